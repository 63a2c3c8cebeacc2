// SPDX-License-Identifier: Apache-2.0
// Kernels of their own for the totals of groups that have many parts, and for the gradients of
// parameters where no other kernel has room for them.
#include "groups/launches.h"
#include "groups/parts.cuh"

namespace fused_layernorm {
namespace {

// A warp has a group.
template <bool kBackward>
__global__ void __launch_bounds__(kTotalsThreads)
    group_totals_kernel(const __grid_constant__ GroupPlan plan,
                        const __grid_constant__ GroupParams p) {
  let_next_kernel_start();
  const int64_t group = (int64_t{blockIdx.x} * kTotalsThreads + threadIdx.x) / kWarpSize;
  wait_for_previous_kernel();
  if (group >= p.samples * p.groups) return;
  const Pair<float> total = kBackward ? means_of_group<float>(plan, p, group)
                                      : statistics_of_group<float>(plan, p, group);
  if (threadIdx.x % kWarpSize != 0) return;
  pairs_at<float>(p, plan.totals_offset)[group] = total;
  if (!kBackward) store_group(p, group, total);
}

__global__ void __launch_bounds__(kMaxWarps* kWarpSize)
    group_param_grad_kernel(const __grid_constant__ GroupPlan plan,
                            const __grid_constant__ GroupParams p) {
  __shared__ Pair<float> rows[kMaxWarps * kWarpSize];
  wait_for_previous_kernel();
  store_param_grads(plan, p, blockIdx.x * kWarpSize, rows);
}

}  // namespace

cudaError_t launch_group_totals(const GroupParams& params, const GroupTypes& types,
                                const GroupPlan& plan, cudaStream_t stream) {
  Launch groups;
  groups.threads = kTotalsThreads;
  groups.blocks = ceil_div(params.samples * params.groups * kWarpSize, kTotalsThreads);
  const auto kernel = types.backward ? group_totals_kernel<true> : group_totals_kernel<false>;
  return launch_early(plan.starts_early, kernel, groups, stream, plan, params);
}

cudaError_t launch_group_param_grad(const GroupParams& params, const GroupTypes&,
                                    const GroupPlan& plan, cudaStream_t stream) {
  Launch channels;
  channels.blocks = param_grad_blocks(params);
  const int64_t parts = params.samples * plan.parts_of_channel;
  channels.threads = kWarpSize * static_cast<int>(std::min<int64_t>(kMaxWarps, ceil_div(parts, 4)));
  return launch_early(plan.starts_early, group_param_grad_kernel, channels, stream, plan, params);
}

}  // namespace fused_layernorm

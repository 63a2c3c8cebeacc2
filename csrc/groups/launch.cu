// SPDX-License-Identifier: Apache-2.0
// A call of GroupNorm as a sequence of launches, with the small kernels that several of them need:
// for totals of groups, and for the gradients of parameters.
#include "groups/launches.h"
#include "groups/parts.cuh"

namespace fused_layernorm {
namespace {

// A warp has a group.
template <typename Acc, bool kBackward>
__global__ void __launch_bounds__(kTotalsThreads)
    group_totals_kernel(const __grid_constant__ GroupPlan plan,
                        const __grid_constant__ GroupParams p) {
  let_next_kernel_start();
  const int64_t group = (int64_t{blockIdx.x} * kTotalsThreads + threadIdx.x) / kWarpSize;
  wait_for_previous_kernel();
  if (group >= p.samples * p.groups) return;
  const Pair<Acc> total =
      kBackward ? means_of_group<Acc>(plan, p, group) : statistics_of_group<Acc>(plan, p, group);
  if (threadIdx.x % kWarpSize != 0) return;
  pairs_at<Acc>(p, plan.totals_offset)[group] = total;
  if (!kBackward) store_group(p, group, total);
}

template <typename Acc>
__global__ void __launch_bounds__(kMaxWarps* kWarpSize)
    group_param_grad_kernel(const __grid_constant__ GroupPlan plan,
                            const __grid_constant__ GroupParams p) {
  __shared__ Pair<Acc> rows[kMaxWarps * kWarpSize];
  wait_for_previous_kernel();
  store_param_grads(plan, p, blockIdx.x * kWarpSize, rows);
}

cudaError_t dispatch_acc(const GroupTypes& types, const auto& then) {
  return types.x == DataType::kFloat64 ? then(double{}) : then(float{});
}

cudaError_t launch_group_param_grad(GroupParams params, const GroupTypes& types,
                                    const GroupPlan& plan, cudaStream_t stream) {
  // Its parts are of all samples.
  if (plan.strategy == GroupStrategy::kOnePosition) params.samples = 1;
  return dispatch_acc(types, [&](auto acc) {
    Launch channels;
    channels.blocks = param_grad_blocks(params);
    const int64_t parts = params.samples * plan.parts_of_channel;
    channels.threads =
        kWarpSize * static_cast<int>(std::min<int64_t>(kMaxWarps, ceil_div(parts, 4)));
    return launch_early(plan.starts_early, group_param_grad_kernel<decltype(acc)>, channels, stream,
                        plan, params);
  });
}

}  // namespace

cudaError_t launch_group_totals(const GroupParams& params, const GroupTypes& types,
                                const GroupPlan& plan, cudaStream_t stream) {
  return dispatch_acc(types, [&](auto acc) {
    using Acc = decltype(acc);
    Launch groups;
    groups.threads = kTotalsThreads;
    groups.blocks = ceil_div(params.samples * params.groups * kWarpSize, kTotalsThreads);
    const auto kernel =
        types.backward ? group_totals_kernel<Acc, true> : group_totals_kernel<Acc, false>;
    return launch_early(plan.starts_early, kernel, groups, stream, plan, params);
  });
}

cudaError_t launch_group_norm(const GroupParams& params, DataType x, DataType y,
                              const GroupPlan& plan, cudaStream_t stream) {
  const GroupTypes types = {x, y, params.dy != nullptr};
  if (plan.strategy == GroupStrategy::kTiles) {
    const bool planes = plan.layout == GroupLayout::kPlanes;
    return (planes ? launch_planes : launch_channels_last)(params, types, plan, stream);
  }
  const auto launch_groups = plan.strategy == GroupStrategy::kHeld    ? launch_held_groups
                             : plan.strategy == GroupStrategy::kSplit ? launch_split_groups
                                                                      : launch_one_position;
  const cudaError_t error = launch_groups(params, types, plan, stream);
  // Without a workspace the launch has stored the gradients of parameters.
  const bool leaves_parts = plan.workspace_bytes > 0;
  const bool has_grads = types.backward && leaves_parts && param_grad_blocks(params) > 0;
  if (error != cudaSuccess || !has_grads) return error;
  return launch_group_param_grad(params, types, plan, stream);
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// The launches of which a call of GroupNorm consists, and the types that their kernels have.
#pragma once

#include "base/launch.cuh"
#include "groups/plan.h"
#include "norm/types.cuh"

namespace fused_layernorm {

struct GroupTypes {
  DataType x, y;  // y: of dy in backward
  bool backward;
};

// The blocks of 32 channels for the gradients of parameters; none if they are not wanted.
inline int64_t param_grad_blocks(const GroupParams& p) {
  const bool wanted = p.dweight.at != nullptr || p.dbias.at != nullptr || p.dshift.at != nullptr ||
                      p.dscale_by.at != nullptr;
  return wanted ? ceil_div(p.channels, kWarpThreads) : 0;
}

using GroupLaunch = cudaError_t(const GroupParams&, const GroupTypes&, const GroupPlan&,
                                cudaStream_t);
GroupLaunch launch_planes, launch_channels_last, launch_group_totals;
// The launch where lanes or blocks hold or share groups; backward, one for parameters follows if
// this one leaves parts.
GroupLaunch launch_held_groups, launch_split_groups, launch_one_position;

// Launches a kernel by the plan's clusters, if it has some.
cudaError_t launch_clusters(auto kernel, const GroupPlan& plan, cudaStream_t stream,
                            const GroupParams& params) {
  return plan.cluster > 1 ? launch<Start::kCluster>(kernel, plan, stream, plan, params)
                          : launch(kernel, plan, stream, plan, params);
}

// The launches of a call over tiles, with so many bytes of shared memory: one measures them, the
// totals follow (if has_totals), and one applies these and makes the gradients of parameters.
inline cudaError_t launch_tiles(const GroupParams& params, const GroupTypes& types,
                                const GroupPlan& plan, cudaStream_t stream, auto measure,
                                int64_t measure_bytes, auto apply, int64_t apply_bytes) {
  Launch tiles = plan;
  tiles.shared_bytes = static_cast<int>(measure_bytes);
  cudaError_t error = launch(measure, tiles, stream, plan, params);
  if (error == cudaSuccess && plan.has_totals) {
    error = launch_group_totals(params, types, plan, stream);
  }
  if (error != cudaSuccess) return error;
  if (types.backward) tiles.blocks += param_grad_blocks(params);
  tiles.shared_bytes = static_cast<int>(apply_bytes);
  return launch_early(plan.starts_early, apply, tiles, stream, plan, params);
}

// Calls then(X{}, Y{}, width) for the types, of x and of y or dy, and the width that kernels are
// compiled for: kTypesWithKernels has each once with a weight of y's type. Kernels over planes have
// half vectors, too, where x and y are of one type of half precision (plan.cpp's group_width).
template <GroupLayout kLayout = GroupLayout::kPlanes>
cudaError_t dispatch_group_types(const GroupTypes& types, int width, const auto& then) {
  return dispatch_types({types.x, types.y, types.y}, [&](auto t) -> cudaError_t {
    using T = decltype(t);
    using X = typename T::X;
    using Y = typename T::Y;
    constexpr int kFull = kVectorWidth<T>;
    constexpr bool kHasHalf =
        kLayout == GroupLayout::kPlanes && sizeof(X) == 2 && std::is_same_v<X, Y>;
    using Widths = std::conditional_t<kHasHalf, VecsList<kFull, kFull / 2, 1>, VecsList<kFull, 1>>;
    if constexpr (std::is_same_v<typename T::W, Y>) {
      return dispatch_vecs(Widths{}, width, [&](auto w) { return then(X{}, Y{}, w); });
    } else {
      return cudaErrorInvalidValue;
    }
  });
}

}  // namespace fused_layernorm

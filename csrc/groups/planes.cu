// SPDX-License-Identifier: Apache-2.0
// Groups of planes that no block holds: the kernels that measure tiles, and those that apply the
// totals of the groups, forward and backward.
#include "base/launch.cuh"
#include "groups/launches.h"
#include "groups/parts.cuh"

namespace fused_layernorm {
namespace {

// The mean of each tile, and the sum of its squared deviations from it.
template <typename X, int kWidth>
__global__ void __launch_bounds__(kTileThreads)
    planes_moments_kernel(const __grid_constant__ GroupPlan plan,
                          const __grid_constant__ GroupParams p) {
  using Acc = acc_t<X>;
  __shared__ alignas(16) Acc scratch[2][kMaxWarps];
  let_next_kernel_start();
  const PlaneTile tile(plan, p, blockIdx.x);
  const Share<kTileVecs> share = {static_cast<int>(threadIdx.x), kTileThreads, tile.vectors};
  Vec<X, kWidth> values[kTileVecs];
  load_tile(values, p.x, tile.begin, share);
  RunningMoments<Acc> own;
  FUSED_UNROLL for (int k = 0; k < kTileVecs; ++k) {
    if (share.has(k)) own.add(values[k]);
  }
  const auto moments =
      moments_of_block<kWidth>(own, Reciprocal<Acc>(tile.vectors * kWidth), scratch);
  if (threadIdx.x == 0) {
    pairs_at<Acc>(p, 0)[blockIdx.x] = {moments.mean, moments.m2};
  }
}

// The kernels that apply take the tiles that were measured last first, as L2 may still have them.

template <typename X, typename Y, int kWidth>
__global__ void __launch_bounds__(kTileThreads)
    planes_apply_kernel(const __grid_constant__ GroupPlan plan,
                        const __grid_constant__ GroupParams p) {
  using Acc = acc_t<X>;
  extern __shared__ __align__(16) unsigned char shared[];
  auto* const maps = reinterpret_cast<ChannelMap<Acc>*>(shared);
  const PlaneTile tile(plan, p, gridDim.x - 1 - blockIdx.x);
  const Share<kTileVecs> share = {static_cast<int>(threadIdx.x), kTileThreads, tile.vectors};
  Vec<X, kWidth> x[kTileVecs];
  load_tile(x, p.x, tile.begin, share);
  load_maps(maps, p, tile.sample, tile.channel, tile.channels);
  wait_for_previous_kernel();
  const Pair<Acc> total = pairs_at<Acc>(p, plan.totals_offset)[tile.group];
  __syncthreads();
  apply_tile<Y>(plan, p, tile, share, x, maps, total);
}

// The sums of dz and of dz xhat over each tile's part of each channel.
template <typename X, typename Y, int kWidth>
__global__ void __launch_bounds__(kTileThreads)
    planes_sums_kernel(const __grid_constant__ GroupPlan plan,
                       const __grid_constant__ GroupParams p) {
  using Acc = acc_t<X>;
  __shared__ alignas(16) Pair<Acc> scratch[kMaxWarps];
  extern __shared__ __align__(16) unsigned char shared[];
  auto* const maps = reinterpret_cast<ChannelMap<Acc>*>(shared);
  auto* const pairs = reinterpret_cast<Pair<Acc>*>(maps + plan.tile_channels);
  let_next_kernel_start();
  const PlaneTile tile(plan, p, blockIdx.x);
  const Share<kTileBackwardVecs> share = {static_cast<int>(threadIdx.x), kTileThreads,
                                          tile.vectors};
  Vec<X, kWidth> x[kTileBackwardVecs];
  Vec<Y, kWidth> dy[kTileBackwardVecs];
  load_tile(x, p.x, tile.begin, share);
  load_tile(dy, p.dy, tile.begin, share);
  load_maps(maps, p, tile.sample, tile.channel, tile.channels);
  const Pair<Acc> statistics = load_group<Acc>(p, tile.group);
  __syncthreads();
  Pair<Acc> all;
  each_gradient(plan, p, tile, share, x, dy, maps, statistics,
                [&](int v, const auto&, const auto& gradients) {
                  if (tile.channels > 1) {
                    pairs[v] = gradients.sums();
                  } else {
                    all += gradients.sums();
                  }
                });
  Pair<Acc>* const parts = pairs_at<Acc>(p, plan.parts_offset) +
                           (tile.sample * p.channels + tile.channel) * plan.pieces + tile.piece;
  if (tile.channels == 1) {
    all = team_sum(all, BlockTeam(), scratch);
    if (threadIdx.x == 0) *parts = scaled_sums(p, all, statistics.second);
  } else {
    __syncthreads();
    sum_channels<1, Acc>(
        pairs, nullptr, tile.channels, static_cast<int>(plan.channel_units), 0, tile.vectors,
        [&](int c, Pair<Acc> sum) { parts[c] = scaled_sums(p, sum, statistics.second); });
  }
}

template <typename X, typename Y, int kWidth>
__global__ void __launch_bounds__(kTileThreads)
    planes_dx_kernel(const __grid_constant__ GroupPlan plan,
                     const __grid_constant__ GroupParams p) {
  using Acc = acc_t<X>;
  extern __shared__ __align__(16) unsigned char shared[];
  auto* const maps = reinterpret_cast<ChannelMap<Acc>*>(shared);
  // The first blocks make the gradients of parameters.
  const uint32_t last = gridDim.x - 1 - blockIdx.x;
  if (last >= static_cast<uint32_t>(p.samples * p.groups * plan.tiles)) {
    __shared__ Pair<Acc> rows[kTileThreads];
    wait_for_previous_kernel();
    return store_param_grads(plan, p, blockIdx.x * kWarpSize, rows);
  }
  const PlaneTile tile(plan, p, last);
  const Share<kTileBackwardVecs> share = {static_cast<int>(threadIdx.x), kTileThreads,
                                          tile.vectors};
  Vec<X, kWidth> x[kTileBackwardVecs];
  Vec<Y, kWidth> dy[kTileBackwardVecs];
  load_tile(x, p.x, tile.begin, share);
  load_tile(dy, p.dy, tile.begin, share);
  load_maps(maps, p, tile.sample, tile.channel, tile.channels);
  const Pair<Acc> statistics = load_group<Acc>(p, tile.group);
  wait_for_previous_kernel();
  const DxOfGroup<Acc> of_group(p, pairs_at<Acc>(p, plan.totals_offset)[tile.group],
                                statistics.second);
  __syncthreads();
  X* const dx = static_cast<X*>(p.y) + tile.begin;
  each_gradient(plan, p, tile, share, x, dy, maps, statistics,
                [&](int v, const auto& of, const auto& gradients) {
                  store_once(element(dx, v * kWidth), of_group.template dx<X>(gradients, of));
                });
}

}  // namespace

cudaError_t launch_planes(const GroupParams& params, const GroupTypes& types, const GroupPlan& plan,
                          cudaStream_t stream) {
  return dispatch_group_types(types, plan.width, [&](auto x, auto y, auto width) -> cudaError_t {
    using X = decltype(x);
    using Y = decltype(y);
    return launch_tiles(
        params, types, plan, stream,
        types.backward ? planes_sums_kernel<X, Y, width()> : planes_moments_kernel<X, width()>,
        types.backward ? planes_shared_bytes<acc_t<X>>(plan, true) : 0,
        types.backward ? planes_dx_kernel<X, Y, width()> : planes_apply_kernel<X, Y, width()>,
        planes_shared_bytes<acc_t<X>>(plan, false));
  });
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// Forward of rows too long for the registers of one block: persistent blocks that keep their slices
// of weight and bias in shared memory for the whole launch, and beside them a ring of slices of x.
// The blocks that share a row publish its moments in global memory and collect them a row or two
// later, so that no block waits for the others.
#include "device/bulk.cuh"
#include "device/slices.cuh"
#include "forward/slice.cuh"
#include "launch.cuh"

namespace fused_layernorm {
namespace {

template <typename N>
__global__ void __launch_bounds__(kForwardSplitThreads + kWarpSize, 1)
    layer_norm_forward_split_kernel(const forward::Split plan, const ForwardParams p) {
  using X = typename N::X;
  using W = typename N::W;
  using Y = typename N::Y;
  constexpr int kWidth = kVectorWidth<typename N::Types>, kVecs = kForwardSplitVecs;
  if constexpr (!kHasBulk) return;  // Never launched on chips without bulk copies.
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ alignas(16) float scratch[2][2][kMaxWarps];
  __shared__ Moments<float> combined[kMostCollected];
  __shared__ __align__(8) uint64_t full[kMostStages];

  const BlockTeam team(plan.team_threads);
  const Slices& slices = plan.slices;
  const SliceWork work(slices, p.rows, p.cols);
  const int vectors = work.cols / kWidth;
  const Share<kVecs> share = {team.thread, team.threads, vectors};
  W* weight = reinterpret_cast<W*>(shared);
  W* bias = weight + slices.slice_cols;
  X* ring = reinterpret_cast<X*>(bias + slices.slice_cols);
  auto* slots = static_cast<uint64_t*>(p.workspace);
  const int lag = plan.lag;

  const auto fill = [&](int stage, int64_t row) {
    const uint32_t bytes = work.cols * sizeof(X);
    barrier_expect(full + stage, bytes);
    const ForwardRow<N> place(p, row, work.first_col);
    bulk_load(ring + stage * slices.slice_cols, place.x.x, bytes, full + stage, false);
  };
  if (threadIdx.x == 0) {
    for (int i = 0; i < kMostStages; ++i) barrier_init(full + i, 1);
    barrier_init_fence();
#pragma unroll 1
    for (int i = 0; i < plan.stages && i < work.rows; ++i) fill(i, work.row(i));
  }
  const ColumnParameters<W> parameters(p.weight, p.bias, work.first_col);
  copy_parameter<kWidth>(weight, parameters.weight, vectors, vectors);
  copy_parameter<kWidth>(bias, parameters.bias, vectors, vectors);
  __syncthreads();

  if (team.index == 1) {
    // This warp is the collector. A block with whole rows has none.
    for (int i = 0; i < work.rows; ++i) {
      const CollectedSlots slot(slots + work.row(i) * slices.blocks_per_row, slices.blocks_per_row);
      const auto moments = combine_slots<N>(slot, slices, p.cols, p.inverse_cols.rounded);
      if (team.lane() == 0) combined[i % kMostCollected] = moments;
      meet_when_collected(plan.threads);
    }
    return;
  }

  const Reciprocal<float> inverse_slice_cols(work.cols);
  RingPosition first_read, second_read, freed;
  for (int i = 0; i < work.rows + lag; ++i) {
    Moments<float> moments;
    if (i < work.rows) {
      barrier_wait(full + first_read.stage, first_read.parity);
      const X* x = ring + first_read.stage * slices.slice_cols;
      first_read.advance(plan.stages);
      const float pivot = N::Statistic::template pivot<X>(
          Pair<float>{to_acc(x[0]), to_acc(x[1])});  // x[1] exists: slices have whole vectors
      Vec<X, kWidth> values[kVecs];
#pragma unroll
      for (int k = 0; k < kVecs; ++k) {
        values[k] = {};
        if (share.has(k)) values[k] = load<Use::kPlain, kWidth>(x + share.vector(k) * kWidth);
      }
      moments = N::Statistic::template measure<kVecs>(
          p.is_rms, values, share, pivot, [&] { return inverse_slice_cols; },
          [&](float v, int n) { return team_sum(v, team, scratch[i & 1][n]); },
          [&] {
            // All threads have left the row of 1 + lag iterations ago, so its stage is refilled.
            if (team.thread == 0 && i >= 1 + lag) {
              const int refill = i - 1 - lag + plan.stages;
              if (refill < work.rows) fill(freed.stage, work.row(refill));
              freed.advance(plan.stages);
            }
          });
      if (lag > 0 && team.thread == 0) {
        publish(slots + work.row(i) * slices.blocks_per_row + work.slice,
                {moments.mean, moments.m2});
      }
    }
    if (i < lag) continue;
    const int64_t row = work.row(i - lag);
    if (lag > 0) {
      meet_when_collected(plan.threads);
      moments = combined[(i - lag) % kMostCollected];
    }
    const float mean = moments.mean;
    const float rstd = finish_moments<N>(p, row, moments, team.thread == 0 && work.slice == 0);
    const X* x = ring + second_read.stage * slices.slice_cols;
    Y* y = static_cast<Y*>(p.y) + row * p.cols + work.first_col;
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      const int col = share.template col<kWidth>(k);
      const auto result = N::template finish<typename N::Epilogue, typename N::Affine>(
          p, load<Use::kPlain, kWidth>(x + col), mean, rstd,
          load<Use::kPlain, kWidth>(weight + col), load<Use::kPlain, kWidth>(bias + col));
      if (share.has(k)) store_once<Y, kWidth>(element(y, col), result);
    }
    second_read.advance(plan.stages);
  }
}

}  // namespace

cudaError_t launch_layer_norm_forward(const ForwardParams& params, const DataTypes& types,
                                      const forward::Split& plan, cudaStream_t stream) {
  const cudaError_t error = clear_slots(params.workspace, plan.workspace_bytes, stream);
  if (error != cudaSuccess) return error;
  return dispatch_types(types, [&](auto t) -> cudaError_t {
    using T = decltype(t);
    if constexpr (kIsFloat64<T>) {
      return cudaErrorInvalidValue;
    } else {
      return dispatch_forward_plain<T>(params, [&](auto norm) {
        using N = decltype(norm);
        return launch<Start::kCooperative>(layer_norm_forward_split_kernel<N>, plan, stream, plan,
                                           params);
      });
    }
  });
}

}  // namespace fused_layernorm

// Several blocks per row: forward of rows too long for one block. Each block keeps its slices of
// weight and bias in shared memory for the whole launch, beside a ring of slices of x; the row's
// blocks meet in global memory, a row or two after they published their sums, so that none waits.
#include "dispatch.h"
#include "launch.cuh"
#include "rows.cuh"
#include "slices.cuh"

namespace fused_layernorm {
namespace {

constexpr int kThreads = kSplitForwardThreads + kWarpSize;

template <typename T, int kWidth, int kVecs, bool kFused>
__global__ void __launch_bounds__(kThreads, 1)
    layer_norm_forward_split_kernel(const ForwardParams p, const SliceLayout layout) {
  using X = typename T::X;
  using W = typename T::W;
  using Y = typename T::Y;
  if constexpr (!kHasBulk) return;  // never launched there
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ float scratch[2][2][kMaxWarps];
  __shared__ Moments<float> combined[kCollected];
  __shared__ __align__(8) uint64_t full[kMaxStages];

  const Group group(layout.threads);
  const SliceWork work(layout, 0, p.rows, p.cols);
  const int vectors = work.cols / kWidth;
  const Share share = {group.thread, group.threads, vectors};
  const bool has_weight = p.weight != nullptr, has_bias = p.bias != nullptr;
  W* weight = reinterpret_cast<W*>(shared);
  W* bias = weight + layout.slice_cols;
  X* ring = reinterpret_cast<X*>(bias + layout.slice_cols);
  auto* slots = static_cast<uint64_t*>(p.workspace);
  const int lag = layout.lag;

  const auto fill = [&](int stage, int64_t row) {
    const uint32_t bytes = work.cols * sizeof(X);
    barrier_expect(full + stage, bytes);
    bulk_load(ring + stage * layout.slice_cols,
              static_cast<const X*>(p.input) + p.input_rows(row) + work.first_col, bytes,
              full + stage);
  };
  if (threadIdx.x == 0) {
    for (int i = 0; i < kMaxStages; ++i) barrier_init(full + i, 1);
    barrier_init_fence();
    for (int i = 0; i < layout.stages && i < work.rows; ++i) fill(i, work.row(i));
  }
  for (int v = threadIdx.x; v < vectors; v += blockDim.x) {
    using P = Vec<W, kWidth>;
    const int col = v * kWidth;
    if (has_weight) {
      *reinterpret_cast<P*>(weight + col) =
          load_again<W, kWidth>(static_cast<const W*>(p.weight) + work.first_col + col);
    }
    if (has_bias) {
      *reinterpret_cast<P*>(bias + col) =
          load_again<W, kWidth>(static_cast<const W*>(p.bias) + work.first_col + col);
    }
  }
  __syncthreads();

  if (group.index == 1) {
    // The collecting warp; there is none where a block has whole rows.
    for (int64_t i = 0; i < work.rows; ++i) {
      const CollectedSlots slot(slots + work.row(i) * layout.blocks_per_row, layout.blocks_per_row);
      const auto moments = combine_slots(slot, layout.blocks_per_row, layout.slice_cols, p.cols,
                                         p.inverse_cols.rounded);
      if (group.lane() == 0) combined[i % kCollected] = moments;
      meet_collector(layout.threads);
    }
    return;
  }

  const float inverse_slice_cols = 1.0f / work.cols;
  RingPosition first_read, second_read, freed;
  for (int64_t i = 0; i < work.rows + lag; ++i) {
    Moments<float> moments;
    if (i < work.rows) {
      barrier_wait(full + first_read.stage, first_read.parity);
      const X* x = ring + first_read.stage * layout.slice_cols;
      first_read.advance(layout.stages);
      const float pivot = to_acc(x[0]);
      RowValues<T, kWidth, kVecs> values;
      values.unpack_shared(x, share);
      const float sum = group_sum(values.sum(pivot, share), group, scratch[i & 1][0]);
      moments.mean = pivot + sum * inverse_slice_cols;
      // Behind that barrier nobody reads the row of 1 + lag iterations ago any more.
      if (group.thread == 0 && i >= 1 + lag) {
        const int64_t refill = i - 1 - lag + layout.stages;
        if (refill < work.rows) fill(freed.stage, work.row(refill));
        freed.advance(layout.stages);
      }
      moments.m2 =
          group_sum(values.squared_deviations(moments.mean, share), group, scratch[i & 1][1]);
      if (lag > 0 && group.thread == 0) {
        publish(slots + work.row(i) * layout.blocks_per_row + work.slice,
                {moments.mean, moments.m2});
      }
    }
    if (i < lag) continue;
    const int64_t row = work.row(i - lag);
    if (lag > 0) {
      meet_collector(layout.threads);
      moments = combined[(i - lag) % kCollected];
    }
    const float mean = moments.mean;
    const float rstd = reciprocal_sqrt(moments.m2 * p.inverse_cols.rounded + p.eps.rounded);
    if (group.thread == 0 && work.slice == 0) store_statistics(p, row, mean, rstd);
    const X* x = ring + second_read.stage * layout.slice_cols;
    Y* y = static_cast<Y*>(p.y) + row * p.cols + work.first_col;
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      if (share.has(k)) {
        const int col = share.vector(k) * kWidth;
        float values[kWidth], w[kWidth], b[kWidth];
        unpack(values, load_plain<X, kWidth>(x + col));
        load_param<true>(w, weight, has_weight, col, 1.0f);
        load_param<true>(b, bias, has_bias, col, 0.0f);
        finish<T, kFused>(p, y, col, values, mean, rstd, w, b);
      }
    }
    second_read.advance(layout.stages);
  }
}

}  // namespace

cudaError_t launch_layer_norm_forward_split(const ForwardParams& params, const DataTypes& types,
                                            const Plan& plan, cudaStream_t stream) {
  if (plan.blocks_per_row > 1) {
    const size_t slots = size_t(params.rows) * plan.blocks_per_row * sizeof(uint64_t);
    const cudaError_t error = cudaMemsetAsync(params.workspace, 0xff, slots, stream);
    if (error != cudaSuccess) return error;
  }
  return dispatch_types(types, [&](auto t) -> cudaError_t {
    using T = decltype(t);
    if constexpr (std::is_same_v<typename T::X, double>) {
      return cudaErrorInvalidValue;
    } else {
      return dispatch_bool<true>(params.has_epilogue, [&](auto fused) {
        return dispatch_vecs<4, 8>(plan.vecs, [&](auto vecs) {
          const auto kernel =
              layer_norm_forward_split_kernel<T, 16 / sizeof(typename T::X), vecs(), fused()>;
          const int collector = plan.blocks_per_row > 1 ? kWarpSize : 0;
          return launch<true>(kernel, plan, plan.threads + collector, stream, params,
                              SliceLayout(plan));
        });
      });
    }
  });
}

}  // namespace fused_layernorm

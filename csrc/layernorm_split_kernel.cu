// Several blocks per row: forward of rows too long for one block. Each block keeps its slices of
// weight and bias in shared memory for the whole launch, beside a ring of slices of x; the row's
// blocks meet in global memory, a row after they published their sums, so that no block waits.
#include "dispatch.h"
#include "launch.cuh"
#include "rows.cuh"
#include "slices.cuh"

namespace fused_layernorm {
namespace {

constexpr int kThreads = 1024;

template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads, 1)
    layer_norm_forward_split_kernel(const ForwardParams p, const SliceLayout layout) {
  using X = typename T::X;
  using W = typename T::W;
  using Y = typename T::Y;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ float scratch[2][2][kMaxWarps];
  __shared__ Moments<float> combined[2];
  __shared__ __align__(8) uint64_t full[kMaxStages];

  const Group group;
  const SliceWork work(layout, 0, p.rows, p.cols);
  const int vectors = work.cols / kWidth;
  const bool has_weight = p.weight != nullptr, has_bias = p.bias != nullptr;
  W* weight = reinterpret_cast<W*>(shared);
  W* bias = weight + layout.slice_cols;
  X* ring = reinterpret_cast<X*>(bias + layout.slice_cols);
  auto* slots = static_cast<uint64_t*>(p.workspace);
  const int lag = layout.blocks_per_row > 1 ? 1 : 0;

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
      *reinterpret_cast<P*>(weight + col) = load_again<W, kWidth>(
          static_cast<const W*>(p.weight) + work.first_col + col);
    }
    if (has_bias) {
      *reinterpret_cast<P*>(bias + col) =
          load_again<W, kWidth>(static_cast<const W*>(p.bias) + work.first_col + col);
    }
  }
  __syncthreads();

  // By the first warp: the moments of a row, from all its blocks.
  const auto collect = [&](int64_t row, Moments<float>& result) {
    const CollectedSlots slot(slots + row * layout.blocks_per_row, layout.blocks_per_row);
    const auto moments = combine_slots(slot, layout.blocks_per_row, layout.slice_cols, p.cols,
                                       p.inverse_cols.rounded);
    if (group.lane() == 0) result = moments;
  };

  const float inverse_slice_cols = 1.0f / work.cols;
  RingPosition first_read, second_read, freed;
  for (int64_t i = 0; i < work.rows + lag; ++i) {
    Moments<float> moments;
    const auto collect_last = [&] {
      if (lag == 1 && i > 0 && group.warp() == 0) collect(work.row(i - 1), combined[i & 1]);
    };
    if (i < work.rows) {
      barrier_wait(full + first_read.stage, first_read.parity);
      const X* x = ring + first_read.stage * layout.slice_cols;
      first_read.advance(layout.stages);
      const float pivot = to_acc(x[0]);
      float total[kWidth] = {};
#pragma unroll 2
      for (int v = group.thread; v < vectors; v += group.threads) {
        float values[kWidth];
        unpack(values, load_plain<X, kWidth>(x + v * kWidth));
#pragma unroll
        for (int j = 0; j < kWidth; ++j) total[j] += values[j] - pivot;
      }
      const float sum = group_sum(tree_sum(total), group, scratch[i & 1][0]);
      moments.mean = pivot + sum * inverse_slice_cols;
      // Behind that barrier nobody reads the row of 1 + lag iterations ago any more.
      if (group.thread == 0 && i >= 1 + lag) {
        const int64_t refill = i - 1 - lag + layout.stages;
        if (refill < work.rows) fill(freed.stage, work.row(refill));
        freed.advance(layout.stages);
      }
#pragma unroll
      for (int j = 0; j < kWidth; ++j) total[j] = 0;
#pragma unroll 2
      for (int v = group.thread; v < vectors; v += group.threads) {
        float values[kWidth];
        unpack(values, load_plain<X, kWidth>(x + v * kWidth));
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          const float d = values[j] - moments.mean;
          total[j] += d * d;
        }
      }
      moments.m2 = group_sum(tree_sum(total), group, scratch[i & 1][1], collect_last);
      if (lag == 1 && group.thread == 0) {
        publish(slots + work.row(i) * layout.blocks_per_row + work.slice,
                {moments.mean, moments.m2});
      }
    } else {
      collect_last();
      group.sync();
    }
    if (i < lag) continue;
    const int64_t row = work.row(i - lag);
    if (lag == 1) moments = combined[i & 1];
    const float mean = moments.mean;
    const float rstd = reciprocal_sqrt(moments.m2 * p.inverse_cols.rounded + p.eps.rounded);
    if (group.thread == 0 && work.slice == 0) store_statistics(p, row, mean, rstd);
    const X* x = ring + second_read.stage * layout.slice_cols;
    Y* y = static_cast<Y*>(p.y) + row * p.cols + work.first_col;
#pragma unroll 2
    for (int v = group.thread; v < vectors; v += group.threads) {
      const int col = v * kWidth;
      float w[kWidth], b[kWidth];
      load_shared_param(w, weight, col, has_weight, 1.0f);
      load_shared_param(b, bias, col, has_bias, 0.0f);
      finish<T, kWidth>(p, y, col, load_plain<X, kWidth>(x + col), mean, rstd, w, b);
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
      const auto kernel = layer_norm_forward_split_kernel<T, 16 / sizeof(typename T::X)>;
      return launch<true>(kernel, plan, plan.threads, stream, params, SliceLayout(plan));
    }
  });
}

}  // namespace fused_layernorm

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

// Mean and squared deviations of a row's slice from shared memory, in one read: the two-pass
// formula within a vector, Chan's merge between vectors.
template <int kWidth, typename X>
__device__ __forceinline__ Moments<float> slice_moments(const X* x, int vectors,
                                                        const Group& group) {
  Moments<float> all;
  float merged = 0;
  for (int v = group.thread; v < vectors; v += group.threads) {
    const auto vec = load_plain<X, kWidth>(x + v * kWidth);
    float values[kWidth];
    float mean = 0;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      values[j] = to_acc(vec.at[j]);
      mean += values[j];
    }
    mean *= 1.0f / kWidth;
    float m2 = 0;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float d = values[j] - mean;
      m2 += d * d;
    }
    // Chan's merge where this vector is the (merged + 1)-th of kWidth values.
    const float share = __fdividef(1.0f, merged + 1.0f);
    const float delta = mean - all.mean;
    all.mean += delta * share;
    all.m2 += m2 + delta * delta * (kWidth * merged * share);
    merged += 1.0f;
  }
  all.count = kWidth * merged;
  return all;
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads, 1)
    layer_norm_forward_split_kernel(const ForwardParams p, const SliceLayout layout) {
  using X = typename T::X;
  using W = typename T::W;
  using Y = typename T::Y;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ Moments<float> scratch[2][kMaxWarps];
  __shared__ __align__(8) uint64_t full[kMaxStages];

  const Group group(blockDim.x);
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

  RingPosition first_read, second_read;
  int freed_stage = 0;
  for (int64_t i = 0; i < work.rows + lag; ++i) {
    Moments<float> moments;
    if (i < work.rows) {
      barrier_wait(full + first_read.stage, first_read.parity);
      moments = slice_moments<kWidth>(ring + first_read.stage * layout.slice_cols, vectors, group);
      first_read.advance(layout.stages);
      moments = group_merge(moments, group, scratch[i & 1]);
      // That barrier says that every thread is done with the row finished an iteration ago.
      if (group.thread == 0 && i - 1 - lag >= 0) {
        const int64_t refill = i - 1 - lag + layout.stages;
        if (refill < work.rows) fill(freed_stage, work.row(refill));
        if (++freed_stage == layout.stages) freed_stage = 0;
      }
      if (lag == 1 && group.thread == 0) {
        publish(slots + work.row(i) * layout.blocks_per_row + work.slice,
                {moments.mean, moments.m2});
      }
    }
    if (i < lag) continue;
    const int64_t row = work.row(i - lag);
    if (lag == 1) {
      moments = {};
      for (int s = group.lane(); s < layout.blocks_per_row; s += kWarpSize) {
        const Pair<float> other = collect(slots + row * layout.blocks_per_row + s);
        const int cols = min(layout.slice_cols, p.cols - s * layout.slice_cols);
        moments.merge({other.first, other.second, static_cast<float>(cols)});
      }
      moments = warp_merge(moments);
    }
    const float mean = moments.mean;
    const float rstd = reciprocal_sqrt(moments.m2 / p.cols + static_cast<float>(p.eps));
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

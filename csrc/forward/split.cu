// Forward of rows too long for layernorm_kernel.cu, by persistent blocks that keep their slices of
// weight and bias in shared memory for the whole launch. Where there is room beside them for a ring
// of slices of x, a row's blocks meet in global memory a row or two after they published their
// sums, so that none waits. Else the slice of one row is in registers.
#include "dispatch.h"
#include "launch.cuh"
#include "norm/rows.cuh"
#include "device/slices.cuh"

namespace fused_layernorm {
namespace {

constexpr int kThreads = kSplitForwardThreads + kWarpSize;

// rstd of a row; one of its threads stores it, and the mean.
__device__ __forceinline__ float finish_moments(const ForwardParams& p, int64_t row,
                                                const Moments<float>& moments, bool stores) {
  const float rstd = reciprocal_sqrt(moments.m2 * p.inverse_cols.rounded + p.eps.rounded);
  if (stores) store_statistics(p, row, moments.mean, rstd);
  return rstd;
}

template <typename T, int kWidth, int kVecs, Fusion kFusion>
__global__ void __launch_bounds__(kThreads, 1)
    layer_norm_forward_split_kernel(const ForwardParams p, const SliceLayout layout) {
  using X = typename T::X;
  using W = typename T::W;
  using Y = typename T::Y;
  if constexpr (!kHasBulk) return;  // never launched there
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ alignas(16) float scratch[2][2][kMaxWarps];
  __shared__ Moments<float> combined[kCollected];
  __shared__ __align__(8) uint64_t full[kMaxStages];

  const Group group(layout.threads);
  const SliceWork work(layout, 0, p.rows, p.cols, std::false_type{});
  const int vectors = work.cols / kWidth;
  const Share<kVecs, false> share = {group.thread, group.threads, vectors};
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
#pragma unroll 1
    for (int i = 0; i < layout.stages && i < work.rows; ++i) fill(i, work.row(i));
  }
  const Parameter<W> all_weight(p.weight, work.first_col, Otherwise::kOnes);
  const Parameter<W> all_bias(p.bias, work.first_col, Otherwise::kZeros);
  copy_parameter<kWidth>(weight, all_weight, vectors, vectors);
  copy_parameter<kWidth>(bias, all_bias, vectors, vectors);
  __syncthreads();

  if (group.index == 1) {
    // The collecting warp; there is none where a block has whole rows.
    for (int i = 0; i < work.rows; ++i) {
      const CollectedSlots slot(slots + work.row(i) * layout.blocks_per_row, layout.blocks_per_row);
      const auto moments = combine_slots(slot, layout.blocks_per_row, layout.slice_cols, p.cols,
                                         p.inverse_cols.rounded);
      if (group.lane() == 0) combined[i % kCollected] = moments;
      meet_collector(layout.threads);
    }
    return;
  }

  const Reciprocal<float> inverse_slice_cols(work.cols);
  RingPosition first_read, second_read, freed;
  for (int i = 0; i < work.rows + lag; ++i) {
    Moments<float> moments;
    if (i < work.rows) {
      barrier_wait(full + first_read.stage, first_read.parity);
      const X* x = ring + first_read.stage * layout.slice_cols;
      first_read.advance(layout.stages);
      const float pivot = to_acc(x[0]);
      RowVectors<T, kWidth, kVecs> values;
      values.load_shared(x, share);
      const float sum = group_sum(values.sum(pivot, share), group, scratch[i & 1][0]);
      moments.mean = inverse_slice_cols.mean(pivot, sum);
      // Behind that barrier nobody reads the row of 1 + lag iterations ago any more.
      if (group.thread == 0 && i >= 1 + lag) {
        const int refill = i - 1 - lag + layout.stages;
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
    const float rstd = finish_moments(p, row, moments, group.thread == 0 && work.slice == 0);
    const X* x = ring + second_read.stage * layout.slice_cols;
    Y* y = static_cast<Y*>(p.y) + row * p.cols + work.first_col;
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      const int col = share.template col<kWidth>(k);
      const auto result = finish<kFusion, Y>(p, load<Use::kPlain, kWidth>(x + col), mean, rstd,
                                             load<Use::kPlain, kWidth>(weight + col),
                                             load<Use::kPlain, kWidth>(bias + col));
      if (share.has(k)) store_once<Y, kWidth>(element(y, col), result);
    }
    second_read.advance(layout.stages);
  }
}

// A block's slice of a row is in its registers, and the places there go to the next row once their
// y is stored. By then the next row is on its way to L2, so that memory does not wait while
// sums are taken and blocks meet.
template <typename T>
__global__ void __launch_bounds__(kResidentThreads, 1)
    layer_norm_forward_resident_kernel(const ForwardParams p, const SliceLayout layout) {
  using X = typename T::X;
  using W = typename T::W;
  using Y = typename T::Y;
  constexpr int kWidth = kVectorWidth<T>, kVecs = kResidentVecs;
  if constexpr (!kHasBulk) return;  // never launched there
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ alignas(16) float scratch[2][kMaxWarps];
  __shared__ Moments<float> combined;
  __shared__ float2 inverse;

  const Group group;
  const SliceWork work(layout, 0, p.rows, p.cols, std::false_type{});
  const int vectors = work.cols / kWidth;
  const Share<kVecs, false> share = {group.thread, group.threads, vectors};
  const Parameter<W> all_weight(p.weight, work.first_col, Otherwise::kOnes);
  const Parameter<W> all_bias(p.bias, work.first_col, Otherwise::kZeros);
  W* weight = reinterpret_cast<W*>(shared);
  W* bias = weight + layout.slice_cols;  // `stage_cols` of it
  auto* slots = static_cast<uint64_t*>(p.workspace);
  const auto x_of = [&](int i) {
    return static_cast<const X*>(p.input) + p.input_rows(work.row(i)) + work.first_col;
  };

  RowVectors<T, kWidth, kVecs> values;
  const auto load_vector = [&](int k, const X* x) {
    values.x[k] = {};
    if (share.has(k)) values.x[k] = load<Use::kOnce, kWidth>(element(x, share.vector(k) * kWidth));
  };
  const X* next = x_of(0);
#pragma unroll
  for (int k = 0; k < kVecs; ++k) load_vector(k, next);
  float pivot = to_acc(*next);
  const int bias_vectors = min(vectors, layout.stage_cols / kWidth);
  copy_parameter<kWidth>(weight, all_weight, vectors, vectors);
  copy_parameter<kWidth>(bias, all_bias, bias_vectors, bias_vectors);
  if (threadIdx.x == 0) {
    const Reciprocal<float> of_slice(work.cols);
    inverse = {of_slice.rounded, of_slice.rest};
  }
  __syncthreads();

  // All of the next row, but less of one that takes the whole chip (16 x 4194304 float32: 202.6 us
  // with three quarters, 204.3 with a half, 207 with all, 227 with nothing; 8192 x 20000: 343 with
  // all, 367 with a half, 375 with nothing).
  const uint32_t prefetched_bytes =
      (layout.blocks_per_row > 1 ? (vectors + 1) / 4 * 3 : vectors) * kWidth * int{sizeof(X)};
#pragma unroll 1
  for (int i = 0; i < work.rows; ++i) {
    const float sum = group_sum(values.sum(pivot, share), group, scratch[0]);
    // All of the row is here.
    const bool more = i + 1 < work.rows;
    if (more) {
      next = x_of(i + 1);
      if (group.thread == 0) bulk_prefetch(next, prefetched_bytes);
    }
    Moments<float> moments;
    // From shared memory: it has no registers.
    moments.mean = Reciprocal<float>{inverse.x, inverse.y}.mean(pivot, sum);
    moments.m2 = group_sum(values.squared_deviations(moments.mean, share), group, scratch[1]);
    const int64_t row = work.row(i);
    if (layout.blocks_per_row > 1) {
      if (group.warp() == 0) {
        uint64_t* const row_slots = slots + row * layout.blocks_per_row;
        if (group.lane() == 0) publish(row_slots + work.slice, {moments.mean, moments.m2});
        const CollectedSlots slot(row_slots, layout.blocks_per_row);
        moments = combine_slots(slot, layout.blocks_per_row, layout.slice_cols, p.cols,
                                p.inverse_cols.rounded);
        if (group.lane() == 0) combined = moments;
      }
      __syncthreads();
      moments = combined;
    }
    const float mean = moments.mean;
    const float rstd = finish_moments(p, row, moments, group.thread == 0 && work.slice == 0);
    if (more) pivot = to_acc(*next);
    Y* y = static_cast<Y*>(p.y) + row * p.cols + work.first_col;
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      const int col = share.template col<kWidth>(k);
      const auto b = col < layout.stage_cols ? load<Use::kPlain, kWidth>(bias + col)
                                             : all_bias.template load<kWidth>(col);
      const auto result = finish<Fusion::kNone, Y>(p, values.x[k], mean, rstd,
                                                   load<Use::kPlain, kWidth>(weight + col), b);
      if (share.has(k)) store_once<Y, kWidth>(element(y, col), result);
      if (more) load_vector(k, next);
    }
  }
}

}  // namespace

cudaError_t launch_layer_norm_forward_split(const ForwardParams& params, const DataTypes& types,
                                            const Plan& plan, cudaStream_t stream) {
  if (plan.workspace_bytes > 0) {
    const cudaError_t error =
        cudaMemsetAsync(params.workspace, 0xff, size_t(plan.workspace_bytes), stream);
    if (error != cudaSuccess) return error;
  }
  return dispatch_types(types, [&](auto t) -> cudaError_t {
    using T = decltype(t);
    if constexpr (std::is_same_v<typename T::X, double>) {
      return cudaErrorInvalidValue;
    } else {
      if (!plan.bulk) {
        if constexpr (std::is_same_v<typename T::X, typename T::Y>) {
          return launch<true>(layer_norm_forward_resident_kernel<T>, plan, plan.threads, stream,
                              params, SliceLayout(plan));
        } else {
          return cudaErrorInvalidValue;
        }
      }
      return dispatch_bool<true>(params.has_epilogue, [&](auto epilogue) {
        constexpr Fusion kFusion = epilogue() ? Fusion::kEpilogue : Fusion::kNone;
        const auto kernel =
            layer_norm_forward_split_kernel<T, kVectorWidth<T>, kSplitForwardVecs, kFusion>;
        const int collector = plan.blocks_per_row > 1 ? kWarpSize : 0;
        return launch<true>(kernel, plan, plan.threads + collector, stream, params,
                            SliceLayout(plan));
      });
    }
  });
}

}  // namespace fused_layernorm

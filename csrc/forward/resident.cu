// SPDX-License-Identifier: Apache-2.0
// Forward of the longest rows that the chip holds: persistent blocks, each with its slice of one
// row in registers. As soon as y of a vector is stored, the vector's registers are loaded with the
// next row. The next row is prefetched to L2 before that, so that memory does not idle while sums
// are taken and blocks meet.
#include "device/bulk.cuh"
#include "device/slices.cuh"
#include "forward/slice.cuh"
#include "launch.cuh"

namespace fused_layernorm {
namespace {

template <typename N>
__global__ void __launch_bounds__(kForwardResidentThreads, 1)
    layer_norm_forward_resident_kernel(const forward::Resident plan, const ForwardParams p) {
  using X = typename N::X;
  using W = typename N::W;
  using Y = typename N::Y;
  constexpr int kWidth = kVectorWidth<typename N::Types>, kVecs = kForwardResidentVecs;
  if constexpr (!kHasBulk) return;  // Never launched on chips without bulk copies.
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ alignas(16) float scratch[2][kMaxWarps];
  __shared__ Moments<float> combined;
  __shared__ float2 inverse;

  const BlockTeam team;
  const Slices& slices = plan.slices;
  const SliceWork work(slices, p.rows, p.cols);
  const int vectors = work.cols / kWidth;
  const Share<kVecs> share = {team.thread, team.threads, vectors};
  const ColumnParameters<W> parameters(p.weight, p.bias, work.first_col);
  W* weight = reinterpret_cast<W*>(shared);
  W* bias = weight + slices.slice_cols;  // only its first plan.bias_cols columns
  auto* slots = static_cast<uint64_t*>(p.workspace);
  const auto x_of = [&](int i) {
    const ForwardRow<N> place(p, work.row(i), work.first_col);
    return place.x.x;
  };

  Vec<X, kWidth> values[kVecs];
  const auto load_vector = [&](int k, const X* x) {
    values[k] = {};
    if (share.has(k)) values[k] = load<Use::kOnce, kWidth>(element(x, share.vector(k) * kWidth));
  };
  const X* next = x_of(0);
#pragma unroll
  for (int k = 0; k < kVecs; ++k) load_vector(k, next);
  // The pivot is the slice's first element, whatever the mean. A thread has no register for a
  // second element, which would tell whether the mean is large (16 x 4194304 float32: 199 us, with
  // a second element 209).
  float pivot = to_acc(*next);
  const int bias_vectors = min(vectors, plan.bias_cols / kWidth);
  copy_parameter<kWidth>(weight, parameters.weight, vectors, vectors);
  copy_parameter<kWidth>(bias, parameters.bias, bias_vectors, bias_vectors);
  if (threadIdx.x == 0) {
    const Reciprocal<float> of_slice(work.cols);
    inverse = {of_slice.rounded, of_slice.rest};
  }
  __syncthreads();

  // A block prefetches the whole next row, or three quarters of its slice where several blocks
  // share a row (16 x 4194304 float32: 202.6 us with three quarters, 204.3 with a half, 207 with
  // all, 227 with nothing; 8192 x 20000: 343 with all, 367 with a half, 375 with nothing).
  const uint32_t prefetched_bytes =
      (slices.blocks_per_row > 1 ? (vectors + 1) / 4 * 3 : vectors) * kWidth * int{sizeof(X)};
#pragma unroll 1
  for (int i = 0; i < work.rows; ++i) {
    const bool more = i + 1 < work.rows;
    Moments<float> moments = N::Statistic::template measure<kVecs>(
        p.is_rms, values, share, pivot,
        // The reciprocal lies in shared memory, as there are no registers for it.
        [&] { return Reciprocal<float>{inverse.x, inverse.y}; },
        [&](float v, int n) { return team_sum(v, team, scratch[n]); },
        [&] {
          // All threads have their vectors of this row, so memory is free for the next row.
          if (more) {
            next = x_of(i + 1);
            if (team.thread == 0) bulk_prefetch(next, prefetched_bytes);
          }
        });
    const int64_t row = work.row(i);
    if (slices.blocks_per_row > 1) {
      if (team.warp() == 0) {
        uint64_t* const row_slots = slots + row * slices.blocks_per_row;
        if (team.lane() == 0) publish(row_slots + work.slice, {moments.mean, moments.m2});
        const CollectedSlots slot(row_slots, slices.blocks_per_row);
        moments = combine_slots<N>(slot, slices, p.cols, p.inverse_cols.rounded);
        if (team.lane() == 0) combined = moments;
      }
      __syncthreads();
      moments = combined;
    }
    const float mean = moments.mean;
    const float rstd = finish_moments<N>(p, row, moments, team.thread == 0 && work.slice == 0);
    if (more) pivot = to_acc(*next);
    Y* y = static_cast<Y*>(p.y) + row * p.cols + work.first_col;
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      const int col = share.template col<kWidth>(k);
      const auto b = col < plan.bias_cols ? load<Use::kPlain, kWidth>(bias + col)
                                          : parameters.bias.template load<kWidth>(col);
      const auto result = N::template finish<typename N::Epilogue, typename N::Affine>(
          p, values[k], mean, rstd, load<Use::kPlain, kWidth>(weight + col), b);
      if (share.has(k)) store_once<Y, kWidth>(element(y, col), result);
      if (more) load_vector(k, next);
    }
  }
}

}  // namespace

// There are kernels only for what is common in such rows: nothing fused, and y of x's type.
cudaError_t launch_layer_norm_forward(const ForwardParams& params, const DataTypes& types,
                                      const forward::Resident& plan, cudaStream_t stream) {
  const cudaError_t error = clear_slots(params.workspace, plan.workspace_bytes, stream);
  if (error != cudaSuccess) return error;
  if (params.residual != nullptr || params.has_epilogue) return cudaErrorInvalidValue;
  return dispatch_types(types, [&](auto t) -> cudaError_t {
    using T = decltype(t);
    if constexpr (kIsFloat64<T> || !std::is_same_v<typename T::X, typename T::Y>) {
      return cudaErrorInvalidValue;
    } else {
      return launch<Start::kCooperative>(layer_norm_forward_resident_kernel<BareForward<T>>, plan,
                                         stream, plan, params);
    }
  });
}

}  // namespace fused_layernorm

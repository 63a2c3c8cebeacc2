// SPDX-License-Identifier: Apache-2.0
// Forward of many short rows that begin anywhere in memory: each thread has one row. A block copies
// its rows to shared memory, by whole vectors wherever the rows begin, or element by element where
// the rows of x do not follow each other directly. A thread reads its row there and writes the
// row's y there, and the block then stores y, by whole vectors where the addresses are aligned.
// Rows of very few columns do not pass through shared memory.
//
// Where rows are few, a logical warp has such a row (forward/warp.cu, forward/spread.cu). The
// thread emulates the lanes of that logical warp: it takes the same sums in the same order, so y is
// the same in any batch.
#include "device/rows_in_shared.cuh"
#include "device/share.cuh"
#include "launch.cuh"
#include "norm/norm.cuh"

namespace fused_layernorm {
namespace {

// The share of one of the lanes that a thread plays. The first kWhole vectors of the row (of kWidth
// columns each) always exist and are whole.
template <int kLanes, int kPieces, int kWidth, int kWhole>
struct PlayedShare {
  static constexpr bool kRagged = true;
  int lane, cols;

  __device__ __forceinline__ int vector(int k) const { return lane + k * kLanes; }
  __device__ __forceinline__ bool is_whole(int k) const { return vector(k) < kWhole; }
  template <int>
  __device__ __forceinline__ int col(int k) const {
    return vector(k) * kWidth;
  }
  __device__ __forceinline__ int cols_from(int k) const { return cols - col<kWidth>(k); }
  __device__ __forceinline__ bool has(int k) const { return is_whole(k) || cols_from(k) > 0; }
  __device__ __forceinline__ bool has_column(int k, int j) const {
    return is_whole(k) || j < cols_from(k);
  }
  template <typename Acc, int>
  __device__ __forceinline__ Acc count(int k) const {
    return is_whole(k) ? Acc(kWidth) : Acc(min(max(cols_from(k), 0), kWidth));
  }
};

template <typename N, int kLanes, int kVecs>
__global__ void __launch_bounds__(kForwardWarpThreads)
    layer_norm_forward_thread_kernel(const int y_offset, const ForwardParams p) {
  using Acc = typename N::Acc;
  using W = typename N::W;
  using X = typename N::X;
  using Y = typename N::Y;
  constexpr int kWidth = kRowWidth<N, kVecs>;
  constexpr int kPiecesOfVec = kVectorWidth<typename N::Types> / kWidth;
  constexpr int kPieces = kVecs * kPiecesOfVec;
  constexpr int kWhole = whole_vectors(kLanes, kVecs) * kPiecesOfVec;
  using Share = PlayedShare<kLanes, kPieces, kWidth, kWhole>;
  extern __shared__ __align__(16) unsigned char shared[];
  const int64_t first_row = int64_t{blockIdx.x} * blockDim.x;
  const int rows = static_cast<int>(min(int64_t{blockDim.x}, p.rows - first_row));
  const RowsInShared<X> block(shared, p.input, p.input_rows, p.cols, first_row, rows);
  // If y is as wide as x, it takes the place of x.
  Y* const y =
      y_offset > 0 ? reinterpret_cast<Y*>(shared + y_offset) : reinterpret_cast<Y*>(block.rows);
  wait_for_rows();
  __syncthreads();

  // A thread without a row of its own reads the last row, but stores nothing.
  const bool has_row = static_cast<int>(threadIdx.x) < rows;
  const int row = has_row ? threadIdx.x : rows - 1;
  constexpr int kPlayed = lanes_with_columns(kLanes, sizeof(X));
  Vec<X, kWidth> x[kPlayed][kPieces];
#pragma unroll
  for (int lane = 0; lane < kPlayed; ++lane) block.load(x[lane], row, Share{lane, p.cols});
  const X* first = block.rows + row * p.cols;
  const Acc pivot = N::Statistic::template pivot<X>(
      Pair<Acc>{to_acc(first[0]), p.cols > 1 ? to_acc(first[1]) : Acc(0)});
  // A load of a row's last vector also reads elements of the next row, so y takes the place of the
  // rows only when all of them are in registers.
  __syncthreads();
  constexpr int kColumnSumGroup = kLaneColumnSumGroup<N, kPieces, kPiecesOfVec>;
  const Acc sum = sum_over_lanes<kLanes, kPlayed, Acc>([&](int lane) {
    return N::Statistic::template sum_from<kColumnSumGroup>(x[lane], Share{lane, p.cols}, pivot);
  });
  const Reciprocal<Acc> inverse_cols(p.inverse_cols);
  const Acc mean = N::Statistic::mean_of(p.is_rms, inverse_cols, pivot, sum);
  const Acc m2 = sum_over_lanes<kLanes, kPlayed, Acc>([&](int lane) {
    return N::Statistic::template squared_deviations<kColumnSumGroup>(x[lane], Share{lane, p.cols},
                                                                      mean);
  });
  const Acc rstd = N::Statistic::rstd(m2, inverse_cols.rounded, p.eps.as<Acc>());
  if (has_row) {
    store_statistics(p, first_row + row, mean, rstd);
    const auto parameters = N::Affine::template row<W>(p, 0, 0);
#pragma unroll
    for (int lane = 0; lane < kPlayed; ++lane) {
      const Share share{lane, p.cols};
#pragma unroll
      for (int k = 0; k < kPieces; ++k) {
        if (!share.has(k)) continue;
        const int col = share.vector(k) * kWidth;
        const auto result = N::template finish<typename N::Epilogue, typename N::Affine>(
            p, x[lane][k], mean, rstd, load_share<kWidth>(parameters.weight, share, k),
            load_share<kWidth>(parameters.bias, share, k));
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          if (share.has_column(k, j)) y[row * p.cols + col + j] = result.at[j];
        }
      }
    }
  }
  __syncthreads();
  store_elements(static_cast<Y*>(p.y) + first_row * p.cols, y, rows * p.cols);
}

// The share of a row of kCols columns, all of which a thread has.
template <int kCols, int kWidth>
struct DirectShare {
  static constexpr bool kRagged = true;
  __device__ __forceinline__ int vector(int k) const { return k; }
  __device__ __forceinline__ bool has(int k) const { return k * kWidth < kCols; }
  __device__ __forceinline__ bool has_column(int k, int j) const { return k * kWidth + j < kCols; }
  template <typename Acc, int>
  __device__ __forceinline__ Acc count(int k) const {
    return Acc(min(max(kCols - k * kWidth, 0), kWidth));
  }
};

// Rows of very few columns, all of which are in one vector: each thread loads its row and stores y
// element by element, and waits for nothing but its row.
template <typename N, int kCols>
__global__ void __launch_bounds__(kForwardWarpThreads)
    layer_norm_forward_direct_kernel(const ForwardParams p) {
  using Acc = typename N::Acc;
  using X = typename N::X;
  using W = typename N::W;
  using Y = typename N::Y;
  constexpr int kWidth = kRowWidth<N, 1>;
  constexpr int kPieces = kVectorWidth<typename N::Types> / kWidth;
  const uint32_t row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= static_cast<uint32_t>(p.rows)) return;
  const DirectShare<kCols, kWidth> share;
  const ForwardRow<N> place(p, row, 0);
  Vec<X, kWidth> x[kPieces];
  place.x.load_singly(x, share);
  Vec<W, kWidth> weight[kPieces], bias[kPieces];
#pragma unroll
  for (int k = 0; k < kPieces; ++k) {
    weight[k] = load_given<kWidth, W>(p.weight, Absent::kOnes, share, k);
    bias[k] = load_given<kWidth, W>(p.bias, Absent::kZeros, share, k);
  }
  const Acc first = to_acc(x[0].at[0]);
  const Acc pivot =
      N::Statistic::template pivot<X>(Pair<Acc>{first, kCols > 1 ? to_acc(x[0].at[1]) : Acc(0)});
  const Reciprocal<Acc> inverse_cols(p.inverse_cols);
  constexpr int kColumnSumGroup = kLaneColumnSumGroup<N, kPieces, kPieces>;
  const auto [mean, m2] = N::Statistic::template measure<kColumnSumGroup>(
      p.is_rms, x, share, pivot, [&] { return inverse_cols; }, [](Acc v, int) { return v; }, [] {});
  const Acc rstd = N::Statistic::rstd(m2, inverse_cols.rounded, p.eps.as<Acc>());
  store_statistics_if(true, p, row, mean, rstd);
#pragma unroll
  for (int k = 0; k < kPieces; ++k) {
    const Vec<Y, kWidth> result = N::template finish<typename N::Epilogue, typename N::Affine>(
        p, x[k], mean, rstd, weight[k], bias[k]);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      if (share.has_column(k, j)) place.y[k * kWidth + j] = result.at[j];
    }
  }
}

// Calls launch() with the lanes and vectors of a plan as template parameters.
template <int kXSize, int... kPlayed, typename Launch>
cudaError_t dispatch_played(std::integer_sequence<int, kPlayed...>, const forward::Thread& plan,
                            const Launch& launch) {
  cudaError_t error = cudaErrorInvalidValue;
  const auto may_launch = [&](auto played) {
    constexpr Lanes kLanes = played_lanes(kXSize, played());
    if (plan.lanes != kLanes.lanes || plan.vecs != kLanes.vecs) return false;
    error = launch(std::integral_constant<int, kLanes.lanes>{},
                   std::integral_constant<int, kLanes.vecs>{});
    return true;
  };
  (may_launch(std::integral_constant<int, kPlayed>{}) || ...);
  return error;
}

}  // namespace

// There are kernels only for what is common in such rows: nothing fused.
cudaError_t launch_layer_norm_forward(const ForwardParams& params, const DataTypes& types,
                                      const forward::Thread& plan, cudaStream_t stream) {
  if (params.residual != nullptr || params.is_modulated || params.has_epilogue) {
    return cudaErrorInvalidValue;
  }
  return dispatch_types_but_float64(types, [&](auto t) {
    using T = decltype(t);
    constexpr int kXSize = sizeof(typename T::X);
    if (plan.direct) {
      return dispatch_vecs(DirectCols{}, params.cols, [&](auto cols) {
        return launch(layer_norm_forward_direct_kernel<BareForward<T>, cols()>, plan, stream,
                      params);
      });
    }
    return dispatch_played<kXSize>(
        std::make_integer_sequence<int, played_count(kXSize)>{}, plan, [&](auto lanes, auto vecs) {
          return launch(layer_norm_forward_thread_kernel<BareForward<T>, lanes(), vecs()>, plan,
                        stream, plan.y_offset, params);
        });
  });
}

}  // namespace fused_layernorm

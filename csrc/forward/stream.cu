// SPDX-License-Identifier: Apache-2.0
// Forward of rows of any length, on any chip. One kernel takes the moments of fixed chunks of each
// row, a second one combines them, and the last one reads the row again and computes y.
#include "base/launch.cuh"
#include "forward/stream.h"
#include "norm/norm.cuh"

namespace fused_layernorm {
namespace {

constexpr int kFinishThreads = 256;
constexpr int kFinishVecs = 4;
// Rows for which a block of the last kernel keeps the parameters of its columns.
constexpr int kRowsPerBlock = 8;

// The first kernel: the moments of a chunk. x = input + residual is stored for the last kernel.
template <typename N, int kWidth>
__global__ void __launch_bounds__(kForwardStreamThreads)
    layer_norm_forward_stream_sums_kernel(const Slices chunks, const ForwardParams p) {
  using Acc = typename N::Acc;
  constexpr int kVecs = forward_stream_vecs(kWidth);
  __shared__ alignas(16) Acc scratch[2][kMaxWarps];
  const BlockTeam team;
  const int64_t row = blockIdx.x / chunks.count;
  const int chunk = blockIdx.x % chunks.count;
  const int first_col = chunk * chunks.cols;
  const int cols = min(chunks.cols, p.cols - first_col);
  const Share<kVecs> share = {team.thread, team.threads, cols / kWidth};

  const ForwardRow<N> place(p, row, first_col);
  Vec<typename N::X, kWidth> x[kVecs];
  place.x.template load<Use::kReadOnly>(x, share);
  const Acc pivot = N::Statistic::template pivot<typename N::X>(place.x.first_elements(cols));
  const auto moments = N::Statistic::template measure<kVecs>(
      p.is_rms, x, share, pivot, [&] { return Reciprocal<Acc>(cols); },
      [&](Acc v, int n) { return team_sum(v, team, scratch[n]); });
  if (team.thread == 0) {
    static_cast<Pair<Acc>*>(p.workspace)[row * chunks.count + chunk] = {moments.mean, moments.m2};
  }
}

// The second kernel, one warp a row. It computes mean and rstd from the moments of the row's
// chunks, and stores them in the workspace, for the last kernel, and in the outputs.
template <typename Statistic, typename Acc>
__global__ void __launch_bounds__(kWarpSize)
    layer_norm_forward_stream_totals_kernel(const Slices chunks, const int64_t totals_offset,
                                            const ForwardParams p) {
  const int64_t row = blockIdx.x;
  const auto* parts = static_cast<const Pair<Acc>*>(p.workspace) + row * chunks.count;
  auto* totals = reinterpret_cast<Pair<Acc>*>(static_cast<char*>(p.workspace) + totals_offset);
  const Acc inverse_cols = p.inverse_cols.as<Acc>();
  const auto each = [&](const auto& use) {
    for (int i = threadIdx.x; i < chunks.count; i += kWarpSize) {
      use(Acc(min(chunks.cols, p.cols - i * chunks.cols)), parts[i]);
    }
  };
  const auto moments = Statistic::combine(each, parts[0].first, inverse_cols);
  if (threadIdx.x == 0) {
    const Acc rstd = Statistic::rstd(moments.m2, inverse_cols, p.eps.as<Acc>());
    totals[row] = {moments.mean, rstd};
    store_statistics(p, row, moments.mean, rstd);
  }
}

// The last kernel. A block keeps the weight and bias of its columns in registers for several rows:
// reading them anew for every row costs as much of L2's throughput as x and y. Shift and scale are
// read for every row, because each row may have its own.
template <typename N, int kWidth>
__global__ void __launch_bounds__(kFinishThreads)
    layer_norm_forward_stream_kernel(const int chunks, const int64_t totals_offset,
                                     const ForwardParams p) {
  using Acc = typename N::Acc;
  using W = typename N::W;
  using X = typename N::X;
  using Y = typename N::Y;
  constexpr int kChunkCols = kFinishThreads * kFinishVecs * kWidth;
  const int first_col = static_cast<int>(blockIdx.x % chunks) * kChunkCols;
  const Share<kFinishVecs> share = {static_cast<int>(threadIdx.x), kFinishThreads,
                                    min(kChunkCols, p.cols - first_col) / kWidth};
  // The last rows come first, as L2 may still have what the first kernel read last.
  const int64_t set = gridDim.x / chunks - 1 - blockIdx.x / chunks;
  const int64_t first_row = set * kRowsPerBlock;
  const int rows = static_cast<int>(min(int64_t{kRowsPerBlock}, p.rows - first_row));
  const auto* totals =
      reinterpret_cast<const Pair<Acc>*>(static_cast<const char*>(p.workspace) + totals_offset);

  ForwardRow<N> place(p, first_row + rows - 1, first_col);
  Vec<X, kWidth> next[kFinishVecs];
  place.x.template load<Use::kReadOnly>(next, share);
  Vec<W, kWidth> weight[kFinishVecs], bias[kFinishVecs];
  const auto load_parameters = [&] {
    FUSED_UNROLL for (int k = 0; k < kFinishVecs; ++k) {
      const int col = share.template col<kWidth>(k);
      weight[k] = place.parameters.factor.template load<kWidth>(col);
      bias[k] = place.parameters.summand.template load<kWidth>(col);
    }
  };
  if constexpr (!N::Affine::kModulates) load_parameters();
  for (int r = rows - 1; r >= 0; --r) {
    if constexpr (N::Affine::kModulates) load_parameters();
    Vec<X, kWidth> x[kFinishVecs];
    FUSED_UNROLL for (int k = 0; k < kFinishVecs; ++k) x[k] = next[k];
    Y* y = place.y;
    if (r > 0) {
      place = ForwardRow<N>(p, first_row + r - 1, first_col);
      place.x.template load<Use::kReadOnly>(next, share);
    }
    const Pair<Acc> total = totals[first_row + r];
    FUSED_UNROLL for (int k = 0; k < kFinishVecs; ++k) {
      const auto result = N::template finish<typename N::Epilogue, typename N::Affine>(
          p, x[k], total.first, total.second, weight[k], bias[k],
          [&](const void* given, Absent absent) {
            return Parameter<W>(given, first_col, absent)
                .template load<kWidth>(share.template col<kWidth>(k));
          });
      if (share.has(k)) store_once<Y, kWidth>(element(y, share.vector(k) * kWidth), result);
    }
  }
}

}  // namespace

cudaError_t launch_layer_norm_forward(const ForwardParams& params, const DataTypes& types,
                                      const forward::Stream& plan, cudaStream_t stream) {
  return dispatch_types(types, [&](auto t) {
    using T = decltype(t);
    return dispatch_width<kVectorWidth<T>>(plan.width, [&](auto width) {
      // The moments do not depend on the epilogue, nor on shift and scale.
      using Sums = NormOf<T, MayAddGated, Identity>;
      cudaError_t error = launch(layer_norm_forward_stream_sums_kernel<Sums, width()>, plan, stream,
                                 plan.chunks, params);
      if (error != cudaSuccess) return error;
      const Launch per_row = {params.rows, kWarpSize};
      error =
          launch(layer_norm_forward_stream_totals_kernel<typename Sums::Statistic, typename T::Acc>,
                 per_row, stream, plan.chunks, plan.totals_offset, params);
      if (error != cudaSuccess) return error;
      // The sum of input and residual, which the first kernel has stored, is now the input.
      ForwardParams stored = params;
      if (params.residual != nullptr) {
        stored.input = params.residual_out;
        stored.input_rows = RowMap(params.cols);
        stored.residual = nullptr;
      }
      constexpr int kChunkCols = kFinishThreads * kFinishVecs * width();
      const int chunks = (params.cols - 1) / kChunkCols + 1;
      const int64_t sets = (params.rows - 1) / kRowsPerBlock + 1;
      const Launch finish = {sets * chunks, kFinishThreads};
      const auto start = [&](auto norm) {
        return launch(layer_norm_forward_stream_kernel<decltype(norm), width()>, finish, stream,
                      chunks, plan.totals_offset, stored);
      };
      return params.is_modulated ? start(ModulatedForward<T, Plain>{})
                                 : start(NormOf<T, Plain, MayActivate>{});
    });
  });
}

}  // namespace fused_layernorm

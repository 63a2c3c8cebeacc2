// SPDX-License-Identifier: Apache-2.0
// Backward of rows of any length, on any chip. One kernel takes the sums of fixed chunks of each
// row together with dweight and dbias, or dscale and dshift of groups of rows. A second one adds up
// the sums of each row, and the last one reads x and dy again and computes dx.
#include "backward/running_param_grads.cuh"
#include "backward/stream.h"
#include "base/launch.cuh"

namespace fused_layernorm {
namespace {

constexpr int kThreads = kBackwardStreamThreads, kBlocks = kBackwardStreamBlocks;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kTotalsThreads = 1024;
// The chunks whose rows the last kernel takes together: as many as the first works on at once (on
// an H200), so that it begins with what L2 may still have.
constexpr int kChunksTogether = 256;

// The columns of a chunk.
struct Chunk {
  int first_col, cols;

  FUSED_DEVICE Chunk(int index, const Slices& chunks, int all_cols)
      : first_col(index * chunks.cols), cols(min(chunks.cols, all_cols - first_col)) {}
};

// The weight at a vector of a chunk's columns, or with a modulation the row's combined weight.
template <typename N, int kWidth>
FUSED_DEVICE auto weight_of(const BackwardParams& p,
                            const ColumnParameters<typename N::W>& parameters, int64_t row,
                            int first_col, int col) {
  if constexpr (N::Affine::kModulates) {
    const auto scale = scale_of_row<N>(p, row, first_col).template load<kWidth>(col);
    return combined_weight<N, kWidth>(p, col, scale, first_col);
  } else {
    return parameters.factor.template load<kWidth>(col);
  }
}

// The first kernel. A block has one chunk of the rows set, set + sets, ...: it computes dweight and
// dbias of its columns, and each warp stores its part of the two sums of each row, so that no warp
// waits. With a modulation the rows follow each other, and the block computes dscale and dshift of
// each group of rows, or of each row.
template <typename N, int kWidth>
__global__ void __launch_bounds__(kThreads, kBlocks)
    layer_norm_backward_stream_sums_kernel(const Slices chunks,
                                           const backward::PartialSums partials,
                                           const BackwardParams p) {
  constexpr bool kModulates = N::Affine::kModulates, kOfRows = is_of_rows<typename N::Affine>();
  using Acc = typename N::Acc;
  constexpr int kVecs = backward_stream_vecs(kWidth);
  const BlockTeam team;
  const int all_chunks = chunks.count;
  const int index = blockIdx.x % all_chunks, set = blockIdx.x / all_chunks;
  const Chunk chunk(index, chunks, p.cols);
  const Share<kVecs> share = {team.thread, team.threads, chunk.cols / kWidth};
  const auto parameters = parameters_of<N>(p, chunk.first_col);
  const bool reads_x = needs_x(p);
  auto* warp_sums = static_cast<Pair<Acc>*>(p.workspace);  // [row][chunk][warp]

  const int sets = gridDim.x / all_chunks;
  int64_t first_row = set, end_row = p.rows, row_step = sets;
  int64_t group_end = p.rows;
  [[maybe_unused]] int64_t part = 0;
  if constexpr (kModulates) {
    const GroupRange range(p, set, sets);
    first_row = range.begin;
    end_row = range.end;
    row_step = 1;
    group_end = range.end_of_group(range.begin);
    part = set + range.group_of(range.begin);
  }

  RunningParamGrads<Acc, kWidth, kVecs> grads;
  const auto leave_part = [&] {
    if (p.dscale || p.dshift || p.dweight || p.dbias) {
      grads.store(PartSink<N>(p, partials, part), share, chunk.first_col);
    }
  };
  for (int64_t row = first_row; row < end_row; row += row_step) {
    if constexpr (kModulates && !kOfRows) {
      if (row == group_end) {
        leave_part();
        grads = {};
        ++part;
        group_end = min(group_end + p.group_rows, end_row);
      }
    }
    const auto [mean, rstd] = load_statistics<Acc>(p, row);
    const auto* x_row = x_row_of<N>(p, row, chunk.first_col);
    const auto* dy_row = dy_row_of<N>(p, row, chunk.first_col);
    // With a dy of zero, a missing vector adds zero.
    Vec<typename N::X, kWidth> x[kVecs] = {};
    Vec<typename N::Y, kWidth> dy[kVecs] = {};
    FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
      const int col = share.template col<kWidth>(k);
      if (reads_x) x[k] = load<Use::kReadOnly, kWidth>(element(x_row, col));
      if (share.has(k)) dy[k] = load<Use::kReadOnly, kWidth>(element(dy_row, col));
    }
    Pair<Acc> sums = {0, 0};
    FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
      const int col = share.template col<kWidth>(k);
      const Gradients<N, kWidth> gradients(
          p, x[k], dy[k], mean, rstd,
          weight_of<N, kWidth>(p, parameters, row, chunk.first_col, col),
          parameters.summand.template load<kWidth>(col));
      gradients.add_sums(sums);
      if constexpr (kOfRows) {
        if (share.has(k)) {
          store_row_modulation(p, row, share.vector(k) * kWidth, gradients, chunk.first_col);
        }
      } else {
        gradients.add_dparams(grads.dweight(k), grads.dbias(k));
      }
    }
    if (p.dx == nullptr) continue;
    sums = warp_sum(sums);
    if (team.lane() == 0) warp_sums[(row * all_chunks + index) * kWarps + team.warp()] = sums;
  }
  if constexpr (kOfRows) {
    // dscale and dshift of each row are stored already.
  } else if constexpr (kModulates) {
    leave_part();
  } else {
    const ParamGradSink<N> sink(p, partials, set);
    if (sink.wanted()) grads.store(sink, share, chunk.first_col);
  }
}

// The second kernel, one block a row: the two means over the row, from the warps' sums.
template <typename Acc>
__global__ void __launch_bounds__(kTotalsThreads)
    layer_norm_backward_stream_totals_kernel(const int chunks, const int64_t totals_offset,
                                             const BackwardParams p) {
  __shared__ alignas(16) Pair<Acc> scratch[kMaxWarps];
  const BlockTeam team;
  const int64_t row = blockIdx.x;
  const int parts = chunks * kWarps;
  const auto* warp_sums = static_cast<const Pair<Acc>*>(p.workspace) + row * parts;
  auto* totals = reinterpret_cast<Pair<Acc>*>(static_cast<char*>(p.workspace) + totals_offset);
  Pair<Acc> sums = {0, 0};
#pragma unroll 8
  for (int i = team.thread; i < parts; i += team.threads) sums += warp_sums[i];
  sums = team_sum(sums, team, scratch);
  if (team.thread == 0) totals[row] = means_of(p, sums);
}

// The last kernel: dx.
template <typename N, int kWidth>
__global__ void __launch_bounds__(kThreads)
    layer_norm_backward_stream_kernel(const Slices chunks, const int64_t totals_offset,
                                      const BackwardParams p) {
  using Acc = typename N::Acc;
  using X = typename N::X;
  using Y = typename N::Y;
  constexpr int kVecs = backward_stream_vecs(kWidth);
  // The last chunks come first, and of the chunks that are taken together the last row.
  const uint32_t rows = static_cast<uint32_t>(p.rows);
  const uint32_t all_chunks = chunks.count;
  const uint32_t most = min(uint32_t{kChunksTogether}, all_chunks);
  const uint32_t later = blockIdx.x / (most * rows) * most;  // chunks that have come before
  const uint32_t together = min(most, all_chunks - later);
  const uint32_t place = blockIdx.x - later * rows;
  const int64_t row = rows - 1 - place / together;
  const Chunk chunk(static_cast<int>(all_chunks - 1 - later - place % together), chunks, p.cols);
  const Share<kVecs> share = {static_cast<int>(threadIdx.x), kThreads, chunk.cols / kWidth};
  const auto parameters = parameters_of<N>(p, chunk.first_col);
  const auto* totals =
      reinterpret_cast<const Pair<Acc>*>(static_cast<const char*>(p.workspace) + totals_offset);

  const DxRow<N> dx_row(p, row, chunk.first_col);
  const X* x_row = x_row_of<N>(p, row, chunk.first_col);
  const Y* dy_row = dy_row_of<N>(p, row, chunk.first_col);
  Vec<X, kWidth> x[kVecs], added[kVecs];
  Vec<Y, kWidth> dy[kVecs];
  FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
    const int col = share.template col<kWidth>(k);
    added[k] = dx_row.template added<kWidth>(col);
    x[k] = load<Use::kReadOnly, kWidth>(element(x_row, col));
    dy[k] = load<Use::kReadOnly, kWidth>(element(dy_row, col));
  }
  const auto [mean, rstd] = load_statistics<Acc>(p, row);
  const Pair<Acc> means = totals[row];
  FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
    const int col = share.template col<kWidth>(k);
    const Gradients<N, kWidth> gradients(
        p, x[k], dy[k], mean, rstd, weight_of<N, kWidth>(p, parameters, row, chunk.first_col, col),
        parameters.summand.template load<kWidth>(col));
    if (share.has(k)) dx_row.store(col, gradients.xhat, gradients.g, means, rstd, added[k]);
  }
}

}  // namespace

cudaError_t launch_layer_norm_backward(const BackwardParams& params, const DataTypes& types,
                                       const backward::Stream& plan, cudaStream_t stream) {
  const cudaError_t error = dispatch_types(types, [&](auto t) {
    using T = decltype(t);
    return dispatch_width<kVectorWidth<T>>(plan.width, [&](auto width) {
      // The sums do not depend on a gradient beside dx.
      const auto start_sums = [&](auto epilogue, auto affine) {
        using N = NormOf<T, NoOtherGradient, decltype(epilogue), decltype(affine)>;
        return launch(layer_norm_backward_stream_sums_kernel<N, width()>, plan, stream, plan.chunks,
                      params.is_modulated ? plan.parts.partials : plan.partials, params);
      };
      const cudaError_t sums = !params.is_modulated ? start_sums(MayActivate{}, ColumnAffine{})
                               : params.group_rows == 1
                                   ? start_sums(Identity{}, MayBeAffineAndModulateRow{})
                                   : start_sums(Identity{}, MayBeAffineAndModulate{});
      if (sums != cudaSuccess || params.dx == nullptr) return sums;
      const int chunks = plan.chunks.count;
      const Launch per_row = {params.rows, kTotalsThreads};
      const cudaError_t totals = launch(layer_norm_backward_stream_totals_kernel<typename T::Acc>,
                                        per_row, stream, chunks, plan.totals_offset, params);
      if (totals != cudaSuccess) return totals;
      const Launch per_chunk = {params.rows * chunks, kThreads};
      const auto start = [&](auto norm) {
        return launch(layer_norm_backward_stream_kernel<decltype(norm), width()>, per_chunk, stream,
                      plan.chunks, plan.totals_offset, params);
      };
      return params.is_modulated
                 ? start(NormOf<T, MayAddGradient, Identity, MayBeAffineAndModulate>{})
                 : start(SharedBackward<T>{});
    });
  });
  return error == cudaSuccess ? launch_sums(params, types, plan, stream) : error;
}

}  // namespace fused_layernorm

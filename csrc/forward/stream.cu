// Rows of any length, also longer than the chip holds, on any chip: the sums of fixed chunks of
// each row, their combination, then the result with a second read of the row.
#include "dispatch.h"
#include "launch.cuh"
#include "norm/rows.cuh"

namespace fused_layernorm {
namespace {

constexpr int kChunkThreads = 512;
constexpr int kSumsThreads = kStreamSumsThreads;
constexpr int kSumsWarps = kSumsThreads / kWarpSize;
constexpr int kTotalsThreads = 1024;
// Chunks whose rows the second kernel of backward takes together: as many as the first works on at
// once (on an H200), so that it begins with what the first read last and L2 may still have.
constexpr int kChunksTogether = 256;
constexpr int kFinishThreads = 256;
constexpr int kFinishVecs = 4;
constexpr int kRowsPerBlock = 8;

// The columns of a chunk.
struct Chunk {
  int first_col, cols;

  __device__ __forceinline__ Chunk(int index, int chunk_cols, int all_cols)
      : first_col(index * chunk_cols), cols(min(chunk_cols, all_cols - first_col)) {}
};

// With a residual, x = input + residual is stored here and read back by the second kernel.
template <typename T, int kWidth, int kVecs, bool kResidual>
__global__ void __launch_bounds__(kChunkThreads)
    layer_norm_forward_stream_sums_kernel(const ForwardParams p, const int chunks,
                                          const int chunk_cols) {
  using Acc = typename T::Acc;
  __shared__ alignas(16) Acc scratch[2][kMaxWarps];
  const Group group;
  const int64_t row = blockIdx.x / chunks;
  const int index = blockIdx.x % chunks;
  const Chunk chunk(index, chunk_cols, p.cols);
  const Share<kVecs, false> share = {group.thread, group.threads, chunk.cols / kWidth};

  const ForwardRow<T> place(p, row, chunk.first_col, std::bool_constant<kResidual>{});
  RowVectors<T, kWidth, kVecs> values;
  values.template load<kResidual>(place, share);
  const Acc pivot = place.template first_element<kResidual>();
  const Acc mean = Reciprocal<Acc>(chunk.cols)
                       .mean(pivot, group_sum(values.sum(pivot, share), group, scratch[0]));
  const Acc m2 = group_sum(values.squared_deviations(mean, share), group, scratch[1]);
  if (group.thread == 0) {
    static_cast<Moments<Acc>*>(p.workspace)[row * chunks + index] = {mean, m2};
  }
}

// One warp a row: mean and rstd from the moments of its chunks, to the workspace for the last
// kernel and to the outputs.
template <typename T>
__global__ void __launch_bounds__(kWarpSize)
    layer_norm_forward_stream_totals_kernel(const ForwardParams p, const int chunks,
                                            const int chunk_cols, const int64_t totals_offset) {
  using Acc = typename T::Acc;
  const int64_t row = blockIdx.x;
  const auto* sums = static_cast<const Moments<Acc>*>(p.workspace) + row * chunks;
  auto* totals = reinterpret_cast<Pair<Acc>*>(static_cast<char*>(p.workspace) + totals_offset);
  const Acc inverse_cols = p.inverse_cols.as<Acc>();
  const auto moments =
      warp_combine([&](int c) { return sums[c]; }, chunks, chunk_cols, p.cols, inverse_cols);
  if (threadIdx.x == 0) {
    const Acc rstd = reciprocal_sqrt(moments.m2 * inverse_cols + p.eps.as<Acc>());
    totals[row].first = moments.mean;
    totals[row].second = rstd;
    store_statistics(p, row, moments.mean, rstd);
  }
}

// Each block keeps the weight and bias of its columns in registers for kRowsPerBlock rows: reading
// them anew for every row costs as much of L2's throughput as x and y.
// kResidual, as in backward's kernels, also stands for an epilogue alone.
template <typename T, int kWidth, Fusion kFusion>
__global__ void __launch_bounds__(kFinishThreads)
    layer_norm_forward_stream_kernel(const ForwardParams p, const int chunks,
                                     const int64_t totals_offset) {
  using Acc = typename T::Acc;
  using W = typename T::W;
  using X = typename T::X;
  using Y = typename T::Y;
  constexpr int kChunkCols = kFinishThreads * kFinishVecs * kWidth;
  const int first_col = static_cast<int>(blockIdx.x % chunks) * kChunkCols;
  const Share<kFinishVecs, false> share = {static_cast<int>(threadIdx.x), kFinishThreads,
                                           min(kChunkCols, p.cols - first_col) / kWidth};
  // Last rows first: what the first kernel read last may still be in L2.
  const int64_t set = gridDim.x / chunks - 1 - blockIdx.x / chunks;
  const int64_t first_row = set * kRowsPerBlock;
  const int rows = static_cast<int>(min(int64_t{kRowsPerBlock}, p.rows - first_row));
  const auto* totals =
      reinterpret_cast<const Pair<Acc>*>(static_cast<const char*>(p.workspace) + totals_offset);

  const auto place_of = [&](int r) {
    ForwardRow<T> place(p, first_row + r, first_col, std::false_type{});
    if (kFusion == Fusion::kResidual && p.residual_out != nullptr) {
      place.input = static_cast<const X*>(p.residual_out) + (first_row + r) * p.cols + first_col;
    }
    return place;
  };
  ForwardRow<T> place = place_of(rows - 1);
  RowVectors<T, kWidth, kFinishVecs> next;
  next.template load<false>(place, share);
  Vec<W, kWidth> weight[kFinishVecs], bias[kFinishVecs];
#pragma unroll
  for (int k = 0; k < kFinishVecs; ++k) {
    const int col = share.template col<kWidth>(k);
    weight[k] = place.weight.template load<kWidth>(col);
    bias[k] = place.bias.template load<kWidth>(col);
  }
  for (int r = rows - 1; r >= 0; --r) {
    const RowVectors<T, kWidth, kFinishVecs> values = next;
    Y* y = place.y;
    if (r > 0) {
      place = place_of(r - 1);
      next.template load<false>(place, share);
    }
    const Pair<Acc> total = totals[first_row + r];
#pragma unroll
    for (int k = 0; k < kFinishVecs; ++k) {
      const auto result =
          finish<kFusion, Y>(p, values.x[k], total.first, total.second, weight[k], bias[k]);
      if (share.has(k)) store_once<Y, kWidth>(element(y, share.vector(k) * kWidth), result);
    }
  }
}

// Each block owns the columns of one chunk for the rows set, set + sets, ...: their dweight and
// dbias, and its warps' shares of the two sums of each of those rows. Warps do not wait for each
// other, so that some load while others compute.
template <typename T, int kWidth, int kVecs, bool kMayActivate>
__global__ void __launch_bounds__(kSumsThreads, 2)
    layer_norm_backward_stream_sums_kernel(const BackwardParams p, const int chunks,
                                           const int chunk_cols, const int partials,
                                           const int64_t dparams_offset) {
  using Acc = typename T::Acc;
  using X = typename T::X;
  using Y = typename T::Y;
  const Group group;
  const int index = blockIdx.x % chunks, set = blockIdx.x / chunks;
  const Chunk chunk(index, chunk_cols, p.cols);
  const Share<kVecs, false> share = {group.thread, group.threads, chunk.cols / kWidth};
  const Parameter<typename T::W> weight(p.weight, chunk.first_col, Otherwise::kOnes);
  const Parameter<typename T::W> bias(kMayActivate ? p.bias : nullptr, chunk.first_col,
                                      Otherwise::kZeros);
  const bool reads_x = needs_x(p);
  auto* warp_sums = static_cast<Pair<Acc>*>(p.workspace);  // [row][chunk][warp]

  Acc dweight[kVecs][kWidth] = {};
  Acc dbias[kVecs][kWidth] = {};
  for (int64_t row = set; row < p.rows; row += gridDim.x / chunks) {
    const Acc mean = static_cast<const Acc*>(p.mean)[row];
    const Acc rstd = static_cast<const Acc*>(p.rstd)[row];
    const X* x_row = static_cast<const X*>(p.x) + p.x_rows(row) + chunk.first_col;
    const Y* dy_row = static_cast<const Y*>(p.dy) + p.dy_rows(row) + chunk.first_col;
    // With a dy of zero, a missing vector adds zero.
    Vec<X, kWidth> x[kVecs] = {};
    Vec<Y, kWidth> dy[kVecs] = {};
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      const int col = share.template col<kWidth>(k);
      if (reads_x) x[k] = load<Use::kOnce, kWidth>(element(x_row, col));
      if (share.has(k)) dy[k] = load<Use::kOnce, kWidth>(element(dy_row, col));
    }
    Pair<Acc> sums = {0, 0};
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      const int col = share.template col<kWidth>(k);
      const Gradients<T, kWidth, kMayActivate> gradients(p, x[k], dy[k], mean, rstd,
                                                         weight.template load<kWidth>(col),
                                                         bias.template load<kWidth>(col));
      gradients.add_sums(sums);
      gradients.add_dparams(dweight[k], dbias[k]);
    }
    if (p.dx == nullptr) continue;
    sums = warp_sum(sums);
    if (group.lane() == 0) {
      warp_sums[(row * chunks + index) * kSumsWarps + group.warp()] = sums;
    }
  }
  const ParamGradSink<T> sink(p, dparams_offset, partials, set);
  if (!sink.wanted()) return;
#pragma unroll
  for (int k = 0; k < kVecs; ++k) {
    if (share.has(k)) {
      sink.store(chunk.first_col + share.vector(k) * kWidth, dweight[k], dbias[k]);
    }
  }
}

// One block a row: the means over the row, from the sums of the warps that read it.
template <typename T>
__global__ void __launch_bounds__(kTotalsThreads)
    layer_norm_backward_stream_totals_kernel(const BackwardParams p, const int chunks,
                                             const int64_t totals_offset) {
  using Acc = typename T::Acc;
  __shared__ alignas(16) Pair<Acc> scratch[kMaxWarps];
  const Group group;
  const int64_t row = blockIdx.x;
  const int parts = chunks * kSumsWarps;
  const auto* warp_sums = static_cast<const Pair<Acc>*>(p.workspace) + row * parts;
  auto* totals = reinterpret_cast<Pair<Acc>*>(static_cast<char*>(p.workspace) + totals_offset);
  Pair<Acc> sums = {0, 0};
#pragma unroll 8
  for (int i = group.thread; i < parts; i += group.threads) sums += warp_sums[i];
  sums = group_sum(sums, group, scratch);
  if (group.thread == 0) {
    const Acc inverse_cols = p.inverse_cols.as<Acc>();
    totals[row] = {sums.first * inverse_cols, sums.second * inverse_cols};
  }
}

template <typename T, int kWidth, int kVecs, Fusion kFusion>
__global__ void __launch_bounds__(kSumsThreads)
    layer_norm_backward_stream_kernel(const BackwardParams p, const int chunks,
                                      const int chunk_cols, const int64_t totals_offset) {
  using Acc = typename T::Acc;
  using X = typename T::X;
  using Y = typename T::Y;
  // The last chunks first, of these the last row first.
  const uint32_t rows = static_cast<uint32_t>(p.rows);
  const uint32_t most = min(kChunksTogether, chunks);
  const uint32_t later = blockIdx.x / (most * rows) * most;  // chunks
  const uint32_t together = min(most, chunks - later);
  const uint32_t place = blockIdx.x - later * rows;
  const int64_t row = rows - 1 - place / together;
  const Chunk chunk(static_cast<int>(chunks - 1 - later - place % together), chunk_cols, p.cols);
  const Share<kVecs, false> share = {static_cast<int>(threadIdx.x), kSumsThreads,
                                     chunk.cols / kWidth};
  constexpr bool kMayActivate = kFusion != Fusion::kNone;
  const Parameter<typename T::W> weight(p.weight, chunk.first_col, Otherwise::kOnes);
  const Parameter<typename T::W> bias(kMayActivate ? p.bias : nullptr, chunk.first_col,
                                      Otherwise::kZeros);
  const auto* totals =
      reinterpret_cast<const Pair<Acc>*>(static_cast<const char*>(p.workspace) + totals_offset);

  const DxRow<X, kFusion == Fusion::kResidual> dx_row(p, row, chunk.first_col);
  const X* x_row = static_cast<const X*>(p.x) + p.x_rows(row) + chunk.first_col;
  const Y* dy_row = static_cast<const Y*>(p.dy) + p.dy_rows(row) + chunk.first_col;
  Vec<X, kWidth> x[kVecs], added[kVecs];
  Vec<Y, kWidth> dy[kVecs];
#pragma unroll
  for (int k = 0; k < kVecs; ++k) {
    const int col = share.template col<kWidth>(k);
    added[k] = dx_row.template added<kWidth>(col);
    x[k] = load<Use::kOnce, kWidth>(element(x_row, col));
    dy[k] = load<Use::kOnce, kWidth>(element(dy_row, col));
  }
  const Acc mean = static_cast<const Acc*>(p.mean)[row];
  const Acc rstd = static_cast<const Acc*>(p.rstd)[row];
  const Pair<Acc> means = totals[row];
#pragma unroll
  for (int k = 0; k < kVecs; ++k) {
    const int col = share.template col<kWidth>(k);
    const Gradients<T, kWidth, kMayActivate> gradients(p, x[k], dy[k], mean, rstd,
                                                       weight.template load<kWidth>(col),
                                                       bias.template load<kWidth>(col));
    if (share.has(k)) dx_row.store(col, gradients.xhat, gradients.g, means, rstd, added[k]);
  }
}

Plan with_blocks(Plan plan, int64_t blocks) {
  plan.blocks = blocks;
  return plan;
}

}  // namespace

cudaError_t launch_layer_norm_forward_stream(const ForwardParams& params, const DataTypes& types,
                                             const Plan& plan, cudaStream_t stream) {
  return dispatch_types(types, [&](auto t) {
    using T = decltype(t);
    return dispatch_width<T>(plan.width, [&](auto width) {
      constexpr int kVecs = width() == 1 ? 16 : 8;
      cudaError_t error = dispatch_bool<true>(has_residual(params), [&](auto residual) {
        return launch(layer_norm_forward_stream_sums_kernel<T, width(), kVecs, residual()>, plan,
                      kChunkThreads, stream, params, plan.blocks_per_row, plan.slice_cols);
      });
      if (error != cudaSuccess) return error;
      error = launch(layer_norm_forward_stream_totals_kernel<T>, with_blocks(plan, params.rows),
                     kWarpSize, stream, params, plan.blocks_per_row, plan.slice_cols,
                     plan.totals_offset);
      if (error != cudaSuccess) return error;
      constexpr int kChunkCols = kFinishThreads * kFinishVecs * width();
      const int chunks = (params.cols - 1) / kChunkCols + 1;
      const int64_t sets = (params.rows - 1) / kRowsPerBlock + 1;
      return dispatch_bool<true>(has_residual(params) || params.has_epilogue, [&](auto fused) {
        constexpr Fusion kFusion = fused() ? Fusion::kResidual : Fusion::kNone;
        return launch(layer_norm_forward_stream_kernel<T, width(), kFusion>,
                      with_blocks(plan, sets * chunks), kFinishThreads, stream, params, chunks,
                      plan.totals_offset);
      });
    });
  });
}

cudaError_t launch_layer_norm_backward_stream(const BackwardParams& params, const DataTypes& types,
                                              const Plan& plan, cudaStream_t stream) {
  return dispatch_types(types, [&](auto t) {
    using T = decltype(t);
    return dispatch_width<T>(plan.width, [&](auto width) {
      return dispatch_any_fusion(params, [&](auto fusion) {
        constexpr int kVecs = 16 / width();
        constexpr bool kMayActivate = fusion() != Fusion::kNone;
        const int chunks = plan.blocks_per_row;
        cudaError_t error =
            launch(layer_norm_backward_stream_sums_kernel<T, width(), kVecs, kMayActivate>, plan,
                   kSumsThreads, stream, params, chunks, plan.slice_cols, plan.partials,
                   plan.dparams_offset);
        if (error != cudaSuccess || params.dx == nullptr) return error;
        error = launch(layer_norm_backward_stream_totals_kernel<T>, with_blocks(plan, params.rows),
                       kTotalsThreads, stream, params, chunks, plan.totals_offset);
        if (error != cudaSuccess) return error;
        return launch(layer_norm_backward_stream_kernel<T, width(), kVecs, fusion()>,
                      with_blocks(plan, params.rows * chunks), kSumsThreads, stream, params, chunks,
                      plan.slice_cols, plan.totals_offset);
      });
    });
  });
}

}  // namespace fused_layernorm

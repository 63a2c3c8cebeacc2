// Rows of any length, also longer than the chip holds, on any chip: the sums of fixed chunks of
// each row, their combination, then the result with a second read of the row.
#include "dispatch.h"
#include "launch.cuh"
#include "rows.cuh"

namespace fused_layernorm {
namespace {

constexpr int kForwardThreads = 512;
constexpr int kBackwardThreads = 256;

// Chunk `blockIdx.x % chunks` of row `blockIdx.x / chunks`.
struct ChunkWork {
  int chunk, first_col, cols;
  int64_t row;

  __device__ __forceinline__ ChunkWork(int64_t block, int chunks, int chunk_cols, int all_cols)
      : chunk(static_cast<int>(block % chunks)),
        first_col(chunk * chunk_cols),
        cols(min(chunk_cols, all_cols - first_col)),
        row(block / chunks) {}
};

// With a residual, x = input + residual is stored here and read back by the second kernel.
template <typename T, int kWidth, int kVecs>
__global__ void __launch_bounds__(kForwardThreads)
    layer_norm_forward_stream_sums_kernel(const ForwardParams p, const int chunks,
                                          const int chunk_cols) {
  using Acc = typename T::Acc;
  __shared__ Acc scratch[2][kMaxWarps];
  const Group group;
  const ChunkWork work(blockIdx.x, chunks, chunk_cols, p.cols);
  const int first = work.first_col / kWidth + group.thread;
  const int vectors = (work.first_col + work.cols) / kWidth;

  RowShare<T, kWidth, kVecs> share;
  share.load(p, work.row, first, group.threads, vectors);
  const Acc pivot = first_element<T>(p, work.row);
  const Acc sum = group_sum(share.sum(pivot, first, group.threads, vectors), group, scratch[0]);
  const Acc mean = pivot + sum / Acc(work.cols);
  const Acc m2 = group_sum(share.squared_deviations(mean, first, group.threads, vectors), group,
                           scratch[1]);
  if (group.thread == 0) {
    static_cast<Moments<Acc>*>(p.workspace)[work.row * chunks + work.chunk] = {mean, m2};
  }
}

template <typename T, int kWidth, int kVecs>
__global__ void __launch_bounds__(kForwardThreads)
    layer_norm_forward_stream_kernel(const ForwardParams p, const int chunks,
                                     const int chunk_cols) {
  using Acc = typename T::Acc;
  using X = typename T::X;
  __shared__ Moments<Acc> combined;
  const Group group;
  // Last blocks first: what the first kernel read last may still be in L2.
  const ChunkWork work(int64_t{gridDim.x} - 1 - blockIdx.x, chunks, chunk_cols, p.cols);
  const int first = work.first_col / kWidth + group.thread;
  const int vectors = (work.first_col + work.cols) / kWidth;

  RowShare<T, kWidth, kVecs> share;
  if (p.residual == nullptr) {
    share.load(p, work.row, first, group.threads, vectors);
  } else {
    const X* x = static_cast<const X*>(p.residual_out) + work.row * p.cols;
    share.load(x, first, group.threads, vectors);
  }
  if (group.warp() == 0) {
    const auto* sums = static_cast<const Moments<Acc>*>(p.workspace) + work.row * chunks;
    const auto moments = warp_combine([&](int c) { return sums[c]; }, chunks, chunk_cols, p.cols,
                                      p.inverse_cols.as<Acc>());
    if (group.lane() == 0) combined = moments;
  }
  group.sync();
  const Acc mean = combined.mean;
  const Acc rstd = reciprocal_sqrt(combined.m2 * p.inverse_cols.as<Acc>() + p.eps.as<Acc>());
  if (group.thread == 0 && work.chunk == 0) store_statistics(p, work.row, mean, rstd);
  finish_row(p, work.row, share, 0, first, group.threads, vectors, mean, rstd);
}

// Each block owns the columns of one chunk for the rows set, set + sets, ...: their dweight and
// dbias, and the chunk's share of the two sums of each of those rows.
template <typename T, int kWidth, int kVecs>
__global__ void __launch_bounds__(kBackwardThreads)
    layer_norm_backward_stream_sums_kernel(const BackwardParams p, const int chunks,
                                           const int chunk_cols, const int partials,
                                           const int64_t dparams_offset) {
  using Acc = typename T::Acc;
  using X = typename T::X;
  using Y = typename T::Y;
  __shared__ Pair<Acc> scratch[2][kMaxWarps];
  const Group group;
  const int chunk = blockIdx.x % chunks, set = blockIdx.x / chunks;
  const int first = chunk * (chunk_cols / kWidth) + group.thread;
  const int vectors = min((chunk + 1) * (chunk_cols / kWidth), p.cols / kWidth);
  const auto* weight = static_cast<const typename T::W*>(p.weight);
  const auto* bias =
      static_cast<const typename T::W*>(p.activation == Activation::kNone ? nullptr : p.bias);
  const bool reads_x = needs_x(p);
  auto* chunk_sums = static_cast<Pair<Acc>*>(p.workspace);

  Acc dweight[kVecs][kWidth] = {};
  Acc dbias[kVecs][kWidth] = {};
  int parity = 0;
  for (int64_t row = set; row < p.rows; row += gridDim.x / chunks, parity ^= 1) {
    const Acc mean = static_cast<const Acc*>(p.mean)[row];
    const Acc rstd = static_cast<const Acc*>(p.rstd)[row];
    Vec<X, kWidth> x[kVecs];
    Vec<Y, kWidth> dy[kVecs];
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      const int v = first + k * group.threads;
      if (v < vectors) {
        if (reads_x) {
          x[k] = load_once<X, kWidth>(static_cast<const X*>(p.x) + p.x_rows(row) + v * kWidth);
        }
        dy[k] = load_once<Y, kWidth>(static_cast<const Y*>(p.dy) + p.dy_rows(row) + v * kWidth);
      }
    }
    Pair<Acc> sums = {0, 0};
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      const int v = first + k * group.threads;
      if (v < vectors) {
        Acc w[kWidth], b[kWidth];
        load_param(w, weight, v * kWidth, Acc(1));
        load_param(b, bias, v * kWidth, Acc(0));
        const Gradients<T, kWidth> gradients(p, x[k], dy[k], mean, rstd, w, b);
        gradients.add_sums(sums);
        gradients.add_dparams(dweight[k], dbias[k]);
      }
    }
    if (p.dx == nullptr) continue;
    sums = group_sum(sums, group, scratch[parity]);
    if (group.thread == 0) chunk_sums[row * chunks + chunk] = sums;
  }
  const ParamGradSink<T> sink(p, dparams_offset, partials, set);
  if (!sink.wanted()) return;
#pragma unroll
  for (int k = 0; k < kVecs; ++k) {
    const int v = first + k * group.threads;
    if (v < vectors) sink.store(v * kWidth, dweight[k], dbias[k]);
  }
}

// One block a row: the means over the row, from the sums of its chunks.
template <typename T>
__global__ void __launch_bounds__(kBackwardThreads)
    layer_norm_backward_stream_totals_kernel(const BackwardParams p, const int chunks,
                                             const int64_t totals_offset) {
  using Acc = typename T::Acc;
  __shared__ Pair<Acc> scratch[kMaxWarps];
  const Group group;
  const int64_t row = blockIdx.x;
  const auto* chunk_sums = static_cast<const Pair<Acc>*>(p.workspace) + row * chunks;
  auto* totals = reinterpret_cast<Pair<Acc>*>(static_cast<char*>(p.workspace) + totals_offset);
  Pair<Acc> sums = {0, 0};
  for (int c = group.thread; c < chunks; c += group.threads) {
    sums.first += chunk_sums[c].first;
    sums.second += chunk_sums[c].second;
  }
  sums = group_sum(sums, group, scratch);
  if (group.thread == 0) {
    const Acc inverse_cols = p.inverse_cols.as<Acc>();
    totals[row] = {sums.first * inverse_cols, sums.second * inverse_cols};
  }
}

template <typename T, int kWidth, int kVecs>
__global__ void __launch_bounds__(kBackwardThreads)
    layer_norm_backward_stream_kernel(const BackwardParams p, const int chunks,
                                      const int chunk_cols, const int64_t totals_offset) {
  using Acc = typename T::Acc;
  using X = typename T::X;
  using Y = typename T::Y;
  const ChunkWork work(int64_t{gridDim.x} - 1 - blockIdx.x, chunks, chunk_cols, p.cols);
  const int first = work.first_col / kWidth + threadIdx.x;
  const int vectors = (work.first_col + work.cols) / kWidth;
  const auto* weight = static_cast<const typename T::W*>(p.weight);
  const auto* bias =
      static_cast<const typename T::W*>(p.activation == Activation::kNone ? nullptr : p.bias);
  const auto* totals =
      reinterpret_cast<const Pair<Acc>*>(static_cast<const char*>(p.workspace) + totals_offset);

  const int64_t row = work.row;
  Vec<X, kWidth> x[kVecs];
  Vec<Y, kWidth> dy[kVecs];
#pragma unroll
  for (int k = 0; k < kVecs; ++k) {
    const int v = first + k * kBackwardThreads;
    if (v < vectors) {
      x[k] = load_once<X, kWidth>(static_cast<const X*>(p.x) + p.x_rows(row) + v * kWidth);
      dy[k] = load_once<Y, kWidth>(static_cast<const Y*>(p.dy) + p.dy_rows(row) + v * kWidth);
    }
  }
  const Acc mean = static_cast<const Acc*>(p.mean)[row];
  const Acc rstd = static_cast<const Acc*>(p.rstd)[row];
  const Pair<Acc> means = totals[row];
#pragma unroll
  for (int k = 0; k < kVecs; ++k) {
    const int v = first + k * kBackwardThreads;
    if (v < vectors) {
      Acc w[kWidth], b[kWidth];
      load_param(w, weight, v * kWidth, Acc(1));
      load_param(b, bias, v * kWidth, Acc(0));
      const Gradients<T, kWidth> gradients(p, x[k], dy[k], mean, rstd, w, b);
      store_dx<T>(p, row, v * kWidth, gradients.xhat, gradients.g, means, rstd);
    }
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
      const auto start = [&](auto kernel) {
        return launch(kernel, plan, kForwardThreads, stream, params, plan.blocks_per_row,
                      plan.slice_cols);
      };
      const cudaError_t error = start(layer_norm_forward_stream_sums_kernel<T, width(), kVecs>);
      if (error != cudaSuccess) return error;
      return start(layer_norm_forward_stream_kernel<T, width(), kVecs>);
    });
  });
}

cudaError_t launch_layer_norm_backward_stream(const BackwardParams& params, const DataTypes& types,
                                              const Plan& plan, cudaStream_t stream) {
  return dispatch_types(types, [&](auto t) {
    using T = decltype(t);
    return dispatch_width<T>(plan.width, [&](auto width) {
      constexpr int kVecs = 16 / width();
      const int chunks = plan.blocks_per_row;
      cudaError_t error = launch(layer_norm_backward_stream_sums_kernel<T, width(), kVecs>, plan,
                                 kBackwardThreads, stream, params, chunks, plan.slice_cols,
                                 plan.partials, plan.dparams_offset);
      if (error != cudaSuccess || params.dx == nullptr) return error;
      error = launch(layer_norm_backward_stream_totals_kernel<T>, with_blocks(plan, params.rows),
                     kBackwardThreads, stream, params, chunks, plan.totals_offset);
      if (error != cudaSuccess) return error;
      return launch(layer_norm_backward_stream_kernel<T, width(), kVecs>,
                    with_blocks(plan, params.rows * chunks), kBackwardThreads, stream, params,
                    chunks, plan.slice_cols, plan.totals_offset);
    });
  });
}

}  // namespace fused_layernorm

// Short rows: a warp, or a power-of-two part of one, holds a row in registers. Nothing but
// shuffles between the lanes.
#include "dispatch.h"
#include "launch.cuh"
#include "rows.cuh"

namespace fused_layernorm {
namespace {

constexpr int kForwardThreads = 256;
constexpr int kBackwardThreads = 512;

// Rows that a group of lanes loads before the first use, so that each lane has four loads in
// flight: plan.cpp counts blocks with the same rule.
template <int kVecs>
constexpr int kRowsAtOnce = kVecs == 1 ? 4 : kVecs == 2 ? 2 : 1;

template <typename T, int kWidth, int kVecs>
__global__ void __launch_bounds__(kForwardThreads)
    layer_norm_forward_warp_kernel(const ForwardParams p, const int lanes) {
  using Acc = typename T::Acc;
  constexpr int kRows = kRowsAtOnce<kVecs>;
  const int groups = kForwardThreads / lanes;
  const int lane = threadIdx.x % lanes;
  const int vectors = p.cols / kWidth;
  const int64_t first_row = int64_t{blockIdx.x} * groups * kRows + threadIdx.x / lanes;

  RowShare<T, kWidth, kVecs> share[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t row = first_row + r * groups;
    if (row < p.rows) {
      share[r].load(p, row, lane, lanes, vectors);
    } else {
      share[r].clear();
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t row = first_row + r * groups;
    const Acc inverse_cols = p.inverse_cols.as<Acc>();
    const Acc pivot = __shfl_sync(kFullWarp, to_acc(share[r].x[0].at[0]), 0, lanes);
    const Acc sum = lanes_sum(share[r].sum(pivot, lane, lanes, vectors), lanes);
    const Acc mean = pivot + sum * inverse_cols;
    const Acc m2 = lanes_sum(share[r].squared_deviations(mean, lane, lanes, vectors), lanes);
    const Acc rstd = reciprocal_sqrt(m2 * inverse_cols + p.eps.as<Acc>());
    if (row < p.rows) {
      if (lane == 0) store_statistics(p, row, mean, rstd);
      finish_row(p, row, share[r], 0, lane, lanes, vectors, mean, rstd);
    }
  }
}

template <typename T, int kWidth, int kVecs>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    layer_norm_backward_warp_kernel(const BackwardParams p, const int lanes, const int partials,
                                    const int64_t dparams_offset) {
  using Acc = typename T::Acc;
  using X = typename T::X;
  using Y = typename T::Y;
  constexpr int kRows = kRowsAtOnce<kVecs>;
  const int groups = kBackwardThreads / lanes;
  const int lane = threadIdx.x % lanes;
  const int vectors = p.cols / kWidth;
  const int64_t group = int64_t{blockIdx.x} * groups + threadIdx.x / lanes;
  const int64_t all_groups = int64_t{gridDim.x} * groups;
  auto* weight = static_cast<const typename T::W*>(p.weight);
  auto* bias =
      static_cast<const typename T::W*>(p.activation == Activation::kNone ? nullptr : p.bias);
  const bool reads_x = needs_x(p);

  Acc dweight[kVecs][kWidth] = {};
  Acc dbias[kVecs][kWidth] = {};

  // The bound is the same for all lanes of a warp: each takes part in the shuffles.
  for (int64_t base = 0; base < p.rows; base += all_groups * kRows) {
    Vec<X, kWidth> x[kRows][kVecs];
    Vec<Y, kWidth> dy[kRows][kVecs];
    Acc mean[kRows], rstd[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = base + r * all_groups + group;
      const bool valid_row = row < p.rows;
      mean[r] = valid_row ? static_cast<const Acc*>(p.mean)[row] : Acc(0);
      rstd[r] = valid_row ? static_cast<const Acc*>(p.rstd)[row] : Acc(0);
#pragma unroll
      for (int k = 0; k < kVecs; ++k) {
        const int v = lane + k * lanes;
        if (valid_row && v < vectors) {
          if (reads_x) {
            x[r][k] = load_once<X, kWidth>(static_cast<const X*>(p.x) + p.x_rows(row) + v * kWidth);
          }
          dy[r][k] =
              load_once<Y, kWidth>(static_cast<const Y*>(p.dy) + p.dy_rows(row) + v * kWidth);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = base + r * all_groups + group;
      const bool valid_row = row < p.rows;
      Pair<Acc> sums = {0, 0};
#pragma unroll
      for (int k = 0; k < kVecs; ++k) {
        const int v = lane + k * lanes;
        if (valid_row && v < vectors) {
          Acc w[kWidth], b[kWidth];
          load_param(w, weight, v * kWidth, Acc(1));
          load_param(b, bias, v * kWidth, Acc(0));
          const Gradients<T, kWidth> gradients(p, x[r][k], dy[r][k], mean[r], rstd[r], w, b);
          gradients.add_sums(sums);
          gradients.add_dparams(dweight[k], dbias[k]);
        }
      }
      if (p.dx == nullptr) continue;
      recompute(weight);
      recompute(bias);
      const Acc inverse_cols = p.inverse_cols.as<Acc>();
      const Pair<Acc> means = {lanes_sum(sums.first, lanes) * inverse_cols,
                               lanes_sum(sums.second, lanes) * inverse_cols};
#pragma unroll
      for (int k = 0; k < kVecs; ++k) {
        const int v = lane + k * lanes;
        if (valid_row && v < vectors) {
          recompute(x[r][k]);
          recompute(dy[r][k]);
          Acc w[kWidth], b[kWidth];
          load_param(w, weight, v * kWidth, Acc(1));
          load_param(b, bias, v * kWidth, Acc(0));
          const Gradients<T, kWidth> gradients(p, x[r][k], dy[r][k], mean[r], rstd[r], w, b);
          store_dx<T>(p, row, v * kWidth, gradients.xhat, gradients.g, means, rstd[r]);
        }
      }
    }
  }

  const ParamGradSink<T> sink(p, dparams_offset, partials, blockIdx.x);
  if (!sink.wanted()) return;
  // First the groups of a warp, then the warps of the block, in order.
#pragma unroll
  for (int k = 0; k < kVecs; ++k) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      for (int offset = lanes; offset < kWarpSize; offset *= 2) {
        dweight[k][j] += __shfl_xor_sync(kFullWarp, dweight[k][j], offset);
        dbias[k][j] += __shfl_xor_sync(kFullWarp, dbias[k][j], offset);
      }
    }
  }
  extern __shared__ __align__(16) unsigned char shared[];
  Acc* dweight_sum = reinterpret_cast<Acc*>(shared);
  Acc* dbias_sum = dweight_sum + p.cols;
  for (int turn = 0; turn < kBackwardThreads / kWarpSize; ++turn) {
    if (threadIdx.x / kWarpSize == turn && threadIdx.x % kWarpSize < lanes) {
#pragma unroll
      for (int k = 0; k < kVecs; ++k) {
        const int v = lane + k * lanes;
        if (v < vectors) {
#pragma unroll
          for (int j = 0; j < kWidth; ++j) {
            const int col = v * kWidth + j;
            dweight_sum[col] = turn == 0 ? dweight[k][j] : dweight_sum[col] + dweight[k][j];
            dbias_sum[col] = turn == 0 ? dbias[k][j] : dbias_sum[col] + dbias[k][j];
          }
        }
      }
    }
    __syncthreads();
  }
  for (int col = threadIdx.x; col < p.cols; col += kBackwardThreads) {
    const Acc dw[1] = {dweight_sum[col]};
    const Acc db[1] = {dbias_sum[col]};
    sink.store(col, dw, db);
  }
}

}  // namespace

cudaError_t launch_layer_norm_forward_warp(const ForwardParams& params, const DataTypes& types,
                                           const Plan& plan, cudaStream_t stream) {
  return dispatch_types(types, [&](auto t) {
    using T = decltype(t);
    return dispatch_width<T>(plan.width, [&](auto width) {
      return dispatch_vecs<1, 2, 4, 8>(plan.vecs, [&](auto vecs) {
        const auto kernel = layer_norm_forward_warp_kernel<T, width(), vecs()>;
        return launch(kernel, plan, kForwardThreads, stream, params, plan.threads);
      });
    });
  });
}

cudaError_t launch_layer_norm_backward_warp(const BackwardParams& params, const DataTypes& types,
                                            const Plan& plan, cudaStream_t stream) {
  return dispatch_types(types, [&](auto t) {
    using T = decltype(t);
    return dispatch_width<T>(plan.width, [&](auto width) {
      return dispatch_vecs<1, 2, 4, 8>(plan.vecs, [&](auto vecs) -> cudaError_t {
        if constexpr (vecs() * width() <= kWarpBackwardColsPerLane) {
          const auto kernel = layer_norm_backward_warp_kernel<T, width(), vecs()>;
          return launch(kernel, plan, kBackwardThreads, stream, params, plan.threads,
                        plan.partials, plan.dparams_offset);
        } else {
          return cudaErrorInvalidValue;
        }
      });
    });
  });
}

}  // namespace fused_layernorm

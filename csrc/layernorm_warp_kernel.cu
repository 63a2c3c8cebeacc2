// Short rows: a warp, or a power-of-two part of one, holds a row in registers. Nothing but
// shuffles between the lanes.
#include "dispatch.h"
#include "launch.cuh"
#include "rows.cuh"

namespace fused_layernorm {
namespace {

// A power-of-two part of a warp.
struct LanesTeam {
  int lanes, lane;

  __device__ __forceinline__ int thread() const { return lane; }
  __device__ __forceinline__ int threads() const { return lanes; }
  template <typename Acc>
  __device__ __forceinline__ Acc sum(Acc v, int) const {
    return lanes_sum(v, lanes);
  }
  // The first lane has the row's first element.
  template <typename T, typename Acc>
  __device__ __forceinline__ Acc pivot(const ForwardRow<T>&, Acc first) const {
    return __shfl_sync(kFullWarp, first, 0, lanes);
  }
};

template <typename T, int kWidth, int kVecs, bool kFused>
__global__ void __launch_bounds__(kWarpForwardThreads)
    layer_norm_forward_warp_kernel(const ForwardParams p, const int log2_lanes) {
  const int lanes = 1 << log2_lanes;
  const LanesTeam team = {lanes, static_cast<int>(threadIdx.x) & (lanes - 1)};
  const int64_t groups = kWarpForwardThreads >> log2_lanes;
  forward_row<T, kWidth, kVecs, kFused>(p, team, blockIdx.x * groups + (threadIdx.x >> log2_lanes));
}

// One row's x and dy as they are loaded: the next row is on its way while one is worked on.
template <typename T, int kWidth, int kVecs>
struct LoadedGradientRow {
  using Acc = typename T::Acc;
  using X = typename T::X;
  using Y = typename T::Y;
  Vec<X, kWidth> x[kVecs];
  Vec<Y, kWidth> dy[kVecs];
  Acc mean, rstd;

  __device__ __forceinline__ LoadedGradientRow(const BackwardParams& p, int64_t row, int lane,
                                               int lanes, int vectors, bool reads_x)
      : x{}, dy{}, mean(0), rstd(0) {
    if (row >= p.rows) return;
    mean = static_cast<const Acc*>(p.mean)[row];
    rstd = static_cast<const Acc*>(p.rstd)[row];
    const X* x_row = static_cast<const X*>(p.x) + p.x_rows(row);
    const Y* dy_row = static_cast<const Y*>(p.dy) + p.dy_rows(row);
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      const int v = lane + k * lanes;
      if (v < vectors) {
        if (reads_x) x[k] = load_once<X, kWidth>(x_row + v * kWidth);
        dy[k] = load_once<Y, kWidth>(dy_row + v * kWidth);
      }
    }
  }
};

template <typename T, int kWidth, int kVecs, bool kEpilogue>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    layer_norm_backward_warp_kernel(const BackwardParams p, const int log2_lanes,
                                    const int partials, const int64_t dparams_offset) {
  using Acc = typename T::Acc;
  const int lanes = 1 << log2_lanes;
  const int groups = kBackwardThreads >> log2_lanes;
  const int lane = threadIdx.x & (lanes - 1);
  const int vectors = p.cols / kWidth;
  const int64_t group = int64_t{blockIdx.x} * groups + (threadIdx.x >> log2_lanes);
  const int64_t all_groups = int64_t{gridDim.x} * groups;
  const auto* weight = static_cast<const typename T::W*>(p.weight);
  const auto* bias = static_cast<const typename T::W*>(kEpilogue ? p.bias : nullptr);
  const bool reads_x = needs_x(p);
  const Acc inverse_cols = p.inverse_cols.as<Acc>();

  Acc dweight[kVecs][kWidth] = {};
  Acc dbias[kVecs][kWidth] = {};

  LoadedGradientRow<T, kWidth, kVecs> next(p, group, lane, lanes, vectors, reads_x);
  // The bound is the same for all lanes of a warp: each takes part in the shuffles.
  for (int64_t base = 0; base < p.rows; base += all_groups) {
    const int64_t row = base + group;
    const bool valid_row = row < p.rows;
    const LoadedGradientRow<T, kWidth, kVecs> now = next;
    next = LoadedGradientRow<T, kWidth, kVecs>(p, row + all_groups, lane, lanes, vectors, reads_x);
    Acc xhat[kVecs][kWidth], g[kVecs][kWidth];
    Pair<Acc> sums;
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      const int v = lane + k * lanes;
      if (valid_row && v < vectors) {
        Acc w[kWidth], b[kWidth];
        load_param(w, weight, v * kWidth, 1.0f);
        load_param(b, bias, v * kWidth, 0.0f);
        const Gradients<T, kWidth, kEpilogue> gradients(p, now.x[k], now.dy[k], now.mean, now.rstd,
                                                        w, b);
        gradients.add_sums(sums);
        gradients.add_dparams(dweight[k], dbias[k]);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          xhat[k][j] = gradients.xhat[j];
          g[k][j] = gradients.g[j];
        }
      }
    }
    if (p.dx == nullptr) continue;
    const Pair<Acc> means = {lanes_sum(sums.first, lanes) * inverse_cols,
                             lanes_sum(sums.second, lanes) * inverse_cols};
    if (!valid_row) continue;
    const DxRow<typename T::X> dx_row(p, row, 0);
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      const int v = lane + k * lanes;
      if (v < vectors) dx_row.store(v * kWidth, xhat[k], g[k], means, now.rstd);
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
  constexpr int kWarps = kBackwardThreads / kWarpSize;
  extern __shared__ __align__(16) unsigned char shared[];
  Acc* sums = reinterpret_cast<Acc*>(shared);  // [dweight, dbias][warp][cols]
  const int warp = threadIdx.x / kWarpSize;
  if (threadIdx.x % kWarpSize < lanes) {
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      const int v = lane + k * lanes;
      if (v < vectors) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          sums[warp * p.cols + v * kWidth + j] = dweight[k][j];
          sums[(kWarps + warp) * p.cols + v * kWidth + j] = dbias[k][j];
        }
      }
    }
  }
  __syncthreads();
  for (int col = threadIdx.x; col < p.cols; col += kBackwardThreads) {
    Acc dw[1] = {sums[col]};
    Acc db[1] = {sums[kWarps * p.cols + col]};
#pragma unroll
    for (int w = 1; w < kWarps; ++w) {
      dw[0] += sums[w * p.cols + col];
      db[0] += sums[(kWarps + w) * p.cols + col];
    }
    sink.store(col, dw, db);
  }
}

int log2_of(int power) {
  int log = 0;
  while (1 << log < power) ++log;
  return log;
}

}  // namespace

cudaError_t launch_layer_norm_forward_warp(const ForwardParams& params, const DataTypes& types,
                                           const Plan& plan, cudaStream_t stream) {
  return dispatch_types(types, [&](auto t) {
    using T = decltype(t);
    return dispatch_width<T>(plan.width, [&](auto width) {
      return dispatch_vecs<1, 2, 3, 4, 5, 8>(plan.vecs, [&](auto vecs) {
        return dispatch_bool<true>(is_fused(params), [&](auto fused) {
          const auto kernel = layer_norm_forward_warp_kernel<T, width(), vecs(), fused()>;
          return launch(kernel, plan, kWarpForwardThreads, stream, params, log2_of(plan.threads));
        });
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
        if constexpr (vecs() <= most_warp_backward_vecs(width())) {
          return dispatch_bool<true>(params.has_epilogue, [&](auto epilogue) {
            const auto kernel = layer_norm_backward_warp_kernel<T, width(), vecs(), epilogue()>;
            return launch(kernel, plan, kBackwardThreads, stream, params, log2_of(plan.threads),
                          plan.partials, plan.dparams_offset);
          });
        } else {
          return cudaErrorInvalidValue;
        }
      });
    });
  });
}

}  // namespace fused_layernorm

// Short rows: a warp, or a power-of-two part of one, holds a row in registers. Nothing but
// shuffles between the lanes.
#include "dispatch.h"
#include "launch.cuh"
#include "norm/rows.cuh"

namespace fused_layernorm {
namespace {

// A power-of-two part of a warp.
struct LanesTeam {
  // Registers that a thread may have for weight and bias while sums are taken (bfloat16: 12608 x
  // 768 11.5 us, read later 12.2; 1 x 768 1.5, 1.9; 32768 x 768 26.3, 26.9; 128 x 1024 2.2, 2.6).
  static constexpr int kMostEarlyWords = 32;
  static constexpr bool kWalks = false;  // 32768 x 1024 with GELU: 36.4 us, walked 37.3
  int lanes, lane;

  __device__ __forceinline__ int thread() const { return lane; }
  __device__ __forceinline__ int threads() const { return lanes; }
  template <typename Acc>
  __device__ __forceinline__ Acc sum(Acc v, int) const {
    return lanes_sum(v, lanes);
  }

  // The first lane has the row's first element, but a shuffle waits for the row, and with it the
  // loads of what comes behind (bfloat16: 32768 x 512 18.9 us, 18.3 with a load of its own; but
  // 4194304 x 64 float32 516 and 521, and 32768 x 1024 with a residual 67.4 and 69.2).
  template <int kVecs, Fusion kFusion>
  static constexpr bool kPivotFirst = false;
  template <bool kResidual, typename T>
  __device__ __forceinline__ auto pivot(const ForwardRow<T>& row, typename T::X first) const {
    if constexpr (sizeof(typename T::X) == 2 && !kResidual) {
      return row.template first_element<kResidual>();
    } else {
      return __shfl_sync(kFullWarp, to_acc(first), 0, lanes);
    }
  }

  // Between a row's vectors, lane to lane, and from the last lane on to the first: only the row's
  // two ends are seams.
  template <int kVecs, typename Words>
  struct Seams {
    const LanesTeam& team;
    Words begin, of_neighbour;  // of the first lane: of the last lane

    __device__ __forceinline__ explicit Seams(const LanesTeam& lanes_team) : team(lanes_team) {}
    // The last words of the vector before this lane's k-th, which has the words `first` to `last`.
    __device__ __forceinline__ Words before(int k, const Words& first, const Words& last) {
      Words words = of_neighbour;
      if (k == 0) begin = first;
      of_neighbour = shuffle(last, team.lane - 1, team.lanes);
      if (team.lane > 0) words = of_neighbour;
      return words;
    }
    __device__ __forceinline__ bool is_at(int k) const { return k == 0 && team.lane == 0; }
    // `store(v, low, high)` for each seam: what is before vector v, and its own beginning.
    template <typename Store>
    __device__ __forceinline__ void close(const Store& store) const {
      if (team.lane > 0) return;
      store(0, of_neighbour, begin);
      store(kVecs * team.lanes, of_neighbour, begin);
    }
  };
};

template <typename T, int kVecs, Fusion kFusion, bool kShifted>
__global__ void __launch_bounds__(kWarpForwardThreads)
    layer_norm_forward_warp_kernel(const ForwardParams p, const int log2_lanes) {
  const int lanes = 1 << log2_lanes;
  const LanesTeam team = {lanes, static_cast<int>(threadIdx.x) & (lanes - 1)};
  const uint32_t groups = kWarpForwardThreads >> log2_lanes;
  forward_row<T, kVecs, kFusion, kShifted>(p, team,
                                           blockIdx.x * groups + (threadIdx.x >> log2_lanes));
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

  __device__ __forceinline__ LoadedGradientRow(const BackwardParams& p, uint32_t row,
                                               const Share<kVecs, false>& share, bool reads_x)
      : x{}, dy{}, mean(0), rstd(0) {
    if (row >= static_cast<uint32_t>(p.rows)) return;
    mean = static_cast<const Acc*>(p.mean)[row];
    rstd = static_cast<const Acc*>(p.rstd)[row];
    const X* x_row = static_cast<const X*>(p.x) + p.x_rows(row);
    const Y* dy_row = static_cast<const Y*>(p.dy) + p.dy_rows(row);
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      const int col = share.template col<kWidth>(k);
      if (reads_x) x[k] = load<Use::kOnce, kWidth>(element(x_row, col));
      if (share.has(k)) dy[k] = load<Use::kOnce, kWidth>(element(dy_row, col));
    }
  }
};

template <typename T, Fusion kFusion>
constexpr int kWarpBackwardThreads =
    warp_backward_threads(sizeof(typename T::X), kFusion == Fusion::kEpilogue);

template <typename T, int kWidth, int kVecs, Fusion kFusion>
__global__ void __launch_bounds__(kWarpBackwardThreads<T, kFusion>, 1)
    layer_norm_backward_warp_kernel(const BackwardParams p, const int log2_lanes,
                                    const int partials, const int64_t dparams_offset) {
  using Acc = typename T::Acc;
  using W = typename T::W;
  using X = typename T::X;
  constexpr bool kMayActivate = kFusion != Fusion::kNone;
  constexpr bool kResidual = kFusion == Fusion::kResidual;
  extern __shared__ __align__(16) unsigned char shared[];
  const int lanes = 1 << log2_lanes;
  constexpr int kThreads = kWarpBackwardThreads<T, kFusion>;
  const int groups = kThreads >> log2_lanes;
  const int lane = threadIdx.x & (lanes - 1);
  const Share<kVecs, false> share = {lane, lanes, p.cols / kWidth};
  // Below 2^32: there are fewer than 2^31 rows, and far fewer groups.
  const uint32_t rows = static_cast<uint32_t>(p.rows);
  const uint32_t group = blockIdx.x * groups + (threadIdx.x >> log2_lanes);
  const uint32_t all_groups = gridDim.x * groups;
  const Parameter<W> weight(p.weight, 0, Otherwise::kOnes);
  const Parameter<W> bias(kMayActivate ? p.bias : nullptr, 0, Otherwise::kZeros);
  const bool reads_x = needs_x(p);
  const Acc inverse_cols = p.inverse_cols.as<Acc>();

  Acc dweight[kVecs][kWidth] = {};
  Acc dbias[kVecs][kWidth] = {};

  LoadedGradientRow<T, kWidth, kVecs> next(p, group, share, reads_x);
  // The bound is the same for all lanes of a warp: each takes part in the shuffles.
  for (uint32_t base = 0; base < rows; base += all_groups) {
    const uint32_t row = base + group;
    const bool valid_row = row < rows;
    const LoadedGradientRow<T, kWidth, kVecs> now = next;
    next = LoadedGradientRow<T, kWidth, kVecs>(p, row + all_groups, share, reads_x);
    const DxRow<X, kResidual> dx_row(p, valid_row ? row : 0, 0);
    Vec<X, kWidth> added[kVecs] = {};
    if constexpr (kResidual) {
#pragma unroll
      for (int k = 0; k < kVecs; ++k) {
        if (share.has(k)) added[k] = dx_row.template added<kWidth>(share.vector(k) * kWidth);
      }
    }
    // At vectors, and in rows, that are not there dy is zero, and so is what they add.
    Acc xhat[kVecs][kWidth], g[kVecs][kWidth];
    Pair<Acc> sums;
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      const int col = share.template col<kWidth>(k);
      const Gradients<T, kWidth, kMayActivate> gradients(p, now.x[k], now.dy[k], now.mean, now.rstd,
                                                         weight.template load<kWidth>(col),
                                                         bias.template load<kWidth>(col));
      gradients.add_sums(sums);
      gradients.add_dparams(dweight[k], dbias[k]);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        xhat[k][j] = gradients.xhat[j];
        g[k][j] = gradients.g[j];
      }
    }
    if (p.dx == nullptr) continue;
    const Pair<Acc> means = {lanes_sum(sums.first, lanes) * inverse_cols,
                             lanes_sum(sums.second, lanes) * inverse_cols};
    if (!valid_row) continue;
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      if (share.has(k)) {
        dx_row.store(share.vector(k) * kWidth, xhat[k], g[k], means, now.rstd, added[k]);
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
        dweight[k][j] += shuffle_xor(dweight[k][j], offset);
        dbias[k][j] += shuffle_xor(dbias[k][j], offset);
      }
    }
  }
  constexpr int kWarps = kThreads / kWarpSize;
  Acc* sums = reinterpret_cast<Acc*>(shared);  // [dweight, dbias][warp][cols]
  const int warp = threadIdx.x / kWarpSize;
  if (threadIdx.x % kWarpSize < lanes) {
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      const int col = share.vector(k) * kWidth;
      if (share.has(k)) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          sums[warp * p.cols + col + j] = dweight[k][j];
          sums[(kWarps + warp) * p.cols + col + j] = dbias[k][j];
        }
      }
    }
  }
  __syncthreads();
  for (int col = threadIdx.x; col < p.cols; col += kThreads) {
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
    if (plan.width != kVectorWidth<T>) return cudaErrorInvalidValue;
    return dispatch_vecs<1, 2, 3, 4>(plan.vecs, [&](auto vecs) {
      return dispatch_fusion(params, [&](auto fusion) {
        return dispatch_bool<true>(plan.shifted, [&](auto shifted) -> cudaError_t {
          constexpr bool kResidual = fusion() == Fusion::kResidual;
          if constexpr (vecs() > most_warp_forward_vecs(sizeof(typename T::X), kResidual)) {
            return cudaErrorInvalidValue;
          } else {
            const auto kernel = layer_norm_forward_warp_kernel<T, vecs(), fusion(), shifted()>;
            return launch(kernel, plan, kWarpForwardThreads, stream, params, log2_of(plan.threads));
          }
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
      const auto start = [&](auto vecs) {
        const auto start_fused = [&](auto fusion) {
          const auto kernel = layer_norm_backward_warp_kernel<T, width(), vecs(), fusion()>;
          return launch(kernel, plan, kWarpBackwardThreads<T, fusion()>, stream, params,
                        log2_of(plan.threads), plan.partials, plan.dparams_offset);
        };
        if constexpr (width() == 1) {
          return dispatch_any_fusion(params, start_fused);
        } else {
          return dispatch_fusion(params, start_fused);
        }
      };
      if constexpr (width() == 1) {
        return dispatch_vecs<4, 8>(plan.vecs, start);
      } else {
        return dispatch_vecs<2>(plan.vecs, start);
      }
    });
  });
}

}  // namespace fused_layernorm

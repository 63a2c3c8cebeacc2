// Backward of few rows, in one launch: blocks on columns compute dweight and dbias, and beside them
// blocks on rows dx. Both read x and dy, the second time from L2, but no partial sums are left to a
// second launch.
#include "dispatch.h"
#include "launch.cuh"
#include "norm/rows.cuh"

namespace fused_layernorm {
namespace {

// dweight and dbias: `kLanes` lanes side by side on the vectors of a line, the rest of the block on
// different rows. The order of the sums is fixed. `shared` holds a pair for each column of each
// warp.
template <typename T, int kWidth>
struct ColumnGradients {
  using Acc = typename T::Acc;
  using W = typename T::W;
  static constexpr int kLanes = column_lanes(kWidth, sizeof(typename T::X));
  static constexpr int kCols = kLanes * kWidth;

  template <bool kMayActivate>
  static __device__ __forceinline__ void run(const BackwardParams& p, int block, void* shared) {
    const int lane = threadIdx.x % kLanes;
    const int first_row = threadIdx.x / kLanes, row_step = blockDim.x / kLanes;
    const int first_col = block * kCols;
    const int vectors = p.cols / kWidth - block * kLanes;
    const int col = lane < vectors ? lane * kWidth : 0;
    const bool reads_x = needs_x(p);
    const auto weight =
        Parameter<W>(p.weight, first_col, Otherwise::kOnes).template load<kWidth>(col);
    const auto bias = Parameter<W>(kMayActivate ? p.bias : nullptr, first_col, Otherwise::kZeros)
                          .template load<kWidth>(col);
    Acc dweight[kWidth] = {}, dbias[kWidth] = {};
    // Several rows on their way at once, as many as have registers; but the code of the activations
    // is large.
    constexpr int kAtOnce = kMayActivate ? 1 : kWidth == 1 ? 8 : 2;
    for (int64_t row = first_row; row < p.rows; row += kAtOnce * row_step) {
      Vec<typename T::X, kWidth> x[kAtOnce] = {};
      Vec<typename T::Y, kWidth> dy[kAtOnce] = {};
      Acc mean[kAtOnce] = {}, rstd[kAtOnce] = {};
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int64_t r = row + i * row_step;
        if (r >= p.rows) continue;  // adds zero
        if (reads_x) {
          x[i] = load<Use::kAgain, kWidth>(static_cast<const typename T::X*>(p.x) + p.x_rows(r) +
                                           first_col + col);
        }
        dy[i] = load<Use::kAgain, kWidth>(static_cast<const typename T::Y*>(p.dy) + p.dy_rows(r) +
                                          first_col + col);
        mean[i] = static_cast<const Acc*>(p.mean)[r];
        rstd[i] = static_cast<const Acc*>(p.rstd)[r];
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        Gradients<T, kWidth, kMayActivate>(p, x[i], dy[i], mean[i], rstd[i], weight, bias)
            .add_dparams(dweight, dbias);
      }
    }
    // First the rows of a warp, then the warps.
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
#pragma unroll
      for (int offset = kLanes; offset < kWarpSize; offset *= 2) {
        dweight[j] += shuffle_xor(dweight[j], offset);
        dbias[j] += shuffle_xor(dbias[j], offset);
      }
    }
    const int warps = blockDim.x / kWarpSize, warp = threadIdx.x / kWarpSize;
    Pair<Acc>* sums = static_cast<Pair<Acc>*>(shared);  // [warp][column]
    if (threadIdx.x % kWarpSize < kLanes) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        sums[warp * kCols + lane * kWidth + j] = {dweight[j], dbias[j]};
      }
    }
    __syncthreads();
    const ParamGradSink<T> outputs(p, 0, 1, 0);
    for (int c = threadIdx.x; c < min(kCols, p.cols - first_col); c += blockDim.x) {
      Pair<Acc> sum = sums[c];
      for (int w = 1; w < warps; ++w) sum += sums[w * kCols + c];
      const Acc dw[1] = {sum.first}, db[1] = {sum.second};
      outputs.store(first_col + c, dw, db);
    }
  }
};

// The lanes of a warp or a part of it, or a group of warps, each as in the kernels for many rows: a
// row's dx is the same in any batch.
template <typename Acc>
struct Team {
  int threads, thread, index;  // index: of the team in its block
  bool by_lanes;

  __device__ __forceinline__ Team(int team_threads, bool lanes)
      : threads(team_threads),
        thread(threadIdx.x % team_threads),
        index(threadIdx.x / team_threads),
        by_lanes(lanes) {}
  __device__ __forceinline__ Pair<Acc> sum(Pair<Acc> sums, Pair<Acc>* scratch) const {
    if (by_lanes) return {lanes_sum(sums.first, threads), lanes_sum(sums.second, threads)};
    const Group group(threads);
    return group_sum(sums, group, scratch + index * scratch_values(group.warps()));
  }
};

// dx of one row by a team; a team without a row goes along with the last one for the sake of the
// others in its warp.
template <typename T, int kWidth, int kVecs, Fusion kFusion>
__device__ __forceinline__ void few_rows_dx(const BackwardParams& p, int team_threads,
                                            bool by_lanes, int block) {
  using Acc = typename T::Acc;
  using X = typename T::X;
  using Y = typename T::Y;
  using W = typename T::W;
  constexpr bool kMayActivate = kFusion != Fusion::kNone;
  // For all teams of a block, each of which has up to three values more than warps.
  __shared__ alignas(16) Pair<Acc> scratch[scratch_values(kBackwardThreads / kWarpSize * 4)];
  const Team<Acc> team(team_threads, by_lanes);
  const int64_t own_row = int64_t{block} * (blockDim.x / team_threads) + team.index;
  const int64_t row = min(own_row, p.rows - 1);
  const Share<kVecs, false> share = {team.thread, team.threads, p.cols / kWidth};
  const X* x_row = static_cast<const X*>(p.x) + p.x_rows(row);
  const Y* dy_row = static_cast<const Y*>(p.dy) + p.dy_rows(row);
  const DxRow<X, kFusion == Fusion::kResidual> dx_row(p, row, 0);
  const Parameter<W> weight(p.weight, 0, Otherwise::kOnes);
  const Parameter<W> bias(kMayActivate ? p.bias : nullptr, 0, Otherwise::kZeros);

  Vec<X, kWidth> x[kVecs];
  Vec<Y, kWidth> dy[kVecs];
#pragma unroll
  for (int k = 0; k < kVecs; ++k) {
    x[k] = load<Use::kAgain, kWidth>(element(x_row, share.template col<kWidth>(k)));
    dy[k] = load<Use::kAgain, kWidth>(element(dy_row, share.template col<kWidth>(k)));
    // With a dy of zero, a missing vector adds zero.
    if (!share.has(k)) dy[k] = {};
  }
  const Acc mean = static_cast<const Acc*>(p.mean)[row];
  const Acc rstd = static_cast<const Acc*>(p.rstd)[row];
  const auto gradients_of = [&](int k) {
    const int col = share.template col<kWidth>(k);
    return Gradients<T, kWidth, kMayActivate>(p, x[k], dy[k], mean, rstd,
                                              weight.template load<kWidth>(col),
                                              bias.template load<kWidth>(col));
  };
  Pair<Acc> sums;
#pragma unroll
  for (int k = 0; k < kVecs; ++k) gradients_of(k).add_sums(sums);
  sums = team.sum(sums, scratch);
  if (own_row >= p.rows) return;
  const Acc inverse_cols = p.inverse_cols.as<Acc>();
  const Pair<Acc> means = {sums.first * inverse_cols, sums.second * inverse_cols};
#pragma unroll
  for (int k = 0; k < kVecs; ++k) {
    if (!share.has(k)) continue;
    const auto gradients = gradients_of(k);
    const int col = share.vector(k) * kWidth;
    dx_row.store(col, gradients.xhat, gradients.g, means, rstd, dx_row.template added<kWidth>(col));
  }
}

// The blocks on columns come first, because they take longest.
template <typename T, int kWidth, int kVecs, Fusion kFusion>
__global__ void __launch_bounds__(kBackwardThreads, few_rows_blocks(kFusion != Fusion::kNone))
    layer_norm_backward_few_rows_kernel(const BackwardParams p, const int column_blocks,
                                        const int team_threads, const bool by_lanes) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int block = static_cast<int>(blockIdx.x) - column_blocks;
  if (block < 0) {
    ColumnGradients<T, kWidth>::template run<kFusion != Fusion::kNone>(p, blockIdx.x, shared);
  } else if (p.dx != nullptr) {
    few_rows_dx<T, kWidth, kVecs, kFusion>(p, team_threads, by_lanes, block);
  }
}

}  // namespace

cudaError_t launch_layer_norm_backward_few_rows(const BackwardParams& params,
                                                const DataTypes& types, const Plan& plan,
                                                cudaStream_t stream) {
  return dispatch_types(types, [&](auto t) {
    using T = decltype(t);
    return dispatch_width<T>(plan.width, [&](auto width) {
      const auto start = [&](auto vecs) {
        return dispatch_any_fusion(params, [&](auto fusion) {
          const bool by_lanes = plan.strategy == Strategy::kWarp;
          return launch(layer_norm_backward_few_rows_kernel<T, width(), vecs(), fusion()>, plan,
                        plan.threads * plan.groups, stream, params,
                        static_cast<int>(plan.column_blocks), plan.threads, by_lanes);
        });
      };
      constexpr int kBlockVecs = kKeptColsPerThread / width();
      if constexpr (width() == 1) {
        return dispatch_vecs<4, 8, kBlockVecs>(plan.vecs, start);
      } else if constexpr (kBlockVecs == 2 || std::is_same_v<typename T::X, double>) {
        return dispatch_vecs<2>(plan.vecs, start);
      } else {
        return dispatch_vecs<2, kBlockVecs>(plan.vecs, start);
      }
    });
  });
}

}  // namespace fused_layernorm

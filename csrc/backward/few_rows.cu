// SPDX-License-Identifier: Apache-2.0
// Backward of few rows, in one launch: blocks on columns compute dweight and dbias beside blocks on
// rows, which compute dx. x and dy are read twice, the second time from L2.
#include "backward/few_rows.h"
#include "backward/row_team.cuh"
#include "base/launch.cuh"
#include "norm/param_grad.cuh"

namespace fused_layernorm {
namespace {

// dweight and dbias of kCols columns, by one block. kLanes neighbouring threads have a vector each
// of these columns; the others have other rows. The order of the sums is fixed.
template <typename N, int kWidth>
struct ColumnGradients {
  using Acc = typename N::Acc;
  static constexpr int kLanes = column_lanes(kWidth, sizeof(typename N::X));
  static constexpr int kCols = kLanes * kWidth;

  // A single row needs no sums: each thread has one vector.
  static FUSED_DEVICE void run_single_row(const BackwardParams& p, int block) {
    const int vector = block * blockDim.x + threadIdx.x;
    if (vector >= p.cols / kWidth) return;
    const int col = vector * kWidth;
    Vec<typename N::X, kWidth> x = {};
    if (needs_x(p)) x = load<Use::kReadOnly, kWidth>(x_row_of<N>(p, 0, 0) + col);
    const auto dy = load<Use::kReadOnly, kWidth>(dy_row_of<N>(p, 0, 0) + col);
    const auto [mean, rstd] = load_statistics<Acc>(p, 0);
    const auto parameters = parameters_of<N>(p, 0);
    Acc dweight[kWidth] = {}, dbias[kWidth] = {};
    Gradients<N, kWidth>(p, x, dy, mean, rstd, parameters.factor.template load<kWidth>(col),
                         parameters.summand.template load<kWidth>(col))
        .add_dparams(dweight, dbias);
    ParamGradSink<N>(p, backward::PartialSums{}, 0).store(col, dweight, dbias);
  }

  // `shared` holds a pair for each column of each warp.
  static FUSED_DEVICE void run(const BackwardParams& p, int block, void* shared) {
    const int lane = threadIdx.x % kLanes;
    const int first_row = threadIdx.x / kLanes, row_step = blockDim.x / kLanes;
    const int first_col = block * kCols;
    const int vectors = p.cols / kWidth - block * kLanes;
    const int col = lane < vectors ? lane * kWidth : 0;
    const bool reads_x = needs_x(p);
    const auto parameters = parameters_of<N>(p, first_col);
    const auto weight = parameters.factor.template load<kWidth>(col);
    const auto bias = parameters.summand.template load<kWidth>(col);
    Acc dweight[kWidth] = {}, dbias[kWidth] = {};
    // Several rows are loaded at once, as many as there are registers for. With an activation only
    // one row is loaded, because the code of the activations is large.
    constexpr int kAtOnce = N::Epilogue::kMayActivate ? 1 : kWidth == 1 ? 8 : 2;
    for (int64_t row = first_row; row < p.rows; row += kAtOnce * row_step) {
      Vec<typename N::X, kWidth> x[kAtOnce] = {};
      Vec<typename N::Y, kWidth> dy[kAtOnce] = {};
      Pair<Acc> statistics[kAtOnce] = {};
      FUSED_UNROLL for (int i = 0; i < kAtOnce; ++i) {
        const int64_t r = row + i * row_step;
        if (r >= p.rows) continue;  // A row that does not exist adds zero.
        if (reads_x) x[i] = load<Use::kReadOnly, kWidth>(x_row_of<N>(p, r, first_col) + col);
        dy[i] = load<Use::kReadOnly, kWidth>(dy_row_of<N>(p, r, first_col) + col);
        statistics[i] = load_statistics<Acc>(p, r);
      }
      FUSED_UNROLL for (int i = 0; i < kAtOnce; ++i) {
        Gradients<N, kWidth>(p, x[i], dy[i], statistics[i].first, statistics[i].second, weight,
                             bias)
            .add_dparams(dweight, dbias);
      }
    }
    // First the rows of a warp are added up, then the warps.
    FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
      FUSED_UNROLL for (int offset = kLanes; offset < kWarpSize; offset *= 2) {
        dweight[j] += shuffle_xor(dweight[j], offset);
        dbias[j] += shuffle_xor(dbias[j], offset);
      }
    }
    const int warps = blockDim.x / kWarpSize, warp = threadIdx.x / kWarpSize;
    Pair<Acc>* sums = static_cast<Pair<Acc>*>(shared);  // [warp][column]
    if (threadIdx.x % kWarpSize < kLanes) {
      FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
        sums[warp * kCols + lane * kWidth + j] = {dweight[j], dbias[j]};
      }
    }
    __syncthreads();
    const ParamGradSink<N> outputs(p, backward::PartialSums{}, 0);
    for (int c = threadIdx.x; c < min(kCols, p.cols - first_col); c += blockDim.x) {
      Pair<Acc> sum = sums[c];
      for (int w = 1; w < warps; ++w) sum += sums[w * kCols + c];
      const Acc dw[1] = {sum.first}, db[1] = {sum.second};
      outputs.store(first_col + c, dw, db);
    }
  }
};

// dx of one row by a team. The team is the one that would work on the row if there were many rows,
// so a row's dx is the same in any batch. A team without a row of its own reads the last row and
// stores nothing, because the shuffles of the other teams in its warp need its lanes.
template <typename N, int kWidth, int kVecs>
FUSED_DEVICE void few_rows_dx(const BackwardParams& p, const TeamLayout& layout, int block) {
  using Acc = typename N::Acc;
  using X = typename N::X;
  using Y = typename N::Y;
  __shared__ alignas(16) Pair<Acc> scratch[kRowTeamScratch];
  const RowTeam<Acc> team(layout);
  const int64_t own_row = int64_t{block} * layout.teams + team.index;
  const int64_t row = min(own_row, p.rows - 1);
  const Share<kVecs> share = {team.thread, team.threads, p.cols / kWidth};
  const X* x_row = x_row_of<N>(p, row, 0);
  const Y* dy_row = dy_row_of<N>(p, row, 0);
  const DxRow<N> dx_row(p, row, 0);
  const auto parameters = parameters_of<N>(p, 0);

  Vec<X, kWidth> x[kVecs];
  Vec<Y, kWidth> dy[kVecs];
  FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
    x[k] = load<Use::kReadOnly, kWidth>(element(x_row, share.template col<kWidth>(k)));
    dy[k] = load<Use::kReadOnly, kWidth>(element(dy_row, share.template col<kWidth>(k)));
    // With a dy of zero, a missing vector adds zero.
    if (!share.has(k)) dy[k] = {};
  }
  const auto [mean, rstd] = load_statistics<Acc>(p, row);
  const auto gradients_of = [&](int k) {
    const int col = share.template col<kWidth>(k);
    return Gradients<N, kWidth>(p, x[k], dy[k], mean, rstd,
                                parameters.factor.template load<kWidth>(col),
                                parameters.summand.template load<kWidth>(col));
  };
  // xhat and g stay in registers between the row's sums and its dx, if there are enough.
  constexpr bool kKeep = few_rows_keep(kWidth, kVecs, sizeof(X), N::Epilogue::kMayActivate);
  KeptRow<N, kWidth, kKeep ? kVecs : 1> kept;
  Pair<Acc> sums;
  FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
    const auto gradients = gradients_of(k);
    gradients.add_sums(sums);
    if constexpr (kKeep) kept.keep(k, gradients);
  }
  sums = team.sum(sums, scratch);
  if (own_row >= p.rows) return;
  const Pair<Acc> means = means_of(p, sums);
  FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
    if (!share.has(k)) continue;
    const int col = share.vector(k) * kWidth;
    const auto added = dx_row.template added<kWidth>(col);
    if constexpr (kKeep) {
      dx_row.store(col, kept.xhat[k], kept.g[k], means, rstd, added);
    } else {
      const auto gradients = gradients_of(k);
      dx_row.store(col, gradients.xhat, gradients.g, means, rstd, added);
    }
  }
}

// The blocks on columns come first, because those of several rows take longest.
template <typename N, int kWidth, int kVecs>
__global__ void __launch_bounds__(kBackwardThreads,
                                  few_rows_blocks(kWidth, kVecs, N::Epilogue::kMayActivate))
    layer_norm_backward_few_rows_kernel(const int column_blocks, const TeamLayout layout,
                                        const BackwardParams p) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int block = static_cast<int>(blockIdx.x) - column_blocks;
  if (block < 0) {
    if (p.rows == 1) {
      ColumnGradients<N, kWidth>::run_single_row(p, blockIdx.x);
    } else {
      ColumnGradients<N, kWidth>::run(p, blockIdx.x, shared);
    }
  } else if (p.dx != nullptr) {
    few_rows_dx<N, kWidth, kVecs>(p, layout, block);
  }
}

}  // namespace

cudaError_t launch_layer_norm_backward(const BackwardParams& params, const DataTypes& types,
                                       const backward::FewRows& plan, cudaStream_t stream) {
  return dispatch_types_but_float64(types, [&](auto t) {
    using T = decltype(t);
    return dispatch_width<kVectorWidth<T>>(plan.width, [&](auto width) {
      using Vecs = FewRowsVecs<width(), sizeof(typename T::X)>;
      return dispatch_vecs(Vecs{}, plan.vecs, [&](auto vecs) {
        return dispatch_backward_shared<T>(params, [&](auto norm) {
          using N = decltype(norm);
          constexpr bool kFused = N::Epilogue::kMayActivate;
          constexpr bool kKeeps = width() * vecs() <= kKeptColsPerThread;
          if constexpr (!has_few_rows_kernel(kTypeOf<typename T::X>, kTypeOf<typename T::W>,
                                             kTypeOf<typename T::Y>, kFused, kKeeps)) {
            return cudaErrorInvalidValue;
          } else {
            return launch(layer_norm_backward_few_rows_kernel<N, width(), vecs()>, plan, stream,
                          static_cast<int>(plan.column_blocks),
                          TeamLayout(plan.threads, plan.team_threads, plan.by_lanes), params);
          }
        });
      });
    });
  });
}

}  // namespace fused_layernorm

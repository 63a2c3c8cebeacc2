// Backward of short rows: a logical warp (a power-of-two part of a warp) holds a row in registers,
// while the next row is on its way. Blocks are persistent, and each lane keeps the running dweight
// and dbias of its columns in registers.
#include "backward/running_param_grads.cuh"
#include "device/dependency.cuh"
#include "launch.cuh"

namespace fused_layernorm {
namespace {

// x and dy of a lane's share of one row.
template <typename N, int kWidth, int kVecs>
struct LoadedGradientRow {
  using Acc = typename N::Acc;
  Vec<typename N::X, kWidth> x[kVecs];
  Vec<typename N::Y, kWidth> dy[kVecs];
  Acc mean, rstd;

  // At vectors, and in rows, that do not exist dy is zero, and so is all that they add to sums.
  __device__ __forceinline__ LoadedGradientRow(const BackwardParams& p, uint32_t row,
                                               const Share<kVecs, false>& share, bool reads_x)
      : x{}, dy{}, mean(0), rstd(0) {
    if (row >= static_cast<uint32_t>(p.rows)) return;
    mean = static_cast<const Acc*>(p.mean)[row];
    rstd = static_cast<const Acc*>(p.rstd)[row];
    const auto* x_row = x_row_of<N>(p, row, 0);
    const auto* dy_row = dy_row_of<N>(p, row, 0);
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      const int col = share.template col<kWidth>(k);
      if (reads_x) x[k] = load<Use::kOnce, kWidth>(element(x_row, col));
      if (share.has(k)) dy[k] = load<Use::kOnce, kWidth>(element(dy_row, col));
    }
  }
};

// An activation that is sure to be there has a kernel of its own, with more threads.
template <typename N>
constexpr int kBlockThreads = backward_warp_threads(
    sizeof(typename N::X), N::Epilogue::kMayActivate && !N::Prologue::kMayAdd);

// The partial sums come as two numbers: as a struct they take three registers more (100000 x 143
// float32: 70.4 us, 68.9).
template <typename N, int kWidth, int kVecs>
__global__ void __launch_bounds__(kBlockThreads<N>, 1)
    layer_norm_backward_warp_kernel(const BackwardParams p, const int log2_lanes,
                                    const int partials, const int64_t partials_offset) {
  using Acc = typename N::Acc;
  using X = typename N::X;
  extern __shared__ __align__(16) unsigned char shared[];
  const int lanes = 1 << log2_lanes;
  constexpr int kThreads = kBlockThreads<N>;
  const int teams = kThreads >> log2_lanes;
  const int lane = threadIdx.x & (lanes - 1);
  const Share<kVecs, false> share = {lane, lanes, p.cols / kWidth};
  // A row number stays below 2^32: there are fewer than 2^31 rows, and far fewer teams.
  const uint32_t rows = static_cast<uint32_t>(p.rows);
  const uint32_t team = blockIdx.x * teams + (threadIdx.x >> log2_lanes);
  const uint32_t all_teams = gridDim.x * teams;
  const ColumnParameters<typename N::W> parameters = parameters_of<N>(p, 0);
  const bool reads_x = needs_x(p);
  const Acc inverse_cols = p.inverse_cols.as<Acc>();

  RunningParamGrads<Acc, kWidth, kVecs> grads;
  LoadedGradientRow<N, kWidth, kVecs> next(p, team, share, reads_x);
  // The bound is the same for all lanes of a warp, as each takes part in the shuffles.
  for (uint32_t base = 0; base < rows; base += all_teams) {
    const uint32_t row = base + team;
    const bool valid_row = row < rows;
    const LoadedGradientRow<N, kWidth, kVecs> now = next;
    next = LoadedGradientRow<N, kWidth, kVecs>(p, row + all_teams, share, reads_x);
    const DxRow<N> dx_row(p, valid_row ? row : 0, 0);
    Vec<X, kWidth> added[kVecs] = {};
    if constexpr (N::Prologue::kMayAdd) {
#pragma unroll
      for (int k = 0; k < kVecs; ++k) {
        if (share.has(k)) added[k] = dx_row.template added<kWidth>(share.vector(k) * kWidth);
      }
    }
    Acc xhat[kVecs][kWidth], g[kVecs][kWidth];
    Pair<Acc> sums;
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      const int col = share.template col<kWidth>(k);
      const Gradients<N, kWidth> gradients(p, now.x[k], now.dy[k], now.mean, now.rstd,
                                           parameters.weight.template load<kWidth>(col),
                                           parameters.bias.template load<kWidth>(col));
      gradients.add_sums(sums);
      gradients.add_dparams(grads.dweight[k], grads.dbias[k]);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        xhat[k][j] = gradients.xhat[j];
        g[k][j] = gradients.g[j];
      }
    }
    if (p.dx == nullptr) continue;
    const Pair<Acc> means = {logical_warp_sum(sums.first, lanes) * inverse_cols,
                             logical_warp_sum(sums.second, lanes) * inverse_cols};
    if (!valid_row) continue;
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      if (share.has(k)) {
        dx_row.store(share.vector(k) * kWidth, xhat[k], g[k], means, now.rstd, added[k]);
      }
    }
  }

  let_next_kernel_start();
  const ParamGradSink<N> sink(p, {partials, partials_offset}, blockIdx.x);
  if (!sink.wanted()) return;
  grads.template store_sum_of_logical_warps<kThreads / kWarpSize>(sink, share, lanes, p.cols,
                                                                  shared);
}

}  // namespace

cudaError_t launch_layer_norm_backward(const BackwardParams& params, const DataTypes& types,
                                       const backward::Warp& plan, cudaStream_t stream) {
  return dispatch_types(types, [&](auto t) {
    using T = decltype(t);
    return dispatch_width<kVectorWidth<T>>(plan.width, [&](auto width) {
      return dispatch_vecs(BackwardWarpVecs<width()>{}, plan.vecs, [&](auto vecs) {
        const auto start = [&](auto norm) -> cudaError_t {
          using N = decltype(norm);
          if (plan.threads != kBlockThreads<N>) return cudaErrorInvalidValue;
          return launch(layer_norm_backward_warp_kernel<N, width(), vecs()>, plan, stream, params,
                        log2_of(plan.lanes), plan.partials.count, plan.partials.offset);
        };
        if constexpr (width() == 1) {
          return dispatch_backward_shared<T>(params, start);
        } else {
          return dispatch_backward<T>(params, start);
        }
      });
    });
  });
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// Backward of short rows: a logical warp (a power-of-two part of a warp) holds a row in registers,
// while the next row is on its way. Blocks are persistent; each lane keeps the running dweight and
// dbias of its columns in registers, or dscale and dshift of one group of rows after the other. Of
// many rows it adds them to second sums in shared memory after each chain of `chain_rows` rows.
#include "backward/running_param_grads.cuh"
#include "backward/warp.h"
#include "base/launch.cuh"

namespace fused_layernorm {
namespace {

// x and dy of a lane's share of one row.
template <typename N, int kWidth, int kVecs>
struct LoadedGradientRow {
  using Acc = typename N::Acc;
  Vec<typename N::X, kWidth> x[kVecs];
  Vec<typename N::Y, kWidth> dy[kVecs];
  Acc mean, rstd;

  // Missing vectors, and rows that do not exist, have a dy of zero, so they add zero to all sums.
  FUSED_DEVICE LoadedGradientRow(const BackwardParams& p, uint32_t row, uint32_t rows,
                                 const Share<kVecs>& share, bool reads_x)
      : x{}, dy{}, mean(0), rstd(0) {
    if (row >= rows) return;
    const Pair<Acc> statistics = load_statistics<Acc>(p, row);
    mean = statistics.first;
    rstd = statistics.second;
    const auto* x_row = x_row_of<N>(p, row, 0);
    const auto* dy_row = dy_row_of<N>(p, row, 0);
    FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
      const int col = share.template col<kWidth>(k);
      if (reads_x) x[k] = load<Use::kReadOnly, kWidth>(element(x_row, col));
      if (share.has(k)) dy[k] = load<Use::kReadOnly, kWidth>(element(dy_row, col));
    }
  }
};

// The kernel for an epilogue alone always runs it, and in float32 has more threads.
template <typename N>
constexpr int kBlockThreads = backward_warp_threads(
    sizeof(typename N::X), N::Epilogue::kMayActivate && !N::Prologue::kMayAdd);

// Backward of the rows of a team, `from + team` and each `teams` rows further, below `to`: stores
// dx, and adds to the running sums. parameters_at(k, col) gives weight and bias at vector k.
template <typename N, int kWidth, int kVecs>
FUSED_DEVICE void backward_of_team(const BackwardParams& p, const Share<kVecs>& share, int lanes,
                                   uint32_t from, uint32_t to, uint32_t team, uint32_t teams,
                                   bool reads_x, int chain_rows, typename N::Acc* second_sums,
                                   RunningParamGrads<typename N::Acc, kWidth, kVecs>& grads,
                                   const auto& parameters_at) {
  using Acc = typename N::Acc;
  LoadedGradientRow<N, kWidth, kVecs> next(p, from + team, to, share, reads_x);
  // All lanes of a warp take part in the shuffles, so the bounds are the same for all of them.
  for (uint32_t base = from; base < to;) {
    if (base > from) grads.add_to(second_sums);
    const uint32_t chain_end = chain_rows > 0 ? min(to, base + chain_rows * teams) : to;
    for (; base < chain_end; base += teams) {
      const uint32_t row = base + team;
      const bool valid_row = row < to;
      const LoadedGradientRow<N, kWidth, kVecs> now = next;
      next = LoadedGradientRow<N, kWidth, kVecs>(p, row + teams, to, share, reads_x);
      const DxRow<N> dx_row(p, valid_row ? row : from, 0);
      Vec<typename N::X, kWidth> added[kVecs] = {};
      if constexpr (N::Prologue::kMayAdd) dx_row.load_added(added, share);
      KeptRow<N, kWidth, kVecs> kept;
      Pair<Acc> sums;
      FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
        const auto at = parameters_at(k, share.template col<kWidth>(k));
        const Gradients<N, kWidth> gradients(p, now.x[k], now.dy[k], now.mean, now.rstd, at.weight,
                                             at.bias);
        gradients.add_sums(sums);
        gradients.add_dparams(grads.dweight(k), grads.dbias(k));
        kept.keep(k, gradients);
      }
      if (p.dx == nullptr) continue;
      const Pair<Acc> means = means_of(p, logical_warp_sum(sums, lanes));
      if (valid_row) kept.store(dx_row, share, means, now.rstd, added);
    }
  }
}

// The kernel takes the partial sums' count and offset as two numbers, because the struct takes
// three registers more (100000 x 143 float32: 70.4 us with the struct, 68.9 with the numbers).
template <typename N, int kWidth>
__global__ void __launch_bounds__(kBlockThreads<N>, 1)
    layer_norm_backward_warp_kernel(const int log2_lanes, const int partials,
                                    const int64_t partials_offset, const int chain_rows,
                                    const int second_sums_offset, const BackwardParams p) {
  using Acc = typename N::Acc;
  using W = typename N::W;
  constexpr int kVecs = backward_warp_vecs(kWidth);
  extern __shared__ __align__(16) unsigned char shared[];
  const int lanes = 1 << log2_lanes;
  constexpr int kThreads = kBlockThreads<N>;
  const int teams = kThreads >> log2_lanes;
  const int lane = threadIdx.x & (lanes - 1);
  const Share<kVecs> share = {lane, lanes, p.cols / kWidth};
  // A row number stays below 2^32: there are fewer than 2^31 rows, and far fewer teams.
  const uint32_t rows = static_cast<uint32_t>(p.rows);
  const uint32_t team = blockIdx.x * teams + (threadIdx.x >> log2_lanes);
  const uint32_t all_teams = gridDim.x * teams;
  const ColumnParameters<typename N::W> parameters = parameters_of<N>(p, 0);
  const bool reads_x = needs_x(p);

  RunningParamGrads<Acc, kWidth, kVecs> grads;
  Acc* const second_sums = reinterpret_cast<Acc*>(shared + second_sums_offset);
  if (chain_rows > 0) grads.clear(second_sums);
  backward_of_team<N>(p, share, lanes, 0, rows, team, all_teams, reads_x, chain_rows, second_sums,
                      grads, [&](int, int col) {
                        return VectorParameters<W, W, kWidth>{
                            parameters.factor.template load<kWidth>(col),
                            parameters.summand.template load<kWidth>(col)};
                      });

  const ParamGradSink<N> sink(p, {partials, partials_offset}, blockIdx.x);
  if (!sink.wanted()) return;
  if (chain_rows > 0) grads.take(second_sums);
  grads.template store_sum_of_logical_warps<kThreads / kWarpSize>(sink, share, lanes, p.cols,
                                                                  shared);
}

// The kernel for rows with a modulation. A block has rows that follow each other, and all of its
// logical warps work on the same group at a time.
template <typename N>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    layer_norm_backward_group_warp_kernel(const int log2_lanes, const int parts,
                                          const int64_t parts_offset, const int chain_rows,
                                          const int second_sums_offset, const BackwardParams p) {
  using Acc = typename N::Acc;
  using W = typename N::W;
  constexpr int kWidth = kVectorWidth<typename N::Types>;
  constexpr int kVecs = backward_warp_vecs(kWidth);
  extern __shared__ __align__(16) unsigned char shared[];
  const int lanes = 1 << log2_lanes;
  const int teams = kBackwardThreads >> log2_lanes, team = threadIdx.x >> log2_lanes;
  const Share<kVecs> share = {static_cast<int>(threadIdx.x) & (lanes - 1), lanes, p.cols / kWidth};
  const GroupRange range(p, blockIdx.x, gridDim.x);
  const bool wanted = p.dscale || p.dshift || p.dweight || p.dbias;

  RunningParamGrads<Acc, kWidth, kVecs> grads;
  Acc* const second_sums = reinterpret_cast<Acc*>(shared + second_sums_offset);
  if (chain_rows > 0) grads.clear(second_sums);
  int64_t part = blockIdx.x + range.group_of(range.begin);
  for (uint32_t from = range.begin; from < range.end; ++part) {
    const uint32_t to = range.end_of_group(from);
    const auto scale = scale_of_row<N>(p, from);
    Vec<Acc, kWidth> weight[kVecs];
    FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
      const int col = share.template col<kWidth>(k);
      weight[k] = combined_weight<N, kWidth>(p, col, scale.template load<kWidth>(col));
    }
    backward_of_team<N>(
        p, share, lanes, from, to, team, teams, true, chain_rows, second_sums, grads,
        [&](int k, int) { return VectorParameters<Acc, W, kWidth>{weight[k], {}}; });
    if (wanted) {
      __syncthreads();  // No thread reads the previous group's sums any more.
      if (chain_rows > 0) grads.take(second_sums);
      grads.template store_sum_of_logical_warps<kBackwardThreads / kWarpSize>(
          PartSink<N>(p, {parts, parts_offset, false}, part), share, lanes, p.cols, shared);
      grads = {};
    }
    from = to;
  }
}

template <typename T>
cudaError_t launch_groups(const BackwardParams& params, const backward::Warp& plan,
                          cudaStream_t stream) {
  if constexpr (kIsFloat64<T>) {
    return cudaErrorInvalidValue;
  } else {
    using N = NormOf<T, MayAddGradient, Identity, MayBeAffineAndModulate>;
    return launch(layer_norm_backward_group_warp_kernel<N>, plan, stream, log2_of(plan.lanes),
                  plan.parts.partials.count, plan.parts.partials.offset, plan.chain_rows,
                  plan.second_sums_offset, params);
  }
}

}  // namespace

cudaError_t launch_layer_norm_backward(const BackwardParams& params, const DataTypes& types,
                                       const backward::Warp& plan, cudaStream_t stream) {
  const cudaError_t error = dispatch_types(types, [&](auto t) {
    using T = decltype(t);
    if (params.is_modulated) return launch_groups<T>(params, plan, stream);
    return dispatch_width<kVectorWidth<T>>(plan.width, [&](auto width) {
      const auto start = [&](auto norm) -> cudaError_t {
        using N = decltype(norm);
        if (plan.threads != kBlockThreads<N>) return cudaErrorInvalidValue;
        return launch(layer_norm_backward_warp_kernel<N, width()>, plan, stream,
                      log2_of(plan.lanes), plan.partials.count, plan.partials.offset,
                      plan.chain_rows, plan.second_sums_offset, params);
      };
      if constexpr (width() == 1) {
        return dispatch_backward_shared<T>(params, start);
      } else {
        return dispatch_backward<T>(params, start);
      }
    });
  });
  return error == cudaSuccess ? launch_sums(params, types, plan, stream) : error;
}

}  // namespace fused_layernorm

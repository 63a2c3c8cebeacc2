// SPDX-License-Identifier: Apache-2.0
// Backward of rows each of which has a modulation of its own (per token). No gradient is a sum over
// rows: a team stores all of its row's and ends; many small blocks keep memory busy.
#include "backward/row_team.cuh"
#include "backward/rows.h"
#include "base/launch.cuh"
#include "norm/param_grad.cuh"

namespace fused_layernorm {
namespace {

// A team without a row of its own reads the last row and stores nothing, because the shuffles of
// the other teams in its warp need its lanes.
template <typename N, int kWidth, int kVecs>
__global__ void __launch_bounds__(backward_rows_bounds(kVecs* kWidth, N::Prologue::kGated).threads,
                                  backward_rows_bounds(kVecs* kWidth, N::Prologue::kGated).blocks)
    layer_norm_backward_rows_kernel(const int team_threads, const bool by_lanes,
                                    const BackwardParams p) {
  using Acc = typename N::Acc;
  using X = typename N::X;
  using Y = typename N::Y;
  using W = typename N::W;
  constexpr bool kGated = N::Prologue::kGated;
  __shared__ alignas(16) Pair<Acc> scratch[kRowTeamScratch];
  const RowTeam<Acc> team(team_threads, by_lanes);
  const int64_t own_row = int64_t{blockIdx.x} * (blockDim.x / team_threads) + team.index;
  const int64_t row = min(own_row, p.rows - 1);
  const Share<kVecs> share = {team.thread, team.threads, p.cols / kWidth};
  const X* x_row = x_row_of<N>(p, row, 0);
  const Y* dy_row = dy_row_of<N>(p, row, 0);
  const DxRow<N> dx_row(p, row, 0);
  const auto scale = scale_of_row<N>(p, row);

  Vec<X, kWidth> x[kVecs], added[kVecs], input[kVecs] = {};
  Vec<Y, kWidth> dy[kVecs];
  FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
    const int col = share.template col<kWidth>(k);
    x[k] = load<Use::kReadOnly, kWidth>(element(x_row, col));
    dy[k] = load<Use::kReadOnly, kWidth>(element(dy_row, col));
    // With a dy of zero, a missing vector adds zero.
    if (!share.has(k)) dy[k] = {};
  }
  const auto load_beside = [&](int k) {
    const int col = share.template col<kWidth>(k);
    added[k] = dx_row.template added<kWidth>(col);
    if constexpr (kGated) {
      const X* input_row = static_cast<const X*>(p.input) + p.input_rows(row);
      input[k] = load<Use::kReadOnly, kWidth>(element(input_row, col));
    }
  };
  constexpr bool kEarly = backward_rows_load_early(kVecs * kWidth, kGated);
  if constexpr (kEarly) {
    FUSED_UNROLL for (int k = 0; k < kVecs; ++k) load_beside(k);
  }
  const auto [mean, rstd] = load_statistics<Acc>(p, row);
  const auto gradients_of = [&](int k) {
    const int col = share.template col<kWidth>(k);
    const auto weight = combined_weight<N, kWidth>(p, col, scale.template load<kWidth>(col));
    return Gradients<N, kWidth>(p, x[k], dy[k], mean, rstd, weight, Vec<W, kWidth>{});
  };
  Pair<Acc> sums;
  FUSED_UNROLL for (int k = 0; k < kVecs; ++k) gradients_of(k).add_sums(sums);
  const Pair<Acc> means = means_of(p, team.sum(sums, scratch));
  if (own_row >= p.rows) return;
  FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
    if (!share.has(k)) continue;
    const int col = share.vector(k) * kWidth;
    const auto gradients = gradients_of(k);
    store_row_modulation(p, row, col, gradients);
    if (!kGated && p.dx == nullptr) continue;
    if constexpr (!kEarly) load_beside(k);
    Acc dx[kWidth];
    dx_row.compute(dx, gradients.xhat, gradients.g, means, rstd, added[k]);
    if (!kGated || p.dx != nullptr) store_once(element(dx_row.dx, col), round_to<X>(dx));
    if constexpr (kGated) {
      const auto gate =
          row_parameter<W>(p.modulation.gate, p.modulation.gate_rows, row, 0, Absent::kOnes);
      store_row_gate(p, row, col, dx, input[k], gate.template load<kWidth>(col));
    }
  }
}

}  // namespace

cudaError_t launch_layer_norm_backward(const BackwardParams& params, const DataTypes& types,
                                       const backward::Rows& plan, cudaStream_t stream) {
  return dispatch_types_but_float64(types, [&](auto t) {
    using T = decltype(t);
    return dispatch_width<kVectorWidth<T>>(plan.width, [&](auto width) {
      return dispatch_vecs(BackwardRowsVecs<width()>{}, plan.vecs, [&](auto vecs) {
        // Where single elements are moved, the gate's gradient has a kernel of its own (gate.cu).
        return dispatch_bool<(width() > 1)>(params.modulation.gate != nullptr, [&](auto gated) {
          using Prologue = std::conditional_t<gated(), GatedGradient, MayAddGradient>;
          using N = NormOf<T, Prologue, Identity, MayBeAffineAndModulate>;
          return launch(layer_norm_backward_rows_kernel<N, width(), vecs()>, plan, stream,
                        plan.team_threads, plan.by_lanes, params);
        });
      });
    });
  });
}

}  // namespace fused_layernorm

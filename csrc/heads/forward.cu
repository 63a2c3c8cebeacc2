// SPDX-License-Identifier: Apache-2.0
// Forward of heads: each row of q and k is normalized, then rotated, and each of v copied
// (heads/plan.h).
#include "heads/plan.h"

#include "base/launch.cuh"
#include "heads/rotation.cuh"

namespace fused_layernorm {
namespace {

// z = xhat * weight + bias, in place of the row's values.
template <typename Lane>
FUSED_DEVICE void normalize_head(const HeadsParams& p, const HeadSide& side, const Lane& lane,
                                 typename Lane::Values& values) {
  lane.center(p, values);
  const float m2 = logical_warp_sum(lane.squares(values), p.lanes);
  const float rstd = MeanAndVariance::rstd(m2, p.inverse_cols.as<float>(), p.eps);
  lane.each([&](int v, int j) { values[v][j] *= rstd; });
  if (side.rounds) lane.round(values);
  // It is loaded for each row: registers that held it would leave room for fewer blocks.
  typename Lane::Values weight;
  lane.load_weight(weight, p, side);
  lane.each([&](int v, int j) { values[v][j] *= weight[v][j]; });
  if (side.bias != nullptr) {
    typename Lane::Values bias;
    lane.load_parameter(bias, side.bias, side.bias_is_float, 0);
    lane.each([&](int v, int j) { values[v][j] += bias[v][j]; });
  }
  if (side.rounds) lane.round(values);
}

template <typename Lane>
__global__ void __launch_bounds__(forward::kHeadThreads, forward::kHeadBlocks)
    heads_forward_kernel(const HeadsParams p) {
  using X = typename Lane::X;
  constexpr int kRounds = forward::task_rounds(Lane::kWidth);
  unsigned block;
  const HeadSide& side = side_of_block(p, block);
  const Lane lane(p);
  const HeadTask task(p, side, kRounds, block * forward::kHeadWarps + threadIdx.x / kWarpSize);

  Vec<X, Lane::kWidth> x[kRounds][Lane::kVecs];
  FUSED_UNROLL for (int round = 0; round < kRounds; ++round) {
    const X* row = head_row(static_cast<const X*>(side.x), side, side.x_strides, task,
                            task.head_of(side, round));
    const bool has = task.has_row(side, round) && side.x != nullptr;
    lane.template load_row<Use::kOnce>(x[round], row, has);
  }
  const auto to = [&](int round) {
    return head_row(static_cast<X*>(side.y), side, side.y_strides, task, task.head_of(side, round));
  };
  if (side.copies) {
    FUSED_UNROLL for (int round = 0; round < kRounds; ++round) {
      if (task.has_row(side, round)) lane.copy_row(to(round), x[round]);
    }
    return;
  }
  const Rotation<Lane> rotation(p, lane, task.batch, task.seq);
  FUSED_UNROLL for (int round = 0; round < kRounds; ++round) {
    typename Lane::Values values;
    FUSED_UNROLL for (int v = 0; v < Lane::kVecs; ++v) unpack(values[v], x[round][v]);
    if (p.statistic != HeadStatistic::kNone) normalize_head(p, side, lane, values);
    if (p.rotary > 0) rotation.apply(values);
    if (task.has_row(side, round)) lane.store_row(to(round), values);
  }
}

}  // namespace

cudaError_t launch_heads_forward(const HeadsParams& params, const forward::Heads& plan,
                                 cudaStream_t stream) {
  return dispatch_heads(params, plan.width, [&](auto of) {
    return launch(heads_forward_kernel<typename decltype(of)::Lane>, plan, stream, params);
  });
}

}  // namespace fused_layernorm

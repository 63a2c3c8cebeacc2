// SPDX-License-Identifier: Apache-2.0
// Forward of heads: each row of q and k is normalized, then rotated (heads/plan.h). It is also the
// backward of a rotation alone, which copies v's gradient.
#include "heads/plan.h"

#include "base/launch.cuh"
#include "heads/rotation.cuh"

namespace fused_layernorm {
namespace {

// z = xhat * weight + bias, in place of the row's values.
template <typename Lane>
FUSED_DEVICE void normalize_head(const HeadsCall& p, const HeadSide& side, const Lane& lane,
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

template <typename Lane, typename Params>
__global__ void __launch_bounds__(forward::kHeadThreads, forward::kHeadBlocks)
    heads_forward_kernel(const Params p) {
  using X = typename Lane::X;
  constexpr int kRounds = forward::task_rounds(Lane::kWidth);
  const SideOfBlock<Params> of(p);
  const HeadSide& side = of.side();
  const Lane lane(p);
  const unsigned block = of.block();
  const HeadTask task(p, side, kRounds, block * forward::kHeadWarps + threadIdx.x / kWarpSize);

  Vec<X, Lane::kWidth> x[kRounds][Lane::kVecs];
  FUSED_UNROLL for (int round = 0; round < kRounds; ++round) {
    const X* row = of.row(static_cast<const X*>(side.x), side.x_strides, task,
                          task.head_of(side, round), &PackedHeadsParams::x_group);
    bool has = task.has_row(side, round);
    if constexpr (SideOfBlock<Params>::kPacked) has = has && side.x != nullptr;
    lane.template load_row<Use::kOnce>(x[round], row, has);
  }
  if (of.copies(side.x)) {
    FUSED_UNROLL for (int round = 0; round < kRounds; ++round) {
      if (!task.has_row(side, round)) continue;
      X* row = of.row(static_cast<X*>(side.y), side.y_strides, task, task.head_of(side, round),
                      &PackedHeadsParams::y_group);
      lane.copy_row(row, x[round]);
    }
    return;
  }
  const Rotation<Lane> rotation(p, lane, task.batch, task.seq);
  FUSED_UNROLL for (int round = 0; round < kRounds; ++round) {
    typename Lane::Values values;
    FUSED_UNROLL for (int v = 0; v < Lane::kVecs; ++v) unpack(values[v], x[round][v]);
    if (p.statistic != HeadStatistic::kNone) normalize_head(p, side, lane, values);
    if (p.rotary > 0) rotation.apply(values);
    if (task.has_row(side, round)) {
      X* row = of.row(static_cast<X*>(side.y), side.y_strides, task, task.head_of(side, round),
                      &PackedHeadsParams::y_group);
      lane.store_row(row, values);
    }
  }
}

}  // namespace

cudaError_t launch_heads_forward(const HeadsParams& params, const forward::Heads& plan,
                                 cudaStream_t stream) {
  return dispatch_heads(params, plan.width, [&](auto of) {
    using Lane = typename decltype(of)::Lane;
    return launch(heads_forward_kernel<Lane, HeadsParams>, plan, stream, params);
  });
}

cudaError_t launch_heads_forward(const PackedHeadsParams& params, const forward::Heads& plan,
                                 cudaStream_t stream) {
  return dispatch_heads(params, plan.width, [&](auto of) {
    using Lane = typename decltype(of)::Lane;
    return launch(heads_forward_kernel<Lane, PackedHeadsParams>, plan, stream, params);
  });
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// The strategy "warp": a logical warp (a power-of-two part of a warp) holds a row in registers.
#pragma once

#include "forward/row.h"

namespace fused_layernorm {

using ForwardWarpVecs = VecsList<1, 2, 3, 4>;
static_assert(contains(ForwardWarpVecs{}, most_forward_warp_vecs(2, true)) &&
                  contains(ForwardWarpVecs{}, most_forward_warp_vecs(4, false)),
              "a lane owns no more vectors than there are kernels for");
static_assert(kForwardWarpThreads % kWarpThreads == 0,
              "every lane of a logical warp takes part in its shuffles");
// The lanes of a logical warp in which each lane has one vector of an aligned row of 64 columns are
// a template constant (kLanes); 0 stands for kernels that take them as an argument.
constexpr int one_vector_lanes(int x_size) { return 64 / vector_width(x_size); }
template <int kXSize>
using OneVectorLanes = VecsList<0, one_vector_lanes(kXSize)>;

namespace forward {

struct Warp : InRegisters {
  static constexpr const char* kName = "warp";
  int vecs = 1;   // vectors of a row that a lane owns
  int lanes = 1;  // on one row
  Moves moves = Moves::kVectors;

  static std::optional<Warp> make(const Problem& problem, const Device& device,
                                  const Forced& forced);
  template <typename Json>
  void describe(Json& json) const {
    json.add("stays_in_l2", stays_in_l2).add("vecs", vecs).add("lanes", lanes).add("moves", moves);
  }
};

inline const LaneVecs& lane_vecs(const Problem& problem, const Device& device, int64_t vectors) {
  const ForwardTuning& tuning = tuning_of(device);
  const bool is_float32 = size_of(problem.x) == 4;
  const auto& rule = !is_float32
                         ? problem.has_epilogue ? tuning.half_epilogue_lanes : tuning.half_lanes
                     : problem.has_epilogue ? tuning.float32_epilogue_lanes
                     : problem.residual     ? tuning.float32_residual_lanes
                                            : tuning.float32_lanes;
  return rule.at(vectors);
}

// The lanes of a row of `vectors` vectors of which each lane has about `vecs`.
inline Lanes lanes_for(int64_t vectors, int vecs) {
  const int64_t lanes = std::min<int64_t>(kWarpThreads, power_of_two_from(ceil_div(vectors, vecs)));
  return {static_cast<int>(ceil_div(vectors, lanes)), static_cast<int>(lanes)};
}

inline std::optional<Lanes> lanes_of(const Problem& problem, const Device& device,
                                     const Forced& forced) {
  if (!has_kernels_on_chip(problem)) return std::nullopt;
  const int64_t vectors = vectors_of(problem);
  const int most = most_forward_warp_vecs(size_of(problem.x), problem.residual);
  if (vectors > int64_t{kWarpThreads} * most) return std::nullopt;
  const LaneVecs& wanted = lane_vecs(problem, device, vectors);
  Lanes lanes = lanes_for(vectors, forced.value_or(Field::kVecs, std::min(most, wanted.vecs)));
  const bool compares = wanted.choice == Choice::kFewestPlaces && !forced.has(Field::kVecs);
  for (int vecs = 1; compares && vecs <= most; ++vecs) {
    const Lanes other = lanes_for(vectors, vecs);
    if (other.vecs <= most && other.vecs * other.lanes < lanes.vecs * lanes.lanes) lanes = other;
  }
  if (lanes.vecs > most || !forced.allows(Field::kVecs, lanes.vecs)) return std::nullopt;
  return lanes;
}

inline std::optional<Warp> Warp::make(const Problem& problem, const Device& device,
                                      const Forced& forced) {
  if (!forced.allows(kName, {Field::kVecs})) return std::nullopt;
  const auto lanes = lanes_of(problem, device, forced);
  if (!lanes) return std::nullopt;
  Warp plan;
  plan.stays_in_l2 = rows_stay_in_l2(problem, device);
  plan.vecs = lanes->vecs;
  plan.lanes = lanes->lanes;
  plan.moves = moves_of(problem);
  plan.threads = kForwardWarpThreads;
  plan.blocks = ceil_div(problem.rows, kForwardWarpThreads / plan.lanes);
  return plan;
}

}  // namespace forward

ForwardLaunch<forward::Warp> launch_layer_norm_forward;

}  // namespace fused_layernorm

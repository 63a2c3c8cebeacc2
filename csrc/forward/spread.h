// SPDX-License-Identifier: Apache-2.0
// The strategy "spread", for few short rows with nothing fused: a row of a logical warp, spread
// over several warps; warp w has vector w of each lane. Or one warp has all vectors of each lane.
// The sums are taken in the order of the logical warp.
#pragma once

#include "forward/warp.h"

namespace fused_layernorm {
namespace forward {

struct Spread : InRegisters {
  static constexpr const char* kName = "spread";
  int lanes = 1;        // of a logical warp, on one row
  int warps = 1;        // on the same rows
  int thread_vecs = 1;  // vectors of a row that a thread owns; follows from the lanes

  static std::optional<Spread> make(const Problem& problem, const Device& device,
                                    const Forced& forced);
  template <typename Json>
  void describe(Json& json) const {
    json.add("stays_in_l2", stays_in_l2)
        .add("lanes", lanes)
        .add("warps", warps)
        .add("thread_vecs", thread_vecs);
  }
};

}  // namespace forward

cudaError_t launch_layer_norm_forward(const ForwardParams&, const DataTypes&,
                                      const forward::Spread&, cudaStream_t);

// ---- Limits.

// As many warps as a lane of the logical warp has vectors; one warp has one of them.
constexpr int kMostSpreadVecs = 4;
using SpreadWarpCounts = VecsList<1, 2, 3, kMostSpreadVecs>;
static_assert(kMostSpreadVecs >= most_forward_warp_vecs(2, false) &&
                  kMostSpreadVecs >= most_forward_warp_vecs(4, false),
              "all rows of logical warps can be spread");
// Or one warp keeps all vectors of its lanes, if a lane has no more vectors than this and the
// logical warp has 8 or 16 lanes, as rows of 64 to 128 columns do (64 x 512 bfloat16: spread 1.44
// us, staying 1.48; 64 x 128 float32 1.46, 1.37). It then knows its lanes: kLanes is a template
// constant, as it is where a whole warp shares a row; elsewhere (0) it is an argument.
constexpr int kMostStayingVecs = 2;
using StayingVecs = VecsList<1, kMostStayingVecs>;
constexpr bool may_stay_in_warp(int x_size, int lanes, int vecs) {
  if (vecs == 1) return lanes == one_vector_lanes(x_size);
  return vecs == kMostStayingVecs && (lanes == 8 || lanes == 16);
}
using SpreadLanes = VecsList<0, 8, 16, kWarpThreads>;
constexpr int known_lanes(int lanes, int warps) {
  return warps == 1 || lanes == kWarpThreads ? lanes : 0;
}
// Whether there is a kernel for rows of logical warps of `lanes` lanes, known or any (0), on which
// `warps` warps work, with `vecs` vectors a thread. There is none that no ladder of lanes leads to:
// with fewer than 32 lanes, a lane that one warp does not keep has three vectors.
constexpr bool has_spread_kernel(int x_size, int lanes, int warps, int vecs) {
  if (lanes != known_lanes(lanes, warps)) return false;
  if (warps == 1) return may_stay_in_warp(x_size, lanes, vecs);
  return vecs == 1 && (lanes == kWarpThreads || warps == 3);
}
// Threads of a block. Where rows stay in their logical warps, as many as in forward/warp.cu.
constexpr int spread_threads(int warps) {
  return warps == 1 ? kForwardWarpThreads : warps * kWarpThreads;
}

// The most bytes of x that are spread over `warps` warps, or stay in one that knows its lanes. The
// times are those of such rows and of logical warps.
// One warp, bfloat16: 256 x 128 1.43, 1.68; not so: 512 x 128 2.06, 1.94. Several, bfloat16: 64 x
// 768 1.63, 1.94; not spread: 64 x 1024 2.12, 2.05.
constexpr int64_t most_spread_bytes(int warps) { return int64_t{warps == 1 ? 64 : 96} << 10; }

namespace forward {

inline std::optional<Spread> Spread::make(const Problem& problem, const Device& device,
                                          const Forced& forced) {
  const bool allowed = forced.allows(kName, {}) && is_bare(problem) && problem.aligned &&
                       is_one_type(problem.x, problem.weight, problem.y);
  const auto lanes = allowed ? lanes_of(problem, forced) : std::nullopt;
  if (!lanes) return std::nullopt;
  const int x_size = size_of(problem.x);
  Spread plan;
  plan.stays_in_l2 = rows_stay_in_l2(problem, device);
  plan.lanes = lanes->lanes;
  const bool stays = may_stay_in_warp(x_size, plan.lanes, lanes->vecs);
  (stays ? plan.thread_vecs : plan.warps) = lanes->vecs;
  const int known = known_lanes(plan.lanes, plan.warps);
  if (!has_spread_kernel(x_size, known, plan.warps, plan.thread_vecs)) return std::nullopt;
  const bool is_few = problem.rows * problem.cols * x_size <= most_spread_bytes(plan.warps);
  if (!is_few && forced.strategy.empty()) return std::nullopt;
  plan.threads = spread_threads(plan.warps);
  plan.blocks = ceil_div(problem.rows, plan.threads / plan.warps / plan.lanes);
  return plan;
}
}  // namespace forward
}  // namespace fused_layernorm

// A team that works on one row and keeps nothing for a next one: the lanes of a logical warp, or
// whole warps.
#pragma once

#include "device/reduce.cuh"

namespace fused_layernorm {

// The scratch memory, in pairs, that team_sum() needs for all teams of a block. A team needs up to
// three pairs more than it has warps.
constexpr int kRowTeamScratch = scratch_values(kBackwardThreads / kWarpSize * 4);

template <typename Acc>
struct RowTeam {
  int threads, thread, index;  // index: of the team in its block
  bool by_lanes;

  __device__ __forceinline__ RowTeam(int team_threads, bool lanes)
      : threads(team_threads),
        thread(threadIdx.x % team_threads),
        index(threadIdx.x / team_threads),
        by_lanes(lanes) {}
  __device__ __forceinline__ Pair<Acc> sum(Pair<Acc> sums, Pair<Acc>* scratch) const {
    if (by_lanes) {
      return {logical_warp_sum(sums.first, threads), logical_warp_sum(sums.second, threads)};
    }
    const BlockTeam team(threads);
    return team_sum(sums, team, scratch + index * scratch_values(team.warps()));
  }
};

}  // namespace fused_layernorm

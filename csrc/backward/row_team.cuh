// The threads on one row where a block has rows of its own and keeps nothing for the next: the
// lanes of a logical warp, or whole warps.
#pragma once

#include "device/reduce.cuh"

namespace fused_layernorm {

// Pairs that team_sum() takes for all teams of a block, each of which has up to three more than
// warps.
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

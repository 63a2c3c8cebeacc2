// SPDX-License-Identifier: Apache-2.0
// A team for one row, which keeps nothing for a next one: a logical warp, or whole warps.
#pragma once

#include "backward/teams.h"
#include "device/reduce.cuh"

namespace fused_layernorm {

// Pairs for team_sum() in all teams of a block: a team needs up to three more than it has warps.
constexpr int kRowTeamScratch = scratch_values(kBackwardThreads / kWarpSize * 4);

// How the threads of a block of few rows are laid out as teams: an argument of kernels. A thread
// finds its team by a multiplication, because a division by a run-time number takes 0.1 us.
struct TeamLayout {
  int team_threads;
  int teams;            // of a block
  uint32_t reciprocal;  // 2^kShift / team_threads, rounded up
  bool by_lanes;        // a team is a logical warp

  static constexpr int kShift = 20;
  static_assert(kBackwardThreads * kBackwardThreads < 1 << kShift,
                "the rounding of the reciprocal changes no thread's team");

  TeamLayout(int block_threads, int threads, bool lanes)
      : team_threads(threads),
        teams(block_threads / threads),
        reciprocal(((1u << kShift) + threads - 1) / threads),
        by_lanes(lanes) {}
};

template <typename Acc>
struct RowTeam {
  int threads, thread, index;  // index: of the team in its block
  bool by_lanes;

  // By divisions. Where there are many rows, other warps work meanwhile, and without the divisions
  // kernels for many rows would spill registers.
  FUSED_DEVICE RowTeam(int team_threads, bool lanes)
      : threads(team_threads),
        thread(threadIdx.x % team_threads),
        index(threadIdx.x / team_threads),
        by_lanes(lanes) {}
  FUSED_DEVICE explicit RowTeam(const TeamLayout& layout)
      : threads(layout.team_threads),
        index(threadIdx.x * layout.reciprocal >> TeamLayout::kShift),
        by_lanes(layout.by_lanes) {
    thread = threadIdx.x - index * threads;
  }

  FUSED_DEVICE Pair<Acc> sum(Pair<Acc> sums, Pair<Acc>* scratch) const {
    if (by_lanes) return logical_warp_sum(sums, threads);
    const BlockTeam team(threads, index);
    return team_sum(sums, team, scratch + index * scratch_values(team.warps()));
  }
};

}  // namespace fused_layernorm

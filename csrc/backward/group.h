// SPDX-License-Identifier: Apache-2.0
// The strategy "group", for modulated rows: a block has whole rows, of one group after the other.
#pragma once

#include "backward/teams.h"

namespace fused_layernorm {

// Blocks with groups of rows keep rows as the blocks above do. They have no kernels for float64,
// nor without a ring for rows that they do not keep.
constexpr bool has_group_kernel(int width, int x_size, bool bulk, bool keeps) {
  return bulk ? has_ring_kernels(width, x_size, false) : x_size != 8 && keeps;
}

// Whether a thread of such a block keeps xhat and g of a row in registers. Beside a gate, whose
// third running sum takes those registers, they are computed again.
constexpr bool group_holds_row(bool keeps, bool gated) { return keeps && !gated; }

// Whether such blocks also compute the gradient of a gate. For longer rows, and for unaligned
// ones, a kernel of its own does (backward/gate.cu).
constexpr bool has_gated_kernel(int width, int x_size, bool bulk, bool keeps) {
  return x_size != 8 && bulk && keeps && width > 1;
}

namespace backward {

struct Group : Persistent {
  static constexpr const char* kName = "group";
  GroupParts parts;
  int sums_offset = 0;  // in shared memory: where the teams of a block add up their sums

  static std::optional<Group> make(const Problem& problem, const Device& device,
                                   const Forced& forced);
  template <typename Json>
  void describe(Json& json) const {
    Persistent::describe(json);
    json.add(parts);
  }
};

inline std::optional<Group> Group::make(const Problem& problem, const Device& device,
                                        const Forced& forced) {
  const int x_size = size_of(problem.x);
  const bool allowed =
      forced.allows(kName, {Field::kVecs, Field::kTeams, Field::kBulk, Field::kStages});
  if (!allowed || !problem.modulated || is_of_rows(problem) ||
      problem.cols > int64_t{kBackwardThreads} * kBackwardColsPerThread) {
    return std::nullopt;
  }
  const auto team = team_of(problem, static_cast<int>(problem.cols), kBackwardThreads, 1, forced);
  if (!team) return std::nullopt;
  // A team that reads its row twice has a block of its own.
  const int most_teams =
      team->keeps ? std::clamp(kBackwardThreads / team->threads, 1, kMostTeams) : 1;
  const auto sums_of = [&](int teams) { return teams > 1 ? teams * team->sums_bytes : 0; };
  const auto stages_of = [&](int teams) {
    return stages_in(room_of(device) - team->param_bytes - sums_of(teams),
                     team->stage_bytes * teams);
  };
  const int64_t rows_of_block = ceil_div(problem.rows, device.sms);
  int teams = static_cast<int>(std::min<int64_t>(most_teams, rows_of_block));
  teams = forced.value_or(Field::kTeams, teams);
  while (!forced.has(Field::kTeams) && teams > 1 && stages_of(teams) < kKeptRowStages) --teams;
  if (teams > most_teams || sums_of(teams) > room_of(device)) return std::nullopt;

  const BackwardTuning& tuning = tuning_of(device);
  Group plan;
  set_team(plan, problem, *team);
  plan.teams = teams;
  plan.threads = plan.team_threads * plan.teams;
  // Rows that a team does not keep, and rows with a gate, have kernels only with rings.
  const bool pays =
      rows_of_block >= int64_t{tuning.least_ring_rows} * teams || !team->keeps || problem.gated;
  const bool ring = may_have_ring(problem, device, forced) && (pays || forced.has(Field::kBulk));
  const bool holds = group_holds_row(team->keeps, problem.gated);
  const int least = ring ? least_stages(holds, 0) : 0;
  if (ring) {
    const int most = stages_of(teams);
    const int64_t bytes = team->stage_bytes * teams;
    const int wanted = std::max(stages_for(problem, teams, tuning.other_ring_bytes),
                                holds ? kKeptRowStages : kTwiceReadRowStages);
    plan.stages = forced.value_or(Field::kStages, std::min(most, wanted));
    if (plan.stages > most || plan.stages < least) return std::nullopt;
    plan.stays_in_l2 = rows_stay_in_l2(problem, device);
    plan.sums_offset = static_cast<int>(team->param_bytes + plan.stages * bytes);
  }
  plan.bulk = ring;
  plan.shared_bytes = static_cast<int>(plan.sums_offset + sums_of(teams));
  const bool has_kernel = problem.gated
                              ? has_gated_kernel(plan.width, x_size, plan.bulk, team->keeps)
                              : has_group_kernel(plan.width, x_size, plan.bulk, team->keeps);
  if (!has_kernel || !forced.allows(Field::kBulk, plan.bulk) ||
      !forced.allows(Field::kStages, plan.stages)) {
    return std::nullopt;
  }
  plan.blocks = persistent_sets(problem, device, 1, plan.teams);
  // Each block works on one group alone, if that costs few blocks.
  const int64_t whole_groups =
      plan.blocks / (problem.rows / problem.group_rows) * (problem.rows / problem.group_rows);
  if (whole_groups * tuning.grouped_blocks_of >= plan.blocks * tuning.grouped_blocks) {
    plan.blocks = whole_groups;
  }
  lay_out_parts(plan.parts, plan, plan.blocks, problem.gated ? 3 : 2, problem, device);
  return plan;
}

}  // namespace backward

BackwardLaunch<backward::Group> launch_layer_norm_backward;

}  // namespace fused_layernorm

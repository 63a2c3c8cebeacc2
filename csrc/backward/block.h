// SPDX-License-Identifier: Apache-2.0
// The strategy "block": persistent blocks whose teams have whole rows (layernorm_kernel.cu).
#pragma once

#include "backward/teams.h"

namespace fused_layernorm {

namespace backward {

struct Block : Persistent {
  static constexpr const char* kName = "block";
  bool as_slices = false;  // by split's kernel, with a single slice: the whole row

  static std::optional<Block> make(const Problem& problem, const Device& device,
                                   const Forced& forced);
  template <typename Json>
  void describe(Json& json) const {
    Persistent::describe(json);
    json.add(partials).add("as_slices", as_slices);
  }
};

// The most teams that a block should have where there are many rows.
inline int most_teams(const Problem& problem, const Device& device) {
  const BackwardTuning& tuning = tuning_of(device);
  const bool is_float32 = size_of(problem.x) == 4;
  if (problem.y != problem.x || (is_fused(problem) && !is_float32)) return kMostTeams;
  const auto& rule = is_fused(problem) ? tuning.float32_fused_teams
                     : is_float32
                         ? problem.aligned ? tuning.float32_teams : tuning.float32_element_teams
                     : problem.aligned ? tuning.half_teams
                                       : tuning.half_element_teams;
  return rule.at(problem.cols);
}

inline std::optional<int> teams_of_rows(const Problem& problem, const Device& device,
                                        const RowTeams& rows, bool ring, const Forced& forced) {
  if (const auto teams = forced.of(Field::kTeams)) {
    return *teams <= rows.most ? teams : std::nullopt;
  }
  // Few rows are spread over all multiprocessors, so that a block has fewer teams.
  const int64_t needed = std::max<int64_t>(1, ceil_div(problem.rows, device.sms));
  const int teams = static_cast<int>(std::min<int64_t>(rows.most, needed));
  if (!ring) return teams;
  const int most = most_teams(problem, device);
  const bool are_many = needed >= int64_t{tuning_of(device).few_teams_rows} * most;
  return are_many ? std::min(teams, most) : teams;
}

// The stages of the ring of each of `teams` teams; std::nullopt where rows come without a ring.
inline std::optional<int> row_stages(const Problem& problem, const Device& device, const Team& team,
                                     int teams, const Forced& forced) {
  const int most = most_stages(team, teams, device);
  if (const auto stages = forced.of(Field::kStages)) {
    return *stages <= most && *stages >= least_stages(team.keeps, 0) ? stages : std::nullopt;
  }
  // A ring pays from least_ring_rows rows a team on. The rows are counted as if one block had all
  // of them: if they are more than least_ring_rows - 1 for each team, some team has one more.
  const BackwardTuning& tuning = tuning_of(device);
  const bool pays = problem.rows > int64_t{tuning.least_ring_rows - 1} * teams;
  if (!pays && !forced.has(Field::kBulk)) return std::nullopt;
  const int64_t ring_bytes = size_of(problem.x) == 4 ? tuning.float32_ring_bytes
                             : problem.aligned       ? tuning.half_ring_bytes
                                                     : tuning.other_ring_bytes;
  int wanted = stages_for(problem, teams, ring_bytes);
  const int64_t long_bytes = size_of(problem.x) == 4 && problem.aligned
                                 ? tuning.long_float32_row_bytes
                                 : tuning.long_row_bytes;
  if (teams == 1 && rows_bytes(problem, 1) < long_bytes) {
    wanted = std::max(wanted, tuning.single_team_stages);
  }
  const int least = team.keeps ? kKeptRowStages : kTwiceReadRowStages;
  return std::min(most, std::max(wanted, least));
}

inline std::optional<Block> Block::make(const Problem& problem, const Device& device,
                                        const Forced& forced) {
  const bool allowed = !problem.modulated && forced.allows(kName, {Field::kVecs, Field::kTeams,
                                                                   Field::kBulk, Field::kStages});
  if (!allowed) return std::nullopt;
  const auto rows = row_teams(problem, device, forced);
  if (!rows) return std::nullopt;
  const bool ring = may_have_ring(problem, device, forced);
  const auto teams = teams_of_rows(problem, device, *rows, ring, forced);
  if (!teams) return std::nullopt;

  Block plan;
  set_team(plan, problem, rows->team);
  plan.teams = *teams;
  plan.threads = plan.team_threads * plan.teams;
  const int64_t sums = plan.teams > 1 ? plan.teams * rows->team.sums_bytes : 0;
  plan.shared_bytes = static_cast<int>(sums);
  const auto stages =
      ring ? row_stages(problem, device, rows->team, plan.teams, forced) : std::optional<int>();
  plan.bulk = stages.has_value();
  if (plan.bulk) {
    plan.stages = *stages;
    plan.stays_in_l2 = rows_stay_in_l2(problem, device);
    const int64_t bytes =
        rows->team.param_bytes + plan.stages * plan.teams * rows->team.stage_bytes;
    plan.shared_bytes = static_cast<int>(std::max(sums, bytes));
  }
  if (!forced.allows(Field::kBulk, plan.bulk) || !forced.allows(Field::kStages, plan.stages)) {
    return std::nullopt;
  }
  // Bare rows that a team reads twice have a kernel without the code for slices, which is faster
  // (8192 x 16384 bfloat16: 241 us, 247; but beside a residual 368.9, 369.0).
  plan.as_slices = !rows->team.keeps && (is_fused(problem) || !plan.bulk);
  plan.blocks = persistent_sets(problem, device, 1, plan.teams);
  lay_out_partials(plan, plan.blocks, problem);
  plan.partials.starts_early = device.starts_early && rows->team.keeps;
  return plan;
}
}  // namespace backward

BackwardLaunch<backward::Block> launch_layer_norm_backward;

}  // namespace fused_layernorm

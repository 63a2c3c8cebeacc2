// SPDX-License-Identifier: Apache-2.0
// The strategy "block": persistent blocks whose teams have whole rows. Its kernels stand in
// layernorm_kernel.cu.
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

// ---- The ladders.

// There is no ladder for the vectors of a thread: the fewest columns a thread for which there are a
// kernel and enough threads are best, because more columns leave no registers for xhat and g.
// (Kernels, but for float64, have no fewer than sixteen columns a thread, because reductions over
// more threads with fewer columns each take longer: with sixteen columns a thread and with eight,
// bfloat16, 32768 x 4096 229, 276.)

// The most teams of a block where rows come through a ring. The number of teams fixes how many
// bytes are on their way and in which order they are asked for. Some numbers are up to a fifth
// slower than their neighbours, in any place in memory, and no counter says why; so these ladders
// hold what was measured (docs/tuning-log.md has all of it).
struct TeamsRung {
  int64_t last;  // columns
  int teams;
};
// float32, rows that are aligned, nothing fused.
constexpr TeamsRung kFloat32Teams[] = {
    {512, 8},     // fifteen teams and eight: 100000 x 384 123.6, 114.7
    {672, 6},     // eight, six and four: 32768 x 640 70.7, 66.6, 69.1
    {1023, 4},    // six, four and three: 32768 x 768 82.8, 77.5, 78.3
    {1407, 3},    // eight, four and three: 100000 x 1024 307.8, 344.2, 295.8
    {2047, 4},    // four and three: 32768 x 1492 152.7, 156.6
    {kNoEnd, 1},  // four and one: 65536 x 2048 403.0, 395.3
};
// float32, rows (which are aligned) with a residual or an activation.
constexpr TeamsRung kFloat32FusedTeams[] = {
    {767, kMostTeams},  // eight teams and five, with a residual: 32768 x 640 85.2, 86.0
    {2047, 4},          // eight, four and three: 32768 x 1024 133.8, 130.5, 134.2
    {2815, 2},          // four, two and one: 32768 x 2048 276.9, 253.3, 305.9
    {kNoEnd, 1},        // two and one: 32768 x 4096 571.3, 500.5
};
// float32, rows that are not aligned, nothing fused.
constexpr TeamsRung kFloat32ElementTeams[] = {
    {320, 12},    // fifteen teams, twelve and eight: 100000 x 285 95.3, 90.3, 106.9
    {448, 8},     // twelve and eight: 100000 x 356 115.0, 112.0
    {512, 12},    // fifteen, twelve and eight: 200000 x 498 316.9, 305.1, 333.4
    {672, 6},     // eight, six and four: 32768 x 569 65.5, 62.8, 71.8
    {1100, 4},    // eight, four and three: 32768 x 924 97.9, 96.3, 101.0
    {1600, 3},    // five, four and three: 100000 x 1350 429.6, 459.9, 424.0
    {2047, 4},    // four, three and one: 65536 x 1847 385.4, 394.3, 423.5
    {2431, 2},    // two and one: 50000 x 2130 336.4, 391.5
    {kNoEnd, 1},  // two and one: 32768 x 2627 283.7, 264.2
};
// Half precision, rows that are aligned, nothing fused. With a residual or an activation all teams
// are better, because a team's time hides behind the other teams.
constexpr TeamsRung kHalfTeams[] = {
    {1007, kMostTeams},  // eight teams and six: 28570 x 896 43.3, 43.2
    {1024, 6},           // eight, six and four: 32768 x 1024 55.5, 54.6, 56.8
    {1983, kMostTeams},
    {2048, 3},             // four, three and two: 32768 x 2048 107.8, 103.5, 107.2
    {kNoEnd, kMostTeams},  // two and one: 32768 x 4096 204.4, 208.5
};
// Half precision, rows that are not aligned, nothing fused.
constexpr TeamsRung kHalfElementTeams[] = {
    {1024, kMostTeams},
    {1536, 4},             // five teams and four: 100000 x 1137 254, 250
    {kNoEnd, kMostTeams},  // two and one: 6250 x 4095 58.4, 62.8
};
static_assert(is_ladder(kFloat32Teams) && is_ladder(kFloat32FusedTeams) &&
                  is_ladder(kFloat32ElementTeams) && is_ladder(kHalfTeams) &&
                  is_ladder(kHalfElementTeams),
              "the rungs ascend");
// A block has no more teams than these ladders allow only if each team then has this many rows.
constexpr int kFewTeamsRows = 16;

// The bytes that rings hold: of half-precision rows that are moved by vectors (with two stages and
// with three, bfloat16: 32768 x 2048 by three teams 103.5, 111.2; but x 768 by eight 45.2, 44.6).
constexpr int64_t kHalfRingBytes = 60000;
// Of float32 rows (with two and with three: 100000 x 711 by four teams 226.6, 228.4).
constexpr int64_t kFloat32RingBytes = 50 * 1024;
// A single team has at least kSingleTeamStages stages if its rows take less than kLongRowBytes
// (with two stages and with three, bfloat16: 16384 x 7168 187.1, 185.0; but x 8192 203.9, 218.4).
// For aligned float32 rows the limit is kLongFloat32RowBytes (32768 x 2816 289.4, 281.7; but x 3408
// 335.4, 348.0).
constexpr int kSingleTeamStages = 3;
constexpr int64_t kLongRowBytes = 32 * 1024, kLongFloat32RowBytes = 25 * 1024;

// ---- The plan.

// The most teams that a block should have where there are many rows.
inline int ladder_teams(const Problem& problem) {
  const auto teams = [&](const auto& ladder) { return rung_of(ladder, problem.cols).teams; };
  const bool is_float32 = size_of(problem.x) == 4;
  if (problem.y != problem.x) return kMostTeams;
  if (is_fused(problem)) {
    return is_float32 ? teams(kFloat32FusedTeams) : kMostTeams;
  }
  if (is_float32) {
    return problem.aligned ? teams(kFloat32Teams) : teams(kFloat32ElementTeams);
  }
  return problem.aligned ? teams(kHalfTeams) : teams(kHalfElementTeams);
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
  const int ladder = ladder_teams(problem);
  return needed >= int64_t{kFewTeamsRows} * ladder ? std::min(teams, ladder) : teams;
}

// The stages of the ring of each of `teams` teams, or none where rows come without a ring.
inline std::optional<int> row_stages(const Problem& problem, const Device& device, const Team& team,
                                     int teams, const Forced& forced) {
  const int most = most_stages(team, teams, device);
  if (const auto stages = forced.of(Field::kStages)) {
    return *stages <= most && *stages >= least_stages(team.keeps, 0) ? stages : std::nullopt;
  }
  // As if one block had all rows: with two rows for each team and one more, a team has its third
  // row.
  const bool pays = problem.rows > int64_t{kLeastRingRows - 1} * teams;
  if (!pays && !forced.has(Field::kBulk)) return std::nullopt;
  const int64_t ring_bytes = size_of(problem.x) == 4 ? kFloat32RingBytes
                             : problem.aligned       ? kHalfRingBytes
                                                     : kOtherRingBytes;
  int wanted = stages_for(problem, teams, ring_bytes);
  const int64_t long_bytes =
      size_of(problem.x) == 4 && problem.aligned ? kLongFloat32RowBytes : kLongRowBytes;
  if (teams == 1 && rows_bytes(problem, 1) < long_bytes) {
    wanted = std::max(wanted, kSingleTeamStages);
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
  // Bare rows that a team reads twice have a kernel without the code for slices, because it is
  // faster (8192 x 16384 bfloat16: 241 us, with that code 247). Beside a residual it is not (368.9,
  // with it 369.0).
  plan.as_slices = !rows->team.keeps && (is_fused(problem) || !plan.bulk);
  plan.blocks = persistent_sets(problem, device, 1, plan.teams);
  lay_out_partials(plan, plan.blocks, problem);
  plan.partials.starts_early = device.starts_early && rows->team.keeps;
  return plan;
}
}  // namespace backward

cudaError_t launch_layer_norm_backward(const BackwardParams&, const DataTypes&,
                                       const backward::Block&, cudaStream_t);

}  // namespace fused_layernorm

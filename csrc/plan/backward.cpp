// SPDX-License-Identifier: Apache-2.0
// The ladder of backward, from problem to plan: short rows by logical warps, longer ones
// by teams of a block or by whole blocks, the longest by several blocks a row or by two reads;
// few rows by one launch; and rows with a modulation group by group, or by two reads. geometry.h
// has the limits of each strategy, ladders.h the best choice where there are several.
#include <algorithm>
#include <cstdint>
#include <optional>

#include "plan/geometry.h"
#include "plan/ladders.h"
#include "plan/layout.h"
#include "plan/plan.h"

namespace fused_layernorm {
namespace {

// Single elements where rows do not begin at multiples of 16 bytes.
int width_of(const Problem& problem) {
  return problem.aligned ? vector_width(size_of(problem.x)) : 1;
}

bool is_fused(const Problem& problem) { return problem.residual || problem.has_epilogue; }

// Whether each row has a shift and a scale of its own.
bool is_of_rows(const Problem& problem) { return problem.modulated && problem.group_rows == 1; }

// ---- Logical warps.

std::optional<Lanes> lanes_of(const Problem& problem, const Forced& forced) {
  const int width = width_of(problem);
  const int64_t vectors = ceil_div(problem.cols, width);
  // A lane has the fewest vectors for which there are a kernel and enough lanes.
  const int64_t fewest =
      std::max<int64_t>(forced.value_or(Field::kVecs, 1), ceil_div(vectors, kWarpThreads));
  const int vecs = backward_warp_vecs_from(width, fewest);
  if (vecs == 0 || !forced.allows(Field::kVecs, vecs)) return std::nullopt;
  return Lanes{vecs, power_of_two_from(ceil_div(vectors, vecs))};
}

// ---- Teams of whole warps.

// How a team owns a row or a slice of one, and the bytes of shared memory that this takes.
struct Team {
  int vecs;
  int threads;
  bool keeps;           // xhat and g stay in registers
  int stage_cols;       // of a row or slice that a stage has room for
  int64_t sums_bytes;   // the running dweight and dbias of all threads
  int64_t param_bytes;  // weight, and bias where an epilogue reads it
  int64_t stage_bytes;  // of x and dy
};

// `least_vecs` is the least number of vectors a thread for which the strategy has a kernel.
std::optional<Team> team_of(const Problem& problem, int cols, int most_threads, int least_vecs,
                            const Forced& forced) {
  const int width = width_of(problem), x_size = size_of(problem.x), y_size = size_of(problem.y);
  const int64_t vectors = ceil_div(cols, width);
  // A thread has the fewest columns for which there are a kernel and enough threads.
  const int64_t fewest =
      std::max<int64_t>(forced.value_or(Field::kVecs, least_vecs), ceil_div(vectors, most_threads));
  const int vecs = backward_block_vecs_from(width, x_size, fewest);
  if (vecs == 0 || !forced.allows(Field::kVecs, vecs)) return std::nullopt;
  Team team;
  team.vecs = vecs;
  team.threads = static_cast<int>(round_up(ceil_div(vectors, vecs), kWarpThreads));
  team.keeps = vecs * width <= kKeptColsPerThread;
  // With vectors, a stage also has room for what threads read behind the row's end. With single
  // elements, it also has room for what lies around a row that does not begin at a multiple of 16
  // bytes, because bulk copies bring it along.
  const int64_t unit = aligned_cols(x_size, y_size);
  team.stage_cols = static_cast<int>(width > 1 ? int64_t{team.threads} * vecs * width
                                               : round_up(cols + unit - 1, unit));
  team.sums_bytes = int64_t{2} * vecs * width * team.threads * acc_size_of(problem.x);
  const int64_t params = int64_t{problem.has_epilogue ? 2 : 1} * team.stage_cols;
  team.param_bytes = round_up(params * size_of(problem.weight), kVectorBytes);
  team.stage_bytes = int64_t{team.stage_cols} * (x_size + y_size);
  if (problem.modulated) {
    // The product of weight and 1 + scale, and the gate.
    team.param_bytes = int64_t{problem.gated ? 2 : 1} * team.stage_cols * acc_size_of(problem.x);
  }
  return team;
}

// Whether rows can come through a ring at all. There is none for float64.
bool may_have_ring(const Problem& problem, const Device& device, const Forced& forced) {
  return device.capability >= 90 && problem.x != DataType::kFloat64 &&
         forced.value_or(Field::kBulk, 1) != 0;
}

// Whether x and dy stay in L2 as other data does, where whole rows come through a ring.
bool rows_stay_in_l2(const Problem& problem) {
  if (problem.has_epilogue) return false;
  const int64_t x_tensors = problem.gated ? 5 : problem.residual ? 3 : 2;
  const int64_t column_bytes = x_tensors * size_of(problem.x) + size_of(problem.y);
  return problem.rows * problem.cols * column_bytes >= ladders::kLargeBackwardL2Bytes;
}

// The number of stages that there is room for in the ring of each of `teams` teams.
int most_stages(const Team& team, int teams, const Device& device) {
  return stages_in(room_of(device) - team.param_bytes, team.stage_bytes * teams);
}

// A team for whole rows, and the most such teams that a block has room for. Both, like everything
// that fixes the order of a row's sums, are independent of the number of rows.
struct RowTeams {
  Team team;
  int most;
};

std::optional<RowTeams> row_teams(const Problem& problem, const Device& device,
                                  const Forced& forced) {
  if (problem.cols > int64_t{kBackwardThreads} * kBackwardColsPerThread) return std::nullopt;
  const auto team = team_of(problem, static_cast<int>(problem.cols), kBackwardThreads, 1, forced);
  if (!team) return std::nullopt;
  const bool ring = may_have_ring(problem, device, forced);
  const auto fits = [&](int teams) {
    const int stages = ring ? most_stages(*team, teams, device) : kMostStages;
    return stages >= ladders::kKeptRowStages &&
           (teams == 1 || teams * team->sums_bytes <= room_of(device));
  };
  // A team that reads its row twice has a block of its own.
  int most = team->keeps ? std::clamp(kBackwardThreads / team->threads, 1, kMostTeams) : 1;
  while (most > 1 && !fits(most)) --most;
  if (!fits(most)) return std::nullopt;
  return RowTeams{*team, most};
}

// ---- Few rows.

bool has_few_rows(const Problem& problem) {
  const int64_t most = problem.aligned ? ladders::kFewAlignedRows : ladders::kFewOtherRows;
  return problem.rows <= most &&
         problem.rows * problem.cols * (size_of(problem.x) + size_of(problem.y)) <=
             ladders::kFewRowsBytes;
}

// Whether few rows go to teams of whole warps: there is a kernel, and rows that a team does not
// keep in registers are fewer still.
bool may_take_few_rows(const Team& team, const Problem& problem, const Forced& forced) {
  const bool few = team.keeps || problem.rows <= ladders::kFewLongRows || forced.strategy;
  return few &&
         has_few_rows_kernel(problem.x, problem.weight, problem.y, is_fused(problem), team.keeps);
}

// Lays out blocks of `teams` teams, whose number is a multiple of the sharers: blocks on rows
// compute dx, and blocks on columns beside them compute dweight and dbias.
void lay_out_few_rows(backward::FewRows& plan, const Problem& problem, int teams) {
  const int x_size = size_of(problem.x);
  plan.threads = plan.team_threads * teams;
  // A block has few columns of many rows, or of a single row a vector for each of its threads.
  const int lanes = problem.rows == 1 ? plan.threads : column_lanes(plan.width, x_size);
  plan.column_blocks =
      problem.needs_dparams ? ceil_div(problem.cols, int64_t{lanes} * plan.width) : 0;
  plan.shared_bytes =
      problem.needs_dparams ? few_rows_shared_bytes(plan.threads, plan.width, x_size) : 0;
  if (plan.sharers > 1) {
    const int exchanged = few_rows_exchanged_bytes(plan.threads, plan.vecs);
    plan.shared_bytes = std::max(plan.shared_bytes, exchanged);
  }
  plan.blocks = ceil_div(problem.rows, teams / plan.sharers) + plan.column_blocks;
}

// The teams of whole warps that a block of few rows should have.
int few_rows_teams(backward::FewRows plan, const Problem& problem, const Device& device) {
  const auto teams_of = [&](int threads) {
    return std::clamp(threads / plan.team_threads, 1, kMostTeams);
  };
  const int most = teams_of(ladders::rung_of(ladders::kFewRowsThreads, problem.rows).block_threads);
  if (plan.width > 1 && plan.team_threads < ladders::kFewRowsLeastThreads) return most;
  const int blocks = few_rows_blocks(plan.width, plan.vecs, is_fused(problem));
  const int sm_threads = blocks * kBackwardThreads;
  for (int teams = most; teams * plan.team_threads >= ladders::kFewRowsLeastThreads; --teams) {
    lay_out_few_rows(plan, problem, teams);
    const int64_t places = int64_t{device.sms} * (sm_threads / plan.threads);
    if (ladders::kFewRowsPlaces * plan.blocks <= ladders::kFewRowsBlocks * places) return teams;
  }
  return plan.width > 1 ? 1 : most;
}

// Whether several teams share a row of single elements. Forced teams do not.
bool may_share_few_rows(const backward::FewRows& plan, const Problem& problem,
                        const Forced& forced) {
  return has_shared_few_rows(problem.x, problem.weight, problem.y, plan.width, is_fused(problem)) &&
         plan.team_threads % kWarpThreads == 0 &&
         plan.team_threads * kFewRowsSharers <= kBackwardThreads &&
         ladders::shares_few_rows(problem.rows, problem.cols, size_of(problem.x)) &&
         !forced.has(Field::kTeams);
}

std::optional<backward::FewRows> few_rows_plan(const Problem& problem, const Device& device,
                                               const Forced& forced) {
  const bool allowed = forced.allows(Strategy::kFewRows, {Field::kVecs, Field::kTeams});
  if (!allowed || !(has_few_rows(problem) || forced.strategy)) return std::nullopt;
  backward::FewRows plan;
  plan.width = width_of(problem);
  int teams;
  // A row's dx has to be the same in any batch, so a team owns a row in the same way as where there
  // are many rows.
  if (const auto lanes = lanes_of(problem, forced)) {
    plan.vecs = lanes->vecs;
    plan.team_threads = lanes->lanes;
    plan.by_lanes = true;
    teams =
        ladders::rung_of(ladders::kFewRowsThreads, problem.rows).block_threads / plan.team_threads;
  } else if (const auto rows = row_teams(problem, device, forced);
             rows && may_take_few_rows(rows->team, problem, forced)) {
    plan.vecs = rows->team.vecs;
    plan.team_threads = rows->team.threads;
    teams = few_rows_teams(plan, problem, device);
  } else {
    return std::nullopt;
  }
  if (may_share_few_rows(plan, problem, forced)) {
    plan.sharers = kFewRowsSharers;
    const int threads = ladders::rung_of(ladders::kFewRowsThreads, problem.rows).block_threads;
    const int row_threads = plan.team_threads * plan.sharers;
    teams = std::max(1, threads / row_threads) * plan.sharers;
  }
  teams = forced.value_or(Field::kTeams, teams);
  lay_out_few_rows(plan, problem, teams);
  // Each team of whole warps has a hardware barrier.
  const bool launches = (plan.by_lanes || teams <= kMostTeams) &&
                        plan.threads <= kBackwardThreads && plan.threads % kWarpThreads == 0 &&
                        plan.blocks <= kMostBlocks;
  if (!launches) return std::nullopt;
  return plan;
}

// ---- Many rows, each in one block.

// Lays out the partial sums of `sets` sets of blocks, behind what the workspace has already.
template <typename Plan>
void lay_out_partials(Plan& plan, int64_t sets, const Problem& problem) {
  plan.partials.count = static_cast<int>(sets);
  plan.partials.offset = plan.workspace_bytes;
  if (problem.needs_dparams && sets > 1) {
    plan.workspace_bytes += int64_t{2} * sets * problem.cols * acc_size_of(problem.x);
  }
}

void lay_out_parts(backward::GroupParts& parts, Launch& launch, int64_t sets, int sums,
                   const Problem& problem, const Device& device) {
  const int64_t groups = problem.rows / problem.group_rows;
  const int64_t sum_bytes = sums * problem.cols * acc_size_of(problem.x);
  parts.sets = static_cast<int>(sets);
  parts.partials.starts_early = device.starts_early;
  if (problem.group_rows == 1) return;
  parts.partials.count = static_cast<int>(sets + groups - 1);
  parts.partials.offset = launch.workspace_bytes;
  if (problem.needs_dparams) launch.workspace_bytes += parts.partials.count * sum_bytes;
  parts.sums_offset = launch.workspace_bytes;
  if (problem.needs_column_grads) launch.workspace_bytes += groups * sum_bytes;
}

// Whether logical warps take rows with a modulation. They do where whole warps would have idle
// lanes.
bool has_warp_kernel_for_groups(const Problem& problem, const Forced& forced) {
  const bool is_short =
      problem.cols <= ladders::kGroupWarpVectors * vector_width(size_of(problem.x));
  return problem.aligned && problem.x != DataType::kFloat64 && !problem.gated &&
         (is_short || forced.strategy == Strategy::kWarp);
}

// Lays out second sums where a logical warp has rows for more than one chain and shared memory has
// room.
void lay_out_second_sums(backward::Warp& plan, const Problem& problem, const Device& device) {
  int64_t rows = ceil_div(problem.rows, plan.blocks);
  if (problem.modulated) rows = std::min(rows, problem.group_rows);
  rows = ceil_div(rows, plan.threads / plan.lanes);
  const int64_t chain_rows = std::clamp<int64_t>(
      ceil_div(rows, ladders::kChains), ladders::kFewestRowsOfChain, ladders::kMostRowsOfChain);
  const int64_t offset = round_up(plan.shared_bytes, kVectorBytes);
  const int64_t bytes = offset + backward_warp_second_sums_bytes(plan.threads, plan.vecs,
                                                                 plan.width, size_of(problem.x));
  if (!problem.needs_dparams || rows <= chain_rows || bytes > room_of(device)) return;
  plan.chain_rows = static_cast<int>(chain_rows);
  plan.second_sums_offset = static_cast<int>(offset);
  plan.shared_bytes = static_cast<int>(bytes);
}

std::optional<backward::Warp> warp_plan(const Problem& problem, const Device& device,
                                        const Forced& forced) {
  if (!forced.allows(Strategy::kWarp, {Field::kVecs})) return std::nullopt;
  if (problem.modulated && !has_warp_kernel_for_groups(problem, forced)) return std::nullopt;
  const auto lanes = lanes_of(problem, forced);
  if (!lanes) return std::nullopt;
  backward::Warp plan;
  plan.width = width_of(problem);
  plan.vecs = lanes->vecs;
  plan.lanes = lanes->lanes;
  const int x_size = size_of(problem.x);
  plan.threads = backward_warp_threads(
      x_size, backward_warp_activates(plan.width, problem.residual, problem.has_epilogue,
                                      problem.x == problem.y));
  plan.blocks = persistent_sets(problem, device, 1, plan.threads / plan.lanes);
  plan.shared_bytes =
      static_cast<int>(backward_warp_shared_bytes(plan.threads, problem.cols, x_size));
  lay_out_second_sums(plan, problem, device);
  if (problem.modulated) {
    lay_out_parts(plan.parts, plan, plan.blocks, 2, problem, device);
  } else {
    lay_out_partials(plan, plan.blocks, problem);
  }
  return plan;
}

// What blocks of whole rows and of slices have in common.
void set_team(backward::Persistent& plan, const Problem& problem, const Team& team) {
  plan.width = width_of(problem);
  plan.vecs = team.vecs;
  plan.team_threads = team.threads;
  plan.stage_cols = team.stage_cols;
}

// The most teams that a block should have where there are many rows.
int ladder_teams(const Problem& problem) {
  const auto teams = [&](const auto& ladder) {
    return ladders::rung_of(ladder, problem.cols).teams;
  };
  const bool is_float32 = size_of(problem.x) == 4;
  if (problem.y != problem.x) return kMostTeams;
  if (is_fused(problem)) {
    return is_float32 && problem.aligned ? teams(ladders::kFloat32FusedTeams) : kMostTeams;
  }
  if (is_float32) {
    return problem.aligned ? teams(ladders::kFloat32Teams) : teams(ladders::kFloat32ElementTeams);
  }
  return problem.aligned ? teams(ladders::kHalfTeams) : teams(ladders::kHalfElementTeams);
}

std::optional<int> teams_of_rows(const Problem& problem, const Device& device, const RowTeams& rows,
                                 bool ring, const Forced& forced) {
  if (const auto teams = forced.of(Field::kTeams)) {
    return *teams <= rows.most ? teams : std::nullopt;
  }
  // Few rows are spread over all multiprocessors, so that a block has fewer teams.
  const int64_t needed = std::max<int64_t>(1, ceil_div(problem.rows, device.sms));
  const int teams = static_cast<int>(std::min<int64_t>(rows.most, needed));
  if (!ring) return teams;
  const int ladder = ladder_teams(problem);
  return needed >= int64_t{ladders::kFewTeamsRows} * ladder ? std::min(teams, ladder) : teams;
}

// x and dy of one row for each of `teams` teams.
int64_t rows_bytes(const Problem& problem, int teams) {
  return problem.cols * (size_of(problem.x) + size_of(problem.y)) * teams;
}

// The stages with which the rings of `teams` teams hold about `ring_bytes`.
int stages_for(const Problem& problem, int teams, int64_t ring_bytes) {
  const int64_t bytes = rows_bytes(problem, teams);
  return static_cast<int>(std::min<int64_t>((ring_bytes + bytes / 2) / bytes, kMostStages));
}

// The stages of the ring of each of `teams` teams, or none where rows come without a ring.
std::optional<int> row_stages(const Problem& problem, const Device& device, const Team& team,
                              int teams, const Forced& forced) {
  const int most = most_stages(team, teams, device);
  if (const auto stages = forced.of(Field::kStages)) {
    return *stages <= most && *stages >= least_stages(team.keeps, 0) ? stages : std::nullopt;
  }
  // As if one block had all rows: with two rows for each team and one more, a team has its third
  // row.
  const bool pays = problem.rows > int64_t{ladders::kLeastRingRows - 1} * teams;
  if (!pays && !forced.has(Field::kBulk)) return std::nullopt;
  const int64_t ring_bytes = size_of(problem.x) == 4 ? ladders::kFloat32RingBytes
                             : problem.aligned       ? ladders::kHalfRingBytes
                                                     : ladders::kOtherRingBytes;
  int wanted = stages_for(problem, teams, ring_bytes);
  const int64_t long_bytes = size_of(problem.x) == 4 && problem.aligned
                                 ? ladders::kLongFloat32RowBytes
                                 : ladders::kLongRowBytes;
  if (teams == 1 && rows_bytes(problem, 1) < long_bytes) {
    wanted = std::max(wanted, ladders::kSingleTeamStages);
  }
  const int least = team.keeps ? ladders::kKeptRowStages : ladders::kTwiceReadRowStages;
  return std::min(most, std::max(wanted, least));
}

std::optional<backward::Block> block_plan(const Problem& problem, const Device& device,
                                          const Forced& forced) {
  const bool allowed =
      forced.allows(Strategy::kBlock, {Field::kVecs, Field::kTeams, Field::kBulk, Field::kStages});
  if (!allowed) return std::nullopt;
  const auto rows = row_teams(problem, device, forced);
  if (!rows) return std::nullopt;
  const bool ring = may_have_ring(problem, device, forced);
  const auto teams = teams_of_rows(problem, device, *rows, ring, forced);
  if (!teams) return std::nullopt;

  backward::Block plan;
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
    plan.stays_in_l2 = rows_stay_in_l2(problem);
    const int64_t bytes =
        rows->team.param_bytes + plan.stages * plan.teams * rows->team.stage_bytes;
    plan.shared_bytes = static_cast<int>(std::max(sums, bytes));
  }
  if (!forced.allows(Field::kBulk, plan.bulk) || !forced.allows(Field::kStages, plan.stages)) {
    return std::nullopt;
  }
  plan.blocks = persistent_sets(problem, device, 1, plan.teams);
  lay_out_partials(plan, plan.blocks, problem);
  plan.partials.starts_early = device.starts_early && rows->team.keeps;
  return plan;
}

// ---- Rows with a modulation, group by group.

std::optional<backward::Group> group_plan(const Problem& problem, const Device& device,
                                          const Forced& forced) {
  const int x_size = size_of(problem.x);
  const bool allowed =
      forced.allows(Strategy::kGroup, {Field::kVecs, Field::kTeams, Field::kBulk, Field::kStages});
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
  while (!forced.has(Field::kTeams) && teams > 1 && stages_of(teams) < ladders::kKeptRowStages)
    --teams;
  if (teams > most_teams || sums_of(teams) > room_of(device)) return std::nullopt;

  backward::Group plan;
  set_team(plan, problem, *team);
  plan.teams = teams;
  plan.threads = plan.team_threads * plan.teams;
  // Rows that a team does not keep, and rows with a gate, have kernels only with rings.
  const bool pays =
      rows_of_block >= int64_t{ladders::kLeastRingRows} * teams || !team->keeps || problem.gated;
  const bool ring = may_have_ring(problem, device, forced) && (pays || forced.has(Field::kBulk));
  const bool holds = group_holds_row(team->keeps, problem.gated);
  const int least = ring ? least_stages(holds, 0) : 0;
  if (ring) {
    const int most = stages_of(teams);
    const int64_t bytes = team->stage_bytes * teams;
    const int wanted = std::max(stages_for(problem, teams, ladders::kOtherRingBytes),
                                holds ? ladders::kKeptRowStages : ladders::kTwiceReadRowStages);
    plan.stages = forced.value_or(Field::kStages, std::min(most, wanted));
    if (plan.stages > most || plan.stages < least) return std::nullopt;
    plan.stays_in_l2 = rows_stay_in_l2(problem);
    plan.sums_offset = static_cast<int>(team->param_bytes + plan.stages * bytes);
  }
  plan.bulk = ring;
  plan.shared_bytes = static_cast<int>(plan.sums_offset + sums_of(teams));
  const bool has_kernel = problem.gated
                              ? has_gated_kernel(plan.width, x_size, plan.bulk, team->keeps)
                              : has_group_kernel(x_size, plan.bulk, team->keeps);
  if (!has_kernel || !forced.allows(Field::kBulk, plan.bulk) ||
      !forced.allows(Field::kStages, plan.stages)) {
    return std::nullopt;
  }
  plan.blocks = persistent_sets(problem, device, 1, plan.teams);
  // Each block works on one group alone, if that costs few blocks.
  const int64_t whole_groups =
      plan.blocks / (problem.rows / problem.group_rows) * (problem.rows / problem.group_rows);
  if (whole_groups * ladders::kGroupedBlocksOf >= plan.blocks * ladders::kGroupedBlocks) {
    plan.blocks = whole_groups;
  }
  lay_out_parts(plan.parts, plan, plan.blocks, problem.gated ? 3 : 2, problem, device);
  return plan;
}

// ---- Rows with a modulation of their own.

std::optional<backward::Rows> rows_plan(const Problem& problem, const Forced& forced) {
  const bool has_kernel = problem.x != DataType::kFloat64 && (problem.aligned || !problem.gated);
  if (!has_kernel || !forced.allows(Strategy::kRows, {Field::kVecs})) return std::nullopt;
  backward::Rows plan;
  plan.width = width_of(problem);
  // A row belongs to as many threads, each with as many of its vectors, as where groups have
  // several rows, so that its sums are the same (plan.h names the exception).
  if (problem.aligned && problem.cols <= ladders::kGroupWarpVectors * plan.width) {
    const auto lanes = lanes_of(problem, forced);
    if (!lanes) return std::nullopt;
    plan.by_lanes = true;
    plan.vecs = lanes->vecs;
    plan.team_threads = lanes->lanes;
  } else {
    int64_t least = std::max(forced.value_or(Field::kVecs, 1), kKeptColsPerThread / plan.width);
    do {
      plan.vecs = backward_rows_vecs_from(plan.width, size_of(problem.x), least);
      if (plan.vecs == 0 || !forced.allows(Field::kVecs, plan.vecs)) return std::nullopt;
      const int64_t vectors = ceil_div(problem.cols, int64_t{plan.vecs} * plan.width);
      plan.team_threads =
          static_cast<int>(std::min<int64_t>(round_up(vectors, kWarpThreads), kMostBlockThreads));
      least = plan.vecs + 1;
    } while (plan.team_threads >
             backward_rows_bounds(plan.vecs * plan.width, problem.gated).threads);
  }
  const int teams = std::max(1, kBackwardRowsThreads / plan.team_threads);
  plan.threads = teams * plan.team_threads;
  plan.blocks = ceil_div(problem.rows, teams);
  return plan;
}

// ---- Several blocks a row.

// The threads of a block that work on a slice, and whether a warp beside them collects the sums of
// its rows.
struct SliceTeam {
  Team team;
  bool has_collector;
};

std::optional<SliceTeam> slice_team(const Problem& problem, int cols,
                                    const ladders::SliceRing& wanted, bool ring,
                                    const Forced& forced) {
  const int least = split_least_vecs(width_of(problem), ring);
  const auto beside = team_of(problem, cols, kBackwardThreads - kWarpThreads, least, forced);
  using ladders::Collects;
  if (ring && wanted.collects != Collects::kBeside) {
    const auto alone = team_of(problem, cols, kBackwardThreads, least, forced);
    const bool fewer_vecs = alone && beside && alone->vecs < beside->vecs;
    const bool is_better = wanted.collects == Collects::kAlone ||
                           (wanted.collects == Collects::kAloneForFewVecs && fewer_vecs);
    if (alone && (!beside || is_better)) return SliceTeam{*alone, false};
  }
  if (!beside) return std::nullopt;
  return SliceTeam{*beside, true};
}

std::optional<backward::Split> split_plan(const Problem& problem, const Device& device,
                                          const ladders::SliceRing& wanted, const Forced& forced) {
  const bool ring = may_have_ring(problem, device, forced);
  const int width = width_of(problem);
  // Slices begin a whole number of cache lines behind the beginning of their row, in the narrower
  // of x and dy.
  const int64_t unit = slice_unit(problem, width);
  const int64_t line_cols = width == 1 ? unit : unit * (kCacheLineBytes / kVectorBytes);
  const auto plan_of = [&](const Slices& slices) -> std::optional<backward::Split> {
    const auto own = slice_team(problem, slices.slice_cols, wanted, ring, forced);
    if (!own) return std::nullopt;
    const Team& team = own->team;
    backward::Split plan;
    set_team(plan, problem, team);
    plan.slices = slices;
    plan.has_collector = own->has_collector;
    plan.threads = plan.team_threads + (plan.has_collector ? kWarpThreads : 0);
    plan.bulk = ring;
    if (ring) {
      const int most = most_stages(team, 1, device);
      if (most < wanted.stages) return std::nullopt;
      plan.stages = forced.value_or(Field::kStages, most);
      plan.lag = lag_of(plan.stages, forced);
      if (plan.stages > most || !is_valid_ring(plan.stages, plan.lag)) return std::nullopt;
      plan.shared_bytes = static_cast<int>(team.param_bytes + plan.stages * team.stage_bytes);
    } else {
      plan.lag = lag_of(std::nullopt, forced);
    }
    if (!forced.allows(Field::kBulk, plan.bulk) || !forced.allows(Field::kStages, plan.stages)) {
      return std::nullopt;
    }
    const int64_t sets = persistent_sets(problem, device, slices.blocks_per_row, 1);
    plan.blocks = sets * slices.blocks_per_row;
    plan.workspace_bytes = round_up(problem.rows * slices.blocks_per_row * 8, 256);
    lay_out_partials(plan, sets, problem);
    plan.partials.starts_early = device.starts_early;
    return plan;
  };
  return first_sliced(problem, device, width, {2, wanted.least_cols, line_cols}, forced, plan_of);
}

std::optional<backward::Split> split_plan(const Problem& problem, const Device& device,
                                          const Forced& forced) {
  const bool allowed =
      forced.allows(Strategy::kSplit, {Field::kVecs, Field::kTeams, Field::kBulk, Field::kStages,
                                       Field::kLag, Field::kBlocksPerRow}) &&
      forced.allows(Field::kTeams, 1);
  // There are no kernels for float64, nor for single elements without a ring.
  const bool has_kernels = problem.x != DataType::kFloat64 &&
                           (problem.aligned || may_have_ring(problem, device, forced));
  if (!allowed || !has_kernels) return std::nullopt;
  const auto first_of = [&](const auto& rings) -> std::optional<backward::Split> {
    for (const ladders::SliceRing& ring : rings) {
      if (const auto plan = split_plan(problem, device, ring, forced)) return plan;
    }
    return std::nullopt;
  };
  // Rows with an epilogue have one list of rings, whatever their types, with and without a
  // residual. Rows whose x and dy differ in size also have one list with and without a residual.
  const int x_size = size_of(problem.x), y_size = size_of(problem.y);
  if (problem.has_epilogue) return first_of(ladders::kEpilogueSliceRings);
  if (x_size != y_size) return first_of(ladders::kSliceRings);
  if (problem.residual) return first_of(ladders::kResidualSliceRings);
  return x_size == 2 ? first_of(ladders::kHalfSliceRings) : first_of(ladders::kSliceRings);
}

// ---- Rows of any length.

// The number of sets of rows that takes the least time; a set has a block for each chunk of the
// columns. Time is counted in rows: blocks run in rounds, a block takes the time of its rows, and
// partial sums take the time of some rows more.
int64_t stream_sets(const Problem& problem, const Device& device, int64_t chunks) {
  const int64_t room = int64_t{kBackwardStreamBlocks} * device.sms;
  const auto time_of = [&](int64_t sets) {
    const int64_t rounds = ceil_div(sets * chunks, room);
    const int64_t partials = sets > 1 ? ladders::kPartialSumsRows * sets * chunks / room : 0;
    return rounds * ceil_div(problem.rows, sets) + partials;
  };
  const int64_t most = std::min<int64_t>(
      {problem.rows, device.sms, ceil_div(ladders::kStreamRounds * room, chunks)});
  int64_t best = 1, least_time = time_of(1);
  for (int64_t sets = 2; sets <= most; ++sets) {
    const int64_t time = time_of(sets);
    if (time < least_time) {
      best = sets;
      least_time = time;
    }
  }
  return best;
}

std::optional<backward::Stream> stream_plan(const Problem& problem, const Device& device,
                                            const Forced& forced) {
  if (!forced.allows(Strategy::kStream, {})) return std::nullopt;
  backward::Stream plan;
  plan.width = width_of(problem);
  plan.threads = kBackwardStreamThreads;
  const int cols = backward_stream_cols(plan.width);
  const int64_t chunks = ceil_div(problem.cols, cols);
  plan.chunks = {static_cast<int>(chunks), cols};
  const int64_t sets = stream_sets(problem, device, chunks);
  plan.blocks = sets * chunks;
  const int64_t sums = int64_t{2} * acc_size_of(problem.x);
  const int64_t parts = problem.rows * chunks * (kBackwardStreamThreads / kWarpThreads);
  plan.totals_offset = round_up(parts * sums, 256);
  plan.workspace_bytes = round_up(plan.totals_offset + problem.rows * sums, 256);
  if (problem.modulated) {
    lay_out_parts(plan.parts, plan, sets, 2, problem, device);
  } else {
    lay_out_partials(plan, sets, problem);
  }
  return plan;
}

}  // namespace

backward::Plan make_backward_plan(const Problem& problem, const Device& device) {
  const Forced forced = forced_now();
  if (is_of_rows(problem)) {
    if (const auto plan = rows_plan(problem, forced)) return *plan;
  } else if (problem.modulated) {
    if (const auto plan = warp_plan(problem, device, forced)) return *plan;
    if (const auto plan = group_plan(problem, device, forced)) return *plan;
  } else {
    if (const auto plan = few_rows_plan(problem, device, forced)) return *plan;
    if (const auto plan = warp_plan(problem, device, forced)) return *plan;
    if (const auto plan = block_plan(problem, device, forced)) return *plan;
    if (const auto plan = split_plan(problem, device, forced)) return *plan;
  }
  if (const auto plan = stream_plan(problem, device, forced)) return *plan;
  refuse(forced, problem, true);
}

std::optional<backward::Plan> make_gated_plan(const Problem& problem, const Device& device) {
  const Forced forced = forced_now();
  if (is_of_rows(problem)) return rows_plan(problem, forced);
  // The kernels of groups take a gated input of x's type. With float32 x, however, that input has
  // y's type (Types::In in norm/types.cuh).
  if (problem.x == DataType::kFloat32 && problem.y != problem.x) return std::nullopt;
  Problem without_gate = problem;
  without_gate.gated = false;
  if (has_warp_kernel_for_groups(without_gate, forced)) return std::nullopt;
  return group_plan(problem, device, forced);
}

backward::Gate make_gate_plan(const Problem& problem, const Device& device) {
  backward::Gate plan;
  plan.width = width_of(problem);
  plan.threads = kGateThreads;
  plan.chunks = static_cast<int>(ceil_div(problem.cols, gate_cols(plan.width)));
  // All blocks run at once, and there is at most one set for each kGateWarps rows, rounded up, so
  // that few warps are without a row.
  const int64_t room = int64_t{ladders::kGateBlocks} * device.sms;
  const int64_t sets =
      std::clamp<int64_t>(room / plan.chunks, 1, ceil_div(problem.rows, kGateWarps));
  plan.blocks = sets * plan.chunks;
  lay_out_parts(plan.parts, plan, sets, 1, problem, device);
  return plan;
}

}  // namespace fused_layernorm

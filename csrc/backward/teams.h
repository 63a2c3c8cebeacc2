// SPDX-License-Identifier: Apache-2.0
// Teams of threads, of backward's blocks: what backward's plans share, most of all those of the
// strategies whose teams are whole warps (block, group, split, and few_rows for the rows that would
// go to these).
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>

#include "backward/tuning.h"
#include "base/choices.h"
#include "base/cuda_types.h"
#include "base/partial_sums.h"
#include "base/planning.h"
#include "base/problem.h"

namespace fused_layernorm {

// ---- Limits.

// A single element takes more registers than an element of a vector.
constexpr int most_backward_block_vecs(int width) {
  return width == 1 ? 16 : kBackwardColsPerThread / width;
}
// float64 has one kernel, with as many columns a thread as registers hold without spills (4096 x
// 1024 took 122 us with 32). Longer rows are streamed.
template <int kWidth, int kXSize>
using BackwardBlockVecs =
    std::conditional_t<kXSize == 8, VecsList<8 / kWidth>,
                       std::conditional_t<kWidth == 1, VecsList<most_backward_block_vecs(1)>,
                                          VecsList<most_backward_block_vecs(kWidth) / 2,
                                                   most_backward_block_vecs(kWidth)>>>;
constexpr int backward_block_vecs_from(int width, int x_size, int64_t least) {
  if (width == 1) {
    return x_size == 8 ? first_from(BackwardBlockVecs<1, 8>{}, least)
                       : first_from(BackwardBlockVecs<1, 4>{}, least);
  }
  if (x_size == 8) return first_from(BackwardBlockVecs<vector_width(8), 8>{}, least);
  if (x_size == 4) return first_from(BackwardBlockVecs<vector_width(4), 4>{}, least);
  return first_from(BackwardBlockVecs<vector_width(2), 2>{}, least);
}

// A ring is refilled once a row has left it. A row that is kept in registers leaves at once, so one
// stage will do. Any other row is read again, `lag` rows later: the ring then holds the rows that
// wait, the one in work and one on its way.
constexpr int least_stages(bool keeps, int lag) { return keeps ? 1 : lag + 2; }
static_assert(least_stages(false, kMostCollected - 1) <= kMostStages,
              "a ring can be made for every lag");

// ---- The shared memory that kernels declare.

// The scratch memory of all teams of a block. The scratch memory of one team has up to three values
// more than the team has warps, because a thread reads four values at once.
constexpr int kBackwardScratch = (kBackwardThreads / kWarpThreads + 3 * kMostTeams + 3) / 4 * 4;
// Two scratch memories and the collected sums, in pairs of the arithmetic's type, and for each
// stage of each team the row's mean and rstd in float32 and a barrier. float64 has no ring.
constexpr int backward_declared_bytes(int acc_size) {
  const int pair = 2 * acc_size;
  const int stages = acc_size == 4 ? kMostTeams * kMostStages : 0;
  return 2 * kBackwardScratch * pair + kMostCollected * pair + stages * (8 + 8);
}
static_assert(backward_declared_bytes(4) <= kReservedSharedMemory &&
                  backward_declared_bytes(8) <= kReservedSharedMemory,
              "backward's blocks declare no more than the plan leaves them");

// Rows come to shared memory by bulk copies, through a ring, but for float64, and for unaligned
// rows with something fused: these are rare, and such a kernel takes up to 90 KB of the binary.
constexpr bool has_ring_kernels(int width, int x_size, bool bare) {
  return x_size != 8 && (width > 1 || bare);
}

namespace backward {

// ---- Problems.

// Single elements where rows do not begin at multiples of 16 bytes.
inline int width_of(const Problem& problem) {
  return problem.aligned ? vector_width(size_of(problem.x)) : 1;
}

inline bool is_fused(const Problem& problem) { return problem.residual || problem.has_epilogue; }

// Whether each row has a shift and a scale of its own.
inline bool is_of_rows(const Problem& problem) {
  return problem.modulated && problem.group_rows == 1;
}

// ---- Plans.

// Rows or slices of them in persistent blocks.
struct Persistent : Launch {
  int width = 1;
  int vecs = 2;
  int team_threads = kWarpThreads;  // on one row
  int teams = 1;                    // rows that a block works on at once
  int stage_cols = 0;               // columns of a row or slice that a stage has room for
  bool bulk = false;                // rows come to shared memory by Hopper's bulk copies
  int stages = 0;                   // bulk: rows or slices that a team keeps in flight
  bool stays_in_l2 = false;         // bulk: x and dy stay in L2 as other data does
  PartialSums partials;

  template <typename Json>
  void describe(Json& json) const {
    json.add("width", width).add("vecs", vecs).add("team_threads", team_threads);
    json.add("teams", teams).add("stage_cols", stage_cols).add("bulk", bulk);
    json.add("stages", stages).add("stays_in_l2", stays_in_l2);
  }
};

// Rows of which each has a team of its own, which keeps nothing for a next one (few_rows, rows).
struct OneRowATeam : Launch {
  int width = 1;
  int vecs = 2;
  int team_threads = 1;   // on one row: a logical warp's lanes, or whole warps
  bool by_lanes = false;  // the team is a logical warp

  template <typename Json>
  void describe(Json& json) const {
    json.add("width", width).add("vecs", vecs).add("team_threads", team_threads);
    json.add("teams", threads / team_threads).add("by_lanes", by_lanes);
  }
};

// ---- Teams.

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

// What blocks of whole rows and of slices have in common.
inline void set_team(Persistent& plan, const Problem& problem, const Team& team) {
  plan.width = width_of(problem);
  plan.vecs = team.vecs;
  plan.team_threads = team.threads;
  plan.stage_cols = team.stage_cols;
}

// `least_vecs` is the least number of vectors a thread for which the strategy has a kernel.
inline std::optional<Team> team_of(const Problem& problem, int cols, int most_threads,
                                   int least_vecs, const Forced& forced) {
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
  // With vectors, a stage also has room for what threads read past the row's end. With single
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

// Whether rows can come through a ring at all.
inline bool may_have_ring(const Problem& problem, const Device& device, const Forced& forced) {
  const bool bare = !is_fused(problem) && !problem.modulated;
  return device.capability >= 90 && has_ring_kernels(width_of(problem), size_of(problem.x), bare) &&
         forced.value_or(Field::kBulk, 1) != 0;
}

// The number of stages of `bytes` bytes each for which `room` bytes suffice.
constexpr int stages_in(int64_t room, int64_t bytes) {
  return room < bytes ? 0 : static_cast<int>(std::min<int64_t>(kMostStages, room / bytes));
}

// The number of stages that there is room for in the ring of each of `teams` teams.
inline int most_stages(const Team& team, int teams, const Device& device) {
  return stages_in(room_of(device) - team.param_bytes, team.stage_bytes * teams);
}

// ---- Rings of whole rows.

// Whether x and dy stay in L2 as other data does (evict_normal), where whole rows come through a
// ring: those of large calls. Those of smaller ones are evict_first. (By evict_first and by
// evict_normal, bfloat16: 32768 x 4096 214.0, 204.4; but 12608 x 768 22.2, 22.5.) Slices of rows
// are always evict_first (32 x 2097152 bfloat16 129.5, 135.2), and so are rows with an epilogue,
// which gain nothing by staying (32768 x 4096 bfloat16 with GELU 255.2, 255.5).
inline bool rows_stay_in_l2(const Problem& problem, const Device& device) {
  if (problem.has_epilogue) return false;
  const int64_t x_tensors = problem.gated ? 5 : problem.residual ? 3 : 2;
  const int64_t column_bytes = x_tensors * size_of(problem.x) + size_of(problem.y);
  return problem.rows * problem.cols * column_bytes >= l2_limits(device).large_call;
}

constexpr int kKeptRowStages = 2;
constexpr int kTwiceReadRowStages = 3;
static_assert(kKeptRowStages >= least_stages(true, 0) &&
                  kTwiceReadRowStages >= least_stages(false, 0),
              "every ring of whole rows holds the rows that it must");

// x and dy of one row for each of `teams` teams.
inline int64_t rows_bytes(const Problem& problem, int teams) {
  return problem.cols * (size_of(problem.x) + size_of(problem.y)) * teams;
}

// The stages with which the rings of `teams` teams hold about `ring_bytes`.
inline int stages_for(const Problem& problem, int teams, int64_t ring_bytes) {
  const int64_t bytes = rows_bytes(problem, teams);
  return static_cast<int>(std::min<int64_t>((ring_bytes + bytes / 2) / bytes, kMostStages));
}

// A team for whole rows, and the most such teams that a block has room for. Both, like everything
// that fixes the order of a row's sums, are independent of the number of rows.
struct RowTeams {
  Team team;
  int most;
};

inline std::optional<RowTeams> row_teams(const Problem& problem, const Device& device,
                                         const Forced& forced) {
  if (problem.cols > int64_t{kBackwardThreads} * kBackwardColsPerThread) return std::nullopt;
  const auto team = team_of(problem, static_cast<int>(problem.cols), kBackwardThreads, 1, forced);
  if (!team || (!team->keeps && is_narrowed(problem.x, problem.y))) return std::nullopt;
  const bool ring = may_have_ring(problem, device, forced);
  const auto fits = [&](int teams) {
    const int stages = ring ? most_stages(*team, teams, device) : kMostStages;
    return stages >= kKeptRowStages && (teams == 1 || teams * team->sums_bytes <= room_of(device));
  };
  // A team that reads its row twice has a block of its own.
  int most = team->keeps ? std::clamp(kBackwardThreads / team->threads, 1, kMostTeams) : 1;
  while (most > 1 && !fits(most)) --most;
  if (!fits(most)) return std::nullopt;
  return RowTeams{*team, most};
}
}  // namespace backward
}  // namespace fused_layernorm

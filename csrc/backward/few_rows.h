// SPDX-License-Identifier: Apache-2.0
// The strategy "few_rows": blocks on rows compute dx, and blocks on columns beside them dweight and
// dbias, in one launch and without partial sums.
#pragma once

#include "backward/warp.h"

namespace fused_layernorm {

// The blocks of few rows that a multiprocessor has registers for: they have no running sums, but
// activations and long rows take registers.
constexpr int few_rows_blocks(int width, int vecs, bool fused) {
  return fused || width * vecs > kKeptColsPerThread ? 1 : 2;
}
static_assert(registers_of(kBackwardThreads, few_rows_blocks(1, kKeptColsPerThread, false)) == 64 &&
                  registers_of(kBackwardThreads, few_rows_blocks(1, kKeptColsPerThread, true)) ==
                      128,
              "half the registers of the persistent blocks do without running sums");
// A team owns a row as in the kernels for many rows: as a logical warp, or as whole warps.
template <int kWidth, int kXSize>
using FewRowsVecs =
    std::conditional_t<kWidth == 1, VecsList<8, kKeptColsPerThread>,
                       std::conditional_t<kXSize == 4, VecsList<2, 4, 8>, VecsList<2, 4>>>;
// There are kernels for all rows that teams for many rows keep in registers, but for a dy narrower
// than x; for longer ones only where nothing is fused and all tensors are of one type.
constexpr bool has_few_rows_kernel(DataType x, DataType weight, DataType y, bool fused,
                                   bool keeps) {
  return keeps ? !is_narrowed(x, y) : !fused && is_one_type(x, weight, y);
}
static_assert(contains(FewRowsVecs<1, 4>{}, most_backward_block_vecs(1)) &&
                  contains(FewRowsVecs<4, 4>{}, backward_block_vecs_from(4, 4, 1)) &&
                  contains(FewRowsVecs<8, 2>{}, backward_block_vecs_from(8, 2, 1)),
              "few rows have a kernel wherever a team of whole warps keeps the row");
// The number of lanes side by side on one row in blocks that compute only dweight and dbias. They
// move 64 bytes of the row by vectors, or a sector of 32 bytes by single elements.
constexpr int column_lanes(int width, int x_size) { return width == 1 ? 32 / x_size : 4; }
// These blocks add up the sums of their warps in shared memory.
constexpr int few_rows_shared_bytes(int block_threads, int width, int x_size) {
  return block_threads / kWarpThreads * column_lanes(width, x_size) * width * 2 *
         acc_size_of(x_size);
}
static_assert(few_rows_shared_bytes(kBackwardThreads, vector_width(2), 2) <= 4096 &&
                  few_rows_shared_bytes(kBackwardThreads, vector_width(4), 4) <= 4096,
              "shared memory never decides how many blocks of few rows run at once");

namespace backward {

struct FewRows : OneRowATeam {
  static constexpr const char* kName = "few_rows";
  int64_t column_blocks = 0;  // of the launch's blocks, those on columns

  static std::optional<FewRows> make(const Problem& problem, const Device& device,
                                     const Forced& forced);
  template <typename Json>
  void describe(Json& json) const {
    OneRowATeam::describe(json);
    json.add("column_blocks", column_blocks);
  }
};

inline bool has_few_rows(const Problem& problem, const Device& device) {
  const int64_t most =
      problem.aligned ? tuning_of(device).few_aligned_rows : tuning_of(device).few_other_rows;
  return problem.rows <= most &&
         problem.rows * problem.cols * (size_of(problem.x) + size_of(problem.y)) <=
             l2_limits(device).read_again;
}

// Lays out blocks of `teams` teams: those on rows, for dx, and those on columns beside them.
inline void lay_out_few_rows(FewRows& plan, const Problem& problem, int teams) {
  const int x_size = size_of(problem.x);
  plan.threads = plan.team_threads * teams;
  // A block has few columns of many rows, or of a single row a vector for each of its threads.
  const int lanes = problem.rows == 1 ? plan.threads : column_lanes(plan.width, x_size);
  plan.column_blocks =
      problem.needs_dparams ? ceil_div(problem.cols, int64_t{lanes} * plan.width) : 0;
  plan.shared_bytes =
      problem.needs_dparams ? few_rows_shared_bytes(plan.threads, plan.width, x_size) : 0;
  plan.blocks = ceil_div(problem.rows, teams) + plan.column_blocks;
}

// The teams of whole warps that a block of few rows should have.
inline int few_rows_teams(FewRows plan, const Problem& problem, const Device& device) {
  const auto teams_of = [&](int threads) {
    return std::clamp(threads / plan.team_threads, 1, kMostTeams);
  };
  const BackwardTuning& tuning = tuning_of(device);
  const int most = teams_of(tuning.few_rows_threads.at(problem.rows));
  if (plan.width > 1 && plan.team_threads < tuning.few_rows_least_threads) return most;
  const int blocks = few_rows_blocks(plan.width, plan.vecs, is_fused(problem));
  const int sm_threads = blocks * kBackwardThreads;
  for (int teams = most; teams * plan.team_threads >= tuning.few_rows_least_threads; --teams) {
    lay_out_few_rows(plan, problem, teams);
    const int64_t places = int64_t{device.sms} * (sm_threads / plan.threads);
    if (tuning.few_rows_places * plan.blocks <= tuning.few_rows_blocks * places) return teams;
  }
  return plan.width > 1 ? 1 : most;
}

inline std::optional<FewRows> FewRows::make(const Problem& problem, const Device& device,
                                            const Forced& forced) {
  // Of float64 other strategies take few rows, too: it is used for its digits, not its speed.
  const bool allowed = !problem.modulated && problem.x != DataType::kFloat64 &&
                       forced.allows(kName, {Field::kVecs, Field::kTeams});
  if (!allowed || !(has_few_rows(problem, device) || !forced.strategy.empty())) return std::nullopt;
  const auto has_kernel = [&](bool keeps) {
    return has_few_rows_kernel(problem.x, problem.weight, problem.y, is_fused(problem), keeps);
  };
  FewRows plan;
  plan.width = width_of(problem);
  int teams;
  // A row's dx is the same in any batch: a team owns a row as where there are many rows.
  if (const auto lanes = lanes_of(problem, forced); lanes && has_kernel(true)) {
    plan.vecs = lanes->vecs;
    plan.team_threads = lanes->lanes;
    plan.by_lanes = true;
    teams = tuning_of(device).few_rows_threads.at(problem.rows) / plan.team_threads;
  } else if (const auto rows = row_teams(problem, device, forced);
             rows && has_kernel(rows->team.keeps) &&
             (rows->team.keeps || problem.rows <= tuning_of(device).few_long_rows ||
              !forced.strategy.empty())) {
    plan.vecs = rows->team.vecs;
    plan.team_threads = rows->team.threads;
    teams = few_rows_teams(plan, problem, device);
  } else {
    return std::nullopt;
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

}  // namespace backward

BackwardLaunch<backward::FewRows> launch_layer_norm_backward;

}  // namespace fused_layernorm

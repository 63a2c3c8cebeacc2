// SPDX-License-Identifier: Apache-2.0
// The strategy "split": several blocks share a row and meet in global memory.
#pragma once

#include "backward/teams.h"

namespace fused_layernorm {

// Slices that come through a ring may be short, because several must fit. Others are as long as a
// block can have them, and their only kernel is that for the most columns a thread.
constexpr int split_least_vecs(int width, bool ring) {
  return ring ? 1 : most_backward_block_vecs(width);
}

namespace backward {

struct Split : Persistent {
  static constexpr const char* kName = "split";
  Slices slices;
  int lag = 1;                // rows between publishing a row's sums and collecting them
  bool has_collector = true;  // a warp beside the team collects sums; else the team's first does

  bool meets() const { return slices.count > 1; }
  static std::optional<Split> make(const Problem& problem, const Device& device,
                                   const Forced& forced);
  template <typename Json>
  void describe(Json& json) const {
    Persistent::describe(json);
    json.add(partials).add(slices).add("lag", lag).add("has_collector", has_collector);
  }
};

static_assert(kHopper.lag_without_ring < kMostCollected,
              "collected sums wait no longer than they are kept");
static_assert(kLeastSliceStages >= least_stages(false, kHopper.lags.at(kLeastSliceStages)),
              "every ring holds the rows of its lag");

// ---- Slices.

// Slices begin at multiples of this number of columns. Single elements can be moved from anywhere.
inline int64_t slice_unit(const Problem& problem, int width) {
  return width == 1 ? 1 : aligned_cols(size_of(problem.x), size_of(problem.y));
}

// The slices of rows for `blocks_per_row` blocks. They begin at multiples of `unit` columns or,
// where that leaves the last slice empty, of slice_unit(); or there are none.
inline std::optional<Slices> slices_of(const Problem& problem, int width, int blocks_per_row,
                                       int64_t unit) {
  const int64_t share = ceil_div(problem.cols, blocks_per_row);
  for (const int64_t begin : {unit, slice_unit(problem, width)}) {
    const int64_t cols = round_up(share, begin);
    if (cols * (blocks_per_row - 1) < problem.cols) {
      return Slices{blocks_per_row, static_cast<int>(cols)};
    }
  }
  return std::nullopt;
}

// The threads of a block on a slice, and whether a warp beside them collects its rows' sums.
struct SliceTeam {
  Team team;
  bool has_collector;
};

inline std::optional<SliceTeam> slice_team(const Problem& problem, int cols,
                                           const SliceRing& wanted, bool ring,
                                           const Forced& forced) {
  const int least = split_least_vecs(width_of(problem), ring);
  const auto beside = team_of(problem, cols, kBackwardThreads - kWarpThreads, least, forced);
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

// The plan of these slices, if their ring holds what is wanted of it.
inline std::optional<Split> split_into(const Slices& slices, const SliceRing& wanted,
                                       const Problem& problem, const Device& device,
                                       const Forced& forced) {
  const bool ring = may_have_ring(problem, device, forced);
  const auto own = slice_team(problem, slices.cols, wanted, ring, forced);
  if (!own) return std::nullopt;
  const Team& team = own->team;
  Split plan;
  set_team(plan, problem, team);
  plan.slices = slices;
  plan.has_collector = own->has_collector;
  plan.threads = plan.team_threads + (plan.has_collector ? kWarpThreads : 0);
  plan.bulk = ring;
  const BackwardTuning& tuning = tuning_of(device);
  if (ring) {
    const int most = most_stages(team, 1, device);
    if (most < wanted.stages) return std::nullopt;
    plan.stages = forced.value_or(Field::kStages, most);
    plan.lag = forced.value_or(Field::kLag, tuning.lags.at(plan.stages));
    if (plan.stages > most || plan.stages < least_stages(false, plan.lag)) return std::nullopt;
    plan.shared_bytes = static_cast<int>(team.param_bytes + plan.stages * team.stage_bytes);
  } else {
    plan.lag = forced.value_or(Field::kLag, tuning.lag_without_ring);
  }
  if (!forced.allows(Field::kBulk, plan.bulk) || !forced.allows(Field::kStages, plan.stages)) {
    return std::nullopt;
  }
  const int64_t sets = persistent_sets(problem, device, slices.count, 1);
  plan.blocks = sets * slices.count;
  plan.workspace_bytes = round_up(problem.rows * slices.count * 8, 256);
  lay_out_partials(plan, sets, problem);
  plan.partials.starts_early = device.starts_early;
  return plan;
}

// The plan with the fewest blocks a row that has one, or with the number that is forced.
inline std::optional<Split> split_with(const SliceRing& wanted, const Problem& problem,
                                       const Device& device, const Forced& forced) {
  const int width = width_of(problem);
  // Slices begin a whole number of cache lines after their row does, in the narrower of x and dy.
  const int64_t unit = slice_unit(problem, width);
  const int64_t line_cols = width == 1 ? unit : unit * (kCacheLineBytes / kVectorBytes);
  const int least = 2, most = most_blocks_per_row(device);
  const auto number = forced.of(Field::kBlocksPerRow);
  if (number && (*number < least || *number > most)) return std::nullopt;
  for (int n = number.value_or(least); n <= number.value_or(most); ++n) {
    const auto slices = slices_of(problem, width, number ? n : widen(n, device), line_cols);
    if (!slices) continue;
    // More blocks a row never have longer slices.
    if (slices->cols < wanted.least_cols) return std::nullopt;
    if (auto plan = split_into(*slices, wanted, problem, device, forced)) return plan;
  }
  return std::nullopt;
}

inline std::optional<Split> Split::make(const Problem& problem, const Device& device,
                                        const Forced& forced) {
  const bool allowed = !problem.modulated &&
                       forced.allows(kName, {Field::kVecs, Field::kTeams, Field::kBulk,
                                             Field::kStages, Field::kLag, Field::kBlocksPerRow}) &&
                       forced.allows(Field::kTeams, 1);
  // No kernels: float64, a y narrower than x, and single elements without a ring.
  const bool has_kernels = problem.x != DataType::kFloat64 && !is_narrowed(problem.x, problem.y) &&
                           (problem.aligned || may_have_ring(problem, device, forced));
  if (!allowed || !has_kernels) return std::nullopt;
  const auto first_of = [&](const auto& rings) -> std::optional<Split> {
    for (const SliceRing& ring : rings) {
      if (const auto plan = split_with(ring, problem, device, forced)) return plan;
    }
    return std::nullopt;
  };
  // Rows with an epilogue have one list of rings, whatever their types, with and without a
  // residual. Rows whose x and dy differ in size also have one list with and without a residual.
  const BackwardTuning& tuning = tuning_of(device);
  const int x_size = size_of(problem.x), y_size = size_of(problem.y);
  if (problem.has_epilogue) return first_of(tuning.epilogue_slice_rings);
  if (x_size != y_size) return first_of(tuning.slice_rings);
  if (problem.residual) return first_of(tuning.residual_slice_rings);
  return x_size == 2 ? first_of(tuning.half_slice_rings) : first_of(tuning.slice_rings);
}

}  // namespace backward

BackwardLaunch<backward::Split> launch_layer_norm_backward;

}  // namespace fused_layernorm

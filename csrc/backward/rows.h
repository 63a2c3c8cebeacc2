// SPDX-License-Identifier: Apache-2.0
// The strategy "rows": each row has a modulation of its own, so nothing is summed over rows.
#pragma once

#include "backward/warp.h"

namespace fused_layernorm {

// Rows with a modulation of their own: a block has about this many threads, or one larger team. The
// lists are the numbers of vectors that kernels are compiled for.
constexpr int kBackwardRowsThreads = 256;
template <int kWidth>
using BackwardRowsVecs =
    std::conditional_t<kWidth == 1, VecsList<16>,
                       std::conditional_t<kWidth == 4, VecsList<2, 4, 8>, VecsList<2, 4>>>;
constexpr int backward_rows_vecs_from(int width, int x_size, int64_t least) {
  if (width == 1) return first_from(BackwardRowsVecs<1>{}, least);
  return x_size == 4 ? first_from(BackwardRowsVecs<4>{}, least)
                     : first_from(BackwardRowsVecs<8>{}, least);
}
// Whether a row's other inputs are loaded together with x and dy. Otherwise there are no registers
// for them, and each is loaded where it is used.
constexpr bool backward_rows_load_early(int cols_per_thread, bool gated) {
  return cols_per_thread <= (gated ? 16 : 8);
}
static_assert(vector_width(4) == 4 && vector_width(2) == 8,
              "the vectors that kernels of float32 and of half precision are compiled for");

namespace backward {

struct Rows : OneRowATeam {
  static constexpr const char* kName = "rows";

  static std::optional<Rows> make(const Problem& problem, const Device&, const Forced& forced);
};

inline std::optional<Rows> Rows::make(const Problem& problem, const Device& device,
                                      const Forced& forced) {
  const bool has_kernel = problem.x != DataType::kFloat64 && (problem.aligned || !problem.gated);
  if (!is_of_rows(problem) || !has_kernel || !forced.allows(kName, {Field::kVecs}))
    return std::nullopt;
  Rows plan;
  plan.width = width_of(problem);
  // A row belongs to as many threads, each with as many of its vectors, as where groups have
  // several rows, so that its sums are the same (forward/plan.h names the exception).
  if (problem.aligned && problem.cols <= tuning_of(device).group_warp_vectors * plan.width) {
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

}  // namespace backward

BackwardLaunch<backward::Rows> launch_layer_norm_backward;

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// How a gated RMSNorm is laid over the chip. A group of columns of a row is held in registers by a
// logical warp, or by a block if it is longer (held). Groups that are longer still, do not begin at
// multiples of 16 bytes, or are float64 are read twice by a block (looped); so is backward where
// dbias is wanted, which no model wants. All blocks of one number, modulo the groups, have the same
// group, so that in backward a thread's running dweight belongs to the same columns in every row.
//
// The layout of a group depends on its length alone, never on the number of rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "base/choices.h"
#include "base/cuda_types.h"
#include "base/json.h"
#include "base/partial_sums.h"
#include "gated/params.h"

namespace fused_layernorm {

struct GatedProblem {
  int64_t rows = 0, cols = 0, groups = 1;
  DataType x = DataType::kFloat32, y = DataType::kFloat32;  // y: in backward of dy
  bool aligned = true;  // all groups of x, gate, weight, bias and dy begin at multiples of 16 bytes
  bool backward = false;
  bool needs_dweight = false, needs_dbias = false;
};

struct GatedPlan : Launch {
  bool held = false;
  int vecs = 0;        // held: vectors of a thread
  int log2_lanes = 0;  // held: of a logical warp, or kBlockTeam
  backward::PartialSums partials;

  int teams() const { return threads >> log2_lanes > 0 ? threads >> log2_lanes : 1; }
};

// For log2_lanes: the block is one team.
constexpr int kBlockTeam = 10;
static_assert(1 << kBlockTeam == kMostBlockThreads, "no block has two teams of this size");

// Vectors of a thread: few where the lanes of a warp have the group then.
constexpr int kGatedManyVecs = 4;
constexpr int gated_few_vecs(bool backward) { return backward ? 1 : 2; }
template <bool kBackward>
using GatedVecs = VecsList<gated_few_vecs(kBackward), kGatedManyVecs>;

// Threads of a block of logical warps, and the most of a block that is a team; in backward also the
// threads that a multiprocessor has registers for. (Backward on an H100, of copy speed: 524288 x 128
// bfloat16 .944, with 128 threads of two vectors .882; 131072 x 1024 .895, with 128 threads .853.)
constexpr int kGatedWarpThreads = 128, kGatedBlockThreads = 1024;
constexpr int kGatedBackwardWarpThreads = 256, kGatedBackwardBlockThreads = 512;
constexpr int gated_backward_room(int vecs, bool wide_dy) {
  return vecs > 1 ? 512 : wide_dy ? 768 : 1024;
}

// Blocks that read their groups twice.
constexpr int kLoopThreads = 512, kLoopBlocks = 4;  // kLoopBlocks: of a multiprocessor
// The partial sums of such blocks should not take more.
constexpr int64_t kMostLoopBytes = int64_t{64} << 20;

// Nothing for a problem that kernels cannot count.
inline std::optional<GatedPlan> make_gated_norm_plan(const GatedProblem& problem,
                                                     const Device& device) {
  GatedPlan plan;
  const bool is_backward = problem.backward;
  const int width = vector_width(size_of(problem.x));
  const int64_t vectors = ceil_div(problem.cols, width);
  const int few = gated_few_vecs(is_backward);
  plan.vecs = vectors <= kWarpThreads * few ? few : kGatedManyVecs;
  const int64_t of_row = ceil_div(vectors, plan.vecs);
  const int most = is_backward ? kGatedBackwardBlockThreads : kGatedBlockThreads;
  plan.held = problem.aligned && problem.x != DataType::kFloat64 && of_row <= most &&
              !(is_backward && problem.needs_dbias);
  if (!plan.held) {
    plan.vecs = 0;
    plan.log2_lanes = kBlockTeam;
    plan.threads =
        static_cast<int>(std::min<int64_t>(round_up(problem.cols, kWarpThreads), kLoopThreads));
  } else if (of_row <= kWarpThreads) {
    while (1 << plan.log2_lanes < of_row) ++plan.log2_lanes;
    plan.threads = is_backward ? kGatedBackwardWarpThreads : kGatedWarpThreads;
    if (is_backward && problem.needs_dweight) {
      // The sums of each warp, which are added up at the end.
      plan.shared_bytes =
          static_cast<int>(plan.threads / kWarpThreads * problem.cols * acc_size_of(problem.x));
    }
  } else {
    plan.log2_lanes = kBlockTeam;
    plan.threads = static_cast<int>(round_up(of_row, kWarpThreads));
  }
  // Blocks of one group.
  int64_t sets = ceil_div(problem.rows, plan.teams());
  if (is_backward) {
    const int64_t width_bytes = problem.groups * problem.cols * acc_size_of(problem.x);
    const int room = gated_backward_room(plan.vecs, size_of(problem.y) > size_of(problem.x));
    const int64_t of_chip = int64_t{device.sms} * (plan.held ? room / plan.threads : kLoopBlocks);
    sets = std::min(sets, of_chip / problem.groups);
    if (!plan.held) sets = std::min(sets, kMostLoopBytes / (2 * width_bytes));
    // The sums of two sets and more are partial sums.
    sets = std::max<int64_t>(sets, 2);
    plan.partials = {static_cast<int>(sets), 0, device.starts_early};
    if (problem.needs_dweight || problem.needs_dbias) {
      plan.workspace_bytes = (problem.needs_dbias ? 2 : 1) * sets * width_bytes;
    }
  }
  plan.blocks = sets * problem.groups;
  if (plan.blocks > kMostBlocks || problem.groups * problem.cols > kMostExtent) return std::nullopt;
  return plan;
}

// The plan in words, as JSON.
inline std::string describe(const GatedPlan& plan) {
  Json json(plan.held ? "held" : "looped");
  json.add("vecs", plan.vecs).add("teams", plan.teams()).add("partials", plan.partials.count);
  json.add("blocks", plan.blocks).add("threads", plan.threads);
  json.add("shared_bytes", plan.shared_bytes).add("workspace_bytes", plan.workspace_bytes);
  return json.end();
}

cudaError_t launch_gated_forward(const GatedParams& params, DataType x, const GatedPlan& plan,
                                 cudaStream_t stream);
// `types`: of x, of weight, and of dy.
cudaError_t launch_gated_backward(const GatedParams& params, const DataTypes& types,
                                  const GatedPlan& plan, cudaStream_t stream);

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// How a gated RMSNorm is laid over the chip. A group of columns of a row is held by a logical warp,
// or by a block if it is longer (held): in registers, in backward in shared memory. Groups that are
// longer still, do not begin at multiples of 16 bytes, or are float64 are read twice by a block
// (looped); so is backward where there is a bias, which no model has. All blocks of one number,
// modulo the groups, have the same group, so that in backward a thread's running dweight belongs to
// the same columns in every row.
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
  DataType x = DataType::kFloat32;
  bool aligned = true;  // all groups of x, gate, weight, bias and dy begin at multiples of 16 bytes
  bool backward = false;
  bool needs_dweight = false, bias = false;  // bias: in backward
};

struct GatedPlan : Launch {
  bool held = false;
  int vecs = 0;        // held: vectors of a thread
  int log2_lanes = 0;  // held: of a logical warp, or kBlockTeam
  int stages = 0;      // held, in backward: rows of a team in shared memory
  // Forward of many vectors: x, gate and y stay in L2 as other data does; else evict_first.
  bool stays_in_l2 = false;
  backward::PartialSums partials;

  int teams() const { return threads >> log2_lanes > 0 ? threads >> log2_lanes : 1; }
};

// For log2_lanes: the block is one team.
constexpr int kBlockTeam = 10;
static_assert(1 << kBlockTeam == kMostBlockThreads, "no block has two teams of this size");

// Vectors of a thread: one where the lanes of a warp have the group then.
constexpr int kGatedManyVecs = 4;
using GatedVecs = VecsList<1, kGatedManyVecs>;

// Threads of a block of logical warps, and the most of a block that is a team.
constexpr int kGatedWarpThreads = 128, kGatedBlockThreads = 1024;
// Forward blocks of logical warps that a multiprocessor has registers for: of more, the compiler
// makes the loads of a row wait for each other; of fewer, long calls take longer. (H100, bfloat16,
// gate first, 8, 12 and 16 blocks: 32 x 128 1.44, 1.50, 1.58 us; 524288 x 128 142, 136, 137.)
constexpr int kGatedWarpBlocks = 12;
// The same of backward, and the threads that a multiprocessor has registers for there. (H100, of
// copy speed, with 128 threads: 524288 x 128 bfloat16 .944, .882; 131072 x 1024 .895, .853.)
constexpr int kGatedBackwardWarpThreads = 256, kGatedBackwardBlockThreads = 512;
constexpr int gated_backward_room(int vecs) { return vecs > 1 ? 512 : 1024; }

// In backward a thread has its vectors of x, gate and dy of so many rows in shared memory at most:
// of the row that it works on, and of the next.
constexpr int kGatedStages = 2, kGatedTensors = 3;
constexpr int kGatedOtherBytes = 512;  // of shared memory, for sums

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
  plan.vecs = vectors <= kWarpThreads ? 1 : kGatedManyVecs;
  const int64_t of_row = ceil_div(vectors, plan.vecs);
  const bool is_warp = of_row <= kWarpThreads;
  const int most = is_backward ? kGatedBackwardBlockThreads : kGatedBlockThreads;
  plan.held = problem.aligned && problem.x != DataType::kFloat64 && of_row <= most &&
              !(is_backward && problem.bias);
  plan.threads = is_warp
                     ? (is_backward ? kGatedBackwardWarpThreads : kGatedWarpThreads)
                     : static_cast<int>(round_up(std::min<int64_t>(of_row, most), kWarpThreads));
  if (is_warp) {
    while (1 << plan.log2_lanes < of_row) ++plan.log2_lanes;
  } else {
    plan.log2_lanes = kBlockTeam;
  }
  // Of few rows one block has them all, one for each logical warp, and writes dweight itself: a
  // second kernel would take longer. (H100, 32 x 128 bfloat16 2.75, 3.66 us; with two rows for each
  // logical warp 64 x 128 takes longer than by two kernels.)
  const bool has_few_rows = plan.held && plan.vecs == 1 && is_backward && problem.needs_dweight &&
                            problem.rows <= kGatedBackwardBlockThreads >> plan.log2_lanes;
  if (has_few_rows) plan.threads = kGatedBackwardBlockThreads;
  if (plan.held && is_backward) {
    const int stage_bytes = plan.threads * kGatedTensors * plan.vecs * kVectorBytes;
    const int most_stages = has_few_rows ? 1 : kGatedStages;
    plan.stages = std::min((device.shared_memory - kGatedOtherBytes) / stage_bytes, most_stages);
    plan.shared_bytes = plan.stages * stage_bytes;
    plan.held = plan.stages > 0;
  }
  if (!plan.held) {
    plan.vecs = 0;
    plan.log2_lanes = kBlockTeam;
    plan.threads =
        static_cast<int>(std::min<int64_t>(round_up(problem.cols, kWarpThreads), kLoopThreads));
  }
  const double bytes = 3.0 * size_of(problem.x) * problem.rows * problem.groups * problem.cols;
  plan.stays_in_l2 = !is_backward && bytes >= l2_limits(device).large_call;
  // Blocks of one group.
  int64_t sets = ceil_div(problem.rows, plan.teams());
  if (is_backward) {
    const int64_t width_bytes = problem.groups * problem.cols * acc_size_of(problem.x);
    // A multiprocessor has a kilobyte more than a block may have, and reserves one of each block.
    const int blocks = plan.held ? std::min(gated_backward_room(plan.vecs) / plan.threads,
                                            (device.shared_memory + 1024) /
                                                (plan.shared_bytes + 1024 + kGatedOtherBytes))
                                 : kLoopBlocks;
    const int64_t of_chip = int64_t{device.sms} * blocks;
    sets = std::min(sets, of_chip / problem.groups);
    if (!plan.held) sets = std::min(sets, kMostLoopBytes / (2 * width_bytes));
    // The sums of two sets and more are partial sums.
    sets = has_few_rows ? 1 : std::max<int64_t>(sets, 2);
    plan.partials = {static_cast<int>(sets), 0, device.starts_early};
    if (sets > 1 && (problem.needs_dweight || problem.bias)) {
      plan.workspace_bytes = (problem.bias ? 2 : 1) * sets * width_bytes;
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
  json.add("blocks", plan.blocks).add("threads", plan.threads).add("stages", plan.stages);
  json.add("stays_in_l2", plan.stays_in_l2);
  json.add("shared_bytes", plan.shared_bytes).add("workspace_bytes", plan.workspace_bytes);
  return json.end();
}

cudaError_t launch_gated_forward(const GatedParams& params, DataType x, const GatedPlan& plan,
                                 cudaStream_t stream);
cudaError_t launch_gated_backward(const GatedParams& params, DataType x, const GatedPlan& plan,
                                  cudaStream_t stream);

}  // namespace fused_layernorm

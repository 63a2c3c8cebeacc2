// SPDX-License-Identifier: Apache-2.0
// Heads: the rows of q and k, one for each head of each position, are normalized and rotated in one
// launch; backward rotates dy back, and computes dx from it and from x, whose statistics are taken
// again, as that costs no traffic. This file has the plans, heads/params.h what a launch is given.
//
// A row of D columns belongs to a power-of-two part of a warp, whose lanes have vectors in pairs:
// the two vectors of a pair are what a rotation of halves turns together, so it needs no exchange
// between lanes. A warp works on several heads of one position at once, and reads the position's
// cos and sin once for all of its heads. Backward's blocks are persistent, the first ones on q, the
// others on k, and leave partial sums of dweight and dbias, which a second kernel adds up.
//
// Backward of q, k and v in one tensor writes all of its gradient: a third side copies v's. Of a
// rotation alone it is forward, with the reverse rotation and that third side.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "base/cuda_types.h"
#include "base/problem.h"
#include "heads/params.h"

namespace fused_layernorm {

namespace forward {

struct Heads : Launch {
  int width = 1;  // of a vector
};

// Of a block (2 x 4096 x 32 x 128 bfloat16: 96 us, with 256 threads 106).
constexpr int kHeadThreads = 128;
constexpr int kHeadWarps = kHeadThreads / kWarpThreads;
// Blocks that a multiprocessor has registers for (the same rows, H200: 73.9 us, of 5 76.1).
constexpr int kHeadBlocks = 6;

// How many times in one task a warp works on as many heads as it does at once. The loads of all
// rounds are issued at once (with one round 113 us).
constexpr int task_rounds(int width) { return width == 1 ? 1 : 2; }

}  // namespace forward

// Which widths there are kernels for: whole vectors, or single elements.
inline int head_width(const HeadsCall& params) {
  const int width = vector_width(size_of(params.type));
  const bool whole = params.cols % (2 * width) == 0 && params.rotary % (2 * width) == 0;
  return params.aligned && whole ? width : 1;
}

// Lays out the tasks of both sides; false if there are no kernels for such rows.
inline bool lay_out_heads(auto& params, int width, int rounds) {
  const bool known = params.type != DataType::kFloat64 && params.cols > 0 && params.cols % 2 == 0 &&
                     params.cols <= kMostHeadCols && params.rotary % 2 == 0 &&
                     params.rotary <= params.cols;
  if (!known) return false;
  const int pairs = params.cols / (2 * width);
  params.lanes = static_cast<int32_t>(power_of_two_from(std::min(pairs, kWarpThreads)));
  const int rows = kWarpThreads / params.lanes;  // of a warp at once
  for (HeadSide& side : params.side) {
    if (side.heads == 0) continue;
    side.at_once = static_cast<int32_t>(power_of_two_from(std::min(side.heads, rows)));
    const int of_task = side.at_once * rounds;
    side.chunks = static_cast<int32_t>(ceil_div(side.heads, of_task));
    const int64_t tasks = ceil_div(params.positions, rows / side.at_once) * side.chunks;
    if (tasks >= int64_t{1} << 31) return false;
    side.tasks = static_cast<int32_t>(tasks);
  }
  return true;
}

namespace forward {

// A warp for each task. There are rows.
inline std::optional<Heads> make_heads_plan(auto& params) {
  Heads plan;
  plan.width = head_width(params);
  if (!lay_out_heads(params, plan.width, task_rounds(plan.width))) return std::nullopt;
  plan.threads = kHeadThreads;
  plan.blocks = 0;
  for (HeadSide& side : params.side) {
    side.blocks = static_cast<int32_t>(ceil_div(side.tasks, kHeadWarps));
    plan.blocks += side.blocks;
  }
  return plan;
}

}  // namespace forward

namespace backward {

struct Heads : Launch {
  int width = 1;  // of a vector
  bool starts_early = false;
};

constexpr int kHeadThreads = 256;  // of a block
constexpr int kHeadWarps = kHeadThreads / kWarpThreads;
constexpr int kHeadBlocks = 2;  // of a multiprocessor (2 x 4096 x 32 x 128 bfloat16 in us: 155; one
                                // 165, three, which spill, 224)
constexpr int task_rounds(int) { return 1; }  // with two, 161 us

// The rows of one block among the partial sums, [blocks][dweight, dbias][cols].
constexpr int kHeadSums = 2;

// There are rows, and a statistic.
inline std::optional<Heads> make_heads_plan(auto& params, const Device& device) {
  Heads plan;
  plan.width = head_width(params);
  if (!lay_out_heads(params, plan.width, task_rounds(plan.width))) return std::nullopt;
  plan.threads = kHeadThreads;
  plan.starts_early = device.starts_early;
  // A block copies some three times as fast as it computes.
  const auto work = [&](const HeadSide& side) {
    const bool copies = &side - params.side == 2 || side.dy == nullptr;
    return int64_t{side.tasks} * (copies ? 1 : 3);
  };
  int64_t all = 0;
  for (const HeadSide& side : params.side) all += work(side);
  const int64_t most = int64_t{kHeadBlocks} * device.sms;
  plan.blocks = 0;
  for (HeadSide& side : params.side) {
    const int64_t wanted = ceil_div(side.tasks, kHeadWarps);
    const int64_t part = std::max<int64_t>(1, (most * work(side) + all / 2) / all);
    side.blocks = static_cast<int32_t>(std::min(wanted, part));
    plan.blocks += side.blocks;
  }
  plan.workspace_bytes = plan.blocks * kHeadSums * params.cols * int64_t{sizeof(float)};
  return plan;
}

}  // namespace backward

cudaError_t launch_heads_forward(const HeadsParams& params, const forward::Heads& plan,
                                 cudaStream_t stream);
cudaError_t launch_heads_forward(const PackedHeadsParams& params, const forward::Heads& plan,
                                 cudaStream_t stream);
cudaError_t launch_heads_backward(const HeadsParams& params, const backward::Heads& plan,
                                  cudaStream_t stream);
cudaError_t launch_heads_backward(const PackedHeadsParams& params, const backward::Heads& plan,
                                  cudaStream_t stream);

}  // namespace fused_layernorm

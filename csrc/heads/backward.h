// SPDX-License-Identifier: Apache-2.0
// Backward of heads (heads/forward.h): dy is rotated back, and dx computed from it and from x,
// whose statistics are taken again: that costs no traffic. Persistent blocks, those in front on q,
// the others on k, leave partial sums of dweight and dbias, which a second kernel adds up.
#pragma once

#include <algorithm>
#include <optional>

#include "heads/forward.h"

namespace fused_layernorm {
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

// The rows of dweight and dbias of one block among the partial sums, [blocks][dweight,
// dbias][cols].
constexpr int kHeadSums = 2;

// There are rows, and a statistic.
inline std::optional<Heads> make_heads_plan(HeadsParams& params, const Device& device) {
  Heads plan;
  plan.width = head_width(params);
  if (!lay_out_heads(params, plan.width, task_rounds(plan.width))) return std::nullopt;
  plan.threads = kHeadThreads;
  plan.starts_early = device.starts_early;
  const int64_t all = int64_t{params.side[0].tasks} + params.side[1].tasks;
  const int64_t most = int64_t{kHeadBlocks} * device.sms;
  plan.blocks = 0;
  for (HeadSide& side : params.side) {
    const int64_t wanted = ceil_div(side.tasks, kHeadWarps);
    const int64_t part = std::max<int64_t>(1, (most * side.tasks + all / 2) / all);
    side.blocks = static_cast<int32_t>(std::min(wanted, part));
    plan.blocks += side.blocks;
  }
  plan.workspace_bytes = plan.blocks * kHeadSums * params.cols * int64_t{sizeof(float)};
  return plan;
}

}  // namespace backward

cudaError_t launch_heads_backward(const HeadsParams& params, const backward::Heads& plan,
                                  cudaStream_t stream);

}  // namespace fused_layernorm

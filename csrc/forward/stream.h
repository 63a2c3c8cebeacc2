// SPDX-License-Identifier: Apache-2.0
// The strategy "stream", for any length: sums of chunks, their combination, a second read.
#pragma once

#include "forward/row.h"

namespace fused_layernorm {

constexpr int kForwardStreamThreads = 512;
constexpr int forward_stream_vecs(int width) { return width == 1 ? 16 : 8; }
constexpr int forward_stream_cols(int width) {
  return kForwardStreamThreads * forward_stream_vecs(width) * width;
}
// A launch has at most one block for each chunk of each row. Chunks have 4,096 columns and more:
// blocks would be too many only from 2^43 elements on, more than any device holds.
static_assert(forward_stream_cols(1) >= 4096 && forward_stream_cols(2) >= 4096,
              "a launch has enough blocks for all chunks of all rows that a device holds");

namespace forward {

struct Stream : Launch {
  static constexpr const char* kName = "stream";
  int width = 1;  // elements that a thread moves at once: a whole vector, or one
  Slices chunks;
  int64_t totals_offset = 0;  // in the workspace: mean and rstd of every row

  static std::optional<Stream> make(const Problem& problem, const Device&, const Forced& forced);
  template <typename Json>
  void describe(Json& json) const {
    json.add("width", width).add(chunks).add("totals_offset", totals_offset);
  }
};

inline std::optional<Stream> Stream::make(const Problem& problem, const Device&,
                                          const Forced& forced) {
  if (!forced.allows(kName, {})) return std::nullopt;
  Stream plan;
  plan.width = problem.aligned ? vector_width_of(problem) : 1;
  const int cols = forward_stream_cols(plan.width);
  plan.chunks = {static_cast<int>(ceil_div(problem.cols, cols)), cols};
  plan.threads = kForwardStreamThreads;
  plan.blocks = problem.rows * plan.chunks.count;
  const int64_t moments = int64_t{2} * acc_size_of(problem.x);
  plan.totals_offset = round_up(plan.blocks * moments, 256);
  plan.workspace_bytes = plan.totals_offset + problem.rows * moments;
  return plan;
}

}  // namespace forward

ForwardLaunch<forward::Stream> launch_layer_norm_forward;

}  // namespace fused_layernorm

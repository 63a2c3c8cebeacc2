// SPDX-License-Identifier: Apache-2.0
// The gradient of a gate: blocks on some columns of a range of rows. A warp has some columns of one
// row, and the warps of a block have rows that follow each other.
#pragma once

#include "backward/teams.h"

namespace fused_layernorm {

constexpr int kGateThreads = 256;
constexpr int kGateWarps = kGateThreads / kWarpThreads;
// A lane has a vector of a row, or several single elements.
constexpr int gate_vecs(int width) { return width == 1 ? 8 : 1; }
static_assert(gate_vecs(1) <= kGateWarps, "a block has a warp for the sum of each vector");
constexpr int gate_cols(int width) { return kWarpThreads * gate_vecs(width) * width; }

namespace backward {

struct Gate : Launch {
  static constexpr const char* kName = "gate";
  int width = 1;
  int chunks = 1;  // blocks side by side on one row
  GroupParts parts;

  // Of the problem it reads rows, cols, x, aligned, needs_dparams, needs_column_grads and
  // group_rows. No part of it can be forced.
  static Gate make(const Problem& problem, const Device& device);
  template <typename Json>
  void describe(Json& json) const {
    json.add("width", width).add("chunks", chunks).add(parts);
  }
};

// Blocks a multiprocessor, all of which run at once.
constexpr int kGateBlocks = 6;

inline Gate Gate::make(const Problem& problem, const Device& device) {
  Gate plan;
  plan.width = width_of(problem);
  plan.threads = kGateThreads;
  plan.chunks = static_cast<int>(ceil_div(problem.cols, gate_cols(plan.width)));
  // All blocks run at once, at most one set for each kGateWarps rows: few warps have no row.
  const int64_t room = int64_t{kGateBlocks} * device.sms;
  const int64_t sets =
      std::clamp<int64_t>(room / plan.chunks, 1, ceil_div(problem.rows, kGateWarps));
  plan.blocks = sets * plan.chunks;
  lay_out_parts(plan.parts, plan, sets, 1, problem, device);
  return plan;
}

}  // namespace backward

cudaError_t launch_gate_backward(const GateParams& params, const DataTypes& types,
                                 const backward::Gate& plan, cudaStream_t stream);

}  // namespace fused_layernorm

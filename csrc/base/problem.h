// SPDX-License-Identifier: Apache-2.0
// What is to be computed, as far as a plan depends on it, and what every plan says of its launch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/chip.h"
#include "base/types.h"

namespace fused_layernorm {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
constexpr int64_t power_of_two_from(int64_t n) {
  int64_t power = 1;
  while (power < n) power *= 2;
  return power;
}

// What is to be computed, as far as the plan depends on it.
struct Problem {
  int64_t rows = 0;
  int64_t cols = 0;
  DataType x = DataType::kFloat32;
  DataType weight = DataType::kFloat32;  // of bias too
  DataType y = DataType::kFloat32;       // of dy in backward
  bool aligned = true;    // every row of every tensor begins at a multiple of 16 bytes
  bool halves = false;    // forward, not aligned: every row of x and y begins at a multiple of 8
  bool residual = false;  // forward: a second input; backward: a gradient added to dx
  // An activation, a scale that is not 1, or a weight that is not plain (ForwardParams).
  bool has_epilogue = false;
  bool needs_dparams = true;  // backward: a gradient of a parameter is asked for
  bool modulated = false;     // by shift and scale of groups of rows, or by a gate

  // Backward of a modulated norm.
  int64_t group_rows = 0;           // rows of a group; 1 where each row has its own shift and scale
  bool needs_column_grads = false;  // dweight or dbias is asked for
  bool gated = false;               // x was a gated sum, whose gradients are asked for too
};

// What every launch needs.
struct Launch {
  int64_t blocks = 1;
  int threads = kWarpThreads;  // of a block
  int shared_bytes = 0;        // of dynamic shared memory, of a block
  int64_t workspace_bytes = 0;
  int cluster = 1;  // blocks that run at the same time and read each other's shared memory

  // Whether blocks wait for each other, so that all must be resident at once. Strategies with such
  // blocks have a function of their own.
  bool meets() const { return false; }
};

// How a logical warp owns a row: vectors of a lane, and lanes.
struct Lanes {
  int vecs;
  int lanes;
};

// How a row is cut into slices, one for each of several blocks.
struct Slices {
  int count = 1;
  int cols = 0;  // of each slice but the last, which may be shorter

  template <typename Json>
  void describe(Json& json) const {
    json.add("blocks_per_row", count).add("slice_cols", cols);
  }
};

// The slots of a row's sums that each lane of a collecting warp can hold.
constexpr int kSlotsPerLane = 5;
// On a device with more multiprocessors than this, some do not work on the longest rows.
constexpr int kMaxBlocksPerRow = kSlotsPerLane * kWarpThreads;
inline int most_blocks_per_row(const Device& device) {
  return device.blocks_meet ? std::min(device.sms, kMaxBlocksPerRow) : 1;
}

// The most blocks a row with which as many rows are in work at once as with `least` blocks a row,
// so that few multiprocessors are idle.
inline int widen(int least, const Device& device) {
  return std::min(kMaxBlocksPerRow, device.sms / (device.sms / least));
}

// The number of sets of blocks: as many as the device has room for, but no more than the rows need.
// A set works on one row for each of its teams at a time.
inline int64_t persistent_sets(const Problem& problem, const Device& device, int blocks_per_row,
                               int teams) {
  const int64_t room = device.sms / blocks_per_row;
  return std::max<int64_t>(1, std::min(room, ceil_div(problem.rows, teams)));
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// Heads: the rows of q and k, one for each head of each position, are normalized and rotated in one
// launch. This file has what a launch is given, its limits and its plan; forward/heads.cu has the
// kernels, backward/heads.h and backward/heads.cu the same for backward.
//
// A row of D columns belongs to a power-of-two part of a warp, whose lanes have vectors in pairs:
// the two vectors of a pair are what a rotation of halves turns together, so it needs no exchange
// between lanes. A warp works on several heads of one position at once, and reads the position's
// cos and sin once for all of its heads.
#pragma once

#include <cstdint>
#include <optional>

#include "base/cuda_types.h"
#include "base/params.h"
#include "base/problem.h"

namespace fused_layernorm {

constexpr int kMostHeadCols = 256;
// Pairs of a lane whose vectors are single elements. Such rows do not begin at multiples of 16
// bytes, or their rotated part is no whole number of pairs of vectors.
constexpr int kNarrowPairs = 4;
static_assert(2 * kNarrowPairs * kWarpThreads >= kMostHeadCols, "a warp holds a row of elements");
static_assert(2 * vector_width(4) * kWarpThreads >= kMostHeadCols, "a warp holds a row of vectors");

enum class HeadStatistic : int32_t { kNone, kRms, kLayer };

// The first element of head h of position s of sample b is b * batch + s * position + h * head.
struct HeadStrides {
  int64_t batch = 0, position = 0, head = 0;
};

// q or k.
struct HeadSide {
  const void* x = nullptr;
  const void* dy = nullptr;      // backward
  void* y = nullptr;             // backward: dx
  const void* weight = nullptr;  // optional
  const void* bias = nullptr;    // optional; forward
  HeadStrides x_strides, dy_strides, y_strides;
  int32_t heads = 0;
  bool weight_is_float = false;  // float32, beside x of any type; else of x's type
  bool bias_is_float = false;
  bool rounds = false;      // forward: xhat and the norm's result are rounded to x's type
  void* dweight = nullptr;  // backward, optional, of weight's type
  void* dbias = nullptr;    // backward, optional, of bias's type

  // Set by the plan. A warp works on `at_once` heads of one position at once (or on all heads of
  // several positions, where there are fewer), and in a task on `slots` times as many.
  int32_t at_once = 1;
  int32_t chunks = 1;  // tasks of a position
  int32_t tasks = 0;
  int32_t blocks = 0;  // of the launch
};

struct HeadsParams {
  HeadSide side[2];  // q, and k, which may have no heads
  // cos and sin of the pairs of a position, of x's type or float32. A doubled row has 2 values for
  // each pair: the second ones stand behind all first ones, or with interleaved pairs beside them.
  const void* cos = nullptr;
  const void* sin = nullptr;
  HeadStrides cos_strides, sin_strides;
  bool angles_are_float = false;
  bool doubled = false;
  bool interleaved = false;  // a pair is (2 i, 2 i + 1), else (i, i + rotary / 2)
  float sin_sign = 1;        // -1 rotates back

  DataType type = DataType::kFloat32;  // of q and k
  bool aligned = true;    // all rows, and those of cos and sin, begin at multiples of 16 bytes
  int32_t positions = 0;  // of all samples
  int32_t seq = 0;        // positions of a sample
  int32_t cols = 0;
  int32_t rotary = 0;  // columns of a row that are rotated, the first ones
  int32_t lanes = 1;   // on a row; set by the plan
  HeadStatistic statistic = HeadStatistic::kRms;
  float weight_offset = 0;
  float eps = 0;
  Scalar inverse_cols;
  void* workspace = nullptr;
};

namespace forward {

struct Heads : Launch {
  int width = 1;  // of a vector
};

// Of a block (2 x 4096 x 32 x 128 bfloat16: 96 us, with 256 threads 106).
constexpr int kHeadThreads = 128;
constexpr int kHeadWarps = kHeadThreads / kWarpThreads;

// Groups of heads that a warp works on in one task. The loads of all of them are issued at once
// (with one group 113 us).
constexpr int head_slots(int width) { return width == 1 ? 1 : 2; }

}  // namespace forward

// Which widths there are kernels for: whole vectors, or single elements.
inline int head_width(const HeadsParams& params) {
  const int width = vector_width(size_of(params.type));
  const bool whole = params.cols % (2 * width) == 0 && params.rotary % (2 * width) == 0;
  return params.aligned && whole ? width : 1;
}

// Lays out the tasks of both sides; false if there are no kernels for such rows.
inline bool lay_out_heads(HeadsParams& params, int width, int slots) {
  const bool known = params.type != DataType::kFloat64 && params.cols > 0 && params.cols % 2 == 0 &&
                     params.cols <= kMostHeadCols && params.rotary % 2 == 0 &&
                     params.rotary <= params.cols;
  if (!known) return false;
  const int pairs = params.cols / (2 * width);
  params.lanes = power_of_two_from(pairs < kWarpThreads ? pairs : kWarpThreads);
  const int rows = kWarpThreads / params.lanes;  // of a warp at once
  for (HeadSide& side : params.side) {
    if (side.heads == 0) continue;
    const int heads = power_of_two_from(side.heads);
    side.at_once = heads < rows ? heads : rows;
    const int of_task = side.at_once * slots;
    side.chunks = static_cast<int32_t>(ceil_div(side.heads, of_task));
    const int64_t tasks = ceil_div(params.positions, rows / side.at_once) * side.chunks;
    if (tasks >= int64_t{1} << 31) return false;
    side.tasks = static_cast<int32_t>(tasks);
  }
  return true;
}

namespace forward {

// A warp for each task. There are rows.
inline std::optional<Heads> make_heads_plan(HeadsParams& params) {
  Heads plan;
  plan.width = head_width(params);
  if (!lay_out_heads(params, plan.width, head_slots(plan.width))) return std::nullopt;
  plan.threads = kHeadThreads;
  plan.blocks = 0;
  for (HeadSide& side : params.side) {
    side.blocks = static_cast<int32_t>(ceil_div(side.tasks, kHeadWarps));
    plan.blocks += side.blocks;
  }
  return plan;
}

}  // namespace forward

cudaError_t launch_heads_forward(const HeadsParams& params, const forward::Heads& plan,
                                 cudaStream_t stream);

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// What a launch for heads is given (q and k, normalized and rotated), and its limits.
#pragma once

#include <cstdint>

#include "base/chip.h"
#include "base/params.h"

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

// q or k; or v.
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
  // several positions, where there are fewer), and in a task in several rounds on as many more.
  int32_t at_once = 1;
  int32_t chunks = 1;  // tasks of a position
  int32_t tasks = 0;
  int32_t blocks = 0;  // of the launch
};

struct HeadsCall {
  // cos and sin of the pairs of a position, of x's type or float32. A doubled row has 2 values for
  // each pair: the second ones come after all first ones, or with interleaved pairs each next to
  // its first.
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

template <int kSides>
struct HeadSides {
  HeadSide side[kSides];  // each of which may have no heads
};

// q and k.
struct HeadsParams : HeadSides<2>, HeadsCall {};

// Parts of one tensor: q, k, and in backward v, whose gradient is copied to its place. So is, as
// zeros, a gradient that is null. (The kernels of HeadsParams do not pay for this.)
struct PackedHeadsParams : HeadSides<3>, HeadsCall {
  // Elements between two groups of q's heads, beside `head`, in x and in dx; and 2^32 divided by
  // the heads of a group, rounded up, or 0 where all heads are one group.
  int64_t x_group = 0, y_group = 0;
  uint32_t inverse_group = 0;
};

// Without v.
inline HeadsParams q_and_k(const HeadsParams& params) { return params; }
inline HeadsParams q_and_k(const PackedHeadsParams& params) {
  return {{{params.side[0], params.side[1]}}, params};
}

}  // namespace fused_layernorm

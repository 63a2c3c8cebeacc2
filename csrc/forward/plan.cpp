// SPDX-License-Identifier: Apache-2.0
// Forward, from problem to plan.
#include "forward/plan.h"

namespace fused_layernorm {
namespace {

// What becomes in L2 of what is read and written once: either it stays as other data does
// (evict_normal), or it is evict_first (L2Policy in device/vec.cuh). Lines marked
// evict_first replace each other before any evict_normal line, so they have only the part of L2
// that no other kernel has filled. Each comment has two pairs of times, by evict_first and by
// evict_normal: with L2 empty of other data, and behind a matrix product.

// So little of x stays. (float32, all by logical warps: 512 x 16 1.73, 1.42; 1.72, 1.41. 64 x 256
// 1.82, 1.72; 1.81, 1.66; but 64 x 320 1.88, 1.97; 1.88, 1.94.)
constexpr int64_t kSmallL2Bytes = 64 << 10;
// Calls that move so many bytes or more let them stay. (bfloat16: 32768 x 4096 131.0, 131.4; 137.5,
// 131.3. 8192 x 4096 34.4, 34.9; 36.2, 35.0. With a residual 8192 x 2048 34.2, 34.6; 35.3, 34.7.
// But 4096 x 4096 18.5, 19.3; 19.2, 19.3, and of a modulation without a residual, whose parameters
// are read again and again, 8 x 4096 x 1152 42.1, 44.6; 42.4, 45.1.)
constexpr int64_t kLargeL2Bytes = 96 << 20;

}  // namespace

bool stays_in_l2(const Problem& problem) {
  const int64_t elements = problem.rows * problem.cols;
  const int64_t x_bytes = elements * size_of(problem.x);
  const int64_t bytes = x_bytes * (problem.residual ? 3 : 1) + elements * size_of(problem.y);
  const bool rereads_parameters = problem.modulated && !problem.residual;
  return x_bytes <= kSmallL2Bytes || (bytes >= kLargeL2Bytes && !rereads_parameters);
}

forward::Plan make_forward_plan(const Problem& problem, const Device& device) {
  const Forced forced = forced_now();
  if (const auto plan = first_plan<forward::Plan>(problem, device, forced)) return *plan;
  refuse(forced, problem, false);
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// What the strategies share that keep rows in registers: logical warps and blocks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "base/choices.h"
#include "base/cuda_types.h"
#include "base/planning.h"
#include "forward/tuning.h"

namespace fused_layernorm {

// How the elements of a row are moved.
enum class Moves {
  kVectors,  // by vectors: the row is aligned, it begins at a multiple of 16 bytes
  kShifted,  // unaligned, by aligned vectors that lanes shift into place
  kHalves    // unaligned, but it begins at a multiple of 8 bytes: by halves of vectors
};
inline const char* name_of(Moves moves) {
  return moves == Moves::kVectors ? "vectors" : moves == Moves::kHalves ? "halves" : "shifted";
}

// Whether rows of these types may be moved by halves.
constexpr bool has_halves(DataType x, DataType weight, DataType y) {
  return size_of(x) == 2 && is_one_type(x, weight, y);
}

namespace forward {

struct InRegisters : Launch {
  // What is read and written once stays in L2 (evict_normal), else it is evict_first (L2Policy).
  bool stays_in_l2 = false;
};

// Whether what is read and written stays in L2 as other data does.
inline bool rows_stay_in_l2(const Problem& problem, const Device& device) {
  const int64_t elements = problem.rows * problem.cols;
  const int64_t x_bytes = elements * size_of(problem.x);
  const int64_t bytes = x_bytes * (problem.residual ? 3 : 1) + elements * size_of(problem.y);
  const bool rereads_parameters = problem.modulated && !problem.residual;
  return x_bytes <= tuning_of(device).small_l2_bytes ||
         (bytes >= l2_limits(device).large_call && !rereads_parameters);
}

// The width of a vector, also for unaligned rows: forward moves these by vectors, too.
inline int vector_width_of(const Problem& problem) { return vector_width(size_of(problem.x)); }
inline int64_t vectors_of(const Problem& problem) {
  return ceil_div(problem.cols, vector_width_of(problem));
}

// Whether there are kernels that keep the problem's rows on the chip.
inline bool has_kernels_on_chip(const Problem& problem) {
  return !problem.modulated ||
         has_modulated_forward(problem.x, problem.weight, problem.y, !problem.aligned);
}

// Whether nothing is fused.
inline bool is_bare(const Problem& problem) {
  return !problem.residual && !problem.modulated && !problem.has_epilogue;
}

// Rows of half precision with nothing fused have kernels that move halves of vectors (8 x 356
// bfloat16 on an H100: shifted 2.47 us, by halves 1.71).
inline Moves moves_of(const Problem& problem) {
  if (problem.aligned) return Moves::kVectors;
  const bool halves =
      problem.halves && is_bare(problem) && has_halves(problem.x, problem.weight, problem.y);
  return halves ? Moves::kHalves : Moves::kShifted;
}
}  // namespace forward
}  // namespace fused_layernorm

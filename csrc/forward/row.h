// SPDX-License-Identifier: Apache-2.0
// What the strategies share that keep rows in registers: logical warps, spread and blocks.
#pragma once

#include <cstdint>

#include "base/choices.h"
#include "base/problem.h"

namespace fused_layernorm {

// How the elements of a row are moved.
enum class Moves {
  kVectors,  // by vectors: the row is aligned, it begins at a multiple of 16 bytes
  kShifted   // unaligned, by aligned vectors that lanes shift into place
};
inline const char* name_of(Moves moves) { return moves == Moves::kVectors ? "vectors" : "shifted"; }

enum class Choice {
  kFirst,         // the first that the row and the kernels allow
  kFewestPlaces,  // the one whose lanes or threads have the fewest places for vectors
};

namespace forward {

// The width of a vector, also for rows that begin anywhere: forward moves these by vectors, too.
inline int width_of(const Problem& problem) { return vector_width(size_of(problem.x)); }
inline int64_t vectors_of(const Problem& problem) {
  return ceil_div(problem.cols, width_of(problem));
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

inline Moves moves_of(const Problem& problem) {
  return problem.aligned ? Moves::kVectors : Moves::kShifted;
}
}  // namespace forward
}  // namespace fused_layernorm

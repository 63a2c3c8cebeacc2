// SPDX-License-Identifier: Apache-2.0
// Lists of the numbers that kernels are compiled for, and ladders: tables of what was measured to
// be best for each range of a length.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

namespace fused_layernorm {

// The numbers that kernels are compiled for: of vectors a thread, and in a few places of warps or
// of columns. A kernel's launch function turns a plan's number into a template parameter by this
// list, and the plan takes only numbers of the list.
template <int... kVecs>
using VecsList = std::integer_sequence<int, kVecs...>;

template <int... kVecs>
constexpr bool contains(VecsList<kVecs...>, int vecs) {
  return ((kVecs == vecs) || ...);
}
// The first number of an ascending list that is not smaller than `least`, or 0 if there is none.
template <int... kVecs>
constexpr int first_from(VecsList<kVecs...>, int64_t least) {
  int found = 0;
  ((found = found == 0 && kVecs >= least ? kVecs : found), ...);
  return found;
}

constexpr int64_t kNoEnd = std::numeric_limits<int64_t>::max();

// A ladder is an array of rungs, each of which applies up to the length `last`. The first rung that
// reaches the given length counts.
template <typename Rung, size_t kRungs>
constexpr const Rung& rung_of(const Rung (&ladder)[kRungs], int64_t length) {
  size_t i = 0;
  while (ladder[i].last < length) ++i;
  return ladder[i];
}
// Whether the rungs ascend and the last has no end, as rung_of requires.
template <typename Rung, size_t kRungs>
constexpr bool is_ladder(const Rung (&ladder)[kRungs]) {
  for (size_t i = 1; i < kRungs; ++i) {
    if (ladder[i].last <= ladder[i - 1].last) return false;
  }
  return ladder[kRungs - 1].last == kNoEnd;
}
}  // namespace fused_layernorm

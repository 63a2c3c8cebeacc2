// SPDX-License-Identifier: Apache-2.0
// Lists of the numbers that kernels are compiled for.
#pragma once

#include <cstdint>
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
}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// A thread's share of a row: which of the row's vectors it has, and where they lie.
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/macros.cuh"

namespace fused_layernorm {

// The address of an element of a row or slice. The offset has 32 bits, which makes it cheaper.
template <typename T>
FUSED_DEVICE T* element(T* base, int index) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return reinterpret_cast<T*>(reinterpret_cast<Byte*>(base) +
                              static_cast<uint32_t>(index) * static_cast<uint32_t>(sizeof(T)));
}

// Returns `address`, but hides how it was computed: it stays in a register.
template <typename T>
FUSED_DEVICE T* hidden(T* address) {
  asm volatile("" : "+l"(address));
  return address;
}

// The vectors `first`, `first + step`, ... of a row, as far as they are below `vectors`.
// kMayMiss: how many of a thread's kVecs vectors may be missing; these are the last ones.
template <int kVecs, int kMayMiss = kVecs>
struct Share {
  static constexpr bool kRagged = false;
  int first, step, vectors;

  FUSED_DEVICE int vector(int k) const { return first + k * step; }
  // The first column of vector k. In the place of a missing vector the row's first one is read.
  template <int kWidth>
  FUSED_DEVICE int col(int k) const {
    return has(k) ? vector(k) * kWidth : 0;
  }
  FUSED_DEVICE bool has(int k) const { return k + kMayMiss < kVecs || vector(k) < vectors; }
  // Whether column j of vector k belongs to the row.
  FUSED_DEVICE bool has_column(int k, int) const { return has(k); }
  // How many columns of vector k belong to the row.
  template <typename Acc, int kWidth>
  FUSED_DEVICE Acc count(int k) const {
    return has(k) ? Acc(kWidth) : Acc(0);
  }
};

// The share of a ragged row: one with any number of columns, whose last vector may not be whole.
template <int kVecs, int kVecWidth, int kMayMiss>
struct RaggedShare : Share<kVecs, kMayMiss> {
  static constexpr bool kRagged = true;
  int cols;

  FUSED_DEVICE RaggedShare(int its_first, int its_step, int row_cols)
      : Share<kVecs, kMayMiss>{its_first, its_step, (row_cols + kVecWidth - 1) / kVecWidth},
        cols(row_cols) {}
  // Whether vector k is there and whole for sure.
  static constexpr bool is_whole(int k) { return k + kMayMiss < kVecs; }
  // How many columns there are from vector k on; not positive if that vector is missing.
  FUSED_DEVICE int cols_from(int k) const { return cols - this->vector(k) * kVecWidth; }
  FUSED_DEVICE bool has_column(int k, int j) const { return is_whole(k) || j < cols_from(k); }
  template <typename Acc, int kWidth>
  FUSED_DEVICE Acc count(int k) const {
    return is_whole(k) ? Acc(kWidth) : Acc(min(max(cols_from(k), 0), kWidth));
  }
};

}  // namespace fused_layernorm

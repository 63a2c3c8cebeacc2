// A thread's share of a row: which of the row's vectors it has, and where they lie.
#pragma once

#include <cstdint>
#include <type_traits>

namespace fused_layernorm {

// An element of a row or slice by a 32-bit offset, which makes cheaper addresses.
template <typename T>
__device__ __forceinline__ T* element(T* base, int index) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return reinterpret_cast<T*>(reinterpret_cast<Byte*>(base) +
                              static_cast<uint32_t>(index) * static_cast<uint32_t>(sizeof(T)));
}

// The address, as one that the compiler knows nothing about and so keeps in a register instead of
// computing it again.
template <typename T>
__device__ __forceinline__ T* hidden(T* address) {
  asm volatile("" : "+l"(address));
  return address;
}

// The vectors `first`, `first + step`, ... of a row, as far as they are below `vectors`.
// kDense: of a thread's kVecs vectors at most the last can be missing.
template <int kVecs, bool kDense>
struct Share {
  int first, step, vectors;

  __device__ __forceinline__ int vector(int k) const { return first + k * step; }
  // The first column of vector k. In the place of a missing vector the row's first one is read.
  template <int kWidth>
  __device__ __forceinline__ int col(int k) const {
    return has(k) ? vector(k) * kWidth : 0;
  }
  __device__ __forceinline__ bool has(int k) const {
    return (kDense && k + 1 < kVecs) || vector(k) < vectors;
  }
  // Whether column j of vector k belongs to the row.
  __device__ __forceinline__ bool has_column(int k, int) const { return has(k); }
  // How many columns of vector k belong to the row.
  template <typename Acc, int kWidth>
  __device__ __forceinline__ Acc count(int k) const {
    return has(k) ? Acc(kWidth) : Acc(0);
  }
};

// The share of a ragged row: one with any number of columns, whose last vector may not be whole.
template <int kVecs, int kVecWidth>
struct RaggedShare : Share<kVecs, true> {
  int cols;
  int last_cols;  // columns of the last of kVecs vectors; not positive if that vector is missing

  __device__ __forceinline__ RaggedShare(int thread, int threads, int row_cols)
      : Share<kVecs, true>{thread, threads, (row_cols + kVecWidth - 1) / kVecWidth},
        cols(row_cols),
        last_cols(row_cols - this->vector(kVecs - 1) * kVecWidth) {}
  __device__ __forceinline__ bool has_column(int k, int j) const {
    return k + 1 < kVecs || j < last_cols;
  }
  template <typename Acc, int kWidth>
  __device__ __forceinline__ Acc count(int k) const {
    return k + 1 < kVecs ? Acc(kWidth) : Acc(min(max(last_cols, 0), kWidth));
  }
};

}  // namespace fused_layernorm

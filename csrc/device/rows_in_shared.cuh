// SPDX-License-Identifier: Apache-2.0
// For strategies with a thread per row: the rows of a block in shared memory, and the sums that a
// thread takes in the place of several lanes.
#pragma once

#include <cuda_pipeline.h>

#include "device/reduce.cuh"
#include "device/shifted.cuh"
#include "device/vec.cuh"
#include "layernorm.h"

namespace fused_layernorm {

// Rows of a block in shared memory, one behind the other. If they lie one behind the other in
// global memory, too, they are copied by whole vectors, wherever they begin.
template <typename X>
struct RowsInShared {
  X* rows;
  int cols;

  // Copies `count` rows of `input` from row `first_row` on. All threads of the block call; then
  // wait_for_rows() and a barrier must follow.
  __device__ __forceinline__ RowsInShared(unsigned char* shared, const void* input_rows,
                                          const RowMap& map, int row_cols, int64_t first_row,
                                          int count)
      : rows(reinterpret_cast<X*>(shared)), cols(row_cols) {
    const X* input = static_cast<const X*>(input_rows);
    if (map.is_dense(cols)) {
      // The first and the last vector may reach past the ends of the rows, but not past the ends of
      // an allocation, which begins and ends at multiples of larger powers of two.
      constexpr int kWidth = kVectorBytes / sizeof(X);
      input += map(first_row);
      const int shift =
          static_cast<int>(reinterpret_cast<uintptr_t>(input) % kVectorBytes / sizeof(X));
      input -= shift;
      const int elements = shift + count * cols;
      for (int i = threadIdx.x * kWidth; i < elements; i += blockDim.x * kWidth) {
        __pipeline_memcpy_async(rows + i, input + i, kVectorBytes);
      }
      __pipeline_commit();
      rows += shift;
    } else {
      const int warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize;
      for (int row = warp; row < count; row += warps) {
        const X* from = input + map(first_row + row);
#pragma unroll 1
        for (int col = threadIdx.x % kWarpSize; col < cols; col += kWarpSize) {
          rows[row * cols + col] = from[col];
        }
      }
    }
  }

  // Loads the vectors that one of the lanes on row `row` has, with zeros behind the row's end.
  template <int kWidth, int kPieces, typename Share>
  __device__ __forceinline__ void load(Vec<X, kWidth> (&x)[kPieces], int row,
                                       const Share& share) const {
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
      const int col = share.vector(k) * kWidth;
      x[k] = {};
      if (!share.has(k)) continue;
      load_elements(x[k], rows + (row * cols + col));
      if (!share.is_whole(k)) keep_first(x[k], cols - col);
    }
  }

 private:
  // Elements of two bytes may begin in the middle of a word. The last word that is read may lie
  // behind the row.
  template <int kWidth>
  static __device__ __forceinline__ void load_elements(Vec<X, kWidth>& v, const X* from) {
    if constexpr (sizeof(X) == 2) {
      constexpr int kWords = kWidth / 2;
      // The pointer itself moves: of an address that is computed from a number, the compiler does
      // not know that it lies in shared memory.
      const int odd = reinterpret_cast<uintptr_t>(from) / 2 % 2;
      const auto* word = reinterpret_cast<const uint32_t*>(from - odd);
      const uint32_t bits = odd * 16;
      auto* to = reinterpret_cast<uint32_t*>(v.at);
      uint32_t low = word[0];
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const uint32_t high = word[i + 1];
        to[i] = __funnelshift_r(low, high, bits);
        low = high;
      }
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) v.at[j] = from[j];
    }
  }
};

// Waits for the rows that this thread copies.
__device__ __forceinline__ void wait_for_rows() { __pipeline_wait_prior(0); }

// Stores `count` elements that lie in shared memory. All threads of the block call, behind a
// barrier.
template <typename Y>
__device__ __forceinline__ void store_elements(Y* y, const Y* from, int count) {
  constexpr int kWidth = kVectorBytes / sizeof(Y);
  const auto addresses = reinterpret_cast<uintptr_t>(y) | reinterpret_cast<uintptr_t>(from);
  const int whole = addresses % kVectorBytes == 0 ? count / kWidth * kWidth : 0;
  for (int i = threadIdx.x * kWidth; i < whole; i += blockDim.x * kWidth) {
    store_once(y + i, load<Use::kPlain, kWidth>(from + i));
  }
  for (int i = whole + threadIdx.x; i < count; i += blockDim.x) y[i] = from[i];
}

// The sum of value_of(lane) over kLanes lanes, in the order of a logical warp's shuffles: first the
// sums of neighbours. Only the first kPlayed lanes have columns; the values of the others are zero.
template <int kLanes, int kPlayed, typename Value, typename ValueOf>
__device__ __forceinline__ Value sum_over_lanes(const ValueOf& value_of) {
  Value values[kLanes];
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane)
    values[lane] = lane < kPlayed ? value_of(lane) : Value();
#pragma unroll
  for (int offset = 1; offset < kLanes; offset *= 2) {
#pragma unroll
    for (int lane = 0; lane < kLanes; lane += 2 * offset) values[lane] += values[lane + offset];
  }
  return values[0];
}

}  // namespace fused_layernorm

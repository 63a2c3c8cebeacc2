// SPDX-License-Identifier: Apache-2.0
// Copies from global to shared memory that a thread starts and later waits for. On chips before
// Ampere they are plain copies.
#pragma once

#include <cstdint>

#include "device/vec.cuh"

namespace fused_layernorm {

// Copies kBytes (4, 8 or 16) to shared memory. The copies of a thread have come when
// wait_for_copies() returns.
template <int kBytes>
__device__ __forceinline__ void copy_async(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(from), "n"(kBytes)
                 : "memory");
  }
#else
  using Piece = typename detail::Piece<kBytes>::type;
  *static_cast<Piece*>(to) = *static_cast<const Piece*>(from);
#endif
}

__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// The same for a vector; single elements of two bytes are copied at once.
template <int kWidth, typename V>
__device__ __forceinline__ void copy_vector(V* to, const V* from) {
  constexpr int kBytes = kWidth * sizeof(V), kPiece = kBytes < 16 ? kBytes : 16;
  if constexpr (kBytes >= 4) {
#pragma unroll
    for (int i = 0; i < kBytes; i += kPiece) {
      copy_async<kPiece>(reinterpret_cast<char*>(to) + i, reinterpret_cast<const char*>(from) + i);
    }
  } else {
    *to = __ldg(from);
  }
}

}  // namespace fused_layernorm

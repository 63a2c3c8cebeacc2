// SPDX-License-Identifier: Apache-2.0
// Copies from global to shared memory that a thread starts and later waits for (on chips before
// Ampere they are plain copies), and loads to L2.
#pragma once

#include <cstdint>

#include "base/chip.h"
#include "device/vec.cuh"

namespace fused_layernorm {

// Copies kBytes (4, 8 or 16) to shared memory. The copies of a thread have come when
// wait_for_copies() returns. Sixteen bytes go past L1, unless they are told to go through it.
template <int kBytes, bool kThroughL1 = false>
FUSED_DEVICE void copy_async(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  if constexpr (kBytes == 16 && !kThroughL1) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(from), "n"(kBytes)
                 : "memory");
  }
#else
  using Piece = detail::Piece<kBytes>;
  *static_cast<Piece*>(to) = *static_cast<const Piece*>(from);
#endif
}

FUSED_DEVICE void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Ends a group of this thread's copies; wait_for_groups() waits for all groups but `kLater`.
FUSED_DEVICE void end_group_of_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int kLater>
FUSED_DEVICE void wait_for_groups() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
#endif
}

// copy_async() for a vector of at least four bytes.
template <int kWidth, bool kThroughL1 = false, typename V>
FUSED_DEVICE void copy_vector(V* to, const V* from) {
  constexpr int kBytes = kWidth * sizeof(V), kPiece = kBytes < 16 ? kBytes : 16;
  FUSED_UNROLL for (int i = 0; i < kBytes; i += kPiece) {
    copy_async<kPiece, kThroughL1>(reinterpret_cast<char*>(to) + i,
                                   reinterpret_cast<const char*>(from) + i);
  }
}

// Asks for `bytes` bytes of global memory to be in L2 soon. All threads of a block call.
FUSED_DEVICE void prefetch_to_l2(const void* from, int64_t bytes) {
  for (int64_t at = threadIdx.x * kCacheLineBytes; at < bytes; at += blockDim.x * kCacheLineBytes) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(from) + at));
  }
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// Hopper's bulk copies from global to shared memory, completing on an mbarrier (PTX ISA,
// "cp.async.bulk" and "mbarrier"). Older chips, whose assembler knows none of these instructions,
// never launch a kernel that uses them: such a kernel first asks kHasBulk and returns.
#pragma once

#include <cstdint>

#include "device/vec.cuh"

namespace fused_layernorm {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kHasBulk = false;
#else
constexpr bool kHasBulk = true;
#endif

FUSED_DEVICE uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

FUSED_DEVICE void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}

// Makes barriers that were just initialized visible to the copy engine.
FUSED_DEVICE void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives at the barrier, whose phase does not end before `bytes` have come by bulk copies.
FUSED_DEVICE void barrier_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

FUSED_DEVICE void barrier_wait(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  } while (done == 0);
}

// Arrives at the barrier.
FUSED_DEVICE void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Makes the barrier count one arrival once this thread's copies by copy_async() have landed.
FUSED_DEVICE void barrier_arrive_with_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Copies `bytes` to shared memory, asynchronously; the barrier counts them. Addresses and bytes are
// multiples of 16. In L2 the data is evict_normal if `stays_in_l2`, else evict_first. (A branch and
// no L2Policy, whose two registers one of backward's float32 kernels does not have.)
FUSED_DEVICE void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* barrier,
                            bool stays_in_l2) {
  if (stays_in_l2) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(L2Policy(false).bits)
        : "memory");
  }
}

// Orders this thread's accesses to shared memory so far before bulk copies that it, or a thread
// after a later barrier, starts. The copies belong to another proxy (PTX ISA, "async proxy") and
// could otherwise overwrite what an earlier load has yet to read.
FUSED_DEVICE void fence_before_bulk_load() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Brings multiples of 16 bytes that will be read once to L2, where they are evict_last till then.
FUSED_DEVICE void bulk_prefetch_to_stay(const void* from, uint32_t bytes) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;" ::"l"(from),
               "r"(bytes), "l"(policy)
               : "memory");
}

}  // namespace fused_layernorm

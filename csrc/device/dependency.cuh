// A kernel that may start before the one in front of it in the stream has ended (PTX ISA,
// "griddepcontrol"). It is launched by launch_early() and waits by itself; on chips before Hopper
// both functions do nothing, and kernels start one after the other.
#pragma once

namespace fused_layernorm {

// Lets the next kernel start where there is room, once all blocks have called or ended.
__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits until the kernel in front has ended and what it wrote can be read.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// For a kernel that may start before the previous kernel of the CUDA stream has ended (PTX ISA,
// "griddepcontrol"). launch_early() launches it, and it has to wait for the previous kernel itself.
// On chips before Hopper both functions do nothing, and kernels start one after the other.
#pragma once

#include "device/macros.cuh"

namespace fused_layernorm {

// Lets the next kernel start once every block of this one has called this or has ended.
FUSED_DEVICE void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits until the previous kernel has ended and its results can be read.
FUSED_DEVICE void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace fused_layernorm

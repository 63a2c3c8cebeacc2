// SPDX-License-Identifier: Apache-2.0
// Whether the machine's NVIDIA driver runs the CUDA runtime that is compiled into the library.
//
// The CUDA kernels are registered with the operators unless the driver is too old for them. If it
// is, CUDA tensors take the composite, as in a build without CUDA kernels.
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <string>

namespace fused_layernorm {

// Why the CUDA kernels are not used and what the user can do about it. Empty if the driver runs the
// kernels, if there is no driver, and in a build without CUDA kernels.
std::string driver_problem();

#ifdef FUSED_LAYERNORM_CUDA
// Registers the operators' CUDA kernels (bindings/cuda/registration.cpp).
void register_cuda_kernels(torch::stable::detail::StableLibrary& library);
void register_head_kernels(torch::stable::detail::StableLibrary& library);  // a part of them

// Whether the driver does not run the kernels, which are then not registered.
bool driver_is_too_old();

// The address of the KernelTable (bindings/cuda/table.cpp).
int64_t kernel_table();
#endif

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// The two types of the CUDA runtime that declarations of launches name, and those of the launch
// functions of strategies. Without CUDA there is nothing to launch, and the types stand for
// themselves.
#pragma once

#include "base/params.h"

#ifdef FUSED_LAYERNORM_CUDA
#include <cuda_runtime_api.h>
#else
using cudaError_t = int;
using cudaStream_t = struct CUstream_st*;
#endif

namespace fused_layernorm {

// Enqueues the kernels of a plan on a CUDA stream of the current device; gives the first error.
template <typename Plan>
using ForwardLaunch = cudaError_t(const ForwardParams&, const DataTypes&, const Plan&,
                                  cudaStream_t);
template <typename Plan>
using BackwardLaunch = cudaError_t(const BackwardParams&, const DataTypes&, const Plan&,
                                   cudaStream_t);

}  // namespace fused_layernorm

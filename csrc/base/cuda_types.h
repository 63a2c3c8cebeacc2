// SPDX-License-Identifier: Apache-2.0
// The two types of the CUDA runtime that declarations of launches name. Without CUDA there is
// nothing to launch, and they stand for themselves.
#pragma once

#ifdef FUSED_LAYERNORM_CUDA
#include <cuda_runtime_api.h>
#else
using cudaError_t = int;
using cudaStream_t = struct CUstream_st*;
#endif

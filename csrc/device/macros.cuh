// SPDX-License-Identifier: Apache-2.0
// Short names for what nearly every device function and every unrolled loop begins with.
#pragma once

#define FUSED_DEVICE __device__ __forceinline__
#define FUSED_UNROLL _Pragma("unroll")  // in front of a loop, on its line

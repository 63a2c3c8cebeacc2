// SPDX-License-Identifier: Apache-2.0
// What nearly every device function and every loop over registers says, in a word each.
#pragma once

#define FUSED_DEVICE __device__ __forceinline__
#define FUSED_UNROLL _Pragma("unroll")  // in front of a loop, on its line

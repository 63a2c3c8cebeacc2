// SPDX-License-Identifier: Apache-2.0
// Code that forward's strategies with persistent blocks share: the moments of a row, combined from
// the moments that the row's blocks have published for their slices.
#pragma once

#include "device/meeting.cuh"
#include "norm/norm.cuh"
#include "plan/plan.h"

namespace fused_layernorm {

// Combines the moments in the slots of a row. One warp calls, and every lane gets the moments.
template <typename N>
__device__ __forceinline__ Moments<float> combine_slots(const CollectedSlots& slots,
                                                        const Slices& slices, int cols,
                                                        float inverse_cols) {
  const int lane = threadIdx.x % kWarpSize;
  float count[kSlotsPerLane];
#pragma unroll
  for (int i = 0; i < kSlotsPerLane; ++i) {
    // A slice that does not exist has no columns and zeros for moments, so it adds nothing.
    const int first_col = (lane + i * kWarpSize) * slices.slice_cols;
    count[i] = lane + i * kWarpSize < slices.blocks_per_row
                   ? float(min(slices.slice_cols, cols - first_col))
                   : 0.0f;
  }
  const auto each = [&](const auto& use) {
#pragma unroll
    for (int i = 0; i < kSlotsPerLane; ++i) use(count[i], slots.values[i]);
  };
  const float pivot = __shfl_sync(kFullWarp, slots.values[0].first, 0);
  return N::Statistic::combine(each, pivot, inverse_cols);
}

// Returns the row's rstd. The thread that has `stores` = true also writes the row's statistics.
template <typename N>
__device__ __forceinline__ float finish_moments(const ForwardParams& p, int64_t row,
                                                const Moments<float>& moments, bool stores) {
  const float rstd = N::Statistic::rstd(moments.m2, p.inverse_cols.rounded, p.eps.rounded);
  if (stores) store_statistics(p, row, moments.mean, rstd);
  return rstd;
}

}  // namespace fused_layernorm

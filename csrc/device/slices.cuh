// Persistent blocks on slices of rows: who works on what, rows in flight in shared memory, and
// the meeting of a row's blocks in global memory. Shared by the kernels of layernorm_kernel.cu
// (backward) and layernorm_split_kernel.cu.
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/bulk.cuh"
#include "layernorm.h"
#include "device/reduce.cuh"

namespace fused_layernorm {

// Collected sums that may wait to be used: more than a plan's lag.
constexpr int kCollected = 4;
// Of a row: what the lanes of one warp collect. plan.cpp plans no more.
constexpr int kSlotsPerLane = 5;
static_assert(kMaxBlocksPerRow <= kSlotsPerLane * kWarpSize);

// What a plan says of slices.
struct SliceLayout {
  int threads = 0;  // of a group
  int groups = 0;   // of a block, each on a row of its own
  int blocks_per_row = 1;
  int slice_cols = 0;
  int stage_cols = 0;  // of a slice in shared memory
  int stages = 0;
  int lag = 0;
  int partials = 1;
  int64_t dparams_offset = 0;

  explicit SliceLayout(const Plan& plan)
      : threads(plan.threads),
        groups(plan.groups),
        blocks_per_row(plan.blocks_per_row),
        slice_cols(plan.slice_cols),
        stage_cols(plan.stage_cols),
        stages(plan.stages),
        lag(plan.lag),
        partials(plan.partials),
        dparams_offset(plan.dparams_offset) {}
};

// The rows and columns of one group: rows first_row, first_row + row_step, ... (`rows` of them).
struct SliceWork {
  int slice, set;
  int first_col, cols;
  uint32_t first_row, row_step;
  int rows;

  // kWholeRows: one block a row.
  template <bool kWholeRows>
  __device__ __forceinline__ SliceWork(const SliceLayout& layout, int group, int64_t all_rows,
                                       int all_cols, std::bool_constant<kWholeRows>)
      : slice(kWholeRows ? 0 : blockIdx.x % layout.blocks_per_row),
        set(kWholeRows ? blockIdx.x : blockIdx.x / layout.blocks_per_row) {
    const int blocks_per_row = kWholeRows ? 1 : layout.blocks_per_row;
    first_col = slice * layout.slice_cols;
    cols = min(layout.slice_cols, all_cols - first_col);
    first_row = set * layout.groups + group;
    row_step = gridDim.x / blocks_per_row * layout.groups;
    const uint32_t end = static_cast<uint32_t>(all_rows);
    rows = first_row < end ? static_cast<int>((end - first_row - 1) / row_step + 1) : 0;
  }
  __device__ __forceinline__ int64_t row(int i) const { return first_row + i * row_step; }
};

// Counts through the stages of a ring: index 0, 1, ..., stages - 1, 0, ..., and its phase's parity.
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  // Of `ago` positions ago, which is less than `stages`.
  __device__ __forceinline__ int stage_of(int ago, int stages) const {
    return stage < ago ? stage - ago + stages : stage - ago;
  }
};

// The meeting: each block of a row leaves eight bytes in a slot of its own, preset to all ones by
// the host, and reads those of the others. A slot is written in one piece, so it needs no flag.
constexpr uint64_t kEmptySlot = ~uint64_t{0};

__device__ __forceinline__ void publish(uint64_t* slot, Pair<float> value) {
  uint64_t bits = uint64_t{__float_as_uint(value.first)} | uint64_t{__float_as_uint(value.second)}
                                                               << 32;
  if (bits == kEmptySlot) bits = 0x7fffffff7fffffffu;  // NaN still, and not empty
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(slot), "l"(bits) : "memory");
}

// Beside the threads that work on rows, a block of a split row has one warp that collects. They
// meet at a barrier of their own when a row's sums are needed.
__device__ __forceinline__ void meet_collector(int working_threads) {
  asm volatile("bar.sync 15, %0;" ::"r"(working_threads + kWarpSize) : "memory");
}

// The slots of a row, by one warp: others must not poll, they would hold up what is polled for.
struct CollectedSlots {
  Pair<float> values[kSlotsPerLane];

  __device__ __forceinline__ CollectedSlots(const uint64_t* slots, int count) {
    const int lane = threadIdx.x % kWarpSize;
    uint64_t bits[kSlotsPerLane];
    bool missing = false;
    do {
      // Polling must not crowd out what is polled for.
      if (missing) __nanosleep(100);
      missing = false;
#pragma unroll
      for (int i = 0; i < kSlotsPerLane; ++i) {
        bits[i] = 0;
        if (lane + i * kWarpSize < count) {
          asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];"
                       : "=l"(bits[i])
                       : "l"(slots + lane + i * kWarpSize)
                       : "memory");
        }
        missing |= bits[i] == kEmptySlot;
      }
      missing = __any_sync(kFullWarp, missing);
    } while (missing);
#pragma unroll
    for (int i = 0; i < kSlotsPerLane; ++i) {
      values[i] = {__uint_as_float(static_cast<uint32_t>(bits[i])),
                   __uint_as_float(static_cast<uint32_t>(bits[i] >> 32))};
    }
  }
};

// A row's moments from those of its slices, as warp_combine, for slots at hand.
__device__ __forceinline__ Moments<float> combine_slots(const CollectedSlots& slot, int slices,
                                                        int slice_cols, int cols,
                                                        float inverse_cols) {
  // Each lane's own slots, in an order that warp_combine's loops follow.
  const float pivot = __shfl_sync(kFullWarp, slot.values[0].first, 0);
  const int lane = threadIdx.x % kWarpSize;
  float count[kSlotsPerLane];
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kSlotsPerLane; ++i) {
    const int slice = lane + i * kWarpSize;
    count[i] = slice < slices ? float(min(slice_cols, cols - slice * slice_cols)) : 0.0f;
    sum += slice < slices ? count[i] * (slot.values[i].first - pivot) : 0.0f;
  }
  const float mean = pivot + warp_sum(sum) * inverse_cols;
  float m2 = 0;
#pragma unroll
  for (int i = 0; i < kSlotsPerLane; ++i) {
    const float delta = slot.values[i].first - mean;
    m2 += count[i] > 0.0f ? slot.values[i].second + count[i] * delta * delta : 0.0f;
  }
  return {mean, warp_sum(m2)};
}

}  // namespace fused_layernorm

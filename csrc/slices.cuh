// Persistent blocks on slices of rows: who works on what, rows in flight in shared memory, and
// the meeting of a row's blocks in global memory. Shared by the kernels of layernorm_kernel.cu
// (backward) and layernorm_split_kernel.cu.
#pragma once

#include <cstdint>

#include "bulk.cuh"
#include "layernorm.h"
#include "reduce.cuh"

namespace fused_layernorm {

constexpr int kMaxGroups = 8;
constexpr int kMaxStages = 8;

// What a plan says of slices.
struct SliceLayout {
  int threads = 0;  // of a group
  int groups = 0;   // of a block, each on a row of its own
  int blocks_per_row = 1;
  int slice_cols = 0;
  int stages = 0;
  int partials = 1;
  int64_t dparams_offset = 0;

  explicit SliceLayout(const Plan& plan)
      : threads(plan.threads),
        groups(plan.groups),
        blocks_per_row(plan.blocks_per_row),
        slice_cols(plan.slice_cols),
        stages(plan.stages),
        partials(plan.partials),
        dparams_offset(plan.dparams_offset) {}
};

// The rows and columns of one group: rows first_row, first_row + row_step, ... (`rows` of them).
struct SliceWork {
  int slice, set;
  int first_col, cols;
  int64_t first_row, row_step;
  int64_t rows;

  __device__ __forceinline__ SliceWork(const SliceLayout& layout, int group, int64_t all_rows,
                                       int all_cols)
      : slice(blockIdx.x % layout.blocks_per_row), set(blockIdx.x / layout.blocks_per_row) {
    const int64_t sets = gridDim.x / layout.blocks_per_row;
    first_col = slice * layout.slice_cols;
    cols = min(layout.slice_cols, all_cols - first_col);
    first_row = int64_t{set} * layout.groups + group;
    row_step = sets * layout.groups;
    rows = first_row < all_rows ? (all_rows - first_row + row_step - 1) / row_step : 0;
  }
  __device__ __forceinline__ int64_t row(int64_t i) const { return first_row + i * row_step; }
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
};

// The meeting: each block of a row leaves eight bytes in a slot of its own, preset to all ones by
// the host, and reads those of the others. A slot is written in one piece, so it needs no flag.
constexpr uint64_t kEmptySlot = ~uint64_t{0};

__device__ __forceinline__ void publish(uint64_t* slot, Pair<float> value) {
  uint64_t bits = uint64_t{__float_as_uint(value.first)} |
                  uint64_t{__float_as_uint(value.second)} << 32;
  if (bits == kEmptySlot) bits = 0x7fffffff7fffffffu;  // NaN still, and not empty
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(slot), "l"(bits) : "memory");
}

__device__ __forceinline__ Pair<float> collect(const uint64_t* slot) {
  uint64_t bits;
  do {
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(bits) : "l"(slot) : "memory");
  } while (bits == kEmptySlot);
  return {__uint_as_float(static_cast<uint32_t>(bits)),
          __uint_as_float(static_cast<uint32_t>(bits >> 32))};
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// Persistent blocks: the rows, or slices of rows, of each, and the place in a ring of rows.
#pragma once

#include <cstdint>

#include "base/problem.h"
#include "device/macros.cuh"

namespace fused_layernorm {

// The rows first_row, first_row + row_step, ... (`rows` of them) and the columns of one team.
struct SliceWork {
  int slice, set;  // numbers; a set is the blocks that share a row
  int first_col, cols;
  uint32_t first_row, row_step;
  int rows;

  // Whole rows: each block has one row a team.
  FUSED_DEVICE SliceWork(int teams, int team, int64_t all_rows, int all_cols)
      : SliceWork(0, blockIdx.x, 1, all_cols, teams, team, all_rows, all_cols) {}
  // Slices of rows: blocks that follow each other share a row.
  FUSED_DEVICE SliceWork(const Slices& slices, int64_t all_rows, int all_cols)
      : SliceWork(blockIdx.x % slices.count, blockIdx.x / slices.count, slices.count, slices.cols,
                  1, 0, all_rows, all_cols) {}

  FUSED_DEVICE int64_t row(int i) const { return first_row + i * row_step; }

 private:
  FUSED_DEVICE SliceWork(int own_slice, int own_set, int blocks_per_row, int slice_cols, int teams,
                         int team, int64_t all_rows, int all_cols)
      : slice(own_slice), set(own_set) {
    first_col = slice * slice_cols;
    cols = min(slice_cols, all_cols - first_col);
    first_row = set * teams + team;
    row_step = gridDim.x / blocks_per_row * teams;
    const uint32_t end = static_cast<uint32_t>(all_rows);
    rows = first_row < end ? static_cast<int>((end - first_row - 1) / row_step + 1) : 0;
  }
};

// A place in a ring of `stages` stages. The stage counts 0, 1, ..., stages - 1, 0, ..., and with
// each round the parity changes, which barrier_wait() takes.
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;

  FUSED_DEVICE void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  // The stage of `ago` positions ago, where `ago` is less than `stages` (any, without a ring).
  FUSED_DEVICE int stage_of(int ago, int stages) const {
    return stage < ago ? stage - ago + stages : stage - ago;
  }
};

}  // namespace fused_layernorm

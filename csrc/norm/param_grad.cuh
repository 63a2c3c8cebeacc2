// SPDX-License-Identifier: Apache-2.0
// The gradients of parameters: where the sums over a set of rows, or over a group of rows, are
// stored.
#pragma once

#include "base/partial_sums.h"
#include "norm/row_gradient.cuh"

namespace fused_layernorm {

// Where the dweight and dbias of one set of rows go: to the outputs themselves if there is only one
// set, else to the set's place among the partial sums in the workspace.
template <typename N>
struct ParamGradSink {
  using Acc = typename N::Acc;
  using W = typename N::W;
  W* dweight;
  W* dbias;
  Acc* dweight_partial;
  Acc* dbias_partial;

  FUSED_DEVICE ParamGradSink(const BackwardParams& p, const backward::PartialSums& partials,
                             int set)
      : dweight(static_cast<W*>(p.dweight)),
        dbias(static_cast<W*>(p.dbias)),
        dweight_partial(nullptr),
        dbias_partial(nullptr) {
    if (partials.count > 1) {
      auto* sums = reinterpret_cast<Acc*>(static_cast<char*>(p.workspace) + partials.offset);
      dweight_partial = sums + int64_t{set} * p.cols;
      dbias_partial = sums + (int64_t{partials.count} + set) * p.cols;
    }
  }

  FUSED_DEVICE bool wanted() const { return dweight || dbias; }

  template <int kWidth>
  FUSED_DEVICE void store(int col, const Acc (&dw)[kWidth], const Acc (&db)[kWidth]) const {
    if (dweight_partial != nullptr) {
      fused_layernorm::store<Acc, kWidth>(dweight_partial + col, round_to<Acc>(dw));
      fused_layernorm::store<Acc, kWidth>(dbias_partial + col, round_to<Acc>(db));
      return;
    }
    if (dweight != nullptr) store_once<W, kWidth>(dweight + col, round_to<W>(dw));
    if (dbias != nullptr) store_once<W, kWidth>(dbias + col, round_to<W>(db));
  }
};

// Stores a vector of a gradient: in type W, or in the arithmetic's type (`is_wide`), as a float32
// parameter beside half precision has it, and as further sums want it.
template <typename W, typename Acc, int kWidth>
FUSED_DEVICE void store_gradient(void* out, bool is_wide, int64_t at, const Acc (&values)[kWidth]) {
  if (is_wide) {
    store_once<Acc, kWidth>(static_cast<Acc*>(out) + at, round_to<Acc>(values));
  } else {
    store_once<W, kWidth>(static_cast<W*>(out) + at, round_to<W>(values));
  }
}

// The rows of one block or set of blocks: a range of consecutive rows, cut into parts where a group
// ends (GroupParts in base/partial_sums.h).
struct GroupRange {
  uint32_t begin, end, group_rows;

  FUSED_DEVICE GroupRange(const BackwardParams& p, int set, int sets)
      : GroupRange(p.rows, p.group_rows, set, sets) {}
  FUSED_DEVICE GroupRange(int64_t rows, int64_t rows_of_group, int set, int sets)
      : begin(static_cast<uint32_t>(set * rows / sets)),
        end(static_cast<uint32_t>((set + int64_t{1}) * rows / sets)),
        group_rows(static_cast<uint32_t>(rows_of_group)) {}

  FUSED_DEVICE uint32_t group_of(uint32_t row) const { return row / group_rows; }
  // One past the last row of this range that belongs to the group of `row`.
  FUSED_DEVICE uint32_t end_of_group(uint32_t row) const {
    return min((row / group_rows + 1) * group_rows, end);
  }
};

// Where the sums of one part are stored: in the workspace, which holds them as [dscale, dshift,
// dgate][part][column]. `first` says which of the three is stored first.
template <typename N>
struct PartSink {
  using Acc = typename N::Acc;
  Acc* at;
  Acc* next;  // of the next sum

  FUSED_DEVICE PartSink(const BackwardParams& p, const backward::PartialSums& partials,
                        int64_t part, int first = 0) {
    auto* sums = reinterpret_cast<Acc*>(static_cast<char*>(p.workspace) + partials.offset);
    at = sums + (int64_t{first} * partials.count + part) * p.cols;
    next = sums + (int64_t{first + 1} * partials.count + part) * p.cols;
  }
  template <int kWidth>
  FUSED_DEVICE void store(int col, const Acc (&by_xhat)[kWidth], const Acc (&alone)[kWidth]) const {
    store(col, by_xhat);
    fused_layernorm::store<Acc, kWidth>(next + col, round_to<Acc>(alone));
  }
  template <int kWidth>
  FUSED_DEVICE void store(int col, const Acc (&sum)[kWidth]) const {
    fused_layernorm::store<Acc, kWidth>(at + col, round_to<Acc>(sum));
  }
};

// Stores dscale and dshift of a row that is a group of its own, at a vector of its columns, from
// `first_col` + `col` on: dscale = dz * z, with z = xhat * weight + bias, and dshift = dz.
template <typename N, int kWidth>
FUSED_DEVICE void store_row_modulation(const BackwardParams& p, int64_t row, int col,
                                       const Gradients<N, kWidth>& gradients, int first_col = 0) {
  using Acc = typename N::Acc;
  using W = typename N::W;
  const int64_t at = row * p.cols + first_col + col;
  if (p.dscale != nullptr) {
    Acc values[kWidth];
    FUSED_UNROLL for (int j = 0; j < kWidth; ++j) values[j] = gradients.xhat[j];
    if (p.weight != nullptr || p.bias != nullptr) {
      Acc weight[kWidth], bias[kWidth];
      unpack(weight, Parameter<W>(p.weight, first_col, Absent::kOnes).template load<kWidth>(col));
      unpack(bias, Parameter<W>(p.bias, first_col, Absent::kZeros).template load<kWidth>(col));
      FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
        values[j] = ColumnAffine::apply(values[j], weight[j], bias[j]);
      }
    }
    FUSED_UNROLL for (int j = 0; j < kWidth; ++j) values[j] *= gradients.dz[j];
    store_gradient<W>(p.dscale, p.dscale_is_wide, at, values);
  }
  if (p.dshift != nullptr) store_gradient<W>(p.dshift, p.dshift_is_wide, at, gradients.dz);
}

// Stores dgate and dinput of a row that is a group of its own, at a vector of its columns, from the
// dx of the gated sum: dgate = dx * input and dinput = dx * gate.
template <typename X, typename W, typename Acc, int kWidth>
FUSED_DEVICE void store_row_gate(const BackwardParams& p, int64_t row, int col,
                                 const Acc (&dx)[kWidth], const Vec<X, kWidth>& input,
                                 const Vec<W, kWidth>& gate) {
  const int64_t at = row * p.cols + col;
  Acc values[kWidth];
  if (p.dgate != nullptr) {
    unpack(values, input);
    FUSED_UNROLL for (int j = 0; j < kWidth; ++j) values[j] *= dx[j];
    store_gradient<W>(p.dgate, p.dgate_is_wide, at, values);
  }
  if (p.dinput != nullptr) {
    unpack(values, gate);
    FUSED_UNROLL for (int j = 0; j < kWidth; ++j) values[j] *= dx[j];
    store_once<X, kWidth>(static_cast<X*>(p.dinput) + at, round_to<X>(values));
  }
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// Parameters of columns, by vectors: absent, or arrays that begin at multiples of 16 bytes.
#pragma once

#include "base/params.h"
#include "device/share.cuh"
#include "device/vec.cuh"

namespace fused_layernorm {

// One vector of ones and one of zeros of each type. An absent weight or bias is read from here,
// again and again, so the loops over columns need no branch for it.
alignas(16) static __device__ const float kFloatOnes[8] = {1, 1, 1, 1, 1, 1, 1, 1};
alignas(16) static __device__ const double kDoubleOnes[2] = {1, 1};
alignas(16) static __device__ const uint32_t kHalfOnes[4] = {0x3c003c00, 0x3c003c00, 0x3c003c00,
                                                             0x3c003c00};
alignas(16) static __device__ const uint32_t kBFloat16Ones[4] = {0x3f803f80, 0x3f803f80, 0x3f803f80,
                                                                 0x3f803f80};
alignas(16) static __device__ const uint32_t kZeros[8] = {};

enum class Absent { kOnes, kZeros };

template <typename W>
FUSED_DEVICE const W* vector_of(Absent absent) {
  const void* ones = kFloatOnes;
  if constexpr (std::is_same_v<W, double>) ones = kDoubleOnes;
  if constexpr (std::is_same_v<W, __half>) ones = kHalfOnes;
  if constexpr (std::is_same_v<W, __nv_bfloat16>) ones = kBFloat16Ones;
  return static_cast<const W*>(absent == Absent::kOnes ? ones : kZeros);
}

// A parameter of a row (weight or bias, or a modulation's scale, shift or gate) from column
// `first_col` on.
template <typename W>
struct Parameter {
  const W* at;
  int mask;  // of columns: 0 for an absent parameter, all of whose columns are read from one vector

  FUSED_DEVICE Parameter(const void* given, int first_col, Absent absent)
      : at(given != nullptr ? static_cast<const W*>(given) + first_col : vector_of<W>(absent)),
        mask(given != nullptr ? -1 : 0) {}

  // A parameter of all columns that is loaded before anything else. The address of the ones or
  // zeros comes from memory, and only a parameter that is absent waits for it here.
  static FUSED_DEVICE Parameter loaded_first(const void* given, Absent absent) {
    Parameter parameter(given, 0, absent);
    parameter.at = static_cast<const W*>(given);
    if (given == nullptr) parameter.at = hidden(vector_of<W>(absent));
    return parameter;
  }

  template <int kWidth, Use kUse = Use::kReadOnly>
  FUSED_DEVICE Vec<W, kWidth> load(int col) const {
    return fused_layernorm::load<kUse, kWidth>(element(at, col & mask));
  }

  // Loads a vector that may reach past the parameter's end. A piece that lies wholly past the end
  // is not read; the columns past the end get any value.
  template <int kWidth>
  FUSED_DEVICE Vec<W, kWidth> load_until(int col, int cols) const {
    using V = Vec<W, kWidth>;
    constexpr int kPieceCols = kWidth * V::kPieceBytes / V::kBytes;
    V v;
    FUSED_UNROLL for (int j = 0; j < kWidth; j += kPieceCols) {
      const auto piece = load<kPieceCols>(col + j < cols ? col + j : col);
      FUSED_UNROLL for (int i = 0; i < kPieceCols; ++i) v.at[j + i] = piece.at[i];
    }
    return v;
  }
};

// A parameter at vector k of a thread's share of a row; for a missing vector, at any columns.
template <int kWidth, Use kUse = Use::kReadOnly, typename W, typename Share>
FUSED_DEVICE Vec<W, kWidth> load_share(const Parameter<W>& from, const Share& share, int k) {
  const int col = share.template col<kWidth>(k);
  // A vector of one piece, of which a part belongs to the row, may be read whole: it does not reach
  // past the end of an allocation (device/shifted.cuh).
  if constexpr (Share::kRagged && kWidth * sizeof(W) > kVectorBytes) {
    if (!share.is_whole(k)) return from.template load_until<kWidth>(col, share.cols);
  }
  return from.template load<kWidth, kUse>(col);
}

// A row's two parameters from column `first_col` on: weight and bias, or scale and shift.
template <typename W>
struct ColumnParameters {
  Parameter<W> factor, summand;

  FUSED_DEVICE ColumnParameters(const void* given_weight, const void* given_bias, int first_col)
      : factor(given_weight, first_col, Absent::kOnes),
        summand(given_bias, first_col, Absent::kZeros) {}
  FUSED_DEVICE ColumnParameters(const Parameter<W>& first, const Parameter<W>& second)
      : factor(first), summand(second) {}

  // Weight and bias of all columns, which are loaded before anything else.
  static FUSED_DEVICE ColumnParameters loaded_first(const ForwardParams& p) {
    return {Parameter<W>::loaded_first(p.weight, Absent::kOnes),
            Parameter<W>::loaded_first(p.bias, Absent::kZeros)};
  }
};

// The part that belongs to row `row` of a parameter of groups of rows, from column `first_col` on.
template <typename W>
FUSED_DEVICE Parameter<W> row_parameter(const void* given, const RowMap& rows, int64_t row,
                                        int first_col, Absent absent) {
  return {given != nullptr ? static_cast<const W*>(given) + rows(row) : nullptr, first_col, absent};
}

// Copies `vectors` vectors of a parameter to shared memory, and the last one again into the rest of
// the `room`. All threads of the block call, and a barrier must follow.
template <int kWidth, typename W>
FUSED_DEVICE void copy_parameter(W* shared, const Parameter<W>& from, int vectors, int room) {
#pragma unroll 4
  for (int v = threadIdx.x; v < room; v += blockDim.x) {
    store(shared + v * kWidth, from.template load<kWidth>(min(v, vectors - 1) * kWidth));
  }
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// The types of a launch, from those of a call.
#pragma once

#include <optional>

#include "base/params.h"
#include "call/description.h"

namespace fused_layernorm {

// The type of sums, and so of mean and rstd.
constexpr DataType statistics_type(DataType x) {
  return x == DataType::kFloat64 ? x : DataType::kFloat32;
}

// Whether a parameter of a type goes with x.
constexpr bool goes_with(DataType parameter, DataType x) {
  return parameter == x || (parameter == DataType::kFloat32 && is_half(x));
}

// The types that a kernel is launched with, given those of x, of the parameters (if there are any)
// and of y in the call. Kernels exist for the combinations of kTypesWithKernels (base/types.h). To
// reach one of them, parameters may be converted to float32 and the output computed in the
// arithmetic's type; neither changes the result.
DataTypes kernel_types(DataType x, std::optional<DataType> parameters, DataType y);

// The same for kernels over groups, which read parameters of x's type and of float32, and write
// half-precision y only where x is of the same type.
DataTypes group_types(DataType x, DataType y);

inline bool has_kernels(const DataTypes& types) {
  return has_kernels(types.x, types.weight, types.y);
}

// The type in which kernels of gated norms write y for one of this type.
DataType kernel_y_of_gated(DataType x, DataType y);

// Whether contiguous rows of `cols` columns, of x and of y, begin at multiples of 16 bytes.
bool are_aligned(const DataTypes& types, int64_t cols);

// The type that round_before_weight means for an input of this type.
XhatRounding xhat_rounding_of(bool round_before_weight, bool has_weight, DataType input);

// ---- How kernels read the tensors of a call: an operator copies what is or lies otherwise.

enum class Layout {
  kAny,
  kContiguous,
  kColumns,     // contiguous, from a multiple of 16 bytes on
  kModulation,  // rows_in_place (layout.h)
  kRows,        // rows_of, or where there are kernels of channels, as channels lie
  kAsWritten,   // as the result of x's shape lies
};
struct Read {
  DataType type = kNoDataType;  // none: any
  Layout layout = Layout::kAny;
};

struct Settled {
  DataTypes kernel;  // of the arithmetic
  NormTensors<Read> read;
  // The result of x's shape, y or dx: as kernels write it, and of the result.
  DataType written, result;
  bool keeps_order = false;  // else it is contiguous
  // Rows with a residual: the sum is taken before the launch, in the type of read.input.
  bool adds_first = false;
};

// Of a valid call whose tensors have types of kernels. `written` has y's type.
Settled settle(const NormCall& call);

}  // namespace fused_layernorm

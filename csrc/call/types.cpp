// SPDX-License-Identifier: Apache-2.0
// The types of a launch; types.h has the contract.
#include "call/types.h"

#include <algorithm>

#include "base/planning.h"
#include "groups/plan.h"

namespace fused_layernorm {

DataTypes kernel_types(DataType x, std::optional<DataType> parameters, DataType y) {
  if (x == DataType::kFloat64) return {x, x, x};
  DataTypes types = {x, parameters.value_or(x), y};
  if (y == DataType::kFloat64 || (is_half(x) && y != x)) types.y = DataType::kFloat32;
  if (!is_half(x) || types.y != x || types.weight != x) types.weight = DataType::kFloat32;
  return types;
}

DataTypes group_types(DataType x, DataType y) {
  DataTypes types = kernel_types(x, std::nullopt, y);
  if (!groups_have_kernels(x, types.y)) types.y = x;
  if (x != DataType::kFloat64) types.weight = DataType::kFloat32;
  return types;
}

bool are_aligned(const DataTypes& types, int64_t cols) {
  return cols * std::min(size_of(types.x), size_of(types.y)) % kVectorBytes == 0;
}

ForwardTypes settle_types(DataType input, std::optional<DataType> residual,
                          std::optional<DataType> parameters, DataType y, bool rounds_xhat) {
  const DataType x = residual.value_or(input);
  ForwardTypes types{kernel_types(x, parameters, y), y, statistics_type(x), input};
  if (!residual) return types;

  // The type of the input that the kernel adds to the residual (Types::In in norm/types.cuh).
  const DataType in = x == DataType::kFloat32 ? types.kernel.y : x;
  if (in == input) return types;
  if (in == DataType::kFloat32 && is_half(input)) {
    types.summand = in;  // exact: a half and a float32 are added in float32
  } else if (x == DataType::kFloat32 && input == DataType::kFloat32) {
    types.kernel.y = DataType::kFloat32;
  } else {
    // The sum is taken first and rounded to the residual's type. If input or residual is float64,
    // both the sum and the norm are computed in float64.
    const bool wide = x == DataType::kFloat64 || input == DataType::kFloat64;
    types.summand = wide ? DataType::kFloat64 : DataType::kFloat32;
    if (parameters) parameters = types.summand;
    // Kernels of half-precision x round xhat to no other type than x's.
    const bool widens = rounds_xhat && is_half(x);
    types.kernel = kernel_types(wide || widens ? types.summand : x, parameters, y);
    types.adds_first = true;
  }
  return types;
}

XhatRounding xhat_rounding_of(bool round_before_weight, bool has_weight, DataType input) {
  if (!round_before_weight || !has_weight) return XhatRounding::kNone;
  return input == DataType::kFloat16    ? XhatRounding::kFloat16
         : input == DataType::kBFloat16 ? XhatRounding::kBFloat16
                                        : XhatRounding::kNone;
}

}  // namespace fused_layernorm

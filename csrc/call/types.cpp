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

DataType kernel_y_of_gated(DataType x, DataType y) {
  const bool fits =
      y == x || (is_half(x) && y == DataType::kFloat32) || (x == DataType::kFloat32 && is_half(y));
  return fits ? y : statistics_type(x);
}

bool are_aligned(const DataTypes& types, int64_t cols) {
  return cols * std::min(size_of(types.x), size_of(types.y)) % kVectorBytes == 0;
}

XhatRounding xhat_rounding_of(bool round_before_weight, bool has_weight, DataType input) {
  if (!round_before_weight || !has_weight) return XhatRounding::kNone;
  return input == DataType::kFloat16    ? XhatRounding::kFloat16
         : input == DataType::kBFloat16 ? XhatRounding::kBFloat16
                                        : XhatRounding::kNone;
}

namespace {

// The one type in which kernels of rows take all parameters: their own if they have the same, else
// float32. std::nullopt if there are none.
std::optional<DataType> common_type(const NormCall& call) {
  std::optional<DataType> common;
  for (const RawTensor* parameter :
       {&call.weight, &call.bias, &call.shift, &call.scale, &call.gate}) {
    if (!*parameter) continue;
    common =
        common.value_or(parameter->type) == parameter->type ? parameter->type : DataType::kFloat32;
  }
  return common;
}

// Forward of rows with a residual.
void settle_sum(const NormCall& call, std::optional<DataType> parameters, Settled& s) {
  const DataType x = call.residual.type, input = call.input.type;
  // The type of the input that the kernel adds to the residual (Types::In in norm/types.cuh).
  const DataType in = x == DataType::kFloat32 ? s.kernel.y : x;
  if (in == input) return;
  if (in == DataType::kFloat32 && is_half(input)) {
    s.read.input.type = in;  // exact: a half and a float32 are added in float32
  } else if (x == DataType::kFloat32 && input == DataType::kFloat32) {
    s.kernel.y = DataType::kFloat32;
  } else {
    // The sum is taken first and rounded to the residual's type. If input or residual is float64,
    // both the sum and the norm are computed in float64.
    const bool wide = x == DataType::kFloat64 || input == DataType::kFloat64;
    s.read.input.type = wide ? DataType::kFloat64 : DataType::kFloat32;
    if (parameters) parameters = s.read.input.type;
    // Kernels of half-precision x round xhat to no other type than x's.
    const bool rounds = xhat_rounding_of(call.options.round_before_weight, bool(call.weight),
                                         input) != XhatRounding::kNone;
    s.kernel = kernel_types(wide || (rounds && is_half(x)) ? s.read.input.type : x, parameters,
                            call.written.type);
    s.adds_first = true;
  }
}

void settle_rows(const NormCall& call, Settled& s) {
  const DataType x = call.normalized().type;
  s.keeps_order = call.options.keeps_order;
  const auto parameters = common_type(call);
  s.kernel = kernel_types(x, parameters, call.backward ? call.dy.type : call.written.type);
  if (call.backward) {
    s.read.dy = {s.kernel.y, Layout::kRows};
    s.read.x = s.read.dresidual = s.read.input = {x, Layout::kRows};
    s.written = s.result = x;
  } else {
    s.read.input = {call.input.type, Layout::kRows};
    s.read.residual = {kNoDataType, Layout::kRows};
    if (call.residual) settle_sum(call, parameters, s);
    s.written = s.kernel.y;
  }
  s.read.weight = s.read.bias = {s.kernel.weight, Layout::kColumns};
  s.read.shift = s.read.scale = s.read.gate = {s.kernel.weight, Layout::kModulation};
}

void settle_groups(const NormCall& call, Settled& s) {
  const DataType x = call.normalized().type;
  s.keeps_order = true;
  s.written = call.backward ? x : group_types(x, call.written.type).y;
  s.read.input = s.read.x = {x, Layout::kAsWritten};
  if (call.backward) s.read.dy = {group_types(x, call.dy.type).y, Layout::kAsWritten};
}

// x, gate and dy are of x's own type, or float32 for half precision beside another type. A float64
// one is rounded to float32, if x is not float64 itself.
void settle_gated(const NormCall& call, Settled& s) {
  const DataType x = call.normalized().type, dy = call.backward ? call.dy.type : x;
  const DataType type = (call.gate.type == x && dy == x) || !is_half(x) ? x : DataType::kFloat32;
  s.written = call.backward ? type : kernel_y_of_gated(type, call.written.type);
  s.read.input = s.read.x = s.read.dy = s.read.gate = {type, Layout::kRows};
  const auto columns = [&](const RawTensor& parameter) -> Read {
    const bool wide = parameter.type == DataType::kFloat32 && type != DataType::kFloat64;
    return {wide ? DataType::kFloat32 : type, Layout::kColumns};
  };
  s.read.weight = columns(call.weight);
  s.read.bias = columns(call.bias);
}

}  // namespace

Settled settle(const NormCall& call) {
  Settled s;
  s.kernel.x = call.normalized().type;
  s.result = call.written.type;
  s.read.mean = s.read.rstd = {kNoDataType, Layout::kContiguous};
  if (call.options.num_groups != 0) {
    settle_groups(call, s);
  } else if (call.options.gate_place != GatePlace::kInput) {
    settle_gated(call, s);
  } else {
    settle_rows(call, s);
  }
  return s;
}

}  // namespace fused_layernorm

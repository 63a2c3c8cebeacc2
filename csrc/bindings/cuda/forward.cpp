// SPDX-License-Identifier: Apache-2.0
// Forward on CUDA: checks and casts until the call is one that kernels take, then describes,
// prepares and launches it.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "bindings/cuda/checks.h"
#include "bindings/cuda/formula.h"
#include "bindings/cuda/modulation.h"
#include "bindings/cuda/ops.h"
#include "call/types.h"

namespace fused_layernorm {
namespace {

bool rounds_xhat(const ForwardArguments& a) {
  return xhat_rounding_of(a.options.round_before_weight, a.weight.has_value(),
                          data_type(a.input.scalar_type())) != XhatRounding::kNone;
}

ForwardTypes check(const ForwardArguments& a, const Shape& shape) {
  check_shape(a.weight, "weight", a.input, shape.leading);
  check_shape(a.bias, "bias", a.input, shape.leading);
  check_shape(a.residual, "residual", a.input, 0);
  check_numbers(a.options, a.weight.has_value());
  const ScalarType input = a.input.scalar_type();
  const ScalarType x = a.residual ? a.residual->scalar_type() : input;
  const DataType y = data_type(a.out_dtype.value_or(input));
  check_parameters_type(type_of_parameters(a.weight, a.bias), x, input, "weight and bias");
  const std::pair<const std::optional<Tensor>&, const char*> modulations[] = {
      {a.shift, "shift"}, {a.scale, "scale"}, {a.gate, "gate"}};
  for (const auto& [modulation, name] : modulations) {
    check_broadcast(modulation, name, a.input);
    if (modulation) check_parameters_type(modulation->scalar_type(), x, input, name);
  }
  return settle_types(data_type(input), a.residual ? std::optional(data_type(x)) : std::nullopt,
                      common_type({&a.weight, &a.bias, &a.shift, &a.scale, &a.gate}), y,
                      rounds_xhat(a));
}

Tensor add(const Tensor& input, const std::optional<Tensor>& gate, const Tensor& residual,
           ScalarType type) {
  Tensor summand = cast(input, type);
  if (gate) summand = product(summand, cast(*gate, type));
  return contiguous_of(cast(plus(summand, cast(residual, type)), residual.scalar_type()));
}

// A new tensor for y.
Tensor new_y(const ForwardArguments& a, ScalarType type) {
  return a.options.keeps_order ? empty_in_order(a.input, type) : empty_like(a.input, type);
}

ForwardCall describe(const ForwardArguments& a, const Tensor& y, DataType rounded_to,
                     const ForwardResult& result) {
  ForwardCall call;
  describe(a, call);
  call.input = raw(a.input);
  call.residual = raw(a.residual);
  call.rounded_to = rounded_to;
  call.y = raw(y);
  if (a.residual) call.residual_out = result.residual_out->mutable_data_ptr();
  if (a.needs_statistics) {
    call.mean = a.options.is_rms ? nullptr : result.mean->mutable_data_ptr();
    call.rstd = result.rstd->mutable_data_ptr();
  }
  return call;
}

// Launches the kernel of a call whose types it takes.
void launch_norm(ForwardArguments a, const Shape& shape, const DataTypes& types,
                 DataType rounded_to, ForwardResult& result) {
  const Device& device = device_of(a.input);
  a.weight = prepare_parameter(a.weight, scalar_type(types.weight));
  a.bias = prepare_parameter(a.bias, scalar_type(types.weight));
  for (std::optional<Tensor>* modulation : {&a.shift, &a.scale, &a.gate}) {
    *modulation = prepare_modulation(*modulation, types.weight, a.input, shape.leading);
  }
  Tensor y = result.y;
  ForwardCall call = describe(a, y, rounded_to, result);
  PreparedForward prepared;
  const bool as_they_lie = prepare(call, device, prepared);
  if (!as_they_lie) {
    a.input = with_rows(a.input, shape.leading);
    a.residual = with_rows(a.residual, shape.leading);
    if (!y.is_contiguous()) y = empty_like(y, y.scalar_type());
    call = describe(a, y, rounded_to, result);
    if (!prepare(call, device, prepared)) throw NoKernel();
  }
  const Workspace workspace(a.input, prepared.workspace_bytes());
  launch(prepared, call, workspace.data(), current_stream(a.input));
  if (y.get() != result.y.get()) torch::stable::copy_(result.y, y);
}

// A modulated norm that rounds xhat, which no kernel does: the norm's kernel gives y in float32,
// and PyTorch's operators take the gated sum and the modulation.
ForwardResult run_rounding(const ForwardArguments& a) {
  ForwardArguments norm = a;
  for (auto* each : {&norm.residual, &norm.shift, &norm.scale, &norm.gate}) each->reset();
  norm.out_dtype = ScalarType::Float;
  if (a.residual) norm.input = add(a.input, a.gate, *a.residual, ScalarType::Float);
  if (norm.input.scalar_type() != a.input.scalar_type()) throw NoKernel();
  ForwardResult result = run_forward(norm);
  if (a.residual) result.residual_out = norm.input;
  Tensor y = scaled(result.y, a.scale, ScalarType::Float);
  if (a.shift) y = plus(y, cast(*a.shift, ScalarType::Float));
  result.y = contiguous_of(cast(y, a.out_dtype.value_or(a.input.scalar_type())));
  return result;
}

// A modulated norm whose weight has an offset. Few models have one, and the kernels of a modulation
// take weight as it is: the sum is made before the launch, in the arithmetic's type.
ForwardResult run_with_offset(const ForwardArguments& a) {
  const bool wide = a.weight->scalar_type() == ScalarType::Double;
  const ScalarType type = wide ? ScalarType::Double : ScalarType::Float;
  Tensor offset = empty_like(*a.weight, type);
  torch::stable::fill_(offset, a.options.weight_offset);
  ForwardArguments with_sum = a;
  with_sum.weight = plus(cast(*a.weight, type), offset);
  if (a.bias) with_sum.bias = cast(*a.bias, type);
  with_sum.options.weight_offset = 0.0;
  return run_forward(with_sum);
}

}  // namespace

ForwardResult run_forward(const ForwardArguments& a) {
  const Shape shape(a.input, a.options.normalized_ndim);
  const ForwardTypes types = check(a, shape);
  if (a.is_modulated() && rounds_xhat(a)) return run_rounding(a);
  if (a.is_modulated() && a.options.weight_offset != 0.0) return run_with_offset(a);
  const CurrentDevice guard(a.input);

  const ScalarType x = scalar_type(types.kernel.x);
  ForwardResult result{new_y(a, scalar_type(types.kernel.y))};
  if (a.needs_statistics) {
    std::vector<int64_t> sizes(a.input.sizes().data(), a.input.sizes().data() + a.input.dim());
    std::fill(sizes.begin() + shape.leading, sizes.end(), 1);
    new_statistics(a.input, sizes, types.kernel.x, a.options.is_rms, result);
  }
  ForwardArguments norm = a;
  if (types.adds_first) {
    result.residual_out = add(a.input, a.gate, *a.residual, scalar_type(types.summand));
    norm.input = cast(*result.residual_out, x);
    norm.residual.reset();
    norm.gate.reset();
  } else {
    if (a.residual) result.residual_out = empty_like(a.input, x);
    norm.input = cast(a.input, scalar_type(types.summand));
  }
  if (!shape.empty()) {
    launch_norm(norm, shape, types.kernel, data_type(a.input.scalar_type()), result);
  }
  if (types.y != types.kernel.y) {
    Tensor y = new_y(a, scalar_type(types.y));
    torch::stable::copy_(y, result.y);
    result.y = y;
  }
  if (a.needs_statistics) {
    result.mean = cast(*result.mean, scalar_type(types.statistics));
    result.rstd = cast(*result.rstd, scalar_type(types.statistics));
  }
  return result;
}

}  // namespace fused_layernorm

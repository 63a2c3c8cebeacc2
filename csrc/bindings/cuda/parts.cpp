// SPDX-License-Identifier: Apache-2.0
// Calls that take more than one launch, or operators of PyTorch's beside it; ops.h has the
// contract.
#include <torch/csrc/stable/ops.h>

#include "bindings/cuda/modulation.h"
#include "bindings/cuda/ops.h"

namespace fused_layernorm {

Tensor add(const Tensor& input, const std::optional<Tensor>& gate, const Tensor& residual,
           ScalarType type) {
  Tensor summand = cast(input, type);
  if (gate) summand = product(summand, cast(*gate, type));
  return contiguous_of(cast(plus(summand, cast(residual, type)), residual.scalar_type()));
}

// A modulated norm that rounds xhat, which no kernel does: the norm's kernel gives y in float32,
// and PyTorch's operators take the gated sum and the modulation.
Results run_rounding(const NormArguments& a) {
  NormArguments norm = a;
  for (auto* each : {&norm.residual, &norm.shift, &norm.scale, &norm.gate}) each->reset();
  norm.out_dtype = ScalarType::Float;
  if (a.residual) norm.input = add(*a.input, a.gate, *a.residual, ScalarType::Float);
  if (norm.input->scalar_type() != a.input->scalar_type()) throw NoKernel();
  Results result = run(norm);
  if (a.residual) result.residual_out = norm.input;
  Tensor y = scaled(*result.y, a.scale, ScalarType::Float);
  if (a.shift) y = plus(y, cast(*a.shift, ScalarType::Float));
  result.y = contiguous_of(cast(y, a.out_dtype.value_or(a.input->scalar_type())));
  return result;
}

// A modulated norm whose weight has an offset. Few models have one, and the kernels of a modulation
// take weight as it is: the sum is made before the launch, in the arithmetic's type.
Results run_with_offset(const NormArguments& a) {
  const bool wide = a.weight->scalar_type() == ScalarType::Double;
  const ScalarType type = wide ? ScalarType::Double : ScalarType::Float;
  Tensor offset = empty_like(*a.weight, type);
  torch::stable::fill_(offset, a.options.weight_offset);
  NormArguments with_sum = a;
  with_sum.weight = plus(cast(*a.weight, type), offset);
  if (a.bias) with_sum.bias = cast(*a.bias, type);
  with_sum.options.weight_offset = 0.0;
  return run(with_sum);
}

// dweight and dbias by a launch of their own: they are those of a norm without a modulation, for
// dy * (1 + scale).
void add_columns(Results& result, const NormArguments& a) {
  NormArguments columns = a;
  const ScalarType wide =
      a.x->scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  columns.dy = scaled(*a.dy, a.scale, wide);
  for (auto* each :
       {&columns.shift, &columns.scale, &columns.gate, &columns.input, &columns.dresidual}) {
    each->reset();
  }
  columns.needs = {};
  columns.needs.dweight = a.needs.dweight;
  columns.needs.dbias = a.needs.dbias;
  const Results found = run(columns);
  result.dweight = found.dweight;
  result.dbias = found.dbias;
}

// A gated sum that takes two launches: of the norm, and of the sum.
Results run_gate_apart(const NormArguments& a) {
  NormArguments norm = a;
  norm.input.reset();
  norm.gate.reset();
  norm.needs.dx = true;
  norm.needs.dinput = norm.needs.dgate = false;
  Results result = run(norm);
  const auto [dinput, dgate] =
      run_gate_backward(*result.dx, *a.input, *a.gate, a.needs.dinput, a.needs.dgate);
  result.dinput = dinput;
  result.dgate = dgate;
  if (!a.needs.dx) result.dx = none(*a.x, a.x->scalar_type());
  return result;
}

}  // namespace fused_layernorm

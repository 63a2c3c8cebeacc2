// SPDX-License-Identifier: Apache-2.0
// Gated RMSNorm on CUDA; ops.h has the contract.
#include <vector>

#include "bindings/cuda/checks.h"
#include "bindings/cuda/ops.h"
#include "call/types.h"

namespace fused_layernorm {
namespace {

using Optional = std::optional<Tensor>;

int64_t width_of(const Tensor& x) { return x.sizes()[x.dim() - 1]; }

// The groups of a row.
int64_t groups_of(const NormOptions& options, const Tensor& x) {
  return options.group_size == 0 ? 1 : width_of(x) / options.group_size;
}

void check(const NormArguments& a, const Tensor& x) {
  CHECK_ARGUMENT(x.dim() >= 1, "the input must have a dimension");
  const int64_t size = a.options.group_size;
  CHECK_ARGUMENT(size >= 0 && (size == 0 || width_of(x) % size == 0),
                 "group_size must be at least one and divide the last dimension");
  check_shape(a.gate, "gate", x, 0);
  check_shape(a.weight, "weight", x, x.dim() - 1);
  check_shape(a.bias, "bias", x, x.dim() - 1);
  check_numbers(a.options, a.weight.has_value());
  const ScalarType type = x.scalar_type();
  check_parameters_type(type_of_parameters(a.weight, a.bias), type, type, "weight and bias");
  (void)data_type(a.gate->scalar_type());  // throws for a type that no kernel computes with
}

// The type of the arithmetic's inputs, x, gate and in backward dy: x's own, or float32 for half
// precision beside a gate or dy of another type. A float64 one is rounded to float32, if x is not
// float64 itself.
ScalarType common_type(ScalarType x, ScalarType gate, ScalarType dy) {
  return (gate == x && dy == x) || !is_half(data_type(x)) ? x : ScalarType::Float;
}

// The type in which a kernel writes y of this type: where there is no such kernel, that of the
// arithmetic.
ScalarType kernel_type(ScalarType x, ScalarType y) {
  const bool fits = y == x || (is_half(data_type(x)) && y == ScalarType::Float) ||
                    (x == ScalarType::Float && is_half(data_type(y)));
  return fits ? y : scalar_type(statistics_type(data_type(x)));
}

Optional parameter_for(const Optional& parameter, ScalarType x) {
  const bool wide = parameter && parameter->scalar_type() == ScalarType::Float;
  return prepare_parameter(parameter, wide && x != ScalarType::Double ? ScalarType::Float : x);
}

Tensor rows_for(const Tensor& tensor, ScalarType type) {
  return with_rows(cast(tensor, type), tensor.dim() - 1);
}

// The gate and the parameters as kernels read them.
NormArguments as_read(NormArguments a, ScalarType type) {
  a.gate = rows_for(*a.gate, type);
  a.weight = parameter_for(a.weight, type);
  a.bias = parameter_for(a.bias, type);
  return a;
}

}  // namespace

ForwardResult run_gated(const ForwardArguments& a) {
  const ScalarType input = a.input.scalar_type(), type = a.out_dtype.value_or(input);
  check(a, a.input);
  const CurrentDevice guard(a.input);
  const ScalarType common = common_type(input, a.gate->scalar_type(), input);
  ForwardResult result{empty_like(a.input, kernel_type(common, type))};
  if (a.needs_statistics) {
    std::vector<int64_t> sizes(a.input.sizes().data(), a.input.sizes().data() + a.input.dim());
    sizes.back() = groups_of(a.options, a.input);
    new_statistics(a.input, sizes, data_type(input), /*is_rms=*/true, result);
  }
  if (a.input.numel() > 0) {
    const NormArguments read = as_read(a, common);
    const Tensor x = rows_for(a.input, common);
    ForwardCall norm;
    describe(read, norm);
    norm.input = raw(x);
    if (a.weight && common != input) {
      norm.rounded_to = data_type(input);
      norm.affine_rounded_to = data_type(a.weight->scalar_type());
    }
    norm.y = raw(result.y);
    norm.rstd = result.rstd ? result.rstd->mutable_data_ptr() : nullptr;
    prepare_and_launch<PreparedForward>(norm, a.input);
  }
  result.y = cast(result.y, type);
  return result;
}

BackwardResult run_gated(const BackwardArguments& a) {
  const Needs& needs = a.needs;
  check(a, a.x);
  check_shape(a.dy, "dy", a.x, 0);
  const bool is_empty = a.x.numel() == 0;
  CHECK_ARGUMENT(is_empty || is_statistic(a.rstd, a.x,
                                          a.x.numel() / width_of(a.x) * groups_of(a.options, a.x)),
                 "rstd must be that of the forward pass");
  const CurrentDevice guard(a.x);
  const ScalarType common =
      common_type(a.x.scalar_type(), a.gate->scalar_type(), a.dy.scalar_type());
  const NormArguments read = as_read(a, common);
  BackwardCall norm;
  const auto gradient = [&](bool needed, const Optional& given, const Optional& as, void*& data) {
    const ScalarType type = as ? as->scalar_type() : common;
    return new_gradient(needed, given, type, a.x, is_empty, data);
  };
  void* dx_data = nullptr;
  const Tensor dx = new_gradient(needs.dx, a.x, common, a.x, is_empty, dx_data);
  const Tensor dgate = gradient(needs.dgate, a.gate, read.gate, norm.dgate);
  const Tensor dweight = gradient(needs.dweight, a.weight, read.weight, norm.dweight);
  const Tensor dbias = gradient(needs.dbias, a.bias, read.bias, norm.dbias);
  if (!is_empty && needs.any()) {
    const Tensor x = rows_for(a.x, common), dy = rows_for(a.dy, common);
    const Tensor rstd = contiguous_of(a.rstd);
    describe(read, norm);
    norm.needs = needs;
    norm.x = raw(x);
    norm.dy = raw(dy);
    norm.rstd = raw(rstd);
    if (needs.dx) norm.dx = raw(dx);
    prepare_and_launch<PreparedBackward>(norm, a.x);
  }
  const auto as_given = [](const Tensor& result, const Optional& given) {
    return given ? cast(result, given->scalar_type()) : result;
  };
  BackwardResult result;
  result.dx = as_given(dx, a.x);
  result.dgate = as_given(dgate, a.gate);
  result.dweight = as_given(dweight, a.weight);
  result.dbias = as_given(dbias, a.bias);
  return result;
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// The operators of gated RMSNorm on CUDA: check, cast and copy what kernels cannot read where it
// lies, describe, prepare, allocate, launch.
#include <torch/csrc/stable/ops.h>

#include <limits>
#include <utility>
#include <vector>

#include "bindings/cuda/call.h"
#include "bindings/cuda/checks.h"
#include "bindings/driver.h"
#include "call/arguments.h"
#include "call/prepare.h"
#include "call/types.h"

namespace fused_layernorm {
namespace {

using Optional = std::optional<Tensor>;

// The arguments that both directions have.
struct GatedArguments {
  Tensor x, gate;
  Optional weight, bias;
  NormOptions options;

  template <class Op>
  GatedArguments(Call& call, Op, Tensor its_x)
      : x(std::move(its_x)),
        gate(call.at<Tensor>(Op::kGate)),
        weight(call.at<Optional>(Op::kWeight)),
        bias(call.at<Optional>(Op::kBias)),
        options(read_options<Op>(call)) {}

  int64_t leading() const { return x.dim() - 1; }
  int64_t width() const { return x.sizes()[leading()]; }
  int64_t groups() const { return options.group_size == 0 ? 1 : width() / options.group_size; }
};

void check(const GatedArguments& a) {
  CHECK_ARGUMENT(a.x.dim() >= 1, "the input must have a dimension");
  CHECK_ARGUMENT(a.options.group_size >= 0 &&
                     (a.options.group_size == 0 || a.width() % a.options.group_size == 0),
                 "group_size must be at least one and divide the last dimension");
  check_shape(a.gate, "gate", a.x, 0);
  check_shape(a.weight, "weight", a.x, a.leading());
  check_shape(a.bias, "bias", a.x, a.leading());
  check_numbers(a.options, a.weight.has_value());
  const ScalarType x = a.x.scalar_type();
  check_parameters_type(type_of_parameters(a.weight, a.bias), x, x, "weight and bias");
  (void)data_type(a.gate.scalar_type());  // throws for a type that no kernel computes with
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

// x, gate and the parameters as kernels read them.
struct GatedTensors {
  Tensor x, gate;
  Optional weight, bias;

  GatedTensors(const GatedArguments& a, ScalarType type)
      : x(with_rows(cast(a.x, type), a.leading())),
        gate(with_rows(cast(a.gate, type), a.leading())),
        weight(parameter_for(a.weight, type)),
        bias(parameter_for(a.bias, type)) {}

  void describe(const GatedArguments& a, NormCall& call) const {
    call.options = a.options;
    call.gate = raw(gate);
    call.weight = raw(weight);
    call.bias = raw(bias);
  }
};

template <bool kGivesStatistics>
void rms_norm_gated(StableIValue* stack, uint64_t arguments, uint64_t results) {
  using Op = GatedForward;
  Call call(stack, arguments, results);
  const GatedArguments a(call, Op{}, call.at<Tensor>(Op::kInput));
  const ScalarType x_type = a.x.scalar_type();
  const auto type = call.at<std::optional<ScalarType>>(Op::kOutDtype).value_or(x_type);
  check(a);
  const CurrentDevice guard(a.x);
  const ScalarType common = common_type(x_type, a.gate.scalar_type(), x_type);
  const Tensor y = empty_like(a.x, kernel_type(common, type));
  Optional mean, rstd;
  if (kGivesStatistics) {
    const ScalarType of = scalar_type(statistics_type(data_type(x_type)));
    std::vector<int64_t> sizes(a.x.sizes().data(), a.x.sizes().data() + a.x.dim());
    sizes.back() = a.groups();
    mean = none(a.x, of);
    rstd = empty(a.x, sizes.data(), a.x.dim(), of);
    if (a.width() == 0) torch::stable::fill_(*rstd, std::numeric_limits<double>::quiet_NaN());
  }
  if (a.x.numel() > 0) {
    const GatedTensors tensors(a, common);
    ForwardCall norm;
    tensors.describe(a, norm);
    norm.input = raw(tensors.x);
    if (a.weight && common != x_type) {
      norm.rounded_to = data_type(x_type);
      norm.affine_rounded_to = data_type(a.weight->scalar_type());
    }
    norm.y = raw(y);
    norm.rstd = rstd ? rstd->mutable_data_ptr() : nullptr;
    prepare_and_launch<PreparedForward>(norm, a.x);
  }
  const Tensor result = cast(y, type);
  call.give({&result, mean ? &*mean : nullptr, rstd ? &*rstd : nullptr});
}

void rms_norm_gated_backward(StableIValue* stack, uint64_t arguments, uint64_t results) {
  using Op = GatedBackward;
  Call call(stack, arguments, results);
  const auto dy = call.at<Tensor>(Op::kDy);
  const GatedArguments a(call, Op{}, call.at<Tensor>(Op::kX));
  const auto rstd = call.at<Tensor>(Op::kRstd);
  BackwardCall norm;
  Needs& needs = norm.needs;
  needs.dx = call.flag(Op::kNeedsDx);
  needs.dgate = call.flag(Op::kNeedsDgate);
  needs.dweight = call.flag(Op::kNeedsDweight);
  needs.dbias = call.flag(Op::kNeedsDbias);
  check(a);
  check_shape(dy, "dy", a.x, 0);
  CHECK_ARGUMENT((a.weight || !needs.dweight) && (a.bias || !needs.dbias),
                 "a gradient is asked for of a parameter that is not there");
  const ScalarType of = scalar_type(statistics_type(data_type(a.x.scalar_type())));
  CHECK_ARGUMENT(a.x.numel() == 0 || (rstd.numel() == a.x.numel() / a.width() * a.groups() &&
                                      rstd.scalar_type() == of && is_beside(rstd, a.x)),
                 "rstd must be that of the forward pass");
  const CurrentDevice guard(a.x);
  const ScalarType common = common_type(a.x.scalar_type(), a.gate.scalar_type(), dy.scalar_type());
  const GatedTensors tensors(a, common);
  // A gradient as a kernel writes it; of shape (0,) unless it is needed.
  const auto gradient = [&](bool needed, const Optional& given, const Optional& read, void*& data) {
    if (!needed) return none(a.x, given ? given->scalar_type() : a.x.scalar_type());
    Tensor result = empty_like(*given, read->scalar_type());
    if (a.x.numel() == 0) torch::stable::zero_(result);
    data = result.mutable_data_ptr();
    return result;
  };
  void* dx_data = nullptr;
  const Tensor dx = gradient(needs.dx, a.x, tensors.x, dx_data);
  const Tensor dgate = gradient(needs.dgate, a.gate, tensors.gate, norm.dgate);
  const Tensor dweight = gradient(needs.dweight, a.weight, tensors.weight, norm.dweight);
  const Tensor dbias = gradient(needs.dbias, a.bias, tensors.bias, norm.dbias);
  if (a.x.numel() > 0 && needs.any()) {
    const Tensor read = with_rows(cast(dy, common), a.leading());
    const Tensor statistic = contiguous_of(rstd);
    tensors.describe(a, norm);
    norm.x = raw(tensors.x);
    norm.dy = raw(read);
    norm.rstd = raw(statistic);
    if (needs.dx) norm.dx = raw(dx);
    prepare_and_launch<PreparedBackward>(norm, a.x);
  }
  const auto as_given = [](const Tensor& result, const Optional& given) {
    return given ? cast(result, given->scalar_type()) : result;
  };
  const Tensor of_x = as_given(dx, a.x), of_gate = as_given(dgate, a.gate);
  const Tensor of_weight = as_given(dweight, a.weight), of_bias = as_given(dbias, a.bias);
  call.give({&of_x, &of_gate, &of_weight, &of_bias});
}

}  // namespace

void register_gated_kernels(torch::stable::detail::StableLibrary& library) {
  library.impl("rms_norm_gated", &rms_norm_gated<false>);
  library.impl("rms_norm_gated_forward", &rms_norm_gated<true>);
  library.impl("rms_norm_gated_backward", &rms_norm_gated_backward);
}

}  // namespace fused_layernorm

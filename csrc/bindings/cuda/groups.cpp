// SPDX-License-Identifier: Apache-2.0
// GroupNorm on CUDA; ops.h has the contract.
#include <torch/csrc/stable/ops.h>

#include <utility>

#include "bindings/cuda/checks.h"
#include "bindings/cuda/ops.h"
#include "call/layout.h"
#include "call/types.h"

namespace fused_layernorm {
namespace {

using Optional = std::optional<Tensor>;

void check(const NormArguments& a, const Tensor& input) {
  const ScalarType x = input.scalar_type();
  CHECK_ARGUMENT(input.dim() >= 2, "the input must have at least two dimensions");
  const int64_t channels = input.sizes()[1];
  CHECK_ARGUMENT(a.options.num_groups >= 1 && channels % a.options.num_groups == 0,
                 "num_groups must be at least one and divide the channels");
  check_numbers(a.options, a.weight.has_value());
  const std::pair<const Optional&, const char*> of_channels[] = {{a.weight, "weight"},
                                                                 {a.bias, "bias"}};
  for (const auto& [parameter, name] : of_channels) {
    if (!parameter) continue;
    CHECK_ARGUMENT(parameter->dim() == 1 && parameter->sizes()[0] == channels, name,
                   " must have a number for each channel");
    CHECK_ARGUMENT(is_beside(*parameter, input), name, " must be on the input's device");
  }
  check_parameters_type(type_of_parameters(a.weight, a.bias), x, x, "weight and bias");
  const std::pair<const Optional&, const char*> of_samples[] = {{a.shift, "shift"},
                                                                {a.scale, "scale"}};
  for (const auto& [modulation, name] : of_samples) {
    if (!modulation) continue;
    bool fits = modulation->dim() >= 2;
    for (int64_t d = 0; fits && d < modulation->dim(); ++d) {
      fits = modulation->sizes()[d] == (d < 2 ? input.sizes()[d] : 1);
    }
    CHECK_ARGUMENT(fits, name, " must have a number for each channel of each sample");
    CHECK_ARGUMENT(is_beside(*modulation, input), name, " must be on the input's device");
    check_parameters_type(modulation->scalar_type(), x, x, name);
  }
}

// The type in which a kernel writes y, or reads dy, of this type.
ScalarType kernel_type(const Tensor& x, ScalarType y) {
  return scalar_type(group_types(data_type(x.scalar_type()), data_type(y)).y);
}

// A tensor that is written where torch.empty_like would have it, and what kernels write in its
// place, which is contiguous where they do not write such an order.
struct Written {
  Tensor result, memory;

  Written(const Tensor& like, ScalarType type)
      : result(empty_in_order(like, type)),
        memory(group_layout_of(raw(result)) ? result : empty_like(like, type)) {}
  void finish() {
    if (memory.get() != result.get()) torch::stable::copy_(result, memory);
  }
};

// The tensor itself where it is of this type and lies as the other one does, else such a copy.
Tensor as_lies(const Tensor& tensor, const Tensor& other, ScalarType type) {
  if (tensor.scalar_type() == type && have_one_order(raw(tensor), raw(other))) return tensor;
  Tensor copy =
      empty_strided(other, other.sizes().data(), other.strides().data(), other.dim(), type);
  torch::stable::copy_(copy, tensor);
  return copy;
}

}  // namespace

ForwardResult run_groups(const ForwardArguments& a) {
  const Tensor& input = a.input;
  const ScalarType type = a.out_dtype.value_or(input.scalar_type());
  check(a, input);
  const CurrentDevice guard(input);
  Written y(input, kernel_type(input, type));
  ForwardResult result{y.result};
  if (a.needs_statistics) {
    new_statistics(input, {input.sizes()[0], a.options.num_groups}, data_type(input.scalar_type()),
                   /*is_rms=*/false, result);
  }
  if (input.numel() > 0) {
    const Tensor x = as_lies(input, y.memory, input.scalar_type());
    ForwardCall norm;
    describe(a, norm);
    norm.input = raw(x);
    norm.y = raw(y.memory);
    if (a.needs_statistics) {
      norm.mean = result.mean->mutable_data_ptr();
      norm.rstd = result.rstd->mutable_data_ptr();
    }
    prepare_and_launch<PreparedForward>(norm, x);
    y.finish();
  }
  if (y.result.scalar_type() != type) {
    result.y = empty_in_order(input, type);
    torch::stable::copy_(result.y, y.result);
  }
  return result;
}

BackwardResult run_groups(const BackwardArguments& a) {
  const Needs& needs = a.needs;
  check(a, a.x);
  check_shape(a.dy, "dy", a.x, 0);
  const int64_t groups = a.x.sizes()[0] * a.options.num_groups;
  CHECK_ARGUMENT(is_statistic(*a.mean, a.x, groups) && is_statistic(a.rstd, a.x, groups),
                 "mean and rstd must be those of the forward pass");
  const CurrentDevice guard(a.x);
  const ScalarType type = a.x.scalar_type();
  BackwardCall norm;
  const auto gradient = [&](bool needed, const Optional& parameter, void*& data) {
    const ScalarType own = parameter ? parameter->scalar_type() : type;
    return new_gradient(needed, parameter, own, a.x, a.x.numel() == 0, data);
  };
  BackwardResult result;
  result.dx = none(a.x, type);
  result.dshift = gradient(needs.dshift, a.shift, norm.dshift);
  result.dscale = gradient(needs.dscale, a.scale, norm.dscale);
  result.dweight = gradient(needs.dweight, a.weight, norm.dweight);
  result.dbias = gradient(needs.dbias, a.bias, norm.dbias);
  if (!needs.any()) return result;
  Written written(a.x, type);
  if (a.x.numel() > 0) {
    const Tensor x = as_lies(a.x, written.memory, type);
    const Tensor dy = as_lies(a.dy, written.memory, kernel_type(x, a.dy.scalar_type()));
    const Tensor of_groups[] = {contiguous_of(*a.mean), contiguous_of(a.rstd)};
    describe(a, norm);
    norm.needs = needs;
    norm.x = raw(x);
    norm.dy = raw(dy);
    norm.mean = raw(of_groups[0]);
    norm.rstd = raw(of_groups[1]);
    norm.dx = raw(written.memory);
    prepare_and_launch<PreparedBackward>(norm, x);
    if (needs.dx) written.finish();
  }
  if (needs.dx) result.dx = written.result;
  return result;
}

}  // namespace fused_layernorm

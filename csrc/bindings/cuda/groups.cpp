// SPDX-License-Identifier: Apache-2.0
// The operators of GroupNorm on CUDA: check, copy what kernels cannot read where it lies, describe,
// prepare, allocate, launch.
#include <torch/csrc/stable/ops.h>

#include <limits>
#include <utility>

#include "bindings/cuda/call.h"
#include "bindings/cuda/checks.h"
#include "bindings/driver.h"
#include "call/arguments.h"
#include "call/layout.h"
#include "call/prepare.h"
#include "call/types.h"

namespace fused_layernorm {
namespace {

using Optional = std::optional<Tensor>;

// The arguments that both directions have.
struct GroupArguments {
  Tensor x;
  Optional shift, scale, weight, bias;
  NormOptions options;

  template <class Op>
  GroupArguments(Call& call, Op, Tensor its_x)
      : x(std::move(its_x)),
        shift(call.at<Optional>(Op::kShift)),
        scale(call.at<Optional>(Op::kScale)),
        weight(call.at<Optional>(Op::kWeight)),
        bias(call.at<Optional>(Op::kBias)),
        options(read_options<Op>(call)) {}

  int64_t samples() const { return x.sizes()[0]; }
  int64_t channels() const { return x.sizes()[1]; }
  int64_t groups() const { return options.num_groups; }
};

void check(const GroupArguments& a) {
  const ScalarType x = a.x.scalar_type();
  CHECK_ARGUMENT(a.x.dim() >= 2, "the input must have at least two dimensions");
  CHECK_ARGUMENT(a.groups() >= 1 && a.channels() % a.groups() == 0,
                 "num_groups must be at least one and divide the channels");
  check_numbers(a.options, a.weight.has_value());
  const std::pair<const Optional&, const char*> of_channels[] = {{a.weight, "weight"},
                                                                 {a.bias, "bias"}};
  for (const auto& [parameter, name] : of_channels) {
    if (!parameter) continue;
    CHECK_ARGUMENT(parameter->dim() == 1 && parameter->sizes()[0] == a.channels(), name,
                   " must have a number for each channel");
    CHECK_ARGUMENT(is_beside(*parameter, a.x), name, " must be on the input's device");
  }
  check_parameters_type(type_of_parameters(a.weight, a.bias), x, x, "weight and bias");
  const std::pair<const Optional&, const char*> of_samples[] = {{a.shift, "shift"},
                                                                {a.scale, "scale"}};
  for (const auto& [modulation, name] : of_samples) {
    if (!modulation) continue;
    bool fits = modulation->dim() >= 2;
    for (int64_t d = 0; fits && d < modulation->dim(); ++d) {
      fits = modulation->sizes()[d] == (d < 2 ? a.x.sizes()[d] : 1);
    }
    CHECK_ARGUMENT(fits, name, " must have a number for each channel of each sample");
    CHECK_ARGUMENT(is_beside(*modulation, a.x), name, " must be on the input's device");
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

template <typename NormOf>
void describe(const GroupArguments& a, NormOf& call) {
  call.options = a.options;
  call.weight = raw(a.weight);
  call.bias = raw(a.bias);
  call.shift = raw(a.shift);
  call.scale = raw(a.scale);
}

// A new tensor for mean or rstd. No kernel runs for groups without elements, so `of_nothing` is
// their statistic.
Tensor new_statistic(const GroupArguments& a, ScalarType type, double of_nothing) {
  const int64_t sizes[] = {a.samples(), a.groups()};
  Tensor statistic = empty(a.x, sizes, 2, type);
  if (a.x.numel() == 0) torch::stable::fill_(statistic, of_nothing);
  return statistic;
}

template <bool kGivesStatistics>
void group_norm(StableIValue* stack, uint64_t arguments, uint64_t results) {
  using Op = GroupForward;
  Call call(stack, arguments, results);
  const GroupArguments a(call, Op{}, call.at<Tensor>(Op::kInput));
  const auto type = call.at<std::optional<ScalarType>>(Op::kOutDtype).value_or(a.x.scalar_type());
  check(a);
  const CurrentDevice guard(a.x);
  Written y(a.x, kernel_type(a.x, type));
  Optional mean, rstd;
  if (kGivesStatistics) {
    // PyTorch's kernels give these for groups without elements.
    const ScalarType of = scalar_type(statistics_type(data_type(a.x.scalar_type())));
    mean = new_statistic(a, of, 0.0);
    rstd = new_statistic(a, of, std::numeric_limits<double>::quiet_NaN());
  }
  if (a.x.numel() > 0) {
    const Tensor x = as_lies(a.x, y.memory, a.x.scalar_type());
    ForwardCall norm;
    describe(a, norm);
    norm.input = raw(x);
    norm.y = raw(y.memory);
    if (kGivesStatistics) {
      norm.mean = mean->mutable_data_ptr();
      norm.rstd = rstd->mutable_data_ptr();
    }
    prepare_and_launch<PreparedForward>(norm, x);
    y.finish();
  }
  if (y.result.scalar_type() != type) {
    Tensor cast = empty_in_order(a.x, type);
    torch::stable::copy_(cast, y.result);
    y.result = cast;
  }
  call.give({&y.result, mean ? &*mean : nullptr, rstd ? &*rstd : nullptr});
}

void group_norm_backward(StableIValue* stack, uint64_t arguments, uint64_t results) {
  using Op = GroupBackward;
  Call call(stack, arguments, results);
  const auto dy = call.at<Tensor>(Op::kDy);
  const GroupArguments a(call, Op{}, call.at<Tensor>(Op::kX));
  const auto mean = call.at<Tensor>(Op::kMean), rstd = call.at<Tensor>(Op::kRstd);
  Needs needs;
  needs.dx = call.flag(Op::kNeedsDx);
  needs.dshift = call.flag(Op::kNeedsDshift);
  needs.dscale = call.flag(Op::kNeedsDscale);
  needs.dweight = call.flag(Op::kNeedsDweight);
  needs.dbias = call.flag(Op::kNeedsDbias);
  check(a);
  check_shape(dy, "dy", a.x, 0);
  CHECK_ARGUMENT((a.shift || !needs.dshift) && (a.scale || !needs.dscale) &&
                     (a.weight || !needs.dweight) && (a.bias || !needs.dbias),
                 "a gradient is asked for of a parameter that is not there");
  const ScalarType type = a.x.scalar_type();
  const ScalarType of = scalar_type(statistics_type(data_type(type)));
  for (const Tensor* each : {&mean, &rstd}) {
    CHECK_ARGUMENT(each->numel() == a.samples() * a.groups() && each->scalar_type() == of &&
                       is_beside(*each, a.x),
                   "mean and rstd must be those of the forward pass");
  }
  const CurrentDevice guard(a.x);
  BackwardCall norm;
  // The gradient of a parameter; of shape (0,) unless it is needed.
  const auto gradient = [&](bool needed, const Optional& parameter, void*& data) {
    if (!needed) return none(a.x, parameter ? parameter->scalar_type() : type);
    Tensor result = empty_like(*parameter, parameter->scalar_type());
    if (a.x.numel() == 0) torch::stable::zero_(result);
    data = result.mutable_data_ptr();
    return result;
  };
  const Tensor dshift = gradient(needs.dshift, a.shift, norm.dshift);
  const Tensor dscale = gradient(needs.dscale, a.scale, norm.dscale);
  const Tensor dweight = gradient(needs.dweight, a.weight, norm.dweight);
  const Tensor dbias = gradient(needs.dbias, a.bias, norm.dbias);
  Tensor dx = none(a.x, type);
  if (needs.any()) {
    Written written(a.x, type);
    if (a.x.numel() > 0) {
      const Tensor x = as_lies(a.x, written.memory, type);
      const Tensor read = as_lies(dy, written.memory, kernel_type(x, dy.scalar_type()));
      const Tensor of_groups[] = {contiguous_of(mean), contiguous_of(rstd)};
      describe(a, norm);
      norm.needs = needs;
      norm.x = raw(x);
      norm.dy = raw(read);
      norm.mean = raw(of_groups[0]);
      norm.rstd = raw(of_groups[1]);
      norm.dx = raw(written.memory);
      prepare_and_launch<PreparedBackward>(norm, x);
      if (needs.dx) written.finish();
    }
    if (needs.dx) dx = written.result;
  }
  call.give({&dx, &dshift, &dscale, &dweight, &dbias});
}

}  // namespace

void register_group_kernels(torch::stable::detail::StableLibrary& library) {
  library.impl("group_norm", &group_norm<false>);
  library.impl("group_norm_forward", &group_norm<true>);
  library.impl("group_norm_backward", &group_norm_backward);
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// override_aten()'s group_norm; override.h says where its kernels are registered.
#pragma once

#include <ATen/ops/group_norm.h>
#include <ATen/ops/group_norm_ops.h>

#include <cmath>
#include <optional>
#include <utility>

#include "override_entry.h"

namespace fused_layernorm {

// From this release on PyTorch's kernels for CUDA read channels_last where it lies; before, they
// read and write contiguous tensors.
constexpr bool kKeepsChannelsLast = TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15;

// How a tensor lies that PyTorch's kernels read in the place of x, and that they write.
inline at::MemoryFormat pytorchs_format(const Tensor& x) {
  const bool keeps = x.is_cpu() || kKeepsChannelsLast;
  return keeps ? x.suggest_memory_format() : at::MemoryFormat::Contiguous;
}

inline bool takes_groups(const Tensor& x, int64_t groups, const OptionalTensor& weight,
                         const OptionalTensor& bias, double eps, Beside beside) {
  if (!is_known(x.scalar_type()) || x.dim() < 2 || groups < 1 || std::isnan(eps)) return false;
  const int64_t channels = x.size(1);
  return channels > 0 && channels % groups == 0 && takes_parameter(weight, x, {channels}, beside) &&
         takes_parameter(bias, x, {channels}, beside);
}

// The arguments of group_norm.
inline Stack group_arguments(const Tensor& x, int64_t groups, const OptionalTensor& weight,
                             const OptionalTensor& bias, double eps) {
  const auto value = [](const OptionalTensor& t) { return t ? value_of(*t) : IValue(); };
  Stack stack;
  stack.reserve(GroupNorm::kArguments);
  torch::jit::push(stack, x, groups, IValue(), IValue(), value(weight), value(bias), eps, IValue(),
                   1.0, IValue());
  return stack;
}

// The result of a call that asks for our kernels, as a negative number of groups does.
inline Tensor groups_by_operator(const Tensor& x, int64_t groups, const OptionalTensor& weight,
                                 const OptionalTensor& bias, double eps) {
  static const OperatorHandle op = find_operator("group_norm");
  const bool autocast = at::autocast::is_autocast_enabled(x.device().type());
  TORCH_CHECK_VALUE(takes_groups(x, groups, weight, bias, eps,
                                 autocast ? Beside::kAnyFloat : Beside::kSameOrFloat),
                    "the kernels do not take such a norm");
  Stack stack = group_arguments(x, groups, weight, bias, eps);
  op.callBoxed(stack);
  return stack[0].toTensor();
}

// Our result of a call at an Autograd or Autocast key, undefined if the call is not taken.
template <c10::DeviceType device, bool kUnderAutocast>
Tensor group_norm_of(DispatchKeySet keys, const Tensor& x, int64_t given,
                     const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  Override& entry = override_of<device>();
  const bool asked = given < 0;
  if (!(asked || entry.is_on.load(std::memory_order_relaxed))) return {};
  const int64_t groups = asked ? -given : given;
  const Beside beside = kUnderAutocast ? Beside::kAnyFloat
                        : asked        ? Beside::kSameOrFloat
                                       : Beside::kSame;
  if (is_inside || !is_next(keys, kBackendKey<device>) ||
      (kUnderAutocast && x.scalar_type() == at::kDouble) ||
      !takes_groups(x, groups, weight, bias, eps, beside)) {
    return asked ? groups_by_operator(x, groups, weight, bias, eps) : Tensor();
  }
  static const OperatorHandle op = find_operator("group_norm");
  Stack stack =
      group_arguments(asked ? x : x.contiguous(pytorchs_format(x)), groups, weight, bias, eps);
  const Taken guard(entry);
  naming_out_of_memory([&] {
    if (kUnderAutocast) {
      autocast<GroupNorm>(op, keys, &stack);
    } else {
      differentiate_forward<GroupNorm, false>(op, keys, &stack);
    }
  });
  return stack[0].toTensor();
}

template <c10::DeviceType device, bool kUnderAutocast>
Tensor group_norm(DispatchKeySet keys, const Tensor& x, int64_t groups,
                  const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                  bool cudnn_enabled) {
  const Tensor y = group_norm_of<device, kUnderAutocast>(keys, x, groups, weight, bias, eps);
  if (y.defined()) return y;
  if (!kUnderAutocast) {
    static const OperatorHandle op = aten("group_norm");
    return at::_ops::group_norm::redispatch(below<device>(op, keys), x, groups, weight, bias, eps,
                                            cudnn_enabled);
  }
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::AutocastCUDA);
  return at::group_norm(as_autocast_casts(x), groups, as_autocast_casts(weight),
                        as_autocast_casts(bias), eps, cudnn_enabled);
}

// What inference mode leads to, as for layer_norm.
inline Tensor select_group_norm(DispatchKeySet keys, const Tensor& x, int64_t groups,
                                const OptionalTensor& weight, const OptionalTensor& bias,
                                double eps, bool cudnn_enabled) {
  if (x.is_cuda() && groups < 0) return groups_by_operator(x, -groups, weight, bias, eps);
  return at::_ops::group_norm::redispatch(keys & kBelowSelect, x, groups, weight, bias, eps,
                                          cudnn_enabled);
}

// Whether x, as the native operators have it, is of these sizes and lies as they read it. From
// torch 2.15 on they read a copy of what lies otherwise, which older releases refuse.
inline bool is_native_input(const Tensor& x, int64_t samples, int64_t channels, int64_t positions) {
  return x.dim() >= 2 && x.size(0) == samples && x.size(1) == channels &&
         x.numel() == samples * channels * positions &&
         (kKeepsChannelsLast || x.is_contiguous(pytorchs_format(x)));
}

// native_group_norm(x, weight, bias, N, C, HxW, groups, eps), whose statistics have x's type.
inline bool take_group_forward(DispatchKeySet keys, Stack* stack, Override& entry) {
  using Op = GroupNorm;
  constexpr size_t kCount = 8;
  const IValue* const a = stack->data() + stack->size() - kCount;
  const Tensor& given = a[0].toTensor();
  const OptionalTensor weight = optional_of(a[1]), bias = optional_of(a[2]);
  const int64_t groups = a[6].toInt();
  const double eps = a[7].toDouble();
  if (!takes_groups(given, groups, weight, bias, eps, Beside::kSame) ||
      !is_native_input(given, a[3].toInt(), a[4].toInt(), a[5].toInt())) {
    return false;
  }
  const Tensor x = given.contiguous(pytorchs_format(given));
  auto arguments = group_arguments(x, groups, weight, bias, eps);
  const Taken taken(entry);
  DirectOutputs out;
  if (!forward_directly<Op>(keys, arguments.data(), options_of<Op>(arguments.data()),
                            /*needs_statistics=*/true, out)) {
    static const OperatorHandle op = find_operator(name_with_statistics<Op>());
    const c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
    call(op, &arguments);
    out = {arguments[0].toTensor(), Tensor(), arguments[1].toTensor(), arguments[2].toTensor()};
  }
  const at::ScalarType type = x.scalar_type();
  torch::jit::drop(*stack, kCount);
  stack->emplace_back(std::move(out.y));
  stack->emplace_back(out.mean.to(type));
  stack->emplace_back(out.rstd.to(type));
  return true;
}

// native_group_norm_backward(dy, x, mean, rstd, weight, N, C, HxW, groups, mask).
inline bool take_group_backward(Stack* stack, Override& entry) {
  constexpr size_t kCount = 10;
  const IValue* const a = stack->data() + stack->size() - kCount;
  const Tensor &dy = a[0].toTensor(), &given = a[1].toTensor();
  const Tensor &mean = a[2].toTensor(), &rstd = a[3].toTensor();
  const OptionalTensor weight = optional_of(a[4]);
  const int64_t samples = a[5].toInt(), channels = a[6].toInt(), groups = a[8].toInt();
  const auto mask = a[9].toBoolList();
  const at::ScalarType type = given.scalar_type();
  const auto is_statistic = [&](const Tensor& t) {
    return t.scalar_type() == type && t.device() == given.device() && t.dim() == 2 &&
           t.size(0) == samples && t.size(1) == groups;
  };
  if (!takes_groups(given, groups, weight, {}, 0.0, Beside::kSame) ||
      !is_native_input(given, samples, channels, a[7].toInt()) || dy.scalar_type() != type ||
      dy.device() != given.device() || dy.sizes() != given.sizes() || !is_statistic(mean) ||
      !is_statistic(rstd) || (mask[1] && !(weight && weight->defined()))) {
    return false;
  }
  const Tensor x = given.contiguous(pytorchs_format(given));
  NormOptions options;
  options.num_groups = groups;
  options.keeps_order = true;
  const Needs needs = {mask[0], mask[1], mask[2]};
  const at::ScalarType wide = statistics_type(type);
  // A bias has a gradient, but is no argument, and without an activation no kernel uses it.
  const Tensor bias = mask[2] ? at::empty({channels}, x.options()) : Tensor();
  const SavedNorm saved = {dy,   x,       mean.to(wide), rstd.to(wide), weight.value_or(Tensor()),
                           bias, Tensor()};
  const Taken taken(entry);
  GradientsOfNorm found = gradients_of<GroupNorm>(saved, options, needs);
  torch::jit::drop(*stack, kCount);
  stack->emplace_back(std::move(found.dx));
  stack->emplace_back(std::move(found.dweight));
  stack->emplace_back(std::move(found.dbias));
  return true;
}

}  // namespace fused_layernorm

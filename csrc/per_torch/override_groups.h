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

// What group_norm is given.
struct GroupsNorm {
  using Op = GroupNorm;
  const Tensor& x;
  const int64_t groups;
  const OptionalTensor &weight, &bias;
  const double eps;

  bool takes_float() const { return false; }
  bool is_taken(Beside beside) const {
    if (!is_known(x.scalar_type()) || x.dim() < 2 || groups < 1 || std::isnan(eps)) return false;
    const int64_t channels = x.size(1);
    return channels > 0 && channels % groups == 0 &&
           takes_parameter(weight, x, {channels}, beside) &&
           takes_parameter(bias, x, {channels}, beside);
  }
  Tensor pytorchs_input() const { return x.contiguous(pytorchs_format(x)); }
  NormOptions options() const {
    NormOptions options;
    options.num_groups = groups;
    options.eps = eps;
    options.keeps_order = true;
    return options;
  }
};

// Whether x, as the native operators have it, is of these sizes and lies as they read it. From
// torch 2.15 on they read a copy of what lies otherwise, which older releases refuse.
inline bool is_native_input(const Tensor& x, int64_t samples, int64_t channels, int64_t positions) {
  return x.dim() >= 2 && x.size(0) == samples && x.size(1) == channels &&
         x.numel() == samples * channels * positions &&
         (kKeepsChannelsLast || x.is_contiguous(pytorchs_format(x)));
}

// native_group_norm(x, weight, bias, N, C, HxW, groups, eps), whose statistics have x's type.
inline bool take_group_forward(DispatchKeySet keys, Stack* stack, Override& entry) {
  constexpr size_t kCount = 8;
  const IValue* const a = stack->data() + stack->size() - kCount;
  const Tensor& given = a[0].toTensor();
  const OptionalTensor weight = optional_of(a[1]), bias = optional_of(a[2]);
  const GroupsNorm norm = {given, a[6].toInt(), weight, bias, a[7].toDouble()};
  if (!norm.is_taken(Beside::kSame) ||
      !is_native_input(given, a[3].toInt(), a[4].toInt(), a[5].toInt())) {
    return false;
  }
  const Tensor x = norm.pytorchs_input();
  const Taken taken(entry);
  DirectOutputs out = with_statistics(keys, norm, x);
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
  if (!GroupsNorm{given, groups, weight, kNoTensor, 0.0}.is_taken(Beside::kSame) ||
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

// SPDX-License-Identifier: Apache-2.0
// override_aten()'s group_norm; override.h says where its kernels are registered.
#pragma once

#include <ATen/ops/group_norm.h>
#include <ATen/ops/group_norm_ops.h>

#include <cmath>
#include <optional>

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

}  // namespace fused_layernorm

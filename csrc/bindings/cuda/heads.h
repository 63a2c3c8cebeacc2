// SPDX-License-Identifier: Apache-2.0
// The operators of heads on CUDA: normalized and rotated q and k, and their backward.
#pragma once

#include <optional>
#include <string>
#include <tuple>

#include "bindings/cuda/tensors.h"

namespace fused_layernorm __attribute__((visibility("hidden"))) {

  using OptionalTensor = std::optional<Tensor>;

  std::tuple<Tensor, Tensor> qk_norm_rope(
      const Tensor& q, const OptionalTensor& k, const OptionalTensor& q_weight,
      const OptionalTensor& k_weight, const OptionalTensor& q_bias, const OptionalTensor& k_bias,
      const OptionalTensor& cos, const OptionalTensor& sin, int64_t rotary_dim, int64_t seq_dim,
      double eps, const std::optional<std::string>& statistic, double weight_offset, bool rounds,
      bool interleaved, bool inverse);

  std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> qk_norm_rope_backward(
      const Tensor& dq_out, const OptionalTensor& dk_out, const Tensor& q, const OptionalTensor& k,
      const OptionalTensor& q_weight, const OptionalTensor& k_weight, const OptionalTensor& q_bias,
      const OptionalTensor& k_bias, const OptionalTensor& cos, const OptionalTensor& sin,
      int64_t rotary_dim, int64_t seq_dim, double eps, const std::optional<std::string>& statistic,
      double weight_offset, bool interleaved, bool inverse, bool needs_dweight, bool needs_dbias);

}  // namespace fused_layernorm

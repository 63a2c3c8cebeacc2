// SPDX-License-Identifier: Apache-2.0
// The operators of schemas.cpp on CUDA, for callers in C++. One function runs all forward
// operators. Three run the backward operators: of a norm, of a norm of a gated sum, and of a gated
// sum alone.
#pragma once

#include <optional>
#include <string>
#include <tuple>

#include "bindings/cuda/checks.h"
#include "bindings/cuda/launches.h"
#include "bindings/cuda/modulation.h"
#include "bindings/cuda/tensors.h"

namespace fused_layernorm __attribute__((visibility("hidden"))) {

  struct ForwardArguments {
    Tensor input;
    std::optional<Tensor> residual = std::nullopt;
    int64_t normalized_ndim = 1;
    std::optional<Tensor> weight = std::nullopt, bias = std::nullopt;
    double eps = 0.0;
    std::optional<std::string> activation = std::nullopt;
    double scale = 1.0;
    std::optional<ScalarType> out_dtype = std::nullopt;  // input's, if absent
    bool needs_statistics = true;
    NormKind kind = {};
    Modulations modulation = {};  // a gate only beside a residual
    bool keeps_order = false;     // y has the strides of torch.empty_like(input)

    XhatRounding xhat_rounding() const {
      return xhat_rounding_of(kind.round_before_weight, weight.has_value(), input.scalar_type());
    }
  };

  struct ForwardResult {
    Tensor y;
    std::optional<Tensor> residual_out;  // with a residual
    std::optional<Tensor> mean, rstd;    // where asked for; RMSNorm's mean is of shape (0,)
  };

  ForwardResult run_forward(const ForwardArguments& a);

  struct BackwardArguments {
    Tensor dy, x;
    int64_t normalized_ndim;
    Tensor mean, rstd;
    std::optional<Tensor> weight = std::nullopt, bias = std::nullopt, dresidual = std::nullopt;
    std::optional<std::string> activation = std::nullopt;
    double scale = 1.0;
    bool needs_dx = true;
    bool needs_dweight = true;
    bool needs_dbias = true;
    NormKind kind = {};
    Modulations modulation = {};  // a gate only for run_gated_backward
    bool needs_dshift = false;
    bool needs_dscale = false;
    bool keeps_order = false;  // dx has the strides of torch.empty_like(x), else it is contiguous
  };

  // A gradient that is not asked for is an empty tensor of shape (0,).
  struct BackwardResult {
    Tensor dx, dweight, dbias, dshift, dscale;
  };

  BackwardResult run_backward(const BackwardArguments& a);

  // The gradients of a norm of the gated sum x = residual + modulation.gate * input.
  struct GatedBackwardResult {
    BackwardResult of_norm;
    Tensor dinput, dgate;
  };

  GatedBackwardResult run_gated_backward(const BackwardArguments& a, const Tensor& input,
                                         bool needs_dinput, bool needs_dgate);

  // (dinput, dgate) from the gradient of residual + gate * input.
  std::tuple<Tensor, Tensor> run_gate_backward(const Tensor& dsum, const Tensor& input,
                                               const Tensor& gate, bool needs_dinput,
                                               bool needs_dgate);

}  // namespace fused_layernorm

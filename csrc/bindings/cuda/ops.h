// SPDX-License-Identifier: Apache-2.0
// The operators of schemas.cpp on CUDA, for callers in C++. One function runs all forward operators
// of norms, one all backward operators but that of a gated sum alone.
#pragma once

#include <optional>
#include <tuple>

#include "bindings/cuda/tensors.h"

namespace fused_layernorm __attribute__((visibility("hidden"))) {

  struct ForwardArguments {
    Tensor input;
    std::optional<Tensor> residual = std::nullopt, weight = std::nullopt, bias = std::nullopt;
    std::optional<Tensor> shift = std::nullopt, scale = std::nullopt;
    std::optional<Tensor> gate = std::nullopt;           // only beside a residual
    std::optional<ScalarType> out_dtype = std::nullopt;  // input's, if absent
    bool needs_statistics = true;
    NormOptions options = {};

    bool is_modulated() const { return shift || scale || gate; }
  };

  struct ForwardResult {
    Tensor y;
    std::optional<Tensor> residual_out = std::nullopt;               // with a residual
    std::optional<Tensor> mean = std::nullopt, rstd = std::nullopt;  // where asked for; RMSNorm's
                                                                     // mean is of shape (0,)
  };

  ForwardResult run_forward(const ForwardArguments& a);

  struct BackwardArguments {
    Tensor dy, x, mean, rstd;
    std::optional<Tensor> weight = std::nullopt, bias = std::nullopt, dresidual = std::nullopt;
    std::optional<Tensor> shift = std::nullopt, scale = std::nullopt;
    // Of a gated sum x = residual + gate * input: both or neither.
    std::optional<Tensor> input = std::nullopt, gate = std::nullopt;
    Needs needs = {};
    NormOptions options = {};

    bool is_modulated() const { return shift || scale || gate; }
  };

  // A gradient that is not asked for is an empty tensor of shape (0,).
  struct BackwardResult {
    Tensor dx, dweight, dbias, dshift, dscale;
    std::optional<Tensor> dinput = std::nullopt, dgate = std::nullopt;  // of a gated sum
  };

  BackwardResult run_backward(const BackwardArguments& a);

  // (dinput, dgate) from the gradient of residual + gate * input.
  std::tuple<Tensor, Tensor> run_gate_backward(const Tensor& dsum, const Tensor& input,
                                               const Tensor& gate, bool needs_dinput,
                                               bool needs_dgate);

}  // namespace fused_layernorm

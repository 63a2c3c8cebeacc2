// The operators on CUDA for callers in C++: what schemas.cpp declares, the four forward ones as
// one.
#pragma once

#include <optional>
#include <string>
#include <tuple>

#include "bindings/cuda/tensors.h"

namespace fused_layernorm __attribute__((visibility("hidden"))) {

  struct ForwardArguments {
    const Tensor& input;
    const std::optional<Tensor>& residual;
    int64_t normalized_ndim;
    const std::optional<Tensor>& weight;
    const std::optional<Tensor>& bias;
    double eps;
    std::optional<std::string> activation = std::nullopt;
    double scale = 1.0;
    std::optional<ScalarType> out_dtype = std::nullopt;  // input's, if absent
    bool needs_statistics = true;
  };

  struct ForwardResult {
    Tensor y;
    std::optional<Tensor> residual_out;  // with a residual
    std::optional<Tensor> mean, rstd;    // where asked for
  };

  ForwardResult run_forward(const ForwardArguments& a);

  struct BackwardArguments {
    const Tensor& dy;
    const Tensor& x;
    int64_t normalized_ndim;
    const Tensor& mean;
    const Tensor& rstd;
    const std::optional<Tensor>& weight;
    const std::optional<Tensor>& bias;
    const std::optional<Tensor>& dresidual;
    std::optional<std::string> activation = std::nullopt;
    double scale = 1.0;
    bool needs_dx = true;
    bool needs_dweight = true;
    bool needs_dbias = true;
  };

  // (dx, dweight, dbias); one that is not asked for is an empty tensor of shape (0,).
  std::tuple<Tensor, Tensor, Tensor> run_backward(const BackwardArguments& a);

}  // namespace fused_layernorm

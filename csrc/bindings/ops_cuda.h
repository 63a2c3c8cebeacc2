// The CUDA implementations of the operators that ops.cpp declares, for callers in C++.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <tuple>

namespace fused_layernorm {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Tensor layer_norm(const Tensor& input, int64_t normalized_ndim, const std::optional<Tensor>& weight,
                  const std::optional<Tensor>& bias, double eps,
                  const std::optional<std::string>& activation, double scale,
                  std::optional<ScalarType> out_dtype);

// (y, mean, rstd)
std::tuple<Tensor, Tensor, Tensor> layer_norm_forward(const Tensor& input, int64_t normalized_ndim,
                                                      const std::optional<Tensor>& weight,
                                                      const std::optional<Tensor>& bias, double eps,
                                                      const std::optional<std::string>& activation,
                                                      double scale,
                                                      std::optional<ScalarType> out_dtype);

// (y, residual_out)
std::tuple<Tensor, Tensor> add_layer_norm(const Tensor& input, const Tensor& residual,
                                          int64_t normalized_ndim,
                                          const std::optional<Tensor>& weight,
                                          const std::optional<Tensor>& bias, double eps,
                                          const std::optional<std::string>& activation,
                                          double scale, std::optional<ScalarType> out_dtype);

// (y, residual_out, mean, rstd)
std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm_forward(
    const Tensor& input, const Tensor& residual, int64_t normalized_ndim,
    const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, double eps,
    const std::optional<std::string>& activation, double scale,
    std::optional<ScalarType> out_dtype);

// (dx, dweight, dbias); one that is not asked for is an empty tensor of shape (0,).
std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(
    const Tensor& dy, const Tensor& x, int64_t normalized_ndim, const Tensor& mean,
    const Tensor& rstd, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& dresidual, const std::optional<std::string>& activation,
    double scale, bool needs_dx, bool needs_dweight, bool needs_dbias);

}  // namespace fused_layernorm

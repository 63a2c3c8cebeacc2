// The operators of schemas.cpp on CUDA: each takes its arguments apart and hands them on.
#include <torch/csrc/stable/library.h>

#include "bindings/cuda/ops.h"

namespace fused_layernorm {
namespace {

using Optional = std::optional<Tensor>;
using Name = std::optional<std::string>;

Tensor layer_norm(const Tensor& input, int64_t normalized_ndim, const Optional& weight,
                  const Optional& bias, double eps, const Name& activation, double scale,
                  std::optional<ScalarType> out_dtype) {
  return run_forward({input, std::nullopt, normalized_ndim, weight, bias, eps, activation, scale,
                      out_dtype, false})
      .y;
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_forward(const Tensor& input, int64_t normalized_ndim,
                                                      const Optional& weight, const Optional& bias,
                                                      double eps, const Name& activation,
                                                      double scale,
                                                      std::optional<ScalarType> out_dtype) {
  const ForwardResult result = run_forward({input, std::nullopt, normalized_ndim, weight, bias, eps,
                                            activation, scale, out_dtype, true});
  return {result.y, *result.mean, *result.rstd};
}

std::tuple<Tensor, Tensor> add_layer_norm(const Tensor& input, const Tensor& residual,
                                          int64_t normalized_ndim, const Optional& weight,
                                          const Optional& bias, double eps, const Name& activation,
                                          double scale, std::optional<ScalarType> out_dtype) {
  const ForwardResult result = run_forward(
      {input, residual, normalized_ndim, weight, bias, eps, activation, scale, out_dtype, false});
  return {result.y, *result.residual_out};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm_forward(
    const Tensor& input, const Tensor& residual, int64_t normalized_ndim, const Optional& weight,
    const Optional& bias, double eps, const Name& activation, double scale,
    std::optional<ScalarType> out_dtype) {
  const ForwardResult result = run_forward(
      {input, residual, normalized_ndim, weight, bias, eps, activation, scale, out_dtype, true});
  return {result.y, *result.residual_out, *result.mean, *result.rstd};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(
    const Tensor& dy, const Tensor& x, int64_t normalized_ndim, const Tensor& mean,
    const Tensor& rstd, const Optional& weight, const Optional& bias, const Optional& dresidual,
    const Name& activation, double scale, bool needs_dx, bool needs_dweight, bool needs_dbias) {
  return run_backward({dy, x, normalized_ndim, mean, rstd, weight, bias, dresidual, activation,
                       scale, needs_dx, needs_dweight, needs_dbias});
}

}  // namespace
}  // namespace fused_layernorm

STABLE_TORCH_LIBRARY_IMPL(fused_layernorm, CUDA, m) {
  m.impl("layer_norm", TORCH_BOX(&fused_layernorm::layer_norm));
  m.impl("layer_norm_forward", TORCH_BOX(&fused_layernorm::layer_norm_forward));
  m.impl("add_layer_norm", TORCH_BOX(&fused_layernorm::add_layer_norm));
  m.impl("add_layer_norm_forward", TORCH_BOX(&fused_layernorm::add_layer_norm_forward));
  m.impl("layer_norm_backward", TORCH_BOX(&fused_layernorm::layer_norm_backward));
}

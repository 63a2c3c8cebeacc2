// SPDX-License-Identifier: Apache-2.0
// The operators of schemas.cpp on CUDA: each passes its arguments to a function of ops.h.
#include <torch/csrc/stable/library.h>

#include "bindings/cuda/ops.h"
#include "bindings/driver.h"

namespace fused_layernorm {
namespace {

using Optional = std::optional<Tensor>;
using Name = std::optional<std::string>;

// The arguments of each forward operator, in the order of its schema; `gives_statistics` says which
// of two operators is meant.
ForwardResult run_plain(const Tensor& input, const Optional& residual, int64_t normalized_ndim,
                        const Optional& weight, const Optional& bias, double eps,
                        const Name& activation, double scale, std::optional<ScalarType> out_dtype,
                        const NormKind& kind, bool gives_statistics, bool keeps_order = false) {
  return run_forward({input,
                      residual,
                      normalized_ndim,
                      weight,
                      bias,
                      eps,
                      activation,
                      scale,
                      out_dtype,
                      gives_statistics,
                      kind,
                      {},
                      keeps_order});
}

Tensor layer_norm(const Tensor& input, int64_t normalized_ndim, const Optional& weight,
                  const Optional& bias, double eps, const Name& activation, double scale,
                  std::optional<ScalarType> out_dtype, const std::string& statistic, double offset,
                  bool rounds, bool keeps_order) {
  return run_plain(input, std::nullopt, normalized_ndim, weight, bias, eps, activation, scale,
                   out_dtype, {statistic, offset, rounds}, false, keeps_order)
      .y;
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_forward(
    const Tensor& input, int64_t normalized_ndim, const Optional& weight, const Optional& bias,
    double eps, const Name& activation, double scale, std::optional<ScalarType> out_dtype,
    const std::string& statistic, double offset, bool rounds, bool keeps_order) {
  const ForwardResult result =
      run_plain(input, std::nullopt, normalized_ndim, weight, bias, eps, activation, scale,
                out_dtype, {statistic, offset, rounds}, true, keeps_order);
  return {result.y, *result.mean, *result.rstd};
}

std::tuple<Tensor, Tensor> add_layer_norm(const Tensor& input, const Tensor& residual,
                                          int64_t normalized_ndim, const Optional& weight,
                                          const Optional& bias, double eps, const Name& activation,
                                          double scale, std::optional<ScalarType> out_dtype,
                                          const std::string& statistic, double offset,
                                          bool rounds) {
  const ForwardResult result =
      run_plain(input, residual, normalized_ndim, weight, bias, eps, activation, scale, out_dtype,
                {statistic, offset, rounds}, false);
  return {result.y, *result.residual_out};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm_forward(
    const Tensor& input, const Tensor& residual, int64_t normalized_ndim, const Optional& weight,
    const Optional& bias, double eps, const Name& activation, double scale,
    std::optional<ScalarType> out_dtype, const std::string& statistic, double offset, bool rounds) {
  const ForwardResult result =
      run_plain(input, residual, normalized_ndim, weight, bias, eps, activation, scale, out_dtype,
                {statistic, offset, rounds}, true);
  return {result.y, *result.residual_out, *result.mean, *result.rstd};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(
    const Tensor& dy, const Tensor& x, int64_t normalized_ndim, const Tensor& mean,
    const Tensor& rstd, const Optional& weight, const Optional& bias, const Optional& dresidual,
    const Name& activation, double scale, bool needs_dx, bool needs_dweight, bool needs_dbias,
    const std::string& statistic, double offset, bool keeps_order) {
  const BackwardResult result = run_backward({dy,
                                              x,
                                              normalized_ndim,
                                              mean,
                                              rstd,
                                              weight,
                                              bias,
                                              dresidual,
                                              activation,
                                              scale,
                                              needs_dx,
                                              needs_dweight,
                                              needs_dbias,
                                              {statistic, offset},
                                              {},
                                              false,
                                              false,
                                              keeps_order});
  return {result.dx, result.dweight, result.dbias};
}

// The same for the forward operators with a modulation.
ForwardResult run_modulated(const Tensor& input, const Optional& residual, const Optional& gate,
                            int64_t normalized_ndim, const Optional& shift, const Optional& scale,
                            const Optional& weight, const Optional& bias, double eps,
                            std::optional<ScalarType> out_dtype, const NormKind& kind,
                            bool gives_statistics) {
  return run_forward({input,
                      residual,
                      normalized_ndim,
                      weight,
                      bias,
                      eps,
                      std::nullopt,
                      1.0,
                      out_dtype,
                      gives_statistics,
                      kind,
                      {shift, scale, gate}});
}

Tensor ada_layer_norm(const Tensor& input, int64_t normalized_ndim, const Optional& shift,
                      const Optional& scale, const Optional& weight, const Optional& bias,
                      double eps, std::optional<ScalarType> out_dtype, const std::string& statistic,
                      double offset, bool rounds) {
  return run_modulated(input, std::nullopt, std::nullopt, normalized_ndim, shift, scale, weight,
                       bias, eps, out_dtype, {statistic, offset, rounds}, false)
      .y;
}

std::tuple<Tensor, Tensor, Tensor> ada_layer_norm_forward(
    const Tensor& input, int64_t normalized_ndim, const Optional& shift, const Optional& scale,
    const Optional& weight, const Optional& bias, double eps, std::optional<ScalarType> out_dtype,
    const std::string& statistic, double offset, bool rounds) {
  const ForwardResult result =
      run_modulated(input, std::nullopt, std::nullopt, normalized_ndim, shift, scale, weight, bias,
                    eps, out_dtype, {statistic, offset, rounds}, true);
  return {result.y, *result.mean, *result.rstd};
}

std::tuple<Tensor, Tensor> add_ada_layer_norm(const Tensor& input, const Tensor& residual,
                                              const Optional& gate, int64_t normalized_ndim,
                                              const Optional& shift, const Optional& scale,
                                              const Optional& weight, const Optional& bias,
                                              double eps, std::optional<ScalarType> out_dtype,
                                              const std::string& statistic, double offset,
                                              bool rounds) {
  const ForwardResult result =
      run_modulated(input, residual, gate, normalized_ndim, shift, scale, weight, bias, eps,
                    out_dtype, {statistic, offset, rounds}, false);
  return {result.y, *result.residual_out};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> add_ada_layer_norm_forward(
    const Tensor& input, const Tensor& residual, const Optional& gate, int64_t normalized_ndim,
    const Optional& shift, const Optional& scale, const Optional& weight, const Optional& bias,
    double eps, std::optional<ScalarType> out_dtype, const std::string& statistic, double offset,
    bool rounds) {
  const ForwardResult result =
      run_modulated(input, residual, gate, normalized_ndim, shift, scale, weight, bias, eps,
                    out_dtype, {statistic, offset, rounds}, true);
  return {result.y, *result.residual_out, *result.mean, *result.rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> ada_layer_norm_backward(
    const Tensor& dy, const Tensor& x, int64_t normalized_ndim, const Tensor& mean,
    const Tensor& rstd, const Optional& shift, const Optional& scale, const Optional& weight,
    const Optional& bias, const Optional& dresidual, bool needs_dx, bool needs_dshift,
    bool needs_dscale, bool needs_dweight, bool needs_dbias, const std::string& statistic,
    double offset) {
  const BackwardResult result = run_backward({dy,
                                              x,
                                              normalized_ndim,
                                              mean,
                                              rstd,
                                              weight,
                                              bias,
                                              dresidual,
                                              std::nullopt,
                                              1.0,
                                              needs_dx,
                                              needs_dweight,
                                              needs_dbias,
                                              {statistic, offset},
                                              {shift, scale, std::nullopt},
                                              needs_dshift,
                                              needs_dscale});
  return {result.dx, result.dshift, result.dscale, result.dweight, result.dbias};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> add_ada_layer_norm_backward(
    const Tensor& dy, const Tensor& x, const Tensor& input, const Tensor& gate,
    int64_t normalized_ndim, const Tensor& mean, const Tensor& rstd, const Optional& shift,
    const Optional& scale, const Optional& weight, const Optional& bias, const Optional& dresidual,
    bool needs_dx, bool needs_dinput, bool needs_dgate, bool needs_dshift, bool needs_dscale,
    bool needs_dweight, bool needs_dbias, const std::string& statistic, double offset) {
  const GatedBackwardResult result = run_gated_backward({dy,
                                                         x,
                                                         normalized_ndim,
                                                         mean,
                                                         rstd,
                                                         weight,
                                                         bias,
                                                         dresidual,
                                                         std::nullopt,
                                                         1.0,
                                                         needs_dx,
                                                         needs_dweight,
                                                         needs_dbias,
                                                         {statistic, offset},
                                                         {shift, scale, gate},
                                                         needs_dshift,
                                                         needs_dscale},
                                                        input, needs_dinput, needs_dgate);
  const BackwardResult& of_norm = result.of_norm;
  return {of_norm.dx,     result.dinput,   result.dgate, of_norm.dshift,
          of_norm.dscale, of_norm.dweight, of_norm.dbias};
}

}  // namespace

void register_cuda_kernels(torch::stable::detail::StableLibrary& library) {
  library.impl("layer_norm", TORCH_BOX(&layer_norm));
  library.impl("layer_norm_forward", TORCH_BOX(&layer_norm_forward));
  library.impl("add_layer_norm", TORCH_BOX(&add_layer_norm));
  library.impl("add_layer_norm_forward", TORCH_BOX(&add_layer_norm_forward));
  library.impl("layer_norm_backward", TORCH_BOX(&layer_norm_backward));
  library.impl("ada_layer_norm", TORCH_BOX(&ada_layer_norm));
  library.impl("ada_layer_norm_forward", TORCH_BOX(&ada_layer_norm_forward));
  library.impl("add_ada_layer_norm", TORCH_BOX(&add_ada_layer_norm));
  library.impl("add_ada_layer_norm_forward", TORCH_BOX(&add_ada_layer_norm_forward));
  library.impl("ada_layer_norm_backward", TORCH_BOX(&ada_layer_norm_backward));
  library.impl("add_ada_layer_norm_backward", TORCH_BOX(&add_ada_layer_norm_backward));
  library.impl("gate_backward", TORCH_BOX(&run_gate_backward));
  register_head_kernels(library);
}

}  // namespace fused_layernorm

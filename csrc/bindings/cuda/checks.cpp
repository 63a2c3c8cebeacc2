// SPDX-License-Identifier: Apache-2.0
// The argument checks of the operators on CUDA; checks.h has the contract.
#include "bindings/cuda/checks.h"

#include <cmath>

#include "bindings/cuda/formula.h"
#include "call/types.h"

namespace fused_layernorm {

Shape::Shape(const Tensor& x, int64_t normalized_ndim) : leading(x.dim() - normalized_ndim) {
  CHECK_ARGUMENT(normalized_ndim >= 1 && leading >= 0, "cannot normalize the last ",
                 normalized_ndim, " of ", x.dim(), " dimensions");
  const auto sizes = x.sizes();
  for (int64_t d = 0; d < x.dim(); ++d) (d < leading ? rows : cols) *= sizes[d];
  if (rows > kMostExtent || cols > kMostExtent) throw NoKernel();
}

void check_numbers(const NormOptions& options, bool has_weight) {
  CHECK_ARGUMENT(std::isfinite(options.output_scale), "scale must be a finite number");
  CHECK_ARGUMENT(!std::isnan(options.eps), "eps must be a number");
  CHECK_ARGUMENT(std::isfinite(options.weight_offset), "weight_offset must be a finite number");
  CHECK_ARGUMENT(has_weight || options.weight_offset == 0.0,
                 "weight_offset is there without a weight");
}

void check_shape(const Tensor& tensor, const char* name, const Tensor& x, int64_t first_dim) {
  const auto sizes = x.sizes();
  bool fits = tensor.dim() == x.dim() - first_dim;
  for (int64_t d = 0; fits && d < tensor.dim(); ++d) {
    fits = tensor.sizes()[d] == sizes[first_dim + d];
  }
  CHECK_ARGUMENT(fits, name,
                 first_dim == 0 ? " must have the shape of the input"
                                : " must have the shape of the normalized dimensions");
  CHECK_ARGUMENT(is_beside(tensor, x), name, " must be on the input's device");
}

void check_shape(const std::optional<Tensor>& tensor, const char* name, const Tensor& x,
                 int64_t first_dim) {
  if (tensor) check_shape(*tensor, name, x, first_dim);
}

bool is_statistic(const Tensor& tensor, const Tensor& x, int64_t count) {
  const DataType type = statistics_type(data_type(x.scalar_type()));
  return tensor.numel() == count && tensor.scalar_type() == scalar_type(type) &&
         is_beside(tensor, x);
}

std::optional<ScalarType> type_of_parameters(const std::optional<Tensor>& weight,
                                             const std::optional<Tensor>& bias) {
  if (weight && bias) {
    CHECK_ARGUMENT(weight->scalar_type() == bias->scalar_type(),
                   "weight and bias must be of one dtype");
  }
  if (weight) return weight->scalar_type();
  if (bias) return bias->scalar_type();
  return std::nullopt;
}

void check_parameters_type(std::optional<ScalarType> parameters, ScalarType x, ScalarType input,
                           const char* name) {
  const auto is_half = [](ScalarType type) {
    return type == ScalarType::Half || type == ScalarType::BFloat16;
  };
  const bool fits = !parameters || *parameters == x || *parameters == input ||
                    (*parameters == ScalarType::Float && (is_half(x) || is_half(input)));
  CHECK_ARGUMENT(fits, name,
                 " must be of the input's dtype, or float32 beside half precision input");
}

}  // namespace fused_layernorm

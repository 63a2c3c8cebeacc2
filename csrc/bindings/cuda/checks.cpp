// SPDX-License-Identifier: Apache-2.0
// The argument checks of the operators on CUDA; checks.h has the contract.
#include "bindings/cuda/checks.h"

#include <cmath>

namespace fused_layernorm {

Shape::Shape(const Tensor& x, int64_t normalized_ndim) : leading(x.dim() - normalized_ndim) {
  CHECK_ARGUMENT(normalized_ndim >= 1 && leading >= 0, "cannot normalize the last ",
                 normalized_ndim, " of ", x.dim(), " dimensions");
  const auto sizes = x.sizes();
  for (int64_t d = 0; d < x.dim(); ++d) (d < leading ? rows : cols) *= sizes[d];
  CHECK_ARGUMENT(rows <= kMostExtent && cols <= kMostExtent, "expected at most ", kMostExtent,
                 " rows and columns, got ", rows, " rows of ", cols);
}

Activation activation_of(const std::optional<std::string>& name) {
  if (!name) return Activation::kNone;
  if (*name == "gelu") return Activation::kGelu;
  if (*name == "gelu_tanh") return Activation::kGeluTanh;
  if (*name == "silu") return Activation::kSilu;
  if (*name == "relu") return Activation::kRelu;
  CHECK_ARGUMENT(false, "activation must be None, 'gelu', 'gelu_tanh', 'silu' or 'relu', got '",
                 *name, "'");
  return Activation::kNone;
}

NormKind::NormKind(const std::string& statistic, double offset, bool rounds)
    : is_rms(statistic == "rms"), weight_offset(offset), round_before_weight(rounds) {
  CHECK_ARGUMENT(is_rms || statistic == "layer", "statistic must be 'layer' or 'rms', got '",
                 statistic, "'");
  CHECK_ARGUMENT(std::isfinite(offset), "weight_offset must be a finite number");
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

KernelTypes::KernelTypes(ScalarType x_type, std::optional<ScalarType> weight_type,
                         ScalarType y_type)
    : x(x_type), weight(weight_type.value_or(x_type)), y(y_type) {
  if (x == ScalarType::Double) {
    weight = y = x;
    return;
  }
  if (y == ScalarType::Double || (is_half(x) && y != x)) y = ScalarType::Float;
  if (!is_half(x) || y != x) weight = ScalarType::Float;
  if (weight != x) weight = ScalarType::Float;
}

DataTypes KernelTypes::data_types() const {
  const DataTypes types = {data_type(x), data_type(weight), data_type(y)};
  CHECK_ARGUMENT(has_kernels(types.x, types.weight, types.y),
                 "this build is trimmed (FUSED_LAYERNORM_TRIMMED=1): it has no kernels for x of ",
                 name_of(types.x), ", weight of ", name_of(types.weight), " and y of ",
                 name_of(types.y));
  return types;
}

bool KernelTypes::aligned(int64_t cols) const {
  return cols * std::min(size_of(data_type(x)), size_of(data_type(y))) % kVectorBytes == 0;
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// The argument checks of the operators on CUDA. They guard memory: no kernel is launched on
// arguments that do not fit together. The error messages that users read come from
// fused_layernorm/ops/arguments.py.
#pragma once

#include <cstdint>
#include <optional>

#include "bindings/cuda/tensors.h"

namespace fused_layernorm __attribute__((visibility("hidden"))) {

  // Leading dimensions and normalized dimensions as rows and columns.
  struct Shape {
    int64_t rows = 1, cols = 1;
    int64_t leading;  // the number of leading dimensions

    // Throws if x has no such dimensions; NoKernel, if more rows or columns than kernels count.
    Shape(const Tensor& x, int64_t normalized_ndim);
    bool empty() const { return rows == 0 || cols == 0; }
  };

  // Throws unless the numbers are finite, and there is no offset without a weight.
  void check_numbers(const NormOptions& options, bool has_weight);

  // Throws unless `tensor` is on x's device and of the shape of x's dimensions from `first_dim` on.
  void check_shape(const Tensor& tensor, const char* name, const Tensor& x, int64_t first_dim);
  void check_shape(const std::optional<Tensor>& tensor, const char* name, const Tensor& x,
                   int64_t first_dim);

  // Whether a tensor can be a statistic of x: on its device, in the arithmetic's type, of so many
  // numbers.
  bool is_statistic(const Tensor& tensor, const Tensor& x, int64_t count);

  // The type of weight and bias, std::nullopt without either. Throws if their types differ.
  std::optional<ScalarType> type_of_parameters(const std::optional<Tensor>& weight,
                                               const std::optional<Tensor>& bias);

  // Throws unless parameters of this type go with x: they are of x's type, or float32 beside half
  // precision. With a residual they may also be of the input's type.
  void check_parameters_type(std::optional<ScalarType> parameters, ScalarType x, ScalarType input,
                             const char* name);

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// The argument checks of the operators on CUDA. They guard memory: no kernel is launched on
// arguments that do not fit together. The error messages that users read come from
// fused_layernorm/ops/arguments.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "bindings/cuda/tensors.h"

namespace fused_layernorm __attribute__((visibility("hidden"))) {

  // Leading dimensions and normalized dimensions as rows and columns.
  struct Shape {
    int64_t rows = 1, cols = 1;
    int64_t leading;  // the number of leading dimensions

    // Throws if x has no such dimensions, or more rows or columns than kernels can count.
    Shape(const Tensor& x, int64_t normalized_ndim);
    bool empty() const { return rows == 0 || cols == 0; }
  };

  Activation activation_of(const std::optional<std::string>& name);

  // Which norm an operator computes: its arguments statistic, weight_offset and
  // round_before_weight.
  struct NormKind {
    bool is_rms = false;
    double weight_offset = 0.0;
    bool round_before_weight = false;

    NormKind() = default;
    // Throws unless the statistic is "layer" or "rms" and the offset a finite number.
    NormKind(const std::string& statistic, double offset, bool rounds = false);
  };

  // Throws unless `tensor` is on x's device and of the shape of x's dimensions from `first_dim` on.
  void check_shape(const Tensor& tensor, const char* name, const Tensor& x, int64_t first_dim);
  void check_shape(const std::optional<Tensor>& tensor, const char* name, const Tensor& x,
                   int64_t first_dim);

  // The type of weight and bias, std::nullopt without either. Throws if their types differ.
  std::optional<ScalarType> type_of_parameters(const std::optional<Tensor>& weight,
                                               const std::optional<Tensor>& bias);

  // The types that a kernel is launched with, given the types of x, weight and y in the call.
  // Kernels exist for the combinations in norm/types.cuh. To reach one of them, the weight may be
  // converted to float32 and the output computed in the arithmetic's type; neither changes the
  // result.
  struct KernelTypes {
    ScalarType x, weight, y;

    KernelTypes(ScalarType x_type, std::optional<ScalarType> weight_type, ScalarType y_type);
    ScalarType statistics() const { return x == ScalarType::Double ? x : ScalarType::Float; }
    // Throws in a trimmed build that has no kernels for them.
    DataTypes data_types() const;
    // Whether contiguous rows of `cols` columns, of x and of y, begin at multiples of 16 bytes.
    bool aligned(int64_t cols) const;
  };

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// Prepares modulations (shift, scale, gate) for kernels, and makes the gradient of one from those
// of the groups of rows that share it. Also the few operators of PyTorch's that the bindings call.
#pragma once

#include "bindings/cuda/tensors.h"
#include "call/layout.h"

namespace [[gnu::visibility("hidden")]] fused_layernorm {

// The modulation itself if kernels can read it in place (rows_in_place) and it is of this type,
// else a copy.
Tensor prepare_modulation(const Tensor& modulation, DataType type, const Tensor& x,
                          int64_t leading);

// The gradient of a modulation. Kernels write the gradient of each group; result() makes that of
// the modulation itself.
class GroupGradient {
 public:
  // Whether one is needed, and further sums follow those of the groups.
  bool is_wide = false;

  GroupGradient(bool needed, const std::optional<Tensor>& modulation, const Groups& groups,
                const Tensor& x);
  // The memory that kernels write, of `type`, or of the arithmetic's type if it is wide.
  void* allocate(DataType type, DataType wide_type);
  void fill_with_zeros();
  // The gradient in the modulation's shape and type, or an empty tensor of shape (0,).
  Tensor result() const;

 private:
  const bool needed_;
  const std::optional<Tensor>& modulation_;
  const Groups& groups_;
  const Tensor& x_;
  std::optional<Tensor> of_groups_;
};

Tensor product(const Tensor& a, const Tensor& b);
Tensor plus(const Tensor& a, const Tensor& b);
// x * (1 + scale), computed in `type`; x itself without a scale.
Tensor scaled(const Tensor& x, const std::optional<Tensor>& scale, ScalarType type);

}  // namespace fused_layernorm

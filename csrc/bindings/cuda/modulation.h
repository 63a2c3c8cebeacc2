// SPDX-License-Identifier: Apache-2.0
// Prepares modulations (shift, scale, gate) for kernels: finds the rows of a tensor that broadcasts
// to x and the groups of rows that share it, and makes its gradient from those of the groups.
#pragma once

#include <initializer_list>
#include <vector>

#include "bindings/cuda/tensors.h"
#include "bindings/kernel_table.h"

namespace fused_layernorm __attribute__((visibility("hidden"))) {

  struct Modulations {
    std::optional<Tensor> shift, scale, gate;

    bool any() const { return shift || scale || gate; }
  };

  inline RawTensor raw(const Tensor& tensor) {
    return {tensor.const_data_ptr(), tensor.sizes().data(), tensor.strides().data(), tensor.dim()};
  }
  inline RawTensor raw(const std::optional<Tensor>& tensor) {
    return tensor ? raw(*tensor) : RawTensor();
  }

  bool broadcasts_to(const RawTensor& tensor, const RawTensor& x);

  // Throws unless `tensor`, if given, broadcasts to x's shape and is on x's device.
  void check_broadcast(const std::optional<Tensor>& tensor, const char* name, const Tensor& x);

  // The one type in which a kernel takes parameters of these types: the types' own if all are the
  // same, else float32. std::nullopt entries do not count.
  std::optional<ScalarType> common_type(std::initializer_list<std::optional<ScalarType>> types);
  std::optional<ScalarType> type_of(const std::optional<Tensor>& tensor);

  // The row of a modulation for each row of x, if kernels can read it in place: its rows are
  // contiguous inside and begin at multiples of 16 bytes, and a RowMap describes where. The first
  // `leading` dimensions of x count rows.
  std::optional<RowMap> rows_in_place(const RawTensor& modulation, ScalarType type,
                                      const RawTensor& x, int64_t leading);

  // The same of a modulation of any type and layout. Kernels read it in place or, if they cannot,
  // a copy.
  struct ModulationRows {
    std::optional<Tensor> tensor;
    RowMap map;

    ModulationRows(const std::optional<Tensor>& given, ScalarType type, const Tensor& x,
                   int64_t leading);
    const void* data() const { return data_of(tensor); }
  };

  // Groups of consecutive rows of x that share all of the given modulations.
  struct Groups {
    int64_t rows = 1;            // of a group
    std::vector<int64_t> sizes;  // x's, with ones for the dimensions inside a group

    Groups(std::initializer_list<RawTensor> modulations, const RawTensor& x, int64_t leading);
    // Whether the modulation has one row of columns for each group.
    bool are_of(const RawTensor& modulation) const;
  };

  // The gradient of a modulation. Kernels write the gradient of each group; result() makes that of
  // the modulation itself.
  struct GroupGradient {
    // The gradient of each group; std::nullopt if none is needed.
    std::optional<Tensor> of_groups;
    bool is_wide = false;  // of the arithmetic's type, because further sums follow

    GroupGradient(bool needed, const std::optional<Tensor>& modulation, const Groups& groups,
                  ScalarType type, ScalarType wide_type, const Tensor& x);
    void* data() const { return of_groups ? of_groups->mutable_data_ptr() : nullptr; }
    // The gradient in the modulation's shape and type, or an empty tensor of shape (0,).
    Tensor result(const std::optional<Tensor>& modulation, const Tensor& x) const;
  };

  Tensor product(const Tensor& a, const Tensor& b);
  Tensor plus(const Tensor& a, const Tensor& b);
  // x * (1 + scale), computed in `type`; x itself without a scale.
  Tensor scaled(const Tensor& x, const std::optional<Tensor>& scale, ScalarType type);
  // An empty tensor of shape (0,).
  Tensor none(const Tensor& like, ScalarType type);

}  // namespace fused_layernorm

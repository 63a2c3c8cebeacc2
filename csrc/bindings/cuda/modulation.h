// Modulations (shift, scale, gate) as kernels want them: the rows of a tensor that broadcasts
// against x, the groups of rows that share it, and its gradient from that of the groups.
#pragma once

#include <initializer_list>
#include <vector>

#include "bindings/cuda/tensors.h"

namespace fused_layernorm __attribute__((visibility("hidden"))) {

  struct Modulations {
    std::optional<Tensor> shift, scale, gate;

    bool any() const { return shift || scale || gate; }
  };

  // Throws unless `tensor` broadcasts against x without enlarging it, on x's device.
  void check_broadcast(const std::optional<Tensor>& tensor, const char* name, const Tensor& x);

  // The one type in which kernels take parameters of these types: theirs if it is the same for all,
  // else float32.
  std::optional<ScalarType> common_type(std::initializer_list<std::optional<ScalarType>> types);
  std::optional<ScalarType> type_of(const std::optional<Tensor>& tensor);

  // What rows of x have of a modulation. It is read where it lies, or from a copy where its rows
  // are not contiguous inside, do not begin at multiples of 16 bytes, or are of another type.
  struct ModulationRows {
    std::optional<Tensor> tensor;
    RowMap map;

    // Of x's dimensions the first `leading` count rows.
    ModulationRows(const std::optional<Tensor>& given, ScalarType type, const Tensor& x,
                   int64_t leading);
    const void* data() const { return data_of(tensor); }
  };

  // Rows of x that share all of some modulations: group_rows of them, which follow each other.
  struct Groups {
    int64_t rows = 1;            // of a group
    std::vector<int64_t> sizes;  // x's, with ones for the dimensions inside a group

    Groups(std::initializer_list<const std::optional<Tensor>*> modulations, const Tensor& x,
           int64_t leading);
  };

  // The gradient of a modulation, first of every group, then of the modulation itself.
  struct GroupGradient {
    // Of each group; empty where it is not needed.
    std::optional<Tensor> of_groups;
    bool is_wide = false;  // of the arithmetic's type, because further sums follow

    GroupGradient(bool needed, const std::optional<Tensor>& modulation, const Groups& groups,
                  ScalarType type, ScalarType wide_type, const Tensor& x);
    void* data() const { return of_groups ? of_groups->mutable_data_ptr() : nullptr; }
    // The gradient in the modulation's shape and type, or an empty tensor of shape (0,).
    Tensor result(const std::optional<Tensor>& modulation, const Tensor& x) const;
  };

  Tensor product(const Tensor& a, const Tensor& b);
  // An empty tensor of shape (0,).
  Tensor none(const Tensor& like, ScalarType type);

}  // namespace fused_layernorm

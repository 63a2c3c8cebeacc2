// SPDX-License-Identifier: Apache-2.0
// What every launch needs, from tensors (forward.cpp, backward.cpp) or from addresses
// (kernel_table.cpp): the types, and the parameters and the problem that follow from the call.
#pragma once

#include <algorithm>
#include <optional>

#include "bindings/cuda/checks.h"

namespace fused_layernorm __attribute__((visibility("hidden"))) {

  // The types of a forward pass: those that its kernel is launched with, and those of its results.
  struct ForwardTypes {
    KernelTypes kernel;
    ScalarType y;           // of the result
    ScalarType statistics;  // of the result
    // With a residual: the type to which input is cast for a kernel that adds the two. If there is
    // no such kernel (adds_first), the type in which the sum is taken before the launch.
    ScalarType summand;
    bool adds_first = false;
  };

  ForwardTypes settle_types(ScalarType input, std::optional<ScalarType> residual,
                            std::optional<ScalarType> parameters, ScalarType y, bool rounds_xhat);

  // The type that round_before_weight means for an input of this type.
  XhatRounding xhat_rounding_of(bool round_before_weight, bool has_weight, ScalarType input);

  // What a launch computes from its tensors.
  struct Computation {
    Activation activation = Activation::kNone;
    double scale = 1.0;
    bool is_rms = false;
    double weight_offset = 0.0;
    double eps = 0.0;  // forward alone, as the rounding
    XhatRounding xhat_rounding = XhatRounding::kNone;

    bool activates() const { return activation != Activation::kNone || scale != 1.0; }
  };

  // A plan, and one whose blocks do not wait for each other. It is launched if the first is refused
  // because its blocks cannot all be resident at once: the caller may have only a part of the
  // device (a green context, a limit of MPS), which no attribute tells.
  template <typename Plan>
  struct Planned {
    Plan plan;
    std::optional<Plan> apart;  // if blocks of `plan` wait for each other

    int64_t workspace_bytes() const {
      const int64_t bytes = launch_of(plan).workspace_bytes;
      return apart ? std::max(bytes, launch_of(*apart).workspace_bytes) : bytes;
    }
  };
  Planned<forward::Plan> plan_forward(const Problem& problem, int device_index);
  Planned<backward::Plan> plan_backward(const Problem& problem, int device_index);

  // Each throws for an error of the launch.
  void launch(const ForwardParams& params, const DataTypes& types,
              const Planned<forward::Plan>& planned, cudaStream_t stream);
  void launch(const BackwardParams& params, const DataTypes& types,
              const Planned<backward::Plan>& planned, cudaStream_t stream);

  // Each completes the parameters of a launch, of which the tensors, the modulation, rows and cols
  // are set (in backward also group_rows), and gives its problem. `aligned`: every row begins at a
  // multiple of 16 bytes. In backward the outputs need not be set.
  Problem complete(ForwardParams & params, const DataTypes& types, const Computation& computation,
                   bool aligned);
  Problem complete(BackwardParams & params, const DataTypes& types, const Computation& computation,
                   bool aligned, bool needs_column_grads, bool needs_modulation_grads);

}  // namespace fused_layernorm

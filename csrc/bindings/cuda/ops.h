// SPDX-License-Identifier: Apache-2.0
// The operators of norms on CUDA, for callers in C++. A call is described and checked; its tensors
// are cast and copied until kernels read them; then it is described again, prepared, its results
// allocated, and launched.
#pragma once

#include <optional>
#include <tuple>

#include "bindings/cuda/formula.h"
#include "bindings/cuda/tensors.h"
#include "call/arguments.h"
#include "call/prepare.h"

namespace [[gnu::visibility("hidden")]] fused_layernorm {

// A call of an operator. What the operator lacks is absent.
struct NormArguments : NormTensors<std::optional<Tensor>> {
  NormOptions options = {};
  bool backward = false;
  std::optional<ScalarType> out_dtype = std::nullopt;  // forward: input's, if absent
  bool needs_statistics = true;                        // forward
  Needs needs = {};                                    // backward

  // The tensor whose shape the call has.
  const Tensor& shaped() const { return backward ? *x : *input; }
  bool is_modulated() const { return shift || scale || gate; }
};

// RMSNorm's mean is of shape (0,), and so is a gradient that is not asked for. What an operator
// does not have may be absent.
using Results = NormResults<std::optional<Tensor>>;

Results run(const NormArguments& a);

// ---- In parts (parts.cpp, gate.cpp)

// residual + gate * input, in `type`, rounded to residual's.
Tensor add(const Tensor& input, const std::optional<Tensor>& gate, const Tensor& residual,
           ScalarType type);
Results run_rounding(const NormArguments& a);
Results run_with_offset(const NormArguments& a);
void add_columns(Results& result, const NormArguments& a);
Results run_gate_apart(const NormArguments& a);

// (dinput, dgate) from the gradient of residual + gate * input.
std::tuple<Tensor, Tensor> run_gate_backward(const Tensor& dsum, const Tensor& input,
                                             const Tensor& gate, bool needs_dinput,
                                             bool needs_dgate);

// Launches what is prepared, on x's device.
void launch_prepared(Prepared& prepared, const NormCall& call, const Tensor& x);

}  // namespace fused_layernorm

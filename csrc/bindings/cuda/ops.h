// SPDX-License-Identifier: Apache-2.0
// The operators of norms on CUDA, for callers in C++, and what their families share. Each family
// checks, casts and copies until the call is one that kernels take, then describes, prepares,
// allocates and launches it.
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "bindings/cuda/formula.h"
#include "bindings/cuda/tensors.h"
#include "call/arguments.h"
#include "call/prepare.h"

namespace fused_layernorm __attribute__((visibility("hidden"))) {

  // What forward and backward have in common. An argument that an operator lacks is absent.
  struct NormArguments {
    std::optional<Tensor> weight = std::nullopt, bias = std::nullopt;
    std::optional<Tensor> shift = std::nullopt, scale = std::nullopt;
    std::optional<Tensor> gate = std::nullopt;  // of rows: of a sum with a residual
    NormOptions options = {};

    bool is_modulated() const { return shift || scale || gate; }
  };

  struct ForwardArguments : NormArguments {
    Tensor input;
    std::optional<Tensor> residual = std::nullopt;
    std::optional<ScalarType> out_dtype = std::nullopt;  // input's, if absent
    bool needs_statistics = true;
  };

  struct ForwardResult {
    Tensor y;
    std::optional<Tensor> residual_out = std::nullopt;               // with a residual
    std::optional<Tensor> mean = std::nullopt, rstd = std::nullopt;  // where asked for; RMSNorm's
                                                                     // mean is of shape (0,)
  };

  struct BackwardArguments : NormArguments {
    Tensor dy, x, rstd;
    std::optional<Tensor> mean = std::nullopt;  // gated norms have none
    std::optional<Tensor> dresidual = std::nullopt;
    // Of a gated sum x = residual + gate * input: there only with a gate.
    std::optional<Tensor> input = std::nullopt;
    Needs needs = {};
  };

  // A gradient that is not asked for is an empty tensor of shape (0,). One that the operator does
  // not have may be absent.
  using BackwardResult = NormGradients<std::optional<Tensor>>;

  // Rows: all operators but those of groups and of gated norms.
  ForwardResult run_forward(const ForwardArguments& a);
  BackwardResult run_backward(const BackwardArguments& a);
  // (dinput, dgate) from the gradient of residual + gate * input.
  std::tuple<Tensor, Tensor> run_gate_backward(const Tensor& dsum, const Tensor& input,
                                               const Tensor& gate, bool needs_dinput,
                                               bool needs_dgate);

  ForwardResult run_groups(const ForwardArguments& a);
  BackwardResult run_groups(const BackwardArguments& a);

  ForwardResult run_gated(const ForwardArguments& a);
  BackwardResult run_gated(const BackwardArguments& a);

  // ---- What the families share (registration.cpp)

  void describe(const NormArguments& a, NormCall& call);

  // New tensors of these sizes for mean and rstd, in the arithmetic's type. No kernel runs for x
  // without elements: they then have what PyTorch's kernels give.
  void new_statistics(const Tensor& x, const std::vector<int64_t>& sizes, DataType type,
                      bool is_rms, ForwardResult& result);

  // A new tensor for a parameter's gradient as a kernel writes it, in `type`, and where that is; of
  // shape (0,) unless it is needed. `is_empty`: no kernel runs, and it is zero. Throws if it is
  // needed of a parameter that is not there.
  Tensor new_gradient(bool needed, const std::optional<Tensor>& parameter, ScalarType type,
                      const Tensor& x, bool is_empty, void*& data);

  // Plans and launches a norm that is described, on x's device; throws NoKernel if none takes it.
  template <typename Prepared, typename NormOf>
  void prepare_and_launch(const NormOf& call, const Tensor& x) {
    Prepared prepared;
    if (!prepare(call, device_of(x), prepared)) throw NoKernel();
    const Workspace workspace(x, prepared.workspace_bytes());
    launch(prepared, call, workspace.data(), current_stream(x));
  }

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// The operators as the dispatcher calls them: where each argument lies on the stack
// (bindings/schemas.cpp has the schemas), and what the Autograd kernels of all operators share.
//
// One template, NormForward, describes four forward operators: with a modulation (ada_layer_norm)
// or without, with a residual (add_...) or without. An argument that an operator lacks has the
// position of another argument, so one list of positions serves all four: without a residual,
// residual and gate have input's position; with a residual but no gate, gate has residual's;
// without a modulation, shift and scale have those of weight and bias.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <exception>
#include <optional>
#include <string>
#include <utility>

#include "../bindings/namespace.h"
#include "node.h"

namespace fused_layernorm {

using at::Tensor;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

// One of this package's operators.
inline OperatorHandle find_operator(const std::string& name) {
  const std::string full = FUSED_LAYERNORM_AS_STRING(FUSED_LAYERNORM_NAMESPACE) "::" + name;
  return c10::Dispatcher::singleton().findSchemaOrThrow(full.c_str(), "");
}

// Undefined for None.
inline const Tensor& tensor_of(const IValue& value) {
  static const Tensor none;
  return value.isNone() ? none : value.toTensor();
}

inline std::optional<at::ScalarType> dtype_of(const IValue& value) {
  return value.toOptional<at::ScalarType>();
}

inline bool is_defined(const IValue& value) {
  return value.isTensor() && value.toTensor().defined();
}

inline bool requires_grad(const IValue& value) {
  return is_defined(value) && value.toTensor().requires_grad();
}

inline IValue value_of(const Tensor& tensor) {
  return tensor.defined() ? IValue(tensor) : IValue();
}

// ---- Positions

template <bool kWithModulation, bool kWithResidual>
struct NormForward {
  // An operator that gives the statistics, too, has a name of its own.
  static std::string name(bool gives_statistics) {
    return std::string(kHasResidual ? "add_" : "") + (kHasModulation ? "ada_" : "") +
           (gives_statistics ? "layer_norm_forward" : "layer_norm");
  }
  static constexpr bool kHasModulation = kWithModulation;
  static constexpr bool kHasResidual = kWithResidual;
  static constexpr bool kHasGate = kHasResidual && kHasModulation;
  static constexpr bool kMayKeepOrder = !kHasModulation && !kHasResidual;
  enum : size_t {
    kInput,
    kResidual = kInput + kHasResidual,
    kGate = kResidual + kHasGate,
    kNormalizedNdim,
    kShift,
    kScale,
    kWeight = kHasModulation ? kScale + 1 : kShift,
    kBias,
    kEps,
    kActivation,  // where there is no modulation
    kOutputScale,
    kOutDtype = kHasModulation ? kEps + 1 : kOutputScale + 1,
    kStatistic,
    kWeightOffset,
    kRoundBeforeWeight,
    kKeepsOrder,  // where there is neither a modulation nor a residual
    kArguments = kKeepsOrder + kMayKeepOrder
  };
  static constexpr size_t kModulations[] = {kGate, kShift, kScale};  // where there is a modulation
  static constexpr size_t kFirstParameter = kShift;
  static constexpr size_t kParameters = kEps - kShift;

  // y and residual_out have gradients; the statistics that follow them have none.
  static constexpr size_t kOutputs = 1 + kHasResidual;
  static constexpr size_t kStatistics = 2;
};

// The arguments of an operator that are not tensors. The operators with a modulation have neither
// activation nor output scale.
struct Options {
  int64_t normalized_ndim = 0;
  std::optional<std::string> activation;
  double output_scale = 1;
  bool is_rms = false;
  bool names_statistic = false;  // the operators refuse any other word
  double weight_offset = 0;
  bool keeps_order = false;
};

inline bool is_rms(const IValue& statistic) { return statistic.toStringRef() == "rms"; }

// The operators' argument `statistic`.
inline const IValue& statistic_of(const Options& options) {
  static const IValue layer("layer"), rms("rms");
  return options.is_rms ? rms : layer;
}

template <class Op>
Options options_of(const IValue* arguments) {
  Options options;
  options.normalized_ndim = arguments[Op::kNormalizedNdim].toInt();
  if constexpr (!Op::kHasModulation) {
    const IValue& activation = arguments[Op::kActivation];
    if (!activation.isNone()) options.activation = activation.toStringRef();
    options.output_scale = arguments[Op::kOutputScale].toDouble();
  }
  const IValue& statistic = arguments[Op::kStatistic];
  options.is_rms = is_rms(statistic);
  options.names_statistic = options.is_rms || statistic.toStringRef() == "layer";
  options.weight_offset = arguments[Op::kWeightOffset].toDouble();
  if constexpr (Op::kMayKeepOrder) options.keeps_order = arguments[Op::kKeepsOrder].toBool();
  return options;
}

inline void collect(CompiledNodeArgs& args, const Options& options) {
  args.collect(options.normalized_ndim);
  args.collect(options.activation);
  args.collect(options.output_scale);
  args.collect(options.is_rms);
  args.collect(options.weight_offset);
  args.collect(options.keeps_order);
}

// ---- Calls

// What BackendSelect's kernel does (direct.h), autograd's has tried.
constexpr DispatchKeySet kSelects(c10::DispatchKey::BackendSelect);
constexpr DispatchKeySet kBelowSelect(DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);

// Runs an operator's kernel below autograd. The stack holds its arguments.
inline void run_below_autograd(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  op.redispatchBoxed((keys & c10::after_autograd_keyset) - kSelects, stack);
}

// Runs a function that may call the kernels' binary. Under the stable ABI that binary can raise
// only std::runtime_error. An error that reports a failed allocation is raised again as
// OutOfMemoryError, as ops/arguments.py does for forward. The new message leaves out the place
// where the first error was raised.
template <typename Function>
void naming_out_of_memory(const Function& function) {
  try {
    function();
  } catch (const std::exception& error) {
    const std::string what = error.what();
    const size_t begin = what.find("CUDA out of memory: fused_layernorm");
    TORCH_CHECK_WITH(OutOfMemoryError, begin == std::string::npos,
                     what.substr(begin, what.find('\n', begin) - begin));
    throw;
  }
}

// Calls an operator through the whole dispatcher, as a user's call does.
inline void call(const OperatorHandle& op, Stack* stack) {
  naming_out_of_memory([&] { op.callBoxed(stack); });
}

// ---- Differentiation

enum class Differentiation { kNone, kForwardMode, kGraph };

// Which derivatives a call needs: none, tangents in forward mode, or a node in autograd's graph.
inline Differentiation differentiation_of(const IValue* arguments, size_t count) {
  bool requires_grad = false;
  for (size_t i = 0; i < count; ++i) {
    if (!is_defined(arguments[i])) continue;
    const Tensor& tensor = arguments[i].toTensor();
    if (tensor._fw_grad(/*level=*/0).defined()) return Differentiation::kForwardMode;
    requires_grad |= tensor.requires_grad();
  }
  return requires_grad && at::GradMode::is_enabled() ? Differentiation::kGraph
                                                     : Differentiation::kNone;
}

// Where a node sends its gradients, by the argument's position. An argument that has no gradient
// has an empty edge.
inline torch::autograd::edge_list edges_of(const IValue* arguments, size_t count) {
  torch::autograd::edge_list edges(count);
  for (size_t i = 0; i < count; ++i) {
    if (is_defined(arguments[i])) {
      edges[i] = torch::autograd::impl::gradient_edge(arguments[i].toTensor());
    }
  }
  return edges;
}

// Calls what the operator does in Python's autograd (ops/autograd.py), which can be differentiated
// as often as anybody asks, under the name that this has beside a library.
inline void differentiate_in_python(const OperatorHandle& op, Stack* stack) {
  const std::string& name = op.operator_name().name;
  call(find_operator("_differentiable_" + name.substr(name.find("::") + 2)), stack);
}

// The Autograd kernel of a backward operator.
inline void differentiate_backward(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const IValue* arguments = stack->data() + stack->size() - count;
  if (differentiation_of(arguments, count) == Differentiation::kNone) {
    return run_below_autograd(op, keys, stack);
  }
  differentiate_in_python(op, stack);
}

}  // namespace fused_layernorm

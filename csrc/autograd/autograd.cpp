// Autograd and autocast of the operators, in C++: compiled once for each minor version of torch.
//
// The operators' own binary keeps to LibTorch's stable ABI, which has no autograd. This file is
// bound to one minor version of torch by its C++ headers, and needs neither CUDA nor Python:
// fused_layernorm/ops/autograd_library.py loads the library that fits the running torch, or leaves
// autograd to Python.
//
// The nodes are made as PyTorch makes those of its own operators (not by
// torch::autograd::Function, which torch.func's transforms refuse): a forward that needs gradients
// runs the operator with statistics below autograd and saves what backward needs; backward calls
// layer_norm_backward through the dispatcher, which is differentiable itself (formulas.h).
//
// The kernels take their arguments on the dispatcher's stack, as the kernels below them do: nothing
// is unpacked that is only passed on.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/library.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "formulas.h"
#include "node.h"

#include "../bindings/namespace.h"

namespace fused_layernorm {
namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::dynamo::autograd::CompiledNodeArgs;
using torch::dynamo::autograd::SwapSavedVariables;
using torch::jit::Stack;

OperatorHandle find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

// Undefined for None.
Tensor tensor_of(const IValue& value) { return value.isNone() ? Tensor() : value.toTensor(); }

IValue value_of(const Tensor& tensor) { return tensor.defined() ? IValue(tensor) : IValue(); }

Activation string_of(const IValue& value) {
  return value.isNone() ? std::nullopt : Activation(value.toStringRef());
}

bool requires_grad(const IValue& value) {
  return value.isTensor() && value.toTensor().defined() && value.toTensor().requires_grad();
}

// Whether forward mode differentiates along this argument.
bool has_tangent(const IValue& value) {
  return value.isTensor() && torch::autograd::isFwGradDefined(value.toTensor());
}

// Runs an operator's kernel below autograd, whose arguments the stack holds.
void run_below_autograd(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

// ---- Backward of layer_norm_backward
// --------------------------------------------------------------

// Arguments of layer_norm_backward, by position.
enum BackwardArgument : size_t {
  kDy,
  kX,
  kNormalizedNdim,
  kMean,
  kRstd,
  kWeight,
  kBias,
  kDresidual,
  kActivation,
  kScale,
  kNeedsDx,
  kNeedsDweight,
  kNeedsDbias,
  kBackwardArguments
};

constexpr size_t kBackwardOutputs = 3;

// From the gradients of dx, dweight and dbias to those of dy, x, weight, bias and dresidual. That
// of x is the whole derivative: mean and rstd are functions of x, and have no gradients.
struct DoubleBackwardNode : public Node {
  SavedVariable dy, x, rstd, weight, bias;
  int64_t normalized_ndim = 0;
  Activation activation;
  double scale = 1;

  std::string name() const override { return "FusedLayerNormBackwardBackward"; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable* saved : {&dy, &x, &rstd, &weight, &bias}) saved->reset_data();
  }

  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const ArgumentGradients found = layer_norm_double_backward_formula(
        {dy.unpack(), x.unpack(), rstd.unpack(), weight.unpack(), bias.unpack(), Tensor(),
         normalized_ndim, activation, scale},
        {gradients[0], gradients[1], gradients[2]});
    return {found.dy, found.x, found.weight, found.bias, gradients[0]};
  }

  void compiled_args(CompiledNodeArgs& args) const override {
    for (const SavedVariable* saved : {&dy, &x, &rstd, &weight, &bias}) args.collect(*saved, false);
    args.collect(normalized_ndim);
    args.collect(activation);
    args.collect(scale);
  }

  variable_list apply_with_saved(const variable_list& gradients,
                                 SwapSavedVariables& swap) override {
    for (SavedVariable* saved : {&dy, &x, &rstd, &weight, &bias}) swap.before(*saved);
    variable_list result = apply(variable_list(gradients));
    for (SavedVariable* saved : {&dy, &x, &rstd, &weight, &bias}) swap.after(*saved);
    return result;
  }
};

void layer_norm_backward(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const IValue* arguments = stack->data() + stack->size() - kBackwardArguments;
  constexpr size_t kDifferentiable[] = {kDy, kX, kWeight, kBias, kDresidual};
  bool in_forward_mode = false, needs_node = false;
  for (const size_t i : kDifferentiable) {
    in_forward_mode |= has_tangent(arguments[i]);
    needs_node |= requires_grad(arguments[i]);
  }
  if (!in_forward_mode && (!needs_node || !at::GradMode::is_enabled())) {
    return run_below_autograd(op, keys, stack);
  }

  const Tensor dy = arguments[kDy].toTensor(), x = arguments[kX].toTensor();
  const Tensor weight = tensor_of(arguments[kWeight]), bias = tensor_of(arguments[kBias]);
  bool needed[kBackwardOutputs];
  for (size_t i = 0; i < kBackwardOutputs; ++i) needed[i] = arguments[kNeedsDx + i].toBool();
  if (in_forward_mode) {
    const BackwardResults found = layer_norm_backward_formula(
        {dy, x, arguments[kRstd].toTensor(), weight, bias, tensor_of(arguments[kDresidual]),
         arguments[kNormalizedNdim].toInt(), string_of(arguments[kActivation]),
         arguments[kScale].toDouble()});
    run_below_autograd(op, keys, stack);
    IValue* outputs = stack->data() + stack->size() - kBackwardOutputs;
    const Tensor* differentiable[] = {&found.dx, &found.dweight, &found.dbias};
    for (size_t i = 0; i < kBackwardOutputs; ++i) {
      if (needed[i]) outputs[i] = *differentiable[i];
    }
    return;
  }

  const auto node = make_node<DoubleBackwardNode>();
  node->set_next_edges(
      torch::autograd::collect_next_edges(dy, x, weight, bias, tensor_of(arguments[kDresidual])));
  node->dy = SavedVariable(dy, false);
  node->x = SavedVariable(x, false);
  node->rstd = SavedVariable(arguments[kRstd].toTensor(), false);
  node->weight = SavedVariable(weight, false);
  node->bias = SavedVariable(bias, false);
  node->normalized_ndim = arguments[kNormalizedNdim].toInt();
  node->activation = string_of(arguments[kActivation]);
  node->scale = arguments[kScale].toDouble();

  run_below_autograd(op, keys, stack);
  const IValue* outputs = stack->data() + stack->size() - kBackwardOutputs;
  for (size_t i = 0; i < kBackwardOutputs; ++i) {
    // An undefined tensor keeps the place of an output that has no gradient.
    torch::autograd::set_history(needed[i] ? outputs[i].toTensor() : Tensor(), node);
  }
}

// ---- Backward of the forward operators
// ------------------------------------------------------------

// layer_norm_backward, called as anybody calls it: all of the dispatcher lies before it.
variable_list call_layer_norm_backward(const Tensor& dy, const Tensor& x, int64_t normalized_ndim,
                                       const Tensor& mean, const Tensor& rstd, const Tensor& weight,
                                       const Tensor& bias, const Tensor& dresidual,
                                       const IValue& activation, double scale, bool needs_dx,
                                       bool needs_dweight, bool needs_dbias) {
  static const OperatorHandle op = find_operator(FUSED_LAYERNORM_OPERATOR("layer_norm_backward"));
  Stack stack;
  stack.reserve(kBackwardArguments);
  torch::jit::push(stack, dy, x, normalized_ndim, mean, rstd, value_of(weight), value_of(bias),
                   value_of(dresidual), activation, scale, needs_dx, needs_dweight, needs_dbias);
  op.callBoxed(&stack);
  return {needs_dx ? std::move(stack[0]).toTensor() : Tensor(),
          needs_dweight ? std::move(stack[1]).toTensor() : Tensor(),
          needs_dbias ? std::move(stack[2]).toTensor() : Tensor()};
}

// The kernels' binary, under the stable ABI, raises no more than std::runtime_error. One that
// speaks of a failed allocation is raised again as what it is, as ops/arguments.py does for
// forward. What else the text holds (where it was raised) is left out.
[[noreturn]] void rethrow(const std::exception& error) {
  const std::string what = error.what();
  const size_t begin = what.find("CUDA out of memory: fused_layernorm");
  TORCH_CHECK_WITH(OutOfMemoryError, begin == std::string::npos,
                   what.substr(begin, what.find('\n', begin) - begin));
  throw;
}

// From the gradients of y (and residual_out) to those of input, (residual,) weight and bias. Of
// the statistics, outputs of some of the operators, there are none.
template <bool kHasResidual>
struct LayerNormNode : public Node {
  // x is what was normalized: input, or residual_out, an output of this node.
  SavedVariable x, mean, rstd, weight, bias;
  int64_t normalized_ndim = 0;
  Activation activation;
  double scale = 1;
  at::ScalarType input_dtype = at::kFloat;

  std::string name() const override {
    return kHasResidual ? "FusedAddLayerNormBackward" : "FusedLayerNormBackward";
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable* saved : {&x, &mean, &rstd, &weight, &bias}) saved->reset_data();
  }

  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    constexpr size_t kFirstParameter = kHasResidual ? 2 : 1;
    const bool needs_input = task_should_compute_output(0);
    const bool needs_residual = kHasResidual && task_should_compute_output(1);
    const Tensor& dy = gradients[0];
    const Tensor dresidual = kHasResidual ? gradients[1] : Tensor();
    variable_list found(3);
    if (dy.defined()) {
      const Tensor saved_x = x.unpack(kHasResidual ? getptr() : nullptr);
      try {
        found = call_layer_norm_backward(
            dy, saved_x, normalized_ndim, mean.unpack(), rstd.unpack(), weight.unpack(),
            bias.unpack(), dresidual, activation ? IValue(*activation) : IValue(), scale,
            needs_input || needs_residual, task_should_compute_output(kFirstParameter),
            task_should_compute_output(kFirstParameter + 1));
      } catch (const std::exception& error) {
        rethrow(error);
      }
    } else {
      found[0] = dresidual;  // residual_out alone was used, if anything
    }
    Tensor dinput = needs_input ? as(found[0], input_dtype) : Tensor();
    if constexpr (kHasResidual) {
      return {dinput, needs_residual ? found[0] : Tensor(), found[1], found[2]};
    } else {
      return {dinput, found[1], found[2]};
    }
  }

  void compiled_args(CompiledNodeArgs& args) const override {
    args.collect(x, kHasResidual);
    for (const SavedVariable* saved : {&mean, &rstd, &weight, &bias}) args.collect(*saved, false);
    args.collect(normalized_ndim);
    args.collect(activation);
    args.collect(scale);
    args.collect(input_dtype);
  }

  variable_list apply_with_saved(const variable_list& gradients,
                                 SwapSavedVariables& swap) override {
    for (SavedVariable* saved : {&x, &mean, &rstd, &weight, &bias}) swap.before(*saved);
    variable_list result = apply(variable_list(gradients));
    for (SavedVariable* saved : {&x, &mean, &rstd, &weight, &bias}) swap.after(*saved);
    return result;
  }
};

// Arguments of the forward operators, by position, from the last of the tensors that are
// normalized.
enum ForwardArgument : size_t {
  kInput,
  kForwardNormalizedNdim,
  kForwardWeight,
  kForwardBias,
  kEps,
  kForwardActivation,
  kForwardScale,
  kOutDtype,
  kForwardArguments
};

// (add_)layer_norm and (add_)layer_norm_forward, which also returns the statistics.
template <bool kHasResidual, bool kReturnsStatistics>
void layer_norm(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  constexpr size_t kArguments = kForwardArguments + kHasResidual;
  constexpr size_t kOutputs = 1 + kHasResidual;  // those that have gradients
  const IValue* first = stack->data() + stack->size() - kArguments;
  const IValue* arguments = first + kHasResidual;
  bool in_forward_mode = false, needs_node = false;
  for (const IValue* value :
       {first, arguments, arguments + kForwardWeight, arguments + kForwardBias}) {
    in_forward_mode |= has_tangent(*value);
    needs_node |= requires_grad(*value);
  }
  if (!in_forward_mode && (!needs_node || !at::GradMode::is_enabled())) {
    return run_below_autograd(op, keys, stack);
  }

  static const OperatorHandle with_statistics =
      find_operator(kHasResidual ? FUSED_LAYERNORM_OPERATOR("add_layer_norm_forward")
                                 : FUSED_LAYERNORM_OPERATOR("layer_norm_forward"));
  const Tensor input = first->toTensor();
  const Tensor residual = kHasResidual ? arguments[kInput].toTensor() : Tensor();
  const Tensor weight = tensor_of(arguments[kForwardWeight]);
  const Tensor bias = tensor_of(arguments[kForwardBias]);
  const int64_t normalized_ndim = arguments[kForwardNormalizedNdim].toInt();
  const Activation activation = string_of(arguments[kForwardActivation]);
  const double scale = arguments[kForwardScale].toDouble();
  if (in_forward_mode) {
    const ForwardArguments named = {
        input,      residual,        weight,
        bias,       normalized_ndim, arguments[kEps].toDouble(),
        activation, scale,           arguments[kOutDtype].toOptional<at::ScalarType>()};
    // The kernel is run for its checks and its statistics, which have no derivatives.
    run_below_autograd(with_statistics, keys, stack);
    const ForwardResults found = layer_norm_formula(named);
    IValue* outputs = stack->data() + stack->size() - (kOutputs + 2);
    outputs[0] = found.y;
    if constexpr (kHasResidual) outputs[1] = found.residual_out;
    if constexpr (!kReturnsStatistics) torch::jit::drop(*stack, 2);
    return;
  }

  const auto node = make_node<LayerNormNode<kHasResidual>>();
  if constexpr (kHasResidual) {
    node->set_next_edges(torch::autograd::collect_next_edges(input, residual, weight, bias));
  } else {
    node->set_next_edges(torch::autograd::collect_next_edges(input, weight, bias));
    node->x = SavedVariable(input, false);
  }
  node->weight = SavedVariable(weight, false);
  node->bias = SavedVariable(bias, false);
  node->normalized_ndim = normalized_ndim;
  node->activation = activation;
  node->scale = scale;
  node->input_dtype = input.scalar_type();

  run_below_autograd(with_statistics, keys, stack);
  const size_t outputs = stack->size() - (kOutputs + 2);
  for (size_t i = 0; i < kOutputs; ++i) {
    torch::autograd::set_history((*stack)[outputs + i].toTensor(), node);
  }
  if constexpr (kHasResidual) {
    node->x = SavedVariable((*stack)[outputs + 1].toTensor(), /*is_output=*/true);
  }
  node->mean = SavedVariable((*stack)[outputs + kOutputs].toTensor(), false);
  node->rstd = SavedVariable((*stack)[outputs + kOutputs + 1].toTensor(), false);
  if constexpr (!kReturnsStatistics) torch::jit::drop(*stack, 2);
}

// ---- Autocast
// -------------------------------------------------------------------------------------

bool is_half(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

// The results of PyTorch's autocast, which runs layer_norm in float32 on every device but the CPU,
// where it leaves it alone. The kernels compute in float32 anyway: the input is not converted.
template <bool kHasResidual>
void autocast(const OperatorHandle& op, DispatchKeySet /*keys*/, Stack* stack) {
  IValue* first = stack->data() + stack->size() - (kForwardArguments + kHasResidual);
  IValue* arguments = first + kHasResidual;
  const Tensor& input = first->toTensor();
  const at::ScalarType dtype = input.scalar_type();
  if (arguments[kOutDtype].isNone() && !input.is_cpu() && is_half(dtype)) {
    arguments[kOutDtype] = at::kFloat;
  }
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  IValue& weight = arguments[kForwardWeight];
  IValue& bias = arguments[kForwardBias];
  const auto type_of = [&](const IValue& p) {
    return p.isNone() ? dtype : p.toTensor().scalar_type();
  };
  const bool differ = !weight.isNone() && !bias.isNone() && type_of(weight) != type_of(bias);
  const auto unlike = [&](const IValue& p) { return is_half(type_of(p)) && type_of(p) != dtype; };
  if (differ || unlike(weight) || unlike(bias)) {
    for (IValue* parameter : {&weight, &bias}) {
      if (parameter->isTensor() && is_half(type_of(*parameter))) {
        *parameter = parameter->toTensor().to(at::kFloat);
      }
    }
  }
  op.callBoxed(stack);
}

// ---- Registration
// ---------------------------------------------------------------------------------

template <void (*kernel)(const OperatorHandle&, DispatchKeySet, Stack*)>
torch::CppFunction boxed() {
  return torch::CppFunction::makeFromBoxedFunction<kernel>();
}

TORCH_LIBRARY_IMPL(FUSED_LAYERNORM_NAMESPACE, Autograd, m) {
  m.impl("layer_norm", boxed<&layer_norm<false, false>>());
  m.impl("layer_norm_forward", boxed<&layer_norm<false, true>>());
  m.impl("add_layer_norm", boxed<&layer_norm<true, false>>());
  m.impl("add_layer_norm_forward", boxed<&layer_norm<true, true>>());
  m.impl("layer_norm_backward", boxed<&layer_norm_backward>());
}

// One registration for each device type that has autocast.
std::vector<torch::Library> register_autocast() {
  std::vector<torch::Library> libraries;
  for (const DispatchKey key : c10::autocast_dispatch_keyset) {
    auto& m = libraries.emplace_back(torch::Library::IMPL,
                                     FUSED_LAYERNORM_AS_STRING(FUSED_LAYERNORM_NAMESPACE), key,
                                     __FILE__, __LINE__);
    m.impl("layer_norm", boxed<&autocast<false>>());
    m.impl("layer_norm_forward", boxed<&autocast<false>>());
    m.impl("add_layer_norm", boxed<&autocast<true>>());
    m.impl("add_layer_norm_forward", boxed<&autocast<true>>());
  }
  return libraries;
}

const std::vector<torch::Library> autocast_libraries = register_autocast();

}  // namespace
}  // namespace fused_layernorm

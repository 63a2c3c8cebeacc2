// SPDX-License-Identifier: Apache-2.0
// What the kernels of all operators share: a call, and its arguments on the dispatcher's stack
// (their positions are in call/arguments.h), calls of operators, and which derivatives a call
// needs.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "bindings/namespace.h"
#include "call/arguments.h"
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

// Null for none.
inline const Tensor* address_of(const Tensor& tensor) {
  return tensor.defined() ? &tensor : nullptr;
}
inline const Tensor* address_of(const std::optional<Tensor>& tensor) {
  return tensor ? address_of(*tensor) : nullptr;
}
inline const Tensor* address_of(const IValue& value) {
  return value.isTensor() ? address_of(value.toTensor()) : nullptr;
}

inline bool requires_grad(const Tensor* tensor) { return tensor && tensor->requires_grad(); }

// None for none.
inline IValue value_of(const Tensor* tensor) { return tensor ? IValue(*tensor) : IValue(); }
inline IValue value_of(const Tensor& tensor) { return value_of(address_of(tensor)); }

// ---- A call's arguments

// The arguments on the stack, as read_options reads them.
struct Arguments {
  const IValue* first;

  int64_t integer(size_t position) const { return first[position].toInt(); }
  double real(size_t position) const { return first[position].toDouble(); }
  bool flag(size_t position) const { return first[position].toBool(); }
  const std::string& name(size_t position) const { return first[position].toStringRef(); }
  const std::string* name_if_any(size_t position) const {
    return first[position].isNone() ? nullptr : &first[position].toStringRef();
  }
  void refuse(const char* /*choices*/, const std::string& /*name*/) const {}  // the operator does
};

template <class Op>
NormOptions options_of(const IValue* arguments) {
  return read_options<Op>(Arguments{arguments});
}

// A call of a forward operator, as autograd and direct calls (direct.h) take it.
struct ForwardCall : NormTensors<const Tensor*> {
  NormOptions options;
  std::optional<at::ScalarType> out_dtype;
};

template <class Op>
IValue* arguments_on(Stack* stack) {
  return stack->data() + stack->size() - Op::kArguments;
}

template <class Op>
ForwardCall call_of(const IValue* arguments) {
  ForwardCall call;
  each_tensor<Op, const Tensor*>(
      [&](size_t position, bool, auto member) { call.*member = address_of(arguments[position]); });
  call.options = options_of<Op>(arguments);
  call.out_dtype = dtype_of(arguments[Op::kOutDtype]);
  return call;
}

// The reverse: an operator's arguments with these tensors and options. All others are None.
template <class Op, class T>
Stack stack_of(const NormTensors<T>& tensors, const NormOptions& options) {
  static const IValue layer("layer"), rms("rms"), silu("silu"), sigmoid("sigmoid");
  Stack stack(Op::kArguments);
  each_tensor<Op, T>(
      [&](size_t position, bool, auto member) { stack[position] = value_of(tensors.*member); });
  write_options<Op>(options, [&](size_t position, const auto& value) {
    using Value = std::decay_t<decltype(value)>;
    if constexpr (std::is_same_v<Value, std::optional<std::string_view>>) {
      if (value) stack[position] = std::string(*value);
    } else if constexpr (std::is_same_v<Value, std::string_view>) {
      for (const IValue* name : {&layer, &rms, &silu, &sigmoid}) {
        if (name->toStringRef() == value) stack[position] = *name;
      }
    } else {
      stack[position] = value;
    }
  });
  return stack;
}
template <class Op>
Stack stack_of(const ForwardCall& call) {
  Stack stack = stack_of<Op, const Tensor*>(call, call.options);
  if (call.out_dtype) stack[Op::kOutDtype] = *call.out_dtype;
  return stack;
}

// ---- Calls

// The key of BackendSelect's kernel, which tries a direct call (direct.h). Autograd's kernel has
// tried one already, so below it this key is left out.
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
// `each_of` calls a function with the address of every tensor.
template <typename EachOf>
Differentiation differentiation_of(const EachOf& each_of) {
  bool requires_grad = false, has_tangent = false;
  each_of([&](const Tensor* tensor) {
    if (!tensor) return;
    requires_grad |= tensor->requires_grad();
    has_tangent |= tensor->_fw_grad(/*level=*/0).defined();
  });
  return has_tangent                                   ? Differentiation::kForwardMode
         : requires_grad && at::GradMode::is_enabled() ? Differentiation::kGraph
                                                       : Differentiation::kNone;
}

// Calls what the operator does in Python's autograd (ops/autograd.py), which can be differentiated
// as often as anybody asks, under the name that this has beside a library.
inline void differentiate_in_python(const OperatorHandle& op, Stack* stack) {
  const std::string& name = op.operator_name().name;
  call(find_operator("_differentiable_" + name.substr(name.find("::") + 2)), stack);
}

}  // namespace fused_layernorm

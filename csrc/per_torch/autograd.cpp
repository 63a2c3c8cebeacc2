// SPDX-License-Identifier: Apache-2.0
// Autograd and autocast of the operators, in C++: compiled once for each minor version of torch.
//
// The operators' own binary keeps to LibTorch's stable ABI, which has no autograd. This file is
// bound to one minor version of torch by its C++ headers, and needs neither CUDA nor Python:
// fused_layernorm/ops/autograd_library.py loads the library that fits the running torch, or leaves
// autograd to Python. This file registers the kernels that the headers beside it define. All of
// them are one translation unit, because torch's own headers take nearly all of the compile time.
//
// It also calls the kernels' library directly where a call is a plain one (direct.h), and has the
// kernels of override_aten (override.h).
//
// The nodes are made as PyTorch makes those of its own operators (not by
// torch::autograd::Function, which torch.func's transforms refuse). The kernels take their
// arguments on the dispatcher's stack, as the kernels below them do, so an argument that is only
// passed on is not unpacked.

#include <torch/library.h>

#include <vector>

#include "autocast.h"
#include "autograd.h"
#include "bindings/namespace.h"
#include "direct.h"
#include "operators.h"
#include "override.h"

namespace fused_layernorm {
namespace {

template <void (*kernel)(const OperatorHandle&, DispatchKeySet, Stack*)>
torch::CppFunction boxed() {
  return torch::CppFunction::makeFromBoxedFunction<kernel>();
}

TORCH_LIBRARY_IMPL(FUSED_LAYERNORM_NAMESPACE, Autograd, m) {
  ForwardOperators::each([&](auto op) {
    using Op = decltype(op);
    m.impl(Op::kName, boxed<&differentiate_forward<Op, false>>());
    m.impl(name_with_statistics<Op>().c_str(), boxed<&differentiate_forward<Op, true>>());
  });
  const auto register_backward = [&](auto op) {
    m.impl(op.kName, boxed<&differentiate_backward<decltype(op)>>());
  };
  BackwardOperators::each(register_backward);
  register_backward(schemas::GateBackward());
}

TORCH_LIBRARY_IMPL(FUSED_LAYERNORM_NAMESPACE, BackendSelect, m) {
  ForwardOperators::each(
      [&](auto op) { m.impl(op.kName, boxed<&select_backend<decltype(op)>>()); });
}

TORCH_LIBRARY_FRAGMENT(FUSED_LAYERNORM_NAMESPACE, m) {
  // For override.py, which counts the overrides in force; the key is CUDA, or for tests CPU.
  m.def("_switch_override(str key, bool on) -> ()",
        torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(switch_override)));
  // For tests: how many calls the override has taken.
  m.def("_override_calls(str key) -> int",
        torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(override_calls)));
  // For tests: switches direct calls on or off, if told to; gives how many there were.
  m.def("_direct_calls(bool? enabled=None) -> int",
        torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd,
                        [](std::optional<bool> enabled) -> int64_t {
                          if (enabled) direct_enabled = *enabled;
                          return direct_calls;
                        }));
}

// One registration for each device type that has autocast.
std::vector<torch::Library> register_autocast() {
  std::vector<torch::Library> libraries;
  for (const c10::DispatchKey key : c10::autocast_dispatch_keyset) {
    auto& m = libraries.emplace_back(torch::Library::IMPL,
                                     FUSED_LAYERNORM_AS_STRING(FUSED_LAYERNORM_NAMESPACE), key,
                                     __FILE__, __LINE__);
    ForwardOperators::each([&](auto op) {
      using Op = decltype(op);
      m.impl(Op::kName, boxed<&autocast<Op>>());
      m.impl(name_with_statistics<Op>().c_str(), boxed<&autocast<Op>>());
    });
  }
  return libraries;
}

const std::vector<torch::Library> autocast_libraries = register_autocast();
const std::vector<torch::Library> aten_libraries = register_norms<at::kCUDA>();

}  // namespace
}  // namespace fused_layernorm

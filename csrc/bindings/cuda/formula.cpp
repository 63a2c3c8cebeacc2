// SPDX-License-Identifier: Apache-2.0
// Calls an operator's formula; formula.h has the contract.
#include "bindings/cuda/formula.h"

#include <torch/csrc/stable/c/shim.h>

#include <stdexcept>
#include <string_view>

#include "bindings/namespace.h"

namespace fused_layernorm {
namespace {

AOTITorchError dispatch(const std::string& name, StableIValue* stack) {
  const std::string full = FUSED_LAYERNORM_AS_STRING(FUSED_LAYERNORM_NAMESPACE) "::" + name;
  return torch_call_dispatcher(full.c_str(), "", stack, TORCH_ABI_VERSION);
}

}  // namespace

void call_formula(const std::string& name, Call& call) {
  if (dispatch("_formula_" + name, call.put_back()) == AOTI_TORCH_SUCCESS) return;
  StableIValue text = 0;
  std::string error;
  if (dispatch("_formula_error", &text) == AOTI_TORCH_SUCCESS) {
    error = torch::stable::detail::to<std::string>(text);
  }
  // As throw_out_of_memory in tensors.cpp words it.
  constexpr std::string_view kOutOfMemory = "CUDA out of memory";
  if (error.compare(0, kOutOfMemory.size(), kOutOfMemory) == 0) {
    error.replace(0, kOutOfMemory.size(), "CUDA out of memory: fused_layernorm's formula");
  }
  throw std::runtime_error(error.empty() ? "fused_layernorm: the formula of " + name + " failed"
                                         : error);
}

}  // namespace fused_layernorm

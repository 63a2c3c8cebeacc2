// SPDX-License-Identifier: Apache-2.0
// Autograd's nodes: the smart pointer that holds a node, which depends on the release of torch, and
// the base of all our operators' nodes, which holds the tensors that they save.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/headeronly/version.h>

#include <array>
#include <cstddef>
#include <memory>
#include <mutex>

namespace fused_layernorm {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::dynamo::autograd::CompiledNodeArgs;
using torch::dynamo::autograd::SwapSavedVariables;

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13

// deleteNode destroys a long chain of nodes one by one. If each node destroyed the next, the stack
// would overflow.
template <class T>
std::shared_ptr<T> make_node() {
  return std::shared_ptr<T>(new T(), torch::autograd::deleteNode);
}

#else

template <class T>
c10::intrusive_ptr<T> make_node() {
  return c10::make_intrusive<T>();
}

#endif

// A node that saves kCount tensors, each of which may be undefined. With kFirstIsOutput, the first
// of them is an output of the node itself, and is held without a reference cycle.
template <size_t kCount, bool kFirstIsOutput>
struct SavingNode : public Node {
  void save(size_t i, const at::Tensor& tensor) { saved_[i] = SavedVariable(tensor, is_output(i)); }

  at::Tensor saved(size_t i) { return saved_[i].unpack(is_output(i) ? getptr() : nullptr); }

  // Adds what the node keeps beside its tensors to the key of compiled autograd's cache.
  virtual void collect_options(CompiledNodeArgs& /*args*/) const {}

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable& saved : saved_) saved.reset_data();
  }

  void compiled_args(CompiledNodeArgs& args) const override {
    for (size_t i = 0; i < kCount; ++i) args.collect(saved_[i], is_output(i));
    collect_options(args);
  }

  variable_list apply_with_saved(const variable_list& gradients,
                                 SwapSavedVariables& swap) override {
    for (SavedVariable& saved : saved_) swap.before(saved);
    variable_list result = apply(variable_list(gradients));
    for (SavedVariable& saved : saved_) swap.after(saved);
    return result;
  }

 private:
  static constexpr bool is_output(size_t i) { return kFirstIsOutput && i == 0; }

  std::array<SavedVariable, kCount> saved_;
};

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// Autograd's nodes: the smart pointer that holds a node, which depends on the release of torch, and
// the base of all our operators' nodes, which holds the tensors that they save.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/headeronly/version.h>

#include <cstddef>
#include <memory>
#include <mutex>

#include "call/arguments.h"
#include "call/description.h"

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

// A node that saves what backward of a norm needs. With kSavesOutput, x is an output of the node
// itself, and is held without a reference cycle.
template <bool kSavesOutput>
struct SavingNode : public Node {
  using Saved = TensorField<SavedVariable>;

  NormOptions options;
  at::ScalarType input_dtype = at::kFloat;

  // Saves the tensors that are there.
  void save(const NormTensors<const at::Tensor*>& tensors) {
    for (size_t i = 0; i < kTensorCount; ++i) {
      const at::Tensor* const tensor = tensors.*kTensorFields<const at::Tensor*>[i].member;
      const Saved& field = kTensorFields<SavedVariable>[i];
      if (tensor) saved_.*field.member = SavedVariable(*tensor, is_output(field));
    }
  }

  at::Tensor saved(SavedVariable NormTensors<SavedVariable>::* member) {
    return (saved_.*member).unpack(is_output({"", member}) ? getptr() : nullptr);
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const Saved& field : kTensorFields<SavedVariable>) (saved_.*field.member).reset_data();
  }

  // All that backward depends on, for the key of compiled autograd's cache.
  void compiled_args(CompiledNodeArgs& args) const override {
    for (const Saved& field : kTensorFields<SavedVariable>) {
      args.collect(saved_.*field.member, is_output(field));
    }
    for (const bool each : {options.is_rms, options.keeps_order}) args.collect(each);
    for (const double each : {options.output_scale, options.weight_offset}) args.collect(each);
    for (const int64_t each :
         {options.normalized_ndim, options.num_groups, options.group_size,
          static_cast<int64_t>(options.activation), static_cast<int64_t>(options.gate_place)}) {
      args.collect(each);
    }
    args.collect(input_dtype);
  }

  variable_list apply_with_saved(const variable_list& gradients,
                                 SwapSavedVariables& swap) override {
    for (const Saved& field : kTensorFields<SavedVariable>) swap.before(saved_.*field.member);
    variable_list result = apply(variable_list(gradients));
    for (const Saved& field : kTensorFields<SavedVariable>) swap.after(saved_.*field.member);
    return result;
  }

 private:
  static bool is_output(const Saved& field) {
    return kSavesOutput && field.member == &NormTensors<SavedVariable>::x;
  }

  NormTensors<SavedVariable> saved_;
};

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// Autograd of the operators: (add_)(ada_)layer_norm, group_norm, rms_norm_gated, the same operators
// with statistics, and their backward.
//
// A call that needs gradients runs the operator with statistics below autograd, or the kernel
// itself (direct.h), and saves what backward needs. Backward runs the kernel too, or calls
// (ada_)layer_norm_backward, with a gate add_ada_layer_norm_backward, group_norm_backward or
// rms_norm_gated_backward, through the dispatcher.
// Derivatives of these, and forward mode, are Python's (differentiate_in_python in operators.h).
#pragma once

#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include "direct.h"
#include "node.h"
#include "operators.h"

namespace fused_layernorm {

// Computes the gradients of a forward operator's arguments from those of y and residual_out. The
// statistics, which some of the operators also return, have no gradients. The x that it saves is
// the tensor that was normalized: input, or with a residual residual_out.
template <class Op>
struct NormNode : public SavingNode<Op::kHasResidual> {
  using Saved = NormTensors<SavedVariable>;

  using SavingNode<Op::kHasResidual>::options, SavingNode<Op::kHasResidual>::input_dtype;

  std::string name() const override { return Op::kNode; }

  void save_arguments(const ForwardCall& call) {
    options = call.options;
    input_dtype = call.input->scalar_type();
    NormTensors<const Tensor*> kept = call;
    kept.residual = nullptr;
    if (!call.residual) kept.x = call.input;
    if (!Op::kGatesSum || !requires_grad(call.gate)) kept.input = nullptr;
    // Backward uses bias only where it computes z, and for the dtype of gradients.
    const bool needs_z = Op::kHasModulation || options.activation != Activation::kNone;
    if (!needs_z && call.weight) kept.bias = nullptr;
    // Its own gradient does not read weight. One that was made in inference mode, which autograd
    // refuses to save, has a tensor of its shape and dtype in its place then, as in PyTorch.
    const bool reads_weight = needs_z || requires_grad(call.input) ||
                              requires_grad(call.residual) || requires_grad(call.gate);
    Tensor stand_in;
    if (!reads_weight && call.weight && call.weight->is_inference()) {
      stand_in = at::empty_like(*call.weight);
      kept.weight = &stand_in;
    }
    // Backward of rows uses shift only for the shape and dtype of its gradient.
    if (!Op::kHasGroups && !requires_grad(call.shift)) kept.shift = nullptr;
    this->save(kept);
  }

  void save_outputs(const ForwardOutputs& outputs) {
    NormTensors<const Tensor*> kept;
    kept.x = address_of(outputs.residual_out);
    if (!options.is_rms) kept.mean = &outputs.mean;
    kept.rstd = &outputs.rstd;
    this->save(kept);
  }

  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard<std::mutex> lock(this->mutex_);
    variable_list results(Op::kArguments);
    const Tensor& dy = gradients[0];
    Tensor dx;
    if constexpr (Op::kHasResidual) dx = gradients[1];
    bool gates_sum = false;
    if (dy.defined()) {
      gates_sum = backward_of_norm(dy, dx, results);
    } else if constexpr (Op::kGatesSum) {
      // If only residual_out was used, the gradient does not pass through the norm.
      const Tensor gate = this->saved(&Saved::gate);
      gates_sum = gate.defined();
      if (dx.defined() && gates_sum) {
        backward_of_gate(dx, gated_input(this->saved(&Saved::input), dx), gate, results);
      }
    }
    if (!dx.defined()) return results;
    if (needs(Op::kResidual)) results[Op::kResidual] = dx;
    if (!gates_sum && needs(Op::kInput)) results[Op::kInput] = dx.to(input_dtype);
    return results;
  }

 private:
  // Whether the gradient of an argument is needed, which the operator may lack.
  bool needs(size_t argument) const {
    return argument != kAbsent && this->task_should_compute_output(argument);
  }

  // Makes dx of the gradient that reaches it other than through the norm; undefined if nothing
  // needs it. The gradients of the gate, of the input that it multiplied and of the parameters go
  // into `results`. Returns whether there is a gate that multiplied the input.
  bool backward_of_norm(const Tensor& dy, Tensor& dx, variable_list& results) {
    SavedNorm saved;
    // Each saved tensor is unpacked once: torch.utils.checkpoint allows no second time.
    for (size_t i = 0; i < kTensorCount; ++i) {
      saved.*kTensorFields<Tensor>[i].member = this->saved(kTensorFields<SavedVariable>[i].member);
    }
    saved.dy = dy;
    saved.dresidual = dx;
    const bool gates_sum = Op::kGatesSum && saved.gate.defined();
    const bool is_gated = gates_sum && (needs(Op::kInput) || needs(Op::kGate));
    saved.input = is_gated ? gated_input(saved.input, saved.x) : Tensor();
    if (gates_sum && !is_gated) saved.gate = Tensor();

    Needs needed;
    each_gradient<Op, Tensor, false>(
        [&](size_t argument, const auto& field) { needed.*field.needed = needs(argument); });
    needed.dx = needs(Op::kResidual) || (!is_gated && needs(Op::kInput));
    needed.dinput = is_gated && needs(Op::kInput);
    const bool is_dshift_dy = !Op::kHasGroups && needed.dshift && is_of_elements(saved.shift, dy);
    if (is_dshift_dy) needed.dshift = false;
    GradientsOfNorm found = gradients_of<Op>(saved, options, needed);
    if (is_dshift_dy) found.dshift = dy;
    each_gradient<Op, Tensor, false>([&](size_t argument, const auto& field) {
      results[argument] = std::move(found.*field.member);
    });
    dx = std::move(found.dx);
    return gates_sum;
  }

  // Whether each element of y has a shift of its own, of y's dtype: the gradient of such a shift is
  // dy itself.
  static bool is_of_elements(const Tensor& shift, const Tensor& dy) {
    return shift.defined() && shift.scalar_type() == dy.scalar_type() &&
           shift.sym_sizes() == dy.sym_sizes();
  }

  void backward_of_gate(const Tensor& dx, const Tensor& input, const Tensor& gate,
                        variable_list& results) {
    static const OperatorHandle op = find_operator(schemas::GateBackward::kName);
    static_assert(argument_count(schemas::GateBackward::kSchema) == 5, "as they are pushed");
    const bool needs_dinput = needs(Op::kInput), needs_dgate = needs(Op::kGate);
    if (!needs_dinput && !needs_dgate) return;
    Stack stack;
    torch::jit::push(stack, dx, input, gate, needs_dinput, needs_dgate);
    call(op, &stack);
    if (needs_dinput) results[Op::kInput] = std::move(stack[0]).toTensor();
    if (needs_dgate) results[Op::kGate] = std::move(stack[1]).toTensor();
  }

  // The input that the gate multiplied. It is not saved if the gate needs no gradient. Backward
  // then uses only its shape, which is that of `rows`, and its dtype, so `rows` takes its place, or
  // an uninitialized tensor of that shape and dtype.
  Tensor gated_input(const Tensor& input, const Tensor& rows) {
    if (input.defined()) return input;
    if (rows.scalar_type() == input_dtype) return rows;
    return at::empty_like(rows, rows.options().dtype(input_dtype));
  }
};

// Runs a forward operator's call at an Autograd key. With kGivesStatistics, the outputs include the
// statistics. Where it cannot go directly, it goes on by its arguments on a stack: they are there
// already, or are put on one.
template <class Op, bool kGivesStatistics>
ForwardOutputs differentiate_forward(const OperatorHandle& op, DispatchKeySet keys,
                                     const ForwardCall& call, Stack* stack = nullptr) {
  ForwardOutputs out;
  Stack own;
  const auto by_stack = [&](bool gives_statistics, const auto& run) {
    if (stack == nullptr) stack = &(own = stack_of<Op>(call));
    run();
    const size_t count = kOutputs<Op> + (gives_statistics ? kStatistics : 0);
    IValue* next = stack->data() + stack->size() - count;
    out.each<Op>(gives_statistics, [&](Tensor& each) { each = std::move(*next++).toTensor(); });
    torch::jit::drop(*stack, count);
  };
  const Differentiation differentiation = differentiation_of([&](const auto& each) {
    for (const auto& field : kTensorFields<const Tensor*>) each(call.*field.member);
  });
  if (differentiation == Differentiation::kNone) {
    constexpr Statistics kWanted = kGivesStatistics ? Statistics::kGiven : Statistics::kNone;
    if (!forward_directly(keys, call, kWanted, out)) {
      by_stack(kGivesStatistics, [&] { run_below_autograd(op, keys, stack); });
    }
    return out;
  }
  if (differentiation == Differentiation::kForwardMode) {
    by_stack(kGivesStatistics, [&] { differentiate_in_python(op, stack); });
    return out;
  }
  const auto node = make_node<NormNode<Op>>();
  torch::autograd::edge_list edges(Op::kArguments);
  each_tensor<Op, const Tensor*>([&](size_t position, bool, auto member) {
    if (call.*member) edges[position] = torch::autograd::impl::gradient_edge(*(call.*member));
  });
  node->set_next_edges(std::move(edges));
  node->save_arguments(call);
  if (kGivesStatistics || !forward_directly(keys, call, Statistics::kSaved, out)) {
    static const OperatorHandle with_statistics = find_operator(name_with_statistics<Op>());
    by_stack(true, [&] { run_below_autograd(with_statistics, keys, stack); });
  }
  torch::autograd::set_history(out.y, node);
  if (Op::kHasResidual) torch::autograd::set_history(out.residual_out, node);
  node->save_outputs(out);
  return out;
}

// The Autograd kernel of a forward operator.
template <class Op, bool kGivesStatistics>
void differentiate_forward(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const size_t below = stack->size() - Op::kArguments;
  const ForwardCall call = call_of<Op>(arguments_on<Op>(stack));
  ForwardOutputs out = differentiate_forward<Op, kGivesStatistics>(op, keys, call, stack);
  stack->resize(below);
  push_outputs<Op>(stack, out, kGivesStatistics);
}

// The Autograd kernel of a backward operator, of a norm if it is an Operator.
template <class Op>
void differentiate_backward(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const size_t count = argument_count(Op::kSchema);
  const Differentiation differentiation = differentiation_of([&](const auto& each) {
    for (const IValue& argument : torch::jit::last(*stack, count)) each(address_of(argument));
  });
  if (differentiation != Differentiation::kNone) return differentiate_in_python(op, stack);
  if constexpr (!std::is_same_v<Op, schemas::GateBackward>) {
    if (is_next(keys, c10::DispatchKey::CUDA) && backward_directly<Op>(stack)) return;
  }
  run_below_autograd(op, keys, stack);
}

}  // namespace fused_layernorm

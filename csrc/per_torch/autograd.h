// SPDX-License-Identifier: Apache-2.0
// Autograd of the forward operators: (add_)(ada_)layer_norm, group_norm, rms_norm_gated and the
// same operators with statistics.
//
// A call that needs gradients runs the operator with statistics below autograd, or the kernel
// itself (direct.h), and saves what backward needs. Backward runs the kernel too, or calls
// (ada_)layer_norm_backward, with a gate add_ada_layer_norm_backward, group_norm_backward or
// rms_norm_gated_backward, through the dispatcher.
// Derivatives of these, and forward mode, are Python's (differentiate_in_python in operators.h).
#pragma once

#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/functions/utils.h>

#include "direct.h"
#include "node.h"
#include "operators.h"

namespace fused_layernorm {

// The positions of the tensors that a node saves. x is the tensor that was normalized: input, or
// with a residual residual_out, which is an output of the node.
template <class Op>
struct SavedByNorm {
  enum : size_t {
    kX,
    kMean,
    kRstd,
    kWeight,
    kBias,
    kShift = kBias + Op::kHasModulation,
    kScale = kShift + Op::kHasModulation,
    kGate = kScale + Op::kHasGate,
    kInput = kGate + Op::kGatesSum,
    kCount
  };
};

// Computes the gradients of a forward operator's arguments from those of y and residual_out. The
// statistics, which some of the operators also return, have no gradients.
template <class Op>
struct NormNode : public SavingNode<SavedByNorm<Op>::kCount, Op::kHasResidual> {
  using Saved = SavedByNorm<Op>;

  NormOptions options;
  at::ScalarType input_dtype = at::kFloat;

  std::string name() const override { return Op::kNode; }

  void collect_options(CompiledNodeArgs& args) const override {
    collect(args, options);
    args.collect(input_dtype);
  }

  void save_arguments(const IValue* arguments) {
    if constexpr (!Op::kHasResidual) this->save(Saved::kX, arguments[Op::kInput].toTensor());
    options = options_of<Op>(arguments);
    const auto save_if_any = [&](size_t i, const IValue& argument) {
      this->save(i, tensor_of(argument));
    };
    const IValue &weight = arguments[Op::kWeight], &bias = arguments[Op::kBias];
    // Backward uses bias only where it computes z, and for the dtype of gradients.
    const bool needs_z = Op::kHasModulation || options.activation != Activation::kNone;
    // Its own gradient does not read weight. One that was made in inference mode, which autograd
    // refuses to save, has a tensor of its shape and dtype in its place then, as in PyTorch.
    bool reads_weight = needs_z || requires_grad(arguments[Op::kInput]);
    if constexpr (Op::kHasResidual) reads_weight |= requires_grad(arguments[Op::kResidual]);
    if constexpr (Op::kHasGate) reads_weight |= requires_grad(arguments[Op::kGate]);
    const Tensor given = tensor_of(weight);
    const bool stands_in = !reads_weight && given.defined() && given.is_inference();
    this->save(Saved::kWeight, stands_in ? at::empty_like(given) : given);
    if (needs_z || !is_defined(weight)) save_if_any(Saved::kBias, bias);
    if constexpr (Op::kHasModulation) {
      // Backward of rows uses shift only for the shape and dtype of its gradient.
      const IValue& shift = arguments[Op::kShift];
      if (Op::kHasGroups || requires_grad(shift)) save_if_any(Saved::kShift, shift);
      save_if_any(Saved::kScale, arguments[Op::kScale]);
    }
    if constexpr (Op::kHasGate) save_if_any(Saved::kGate, arguments[Op::kGate]);
    if constexpr (Op::kGatesSum) {
      if (requires_grad(arguments[Op::kGate])) save_if_any(Saved::kInput, arguments[Op::kInput]);
    }
    input_dtype = arguments[Op::kInput].toTensor().scalar_type();
  }

  void save_outputs(const Tensor& residual_out, const Tensor& mean, const Tensor& rstd) {
    if constexpr (Op::kHasResidual) this->save(Saved::kX, residual_out);
    if (!options.is_rms) this->save(Saved::kMean, mean);
    this->save(Saved::kRstd, rstd);
  }

  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard<std::mutex> lock(this->mutex_);
    variable_list results(Op::kArguments);
    const Tensor& dy = gradients[0];
    Tensor gate, dx;
    if constexpr (Op::kHasGate) {
      if (dy.defined() || Op::kHasResidual) gate = this->saved(Saved::kGate);
    }
    if constexpr (Op::kHasResidual) dx = gradients[1];
    if (dy.defined()) {
      dx = backward_of_norm(dy, dx, gate, results);
    } else if constexpr (Op::kGatesSum) {
      // If only residual_out was used, the gradient does not pass through the norm.
      if (dx.defined() && gate.defined()) backward_of_gate(dx, gate, results);
    }
    if (!dx.defined()) return results;
    if constexpr (Op::kHasResidual) {
      if (needs(Op::kResidual)) results[Op::kResidual] = dx;
    }
    const bool gates_sum = Op::kGatesSum && gate.defined();
    if (!gates_sum && needs(Op::kInput)) results[Op::kInput] = dx.to(input_dtype);
    return results;
  }

 private:
  // Whether the gradient of an argument is needed, which the operator may lack.
  bool needs(size_t argument) const {
    return argument != kAbsent && this->task_should_compute_output(argument);
  }

  // Returns dx, undefined if nothing needs it. The gradients of the gate, of the input that it
  // multiplied and of the parameters go into `results`.
  Tensor backward_of_norm(const Tensor& dy, const Tensor& dresidual, const Tensor& gate,
                          variable_list& results) {
    const bool is_gated =
        Op::kGatesSum && gate.defined() && (needs(Op::kInput) || needs(Op::kGate));
    SavedNorm saved;
    Needs needed;
    // Each saved tensor is unpacked once: torch.utils.checkpoint allows no second time.
    saved.dy = dy;
    saved.x = this->saved(Saved::kX);
    saved.mean = this->saved(Saved::kMean);
    saved.rstd = this->saved(Saved::kRstd);
    saved.weight = this->saved(Saved::kWeight);
    saved.bias = this->saved(Saved::kBias);
    saved.dresidual = dresidual;
    needed.dx = needs(Op::kResidual) || (!is_gated && needs(Op::kInput));
    needed.dweight = needs(Op::kWeight);
    needed.dbias = needs(Op::kBias);
    bool is_dshift_dy = false;
    if constexpr (Op::kHasModulation) {
      saved.shift = this->saved(Saved::kShift);
      saved.scale = this->saved(Saved::kScale);
      is_dshift_dy = !Op::kHasGroups && needs(Op::kShift) && is_of_elements(saved.shift, dy);
      needed.dshift = needs(Op::kShift) && !is_dshift_dy;
      needed.dscale = needs(Op::kScale);
    }
    if constexpr (Op::kGatesSum) {
      if (is_gated) saved.input = gated_input(saved.x);
      needed.dinput = is_gated && needs(Op::kInput);
    }
    if (is_gated || !Op::kGatesSum) saved.gate = gate;
    needed.dgate = needs(Op::kGate);
    GradientsOfNorm found = gradients_of<Op>(saved, options, needed);
    const auto give = [&](size_t argument, Tensor&& gradient) {
      if (argument != kAbsent) results[argument] = std::move(gradient);
    };
    give(Op::kGate, std::move(found.dgate));
    give(Op::kInput, std::move(found.dinput));
    give(Op::kShift, is_dshift_dy ? Tensor(dy) : std::move(found.dshift));
    give(Op::kScale, std::move(found.dscale));
    give(Op::kWeight, std::move(found.dweight));
    give(Op::kBias, std::move(found.dbias));
    return found.dx;
  }

  // Whether each element of y has a shift of its own, of y's dtype: the gradient of such a shift is
  // dy itself.
  static bool is_of_elements(const Tensor& shift, const Tensor& dy) {
    return shift.defined() && shift.scalar_type() == dy.scalar_type() &&
           shift.sym_sizes() == dy.sym_sizes();
  }

  void backward_of_gate(const Tensor& dx, const Tensor& gate, variable_list& results) {
    static const OperatorHandle op = find_operator(schemas::GateBackward::kName);
    static_assert(argument_count(schemas::GateBackward::kSchema) == 5, "as they are pushed");
    const bool needs_dinput = needs(Op::kInput), needs_dgate = needs(Op::kGate);
    if (!needs_dinput && !needs_dgate) return;
    Stack stack;
    torch::jit::push(stack, dx, gated_input(dx), gate, needs_dinput, needs_dgate);
    call(op, &stack);
    if (needs_dinput) results[Op::kInput] = std::move(stack[0]).toTensor();
    if (needs_dgate) results[Op::kGate] = std::move(stack[1]).toTensor();
  }

  // The input that the gate multiplied. It is not saved if the gate needs no gradient. Backward
  // then uses only its shape, which is that of `rows`, and its dtype, so `rows` takes its place, or
  // an uninitialized tensor of that shape and dtype.
  Tensor gated_input(const Tensor& rows) {
    const Tensor input = this->saved(Saved::kInput);
    if (input.defined()) return input;
    if (rows.scalar_type() == input_dtype) return rows;
    return at::empty_like(rows, rows.options().dtype(input_dtype));
  }
};

// The Autograd kernel of a forward operator. With kGivesStatistics, the operator's own outputs
// include the statistics.
template <class Op, bool kGivesStatistics>
void differentiate_forward(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const IValue* arguments = stack->data() + stack->size() - Op::kArguments;
  const Differentiation differentiation = differentiation_of(arguments, Op::kArguments);
  DirectOutputs direct;
  if (differentiation == Differentiation::kNone) {
    constexpr Statistics kWanted = kGivesStatistics ? Statistics::kGiven : Statistics::kNone;
    if (forward_directly<Op>(keys, arguments, options_of<Op>(arguments), kWanted, direct)) {
      return replace_arguments<Op, kGivesStatistics>(stack, direct);
    }
    return run_below_autograd(op, keys, stack);
  }

  if (differentiation == Differentiation::kForwardMode) return differentiate_in_python(op, stack);
  const auto node = make_node<NormNode<Op>>();
  node->set_next_edges(edges_of(arguments, Op::kArguments));
  node->save_arguments(arguments);
  if (!kGivesStatistics &&
      forward_directly<Op>(keys, arguments, node->options, Statistics::kSaved, direct)) {
    torch::autograd::set_history(direct.y, node);
    if (Op::kHasResidual) torch::autograd::set_history(direct.residual_out, node);
    node->save_outputs(direct.residual_out, direct.mean, direct.rstd);
    return replace_arguments<Op>(stack, direct);
  }
  static const OperatorHandle with_statistics = find_operator(name_with_statistics<Op>());
  run_below_autograd(with_statistics, keys, stack);
  const IValue* outputs = stack->data() + stack->size() - (kOutputs<Op> + kStatistics);
  for (size_t i = 0; i < kOutputs<Op>; ++i) {
    torch::autograd::set_history(outputs[i].toTensor(), node);
  }
  node->save_outputs(outputs[kOutputs<Op> - 1].toTensor(), outputs[kOutputs<Op>].toTensor(),
                     outputs[kOutputs<Op> + 1].toTensor());
  if constexpr (!kGivesStatistics) torch::jit::drop(*stack, kStatistics);
}

// The Autograd kernel of a backward operator, of a norm if it is an Operator.
template <class Op>
void differentiate_backward(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const size_t count = argument_count(Op::kSchema);
  if (differentiation_of(stack->data() + stack->size() - count, count) != Differentiation::kNone) {
    return differentiate_in_python(op, stack);
  }
  if constexpr (!std::is_same_v<Op, schemas::GateBackward>) {
    if (is_next(keys, c10::DispatchKey::CUDA) && backward_directly<Op>(stack)) return;
  }
  run_below_autograd(op, keys, stack);
}

}  // namespace fused_layernorm

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

// The positions of the tensors that a NormNode saves. x is the tensor that was normalized: input,
// or with a residual residual_out, which is an output of the node.
template <class Op>
struct SavedByNorm {
  enum : size_t {
    kX,
    kMean,
    kRstd,
    kFirstParameter,
    kInput = kFirstParameter + Op::kParameters,
    kGate,
    kEnd
  };
  static constexpr size_t kCount = Op::kHasGate ? kEnd : kInput;
};

// Computes the gradients of a forward operator's arguments from those of y and residual_out. The
// statistics, which some of the operators also return, have no gradients.
template <class Op>
struct NormNode : public SavingNode<SavedByNorm<Op>::kCount, Op::kHasResidual> {
  using Saved = SavedByNorm<Op>;

  NormOptions options;
  at::ScalarType input_dtype = at::kFloat;

  std::string name() const override {
    if (Op::kHasGroups) return "FusedGroupNormBackward";
    return std::string("Fused") + (Op::kHasResidual ? "Add" : "") +
           (Op::kHasModulation ? "Ada" : "") + "LayerNormBackward";
  }

  void collect_options(CompiledNodeArgs& args) const override {
    collect(args, options);
    args.collect(input_dtype);
  }

  void save_arguments(const IValue* arguments) {
    if constexpr (!Op::kHasResidual) this->save(Saved::kX, arguments[Op::kInput].toTensor());
    options = options_of<Op>(arguments);
    for (size_t i = 0; i < Op::kParameters; ++i) {
      const IValue& parameter = arguments[Op::kFirstParameter + i];
      // Backward uses bias only where it computes z, and for the dtype of gradients.
      const bool is_bias = Op::kFirstParameter + i == Op::kBias;
      const bool needs_z = Op::kHasModulation || options.activation != Activation::kNone;
      if (is_bias && !needs_z && is_defined(arguments[Op::kWeight])) continue;
      // Backward of rows uses shift only for the shape and dtype of its gradient.
      const bool is_shift =
          Op::kHasModulation && !Op::kHasGroups && Op::kFirstParameter + i == Op::kShift;
      if (is_shift && !requires_grad(parameter)) continue;
      this->save(Saved::kFirstParameter + i, tensor_of(parameter));
    }
    if constexpr (Op::kHasGate) {
      this->save(Saved::kGate, tensor_of(arguments[Op::kGate]));
      if (requires_grad(arguments[Op::kGate])) {
        this->save(Saved::kInput, arguments[Op::kInput].toTensor());
      }
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
    if constexpr (Op::kHasGate) gate = this->saved(Saved::kGate);
    if constexpr (Op::kHasResidual) dx = gradients[1];
    if (dy.defined()) {
      dx = backward_of_norm(dy, dx, gate, results);
    } else if constexpr (Op::kHasGate) {
      // If only residual_out was used, the gradient does not pass through the norm.
      if (dx.defined() && gate.defined()) backward_of_gate(dx, gate, results);
    }
    if (!dx.defined()) return results;
    if constexpr (Op::kHasResidual) {
      if (needs(Op::kResidual)) results[Op::kResidual] = dx;
    }
    if (!gate.defined() && needs(Op::kInput)) results[Op::kInput] = dx.to(input_dtype);
    return results;
  }

 private:
  bool needs(size_t argument) const { return this->task_should_compute_output(argument); }

  // Returns dx, undefined if nothing needs it. The gradients of the gate, of the input that it
  // multiplied and of the parameters go into `results`.
  Tensor backward_of_norm(const Tensor& dy, const Tensor& dresidual, const Tensor& gate,
                          variable_list& results) {
    const bool is_gated = gate.defined() && (needs(Op::kInput) || needs(Op::kGate));
    // Without a residual, Op::kResidual is the position of input.
    const bool needs_dx = needs(Op::kResidual) || (!is_gated && needs(Op::kInput));
    // Each saved tensor is unpacked once: torch.utils.checkpoint allows no second time.
    const auto parameter = [&](size_t argument) {
      return this->saved(Saved::kFirstParameter + argument - Op::kFirstParameter);
    };
    const Tensor x = this->saved(Saved::kX), mean = this->saved(Saved::kMean);
    const Tensor rstd = this->saved(Saved::kRstd);
    SavedNorm saved = {dy, x, mean, rstd, parameter(Op::kWeight), parameter(Op::kBias), dresidual};
    Needs needed = {needs_dx, needs(Op::kWeight), needs(Op::kBias)};
    bool is_dshift_dy = false;
    if constexpr (Op::kHasModulation) {
      saved.shift = parameter(Op::kShift);
      saved.scale = parameter(Op::kScale);
      is_dshift_dy = !Op::kHasGroups && needs(Op::kShift) && is_of_elements(saved.shift, dy);
      needed.dshift = needs(Op::kShift) && !is_dshift_dy;
      needed.dscale = needs(Op::kScale);
    }
    if constexpr (Op::kHasGate) {
      if (is_gated) saved.input = gated_input(x);
      if (is_gated) saved.gate = gate;
      needed.dinput = is_gated && needs(Op::kInput);
      needed.dgate = needs(Op::kGate);
    }
    GradientsOfNorm found = gradients_of<Op>(saved, options, needed);
    // An argument that the operator lacks has the position of one that follows here, or of x.
    results[Op::kGate] = std::move(found.dgate);
    results[Op::kInput] = std::move(found.dinput);
    results[Op::kShift] = is_dshift_dy ? dy : std::move(found.dshift);
    results[Op::kScale] = std::move(found.dscale);
    results[Op::kWeight] = std::move(found.dweight);
    results[Op::kBias] = std::move(found.dbias);
    return found.dx;
  }

  // Whether each element of y has a shift of its own, of y's dtype: the gradient of such a shift is
  // dy itself.
  static bool is_of_elements(const Tensor& shift, const Tensor& dy) {
    return shift.defined() && shift.scalar_type() == dy.scalar_type() &&
           shift.sym_sizes() == dy.sym_sizes();
  }

  void backward_of_gate(const Tensor& dx, const Tensor& gate, variable_list& results) {
    static const OperatorHandle op = find_operator("gate_backward");
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

// The same of a gated norm.
struct SavedByGatedNorm {
  enum : size_t { kX, kGate, kRstd, kWeight, kBias, kCount };
};
struct GatedNode : public SavingNode<SavedByGatedNorm::kCount, false> {
  using Op = GatedForward;
  using Saved = SavedByGatedNorm;

  NormOptions options;

  std::string name() const override { return "FusedRMSNormGatedBackward"; }
  void collect_options(CompiledNodeArgs& args) const override { collect(args, options); }

  void save_arguments(const IValue* arguments) {
    options = options_of<Op>(arguments);
    save(Saved::kX, arguments[Op::kInput].toTensor());
    save(Saved::kGate, arguments[Op::kGate].toTensor());
    save(Saved::kWeight, tensor_of(arguments[Op::kWeight]));
    save(Saved::kBias, tensor_of(arguments[Op::kBias]));
  }
  void save_outputs(const Tensor&, const Tensor&, const Tensor& rstd) { save(Saved::kRstd, rstd); }

  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    variable_list results(Op::kArguments);
    if (!gradients[0].defined()) return results;
    const auto needs = [&](size_t argument) { return task_should_compute_output(argument); };
    Needs needed;
    needed.dx = needs(Op::kInput);
    needed.dgate = needs(Op::kGate);
    needed.dweight = needs(Op::kWeight);
    needed.dbias = needs(Op::kBias);
    SavedNorm norm;
    norm.dy = gradients[0];
    norm.x = saved(Saved::kX);
    norm.gate = saved(Saved::kGate);
    norm.rstd = saved(Saved::kRstd);
    norm.weight = saved(Saved::kWeight);
    norm.bias = saved(Saved::kBias);
    GradientsOfNorm found = gradients_of<Op>(norm, options, needed);
    results[Op::kInput] = std::move(found.dx);
    results[Op::kGate] = std::move(found.dgate);
    results[Op::kWeight] = std::move(found.dweight);
    results[Op::kBias] = std::move(found.dbias);
    return results;
  }
};

template <class Op>
using NodeOf = std::conditional_t<std::is_same_v<Op, GatedForward>, GatedNode, NormNode<Op>>;

// The Autograd kernel of a forward operator. With kGivesStatistics, the operator's own outputs
// include the statistics.
template <class Op, bool kGivesStatistics>
void differentiate_forward(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const IValue* arguments = stack->data() + stack->size() - Op::kArguments;
  const Differentiation differentiation = differentiation_of(arguments, Op::kArguments);
  DirectOutputs direct;
  if (differentiation == Differentiation::kNone) {
    if (!kGivesStatistics &&
        forward_directly<Op>(keys, arguments, options_of<Op>(arguments), false, direct)) {
      return replace_arguments<Op>(stack, direct);
    }
    return run_below_autograd(op, keys, stack);
  }

  if (differentiation == Differentiation::kForwardMode) return differentiate_in_python(op, stack);
  const auto node = make_node<NodeOf<Op>>();
  node->set_next_edges(edges_of(arguments, Op::kArguments));
  node->save_arguments(arguments);
  if (!kGivesStatistics && forward_directly<Op>(keys, arguments, node->options, true, direct)) {
    torch::autograd::set_history(direct.y, node);
    if (Op::kHasResidual) torch::autograd::set_history(direct.residual_out, node);
    node->save_outputs(direct.residual_out, direct.mean, direct.rstd);
    return replace_arguments<Op>(stack, direct);
  }
  static const OperatorHandle with_statistics = find_operator(Op::name(/*gives_statistics=*/true));
  run_below_autograd(with_statistics, keys, stack);
  const IValue* outputs = stack->data() + stack->size() - (Op::kOutputs + Op::kStatistics);
  for (size_t i = 0; i < Op::kOutputs; ++i) {
    torch::autograd::set_history(outputs[i].toTensor(), node);
  }
  node->save_outputs(outputs[Op::kOutputs - 1].toTensor(), outputs[Op::kOutputs].toTensor(),
                     outputs[Op::kOutputs + 1].toTensor());
  if constexpr (!kGivesStatistics) torch::jit::drop(*stack, Op::kStatistics);
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// Autograd of the backward operators: layer_norm_backward, ada_layer_norm_backward and
// gate_backward. Their derivatives, double backward among them, are formulas in PyTorch's operators
// (formulas.h). Where derivatives of add_ada_layer_norm_backward are wanted, two of these operators
// are called instead.
#pragma once

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/functions/utils.h>

#include "node.h"
#include "operators.h"

namespace fused_layernorm {

// The node of (ada_)layer_norm_backward. The gradient of x that it gives is the total derivative:
// mean and rstd count as functions of x and have no gradients of their own.
template <bool kHasModulation>
struct NormBackwardNode : public SavingNode<6, /*kFirstIsOutput=*/false> {
  using Op = NormBackward<kHasModulation>;
  enum Saved : size_t { kDy, kX, kRstd, kScale, kWeight, kBias };

  Options options;

  std::string name() const override {
    return kHasModulation ? "FusedAdaLayerNormBackwardBackward" : "FusedLayerNormBackwardBackward";
  }

  void collect_options(CompiledNodeArgs& args) const override { collect(args, options); }

  static BackwardArguments read(const IValue* arguments) {
    return {arguments[Op::kDy].toTensor(),   arguments[Op::kX].toTensor(),
            arguments[Op::kRstd].toTensor(), tensor_of(arguments[Op::kDresidual]),
            parameters_of<Op>(arguments),    options_of<Op>(arguments)};
  }

  static variable_list formula(const BackwardArguments& a) {
    const BackwardResults found = backward_formula(a);
    if constexpr (kHasModulation) {
      return {found.dx, found.parameters.shift, found.parameters.scale, found.parameters.weight,
              found.parameters.bias};
    } else {
      return {found.dx, found.parameters.weight, found.parameters.bias};
    }
  }

  // Neither shift nor dresidual appears in a derivative.
  void save_arguments(const BackwardArguments& a) {
    save(kDy, a.dy);
    save(kX, a.x);
    save(kRstd, a.rstd);
    save(kScale, a.parameters.scale);
    save(kWeight, a.parameters.weight);
    save(kBias, a.parameters.bias);
    options = a.options;
  }

  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Tensor &ddx = gradients[0], &ddweight = gradients[Op::kOutputs - 2];
    const Tensor& ddbias = gradients[Op::kOutputs - 1];
    const Parameters parameters = {Tensor(), saved(kScale), saved(kWeight), saved(kBias)};
    const BackwardGradients found = double_backward_formula(
        {saved(kDy), saved(kX), saved(kRstd), Tensor(), parameters, options},
        {ddx, kHasModulation ? Parameters{gradients[1], gradients[2], ddweight, ddbias}
                             : Parameters{Tensor(), Tensor(), ddweight, ddbias}});
    variable_list results(Op::kArguments);
    results[Op::kDy] = found.dy;
    results[Op::kX] = found.x;
    if constexpr (kHasModulation) results[Op::kScale] = found.parameters.scale;
    results[Op::kWeight] = found.parameters.weight;
    results[Op::kBias] = found.parameters.bias;
    results[Op::kDresidual] = ddx;
    return results;
  }
};

struct GateBackwardNode : public SavingNode<3, /*kFirstIsOutput=*/false> {
  using Op = GateBackward;
  enum Saved : size_t { kDresidualOut, kInput, kGate };

  std::string name() const override { return "FusedGateBackwardBackward"; }

  static GateArguments read(const IValue* arguments) {
    return {arguments[Op::kDresidualOut].toTensor(), arguments[Op::kInput].toTensor(),
            arguments[Op::kGate].toTensor()};
  }

  static variable_list formula(const GateArguments& a) {
    const GateResults found = gate_backward_formula(a);
    return {found.dinput, found.dgate};
  }

  void save_arguments(const GateArguments& a) {
    save(kDresidualOut, a.dresidual_out);
    save(kInput, a.input);
    save(kGate, a.gate);
  }

  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const GateArguments found = gate_double_backward_formula(
        {saved(kDresidualOut), saved(kInput), saved(kGate)}, {gradients[0], gradients[1]});
    variable_list results(Op::kArguments);
    results[Op::kDresidualOut] = found.dresidual_out;
    results[Op::kInput] = found.input;
    results[Op::kGate] = found.gate;
    return results;
  }
};

// The Autograd kernel of a backward operator, given its node.
template <class OpNode>
void differentiate_backward(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  using Op = typename OpNode::Op;
  const IValue* arguments = stack->data() + stack->size() - Op::kArguments;
  const Differentiation differentiation = differentiation_of<Op>(arguments);
  if (differentiation == Differentiation::kNone) return run_below_autograd(op, keys, stack);

  const auto named = OpNode::read(arguments);
  bool needed[Op::kOutputs];
  for (size_t i = 0; i < Op::kOutputs; ++i) needed[i] = arguments[Op::kNeeds + i].toBool();
  if (differentiation == Differentiation::kForwardMode) {
    // The kernel is run for its checks, and for the empty tensors in place of gradients that are
    // not asked for.
    run_below_autograd(op, keys, stack);
    const variable_list found = OpNode::formula(named);
    IValue* outputs = stack->data() + stack->size() - Op::kOutputs;
    for (size_t i = 0; i < Op::kOutputs; ++i) {
      if (needed[i]) outputs[i] = found[i];
    }
    return;
  }

  const auto node = make_node<OpNode>();
  node->set_next_edges(edges_of<Op>(arguments));
  node->save_arguments(named);
  run_below_autograd(op, keys, stack);
  const IValue* outputs = stack->data() + stack->size() - Op::kOutputs;
  for (size_t i = 0; i < Op::kOutputs; ++i) {
    // An undefined tensor reserves the output number of an output that has no gradient.
    torch::autograd::set_history(needed[i] ? outputs[i].toTensor() : Tensor(), node);
  }
}

// The Autograd kernel of add_ada_layer_norm_backward. If a graph or a tangent is wanted, it calls
// ada_layer_norm_backward and then gate_backward on its dx, which are both differentiable.
inline void differentiate_gated_backward(const OperatorHandle& op, DispatchKeySet keys,
                                         Stack* stack) {
  using Op = GatedNormBackward;
  const IValue* in_place = stack->data() + stack->size() - Op::kArguments;
  if (differentiation_of<Op>(in_place) == Differentiation::kNone) {
    return run_below_autograd(op, keys, stack);
  }
  static const OperatorHandle norm_backward =
      find_operator(FUSED_LAYERNORM_OPERATOR("ada_layer_norm_backward"));
  static const OperatorHandle gate_backward =
      find_operator(FUSED_LAYERNORM_OPERATOR("gate_backward"));
  const Stack arguments = torch::jit::pop(*stack, Op::kArguments);
  const Tensor& x = arguments[Op::kX].toTensor();
  const Tensor& input = arguments[Op::kInput].toTensor();
  const Tensor& gate = arguments[Op::kGate].toTensor();
  const bool needs_dx = arguments[Op::kNeeds].toBool();
  const bool needs_dinput = arguments[Op::kNeedsDinput].toBool();
  const bool needs_dgate = arguments[Op::kNeedsDgate].toBool();
  const bool is_gate_needed = needs_dinput || needs_dgate;

  Stack of_norm = {arguments[Op::kDy], arguments[Op::kX]};
  of_norm.insert(of_norm.end(), arguments.begin() + Op::kNormalizedNdim,
                 arguments.begin() + Op::kNeeds);
  of_norm.emplace_back(needs_dx || is_gate_needed);
  // The parameters' flags, the statistic and the offset.
  of_norm.insert(of_norm.end(), arguments.begin() + Op::kNeedsOfParameters, arguments.end());
  call(norm_backward, &of_norm);

  const auto nothing = [](const Tensor& of) { return IValue(at::empty({0}, of.options())); };
  Stack of_gate;
  if (is_gate_needed) {
    of_gate = {of_norm[0], input, gate, needs_dinput, needs_dgate};
    call(gate_backward, &of_gate);
  } else {
    of_gate = {nothing(input), nothing(gate)};
  }
  stack->push_back(needs_dx ? of_norm[0] : nothing(x));
  stack->insert(stack->end(), of_gate.begin(), of_gate.end());
  stack->insert(stack->end(), of_norm.begin() + 1, of_norm.end());
}

}  // namespace fused_layernorm

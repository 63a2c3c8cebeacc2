// SPDX-License-Identifier: Apache-2.0
// The operators of norms as the dispatcher calls them: where each argument lies on the stack, which
// follows from their schemas (call/schemas.h), and how the options are read from there.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>

#include "call/description.h"
#include "call/schemas.h"
#include "gated/params.h"
#include "groups/params.h"

namespace fused_layernorm {

// The position of an argument that an operator lacks.
constexpr size_t kAbsent = static_cast<size_t>(-1);

// An argument in a schema.
struct Argument {
  size_t position = kAbsent;
  std::string_view type;
};

// The argument that is called `wanted` (a name, or a type and a name) and whose type begins with
// `type`.
constexpr Argument argument_of(std::string_view schema, std::string_view wanted,
                               std::string_view type = "") {
  for (size_t position = 0; !schema.empty(); ++position) {
    const size_t end = std::min(schema.find(", "), schema.size());
    const std::string_view argument = schema.substr(0, std::min(schema.find('='), end));
    const size_t space = argument.rfind(' ');
    const bool is_named = argument == wanted || argument.substr(space + 1) == wanted;
    if (is_named && argument.substr(0, type.size()) == type) {
      return {position, argument.substr(0, space)};
    }
    schema.remove_prefix(std::min(end + 2, schema.size()));
  }
  return {};
}
constexpr size_t position_of(std::string_view schema, std::string_view wanted) {
  return argument_of(schema, wanted).position;
}
// By the type, because a number may have a tensor's name (scale).
constexpr Argument tensor_of(std::string_view schema, std::string_view wanted) {
  return argument_of(schema, wanted, "Tensor");
}

constexpr size_t argument_count(std::string_view schema) {
  size_t count = 1;
  for (size_t at = 0; (at = schema.find(", ", at)) != schema.npos; ++at) ++count;
  return count;
}

// How many gradients a backward operator is asked for, and gives.
constexpr size_t flag_count(std::string_view schema) {
  size_t count = 0;
  for (size_t at = 0; (at = schema.find("bool needs_", at)) != schema.npos; ++at) ++count;
  return count;
}

// An operator: the positions of its arguments, and what follows from the arguments that it has.
template <class Schema>
struct Operator : Schema {
  static constexpr std::string_view kAll = Schema::kSchema;
  enum : size_t {
    kArguments = argument_count(kAll),
    // Forward.
    kInput = position_of(kAll, "input"),
    kResidual = position_of(kAll, "residual"),
    kEps = position_of(kAll, "eps"),
    kOutDtype = position_of(kAll, "out_dtype"),
    kRoundBeforeWeight = position_of(kAll, "round_before_weight"),
    // Backward.
    kDy = position_of(kAll, "dy"),
    kX = position_of(kAll, "x"),
    kMean = position_of(kAll, "mean"),
    kRstd = position_of(kAll, "rstd"),
    kNeedsDx = position_of(kAll, "needs_dx"),
    // Both.
    kNormalizedNdim = position_of(kAll, "normalized_ndim"),
    kNumGroups = position_of(kAll, "num_groups"),
    kGate = position_of(kAll, "gate"),
    kShift = position_of(kAll, "shift"),
    kScale = tensor_of(kAll, "scale").position,
    kWeight = position_of(kAll, "weight"),
    kBias = position_of(kAll, "bias"),
    kActivation = position_of(kAll, "activation"),
    kOutputScale = std::min(position_of(kAll, "float scale"), position_of(kAll, "output_scale")),
    kStatistic = position_of(kAll, "statistic"),
    kWeightOffset = position_of(kAll, "weight_offset"),
    kKeepsOrder = position_of(kAll, "keeps_order"),
    kGateFirst = position_of(kAll, "gate_first"),
    kGateActivation = position_of(kAll, "gate_activation"),
    kGroupSize = position_of(kAll, "group_size"),
  };
  static constexpr bool kHasResidual = kResidual != kAbsent;
  static constexpr bool kHasModulation = kShift != kAbsent;
  static constexpr bool kHasGroups = kNumGroups != kAbsent;
  static constexpr bool kHasGate = kGate != kAbsent;
  // The gate is that of a sum, x = residual + gate * input.
  static constexpr bool kGatesSum = kHasGate && kGateFirst == kAbsent;
};

// How many outputs of a forward operator have gradients. A second operator of the same schema, with
// a name of its own, also gives the two statistics, after those outputs.
template <class Op>
constexpr size_t kOutputs = Op::kHasResidual ? 2 : 1;
constexpr size_t kStatistics = 2;
template <class Op>
std::string name_with_statistics() {
  return std::string(Op::kName) + "_forward";
}

// Calls a function with each of these operators.
template <class... Schemas>
struct Operators {
  template <typename Function>
  static void each(const Function& function) {
    (function(Operator<Schemas>()), ...);
  }
};
using ForwardOperators =
    Operators<schemas::LayerNorm, schemas::AddLayerNorm, schemas::AdaLayerNorm,
              schemas::AddAdaLayerNorm, schemas::GroupNorm, schemas::RmsNormGated>;
// gate_backward is none of them: it has no norm.
using BackwardOperators = Operators<schemas::LayerNormBackward, schemas::AdaLayerNormBackward,
                                    schemas::AddAdaLayerNormBackward, schemas::GroupNormBackward,
                                    schemas::RmsNormGatedBackward>;
using LayerNorm = Operator<schemas::LayerNorm>;
using GroupNorm = Operator<schemas::GroupNorm>;

// ---- Fields: which tensors a call has, and what it gives. Whatever reads calls, writes them back,
// describes or saves them goes over these.

template <class T>
struct TensorField {
  std::string_view name;
  T NormTensors<T>::* member;
};
template <class T, class All = NormTensors<T>>
constexpr TensorField<T> kTensorFields[] = {
    {"input", &All::input}, {"residual", &All::residual},   {"dy", &All::dy},
    {"x", &All::x},         {"mean", &All::mean},           {"rstd", &All::rstd},
    {"gate", &All::gate},   {"dresidual", &All::dresidual}, {"shift", &All::shift},
    {"scale", &All::scale}, {"weight", &All::weight},       {"bias", &All::bias}};
constexpr size_t kTensorCount = std::size(kTensorFields<int>);

// Each of these tensors among the arguments of an operator.
template <class Op>
constexpr auto kTensorArguments = [] {
  std::array<Argument, kTensorCount> found = {};
  for (size_t i = 0; i < kTensorCount; ++i) {
    found[i] = tensor_of(Op::kSchema, kTensorFields<int>[i].name);
  }
  return found;
}();

// Calls a function with the position of every tensor that an operator has, whether it may be None,
// and its field among tensors of type T.
template <class Op, class T, class Function>
void each_tensor(const Function& function) {
  for (size_t i = 0; i < kTensorCount; ++i) {
    const Argument& argument = kTensorArguments<Op>[i];
    if (argument.position != kAbsent) {
      function(argument.position, argument.type == "Tensor?", kTensorFields<T>[i].member);
    }
  }
}

// Fills in the description of a call's tensors: raw_of(tensor) describes one.
template <class T, class Raw>
void describe(const NormTensors<T>& tensors, NormTensors<RawTensor>& into, const Raw& raw_of) {
  for (size_t i = 0; i < kTensorCount; ++i) {
    into.*kTensorFields<RawTensor>[i].member = raw_of(tensors.*kTensorFields<T>[i].member);
  }
}

// The gradients of tensors: the flags of a backward operator, and in their order its results.
template <class T>
struct GradientField {
  std::string_view of_name;
  T NormTensors<T>::* of;
  std::string_view flag;
  bool NormResults<bool>::* needed;
  T NormResults<T>::* member;
  bool NormCall::* is_wide = nullptr;  // of a modulation
};
template <class T, class All = NormTensors<T>, class Results = NormResults<T>>
constexpr GradientField<T> kGradientFields[] = {
    {"x", &All::x, "needs_dx", &Needs::dx, &Results::dx},
    {"input", &All::input, "needs_dinput", &Needs::dinput, &Results::dinput},
    {"gate", &All::gate, "needs_dgate", &Needs::dgate, &Results::dgate, &NormCall::dgate_is_wide},
    {"shift", &All::shift, "needs_dshift", &Needs::dshift, &Results::dshift,
     &NormCall::dshift_is_wide},
    {"scale", &All::scale, "needs_dscale", &Needs::dscale, &Results::dscale,
     &NormCall::dscale_is_wide},
    {"weight", &All::weight, "needs_dweight", &Needs::dweight, &Results::dweight},
    {"bias", &All::bias, "needs_dbias", &Needs::dbias, &Results::dbias}};

// The position in an operator of each flag, and of each tensor whose gradient it is.
template <class Op, bool kFlags>
constexpr auto kGradientPositions = [] {
  std::array<size_t, std::size(kGradientFields<int>)> positions = {};
  for (size_t i = 0; i < positions.size(); ++i) {
    const auto& field = kGradientFields<int>[i];
    positions[i] = kFlags ? position_of(Op::kSchema, field.flag)
                          : tensor_of(Op::kSchema, field.of_name).position;
  }
  return positions;
}();
// Calls a function with the position of every flag that a backward operator has, or of every tensor
// with a gradient that a forward operator has, and its field.
template <class Op, class T, bool kFlags = true, class Function>
void each_gradient(const Function& function) {
  for (size_t i = 0; i < std::size(kGradientFields<T>); ++i) {
    const size_t position = kGradientPositions<Op, kFlags>[i];
    if (position != kAbsent) function(position, kGradientFields<T>[i]);
  }
}

// A name that is misspelt above would count as absent, so these are asserted: that an operator has
// the arguments that every operator of its direction has and, of backward, that all its flags are
// found, one next to the other.
template <class Op>
constexpr bool kIsForward = Op::kInput != kAbsent && Op::kWeight != kAbsent &&
                            Op::kBias != kAbsent && Op::kEps != kAbsent && Op::kOutDtype != kAbsent;
template <class Op>
constexpr bool is_backward() {
  size_t next = Op::kNeedsDx;
  for (const size_t position : kGradientPositions<Op, true>) {
    if (position != kAbsent && position != next++) return false;
  }
  return Op::kDy != kAbsent && Op::kX != kAbsent && Op::kRstd != kAbsent &&
         Op::kWeight != kAbsent && Op::kBias != kAbsent && Op::kNeedsDx != kAbsent &&
         next - Op::kNeedsDx == flag_count(Op::kSchema);
}

// The activations as users write them, in the order of enum class Activation, and at the end
// kLeakyRelu, which only groups have.
constexpr std::string_view kActivationNames[] = {"",     "gelu", "gelu_tanh",
                                                 "silu", "relu", "leaky_relu"};
static_assert(static_cast<size_t>(kLeakyRelu) == std::size(kActivationNames) - 1);
constexpr const char* kActivationChoices =
    "activation must be None, 'gelu', 'gelu_tanh', 'silu' or 'relu'";
constexpr const char* kGroupActivationChoices =
    "activation must be None, 'gelu', 'gelu_tanh', 'silu', 'relu' or 'leaky_relu'";
constexpr const char* kGateActivationChoices = "gate_activation must be 'silu' or 'sigmoid'";
constexpr const char* kStatisticChoices = "statistic must be 'layer' or 'rms'";

constexpr std::string_view name_of(Activation activation) {
  return kActivationNames[static_cast<size_t>(activation)];
}

// Activation::kNone for a name that is unknown.
inline Activation activation_of(std::string_view name) {
  for (size_t i = 1; i < std::size(kActivationNames); ++i) {
    if (name == kActivationNames[i]) return static_cast<Activation>(i);
  }
  return Activation::kNone;
}

// ---- Options

// Calls a function with the position and the field of every number and flag that the operator has.
template <class Op, class Function>
void each_number(const Function& function) {
  using Options = NormOptions;
  const auto pass = [&](size_t position, auto member) {
    if (position != kAbsent) function(position, member);
  };
  pass(Op::kNormalizedNdim, &Options::normalized_ndim);
  pass(Op::kNumGroups, &Options::num_groups);
  pass(Op::kGroupSize, &Options::group_size);
  pass(Op::kOutputScale, &Options::output_scale);
  pass(Op::kEps, &Options::eps);
  pass(Op::kWeightOffset, &Options::weight_offset);
  pass(Op::kKeepsOrder, &Options::keeps_order);
  pass(Op::kRoundBeforeWeight, &Options::round_before_weight);
}

// The options of a call. `Stack` gives the argument of a position: an integer, a real number, a
// flag, a name, or a name that may be None (an optional string or a pointer). Its refuse() is told
// of an unknown name.
template <class Op, class Stack>
NormOptions read_options(Stack&& stack) {
  NormOptions options;
  const auto refuse = [&](const char* choices, const std::string& name) {
    options.has_unknown_name = true;
    stack.refuse(choices, name);
  };
  options.keeps_order = Op::kHasGroups;
  each_number<Op>([&](size_t position, auto member) {
    auto& into = options.*member;
    if constexpr (std::is_same_v<decltype(into), int64_t&>) {
      into = stack.integer(position);
    } else if constexpr (std::is_same_v<decltype(into), double&>) {
      into = stack.real(position);
    } else {
      into = stack.flag(position);
    }
  });
  // In NormOptions zero stands for no groups. As a number of groups it is as wrong as any below
  // one.
  if (Op::kHasGroups && options.num_groups == 0) options.num_groups = -1;
  if constexpr (Op::kActivation != kAbsent) {
    if (const auto name = stack.name_if_any(Op::kActivation)) {
      options.activation = activation_of(*name);
      if (options.activation == Activation::kNone ||
          (!Op::kHasGroups && options.activation == kLeakyRelu)) {
        refuse(Op::kHasGroups ? kGroupActivationChoices : kActivationChoices, *name);
      }
    }
  }
  if constexpr (Op::kStatistic != kAbsent) {
    const std::string& statistic = stack.name(Op::kStatistic);
    options.is_rms = statistic == "rms";
    if (!options.is_rms && statistic != "layer") refuse(kStatisticChoices, statistic);
  }
  if constexpr (Op::kGateFirst != kAbsent) {
    options.is_rms = true;
    options.gate_place = stack.flag(Op::kGateFirst) ? GatePlace::kFirst : GatePlace::kLast;
    const std::string& activation = stack.name(Op::kGateActivation);
    options.activation = activation == "silu" ? Activation::kSilu : kSigmoid;
    if (activation != "silu" && activation != "sigmoid") refuse(kGateActivationChoices, activation);
  }
  return options;
}

// The reverse: gives `put` the position and value of every option. A name is a std::string_view, or
// an optional one.
template <class Op, class Put>
void write_options(const NormOptions& options, const Put& put) {
  using Name = std::string_view;
  each_number<Op>([&](size_t position, auto member) { put(position, options.*member); });
  if constexpr (Op::kActivation != kAbsent) {
    const bool activates = options.activation != Activation::kNone;
    put(Op::kActivation,
        activates ? std::optional<Name>(name_of(options.activation)) : std::nullopt);
  }
  if constexpr (Op::kStatistic != kAbsent) {
    put(Op::kStatistic, Name(options.is_rms ? "rms" : "layer"));
  }
  if constexpr (Op::kGateFirst != kAbsent) {
    put(Op::kGateFirst, options.gate_place == GatePlace::kFirst);
    put(Op::kGateActivation, Name(options.activation == Activation::kSilu ? "silu" : "sigmoid"));
  }
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// The operators of norms as the dispatcher calls them: where each argument lies on the stack
// (bindings/schemas.cpp has the schemas), and how the options are read from there.
//
// One template describes four forward operators: with a modulation (ada_layer_norm) or without,
// with a residual (add_...) or without; another describes the three backward operators. group_norm
// and rms_norm_gated and their backwards have a list each. An argument that an operator lacks has
// the position of another argument, so one list of positions serves all: in forward, without a
// residual, residual and gate have input's position; with a residual but no gate, gate has
// residual's; without a modulation, shift and scale have those of weight and bias.
#pragma once

#include <cstddef>
#include <iterator>
#include <string>
#include <string_view>
#include <type_traits>

#include "call/description.h"
#include "gated/params.h"
#include "groups/params.h"

namespace fused_layernorm {

template <bool kWithModulation, bool kWithResidual>
struct NormForward {
  // An operator that gives the statistics, too, has a name of its own.
  static std::string name(bool gives_statistics) {
    return std::string(kHasResidual ? "add_" : "") + (kHasModulation ? "ada_" : "") +
           (gives_statistics ? "layer_norm_forward" : "layer_norm");
  }
  static constexpr bool kIsForward = true;
  static constexpr bool kHasGroups = false;
  static constexpr bool kHasModulation = kWithModulation;
  static constexpr bool kMayActivate = !kHasModulation;
  static constexpr bool kHasResidual = kWithResidual;
  static constexpr bool kHasGate = kHasResidual && kHasModulation;
  static constexpr bool kMayKeepOrder = !kHasModulation && !kHasResidual;
  enum : size_t {
    kInput,
    kResidual = kInput + kHasResidual,
    kGate = kResidual + kHasGate,
    kNormalizedNdim,
    kShift,
    kScale,
    kWeight = kHasModulation ? kScale + 1 : kShift,
    kBias,
    kEps,
    kActivation,  // where there is no modulation
    kOutputScale,
    kOutDtype = kHasModulation ? kEps + 1 : kOutputScale + 1,
    kStatistic,
    kWeightOffset,
    kRoundBeforeWeight,
    kKeepsOrder,  // where there is neither a modulation nor a residual
    kArguments = kKeepsOrder + kMayKeepOrder
  };
  static constexpr size_t kModulations[] = {kGate, kShift, kScale};  // where there is a modulation
  static constexpr size_t kFirstParameter = kShift;
  static constexpr size_t kParameters = kEps - kShift;

  // y and residual_out have gradients; the statistics that follow them have none.
  static constexpr size_t kOutputs = 1 + kHasResidual;
  static constexpr size_t kStatistics = 2;
};

template <bool kWithModulation, bool kWithGate>
struct NormBackward {
  static constexpr bool kIsForward = false;
  static constexpr bool kHasGroups = false;
  static constexpr bool kHasModulation = kWithModulation;
  static constexpr bool kMayActivate = !kHasModulation;
  static constexpr bool kHasGate = kWithGate;
  static constexpr bool kMayKeepOrder = !kHasModulation;
  static constexpr const char* kName = kHasGate         ? "add_ada_layer_norm_backward"
                                       : kHasModulation ? "ada_layer_norm_backward"
                                                        : "layer_norm_backward";
  enum : size_t {
    kDy,
    kX,
    kInput = kX + kHasGate,
    kGate = kInput + kHasGate,
    kNormalizedNdim,
    kMean,
    kRstd,
    kShift = kRstd + kHasModulation,
    kScale = kShift + kHasModulation,
    kWeight,
    kBias,
    kDresidual,
    kActivation,  // where there is no modulation
    kOutputScale,
    kNeedsDx = kHasModulation ? kDresidual + 1 : kOutputScale + 1,
    kNeedsDinput = kNeedsDx + kHasGate,
    kNeedsDgate = kNeedsDinput + kHasGate,
    kNeedsDshift = kNeedsDgate + kHasModulation,
    kNeedsDscale = kNeedsDshift + kHasModulation,
    kNeedsDweight,
    kNeedsDbias,
    kStatistic,
    kWeightOffset,
    kKeepsOrder,  // where there is no modulation
    kArguments = kKeepsOrder + kMayKeepOrder
  };
};

struct GroupForward {
  static std::string name(bool gives_statistics) {
    return gives_statistics ? "group_norm_forward" : "group_norm";
  }
  static constexpr bool kIsForward = true;
  static constexpr bool kHasGroups = true;
  static constexpr bool kHasModulation = true;
  static constexpr bool kMayActivate = true;
  static constexpr bool kHasResidual = false;
  static constexpr bool kHasGate = false;
  enum : size_t {
    kInput,
    kResidual = kInput,
    kGate = kInput,
    kNumGroups,
    kShift,
    kScale,
    kWeight,
    kBias,
    kEps,
    kActivation,
    kOutputScale,
    kOutDtype,
    kArguments
  };
  static constexpr size_t kModulations[] = {kShift, kScale};
  static constexpr size_t kFirstParameter = kShift;
  static constexpr size_t kParameters = kEps - kShift;
  static constexpr size_t kOutputs = 1;
  static constexpr size_t kStatistics = 2;
};

struct GroupBackward {
  static constexpr bool kIsForward = false;
  static constexpr bool kHasGroups = true;
  static constexpr bool kHasModulation = true;
  static constexpr bool kMayActivate = true;
  static constexpr bool kHasGate = false;
  static constexpr const char* kName = "group_norm_backward";
  enum : size_t {
    kDy,
    kX,
    kNumGroups,
    kMean,
    kRstd,
    kShift,
    kScale,
    kWeight,
    kBias,
    kActivation,
    kOutputScale,
    kNeedsDx,
    kNeedsDshift,
    kNeedsDscale,
    kNeedsDweight,
    kNeedsDbias,
    kArguments
  };
};

struct GatedForward {
  static std::string name(bool gives_statistics) {
    return gives_statistics ? "rms_norm_gated_forward" : "rms_norm_gated";
  }
  static constexpr bool kIsForward = true;
  static constexpr bool kHasGroups = false;
  static constexpr bool kHasModulation = false;
  static constexpr bool kHasResidual = false;
  static constexpr bool kHasGate = true;
  enum : size_t {
    kInput,
    kResidual = kInput,
    kGate,
    kWeight,
    kShift = kWeight,
    kBias,
    kScale = kBias,
    kEps,
    kGateFirst,
    kGateActivation,
    kGroupSize,
    kOutDtype,
    kWeightOffset,
    kRoundBeforeWeight,
    kArguments
  };
  static constexpr size_t kOutputs = 1;
  static constexpr size_t kStatistics = 2;
};

struct GatedBackward {
  static constexpr bool kIsForward = false;
  static constexpr const char* kName = "rms_norm_gated_backward";
  enum : size_t {
    kDy,
    kX,
    kGate,
    kRstd,
    kWeight,
    kBias,
    kGateFirst,
    kGateActivation,
    kGroupSize,
    kWeightOffset,
    kNeedsDx,
    kNeedsDgate,
    kNeedsDweight,
    kNeedsDbias,
    kArguments
  };
};

// The activations as users write them, in the order of the enumeration; the last one belongs to
// groups.
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

// Whether an operator is a gated norm.
template <class Op, class = void>
constexpr bool kIsGated = false;
template <class Op>
constexpr bool kIsGated<Op, std::void_t<decltype(Op::kGateActivation)>> = true;

// The options of a call. `Stack` gives the argument of a position: an integer, a real number, a
// flag, a name, or a name that may be None (an optional string or a pointer). It is told of an
// unknown one.
template <class Op, class Stack>
std::enable_if_t<!kIsGated<Op>, NormOptions> read_options(Stack&& stack) {
  NormOptions options;
  const auto refuse = [&](const char* choices, const std::string& name) {
    options.has_unknown_name = true;
    stack.refuse(choices, name);
  };
  if constexpr (Op::kHasGroups) {
    options.num_groups = stack.integer(Op::kNumGroups);
    options.keeps_order = true;
  } else {
    options.normalized_ndim = stack.integer(Op::kNormalizedNdim);
  }
  if constexpr (Op::kMayActivate) {
    if (const auto name = stack.name_if_any(Op::kActivation)) {
      options.activation = activation_of(*name);
      if (options.activation == Activation::kNone ||
          (!Op::kHasGroups && options.activation == kLeakyRelu)) {
        refuse(Op::kHasGroups ? kGroupActivationChoices : kActivationChoices, *name);
      }
    }
    options.output_scale = stack.real(Op::kOutputScale);
  }
  if constexpr (Op::kIsForward) options.eps = stack.real(Op::kEps);
  if constexpr (!Op::kHasGroups) {
    const std::string& statistic = stack.name(Op::kStatistic);
    options.is_rms = statistic == "rms";
    if (!options.is_rms && statistic != "layer") refuse(kStatisticChoices, statistic);
    options.weight_offset = stack.real(Op::kWeightOffset);
    if constexpr (Op::kMayKeepOrder) options.keeps_order = stack.flag(Op::kKeepsOrder);
    if constexpr (Op::kIsForward) {
      options.round_before_weight = stack.flag(Op::kRoundBeforeWeight);
    }
  }
  return options;
}

template <class Op, class Stack>
std::enable_if_t<kIsGated<Op>, NormOptions> read_options(Stack&& stack) {
  NormOptions options;
  options.is_rms = true;
  if constexpr (Op::kIsForward) options.eps = stack.real(Op::kEps);
  options.gate_place = stack.flag(Op::kGateFirst) ? GatePlace::kFirst : GatePlace::kLast;
  const std::string& activation = stack.name(Op::kGateActivation);
  options.activation = activation == "silu" ? Activation::kSilu : kSigmoid;
  if (activation != "silu" && activation != "sigmoid") {
    options.has_unknown_name = true;
    stack.refuse(kGateActivationChoices, activation);
  }
  options.group_size = stack.integer(Op::kGroupSize);
  options.weight_offset = stack.real(Op::kWeightOffset);
  if constexpr (Op::kIsForward) options.round_before_weight = stack.flag(Op::kRoundBeforeWeight);
  return options;
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// What every launch needs; launches.h has the contract.
#include "bindings/cuda/launches.h"

namespace fused_layernorm {
namespace {

bool any(const Modulation& m) { return m.shift || m.scale || m.gate; }

template <typename Params>
Problem problem_of(const Params& params, const DataTypes& types, bool aligned) {
  Problem problem;
  problem.rows = params.rows;
  problem.cols = params.cols;
  problem.x = types.x;
  problem.weight = types.weight;
  problem.y = types.y;
  problem.aligned = aligned;
  return problem;
}

// Whether every row of x and of y, which has an allocation of its own, begins at a multiple of half
// a vector.
bool begin_at_halves(const ForwardParams& p, const DataTypes& types) {
  constexpr int kHalf = kVectorBytes / 2;
  const int64_t x = size_of(types.x), y = size_of(types.y);
  return reinterpret_cast<uintptr_t>(p.input) % kHalf == 0 &&
         p.input_rows.stride * x % kHalf == 0 && p.input_rows.jump * x % kHalf == 0 &&
         p.cols * y % kHalf == 0;
}

template <typename Params>
void complete_common(Params& params, const Computation& computation, bool has_epilogue) {
  params.is_rms = computation.is_rms;
  params.inverse_cols = Scalar(1.0 / static_cast<double>(params.cols));
  params.scale = Scalar(computation.scale);
  params.has_epilogue = has_epilogue;
  params.activates = computation.activates();
  params.activation = computation.activation;
  if (computation.weight_offset != 0.0) params.weight_offset = Scalar(computation.weight_offset);
}

template <typename Plan, typename Make>
Planned<Plan> planned_by(const Make& make, const Problem& problem, int device_index) {
  const Device& device = device_of(device_index);
  Planned<Plan> planned{make(problem, device), std::nullopt};
  const bool meets =
      std::visit([](const auto& strategy) { return strategy.meets(); }, planned.plan);
  if (meets && forced_now().words.empty()) {
    Device apart = device;
    apart.blocks_meet = false;
    planned.apart = make(problem, apart);
  }
  return planned;
}

}  // namespace

Planned<forward::Plan> plan_forward(const Problem& problem, int device_index) {
  return planned_by<forward::Plan>(make_forward_plan, problem, device_index);
}
Planned<backward::Plan> plan_backward(const Problem& problem, int device_index) {
  return planned_by<backward::Plan>(make_backward_plan, problem, device_index);
}

ForwardTypes settle_types(ScalarType input, std::optional<ScalarType> residual,
                          std::optional<ScalarType> parameters, ScalarType y, bool rounds_xhat) {
  const ScalarType x = residual.value_or(input);
  ForwardTypes types{KernelTypes(x, parameters, y), y, ScalarType::Float, input};
  types.statistics = types.kernel.statistics();
  if (!residual) return types;

  // The type of the input that the kernel adds to the residual (Types::In in norm/types.cuh).
  const ScalarType in = x == ScalarType::Float ? types.kernel.y : x;
  if (in == input) return types;
  if (in == ScalarType::Float && is_half(input)) {
    types.summand = in;  // exact: a half and a float32 are added in float32
  } else if (x == ScalarType::Float && input == ScalarType::Float) {
    types.kernel.y = ScalarType::Float;
  } else {
    // The sum is taken first and rounded to the residual's type. If input or residual is float64,
    // both the sum and the norm are computed in float64.
    const bool wide = x == ScalarType::Double || input == ScalarType::Double;
    types.summand = wide ? ScalarType::Double : ScalarType::Float;
    if (parameters) parameters = types.summand;
    // Kernels of half-precision x round xhat to no other type than x's.
    const bool widens = rounds_xhat && is_half(x);
    types.kernel = KernelTypes(wide || widens ? types.summand : x, parameters, y);
    types.adds_first = true;
  }
  return types;
}

XhatRounding xhat_rounding_of(bool round_before_weight, bool has_weight, ScalarType input) {
  if (!round_before_weight || !has_weight) return XhatRounding::kNone;
  return input == ScalarType::Half       ? XhatRounding::kFloat16
         : input == ScalarType::BFloat16 ? XhatRounding::kBFloat16
                                         : XhatRounding::kNone;
}

Problem complete(ForwardParams& params, const DataTypes& types, const Computation& computation,
                 bool aligned) {
  Problem problem = problem_of(params, types, aligned);
  problem.halves = !aligned && begin_at_halves(params, types);
  problem.residual = params.residual != nullptr;
  problem.modulated = any(params.modulation);
  params.is_modulated = problem.modulated;
  params.plain_weight =
      computation.weight_offset == 0.0 && computation.xhat_rounding == XhatRounding::kNone;
  problem.has_epilogue = computation.activates() || !params.plain_weight;
  params.eps = Scalar(computation.eps);
  complete_common(params, computation, problem.has_epilogue);
  params.xhat_rounding = computation.xhat_rounding;
  return problem;
}

Problem complete(BackwardParams& params, const DataTypes& types, const Computation& computation,
                 bool aligned, bool needs_column_grads, bool needs_modulation_grads) {
  Problem problem = problem_of(params, types, aligned);
  problem.residual = params.dresidual != nullptr;
  problem.gated = params.input != nullptr;
  problem.modulated = any(params.modulation) || problem.gated;
  params.is_modulated = problem.modulated;
  problem.group_rows = params.group_rows;
  problem.needs_column_grads = needs_column_grads;
  problem.needs_dparams = needs_column_grads || needs_modulation_grads || problem.gated;
  problem.has_epilogue =
      computation.activates() || (computation.weight_offset != 0.0 && !problem.modulated);
  complete_common(params, computation, problem.has_epilogue);
  return problem;
}

// Each passes a plan to the launch function of its strategy.
cudaError_t launch_layer_norm_forward(const ForwardParams& params, const DataTypes& types,
                                      const forward::Plan& plan, cudaStream_t stream) {
  return std::visit(
      [&](const auto& strategy) {
        return launch_layer_norm_forward(params, types, strategy, stream);
      },
      plan);
}

cudaError_t launch_layer_norm_backward(const BackwardParams& params, const DataTypes& types,
                                       const backward::Plan& plan, cudaStream_t stream) {
  return std::visit(
      [&](const auto& strategy) {
        return launch_layer_norm_backward(params, types, strategy, stream);
      },
      plan);
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// Forward on CUDA: settle the types, check, allocate, plan, launch. Tensors stop here.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "bindings/cuda/checks.h"
#include "bindings/cuda/ops.h"

namespace fused_layernorm {
namespace {

// The types of a forward pass: those that its kernel is launched with, and those of its results.
struct ForwardTypes {
  KernelTypes kernel;
  ScalarType y;           // of the result
  ScalarType statistics;  // of the result
  // With a residual: the type to which input is cast for a kernel that adds the two. If there is no
  // such kernel (adds_first), the type in which the sum is taken before the launch.
  ScalarType summand;
  bool adds_first = false;
};

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

// Parameters have to be of x's type, or float32 beside half precision. With a residual they may
// also be of the input's type.
void check_parameters_type(std::optional<ScalarType> parameters, ScalarType x, ScalarType input,
                           const char* name) {
  const bool fits = !parameters || *parameters == x || *parameters == input ||
                    (*parameters == ScalarType::Float && (is_half(x) || is_half(input)));
  CHECK_ARGUMENT(fits, name,
                 " must be of the input's dtype, or float32 beside half precision input");
}

ForwardTypes check(const ForwardArguments& a, const Shape& shape) {
  check_shape(a.weight, "weight", a.input, shape.leading);
  check_shape(a.bias, "bias", a.input, shape.leading);
  check_shape(a.residual, "residual", a.input, 0);
  CHECK_ARGUMENT(std::isfinite(a.scale), "scale must be a finite number");
  CHECK_ARGUMENT(!std::isnan(a.eps), "eps must be a number");
  const ScalarType input = a.input.scalar_type();
  const auto residual =
      a.residual ? std::optional<ScalarType>(a.residual->scalar_type()) : std::nullopt;
  const ScalarType y = a.out_dtype.value_or(input);
  for (const ScalarType each : {input, residual.value_or(input), y}) data_type(each);
  const auto affine = type_of_parameters(a.weight, a.bias);
  const auto& m = a.modulation;
  const std::pair<const std::optional<Tensor>&, const char*> modulations[] = {
      {m.shift, "shift"}, {m.scale, "scale"}, {m.gate, "gate"}};
  check_parameters_type(affine, residual.value_or(input), input, "weight and bias");
  for (const auto& [modulation, name] : modulations) {
    check_broadcast(modulation, name, a.input);
    check_parameters_type(type_of(modulation), residual.value_or(input), input, name);
  }
  CHECK_ARGUMENT(a.weight || a.kind.weight_offset == 0.0,
                 "weight_offset is there without a weight");
  const auto parameters =
      common_type({affine, type_of(m.shift), type_of(m.scale), type_of(m.gate)});
  return settle_types(input, residual, parameters, y, a.xhat_rounding() != XhatRounding::kNone);
}

// A new tensor for mean or rstd. No kernel runs for rows without columns, so `of_no_columns` is
// their statistic.
Tensor new_statistic(const Tensor& x, const Shape& shape, ScalarType type, double of_no_columns) {
  std::vector<int64_t> sizes(x.sizes().data(), x.sizes().data() + x.dim());
  std::fill(sizes.begin() + shape.leading, sizes.end(), 1);
  Tensor statistic = empty(x, sizes.data(), x.dim(), type);
  if (shape.cols == 0) torch::stable::fill_(statistic, of_no_columns);
  return statistic;
}

Tensor add(const Tensor& input, const std::optional<Tensor>& gate, const Tensor& residual,
           ScalarType type) {
  Tensor summand = cast(input, type);
  if (gate) summand = product(summand, cast(*gate, type));
  const Tensor sum = torch::stable::subtract(summand, cast(residual, type), -1.0);
  return contiguous_of(cast(sum, residual.scalar_type()));
}

// Launches the kernel on the rows of `input`, to which it adds those of `residual`, if given.
void launch(const Tensor& input, const std::optional<Tensor>& residual, const ForwardArguments& a,
            const Shape& shape, const KernelTypes& types, Activation activation,
            ForwardResult& result) {
  const bool plain_weight = a.has_plain_weight();
  const Rows rows(input, shape.leading);
  std::optional<Rows> residual_rows;
  if (residual) residual_rows.emplace(*residual, shape.leading);
  const auto weight = prepare_parameter(a.weight, types.weight);
  const auto bias = prepare_parameter(a.bias, types.weight);
  const auto rows_of = [&](const std::optional<Tensor>& modulation) {
    return ModulationRows(modulation, types.weight, input, shape.leading);
  };
  const ModulationRows shift = rows_of(a.modulation.shift), scale = rows_of(a.modulation.scale);
  // If the sum was taken before the launch, the gate was applied with it.
  const ModulationRows gate = rows_of(residual ? a.modulation.gate : std::nullopt);

  const DataTypes data_types = types.data_types();
  Problem problem;
  problem.rows = shape.rows;
  problem.cols = shape.cols;
  problem.x = data_types.x;
  problem.weight = data_types.weight;
  problem.y = data_types.y;
  problem.residual = residual.has_value();
  const bool activates = activation != Activation::kNone || a.scale != 1.0;
  problem.modulated = shift.tensor || scale.tensor || gate.tensor;
  problem.has_epilogue = activates || !plain_weight;
  problem.aligned =
      rows.aligned() && (!residual_rows || residual_rows->aligned()) && types.aligned(shape.cols);
  const forward::Plan plan = make_forward_plan(problem, device_of(input));
  const Workspace workspace(input, launch_of(plan).workspace_bytes);

  ForwardParams params;
  params.input = rows.data();
  params.input_rows = rows.map;
  if (residual) {
    params.residual = residual_rows->data();
    params.residual_rows = residual_rows->map;
    params.residual_out = result.residual_out->mutable_data_ptr();
  }
  params.weight = data_of(weight);
  params.bias = data_of(bias);
  params.y = result.y.mutable_data_ptr();
  if (a.needs_statistics) {
    params.mean = a.kind.is_rms ? nullptr : result.mean->mutable_data_ptr();
    params.rstd = result.rstd->mutable_data_ptr();
  }
  params.rows = shape.rows;
  params.cols = static_cast<int32_t>(shape.cols);
  params.stays_in_l2 = stays_in_l2(problem);
  params.is_rms = a.kind.is_rms;
  params.inverse_cols = Scalar(1.0 / static_cast<double>(shape.cols));
  params.eps = Scalar(a.eps);
  params.scale = Scalar(a.scale);
  params.has_epilogue = problem.has_epilogue;
  params.activates = activates;
  params.activation = activation;
  if (!plain_weight) {
    params.plain_weight = false;
    params.weight_offset = Scalar(a.kind.weight_offset);
    params.xhat_rounding = a.xhat_rounding();
  }
  params.workspace = workspace.data();
  params.is_modulated = problem.modulated;
  params.modulation = {shift.data(), scale.data(), gate.data(), shift.map, scale.map, gate.map};
  check_launch(launch_layer_norm_forward(params, data_types, plan, current_stream(input)),
               "forward", shape.rows, shape.cols, data_types, plan);
}

// A modulated norm that rounds xhat, which no kernel does: the norm's kernel gives y in float32,
// and PyTorch's operators take the gated sum and the modulation.
ForwardResult run_rounding(const ForwardArguments& a) {
  ForwardResult result;
  Tensor x = a.input;
  if (a.residual) {
    x = add(a.input, a.modulation.gate, *a.residual, ScalarType::Float);
    result.residual_out = x;
  }
  CHECK_ARGUMENT(x.scalar_type() == a.input.scalar_type(),
                 "round_before_weight beside a gate needs a residual of input's dtype");
  const std::optional<Tensor> none_beside;
  ForwardResult norm =
      run_forward({x, none_beside, a.normalized_ndim, a.weight, a.bias, a.eps, a.activation,
                   a.scale, ScalarType::Float, a.needs_statistics, a.kind});
  const auto plus = [](const Tensor& sum, const Tensor& more) {
    return torch::stable::subtract(sum, more, -1.0);
  };
  const auto& [shift, scale, gate] = a.modulation;
  Tensor y = norm.y;
  if (scale) y = plus(y, product(y, cast(*scale, ScalarType::Float)));
  if (shift) y = plus(y, cast(*shift, ScalarType::Float));
  result.y = contiguous_of(cast(y, a.out_dtype.value_or(a.input.scalar_type())));
  result.mean = norm.mean;
  result.rstd = norm.rstd;
  return result;
}

// A modulated norm whose weight has an offset. Few models have one, and the kernels of a modulation
// take weight as it is: the sum is made before the launch, in the arithmetic's type.
ForwardResult run_with_offset(const ForwardArguments& a) {
  const bool wide = a.weight->scalar_type() == ScalarType::Double;
  const ScalarType type = wide ? ScalarType::Double : ScalarType::Float;
  Tensor offset = empty_like(*a.weight, type);
  torch::stable::fill_(offset, a.kind.weight_offset);
  const std::optional<Tensor> weight = torch::stable::subtract(cast(*a.weight, type), offset, -1.0);
  const std::optional<Tensor> bias = a.bias ? std::optional(cast(*a.bias, type)) : std::nullopt;
  NormKind kind;
  kind.is_rms = a.kind.is_rms;
  return run_forward({a.input, a.residual, a.normalized_ndim, weight, bias, a.eps, a.activation,
                      a.scale, a.out_dtype, a.needs_statistics, kind, a.modulation});
}

}  // namespace

ForwardResult run_forward(const ForwardArguments& a) {
  const Shape shape(a.input, a.normalized_ndim);
  const ForwardTypes types = check(a, shape);
  if (a.modulation.any() && !a.has_plain_weight()) {
    return a.xhat_rounding() == XhatRounding::kNone ? run_with_offset(a) : run_rounding(a);
  }
  const Activation activation = activation_of(a.activation);
  const CurrentDevice guard(a.input);

  ForwardResult result{empty_like(a.input, types.kernel.y), std::nullopt, std::nullopt,
                       std::nullopt};
  if (a.needs_statistics) {
    // PyTorch's kernels give these for rows without columns.
    constexpr double kNoMean = 0.0, kNoRstd = std::numeric_limits<double>::quiet_NaN();
    result.mean = a.kind.is_rms ? none(a.input, types.kernel.statistics())
                                : new_statistic(a.input, shape, types.kernel.statistics(), kNoMean);
    result.rstd = new_statistic(a.input, shape, types.kernel.statistics(), kNoRstd);
  }
  if (types.adds_first) {
    result.residual_out = add(a.input, a.modulation.gate, *a.residual, types.summand);
  } else if (a.residual) {
    result.residual_out = empty_like(a.input, types.kernel.x);
  }
  if (!shape.empty()) {
    if (types.adds_first) {
      launch(cast(*result.residual_out, types.kernel.x), std::nullopt, a, shape, types.kernel,
             activation, result);
    } else {
      launch(cast(a.input, types.summand), a.residual, a, shape, types.kernel, activation, result);
    }
  }
  result.y = cast(result.y, types.y);
  if (a.needs_statistics) {
    result.mean = cast(*result.mean, types.statistics);
    result.rstd = cast(*result.rstd, types.statistics);
  }
  return result;
}

}  // namespace fused_layernorm

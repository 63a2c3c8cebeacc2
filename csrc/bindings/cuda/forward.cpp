// SPDX-License-Identifier: Apache-2.0
// Forward on CUDA: settle the types, check, allocate, plan, launch. Tensors stop here.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "bindings/cuda/checks.h"
#include "bindings/cuda/launches.h"
#include "bindings/cuda/ops.h"
#include "forward/channels.h"

namespace fused_layernorm {
namespace {

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

// A new tensor for y.
Tensor new_y(const ForwardArguments& a, ScalarType type) {
  return a.keeps_order ? empty_in_order(a.input, type) : empty_like(a.input, type);
}

// The plan of a launch that reads the channels of planes where they lie, if there is one.
std::optional<forward::Channels> channels_plan(const Problem& problem, const Planes& planes,
                                               const Tensor& input, const Tensor& y,
                                               int64_t leading) {
  const bool channels_last = y.is_contiguous();
  if (!channels_last && !has_dense_planes(y, planes, leading)) return std::nullopt;
  return make_channels_plan(problem, planes, unit_of(input, planes),
                            is_run(input, planes, problem.cols), channels_last,
                            device_of(input.get_device_index()));
}

// Launches the kernel on the rows of `input`, to which it adds those of `residual`, if given.
void launch(const Tensor& input, const std::optional<Tensor>& residual, const ForwardArguments& a,
            const Shape& shape, const KernelTypes& types, Activation activation,
            ForwardResult& result) {
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
  ForwardParams params;
  if (residual) {
    params.residual = residual_rows->data();
    params.residual_rows = residual_rows->map;
    params.residual_out = result.residual_out->mutable_data_ptr();
  }
  params.weight = data_of(weight);
  params.bias = data_of(bias);
  if (a.needs_statistics) {
    params.mean = a.kind.is_rms ? nullptr : result.mean->mutable_data_ptr();
    params.rstd = result.rstd->mutable_data_ptr();
  }
  params.rows = shape.rows;
  params.cols = static_cast<int32_t>(shape.cols);
  params.modulation = {shift.data(), scale.data(), gate.data(), shift.map, scale.map, gate.map};
  const Computation computation = {activation,           a.scale, a.kind.is_rms,
                                   a.kind.weight_offset, a.eps,   a.xhat_rounding()};
  const int device_index = input.get_device_index();
  const cudaStream_t stream = current_stream(device_index);
  params.input = input.const_data_ptr();
  params.y = result.y.mutable_data_ptr();
  if (const auto planes = planes_of(input, shape.leading)) {
    const Problem as_they_lie = complete(params, data_types, computation, false);
    if (const auto plan = channels_plan(as_they_lie, *planes, input, result.y, shape.leading)) {
      check_launch(launch_layer_norm_forward(params, data_types, *plan, stream), "forward",
                   shape.rows, shape.cols, data_types, *plan);
      return;
    }
  }

  const Rows rows(input, shape.leading);
  const bool contiguous = result.y.is_contiguous();
  Tensor y = contiguous ? result.y : empty_like(result.y, types.y);
  params.input = rows.data();
  params.input_rows = rows.map;
  params.y = y.mutable_data_ptr();
  const bool aligned =
      rows.aligned() && (!residual_rows || residual_rows->aligned()) && types.aligned(shape.cols);
  const Problem problem = complete(params, data_types, computation, aligned);
  const auto planned = plan_forward(problem, device_index);
  const Workspace workspace(input, planned.workspace_bytes());
  params.workspace = workspace.data();
  params.stays_in_l2 = stays_in_l2(planned.plan);
  fused_layernorm::launch(params, data_types, planned, stream);
  if (!contiguous) torch::stable::copy_(result.y, y);
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

  ForwardResult result{new_y(a, types.kernel.y), std::nullopt, std::nullopt, std::nullopt};
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
  if (types.y != types.kernel.y) {
    Tensor y = new_y(a, types.y);
    torch::stable::copy_(y, result.y);
    result.y = y;
  }
  if (a.needs_statistics) {
    result.mean = cast(*result.mean, types.statistics);
    result.rstd = cast(*result.rstd, types.statistics);
  }
  return result;
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// Backward on CUDA: check, settle the types, allocate, plan, launch. Tensors stop here.
#include <torch/csrc/stable/ops.h>

#include "backward/channels.h"
#include "bindings/cuda/checks.h"
#include "bindings/cuda/launches.h"
#include "bindings/cuda/ops.h"

namespace fused_layernorm {
namespace {

void check(const BackwardArguments& a, const Shape& shape, const KernelTypes& types) {
  check_shape(a.weight, "weight", a.x, shape.leading);
  check_shape(a.bias, "bias", a.x, shape.leading);
  check_shape(a.dy, "dy", a.x, 0);
  check_shape(a.dresidual, "dresidual", a.x, 0);
  check_broadcast(a.modulation.shift, "shift", a.x);
  check_broadcast(a.modulation.scale, "scale", a.x);
  CHECK_ARGUMENT((a.modulation.shift || !a.needs_dshift) && (a.modulation.scale || !a.needs_dscale),
                 "a gradient is asked for of a shift or scale that is not there");
  CHECK_ARGUMENT(!a.dresidual || a.dresidual->scalar_type() == a.x.scalar_type(),
                 "dresidual must be of x's dtype");
  CHECK_ARGUMENT(!a.kind.is_rms || a.mean.numel() == 0, "RMSNorm has no mean");
  for (const Tensor* each : {&a.mean, &a.rstd}) {
    if (a.kind.is_rms && each == &a.mean) continue;
    CHECK_ARGUMENT(each->numel() == shape.rows && each->scalar_type() == types.statistics() &&
                       is_beside(*each, a.x),
                   "mean and rstd must be those of the forward pass");
  }
}

// The tensors of a launch as kernels read them, the parameters but for the outputs, and the problem
// to plan. `gated_input` is the input of a gated sum, if there is a gate. With `as_they_lie` x
// and dy are not mapped as rows.
struct Operands {
  Rows x, dy, dresidual, input;
  std::optional<Tensor> weight, bias;
  ModulationRows shift, scale, gate;
  Tensor mean, rstd;
  BackwardParams params;
  Problem problem;

  Operands(const BackwardArguments& a, const Shape& shape, const KernelTypes& types,
           Activation activation, const Groups& groups, const std::optional<Tensor>& gated_input,
           bool as_they_lie = false)
      : x(as_they_lie ? Rows(a.x) : Rows(a.x, shape.leading)),
        dy(as_they_lie ? Rows(cast(a.dy, types.y)) : Rows(cast(a.dy, types.y), shape.leading)),
        dresidual(a.dresidual, shape.leading),
        input(gated_input, shape.leading),
        weight(prepare_parameter(a.weight, types.weight)),
        bias(prepare_parameter(a.bias, types.weight)),
        shift(a.modulation.shift, types.weight, a.x, shape.leading),
        scale(a.modulation.scale, types.weight, a.x, shape.leading),
        gate(gated_input ? a.modulation.gate : std::nullopt, types.weight, a.x, shape.leading),
        mean(contiguous_of(a.mean)),
        rstd(contiguous_of(a.rstd)) {
    params.dy = dy.data();
    params.dy_rows = dy.map;
    params.x = x.data();
    params.x_rows = x.map;
    params.mean = a.kind.is_rms ? nullptr : mean.const_data_ptr();
    params.rstd = rstd.const_data_ptr();
    params.weight = data_of(weight);
    params.bias = data_of(bias);
    params.dresidual = dresidual.data();
    params.dresidual_rows = dresidual.map;
    params.input = input.data();
    params.input_rows = input.map;
    params.rows = shape.rows;
    params.cols = static_cast<int32_t>(shape.cols);
    params.modulation = {shift.data(), scale.data(), gate.data(), shift.map, scale.map, gate.map};
    params.group_rows = groups.rows;
    const bool aligned = x.aligned() && dy.aligned() && dresidual.aligned() && input.aligned() &&
                         types.aligned(shape.cols);
    problem = complete(params, types.data_types(),
                       {activation, a.scale, a.kind.is_rms, a.kind.weight_offset}, aligned,
                       a.needs_dweight || a.needs_dbias, a.needs_dshift || a.needs_dscale);
  }
};

// The outputs of a launch. Those that are not needed are empty.
struct Outputs {
  Tensor dx, dweight, dbias;
  GroupGradient dshift, dscale;

  Outputs(const BackwardArguments& a, const Shape& shape, const KernelTypes& types,
          const Groups& groups, ScalarType dparameter_type)
      : dx(!a.needs_dx     ? none(a.x, types.x)
           : a.keeps_order ? empty_in_order(a.x, types.x)
                           : empty_like(a.x, types.x)),
        dweight(dparameter(a.needs_dweight, a, shape, types, dparameter_type)),
        dbias(dparameter(a.needs_dbias, a, shape, types, dparameter_type)),
        dshift(a.needs_dshift, a.modulation.shift, groups, types.weight, types.statistics(), a.x),
        dscale(a.needs_dscale, a.modulation.scale, groups, types.weight, types.statistics(), a.x) {}

  BackwardResult result(const BackwardArguments& a, ScalarType dparameter_type) const {
    return {dx, cast(dweight, dparameter_type), cast(dbias, dparameter_type),
            dshift.result(a.modulation.shift, a.x), dscale.result(a.modulation.scale, a.x)};
  }

 private:
  static Tensor dparameter(bool needed, const BackwardArguments& a, const Shape& shape,
                           const KernelTypes& types, ScalarType dparameter_type) {
    return needed ? empty(a.x, a.x.sizes().data() + shape.leading, a.normalized_ndim, types.weight)
                  : none(a.x, dparameter_type);
  }
};

BackwardParams params_of(const BackwardArguments& a, const Operands& operands, const Outputs& out) {
  BackwardParams params = operands.params;
  params.dx = a.needs_dx ? out.dx.mutable_data_ptr() : nullptr;
  params.dweight = a.needs_dweight ? out.dweight.mutable_data_ptr() : nullptr;
  params.dbias = a.needs_dbias ? out.dbias.mutable_data_ptr() : nullptr;
  params.dshift = out.dshift.data();
  params.dscale = out.dscale.data();
  params.dshift_is_wide = out.dshift.is_wide;
  params.dscale_is_wide = out.dscale.is_wide;
  return params;
}

// Launches the plan that reads the channels of planes where they lie; false if there is none.
bool launch_channels(const BackwardArguments& a, const Shape& shape, const KernelTypes& types,
                     Activation activation, const Groups& groups, const Outputs& out) {
  const auto planes = planes_of(a.x, shape.leading);
  if (!planes || a.dresidual || a.modulation.any()) return false;
  const bool dx_channels_last = !a.needs_dx || out.dx.is_contiguous();
  if (!dx_channels_last && !has_dense_planes(out.dx, *planes, shape.leading)) return false;
  Operands operands(a, shape, types, activation, groups, std::nullopt, true);
  auto dy_planes = planes_of(*operands.dy.tensor, shape.leading);
  if (!dy_planes || dy_planes->samples != planes->samples || dy_planes->pixels != planes->pixels) {
    dy_planes.reset();
    operands.dy.tensor = aligned_of(*operands.dy.tensor);
    operands.params.dy = operands.dy.data();
  }
  int64_t unit = unit_of(a.x, *planes);
  bool run = is_run(a.x, *planes, shape.cols);
  if (dy_planes) {
    const Tensor& dy = *operands.dy.tensor;
    const int64_t of_dy = unit_of(dy, *dy_planes);
    // Whole vectors of dy, which has fewer elements in one if its type is wider, suffice.
    if (of_dy * static_cast<int64_t>(dy.element_size()) < kVectorBytes) {
      unit = std::min(unit, of_dy);
    }
    run = run && is_run(dy, *dy_planes, shape.cols);
  }
  const auto plan = make_channels_plan(operands.problem, *planes, dy_planes, unit, run,
                                       dx_channels_last, device_of(a.x.get_device_index()));
  if (!plan) return false;
  launch(params_of(a, operands, out), types.data_types(), *plan, a.x);
  return true;
}

void launch_norm(const BackwardArguments& a, const Shape& shape, const KernelTypes& types,
                 Activation activation, const Groups& groups, const Outputs& out) {
  if (launch_channels(a, shape, types, activation, groups, out)) return;
  const Operands operands(a, shape, types, activation, groups, std::nullopt);
  BackwardParams params = params_of(a, operands, out);
  const bool contiguous = out.dx.is_contiguous();
  Tensor dx = contiguous ? out.dx : empty_like(out.dx, types.x);
  if (!contiguous) params.dx = dx.mutable_data_ptr();
  launch(params, types.data_types(), plan_backward(operands.problem, a.x.get_device_index()), a.x);
  if (!contiguous) {
    Tensor ordered = out.dx;
    torch::stable::copy_(ordered, dx);
  }
}

// If each row has a modulation of its own, the modulated kernels take no sums over rows. dweight
// and dbias then come from a second launch (add_columns): they are those of a norm without a
// modulation, for dy * (1 + scale).
bool has_columns_apart(const BackwardArguments& a, const Groups& groups) {
  return groups.rows == 1 && (a.needs_dweight || a.needs_dbias);
}
BackwardArguments without_columns(const BackwardArguments& a) {
  BackwardArguments rest = a;
  rest.needs_dweight = rest.needs_dbias = false;
  return rest;
}
void add_columns(BackwardResult& result, const BackwardArguments& a) {
  const ScalarType wide =
      a.x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  const Tensor dy = scaled(a.dy, a.modulation.scale, wide);
  const BackwardResult columns =
      run_backward({dy, a.x, a.normalized_ndim, a.mean, a.rstd, a.weight, a.bias, std::nullopt,
                    std::nullopt, 1.0, false, a.needs_dweight, a.needs_dbias, a.kind});
  result.dweight = columns.dweight;
  result.dbias = columns.dbias;
}

}  // namespace

BackwardResult run_backward(const BackwardArguments& a) {
  const Shape shape(a.x, a.normalized_ndim);
  const auto parameters = type_of_parameters(a.weight, a.bias);
  const ScalarType dparameter_type = parameters.value_or(a.x.scalar_type());
  const CurrentDevice guard(a.x);
  const Groups groups({raw(a.modulation.shift), raw(a.modulation.scale)}, raw(a.x), shape.leading);
  if (a.modulation.any() && has_columns_apart(a, groups)) {
    BackwardResult result = run_backward(without_columns(a));
    add_columns(result, a);
    return result;
  }

  const auto all_parameters =
      common_type({parameters, type_of(a.modulation.shift), type_of(a.modulation.scale)});
  const KernelTypes types(a.x.scalar_type(), all_parameters, a.dy.scalar_type());
  check(a, shape, types);
  const Activation activation = activation_of(a.activation);

  Outputs out(a, shape, types, groups, dparameter_type);
  const bool needs_parameters =
      a.needs_dweight || a.needs_dbias || a.needs_dshift || a.needs_dscale;
  if (shape.empty()) {
    if (a.needs_dweight) torch::stable::zero_(out.dweight);
    if (a.needs_dbias) torch::stable::zero_(out.dbias);
    for (GroupGradient* gradient : {&out.dshift, &out.dscale}) {
      if (gradient->of_groups) torch::stable::zero_(*gradient->of_groups);
    }
  } else if (a.needs_dx || needs_parameters) {
    launch_norm(a, shape, types, activation, groups, out);
  }
  return out.result(a, dparameter_type);
}

GatedBackwardResult run_gated_backward(const BackwardArguments& a, const Tensor& input,
                                       bool needs_dinput, bool needs_dgate) {
  const Shape shape(a.x, a.normalized_ndim);
  const auto parameters = type_of_parameters(a.weight, a.bias);
  const auto& m = a.modulation;
  const KernelTypes types(
      a.x.scalar_type(),
      common_type({parameters, type_of(m.shift), type_of(m.scale), type_of(m.gate)}),
      a.dy.scalar_type());
  check(a, shape, types);
  check_shape(input, "input", a.x, 0);
  check_broadcast(m.gate, "gate", a.x);
  const CurrentDevice guard(a.x);

  const Groups groups({raw(m.shift), raw(m.scale), raw(m.gate)}, raw(a.x), shape.leading);
  if (!shape.empty() && input.scalar_type() == a.x.scalar_type()) {
    const Operands operands(a, shape, types, Activation::kNone, groups, input);
    if (const auto plan = make_gated_plan(operands.problem, device_of(a.x.get_device_index()))) {
      if (has_columns_apart(a, groups)) {
        GatedBackwardResult result =
            run_gated_backward(without_columns(a), input, needs_dinput, needs_dgate);
        add_columns(result.of_norm, a);
        return result;
      }
      const ScalarType dparameter_type = parameters.value_or(a.x.scalar_type());
      const Outputs out(a, shape, types, groups, dparameter_type);
      const GroupGradient dgate(needs_dgate, m.gate, groups, types.weight, types.statistics(), a.x);
      const Tensor dinput = needs_dinput ? empty_like(input, types.x) : none(input, types.x);
      BackwardParams params = params_of(a, operands, out);
      params.dinput = needs_dinput ? dinput.mutable_data_ptr() : nullptr;
      params.dgate = dgate.data();
      params.dgate_is_wide = dgate.is_wide;
      launch(params, types.data_types(), *plan, a.x);
      return {out.result(a, dparameter_type), dinput, dgate.result(m.gate, input)};
    }
  }
  BackwardArguments of_norm = a;
  of_norm.modulation.gate = std::nullopt;
  of_norm.needs_dx = true;
  BackwardResult result = run_backward(of_norm);
  const auto [dinput, dgate] =
      run_gate_backward(result.dx, input, *m.gate, needs_dinput, needs_dgate);
  if (!a.needs_dx) result.dx = none(a.x, a.x.scalar_type());
  return {result, dinput, dgate};
}

std::tuple<Tensor, Tensor> run_gate_backward(const Tensor& dsum, const Tensor& input,
                                             const Tensor& gate, bool needs_dinput,
                                             bool needs_dgate) {
  const Shape shape(input, 1);
  const std::optional<Tensor> given_gate(gate);
  check_shape(dsum, "dresidual_out", input, 0);
  check_broadcast(given_gate, "gate", input);
  // Kernels take dsum of input's type, or float32 dsum beside half-precision input. Other types are
  // converted: all to float64 if either is float64, else dsum to float32.
  const ScalarType in = input.scalar_type(), given = dsum.scalar_type();
  const bool wide = in == ScalarType::Double || given == ScalarType::Double;
  const ScalarType x = wide ? ScalarType::Double : given == in ? in : ScalarType::Float;
  const ScalarType summand = wide ? ScalarType::Double : in;
  const KernelTypes types(x, gate.scalar_type(), summand);
  const CurrentDevice guard(input);

  const Groups groups({raw(gate)}, raw(input), shape.leading);
  const GroupGradient dgate(needs_dgate, given_gate, groups, types.weight, types.statistics(),
                            input);
  Tensor dinput = needs_dinput ? empty_like(input, summand) : none(input, in);
  if (shape.empty()) {
    if (dgate.of_groups) {
      Tensor zeros = *dgate.of_groups;
      torch::stable::zero_(zeros);
    }
  } else if (needs_dinput || needs_dgate) {
    const Rows dsum_rows(cast(dsum, x), shape.leading);
    const Rows input_rows(cast(input, summand), shape.leading);
    const ModulationRows gate_rows(given_gate, types.weight, input, shape.leading);
    const DataTypes data_types = types.data_types();
    Problem problem;
    problem.rows = shape.rows;
    problem.cols = shape.cols;
    problem.x = data_types.x;
    problem.aligned = dsum_rows.aligned() && input_rows.aligned() && types.aligned(shape.cols);
    problem.needs_dparams = needs_dgate;
    problem.modulated = true;
    problem.group_rows = groups.rows;

    GateParams params;
    params.dsum = dsum_rows.data();
    params.input = input_rows.data();
    params.gate = gate_rows.data();
    params.dsum_rows = dsum_rows.map;
    params.input_rows = input_rows.map;
    params.gate_rows = gate_rows.map;
    params.dinput = needs_dinput ? dinput.mutable_data_ptr() : nullptr;
    params.dgate = dgate.data();
    params.dgate_is_wide = dgate.is_wide;
    params.rows = shape.rows;
    params.cols = static_cast<int32_t>(shape.cols);
    params.group_rows = groups.rows;
    launch(params, data_types, backward::Gate::make(problem, device_of(input.get_device_index())),
           input);
  }
  return {cast(dinput, in), dgate.result(given_gate, input)};
}

}  // namespace fused_layernorm

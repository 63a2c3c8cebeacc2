// SPDX-License-Identifier: Apache-2.0
// Backward on CUDA: checks and casts until the call is one that kernels take, then describes,
// prepares and launches it.
#include <torch/csrc/stable/ops.h>

#include "bindings/cuda/checks.h"
#include "bindings/cuda/formula.h"
#include "bindings/cuda/modulation.h"
#include "bindings/cuda/ops.h"
#include "call/types.h"

namespace fused_layernorm {
namespace {

void check(const BackwardArguments& a, const Shape& shape) {
  check_shape(a.weight, "weight", a.x, shape.leading);
  check_shape(a.bias, "bias", a.x, shape.leading);
  check_shape(a.dy, "dy", a.x, 0);
  check_shape(a.dresidual, "dresidual", a.x, 0);
  check_shape(a.input, "input", a.x, 0);
  check_broadcast(a.shift, "shift", a.x);
  check_broadcast(a.scale, "scale", a.x);
  check_broadcast(a.gate, "gate", a.x);
  check_numbers(a.options, a.weight.has_value());
  CHECK_ARGUMENT((a.shift || !a.needs.dshift) && (a.scale || !a.needs.dscale),
                 "a gradient is asked for of a shift or scale that is not there");
  CHECK_ARGUMENT(!a.dresidual || a.dresidual->scalar_type() == a.x.scalar_type(),
                 "dresidual must be of x's dtype");
  CHECK_ARGUMENT(!a.options.is_rms || a.mean->numel() == 0, "RMSNorm has no mean");
  CHECK_ARGUMENT((a.options.is_rms || is_statistic(*a.mean, a.x, shape.rows)) &&
                     is_statistic(a.rstd, a.x, shape.rows),
                 "mean and rstd must be those of the forward pass");
}

ScalarType dparameter_type(const BackwardArguments& a) {
  return type_of_parameters(a.weight, a.bias).value_or(a.x.scalar_type());
}

// The outputs of a call but for dx; those that are not needed are empty. The memory of the others
// is allocated by `allocate`.
struct Outputs {
  Tensor dweight, dbias;
  GroupGradient dshift, dscale, dgate;
  std::optional<Tensor> dinput;

  Outputs(const BackwardArguments& a, const Groups& groups)
      : dweight(none(a.x, dparameter_type(a))),
        dbias(none(a.x, dparameter_type(a))),
        dshift(a.needs.dshift, a.shift, groups, a.x),
        dscale(a.needs.dscale, a.scale, groups, a.x),
        dgate(a.needs.dgate, a.gate, groups, a.x) {
    if (a.input) dinput = none(a.x, a.x.scalar_type());
  }

  void allocate(const BackwardArguments& a, const Shape& shape, const DataTypes& types,
                BackwardCall& call) {
    const auto like_columns = [&](bool needed, Tensor& into) -> void* {
      if (!needed) return nullptr;
      into = empty(a.x, a.x.sizes().data() + shape.leading, a.options.normalized_ndim,
                   scalar_type(types.weight));
      return into.mutable_data_ptr();
    };
    const DataType wide = statistics_type(types.x);
    call.dweight = like_columns(a.needs.dweight, dweight);
    call.dbias = like_columns(a.needs.dbias, dbias);
    call.dshift = dshift.allocate(types.weight, wide);
    call.dscale = dscale.allocate(types.weight, wide);
    call.dgate = dgate.allocate(types.weight, wide);
    if (a.needs.dinput) {
      dinput = empty_like(a.x, a.x.scalar_type());
      call.dinput = dinput->mutable_data_ptr();
    }
  }

  void fill_with_zeros(const BackwardArguments& a) {
    if (a.needs.dweight) torch::stable::zero_(dweight);
    if (a.needs.dbias) torch::stable::zero_(dbias);
    for (GroupGradient* gradient : {&dshift, &dscale, &dgate}) gradient->fill_with_zeros();
  }

  BackwardResult result(const BackwardArguments& a, const Tensor& dx) const {
    const ScalarType type = dparameter_type(a);
    return {dx,
            dinput,
            a.input ? std::optional(dgate.result()) : std::nullopt,
            dshift.result(),
            dscale.result(),
            cast(dweight, type),
            cast(dbias, type)};
  }
};

BackwardCall describe(const BackwardArguments& a, const Tensor& dx, const Groups& groups,
                      const Outputs& out) {
  BackwardCall call;
  describe(a, call);
  call.needs = a.needs;
  call.dy = raw(a.dy);
  call.x = raw(a.x);
  call.dresidual = raw(a.dresidual);
  call.input = raw(a.input);
  if (!a.options.is_rms) call.mean = raw(a.mean);
  call.rstd = raw(a.rstd);
  call.group_rows = groups.rows;
  call.dx = raw(dx);
  call.dshift_is_wide = out.dshift.is_wide;
  call.dscale_is_wide = out.dscale.is_wide;
  call.dgate_is_wide = out.dgate.is_wide;
  return call;
}

// The arguments as kernels of these types read them, but for rows that are copied only if no kernel
// reads them where they lie.
BackwardArguments cast_to(const DataTypes& types, BackwardArguments a, const Shape& shape) {
  a.dy = cast(a.dy, scalar_type(types.y));
  a.mean = contiguous_of(*a.mean);
  a.rstd = contiguous_of(a.rstd);
  a.weight = prepare_parameter(a.weight, scalar_type(types.weight));
  a.bias = prepare_parameter(a.bias, scalar_type(types.weight));
  for (std::optional<Tensor>* modulation : {&a.shift, &a.scale, &a.gate}) {
    *modulation = prepare_modulation(*modulation, types.weight, a.x, shape.leading);
  }
  return a;
}

// Launches the kernels of a call, all of whose gradients fit into one launch but for sums of
// groups. False if there are none, which only a gated sum may lack: it then takes two launches.
bool launch_norm(const BackwardArguments& given, const Shape& shape, const DataTypes& types,
                 const Groups& groups, Tensor& dx, Outputs& out) {
  const Device device = device_of(given.x);
  const BackwardArguments as_they_lie = cast_to(types, given, shape);
  BackwardArguments a = as_they_lie;
  Tensor written = dx;
  BackwardCall call = describe(a, written, groups, out);
  PreparedBackward prepared;
  bool is_ready = prepare(call, device, prepared);
  if (!is_ready && !a.dresidual && !a.is_modulated() && channel_map_of(call.x, shape.leading)) {
    // Kernels of channels read dy as they read x, or contiguous and aligned.
    a.dy = aligned_of(a.dy);
    call = describe(a, written, groups, out);
    is_ready = prepare(call, device, prepared);
  }
  if (!is_ready) {
    a.dy = with_rows(as_they_lie.dy, shape.leading);
    a.x = with_rows(a.x, shape.leading);
    a.dresidual = with_rows(a.dresidual, shape.leading);
    a.input = with_rows(a.input, shape.leading);
    if (a.needs.dx && !dx.is_contiguous()) written = empty_like(dx, dx.scalar_type());
    call = describe(a, written, groups, out);
    is_ready = prepare(call, device, prepared);
  }
  if (!is_ready) return false;
  out.allocate(given, shape, types, call);
  call.dx.data = a.needs.dx ? written.mutable_data_ptr() : nullptr;
  const Workspace workspace(a.x, prepared.workspace_bytes());
  launch(prepared, call, workspace.data(), current_stream(a.x));
  if (written.get() != dx.get()) torch::stable::copy_(dx, written);
  return true;
}

// dweight and dbias by a launch of their own: they are those of a norm without a modulation, for
// dy * (1 + scale).
void add_columns(BackwardResult& result, const BackwardArguments& a) {
  BackwardArguments columns = a;
  const ScalarType wide =
      a.x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  columns.dy = scaled(a.dy, a.scale, wide);
  for (auto* each :
       {&columns.shift, &columns.scale, &columns.gate, &columns.input, &columns.dresidual}) {
    each->reset();
  }
  columns.needs = {};
  columns.needs.dweight = a.needs.dweight;
  columns.needs.dbias = a.needs.dbias;
  const BackwardResult found = run_backward(columns);
  result.dweight = found.dweight;
  result.dbias = found.dbias;
}

// A gated sum that takes two launches: of the norm, and of the sum.
BackwardResult run_gate_apart(const BackwardArguments& a) {
  BackwardArguments norm = a;
  norm.input.reset();
  norm.gate.reset();
  norm.needs.dx = true;
  norm.needs.dinput = norm.needs.dgate = false;
  BackwardResult result = run_backward(norm);
  const auto [dinput, dgate] =
      run_gate_backward(*result.dx, *a.input, *a.gate, a.needs.dinput, a.needs.dgate);
  result.dinput = dinput;
  result.dgate = dgate;
  if (!a.needs.dx) result.dx = none(a.x, a.x.scalar_type());
  return result;
}

}  // namespace

BackwardResult run_backward(const BackwardArguments& given) {
  const Shape shape(given.x, given.options.normalized_ndim);
  check(given, shape);
  const ScalarType x = given.x.scalar_type();
  const bool is_gated = given.input.has_value();
  if (is_gated && (shape.empty() || given.input->scalar_type() != x)) return run_gate_apart(given);
  const CurrentDevice guard(given.x);
  const RawTensor shift = raw(given.shift), scale = raw(given.scale), gate = raw(given.gate);
  const Groups groups({&shift, &scale, &gate}, raw(given.x), shape.leading);
  // If each row has a modulation of its own, the modulated kernels take no sums over rows.
  const bool has_columns_apart = given.is_modulated() && groups.rows == 1 && given.needs.columns();
  BackwardArguments a = given;
  if (has_columns_apart) a.needs.dweight = a.needs.dbias = false;

  const DataTypes types =
      kernel_types(data_type(x), common_type({&a.weight, &a.bias, &a.shift, &a.scale, &a.gate}),
                   data_type(a.dy.scalar_type()));
  Outputs out(a, groups);
  Tensor dx = !a.needs.dx             ? none(a.x, x)
              : a.options.keeps_order ? empty_in_order(a.x, x)
                                      : empty_like(a.x, x);
  if (shape.empty()) {
    BackwardCall call;
    out.allocate(a, shape, types, call);
    out.fill_with_zeros(a);
  } else if (a.needs.any() && !launch_norm(a, shape, types, groups, dx, out)) {
    if (!is_gated) throw NoKernel();
    return run_gate_apart(given);
  }
  BackwardResult result = out.result(a, dx);
  if (has_columns_apart) add_columns(result, given);
  return result;
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
  const DataType in = data_type(input.scalar_type()), given = data_type(dsum.scalar_type());
  const bool wide = in == DataType::kFloat64 || given == DataType::kFloat64;
  const DataType x = wide ? DataType::kFloat64 : given == in ? in : DataType::kFloat32;
  const DataType summand = wide ? DataType::kFloat64 : in;
  const DataTypes types = kernel_types(x, common_type({&given_gate}), summand);
  const CurrentDevice guard(input);

  const RawTensor gate_as_given = raw(gate);
  const Groups groups({&gate_as_given}, raw(input), shape.leading);
  GroupGradient dgate(needs_dgate, given_gate, groups, input);
  Tensor dinput =
      needs_dinput ? empty_like(input, scalar_type(summand)) : none(input, input.scalar_type());
  PreparedGate prepared;
  prepared.types = types;
  GateParams& params = prepared.params;
  params.dgate = dgate.allocate(types.weight, statistics_type(x));
  if (shape.empty()) {
    dgate.fill_with_zeros();
  } else if (needs_dinput || needs_dgate) {
    const Tensor sum = with_rows(cast(dsum, scalar_type(x)), shape.leading);
    const Tensor rows = with_rows(cast(input, scalar_type(summand)), shape.leading);
    const auto read = prepare_modulation(given_gate, types.weight, input, shape.leading);
    const auto gate_rows = rows_in_place(raw(read), raw(rows), shape.leading);
    Problem problem;
    problem.aligned = are_aligned(types, shape.cols);
    const bool is_ready =
        gate_rows &&
        place_rows(raw(sum), shape.leading, params.dsum, params.dsum_rows, problem.aligned) &&
        place_rows(raw(rows), shape.leading, params.input, params.input_rows, problem.aligned);
    if (!is_ready || !has_kernels(types) || is_formula_forced()) throw NoKernel();
    params.gate = read->const_data_ptr();
    params.gate_rows = *gate_rows;
    params.dinput = needs_dinput ? dinput.mutable_data_ptr() : nullptr;
    params.dgate_is_wide = dgate.is_wide;
    problem.rows = params.rows = shape.rows;
    problem.cols = params.cols = static_cast<int32_t>(shape.cols);
    problem.group_rows = params.group_rows = groups.rows;
    problem.x = types.x;
    problem.needs_dparams = needs_dgate;
    problem.modulated = true;
    prepared.plan = backward::Gate::make(problem, device_of(input));
    const Workspace workspace(input, prepared.workspace_bytes());
    launch(prepared, workspace.data(), current_stream(input));
  }
  return {cast(dinput, input.scalar_type()), dgate.result()};
}

}  // namespace fused_layernorm

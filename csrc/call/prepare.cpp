// SPDX-License-Identifier: Apache-2.0
// From the description of a call to a launch's parameters and plan; prepare.h has the contract.
#include "call/prepare.h"

#include "call/arguments.h"
#include "call/layout.h"
#include "call/types.h"

namespace fused_layernorm {
namespace {

// x's leading dimensions are rows, its others columns.
struct Norm {
  int64_t leading = 0, rows = 1, cols = 1;
};

// The norm of a call; std::nullopt if it is empty, or if kernels do not read its parameters as they
// are.
std::optional<Norm> norm_of(const NormCall& call, const RawTensor& x) {
  Norm norm;
  norm.leading = x.dims - call.options.normalized_ndim;
  norm.rows = numel_of(x, 0, norm.leading);
  norm.cols = numel_of(x, norm.leading, x.dims);
  if (norm.rows < 1 || norm.cols < 1) return std::nullopt;
  for (const RawTensor* parameter : {&call.weight, &call.bias}) {
    if (*parameter && (!parameter->is_contiguous || !is_aligned(parameter->data))) {
      return std::nullopt;
    }
  }
  return norm;
}

// The types of a call's kernels; std::nullopt if a tensor has to be converted for them.
std::optional<DataTypes> types_of(const NormCall& call) {
  const Settled settled = settle(call);
  bool fits = !settled.adds_first && has_kernels(settled.kernel) &&
              (!call.written || call.written.type == settled.written);
  for (size_t i = 0; fits && i < kTensorCount; ++i) {
    const RawTensor& tensor = call.*kTensorFields<RawTensor>[i].member;
    const DataType read = (settled.read.*kTensorFields<Read>[i].member).type;
    fits = !tensor || read == kNoDataType || read == tensor.type;
  }
  return fits ? std::optional(settled.kernel) : std::nullopt;
}

// Sets the parameters of kernels that both directions share. False if kernels cannot read a
// modulation where it lies.
template <typename Params>
bool set_norm(Params& params, const NormCall& call, const Norm& norm, const RawTensor& x) {
  const NormOptions& options = call.options;
  params.weight = call.weight.data;
  params.bias = call.bias.data;
  params.rows = norm.rows;
  params.cols = static_cast<int32_t>(norm.cols);
  params.is_rms = options.is_rms;
  params.inverse_cols = Scalar(1.0 / static_cast<double>(norm.cols));
  params.scale = Scalar(options.output_scale);
  params.activates = options.activation != Activation::kNone || options.output_scale != 1.0;
  params.activation = options.activation;
  if (options.weight_offset != 0.0) params.weight_offset = Scalar(options.weight_offset);

  params.is_modulated = call.is_modulated();
  const auto place = [&](const RawTensor& tensor, const void*& data, RowMap& rows) {
    if (!tensor) return true;
    const auto found = rows_in_place(tensor, x, norm.leading);
    data = tensor.data;
    if (found) rows = *found;
    return found.has_value();
  };
  Modulation& m = params.modulation;
  return !params.is_modulated ||
         (place(call.shift, m.shift, m.shift_rows) && place(call.scale, m.scale, m.scale_rows) &&
          place(call.gate, m.gate, m.gate_rows));
}

template <typename Params>
Problem problem_of(const Params& params, const DataTypes& types) {
  Problem problem;
  problem.rows = params.rows;
  problem.cols = params.cols;
  problem.x = types.x;
  problem.weight = types.weight;
  problem.y = types.y;
  problem.aligned = false;
  problem.modulated = params.is_modulated;
  problem.has_epilogue = params.has_epilogue;
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

// What a plan says for ForwardParams::stays_in_l2.
bool stays_in_l2(const Launch&) { return false; }
bool stays_in_l2(const forward::InRegisters& plan) { return plan.stays_in_l2; }

// The plan of rows that kernels find by a RowMap.
template <typename Plan, typename Make>
Planned<Plan> planned_by(const Make& make, const Problem& problem, const Device& device) {
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

// The plan of a forward pass over channels, read where they lie.
std::optional<forward::Channels> plan_forward_channels(const NormCall& call, const Norm& norm,
                                                       const Problem& problem,
                                                       const Device& device) {
  const RawTensor& input = call.input;
  const auto map = channel_map_of(input, norm.leading);
  const bool channels_last = call.written.is_contiguous;
  if (!map || (!channels_last && !has_dense_channels(call.written, *map, norm.leading))) {
    return std::nullopt;
  }
  return make_channels_plan(problem, *map, unit_of(input, *map), is_run(input, *map, norm.cols),
                            channels_last, device);
}

// The same for backward. The channels of dy lie apart, as those of x, or side by side.
std::optional<backward::Channels> plan_backward_channels(const NormCall& call, const Norm& norm,
                                                         const Problem& problem,
                                                         const Device& device) {
  const RawTensor &x = call.x, &dy = call.dy;
  const auto map = channel_map_of(x, norm.leading);
  const bool dx_channels_last = !call.needs.dx || call.written.is_contiguous;
  if (!map || (!dx_channels_last && !has_dense_channels(call.written, *map, norm.leading))) {
    return std::nullopt;
  }
  int64_t unit = unit_of(x, *map);
  bool run = is_run(x, *map, norm.cols);
  auto dy_map = channel_map_of(dy, norm.leading);
  if (dy_map && dy_map->samples == map->samples && dy_map->pixels == map->pixels) {
    const int64_t of_dy = unit_of(dy, *dy_map);
    // Whole vectors of dy, which has fewer elements in one if its type is wider, suffice.
    if (of_dy * size_of(dy.type) < kVectorBytes) unit = std::min(unit, of_dy);
    run = run && is_run(dy, *dy_map, norm.cols);
  } else if (dy.is_contiguous && is_aligned(dy.data)) {
    dy_map.reset();
  } else {
    return std::nullopt;
  }
  return make_channels_plan(problem, *map, dy_map, unit, run, dx_channels_last, device);
}

bool prepare_forward(const NormCall& call, const Device& device, Prepared& into) {
  const NormOptions& options = call.options;
  const RawTensor &input = call.input, &x = call.normalized(), &y = call.written;
  const auto norm = norm_of(call, x);
  const auto types = norm ? types_of(call) : std::nullopt;
  ForwardParams params;
  if (!types || !set_norm(params, call, *norm, x)) return false;
  into.types = *types;
  params.xhat_rounding =
      xhat_rounding_of(options.round_before_weight, static_cast<bool>(call.weight),
                       call.rounded_to == kNoDataType ? input.type : call.rounded_to);
  params.eps = Scalar(options.eps);
  params.plain_weight = options.weight_offset == 0.0 && params.xhat_rounding == XhatRounding::kNone;
  if (params.is_modulated && !params.plain_weight) return false;  // it takes more than one kernel
  params.has_epilogue = params.activates || !params.plain_weight;

  Problem problem = problem_of(params, into.types);
  bool aligned = are_aligned(into.types, norm->cols);
  if (y.is_contiguous &&
      place_rows(input, norm->leading, params.input, params.input_rows, aligned)) {
    if (call.residual &&
        !place_rows(call.residual, norm->leading, params.residual, params.residual_rows, aligned)) {
      return false;
    }
    problem.aligned = aligned;
    problem.halves = !aligned && begin_at_halves(params, into.types);
    problem.residual = static_cast<bool>(call.residual);
    const auto planned = planned_by<forward::Plan>(make_forward_plan, problem, device);
    params.stays_in_l2 =
        std::visit([](const auto& strategy) { return stays_in_l2(strategy); }, planned.plan);
    into.kernel = Kernel<ForwardParams, Planned<forward::Plan>>{params, planned};
    return true;
  }
  if (call.residual || params.is_modulated) return false;
  const auto channels = plan_forward_channels(call, *norm, problem, device);
  if (!channels) return false;
  params.input = input.data;
  into.kernel = Kernel<ForwardParams, forward::Channels>{params, *channels};
  return true;
}

bool prepare_backward(const NormCall& call, const Device& device, Prepared& into) {
  const RawTensor& x = call.x;
  const auto norm = norm_of(call, x);
  const auto types = norm ? types_of(call) : std::nullopt;
  BackwardParams params;
  if (!types || !set_norm(params, call, *norm, x)) return false;
  into.types = *types;
  if (!call.options.is_rms) params.mean = call.mean.data;
  params.rstd = call.rstd.data;

  const Needs& needs = call.needs;
  const bool is_gated = static_cast<bool>(call.input);
  params.is_modulated = params.is_modulated || is_gated;
  params.group_rows = norm->rows;
  if (params.is_modulated) {
    const Groups groups({&call.shift, &call.scale, &call.gate}, x, norm->leading);
    const auto takes_sums = [&](bool needed, const RawTensor& modulation) {
      return needed && call.group_rows == 0 && !groups.are_of(modulation, x);
    };
    params.group_rows = call.group_rows != 0 ? call.group_rows : groups.rows;
    // What would have to follow the launch is left to the operator: further sums, or where each row
    // has its own modulation the sums of dweight and dbias.
    if (takes_sums(needs.dshift, call.shift) || takes_sums(needs.dscale, call.scale) ||
        takes_sums(needs.dgate, call.gate) || (params.group_rows == 1 && needs.columns())) {
      return false;
    }
  }
  params.has_epilogue =
      params.activates || (call.options.weight_offset != 0.0 && !params.is_modulated);

  Problem problem = problem_of(params, into.types);
  problem.residual = static_cast<bool>(call.dresidual);
  problem.gated = is_gated;
  problem.group_rows = params.group_rows;
  problem.needs_column_grads = needs.columns();
  problem.needs_dparams = needs.columns() || needs.dshift || needs.dscale || is_gated;
  bool aligned = are_aligned(into.types, norm->cols);
  const auto place = [&](const RawTensor& tensor, const void*& data, RowMap& rows) {
    return !tensor || place_rows(tensor, norm->leading, data, rows, aligned);
  };
  if (place(x, params.x, params.x_rows) && (!needs.dx || call.written.is_contiguous)) {
    if (!place(call.dy, params.dy, params.dy_rows) ||
        !place(call.dresidual, params.dresidual, params.dresidual_rows) ||
        !place(call.input, params.input, params.input_rows)) {
      return false;
    }
    problem.aligned = aligned;
    Planned<backward::Plan> planned;
    if (is_gated) {
      const auto gated = make_gated_plan(problem, device);
      if (!gated) return false;
      planned.plan = *gated;
    } else {
      planned = planned_by<backward::Plan>(make_backward_plan, problem, device);
    }
    into.kernel = Kernel<BackwardParams, Planned<backward::Plan>>{params, planned};
    return true;
  }
  if (call.dresidual || params.is_modulated) return false;
  const auto channels = plan_backward_channels(call, *norm, problem, device);
  if (!channels) return false;
  params.x = x.data;
  params.dy = call.dy.data;
  into.kernel = Kernel<BackwardParams, backward::Channels>{params, *channels};
  return true;
}

}  // namespace

bool prepare(const NormCall& call, const Device& device, Prepared& into) {
  if (is_formula_forced()) return false;
  for (const RawTensor* statistic : {&call.mean, &call.rstd}) {
    if (*statistic && !statistic->is_contiguous) return false;
  }
  if (call.options.num_groups != 0) return prepare_groups(call, device, into);
  if (call.options.gate_place != GatePlace::kInput) return prepare_gated(call, device, into);
  return (call.backward ? prepare_backward : prepare_forward)(call, device, into);
}

}  // namespace fused_layernorm

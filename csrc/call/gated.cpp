// SPDX-License-Identifier: Apache-2.0
// From the description of a call of a gated norm to its launch; prepare.h has the contract.
#include <cmath>

#include "call/layout.h"
#include "call/prepare.h"
#include "call/types.h"

namespace fused_layernorm {
namespace {

// Whether kernels write y, or read dy, of this type beside x.
bool is_beside(DataType y, DataType x, bool backward) {
  return y == x || (!backward && is_half(x) && y == DataType::kFloat32) ||
         (!backward && x == DataType::kFloat32 && is_half(y));
}

// Settles types, parameters and plan of a call. `y` is dy in backward.
template <typename Prepared>
bool prepare_call(const NormCall& call, const RawTensor& x, const RawTensor& y, const Needs* needs,
                  const Device& device, Prepared& into) {
  const NormOptions& options = call.options;
  const int64_t leading = x.dims - 1;
  if (leading < 0 || x.type == kNoDataType || options.has_unknown_name ||
      !std::isfinite(options.weight_offset) || (!call.weight && options.weight_offset != 0.0) ||
      !call.gate || call.gate.type != x.type || !have_one_shape(call.gate, x) ||
      !have_one_shape(y, x) || !is_beside(y.type, x.type, needs != nullptr)) {
    return false;
  }
  GatedProblem problem;
  problem.rows = 1;
  for (int64_t d = 0; d < leading; ++d) problem.rows *= x.sizes[d];
  const int64_t width = x.sizes[leading];
  problem.cols = options.group_size == 0 ? width : options.group_size;
  if (problem.rows < 1 || width < 1 || problem.rows > kMostExtent || width > kMostExtent ||
      problem.cols < 1 || width % problem.cols != 0) {
    return false;
  }
  problem.groups = width / problem.cols;
  problem.x = x.type;
  problem.aligned = problem.cols * size_of(x.type) % kVectorBytes == 0;
  DataType parameters = x.type;
  for (const RawTensor* parameter : {&call.weight, &call.bias}) {
    if (!*parameter) continue;
    parameters = parameter->type;
    const RawTensor columns = {.sizes = x.sizes + leading, .dims = 1};
    if (!goes_with(parameters, x.type) || !have_one_shape(*parameter, columns) ||
        !parameter->is_contiguous)
      return false;
    problem.aligned = problem.aligned && is_aligned(parameter->data);
  }
  if (call.weight && call.bias && call.weight.type != call.bias.type) return false;
  into.types = {x.type, parameters, y.type};
  if (!has_kernels(x.type, parameters, x.type)) return false;

  PreparedGated prepared;
  GatedParams& params = prepared.params;
  const auto place = [&](const RawTensor& tensor, const void*& data, RowMap& rows) {
    return place_rows(tensor, leading, data, rows, problem.aligned);
  };
  if (!place(x, params.x, params.x_rows) || !place(call.gate, params.gate, params.gate_rows) ||
      (needs != nullptr && !place(y, params.dy, params.dy_rows))) {
    return false;
  }
  params.weight = call.weight.data;
  params.bias = call.bias.data;
  params.rows = static_cast<int32_t>(problem.rows);
  params.cols = static_cast<int32_t>(problem.cols);
  params.groups = static_cast<int32_t>(problem.groups);
  params.silu = options.activation == Activation::kSilu;
  params.weight_is_float = parameters == DataType::kFloat32;
  params.gate_first = options.gate_place == GatePlace::kFirst;
  params.y_type = y.type;
  params.inverse_cols = Scalar(1.0 / static_cast<double>(problem.cols));
  params.eps = Scalar(options.eps);
  params.weight_offset = Scalar(options.weight_offset);
  if (needs != nullptr) {
    problem.backward = true;
    problem.needs_dweight = needs->dweight;
    problem.bias = bool(call.bias);
  }
  const auto plan = make_gated_norm_plan(problem, device);
  if (!plan) return false;
  prepared.plan = *plan;
  into.plan = prepared;
  return true;
}

}  // namespace

bool prepare_gated(const ForwardCall& call, const Device& device, PreparedForward& into) {
  const RawTensor& x = call.input;
  if (std::isnan(call.options.eps) || !call.y.is_contiguous ||
      !prepare_call(call, x, call.y, nullptr, device, into)) {
    return false;
  }
  GatedParams& params = std::get<PreparedGated>(into.plan).params;
  const bool rounds = call.options.round_before_weight, has_weight = bool(call.weight);
  const auto or_else = [](DataType given, DataType otherwise) {
    return given == kNoDataType ? otherwise : given;
  };
  // In the promoted type of half precision and float32 nothing is rounded.
  const DataType promoted = has_weight && call.weight.type == x.type ? x.type : DataType::kFloat32;
  params.xhat_rounding = xhat_rounding_of(rounds, has_weight, or_else(call.rounded_to, x.type));
  params.affine_rounding =
      xhat_rounding_of(rounds, has_weight, or_else(call.affine_rounded_to, promoted));
  const XhatRounding own = xhat_rounding_of(true, true, x.type);
  params.is_one_type = is_half(x.type) && promoted == x.type && call.y.type == x.type &&
                       !call.bias && call.options.weight_offset == 0.0 &&
                       params.xhat_rounding == own && params.affine_rounding == own;
  return true;
}

bool prepare_gated(const BackwardCall& call, const Device& device, PreparedBackward& into) {
  const RawTensor& x = call.x;
  if ((call.needs.dx && !call.dx.is_contiguous) ||
      !prepare_call(call, x, call.dy, &call.needs, device, into)) {
    return false;
  }
  GatedParams& params = std::get<PreparedGated>(into.plan).params;
  params.rstd = const_cast<void*>(call.rstd.data);
  return is_statistic(call.rstd, int64_t{params.rows} * params.groups, x.type);
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// From the description of a call of a gated norm to its launch; prepare.h has the contract.
#include "call/layout.h"
#include "call/prepare.h"
#include "call/types.h"

namespace fused_layernorm {
namespace {

// Sets to which types forward rounds.
void set_rounding(GatedParams& params, const NormCall& call) {
  const DataType x = call.input.type;
  const bool rounds = call.options.round_before_weight, has_weight = bool(call.weight);
  const auto or_else = [](DataType given, DataType otherwise) {
    return given == kNoDataType ? otherwise : given;
  };
  // In the promoted type of half precision and float32 nothing is rounded.
  const DataType promoted = has_weight && call.weight.type == x ? x : DataType::kFloat32;
  params.xhat_rounding = xhat_rounding_of(rounds, has_weight, or_else(call.rounded_to, x));
  params.affine_rounding =
      xhat_rounding_of(rounds, has_weight, or_else(call.affine_rounded_to, promoted));
  const XhatRounding own = xhat_rounding_of(true, true, x);
  params.is_one_type = is_half(x) && promoted == x && call.written.type == x && !call.bias &&
                       call.options.weight_offset == 0.0 && params.xhat_rounding == own &&
                       params.affine_rounding == own;
}

}  // namespace

bool prepare_gated(const NormCall& call, const Device& device, Prepared& into) {
  const NormOptions& options = call.options;
  const RawTensor &x = call.normalized(), &y = call.backward ? call.dy : call.written;
  const int64_t leading = x.dims - 1, width = x.sizes[leading];
  const bool fits = call.backward ? y.type == x.type : kernel_y_of_gated(x.type, y.type) == y.type;
  if (call.gate.type != x.type || !fits || (call.written && !call.written.is_contiguous)) {
    return false;
  }
  GatedProblem problem;
  problem.rows = 1;
  for (int64_t d = 0; d < leading; ++d) problem.rows *= x.sizes[d];
  problem.cols = options.group_size == 0 ? width : options.group_size;
  if (problem.rows < 1 || width < 1 || problem.rows > kMostExtent || width > kMostExtent) {
    return false;
  }
  problem.groups = width / problem.cols;
  problem.x = x.type;
  problem.aligned = problem.cols * size_of(x.type) % kVectorBytes == 0;
  DataType parameters = x.type;
  for (const RawTensor* parameter : {&call.weight, &call.bias}) {
    if (!*parameter) continue;
    parameters = parameter->type;
    if (!goes_with(parameters, x.type) || !parameter->is_contiguous) return false;
    problem.aligned = problem.aligned && is_aligned(parameter->data);
  }
  into.types = {x.type, parameters, y.type};
  if (!has_kernels(x.type, parameters, x.type)) return false;

  auto& kernel = into.kernel.emplace<Kernel<GatedParams, GatedPlan>>();
  GatedParams& params = kernel.params;
  const auto place = [&](const RawTensor& tensor, const void*& data, RowMap& rows) {
    return place_rows(tensor, leading, data, rows, problem.aligned);
  };
  if (!place(x, params.x, params.x_rows) || !place(call.gate, params.gate, params.gate_rows) ||
      (call.backward && !place(y, params.dy, params.dy_rows))) {
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
  if (call.backward) {
    params.rstd = const_cast<void*>(call.rstd.data);
    problem.backward = true;
    problem.needs_dweight = call.needs.dweight;
    problem.bias = bool(call.bias);
  } else {
    set_rounding(params, call);
  }
  const auto plan = make_gated_norm_plan(problem, device);
  if (plan) kernel.plan = *plan;
  return plan.has_value();
}

}  // namespace fused_layernorm

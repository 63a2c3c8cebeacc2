// SPDX-License-Identifier: Apache-2.0
// From the description of a call with groups to its launch; prepare.h has the contract.
#include <cmath>

#include "call/layout.h"
#include "call/prepare.h"
#include "call/types.h"

namespace fused_layernorm {
namespace {

int64_t stride_along(const RawTensor& tensor, int64_t d) {
  return tensor.sizes[d] > 1 ? tensor.strides[d] : 0;
}

// Where weight or bias is: (channels). False if it does not go with x.
bool place_channels(const RawTensor& tensor, const RawTensor& x, ChannelNumbers& into) {
  if (!tensor) return true;
  into = {tensor.data, 0, stride_along(tensor, 0), tensor.type};
  return tensor.dims == 1 && tensor.sizes[0] == x.sizes[1] && goes_with(tensor.type, x.type);
}

// Where shift or scale is: (samples, channels, 1, ...).
bool place_samples(const RawTensor& tensor, const RawTensor& x, ChannelNumbers& into) {
  if (!tensor) return true;
  bool fits = tensor.dims >= 2 && goes_with(tensor.type, x.type);
  for (int64_t d = 0; fits && d < tensor.dims; ++d) {
    fits = tensor.sizes[d] == (d < 2 ? x.sizes[d] : 1);
  }
  if (fits) into = {tensor.data, stride_along(tensor, 0), stride_along(tensor, 1), tensor.type};
  return fits;
}

// Settles types, parameters and plan of a call. `y` is dy in backward; `written` is what is written
// of x's shape.
template <typename Prepared>
bool prepare_call(const NormCall& call, const RawTensor& x, const RawTensor& y,
                  const RawTensor& written, bool backward, const Device& device, Prepared& into) {
  const NormOptions& options = call.options;
  const int64_t groups = options.num_groups;
  if (options.has_unknown_name || !std::isfinite(options.output_scale) || x.dims < 2 ||
      groups < 1 || x.sizes[1] % groups != 0 || x.type == kNoDataType || y.type == kNoDataType) {
    return false;
  }
  PreparedGroups prepared;
  GroupParams& params = prepared.params;
  int64_t positions = 1;
  for (int64_t d = 2; d < x.dims; ++d) positions *= x.sizes[d];
  if (x.sizes[0] < 1 || x.sizes[1] < 1 || positions < 1 || x.sizes[1] > kMostExtent ||
      !place_channels(call.weight, x, params.weight) ||
      !place_channels(call.bias, x, params.bias) || !place_samples(call.shift, x, params.shift) ||
      !place_samples(call.scale, x, params.scale_by)) {
    return false;
  }
  const auto layout = group_layout_of(x);
  if (!layout || (call.weight && call.bias && call.weight.type != call.bias.type)) return false;
  for (const RawTensor* each : {&y, &written}) {
    if (!have_one_shape(*each, x) || !have_one_order(*each, x)) return false;
  }
  into.types = group_types(x.type, y.type);
  if (into.types.y != y.type || !has_kernels(into.types)) return false;

  params.x = x.data;
  params.samples = x.sizes[0];
  params.channels = static_cast<int32_t>(x.sizes[1]);
  params.positions = positions;
  params.groups = static_cast<int32_t>(groups);
  params.layout = *layout;
  params.inverse_count = Scalar(1.0 / static_cast<double>(x.sizes[1] / groups * positions));
  params.eps = Scalar(options.eps);
  params.scale = Scalar(options.output_scale);
  params.activates = options.activation != Activation::kNone || options.output_scale != 1.0;
  params.activation = options.activation;

  GroupProblem problem;
  problem.samples = params.samples;
  problem.positions = positions;
  problem.channels = params.channels;
  problem.groups = groups;
  problem.layout = *layout;
  problem.x = x.type;
  problem.y = y.type;
  problem.aligned = is_aligned(x.data) && is_aligned(y.data) && is_aligned(written.data);
  problem.backward = backward;
  const auto plan = make_group_plan(problem, device);
  if (!plan) return false;
  prepared.planned.plan = *plan;
  if (plan->meets()) {
    Device apart = device;
    apart.blocks_meet = false;
    prepared.planned.apart = make_group_plan(problem, apart);
  }
  into.plan = prepared;
  return true;
}

}  // namespace

bool prepare_groups(const ForwardCall& call, const Device& device, PreparedForward& into) {
  return !std::isnan(call.options.eps) &&
         prepare_call(call, call.input, call.y, call.y, false, device, into);
}

bool prepare_groups(const BackwardCall& call, const Device& device, PreparedBackward& into) {
  if (!prepare_call(call, call.x, call.dy, call.dx, true, device, into)) return false;
  GroupParams& params = std::get<PreparedGroups>(into.plan).params;
  const int64_t all_groups = params.samples * params.groups;
  if (!is_statistic(call.mean, all_groups, call.x.type) ||
      !is_statistic(call.rstd, all_groups, call.x.type)) {
    return false;
  }
  params.dy = call.dy.data;
  params.mean = const_cast<void*>(call.mean.data);
  params.rstd = const_cast<void*>(call.rstd.data);
  params.dweight.type = call.weight.type;
  params.dbias.type = call.bias.type;
  params.dshift.type = call.shift.type;
  params.dscale_by.type = call.scale.type;
  return true;
}

}  // namespace fused_layernorm

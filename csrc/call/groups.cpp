// SPDX-License-Identifier: Apache-2.0
// From the description of a call with groups to its launch; prepare.h has the contract.
#include "call/layout.h"
#include "call/prepare.h"
#include "call/types.h"

namespace fused_layernorm {
namespace {

int64_t stride_along(const RawTensor& tensor, int64_t d) {
  return tensor.sizes[d] > 1 ? tensor.strides[d] : 0;
}

// Where a number for each channel is, or for each channel of each sample.
void place(const RawTensor& tensor, ChannelNumbers& into) {
  if (!tensor) return;
  const bool of_samples = tensor.dims > 1;
  const int64_t stride = stride_along(tensor, of_samples ? 1 : 0);
  into = {tensor.data, of_samples ? stride_along(tensor, 0) : 0, stride, tensor.type,
          stride == 1 && is_aligned(tensor.data)};
}

}  // namespace

bool prepare_groups(const NormCall& call, const Device& device, Prepared& into) {
  const NormOptions& options = call.options;
  const RawTensor& x = call.normalized();
  const RawTensor &written = call.written, &y = call.backward ? call.dy : written;
  int64_t positions = 1;
  for (int64_t d = 2; d < x.dims; ++d) positions *= x.sizes[d];
  if (x.sizes[0] < 1 || x.sizes[1] < 1 || positions < 1 || x.sizes[1] > kMostExtent) return false;
  const auto layout = group_layout_of(x);
  if (!layout || !have_one_order(y, x) || !have_one_order(written, x)) return false;
  into.types = group_types(x.type, y.type);
  if (into.types.y != y.type || !has_kernels(into.types)) return false;

  GroupProblem problem;
  problem.samples = x.sizes[0];
  problem.positions = positions;
  problem.channels = x.sizes[1];
  problem.groups = options.num_groups;
  problem.layout = *layout;
  problem.x = x.type;
  problem.y = y.type;
  problem.aligned = is_aligned(x.data) && is_aligned(y.data) && is_aligned(written.data);
  problem.backward = call.backward;
  problem.modulated = call.shift || call.scale;
  const auto plan = make_group_plan(problem, device);
  if (!plan) return false;
  auto& kernel = into.kernel.emplace<Kernel<GroupParams, Planned<GroupPlan>>>();
  kernel.plan.plan = *plan;
  if (plan->meets()) {
    Device apart = device;
    apart.blocks_meet = false;
    kernel.plan.apart = make_group_plan(problem, apart);
  }

  GroupParams& params = kernel.params;
  place(call.weight, params.weight);
  place(call.bias, params.bias);
  place(call.shift, params.shift);
  place(call.scale, params.scale_by);
  params.x = x.data;
  params.samples = problem.samples;
  params.channels = static_cast<int32_t>(problem.channels);
  params.positions = positions;
  params.groups = static_cast<int32_t>(problem.groups);
  params.channels_of_group = static_cast<int32_t>(problem.channels_of_group());
  params.by_groups = Divisor(params.groups);
  params.by_channels_of_group = Divisor(params.channels_of_group);
  params.inverse_count = Scalar(1.0 / static_cast<double>(problem.channels_of_group() * positions));
  params.eps = Scalar(options.eps);
  params.scale = Scalar(options.output_scale);
  params.activates = options.activation != Activation::kNone || options.output_scale != 1.0;
  params.activation = options.activation;
  if (call.backward) {
    params.dy = call.dy.data;
    params.mean = const_cast<void*>(call.mean.data);
    params.rstd = const_cast<void*>(call.rstd.data);
    params.dweight.type = call.weight.type;
    params.dbias.type = call.bias.type;
    params.dshift.type = call.shift.type;
    params.dscale_by.type = call.scale.type;
  }
  return true;
}

}  // namespace fused_layernorm

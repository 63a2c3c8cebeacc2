// SPDX-License-Identifier: Apache-2.0
// Launches of prepared calls; prepare.h has the contract.
#include <sstream>
#include <stdexcept>
#include <type_traits>

#include "backward/gate.h"
#include "base/json.h"
#include "call/prepare.h"
#include "call/room.h"

namespace fused_layernorm {
namespace {

// Passes a plan to the launch function of its strategy.
cudaError_t enqueue(const GateParams& params, const DataTypes& types, const backward::Gate& plan,
                    cudaStream_t stream) {
  return launch_gate_backward(params, types, plan, stream);
}
template <typename Params, typename Strategy>
cudaError_t enqueue(const Params& params, const DataTypes& types, const Strategy& plan,
                    cudaStream_t stream) {
  if constexpr (std::is_same_v<Params, ForwardParams>) {
    return launch_layer_norm_forward(params, types, plan, stream);
  } else {
    return launch_layer_norm_backward(params, types, plan, stream);
  }
}
template <typename Params, typename... Strategies>
cudaError_t enqueue(const Params& params, const DataTypes& types,
                    const std::variant<Strategies...>& plan, cudaStream_t stream) {
  return std::visit([&](const auto& strategy) { return enqueue(params, types, strategy, stream); },
                    plan);
}
cudaError_t enqueue(const GroupParams& params, const DataTypes& types, const GroupPlan& plan,
                    cudaStream_t stream) {
  return launch_group_norm(params, types.x, types.y, plan, stream);
}

cudaError_t enqueue(const GatedParams& params, const DataTypes& types, const GatedPlan& plan,
                    cudaStream_t stream) {
  return params.dy == nullptr ? launch_gated_forward(params, types.x, plan, stream)
                              : launch_gated_backward(params, types.x, plan, stream);
}

// What a launch computes, for an error message.
void describe_call(std::ostream& message, const GroupParams& p) {
  message << (p.dy == nullptr ? "forward" : "backward") << " for " << p.samples << " samples of "
          << p.groups << " groups of " << p.channels_of_group() << " channels and " << p.positions
          << " positions";
}
void describe_call(std::ostream& message, const GatedParams& p) {
  message << (p.dy == nullptr ? "forward" : "backward") << " for " << p.rows << " gated rows of "
          << p.groups << " groups of " << p.cols << " columns";
}
template <typename Params>
void describe_call(std::ostream& message, const Params& params) {
  message << (std::is_same_v<Params, ForwardParams>    ? "forward"
              : std::is_same_v<Params, BackwardParams> ? "backward"
                                                       : "gate_backward")
          << " for " << params.rows << " rows of " << params.cols << " columns";
}

// Throws unless the launch of a plan succeeded; the message says which plan, for what and which
// types.
template <typename Params, typename Plan>
void check_launch(cudaError_t error, const Params& params, const DataTypes& types,
                  const Plan& plan) {
  if (error == cudaSuccess) return;
  std::ostringstream message;
  message << "fused_layernorm: CUDA error: " << cudaGetErrorString(error) << ", at the launch of ";
  describe_call(message, params);
  message << ", x " << name_of(types.x) << ", weight " << name_of(types.weight) << ", y "
          << name_of(types.y) << ", by the plan " << describe(plan);
  throw std::runtime_error(message.str());
}

// Whether a launch was refused because its blocks cannot all be resident at once, or those of a
// cluster.
bool is_refused(cudaError_t error) {
  return error == cudaErrorCooperativeLaunchTooLarge || error == cudaErrorInvalidClusterSize ||
         error == cudaErrorLaunchOutOfResources;
}

template <typename Params, typename Plan>
void launch_plan(const Params& params, const DataTypes& types, const Plan& plan,
                 cudaStream_t stream) {
  check_launch(enqueue(params, types, plan, stream), params, types, plan);
}
template <typename Params, typename Plan>
void launch_plan(const Params& params, const DataTypes& types, const Planned<Plan>& planned,
                 cudaStream_t stream) {
  // A capture refuses nothing, and the graph would hang.
  if (planned.apart && !room_of(stream).has(launch_of(planned.plan))) {
    return launch_plan(params, types, *planned.apart, stream);
  }
  const cudaError_t error = enqueue(params, types, planned.plan, stream);
  if (is_refused(error) && planned.apart) {
    (void)cudaGetLastError();  // else the next check of PyTorch's would find it
    launch_plan(params, types, *planned.apart, stream);
  } else {
    check_launch(error, params, types, planned.plan);
  }
}

template <typename Plan>
int64_t workspace_of(const Plan& plan) {
  return launch_of(plan).workspace_bytes;
}
template <typename Plan>
int64_t workspace_of(const Planned<Plan>& planned) {
  const int64_t bytes = workspace_of(planned.plan);
  return planned.apart ? std::max(bytes, workspace_of(*planned.apart)) : bytes;
}

// The outputs of each family's kernels.
void set_outputs(ForwardParams& params, const NormCall& call) {
  params.y = call.to.y;
  params.residual_out = call.to.residual_out;
  params.mean = call.to.mean;
  params.rstd = call.to.rstd;
}
void set_outputs(BackwardParams& params, const NormCall& call) {
  params.dx = call.to.dx;
  params.dweight = call.to.dweight;
  params.dbias = call.to.dbias;
  params.dshift = call.to.dshift;
  params.dscale = call.to.dscale;
  params.dinput = call.to.dinput;
  params.dgate = call.to.dgate;
  params.dshift_is_wide = call.dshift_is_wide;
  params.dscale_is_wide = call.dscale_is_wide;
  params.dgate_is_wide = call.dgate_is_wide;
}
void set_outputs(GroupParams& params, const NormCall& call) {
  params.y = call.backward ? call.to.dx : call.to.y;
  if (!call.backward) {
    params.mean = call.to.mean;
    params.rstd = call.to.rstd;
  }
  params.dweight.at = call.to.dweight;
  params.dbias.at = call.to.dbias;
  params.dshift.at = call.to.dshift;
  params.dscale_by.at = call.to.dscale;
}
void set_outputs(GatedParams& params, const NormCall& call) {
  params.y = call.backward ? call.to.dx : call.to.y;
  if (!call.backward) params.rstd = call.to.rstd;
  params.dgate = call.to.dgate;
  params.dweight = call.to.dweight;
  params.dbias = call.to.dbias;
}
void set_outputs(GateParams& params, const NormCall& call) {
  params.dinput = call.to.dinput;
  params.dgate = call.to.dgate;
  params.dgate_is_wide = call.dgate_is_wide;
}

}  // namespace

int64_t Prepared::workspace_bytes() const {
  return std::visit([](const auto& each) { return workspace_of(each.plan); }, kernel);
}

void launch(Prepared& prepared, const NormCall& call, void* workspace, cudaStream_t stream) {
  std::visit(
      [&](auto& each) {
        set_outputs(each.params, call);
        each.params.workspace = workspace;
        launch_plan(each.params, prepared.types, each.plan, stream);
      },
      prepared.kernel);
}

}  // namespace fused_layernorm

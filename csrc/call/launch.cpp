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
template <typename Params, typename Plan>
cudaError_t enqueue(const Params& params, const DataTypes& types, const Plan& plan,
                    cudaStream_t stream) {
  if constexpr (requires { std::variant_size<Plan>::value; }) {
    return std::visit(
        [&](const auto& strategy) { return enqueue(params, types, strategy, stream); }, plan);
  } else if constexpr (std::is_same_v<Params, ForwardParams>) {
    return launch_layer_norm_forward(params, types, plan, stream);
  } else if constexpr (std::is_same_v<Params, BackwardParams>) {
    return launch_layer_norm_backward(params, types, plan, stream);
  } else if constexpr (std::is_same_v<Params, GateParams>) {
    return launch_gate_backward(params, types, plan, stream);
  } else if constexpr (std::is_same_v<Params, GroupParams>) {
    return launch_group_norm(params, types.x, types.y, plan, stream);
  } else {
    return (params.dy ? launch_gated_backward : launch_gated_forward)(params, types.x, plan,
                                                                      stream);
  }
}

// What a launch computes, for an error message.
void describe_call(std::ostream& message, const GroupParams& p) {
  message << (p.dy == nullptr ? "forward" : "backward") << " for " << p.samples << " samples of "
          << p.groups << " groups of " << p.channels_of_group << " channels and " << p.positions
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

// Whether a launch was refused because its blocks, or those of a cluster, cannot all be resident at
// once.
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
  // The driver is asked first, because a launch that is captured into a CUDA graph is never
  // refused, and the graph would hang.
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

void place(void*& output, void* at) { output = at; }
void place(ChannelGradient& output, void* at) { output.at = at; }

// The outputs that a family's kernels have.
template <typename Params>
void set_outputs(Params& p, const NormCall& call) {
  const NormResults<void*>& to = call.to;
  if constexpr (requires { p.y; }) p.y = call.backward ? to.dx : to.y;
  if constexpr (requires { p.residual_out; }) p.residual_out = to.residual_out;
  if (!call.backward) {
    if constexpr (requires { p.mean; }) p.mean = to.mean;
    if constexpr (requires { p.rstd; }) p.rstd = to.rstd;
  }
  if constexpr (requires { p.dx; }) p.dx = to.dx;
  if constexpr (requires { p.dweight; }) place(p.dweight, to.dweight);
  if constexpr (requires { p.dbias; }) place(p.dbias, to.dbias);
  if constexpr (requires { p.dshift; }) place(p.dshift, to.dshift);
  if constexpr (requires { p.dscale; }) place(p.dscale, to.dscale);
  if constexpr (requires { p.dscale_by; }) place(p.dscale_by, to.dscale);
  if constexpr (requires { p.dinput; }) p.dinput = to.dinput;
  if constexpr (requires { p.dgate; }) p.dgate = to.dgate;
  if constexpr (requires { p.dshift_is_wide; }) p.dshift_is_wide = call.dshift_is_wide;
  if constexpr (requires { p.dscale_is_wide; }) p.dscale_is_wide = call.dscale_is_wide;
  if constexpr (requires { p.dgate_is_wide; }) p.dgate_is_wide = call.dgate_is_wide;
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

// SPDX-License-Identifier: Apache-2.0
// From the description of a call to its launch: prepare settles the types, finds the rows, fills in
// the parameters of the kernels and makes the plan; launch enqueues it. Between the two the caller
// allocates outputs and workspace. This is host code: without a GPU it makes plans of any device.
#pragma once

#include <variant>

#include "backward/plan.h"
#include "call/description.h"
#include "channels/backward.h"
#include "channels/forward.h"
#include "forward/plan.h"
#include "gated/plan.h"
#include "groups/plan.h"

namespace fused_layernorm {

// A plan, and one whose blocks do not wait for each other. It is launched if the first one's blocks
// cannot all be resident at once: the caller may have only a part of the device (a green context, a
// limit of MPS). Of some, the driver says so beforehand (room.h), others it refuses.
template <typename Plan>
struct Planned {
  Plan plan;
  std::optional<Plan> apart;  // if blocks of `plan` wait for each other
};

// A launch of GroupNorm, in either direction, has parameters of its own.
struct PreparedGroups {
  GroupParams params;
  Planned<GroupPlan> planned;
};

// A launch of a gated norm, likewise.
struct PreparedGated {
  GatedParams params;
  GatedPlan plan;
};

// A launch without its outputs. A family of norms is one alternative of its plans.
template <typename KernelParams, typename... Plans>
struct Prepared {
  KernelParams params;
  DataTypes types;
  std::variant<Plans...> plan;

  int64_t workspace_bytes() const;
};
using PreparedForward = Prepared<ForwardParams, Planned<forward::Plan>, forward::Channels,
                                 PreparedGroups, PreparedGated>;
using PreparedBackward = Prepared<BackwardParams, Planned<backward::Plan>, backward::Channels,
                                  PreparedGroups, PreparedGated>;
// The gradients of the gated sum residual + gate * input, by themselves.
using PreparedGate = Prepared<GateParams, backward::Gate>;

// False for a call that kernels do not take as it is: because tensors do not lie where kernels read
// or write them, a type has to be converted, or one launch does not suffice; or because it is not
// valid. Throws std::invalid_argument if no plan can have what is forced, and in a trimmed build.
bool prepare(const ForwardCall& call, const Device& device, PreparedForward& into);
bool prepare(const BackwardCall& call, const Device& device, PreparedBackward& into);

// The same for calls whose options have groups (groups.cpp).
bool prepare_groups(const ForwardCall& call, const Device& device, PreparedForward& into);
bool prepare_groups(const BackwardCall& call, const Device& device, PreparedBackward& into);
// And for calls of a gated norm (gated.cpp).
bool prepare_gated(const ForwardCall& call, const Device& device, PreparedForward& into);
bool prepare_gated(const BackwardCall& call, const Device& device, PreparedBackward& into);

// Launches what was prepared for this call, which has its outputs now. Throws std::runtime_error
// with what is wrong.
void launch(PreparedForward& prepared, const ForwardCall& call, void* workspace,
            cudaStream_t stream);
void launch(PreparedBackward& prepared, const BackwardCall& call, void* workspace,
            cudaStream_t stream);
void launch(PreparedGate& prepared, void* workspace, cudaStream_t stream);

}  // namespace fused_layernorm

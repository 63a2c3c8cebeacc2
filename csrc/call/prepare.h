// SPDX-License-Identifier: Apache-2.0
// From the description of a call to its launch: check says whether it is valid, prepare settles the
// types, finds the rows, fills in the parameters of the kernels and makes the plan; launch enqueues
// it. Between the two the caller allocates outputs and workspace. This is host code: without a GPU
// it makes plans of any device.
#pragma once

#include <optional>
#include <string>
#include <type_traits>
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
// limit of MPS). launch() asks the driver beforehand (room.h), and takes the second plan, too, if
// the driver refuses the launch of the first.
template <typename Plan>
struct Planned {
  Plan plan;
  std::optional<Plan> apart;  // if blocks of `plan` wait for each other
};

// A launch without its outputs: the parameters of its kernels, and their plan.
template <typename KernelParams, typename Plan>
struct Kernel {
  KernelParams params;
  Plan plan;
};
struct Prepared {
  DataTypes types;
  std::variant<Kernel<ForwardParams, Planned<forward::Plan>>,
               Kernel<BackwardParams, Planned<backward::Plan>>,
               Kernel<ForwardParams, forward::Channels>, Kernel<BackwardParams, backward::Channels>,
               Kernel<GroupParams, Planned<GroupPlan>>, Kernel<GatedParams, GatedPlan>,
               Kernel<GateParams, backward::Gate>>
      kernel;

  int64_t workspace_bytes() const;
};
static_assert(std::is_trivially_destructible_v<Prepared>);

// What is to be done with a call. Operators throw what is wrong with one.
struct Verdict {
  enum Kind {
    kTaken,
    kInvalid,   // `reason` says why, in a sentence
    kNoKernel,  // it is valid, but more than kernels count
  };
  Kind kind = kTaken;
  std::string reason = {};

  explicit operator bool() const { return kind == kTaken; }
};

// Whether a call is valid, by its options and the types, shapes and devices of its tensors.
Verdict check(const NormCall& call);

// A valid call's launch. False if kernels do not take it as it is: because tensors do not lie where
// kernels read or write them, a type has to be converted, or one launch does not suffice. Throws
// std::invalid_argument if no plan can have what is forced, and in a trimmed build.
bool prepare(const NormCall& call, const Device& device, Prepared& into);
// The same for calls whose options have groups (groups.cpp), and of a gated norm (gated.cpp).
bool prepare_groups(const NormCall& call, const Device& device, Prepared& into);
bool prepare_gated(const NormCall& call, const Device& device, Prepared& into);

// Launches what was prepared for this call, which has its outputs now. Throws std::runtime_error
// with what is wrong.
void launch(Prepared& prepared, const NormCall& call, void* workspace, cudaStream_t stream);

}  // namespace fused_layernorm

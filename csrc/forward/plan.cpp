// SPDX-License-Identifier: Apache-2.0
// Chooses the plan of a forward problem: that of the first strategy in the order of forward/plan.h
// whose make() does not decline.
#include "forward/plan.h"

namespace fused_layernorm {

forward::Plan make_forward_plan(const Problem& problem, const Device& device) {
  const Forced forced = forced_now();
  if (const auto plan = first_plan<forward::Plan>(problem, device, forced)) return *plan;
  refuse(forced, problem, false);
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// Forward, from problem to plan.
#include "forward/plan.h"

namespace fused_layernorm {

std::optional<forward::Plan> make_forward_plan(const Problem& problem, const Device& device) {
  const Forced forced = forced_now();
  const auto plan = first_plan<forward::Plan>(problem, device, forced);
  if (!plan && !forced.words.empty()) refuse(forced, problem, false);
  return plan;
}

}  // namespace fused_layernorm

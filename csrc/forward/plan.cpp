// SPDX-License-Identifier: Apache-2.0
// Forward, from problem to plan.
#include "forward/plan.h"

#include <type_traits>

namespace fused_layernorm {

forward::Plan make_forward_plan(const Problem& problem, const Device& device) {
  const Forced forced = forced_now();
  if (const auto plan = first_plan<forward::Plan>(problem, device, forced)) return *plan;
  refuse(forced, problem, false);
}

bool stays_in_l2(const forward::Plan& plan) {
  return std::visit(
      [](const auto& strategy) {
        using Strategy = std::decay_t<decltype(strategy)>;
        if constexpr (std::is_base_of_v<forward::InRegisters, Strategy>) {
          return strategy.stays_in_l2;
        } else {
          return false;
        }
      },
      plan);
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// Chooses the plan of a backward problem: that of the first strategy in the order of
// backward/plan.h whose make() does not decline.
#include "backward/plan.h"

namespace fused_layernorm {

backward::Plan make_backward_plan(const Problem& problem, const Device& device) {
  const Forced forced = forced_now();
  if (const auto plan = first_plan<backward::Plan>(problem, device, forced)) return *plan;
  refuse(forced, problem, true);
}

std::optional<backward::Plan> make_gated_plan(const Problem& problem, const Device& device) {
  const Forced forced = forced_now();
  if (backward::is_of_rows(problem)) return backward::Rows::make(problem, device, forced);
  // The kernels of groups take a gated input of x's type. With float32 x, however, that input has
  // y's type (Types::In in norm/types.cuh).
  if (problem.x == DataType::kFloat32 && problem.y != problem.x) return std::nullopt;
  Problem without_gate = problem;
  without_gate.gated = false;
  if (backward::has_warp_kernel_for_groups(without_gate, device, forced)) return std::nullopt;
  return backward::Group::make(problem, device, forced);
}

}  // namespace fused_layernorm

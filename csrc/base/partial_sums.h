// SPDX-License-Identifier: Apache-2.0
// The partial sums of dweight, dbias and the gradients of modulations: where they lie in the
// workspace. norm/param_grad.cuh fills them, backward/param_grad.cu adds them up.
#pragma once

#include <cstdint>

#include "base/cuda_types.h"
#include "base/problem.h"

namespace fused_layernorm {
namespace backward {

// The dweight and dbias of persistent blocks, [dweight, dbias][count][cols] of the arithmetic's
// type in the workspace, which a second kernel adds up. With a count of one the first kernel
// writes dweight and dbias themselves.
struct PartialSums {
  int count = 1;
  int64_t offset = 0;
  bool starts_early = false;  // the second kernel starts before the first has ended

  template <typename Json>
  void describe(Json& json) const {
    json.add("partials", count).add("partials_offset", offset);
  }
};

// The parts of groups of rows (those that share a modulation, not GroupNorm's groups). Set s of the
// `sets` has the rows from s * rows / sets up to those of the next set. The sums over its rows of
// one group are a part, and s + group is the number of that part among the partial sums, so that
// the parts of a group follow each other.
struct GroupParts {
  PartialSums partials{0, 0, false};  // [dscale, dshift, dgate][parts][cols], of the arithmetic's
                                      // type; without a gate the first two, for a gate alone dgate
  int64_t sums_offset = 0;            // of [dscale, dshift][groups][cols], for dweight and dbias
  int sets = 0;  // blocks, or sets of blocks that share rows, over which rows are spread

  template <typename Json>
  void describe(Json& json) const {
    json.add("parts", partials.count).add("partials_offset", partials.offset);
    json.add("sums_offset", sums_offset).add("sets", sets);
  }
};

// Adds the partial sums of a plan, which are parts of groups if the norm is modulated.
template <typename Json, typename Plan>
void add_sums(Json& json, const Plan& plan) {
  plan.parts.sets > 0 ? json.add(plan.parts) : json.add(plan.partials);
}

// Lays out the partial sums of `sets` sets of blocks, after what the workspace has already.
template <typename Plan>
inline void lay_out_partials(Plan& plan, int64_t sets, const Problem& problem) {
  plan.partials.count = static_cast<int>(sets);
  plan.partials.offset = plan.workspace_bytes;
  if (problem.needs_dparams && sets > 1) {
    plan.workspace_bytes += int64_t{2} * sets * problem.cols * acc_size_of(problem.x);
  }
}

inline void lay_out_parts(GroupParts& parts, Launch& launch, int64_t sets, int sums,
                          const Problem& problem, const Device& device) {
  const int64_t groups = problem.rows / problem.group_rows;
  const int64_t sum_bytes = sums * problem.cols * acc_size_of(problem.x);
  parts.sets = static_cast<int>(sets);
  parts.partials.starts_early = device.starts_early;
  if (problem.group_rows == 1) return;
  parts.partials.count = static_cast<int>(sets + groups - 1);
  parts.partials.offset = launch.workspace_bytes;
  if (problem.needs_dparams) launch.workspace_bytes += parts.partials.count * sum_bytes;
  parts.sums_offset = launch.workspace_bytes;
  if (problem.needs_column_grads) launch.workspace_bytes += groups * sum_bytes;
}
}  // namespace backward

// Each adds up what lies in the workspace, if there is anything: partial dweight and dbias; the
// partial sums of groups of rows; those of a gate alone.
cudaError_t launch_param_grad(const BackwardParams&, const DataTypes&, const backward::PartialSums&,
                              cudaStream_t);
cudaError_t launch_modulation_grad(const BackwardParams&, const DataTypes&,
                                   const backward::GroupParts&, cudaStream_t);
cudaError_t launch_gate_grad(const GateParams&, const DataTypes&, const backward::GroupParts&,
                             cudaStream_t);

// Adds up the partial sums of a plan that may have parts of groups, as add_sums describes them.
template <typename Plan>
cudaError_t launch_sums(const BackwardParams& params, const DataTypes& types, const Plan& plan,
                        cudaStream_t stream) {
  return plan.parts.sets > 0 ? launch_modulation_grad(params, types, plan.parts, stream)
                             : launch_param_grad(params, types, plan.partials, stream);
}

}  // namespace fused_layernorm

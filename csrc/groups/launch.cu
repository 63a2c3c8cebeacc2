// SPDX-License-Identifier: Apache-2.0
// A call of GroupNorm as a sequence of launches.
#include "groups/launches.h"

namespace fused_layernorm {
namespace {

cudaError_t run_tiles(const GroupParams& params, const GroupTypes& types, const GroupPlan& plan,
                      cudaStream_t stream) {
  const bool planes = params.layout == GroupLayout::kPlanes;
  cudaError_t error =
      (planes ? launch_planes_measure : launch_last_measure)(params, types, plan, stream);
  if (error == cudaSuccess) error = launch_group_totals(params, types, plan, stream);
  if (error != cudaSuccess) return error;
  return (planes ? launch_planes_apply : launch_last_apply)(params, types, plan, stream);
}

}  // namespace

cudaError_t launch_group_norm(const GroupParams& params, DataType x, DataType y,
                              const GroupPlan& plan, cudaStream_t stream) {
  const GroupTypes types = {x, y, params.dy != nullptr};
  if (plan.strategy == GroupStrategy::kTiles) return run_tiles(params, types, plan, stream);
  const bool held = plan.strategy == GroupStrategy::kHeld;
  const cudaError_t error =
      (held ? launch_held_groups : launch_split_groups)(params, types, plan, stream);
  const bool has_grads = types.backward && param_grad_blocks(params) > 0;
  if (error != cudaSuccess || !has_grads) return error;
  return launch_group_param_grad(params, types, plan, stream);
}

}  // namespace fused_layernorm

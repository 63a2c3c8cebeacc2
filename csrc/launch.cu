// SPDX-License-Identifier: Apache-2.0
// The launch functions that the bindings call: each passes a plan to the launch function of its
// strategy.
#include <type_traits>

#include "launch.cuh"

namespace fused_layernorm {

cudaError_t launch_layer_norm_forward(const ForwardParams& params, const DataTypes& types,
                                      const forward::Plan& plan, cudaStream_t stream) {
  return std::visit(
      [&](const auto& strategy) {
        return launch_layer_norm_forward(params, types, strategy, stream);
      },
      plan);
}

cudaError_t launch_layer_norm_backward(const BackwardParams& params, const DataTypes& types,
                                       const backward::Plan& plan, cudaStream_t stream) {
  return std::visit(
      [&](const auto& strategy) {
        const cudaError_t error = launch_layer_norm_backward(params, types, strategy, stream);
        using Strategy = std::decay_t<decltype(strategy)>;
        if (error != cudaSuccess) return error;
        if constexpr (std::is_base_of_v<backward::OneRowATeam, Strategy>) {
          return cudaSuccess;
        } else if constexpr (std::is_same_v<Strategy, backward::Group>) {
          return launch_modulation_grad(params, types, strategy.parts, stream);
        } else {
          if constexpr (std::is_same_v<Strategy, backward::Stream> ||
                        std::is_same_v<Strategy, backward::Warp>) {
            if (params.is_modulated) {
              return launch_modulation_grad(params, types, strategy.parts, stream);
            }
          }
          return launch_param_grad(params, types, strategy.partials, stream);
        }
      },
      plan);
}

}  // namespace fused_layernorm

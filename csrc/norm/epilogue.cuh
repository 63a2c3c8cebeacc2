// SPDX-License-Identifier: Apache-2.0
// The epilogue: y = activation(z) * scale behind the affine map, and its gradient.
//
// The kind of activation is tested at run time: a kernel has the code of all activations, and those
// that are not wanted cost nothing, because a branch skips them. But launches without an activation
// are slower with this code, so there are kernels without it. These policies say whether a kernel
// has it.
#pragma once

#include "norm/activation.cuh"

namespace fused_layernorm {

// y = z.
struct Identity {
  static constexpr bool kBranches = false;
  static constexpr bool kMayActivate = false;

  template <typename Y, typename Acc, int kWidth>
  static __device__ __forceinline__ void apply(const ForwardParams&, Acc (&)[kWidth]) {}
  template <typename Body>
  static __device__ __forceinline__ void for_row(const ForwardParams&, const Body& body) {
    body(Identity{});
  }
};

// There is an activation, or a scale that is not 1.
struct Activate {
  static constexpr bool kBranches = true;
  static constexpr bool kMayActivate = true;

  template <typename Y, typename Acc, int kWidth>
  static __device__ __forceinline__ void apply(const ForwardParams& p, Acc (&values)[kWidth]) {
    activate<Y>(values, p.activation, p.scale.as<Acc>());
  }
  template <typename Body>
  static __device__ __forceinline__ void for_row(const ForwardParams&, const Body& body) {
    body(Activate{});
  }
};

// Either of the two: params.has_epilogue says which.
struct MayActivate {
  static constexpr bool kBranches = false;
  static constexpr bool kMayActivate = true;

  template <typename Y, typename Acc, int kWidth>
  static __device__ __forceinline__ void apply(const ForwardParams& p, Acc (&values)[kWidth]) {
    if (p.has_epilogue) Activate::apply<Y>(p, values);
  }
  // Calls the body with the policy that applies, so that it is chosen outside the row's loop.
  template <typename Body>
  static __device__ __forceinline__ void for_row(const ForwardParams& p, const Body& body) {
    if (p.has_epilogue) {
      body(Activate{});
    } else {
      body(Identity{});
    }
  }
};

}  // namespace fused_layernorm

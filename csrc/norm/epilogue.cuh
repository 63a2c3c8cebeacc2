// SPDX-License-Identifier: Apache-2.0
// The epilogue: y = activation(z) * scale after the affine map, and its gradient. The same kernels
// serve weights that are not plain (ForwardParams::plain_weight), which are as rare as activations:
// before_affine() adjusts xhat and weight before the affine map.
//
// The kind of activation is tested at run time: a kernel has the code of all, and a branch skips
// those that are not wanted. But launches without an activation are slower with this code, so there
// are kernels without it. The epilogue policy of a norm has
//   kMayActivate     whether its kernels have the code of an epilogue
//   kBranches        whether its kernels run only with an epilogue, so that a row's loop orders its
//                    loads around the branches of activate() (finish_vectors() in forward/row.cuh)
//   before_affine()  adjusts xhat and weight, if weight is not plain
//   apply()          makes y of z
//   for_row()        calls the body with the policy that applies to the row, so that it is chosen
//                    once, outside the row's loops
#pragma once

#include "norm/activation.cuh"
#include "norm/affine.cuh"

namespace fused_layernorm {

// y = z.
struct Identity {
  static constexpr bool kBranches = false;
  static constexpr bool kMayActivate = false;

  template <typename X, typename Acc, int kWidth>
  static FUSED_DEVICE void before_affine(const ForwardParams&, Acc (&)[kWidth], Acc (&)[kWidth]) {}
  template <typename Y, typename Acc, int kWidth>
  static FUSED_DEVICE void apply(const ForwardParams&, Acc (&)[kWidth]) {}
  static FUSED_DEVICE void for_row(const ForwardParams&, const auto& body) { body(Identity{}); }
};

// Weight is plain, and there is an activation or a scale.
struct ActivateOnly : Identity {
  static constexpr bool kBranches = true;

  template <typename Y, typename Acc, int kWidth>
  static FUSED_DEVICE void apply(const ForwardParams& p, Acc (&values)[kWidth]) {
    activate<Y>(values, p.activation, p.scale.as<Acc>());
  }
};

// Weight is not plain; there may be an activation or a scale, too.
struct AdjustWeight {
  static constexpr bool kBranches = true;

  template <typename X, typename Acc, int kWidth>
  static FUSED_DEVICE void before_affine(const ForwardParams& p, Acc (&xhat)[kWidth],
                                         Acc (&weight)[kWidth]) {
    adjust_weight<X>(p, xhat, weight);
  }
  template <typename Y, typename Acc, int kWidth>
  static FUSED_DEVICE void apply(const ForwardParams& p, Acc (&values)[kWidth]) {
    if (p.activates) ActivateOnly::apply<Y>(p, values);
  }
};

// There is an activation or a scale, or weight is not plain.
struct Activate : ActivateOnly {
  static constexpr bool kMayActivate = true;

  template <typename X, typename Acc, int kWidth>
  static FUSED_DEVICE void before_affine(const ForwardParams& p, Acc (&xhat)[kWidth],
                                         Acc (&weight)[kWidth]) {
    if (!p.plain_weight) adjust_weight<X>(p, xhat, weight);
  }
  // Calls the body with the policy that applies, so that it is chosen outside the row's loop.
  static FUSED_DEVICE void for_row(const ForwardParams& p, const auto& body) {
    if (p.plain_weight) {
      body(ActivateOnly{});
    } else {
      body(AdjustWeight{});
    }
  }
};

// An epilogue or none: params.has_epilogue says which, once for each row (for_row). Its kernels
// order a row's loads as those without an activation do.
struct MayActivate : Activate {
  static constexpr bool kBranches = false;

  template <typename Y, typename Acc, int kWidth>
  static FUSED_DEVICE void apply(const ForwardParams& p, Acc (&values)[kWidth]) {
    if (p.activates) ActivateOnly::apply<Y>(p, values);
  }
  static FUSED_DEVICE void for_row(const ForwardParams& p, const auto& body) {
    if (p.has_epilogue) {
      Activate::for_row(p, body);
    } else {
      body(Identity{});
    }
  }
};

}  // namespace fused_layernorm

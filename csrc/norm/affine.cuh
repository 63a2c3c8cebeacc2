// SPDX-License-Identifier: Apache-2.0
// The affine map that follows the normalization, and what may modulate it: to which parameters a
// row's columns belong, and how they are applied.
#pragma once

#include "norm/parameter.cuh"

namespace fused_layernorm {

// Adds weight_offset to weight, and rounds xhat to the type that round_before_weight means: for x
// of half precision this is always x's own type, for float32 x either half-precision type.
template <typename X, typename Acc, int kWidth>
FUSED_DEVICE void adjust_weight(const ForwardParams& p, Acc (&xhat)[kWidth],
                                Acc (&weight)[kWidth]) {
  const Acc offset = p.weight_offset.as<Acc>();
  FUSED_UNROLL for (int j = 0; j < kWidth; ++j) weight[j] += offset;
  const auto round_xhat = [&](auto half, bool wanted) {
    using Half = decltype(half);
    Acc rounded[kWidth];
    unpack(rounded, round_to<Half>(xhat));
    FUSED_UNROLL for (int j = 0; j < kWidth; ++j) xhat[j] = wanted ? rounded[j] : xhat[j];
  };
  if constexpr (sizeof(X) == 2) {
    round_xhat(X{}, p.xhat_rounding != XhatRounding::kNone);
  } else if constexpr (sizeof(X) == 4) {
    if (p.xhat_rounding == XhatRounding::kFloat16) round_xhat(__half{}, true);
    if (p.xhat_rounding == XhatRounding::kBFloat16) round_xhat(__nv_bfloat16{}, true);
  }
}

// The next three structs give a row's two parameters at the vectors of a thread's share, and differ
// in when and how they load these parameters.

// Loaded where they are used. For a missing vector the first columns are read.
template <typename W, int kWidth, typename Share>
struct LateParameters {
  const ColumnParameters<W>& columns;
  const Share& share;

  template <Use kUse = Use::kReadOnly>
  FUSED_DEVICE auto factor(int k) const {
    return load_share<kWidth, kUse>(columns.factor, share, k);
  }
  template <Use kUse = Use::kReadOnly>
  FUSED_DEVICE auto summand(int k) const {
    return load_share<kWidth, kUse>(columns.summand, share, k);
  }
};

// Loaded by load() together with the row, so that they arrive while the row's sums are taken.
template <typename W, int kWidth, int kVecs, Use kUse>
struct EarlyParameters {
  Vec<W, kWidth> weights[kVecs], biases[kVecs];

  template <typename Share>
  FUSED_DEVICE explicit EarlyParameters(const LateParameters<W, kWidth, Share>&) {}
  template <typename Share>
  FUSED_DEVICE void load(const LateParameters<W, kWidth, Share>& parameters) {
    FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
      weights[k] = parameters.template factor<kUse>(k);
      biases[k] = parameters.template summand<kUse>(k);
    }
    FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
      hold(weights[k]);
      hold(biases[k]);
    }
  }
  FUSED_DEVICE const Vec<W, kWidth>& factor(int k) const { return weights[k]; }
  FUSED_DEVICE const Vec<W, kWidth>& summand(int k) const { return biases[k]; }
};

// An affine policy has
//   kModulates  whether there is a modulation, whose shift and scale belong to groups of rows
//   row()       the two parameters that a row's loops load, from `first_col` on
//   for_row()   calls the body with the policy that applies to the row, so that it is chosen once,
//               outside the row's loops
//   apply()     the affine map of a vector of xhat, from the two parameters at its columns.
//               `columns(given, absent)` loads weight or bias at these columns.

// z = xhat * weight + bias. All rows share weight and bias.
struct ColumnAffine {
  static constexpr bool kModulates = false;

  template <typename W>
  static FUSED_DEVICE ColumnParameters<W> row(const ForwardParams& p, int64_t, int first_col) {
    return {p.weight, p.bias, first_col};
  }
  static FUSED_DEVICE void for_row(const ForwardParams&, const auto& body) { body(ColumnAffine{}); }
  template <typename Acc>
  static FUSED_DEVICE Acc apply(Acc xhat, Acc weight, Acc bias) {
    return xhat * weight + bias;
  }
  template <typename Acc, int kWidth>
  static FUSED_DEVICE void apply(const ForwardParams&, Acc (&values)[kWidth],
                                 const Acc (&weight)[kWidth], const Acc (&bias)[kWidth],
                                 const auto&) {
    FUSED_UNROLL for (int j = 0; j < kWidth; ++j) values[j] = apply(values[j], weight[j], bias[j]);
  }
};

// xhat * (1 + scale) + shift.
struct Modulate {
  template <typename Acc, int kWidth>
  static FUSED_DEVICE void apply(const ForwardParams&, Acc (&values)[kWidth],
                                 const Acc (&scale)[kWidth], const Acc (&shift)[kWidth],
                                 const auto&) {
    FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
      values[j] = values[j] * (Acc(1) + scale[j]) + shift[j];
    }
  }
};

// (xhat * weight + bias) * (1 + scale) + shift.
struct AffineAndModulate {
  template <typename Acc, int kWidth>
  static FUSED_DEVICE void apply(const ForwardParams& p, Acc (&values)[kWidth],
                                 const Acc (&scale)[kWidth], const Acc (&shift)[kWidth],
                                 const auto& columns) {
    Acc weight[kWidth], bias[kWidth];
    unpack(weight, columns(p.weight, Absent::kOnes));
    unpack(bias, columns(p.bias, Absent::kZeros));
    ColumnAffine::apply(p, values, weight, bias, columns);
    Modulate::apply(p, values, scale, shift, columns);
  }
};

// Modulate or AffineAndModulate, with shift and scale of the row's group: a row's loops load these
// two, and weight and bias, which such norms seldom have, where they are used.
struct MayBeAffineAndModulate {
  static constexpr bool kModulates = true;
  static constexpr bool kOfRows = false;

  template <typename W>
  static FUSED_DEVICE ColumnParameters<W> row(const ForwardParams& p, int64_t row, int first_col) {
    return of_row<W>(p.modulation, row, first_col);
  }
  template <typename W>
  static FUSED_DEVICE ColumnParameters<W> of_row(const Modulation& m, int64_t row, int first_col) {
    return {row_parameter<W>(m.scale, m.scale_rows, row, first_col, Absent::kZeros),
            row_parameter<W>(m.shift, m.shift_rows, row, first_col, Absent::kZeros)};
  }
  static FUSED_DEVICE void for_row(const ForwardParams& p, const auto& body) {
    if (p.weight != nullptr || p.bias != nullptr) {
      body(AffineAndModulate{});
    } else {
      body(Modulate{});
    }
  }
  template <typename Acc, int kWidth>
  static FUSED_DEVICE void apply(const ForwardParams& p, Acc (&values)[kWidth],
                                 const Acc (&scale)[kWidth], const Acc (&shift)[kWidth],
                                 const auto& columns) {
    for_row(p, [&](auto affine) { affine.apply(p, values, scale, shift, columns); });
  }
};

// Whether each row has its own shift and scale.
template <typename Affine>
constexpr bool is_of_rows() {
  if constexpr (Affine::kModulates) return Affine::kOfRows;
  return false;
}

// In backward: a group is one row, so the gradients of its shift and scale are not sums over rows.
struct MayBeAffineAndModulateRow : MayBeAffineAndModulate {
  static constexpr bool kOfRows = true;
};

}  // namespace fused_layernorm

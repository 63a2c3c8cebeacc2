// SPDX-License-Identifier: Apache-2.0
// The prologue: what x, the row to be normalized, is made of, and in backward what is added to dx.
//
// A prologue has
//   kMayStore     whether it may store x as well (residual_out)
//   kMayBePlain   whether x may be the input alone, which is not stored
//   Row<T>        one row of its inputs, of data types T
// and a Row has
//   first_elements()  x at the row's first two columns; a row of one column gives its x twice. In
//                     half precision the second is zero, as the statistic does not use it.
//   load()            loads a thread's share of x; `policy` says what becomes of it in L2
//   load_shifted()    the same by vectors, for an unaligned row (device/shifted.cuh). Calls then()
//                     once, as soon as further loads need not wait for x.
#pragma once

#include "base/params.h"
#include "device/reduce.cuh"
#include "device/share.cuh"
#include "device/shifted.cuh"
#include "device/vec.cuh"
#include "norm/parameter.cuh"

namespace fused_layernorm {

// x = input.
struct Plain {
  static constexpr bool kMayStore = false;
  static constexpr bool kMayBePlain = true;

  template <typename T>
  struct Row {
    using X = typename T::X;
    const X* x;

    FUSED_DEVICE Row(const ForwardParams& p, int64_t row, int first_col)
        : x(static_cast<const X*>(p.input) + (p.input_rows(row) + first_col)) {}

    FUSED_DEVICE Pair<typename T::Acc> first_elements(int cols) const {
      return {to_acc(*x), sizeof(X) == 2 ? 0 : to_acc(x[cols > 1])};
    }

    template <Use kUse, int kWidth, int kVecs, typename Policy = EvictFirst>
    FUSED_DEVICE void load(Vec<X, kWidth> (&out)[kVecs], const auto& share,
                           Policy policy = Policy{}) const {
      FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
        out[k] = {};
        if (share.has(k)) {
          out[k] =
              fused_layernorm::load<kUse, kWidth>(element(x, share.vector(k) * kWidth), policy);
        }
      }
    }

    template <int kWidth, int kVecs, typename Team, int kMayMiss>
    FUSED_DEVICE void load_shifted(Vec<X, kWidth> (&out)[kVecs], const Team&,
                                   const RaggedShare<kVecs, kWidth, kMayMiss>& share, bool,
                                   const auto& then) const {
      fused_layernorm::load_shifted<0>(out, ShiftedRow<const X, kWidth>(x), share, then);
      keep_columns(out, share);
    }
  };
};

// x = residual + input or residual + gate * input, rounded to residual's type and stored.
template <bool kGated>
struct Adding {
  static constexpr bool kMayStore = true;
  static constexpr bool kMayBePlain = false;

  template <typename T>
  struct Row {
    using X = typename T::X;
    using In = typename T::In;
    using W = typename T::W;
    const In* input;
    const X* residual;
    X* residual_out;
    Parameter<W> gate;

    FUSED_DEVICE Row(const ForwardParams& p, int64_t row, int first_col)
        : input(static_cast<const In*>(p.input) + (p.input_rows(row) + first_col)),
          residual(static_cast<const X*>(p.residual) + p.residual_rows(row) + first_col),
          residual_out(static_cast<X*>(p.residual_out) + (row * p.cols + first_col)),
          gate(row_parameter<W>(kGated ? p.modulation.gate : nullptr, p.modulation.gate_rows, row,
                                first_col, Absent::kOnes)) {}

    FUSED_DEVICE Pair<typename T::Acc> first_elements(int cols) const {
      const auto at = [&](int col) {
        const auto sum = kGated ? fma(to_acc(gate.at[col & gate.mask]), to_acc(input[col]),
                                      to_acc(residual[col]))
                                : to_acc(input[col]) + to_acc(residual[col]);
        return to_acc(from_acc<X>(sum));
      };
      return {at(0), sizeof(X) == 2 ? 0 : at(cols > 1)};
    }

    // The sum of residual `x` and input `added` at a thread's vector k, rounded once.
    template <int kWidth>
    FUSED_DEVICE Vec<X, kWidth> sum_of(const Vec<X, kWidth>& x, const Vec<In, kWidth>& added,
                                       const auto& share, int k) const {
      Vec<W, kWidth> gates = {};
      if constexpr (kGated) gates = load_share<kWidth>(gate, share, k);
      acc_t<X> sum[kWidth], summand[kWidth], factor[kWidth];
      unpack(sum, x);
      unpack(summand, added);
      unpack(factor, gates);
      FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
        if constexpr (kGated) {
          sum[j] = fma(factor[j], summand[j], sum[j]);
        } else {
          sum[j] += summand[j];
        }
      }
      return round_to<X>(sum);
    }

    template <Use kUse, int kWidth, int kVecs, typename Policy = EvictFirst>
    FUSED_DEVICE void load(Vec<X, kWidth> (&out)[kVecs], const auto& share,
                           Policy policy = Policy{}) const {
      FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
        out[k] = {};
        if (share.has(k)) {
          out[k] = fused_layernorm::load<kUse, kWidth>(element(residual, share.vector(k) * kWidth),
                                                       policy);
        }
      }
      Vec<In, kWidth> added[kVecs];
      FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
        added[k] = {};
        if (share.has(k)) {
          constexpr Use kInputUse = kUse == Use::kInOrder ? Use::kOnce : kUse;
          added[k] = fused_layernorm::load<kInputUse, kWidth>(
              element(input, share.vector(k) * kWidth), policy);
        }
      }
      FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
        out[k] = sum_of(out[k], added[k], share, k);
        if (share.has(k)) {
          store_once(element(residual_out, share.vector(k) * kWidth), out[k], policy);
        }
      }
    }

    // Nothing is stored for a team without a row of its own (`valid_row` is false).
    template <int kWidth, int kVecs, int kMayMiss>
    FUSED_DEVICE void load_shifted(Vec<X, kWidth> (&out)[kVecs], const auto& team,
                                   const RaggedShare<kVecs, kWidth, kMayMiss>& share,
                                   bool valid_row, const auto& then) const {
      fused_layernorm::load_shifted<0>(out, ShiftedRow<const X, kWidth>(residual), share, then);
      const ShiftedRow<const In, kWidth> added_row(input);
      const auto add = [&](auto first, auto count) {
        Vec<In, kWidth> added[count()];
        fused_layernorm::load_shifted<first()>(added, added_row, share, [] {});
        FUSED_UNROLL for (int n = 0; n < count(); ++n) {
          const int k = first() + n;
          out[k] = sum_of(out[k], added[n], share, k);
        }
      };
      // The input is loaded as many vectors at once as there are registers for.
      in_turn<kVecs, 4 * kMayMiss>(add);
      keep_columns(out, share);
      store_shifted<X, kWidth, kVecs>(residual_out, team, share, valid_row ? share.cols : 0,
                                      [&](int k) { return out[k]; });
    }
  };
};

using Add = Adding<false>;
using AddGated = Adding<true>;

// A sum or the input as it is: params.residual says which. It is tested outside the row's loops.
template <typename Sum>
struct OrPlain {
  static constexpr bool kMayStore = true;
  static constexpr bool kMayBePlain = true;

  template <typename T>
  struct Row {
    using X = typename T::X;
    const ForwardParams& p;
    const int64_t row;
    const int first_col;

    FUSED_DEVICE Row(const ForwardParams& params, int64_t its_row, int its_first_col)
        : p(params), row(its_row), first_col(its_first_col) {}

    // Calls the body with this row as one of the prologue that applies, Sum or Plain.
    FUSED_DEVICE auto as_it_is(const auto& body) const {
      if (p.residual != nullptr) return body(typename Sum::template Row<T>(p, row, first_col));
      return body(Plain::Row<T>(p, row, first_col));
    }

    FUSED_DEVICE Pair<typename T::Acc> first_elements(int cols) const {
      return as_it_is([&](const auto& as) { return as.first_elements(cols); });
    }
    template <Use kUse, int kWidth, int kVecs, typename Policy = EvictFirst>
    FUSED_DEVICE void load(Vec<X, kWidth> (&out)[kVecs], const auto& share,
                           Policy policy = Policy{}) const {
      as_it_is([&](const auto& as) { as.template load<kUse>(out, share, policy); });
    }
    template <int kWidth, int kVecs, int kMayMiss>
    FUSED_DEVICE void load_shifted(Vec<X, kWidth> (&out)[kVecs], const auto& team,
                                   const RaggedShare<kVecs, kWidth, kMayMiss>& share,
                                   bool valid_row, const auto& then) const {
      as_it_is([&](const auto& as) { as.load_shifted(out, team, share, valid_row, then); });
    }
  };
};

using MayAdd = OrPlain<Add>;
using MayAddGated = OrPlain<AddGated>;

// Backward: dx is stored as it is.
struct NoOtherGradient {
  static constexpr bool kMayAdd = false;
  static constexpr bool kGated = false;
};

// Backward: a gradient that reaches x past the norm, dresidual, may be added to dx.
struct MayAddGradient {
  static constexpr bool kMayAdd = true;
  static constexpr bool kGated = false;
};

// Backward of x = residual + gate * input, whose gradients of input and gate follow from dx.
struct GatedGradient {
  static constexpr bool kMayAdd = true;
  static constexpr bool kGated = true;
};

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// Forward of gated RMSNorm; gated/plan.h says how it is laid out.
#include "gated/row.cuh"

namespace fused_layernorm {
namespace {

// Rounds to a type of half precision: to X if x has it, else to either one beside float32.
template <typename X, int kWidth, typename Acc>
FUSED_DEVICE void round_as(Acc (&values)[kWidth], XhatRounding rounding) {
  if (rounding == XhatRounding::kNone) return;
  if constexpr (sizeof(X) == 2) {
    unpack(values, round_to<X>(values));
  } else if constexpr (sizeof(X) == 4) {
    if (rounding == XhatRounding::kFloat16) {
      unpack(values, round_to<__half>(values));
    } else {
      unpack(values, round_to<__nv_bfloat16>(values));
    }
  }
}

// Stores y: of x's type, of float32 beside half precision, or of half precision beside float32.
template <typename X, int kWidth, typename Acc, typename Policy>
FUSED_DEVICE void store_y(const GatedParams& p, int64_t at, const Acc (&values)[kWidth],
                          Policy policy) {
  const auto store_as = [&](auto type) {
    using Y = decltype(type);
    store_once<Y, kWidth>(static_cast<Y*>(p.y) + at, round_to<Y>(values), policy);
  };
  if (p.y_type == kTypeOf<X>) {
    store_as(X{});
  } else if constexpr (sizeof(X) == 2) {
    store_as(float{});
  } else if constexpr (sizeof(X) == 4) {
    if (p.y_type == DataType::kFloat16) {
      store_as(__half{});
    } else {
      store_as(__nv_bfloat16{});
    }
  }
}

// values *= activation(gate). Where x and y are of half precision it is of the coarse grade, and
// asked for outside the loop: an element has time for few instructions.
template <typename X, int kWidth, typename Acc>
FUSED_DEVICE void apply_gate(const GatedParams& p, Acc (&values)[kWidth],
                             const Vec<X, kWidth>& gate) {
  Acc gates[kWidth];
  unpack(gates, gate);
  const auto apply = [&](auto grade, bool silu) {
    FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
      values[j] *= Gating<decltype(grade), Acc>(gates[j], silu).value;
    }
  };
  if (sizeof(X) > 2 || p.y_type != kTypeOf<X>) {
    apply(Acc{}, p.silu);
  } else if (p.silu) {
    apply(X{}, true);
  } else {
    apply(X{}, false);
  }
}

// What is normalized: x, or with the gate in front x * activation(gate).
template <bool kGateFirst, typename X, int kWidth, typename Acc>
FUSED_DEVICE void normalized_of(const GatedParams& p, Acc (&values)[kWidth],
                                const Vec<X, kWidth>& x, const Vec<X, kWidth>& gate) {
  unpack(values, x);
  if constexpr (kGateFirst) apply_gate(p, values, gate);
}

// The products of elements of half precision, two by an instruction. Each is exact in float32 (if
// it is not subnormal), so that it is rounded here as it would be there.
template <typename X, int kWidth>
FUSED_DEVICE Vec<X, kWidth> product(const Vec<X, kWidth>& a, const Vec<X, kWidth>& b) {
  using Pair = std::conditional_t<std::is_same_v<X, __half>, __half2, __nv_bfloat162>;
  Vec<X, kWidth> v;
  FUSED_UNROLL for (int j = 0; j < kWidth; j += 2) {
    *reinterpret_cast<Pair*>(v.at + j) = __hmul2_rn(*reinterpret_cast<const Pair*>(a.at + j),
                                                    *reinterpret_cast<const Pair*>(b.at + j));
  }
  return v;
}

// xhat, which `values` hold, * (weight + weight_offset) + bias, at the columns from `col` on.
template <typename X, int kWidth, typename Acc>
FUSED_DEVICE void apply_affine(const GatedParams& p, Acc (&values)[kWidth],
                               const Acc (&weight)[kWidth], int col) {
  round_as<X>(values, p.xhat_rounding);
  FUSED_UNROLL for (int j = 0; j < kWidth; ++j) values[j] *= weight[j];
  if (p.bias != nullptr) {
    Acc bias[kWidth];
    load_gated<X>(bias, p.bias, col, p.weight_is_float, Acc(0));
    FUSED_UNROLL for (int j = 0; j < kWidth; ++j) values[j] += bias[j];
  }
  round_as<X>(values, p.affine_rounding);
}

// The same with a loaded weight.
template <typename X, int kWidth>
FUSED_DEVICE void apply_affine(const GatedParams& p, float (&values)[kWidth],
                               const WeightVector<X>& loaded, int col) {
  if constexpr (sizeof(X) == 2) {
    if (p.is_one_type) return unpack(values, product(round_to<X>(values), loaded.vector()));
  }
  float weight[kWidth];
  loaded.unpack_to(weight, p);
  apply_affine<X>(p, values, weight, col);
}

template <typename Acc>
FUSED_DEVICE Acc rstd_of(const GatedParams& p, Acc squares) {
  return MeanAndVariance::rstd(squares, p.inverse_cols.as<Acc>(), p.eps.as<Acc>());
}

template <typename X, int kVecs, bool kGateFirst>
__global__ void __launch_bounds__(kVecs < kGatedManyVecs ? kGatedWarpThreads : kGatedBlockThreads,
                                  kVecs < kGatedManyVecs ? kGatedWarpBlocks : 1)
    gated_forward_kernel(const int log2_lanes, const bool stays_in_l2, const GatedParams p) {
  constexpr int kWidth = vector_width(sizeof(X));
  __shared__ alignas(16) float scratch[kMaxWarps];
  const GatedBlock block(p);
  const GatedTeam team(log2_lanes);
  const int first_col = block.first_col(p);
  const unsigned own_row = block.set * team.teams + team.index, rows = p.rows;
  const bool has_row = own_row < rows;
  const unsigned row = has_row ? own_row : rows - 1;
  const Share<kVecs> share{team.thread, team.threads,
                           static_cast<int>(static_cast<unsigned>(p.cols) / kWidth)};
  const X* x_row = static_cast<const X*>(p.x) + (p.x_rows(row) + first_col);
  const X* gate_row = static_cast<const X*>(p.gate) + (p.gate_rows(row) + first_col);
  // Of many vectors the plan says what becomes of a row in L2; of one vector it is evict_first.
  using Policy = std::conditional_t<kVecs == kGatedManyVecs, L2Policy, EvictFirst>;
  const Policy policy = [&] {
    if constexpr (kVecs == kGatedManyVecs)
      return L2Policy(stays_in_l2);
    else
      return EvictFirst{};
  }();
  Vec<X, kWidth> x[kVecs] = {}, gate[kVecs] = {};
  FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
    const int col = share.vector(k) * kWidth;
    if (!share.has(k)) continue;
    x[k] = load<Use::kOnce, kWidth>(element(x_row, col), policy);
    gate[k] = load<Use::kOnce, kWidth>(element(gate_row, col), policy);
  }
  // Of one vector the weight is loaded with the row; of more, where it is used.
  constexpr bool kEarly = kVecs < kGatedManyVecs;
  WeightVector<X> weights[kEarly ? kVecs : 1];
  const auto weight_at = [&](int k) {
    return WeightVector<X>(p, first_col, share.template col<kWidth>(k));
  };
  FUSED_UNROLL for (int k = 0; kEarly && k < kVecs; ++k) weights[k] = weight_at(k);
  // With the gate in front, what is normalized takes as many registers as x and gate.
  constexpr int kKept = kGateFirst ? kVecs : 1;
  float kept[kKept][kWidth];
  float squares = 0;
  FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
    float (&values)[kWidth] = kept[kGateFirst ? k : 0];
    normalized_of<kGateFirst>(p, values, x[k], gate[k]);
    float square[kWidth];
    FUSED_UNROLL for (int j = 0; j < kWidth; ++j) square[j] = values[j] * values[j];
    squares += tree_sum(square);
  }
  const float rstd = rstd_of(p, team.sum(squares, scratch));
  if (!has_row) return;
  if (team.thread == 0 && p.rstd != nullptr) {
    static_cast<float*>(p.rstd)[int64_t{row} * p.groups + block.group] = rstd;
  }
  const int64_t at = dense_at(p, row, first_col);
  FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
    if (!share.has(k)) continue;
    const int col = share.vector(k) * kWidth;
    float values[kWidth];
    if constexpr (kGateFirst) {
      FUSED_UNROLL for (int j = 0; j < kWidth; ++j) values[j] = kept[k][j] * rstd;
    } else {
      unpack(values, x[k]);
      FUSED_UNROLL for (int j = 0; j < kWidth; ++j) values[j] *= rstd;
    }
    if (!kEarly) weights[0] = weight_at(k);
    apply_affine(p, values, weights[kEarly ? k : 0], first_col + col);
    if constexpr (!kGateFirst) apply_gate(p, values, gate[k]);
    store_y<X>(p, at + col, values, policy);
  }
}

template <typename X, bool kGateFirst>
__global__ void __launch_bounds__(kLoopThreads) gated_forward_loop_kernel(const GatedParams p) {
  using Acc = acc_t<X>;
  __shared__ alignas(16) Acc scratch[kMaxWarps];
  const GatedBlock block(p);
  const int first_col = block.first_col(p), row = block.set;
  const X* x_row = static_cast<const X*>(p.x) + (p.x_rows(row) + first_col);
  const X* gate_row = static_cast<const X*>(p.gate) + (p.gate_rows(row) + first_col);
  const auto each = [&](const auto& use) {
#pragma unroll 4
    for (unsigned col = threadIdx.x; col < static_cast<unsigned>(p.cols); col += blockDim.x) {
      const auto gate = load<Use::kReadOnly, 1>(gate_row + col);
      Acc value[1];
      normalized_of<kGateFirst>(p, value, load<Use::kReadOnly, 1>(x_row + col), gate);
      use(static_cast<int>(col), value, gate);
    }
  };
  Acc squares = 0;
  each([&](int, const Acc(&value)[1], const auto&) { squares += value[0] * value[0]; });
  const Acc rstd = rstd_of(p, team_sum(squares, BlockTeam(), scratch));
  if (threadIdx.x == 0 && p.rstd != nullptr) {
    static_cast<Acc*>(p.rstd)[int64_t{row} * p.groups + block.group] = rstd;
  }
  const int64_t at = dense_at(p, row, first_col);
  each([&](int col, Acc(&value)[1], const auto& gate) {
    Acc weight[1];
    load_weight<X>(weight, p, first_col + col);
    value[0] *= rstd;
    apply_affine<X>(p, value, weight, first_col + col);
    if constexpr (!kGateFirst) apply_gate(p, value, gate);
    store_y<X>(p, at + col, value, EvictFirst{});
  });
}

}  // namespace

cudaError_t launch_gated_forward(const GatedParams& params, DataType x, const GatedPlan& plan,
                                 cudaStream_t stream) {
  return dispatch_gated(
      params, x, plan,
      [&](auto type, auto first, auto vecs) {
        return launch(gated_forward_kernel<decltype(type), vecs(), first()>, plan, stream,
                      plan.log2_lanes, plan.stays_in_l2, params);
      },
      [&](auto type, auto first) {
        return launch(gated_forward_loop_kernel<decltype(type), first()>, plan, stream, params);
      });
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// A group of a row of a gated norm: the team that has it, its gate, and its parameters.
#pragma once

#include "base/launch.cuh"
#include "device/reduce.cuh"
#include "device/share.cuh"
#include "gated/plan.h"
#include "norm/activation.cuh"
#include "norm/statistic.cuh"
#include "norm/types.cuh"

namespace fused_layernorm {

// The value of a gate's activation, and its derivative. `Y` says how fine (norm/activation.cuh).
template <typename Y, typename Acc>
struct Gating {
  Acc value, slope;

  FUSED_DEVICE Gating(Acc gate, bool silu) {
    const Logistic<Acc> s = logistic<Y>(gate);
    // The logistic function is not NaN for NaN, but its product with it is.
    const Acc factor = silu || gate != gate ? gate : Acc(1);
    value = s.value * factor;
    slope = s.value * fma(s.complement, factor, silu ? Acc(1) : Acc(0));
  }
};

// A logical warp, or the whole block.
struct GatedTeam {
  int threads, thread, index, teams;  // index: of the team in its block, which has so many
  bool is_block;

  FUSED_DEVICE explicit GatedTeam(int log2_lanes)
      : threads(log2_lanes == kBlockTeam ? blockDim.x : 1 << log2_lanes),
        thread(threadIdx.x & ((1 << log2_lanes) - 1)),
        index(threadIdx.x >> log2_lanes),
        teams(log2_lanes == kBlockTeam ? 1 : blockDim.x >> log2_lanes),
        is_block(log2_lanes == kBlockTeam) {}

  // `scratch` is free again behind another barrier of the block.
  template <typename Acc>
  FUSED_DEVICE Acc sum(Acc v, Acc* scratch) const {
    return is_block ? team_sum(v, BlockTeam(), scratch) : logical_warp_sum(v, threads);
  }
};

// A block's group of columns, its number among the blocks of this group, and how many they are.
struct GatedBlock {
  int group;
  unsigned set, sets;

  FUSED_DEVICE explicit GatedBlock(const GatedParams& p)
      : group(0), set(blockIdx.x), sets(gridDim.x) {
    if (p.groups > 1) {  // divisions take time that few rows do not have
      group = blockIdx.x % p.groups;
      set = blockIdx.x / p.groups;
      sets = gridDim.x / p.groups;
    }
  }
  // The first column.
  FUSED_DEVICE int first_col(const GatedParams& p) const { return group * p.cols; }
};

// Where a group begins in a tensor that has rows of all groups side by side.
FUSED_DEVICE int64_t dense_at(const GatedParams& p, unsigned row, int first_col) {
  return int64_t{row} * static_cast<uint32_t>(p.groups * p.cols) + first_col;
}

// weight or bias at columns, `absent` without it.
template <typename X, int kWidth, typename Acc>
FUSED_DEVICE void load_gated(Acc (&values)[kWidth], const void* from, int col, bool is_float,
                             Acc absent) {
  FUSED_UNROLL for (int j = 0; j < kWidth; ++j) values[j] = absent;
  if (from == nullptr) return;
  if constexpr (sizeof(X) == 2) {
    if (is_float) {
      unpack(values, load<Use::kReadOnly, kWidth>(element(static_cast<const float*>(from), col)));
      return;
    }
  }
  unpack(values, load<Use::kReadOnly, kWidth>(element(static_cast<const X*>(from), col)));
}

// weight + weight_offset.
template <typename X, int kWidth, typename Acc>
FUSED_DEVICE void load_weight(Acc (&values)[kWidth], const GatedParams& p, int col) {
  load_gated<X>(values, p.weight, col, p.weight_is_float, Acc(1));
  FUSED_UNROLL for (int j = 0; j < kWidth; ++j) values[j] += p.weight_offset.as<Acc>();
}

// weight at the columns of a vector, in pieces of 16 bytes. Its type is asked apart from the load,
// and x is loaded for a missing one: no branch and no wait stands between a row's loads.
template <typename X>
struct WeightVector {
  static constexpr int kWidth = vector_width(sizeof(X));
  Vec<float, 4> low = {}, high = {};  // high: of float32 beside half precision

  WeightVector() = default;
  // At column `col` of the group that begins at `first_col`.
  FUSED_DEVICE WeightVector(const GatedParams& p, int first_col, int col) {
    const int size = is_wide(p) ? sizeof(float) : sizeof(X);
    const auto* const first =
        static_cast<const char*>(p.weight != nullptr ? p.weight : p.x) + int64_t{first_col} * size;
    const auto* const at =
        reinterpret_cast<const float*>(first + static_cast<uint32_t>(col) * size);
    low = load<Use::kReadOnly, 4>(at);
    if (is_wide(p)) high = load<Use::kReadOnly, 4>(at + 4);
  }
  static FUSED_DEVICE bool is_wide(const GatedParams& p) {
    return sizeof(X) == 2 && p.weight_is_float && p.weight != nullptr;
  }
  // As it lies in memory, of x's type.
  FUSED_DEVICE const Vec<X, kWidth>& vector() const {
    return *reinterpret_cast<const Vec<X, kWidth>*>(low.at);
  }
  // weight + weight_offset.
  FUSED_DEVICE void unpack_to(float (&values)[kWidth], const GatedParams& p) const {
    if (is_wide(p)) {
      FUSED_UNROLL for (int j = 0; j < kWidth; ++j) values[j] = j < 4 ? low.at[j] : high.at[j % 4];
    } else {
      unpack(values, vector());
    }
    if (p.weight == nullptr) {
      FUSED_UNROLL for (float& value : values) value = 1;
    }
    if (p.weight_offset.rounded == 0.0f) return;
    FUSED_UNROLL for (int j = 0; j < kWidth; ++j) values[j] += p.weight_offset.rounded;
  }
};

// Calls held(X{}, gate_first, vecs) or looped(X{}, gate_first), as the plan says.
cudaError_t dispatch_gated(const GatedParams& params, DataType x, const GatedPlan& plan,
                           const auto& held, const auto& looped) {
  const auto with_type = [&](auto type) {
    return dispatch_bool(params.gate_first, [&](auto first) {
      if (!plan.held) return looped(type, first);
      if constexpr (sizeof(type) <= sizeof(float)) {
        return dispatch_vecs(GatedVecs{}, plan.vecs,
                             [&](auto vecs) { return held(type, first, vecs); });
      }
      return cudaErrorInvalidValue;
    });
  };
  if (x == DataType::kFloat32) return with_type(float{});
  if (x == DataType::kBFloat16) return with_type(__nv_bfloat16{});
#ifndef FUSED_LAYERNORM_TRIMMED
  if (x == DataType::kFloat16) return with_type(__half{});
  if (x == DataType::kFloat64) return with_type(double{});
#endif
  return cudaErrorInvalidValue;
}

}  // namespace fused_layernorm

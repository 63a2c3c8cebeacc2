// SPDX-License-Identifier: Apache-2.0
// A row of a head: which columns a lane has, its statistics, and its rotation.
#pragma once

#include <type_traits>

#include "device/reduce.cuh"
#include "device/vec.cuh"
#include "heads/params.h"
#include "norm/statistic.cuh"

namespace fused_layernorm {

// The elements of a parameter of x's type or float32.
template <typename X, int kWidth>
FUSED_DEVICE void load_floats(float (&values)[kWidth], const void* from, int64_t at,
                              bool is_float) {
  if (is_float) {
    unpack(values, load<Use::kReadOnly, kWidth>(static_cast<const float*>(from) + at));
  } else {
    unpack(values, load<Use::kReadOnly, kWidth>(static_cast<const X*>(from) + at));
  }
}

// What of a row a lane has: kPairs pairs of vectors. Vectors 2 k and 2 k + 1 are a pair.
// kInterleaved counts for vectors of several elements, which then hold whole pairs of elements;
// their pairs of vectors are those of the row's two halves, whatever is rotated.
template <typename X_, int kWidth_, int kPairs_, bool kInterleaved_>
struct HeadLane {
  using X = X_;
  static constexpr int kWidth = kWidth_, kPairs = kPairs_, kVecs = 2 * kPairs;
  static constexpr bool kInterleaved = kInterleaved_;
  using Values = float[kVecs][kWidth];

  int first;  // the lane that has the row's first columns
  int col[kVecs];
  bool has[kPairs];

  FUSED_DEVICE explicit HeadLane(const HeadsCall& p) {
    const int lane = threadIdx.x % kWarpSize;
    first = lane & -p.lanes;
    const int turned = p.rotary / (2 * kWidth);
    FUSED_UNROLL for (int k = 0; k < kPairs; ++k) {
      const int pair = lane - first + k * p.lanes;
      has[k] = pair < p.cols / (2 * kWidth);
      if (kInterleaved) {
        col[2 * k] = pair * kWidth;
        col[2 * k + 1] = p.cols / 2 + pair * kWidth;
      } else if (pair < turned && !p.interleaved) {
        col[2 * k] = pair * kWidth;
        col[2 * k + 1] = p.rotary / 2 + pair * kWidth;
      } else {
        col[2 * k] = 2 * pair * kWidth;
        col[2 * k + 1] = col[2 * k] + kWidth;
      }
    }
  }

  // Calls f(v, j) for the elements that the lane has.
  FUSED_DEVICE void each(const auto& f) const {
    FUSED_UNROLL for (int v = 0; v < kVecs; ++v) {
      if (!has[v / 2]) continue;
      FUSED_UNROLL for (int j = 0; j < kWidth; ++j) f(v, j);
    }
  }

  // Rounds to x's type. (Whole vectors: two elements take one instruction.)
  FUSED_DEVICE void round(Values& values) const {
    FUSED_UNROLL for (int v = 0; v < kVecs; ++v) unpack(values[v], round_to<X>(values[v]));
  }

  // Loads a row; what the lane does not have is zero.
  template <Use kUse>
  FUSED_DEVICE void load_row(Vec<X, kWidth> (&row)[kVecs], const X* from, bool has_row) const {
    FUSED_UNROLL for (int v = 0; v < kVecs; ++v) {
      FUSED_UNROLL for (int j = 0; j < kWidth; ++j) row[v].at[j] = from_acc<X>(0.0f);
      if (has_row && has[v / 2]) row[v] = load<kUse, kWidth>(from + col[v]);
    }
  }

  FUSED_DEVICE void store_row(X* to, const Values& values) const {
    FUSED_UNROLL for (int v = 0; v < kVecs; ++v) {
      if (has[v / 2]) store_once<X, kWidth>(to + col[v], round_to<X>(values[v]));
    }
  }

  FUSED_DEVICE void copy_row(X* to, const Vec<X, kWidth> (&row)[kVecs]) const {
    FUSED_UNROLL for (int v = 0; v < kVecs; ++v) {
      if (has[v / 2]) store_once(to + col[v], row[v]);
    }
  }

  // A parameter of the columns, `absent` without one or where the lane has no columns.
  FUSED_DEVICE void load_parameter(Values& values, const void* from, bool is_float,
                                   float absent) const {
    FUSED_UNROLL for (int v = 0; v < kVecs; ++v) {
      FUSED_UNROLL for (int j = 0; j < kWidth; ++j) values[v][j] = absent;
      if (from != nullptr && has[v / 2]) load_floats<X>(values[v], from, col[v], is_float);
    }
  }

  FUSED_DEVICE void load_weight(Values& weight, const HeadsCall& p, const HeadSide& side) const {
    load_parameter(weight, side.weight, side.weight_is_float, 1);
    if (side.weight != nullptr) each([&](int v, int j) { weight[v][j] += p.weight_offset; });
  }

  // Subtracts the row's mean, if the statistic has one.
  FUSED_DEVICE void center(const HeadsCall& p, Values& values) const {
    if (p.statistic != HeadStatistic::kLayer) return;
    const float pivot = MeanAndVariance::pivot<X>(Pair<float>{
        __shfl_sync(kFullWarp, values[0][0], first), __shfl_sync(kFullWarp, values[1][0], first)});
    float sum = 0;
    each([&](int v, int j) { sum += values[v][j] - pivot; });
    const float mean =
        Reciprocal<float>(p.inverse_cols).mean(pivot, logical_warp_sum(sum, p.lanes));
    each([&](int v, int j) { values[v][j] -= mean; });
  }

  // The lane's part of the sum of squares.
  FUSED_DEVICE float squares(const Values& values) const {
    float sum[kVecs] = {};
    FUSED_UNROLL for (int v = 0; v < kVecs; ++v) {
      FUSED_UNROLL for (int j = 0; j < kWidth; ++j) sum[v] += values[v][j] * values[v][j];
    }
    return tree_sum(sum);
  }
};

// cos and sin of one position, at the pairs that a lane has.
template <typename Lane>
struct Rotation {
  static constexpr int kWidth = Lane::kWidth, kPairs = Lane::kPairs;
  using Values = typename Lane::Values;
  float cos[kPairs][kWidth], sin[kPairs][kWidth];
  bool turns[2 * kPairs];  // whether a vector is rotated

  // Of position `seq` of sample `batch`.
  FUSED_DEVICE Rotation(const HeadsCall& p, const Lane& lane, unsigned batch, unsigned seq) {
    const int64_t of_cos = batch * p.cos_strides.batch + seq * p.cos_strides.position;
    const int64_t of_sin = batch * p.sin_strides.batch + seq * p.sin_strides.position;
    FUSED_UNROLL for (int v = 0; v < 2 * kPairs; ++v) {
      turns[v] = lane.has[v / 2] && lane.col[v] < p.rotary;
    }
    FUSED_UNROLL for (int k = 0; k < kPairs; ++k) {
      FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
        cos[k][j] = 1;
        sin[k][j] = 0;
      }
      if constexpr (Lane::kInterleaved) {
        FUSED_UNROLL for (int half = 0; half < 2; ++half) {
          if (!turns[2 * k + half]) continue;
          const int col = lane.col[2 * k + half];
          load_half(cos[k], half, p, p.cos, of_cos, col);
          load_half(sin[k], half, p, p.sin, of_sin, col);
        }
      } else if (turns[2 * k]) {
        // The first of two interleaved elements of a lane stands at an even column.
        const int col = lane.col[2 * k];
        const int at = kWidth == 1 && p.interleaved && !p.doubled ? col / 2 : col;
        load_floats<typename Lane::X>(cos[k], p.cos, of_cos + at, p.angles_are_float);
        load_floats<typename Lane::X>(sin[k], p.sin, of_sin + at, p.angles_are_float);
      }
      FUSED_UNROLL for (int j = 0; j < kWidth; ++j) sin[k][j] *= p.sin_sign;
    }
  }

  // A pair (a, b) becomes (a cos - b sin, b cos + a sin).
  FUSED_DEVICE void apply(Values& values) const {
    FUSED_UNROLL for (int i = 0; i < kPairs * kWidth; ++i) {
      const int k = i / kWidth, j = i % kWidth;
      // Interleaved pairs: the first half of them is in the first vector, the others in the second.
      const int v = 2 * k + (Lane::kInterleaved ? 2 * j / kWidth : 0);
      if (!turns[v]) continue;
      float& a = values[v][Lane::kInterleaved ? 2 * j % kWidth : j];
      float& b = Lane::kInterleaved ? values[v][2 * j % kWidth + 1] : values[2 * k + 1][j];
      const float first = a * cos[k][j] - b * sin[k][j];
      b = b * cos[k][j] + a * sin[k][j];
      a = first;
    }
  }

 private:
  // The angles of one vector of interleaved pairs: half as many as it has elements.
  static FUSED_DEVICE void load_half(float (&angles)[kWidth], int half, const HeadsCall& p,
                                     const void* from, int64_t row, int col) {
    constexpr int kHalf = kWidth / 2 > 0 ? kWidth / 2 : 1;
    float found[kWidth];
    if (p.doubled) {
      load_floats<typename Lane::X>(found, from, row + col, p.angles_are_float);
      FUSED_UNROLL for (int j = 0; j < kHalf; ++j) angles[half * kHalf + j] = found[2 * j];
    } else {
      float few[kHalf];
      load_floats<typename Lane::X>(few, from, row + col / 2, p.angles_are_float);
      FUSED_UNROLL for (int j = 0; j < kHalf; ++j) angles[half * kHalf + j] = few[j];
    }
  }
};

// What a lane's rows of one task are: a position, and some of its heads.
struct HeadTask {
  unsigned batch, seq;
  unsigned head;  // of the first round
  bool has;       // whether there is such a position

  FUSED_DEVICE HeadTask(const HeadsCall& p, const HeadSide& side, int rounds, unsigned task) {
    const unsigned set = task / static_cast<unsigned>(side.chunks);
    const unsigned chunk = task - set * side.chunks;
    // Shifts, as divisions by these powers of two would take as long as several elements do.
    const int log2_lanes = __ffs(p.lanes) - 1, log2_at_once = __ffs(side.at_once) - 1;
    const unsigned group = threadIdx.x % kWarpSize >> log2_lanes;
    const unsigned positions = kWarpSize >> log2_lanes >> log2_at_once;
    const unsigned position = set * positions + (group >> log2_at_once);
    has = position < static_cast<unsigned>(p.positions);
    batch = has ? position / static_cast<unsigned>(p.seq) : 0;
    seq = has ? position - batch * p.seq : 0;
    head = (chunk * rounds << log2_at_once) + (group & (side.at_once - 1));
  }
  // The head that the lane has in a round, which may be beyond the last.
  FUSED_DEVICE unsigned head_of(const HeadSide& side, int round) const {
    return head + round * side.at_once;
  }
  // Whether the lane has a row in a round.
  FUSED_DEVICE bool has_row(const HeadSide& side, int round) const {
    return has && head_of(side, round) < static_cast<unsigned>(side.heads);
  }
};

template <typename T>
FUSED_DEVICE T* head_row(T* base, const HeadStrides& strides, const HeadTask& task, unsigned head) {
  return base + (task.batch * strides.batch + task.seq * strides.position + head * strides.head);
}

// The side that a block works on, and where its rows begin.
template <typename Params>
struct SideOfBlock {
  static constexpr bool kPacked = std::is_same_v<Params, PackedHeadsParams>;

  const Params& p;
  const bool is_second, is_third;

  FUSED_DEVICE explicit SideOfBlock(const Params& p)
      : p(p),
        is_second(static_cast<int>(blockIdx.x) >= p.side[0].blocks),
        is_third(kPacked && static_cast<int>(blockIdx.x) >= p.side[0].blocks + p.side[1].blocks) {}
  FUSED_DEVICE const HeadSide& side() const { return p.side[is_second + is_third]; }
  // The block's number among those of the side.
  FUSED_DEVICE unsigned block() const {
    const unsigned block = blockIdx.x - (is_second ? p.side[0].blocks : 0);
    return is_third ? block - p.side[1].blocks : block;
  }
  // Whether rows are copied, or set to zero, where this is what they would be computed from.
  FUSED_DEVICE bool copies(const void* source) const {
    return kPacked && (is_third || source == nullptr);
  }
  // A row of x or dx. group: the elements between two groups of q's heads.
  template <typename T>
  FUSED_DEVICE T* row(T* base, const HeadStrides& strides, const HeadTask& task, unsigned head,
                      int64_t PackedHeadsParams::* group) const {
    T* const row = head_row(base, strides, task, head);
    if constexpr (kPacked) {
      return row + (is_second ? 0 : __umulhi(head, p.inverse_group) * (p.*group));
    } else {
      return row;
    }
  }
};

template <typename Lane_>
struct OfLane {
  using Lane = Lane_;
};

// Calls launch(OfLane{}) with the HeadLane that a plan's rows need.
cudaError_t dispatch_heads(const HeadsCall& params, int width, const auto& launch) {
  const auto with_type = [&](auto of_type) {
    using X = decltype(of_type);
    constexpr int kWidth = vector_width(sizeof(X));
    if (width == 1) return launch(OfLane<HeadLane<X, 1, kNarrowPairs, false>>{});
    if (width != kWidth) return cudaErrorInvalidValue;
    return params.interleaved ? launch(OfLane<HeadLane<X, kWidth, 1, true>>{})
                              : launch(OfLane<HeadLane<X, kWidth, 1, false>>{});
  };
  switch (params.type) {
    case DataType::kFloat32:
      return with_type(float{});
    case DataType::kFloat16:
      return with_type(__half{});
    case DataType::kBFloat16:
      return with_type(__nv_bfloat16{});
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// The strategy "warp": a logical warp (a power-of-two part of a warp) holds a row in registers.
#pragma once

#include "forward/row.h"

namespace fused_layernorm {
namespace forward {

struct Warp : InRegisters {
  static constexpr const char* kName = "warp";
  int vecs = 1;   // vectors of a row that a lane owns
  int lanes = 1;  // on one row
  Moves moves = Moves::kVectors;

  static std::optional<Warp> make(const Problem& problem, const Device& device,
                                  const Forced& forced);
  template <typename Json>
  void describe(Json& json) const {
    json.add("stays_in_l2", stays_in_l2).add("vecs", vecs).add("lanes", lanes).add("moves", moves);
  }
};

}  // namespace forward

cudaError_t launch_layer_norm_forward(const ForwardParams&, const DataTypes&, const forward::Warp&,
                                      cudaStream_t);

// ---- Limits.

// Threads of a block (4194304 x 64 float32: 522 us, with 256 threads 533; 128 x 1024 bfloat16: 2.6
// and 2.8).
constexpr int kForwardWarpThreads = 128;
using ForwardWarpVecs = VecsList<1, 2, 3, 4>;
// Beside a residual, rows of four half-precision vectors a lane are faster in a block, even in a
// block of one warp (by a logical warp and by a block, bfloat16: 32768 x 1024 67.4 us, 66.4; but
// 4096 x 1024 9.8, 10.0).
constexpr int most_forward_warp_vecs(int x_size, bool residual) {
  return residual && x_size == 2 ? 3 : 4;
}
static_assert(contains(ForwardWarpVecs{}, most_forward_warp_vecs(2, true)) &&
                  contains(ForwardWarpVecs{}, most_forward_warp_vecs(4, false)),
              "a lane owns no more vectors than there are kernels for");
// The compiler has to leave registers for at least so many blocks on a multiprocessor; 0 leaves the
// choice to it. It chooses well (32768 x 1024 bfloat16: 34.9 us, with a bound of one block 37.4),
// with two exceptions. Where y is wider than x it keeps too much in registers (the same shape with
// float32 weights and y: 61.1, with a bound of one block 55.0). Where a modulation has x's size it
// takes too many of them (float16: 40.0, with a bound of five blocks 36.4).
constexpr int forward_warp_blocks(int x_size, int weight_size, int y_size, bool modulated) {
  if (modulated) return weight_size <= x_size ? 5 : 4;
  return y_size > x_size ? 1 : 0;
}
// The same for rows of whole vectors and one type with nothing fused. Here the compiler's choice
// delays the loads of weight and bias until the row has come, to save registers, and each warp then
// waits twice (with its choice and with these bounds, bfloat16: 65536 x 128 10.35 us, 9.98). On
// chips that have no room for so many threads the compiler ignores the bound.
constexpr int forward_warp_bare_blocks(int vecs, int x_size) {
  if (vecs == 2) return x_size == 2 ? 9 : 10;
  if (vecs == 3) return x_size == 2 ? 7 : 0;
  return vecs == 4 && x_size == 4 ? 6 : 0;
}
static_assert(kForwardWarpThreads % kWarpThreads == 0,
              "every lane of a logical warp takes part in its shuffles");
// The lanes of a logical warp in which each lane has one vector of an aligned row of 64 columns are
// a template constant (kLanes); 0 stands for kernels that take them as an argument.
constexpr int one_vector_lanes(int x_size) { return 64 / vector_width(x_size); }
template <int kXSize>
using OneVectorLanes = VecsList<0, one_vector_lanes(kXSize)>;

// How a logical warp owns a row: vectors of a lane, and lanes.
struct Lanes {
  int vecs;
  int lanes;
};

// ---- The ladder: how many lanes share a row.

// Few lanes with several vectors each make a shuffle serve more columns. This helps half precision,
// which arithmetic bounds. Loads of whole lines of 128 bytes help float32. A lane without a vector
// takes as long as one with a vector, so a row should leave few places for vectors empty.
struct LaneRung {
  int64_t last;  // vectors of the row
  Choice choice;
  int vecs;  // vectors a lane; kFewestPlaces takes this number among equals
};

constexpr LaneRung kFloat32Lanes[] = {
    {2, Choice::kFirst, 1},
    {8, Choice::kFirst, 2},              // one vector a lane, two, three: 1666666 x 24 87, 78, 81
    {15, Choice::kFewestPlaces, 2},      // two and three: 1000000 x 40 83.6, 79.6
    {16, Choice::kFirst, 1},             // one and two: 4194304 x 64 518.2, 523.7
    {kNoEnd, Choice::kFewestPlaces, 2},  // one and three: 188235 x 68 36.6, 26.9
};
constexpr LaneRung kFloat32EpilogueLanes[] = {
    {kNoEnd, Choice::kFewestPlaces, 2},  // one, two, three, GELU: 208333 x 96 54.4, 44.2, 40.6
};
// With a residual and no epilogue.
constexpr LaneRung kFloat32SingleLanes[] = {
    {kNoEnd, Choice::kFirst, 1},  // one, two and three: 208333 x 96 77.7, 77.8, 78.8
};

// For half precision (the times are bfloat16's), and for float64, for which nothing was measured.
constexpr LaneRung kHalfLanes[] = {
    {2, Choice::kFirst, 1},              // one vector a lane and two: 2000000 x 16 34.1, 35.3
    {7, Choice::kFewestPlaces, 2},       // two and four: 1500000 x 32 48.1, 54.2
    {8, Choice::kFirst, 1},              // one, two and four: 524288 x 64 35.7, 37.4, 37.3
    {kNoEnd, Choice::kFewestPlaces, 2},  // two and four: 65536 x 128 10.8, 11.4
};
constexpr LaneRung kHalfEpilogueLanes[] = {
    {7, Choice::kFewestPlaces, 4},
    {8, Choice::kFewestPlaces, 2},       // one, two and four, SiLU: 524288 x 64 43.9, 37.0, 43.2
    {kNoEnd, Choice::kFewestPlaces, 4},  // two and four, GELU: 446428 x 112 64.1, 57.2
};
static_assert(is_ladder(kFloat32Lanes) && is_ladder(kFloat32EpilogueLanes) &&
                  is_ladder(kFloat32SingleLanes) && is_ladder(kHalfLanes) &&
                  is_ladder(kHalfEpilogueLanes),
              "the rungs ascend");

namespace forward {

inline const LaneRung& lane_rung(const Problem& problem, int64_t vectors) {
  const int size = size_of(problem.x);
  if (problem.has_epilogue) {
    return size == 4 ? rung_of(kFloat32EpilogueLanes, vectors)
                     : rung_of(kHalfEpilogueLanes, vectors);
  }
  if (size != 4) return rung_of(kHalfLanes, vectors);
  return problem.residual ? rung_of(kFloat32SingleLanes, vectors) : rung_of(kFloat32Lanes, vectors);
}

// The lanes of a row of `vectors` vectors of which each lane has about `vecs`.
inline Lanes lanes_for(int64_t vectors, int vecs) {
  const int64_t lanes = std::min<int64_t>(kWarpThreads, power_of_two_from(ceil_div(vectors, vecs)));
  return {static_cast<int>(ceil_div(vectors, lanes)), static_cast<int>(lanes)};
}

inline std::optional<Lanes> lanes_of(const Problem& problem, const Forced& forced) {
  if (!has_kernels_on_chip(problem)) return std::nullopt;
  const int64_t vectors = vectors_of(problem);
  const int most = most_forward_warp_vecs(size_of(problem.x), problem.residual);
  if (vectors > int64_t{kWarpThreads} * most) return std::nullopt;
  const auto& rung = lane_rung(problem, vectors);
  Lanes lanes = lanes_for(vectors, forced.value_or(Field::kVecs, std::min(most, rung.vecs)));
  const bool compares = rung.choice == Choice::kFewestPlaces && !forced.has(Field::kVecs);
  for (int vecs = 1; compares && vecs <= most; ++vecs) {
    const Lanes other = lanes_for(vectors, vecs);
    if (other.vecs <= most && other.vecs * other.lanes < lanes.vecs * lanes.lanes) lanes = other;
  }
  if (lanes.vecs > most || !forced.allows(Field::kVecs, lanes.vecs)) return std::nullopt;
  return lanes;
}

inline std::optional<Warp> Warp::make(const Problem& problem, const Device& device,
                                      const Forced& forced) {
  if (!forced.allows(kName, {Field::kVecs})) return std::nullopt;
  const auto lanes = lanes_of(problem, forced);
  if (!lanes) return std::nullopt;
  Warp plan;
  plan.stays_in_l2 = rows_stay_in_l2(problem, device);
  plan.vecs = lanes->vecs;
  plan.lanes = lanes->lanes;
  plan.moves = moves_of(problem);
  plan.threads = kForwardWarpThreads;
  plan.blocks = ceil_div(problem.rows, kForwardWarpThreads / plan.lanes);
  return plan;
}
}  // namespace forward
}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// The numbers of threads, vectors and registers of forward's strategies, as measured on Hopper.
// `tuning_of` gives a chip its numbers: every other chip has Hopper's, because nobody has measured
// one. What kernels are compiled for is the same for all.
#pragma once

#include "base/chip.h"
#include "base/choices.h"
#include "base/tuning.h"
#include "base/types.h"

namespace fused_layernorm {

enum class Choice {
  kFirst,         // the first that the row and the kernels allow
  kFewestPlaces,  // the one whose lanes or threads have the fewest places for vectors
};

// ---- Logical warps

// Threads of a block (4194304 x 64 float32: 522 us, by 256 533; 128 x 1024 bfloat16 2.6, 2.8).
constexpr int kForwardWarpThreads = 128;
// Beside a residual, rows of four half-precision vectors a lane are faster in a block, even in a
// block of one warp (by a logical warp and by a block, bfloat16: 32768 x 1024 67.4 us, 66.4; but
// 4096 x 1024 9.8, 10.0).
constexpr int most_forward_warp_vecs(int x_size, bool residual) {
  return residual && x_size == 2 ? 3 : 4;
}
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

// The vectors of a row that a lane has, by the vectors of the row. Few lanes with several vectors
// each make a shuffle serve more columns. This helps half precision, which arithmetic bounds. Loads
// of whole lines of 128 bytes help float32. A lane without a vector takes as long as one with a
// vector, so a row should leave few places for vectors empty.
struct LaneVecs {
  Choice choice;
  int vecs;  // kFewestPlaces takes this number among equals
};
constexpr Exception<LaneVecs> kFloat32Lanes[] = {
    {1, 2, {Choice::kFirst, 1}},
    {3, 8, {Choice::kFirst, 2}},    // one vector a lane, two, three: 1666666 x 24 87, 78, 81
    {16, 16, {Choice::kFirst, 1}},  // one and two: 4194304 x 64 518.2, 523.7
};
// For half precision (the times are bfloat16's), and for float64, for which nothing was measured.
constexpr Exception<LaneVecs> kHalfLanes[] = {
    {1, 2, {Choice::kFirst, 1}},  // one vector a lane and two: 2000000 x 16 34.1, 35.3
    {8, 8, {Choice::kFirst, 1}},  // one, two and four: 524288 x 64 35.7, 37.4, 37.3
};
constexpr Exception<LaneVecs> kHalfEpilogueLanes[] = {
    {8, 8, {Choice::kFewestPlaces, 2}},  // one, two and four, SiLU: 524288 x 64 43.9, 37.0, 43.2
};

// ---- Blocks

// Up to four vectors a thread take 64 registers, five 72, eight 96. Eight vectors of a bare row
// take 80 registers in narrow blocks, three a multiprocessor, and 64 in wide ones, two a
// multiprocessor. Four vectors of a lean row take 56 (8192 x 12288 with GELU: 112.5 us, with 64
// registers 123.7).
enum class ForwardLoad {
  kBare,   // statistics and affine alone, parameters of x's type, rows of whole vectors
  kLean,   // an epilogue and no residual, with parameters no wider than x
  kHeavy,  // anything else
};
constexpr int kNarrowForwardThreads = 256;
constexpr BlockBounds forward_block_bounds(int vecs, ForwardLoad load, bool narrow) {
  if (vecs == 8 && load == ForwardLoad::kBare) {
    return narrow ? BlockBounds{kNarrowForwardThreads, 3} : BlockBounds{512, 2};
  }
  if (vecs == 8) return {640, 1};
  if (vecs == 5) return {448, 2};
  if (vecs == 4 && load == ForwardLoad::kLean) return {576, 2};
  return {1024, 1};
}
// The same for few rows, whose kernels also keep weight and bias in registers (bfloat16, without
// and with them: 1 x 2048 1.84 us, 1.61; 64 x 4096 2.64, 2.42; float32: 64 x 1024 2.23, 2.07).
constexpr BlockBounds kEarlyForwardBounds = {512, 1};
constexpr int kMostEarlyVecs = 5;

// The vectors of a row that a thread owns: the best first, of which the last may have no kernel.
struct ThreadVecs {
  Choice choice;
  int vecs[3];  // kFewestPlaces takes the first among equals
};
// Nothing fused. The times are those of four, five and eight vectors a thread, bfloat16.
constexpr Exception<ThreadVecs> kBareBlocks[] = {
    {1, 639, {Choice::kFewestPlaces, {4, 5, 3}}},
    {640, 1472, {Choice::kFirst, {5, 4, 8}}},  // 11264 x 11264 148.6, 124.1, 126.0
};
// With an epilogue and no residual: times of four, five and eight vectors, bfloat16 with GELU.
constexpr Exception<ThreadVecs> kEpilogueBlocks[] = {
    {1, 639, {Choice::kFewestPlaces, {4, 5, 3}}},
    {640, 704, {Choice::kFirst, {5, 4, 8}}},    // 32768 x 5120 175.4, 170.4, none of eight
    {961, 1408, {Choice::kFirst, {8, 4, 5}}},   // 16384 x 8192 145.3, 153.8, 137.7
    {1665, 1792, {Choice::kFirst, {5, 4, 8}}},  // 8192 x 14336 150.8, 140.2, 147.0
};
// With a residual and parameters no wider than x, whatever else is fused, bfloat16.
constexpr Exception<ThreadVecs> kResidualBlocks[] = {
    {1, 639, {Choice::kFirst, {3, 4, 5}}},  // three and four: 32768 x 4096 270.4, 274.8
};
// With a residual and parameters wider than x. The times are those of three, four and five vectors
// a thread, bfloat16 with float32 parameters.
constexpr Exception<ThreadVecs> kResidualWideBlocks[] = {
    {1, 959, {Choice::kFirst, {3, 4, 5}}},      // 16384 x 5120 169.4, 169.7, 172.8
    {1089, 1664, {Choice::kFirst, {3, 4, 5}}},  // 8192 x 12288, gated 206.2, 230.1, 219.8
};

// ---- What a chip decides

struct ForwardTuning {
  // Lines marked evict_first replace each other before any evict_normal line, so they have only the
  // part of L2 that no other kernel has filled. An x of no more bytes than this stays as other data
  // does. (By evict_first and evict_normal, with L2 empty of other data and after a matrix product,
  // float32 by logical warps: 64 x 256 1.82, 1.72; 1.81, 1.66; but 64 x 320 1.88, 1.97; 1.88,
  // 1.94.) So does all of a call that moves as much as l2_limits says. (bfloat16: 8192 x 4096 34.4,
  // 34.9; 36.2, 35.0. But 4096 x 4096 18.5, 19.3; 19.2, 19.3, and of a modulation without a
  // residual, whose parameters are read again and again, 8 x 4096 x 1152 42.1, 44.6; 42.4, 45.1.)
  int64_t small_l2_bytes = 64 << 10;

  Rule<LaneVecs> float32_lanes = {{Choice::kFewestPlaces, 2}, kFloat32Lanes};
  // One, two, three, GELU: 208333 x 96 54.4, 44.2, 40.6.
  Rule<LaneVecs> float32_epilogue_lanes = LaneVecs{Choice::kFewestPlaces, 2};
  // With a residual and no epilogue. One, two and three: 208333 x 96 77.7, 77.8, 78.8.
  Rule<LaneVecs> float32_residual_lanes = LaneVecs{Choice::kFirst, 1};
  // Two and four: 1500000 x 32 48.1, 54.2; 65536 x 128 10.8, 11.4.
  Rule<LaneVecs> half_lanes = {{Choice::kFewestPlaces, 2}, kHalfLanes};
  // Two and four, GELU: 446428 x 112 64.1, 57.2.
  Rule<LaneVecs> half_epilogue_lanes = {{Choice::kFewestPlaces, 4}, kHalfEpilogueLanes};

  // 8192 x 12288 112.7, 114.0, 100.0.
  Rule<ThreadVecs> bare_blocks = {{Choice::kFirst, {8, 5, 4}}, kBareBlocks};
  // 16384 x 6144 107.8, 113.3, 109.0; 8192 x 12288 with SiLU 106.7, 137.2, 115.9.
  Rule<ThreadVecs> epilogue_blocks = {{Choice::kFirst, {4, 5, 8}}, kEpilogueBlocks};
  // Four, five, eight: 16384 x 8192 265.0, 261.6, 274.9.
  Rule<ThreadVecs> residual_blocks = {{Choice::kFirst, {5, 4, 8}}, kResidualBlocks};
  // 8192 x 16384 284.6, 274.3, 278.3.
  Rule<ThreadVecs> residual_wide_blocks = {{Choice::kFirst, {4, 5, 8}}, kResidualWideBlocks};

  // How many stages a ring should have for every eight spans of a row: of a block alone; of blocks
  // that share rows, and so wait for each other; and at the least.
  int alone_ring = 12, shared_ring = 21, least_ring = 9;
  // Float32 rows have the long kernel, with up to so many spans in a block. (H100, short and long:
  // 64 x 150528 37.5, 33.7; 48 x 442368 67.8, 66.8; 200 x 65536 47.0, 45.3; 1024 x 65536 194.7,
  // 196.3; but 6 x 65536 10.6, 12.8. In half precision the short one is as fast or faster.)
  int long_ring_spans = 8;
};

namespace forward {

inline constexpr ForwardTuning kHopper;

inline const ForwardTuning& tuning_of(const Device&) { return kHopper; }

}  // namespace forward
}  // namespace fused_layernorm

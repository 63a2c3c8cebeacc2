// SPDX-License-Identifier: Apache-2.0
// What the plan prefers where the limits of geometry.h leave it a choice: ladders, with a rung for
// each range, and beside each rung the measurement that set it. The functions of forward.cpp and
// backward.cpp read these ladders and have no numbers of their own.
//
// All times are microseconds of device time on an H200. A measurement reads "32768 x 4096 211,
// 222": rows x columns, then one time for each alternative, in the order in which the comment names
// the alternatives. docs/tuning-log.md tells what else was tried and why the winners win. To tune,
// force plans with `python -m benchmarks.tune`, change a rung, and put the new numbers in place of
// the old.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "plan/geometry.h"

namespace fused_layernorm {
namespace ladders {

constexpr int64_t kNoEnd = std::numeric_limits<int64_t>::max();

// A ladder is an array of rungs, each of which applies up to the length `last`. The first rung that
// reaches the given length counts.
template <typename Rung, size_t kRungs>
constexpr const Rung& rung_of(const Rung (&ladder)[kRungs], int64_t length) {
  size_t i = 0;
  while (ladder[i].last < length) ++i;
  return ladder[i];
}
// Whether the rungs ascend and the last has no end, as rung_of requires.
template <typename Rung, size_t kRungs>
constexpr bool is_ladder(const Rung (&ladder)[kRungs]) {
  for (size_t i = 1; i < kRungs; ++i) {
    if (ladder[i].last <= ladder[i - 1].last) return false;
  }
  return ladder[kRungs - 1].last == kNoEnd;
}

// ---- Forward, rows in registers: the vectors that a lane or a thread should own.

enum class Choice {
  kFirst,         // the first that the row and the kernels allow
  kFewestPlaces,  // the one whose lanes or threads have the fewest places for vectors
};

// ---- Forward, a logical warp per row.

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
    // One, two and three vectors a lane: 3333333 x 12 87.0, 79.9, 96.6; 1666666 x 24 87.0, 77.6,
    // 81.2.
    {8, Choice::kFirst, 2},
    // Two and three: 1000000 x 40 83.6, 79.6. One and two: 246153 x 52 28.9, 26.9.
    {15, Choice::kFewestPlaces, 2},
    // One and two: 4194304 x 64 518.2, 523.7 (with mean and rstd 605, 581).
    {16, Choice::kFirst, 1},
    // Two and three: 89510 x 143 36.5, 30.0; 188235 x 68 -, 26.9, by one 36.6. One, two and three:
    // 200704 x 96 42.2, 38.7, 38.7. One, two and four: 357142 x 112 81.7, 77.4, 78.1.
    {kNoEnd, Choice::kFewestPlaces, 2},
};
constexpr LaneRung kFloat32EpilogueLanes[] = {
    // One, two, three and four vectors a lane, with GELU: 312500 x 64 44.9, 40.3, -, 41.3;
    // 208333 x 96 54.4, 44.2, 40.6, -; 138888 x 144 -, 53.3, 43.3, -.
    {kNoEnd, Choice::kFewestPlaces, 2},
};
// With a residual and no epilogue.
constexpr LaneRung kFloat32SingleLanes[] = {
    // One, two and three vectors a lane, with a residual: 312500 x 64 77.2, 78.4, -; 208333 x 96
    // 77.7, 77.8, 78.8; two and three: 138888 x 144 77.9, 78.6.
    {kNoEnd, Choice::kFirst, 1},
};

// For half precision, and for float64, for which nothing was measured.
constexpr LaneRung kHalfLanes[] = {
    // One and two vectors a lane, bfloat16: 2000000 x 16 34.1, 35.3.
    {2, Choice::kFirst, 1},
    // Two and four: 1500000 x 32 48.1, 54.2; 892857 x 56 54.0, 55.3. Two and three: 2000000 x 24
    // 54.8, 53.9; 1000000 x 48 51.8, 47.6.
    {7, Choice::kFewestPlaces, 2},
    // One, two and four: 524288 x 64 35.7, 37.4, 37.3.
    {8, Choice::kFirst, 1},
    // Two and four: 65536 x 128 10.8, 11.4; 446428 x 112 51.6, 53.3; 111607 x 448 51.2, 52.7;
    // 32768 x 512 18.9, 19.2. Two and three: 32768 x 320 15.5, 13.3.
    {kNoEnd, Choice::kFewestPlaces, 2},
};
constexpr LaneRung kHalfEpilogueLanes[] = {
    {7, Choice::kFewestPlaces, 4},
    // One, two and four vectors a lane, with SiLU, bfloat16: 524288 x 64 43.9, 37.0, 43.2.
    {8, Choice::kFewestPlaces, 2},
    // Two and four, with GELU: 446428 x 112 64.1, 57.2; 97656 x 512 57.1, 52.4.
    {kNoEnd, Choice::kFewestPlaces, 4},
};
static_assert(is_ladder(kFloat32Lanes) && is_ladder(kFloat32EpilogueLanes) &&
                  is_ladder(kFloat32SingleLanes) && is_ladder(kHalfLanes) &&
                  is_ladder(kHalfEpilogueLanes),
              "the rungs ascend");

// The most bytes of x that are spread over `warps` warps, or stay in one that knows its lanes. The
// times are those of such rows and of logical warps.
// One warp, bfloat16: 512 x 64 1.35, 1.63; 8 x 128 1.31, 1.39; 256 x 128 1.43, 1.68. Not so: 1024 x
// 64 1.99, 2.09, but 4096 x 64 2.26, 2.14; 512 x 128 2.06, 1.94. float32: 256 x 64 1.41, 1.59. Not
// so: 512 x 64 2.03, 1.92.
// Several, bfloat16: 8 x 512 1.37, 1.49; 64 x 768 1.63, 1.94; 256 x 192 1.90, 1.99. Not spread: 64
// x 1024 2.12, 2.05; 128 x 512 2.04, 1.97. float32: 256 x 72 1.49, 1.91; 8 x 320 1.33, 1.59; 256 x
// 96 1.86, 1.94. Not spread: 64 x 512 2.01, 1.99; 128 x 256 1.99, 1.95.
constexpr int64_t most_spread_bytes(int warps) { return int64_t{warps == 1 ? 64 : 96} << 10; }

// ---- Forward, a block per row.

struct BlockRung {
  int64_t last;  // vectors of the row
  Choice choice;
  int vecs[3];  // vectors a thread; kFewestPlaces takes the first among equals
};

// Nothing fused. The times are those of four, five and eight vectors a thread.
constexpr BlockRung kBareBlocks[] = {
    {639, Choice::kFewestPlaces, {4, 5, 3}},
    // bfloat16: 16384 x 8192 130.3, 130.1, 132.8; 11264 x 11264 148.6, 124.1, 126.0;
    // float32: 16384 x 4096 130.8, 129.5, 132.2.
    {1472, Choice::kFirst, {5, 4, 8}},
    // bfloat16: 8192 x 12288 112.7, 114.0, 100.0; 8192 x 16384 136.8, 135.1, 133.4;
    // float32: 10240 x 6144 132.7, 132.6, 123.2.
    {kNoEnd, Choice::kFirst, {8, 5, 4}},
};

// With an epilogue and no residual. The times are those of four, five and eight vectors a thread,
// bfloat16 with GELU.
constexpr BlockRung kEpilogueBlocks[] = {
    {639, Choice::kFewestPlaces, {4, 5, 3}},
    // 32768 x 5120 175.4, 170.4, and no kernel of eight.
    {704, Choice::kFirst, {5, 4, 8}},
    // 16384 x 6144 107.8, 113.3, 109.0.
    {960, Choice::kFirst, {4, 5, 8}},
    // 16384 x 8192 145.3, 153.8, 137.7; 8192 x 10240 100.3, 96.0, 93.0.
    {1408, Choice::kFirst, {8, 4, 5}},
    // 8192 x 12288 112.3, 132.8, 112.5; with SiLU 106.7, 137.2, 115.9.
    {1664, Choice::kFirst, {4, 5, 8}},
    // 8192 x 14336 150.8, 140.2, 147.0.
    {1792, Choice::kFirst, {5, 4, 8}},
    // 8192 x 16384 159.9, 169.8, 157.2; with SiLU 155.3, 162.6, 165.6.
    {kNoEnd, Choice::kFirst, {4, 5, 8}},
};

// With a residual and parameters no wider than x, whatever else is fused. The times are those of
// bfloat16.
constexpr BlockRung kResidualBlocks[] = {
    // Three and four vectors a thread:
    // 32768 x 4096 270.4, 274.8; 65536 x 2048 262.7, 264.9; 32768 x 3072 201.8, 199.8.
    {639, Choice::kFirst, {3, 4, 5}},
    // Four, five and eight vectors a thread: 16384 x 8192 265.0, 261.6, 274.9.
    {kNoEnd, Choice::kFirst, {5, 4, 8}},
};

// With a residual and parameters wider than x. The times are those of three, four and five vectors
// a thread, bfloat16 with float32 parameters.
constexpr BlockRung kResidualWideBlocks[] = {
    // 16384 x 5120 169.4, 169.7, 172.8; 16384 x 6144 202.2, 202.5, 206.6; with a gate and a
    // modulation 32760 x 5120 331.4, 332.8, 343.2.
    {959, Choice::kFirst, {3, 4, 5}},
    // 16384 x 8192 270.6, 271.6, 275.9; with a gate and a modulation 286.9, 273.5, 275.3.
    {1088, Choice::kFirst, {4, 3, 5}},
    // 8192 x 10240 172.0, 172.5, 178.5; with a gate and a modulation 8192 x 12288 206.2, 230.1,
    // 219.8.
    {1664, Choice::kFirst, {3, 4, 5}},
    // 8192 x 16384 284.6, 274.3, 278.3.
    {kNoEnd, Choice::kFirst, {4, 5, 8}},
};

template <size_t kRungs>
constexpr bool has_block_kernels(const BlockRung (&ladder)[kRungs]) {
  for (const auto& rung : ladder) {
    for (const int vecs : rung.vecs) {
      if (!contains(ForwardBlockVecs{}, vecs)) return false;
    }
  }
  return is_ladder(ladder);
}
static_assert(has_block_kernels(kBareBlocks) && has_block_kernels(kEpilogueBlocks) &&
                  has_block_kernels(kResidualBlocks) && has_block_kernels(kResidualWideBlocks),
              "the rungs ascend, and there is a kernel for each number of vectors");

// ---- Forward, rows in registers: what becomes in L2 of what is read and written once.

// Either evict_normal, as other data, or evict_first (L2Policy in device/vec.cuh). Lines marked
// evict_first replace each other before any evict_normal line, so they have only the part of L2
// that no other kernel has filled. Each comment has two pairs of times, by evict_first and by
// evict_normal: with L2 empty of other data, and behind a matrix product.

// So little of x stays. (float32, all by logical warps: 512 x 16 1.73, 1.42; 1.72, 1.41. 64 x 256
// 1.82, 1.72; 1.81, 1.66; but 64 x 320 1.88, 1.97; 1.88, 1.94.)
constexpr int64_t kSmallL2Bytes = 64 << 10;
// Calls that move so many bytes or more let them stay. (bfloat16: 32768 x 4096 131.0, 131.4; 137.5,
// 131.3. 8192 x 4096 34.4, 34.9; 36.2, 35.0. With a residual 8192 x 2048 34.2, 34.6; 35.3, 34.7.
// But 4096 x 4096 18.5, 19.3; 19.2, 19.3, and of a modulation without a residual, whose parameters
// are read again and again, 8 x 4096 x 1152 42.1, 44.6; 42.4, 45.1.)
constexpr int64_t kLargeL2Bytes = 96 << 20;

// ---- The meeting of a row's blocks, forward and backward.

// Rows between publishing a row's sums and collecting them. A meeting takes about 2 us. A ring that
// holds five rows or more has room for two rows that wait, and so has a kernel without a ring.
struct LagRung {
  int64_t last;  // stages of the ring
  int lag;
};
constexpr LagRung kLags[] = {
    {4, 1},
    {kNoEnd, 2},
};
constexpr int kLagWithoutRing = 2;
static_assert(is_ladder(kLags) && kLagWithoutRing < kMostCollected &&
                  rung_of(kLags, kMostStages).lag < kMostCollected,
              "collected sums wait no longer than they are kept");

// ---- Backward, few rows in one launch.

// Blocks on rows compute dx, and blocks on columns beside them compute dweight and dbias. x and dy
// are then read twice, the second time from L2, but no second launch adds up partial sums. The
// limits below are the most rows, aligned and not, and the most bytes. In one launch and in two,
// bfloat16: 128 x 1024 2.8, 9.3; 512 x 1023 5.4, 9.0; 512 x 4096 7.3, 13.4; 2048 x 768 10.1, 10.4;
// 2048 x 4096 21.4, 23.1; 1024 x 8192 24.4, 26.9.
constexpr int kFewAlignedRows = 2048;
constexpr int kFewOtherRows = 1024;
constexpr int64_t kFewRowsBytes = int64_t{32} << 20;  // of x and dy
// The most rows that a team does not keep in registers. In one launch and in two, bfloat16: 16 x
// 16384 9.1, 14.6; 256 x 12288 16.2, 20.4; 384 x 16384 25.4, 29.5; but 512 x 12288 25.2, 24.2.
constexpr int kFewLongRows = 384;

// A block has as many teams as make up `block_threads` threads: the more rows there are, the more
// threads the blocks on columns need.
struct FewRowsRung {
  int64_t last;  // rows
  int block_threads;
};
constexpr FewRowsRung kFewRowsThreads[] = {
    // With 64, 128, 256 and 512 threads a block, bfloat16: 1 x 320 1.8, 1.8, 1.9, 2.3; with the
    // first three: 8 x 768 1.8, 1.8, 2.0.
    {16, 64},
    // With all four: 64 x 320 2.4, 2.1, 2.2, 2.5; 64 x 64 2.2, 1.9, 2.1, 2.4; with the first three:
    // 64 x 768 3.0, 2.5, 2.7.
    {64, 128},
    // With all four: 255 x 320 5.8, 4.0, 3.3, 3.3; with 64 and with 256: 128 x 1024 4.6, 2.9.
    {255, 256},
    // With 256 and with 512: 512 x 1024 4.6, 4.2.
    {kNoEnd, 512},
};
static_assert(is_ladder(kFewRowsThreads) &&
                  rung_of(kFewRowsThreads, kNoEnd).block_threads <= kBackwardThreads,
              "blocks of few rows have kernels");
// Whether several teams share a row of single elements. Times where four teams share a row, and
// where each has one: bfloat16 8 x 285 1.53, 1.81; 64 x 1023 2.34, 3.00; 128 x 1023 2.64, 3.18;
// 1 x 1492 1.94, 2.28; float32 128 x 285 2.20, 2.73. Not shared: bfloat16 512 x 1023 5.14, 4.80;
// 128 x 2047 3.65, 3.56; float32 64 x 1492 3.08, 2.80; 512 x 65 3.00, 2.87.
constexpr bool shares_few_rows(int64_t rows, int64_t cols, int x_size) {
  return rows <= 128 && rows * cols <= 1 << 17 && (x_size == 2 || cols <= 1024);
}

// The teams of whole warps in a block. Aligned rows have the most teams that kFewRowsThreads
// allows, if a team has fewer threads than kFewRowsLeastThreads (four and two teams, bfloat16:
// 1024 x 2048 7.9, 9.1; 2048 x 1536 12.1, 17.4; 2048 x 2048 12.4, 15.3; eight and four teams,
// float32: 2048 x 1024 12.0, 14.3). Otherwise a block has the largest number of teams, but at least
// kFewRowsLeastThreads threads, with which almost all blocks run at once (the most teams, two teams
// and one, bfloat16: 512 x 2060 9.9, 9.0, 11.6; 512 x 2415 9.8, 9.2, 12.0; float32: 512 x 2047
// 10.6, 8.0, 9.1). If there is no such number, rows that begin anywhere have the most teams, and
// aligned rows have one (one team and two, bfloat16: 1024 x 4096 12.0, 12.8; 1100 x 4096 12.2,
// 13.6; 2048 x 4096 19.6, 21.4).
constexpr int kFewRowsLeastThreads = 256;
// Almost all run at once if there are at least eight places for nine blocks.
constexpr int64_t kFewRowsBlocks = 9, kFewRowsPlaces = 8;

// ---- Backward, rows through a ring: what becomes in L2 of what is read once.

// x and dy of calls that move so many bytes stay in L2 as other data does. Of smaller calls they
// are the first to make room. (By first to make room and by staying, each with the better numbers
// of teams and stages, bfloat16: 32768 x 4096 214.0, 204.4; 16384 x 8192 223.7, 204.5; 32768 x 4096
// with a residual 271.8, 252.2; float32: 100000 x 3977 1441, 1279; 8192 x 4096 111.2, 102.1. With a
// modulation and a gate 1 x 32760 x 5120 516, 508, but 32 x 1024 x 1024 110.3, 112.7. Of smaller
// calls: 12608 x 768 22.2, 22.5; 8192 x 768 16.8, 17.1; 5000 x 3073 41.6, 42.6.) Slices of rows are
// always the first to make room (8192 x 32768 bfloat16 452, 444, but 64 x 150528
// float32 43.9, 46.5; 32 x 2097152 bfloat16 129.5, 135.2), and so are rows with an epilogue, which
// gain nothing by staying (32768 x 4096 bfloat16 with GELU 255.2, 255.5).
constexpr int64_t kLargeBackwardL2Bytes = 96 << 20;

// ---- Backward, persistent blocks.

// There is no ladder for the vectors of a thread: the fewest columns a thread for which there are a
// kernel and enough threads are best, because more columns leave no registers for xhat and g.
// (Kernels, but for float64, have no fewer than sixteen columns a thread, because reductions over
// more threads with fewer columns each take longer: with sixteen columns a thread and with eight,
// bfloat16, 32768 x 4096 229, 276.)

// The most teams of a block where rows come through a ring. The number of teams fixes how many
// bytes are on their way and in which order they are asked for. Some numbers are up to a fifth
// slower than their neighbours, in any place in memory, and no counter says why; so these ladders
// hold what was measured, each time as the median over several places in memory.
struct TeamsRung {
  int64_t last;  // columns
  int teams;
};
// float32, rows that are aligned, nothing fused.
constexpr TeamsRung kFloat32Teams[] = {
    // Fifteen teams, twelve and eight: 100000 x 384 123.6, 123.0, 114.7; x 512 158.6, 159.1, 159.8.
    {512, 8},
    // Eight teams, six, five and four: 32768 x 640 70.7, 66.6, 66.3, 69.1.
    {672, 6},
    // Eight teams, six, four and three: 32768 x 768 83.7, 82.8, 77.5, 78.3; x 896 95.0, 95.7, 91.0,
    // 98.5.
    {1023, 4},
    // Five teams, four and three: 100000 x 1024 307.8 (eight), 344.2, 295.8; 32768 x 1152 120.3,
    // 120.1, 112.6; 100000 x 1280 381.0, 424.1, 382.2.
    {1407, 3},
    // Five teams, four and three: 32768 x 1492 154.7, 152.7, 156.6; 65536 x 1536 301.3, 303.1,
    // 304.9;
    // 32768 x 1776 181.2 (four), 185.1.
    {2047, 4},
    // Four teams, three, two and one: 65536 x 2048 403.0, 402.9, 449.1, 395.3; 50000 x 2560 420.1
    // (three), 384.4, 375.5; 50000 x 3072 507.6 (two), 459.4; 8192 x 4096 110.0, 102.2.
    {kNoEnd, 1},
};
// float32, rows that are aligned, with a residual or an activation.
constexpr TeamsRung kFloat32FusedTeams[] = {
    // Eight teams, six and four, with a residual: 32768 x 640 85.2, 85.0, 86.0 (five); x 768 102.2,
    // 100.3, 101.7.
    {767, kMostTeams},
    // All teams, four, three, two and one, with a residual: 32768 x 896 117.4 (eight), 115.9; x
    // 1024 133.8 (eight), 130.5, 134.2; x 1536 194.3 (five), 194.3, 192.0; with GELU x 1024 111.6
    // (eight), 106.9.
    {2047, 4},
    // 32768 x 2048 276.9 (four), 259.3, 253.3, 305.9; x 2560 360.4 (three), 319.1, 353.2.
    {2815, 2},
    // 32768 x 3072 415.9 (two), 392.1; x 4096 571.3 (two), 500.5; with GELU 456.7 (two), 438.1.
    {kNoEnd, 1},
};
// float32, rows that are not aligned, nothing fused. With a residual or an activation all teams are
// better (by four and by all teams, 32768 x 1023 with a residual 180.1, 157.4, with GELU 225.5,
// 147.1; by one and by two 32768 x 2847 with a residual 551.6, 432.4).
constexpr TeamsRung kFloat32ElementTeams[] = {
    // Fifteen teams, twelve and eight: 100000 x 285 95.3, 90.3, 106.9.
    {320, 12},
    // 100000 x 356 116.5, 115.0, 112.0; x 427 139.2, 138.3, 134.4.
    {448, 8},
    // 200000 x 498 316.9, 305.1, 333.4.
    {512, 12},
    // Eight teams, six and four: 32768 x 569 65.5, 62.8, 71.8.
    {672, 6},
    // Eight teams, six, four and three: 32768 x 711 79.8 (six), 78.8, 93.5; 100000 x 853 286.5,
    // 274.0, 268.1; 32768 x 924 97.9, 98.2, 96.3, 101.0; x 1065 114.0 (four), 117.3.
    {1100, 4},
    // Five teams, four and three: 32768 x 1137 126.2, 123.5, 122.5; 100000 x 1350 429.6, 459.9,
    // 424.0;
    // x 1563 505.6 (four), 481.0.
    {1600, 3},
    // Four teams, three, two and one: 32768 x 1634 170.3, 175.1; 65536 x 1847 385.4, 394.3, 404.5,
    // 423.5.
    {2047, 4},
    // Three teams, two and one: 50000 x 2130 336.4 (two), 391.5; x 2343 365.2 (two), 397.6.
    {2431, 2},
    // 32768 x 2485 260.1, 263.2, 262.6; x 2627 283.7 (two), 264.2; x 3622 408.0, 370.7.
    {kNoEnd, 1},
};
// Half precision, rows that are aligned, nothing fused. With a residual or an activation all teams
// are better, because a team's time hides behind the other teams.
constexpr TeamsRung kHalfTeams[] = {
    {1007, kMostTeams},
    // Eight teams, six and four, bfloat16: 32768 x 1024 55.5, 54.6, 56.8; but eight and six 28570 x
    // 896 43.3, 43.2.
    {1024, 6},
    {1983, kMostTeams},
    // Four teams, three and two, bfloat16: 32768 x 2048 107.8, 103.5, 107.2.
    {2048, 3},
    // Two teams and one, bfloat16: 32768 x 4096 204.4, 208.5.
    {kNoEnd, kMostTeams},
};
// Half precision, rows that are not aligned, nothing fused.
constexpr TeamsRung kHalfElementTeams[] = {
    {1024, kMostTeams},
    // Five teams and four, bfloat16: 100000 x 1137 254, 250; 18962 x 1350 56.3, 55.2.
    {1536, 4},
    // Two teams and one, bfloat16: 6250 x 4095 58.4, 62.8.
    {kNoEnd, kMostTeams},
};
static_assert(is_ladder(kFloat32Teams) && is_ladder(kFloat32FusedTeams) &&
                  is_ladder(kFloat32ElementTeams) && is_ladder(kHalfTeams) &&
                  is_ladder(kHalfElementTeams),
              "the rungs ascend");
// A block has no more teams than these ladders allow only if each team then has this many rows.
constexpr int kFewTeamsRows = 16;

// A ring pays if a team has at least this many rows.
constexpr int kLeastRingRows = 3;
// The bytes that the rings of a block with whole rows should hold. More rows in flight do harm, but
// the threads of a block need work. Of half-precision rows that are moved by vectors (with two
// stages and with three, bfloat16: 28444 x 1152 by five teams 57.4, 55.8; 32768 x 2048 by three
// teams 103.5, 111.2; 32768 x 3072 by two 155.9, 163.5; but 32768 x 768 by eight 45.2, 44.6).
constexpr int64_t kHalfRingBytes = 60000;
// Of float32 rows (with two and with three: 100000 x 711 by four teams 226.6, 228.4; 50000 x 2560
// by two 384.4, 383.9).
constexpr int64_t kFloat32RingBytes = 50 * 1024;
// Of other rows, also those of groups (with two and with three, bfloat16: 5000 x 3073 by two teams
// 42.6, 42.0; 1 x 4608 x 3072 with a modulation and a gate 54.4, 52.7).
constexpr int64_t kOtherRingBytes = 64 * 1024;
// A single team has at least kSingleTeamStages stages if its rows take less than kLongRowBytes
// (with two stages and with three, bfloat16: 16384 x 6144 166.9, 157.2; 16384 x 7168 187.1, 185.0;
// but 16384 x 8192 203.9, 218.4; float32 that is not aligned: 32768 x 3053 336.5, 312.5; x 3977
// 444.1, 407.7). For aligned float32 rows the limit is kLongFloat32RowBytes (32768 x 2816 289.4,
// 281.7; but x 3408 335.4, 348.0; x 3584 340.5, 356.5; 8192 x 4096 102.2, 110.6).
constexpr int kSingleTeamStages = 3;
constexpr int64_t kLongRowBytes = 32 * 1024, kLongFloat32RowBytes = 25 * 1024;
constexpr int kKeptRowStages = 2;
constexpr int kTwiceReadRowStages = 3;

// Which warp collects the sums of a row.
enum class Collects {
  kBeside,           // a warp beside the team; slices that leave no room for it are too long
  kAloneForFewVecs,  // a working warp, where there is no room for one beside the team or where a
                     // thread has fewer vectors without it; else a warp beside the team
  kAlone,            // a working warp
};

// What rings of slices should hold; arrays of them have the best first. A row has the fewest blocks
// whose slices are short enough for at least `stages` stages. If these slices are shorter than
// `least_cols`, the next ring is tried.
struct SliceRing {
  int stages;
  int least_cols;
  Collects collects;
};
constexpr int kLeastSliceStages = 3;
// With three stages a block is faster without a warp beside the team than with one (2048 x 262144
// bfloat16 by 18 blocks a row 1060, 1217; 2048 x 65536 float32 by 9 blocks a row 509, 540). float32
// also is with four stages, which rows of 676,000 to 811,000 columns have (150 x 800000 413, 502).
// With longer rings half precision is slower without that warp (8192 x 32768 506, 474).
constexpr SliceRing kLeastSliceRing = {kLeastSliceStages, 0, Collects::kAlone};
// From five stages on the meeting of a row has two rows' time (kLags). With five, four and three
// stages, float32: 2048 x 65536 440, 447, 444; with five and four, bfloat16 with float32 weight and
// dy: 2048 x 65536 320, 338.
constexpr SliceRing kSliceRings[] = {{5, 0, Collects::kBeside}, kLeastSliceRing};
// Half precision gains as much by two rows' time, but the meeting of a row takes as long as the
// work on 8,000 columns, so that slices shorter than that lose more than they gain. With six stages
// and with four: 4096 x 65536 441, 464; 3072 x 81920 414, 439; but 8192 x 36000, whose slices have
// 7,232 and 12,032 columns, 566, 516.
constexpr SliceRing kHalfSliceRings[] = {
    {6, 7936, Collects::kBeside}, {4, 0, Collects::kBeside}, kLeastSliceRing};
// With an epilogue. With five stages and with four, float32 with GELU: 2048 x 65536 642, 548;
// 4096 x 20000 394, 364.
constexpr SliceRing kEpilogueSliceRings[] = {{4, 0, Collects::kBeside}, kLeastSliceRing};
// With a residual. Threads load the gradient of a residual themselves and wait for it once a row,
// so that the longest slices are the best (with four stages and with three: 4096 x 65536 bfloat16
// 880, 787; with five and with three: 2048 x 65536 float32 852, 735). A block is faster with a warp
// beside the team than without (4096 x 65536 by 5 blocks a row 837, 876), unless a thread then has
// 32 columns in place of 16 (with such a warp and without, by 8 blocks a row: 2048 x 65536 float32
// 900, 735; 4096 x 65536 bfloat16 1040, 906).
constexpr SliceRing kResidualSliceRings[] = {{kLeastSliceStages, 0, Collects::kAloneForFewVecs}};
static_assert(kLeastSliceStages >= least_stages(false, rung_of(kLags, kLeastSliceStages).lag),
              "every ring holds the rows of its lag");
static_assert(kKeptRowStages >= least_stages(true, 0) &&
                  kTwiceReadRowStages >= least_stages(false, 0),
              "every ring of whole rows holds the rows that it must");

// ---- Backward, short rows.

// A logical warp adds up a chain of rows, and then adds its sum to a second sum in shared memory. A
// single chain over all rows would be rounded as often as there are rows: the rms errors of dbias
// for 1000003 x 37 and 4194304 x 64 float32 were 1.8 and 1.6 times PyTorch's. A chain has a quarter
// of a logical warp's rows, within these bounds (1.1 and 0.8 times). Shorter chains are more exact
// where rows are many, but slower (chains of 32 rows: 1.1 and 0.6 times; with them and with chains
// of a quarter, 1000003 x 37 189.9, 189.3).
constexpr int kFewestRowsOfChain = 32, kMostRowsOfChain = 512;
constexpr int kChains = 4;

// ---- Backward, groups of rows.

// Rows of at most this many vectors go to logical warps, longer rows to teams of whole warps, which
// would have idle lanes with shorter rows. Times by teams of whole warps, bfloat16: 262144 x 64
// 151.9; 262144 x 256 152.0 (0.65 of copy speed); 262144 x 384 168.6 (0.87 of it).
constexpr int64_t kGroupWarpVectors = 32;

// A block that begins a new group in the midst of its rows waits for the last rows of the group
// before, for the sums of that group and for the new parameters. So each block has rows of one
// group alone, if at least 19 of 20 blocks are left then.
constexpr int64_t kGroupedBlocks = 19, kGroupedBlocksOf = 20;

// ---- Backward, gates.

// Blocks a multiprocessor, all of which run at once.
constexpr int kGateBlocks = 6;

// ---- Backward, rows of any length.

// Numbers of sets of rows are tried up to this many rounds of blocks. With more rounds the blocks
// would not end closer together.
constexpr int kStreamRounds = 4;

// The cost of the partial sums of all blocks that run at once, in rows: partial sums are written
// and read again (with two sets of rows and with one, bfloat16: 8 x 2097152 103, 52). Problems
// whose parameters get no gradients, and modulated problems, which have sums of groups in any case,
// are laid out in the same way.
constexpr int kPartialSumsRows = 4;

}  // namespace ladders
}  // namespace fused_layernorm

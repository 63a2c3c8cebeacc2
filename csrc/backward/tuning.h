// SPDX-License-Identifier: Apache-2.0
// The numbers of backward's strategies, as measured on Hopper, in the form of forward/tuning.h.
#pragma once

#include "base/chip.h"
#include "base/tuning.h"
#include "base/types.h"

namespace fused_layernorm {

// ---- What kernels are compiled for

// Threads of backward's persistent blocks, each of which has 128 registers. (640 threads of 96
// registers were slower, 152 us against 147, even with rows of 5,120 columns, which leave 192 of
// 512 threads idle.)
constexpr int kBackwardThreads = 512;
static_assert(registers_of(kBackwardThreads, 1) == 128 && registers_of(640, 1) == 96,
              "what was measured");
// The warp kernel of float32 with an activation has more threads, of 80 registers (4194304 x 64
// with GELU: 833 us, with 512 threads 959; without an activation 640 threads and 512 are alike).
constexpr int backward_warp_threads(int x_size, bool activates) {
  return x_size == 4 && activates ? 768 : kBackwardThreads;
}
static_assert(registers_of(backward_warp_threads(4, true), 1) == 80, "what was measured");

// Columns of a thread: at most, and where it also keeps xhat and g of a row. The fewest columns a
// thread for which there are a kernel and enough threads are best, because more columns leave no
// registers for xhat and g. (Kernels, but for float64, have no fewer than sixteen, because
// reductions over more threads with fewer columns each take longer: with sixteen columns a thread
// and with eight, bfloat16, 32768 x 4096 229, 276.)
constexpr int kBackwardColsPerThread = 32;
constexpr int kKeptColsPerThread = 16;

// Rows that a block works on at once (its teams), and rows or slices that a team keeps in flight. A
// block has 16 hardware barriers; each team takes one, and barrier 0 is that of __syncthreads().
constexpr int kMostTeams = 15;
constexpr int kMostStages = 8;
static_assert(kMostTeams < 16, "a block has 16 hardware barriers, and the first is the block's");
static_assert(kMostTeams * kWarpThreads <= kBackwardThreads,
              "a team has a warp at least, so a block has room for all of its teams");
// The number of rows whose collected sums can wait to be used; a plan's lag is smaller.
constexpr int kMostCollected = 4;

// Whether a thread of a block with few rows keeps xhat and g of a row in registers between the
// row's sums and its dx: always with something fused; otherwise up to 16 columns of vectors of half
// precision and 8 of other vectors. (Computed again, and kept beside nearer arguments and no
// divisions, with GELU: 64 x 1024 bfloat16 3.24 us, 2.68; 8 x 4096 3.84, 2.95; 1024 x 1024 float32
// 10.85, 9.01.)
constexpr bool few_rows_keep(int width, int vecs, int x_size, bool fused) {
  const int cols = width * vecs;
  if (fused) return cols <= kKeptColsPerThread;
  return width > 1 && cols <= (x_size == 2 ? kKeptColsPerThread : 8);
}

// Rows with a modulation of their own: the most threads of a team or block, and the blocks on a
// multiprocessor. 16 columns a thread take 80 registers, but 128 beside a gate, which adds loads
// and stores. (With 80 registers and with 128, bfloat16, batch x rows x columns: 1 x 4608 x 3072
// 38.8 us, 41.1; 1 x 32760 x 5120 with a gate 862, 846.)
constexpr BlockBounds backward_rows_bounds(int cols_per_thread, bool gated) {
  if (cols_per_thread <= 8) return {kBackwardThreads, 2};
  return cols_per_thread <= 16 && !gated ? BlockBounds{384, 2} : BlockBounds{kBackwardThreads, 1};
}
static_assert(registers_of(512, 2) == 64 && registers_of(384, 2) == 80, "what was measured");

// ---- Blocks of whole rows, by columns: the most teams where rows come through a ring

// The number of teams fixes how many bytes are on their way and in which order they are asked for.
// Some numbers are up to a fifth slower than their neighbours, in any place in memory, and no
// counter says why.

// float32, rows that are aligned, nothing fused.
constexpr Exception<int> kFloat32Teams[] = {
    {1, 512, 8},     // fifteen teams and eight: 100000 x 384 123.6, 114.7
    {513, 672, 6},   // eight, six and four: 32768 x 640 70.7, 66.6, 69.1
    {673, 2047, 3},  // six, four and three: 32768 x 768 82.8, 77.5, 78.3
};
// float32, rows (which are aligned) with a residual or an activation.
constexpr Exception<int> kFloat32FusedTeams[] = {
    {1, 767, kMostTeams},  // eight teams and five, with a residual: 32768 x 640 85.2, 86.0
    {768, 2047, 4},        // eight, four and three: 32768 x 1024 133.8, 130.5, 134.2
    {2048, 2815, 2},       // four, two and one: 32768 x 2048 276.9, 253.3, 305.9
};
// float32, rows that are not aligned, nothing fused.
constexpr Exception<int> kFloat32ElementTeams[] = {
    {1, 512, 12},     // fifteen teams, twelve and eight: 100000 x 285 95.3, 90.3, 106.9
    {513, 672, 6},    // eight, six and four: 32768 x 569 65.5, 62.8, 71.8
    {673, 1100, 4},   // eight, four and three: 32768 x 924 97.9, 96.3, 101.0
    {1101, 2047, 3},  // five, four and three: 100000 x 1350 429.6, 459.9, 424.0
    {2048, 2431, 2},  // two and one: 50000 x 2130 336.4, 391.5
};
// Half precision, rows that are aligned, nothing fused.
constexpr Exception<int> kHalfTeams[] = {
    {1984, 2048, 3},  // four, three and two: 32768 x 2048 107.8, 103.5, 107.2
};

// ---- Slices of rows

// Which warp collects the sums of a row.
enum class Collects {
  kBeside,           // a warp beside the team; slices that leave no room for it are too long
  kAloneForFewVecs,  // a working warp, where there is no room for one beside the team or where a
                     // thread has fewer vectors without it; else a warp beside the team
  kAlone,            // a working warp
};
// What rings of slices should hold. A row has the fewest blocks whose slices are short enough for
// at least `stages` stages. If these slices are shorter than `least_cols`, the next ring is tried.
struct SliceRing {
  int stages;
  int least_cols;
  Collects collects;
};
constexpr int kLeastSliceStages = 3;
// With three stages a block is faster without a warp beside the team than with one (2048 x 262144
// bfloat16 by 18 blocks a row 1060, 1217), and float32 also is with four, which rows of 676,000 to
// 811,000 columns have. With longer rings half precision is slower (8192 x 32768 506, 474).
constexpr SliceRing kLeastSliceRing = {kLeastSliceStages, 0, Collects::kAlone};

// ---- What a chip decides

struct BackwardTuning {
  // The most teams by a block's columns, where there are many rows.
  Rule<int> float32_teams = {1, kFloat32Teams};  // four and one: 65536 x 2048 403.0, 395.3
  // Two and one: 32768 x 4096 571.3, 500.5.
  Rule<int> float32_fused_teams = {1, kFloat32FusedTeams};
  // Two and one: 32768 x 2627 283.7, 264.2.
  Rule<int> float32_element_teams = {1, kFloat32ElementTeams};
  // Two and one: 32768 x 4096 204.4, 208.5. With a residual or an activation all teams are better,
  // because other teams work while one waits.
  Rule<int> half_teams = {kMostTeams, kHalfTeams};
  // Two and one: 6250 x 4095 58.4, 62.8.
  Rule<int> half_element_teams = kMostTeams;
  // A block has no more teams than that only if each then has this many rows.
  int few_teams_rows = 16;

  // A ring pays if a team has at least this many rows.
  int least_ring_rows = 3;
  // The bytes that the rings of a block with whole rows hold. More rows in flight do harm, but the
  // threads of a block need work. Of half-precision rows that are moved by vectors (with two stages
  // and with three, bfloat16: 32768 x 2048 by three teams 103.5, 111.2; but x 768 by eight 45.2,
  // 44.6); of float32 rows (100000 x 711 by four teams 226.6, 228.4); and of others (5000 x 3073 by
  // two teams 42.6, 42.0; 1 x 4608 x 3072 with a modulation and a gate 54.4, 52.7).
  int64_t half_ring_bytes = 60000, float32_ring_bytes = 50 * 1024, other_ring_bytes = 64 * 1024;
  // A single team has at least so many stages if its rows take less than long_row_bytes (with two
  // stages and with three, bfloat16: 16384 x 7168 187.1, 185.0; but x 8192 203.9, 218.4). For
  // aligned float32 rows the limit is another (32768 x 2816 289.4, 281.7; but x 3408 335.4, 348.0).
  int single_team_stages = 3;
  int64_t long_row_bytes = 32 * 1024, long_float32_row_bytes = 25 * 1024;

  // A logical warp adds up a chain of rows, and then adds its sum to a second sum in shared memory.
  // A single chain over all rows would be rounded as often as there are rows: the rms errors of
  // dbias for 1000003 x 37 and 4194304 x 64 float32 were 1.8 and 1.6 times PyTorch's. A chain has
  // this part of a logical warp's rows, within these bounds (1.1 and 0.8 times). Shorter chains are
  // more exact where rows are many, but slower (chains of 32 rows: 1.1 and 0.6 times; with them and
  // with chains of a quarter, 1000003 x 37 189.9, 189.3).
  int chains = 4;
  int fewest_rows_of_chain = 32, most_rows_of_chain = 512;
  // Modulated rows of at most this many vectors go to logical warps, longer rows to teams of whole
  // warps, which would have idle lanes with shorter rows. Times by teams of whole warps, bfloat16:
  // 262144 x 64 151.9; 262144 x 256 152.0 (0.65 of copy speed); 262144 x 384 168.6 (0.87 of it).
  int64_t group_warp_vectors = 32;
  // A block that begins a new group in the midst of its rows waits for the last rows of the group
  // before, for the sums of that group and for the new parameters. So each block has rows of one
  // group alone, if at least 19 of 20 blocks are left then.
  int64_t grouped_blocks = 19, grouped_blocks_of = 20;

  // Few rows in one launch: blocks on rows compute dx, and blocks on columns beside them compute
  // dweight and dbias. x and dy are then read twice, the second time from L2, but no second launch
  // adds up partial sums. The most rows, aligned, not aligned, and of those that a team does not
  // keep in registers. (In one launch and in two, bfloat16: 128 x 1024 2.8, 9.3; 2048 x 768 10.1,
  // 10.4; 384 x 16384 25.4, 29.5; but 512 x 12288 25.2, 24.2.)
  int few_aligned_rows = 2048, few_other_rows = 1024, few_long_rows = 384;
  // A block has as many teams as make up this many threads: the more rows there are, the more
  // threads the blocks on columns need. With 64, 128, 256 and 512, bfloat16.
  static constexpr Exception<int> kFewRowsThreads[] = {
      {1, 16, 64},     // 1 x 320 1.8, 1.8, 1.9, 2.3
      {17, 64, 128},   // 64 x 320 2.4, 2.1, 2.2, 2.5
      {65, 255, 256},  // 255 x 320 5.8, 4.0, 3.3, 3.3
  };
  Rule<int> few_rows_threads = {512, kFewRowsThreads};  // the last two: 512 x 1024 4.6, 4.2
  // The teams of whole warps in a block. Aligned rows have the most teams that few_rows_threads
  // allows, if a team has fewer threads than this (four and two teams, bfloat16: 2048 x 1536 12.1,
  // 17.4). Otherwise a block has the largest number of teams, but at least these threads, with
  // which almost all blocks run at once (the most teams, two teams and one, bfloat16: 512 x 2060
  // 9.9, 9.0, 11.6). If there is no such number, unaligned rows have the most teams, and aligned
  // rows have one (one team and two, bfloat16: 2048 x 4096 19.6, 21.4).
  int few_rows_least_threads = 256;
  // Almost all run at once if there are at least eight places for nine blocks.
  int64_t few_rows_blocks = 9, few_rows_places = 8;

  // Rows between publishing a row's sums and collecting them, by the stages of the ring. A meeting
  // takes about 2 us. A ring that holds five rows or more has room for two rows that wait, and so
  // has a kernel without a ring.
  static constexpr Exception<int> kLags[] = {{1, 4, 1}};
  Rule<int> lags = {2, kLags};
  int lag_without_ring = 2;
  // Rings of slices, the best first. From five stages on the meeting of a row has two rows' time.
  // With five and four, bfloat16 with float32 weight and dy: 2048 x 65536 320, 338.
  SliceRing slice_rings[2] = {{5, 0, Collects::kBeside}, kLeastSliceRing};
  // Half precision gains as much by two rows' time, but the meeting of a row takes as long as the
  // work on 8,000 columns, so that slices shorter than that lose more than they gain. With six
  // stages and with four: 4096 x 65536 441, 464; but 8192 x 36000, whose slices are short, 566,
  // 516.
  SliceRing half_slice_rings[3] = {
      {6, 7936, Collects::kBeside}, {4, 0, Collects::kBeside}, kLeastSliceRing};
  // With an epilogue. With five stages and with four, float32 with GELU: 2048 x 65536 642, 548.
  SliceRing epilogue_slice_rings[2] = {{4, 0, Collects::kBeside}, kLeastSliceRing};
  // With a residual. Threads load the gradient of a residual themselves and wait for it once a row,
  // so that the longest slices are the best (with four stages and with three: 4096 x 65536 bfloat16
  // 880, 787). A block is faster with a warp beside the team than without (4096 x 65536 by 5 blocks
  // a row 837, 876), unless a thread then has 32 columns in place of 16 (by 8 blocks a row 1040,
  // 906).
  SliceRing residual_slice_rings[1] = {{kLeastSliceStages, 0, Collects::kAloneForFewVecs}};

  // Stream: numbers of sets of rows are tried up to this many rounds of blocks. With more rounds
  // the blocks would not end closer together.
  int stream_rounds = 4;
  // The cost of the partial sums of all blocks that run at once, in rows: partial sums are written
  // and read again (with two sets of rows and with one, bfloat16: 8 x 2097152 103, 52). Problems
  // whose parameters get no gradients, and modulated problems, which have sums of groups in any
  // case, are laid out in the same way.
  int partial_sums_rows = 4;
};

namespace backward {

inline constexpr BackwardTuning kHopper;

inline const BackwardTuning& tuning_of(const Device&) { return kHopper; }

}  // namespace backward
}  // namespace fused_layernorm

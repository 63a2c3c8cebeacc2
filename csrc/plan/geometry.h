// SPDX-License-Identifier: Apache-2.0
// The limits that the plan and the kernels share: how many threads, vectors and columns a kernel is
// compiled for. The plan stays within them, the kernels are compiled from them, and each stands
// here once, with the measurement that set it or the proof that it holds. What the plan prefers
// within these limits stands in ladders.h.
//
// All times are microseconds of device time on an H200; docs/tuning-log.md has the whole story.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <type_traits>
#include <utility>

namespace fused_layernorm {

// ---- Data types.

enum class DataType : int32_t { kFloat32, kFloat16, kBFloat16, kFloat64 };

constexpr int size_of(DataType type) {
  return type == DataType::kFloat64 ? 8 : type == DataType::kFloat32 ? 4 : 2;
}

// Whether x, the parameters and y (dy in backward) are of one type, and it is not float64.
constexpr bool is_one_type(DataType x, DataType weight, DataType y) {
  return x == weight && x == y && x != DataType::kFloat64;
}

// The types of x, of weight and bias, and of y (dy in backward) for which there are kernels.
constexpr DataType kTypesWithKernels[][3] = {
    {DataType::kFloat32, DataType::kFloat32, DataType::kFloat32},
    {DataType::kFloat32, DataType::kFloat32, DataType::kFloat16},
    {DataType::kFloat32, DataType::kFloat32, DataType::kBFloat16},
    {DataType::kFloat16, DataType::kFloat16, DataType::kFloat16},
    {DataType::kFloat16, DataType::kFloat32, DataType::kFloat16},
    {DataType::kFloat16, DataType::kFloat32, DataType::kFloat32},
    {DataType::kBFloat16, DataType::kBFloat16, DataType::kBFloat16},
    {DataType::kBFloat16, DataType::kFloat32, DataType::kBFloat16},
    {DataType::kBFloat16, DataType::kFloat32, DataType::kFloat32},
    {DataType::kFloat64, DataType::kFloat64, DataType::kFloat64},
};

constexpr bool has_kernels(DataType x, DataType weight, DataType y) {
  for (const auto& types : kTypesWithKernels) {
    if (types[0] == x && types[1] == weight && types[2] == y) return true;
  }
  return false;
}

// Whether modulated norms have forward kernels that keep a row of these types on the chip: not for
// float64, and for rows that begin anywhere (`shifted`) only if all types are the same. All others
// are streamed, because each kernel takes some 20 KB of the binary.
constexpr bool has_modulated_forward(DataType x, DataType weight, DataType y, bool shifted) {
  return x != DataType::kFloat64 && (!shifted || (x == weight && x == y));
}

// The size of the type that sums are taken in: float32, or float64 for float64.
constexpr int acc_size_of(int x_size) { return x_size == 8 ? 8 : 4; }

// ---- The chip.

constexpr int kWarpThreads = 32;
constexpr int kMostBlockThreads = 1024;
// Rows and columns are 32-bit numbers in kernels, and so are the blocks of a launch.
constexpr int64_t kMostExtent = (int64_t{1} << 31) - 1;
constexpr int64_t kMostBlocks = (int64_t{1} << 31) - 1;
static_assert(kMostExtent <= kMostBlocks, "a launch may have a block for each row");

// A multiprocessor has this many registers, and one block can have all of them. The compiler gives
// each thread a multiple of eight.
constexpr int kRegisters = 65536;
constexpr int registers_of(int block_threads, int blocks) {
  return kRegisters / (block_threads * blocks) / 8 * 8;
}

// Dynamic shared memory that a block can have on every chip for which kernels are compiled
// (capability 7.5 has the least).
constexpr int kLeastSharedMemory = 64 * 1024;
// The plan leaves this much of a block's shared memory to what kernels declare (scratch memory of
// sums, collected sums, and the barriers and statistics of rings). The end of this file proves that
// it suffices.
constexpr int kReservedSharedMemory = 3072;

// ---- Vectors.

// A vector is what a thread moves with one instruction.
constexpr int kVectorBytes = 16;
constexpr int vector_width(int element_size) { return kVectorBytes / element_size; }
// The most bytes that memory and L2 move at once.
constexpr int kCacheLineBytes = 128;

// The least number of columns that takes whole vectors in x, y and the parameters alike. Slices of
// rows begin at multiples of it, and rings have room for a multiple of it, because bulk copies
// begin and end at multiples of 16 bytes.
constexpr int aligned_cols(int x_size, int y_size) {
  return vector_width(x_size < y_size ? x_size : y_size);
}
constexpr bool slices_are_aligned() {
  for (const auto& types : kTypesWithKernels) {
    const int cols = aligned_cols(size_of(types[0]), size_of(types[2]));
    for (const DataType type : types) {
      if (cols * size_of(type) % kVectorBytes != 0) return false;
    }
  }
  return true;
}
static_assert(slices_are_aligned(),
              "a slice of weight and bias begins at a multiple of 16 bytes wherever one of x does");

// The numbers that kernels are compiled for: of vectors a thread, and in a few places of warps or
// of columns. A kernel's launch function turns a plan's number into a template parameter by this
// list, and the plan takes only numbers of the list.
template <int... kVecs>
using VecsList = std::integer_sequence<int, kVecs...>;

template <int... kVecs>
constexpr bool contains(VecsList<kVecs...>, int vecs) {
  return ((kVecs == vecs) || ...);
}
// The first number of an ascending list that is not smaller than `least`, or 0 if there is none.
template <int... kVecs>
constexpr int first_from(VecsList<kVecs...>, int64_t least) {
  int found = 0;
  ((found = found == 0 && kVecs >= least ? kVecs : found), ...);
  return found;
}

// ---- Forward, rows in registers.

// How the elements of a row are moved.
enum class Moves {
  kVectors,  // by vectors: the row is aligned, it begins at a multiple of 16 bytes
  kShifted   // unaligned, by aligned vectors that lanes shift into place
};

// A thread has `vecs` vectors of a row, each as many columns as 16 bytes of x hold. It moves them
// in pieces of so many columns that none takes more than 16 bytes of x, of a parameter or of y: a
// warp then moves whole lines of all three. (Whole vectors of x and halves of them, bfloat16 beside
// float32 parameters: 16384 x 8192 143 us, 136; with a float32 y 254, 203; 32768 x 4096 with a
// float32 y 242, 203.) But with five and more vectors of a row and something fused there are no
// registers for halves, and whole vectors are moved unless y is wide (8192 x 16384 with a residual
// and a gate 281, 296; with a residual and a float32 y 394, 339).
constexpr int row_width(int x_size, int weight_size, int y_size, int vecs, bool bare) {
  const bool splits = y_size > x_size || (weight_size > x_size && (vecs < 5 || bare));
  return splits ? vector_width(y_size > weight_size ? y_size : weight_size) : vector_width(x_size);
}

// ---- Forward, a logical warp per row.

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
// The least number of blocks on a multiprocessor that the compiler has to leave registers for; 0
// leaves the choice to the compiler. It chooses well (32768 x 1024 bfloat16: 34.9 us, with a bound
// of one block 37.4), with two exceptions. Of a y wider than x it keeps too much in registers (the
// same shape with float32 weights and y: 61.1, with a bound of one block 55.0). And a modulation of
// x's size needs no more registers than other parameters do (float16: 40.0, with a bound of five
// blocks 36.4).
constexpr int forward_warp_blocks(int x_size, int weight_size, int y_size, bool modulated) {
  if (modulated) return weight_size <= x_size ? 5 : 4;
  return y_size > x_size ? 1 : 0;
}
// The same for rows of whole vectors and one type with nothing fused. Here the compiler's choice
// delays the loads of weight and bias until the row has come, to save registers, and each warp then
// waits twice. (With its choice, and with these bounds and the nearer arguments of launch.cuh,
// which save some 0.1 us, bfloat16: 65536 x 128 10.35 us, 9.98; 32768 x 256 10.27, 9.93; float32:
// 32768 x 256 18.54, 17.92; 32768 x 512 35.71, 34.98; but 200704 x 96 39.36, 39.48.) On chips that
// have no room for so many threads the compiler ignores the bound.
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

// ---- Forward, a row spread over several warps.

// As many warps as a lane of the logical warp has vectors; one warp has one of them.
constexpr int kMostSpreadVecs = 4;
using SpreadWarpCounts = VecsList<1, 2, 3, kMostSpreadVecs>;
static_assert(kMostSpreadVecs >= most_forward_warp_vecs(2, false) &&
                  kMostSpreadVecs >= most_forward_warp_vecs(4, false),
              "all rows of logical warps can be spread");
// Or one warp keeps all vectors of its lanes, if a lane has no more vectors than this and the
// logical warp has 8 or 16 lanes, as rows of 64 to 128 columns do (64 x 512 bfloat16: spread 1.44
// us, staying 1.48; 64 x 128 float32 1.46, 1.37). It then knows its lanes: kLanes is a template
// constant, as it is where a whole warp shares a row; elsewhere (0) it is an argument.
constexpr int kMostStayingVecs = 2;
using StayingVecs = VecsList<1, kMostStayingVecs>;
constexpr bool may_stay_in_warp(int x_size, int lanes, int vecs) {
  if (vecs == 1) return lanes == one_vector_lanes(x_size);
  return vecs == kMostStayingVecs && (lanes == 8 || lanes == 16);
}
using SpreadLanes = VecsList<0, 8, 16, kWarpThreads>;
constexpr int known_lanes(int lanes, int warps) {
  return warps == 1 || lanes == kWarpThreads ? lanes : 0;
}
// Whether there is a kernel for rows of logical warps of `lanes` lanes, known or any (0), on which
// `warps` warps work, with `vecs` vectors a thread. There is none that no ladder of lanes leads to:
// with fewer than 32 lanes, a lane that one warp does not keep has three vectors.
constexpr bool has_spread_kernel(int x_size, int lanes, int warps, int vecs) {
  if (lanes != known_lanes(lanes, warps)) return false;
  if (warps == 1) return may_stay_in_warp(x_size, lanes, vecs);
  return vecs == 1 && (lanes == kWarpThreads || warps == 3);
}
// Threads of a block. Where rows stay in their logical warps, as many as in forward/warp.cu.
constexpr int spread_threads(int warps) {
  return warps == 1 ? kForwardWarpThreads : warps * kWarpThreads;
}

// How a logical warp owns a row: vectors of a lane, and lanes.
struct Lanes {
  int vecs;
  int lanes;
};

// ---- Forward, a block per row, which keeps the row in registers.

using ForwardBlockVecs = VecsList<3, 4, 5, 8>;

// What a kernel computes, as far as it decides how many registers a thread needs.
enum class ForwardLoad {
  kBare,   // statistics and affine alone, parameters of x's type, rows of whole vectors
  kLean,   // an epilogue and no residual, with parameters no wider than x
  kHeavy,  // anything else
};

// Parameters are of x's type or of float32, so parameters of x's size are of x's type. `shifted`:
// rows begin anywhere.
constexpr ForwardLoad forward_load(int x_size, int weight_size, bool residual, bool epilogue,
                                   bool shifted, bool modulated) {
  if (residual || modulated) return ForwardLoad::kHeavy;
  if (epilogue) return weight_size <= x_size ? ForwardLoad::kLean : ForwardLoad::kHeavy;
  const bool bare = !shifted && weight_size == x_size && x_size != size_of(DataType::kFloat64);
  return bare ? ForwardLoad::kBare : ForwardLoad::kHeavy;
}

// The most threads of a block, and the least number of blocks that a multiprocessor has registers
// for.
struct BlockBounds {
  int threads;
  int blocks;
};

// Up to four vectors a thread take 64 registers, five 72, eight 96. Eight vectors of a bare row
// take 80 registers in narrow blocks, three a multiprocessor, and 64 in wide ones, two a
// multiprocessor. Four vectors of a lean row take 56 (8192 x 12288 with GELU: 112.5 us, with 64
// registers 123.7).
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
constexpr bool has_early_forward(DataType x, DataType weight, DataType y, int vecs) {
  return is_one_type(x, weight, y) && vecs <= kMostEarlyVecs;
}
constexpr int registers_of(BlockBounds bounds) {
  return registers_of(bounds.threads, bounds.blocks);
}
static_assert(registers_of(kEarlyForwardBounds) == 128 &&
                  3 * kMostEarlyVecs * kVectorBytes / 4 <= 64,
              "a thread has registers for its vectors of the row and of both parameters");
static_assert(registers_of(forward_block_bounds(4, ForwardLoad::kHeavy, false)) == 64 &&
                  registers_of(forward_block_bounds(5, ForwardLoad::kHeavy, false)) == 72 &&
                  registers_of(forward_block_bounds(8, ForwardLoad::kHeavy, false)) == 96 &&
                  registers_of(forward_block_bounds(8, ForwardLoad::kBare, true)) == 80 &&
                  registers_of(forward_block_bounds(8, ForwardLoad::kBare, false)) == 64 &&
                  registers_of(forward_block_bounds(4, ForwardLoad::kLean, false)) == 56,
              "a thread has the registers that its vectors take");
// In a row that begins anywhere, each warp has one seam for each piece that its threads move, and
// one more seam is behind the row's last piece. Each seam is closed by a thread of its own.
static_assert(2 * 8 + 1 <= kWarpThreads && !contains(ForwardBlockVecs{}, 9) &&
                  vector_width(2) / row_width(2, 4, 4, 8, true) == 2,
              "a block has more threads than seams: two for each of at most eight vectors of each "
              "of its warps, and one");

// ---- Forward, rows of any length, read twice in chunks.

constexpr int kForwardStreamThreads = 512;
constexpr int forward_stream_vecs(int width) { return width == 1 ? 16 : 8; }
constexpr int forward_stream_cols(int width) {
  return kForwardStreamThreads * forward_stream_vecs(width) * width;
}

// ---- Backward.

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
// Whether a launch takes the warp kernel for an epilogue without a residual, the only one that
// always has an epilogue. There is no such kernel for single elements (a width of one), nor where y
// is not of x's type.
constexpr bool backward_warp_activates(int width, bool residual, bool epilogue, bool same_type) {
  return width > 1 && epilogue && !residual && same_type;
}
// A thread keeps the running dweight and dbias of its columns in registers; a lane of a logical
// warp also keeps the next row there. A lane may have fewer vectors than its kernel is compiled
// for.
constexpr int most_backward_warp_vecs(int width) { return width == 1 ? 8 : 2; }
template <int kWidth>
using BackwardWarpVecs = std::conditional_t<kWidth == 1, VecsList<4, 8>, VecsList<2>>;
constexpr int backward_warp_vecs_from(int width, int64_t least) {
  return width == 1 ? first_from(BackwardWarpVecs<1>{}, least)
                    : first_from(BackwardWarpVecs<2>{}, least);
}
static_assert(backward_warp_vecs_from(1, most_backward_warp_vecs(1)) ==
                      most_backward_warp_vecs(1) &&
                  backward_warp_vecs_from(8, most_backward_warp_vecs(8)) ==
                      most_backward_warp_vecs(8),
              "there are kernels for the longest rows that a logical warp takes");
// The warp kernel adds up dweight and dbias of its warps in shared memory.
constexpr int64_t backward_warp_shared_bytes(int block_threads, int64_t cols, int x_size) {
  return int64_t{2} * (block_threads / kWarpThreads) * cols * acc_size_of(x_size);
}
// Where logical warps have many rows, shared memory also has a second sum for each running sum of
// each thread.
constexpr int64_t backward_warp_second_sums_bytes(int block_threads, int vecs, int width,
                                                  int x_size) {
  return int64_t{2} * vecs * width * block_threads * acc_size_of(x_size);
}
constexpr bool backward_warp_fits(int x_size) {
  for (const int width : {1, vector_width(x_size)}) {
    const int64_t cols = int64_t{kWarpThreads} * most_backward_warp_vecs(width) * width;
    for (const bool epilogue : {false, true}) {
      const bool activates = backward_warp_activates(width, false, epilogue, true);
      const int threads = backward_warp_threads(x_size, activates);
      if (backward_warp_shared_bytes(threads, cols, x_size) > kLeastSharedMemory) return false;
    }
  }
  return true;
}
static_assert(backward_warp_fits(2) && backward_warp_fits(4) && backward_warp_fits(8),
              "the longest rows of the warp kernel fit the smallest shared memory; the kernel has "
              "no other");

constexpr int kBackwardColsPerThread = 32;
constexpr int kKeptColsPerThread = 16;  // where a thread also keeps xhat and g of a row
// A single element takes more registers than an element of a vector.
constexpr int most_backward_block_vecs(int width) {
  return width == 1 ? 16 : kBackwardColsPerThread / width;
}
// float64 has one kernel, with as many columns a thread as registers hold without spills
// (4096 x 1024 took 122 us with the 32 columns of other types). Longer rows go to the stream
// strategy.
template <int kWidth, int kXSize>
using BackwardBlockVecs =
    std::conditional_t<kXSize == 8, VecsList<8 / kWidth>,
                       std::conditional_t<kWidth == 1, VecsList<most_backward_block_vecs(1)>,
                                          VecsList<most_backward_block_vecs(kWidth) / 2,
                                                   most_backward_block_vecs(kWidth)>>>;
constexpr int backward_block_vecs_from(int width, int x_size, int64_t least) {
  if (width == 1) {
    return x_size == 8 ? first_from(BackwardBlockVecs<1, 8>{}, least)
                       : first_from(BackwardBlockVecs<1, 4>{}, least);
  }
  if (x_size == 8) return first_from(BackwardBlockVecs<vector_width(8), 8>{}, least);
  if (x_size == 4) return first_from(BackwardBlockVecs<vector_width(4), 4>{}, least);
  return first_from(BackwardBlockVecs<vector_width(2), 2>{}, least);
}

// Slices that come through a ring may be short, because several must fit. Others are as long as a
// block can have them, and their only kernel is that for the most columns a thread.
constexpr int split_least_vecs(int width, bool ring) {
  return ring ? 1 : most_backward_block_vecs(width);
}

// Blocks with groups of rows keep rows as the blocks above do. They have no kernels for float64,
// nor without a ring for rows that they do not keep.
constexpr bool has_group_kernel(int x_size, bool bulk, bool keeps) {
  return x_size != 8 && (bulk || keeps);
}

// Whether a thread of such a block keeps xhat and g of a row in registers. Otherwise they are
// computed again from the ring: always beside a gate, whose third running sum takes those
// registers.
constexpr bool group_holds_row(bool keeps, bool gated) { return keeps && !gated; }

// Whether such blocks also compute the gradient of a gate. For longer rows, and for rows that begin
// anywhere, a kernel of its own does (backward/gate.cu).
constexpr bool has_gated_kernel(int width, int x_size, bool bulk, bool keeps) {
  return x_size != 8 && bulk && keeps && width > 1;
}

// The blocks of few rows that a multiprocessor has registers for: they have no running sums, but
// activations and long rows take registers.
constexpr int few_rows_blocks(int width, int vecs, bool fused) {
  return fused || width * vecs > kKeptColsPerThread ? 1 : 2;
}
static_assert(registers_of(kBackwardThreads, few_rows_blocks(1, kKeptColsPerThread, false)) == 64 &&
                  registers_of(kBackwardThreads, few_rows_blocks(1, kKeptColsPerThread, true)) ==
                      128,
              "half the registers of the persistent blocks do without running sums");
// Whether a thread of such a block keeps xhat and g of a row in registers between the row's sums
// and its dx: always with something fused; otherwise up to 16 columns of vectors of half precision,
// 8 of other vectors, and 4 of single elements. (Computed again, and kept beside nearer arguments
// and no divisions, with GELU: 64 x 1024 bfloat16 3.24 us, 2.68; 8 x 4096 3.84, 2.95; 1024 x 1024
// float32 10.85, 9.01.)
constexpr bool few_rows_keep(int width, int vecs, int x_size, bool fused) {
  const int cols = width * vecs;
  if (fused) return cols <= kKeptColsPerThread;
  return width == 1 ? cols <= 4 : cols <= (x_size == 2 ? kKeptColsPerThread : 8);
}
// With few rows a team owns a row as in the kernels for many rows: as a logical warp, or as whole
// warps.
template <int kWidth, int kXSize>
using FewRowsVecs =
    std::conditional_t<kWidth == 1, VecsList<4, 8, kKeptColsPerThread>,
                       std::conditional_t<kXSize == 4, VecsList<2, 4, 8>, VecsList<2, 4>>>;
// There are kernels for all rows that teams for many rows keep in registers. For longer rows there
// are kernels only where nothing is fused and all tensors are of one type.
constexpr bool has_few_rows_kernel(DataType x, DataType weight, DataType y, bool fused,
                                   bool keeps) {
  return keeps || (!fused && is_one_type(x, weight, y));
}
static_assert(contains(FewRowsVecs<1, 4>{}, most_backward_block_vecs(1)) &&
                  contains(FewRowsVecs<4, 4>{}, backward_block_vecs_from(4, 4, 1)) &&
                  contains(FewRowsVecs<8, 2>{}, backward_block_vecs_from(8, 2, 1)) &&
                  contains(FewRowsVecs<1, 8>{}, backward_block_vecs_from(1, 8, 1)) &&
                  contains(FewRowsVecs<2, 8>{}, backward_block_vecs_from(2, 8, 1)),
              "few rows have a kernel wherever a team of whole warps keeps the row");
// A thread that moves single elements owns many of them, and works on one after the other. Where
// rows are few, several threads share these elements, and exchange xhat and g of the row through
// shared memory.
constexpr int kFewRowsSharers = 4;
constexpr bool has_shared_few_rows(DataType x, DataType weight, DataType y, int width, bool fused) {
  return width == 1 && !fused && is_one_type(x, weight, y);
}
constexpr int few_rows_exchanged_bytes(int block_threads, int vecs) {
  return block_threads / kFewRowsSharers * vecs * 2 * static_cast<int>(sizeof(float));
}
static_assert(first_from(FewRowsVecs<1, 4>{}, 1) % kFewRowsSharers == 0,
              "the threads that share have as many elements each");
// The number of lanes side by side on one row in blocks that compute only dweight and dbias. They
// move 64 bytes of the row by vectors, or a sector of 32 bytes by single elements.
constexpr int column_lanes(int width, int x_size) { return width == 1 ? 32 / x_size : 4; }
// These blocks add up the sums of their warps in shared memory.
constexpr int few_rows_shared_bytes(int block_threads, int width, int x_size) {
  return block_threads / kWarpThreads * column_lanes(width, x_size) * width * 2 *
         acc_size_of(x_size);
}
static_assert(few_rows_shared_bytes(kBackwardThreads, vector_width(2), 2) <= 4096 &&
                  few_rows_shared_bytes(kBackwardThreads, vector_width(4), 4) <= 4096 &&
                  few_rows_shared_bytes(kBackwardThreads, vector_width(8), 8) <= 4096,
              "shared memory never decides how many blocks of few rows run at once");
static_assert(few_rows_exchanged_bytes(kBackwardThreads, kKeptColsPerThread) <= 16384,
              "nor does it where teams share rows");

// Rows with a modulation of their own: a block has about this many threads, or one larger team. The
// lists are the numbers of vectors that kernels are compiled for.
constexpr int kBackwardRowsThreads = 256;
template <int kWidth>
using BackwardRowsVecs =
    std::conditional_t<kWidth == 1, VecsList<16>,
                       std::conditional_t<kWidth == 4, VecsList<2, 4, 8>, VecsList<2, 4>>>;
constexpr int backward_rows_vecs_from(int width, int x_size, int64_t least) {
  if (width == 1) return first_from(BackwardRowsVecs<1>{}, least);
  return x_size == 4 ? first_from(BackwardRowsVecs<4>{}, least)
                     : first_from(BackwardRowsVecs<8>{}, least);
}
// The most threads of a team or block, and the blocks on a multiprocessor. 16 columns a thread take
// 80 registers, but 128 beside a gate, which adds loads and stores. (With 80 registers and with
// 128, bfloat16, batch x rows x columns: 1 x 4608 x 3072 38.8 us, 41.1; 1 x 32760 x 5120 with a
// gate 862, 846.)
constexpr BlockBounds backward_rows_bounds(int cols_per_thread, bool gated) {
  if (cols_per_thread <= 8) return {kBackwardThreads, 2};
  return cols_per_thread <= 16 && !gated ? BlockBounds{384, 2} : BlockBounds{kBackwardThreads, 1};
}
static_assert(registers_of(512, 2) == 64 && registers_of(384, 2) == 80, "what was measured");
// Whether a row's other inputs are loaded together with x and dy. Otherwise there are no registers
// for them, and each is loaded where it is used.
constexpr bool backward_rows_load_early(int cols_per_thread, bool gated) {
  return cols_per_thread <= (gated ? 16 : 8);
}
static_assert(vector_width(4) == 4 && vector_width(2) == 8,
              "the vectors that kernels of float32 and of half precision are compiled for");

// Rows that a block works on at once (its teams), and rows or slices that a team keeps in flight. A
// block has 16 hardware barriers; each team takes one, and barrier 0 is that of __syncthreads().
constexpr int kMostTeams = 15;
constexpr int kMostStages = 8;
static_assert(kMostTeams < 16, "a block has 16 hardware barriers, and the first is the block's");
static_assert(kMostTeams * kWarpThreads <= kBackwardThreads,
              "a team has a warp at least, so a block has room for all of its teams");
// Threads of the stream kernels' blocks. Each warp writes its part of a row's sums to the
// workspace.
constexpr int kBackwardStreamThreads = 256;
// Blocks of the first stream kernel that a multiprocessor has registers for.
constexpr int kBackwardStreamBlocks = 2;
constexpr int backward_stream_vecs(int width) { return 16 / width; }
constexpr int backward_stream_cols(int width) {
  return kBackwardStreamThreads * backward_stream_vecs(width) * width;
}
// A stream kernel has at most one block for each chunk of each row. Chunks have 4,096 columns and
// more, so a launch would have too many blocks only from 2^43 elements on, more than any device
// holds.
static_assert(backward_stream_cols(1) >= 4096 && backward_stream_cols(8) >= 4096 &&
                  forward_stream_cols(1) >= 4096 && forward_stream_cols(2) >= 4096,
              "a launch has enough blocks for all chunks of all rows that a device holds");

// ---- Backward of gates.

// A warp has some columns of one row, and the warps of a block have rows that follow each other.
constexpr int kGateThreads = 256;
constexpr int kGateWarps = kGateThreads / kWarpThreads;
// A lane has a vector of a row, or several single elements.
constexpr int gate_vecs(int width) { return width == 1 ? 8 : 1; }
static_assert(gate_vecs(1) <= kGateWarps, "a block has a warp for the sum of each vector");
constexpr int gate_cols(int width) { return kWarpThreads * gate_vecs(width) * width; }

// ---- The meeting of the blocks of one row.

// The slots of a row's sums that each lane of a collecting warp can hold.
constexpr int kSlotsPerLane = 5;
// On a device with more multiprocessors than this, some do not work on the longest rows.
constexpr int kMaxBlocksPerRow = kSlotsPerLane * kWarpThreads;
// The number of rows whose collected sums can wait to be used; a plan's lag is smaller.
constexpr int kMostCollected = 4;

// A ring is refilled once a row has left it. A row that is kept in registers leaves at once, so one
// stage will do. Any other row is read again, `lag` rows later: the ring then holds the rows that
// wait, the one in work and one on its way.
constexpr int least_stages(bool keeps, int lag) { return keeps ? 1 : lag + 2; }
static_assert(least_stages(false, kMostCollected - 1) <= kMostStages,
              "a ring can be made for every lag");

// ---- The shared memory that kernels declare.

// The scratch memory of all teams of a block. The scratch memory of one team has up to three values
// more than the team has warps, because a thread reads four values at once.
constexpr int kBackwardScratch = (kBackwardThreads / kWarpThreads + 3 * kMostTeams + 3) / 4 * 4;
// Two scratch memories and the collected sums, in pairs of the arithmetic's type, and for each
// stage of each team the row's mean and rstd in float32 and a barrier. float64 has no ring.
constexpr int backward_declared_bytes(int acc_size) {
  const int pair = 2 * acc_size;
  const int stages = acc_size == 4 ? kMostTeams * kMostStages : 0;
  return 2 * kBackwardScratch * pair + kMostCollected * pair + stages * (8 + 8);
}
static_assert(backward_declared_bytes(4) <= kReservedSharedMemory &&
                  backward_declared_bytes(8) <= kReservedSharedMemory,
              "backward's blocks declare no more than the plan leaves them");
}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// The strategy "block": a block holds a row in registers. Its kernels stand in
// layernorm_kernel.cu.
#pragma once

#include "forward/row.h"

namespace fused_layernorm {
namespace forward {

struct Block : InRegisters {
  static constexpr const char* kName = "block";
  int vecs = 3;
  Moves moves = Moves::kVectors;
  bool early = false;  // weight and bias are loaded with the row

  static std::optional<Block> make(const Problem& problem, const Device& device,
                                   const Forced& forced);
  template <typename Json>
  void describe(Json& json) const {
    json.add("stays_in_l2", stays_in_l2).add("vecs", vecs).add("moves", moves).add("early", early);
  }
};

}  // namespace forward

cudaError_t launch_layer_norm_forward(const ForwardParams&, const DataTypes&, const forward::Block&,
                                      cudaStream_t);

// ---- Limits.

using ForwardBlockVecs = VecsList<3, 4, 5, 8>;
// Three or four vectors a thread suit every number of vectors, and are all that unaligned rows
// have.
constexpr int kMostShiftedVecs = 4;
constexpr bool has_block_kernels(int vecs, Moves moves) {
  return contains(ForwardBlockVecs{}, vecs) &&
         (moves == Moves::kVectors || vecs <= kMostShiftedVecs);
}

// What a kernel computes, as far as it decides how many registers a thread needs.
enum class ForwardLoad {
  kBare,   // statistics and affine alone, parameters of x's type, rows of whole vectors
  kLean,   // an epilogue and no residual, with parameters no wider than x
  kHeavy,  // anything else
};

// Parameters are of x's type or of float32, so parameters of x's size are of x's type. `shifted`:
// rows are unaligned.
constexpr ForwardLoad forward_load(int x_size, int weight_size, bool residual, bool epilogue,
                                   bool shifted, bool modulated) {
  if (residual || modulated) return ForwardLoad::kHeavy;
  if (epilogue) return weight_size <= x_size ? ForwardLoad::kLean : ForwardLoad::kHeavy;
  const bool bare = !shifted && weight_size == x_size && x_size != size_of(DataType::kFloat64);
  return bare ? ForwardLoad::kBare : ForwardLoad::kHeavy;
}

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
// In an unaligned row each warp has one boundary for each piece that its threads move, and
// one more boundary is behind the row's last piece. Each boundary is closed by a thread of its own.
static_assert(
    2 * 8 + 1 <= kWarpThreads && !contains(ForwardBlockVecs{}, 9) &&
        vector_width(2) / row_width(2, 4, 4, 8, true) == 2,
    "a block has more threads than boundaries: two for each of at most eight vectors of each "
    "of its warps, and one");

// ---- The ladders: how many vectors of a row a thread owns.

struct BlockRung {
  int64_t last;  // vectors of the row
  Choice choice;
  int vecs[3];  // vectors a thread; kFewestPlaces takes the first among equals
};

// Nothing fused. The times are those of four, five and eight vectors a thread, bfloat16
// (docs/tuning-log.md has more of all ladders).
constexpr BlockRung kBareBlocks[] = {
    {639, Choice::kFewestPlaces, {4, 5, 3}},
    {1472, Choice::kFirst, {5, 4, 8}},    // 11264 x 11264 148.6, 124.1, 126.0
    {kNoEnd, Choice::kFirst, {8, 5, 4}},  // 8192 x 12288 112.7, 114.0, 100.0
};

// With an epilogue and no residual. The times are those of four, five and eight vectors a thread,
// bfloat16 with GELU.
constexpr BlockRung kEpilogueBlocks[] = {
    {639, Choice::kFewestPlaces, {4, 5, 3}},
    {704, Choice::kFirst, {5, 4, 8}},     // 32768 x 5120 175.4, 170.4, and no kernel of eight
    {960, Choice::kFirst, {4, 5, 8}},     // 16384 x 6144 107.8, 113.3, 109.0
    {1408, Choice::kFirst, {8, 4, 5}},    // 16384 x 8192 145.3, 153.8, 137.7
    {1664, Choice::kFirst, {4, 5, 8}},    // 8192 x 12288 with SiLU 106.7, 137.2, 115.9
    {1792, Choice::kFirst, {5, 4, 8}},    // 8192 x 14336 150.8, 140.2, 147.0
    {kNoEnd, Choice::kFirst, {4, 5, 8}},  // 8192 x 16384 with SiLU 155.3, 162.6, 165.6
};

// With a residual and parameters no wider than x, whatever else is fused. The times are those of
// bfloat16.
constexpr BlockRung kResidualBlocks[] = {
    {639, Choice::kFirst, {3, 4, 5}},     // three and four: 32768 x 4096 270.4, 274.8
    {kNoEnd, Choice::kFirst, {5, 4, 8}},  // four, five, eight: 16384 x 8192 265.0, 261.6, 274.9
};

// With a residual and parameters wider than x. The times are those of three, four and five vectors
// a thread, bfloat16 with float32 parameters.
constexpr BlockRung kResidualWideBlocks[] = {
    {959, Choice::kFirst, {3, 4, 5}},     // 16384 x 5120 169.4, 169.7, 172.8
    {1088, Choice::kFirst, {4, 3, 5}},    // 16384 x 8192, gated and modulated 286.9, 273.5, 275.3
    {1664, Choice::kFirst, {3, 4, 5}},    // 8192 x 12288, the same 206.2, 230.1, 219.8
    {kNoEnd, Choice::kFirst, {4, 5, 8}},  // 8192 x 16384 284.6, 274.3, 278.3
};

template <size_t kRungs>
constexpr bool is_block_ladder(const BlockRung (&ladder)[kRungs]) {
  for (const auto& rung : ladder) {
    for (const int vecs : rung.vecs) {
      if (!contains(ForwardBlockVecs{}, vecs)) return false;
    }
  }
  return is_ladder(ladder);
}
static_assert(is_block_ladder(kBareBlocks) && is_block_ladder(kEpilogueBlocks) &&
                  is_block_ladder(kResidualBlocks) && is_block_ladder(kResidualWideBlocks),
              "the rungs ascend, and there is a kernel for each number of vectors");

namespace forward {

inline const BlockRung& block_rung(const Problem& problem, int64_t vectors) {
  if (problem.residual) {
    return size_of(problem.weight) > size_of(problem.x) ? rung_of(kResidualWideBlocks, vectors)
                                                        : rung_of(kResidualBlocks, vectors);
  }
  if (problem.has_epilogue) return rung_of(kEpilogueBlocks, vectors);
  return rung_of(kBareBlocks, vectors);
}

// The threads of a block whose threads own `vecs` vectors of a row each, if there is a kernel for
// it.
inline std::optional<int> block_threads(const Problem& problem, int64_t vectors, int vecs) {
  if (!has_block_kernels(vecs, moves_of(problem))) return std::nullopt;
  const ForwardLoad load =
      forward_load(size_of(problem.x), size_of(problem.weight), problem.residual,
                   problem.has_epilogue, !problem.aligned, problem.modulated);
  const int64_t threads = round_up(ceil_div(vectors, vecs), kWarpThreads);
  if (threads > forward_block_bounds(vecs, load, false).threads) return std::nullopt;
  // Of a thread's vectors only the last may be missing.
  if ((vecs - 1) * threads >= vectors) return std::nullopt;
  return static_cast<int>(threads);
}

// Whether blocks that have one row each may load weight and bias together with it: the registers
// for this must not keep any of the blocks waiting. (bfloat16, with such loads and without: 528 x
// 4096 4.40 us, 4.55; 1056 x 2048 4.18, 4.25; but where not all blocks run
// at once 1056 x 4096 6.93, 6.15.)
inline bool may_be_early(const Problem& problem, const Device& device, int vecs, int threads) {
  return is_bare(problem) && problem.aligned &&
         has_early_forward(problem.x, problem.weight, problem.y, vecs) &&
         problem.rows <= int64_t{device.sms} * (kEarlyForwardBounds.threads / threads);
}

inline std::optional<Block> Block::make(const Problem& problem, const Device& device,
                                        const Forced& forced) {
  if (!forced.allows(kName, {Field::kVecs}) || !has_kernels_on_chip(problem)) {
    return std::nullopt;
  }
  const int64_t vectors = vectors_of(problem);
  const auto& rung = block_rung(problem, vectors);
  std::optional<Block> best;
  for (const int preferred : rung.vecs) {
    const int vecs = forced.value_or(Field::kVecs, preferred);
    const auto threads = block_threads(problem, vectors, vecs);
    if (!threads) continue;
    const bool fewer_places = rung.choice == Choice::kFewestPlaces && best &&
                              *threads * vecs < best->threads * best->vecs;
    if (best && !fewer_places) continue;
    Block plan;
    plan.stays_in_l2 = rows_stay_in_l2(problem, device);
    plan.vecs = vecs;
    plan.moves = moves_of(problem);
    plan.threads = *threads;
    plan.early = may_be_early(problem, device, vecs, plan.threads);
    plan.blocks = problem.rows;
    best = plan;
  }
  return best;
}
}  // namespace forward
}  // namespace fused_layernorm

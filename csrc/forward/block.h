// SPDX-License-Identifier: Apache-2.0
// The strategy "block": a block holds a row in registers (layernorm_kernel.cu).
#pragma once

#include "forward/row.h"

namespace fused_layernorm {

using ForwardBlockVecs = VecsList<3, 4, 5, 8>;
// With three or with four vectors a thread every row of more than 64 vectors has a plan (the
// shorter ones are logical warps'). So unaligned rows have kernels for no other number.
constexpr int kMostShiftedVecs = 4;
constexpr bool has_block_kernels(int vecs, Moves moves) {
  return contains(ForwardBlockVecs{}, vecs) &&
         (moves == Moves::kVectors || vecs <= kMostShiftedVecs);
}

// Parameters are of x's type or float32. `shifted`: rows are unaligned.
constexpr ForwardLoad forward_load(int x_size, int weight_size, bool residual, bool epilogue,
                                   bool shifted, bool modulated) {
  if (residual || modulated) return ForwardLoad::kHeavy;
  if (epilogue) return weight_size <= x_size ? ForwardLoad::kLean : ForwardLoad::kHeavy;
  const bool bare = !shifted && weight_size == x_size && x_size != size_of(DataType::kFloat64);
  return bare ? ForwardLoad::kBare : ForwardLoad::kHeavy;
}

// Whether there are kernels that also keep weight and bias in registers, for few rows.
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
// In an unaligned row each warp has one boundary for each piece that its threads move, and one more
// boundary is at the end of the row's last piece. Each boundary is closed by a thread of its own.
static_assert(
    2 * 8 + 1 <= kWarpThreads && !contains(ForwardBlockVecs{}, 9) &&
        vector_width(2) / row_width(2, 4, 4, 8, true) == 2,
    "a block has more threads than boundaries: two for each of at most eight vectors of each "
    "of its warps, and one");

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

inline const ThreadVecs& thread_vecs(const Problem& problem, const Device& device,
                                     int64_t vectors) {
  const ForwardTuning& tuning = tuning_of(device);
  const bool wide = size_of(problem.weight) > size_of(problem.x);
  const auto& rule = problem.residual ? wide ? tuning.residual_wide_blocks : tuning.residual_blocks
                     : problem.has_epilogue ? tuning.epilogue_blocks
                                            : tuning.bare_blocks;
  return rule.at(vectors);
}

// The threads of a block, each with `vecs` vectors of the row, if there is a kernel for it.
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

// Whether weight and bias are loaded together with the row: only where all blocks run at once
// although each takes the registers for this. (bfloat16, with such loads and without: 528 x 4096
// 4.40 us, 4.55; 1056 x 2048 4.18, 4.25; but 1056 x 4096 6.93, 6.15.)
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
  const ThreadVecs& wanted = thread_vecs(problem, device, vectors);
  std::optional<Block> best;
  for (const int preferred : wanted.vecs) {
    const int vecs = forced.value_or(Field::kVecs, preferred);
    const auto threads = block_threads(problem, vectors, vecs);
    if (!threads) continue;
    const bool fewer_places = wanted.choice == Choice::kFewestPlaces && best &&
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

ForwardLaunch<forward::Block> launch_layer_norm_forward;

}  // namespace fused_layernorm

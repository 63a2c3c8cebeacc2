// SPDX-License-Identifier: Apache-2.0
// Forward of rows that no single block keeps in its registers: limits and plan of forward/ring.cu.
//
// A block has warps by role. Eight workers bring x to a ring of stages in shared memory by bulk
// copies, and normalize it; three measurers take the moments of what has come; one collector waits
// for the other blocks of the row. In half precision, where the workers are the bound, one more
// warp brings x in their place: the feeder. A stage has a span of vectors, 64 for each worker. The
// spans of the blocks that share a row lie side by side, so that all of them read and write one
// part of memory at a time.
//
// There are two kinds of kernels. In one the block's columns of weight and bias lie in shared
// memory beside the ring: for all types, with an epilogue or without. In the other most of them lie
// in the workers' registers, which on Hopper get those that other warps do without (PTX ISA,
// "setmaxnreg"): for the longest rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "base/cuda_types.h"
#include "base/planning.h"
#include "forward/tuning.h"

namespace fused_layernorm {

namespace forward {

struct Ring : Launch {
  static constexpr const char* kName = "ring";
  int blocks_per_row = 1;
  int spans = 0;           // of vectors of a row that a block has
  int rest = 0;            // vectors of the last spans of all blocks
  int last_of_block = 0;   // vectors of a block's last span
  int last_of_worker = 0;  // vectors of a worker's part of it
  int stages = 0;          // of the ring, each with a span
  bool is_long = false;    // most of weight and bias lie in registers

  bool meets() const { return blocks_per_row > 1; }
  static std::optional<Ring> make(const Problem& problem, const Device& device,
                                  const Forced& forced);
  template <typename Json>
  void describe(Json& json) const {
    json.add("blocks_per_row", blocks_per_row).add("spans", spans).add("stages", stages);
    json.add("long", is_long);
  }
};

}  // namespace forward

ForwardLaunch<forward::Ring> launch_layer_norm_forward;

constexpr int kRingWorkers = 8, kRingMeasurers = 3, kRingCollectors = 1;
constexpr int ring_threads(bool fed) {
  return (kRingWorkers + kRingMeasurers + kRingCollectors + fed) * kWarpThreads;
}
// Whether a block has a feeder. (H200, without and with it, bfloat16: 4096 x 65536 343.1, 296.2;
// 2048 x 262144 636.1, 571.0; but float32, long: 16 x 4194304 175.2, 186.5.)
constexpr bool ring_is_fed(int x_size, bool is_long) { return x_size == 2 && !is_long; }
// A worker's lane has two vectors of a span.
constexpr int kRingLaneVecs = 2;
constexpr int kRingPieceVectors = kRingLaneVecs * kWarpThreads;
constexpr int kRingSpanVectors = kRingWorkers * kRingPieceVectors;
constexpr int kRingStageBytes = kRingSpanVectors * kVectorBytes;
constexpr int kMostRingStages = 28;
// What the warps tell each other about a row is kept for so many rows.
constexpr int kRingRowsKept = 8;
// Shared memory that a block declares beside its ring. (Less than other kernels are given, because
// 1 KB decides on the longest rows' last stage.)
constexpr int kRingStateBytes = 2048;
static_assert(kRingStateBytes <= kReservedSharedMemory);
// The stages that an L2 prefetch is ahead of the ring.
constexpr int kRingAhead = 4;

// The long kernels: of a lane's vectors the first `weights` and the first `biases` have theirs in
// registers, the others in shared memory. `wide`: a vector's parameters take twice the registers.
struct LongRing {
  int spans, weights, biases;
};
constexpr LongRing long_ring(bool wide) { return wide ? LongRing{8, 16, 9} : LongRing{16, 31, 19}; }
constexpr int kLongRingWorkerRegisters = 224, kLongRingOtherRegisters = 56;
static_assert(kRingWorkers * kLongRingWorkerRegisters +
                      (kRingMeasurers + kRingCollectors) * kLongRingOtherRegisters <=
                  ring_threads(false) / kWarpThreads * registers_of(ring_threads(false), 1),
              "the registers that a launch begins with suffice");
// There are long kernels for nothing fused, and y of x's type. They pay on Hopper alone, where
// registers can be moved: elsewhere most of what they keep would be spilled.
constexpr bool has_long_ring(DataType x, DataType y, bool epilogue) {
  return x == y && x != DataType::kFloat64 && !epilogue;
}

// The vectors of a lane whose parameter lies in shared memory. The last of all has room only for
// the lanes of each worker that have one.
constexpr int64_t shared_ring_vectors(int vecs, int in_registers, int last_of_worker) {
  if (vecs <= in_registers) return 0;
  const int last_lanes = std::max(last_of_worker - (kRingLaneVecs - 1) * kWarpThreads, 0);
  return kRingWorkers * ((vecs - 1 - in_registers) * int64_t{kWarpThreads} + last_lanes);
}

// The plan with `blocks_per_row` blocks a row and, for every eight spans, `least` stages or more.
inline std::optional<forward::Ring> ring_of(const Problem& problem, const Device& device,
                                            int blocks_per_row, bool is_long, int least) {
  const int width = vector_width(size_of(problem.x));
  const int64_t vectors = problem.cols / width;
  const int64_t spans = ceil_div(vectors, int64_t{blocks_per_row} * kRingSpanVectors);
  const LongRing kept =
      is_long ? long_ring(size_of(problem.weight) > size_of(problem.x)) : LongRing{0, 0, 0};
  if (spans > (is_long ? kept.spans : kMostRingStages)) return std::nullopt;
  forward::Ring plan;
  plan.blocks_per_row = blocks_per_row;
  plan.spans = static_cast<int>(spans);
  const int64_t rest = vectors - (spans - 1) * blocks_per_row * kRingSpanVectors;
  plan.rest = static_cast<int>(rest);
  plan.last_of_block = static_cast<int>(ceil_div(rest, blocks_per_row));
  plan.last_of_worker = static_cast<int>(ceil_div(plan.last_of_block, kRingWorkers));
  plan.is_long = is_long;
  const int vecs = kRingLaneVecs * plan.spans;
  const int64_t parameters = (shared_ring_vectors(vecs, kept.weights, plan.last_of_worker) +
                              shared_ring_vectors(vecs, kept.biases, plan.last_of_worker)) *
                             width * size_of(problem.weight);
  // In a ring of more rows than are kept, one row would take the place of another.
  const int64_t stages =
      std::min<int64_t>({(device.shared_memory - kRingStateBytes - parameters) / kRingStageBytes,
                         kRingRowsKept * spans - 1, kMostRingStages});
  if (stages <= spans || stages * 8 < spans * least) return std::nullopt;
  plan.stages = static_cast<int>(stages);
  plan.threads = ring_threads(ring_is_fed(size_of(problem.x), is_long));
  plan.shared_bytes = static_cast<int>(stages * kRingStageBytes + parameters);
  plan.blocks = persistent_sets(problem, device, blocks_per_row, 1) * blocks_per_row;
  plan.workspace_bytes = plan.meets() ? problem.rows * blocks_per_row * 8 : 0;
  return plan;
}

inline std::optional<forward::Ring> forward::Ring::make(const Problem& problem,
                                                        const Device& device,
                                                        const Forced& forced) {
  const bool allowed = forced.allows(kName, {Field::kBlocksPerRow, Field::kLong}) &&
                       device.capability >= 90 && problem.aligned &&
                       problem.x != DataType::kFloat64 && !problem.residual && !problem.modulated;
  if (!allowed) return std::nullopt;
  const ForwardTuning& tuning = forward::tuning_of(device);
  const int most = most_blocks_per_row(device);
  const auto number = forced.of(Field::kBlocksPerRow);
  if (number && *number > most) return std::nullopt;
  const bool may_be_short = forced.allows(Field::kLong, 0);
  const bool may_be_long = forced.allows(Field::kLong, 1) && device.capability == 90 &&
                           has_long_ring(problem.x, problem.y, problem.has_epilogue);
  const auto short_plan = [&](int n, int least) {
    return may_be_short ? ring_of(problem, device, n, false, least) : std::nullopt;
  };
  const auto long_plan = [&](int n, int spans) {
    auto plan = may_be_long ? ring_of(problem, device, n, true, tuning.least_ring) : std::nullopt;
    return plan && plan->spans <= spans ? plan : std::nullopt;
  };
  const bool prefers_long = may_be_long && problem.x == DataType::kFloat32;
  const auto preferred = [&](int n) {
    return prefers_long ? long_plan(n, tuning.long_ring_spans)
                        : short_plan(n, n == 1 ? tuning.alone_ring : tuning.shared_ring);
  };
  for (int n = 1; n <= most && !number; ++n) {
    if (auto plan = preferred(widen(n, device))) return plan;
  }
  const int blocks = number.value_or(most);
  if (auto plan = preferred(blocks)) return plan;
  if (auto plan = short_plan(blocks, blocks == 1 ? tuning.alone_ring : tuning.shared_ring))
    return plan;
  if (auto plan = long_plan(blocks, kMostRingStages)) return plan;
  return short_plan(blocks, tuning.least_ring);
}

}  // namespace fused_layernorm

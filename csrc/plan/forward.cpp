// SPDX-License-Identifier: Apache-2.0
// The ladder of forward, from problem to plan: short rows by logical warps, or where
// they are few spread over warps; longer ones by blocks, the longest by several blocks a row or by
// two reads. geometry.h has the limits of each strategy, ladders.h the best choice where there are
// several.
#include <algorithm>
#include <cstdint>
#include <optional>

#include "forward/ring.h"
#include "plan/geometry.h"
#include "plan/ladders.h"
#include "plan/layout.h"
#include "plan/plan.h"

namespace fused_layernorm {
namespace {

// The width of a vector, also for rows that begin anywhere: forward moves these by vectors, too.
int width_of(const Problem& problem) { return vector_width(size_of(problem.x)); }
int64_t vectors_of(const Problem& problem) { return ceil_div(problem.cols, width_of(problem)); }

// Whether there are kernels that keep the problem's rows on the chip.
bool has_kernels_on_chip(const Problem& problem) {
  return !problem.modulated ||
         has_modulated_forward(problem.x, problem.weight, problem.y, !problem.aligned);
}

// Whether nothing is fused.
bool is_bare(const Problem& problem) {
  return !problem.residual && !problem.modulated && !problem.has_epilogue;
}

Moves moves_of(const Problem& problem) {
  return problem.aligned ? Moves::kVectors : Moves::kShifted;
}

const ladders::LaneRung& lane_rung(const Problem& problem, int64_t vectors) {
  const int size = size_of(problem.x);
  if (problem.has_epilogue) {
    return size == 4 ? ladders::rung_of(ladders::kFloat32EpilogueLanes, vectors)
                     : ladders::rung_of(ladders::kHalfEpilogueLanes, vectors);
  }
  if (size != 4) return ladders::rung_of(ladders::kHalfLanes, vectors);
  return problem.residual ? ladders::rung_of(ladders::kFloat32SingleLanes, vectors)
                          : ladders::rung_of(ladders::kFloat32Lanes, vectors);
}

// The lanes of a row of `vectors` vectors of which each lane has about `vecs`.
Lanes lanes_for(int64_t vectors, int vecs) {
  const int lanes = std::min(kWarpThreads, power_of_two_from(ceil_div(vectors, vecs)));
  return {static_cast<int>(ceil_div(vectors, lanes)), lanes};
}

std::optional<Lanes> lanes_of(const Problem& problem, const Forced& forced) {
  if (!has_kernels_on_chip(problem)) return std::nullopt;
  const int64_t vectors = vectors_of(problem);
  const int most = most_forward_warp_vecs(size_of(problem.x), problem.residual);
  if (vectors > int64_t{kWarpThreads} * most) return std::nullopt;
  const auto& rung = lane_rung(problem, vectors);
  Lanes lanes = lanes_for(vectors, forced.value_or(Field::kVecs, std::min(most, rung.vecs)));
  const bool compares = rung.choice == ladders::Choice::kFewestPlaces && !forced.has(Field::kVecs);
  for (int vecs = 1; compares && vecs <= most; ++vecs) {
    const Lanes other = lanes_for(vectors, vecs);
    if (other.vecs <= most && other.vecs * other.lanes < lanes.vecs * lanes.lanes) lanes = other;
  }
  if (lanes.vecs > most || !forced.allows(Field::kVecs, lanes.vecs)) return std::nullopt;
  return lanes;
}

std::optional<forward::Warp> warp_plan(const Problem& problem, const Forced& forced) {
  if (!forced.allows(Strategy::kWarp, {Field::kVecs})) return std::nullopt;
  const auto lanes = lanes_of(problem, forced);
  if (!lanes) return std::nullopt;
  forward::Warp plan;
  plan.vecs = lanes->vecs;
  plan.lanes = lanes->lanes;
  plan.moves = moves_of(problem);
  plan.threads = kForwardWarpThreads;
  plan.blocks = ceil_div(problem.rows, kForwardWarpThreads / plan.lanes);
  return plan;
}

// Few short rows with nothing fused.
std::optional<forward::Spread> spread_plan(const Problem& problem, const Forced& forced) {
  const bool allowed = forced.allows(Strategy::kSpread, {}) && is_bare(problem) &&
                       problem.aligned && is_one_type(problem.x, problem.weight, problem.y);
  const auto lanes = allowed ? lanes_of(problem, forced) : std::nullopt;
  if (!lanes) return std::nullopt;
  const int x_size = size_of(problem.x);
  forward::Spread plan;
  plan.lanes = lanes->lanes;
  const bool stays = may_stay_in_warp(x_size, plan.lanes, lanes->vecs);
  (stays ? plan.thread_vecs : plan.warps) = lanes->vecs;
  const int known = known_lanes(plan.lanes, plan.warps);
  if (!has_spread_kernel(x_size, known, plan.warps, plan.thread_vecs)) return std::nullopt;
  const bool is_few =
      problem.rows * problem.cols * x_size <= ladders::most_spread_bytes(plan.warps);
  if (!is_few && !forced.strategy) return std::nullopt;
  plan.threads = spread_threads(plan.warps);
  plan.blocks = ceil_div(problem.rows, plan.threads / plan.warps / plan.lanes);
  return plan;
}

const ladders::BlockRung& block_rung(const Problem& problem, int64_t vectors) {
  if (problem.residual) {
    return size_of(problem.weight) > size_of(problem.x)
               ? ladders::rung_of(ladders::kResidualWideBlocks, vectors)
               : ladders::rung_of(ladders::kResidualBlocks, vectors);
  }
  if (problem.has_epilogue) return ladders::rung_of(ladders::kEpilogueBlocks, vectors);
  return ladders::rung_of(ladders::kBareBlocks, vectors);
}

// The threads of a block whose threads own `vecs` vectors of a row each, if there is a kernel for
// it.
std::optional<int> block_threads(const Problem& problem, int64_t vectors, int vecs) {
  if (!contains(ForwardBlockVecs{}, vecs)) return std::nullopt;
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
bool may_be_early(const Problem& problem, const Device& device, int vecs, int threads) {
  return is_bare(problem) && problem.aligned &&
         has_early_forward(problem.x, problem.weight, problem.y, vecs) &&
         problem.rows <= int64_t{device.sms} * (kEarlyForwardBounds.threads / threads);
}

std::optional<forward::Block> block_plan(const Problem& problem, const Device& device,
                                         const Forced& forced) {
  if (!forced.allows(Strategy::kBlock, {Field::kVecs}) || !has_kernels_on_chip(problem)) {
    return std::nullopt;
  }
  const int64_t vectors = vectors_of(problem);
  const auto& rung = block_rung(problem, vectors);
  std::optional<forward::Block> best;
  for (const int preferred : rung.vecs) {
    const int vecs = forced.value_or(Field::kVecs, preferred);
    const auto threads = block_threads(problem, vectors, vecs);
    if (!threads) continue;
    const bool fewer_places = rung.choice == ladders::Choice::kFewestPlaces && best &&
                              *threads * vecs < best->threads * best->vecs;
    if (best && !fewer_places) continue;
    forward::Block plan;
    plan.vecs = vecs;
    plan.moves = moves_of(problem);
    plan.threads = *threads;
    plan.early = may_be_early(problem, device, vecs, plan.threads);
    plan.blocks = problem.rows;
    best = plan;
  }
  return best;
}

std::optional<forward::Stream> stream_plan(const Problem& problem, const Forced& forced) {
  if (!forced.allows(Strategy::kStream, {})) return std::nullopt;
  forward::Stream plan;
  plan.width = problem.aligned ? width_of(problem) : 1;
  const int cols = forward_stream_cols(plan.width);
  plan.chunks = {static_cast<int>(ceil_div(problem.cols, cols)), cols};
  plan.threads = kForwardStreamThreads;
  plan.blocks = problem.rows * plan.chunks.blocks_per_row;
  const int64_t moments = int64_t{2} * acc_size_of(problem.x);
  plan.totals_offset = round_up(plan.blocks * moments, 256);
  plan.workspace_bytes = plan.totals_offset + problem.rows * moments;
  return plan;
}

}  // namespace

bool stays_in_l2(const Problem& problem) {
  const int64_t elements = problem.rows * problem.cols;
  const int64_t x_bytes = elements * size_of(problem.x);
  const int64_t bytes = x_bytes * (problem.residual ? 3 : 1) + elements * size_of(problem.y);
  const bool rereads_parameters = problem.modulated && !problem.residual;
  return x_bytes <= ladders::kSmallL2Bytes ||
         (bytes >= ladders::kLargeL2Bytes && !rereads_parameters);
}

forward::Plan make_forward_plan(const Problem& problem, const Device& device) {
  const Forced forced = forced_now();
  if (const auto plan = spread_plan(problem, forced)) return *plan;
  if (const auto plan = warp_plan(problem, forced)) return *plan;
  if (const auto plan = block_plan(problem, device, forced)) return *plan;
  if (const auto plan = ring_plan(problem, device, forced)) return *plan;
  if (const auto plan = stream_plan(problem, forced)) return *plan;
  refuse(forced, problem, false);
}

}  // namespace fused_layernorm

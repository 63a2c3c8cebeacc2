// SPDX-License-Identifier: Apache-2.0
// How several blocks share a group of planes: which segments a warp has, the steps in which it
// works on them, and how the blocks meet.
//
// A group is a row of segments: up to kSegmentVectors neighbouring vectors of one channel. A warp
// has some neighbouring segments of a group, a block the warps' segments that lie side by side, and
// the blocks of a set the whole group; then comes the set's next group. Each warp brings its
// segments to a ring of its own (whose places are called slots here, as are those in global memory
// in which blocks meet), measures them, and applies the totals to those of `lag` steps ago; a lane
// reads only what it has copied itself, so warps wait for each other only where a group's totals
// are taken. There one more warp, the collector, combines the parts of all warps, publishes the
// block's part and collects those of the other blocks.
#pragma once

#include "base/launch.cuh"
#include "device/async.cuh"
#include "device/bulk.cuh"
#include "device/meeting.cuh"
#include "groups/launches.h"
#include "groups/planes.cuh"

namespace fused_layernorm {

FUSED_DEVICE Pair<float> pair_of(float2 v) { return {v.x, v.y}; }

// What the warps of a block tell each other of a group. The group that a warp applies is fewer than
// kGroupsKept groups before the one that it measures, so a place is free when its turn comes again.
struct SplitState {
  alignas(8) uint64_t measured[kGroupsKept];  // all warps have left their parts
  uint64_t collected[kGroupsKept];            // the totals are there
  float2 parts[kGroupsKept][kSplitWarps];
  float4 totals[kGroupsKept];  // forward: mean and rstd; backward: the two means, mean and rstd
  // Backward: slope and offset of the channel whose segment is in a slot of a warp's ring.
  float2 maps[kSplitWarps][kMostSplitSlots];
  // The segments that each warp has of a group, which are the same for every group: the channel and
  // the first vector, counted in the group, and the number of vectors.
  struct Segment {
    int begin;
    unsigned channel : 24, vectors : 8;
  } segments[kSplitWarps][kMostWarpSegments];
};
using Segment = SplitState::Segment;
static_assert(sizeof(SplitState) <= kReservedSharedMemory, "the plan leaves room for it");

struct SplitWarp {
  const GroupPlan& plan;
  const GroupParams& p;
  int warp = __shfl_sync(kFullWarp, threadIdx.x / kWarpSize, 0);
  int lane = threadIdx.x % kWarpSize;
  int first_group = plan.by_blocks_per_group.quotient(blockIdx.x);
  int block = static_cast<int>(blockIdx.x) - first_group * plan.blocks_per_group;  // of the set
  int sets = plan.by_blocks_per_group.quotient(gridDim.x);
  int groups = static_cast<int>(p.samples * p.groups);
  int64_t group_elements = plan.tile_channels * p.positions;

  // The number of the warp among all warps of the blocks that share a group.
  FUSED_DEVICE int chunk() const { return block * kSplitWarps + warp; }
  // The vectors of a group in front of one of its warps.
  FUSED_DEVICE int vectors_before(int chunk) const {
    const int first = min(chunk * plan.segments_of_warp, plan.tile_channels * plan.pieces);
    const int channel = plan.by_pieces.quotient(first);
    return channel * static_cast<int>(plan.channel_units) +
           (first - channel * plan.pieces) * plan.piece_vectors;
  }
};

// Lists the segments of all warps of the block. A barrier must follow.
FUSED_DEVICE void list_segments(SplitState& state, const SplitWarp& own) {
  const GroupPlan& plan = own.plan;
  for (int i = threadIdx.x; i < kSplitWarps * plan.segments_of_warp; i += kSplitThreads) {
    const int number = own.block * kSplitWarps * plan.segments_of_warp + i;
    const int channel = plan.by_pieces.quotient(number), piece = number - channel * plan.pieces;
    const int whole = static_cast<int>(plan.channel_units), from = piece * plan.piece_vectors;
    const int warp = i / plan.segments_of_warp;
    const bool exists = channel < plan.tile_channels;
    state.segments[warp][i - warp * plan.segments_of_warp] = {
        channel * whole + from, static_cast<unsigned>(channel),
        static_cast<unsigned>(exists ? min(plan.piece_vectors, whole - from) : 0)};
  }
}

// A warp's place in its sequence of segments.
struct SegmentCursor {
  int group;
  int step, slot, kept;  // step: of the warp's segments of the group
  uint32_t phase;        // of the barriers at `kept`

  FUSED_DEVICE explicit SegmentCursor(const SplitWarp& own)
      : group(own.first_group), step(0), slot(0), kept(0), phase(0) {}
  FUSED_DEVICE void advance(const SplitWarp& own) {
    if (++slot == own.plan.slots) slot = 0;
    if (++step < own.plan.segments_of_warp) return;
    step = 0;
    group += own.sets;
    if (++kept == kGroupsKept) {
      kept = 0;
      phase ^= 1;
    }
  }
  FUSED_DEVICE bool is_last(const SplitWarp& own) const {
    return step == own.plan.segments_of_warp - 1;
  }
};

// The one grid barrier of the launch, after which all slots are empty. The blocks pass it while the
// first segments come. All threads of a block arrive; later each waits, where its role needs the
// slots.
struct SplitMeeting {
  cooperative_groups::grid_group::arrival_token token{};
  const bool takes_place;

  FUSED_DEVICE explicit SplitMeeting(const SplitWarp& own)
      : takes_place(own.plan.blocks_per_group > 1) {
    if (!takes_place) return;
    auto* const slots = static_cast<uint64_t*>(own.p.workspace) + own.block;
    for (int64_t g = own.first_group + int64_t{threadIdx.x} * own.sets; g < own.groups;
         g += int64_t{blockDim.x} * own.sets) {
      slots[g * own.plan.blocks_per_group] = kEmptySlot;
    }
    token = cooperative_groups::this_grid().barrier_arrive();
  }
  FUSED_DEVICE void wait() const {
    auto own = token;
    if (takes_place) cooperative_groups::this_grid().barrier_wait(std::move(own));
  }
};

// The collector: for each group combines the parts of the block's warps, exchanges them, and leaves
// the totals. enter(group) is called in front, block_part(kept) gives the part of this block,
// totals(group, slots, part) the group's totals.
FUSED_DEVICE void run_collector(const SplitWarp& own, SplitState& state,
                                const SplitMeeting& meeting, const auto& enter,
                                const auto& block_part, const auto& totals) {
  meeting.wait();
  const int blocks = own.plan.blocks_per_group;
  auto* const slots = static_cast<uint64_t*>(own.p.workspace);
  int i = 0;
  for (int64_t group = own.first_group; group < own.groups; group += own.sets, ++i) {
    const int kept = i % kGroupsKept;
    enter(group);
    barrier_wait(&state.measured[kept], i / kGroupsKept & 1);
    const Pair<float> part = block_part(kept);
    if (blocks > 1 && own.lane == 0) publish(slots + group * blocks + own.block, part);
    const float4 found = totals(group, slots + group * blocks, part);
    if (own.lane == 0) {
      state.totals[kept] = found;
      barrier_arrive(&state.collected[kept]);
    }
    __syncwarp();
  }
}

// All threads of the block call, in front of anything else.
FUSED_DEVICE void start(SplitState& state, const SplitWarp& own) {
  list_segments(state, own);
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int i = 0; i < kGroupsKept; ++i) {
      barrier_init(&state.measured[i], kSplitWarps);
      barrier_init(&state.collected[i], 1);
    }
    barrier_init_fence();
  }
  __syncthreads();
}

// Runs a warp's steps: bring(cursor) starts the copies of a segment, `kAhead` steps before
// measure(cursor) takes what has come, and apply(cursor) uses it a last time.
template <int kAhead>
FUSED_DEVICE void run_steps(const SplitWarp& own, const SplitMeeting& meeting, const auto& bring,
                            const auto& measure, const auto& apply) {
  SegmentCursor brought(own), measured(own), applied(own);
  const auto bring_next = [&] {
    if (brought.group < own.groups) {
      bring(brought);
      brought.advance(own);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
#pragma unroll 1
  for (int i = 0; i < kAhead; ++i) bring_next();
  meeting.wait();
  int behind = own.plan.lag;
  while (applied.group < own.groups) {
    bring_next();
    if (measured.group < own.groups) {
      asm volatile("cp.async.wait_group %0;" ::"n"(kAhead) : "memory");
      measure(measured);
      measured.advance(own);
    }
    if (behind > 0) {
      --behind;
    } else {
      apply(applied);
      applied.advance(own);
    }
  }
}

// Calls body(vector) for a lane's vectors of a segment, all at once where it is full.
template <int kVecs>
FUSED_DEVICE void each_vector(int vectors, int lane, const auto& body) {
  if (vectors == kVecs * kWarpSize) {
    FUSED_UNROLL for (int k = 0; k < kVecs; ++k) body(k * kWarpSize + lane);
  } else {
#pragma unroll 1
    for (int v = lane; v < vectors; v += kWarpSize) body(v);
  }
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// Tiles of channels_last: which positions and channels a thread has, and the groups of a slice.
#pragma once

#include <type_traits>

#include "groups/parts.cuh"

namespace fused_layernorm {

// A thread's place in its block's tile.
struct LastThread {
  int64_t sample;
  int tile, slice, column, row;
  int first_channel, channels;  // of the slice
  int positions;                // of the tile
  int count;                    // of this thread's positions
  int64_t begin;                // this thread's first element
  int step;                     // elements from one of its positions to the next

  // `number`: of all slices of tiles.
  FUSED_DEVICE LastThread(const GroupPlan& plan, const GroupParams& p, int width, int number) {
    const int all = plan.by_slices.quotient(number);
    const int of_samples = plan.by_tiles.quotient(all);
    slice = number - all * plan.slices;
    tile = all - of_samples * plan.tiles;
    sample = of_samples;
    row = plan.by_columns.quotient(threadIdx.x);
    column = threadIdx.x - row * plan.columns;
    first_channel = slice * plan.columns * width;
    channels = min(plan.columns * width, p.channels - first_channel);
    positions = positions_of(plan, p, tile);
    const bool works = row < plan.rows && column * width < channels;
    count = works ? count_of(row, plan) : 0;
    begin = (sample * p.positions + int64_t{tile} * plan.tile_positions + row) * p.channels +
            first_channel + column * width;
    step = plan.rows * p.channels;
  }
  // The positions of the threads in a row.
  FUSED_DEVICE int count_of(int its_row, const GroupPlan& plan) const {
    return plan.by_rows.quotient(positions - its_row + plan.rows - 1);
  }
};

// A thread's vectors, kVecs positions at a time. The first ones are asked for at once.
template <typename V, int kWidth, int kVecs>
struct LastVectors {
  Vec<V, kWidth> at[kVecs], now[kVecs];
  const V* next;

  FUSED_DEVICE LastVectors(const void* from, const LastThread& thread)
      : next(static_cast<const V*>(from) + thread.begin) {
    bring(thread, thread.count);
  }
  // Makes the vectors that have come the current ones.
  FUSED_DEVICE void take() { FUSED_UNROLL for (int k = 0; k < kVecs; ++k) now[k] = at[k]; }
  // Loads the next positions, of which `left` are left.
  FUSED_DEVICE void bring(const LastThread& thread, int left) {
    FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
      if (k < left) at[k] = load<Use::kOnce, kWidth>(next);
      next += thread.step;
    }
  }
};

// Calls use(vectors in the place of each argument at one position) for all positions of a thread.
template <int kVecs, typename First, typename... Rest>
FUSED_DEVICE void each_position(const LastThread& thread, const auto& use, First& first,
                                Rest&... rest) {
  for (int left = thread.count; left > 0; left -= kVecs) {
    first.take();
    (rest.take(), ...);
    first.bring(thread, left - kVecs);
    (rest.bring(thread, left - kVecs), ...);
    FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
      if (k < left) use(first.now[k], rest.now[k]...);
    }
  }
}

// The neighbouring lanes that work on one group of a slice: eight or, where threads move single
// elements and groups are few, a warp. (To choose at run time would cost threads that move vectors
// two registers that they do not have.)
template <int kWidth>
FUSED_DEVICE auto group_lanes(const GroupPlan& plan) {
  if constexpr (kWidth > 1) {
    return std::integral_constant<int, 8>();
  } else {
    return plan.groups_of_slice > kLastThreads / kWarpSize ? 8 : kWarpSize;
  }
}

// Calls use(group, first channel, last channel + 1) for the groups of a slice, the first and the
// last of which other slices may share. Channels count from the slice's first one, groups from the
// first that it has. All lanes call use(), for groups that are not there with an empty range.
template <int kWidth>
FUSED_DEVICE void each_group(const GroupPlan& plan, const GroupParams& p, const LastThread& thread,
                             const auto& use) {
  const int of_group = p.channels_of_group;
  const int last_channel = thread.first_channel + thread.channels - 1;
  const int first = p.by_channels_of_group.quotient(thread.first_channel);
  const int groups = p.by_channels_of_group.quotient(last_channel) - first + 1;
  const auto lanes = group_lanes<kWidth>(plan);
  const int at_once = blockDim.x / lanes;
  for (int from = 0; from < groups; from += at_once) {
    const int g = from + threadIdx.x / lanes;
    const int begin = max((first + g) * of_group - thread.first_channel, 0);
    const int end = min((first + g + 1) * of_group - thread.first_channel, thread.channels);
    use(g, begin, g < groups ? end : begin);
  }
}
template <typename Value>
FUSED_DEVICE Value sum_of_lanes(Value v, auto lanes) {
  for (int offset = 1; offset < lanes; offset *= 2) v += shuffle_xor(v, offset);
  return v;
}

// The part of a tile's slice for a group that it has.
template <typename Acc>
FUSED_DEVICE Pair<Acc>& group_part(const GroupPlan& plan, const GroupParams& p,
                                   const LastThread& thread, int group) {
  const int64_t tile = (thread.sample * plan.tiles + thread.tile) * plan.slices + thread.slice;
  return pairs_at<Acc>(p, 0)[tile * plan.groups_of_slice + group];
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// Tiles of planes: which vectors of memory a block has, and to which channels they belong.
#pragma once

#include "device/share.cuh"
#include "groups/arithmetic.cuh"

namespace fused_layernorm {

// The vectors of a tile of planes, by its number in its group.
FUSED_DEVICE int vectors_of(const GroupPlan& plan, int channels_of_group, int tile) {
  const int whole = static_cast<int>(plan.channel_units);
  if (plan.pieces > 1) {
    return min(plan.piece_vectors, whole - tile % plan.pieces * plan.piece_vectors);
  }
  return min(plan.tile_channels, channels_of_group - tile * plan.tile_channels) * whole;
}
// The positions of a tile of channels_last, by its number in its sample.
FUSED_DEVICE int positions_of(const GroupPlan& plan, const GroupParams& p, int tile) {
  const int64_t left = p.positions - int64_t{tile} * plan.tile_positions;
  return static_cast<int>(min(left, int64_t{plan.tile_positions}));
}

// Some channels of a group or, if `pieces` > 1, a piece of one.
struct PlaneTile {
  int64_t group;  // of all samples
  int64_t sample;
  int channel;  // of the sample, the first one
  int channels;
  int piece;
  int vectors;
  int64_t begin;  // in elements

  // `number`: of all tiles.
  FUSED_DEVICE PlaneTile(const GroupPlan& plan, const GroupParams& p, int number) {
    const int all = plan.by_tiles.quotient(number);
    const int own = number - all * plan.tiles;
    group = all;
    // By a division: with p.by_groups some kernels would keep a number in local memory.
    sample = static_cast<uint32_t>(all) / static_cast<uint32_t>(p.groups);
    const int of_group = p.channels_of_group;
    const int first = plan.pieces > 1 ? plan.by_pieces.quotient(own) : own * plan.tile_channels;
    channel = static_cast<int>(group - sample * p.groups) * of_group + first;
    piece = plan.pieces > 1 ? own - first * plan.pieces : 0;
    channels = min(plan.tile_channels, of_group - first);
    vectors = vectors_of(plan, of_group, own);
    begin = (sample * p.channels + channel) * p.positions +
            int64_t{piece} * plan.piece_vectors * plan.width;
  }
  // The channel, counted in the tile, to which a vector belongs.
  FUSED_DEVICE int channel_of(int vector, const GroupPlan& plan) const {
    return channels > 1 ? plan.by_channel.quotient(vector) : 0;
  }
};

// The affine maps of a tile's channels, in shared memory. A barrier must follow.
template <typename Acc>
FUSED_DEVICE void load_maps(ChannelMap<Acc>* maps, const GroupParams& p, int64_t sample,
                            int channel, int channels) {
  for (int c = threadIdx.x; c < channels; c += blockDim.x) {
    maps[c] = ChannelMap<Acc>(p, sample, channel + c);
  }
}

// The vectors of a thread: some of a tile's, all of which a block's threads share.
template <typename X, int kWidth, int kVecs>
FUSED_DEVICE void load_tile(Vec<X, kWidth> (&x)[kVecs], const void* from, int64_t begin,
                            const Share<kVecs>& share) {
  const X* const at = static_cast<const X*>(from) + begin;
  FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
    x[k] = {};
    if (share.has(k)) x[k] = load<Use::kOnce, kWidth>(element(at, share.vector(k) * kWidth));
  }
}

// The sums of some channels over the vectors of a tile, from the pairs[v] of its vectors; a barrier
// must stand in front. A channel has `of_channel` units, a vector kUnits, and the tile begins at
// the first channel's unit `offset`. Where a channel begins within a vector, tails[channel] is its
// part of it. then(channel, sum) is called by one thread for each channel.
template <int kUnits = 1, typename Acc>
FUSED_DEVICE void sum_channels(const Pair<Acc>* pairs, const Pair<Acc>* tails, int channels,
                               int of_channel, int offset, int vectors, const auto& then) {
  int lanes = 1;
  while (lanes < kWarpSize && lanes * kUnits < of_channel) lanes *= 2;
  const int at_once = kWarpSize / lanes, warps = blockDim.x / kWarpSize;
  const int lane = threadIdx.x % lanes, place = threadIdx.x % kWarpSize / lanes;
  for (int from = threadIdx.x / kWarpSize * at_once; from < channels; from += warps * at_once) {
    const int c = from + place, first = max(c * of_channel - offset, 0);
    Pair<Acc> sum;
    if (c < channels) {
      const int end = min(((c + 1) * of_channel - offset + kUnits - 1) / kUnits, vectors);
#pragma unroll 4
      for (int v = (first + kUnits - 1) / kUnits + lane; v < end; v += lanes) sum += pairs[v];
      if (kUnits > 1 && lane == 0 && first % kUnits != 0) sum += tails[c];
    }
    sum = logical_warp_sum(sum, lanes);
    if (lane == 0 && c < channels) then(c, sum);
  }
}

// Stores y of a tile, from the totals of its group.
template <typename Y, typename X, int kWidth, int kVecs, typename Acc>
FUSED_DEVICE void apply_tile(const GroupPlan& plan, const GroupParams& p, const PlaneTile& tile,
                             const Share<kVecs>& share, const Vec<X, kWidth> (&x)[kVecs],
                             const ChannelMap<Acc>* maps, Pair<Acc> total) {
  Y* const y = static_cast<Y*>(p.y) + tile.begin;
  FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
    const int v = share.vector(k);
    if (!share.has(k)) continue;
    const auto map = maps[tile.channel_of(v, plan)];
    const Acc factor = total.second * map.factor;
    Acc values[kWidth];
    unpack(values, x[k]);
    FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
      values[j] = (values[j] - total.first) * factor + map.offset;
    }
    activate_if<Y>(p, values);
    store_once(element(y, v * kWidth), round_to<Y>(values));
  }
}

// Calls use(vector, the ChannelSlope of its channel, gradients) for each vector of a thread.
template <typename X, typename Y, int kWidth, int kVecs, typename Acc>
FUSED_DEVICE void each_gradient(const GroupPlan& plan, const GroupParams& p, const PlaneTile& tile,
                                const Share<kVecs>& share, const Vec<X, kWidth> (&x)[kVecs],
                                const Vec<Y, kWidth> (&dy)[kVecs], const ChannelMap<Acc>* maps,
                                Pair<Acc> statistics, const auto& use) {
  with_activation<kActivationLoops<X, kWidth>>(p, [&](auto activation) {
    FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
      const int v = share.vector(k);
      if (!share.has(k)) continue;
      const auto of = slope_of(maps[tile.channel_of(v, plan)], statistics.second);
      use(v, of, GroupGradients<Acc, kWidth>(p, x[k], dy[k], statistics.first, of, activation));
    }
  });
}

// Shared memory for a tile's maps and, where backward sums up channels, its vectors' sums.
template <typename Acc>
int planes_shared_bytes(const GroupPlan& plan, bool of_sums) {
  const int64_t vectors = plan.tile_channels > 1 ? plan.tile_channels * plan.channel_units : 0;
  return static_cast<int>(plan.tile_channels * sizeof(ChannelMap<Acc>) +
                          (of_sums ? vectors * sizeof(Pair<Acc>) : 0));
}

}  // namespace fused_layernorm

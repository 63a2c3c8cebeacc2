// SPDX-License-Identifier: Apache-2.0
// Groups of planes that several blocks share, forward and backward: x and dy are read once and stay
// in shared memory until the totals of their group are there (split.cuh).
#include "groups/launches.h"
#include "groups/split.cuh"

namespace fused_layernorm {
namespace {

// The channel whose segments a warp has in work.
struct SplitChannel {
  int group = -1, channel = -1;  // channel: of the group
  ChannelMap<float> map;

  FUSED_DEVICE void enter(const SplitWarp& own, int its_group, int its_channel) {
    if (group == its_group && channel == its_channel) return;
    group = its_group;
    channel = its_channel;
    const GroupParams& p = own.p;
    const auto sample = sample_of(p, group);
    const int in_sample = group - sample * p.groups;
    map = ChannelMap<float>(p, sample, in_sample * own.plan.tile_channels + channel);
  }
};

template <typename X, typename Y>
__global__ void __launch_bounds__(kSplitThreads, 1)
    group_split_kernel(const __grid_constant__ GroupPlan plan,
                       const __grid_constant__ GroupParams p) {
  if constexpr (!kHasBulk) return;  // Never launched on chips without barriers in shared memory.
  constexpr int kWidth = vector_width(static_cast<int>(sizeof(X)));
  constexpr int kVecs = kSegmentVectors / kWarpSize, kSlot = kSegmentVectors * kWidth;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ SplitState state;
  const SplitWarp own{plan, p};
  start(state, own);
  const SplitMeeting meeting(own);

  if (own.warp == kSplitWarps) {
    // The elements of this lane's parts, of the block's warps and of the set's blocks.
    const auto elements = [&](int first, int last) {
      return static_cast<float>((own.vectors_before(last) - own.vectors_before(first)) * kWidth);
    };
    const int own_chunk = own.block * kSplitWarps + own.lane;
    const float of_warp = own.lane < kSplitWarps ? elements(own_chunk, own_chunk + 1) : 0.0f;
    const float of_block = warp_sum(of_warp);
    float counts[kSlotsPerLane];
    FUSED_UNROLL for (int i = 0; i < kSlotsPerLane; ++i) {
      const int first = (own.lane + i * kWarpSize) * kSplitWarps;
      counts[i] = elements(first, first + kSplitWarps);
    }
    // Moments combine about one of the means, and then about their own (Chan, Golub and LeVeque,
    // 1979). A part without elements is zero.
    const auto block_part = [&](int kept) -> Pair<float> {
      const Pair<float> part = pair_of(state.parts[kept][own.lane % kSplitWarps]);
      const float about = __shfl_sync(kFullWarp, part.first, 0);
      const float delta = part.first - about;
      const float shift = warp_sum(of_warp * delta) / fmaxf(of_block, 1.0f), rest = delta - shift;
      const float m2 = own.lane < kSplitWarps ? part.second : 0.0f;
      return {about + shift, warp_sum(m2 + of_warp * rest * rest)};
    };
    const auto totals = [&](int64_t group, const uint64_t* slots, Pair<float> part) -> float4 {
      if (plan.blocks_per_group > 1) {
        const CollectedSlots<Polls::kAll> parts(slots, plan.blocks_per_group);
        const float about = __shfl_sync(kFullWarp, parts.values[0].first, 0);
        float sum = 0, m2 = 0;
        FUSED_UNROLL for (int i = 0; i < kSlotsPerLane; ++i) {
          sum += counts[i] * (parts.values[i].first - about);
        }
        const float mean = about + warp_sum(sum) * p.inverse_count.rounded;
        FUSED_UNROLL for (int i = 0; i < kSlotsPerLane; ++i) {
          const float delta = parts.values[i].first - mean;
          m2 += parts.values[i].second + counts[i] * delta * delta;
        }
        part = {mean, warp_sum(m2)};
      }
      part.second = MeanAndVariance::rstd(part.second, p.inverse_count.rounded, p.eps.rounded);
      if (own.lane == 0 && own.block == 0) store_group(p, group, part);
      return {part.first, part.second, 0.0f, 0.0f};
    };
    return run_collector(own, state, meeting, [](int64_t) {}, block_part, totals);
  }

  X* const ring = reinterpret_cast<X*>(shared) + own.warp * plan.slots * kSlot;
  const X* const x = static_cast<const X*>(p.x);
  RunningMoments<float> running;
  SplitChannel applied;
  // A channel's parameters come while the totals are waited for, but later where an affine map
  // alone is applied to many groups in turn: stores that all blocks start at once hold up the loads
  // of the next group (1 x 128 x 1024 x 1024 272 us, 216).
  const bool enters_early = p.activates || own.groups <= 4 * own.sets;
  run_steps<kSplitAhead>(
      own, meeting,
      [&](const SegmentCursor& at) {
        const Segment segment = state.segments[own.warp][at.step];
        X* const to = ring + at.slot * kSlot;
        const X* const from = x + at.group * own.group_elements + segment.begin * kWidth;
        each_vector<kVecs>(segment.vectors, own.lane, [&](int v) {
          copy_vector<kWidth>(to + v * kWidth, element(from, v * kWidth));
        });
      },
      [&](const SegmentCursor& at) {
        if (at.step == 0) running = {};
        const X* const from = ring + at.slot * kSlot;
        each_vector<kVecs>(state.segments[own.warp][at.step].vectors, own.lane, [&](int v) {
          running.add(load<Use::kPlain, kWidth>(from + v * kWidth));
        });
        if (!at.is_last(own)) return;
        // The moments of the lanes become those of the warp.
        const auto part = running.template moments<kWidth>();
        const float count = static_cast<float>(running.vectors * kWidth), all = warp_sum(count);
        const float about = __shfl_sync(kFullWarp, part.mean, 0);
        const float delta = count > 0 ? part.mean - about : 0.0f;
        const float shift = warp_sum(count * delta) / fmaxf(all, 1.0f);
        const float rest = delta - shift;
        const float m2 = warp_sum(count > 0 ? part.m2 + count * rest * rest : 0.0f);
        if (own.lane == 0) {
          state.parts[at.kept][own.warp] = {about + shift, m2};
          barrier_arrive(&state.measured[at.kept]);
        }
        __syncwarp();
      },
      [&](const SegmentCursor& at) {
        const Segment segment = state.segments[own.warp][at.step];
        const bool exists = segment.vectors > 0;
        if (exists && enters_early) applied.enter(own, at.group, segment.channel);
        if (at.step == 0) barrier_wait(&state.collected[at.kept], at.phase);
        if (!exists) return;
        applied.enter(own, at.group, segment.channel);
        const float mean = state.totals[at.kept].x;
        const float factor = applied.map.factor * state.totals[at.kept].y;
        const X* const from = ring + at.slot * kSlot;
        Y* const y = static_cast<Y*>(p.y) + at.group * own.group_elements + segment.begin * kWidth;
        with_activation<kActivationLoops<X, kWidth>>(p, [&](auto activation) {
          constexpr Compiled kActivation = decltype(activation)::value;
          each_vector<kActivation == Compiled::kAny ? 1 : kVecs>(
              segment.vectors, own.lane, [&](int v) {
                float values[kWidth];
                unpack(values, load<Use::kPlain, kWidth>(from + v * kWidth));
                FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
                  values[j] = (values[j] - mean) * factor + applied.map.offset;
                }
                activate_if<Y, kActivation>(p, values);
                store_once(element(y, v * kWidth), round_to<Y>(values));
              });
        });
      });
}

template <typename X, typename Y>
__global__ void __launch_bounds__(kSplitThreads, 1)
    group_split_backward_kernel(const __grid_constant__ GroupPlan plan,
                                const __grid_constant__ GroupParams p) {
  if constexpr (!kHasBulk) return;  // Never launched on chips without barriers in shared memory.
  constexpr int kWidth = vector_width(static_cast<int>(sizeof(X)));
  constexpr int kVecs = kBackwardSegmentVectors / kWarpSize;
  constexpr int kSlot = kBackwardSegmentVectors * kWidth;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ SplitState state;
  const SplitWarp own{plan, p};
  start(state, own);
  const SplitMeeting meeting(own);

  if (own.warp == kSplitWarps) {
    const auto block_part = [&](int kept) {
      return warp_sum(own.lane < kSplitWarps ? pair_of(state.parts[kept][own.lane])
                                             : Pair<float>{});
    };
    Pair<float> statistics;  // of the group whose parts are collected
    const auto totals = [&](int64_t, const uint64_t* slots, Pair<float> part) -> float4 {
      if (plan.blocks_per_group > 1) {
        const CollectedSlots<Polls::kAll> parts(slots, plan.blocks_per_group);
        part = parts.values[0];
        FUSED_UNROLL for (int i = 1; i < kSlotsPerLane; ++i) part += parts.values[i];
        part = warp_sum(part);
      }
      const Pair<float> means = group_means(p, part);
      return {means.first, means.second, statistics.first, statistics.second};
    };
    return run_collector(
        own, state, meeting, [&](int64_t group) { statistics = load_group<float>(p, group); },
        block_part, totals);
  }

  X* const xs = reinterpret_cast<X*>(shared) + own.warp * plan.slots * kSlot;
  Y* const dys = reinterpret_cast<Y*>(shared + kSplitWarps * plan.slots * kSlot * sizeof(X)) +
                 own.warp * plan.slots * kSlot;
  // Calls use(vector, gradients) for a lane's vectors of a segment.
  const auto each = [&](const SegmentCursor& at, int vectors, float mean,
                        const ChannelSlope<float>& of, const auto& use) {
    const X* const x = xs + at.slot * kSlot;
    const Y* const dy = dys + at.slot * kSlot;
    with_activation<kActivationLoops<X, kWidth>>(p, [&](auto activation) {
      constexpr bool kIsAny = decltype(activation)::value == Compiled::kAny;
      each_vector<kIsAny ? 1 : kVecs>(vectors, own.lane, [&](int v) {
        use(v, GroupGradients<float, kWidth>(p, load<Use::kPlain, kWidth>(x + v * kWidth),
                                             load<Use::kPlain, kWidth>(dy + v * kWidth), mean, of,
                                             activation));
      });
    });
  };
  SplitChannel measured;
  Pair<float> statistics;  // of the group that is measured
  Pair<float> sums, all;   // of a channel, and of factor * dz over the group
  // Leaves the sums of a channel. Its parts count from the warp in which it begins.
  const auto leave = [&] {
    sums = scaled_sums(p, warp_sum(sums), statistics.second);
    all += Pair<float>{measured.map.factor * sums.first, measured.map.factor * sums.second};
    const int first = measured.channel * plan.pieces / plan.segments_of_warp;
    if (own.lane == 0) {
      const int64_t channel = int64_t{measured.group} * plan.tile_channels + measured.channel;
      pairs_at<float>(p, plan.parts_offset)[channel * plan.parts_of_channel + own.chunk() - first] =
          sums;
    }
    sums = {};
  };
  static_assert(
      kSplitBackwardAhead >= 1,
      "an apply, which begins with a barrier, lies between a map's last use and its next");
  run_steps<kSplitBackwardAhead>(
      own, meeting,
      [&](const SegmentCursor& at) {
        const Segment segment = state.segments[own.warp][at.step];
        const int64_t begin = at.group * own.group_elements + segment.begin * kWidth;
        const X* const x = static_cast<const X*>(p.x) + begin;
        const Y* const dy = static_cast<const Y*>(p.dy) + begin;
        each_vector<kVecs>(segment.vectors, own.lane, [&](int v) {
          copy_vector<kWidth>(xs + at.slot * kSlot + v * kWidth, element(x, v * kWidth));
          copy_vector<kWidth>(dys + at.slot * kSlot + v * kWidth, element(dy, v * kWidth));
        });
      },
      [&](const SegmentCursor& at) {
        const Segment segment = state.segments[own.warp][at.step];
        if (at.step == 0) {
          all = {};
          statistics = load_group<float>(p, at.group);
        }
        if (segment.vectors > 0) {
          if (at.step > 0 && measured.channel != segment.channel) leave();
          measured.enter(own, at.group, segment.channel);
          const auto of = slope_of(measured.map, statistics.second);
          if (own.lane == 0) state.maps[own.warp][at.slot] = {of.slope, of.offset};
          each(at, segment.vectors, statistics.first, of,
               [&](int, const auto& gradients) { sums += gradients.sums(); });
        }
        if (!at.is_last(own)) return;
        if (measured.group == at.group) leave();
        if (own.lane == 0) {
          state.parts[at.kept][own.warp] = {all.first, all.second};
          barrier_arrive(&state.measured[at.kept]);
        }
      },
      [&](const SegmentCursor& at) {
        // The first lane's map is there for all, and all have read the slot's map of before.
        __syncwarp();
        if (at.step == 0) barrier_wait(&state.collected[at.kept], at.phase);
        const Segment segment = state.segments[own.warp][at.step];
        if (segment.vectors == 0) return;
        const float4 total = state.totals[at.kept];
        const float2 map = state.maps[own.warp][at.slot];
        const DxOfGroup<float> of_group(p, {total.x, total.y}, total.w);
        X* const dx = static_cast<X*>(p.y) + at.group * own.group_elements + segment.begin * kWidth;
        const ChannelSlope<float> of = {map.x, map.y};
        each(at, segment.vectors, total.z, of, [&](int v, const auto& gradients) {
          store_once(element(dx, v * kWidth), of_group.template dx<X>(gradients, of));
        });
      });
}

}  // namespace

cudaError_t launch_split_groups(const GroupParams& params, const GroupTypes& types,
                                const GroupPlan& plan, cudaStream_t stream) {
  return dispatch_group_types(types, plan.width, [&](auto x, auto y, auto width) -> cudaError_t {
    using X = decltype(x);
    using Y = decltype(y);
    if constexpr (std::is_same_v<X, double> ||
                  width() < vector_width(static_cast<int>(sizeof(X)))) {
      return cudaErrorInvalidValue;
    } else {
      const auto kernel =
          types.backward ? group_split_backward_kernel<X, Y> : group_split_kernel<X, Y>;
      return launch_meeting(kernel, plan, stream, plan, params);
    }
  });
}

}  // namespace fused_layernorm

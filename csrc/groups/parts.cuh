// SPDX-License-Identifier: Apache-2.0
// What tiles leave in the workspace: parts of groups, from which a warp makes a group's totals, and
// parts of channels, from which the gradients of parameters are made.
#pragma once

#include "groups/planes.cuh"

namespace fused_layernorm {

// Where the parts of a group lie, and of how many elements each is.
template <typename Acc>
struct GroupPartsOf {
  const GroupPlan& plan;
  const GroupParams& p;
  const Pair<Acc>* from;
  int first_slice = 0, slices = 1, slice_channels = 0, channel;
  int of_group;

  FUSED_DEVICE GroupPartsOf(const GroupPlan& its_plan, const GroupParams& params, int64_t group)
      : plan(its_plan), p(params), of_group(p.channels_of_group) {
    const int64_t sample = sample_of(p, group);
    channel = static_cast<int>(group - sample * p.groups) * of_group;
    from = pairs_at<Acc>(p, 0);
    if (plan.layout == GroupLayout::kPlanes) {
      from += group * plan.tiles;
    } else {
      slice_channels = plan.columns * plan.width;
      first_slice = channel / slice_channels;
      slices = (channel + of_group - 1) / slice_channels - first_slice + 1;
      from += sample * plan.tiles * plan.slices * plan.groups_of_slice;
    }
  }
  FUSED_DEVICE int count() const { return plan.tiles * slices; }
  // use(elements, part) for part i.
  FUSED_DEVICE void with(int i, const auto& use) const {
    if (plan.layout == GroupLayout::kPlanes) {
      use(vectors_of(plan, of_group, i) * plan.width, from[i]);
      return;
    }
    const int tile = i / slices, slice = first_slice + i - tile * slices;
    const int begin = slice * slice_channels;
    const int channels = min(channel + of_group, begin + slice_channels) - max(channel, begin);
    use(channels * positions_of(plan, p, tile),
        from[(int64_t{tile} * plan.slices + slice) * plan.groups_of_slice +
             p.by_channels_of_group.quotient(channel) - p.by_channels_of_group.quotient(begin)]);
  }
};

// mean and rstd of a group, from its parts. Every lane of the warp gets them. The parts are
// combined as deviations from the mean of one of them (Chan, Golub and LeVeque, 1979), in float64,
// so that combining them costs no digits of float32.
template <typename Acc>
FUSED_DEVICE Pair<Acc> statistics_of_group(const GroupPlan& plan, const GroupParams& p,
                                           int64_t group) {
  const GroupPartsOf<Acc> parts(plan, p, group);
  double pivot = 0;
  parts.with(0, [&](int, const Pair<Acc>& part) { pivot = part.first; });
  Pair<double> sums;
#pragma unroll 4
  for (int i = threadIdx.x % kWarpSize; i < parts.count(); i += kWarpSize) {
    parts.with(i, [&](int count, const Pair<Acc>& part) {
      const double delta = part.first - pivot, by = count * delta;
      sums += Pair<double>{by, part.second + by * delta};
    });
  }
  sums = warp_sum(sums);
  const double delta = sums.first * p.inverse_count.exact;
  return {Acc(pivot + delta), MeanAndVariance::rstd(Acc(sums.second - sums.first * delta),
                                                    p.inverse_count.as<Acc>(), p.eps.as<Acc>())};
}

// The parts of a channel of a sample.
template <typename Acc>
struct ChannelPartsOf {
  const Pair<Acc>* from;
  int64_t step = 1;
  int count;

  FUSED_DEVICE ChannelPartsOf(const GroupPlan& plan, const GroupParams& p, int64_t sample,
                              int channel)
      : from(pairs_at<Acc>(p, plan.parts_offset)), count(plan.parts_of_channel) {
    if (plan.layout == GroupLayout::kPlanes) {
      from += (sample * p.channels + channel) * plan.parts_of_channel;
    } else {
      from += sample * plan.tiles * p.channels + channel;
      step = p.channels;
    }
    // Of the blocks or warps that have a piece of a channel, the first one depends on the channel.
    const bool split = plan.strategy == GroupStrategy::kSplit;
    if (split || plan.strategy == GroupStrategy::kHeld) {
      const int length = split ? plan.pieces : static_cast<int>(plan.channel_units);
      const int each = split ? plan.segments_of_warp : plan.slice_vectors * plan.vector_units;
      const int begin = channel % plan.tile_channels * length;
      count = (begin + length - 1) / each - begin / each + 1;
    }
  }
};

// The two means over a group that dx needs. Every lane of the warp gets them.
template <typename Acc>
FUSED_DEVICE Pair<Acc> means_of_group(const GroupPlan& plan, const GroupParams& p, int64_t group) {
  const int lane = threadIdx.x % kWarpSize;
  Pair<Acc> sums;
  if (plan.layout == GroupLayout::kPlanes) {
    const int of_group = p.channels_of_group, count = of_group * plan.pieces;
    const int64_t sample = sample_of(p, group);
    const int channel = static_cast<int>(group - sample * p.groups) * of_group;
    const ChannelPartsOf<Acc> parts(plan, p, sample, channel);
#pragma unroll 2
    for (int i = lane; i < count; i += kWarpSize) {
      const Acc factor = ChannelMap<Acc>(p, sample, channel + plan.by_pieces.quotient(i)).factor;
      sums += Pair<Acc>{factor * parts.from[i].first, factor * parts.from[i].second};
    }
  } else {
    const GroupPartsOf<Acc> parts(plan, p, group);
#pragma unroll 4
    for (int i = lane; i < parts.count(); i += kWarpSize) {
      parts.with(i, [&](int, const Pair<Acc>& part) { sums += part; });
    }
  }
  return group_means(p, warp_sum(sums));
}

// dbias and dweight of a channel, its sums of dz and of dz xhat.
template <typename Acc>
FUSED_DEVICE void store_param_grad(const GroupParams& p, int channel, Pair<Acc> sums) {
  if (p.dbias.at != nullptr) store_number(p.dbias, channel, sums.first);
  if (p.dweight.at != nullptr) store_number(p.dweight, channel, sums.second);
}

// The gradients of the parameters of 32 channels, from the parts of all samples. All threads of a
// block call: lanes have channels, warps have parts. `rows` has room for kMaxWarps rows of 32.
template <typename Acc>
FUSED_DEVICE void store_param_grads(const GroupPlan& plan, const GroupParams& p, int first_channel,
                                    Pair<Acc>* rows) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int warps = blockDim.x / kWarpSize, channel = first_channel + lane;
  const bool works = channel < p.channels;
  // The sum over all warps, which the first one gets.
  const auto sum_of_warps = [&](Pair<Acc> sum) {
    rows[warp * kWarpSize + lane] = sum;
    __syncthreads();
    if (warp == 0) {
#pragma unroll 8
      for (int w = 1; w < warps; ++w) sum += rows[w * kWarpSize + lane];
    }
    __syncthreads();
    return sum;
  };
  const auto sum_of_parts = [&](int64_t sample, int from, int step) {
    const ChannelPartsOf<Acc> parts(plan, p, sample, channel);
    Pair<Acc> sum;
#pragma unroll 8
    for (int i = from; i < parts.count; i += step) sum += parts.from[i * parts.step];
    return sum;
  };
  Pair<Acc> all;
  if (p.shift.at != nullptr || p.scale_by.at != nullptr) {
    for (int64_t n = 0; n < p.samples; ++n) {
      const Pair<Acc> sum = sum_of_warps(works ? sum_of_parts(n, warp, warps) : Pair<Acc>{});
      if (warp > 0 || !works) continue;
      store_modulation(p, n, channel, sum);
      const Acc by = Acc(1) + number_of<Acc>(p.scale_by, n, channel, Acc(0));
      all += Pair<Acc>{by * sum.first, by * sum.second};
    }
  } else {
    // Each warp has some samples or, of fewer samples, some parts of each.
    const bool has_samples = p.samples >= warps;
    for (int64_t n = has_samples ? warp : 0; works && n < p.samples; n += has_samples ? warps : 1) {
      all += has_samples ? sum_of_parts(n, 0, 1) : sum_of_parts(n, warp, warps);
    }
    all = sum_of_warps(all);
  }
  if (warp == 0 && works) store_param_grad(p, channel, all);
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// Groups of channels_last: a tile has all channels of some positions, or one slice of them. A
// thread has a vector of channels at every `rows`-th position of its tile.
#include "groups/channels_last.cuh"
#include "groups/launches.h"

namespace fused_layernorm {
namespace {

// The moments of each group in a tile.
template <typename X, int kWidth>
__global__ void __launch_bounds__(kLastThreads)
    last_moments_kernel(const __grid_constant__ GroupPlan plan,
                        const __grid_constant__ GroupParams p) {
  using Acc = acc_t<X>;
  extern __shared__ __align__(16) unsigned char shared[];
  auto* const parts = reinterpret_cast<Pair<Acc>*>(shared);  // [row][channel]
  let_next_kernel_start();
  const LastThread thread(plan, p, kWidth, blockIdx.x);
  LastVectors<X, kWidth, kLastVecs> x(p.x, thread);
  // Sums of the deviations from a thread's first position, and of their squares.
  Acc pivot[kWidth], sum[kWidth] = {}, square[kWidth] = {};
  unpack(pivot, x.at[0]);
  each_position<kLastVecs>(
      thread,
      [&](const auto& vector) {
        Acc v[kWidth];
        unpack(v, vector);
        FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
          const Acc d = v[j] - pivot[j];
          sum[j] += d;
          square[j] += d * d;
        }
      },
      x);
  const int columns = plan.columns * kWidth, rows = min(plan.rows, thread.positions);
  if (thread.count > 0) {
    const Acc inverse = Acc(1) / thread.count;
    FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
      parts[thread.row * columns + thread.column * kWidth + j] = {
          pivot[j] + sum[j] * inverse, square[j] - sum[j] * sum[j] * inverse};
    }
  }
  __syncthreads();
  const auto lanes = group_lanes<kWidth>(plan);
  each_group<kWidth>(plan, p, thread, [&](int g, int begin, int end) {
    const int lane = threadIdx.x % lanes, width = end - begin, all = width * rows;
    const double about = parts[min(begin, columns - 1)].first;
    Pair<double> sums;  // as those of parts.cuh
    for (int i = lane; i < all; i += lanes) {
      const int row = i / width;
      const Pair<Acc> part = parts[row * columns + begin + i - row * width];
      const double delta = part.first - about, by = thread.count_of(row, plan) * delta;
      sums += Pair<double>{by, part.second + by * delta};
    }
    sums = sum_of_lanes(sums, lanes);
    const double delta = sums.first / (double(max(width, 1)) * thread.positions);
    if (lane == 0 && width > 0) {
      group_part<Acc>(plan, p, thread, g) = {Acc(about + delta),
                                             Acc(sums.second - sums.first * delta)};
    }
  });
}

// Numbers of the slice's channels in shared memory: [number][channel].
template <typename Acc>
struct ChannelTable {
  Acc* numbers;
  int columns;

  FUSED_DEVICE Acc* row(int n) const { return numbers + n * columns; }
  template <int kWidth>
  FUSED_DEVICE void take(Acc (&values)[kWidth], int n, const LastThread& thread) const {
    if (thread.count > 0) {
      unpack(values, load<Use::kPlain, kWidth>(row(n) + thread.column * kWidth));
    }
  }
};

// The kernels that apply take the tiles that were measured last first, as L2 may still have them.

// The totals of the group of a channel of the slice. Where a group has one part alone, they are
// made of it here, and in forward the thread of the group's first channel stores them.
template <typename Acc, bool kBackward>
FUSED_DEVICE Pair<Acc> total_of(const GroupPlan& plan, const GroupParams& p,
                                const LastThread& thread, int c) {
  const int channel = thread.first_channel + c;
  const int group = p.by_channels_of_group.quotient(channel);
  const int64_t of_samples = thread.sample * p.groups + group;
  if (plan.has_totals) return pairs_at<Acc>(p, plan.totals_offset)[of_samples];
  const int first = p.by_channels_of_group.quotient(thread.first_channel);
  const Pair<Acc> part = group_part<Acc>(plan, p, thread, group - first);
  if constexpr (kBackward) {
    return group_means(p, part);
  } else {
    const Pair<Acc> total = {
        part.first, MeanAndVariance::rstd(part.second, p.inverse_count.as<Acc>(), p.eps.as<Acc>())};
    if (channel == group * p.channels_of_group) store_group(p, of_samples, total);
    return total;
  }
}

template <typename X, typename Y, int kWidth>
__global__ void __launch_bounds__(kLastThreads)
    last_apply_kernel(const __grid_constant__ GroupPlan plan,
                      const __grid_constant__ GroupParams p) {
  using Acc = acc_t<X>;
  extern __shared__ __align__(16) unsigned char shared[];
  const ChannelTable<Acc> table = {reinterpret_cast<Acc*>(shared), plan.columns * kWidth};
  const LastThread thread(plan, p, kWidth, gridDim.x - 1 - blockIdx.x);
  LastVectors<X, kWidth, kLastVecs> x(p.x, thread);
  for (int c = threadIdx.x; c < thread.channels; c += blockDim.x) {
    const ChannelMap<Acc> map(p, thread.sample, thread.first_channel + c);
    table.row(1)[c] = map.factor;
    table.row(2)[c] = map.offset;
  }
  wait_for_previous_kernel();
  for (int c = threadIdx.x; c < thread.channels; c += blockDim.x) {
    const Pair<Acc> total = total_of<Acc, false>(plan, p, thread, c);
    table.row(0)[c] = total.first;
    table.row(1)[c] *= total.second;
  }
  __syncthreads();
  Acc mean[kWidth], factor[kWidth], offset[kWidth];
  table.take(mean, 0, thread);
  table.take(factor, 1, thread);
  table.take(offset, 2, thread);
  Y* y = static_cast<Y*>(p.y) + thread.begin;
  with_activation<kActivationLoops<X, kWidth>>(p, [&](auto activation) {
    each_position<kLastVecs>(
        thread,
        [&](const auto& vector) {
          Acc v[kWidth];
          unpack(v, vector);
          FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
            v[j] = (v[j] - mean[j]) * factor[j] + offset[j];
          }
          activate_if<Y, decltype(activation)::value>(p, v);
          store_once(y, round_to<Y>(v));
          y += thread.step;
        },
        x);
  });
}

// mean, rstd, factor and offset of each channel.
template <typename Acc>
FUSED_DEVICE void fill_table(const ChannelTable<Acc>& table, const GroupParams& p,
                             const LastThread& thread) {
  for (int c = threadIdx.x; c < thread.channels; c += blockDim.x) {
    const int channel = thread.first_channel + c;
    const Pair<Acc> statistics =
        load_group<Acc>(p, thread.sample * p.groups + p.by_channels_of_group.quotient(channel));
    const ChannelMap<Acc> map(p, thread.sample, channel);
    table.row(0)[c] = statistics.first;
    table.row(1)[c] = statistics.second;
    table.row(2)[c] = map.factor;
    table.row(3)[c] = map.offset;
  }
}

// The sums of dz and of dz xhat over a tile: of each channel, and times `factor` of each group.
template <typename X, typename Y, int kWidth>
__global__ void __launch_bounds__(kLastThreads)
    last_sums_kernel(const __grid_constant__ GroupPlan plan,
                     const __grid_constant__ GroupParams p) {
  using Acc = acc_t<X>;
  extern __shared__ __align__(16) unsigned char shared[];
  const int columns = plan.columns * kWidth;
  const ChannelTable<Acc> table = {reinterpret_cast<Acc*>(shared), columns};
  auto* const sums = reinterpret_cast<Pair<Acc>*>(table.row(4));  // [row][channel]
  let_next_kernel_start();
  const LastThread thread(plan, p, kWidth, blockIdx.x);
  LastVectors<X, kWidth, kLastBackwardVecs> x(p.x, thread);
  LastVectors<Y, kWidth, kLastBackwardVecs> dy(p.dy, thread);
  fill_table(table, p, thread);
  __syncthreads();
  Acc alone[kWidth] = {}, by_d[kWidth] = {};
  {
    Acc mean[kWidth];
    ChannelSlope<Acc[kWidth]> of;
    table.take(mean, 0, thread);
    table.take(of.slope, 1, thread);
    table.take(of.offset, 2, thread);
    FUSED_UNROLL for (int j = 0; j < kWidth; ++j) of.slope[j] *= of.offset[j];
    table.take(of.offset, 3, thread);
    each_position<kLastBackwardVecs>(
        thread,
        [&](const auto& vector, const auto& gradient) {
          const GroupGradients<Acc, kWidth> gradients(p, vector, gradient, mean, of);
          FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
            alone[j] += gradients.dz[j];
            by_d[j] += gradients.dz[j] * gradients.d[j];
          }
        },
        x, dy);
  }
  if (thread.count > 0) {
    FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
      sums[thread.row * columns + thread.column * kWidth + j] = {alone[j], by_d[j]};
    }
  }
  __syncthreads();
  const int rows = min(plan.rows, thread.positions);
  auto* const channel_parts = pairs_at<Acc>(p, plan.parts_offset) +
                              (thread.sample * plan.tiles + thread.tile) * p.channels +
                              thread.first_channel;
  for (int c = threadIdx.x; c < thread.channels; c += blockDim.x) {
    Pair<Acc> sum = sums[c];
    for (int r = 1; r < rows; ++r) sum += sums[r * columns + c];
    sum = scaled_sums(p, sum, table.row(1)[c]);
    channel_parts[c] = sum;
    const Acc factor = table.row(2)[c];
    sums[c] = {factor * sum.first, factor * sum.second};
  }
  __syncthreads();
  const auto lanes = group_lanes<kWidth>(plan);
  const int lane = threadIdx.x % lanes;
  each_group<kWidth>(plan, p, thread, [&](int g, int begin, int end) {
    Pair<Acc> sum;
    for (int c = begin + lane; c < end; c += lanes) sum += sums[c];
    sum = sum_of_lanes(sum, lanes);
    if (lane == 0 && end > begin) group_part<Acc>(plan, p, thread, g) = sum;
  });
}

template <typename X, typename Y, int kWidth>
__global__ void __launch_bounds__(kLastThreads)
    last_dx_kernel(const __grid_constant__ GroupPlan plan, const __grid_constant__ GroupParams p) {
  using Acc = acc_t<X>;
  extern __shared__ __align__(16) unsigned char shared[];
  const ChannelTable<Acc> table = {reinterpret_cast<Acc*>(shared), plan.columns * kWidth};
  // The first blocks make the gradients of parameters.
  const uint32_t last = gridDim.x - 1 - blockIdx.x;
  if (last >= static_cast<uint32_t>(p.samples * plan.tiles * plan.slices)) {
    wait_for_previous_kernel();
    return store_param_grads(plan, p, blockIdx.x * kWarpSize, reinterpret_cast<Pair<Acc>*>(shared));
  }
  const LastThread thread(plan, p, kWidth, last);
  LastVectors<X, kWidth, kLastBackwardVecs> x(p.x, thread);
  LastVectors<Y, kWidth, kLastBackwardVecs> dy(p.dy, thread);
  fill_table(table, p, thread);
  wait_for_previous_kernel();
  // With d = x - mean, z = d a + offset and dx = dz a scale + d b + alone.
  for (int c = threadIdx.x; c < thread.channels; c += blockDim.x) {
    const Pair<Acc> means = total_of<Acc, true>(plan, p, thread, c);
    const Acc rstd = table.row(1)[c];
    table.row(1)[c] = rstd * table.row(2)[c];
    table.row(2)[c] = -rstd * rstd * means.second;
    table.row(4)[c] = -rstd * means.first;
  }
  __syncthreads();
  Acc mean[kWidth], b[kWidth], alone[kWidth];
  ChannelSlope<Acc[kWidth]> of;
  table.take(mean, 0, thread);
  table.take(of.slope, 1, thread);
  table.take(b, 2, thread);
  table.take(of.offset, 3, thread);
  table.take(alone, 4, thread);
  const Acc scale = p.scale.as<Acc>();
  X* dx = static_cast<X*>(p.y) + thread.begin;
  each_position<kLastBackwardVecs>(
      thread,
      [&](const auto& vector, const auto& gradient) {
        const GroupGradients<Acc, kWidth> gradients(p, vector, gradient, mean, of);
        Acc values[kWidth];
        FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
          values[j] = gradients.dz[j] * (of.slope[j] * scale) + (gradients.d[j] * b[j] + alone[j]);
        }
        store_once(dx, round_to<X>(values));
        dx += thread.step;
      },
      x, dy);
}

}  // namespace

cudaError_t launch_channels_last(const GroupParams& params, const GroupTypes& types,
                                 const GroupPlan& plan, cudaStream_t stream) {
  return dispatch_group_types<GroupLayout::kChannelsLast>(
      types, plan.width, [&](auto x, auto y, auto width) -> cudaError_t {
        using X = decltype(x);
        using Y = decltype(y);
        const int64_t acc = sizeof(acc_t<X>), numbers = int64_t{plan.columns} * plan.width * acc;
        return launch_tiles(
            params, types, plan, stream,
            types.backward ? last_sums_kernel<X, Y, width()> : last_moments_kernel<X, width()>,
            2 * plan.rows * numbers + (types.backward ? 4 * numbers : 0),
            types.backward ? last_dx_kernel<X, Y, width()> : last_apply_kernel<X, Y, width()>,
            types.backward ? std::max(5 * numbers, 2 * acc * plan.threads) : 3 * numbers);
      });
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// Groups of planes that shared memory holds, forward and backward: a block for each group or, of
// longer ones, a cluster of blocks, each with a slice of it. The blocks of a cluster run at the
// same time and read each other's shared memory (PTX ISA, "Cluster of Cooperative Thread Arrays").
#include <cooperative_groups.h>

#include "device/async.cuh"
#include "groups/launches.h"
#include "groups/planes.cuh"

namespace fused_layernorm {
namespace {

// A block's slice of a group.
struct HeldSlice {
  int64_t group, sample, begin;  // begin: in elements
  int first, vectors;            // of the group
  int channel, channels;         // of the sample; those that the slice touches
  int offset;                    // of the slice's first vector in its channel
  int channel_vectors;

  __device__ __forceinline__ HeldSlice(const GroupPlan& plan, const GroupParams& p)
      : group(blockIdx.x / plan.blocks_per_group),
        sample(sample_of(p, group)),
        channel_vectors(static_cast<int>(plan.channel_vectors)) {
    const int all = plan.tile_channels * channel_vectors;
    first = static_cast<int>(blockIdx.x % plan.blocks_per_group) * plan.slice_vectors;
    vectors = min(plan.slice_vectors, all - first);
    const int in_group = first / channel_vectors;
    channel = static_cast<int>(group - sample * p.groups) * plan.tile_channels + in_group;
    offset = first - in_group * channel_vectors;
    channels = (offset + vectors - 1) / channel_vectors + 1;
    begin = (group * all + first) * plan.width;
  }
  // The channel, counted from the slice's first one, to which a vector of the slice belongs.
  __device__ __forceinline__ int channel_of(int v, const GroupPlan& plan) const {
    return channels > 1 ? plan.by_channel.quotient(offset + v) : 0;
  }
};

// The exchange of two numbers between the blocks that share a group.
class Exchange {
 public:
  __device__ __forceinline__ explicit Exchange(const GroupPlan& plan)
      : blocks_(plan.blocks_per_group) {}

  // combine(part, block) is called by one warp, whose lane k has the part of block k, or any part
  // if there is no such block; all lanes give the same result, which all threads of all blocks get.
  template <typename Acc, typename Combine>
  __device__ __forceinline__ Pair<Acc> operator()(Pair<Acc> own, Pair<Acc> (&shared)[2],
                                                  const Combine& combine) {
    if (blocks_ == 1) return own;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    namespace cg = cooperative_groups;
    if (threadIdx.x == 0) shared[0] = own;
    cg::this_cluster().sync();
    if (threadIdx.x < kWarpSize) {
      const int block = static_cast<int>(threadIdx.x) % blocks_;
      const Pair<Acc> part = *cg::this_cluster().map_shared_rank(&shared[0], block);
      const Pair<Acc> found = combine(part, static_cast<int>(threadIdx.x));
      if (threadIdx.x == 0) shared[1] = found;
    }
    // A block may end only when the others have read its part.
    token_ = cg::this_cluster().barrier_arrive();
    __syncthreads();
    return shared[1];
#else
    return own;
#endif
  }
  __device__ __forceinline__ void end() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    if (blocks_ > 1) cooperative_groups::this_cluster().barrier_wait(std::move(token_));
#endif
  }

 private:
  int blocks_;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  cooperative_groups::cluster_group::arrival_token token_;
#endif
};

// Starts the copies of a slice to shared memory.
template <typename X, int kWidth>
__device__ __forceinline__ void copy_slice(X* to, const void* from, const HeldSlice& own) {
  const X* const at = static_cast<const X*>(from) + own.begin;
#pragma unroll 4
  for (int v = threadIdx.x; v < own.vectors; v += blockDim.x) {
    if constexpr (kWidth * sizeof(X) >= 4) {
      copy_vector<kWidth>(to + v * kWidth, element(at, v * kWidth));
    } else {
      to[v] = at[v];
    }
  }
}

template <typename X, typename Y, int kWidth>
__global__ void __launch_bounds__(kHeldThreads)
    group_held_kernel(const __grid_constant__ GroupPlan plan,
                      const __grid_constant__ GroupParams p) {
  using Acc = acc_t<X>;
  __shared__ alignas(16) Acc scratch[2][kMaxWarps];
  __shared__ Pair<Acc> exchanged[2];
  extern __shared__ __align__(16) unsigned char shared[];
  auto* const x = reinterpret_cast<X*>(shared);
  auto* const maps = reinterpret_cast<ChannelMap<Acc>*>(shared + plan.maps_offset);
  const HeldSlice own(plan, p);
  copy_slice<X, kWidth>(x, p.x, own);
  load_maps(maps, p, own.sample, own.channel, own.channels);
  wait_for_copies();
  __syncthreads();
  RunningMoments<Acc> running;
#pragma unroll 2
  for (int v = threadIdx.x; v < own.vectors; v += blockDim.x) {
    running.add(load<Use::kPlain, kWidth>(x + v * kWidth));
  }
  const auto of_slice =
      moments_of_block<kWidth>(running, Reciprocal<Acc>(own.vectors * kWidth), scratch);
  Exchange exchange(plan);
  const Pair<Acc> found = exchange(
      Pair<Acc>{of_slice.mean, of_slice.m2}, exchanged, [&](const Pair<Acc>& part, int block) {
        // Chan, Golub and LeVeque, 1979, for all parts at once.
        const int all = plan.tile_channels * own.channel_vectors;
        const int vectors = min(plan.slice_vectors, all - block * plan.slice_vectors);
        const Acc count = block < plan.blocks_per_group ? vectors * kWidth : 0;
        const Acc about = __shfl_sync(kFullWarp, part.first, 0), delta = part.first - about;
        const Acc shift = warp_sum(count * delta) * p.inverse_count.as<Acc>();
        const Acc rest = delta - shift;
        const Acc m2 = block < plan.blocks_per_group ? part.second + count * rest * rest : Acc(0);
        return Pair<Acc>{about + shift, warp_sum(m2)};
      });
  const Acc mean = found.first;
  const Acc rstd = MeanAndVariance::rstd(found.second, p.inverse_count.as<Acc>(), p.eps.as<Acc>());
  if (threadIdx.x == 0 && own.first == 0) store_group(p, own.group, Pair<Acc>{mean, rstd});
  Y* const y = static_cast<Y*>(p.y) + own.begin;
  with_activation<Acc>(p, [&](auto activation) {
#pragma unroll 2
    for (int v = threadIdx.x; v < own.vectors; v += blockDim.x) {
      const auto map = maps[own.channel_of(v, plan)];
      const Acc factor = rstd * map.factor;
      Acc values[kWidth];
      unpack(values, load<Use::kPlain, kWidth>(x + v * kWidth));
#pragma unroll
      for (int j = 0; j < kWidth; ++j) values[j] = (values[j] - mean) * factor + map.offset;
      activate_if<Y, decltype(activation)::value>(p, values);
      store_once(element(y, v * kWidth), round_to<Y>(values));
    }
  });
  exchange.end();
}

template <typename X, typename Y, int kWidth>
__global__ void __launch_bounds__(kHeldThreads)
    group_held_backward_kernel(const __grid_constant__ GroupPlan plan,
                               const __grid_constant__ GroupParams p) {
  using Acc = acc_t<X>;
  __shared__ alignas(16) Pair<Acc> scratch[2][kMaxWarps];
  __shared__ Pair<Acc> exchanged[2];
  extern __shared__ __align__(16) unsigned char shared[];
  auto* const xs = reinterpret_cast<X*>(shared);
  auto* const dys = reinterpret_cast<Y*>(shared + plan.dy_offset);
  auto* const pairs = reinterpret_cast<Pair<Acc>*>(shared + plan.pairs_offset);
  auto* const maps = reinterpret_cast<ChannelMap<Acc>*>(shared + plan.maps_offset);
  let_next_kernel_start();
  const HeldSlice own(plan, p);
  copy_slice<X, kWidth>(xs, p.x, own);
  copy_slice<Y, kWidth>(dys, p.dy, own);
  load_maps(maps, p, own.sample, own.channel, own.channels);
  const Pair<Acc> statistics = load_group<Acc>(p, own.group);
  wait_for_copies();
  __syncthreads();
  // Calls body(vector, slope of its channel, gradients) for all vectors of this thread.
  const auto each = [&](const auto& body) {
    with_activation<Acc>(p, [&](auto activation) {
#pragma unroll 2
      for (int v = threadIdx.x; v < own.vectors; v += blockDim.x) {
        const ChannelSlope<Acc> of(maps[own.channel_of(v, plan)], statistics.second);
        body(v, of.slope,
             GroupGradients<Acc, kWidth>(p, load<Use::kPlain, kWidth>(xs + v * kWidth),
                                         load<Use::kPlain, kWidth>(dys + v * kWidth),
                                         statistics.first, of, activation));
      }
    });
  };
  Pair<Acc> sums;
  // Takes the sums of channel c of the slice.
  const auto take = [&](int c, Pair<Acc> sum) {
    sum = scaled_sums(p, sum, statistics.second);
    // A channel's parts count from the slice in which it begins.
    const int slice = own.first / plan.slice_vectors;
    const int begins = (own.first - own.offset + c * own.channel_vectors) / plan.slice_vectors;
    pairs_at<Acc>(
        p, plan.parts_offset)[(own.sample * p.channels + own.channel + c) * plan.parts_of_channel +
                              slice - begins] = sum;
    sums += Pair<Acc>{maps[c].factor * sum.first, maps[c].factor * sum.second};
  };
  if (own.channels == 1) {  // all threads add up, where otherwise one warp would
    Pair<Acc> sum;
    each([&](int, Acc, const auto& gradients) { sum += gradients.sums(); });
    sum = team_sum(sum, BlockTeam(), scratch[0]);
    if (threadIdx.x == 0) take(0, sum);
  } else {
    each([&](int v, Acc, const auto& gradients) { pairs[v] = gradients.sums(); });
    __syncthreads();
    sum_channels(pairs, own.channels, own.channel_vectors, own.offset, own.vectors, take);
  }
  Exchange exchange(plan);
  const Pair<Acc> all = exchange(
      team_sum(sums, BlockTeam(), scratch[1]), exchanged, [&](const Pair<Acc>& part, int block) {
        return warp_sum(block < plan.blocks_per_group ? part : Pair<Acc>{});
      });
  const DxOfGroup<Acc> of_group(p, group_means(p, all), statistics.second);
  X* const dx = static_cast<X*>(p.y) + own.begin;
  each([&](int v, Acc slope, const auto& gradients) {
    store_once(element(dx, v * kWidth), of_group.template dx<X>(gradients, slope));
  });
  exchange.end();
}

}  // namespace

cudaError_t launch_held_groups(const GroupParams& params, const GroupTypes& types,
                               const GroupPlan& plan, cudaStream_t stream) {
  return dispatch_group_types(types, plan.width, [&](auto x, auto y, auto width) {
    using X = decltype(x);
    using Y = decltype(y);
    const auto kernel = types.backward ? group_held_backward_kernel<X, Y, width()>
                                       : group_held_kernel<X, Y, width()>;
    return plan.cluster > 1 ? launch<Start::kCluster>(kernel, plan, stream, plan, params)
                            : launch(kernel, plan, stream, plan, params);
  });
}

}  // namespace fused_layernorm

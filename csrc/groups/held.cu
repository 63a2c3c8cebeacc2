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

// A block's slice of a group. `kUnits`: of a vector, in which channels and offsets are counted.
template <int kUnits>
struct HeldSlice {
  int64_t group, sample, begin;  // begin: in elements
  int first, vectors;            // of the group
  int channel, channels;         // of the sample; those that the slice touches
  int offset;                    // of the slice in its first channel
  int channel_units;

  FUSED_DEVICE HeldSlice(const GroupPlan& plan, const GroupParams& p)
      : group(plan.by_blocks_per_group.quotient(blockIdx.x)),
        sample(sample_of(p, group)),
        channel_units(static_cast<int>(plan.channel_units)) {
    const int all = vectors_of_group(plan);
    const int block = static_cast<int>(blockIdx.x - group * plan.blocks_per_group);
    first = block * plan.slice_vectors;
    vectors = min(plan.slice_vectors, all - first);
    const int in_group = plan.by_channel.quotient(first * kUnits);
    channel = static_cast<int>(group - sample * p.groups) * plan.tile_channels + in_group;
    offset = first * kUnits - in_group * channel_units;
    channels = plan.by_channel.quotient(offset + vectors * kUnits - 1) + 1;
    begin = (group * all + first) * plan.width;
  }
  static FUSED_DEVICE int vectors_of_group(const GroupPlan& plan) {
    return plan.tile_channels * static_cast<int>(plan.channel_units) / kUnits;
  }
};

// To which channels the elements of a vector belong, counted from the slice's first one: those in
// front of `boundary` to `head`, the others to the next.
template <int kWidth, int kUnits>
struct VectorChannels {
  int head, next, boundary = kWidth;

  FUSED_DEVICE VectorChannels(int v, const HeldSlice<kUnits>& own, const GroupPlan& plan) {
    const int at = own.offset + v * kUnits;
    head = own.channels > 1 ? plan.by_channel.quotient(at) : 0;
    if constexpr (kUnits > 1) {
      boundary = (head + 1) * own.channel_units - at;
      next = min(head + 1, own.channels - 1);
    }
  }
  // Calls set(j, number) with the number, head's or the next one's, of each element.
  template <typename Number>
  FUSED_DEVICE void each(const Number* numbers, const auto& set) const {
    const Number of_head = numbers[head];
    if constexpr (kUnits > 1) {
      const Number of_next = numbers[next];
      FUSED_UNROLL for (int j = 0; j < kWidth; ++j) set(j, j < boundary ? of_head : of_next);
    } else {
      FUSED_UNROLL for (int j = 0; j < kWidth; ++j) set(j, of_head);
    }
  }
};

// The exchange of two numbers between the blocks that share a group.
class Exchange {
 public:
  FUSED_DEVICE explicit Exchange(const GroupPlan& plan) : blocks_(plan.blocks_per_group) {}

  // combine(part, block) is called by one warp, whose lane k has the part of block k, or any part
  // if there is no such block; all lanes give the same result, which all threads of all blocks get.
  template <typename Acc>
  FUSED_DEVICE Pair<Acc> operator()(Pair<Acc> own, Pair<Acc> (&shared)[2], const auto& combine) {
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
  FUSED_DEVICE void end() {
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

// Starts the copies of a slice to shared memory, and gives where its first element then lies.
// Single elements of two bytes lie there as in global memory, between multiples of 16 bytes (a
// vector more of shared memory is theirs), so that all but the first and the last few are copied by
// vectors.
template <typename X, int kWidth, int kUnits>
FUSED_DEVICE X* copy_slice(X* to, const void* from, const HeldSlice<kUnits>& own) {
  constexpr bool kSingle = is_copied_by_vectors(kWidth, sizeof(X));
  constexpr int kCopied = kSingle ? vector_width(static_cast<int>(sizeof(X))) : kWidth;
  const X* const at = static_cast<const X*>(from) + own.begin;
  int front = 0, vectors = own.vectors;
  if constexpr (kSingle) {
    const int before = reinterpret_cast<uintptr_t>(at) % kVectorBytes / sizeof(X);
    to += before;
    front = min((kCopied - before) % kCopied, own.vectors);
    vectors = (own.vectors - front) / kCopied;
  }
#pragma unroll 4
  for (int v = threadIdx.x; v < vectors; v += blockDim.x) {
    copy_vector<kCopied>(to + front + v * kCopied, element(at, front + v * kCopied));
  }
  if constexpr (kSingle) {
    // The other elements. The last warp waits for their loads, as the first one loads the maps.
    const int thread = static_cast<int>(blockDim.x - 1 - threadIdx.x);
    const int behind = front + vectors * kCopied;
    if (thread < front) to[thread] = at[thread];
    if (behind + thread < own.vectors) to[behind + thread] = at[behind + thread];
  }
  return to;
}

template <typename X, typename Y, int kWidth, int kUnits>
__global__ void __launch_bounds__(kHeldThreads)
    group_held_kernel(const __grid_constant__ GroupPlan plan,
                      const __grid_constant__ GroupParams p) {
  using Acc = acc_t<X>;
  __shared__ alignas(16) Acc scratch[2][kMaxWarps];
  __shared__ Pair<Acc> exchanged[2];
  extern __shared__ __align__(16) unsigned char shared[];
  auto* const maps = reinterpret_cast<ChannelMap<Acc>*>(shared + plan.maps_offset);
  const HeldSlice<kUnits> own(plan, p);
  const X* const x = copy_slice<X, kWidth>(reinterpret_cast<X*>(shared), p.x, own);
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
        const int vectors =
            min(plan.slice_vectors, own.vectors_of_group(plan) - block * plan.slice_vectors);
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
  with_activation<kActivationLoops<X, kWidth, kUnits>>(p, [&](auto activation) {
#pragma unroll 2
    for (int v = threadIdx.x; v < own.vectors; v += blockDim.x) {
      Acc values[kWidth];
      unpack(values, load<Use::kPlain, kWidth>(x + v * kWidth));
      VectorChannels<kWidth, kUnits>(v, own, plan).each(maps, [&](int j, const auto& map) {
        values[j] = (values[j] - mean) * (rstd * map.factor) + map.offset;
      });
      activate_if<Y, decltype(activation)::value>(p, values);
      store_once(element(y, v * kWidth), round_to<Y>(values));
    }
  });
  exchange.end();
}

template <typename X, typename Y, int kWidth, int kUnits>
__global__ void __launch_bounds__(kHeldThreads)
    group_held_backward_kernel(const __grid_constant__ GroupPlan plan,
                               const __grid_constant__ GroupParams p) {
  using Acc = acc_t<X>;
  __shared__ alignas(16) Pair<Acc> scratch[2][kMaxWarps];
  __shared__ Pair<Acc> exchanged[2];
  extern __shared__ __align__(16) unsigned char shared[];
  auto* const pairs = reinterpret_cast<Pair<Acc>*>(shared + plan.pairs_offset);
  auto* const maps = reinterpret_cast<ChannelMap<Acc>*>(shared + plan.maps_offset);
  let_next_kernel_start();
  const HeldSlice<kUnits> own(plan, p);
  const X* const xs = copy_slice<X, kWidth>(reinterpret_cast<X*>(shared), p.x, own);
  const Y* const dys =
      copy_slice<Y, kWidth>(reinterpret_cast<Y*>(shared + plan.dy_offset), p.dy, own);
  load_maps(maps, p, own.sample, own.channel, own.channels);
  const Pair<Acc> statistics = load_group<Acc>(p, own.group);
  wait_for_copies();
  __syncthreads();
  // Calls body(vector, its channels, their slopes, gradients) for all vectors of this thread.
  const auto each = [&](const auto& body) {
    with_activation<kActivationLoops<X, kWidth, kUnits>>(p, [&](auto activation) {
#pragma unroll 2
      for (int v = threadIdx.x; v < own.vectors; v += blockDim.x) {
        const VectorChannels<kWidth, kUnits> channels(v, own, plan);
        ChannelSlope<Acc[kWidth]> of;
        channels.each(maps, [&](int j, const auto& map) {
          of.slope[j] = map.factor * statistics.second;
          of.offset[j] = map.offset;
        });
        body(v, channels, of,
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
    const int begins =
        (own.first * kUnits - own.offset + c * own.channel_units) / (plan.slice_vectors * kUnits);
    pairs_at<Acc>(
        p, plan.parts_offset)[(own.sample * p.channels + own.channel + c) * plan.parts_of_channel +
                              slice - begins] = sum;
    sums += Pair<Acc>{maps[c].factor * sum.first, maps[c].factor * sum.second};
  };
  if (own.channels == 1) {  // all threads add up, where otherwise one warp would
    Pair<Acc> sum;
    each([&](int, const auto&, const auto&, const auto& gradients) { sum += gradients.sums(); });
    sum = team_sum(sum, BlockTeam(), scratch[0]);
    if (threadIdx.x == 0) take(0, sum);
  } else {
    // The sums of a vector over its head's elements and, at the next channel, over the others.
    auto* const tails = reinterpret_cast<Pair<Acc>*>(maps + own.channels);
    each([&](int v, const auto& channels, const auto&, const auto& gradients) {
      pairs[v] = gradients.sums(0, channels.boundary);
      if (kUnits > 1 && channels.boundary < kWidth) {
        tails[channels.next] = gradients.sums(channels.boundary, kWidth);
      }
    });
    __syncthreads();
    sum_channels<kUnits>(pairs, tails, own.channels, own.channel_units, own.offset, own.vectors,
                         take);
  }
  Exchange exchange(plan);
  const Pair<Acc> all = exchange(
      team_sum(sums, BlockTeam(), scratch[1]), exchanged, [&](const Pair<Acc>& part, int block) {
        return warp_sum(block < plan.blocks_per_group ? part : Pair<Acc>{});
      });
  const DxOfGroup<Acc> of_group(p, group_means(p, all), statistics.second);
  X* const dx = static_cast<X*>(p.y) + own.begin;
  each([&](int v, const auto&, const auto& of, const auto& gradients) {
    store_once(element(dx, v * kWidth), of_group.template dx<X>(gradients, of));
  });
  exchange.end();
}

}  // namespace

cudaError_t launch_held_groups(const GroupParams& params, const GroupTypes& types,
                               const GroupPlan& plan, cudaStream_t stream) {
  return dispatch_group_types(types, plan.width, [&](auto x, auto y, auto width) -> cudaError_t {
    using X = decltype(x);
    using Y = decltype(y);
    const auto with = [&](auto units) {
      const auto kernel = types.backward ? group_held_backward_kernel<X, Y, width(), units()>
                                         : group_held_kernel<X, Y, width(), units()>;
      return launch_clusters(kernel, plan, stream, params);
    };
    if (plan.vector_units == 1) return with(std::integral_constant<int, 1>());
    if constexpr (width() == vector_width(static_cast<int>(sizeof(X))) && sizeof(X) < 8) {
      return with(width);
    } else {
      return cudaErrorInvalidValue;
    }
  });
}

}  // namespace fused_layernorm

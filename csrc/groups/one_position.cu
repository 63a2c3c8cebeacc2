// SPDX-License-Identifier: Apache-2.0
// Samples of one position, (samples, channels), forward and backward: some lanes of a warp, a block
// or a cluster of blocks hold a group. A block has the groups of a slice of the channels, keeps
// their weights, and goes through some of the samples. Backward adds up the gradients of weight and
// bias over them: one block for all samples stores the gradients, several leave parts.
#include <cooperative_groups.h>

#include "groups/launches.h"
#include "groups/parts.cuh"

namespace fused_layernorm {
namespace {

// Elements as they were loaded: packed vectors, or a word for each single one. What is done to a
// word waits for memory, so they are not brought into one form before they are needed.
template <typename V, int kElements>
struct Loaded {
  using Word = std::conditional_t<sizeof(V) == 8, uint64_t, uint32_t>;
  static constexpr int kOfWord = sizeof(Word) / sizeof(V);
  Word words[kElements] = {};

  template <int kFull, int kWidth>
  FUSED_DEVICE void set(int e, const Vec<V, kWidth>& some) {
    if constexpr (kWidth == kFull) {
      FUSED_UNROLL for (int k = 0; k < kWidth / kOfWord; ++k) {
        words[e / kOfWord + k] = reinterpret_cast<const Word*>(some.at)[k];
      }
    } else if constexpr (kOfWord == 1) {
      words[e] = *reinterpret_cast<const Word*>(some.at);
    } else {
      words[e] = *reinterpret_cast<const uint16_t*>(some.at);
    }
  }
  FUSED_DEVICE Vec<V, kElements> elements(bool are_packed) const {
    Vec<V, kElements> all;
    auto* const to = reinterpret_cast<Word*>(all.at);
    FUSED_UNROLL for (int k = 0; k < kElements / kOfWord; ++k) to[k] = words[k];
    if constexpr (kOfWord > 1) {
      if (are_packed) return all;
      FUSED_UNROLL for (int k = 0; k < kElements / kOfWord; ++k) {
        to[k] = words[2 * k] | words[2 * k + 1] << 16;
      }
    }
    return all;
  }
};

// The place of a thread, and its elements: vectors of `kWidth`, or as many single ones, `lanes`
// apart.
template <int kWidth, int kElements>
struct OneThread {
  const GroupPlan& plan;
  const GroupParams& p;
  int row, group;      // of the block's; of a sample's
  int part;            // of the samples, that the block goes through
  int channel, count;  // of the thread's first element; of its elements
  bool is_first;       // of the group's threads

  FUSED_DEVICE OneThread(const GroupPlan& its_plan, const GroupParams& params)
      : plan(its_plan), p(params) {
    const int blocks = plan.cluster, lanes = plan.lanes;
    int cluster = blockIdx.x, thread = threadIdx.x;
    if (blocks > 1) {
      cluster /= blocks;
      thread += (blockIdx.x - cluster * blocks) * blockDim.x;
    }
    part = cluster / plan.slices;
    const int team = thread / lanes, slice = cluster - part * plan.slices;
    const int lane = thread - team * lanes;
    row = team / plan.groups_of_slice;
    group = (slice - row) * plan.groups_of_slice + team;
    const int of_group = p.channels_of_group(), at = lane * plan.width;
    const bool works = row < plan.rows && group < p.groups;
    is_first = works && lane == 0;
    channel = group * of_group + at;
    // The elements, or those of whole vectors, that lie `lanes` of these apart.
    const int all = works ? of_group - at : 0;
    count = 0;
    FUSED_UNROLL for (int e = 0; e < kElements; e += kWidth) {
      count += e * lanes < all ? kWidth : 0;
    }
    if (!has_vectors()) count = min((all + lanes - 1) / lanes, kElements);
  }
  FUSED_DEVICE bool has(int e) const { return e < count; }
  FUSED_DEVICE bool has_vectors() const { return plan.width > 1; }
  // Channels from an element to the next one of its vector, and from a vector to the next.
  FUSED_DEVICE int apart() const { return has_vectors() ? 1 : plan.lanes; }
  FUSED_DEVICE int further() const { return plan.lanes * kWidth; }
  FUSED_DEVICE int channel_of(int e) const {
    return channel + e % kWidth * apart() + e / kWidth * further();
  }
  FUSED_DEVICE int first() const { return part * plan.rows; }
  FUSED_DEVICE int step() const { return plan.tiles * plan.rows; }
  // Calls use(sample), equally often for all threads, so that `use` may have barriers. Not all of
  // these samples are there.
  FUSED_DEVICE void each_sample(const auto& use) const {
    for (int n = first(); n < p.samples; n += step()) use(n + row);
  }
  // Calls use(e, channel, how many) for each vector that the thread has, or for each element.
  FUSED_DEVICE void each(const auto& use) const {
    if (has_vectors()) {
      FUSED_UNROLL for (int e = 0; e < kElements; e += kWidth) {
        if (has(e)) use(e, channel_of(e), std::integral_constant<int, kWidth>());
      }
    } else {
      FUSED_UNROLL for (int e = 0; e < kElements; ++e) {
        if (has(e)) use(e, channel_of(e), std::integral_constant<int, 1>());
      }
    }
  }
  // Calls use(e) for each element that the thread has: mostly all of them.
  FUSED_DEVICE void each_element(const auto& use) const {
    if (kWidth == kElements && count == kElements) {
      FUSED_UNROLL for (int e = 0; e < kElements; ++e) use(e);
    } else {
      FUSED_UNROLL for (int e = 0; e < kElements; ++e) {
        if (has(e)) use(e);
      }
    }
  }
  // The thread's elements of a sample that is there. Others stay what they were.
  template <typename V>
  FUSED_DEVICE void load_sample(Loaded<V, kElements>& to, const void* from, int sample) const {
    const V* const at = static_cast<const V*>(from) + int64_t{sample} * p.channels;
    each([&](int e, int c, auto width) {
      to.template set<kWidth>(e, load<Use::kOnce, width()>(element(at, c)));
    });
  }
  template <typename V>
  FUSED_DEVICE void store_sample(void* to, const Vec<V, kElements>& from, int sample) const {
    if (sample >= p.samples) return;
    V* const at = static_cast<V*>(to) + int64_t{sample} * p.channels;
    each([&](int e, int c, auto width) {
      Vec<V, width()> some;
      FUSED_UNROLL for (int j = 0; j < width(); ++j) some.at[j] = from.at[e + j];
      store_once(element(at, c), some);
    });
  }
  // The sum over the threads of the group, which all of them get. Calls take turns with two scratch
  // areas: after the barrier in the next call nobody reads the one of this call any more.
  template <typename Value>
  FUSED_DEVICE Value sum(Value v, Value (&scratch)[kMaxWarps]) const {
    if (plan.lanes <= kWarpSize) return logical_warp_sum(v, plan.lanes);
    v = team_sum(v, BlockTeam(), scratch);
    if (plan.cluster == 1) return v;
    Value* const of_block = scratch + kMaxWarps - 1;  // which no warp has (kMostOneThreads)
    if (threadIdx.x == 0) *of_block = v;
    meet();
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    const int block = threadIdx.x % kWarpSize;
    v = Value{};
    if (block < plan.cluster) {
      v = *cooperative_groups::this_cluster().map_shared_rank(of_block, block);
    }
#endif
    return warp_sum(v);
  }
  // The blocks of a cluster run at the same time, read each other's shared memory (PTX ISA,
  // "Cluster of Cooperative Thread Arrays"), and end when all of them have read.
  FUSED_DEVICE void meet() const {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    if (plan.cluster > 1) cooperative_groups::this_cluster().sync();
#endif
  }
};

// weight or bias of a thread's channels. The type is asked for once, so that the loads overlap.
template <typename Acc, int kWidth, int kElements>
FUSED_DEVICE void load_numbers(Acc (&to)[kElements], const ChannelNumbers& numbers,
                               const OneThread<kWidth, kElements>& own, Acc absent) {
  // Zeros make what is computed of elements that the thread lacks zero, too, whatever the mean.
  FUSED_UNROLL for (int e = 0; e < kElements; ++e) to[e] = own.has(e) ? absent : Acc(0);
  if (numbers.at == nullptr) return;
  const int64_t bytes = numbers.channel_stride * size_of(numbers.type);
  const int64_t apart = own.apart() * bytes, further = own.further() * bytes;
  const char* places[kElements];
  FUSED_UNROLL for (int e = 0; e < kElements; ++e) {
    const char* const at = e == 0 ? static_cast<const char*>(numbers.at) + own.channel * bytes
                           : e % kWidth == 0 ? places[e - kWidth] + further
                                             : places[e - 1] + apart;
    places[e] = at;
  }
  const auto from = [&](auto of_type) {
    FUSED_UNROLL for (int e = 0; e < kElements; ++e) {
      if (own.has(e)) to[e] = Acc(to_acc(*reinterpret_cast<const decltype(of_type)*>(places[e])));
    }
  };
  switch (numbers.type) {
    case DataType::kFloat32:
      return from(float{});
    case DataType::kFloat16:
      return from(__half{});
    case DataType::kBFloat16:
      return from(__nv_bfloat16{});
    case DataType::kFloat64:
      return from(double{});
  }
}

template <typename X, typename Y>
__global__ void __launch_bounds__(kMostOneThreads, sizeof(X) > 4 ? 1 : 2)
    one_position_kernel(const __grid_constant__ GroupPlan plan,
                        const __grid_constant__ GroupParams p) {
  using Acc = acc_t<X>;
  constexpr int kElements = one_position_elements(sizeof(X)), kWidth = vector_width(sizeof(X));
  __shared__ alignas(16) Acc scratch[2][kMaxWarps];
  const OneThread<kWidth, kElements> own(plan, p);
  Loaded<X, kElements> next;
  X next_first, next_second;  // of the group
  const int first_channel = own.group * p.channels_of_group();
  const int second = p.channels_of_group() > 1;
  const auto bring = [&](int n) {
    // Two vectors leave no registers for elements that stay what they were.
    if constexpr (kWidth < kElements) next = {};
    if (n >= p.samples || own.count == 0) return;
    own.load_sample(next, p.x, n);
    const X* const group = static_cast<const X*>(p.x) + int64_t{n} * p.channels + first_channel;
    next_first = group[0];
    next_second = group[second];
  };
  bring(own.first() + own.row);
  Acc factor[kElements], offset[kElements];
  load_numbers(factor, p.weight, own, Acc(1));
  load_numbers(offset, p.bias, own, Acc(0));
  const Reciprocal<Acc> inverse(p.inverse_count);
  own.each_sample([&](int n) {
    Acc values[kElements];
    unpack(values, next.elements(own.has_vectors()));
    const Pair<Acc> two = {to_acc(next_first), to_acc(next_second)};
    bring(n + own.step());
    const Acc pivot = MeanAndVariance::pivot<Acc>(two);
    Acc sum = 0, m2 = 0;
    own.each_element([&](int e) { sum += values[e] - pivot; });
    const Acc mean = inverse.mean(pivot, own.sum(sum, scratch[0]));
    own.each_element([&](int e) {
      values[e] -= mean;
      m2 += values[e] * values[e];
    });
    const Acc rstd =
        MeanAndVariance::rstd(own.sum(m2, scratch[1]), p.inverse_count.as<Acc>(), p.eps.as<Acc>());
    if (n < p.samples && own.is_first) {
      store_group(p, n * p.groups + own.group, Pair<Acc>{mean, rstd});
    }
    FUSED_UNROLL for (int e = 0; e < kElements; ++e) {
      values[e] = values[e] * (rstd * factor[e]) + offset[e];
    }
    activate_if<Y>(p, values);
    own.store_sample(p.y, round_to<Y>(values), n);
  });
  own.meet();
}

template <typename X, typename Y>
__global__ void __launch_bounds__(kMostOneThreads, 1)
    one_position_backward_kernel(const __grid_constant__ GroupPlan plan,
                                 const __grid_constant__ GroupParams p) {
  using Acc = acc_t<X>;
  constexpr int kElements = one_position_elements(sizeof(X)), kWidth = vector_width(sizeof(X));
  __shared__ alignas(16) Pair<Acc> scratch[2][kMaxWarps];
  __shared__ Pair<Acc> of_rows[kElements][kOneThreads];
  let_next_kernel_start();
  const OneThread<kWidth, kElements> own(plan, p);
  Loaded<X, kElements> next_x;
  Loaded<Y, kElements> next_dy;
  Pair<Acc> next_statistics;
  const auto bring = [&](int n) {
    if (n >= p.samples) {
      next_dy = {};
      return;
    }
    own.load_sample(next_x, p.x, n);
    own.load_sample(next_dy, p.dy, n);
    if (own.count > 0) next_statistics = load_group<Acc>(p, n * p.groups + own.group);
  };
  bring(own.first() + own.row);
  Acc factor[kElements];
  ChannelSlope<Acc[kElements]> of;
  load_numbers(factor, p.weight, own, Acc(1));
  load_numbers(of.offset, p.bias, own, Acc(0));
  Pair<Acc> grads[kElements];  // sums of dz and of dz xhat over the samples
  bool odd = false;
  own.each_sample([&](int n) {
    const auto x = next_x.elements(own.has_vectors());
    const auto dy = next_dy.elements(own.has_vectors());
    const auto [mean, rstd] = next_statistics;
    bring(n + own.step());
    FUSED_UNROLL for (int e = 0; e < kElements; ++e) of.slope[e] = factor[e] * rstd;
    const GroupGradients<Acc, kElements> gradients(p, x, dy, mean, of);
    Pair<Acc> sums;
    FUSED_UNROLL for (int e = 0; e < kElements; ++e) {
      const Acc dz = gradients.dz[e], dz_d = dz * gradients.d[e];
      grads[e] += Pair<Acc>{dz, dz_d * rstd};
      sums += Pair<Acc>{factor[e] * dz, factor[e] * dz_d};
    }
    sums = scaled_sums(p, own.sum(sums, scratch[odd]), rstd);
    odd = !odd;
    const DxOfGroup<Acc> of_group(p, group_means(p, sums), rstd);
    own.store_sample(p.y, of_group.template dx<X>(gradients, of), n);
  });
  own.meet();
  if (p.dweight.at == nullptr && p.dbias.at == nullptr) return;
  // The sums of the block's rows, which the first row stores: as the gradients, or as a part.
  const int apart = plan.groups_of_slice * plan.lanes;  // threads from one row to the next
  int left = static_cast<int>(min(int64_t{plan.rows}, p.samples - own.first()));
  for (int half; left > 1; left = half) {
    half = (left + 1) / 2;
    __syncthreads();
    FUSED_UNROLL for (int e = 0; e < kElements; ++e) of_rows[e][threadIdx.x] = grads[e];
    __syncthreads();
    if (own.row + half >= left) continue;
    FUSED_UNROLL for (int e = 0; e < kElements; ++e) {
      grads[e] += of_rows[e][threadIdx.x + half * apart];
    }
  }
  if (own.row > 0) return;
  auto* const parts = pairs_at<Acc>(p, 0) + int64_t{own.part} * p.channels;
  const Acc scale = p.scale.as<Acc>();
  // Not unrolled, for storing a gradient is much code: the next sum takes the first one's place.
#pragma unroll 1
  for (int e = 0; own.has(e); ++e) {
    const Pair<Acc> sum = {grads[0].first * scale, grads[0].second * scale};
    FUSED_UNROLL for (int k = 1; k < kElements; ++k) grads[k - 1] = grads[k];
    if (plan.tiles > 1) {
      parts[own.channel_of(e)] = sum;
    } else {
      store_param_grad(p, own.channel_of(e), sum);
    }
  }
}

}  // namespace

cudaError_t launch_one_position(const GroupParams& params, const GroupTypes& types,
                                const GroupPlan& plan, cudaStream_t stream) {
  const int full = vector_width(size_of(types.x));
  return dispatch_group_types(types, full, [&](auto x, auto y, auto width) -> cudaError_t {
    using X = decltype(x);
    using Y = decltype(y);
    const auto start = [&](auto kernel) {
      return plan.cluster > 1 ? launch<Start::kCluster>(kernel, plan, stream, plan, params)
                              : launch(kernel, plan, stream, plan, params);
    };
    if constexpr (width() == vector_width(static_cast<int>(sizeof(X)))) {
      return start(types.backward ? one_position_backward_kernel<X, Y> : one_position_kernel<X, Y>);
    } else {
      return cudaErrorInvalidValue;
    }
  });
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// GroupNorm of (samples, channels), forward and backward. The threads of a group, lanes of a warp,
// a block or a cluster, hold it in registers. A block or cluster covers a slice of the channels,
// keeps its weights, loops over a share of the samples, and loads the next sample ahead. Backward
// adds up the gradients of weight and bias in registers; where several blocks share the samples of
// a slice, each leaves a part, and another kernel adds these up (parts.cuh).
#include <cooperative_groups.h>

#include "groups/launches.h"
#include "groups/parts.cuh"

namespace fused_layernorm {
namespace {

template <typename V>
using WordOf = std::conditional_t<sizeof(V) == 8, uint64_t, uint32_t>;

// Elements that are loaded ahead, as raw words: packed vectors, or a word for each single element.
// To pack single ones, or to convert, takes the values, and so waits for memory: it is done when
// they are needed. Zeros stand for elements that the thread lacks.
template <typename Word, int kElements>
struct Loaded {
  template <typename V>
  static constexpr int kOfWord = sizeof(Word) / sizeof(V);
  Word words[kElements] = {};

  template <typename V, int kWidth>
  FUSED_DEVICE void set(int e, const Vec<V, kWidth>& some) {
    if constexpr (kWidth < kOfWord<V>) {  // a single element of two bytes
      words[e] = *reinterpret_cast<const uint16_t*>(some.at);
    } else {
      FUSED_UNROLL for (int k = 0; k < kWidth / kOfWord<V>; ++k) {
        words[e / kOfWord<V> + k] = reinterpret_cast<const Word*>(some.at)[k];
      }
    }
  }
  template <typename V>
  FUSED_DEVICE Vec<V, kElements> elements(bool are_packed) const {
    Vec<V, kElements> all;
    auto* const to = reinterpret_cast<Word*>(all.at);
    FUSED_UNROLL for (int k = 0; k < kElements / kOfWord<V>; ++k) to[k] = words[k];
    if constexpr (kOfWord<V> > 1) {
      if (are_packed) return all;
      FUSED_UNROLL for (int k = 0; k < kElements / kOfWord<V>; ++k) {
        to[k] = words[2 * k] | words[2 * k + 1] << 16;
      }
    }
    return all;
  }
};

// The place of a thread, and its elements: vectors of kWidth or single ones, plan.lanes apart.
template <int kWidth, int kElements>
struct ThreadElements {
  const GroupPlan& plan;
  const GroupParams& p;
  int row, group;      // which of the samples that are side by side; of the sample's groups
  int part;            // which of the plan.tiles shares of the samples, and of their partial sums
  int channel, count;  // of the thread's first element; of its elements
  bool is_first;       // of the group's threads

  FUSED_DEVICE ThreadElements(const GroupPlan& its_plan, const GroupParams& params)
      : plan(its_plan), p(params) {
    const int blocks = plan.cluster, lanes = plan.lanes;
    int cluster = blockIdx.x, thread = threadIdx.x;
    if (blocks > 1) {
      cluster /= blocks;
      thread += (blockIdx.x - cluster * blocks) * blockDim.x;
    }
    part = plan.by_slices.quotient(cluster);
    // Lanes of a warp are a power of two. More are all threads of the block or cluster.
    const int team = lanes > kWarpSize ? 0 : thread >> (31 - __clz(lanes));
    const int slice = cluster - part * plan.slices;
    const int lane = thread - team * lanes;
    row = plan.by_groups_of_slice.quotient(team);
    group = (slice - row) * plan.groups_of_slice + team;
    const int of_group = p.channels_of_group, at = lane * plan.width;
    const bool works = row < plan.rows && group < p.groups;
    is_first = works && lane == 0;
    channel = group * of_group + at;
    // Threads left over behind whole rows, or behind the last group, have no elements.
    const int all = works ? of_group - at : 0;
    count = 0;
    FUSED_UNROLL for (int e = 0; e < kElements; e += kWidth) {
      count += e * lanes < all ? kWidth : 0;
    }
    if (!has_vectors()) count = min((all + lanes - 1) / lanes, kElements);
  }
  FUSED_DEVICE bool has(int e) const { return e < count; }
  FUSED_DEVICE bool has_vectors() const { return plan.width > 1; }
  // In channels: between the elements of a vector, and between vectors.
  FUSED_DEVICE int element_stride() const { return has_vectors() ? 1 : plan.lanes; }
  FUSED_DEVICE int vector_stride() const { return plan.lanes * kWidth; }
  FUSED_DEVICE int channel_of(int e) const {
    return channel + e % kWidth * element_stride() + e / kWidth * vector_stride();
  }
  FUSED_DEVICE int first() const { return part * plan.rows; }
  FUSED_DEVICE int step() const { return plan.tiles * plan.rows; }
  // Calls use(sample) equally often in all threads of a block or cluster, so that it may contain
  // barriers. The sample may be beyond the last one, which `use` must check.
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
  // Calls use(e) for each element that the thread has. If it has all, none is asked for.
  FUSED_DEVICE void each_element(const auto& use) const {
    if (count == kElements) {
      FUSED_UNROLL for (int e = 0; e < kElements; ++e) use(e);
    } else {
      FUSED_UNROLL for (int e = 0; e < kElements; ++e) {
        if (has(e)) use(e);
      }
    }
  }
  // Loads of a sample, which must exist, what the thread has. Other elements stay what they were.
  template <typename V>
  FUSED_DEVICE void load_sample(Loaded<WordOf<V>, kElements>& to, const V* x, int sample) const {
    const V* const at = x + int64_t{sample} * p.channels;
    each([&](int e, int c, auto width) { to.set(e, load<Use::kOnce, width()>(element(at, c))); });
  }
  // Stores nothing of a sample beyond the last one.
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
  // The sum over the threads of the group, which all of them get. Calls alternate between two
  // scratch areas: behind the barrier of the next call nobody reads the one of this call.
  template <typename Value>
  FUSED_DEVICE Value sum(Value v, Value (&scratch)[kMaxWarps]) const {
    if (plan.lanes <= kWarpSize) return logical_warp_sum(v, plan.lanes);
    v = team_sum(v, BlockTeam(), scratch);
    if (plan.cluster == 1) return v;
    static_assert(kMostOneThreads / kWarpSize < kMaxWarps, "the last value is no warp's");
    Value* const of_block = scratch + kMaxWarps - 1;
    if (threadIdx.x == 0) *of_block = v;
    sync_cluster();
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    const int block = threadIdx.x % kWarpSize;
    v = Value{};
    if (block < plan.cluster) {
      v = *cooperative_groups::this_cluster().map_shared_rank(of_block, block);
    }
#endif
    return warp_sum(v);
  }
  // The barrier of a cluster, if there is one. Its blocks run at the same time and read each
  // other's shared memory (PTX ISA, "Cluster of Cooperative Thread Arrays"), so it also stands at
  // the end.
  FUSED_DEVICE void sync_cluster() const {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    if (plan.cluster > 1) cooperative_groups::this_cluster().sync();
#endif
  }
};

// weight or bias of a thread's channels, of x's type or float32 (call/check.cpp). Of elements that
// the thread lacks it is 0: in backward z is then 0, and dz, 0 times the activation's slope at z,
// is 0 for any finite mean.
template <typename X, int kWidth, int kElements>
struct Parameter {
  using Acc = acc_t<X>;
  using Wide = std::conditional_t<sizeof(X) == 2, float, X>;
  using Own = ThreadElements<kWidth, kElements>;
  const ChannelNumbers& numbers;
  const bool is_wide, is_packed;  // of Wide; in whole vectors
  Loaded<WordOf<X>, kElements> loaded;

  FUSED_DEVICE Parameter(const ChannelNumbers& of_channels, const Own& own, Acc absent)
      : numbers(of_channels),
        is_wide(sizeof(X) > 2 || numbers.type == DataType::kFloat32),
        is_packed(own.has_vectors() && numbers.is_dense) {
    if (numbers.at == nullptr) {  // ChannelNumbers then have the type float32: it is wide
      Vec<Acc, 1> one;
      one.at[0] = absent;
      FUSED_UNROLL for (int e = 0; e < kElements; ++e) {
        if (own.has(e)) loaded.set(e, one);
      }
    } else if (is_wide) {
      load_from(static_cast<const Wide*>(numbers.at), own);
    } else {
      load_from(static_cast<const X*>(numbers.at), own);
    }
  }
  template <typename V>
  FUSED_DEVICE void load_from(const V* at, const Own& own) {
    if (is_packed) {
      FUSED_UNROLL for (int e = 0; e < kElements; e += kWidth) {
        if (own.has(e)) loaded.set(e, load<Use::kReadOnly, kWidth>(at + own.channel_of(e)));
      }
      return;
    }
    // A place follows from another one by an addition, which takes less than a product of 64 bits.
    const int64_t stride = numbers.channel_stride;
    const int64_t apart = own.element_stride() * stride, further = own.vector_stride() * stride;
    const V* vector = at + own.channel * stride;
    FUSED_UNROLL for (int e = 0; e < kElements; e += kWidth, vector += further) {
      at = vector;
      FUSED_UNROLL for (int j = e; j < e + kWidth; ++j, at += apart) {
        if (own.has(j)) loaded.set(j, load<Use::kReadOnly, 1>(at));
      }
    }
  }
  FUSED_DEVICE void convert(Acc (&to)[kElements]) const {
    if (is_wide) {
      unpack(to, loaded.template elements<Wide>(is_packed));
    } else {
      unpack(to, loaded.template elements<X>(is_packed));
    }
  }
};

// weight and bias, 1 and 0 where there are none: all loads are on the way before one is waited for.
template <typename X, int kWidth, int kElements>
FUSED_DEVICE void load_parameters(const GroupParams& p,
                                  const ThreadElements<kWidth, kElements>& own,
                                  acc_t<X> (&factor)[kElements], acc_t<X> (&offset)[kElements]) {
  const Parameter<X, kWidth, kElements> weight(p.weight, own, 1), bias(p.bias, own, 0);
  weight.convert(factor);
  bias.convert(offset);
}

template <typename X, typename Y>
__global__ void __launch_bounds__(kMostOneThreads, sizeof(X) > 4 ? 1 : 2)
    one_position_kernel(const __grid_constant__ GroupPlan plan,
                        const __grid_constant__ GroupParams p) {
  using Acc = acc_t<X>;
  constexpr int kElements = one_position_elements(sizeof(X)), kWidth = vector_width(sizeof(X));
  __shared__ alignas(16) Acc scratch[2][kMaxWarps];
  const ThreadElements<kWidth, kElements> own(plan, p);
  Loaded<WordOf<X>, kElements> next;
  X next_first, next_second;  // of the group's elements, from which the pivot is chosen
  const int first_channel = own.group * p.channels_of_group, second = p.channels_of_group > 1;
  const auto prefetch = [&](int n) {
    // Of two vectors, old values that a load may leave as they are would take too many registers.
    if constexpr (kWidth < kElements) next = {};
    if (n >= p.samples || own.count == 0) return;
    own.load_sample(next, static_cast<const X*>(p.x), n);
    const X* const group = static_cast<const X*>(p.x) + int64_t{n} * p.channels + first_channel;
    next_first = group[0];
    next_second = group[second];
  };
  prefetch(own.first() + own.row);
  Acc factor[kElements], offset[kElements];
  load_parameters<X>(p, own, factor, offset);
  const Reciprocal<Acc> inverse(p.inverse_count);
  own.each_sample([&](int n) {
    Acc values[kElements];
    unpack(values, next.template elements<X>(own.has_vectors()));
    const Pair<Acc> two = {to_acc(next_first), to_acc(next_second)};
    prefetch(n + own.step());
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
  own.sync_cluster();
}

template <typename X, typename Y>
__global__ void __launch_bounds__(kMostOneThreads, 1)
    one_position_backward_kernel(const __grid_constant__ GroupPlan plan,
                                 const __grid_constant__ GroupParams p) {
  using Acc = acc_t<X>;
  constexpr int kElements = one_position_elements(sizeof(X)), kWidth = vector_width(sizeof(X));
  __shared__ alignas(16) Pair<Acc> scratch[2][kMaxWarps];
  __shared__ Pair<Acc> of_rows[kElements][kOneThreads];  // which blocks of several rows have
  let_next_kernel_start();
  const ThreadElements<kWidth, kElements> own(plan, p);
  Loaded<WordOf<X>, kElements> next_x;
  Loaded<WordOf<Y>, kElements> next_dy;
  Pair<Acc> next_statistics;
  const auto prefetch = [&](int n) {
    if (n >= p.samples) {
      next_dy = {};  // adds nothing to the gradients
      return;
    }
    own.load_sample(next_x, static_cast<const X*>(p.x), n);
    own.load_sample(next_dy, static_cast<const Y*>(p.dy), n);
    if (own.count > 0) next_statistics = load_group<Acc>(p, n * p.groups + own.group);
  };
  prefetch(own.first() + own.row);
  Acc factor[kElements];
  ChannelSlope<Acc[kElements]> of;
  load_parameters<X>(p, own, factor, of.offset);
  Pair<Acc> grads[kElements];  // sums of dz and of dz xhat over the samples, without the scale
  bool odd = false;
  own.each_sample([&](int n) {
    const auto x = next_x.template elements<X>(own.has_vectors());
    const auto dy = next_dy.template elements<Y>(own.has_vectors());
    const auto [mean, rstd] = next_statistics;
    prefetch(n + own.step());
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
  own.sync_cluster();
  if (p.dweight.at == nullptr && p.dbias.at == nullptr) return;
  // The sums over the block's rows, by a tree. The first row stores the gradients, or a part.
  const int apart = plan.groups_of_slice * plan.lanes;  // threads from one row to the next
  int left = static_cast<int>(min(int64_t{plan.rows}, p.samples - own.first()));
  for (int half; left > 1; left = half) {
    half = (left + 1) / 2;
    __syncthreads();
    FUSED_UNROLL for (int e = 0; e < kElements; ++e) of_rows[e][threadIdx.x] = grads[e];
    __syncthreads();
    if (own.row + half < left) {
      FUSED_UNROLL for (int e = 0; e < kElements; ++e) {
        grads[e] += of_rows[e][threadIdx.x + half * apart];
      }
    }
  }
  if (own.row > 0) return;
  auto* const parts = pairs_at<Acc>(p, 0) + int64_t{own.part} * p.channels;
  const Acc scale = p.scale.as<Acc>();
  // Not unrolled, for storing a gradient is much code. The sums move up, so that each index is a
  // constant and they stay in registers.
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
  // A kernel serves whole vectors and single elements. There are no half vectors of one position.
  const int full = vector_width(size_of(types.x));
  return dispatch_group_types(types, full, [&](auto x, auto y, auto width) -> cudaError_t {
    using X = decltype(x);
    using Y = decltype(y);
    if constexpr (width() == vector_width(static_cast<int>(sizeof(X)))) {
      const auto kernel =
          types.backward ? one_position_backward_kernel<X, Y> : one_position_kernel<X, Y>;
      return launch_clusters(kernel, plan, stream, params);
    } else {
      return cudaErrorInvalidValue;
    }
  });
}

}  // namespace fused_layernorm

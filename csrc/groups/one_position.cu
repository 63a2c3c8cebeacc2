// SPDX-License-Identifier: Apache-2.0
// Samples of one position, (samples, channels), forward and backward: some lanes of a warp, or a
// block, hold a group. A block has the groups of a slice of the channels, keeps their weights, and
// goes through some of the samples. Backward adds up the gradients of weight and bias over them:
// one block for all samples stores the gradients, several leave parts.
#include "groups/launches.h"
#include "groups/parts.cuh"

namespace fused_layernorm {
namespace {

// The place of a thread: `kVecs` vectors of a group, `lanes` apart.
template <int kWidth, int kVecs>
struct OneThread {
  int lane, lanes, row, group, channel, vectors;  // channel: the group's first one
  int64_t first, step;                            // of the samples that the block goes through

  FUSED_DEVICE OneThread(const GroupPlan& plan, const GroupParams& p)
      : lanes(plan.lanes),
        first(int64_t{blockIdx.x / plan.slices} * plan.rows),
        step(int64_t{plan.tiles} * plan.rows) {
    const int team = threadIdx.x / lanes, slice = blockIdx.x % plan.slices;
    lane = threadIdx.x - team * lanes;
    row = team / plan.groups_of_slice;
    group = (slice - row) * plan.groups_of_slice + team;
    channel = group * p.channels_of_group();
    const bool works = row < plan.rows && group < p.groups;
    vectors = works ? p.channels_of_group() / kWidth : 0;
  }
  // Calls use(i, first channel) for the thread's vectors, those of a sample that is there.
  FUSED_DEVICE void each(const auto& use, bool is_there = true) const {
    FUSED_UNROLL for (int i = 0; i < kVecs; ++i) {
      const int vector = lane + i * lanes;
      if (is_there && vector < vectors) use(i, channel + vector * kWidth);
    }
  }
  // Calls use(sample, whether it is there), equally often for all threads, so that `use` may have
  // barriers.
  FUSED_DEVICE void each_sample(const GroupParams& p, const auto& use) const {
    for (int64_t n = first; n < p.samples; n += step) use(n + row, n + row < p.samples);
  }
  // The sum over the threads of the group, which all of them get. Calls take turns with two scratch
  // areas: after the barrier in the next call nobody reads the one of this call any more.
  template <typename Value>
  FUSED_DEVICE Value sum(Value v, Value* scratch) const {
    return lanes > kWarpSize ? team_sum(v, BlockTeam(), scratch) : logical_warp_sum(v, lanes);
  }
  template <typename V>
  FUSED_DEVICE void load_sample(Vec<V, kWidth> (&to)[kVecs], const void* from, int64_t sample,
                                const GroupParams& p) const {
    const V* const at = static_cast<const V*>(from) + sample * p.channels;
    each([&](int i, int c) { to[i] = load<Use::kOnce, kWidth>(element(at, c)); },
         sample < p.samples);
  }
};

// The numbers of neighbouring channels. The type is asked for once, so that their loads overlap.
template <typename Acc, int kWidth>
FUSED_DEVICE void load_numbers(Acc (&to)[kWidth], const ChannelNumbers& numbers, int channel,
                               Acc absent) {
  const auto from = [&](auto of_type) {
    const auto* const at = static_cast<const decltype(of_type)*>(numbers.at);
    FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
      to[j] = Acc(to_acc(at[(channel + j) * numbers.channel_stride]));
    }
  };
  if (numbers.at == nullptr) {
    FUSED_UNROLL for (int j = 0; j < kWidth; ++j) to[j] = absent;
  } else if (numbers.type == DataType::kFloat32) {
    from(float{});
  } else if (numbers.type == DataType::kFloat16) {
    from(__half{});
  } else if (numbers.type == DataType::kBFloat16) {
    from(__nv_bfloat16{});
  } else {
    from(double{});
  }
}

// weight and bias of a thread's channels.
template <typename Acc, int kWidth, int kVecs>
struct OneMaps {
  Acc factor[kVecs][kWidth], offset[kVecs][kWidth];

  FUSED_DEVICE OneMaps(const GroupParams& p, const OneThread<kWidth, kVecs>& own) {
    own.each([&](int i, int c) {
      load_numbers(factor[i], p.weight, c, Acc(1));
      load_numbers(offset[i], p.bias, c, Acc(0));
    });
  }
};

template <typename X, int kWidth>
__global__ void __launch_bounds__(kMostOneThreads, 2)
    one_position_kernel(const __grid_constant__ GroupPlan plan,
                        const __grid_constant__ GroupParams p) {
  using Acc = acc_t<X>;
  constexpr int kVecs = one_position_vecs(kWidth, sizeof(X));
  __shared__ alignas(16) Acc scratch[2][kMaxWarps];
  const OneThread<kWidth, kVecs> own(plan, p);
  Vec<X, kWidth> next[kVecs];
  // Deviations from a group's first element are summed up, so that a large mean costs no digits
  // (an outlier in its place does: kMostOnePivot).
  Acc next_pivot = 0;
  const auto bring = [&](int64_t n) {
    own.load_sample(next, p.x, n, p);
    if (n < p.samples && own.vectors > 0) {
      next_pivot = to_acc(static_cast<const X*>(p.x)[n * p.channels + own.channel]);
    }
  };
  bring(own.first + own.row);
  const OneMaps<Acc, kWidth, kVecs> maps(p, own);
  const Reciprocal<Acc> inverse(p.inverse_count);
  own.each_sample(p, [&](int64_t n, bool is_there) {
    Acc values[kVecs][kWidth];
    own.each([&](int i, int) { unpack(values[i], next[i]); }, is_there);
    const Acc pivot = next_pivot;
    bring(n + own.step);
    Acc sum = 0, m2 = 0;
    own.each(
        [&](int i, int) {
          FUSED_UNROLL for (int j = 0; j < kWidth; ++j) sum += values[i][j] - pivot;
        },
        is_there);
    const Acc mean = inverse.mean(pivot, own.sum(sum, scratch[0]));
    own.each(
        [&](int i, int) {
          FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
            values[i][j] -= mean;
            m2 += values[i][j] * values[i][j];
          }
        },
        is_there);
    const Acc rstd =
        MeanAndVariance::rstd(own.sum(m2, scratch[1]), p.inverse_count.as<Acc>(), p.eps.as<Acc>());
    if (is_there && own.vectors > 0 && own.lane == 0) {
      store_group(p, n * p.groups + own.group, Pair<Acc>{mean, rstd});
    }
    X* const y = static_cast<X*>(p.y) + n * p.channels;
    with_activation<kActivationLoops<X, kWidth>>(p, [&](auto activation) {
      own.each(
          [&](int i, int c) {
            FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
              values[i][j] = values[i][j] * (rstd * maps.factor[i][j]) + maps.offset[i][j];
            }
            activate_if<X, decltype(activation)::value>(p, values[i]);
            store_once(element(y, c), round_to<X>(values[i]));
          },
          is_there);
    });
  });
}

template <typename X, int kWidth>
__global__ void __launch_bounds__(kMostOneThreads, 1)
    one_position_backward_kernel(const __grid_constant__ GroupPlan plan,
                                 const __grid_constant__ GroupParams p) {
  using Acc = acc_t<X>;
  constexpr int kVecs = one_position_vecs(kWidth, sizeof(X));
  __shared__ alignas(16) Pair<Acc> scratch[2][kMaxWarps];
  __shared__ Pair<Acc> of_rows[kWidth][kOneThreads];
  let_next_kernel_start();
  const OneThread<kWidth, kVecs> own(plan, p);
  Vec<X, kWidth> x[kVecs], next_x[kVecs], dy[kVecs], next_dy[kVecs];
  Pair<Acc> statistics, next_statistics;
  const auto bring = [&](int64_t n) {
    own.load_sample(next_x, p.x, n, p);
    own.load_sample(next_dy, p.dy, n, p);
    if (n < p.samples && own.vectors > 0) {
      next_statistics = load_group<Acc>(p, n * p.groups + own.group);
    }
  };
  bring(own.first + own.row);
  const OneMaps<Acc, kWidth, kVecs> maps(p, own);
  Pair<Acc> grads[kVecs][kWidth];  // sums of dz and of dz xhat over the samples
  bool odd = false;
  own.each_sample(p, [&](int64_t n, bool is_there) {
    FUSED_UNROLL for (int i = 0; i < kVecs; ++i) {
      x[i] = next_x[i];
      dy[i] = next_dy[i];
    }
    statistics = next_statistics;
    bring(n + own.step);
    const Acc rstd = statistics.second;
    // Calls body(vector, first channel, slopes, gradients) for the vectors of this thread.
    const auto each = [&](const auto& body) {
      with_activation<kActivationLoops<X, kWidth>>(p, [&](auto activation) {
        own.each(
            [&](int i, int c) {
              ChannelSlope<Acc[kWidth]> of;
              FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
                of.slope[j] = maps.factor[i][j] * rstd;
                of.offset[j] = maps.offset[i][j];
              }
              body(i, c, of,
                   GroupGradients<Acc, kWidth>(p, x[i], dy[i], statistics.first, of, activation));
            },
            is_there);
      });
    };
    Pair<Acc> sums;
    each([&](int i, int, const auto&, const auto& gradients) {
      FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
        const Acc dz = gradients.dz[j], dz_d = dz * gradients.d[j];
        grads[i][j] += Pair<Acc>{dz, dz_d * rstd};
        sums += Pair<Acc>{maps.factor[i][j] * dz, maps.factor[i][j] * dz_d};
      }
    });
    sums = scaled_sums(p, own.sum(sums, scratch[odd]), rstd);
    odd = !odd;
    const DxOfGroup<Acc> of_group(p, group_means(p, sums), rstd);
    X* const dx = static_cast<X*>(p.y) + n * p.channels;
    each([&](int, int c, const auto& of, const auto& gradients) {
      store_once(element(dx, c), of_group.template dx<X>(gradients, of));
    });
  });
  if (p.dweight.at == nullptr && p.dbias.at == nullptr) return;
  // The sums of the block's rows, which the first row stores: as the gradients, or as a part.
  auto* const parts = pairs_at<Acc>(p, 0) + int64_t{blockIdx.x / plan.slices} * p.channels;
  const int apart = plan.groups_of_slice * own.lanes;  // threads from one row to the next
  const Acc scale = p.scale.as<Acc>();
  FUSED_UNROLL for (int i = 0; i < kVecs; ++i) {
    for (int left = plan.rows, half; left > 1; left = half) {
      half = (left + 1) / 2;
      __syncthreads();
      FUSED_UNROLL for (int j = 0; j < kWidth; ++j) of_rows[j][threadIdx.x] = grads[i][j];
      __syncthreads();
      if (own.row + half >= left) continue;
      FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
        grads[i][j] += of_rows[j][threadIdx.x + half * apart];
      }
    }
    const int vector = own.lane + i * own.lanes;
    if (own.row > 0 || vector >= own.vectors) continue;
    FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
      const int c = own.channel + vector * kWidth + j;
      const Pair<Acc> sum = {grads[i][j].first * scale, grads[i][j].second * scale};
      if (plan.tiles > 1) {
        parts[c] = sum;
      } else {
        store_param_grad(p, c, sum);
      }
    }
  }
}

}  // namespace

cudaError_t launch_one_position(const GroupParams& params, const GroupTypes& types,
                                const GroupPlan& plan, cudaStream_t stream) {
  return dispatch_group_types(types, plan.width, [&](auto x, auto y, auto width) -> cudaError_t {
    using X = decltype(x);
    constexpr bool kWhole = width() == vector_width(static_cast<int>(sizeof(X)));
    if constexpr (std::is_same_v<X, decltype(y)> && sizeof(X) <= 4) {
      if constexpr (kWhole || width() == 1) {
        if (types.backward) {
          return launch(one_position_backward_kernel<X, width()>, plan, stream, plan, params);
        }
      }
      if constexpr (kWhole) {
        return launch(one_position_kernel<X, width()>, plan, stream, plan, params);
      }
    }
    return cudaErrorInvalidValue;
  });
}

}  // namespace fused_layernorm

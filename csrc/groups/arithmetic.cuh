// SPDX-License-Identifier: Apache-2.0
// What kernels over groups share: numbers of channels, and where parts and totals lie.
#pragma once

#include "device/pdl.cuh"
#include "groups/plan.h"
#include "norm/activation.cuh"
#include "norm/statistic.cuh"

namespace fused_layernorm {

// The sample that has a group. All samples together have fewer than 2^31 groups (make_group_plan).
FUSED_DEVICE int sample_of(const GroupParams& p, int64_t group) {
  return p.by_groups.quotient(static_cast<int>(group));
}

template <typename Acc>
FUSED_DEVICE Acc number_at(const void* at, DataType type, int64_t index) {
  switch (type) {
    case DataType::kFloat32:
      return Acc(static_cast<const float*>(at)[index]);
    case DataType::kFloat16:
      return Acc(to_acc(static_cast<const __half*>(at)[index]));
    case DataType::kBFloat16:
      return Acc(to_acc(static_cast<const __nv_bfloat16*>(at)[index]));
    case DataType::kFloat64:
      return Acc(static_cast<const double*>(at)[index]);
  }
  return Acc(0);
}
template <typename Acc>
FUSED_DEVICE Acc number_of(const ChannelNumbers& numbers, int64_t sample, int channel, Acc absent) {
  if (numbers.at == nullptr) return absent;
  return number_at<Acc>(numbers.at, numbers.type,
                        sample * numbers.sample_stride + channel * numbers.channel_stride);
}
template <typename Acc>
FUSED_DEVICE void store_number(const ChannelGradient& to, int64_t index, Acc value) {
  switch (to.type) {
    case DataType::kFloat32:
      static_cast<float*>(to.at)[index] = static_cast<float>(value);
      return;
    case DataType::kFloat16:
      static_cast<__half*>(to.at)[index] = from_acc<__half>(value);
      return;
    case DataType::kBFloat16:
      static_cast<__nv_bfloat16*>(to.at)[index] = from_acc<__nv_bfloat16>(value);
      return;
    case DataType::kFloat64:
      static_cast<double*>(to.at)[index] = static_cast<double>(value);
      return;
  }
}

// The affine map after the normalization, for one channel of one sample: z = xhat factor + offset.
template <typename Acc>
struct ChannelMap {
  Acc factor = 1, offset = 0;

  ChannelMap() = default;
  FUSED_DEVICE ChannelMap(const GroupParams& p, int64_t sample, int channel) {
    factor = number_of<Acc>(p.weight, sample, channel, Acc(1));
    offset = number_of<Acc>(p.bias, sample, channel, Acc(0));
    if (p.scale_by.at != nullptr) {
      const Acc by = Acc(1) + number_of<Acc>(p.scale_by, sample, channel, Acc(0));
      factor *= by;
      offset *= by;
    }
    offset += number_of<Acc>(p.shift, sample, channel, Acc(0));
  }
};

// What kernels leave for later ones in the workspace.
template <typename Acc>
FUSED_DEVICE Pair<Acc>* pairs_at(const GroupParams& p, int64_t offset) {
  return reinterpret_cast<Pair<Acc>*>(static_cast<char*>(p.workspace) + offset);
}

// mean and rstd of a group, as forward leaves them.
template <typename Acc>
FUSED_DEVICE void store_group(const GroupParams& p, int64_t group, Pair<Acc> total) {
  if (p.mean != nullptr) static_cast<Acc*>(p.mean)[group] = total.first;
  if (p.rstd != nullptr) static_cast<Acc*>(p.rstd)[group] = total.second;
}
template <typename Acc>
FUSED_DEVICE Pair<Acc> load_group(const GroupParams& p, int64_t group) {
  return {static_cast<const Acc*>(p.mean)[group], static_cast<const Acc*>(p.rstd)[group]};
}

// The two means over a group that dx needs, from its sums of g = factor dz and of g xhat.
template <typename Acc>
FUSED_DEVICE Pair<Acc> group_means(const GroupParams& p, Pair<Acc> sums) {
  const Acc inverse = p.inverse_count.as<Acc>();
  return {sums.first * inverse, sums.second * inverse};
}

// The activations that kernels' loops are compiled for, so that they ask nothing of a vector and
// the work on several vectors overlaps; kAny is looked up for each vector.
enum class Compiled { kNone, kSilu, kLeakyRelu, kAny };
template <Compiled kActivation>
using CompiledFor = std::integral_constant<Compiled, kActivation>;

// How many loops a kernel that uses with_activation has: all four; without that for LeakyReLU where
// a vector may have elements of two channels; only kAny's where single elements are moved, and for
// float64, which is used for its digits, not its speed. (All four everywhere make the library 2%
// larger.)
template <typename X, int kWidth, int kUnits = 1>
constexpr int kActivationLoops = std::is_same_v<X, double> || kWidth == 1 ? 1
                                 : kUnits > 1                             ? 3
                                                                          : 4;
// Calls body(CompiledFor<...>) for the launch's activation.
template <int kLoops>
FUSED_DEVICE void with_activation(const GroupParams& p, const auto& body) {
  if constexpr (kLoops > 1) {
    if (p.activation == Activation::kSilu) return body(CompiledFor<Compiled::kSilu>());
    if (!p.activates) return body(CompiledFor<Compiled::kNone>());
  }
  if constexpr (kLoops > 3) {
    if (p.activation == kLeakyRelu) return body(CompiledFor<Compiled::kLeakyRelu>());
  }
  body(CompiledFor<Compiled::kAny>());
}

// values = activation(values) * scale.
template <typename Y, Compiled kActivation = Compiled::kAny, typename Acc, int kWidth>
FUSED_DEVICE void activate_if(const GroupParams& p, Acc (&values)[kWidth]) {
  if constexpr (kActivation == Compiled::kAny) {
    if (!p.activates) return;
    if (p.activation == Activation::kSilu) return activate_if<Y, Compiled::kSilu>(p, values);
    if (p.activation == kLeakyRelu) return activate_if<Y, Compiled::kLeakyRelu>(p, values);
    return activate<Y>(values, p.activation, p.scale.as<Acc>());
  } else if constexpr (kActivation != Compiled::kNone) {
    const Acc scale = p.scale.as<Acc>();
    FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
      if constexpr (kActivation == Compiled::kSilu) {
        values[j] = silu<Y>(values[j]) * scale;
      } else {
        values[j] = (values[j] > Acc(0) ? values[j] : values[j] * Acc(kLeakySlope)) * scale;
      }
    }
  }
}
// dy = dy * activation'(z). The scale, a factor of all gradients, is left to later.
template <typename Y, Compiled kActivation = Compiled::kAny, typename Acc, int kWidth>
FUSED_DEVICE void undo_activation(const GroupParams& p, Acc (&dy)[kWidth], const Acc (&z)[kWidth]) {
  if constexpr (kActivation == Compiled::kAny) {
    if (p.activation == Activation::kNone) return;
    if (p.activation == Activation::kSilu) return undo_activation<Y, Compiled::kSilu>(p, dy, z);
    if (p.activation == kLeakyRelu) return undo_activation<Y, Compiled::kLeakyRelu>(p, dy, z);
    activate_backward<Y>(dy, z, p.activation, Acc(1));
  } else if constexpr (kActivation != Compiled::kNone) {
    FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
      if constexpr (kActivation == Compiled::kSilu) {
        dy[j] = silu_gradient<Y>(dy[j], z[j]);
      } else {
        dy[j] = z[j] > Acc(0) ? dy[j] : dy[j] * Acc(kLeakySlope);
      }
    }
  }
}

// The sum and the sum of squares of a thread's values, as deviations from its first one.
template <typename Acc>
struct RunningMoments {
  Acc pivot = 0, sum = 0, square = 0;
  int vectors = 0;

  template <typename X, int kWidth>
  FUSED_DEVICE void add(const Vec<X, kWidth>& vector) {
    Acc values[kWidth];
    unpack(values, vector);
    if (vectors == 0) pivot = values[0];
    ++vectors;
    Pair<Acc> low, high;
    FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
      Pair<Acc>& chain = j % 2 == 0 ? low : high;
      const Acc d = values[j] - pivot;
      chain.first += d;
      chain.second += d * d;
    }
    sum += low.first + high.first;
    square += low.second + high.second;
  }
  // The moments of these values. Without any, their sum of squares is zero.
  template <int kWidth>
  FUSED_DEVICE Moments<Acc> moments() const {
    const Acc shift = sum / Acc(max(vectors, 1) * kWidth);
    return {pivot + shift, square - sum * shift};
  }
};

// The moments of `count` values from those of a block's threads (Chan, Golub and LeVeque, 1979).
// `scratch` has kMaxWarps numbers twice.
template <int kWidth, typename Acc>
FUSED_DEVICE Moments<Acc> moments_of_block(const RunningMoments<Acc>& own,
                                           const Reciprocal<Acc>& inverse,
                                           Acc (&scratch)[2][kMaxWarps]) {
  const BlockTeam team;
  const Moments<Acc> part = own.template moments<kWidth>();
  const Acc count = own.vectors * kWidth;
  // The means are summed up as deviations from the first thread's, which has values.
  __shared__ Acc first;
  if (threadIdx.x == 0) first = part.mean;
  __syncthreads();
  const Acc mean = inverse.mean(
      first, team_sum(count > 0 ? count * (part.mean - first) : Acc(0), team, scratch[0]));
  const Acc delta = part.mean - mean;
  return {mean, team_sum(count > 0 ? part.m2 + count * delta * delta : Acc(0), team, scratch[1])};
}

// A number that all elements of a vector share, or one of an array with one for each.
template <typename Acc>
FUSED_DEVICE Acc of_element(const Acc& number, int) {
  return number;
}
template <typename Acc, int kWidth>
FUSED_DEVICE Acc of_element(const Acc (&numbers)[kWidth], int j) {
  return numbers[j];
}

// What a channel of a sample is in backward, or the channels of a vector's elements (with arrays):
// with d = x - mean, z = d slope + offset.
template <typename Numbers>
struct ChannelSlope {
  Numbers slope, offset;
};
template <typename Acc>
FUSED_DEVICE ChannelSlope<Acc> slope_of(const ChannelMap<Acc>& map, Acc rstd) {
  return {map.factor * rstd, map.offset};
}

// d = x - mean, and dz, the gradient at the output of the affine map but for the factor `scale`.
template <typename Acc, int kWidth>
struct GroupGradients {
  Acc d[kWidth], dz[kWidth];

  template <typename X, typename Y, typename Activation_ = CompiledFor<Compiled::kAny>>
  FUSED_DEVICE GroupGradients(const GroupParams& p, const Vec<X, kWidth>& x,
                              const Vec<Y, kWidth>& dy, const auto& mean, const auto& of,
                              Activation_ = {}) {
    unpack(d, x);
    unpack(dz, dy);
    Acc z[kWidth];
    FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
      d[j] -= of_element(mean, j);
      z[j] = d[j] * of_element(of.slope, j) + of_element(of.offset, j);
    }
    undo_activation<Y, Activation_::value>(p, dz, z);
  }
  // The sums of dz and of dz d, but for the factor `scale`, over some elements.
  FUSED_DEVICE Pair<Acc> sums(int begin = 0, int end = kWidth) const {
    Pair<Acc> low, high;
    FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
      Pair<Acc>& chain = j % 2 == 0 ? low : high;
      if (j < begin || j >= end) continue;
      chain.first += dz[j];
      chain.second += dz[j] * d[j];
    }
    low += high;
    return low;
  }
};

// The sums of dz and of dz xhat, from those of dz and of dz d without the scale.
template <typename Acc>
FUSED_DEVICE Pair<Acc> scaled_sums(const GroupParams& p, Pair<Acc> sums, Acc rstd) {
  const Acc scale = p.scale.as<Acc>();
  return {sums.first * scale, sums.second * (scale * rstd)};
}

// dx = rstd (factor dz - means.first - xhat means.second), as dz slope scale + (d by_d + alone).
template <typename Acc>
struct DxOfGroup {
  Acc scale, by_d, alone;

  FUSED_DEVICE DxOfGroup(const GroupParams& p, Pair<Acc> means, Acc rstd)
      : scale(p.scale.as<Acc>()), by_d(-rstd * rstd * means.second), alone(-rstd * means.first) {}
  template <typename X, int kWidth>
  FUSED_DEVICE Vec<X, kWidth> dx(const GroupGradients<Acc, kWidth>& gradients,
                                 const auto& of) const {
    Acc values[kWidth];
    FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
      const Acc by_dz = of_element(of.slope, j) * scale;
      values[j] = gradients.dz[j] * by_dz + (gradients.d[j] * by_d + alone);
    }
    return round_to<X>(values);
  }
};

// dshift and dscale_by of a channel of a sample, from its sums of dz and of dz xhat.
template <typename Acc>
FUSED_DEVICE void store_modulation(const GroupParams& p, int64_t sample, int channel,
                                   Pair<Acc> sum) {
  const int64_t at = sample * p.channels + channel;
  if (p.dshift.at != nullptr) store_number(p.dshift, at, sum.first);
  if (p.dscale_by.at != nullptr) {
    store_number(p.dscale_by, at,
                 number_of<Acc>(p.weight, sample, channel, Acc(1)) * sum.second +
                     number_of<Acc>(p.bias, sample, channel, Acc(0)) * sum.first);
  }
}

}  // namespace fused_layernorm

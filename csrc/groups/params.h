// SPDX-License-Identifier: Apache-2.0
// What a launch of a norm over groups of channels is given (GroupNorm): x of (samples, channels,
// positions), where each group of a sample's channels has a mean and a variance of its own.
#pragma once

#include <cstdint>

#include "base/params.h"

namespace fused_layernorm {

// How a sample's elements lie: channel by channel, or position by position (channels_last).
enum class GroupLayout : int32_t { kPlanes, kChannelsLast };

// LeakyReLU, of slope 0.01, which only groups have: over rows one activation more costs kernels
// registers. Its number is the one after the last of enum class Activation.
constexpr Activation kLeakyRelu{5};
constexpr double kLeakySlope = 0.01;

// Divides n, 0 <= n < 2^31, by a number that a launch has, in an eighth of a division's
// instructions (Granlund and Montgomery, 1994). Of a number below 2 the quotient is n.
struct Divisor {
  uint32_t multiplier = 0, shift = 0;

  Divisor() = default;
  explicit Divisor(int64_t by) {
    if (by < 2) return;
    while (int64_t{2} << shift < by) ++shift;
    multiplier = static_cast<uint32_t>(((int64_t{1} << (32 + shift)) + by - 1) / by);
  }
#ifdef __CUDACC__
  __device__ __forceinline__ int quotient(int n) const {
    const int found = static_cast<int>(__umulhi(static_cast<uint32_t>(n), multiplier) >> shift);
    return multiplier == 0 ? n : found;
  }
#endif
};

// One number for each channel, or for each channel of each sample, of x's type or float32: weight,
// bias, shift or scale. It is optional.
struct ChannelNumbers {
  const void* at = nullptr;
  int64_t sample_stride = 0;  // in elements
  int64_t channel_stride = 1;
  DataType type = DataType::kFloat32;
  bool is_dense = false;  // the first sample's are side by side, from a multiple of 16 bytes on
};

// The gradient of one: contiguous, (channels) or (samples, channels). It is optional.
struct ChannelGradient {
  void* at = nullptr;
  DataType type = DataType::kFloat32;
};

// y = activation((x - mean) rstd f + o) scale, where f = weight (1 + scale_by) and
// o = bias (1 + scale_by) + shift.
struct GroupParams {
  const void* x = nullptr;
  void* y = nullptr;         // in backward: dx
  const void* dy = nullptr;  // backward
  ChannelNumbers weight, bias, shift, scale_by;

  // (samples, groups), of the arithmetic's type: outputs of forward, inputs of backward.
  void* mean = nullptr;
  void* rstd = nullptr;

  int64_t samples = 0;
  int64_t positions = 0;
  int32_t channels = 0;
  int32_t groups = 0;
  int32_t channels_of_group = 0;
  Divisor by_groups, by_channels_of_group;
  Scalar inverse_count;  // of the elements of a group
  Scalar eps;
  bool activates = false;  // there is an activation, or a scale that is not 1
  Activation activation = Activation::kNone;
  Scalar scale;

  ChannelGradient dweight, dbias, dshift, dscale_by;  // backward

  void* workspace = nullptr;
};

}  // namespace fused_layernorm

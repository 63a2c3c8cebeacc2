// What is fused behind the normalization: activation(z) * scale, and its derivative.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "layernorm.h"

namespace fused_layernorm {

// The standard normal distribution: cdf = Phi(z), pdf = phi(z).
template <typename Acc>
struct Normal {
  Acc cdf, pdf;
};

// kCoarse: for results that are rounded to half precision; within 4e-7 of Phi and, down to
// z = -5, within a relative 2e-6 (fitted to erfc(u) = exp(-u^2) * P(1 / (1 + 0.36 u)), the form of
// Abramowitz and Stegun 7.1.26). A third of erff's instructions: bfloat16 rows leave 28 an element.
template <bool kCoarse, typename Acc>
__device__ __forceinline__ Normal<Acc> normal(Acc z) {
  constexpr double kRootHalf = 0.70710678118654752440;
  constexpr double kInverseRootTwoPi = 0.39894228040143267794;
  if constexpr (std::is_same_v<Acc, double>) {
    return {0.5 * erfc(-z * kRootHalf), kInverseRootTwoPi * exp(-0.5 * z * z)};
  } else if constexpr (!kCoarse) {
    return {0.5f * (1.0f + erff(z * static_cast<float>(kRootHalf))),
            static_cast<float>(kInverseRootTwoPi) * expf(-0.5f * z * z)};
  } else {
    const float u = fabsf(z) * static_cast<float>(kRootHalf);
    const float e = __expf(-u * u);
    const float k = __fdividef(1.0f, fmaf(0.36f, u, 1.0f));
    float p = -0.16629869f;
    p = fmaf(p, k, 0.57674360f);
    p = fmaf(p, k, -0.37934837f);
    p = fmaf(p, k, 0.45156258f);
    p = fmaf(p, k, 0.09572285f);
    p = fmaf(p, k, 0.21973722f);
    p = fmaf(p, k, 0.20188116f);
    const float tail = 0.5f * e * p * k;
    return {z < 0.0f ? tail : 1.0f - tail, static_cast<float>(kInverseRootTwoPi) * e};
  }
}

template <bool kCoarse, typename Acc>
__device__ __forceinline__ Acc sigmoid(Acc z) {
  if constexpr (kCoarse) {
    return __fdividef(1.0f, 1.0f + __expf(-z));
  } else {
    return Acc(1) / (Acc(1) + exp(-z));
  }
}

// sigmoid(z) and its derivative, neither by a difference of nearly equal numbers.
template <typename Acc>
struct Sigmoid {
  Acc value, slope;
};

template <bool kCoarse, typename Acc>
__device__ __forceinline__ Sigmoid<Acc> sigmoid_with_slope(Acc z) {
  Acc e, r;
  if constexpr (kCoarse) {
    e = __expf(-fabsf(z));
    r = __fdividef(1.0f, 1.0f + e);
  } else {
    e = exp(z < Acc(0) ? z : -z);
    r = Acc(1) / (Acc(1) + e);
  }
  return {z < Acc(0) ? e * r : r, e * r * r};
}

// gelu_tanh(z) = z * (1 + tanh(t)) / 2 = z * sigmoid(2t), t = sqrt(2/pi) (z + 0.044715 z^3).
constexpr double kTwoRootTwoOverPi = 1.59576912160573071176;
constexpr double kGeluTanhCubic = 0.044715;

template <typename Y, typename Acc>
constexpr bool kCoarseFor = sizeof(Y) < sizeof(float) && std::is_same_v<Acc, float>;

// values = activation(values) * scale. The switch stands outside the loop: the branch is uniform
// over the grid, one a vector.
template <typename Y, typename Acc, int kWidth>
__device__ __forceinline__ void activate(Acc (&values)[kWidth], Activation activation, Acc scale) {
  switch (activation) {
    case Activation::kNone:
      break;
    case Activation::kGelu:
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        values[j] *= normal<kCoarseFor<Y, Acc>>(values[j]).cdf;
      }
      break;
    case Activation::kGeluTanh:
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const Acc z = values[j];
        const Acc t = Acc(kTwoRootTwoOverPi) * (z + Acc(kGeluTanhCubic) * z * z * z);
        values[j] = z * sigmoid<kCoarseFor<Y, Acc>>(t);
      }
      break;
    case Activation::kSilu:
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        values[j] *= sigmoid<kCoarseFor<Y, Acc>>(values[j]);
      }
      break;
    case Activation::kRelu:
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        // Not a maximum: NaN must pass.
        values[j] = values[j] < Acc(0) ? Acc(0) : values[j];
      }
      break;
  }
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    values[j] *= scale;
  }
}

// dz = dy * scale * activation'(z), from z = xhat * weight + bias.
template <typename Y, typename Acc, int kWidth>
__device__ __forceinline__ void activate_backward(Acc (&dy)[kWidth], const Acc (&z)[kWidth],
                                                  Activation activation, Acc scale) {
  switch (activation) {
    case Activation::kNone:
      break;
    case Activation::kGelu:
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const Normal<Acc> n = normal<kCoarseFor<Y, Acc>>(z[j]);
        dy[j] *= n.cdf + z[j] * n.pdf;
      }
      break;
    case Activation::kGeluTanh:
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const Acc z2 = z[j] * z[j];
        const Acc t = Acc(kTwoRootTwoOverPi) * (z[j] + Acc(kGeluTanhCubic) * z2 * z[j]);
        const Acc slope = Acc(kTwoRootTwoOverPi) * (Acc(1) + Acc(3 * kGeluTanhCubic) * z2);
        const Sigmoid<Acc> s = sigmoid_with_slope<kCoarseFor<Y, Acc>>(t);
        dy[j] *= s.value + z[j] * s.slope * slope;
      }
      break;
    case Activation::kSilu:
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const Sigmoid<Acc> s = sigmoid_with_slope<kCoarseFor<Y, Acc>>(z[j]);
        dy[j] *= s.value + z[j] * s.slope;
      }
      break;
    case Activation::kRelu:
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        dy[j] = z[j] <= Acc(0) ? Acc(0) : dy[j];
      }
      break;
  }
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    dy[j] *= scale;
  }
}

}  // namespace fused_layernorm

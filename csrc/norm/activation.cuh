// SPDX-License-Identifier: Apache-2.0
// What is fused after the affine map: activation(z) * scale, and its derivative.
//
// float32 arithmetic comes in two grades. The coarse grade serves where y is rounded to half
// precision. It takes the fewest instructions, because a bfloat16 element has time for only about
// 28 in all. The fine grade serves where y is float32, and its errors are like those of PyTorch's
// own float32.
//
// "Instructions: n, m" gives the instructions of an element on sm_90, in the coarse and in the fine
// grade, with the multiplication by scale. Except in relu, one of them is EX2, and except in relu
// and gelu another is RCP; these two run on 16 lanes a clock. The errors stated are those of the
// approximation; EX2 (2 ulp), RCP (1 ulp) and the roundings of float32 add theirs.
//
// The float64 functions are called, not inlined into every kernel: float64 is used for its digits,
// not its speed, and the code is large.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "base/params.h"

namespace fused_layernorm {

template <typename Y, typename Acc>
constexpr bool kCoarseFor = sizeof(Y) < sizeof(float) && std::is_same_v<Acc, float>;

constexpr double kRootHalf = 0.70710678118654752440;
constexpr double kInverseRootTwoPi = 0.39894228040143267794;
constexpr double kLog2E = 1.44269504088896340736;
constexpr double kLn2 = 0.69314718055994530942;

// These take one instruction each. Unlike exp2f() and a division, they take no care at the ends of
// the range: subnormal arguments and results count as 0, and results that are too great are Inf.
FUSED_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

FUSED_DEVICE float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The coefficients begin with that of the highest power.
template <int kCount>
FUSED_DEVICE float polynomial(float x, const float (&coefficients)[kCount]) {
  float p = coefficients[0];
  FUSED_UNROLL for (int k = 1; k < kCount; ++k) p = fmaf(p, x, coefficients[k]);
  return p;
}

// 2 gelu(z): the factor 1/2 is multiplied into scale. Instructions: 11, 13.
//
// 2 z Phi(z) = z + |z| - |z| 2^P(|z|) with 2^P(u) = 2 Phi(-u): one EX2, and no difference of nearly
// equal numbers for either sign of z. The fit of P minimizes the greatest error of gelu(-u). In the
// coarse grade this is 1.8e-6 of gelu(-u) or 5e-9, whichever is more. In the fine grade P(0) = 0,
// so that the errors of small z are no greater than those of others (beyond float32's roundings,
// normally distributed z of deviation 1, 0.1 and 0.02 have 0.14, 0.7 and 0.9 of PyTorch's errors).
// Beyond the range of the fit P goes on falling, and the result goes to 0.
//
// |z| is bounded because for z = Inf the product Inf * 0 would be NaN. z + |z| is NaN for NaN and
// for -Inf, as PyTorch's gelu is.
template <typename Y>
FUSED_DEVICE float twice_gelu(float z) {
  // The coarse P is lowest, at -100, where u is 13.3.
  const float u = fminf(fabsf(z), kCoarseFor<Y, float> ? 13.3f : 20.0f);
  float p;
  if constexpr (kCoarseFor<Y, float>) {
    p = polynomial(u, {3.49846741e-05f, -7.79888593e-04f, 8.0879759e-03f, -5.33625595e-02f,
                       -4.58869427e-01f, -1.1511451f, -1.06364462e-06f});
  } else {
    p = polynomial(u, {-1.7658374e-06f, 2.64817172e-05f, -1.24635917e-04f, -2.85530201e-04f,
                       7.25575676e-03f, -5.26259579e-02f, -4.59167778e-01f, -1.15110934f, 0.0f});
  }
  return fmaf(-u, exp2_approx(p), z + fabsf(z));
}

template <typename Y>
__device__ __noinline__ double twice_gelu(double z) {
  return z * erfc(-z * kRootHalf);
}

// dy * gelu'(z). Instructions: 17.
//
// gelu'(-u) = Phi(-u) - u phi(u) = 2^(u (a + b u)) G(u), where G is a polynomial. a and b are
// fitted together with the coefficients of G, which saves four powers of G. gelu'(u) is
// 1 - gelu'(-u). The greatest error is 7.5e-9, and down to z = -8 it is at most 1.5 percent of
// gelu'. There is no coarse grade for a half-precision y: the gradient of a float32 weight shows an
// error of 4e-8 where many z are near one value.
template <typename Y>
FUSED_DEVICE float gelu_gradient(float dy, float z) {
  const float u = fabsf(z);
  const float e = exp2_approx(u * fmaf(-0.687904835f, u, -1.31787086f));
  // u is bounded so that g stays finite, because Inf * 0 is NaN. As g * u could overflow, g is
  // first multiplied by e, which is 0 for great u. The result is NaN only for u = Inf, as in
  // PyTorch.
  const float g = polynomial(fminf(u, 64.0f),
                             {-1.72557091e-04f, -5.76253457e-04f, -9.5763607e-03f, -3.5259936e-02f,
                              -1.66030943e-01f, -2.81837791e-01f, -3.4114489e-01f});
  const float d = fmaf(e * g, u, 0.5f * e);
  return dy * (z < 0.0f ? d : 1.0f - d);
}

template <typename Y>
__device__ __noinline__ double gelu_gradient(double dy, double z) {
  return dy * (0.5 * erfc(-z * kRootHalf) + z * (kInverseRootTwoPi * exp(-0.5 * z * z)));
}

// The logistic function s(x) = 1 / (1 + exp(-x)), and 1 - s(x), computed without a subtraction.
template <typename Acc>
struct Logistic {
  Acc value, complement;
};

// Both are computed from e = exp(-x). For e = Inf, e * s is NaN, and __saturatef() makes it 0. The
// right complement would be 1, but beside a value of 0 a complement of 0 is as good.
FUSED_DEVICE Logistic<float> coarse_logistic(float e) {
  const float s = reciprocal_approx(1.0f + e);
  return {s, __saturatef(e * s)};
}

// One step of Newton's method removes RCP's error. e must be finite; the value is 0 from 2^126 on.
FUSED_DEVICE Logistic<float> fine_logistic(float e) {
  const float d = 1.0f + e;
  const float r = reciprocal_approx(d);
  const float s = fmaf(fmaf(-d, r, 1.0f), r, r);
  return {s, e * s};
}

template <typename Y>
FUSED_DEVICE Logistic<float> logistic(float x) {
  constexpr float kMinusLog2E = -kLog2E, kMinusLn2 = -kLn2;
  if constexpr (kCoarseFor<Y, float>) {
    return coarse_logistic(exp2_approx(x * kMinusLog2E));
  } else {
    // The rounding of the product would cost e up to 6e-8 |x| of itself. A correction puts this
    // back. Because the product is rounded down, a negative correction is too small to matter, and
    // the correction can be saturated, which also makes its NaN for x = Inf 0.
    const float w = fminf(__fmul_rd(x, kMinusLog2E), 126.0f);
    const float e = exp2_approx(w);
    return fine_logistic(fmaf(e, __saturatef(fmaf(w, kMinusLn2, -x)), e));
  }
}

template <typename Y>
__device__ __noinline__ Logistic<double> logistic(double x) {
  const double e = exp(-fabs(x));
  const double r = 1.0 / (1.0 + e);
  return x < 0.0 ? Logistic<double>{e * r, r} : Logistic<double>{r, e * r};
}

// silu(z) = z s(z). Instructions: 6, 11. The coarse relative error of exp(-z) is 6e-8 |z|.
template <typename Y, typename Acc>
FUSED_DEVICE Acc silu(Acc z) {
  return z * logistic<Y>(z).value;
}

// dy * silu'(z). Instructions: 9, 14.
template <typename Y, typename Acc>
FUSED_DEVICE Acc silu_gradient(Acc dy, Acc z) {
  const Logistic<Acc> s = logistic<Y>(z);
  return dy * s.value * (Acc(1) + s.complement * z);
}

// gelu_tanh(z) = z (1 + tanh(x / 2)) / 2 = z s(x), x = z (a + b z^2)
constexpr double kGeluTanhA = 1.59576912160573071176;  // 2 sqrt(2 / pi)
constexpr double kGeluTanhB = 0.044715 * kGeluTanhA;

struct GeluTanh {
  float w;  // -x log2(e)
  Logistic<float> s;
};

// tanh.approx would save three instructions, but its error of 2^-11 is too great.
template <typename Y>
FUSED_DEVICE GeluTanh gelu_tanh_parts(float z) {
  constexpr float kA = -kLog2E * kGeluTanhA, kB = -kLog2E * kGeluTanhB;
  const float w = z * fmaf(z * z, kB, kA);
  if constexpr (kCoarseFor<Y, float>) {
    return {w, coarse_logistic(exp2_approx(w))};
  } else {
    return {w, fine_logistic(exp2_approx(fminf(w, 127.5f)))};
  }
}

// Instructions: 8, 11. The relative error of exp(-x) is at most 2e-7 |x|.
template <typename Y>
FUSED_DEVICE float gelu_tanh(float z) {
  return z * gelu_tanh_parts<Y>(z).s.value;
}

template <typename Y>
__device__ __noinline__ double gelu_tanh(double z) {
  return z * logistic<Y>(z * (kGeluTanhA + kGeluTanhB * z * z)).value;
}

// The factor that gelu_tanh_gradient() leaves out. It is multiplied into scale.
template <typename Acc>
constexpr Acc kGeluTanhGradientFactor = std::is_same_v<Acc, float> ? Acc(2 * kGeluTanhA) : Acc(1);

// dy * gelu_tanh'(z) / kGeluTanhGradientFactor. Instructions: 12, 16.
//
// gelu_tanh'(z) = s (1 + (1 - s) z x'), where z x' = z (a + 3 b z^2) = 3 x - 2 a z. The coarse
// grade computes z x' from x, with three times the error of x; divided by 2 a, this takes one fmaf.
template <typename Y>
FUSED_DEVICE float gelu_tanh_gradient(float dy, float z) {
  constexpr float kOne = 1 / (2 * kGeluTanhA);
  constexpr float kX = -3 * kLn2 / (2 * kGeluTanhA), kB = 3 * kGeluTanhB / (2 * kGeluTanhA);
  const GeluTanh parts = gelu_tanh_parts<Y>(z);
  const float slope = kCoarseFor<Y, float> ? fmaf(parts.w, kX, -z) : z * fmaf(z * z, kB, 0.5f);
  return dy * parts.s.value * fmaf(parts.s.complement, slope, kOne);
}

template <typename Y>
__device__ __noinline__ double gelu_tanh_gradient(double dy, double z) {
  const double z2 = z * z;
  const Logistic<double> s = logistic<Y>(z * (kGeluTanhA + kGeluTanhB * z2));
  return dy * s.value * (1.0 + s.complement * z * (kGeluTanhA + 3 * kGeluTanhB * z2));
}

// A NaN stays NaN. Instructions: 2.
FUSED_DEVICE float relu(float z) {
#if __CUDA_ARCH__ >= 800
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(z));
  return y;
#else
  return z < 0.0f ? 0.0f : z;
#endif
}

FUSED_DEVICE double relu(double z) { return z < 0.0 ? 0.0 : z; }

// values = activation(values) * scale. The switch stands outside the loop: there is one branch a
// vector, uniform over the grid. GELU is tested in front of the switch, and the tested value is
// hidden from the compiler, which would otherwise make one table of jumps of the test and the
// switch: nine instructions a vector, where a bfloat16 element has some 28 in all.
template <typename Y, typename Acc, int kWidth>
FUSED_DEVICE void activate(Acc (&values)[kWidth], Activation activation, Acc scale) {
  const auto each = [&](Acc factor, const auto& f) {
    FUSED_UNROLL for (int j = 0; j < kWidth; ++j) values[j] = f(values[j]) * factor;
  };
  auto hidden = static_cast<int32_t>(activation);
  asm("" : "+r"(hidden));
  if (hidden == static_cast<int32_t>(Activation::kGelu)) {
    return each(Acc(0.5) * scale, [](Acc z) { return twice_gelu<Y>(z); });
  }
  switch (activation) {
    case Activation::kGelu:  // It has returned above.
    case Activation::kNone:
      return each(scale, [](Acc z) { return z; });
    case Activation::kGeluTanh:
      return each(scale, [](Acc z) { return gelu_tanh<Y>(z); });
    case Activation::kSilu:
      return each(scale, [](Acc z) { return silu<Y>(z); });
    case Activation::kRelu:
      return each(scale, [](Acc z) { return relu(z); });
  }
}

// dy = dy * scale * activation'(z), from z = xhat * weight + bias.
template <typename Y, typename Acc, int kWidth>
FUSED_DEVICE void activate_backward(Acc (&dy)[kWidth], const Acc (&z)[kWidth],
                                    Activation activation, Acc scale) {
  const auto each = [&](Acc factor, const auto& f) {
    FUSED_UNROLL for (int j = 0; j < kWidth; ++j) dy[j] = f(dy[j] * factor, z[j]);
  };
  switch (activation) {
    case Activation::kNone:
      return each(scale, [](Acc g, Acc) { return g; });
    case Activation::kGelu:
      return each(scale, [](Acc g, Acc z) { return gelu_gradient<Y>(g, z); });
    case Activation::kGeluTanh:
      return each(kGeluTanhGradientFactor<Acc> * scale,
                  [](Acc g, Acc z) { return gelu_tanh_gradient<Y>(g, z); });
    case Activation::kSilu:
      return each(scale, [](Acc g, Acc z) { return silu_gradient<Y>(g, z); });
    case Activation::kRelu:
      return each(scale, [](Acc g, Acc z) { return z <= Acc(0) ? Acc(0) : g; });
  }
}

}  // namespace fused_layernorm

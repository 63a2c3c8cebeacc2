// SPDX-License-Identifier: Apache-2.0
// The statistic of a row: what is measured of x, how the measures of a row's parts combine, the
// normalized xhat, and the gradient that goes back through it.
//
// A statistic is a struct of static functions. They are given vectors of elements and a function
// that sums over the threads on the row; they do not depend on which threads these are.
#pragma once

#include "base/params.h"
#include "device/reduce.cuh"
#include "device/vec.cuh"

namespace fused_layernorm {

FUSED_DEVICE float reciprocal_sqrt(float v) { return rsqrtf(v); }
FUSED_DEVICE double reciprocal_sqrt(double v) { return rsqrt(v); }

// A product that the compiler does not fuse with a sum.
FUSED_DEVICE float rounded_product(float a, float b) { return __fmul_rn(a, b); }
FUSED_DEVICE double rounded_product(double a, double b) { return __dmul_rn(a, b); }

// The sum of values in a tree: chains are short, and it is exact where all values are equal.
template <typename Acc, int kWidth>
FUSED_DEVICE Acc tree_sum(const Acc (&values)[kWidth]) {
  Acc sums[kWidth];
  FUSED_UNROLL for (int j = 0; j < kWidth; ++j) sums[j] = values[j];
  FUSED_UNROLL for (int half = kWidth / 2; half > 0; half /= 2) {
    FUSED_UNROLL for (int j = 0; j < half; ++j) sums[j] += sums[j + half];
  }
  return sums[0];
}

// The sum over a thread's vectors, in parts of `kColumnSumGroup` vectors. `add_up(from, total)`
// adds up the values of the vectors from number `from` on, column by column.
template <int kColumnSumGroup, int kVecs, int kWidth, typename Acc>
FUSED_DEVICE Acc sum_of_parts(const auto& add_up) {
  static_assert(kVecs % kColumnSumGroup == 0);
  Acc sum;
  FUSED_UNROLL for (int from = 0; from < kVecs; from += kColumnSumGroup) {
    Acc total[kWidth];
    add_up(from, total);
    const Acc part = tree_sum(total);
    sum = from == 0 ? part : sum + part;
  }
  return sum;
}

// 1 / n to twice the digits of float32. A mean is the pivot plus sum * (1 / n); where these two
// terms nearly cancel, the rounding of 1 / n would be magnified.
template <typename Acc>
struct Reciprocal {
  Acc rounded, rest;

  FUSED_DEVICE Reciprocal(Acc r, Acc its_rest) : rounded(r), rest(its_rest) {}
  FUSED_DEVICE explicit Reciprocal(int n)
      : rounded(Acc(1) / Acc(n)), rest(fma(-rounded, Acc(n), Acc(1)) * rounded) {}
  FUSED_DEVICE explicit Reciprocal(const Scalar& inverse)
      : rounded(inverse.as<Acc>()), rest(sizeof(Acc) == sizeof(float) ? inverse.rest : 0) {}

  FUSED_DEVICE Acc mean(Acc pivot, Acc sum) const {
    return fma(sum, rest, fma(sum, rounded, pivot));
  }
};

// The mean of some columns, and the sum of their squared deviations from it.
template <typename Acc>
struct Moments {
  Acc mean, m2;
};

// Mean and variance, by two passes over the elements: the mean first, then the deviations from it.
// RMSNorm (`is_rms`) is the same norm with a mean that counts as zero: its variance is then the
// mean of the squares. The mean is selected, not multiplied by zero, because it may be Inf.
struct MeanAndVariance {
  // The pivot, which is subtracted from elements before they are summed up. Where the first one is
  // large beside its difference to the second, the mean is large and the pivot is the first
  // element: the sum stays of the order of the deviations, and is zero for a constant row.
  // Otherwise the pivot is zero: subtracting a first element of the size of the deviations would
  // only make the sum larger, by that element times the number of columns, and so its rounding
  // error (float32, 1024 columns of mean 0 and deviation 1, rms errors: mean 4.0e-8 and y 6.9e-8
  // with the first element, 1.0e-8 and 5.7e-8 by this rule). In half precision, where a thread's
  // sum is exact either way, it is always the first.
  template <typename X, typename Acc>
  static FUSED_DEVICE Acc pivot(Pair<Acc> first) {
    constexpr Acc kLarge = 4;
    const bool is_large = fabs(first.first) > kLarge * fabs(first.first - first.second);
    return sizeof(X) == 2 || is_large ? first.first : Acc(0);
  }

  // A thread's part of the two sums from which moments are computed: of x - pivot, and of the
  // squared deviations from the mean. Every `kColumnSumGroup` vectors are summed up by themselves,
  // and these sums are then added in order.
  template <int kColumnSumGroup, typename X, int kWidth, int kVecs, typename Acc>
  static FUSED_DEVICE Acc sum_from(const Vec<X, kWidth> (&x)[kVecs], const auto& share, Acc pivot) {
    // The sum of a few half-precision values is exact in float32, so the pivots of all these values
    // are subtracted at once. This comes first, because the pivot is loaded first.
    constexpr bool kExact = sizeof(X) == 2;
    return sum_of_parts<kColumnSumGroup, kVecs, kWidth, Acc>([&](int from, Acc(&total)[kWidth]) {
      Acc count = 0;
      FUSED_UNROLL for (int k = from; k < from + kColumnSumGroup; ++k) {
        count += share.template count<Acc, kWidth>(k);
      }
      FUSED_UNROLL for (int k = from; k < from + kColumnSumGroup; ++k) {
        Acc values[kWidth];
        unpack(values, x[k]);
        if (kExact && k == from) values[0] -= count * pivot;
        FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
          const Acc subtracted = share.has_column(k, j) ? pivot : Acc(0);
          const Acc v = kExact ? values[j] : values[j] - subtracted;
          total[j] = k == from ? v : total[j] + v;
        }
      }
    });
  }

  template <int kColumnSumGroup, typename X, int kWidth, int kVecs, typename Acc>
  static FUSED_DEVICE Acc squared_deviations(const Vec<X, kWidth> (&x)[kVecs], const auto& share,
                                             Acc mean) {
    if constexpr (kColumnSumGroup == 1 && kWidth > 1) {
      return squared_deviations_by_vectors(x, share, mean);
    }
    return sum_of_parts<kColumnSumGroup, kVecs, kWidth, Acc>([&](int from, Acc(&total)[kWidth]) {
      FUSED_UNROLL for (int k = from; k < from + kColumnSumGroup; ++k) {
        Acc values[kWidth];
        unpack(values, x[k]);
        FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
          const Acc subtracted = share.has_column(k, j) ? mean : Acc(0);
          const Acc d = values[j] - subtracted;
          total[j] = k == from ? d * d : total[j] + d * d;
        }
      }
    });
  }

  // The same, each vector by itself. Several strategies sum up a row in this way and must get the
  // same bits, so it is written out which of two squares is rounded before they are added: left to
  // itself, the compiler chooses one or the other.
  template <typename X, int kWidth, int kVecs, typename Acc>
  static FUSED_DEVICE Acc squared_deviations_by_vectors(const Vec<X, kWidth> (&x)[kVecs],
                                                        const auto& share, Acc mean) {
    constexpr int kHalf = kWidth / 2;
    return sum_of_parts<1, kVecs, kHalf, Acc>([&](int k, Acc(&squares)[kHalf]) {
      Acc values[kWidth];
      unpack(values, x[k]);
      FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
        values[j] -= share.has_column(k, j) ? mean : Acc(0);
      }
      FUSED_UNROLL for (int j = 0; j < kHalf; ++j) {
        const Acc low = values[j], high = values[j + kHalf];
        squares[j] = fma(high, high, rounded_product(low, low));
      }
    });
  }

  // The mean of some columns, from the sum of their deviations from the pivot.
  template <typename Acc>
  static FUSED_DEVICE Acc mean_of(bool is_rms, const Reciprocal<Acc>& inverse, Acc pivot,
                                  Acc total) {
    const Acc mean = inverse.mean(pivot, total);
    return is_rms ? Acc(0) : mean;
  }

  // The moments of some columns, of which each thread has the vectors `x` in registers.
  //   is_rms   the mean counts as zero
  //   pivot    the pivot of these columns
  //   inverse  inverse(): the Reciprocal of the number of columns
  //   sum      sum(value, n): the sum over all threads that work on these columns, for n = 0 and 1
  template <int kColumnSumGroup, typename X, int kWidth, int kVecs, typename Acc>
  static FUSED_DEVICE Moments<Acc> measure(bool is_rms, const Vec<X, kWidth> (&x)[kVecs],
                                           const auto& share, Acc pivot, const auto& inverse,
                                           const auto& sum) {
    const Acc total = sum(sum_from<kColumnSumGroup>(x, share, pivot), 0);
    const Acc mean = mean_of(is_rms, inverse(), pivot, total);
    return {mean, sum(squared_deviations<kColumnSumGroup>(x, share, mean), 1)};
  }

  // The moments of a row from those of its parts, by one warp; every lane gets them. `each(f)`
  // calls f(columns, moments) for each of a lane's parts; `pivot` is the mean of one part. (Chan,
  // Golub and LeVeque, 1979, for many parts at once.)
  template <typename Acc>
  static FUSED_DEVICE Moments<Acc> combine(const auto& each, Acc pivot, Acc inverse_cols) {
    Acc sum = 0;
    each([&](Acc cols, const auto& part) { sum += cols * (part.first - pivot); });
    const Acc mean = pivot + warp_sum(sum) * inverse_cols;
    Acc m2 = 0;
    each([&](Acc cols, const auto& part) {
      const Acc delta = part.first - mean;
      m2 += part.second + cols * delta * delta;
    });
    return {mean, warp_sum(m2)};
  }

  template <typename Acc>
  static FUSED_DEVICE Acc rstd(Acc m2, Acc inverse_cols, Acc eps) {
    return reciprocal_sqrt(m2 * inverse_cols + eps);
  }

  // xhat, from x.
  template <typename Acc>
  static FUSED_DEVICE Acc normalize(Acc x, Acc mean, Acc rstd) {
    return (x - mean) * rstd;
  }

  // Adds to the two sums over a row that dx needs, of g and of g * xhat: each in two chains of
  // additions, of the even and of the odd columns, which run side by side.
  template <typename Acc, int kWidth>
  static FUSED_DEVICE void add_sums(Pair<Acc>& sums, const Acc (&xhat)[kWidth],
                                    const Acc (&g)[kWidth]) {
    Pair<Acc> part;
    FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
      Pair<Acc>& chain = j % 2 == 0 ? sums : part;
      chain.first += g[j];
      chain.second += g[j] * xhat[j];
    }
    if constexpr (kWidth > 1) sums += part;
  }

  // dx = rstd * (g - mean(g) - xhat * mean(g * xhat)); docs/backward.md derives it.
  template <typename Acc>
  static FUSED_DEVICE Acc dx(Acc xhat, Acc g, Pair<Acc> means, Acc rstd) {
    return (g - means.first - xhat * means.second) * rstd;
  }
};

// Stores the statistics of a row that backward reads, if they are wanted.
template <typename Acc>
FUSED_DEVICE void store_statistics(const ForwardParams& p, int64_t row, Acc mean, Acc rstd) {
  if (p.rstd != nullptr) {
    if (!p.is_rms) static_cast<Acc*>(p.mean)[row] = mean;
    static_cast<Acc*>(p.rstd)[row] = rstd;
  }
}

// The statistics of a row as forward stored them: mean and rstd.
template <typename Acc>
FUSED_DEVICE Pair<Acc> load_statistics(const BackwardParams& p, int64_t row) {
  return {p.is_rms ? Acc(0) : static_cast<const Acc*>(p.mean)[row],
          static_cast<const Acc*>(p.rstd)[row]};
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// Backward of one row: the gradients at a vector of its columns, and dx.
#pragma once

#include "norm/norm.cuh"

namespace fused_layernorm {

// The weight, or combined weight, and the bias at one vector of columns.
template <typename Weight, typename W, int kWidth>
struct VectorParameters {
  Vec<Weight, kWidth> weight;
  Vec<W, kWidth> bias;
};

// The gradients at `kWidth` columns of one row: xhat; dz, the gradient at the output of the affine
// map z = xhat * weight + bias; and g = dz * weight, the gradient at xhat.
template <typename N, int kWidth>
struct Gradients {
  using Acc = typename N::Acc;
  Acc xhat[kWidth], dz[kWidth], g[kWidth];

  // x, dy, weight and bias are of the types X, Y and W, or of the arithmetic's. With a modulation
  // `weight` is that of combined_weight(), and dz is dy.
  template <typename X, typename Y, typename Weight, typename Bias>
  FUSED_DEVICE Gradients(const BackwardParams& p, const Vec<X, kWidth>& x, const Vec<Y, kWidth>& dy,
                         Acc mean, Acc rstd, const Vec<Weight, kWidth>& weight,
                         const Vec<Bias, kWidth>& bias) {
    Acc w[kWidth];
    unpack(w, weight);
    unpack(xhat, x);
    unpack(dz, dy);
    FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
      xhat[j] = N::Statistic::normalize(xhat[j], mean, rstd);
    }
    if constexpr (N::Epilogue::kMayActivate) {
      if (p.has_epilogue) {
        FUSED_UNROLL for (int j = 0; j < kWidth; ++j) w[j] += p.weight_offset.as<Acc>();
      }
      if (p.activates) {
        Acc z[kWidth], b[kWidth];
        unpack(b, bias);
        FUSED_UNROLL for (int j = 0; j < kWidth; ++j) z[j] = N::Affine::apply(xhat[j], w[j], b[j]);
        activate_backward<typename N::Y>(dz, z, p.activation, p.scale.as<Acc>());
      }
    }
    // The product is rounded, so that dx and the mean of g use the same g: the dx of a row of one
    // column is then zero.
    FUSED_UNROLL for (int j = 0; j < kWidth; ++j) g[j] = rounded_product(dz[j], w[j]);
  }

  // Adds these columns' part of the two sums over the row that dx needs.
  FUSED_DEVICE void add_sums(Pair<Acc>& sums) const { N::Statistic::add_sums(sums, xhat, g); }

  FUSED_DEVICE void add_dparams(Acc (&dweight)[kWidth], Acc (&dbias)[kWidth]) const {
    FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
      dweight[j] += dz[j] * xhat[j];
      dbias[j] += dz[j];
    }
  }
};

// Where the dx of a row, from `first_col` on, goes, and the gradient that may be added to it.
template <typename N>
struct DxRow {
  using X = typename N::X;
  using Acc = typename N::Acc;
  static constexpr bool kMayAdd = N::Prologue::kMayAdd;
  X* dx;
  const X* dresidual;

  FUSED_DEVICE DxRow(const BackwardParams& p, int64_t row, int first_col)
      : dx(static_cast<X*>(p.dx) + row * p.cols + first_col), dresidual(nullptr) {
    if (kMayAdd && p.dresidual != nullptr) {
      dresidual = static_cast<const X*>(p.dresidual) + p.dresidual_rows(row) + first_col;
    }
  }

  // What is added to dx at `kWidth` columns: without a gradient negative zeros, which change no
  // value.
  template <int kWidth>
  FUSED_DEVICE Vec<X, kWidth> added(int col) const {
    if (kMayAdd && dresidual != nullptr)
      return load<Use::kReadOnly, kWidth>(element(dresidual, col));
    return negative_zeros<X, kWidth>();
  }

  // The same at a thread's share of the row, as far as it has vectors.
  template <int kWidth, int kVecs>
  FUSED_DEVICE void load_added(Vec<X, kWidth> (&into)[kVecs], const auto& share) const {
    FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
      if (share.has(k)) into[k] = added<kWidth>(share.vector(k) * kWidth);
    }
  }

  // The dx of `kWidth` columns, not yet rounded. `means` are the two sums divided by the columns.
  template <int kWidth>
  FUSED_DEVICE void compute(Acc (&values)[kWidth], const Acc (&xhat)[kWidth],
                            const Acc (&g)[kWidth], Pair<Acc> means, Acc rstd,
                            const Vec<X, kWidth>& added) const {
    FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
      values[j] = N::Statistic::dx(xhat[j], g[j], means, rstd);
    }
    if constexpr (kMayAdd) {
      Acc more[kWidth];
      unpack(more, added);
      FUSED_UNROLL for (int j = 0; j < kWidth; ++j) values[j] += more[j];
    }
  }

  template <int kWidth>
  FUSED_DEVICE Vec<X, kWidth> vector(const Acc (&xhat)[kWidth], const Acc (&g)[kWidth],
                                     Pair<Acc> means, Acc rstd, const Vec<X, kWidth>& added) const {
    Acc values[kWidth];
    compute(values, xhat, g, means, rstd, added);
    return round_to<X>(values);
  }

  template <int kWidth>
  FUSED_DEVICE void store(int col, const Acc (&xhat)[kWidth], const Acc (&g)[kWidth],
                          Pair<Acc> means, Acc rstd, const Vec<X, kWidth>& added) const {
    store_once<X, kWidth>(element(dx, col), vector(xhat, g, means, rstd, added));
  }
};

// xhat and g of a thread's share of a row, in registers between the row's sums and its dx.
template <typename N, int kWidth, int kVecs>
struct KeptRow {
  typename N::Acc xhat[kVecs][kWidth], g[kVecs][kWidth];

  FUSED_DEVICE void keep(int k, const Gradients<N, kWidth>& gradients) {
    FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
      xhat[k][j] = gradients.xhat[j];
      g[k][j] = gradients.g[j];
    }
  }
  FUSED_DEVICE void store(const DxRow<N>& dx_row, const auto& share, Pair<typename N::Acc> means,
                          typename N::Acc rstd,
                          const Vec<typename N::X, kWidth> (&added)[kVecs]) const {
    FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
      if (share.has(k)) {
        dx_row.store(share.vector(k) * kWidth, xhat[k], g[k], means, rstd, added[k]);
      }
    }
  }
};

// The two means over a row that dx needs, from its sums; RMSNorm's dx has no use for the mean of g,
// which counts as zero. The products are rounded, so that the dx of a row is the same in every
// kernel: the compiler would fuse some of them with the subtractions that use them.
template <typename Acc>
FUSED_DEVICE Pair<Acc> means_of(const BackwardParams& p, Pair<Acc> sums) {
  const Acc inverse_cols = p.inverse_cols.as<Acc>();
  const Acc mean = rounded_product(sums.first, inverse_cols);
  return {p.is_rms ? Acc(0) : mean, rounded_product(sums.second, inverse_cols)};
}

// Whether backward reads x at all: dbias and dshift alone, without an activation, are sums of dy.
FUSED_DEVICE bool needs_x(const BackwardParams& p) {
  return p.dx != nullptr || p.dweight != nullptr || p.dscale != nullptr ||
         p.activation != Activation::kNone;
}

// (weight + offset) * (1 + scale) at `kWidth` columns from `first_col` + `col` on.
template <typename N, int kWidth>
FUSED_DEVICE Vec<typename N::Acc, kWidth> combined_weight(const BackwardParams& p, int col,
                                                          const Vec<typename N::W, kWidth>& scale,
                                                          int first_col = 0) {
  using Acc = typename N::Acc;
  using W = typename N::W;
  Acc values[kWidth];
  unpack(values, scale);
  FUSED_UNROLL for (int j = 0; j < kWidth; ++j) values[j] += Acc(1);
  if (p.weight != nullptr) {
    Acc weight[kWidth];
    unpack(weight, Parameter<W>(p.weight, first_col, Absent::kOnes).template load<kWidth>(col));
    FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
      values[j] *= weight[j] + p.weight_offset.as<Acc>();
    }
  }
  return round_to<Acc>(values);
}

// The modulation's scale for a row, from column `first_col` on.
template <typename N>
FUSED_DEVICE Parameter<typename N::W> scale_of_row(const BackwardParams& p, int64_t row,
                                                   int first_col = 0) {
  return row_parameter<typename N::W>(p.modulation.scale, p.modulation.scale_rows, row, first_col,
                                      Absent::kZeros);
}

// The rows of x and dy, from column `first_col` on.
template <typename N>
FUSED_DEVICE const typename N::X* x_row_of(const BackwardParams& p, int64_t row, int first_col) {
  return static_cast<const typename N::X*>(p.x) + p.x_rows(row) + first_col;
}
template <typename N>
FUSED_DEVICE const typename N::Y* dy_row_of(const BackwardParams& p, int64_t row, int first_col) {
  return static_cast<const typename N::Y*>(p.dy) + p.dy_rows(row) + first_col;
}

// weight and bias from `first_col` on. Only an activation reads bias.
template <typename N>
FUSED_DEVICE ColumnParameters<typename N::W> parameters_of(const BackwardParams& p, int first_col) {
  return {p.weight, N::Epilogue::kMayActivate && p.has_epilogue ? p.bias : nullptr, first_col};
}

}  // namespace fused_layernorm

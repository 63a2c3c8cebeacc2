// What every kernel does with its share of a row, whatever the strategy: load (+ residual) ->
// statistics -> normalize -> epilogue -> store, and the same for the gradients.
#pragma once

#include "fusion.cuh"
#include "layernorm.h"
#include "reduce.cuh"
#include "vec.cuh"

namespace fused_layernorm {

// weight or bias of `kWidth` columns, from global memory; `otherwise` where there is none.
template <int kWidth, typename W, typename Acc>
__device__ __forceinline__ void load_param(Acc (&values)[kWidth], const W* param, int col,
                                           Acc otherwise) {
  if (param != nullptr) {
    unpack(values, load_again<W, kWidth>(param + col));
  } else {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) values[j] = otherwise;
  }
}

// The same from shared memory.
template <int kWidth, typename W, typename Acc>
__device__ __forceinline__ void load_shared_param(Acc (&values)[kWidth], const W* param, int col,
                                                  bool given, Acc otherwise) {
  if (given) {
    unpack(values, load_plain<W, kWidth>(param + col));
  } else {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) values[j] = otherwise;
  }
}

// Sum of a vector's values in a tree: short chains, and exact where all are equal.
template <typename Acc, int kWidth>
__device__ __forceinline__ Acc tree_sum(const Acc (&values)[kWidth]) {
  Acc sums[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) sums[j] = values[j];
#pragma unroll
  for (int half = kWidth / 2; half > 0; half /= 2) {
#pragma unroll
    for (int j = 0; j < half; ++j) sums[j] += sums[j + half];
  }
  return sums[0];
}

// The first element of a row, as RowShare::load gives it.
template <typename T>
__device__ __forceinline__ typename T::Acc first_element(const ForwardParams& p, int64_t row) {
  using X = typename T::X;
  using In = typename T::In;
  if (p.residual == nullptr) {
    return to_acc(static_cast<const X*>(p.input)[p.input_rows(row)]);
  }
  const auto sum = to_acc(static_cast<const In*>(p.input)[p.input_rows(row)]) +
                   to_acc(static_cast<const X*>(p.residual)[p.residual_rows(row)]);
  return to_acc(from_acc<X>(sum));
}

// The vectors `first`, `first + step`, ... (kVecs of them, those below `vectors`) of a row, kept in
// registers in the type they are stored in. Vectors past the row's end read as zero.
template <typename T, int kWidth, int kVecs>
struct RowShare {
  Vec<typename T::X, kWidth> x[kVecs];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) x[k].at[j] = from_acc<typename T::X>(0.0f);
    }
  }

  __device__ __forceinline__ void load(const typename T::X* row, int first, int step,
                                       int vectors) {
    clear();
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      const int v = first + k * step;
      if (v < vectors) x[k] = load_once<typename T::X, kWidth>(row + v * kWidth);
    }
  }

  // x = input, or input + residual rounded to residual's type, which is then stored as well.
  __device__ __forceinline__ void load(const ForwardParams& p, int64_t row, int first, int step,
                                       int vectors) {
    using X = typename T::X;
    using In = typename T::In;
    if (p.residual == nullptr) {
      load(static_cast<const X*>(p.input) + p.input_rows(row), first, step, vectors);
      return;
    }
    clear();
    const In* input = static_cast<const In*>(p.input) + p.input_rows(row);
    const X* residual = static_cast<const X*>(p.residual) + p.residual_rows(row);
    X* residual_out = static_cast<X*>(p.residual_out) + row * p.cols;
    Vec<In, kWidth> added[kVecs];
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      const int v = first + k * step;
      if (v < vectors) {
        x[k] = load_once<X, kWidth>(residual + v * kWidth);
        added[k] = load_once<In, kWidth>(input + v * kWidth);
      }
    }
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      const int v = first + k * step;
      if (v < vectors) {
        typename T::Acc a[kWidth], r[kWidth];
        unpack(a, added[k]);
        unpack(r, x[k]);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) r[j] += a[j];
        x[k] = round_to<X>(r);
        store_once<X, kWidth>(residual_out + v * kWidth, x[k]);
      }
    }
  }

  // Sum of x - pivot. Any element of the row is a good pivot: the sum stays of the order of the
  // deviations, however large the mean, and that of a constant row is exactly zero.
  __device__ __forceinline__ typename T::Acc sum(typename T::Acc pivot, int first, int step,
                                                 int vectors) const {
    typename T::Acc total[kWidth] = {};
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      if (first + k * step < vectors) {
        typename T::Acc values[kWidth];
        unpack(values, x[k]);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) total[j] += values[j] - pivot;
      }
    }
    return tree_sum(total);
  }

  __device__ __forceinline__ typename T::Acc squared_deviations(typename T::Acc mean, int first,
                                                                int step, int vectors) const {
    typename T::Acc total[kWidth] = {};
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      if (first + k * step < vectors) {
        typename T::Acc values[kWidth];
        unpack(values, x[k]);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          const auto d = values[j] - mean;
          total[j] += d * d;
        }
      }
    }
    return tree_sum(total);
  }
};

// y of `kWidth` columns from x, the last step of every forward kernel.
template <typename T, int kWidth, typename Acc>
__device__ __forceinline__ void finish(const ForwardParams& p, typename T::Y* y, int col,
                                       const Vec<typename T::X, kWidth>& x, Acc mean, Acc rstd,
                                       const Acc (&weight)[kWidth], const Acc (&bias)[kWidth]) {
  Acc z[kWidth];
  unpack(z, x);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) z[j] = (z[j] - mean) * rstd * weight[j] + bias[j];
  if (p.has_epilogue) {
    activate<typename T::Y>(z, p.activation, p.scale.as<Acc>());
  }
  store_once<typename T::Y, kWidth>(y + col, round_to<typename T::Y>(z));
}

template <typename T, int kWidth, int kVecs, typename Acc>
__device__ __forceinline__ void finish_row(const ForwardParams& p, int64_t row,
                                           const RowShare<T, kWidth, kVecs>& share, int col,
                                           int first, int step, int vectors, Acc mean, Acc rstd) {
  auto* y = static_cast<typename T::Y*>(p.y) + row * p.cols;
  const auto* weight = static_cast<const typename T::W*>(p.weight);
  const auto* bias = static_cast<const typename T::W*>(p.bias);
#pragma unroll
  for (int k = 0; k < kVecs; ++k) {
    const int v = first + k * step;
    if (v < vectors) {
      Acc w[kWidth], b[kWidth];
      load_param(w, weight, col + v * kWidth, Acc(1));
      load_param(b, bias, col + v * kWidth, Acc(0));
      finish<T, kWidth>(p, y, col + v * kWidth, share.x[k], mean, rstd, w, b);
    }
  }
}

template <typename Acc>
__device__ __forceinline__ void store_statistics(const ForwardParams& p, int64_t row, Acc mean,
                                                 Acc rstd) {
  if (p.mean != nullptr) {
    static_cast<Acc*>(p.mean)[row] = mean;
    static_cast<Acc*>(p.rstd)[row] = rstd;
  }
}

// The gradients at `kWidth` columns of one row: xhat; dz, the gradient at the affine output
// z = xhat * weight + bias (dy itself without activation and scale); and g = dz * weight.
template <typename T, int kWidth>
struct Gradients {
  using Acc = typename T::Acc;
  Acc xhat[kWidth], dz[kWidth], g[kWidth];

  __device__ __forceinline__ Gradients(const BackwardParams& p,
                                       const Vec<typename T::X, kWidth>& x,
                                       const Vec<typename T::Y, kWidth>& dy, Acc mean, Acc rstd,
                                       const Acc (&weight)[kWidth], const Acc (&bias)[kWidth]) {
    unpack(xhat, x);
    unpack(dz, dy);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) xhat[j] = (xhat[j] - mean) * rstd;
    if (p.has_epilogue) {
      Acc z[kWidth];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) z[j] = xhat[j] * weight[j] + bias[j];
      activate_backward<typename T::Y>(dz, z, p.activation, p.scale.as<Acc>());
    }
#pragma unroll
    for (int j = 0; j < kWidth; ++j) g[j] = dz[j] * weight[j];
  }

  // Adds this row's share of the two sums of dx: of g, and of g * xhat.
  __device__ __forceinline__ void add_sums(Pair<Acc>& sums) const {
    Acc second[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) second[j] = g[j] * xhat[j];
    sums += {tree_sum(g), tree_sum(second)};
  }

  __device__ __forceinline__ void add_dparams(Acc (&dweight)[kWidth], Acc (&dbias)[kWidth]) const {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      dweight[j] += dz[j] * xhat[j];
      dbias[j] += dz[j];
    }
  }
};

// dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + dresidual.
template <typename T, int kWidth, typename Acc>
__device__ __forceinline__ void store_dx(const BackwardParams& p, int64_t row, int col,
                                         const Acc (&xhat)[kWidth], const Acc (&g)[kWidth],
                                         Pair<Acc> means, Acc rstd) {
  using X = typename T::X;
  Acc dx[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    dx[j] = (g[j] - means.first - xhat[j] * means.second) * rstd;
  }
  if (p.dresidual != nullptr) {
    const X* dresidual = static_cast<const X*>(p.dresidual) + p.dresidual_rows(row);
    Acc added[kWidth];
    unpack(added, load_once<X, kWidth>(dresidual + col));
#pragma unroll
    for (int j = 0; j < kWidth; ++j) dx[j] += added[j];
  }
  store_once<X, kWidth>(static_cast<X*>(p.dx) + row * p.cols + col, round_to<X>(dx));
}

// Whether backward reads x at all: dbias alone, without activation, is a sum of dy.
__device__ __forceinline__ bool needs_x(const BackwardParams& p) {
  return p.dx != nullptr || p.dweight != nullptr || p.activation != Activation::kNone;
}

// Where the dweight and dbias of one set of rows go: the outputs themselves if there is but one
// set, else its place in the workspace, [dweight, dbias][partials][cols].
template <typename T>
struct ParamGradSink {
  using Acc = typename T::Acc;
  using W = typename T::W;
  W* dweight;
  W* dbias;
  Acc* dweight_partial;
  Acc* dbias_partial;

  __device__ __forceinline__ ParamGradSink(const BackwardParams& p, int64_t offset, int partials,
                                           int partial)
      : dweight(static_cast<W*>(p.dweight)),
        dbias(static_cast<W*>(p.dbias)),
        dweight_partial(nullptr),
        dbias_partial(nullptr) {
    if (partials > 1) {
      auto* sums = reinterpret_cast<Acc*>(static_cast<char*>(p.workspace) + offset);
      dweight_partial = sums + int64_t{partial} * p.cols;
      dbias_partial = sums + (int64_t{partials} + partial) * p.cols;
    }
  }

  __device__ __forceinline__ bool wanted() const { return dweight || dbias; }

  template <int kWidth>
  __device__ __forceinline__ void store(int col, const Acc (&dw)[kWidth],
                                        const Acc (&db)[kWidth]) const {
    if (dweight_partial != nullptr) {
      store_once<Acc, kWidth>(dweight_partial + col, round_to<Acc>(dw));
      store_once<Acc, kWidth>(dbias_partial + col, round_to<Acc>(db));
      return;
    }
    if (dweight != nullptr) store_once<W, kWidth>(dweight + col, round_to<W>(dw));
    if (dbias != nullptr) store_once<W, kWidth>(dbias + col, round_to<W>(db));
  }
};

}  // namespace fused_layernorm

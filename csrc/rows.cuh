// What every kernel does with its share of a row, whatever the strategy: load (+ residual) ->
// statistics -> normalize -> epilogue -> store, and the same for the gradients.
#pragma once

#include "fusion.cuh"
#include "layernorm.h"
#include "reduce.cuh"
#include "vec.cuh"

namespace fused_layernorm {

// An element of a row or slice by a 32-bit offset: cheaper addresses.
template <typename T>
__device__ __forceinline__ T* element(T* base, int index) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return reinterpret_cast<T*>(reinterpret_cast<Byte*>(base) +
                              static_cast<uint32_t>(index) * static_cast<uint32_t>(sizeof(T)));
}

// weight or bias of `kWidth` columns; `otherwise` where there is none. kShared: in shared memory.
template <bool kShared, typename W, int kWidth>
__device__ __forceinline__ Vec<W, kWidth> load_param_vec(const W* param, bool given, int col,
                                                         float otherwise) {
  Vec<W, kWidth> v;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) v.at[j] = from_acc<W>(otherwise);
  if (given) {
    if constexpr (kShared) {
      v = load_plain<W, kWidth>(param + col);
    } else {
      v = load_again<W, kWidth>(element(param, col));
    }
  }
  return v;
}

template <bool kShared, int kWidth, typename W, typename Acc>
__device__ __forceinline__ void load_param(Acc (&values)[kWidth], const W* param, bool given,
                                           int col, float otherwise) {
  unpack(values, load_param_vec<kShared, W, kWidth>(param, given, col, otherwise));
}

template <int kWidth, typename W, typename Acc>
__device__ __forceinline__ void load_param(Acc (&values)[kWidth], const W* param, int col,
                                           float otherwise) {
  load_param<false>(values, param, param != nullptr, col, otherwise);
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

// Where one row, or a part of it from `first_col` on, is read and written by forward.
template <typename T>
struct ForwardRow {
  using X = typename T::X;
  using In = typename T::In;

  const void* input;  // of In with a residual, else of X
  const X* residual;
  X* residual_out;
  typename T::Y* y;
  const typename T::W* weight;
  const typename T::W* bias;

  __device__ __forceinline__ ForwardRow(const ForwardParams& p, int64_t row, int first_col)
      : residual(nullptr), residual_out(nullptr) {
    const int64_t input_start = p.input_rows(row) + first_col;
    const int64_t start = row * p.cols + first_col;
    if (p.residual == nullptr) {
      input = static_cast<const X*>(p.input) + input_start;
    } else {
      input = static_cast<const In*>(p.input) + input_start;
      residual = static_cast<const X*>(p.residual) + p.residual_rows(row) + first_col;
      residual_out = static_cast<X*>(p.residual_out) + start;
    }
    y = static_cast<typename T::Y*>(p.y) + start;
    weight = p.weight ? static_cast<const typename T::W*>(p.weight) + first_col : nullptr;
    bias = p.bias ? static_cast<const typename T::W*>(p.bias) + first_col : nullptr;
  }

  __device__ __forceinline__ typename T::Acc first_element() const {
    if (residual == nullptr) return to_acc(*static_cast<const X*>(input));
    const auto sum = to_acc(*static_cast<const In*>(input)) + to_acc(*residual);
    return to_acc(from_acc<X>(sum));
  }
};

// Which vectors of a row a thread has: `first`, `first + step`, ..., those below `vectors`.
struct Share {
  int first, step, vectors;

  __device__ __forceinline__ int vector(int k) const { return first + k * step; }
  __device__ __forceinline__ bool has(int k) const { return vector(k) < vectors; }
};

// A thread's kVecs vectors of a row as they are loaded. Those past the row's end read as zero.
// kFused: a residual may come to the input.
template <typename T, int kWidth, int kVecs, bool kFused>
struct LoadedRow {
  Vec<typename T::X, kWidth> x[kVecs];
  Vec<typename T::In, kWidth> added[kFused ? kVecs : 1];

  __device__ __forceinline__ void load(const ForwardRow<T>& row, const Share& share) {
    using X = typename T::X;
    using In = typename T::In;
    const X* x_row = static_cast<const X*>(row.input);
    const In* added_row = nullptr;
    if (kFused && row.residual != nullptr) {
      x_row = row.residual;
      added_row = static_cast<const In*>(row.input);
    }
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      x[k] = {};
      if (share.has(k)) x[k] = load_once<X, kWidth>(element(x_row, share.vector(k) * kWidth));
    }
    if (kFused && added_row != nullptr) {
#pragma unroll
      for (int k = 0; k < kVecs; ++k) {
        added[k] = {};
        if (share.has(k)) {
          added[k] = load_once<In, kWidth>(element(added_row, share.vector(k) * kWidth));
        }
      }
    }
  }
};

// The same in the arithmetic's type.
template <typename T, int kWidth, int kVecs>
struct RowValues {
  using Acc = typename T::Acc;
  using X = typename T::X;
  Acc x[kVecs][kWidth];

  // x = input, or input + residual rounded to residual's type, which is then stored as well.
  template <bool kFused>
  __device__ __forceinline__ void unpack_row(const LoadedRow<T, kWidth, kVecs, kFused>& loaded,
                                             const ForwardRow<T>& row, const Share& share) {
#pragma unroll
    for (int k = 0; k < kVecs; ++k) unpack(x[k], loaded.x[k]);
    if constexpr (kFused) {
      if (row.residual != nullptr) {
#pragma unroll
        for (int k = 0; k < kVecs; ++k) {
          Acc sum[kWidth];
          unpack(sum, loaded.added[k]);
#pragma unroll
          for (int j = 0; j < kWidth; ++j) sum[j] += x[k][j];
          const auto rounded = round_to<X>(sum);
          if (share.has(k)) {
            store_once<X, kWidth>(element(row.residual_out, share.vector(k) * kWidth), rounded);
          }
          unpack(x[k], rounded);
        }
      }
    }
  }

  __device__ __forceinline__ void unpack_shared(const X* row, const Share& share) {
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      Vec<X, kWidth> loaded = {};
      if (share.has(k)) loaded = load_plain<X, kWidth>(row + share.vector(k) * kWidth);
      unpack(x[k], loaded);
    }
  }

  // Sum of x - pivot. Any element of the row is a good pivot: the sum stays of the order of the
  // deviations, however large the mean, and that of a constant row is exactly zero.
  __device__ __forceinline__ Acc sum(Acc pivot, const Share& share) const {
    // A thread's own sum of half-precision values is exact in float32: one subtraction will do.
    constexpr bool kExact = sizeof(X) == 2;
    Acc total[kWidth] = {};
    Acc count = 0;
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      if (share.has(k)) {
        count += kWidth;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) total[j] += kExact ? x[k][j] : x[k][j] - pivot;
      }
    }
    const Acc all = tree_sum(total);
    return kExact ? all - count * pivot : all;
  }

  // x - mean is not kept for the last step: packed, a row takes half the registers, and twice the
  // warps are worth more than the subtractions (32768 x 2048 bfloat16: 67.7 us against 70.0).
  __device__ __forceinline__ Acc squared_deviations(Acc mean, const Share& share) const {
    Acc total[kWidth] = {};
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      if (share.has(k)) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          const Acc d = x[k][j] - mean;
          total[j] += d * d;
        }
      }
    }
    return tree_sum(total);
  }
};

// y of `kWidth` columns from x, the last step of every forward kernel. kFused: there may be
// an activation or a scale; without, the code of the activations must not stand in the way.
template <typename T, bool kFused, int kWidth, typename Acc>
__device__ __forceinline__ void finish(const ForwardParams& p, typename T::Y* y, int col,
                                       const Acc (&x)[kWidth], Acc mean, Acc rstd,
                                       const Acc (&weight)[kWidth], const Acc (&bias)[kWidth]) {
  Acc z[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) z[j] = (x[j] - mean) * rstd * weight[j] + bias[j];
  if constexpr (kFused) {
    if (p.has_epilogue) activate<typename T::Y>(z, p.activation, p.scale.as<Acc>());
  }
  store_once<typename T::Y, kWidth>(element(y, col), round_to<typename T::Y>(z));
}

template <bool kFused, typename T, int kWidth, int kVecs, typename Acc>
__device__ __forceinline__ void finish_row(const ForwardParams& p, const ForwardRow<T>& row,
                                           const RowValues<T, kWidth, kVecs>& values,
                                           const Share& share, Acc mean, Acc rstd) {
#pragma unroll
  for (int k = 0; k < kVecs; ++k) {
    if (share.has(k)) {
      const int col = share.vector(k) * kWidth;
      Acc w[kWidth], b[kWidth];
      load_param(w, row.weight, col, 1.0f);
      load_param(b, row.bias, col, 0.0f);
      finish<T, kFused>(p, row.y, col, values.x[k], mean, rstd, w, b);
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

// Forward of one row by a team: the lanes of a warp, or a block. A team without a row of its own
// (`row` is past the last) goes along for the sake of the others in its warp, and stores nothing.
template <typename T, int kWidth, int kVecs, bool kFused, typename Team>
__device__ __forceinline__ void forward_row(const ForwardParams& p, const Team& team, int64_t row) {
  using Acc = typename T::Acc;
  const Acc inverse_cols = p.inverse_cols.as<Acc>();
  const bool valid_row = row < p.rows;
  const ForwardRow<T> place(p, valid_row ? row : p.rows - 1, 0);
  const Share share = {team.thread(), team.threads(), valid_row ? p.cols / kWidth : 0};

  RowValues<T, kWidth, kVecs> values;
  {
    LoadedRow<T, kWidth, kVecs, kFused> loaded;
    loaded.load(place, share);
    values.unpack_row(loaded, place, share);
  }
  const Acc pivot = team.pivot(place, values.x[0][0]);
  const Acc mean = pivot + team.sum(values.sum(pivot, share), 0) * inverse_cols;
  const Acc m2 = team.sum(values.squared_deviations(mean, share), 1);
  const Acc rstd = reciprocal_sqrt(m2 * inverse_cols + p.eps.as<Acc>());
  if (!valid_row) return;
  if (team.thread() == 0) store_statistics(p, row, mean, rstd);
  finish_row<kFused>(p, place, values, share, mean, rstd);
}

__device__ __forceinline__ float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double rounded_product(double a, double b) { return __dmul_rn(a, b); }

// The gradients at `kWidth` columns of one row: xhat; dz, the gradient at the affine output
// z = xhat * weight + bias (dy itself without activation and scale); and g = dz * weight.
template <typename T, int kWidth, bool kEpilogue>
struct Gradients {
  using Acc = typename T::Acc;
  Acc xhat[kWidth], dz[kWidth], g[kWidth];

  __device__ __forceinline__ Gradients(const BackwardParams& p, const Vec<typename T::X, kWidth>& x,
                                       const Vec<typename T::Y, kWidth>& dy, Acc mean, Acc rstd,
                                       const Acc (&weight)[kWidth], const Acc (&bias)[kWidth]) {
    unpack(xhat, x);
    unpack(dz, dy);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) xhat[j] = (xhat[j] - mean) * rstd;
    if constexpr (kEpilogue) {
      Acc z[kWidth];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) z[j] = xhat[j] * weight[j] + bias[j];
      activate_backward<typename T::Y>(dz, z, p.activation, p.scale.as<Acc>());
    }
    // Rounded, so that the g of dx is the g of its mean: a row of one column has no gradient.
#pragma unroll
    for (int j = 0; j < kWidth; ++j) g[j] = rounded_product(dz[j], weight[j]);
  }

  // Adds this row's share of the two sums of dx: of g, and of g * xhat.
  __device__ __forceinline__ void add_sums(Pair<Acc>& sums) const {
    // Two chains each.
    Pair<Acc> part;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      Pair<Acc>& chain = j % 2 == 0 ? sums : part;
      chain.first += g[j];
      chain.second += g[j] * xhat[j];
    }
    sums += part;
  }

  __device__ __forceinline__ void add_dparams(Acc (&dweight)[kWidth], Acc (&dbias)[kWidth]) const {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      dweight[j] += dz[j] * xhat[j];
      dbias[j] += dz[j];
    }
  }
};

// dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + dresidual, where dx and dresidual begin with
// the columns of xhat and g.
template <typename X, int kWidth, typename Acc>
__device__ __forceinline__ void store_dx(X* dx, const X* dresidual, const Acc (&xhat)[kWidth],
                                         const Acc (&g)[kWidth], Pair<Acc> means, Acc rstd) {
  Acc values[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    values[j] = (g[j] - means.first - xhat[j] * means.second) * rstd;
  }
  if (dresidual != nullptr) {
    Acc added[kWidth];
    unpack(added, load_once<X, kWidth>(dresidual));
#pragma unroll
    for (int j = 0; j < kWidth; ++j) values[j] += added[j];
  }
  store_once<X, kWidth>(dx, round_to<X>(values));
}

// Where the dx of one row, or of a part of it from `first_col` on, goes.
template <typename X>
struct DxRow {
  X* dx;
  const X* dresidual;

  __device__ __forceinline__ DxRow(const BackwardParams& p, int64_t row, int first_col)
      : dx(static_cast<X*>(p.dx) + row * p.cols + first_col), dresidual(nullptr) {
    if (p.dresidual != nullptr) {
      dresidual = static_cast<const X*>(p.dresidual) + p.dresidual_rows(row) + first_col;
    }
  }

  template <int kWidth, typename Acc>
  __device__ __forceinline__ void store(int col, const Acc (&xhat)[kWidth], const Acc (&g)[kWidth],
                                        Pair<Acc> means, Acc rstd) const {
    store_dx(element(dx, col), dresidual != nullptr ? element(dresidual, col) : nullptr, xhat, g,
             means, rstd);
  }
};

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

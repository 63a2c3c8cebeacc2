// What every kernel does with its share of a row, whatever the strategy: load (+ residual) ->
// statistics -> normalize -> epilogue -> store, and the same for the gradients.
#pragma once

#include "norm/activation.cuh"
#include "layernorm.h"
#include "device/reduce.cuh"
#include "device/shifted.cuh"
#include "device/vec.cuh"

namespace fused_layernorm {

// An element of a row or slice by a 32-bit offset: cheaper addresses.
template <typename T>
__device__ __forceinline__ T* element(T* base, int index) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return reinterpret_cast<T*>(reinterpret_cast<Byte*>(base) +
                              static_cast<uint32_t>(index) * static_cast<uint32_t>(sizeof(T)));
}

// An address that the compiler knows nothing about, and so keeps instead of computing it again.
template <typename T>
__device__ __forceinline__ T* hidden(T* address) {
  asm volatile("" : "+l"(address));
  return address;
}

// What stands for a weight or bias that is not there: read like one, so that nothing asks.
alignas(16) static __device__ const float kFloatOnes[8] = {1, 1, 1, 1, 1, 1, 1, 1};
alignas(16) static __device__ const double kDoubleOnes[2] = {1, 1};
alignas(16) static __device__ const uint32_t kHalfOnes[4] = {0x3c003c00, 0x3c003c00, 0x3c003c00,
                                                             0x3c003c00};
alignas(16) static __device__ const uint32_t kBFloat16Ones[4] = {0x3f803f80, 0x3f803f80, 0x3f803f80,
                                                                 0x3f803f80};
alignas(16) static __device__ const uint32_t kZeros[8] = {};

enum class Otherwise { kOnes, kZeros };

template <typename W>
__device__ __forceinline__ const W* vector_of(Otherwise otherwise) {
  const void* ones = kFloatOnes;
  if constexpr (std::is_same_v<W, double>) ones = kDoubleOnes;
  if constexpr (std::is_same_v<W, __half>) ones = kHalfOnes;
  if constexpr (std::is_same_v<W, __nv_bfloat16>) ones = kBFloat16Ones;
  return static_cast<const W*>(otherwise == Otherwise::kOnes ? ones : kZeros);
}

// weight or bias from `first_col` on.
template <typename W>
struct Parameter {
  const W* at;
  int mask;  // of a column: without a parameter, all columns read one vector

  __device__ __forceinline__ Parameter(const void* given, int first_col, Otherwise otherwise)
      : at(given != nullptr ? static_cast<const W*>(given) + first_col : vector_of<W>(otherwise)),
        mask(given != nullptr ? -1 : 0) {}

  template <int kWidth>
  __device__ __forceinline__ Vec<W, kWidth> load(int col) const {
    return fused_layernorm::load<Use::kAgain, kWidth>(element(at, col & mask));
  }

  // The same for a vector that may reach past the parameter's end, of which no piece is read that
  // is wholly behind it: those columns are anything.
  template <int kWidth>
  __device__ __forceinline__ Vec<W, kWidth> load_until(int col, int cols) const {
    using V = Vec<W, kWidth>;
    constexpr int kPieceCols = kWidth * V::kPieceBytes / V::kBytes;
    V v;
#pragma unroll
    for (int j = 0; j < kWidth; j += kPieceCols) {
      const auto piece = load<kPieceCols>(col + j < cols ? col + j : col);
#pragma unroll
      for (int i = 0; i < kPieceCols; ++i) v.at[j + i] = piece.at[i];
    }
    return v;
  }
};

// The first `vectors` vectors of a parameter to shared memory with room for `room`, which the last
// one fills up. By all threads of the block; a barrier must follow.
template <int kWidth, typename W>
__device__ __forceinline__ void copy_parameter(W* shared, const Parameter<W>& from, int vectors,
                                               int room) {
#pragma unroll 4
  for (int v = threadIdx.x; v < room; v += blockDim.x) {
    store(shared + v * kWidth, from.template load<kWidth>(min(v, vectors - 1) * kWidth));
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

// 1 / n, to twice the digits of float32: a mean is a pivot and a sum over n, and where the two
// nearly cancel the rounding of 1 / n would be magnified.
template <typename Acc>
struct Reciprocal {
  Acc rounded, rest;

  __device__ __forceinline__ Reciprocal(Acc r, Acc its_rest) : rounded(r), rest(its_rest) {}
  __device__ __forceinline__ explicit Reciprocal(int n)
      : rounded(Acc(1) / Acc(n)), rest(fma(-rounded, Acc(n), Acc(1)) * rounded) {}
  __device__ __forceinline__ explicit Reciprocal(const Scalar& inverse)
      : rounded(inverse.as<Acc>()), rest(sizeof(Acc) == sizeof(float) ? inverse.rest : 0) {}

  __device__ __forceinline__ Acc mean(Acc pivot, Acc sum) const {
    return fma(sum, rest, fma(sum, rounded, pivot));
  }
};

// Elements of x in 16 bytes.
template <typename T>
constexpr int kVectorWidth = 16 / static_cast<int>(sizeof(typename T::X));

// What a kernel is compiled for. The code of the activations slows kernels down that do not use it,
// and so does a residual's.
enum class Fusion {
  kNone,
  kEpilogue,  // there is an activation or a scale
  kResidual,  // there is a residual (in backward, and forward's kStream: may be), and there may be
              // an epilogue
};

// Where one row, or a part of it from `first_col` on, is read and written by forward.
template <typename T>
struct ForwardRow {
  using X = typename T::X;
  using In = typename T::In;
  using W = typename T::W;

  const void* input;  // of In with a residual, else of X
  const X* residual;
  X* residual_out;
  typename T::Y* y;
  Parameter<W> weight, bias;

  template <bool kResidual>
  __device__ __forceinline__ ForwardRow(const ForwardParams& p, int64_t row, int first_col,
                                        std::bool_constant<kResidual>)
      : residual(nullptr),
        residual_out(nullptr),
        weight(p.weight, first_col, Otherwise::kOnes),
        bias(p.bias, first_col, Otherwise::kZeros) {
    const int64_t input_start = p.input_rows(row) + first_col;
    const int64_t start = row * p.cols + first_col;
    if constexpr (kResidual) {
      input = static_cast<const In*>(p.input) + input_start;
      residual = static_cast<const X*>(p.residual) + p.residual_rows(row) + first_col;
      residual_out = static_cast<X*>(p.residual_out) + start;
    } else {
      input = static_cast<const X*>(p.input) + input_start;
    }
    y = static_cast<typename T::Y*>(p.y) + start;
  }

  template <bool kResidual>
  __device__ __forceinline__ typename T::Acc first_element() const {
    if constexpr (kResidual) {
      const auto sum = to_acc(*static_cast<const In*>(input)) + to_acc(*residual);
      return to_acc(from_acc<X>(sum));
    } else {
      return to_acc(*static_cast<const X*>(input));
    }
  }
};

// Which of a row's vectors a thread has: `first`, `first + step`, ..., those below `vectors`.
// kDense: of kVecs vectors at most the last can be missing.
template <int kVecs, bool kDense>
struct Share {
  int first, step, vectors;

  __device__ __forceinline__ int vector(int k) const { return first + k * step; }
  // The first column of vector k; of a missing one, the row's first column, to be read in its
  // place.
  template <int kWidth>
  __device__ __forceinline__ int col(int k) const {
    return has(k) ? vector(k) * kWidth : 0;
  }
  __device__ __forceinline__ bool has(int k) const {
    return (kDense && k + 1 < kVecs) || vector(k) < vectors;
  }
  // Of vector k, column j, and the number of them.
  __device__ __forceinline__ bool has_column(int k, int) const { return has(k); }
  template <typename Acc, int kWidth>
  __device__ __forceinline__ Acc count(int k) const {
    return has(k) ? Acc(kWidth) : Acc(0);
  }
};

// Of a row with any number of columns, whose last vector may not be whole.
template <int kVecs, int kVecWidth>
struct RaggedShare : Share<kVecs, true> {
  int cols;
  int last_cols;  // of the last of kVecs vectors: not positive if it is missing

  __device__ __forceinline__ RaggedShare(int thread, int threads, int row_cols)
      : Share<kVecs, true>{thread, threads, (row_cols + kVecWidth - 1) / kVecWidth},
        cols(row_cols),
        last_cols(row_cols - this->vector(kVecs - 1) * kVecWidth) {}
  __device__ __forceinline__ bool has_column(int k, int j) const {
    return k + 1 < kVecs || j < last_cols;
  }
  template <typename Acc, int kWidth>
  __device__ __forceinline__ Acc count(int k) const {
    return k + 1 < kVecs ? Acc(kWidth) : Acc(min(max(last_cols, 0), kWidth));
  }
};

// x + added, rounded to x's type.
template <typename X, typename In, int kWidth>
__device__ __forceinline__ Vec<X, kWidth> rounded_sum(const Vec<X, kWidth>& x,
                                                      const Vec<In, kWidth>& added) {
  acc_t<X> sum[kWidth], summand[kWidth];
  unpack(sum, x);
  unpack(summand, added);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) sum[j] += summand[j];
  return round_to<X>(sum);
}

// A thread's vectors of a row, as they are in memory: unpacked for every use, a row takes half the
// registers, and twice the warps are worth more than the instructions. Missing vectors are zero.
template <typename T, int kWidth, int kVecs>
struct RowVectors {
  using Acc = typename T::Acc;
  using X = typename T::X;
  Vec<X, kWidth> x[kVecs];

  // What was computed of the elements before is not kept for after: it has no registers.
  __device__ __forceinline__ void forget_unpacked() {
#pragma unroll
    for (int k = 0; k < kVecs; ++k) hold(x[k]);
  }

  // x = input, or input + residual rounded to residual's type, which is then stored as well.
  template <bool kResidual, Use kUse = Use::kOnce, typename Share>
  __device__ __forceinline__ void load(const ForwardRow<T>& row, const Share& share) {
    using In = typename T::In;
    const X* x_row = kResidual ? row.residual : static_cast<const X*>(row.input);
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      x[k] = {};
      if (share.has(k)) {
        x[k] = fused_layernorm::load<kUse, kWidth>(element(x_row, share.vector(k) * kWidth));
      }
    }
    if constexpr (kResidual) {
      const In* added_row = static_cast<const In*>(row.input);
      Vec<In, kWidth> added[kVecs];
#pragma unroll
      for (int k = 0; k < kVecs; ++k) {
        added[k] = {};
        if (share.has(k)) {
          added[k] = fused_layernorm::load<Use::kOnce, kWidth>(
              element(added_row, share.vector(k) * kWidth));
        }
      }
#pragma unroll
      for (int k = 0; k < kVecs; ++k) {
        x[k] = rounded_sum(x[k], added[k]);
        if (share.has(k)) {
          store_once<X, kWidth>(element(row.residual_out, share.vector(k) * kWidth), x[k]);
        }
      }
    }
  }

  // The same for a row that begins anywhere: what is behind its last column is zero. Nothing is
  // stored for a team without a row of its own.
  template <bool kResidual, typename Team>
  __device__ __forceinline__ void load_shifted(const ForwardRow<T>& row, const Team& team,
                                               const RaggedShare<kVecs, kWidth>& share,
                                               bool valid_row) {
    using In = typename T::In;
    const X* x_row = kResidual ? row.residual : static_cast<const X*>(row.input);
    fused_layernorm::load_shifted<0, kVecs>(x, ShiftedRow<const X, kWidth>(x_row), share);
    if constexpr (kResidual) {
      const ShiftedRow<const In, kWidth> added_row(static_cast<const In*>(row.input));
      const auto add = [&](auto first, auto count) {
        Vec<In, kWidth> added[count()];
        fused_layernorm::load_shifted<first(), kVecs>(added, added_row, share);
#pragma unroll
        for (int n = 0; n < count(); ++n) {
          x[first() + n] = rounded_sum(x[first() + n], added[n]);
        }
      };
      // As many as there are registers for.
      constexpr int kCount = kVecs < 4 ? kVecs : 4;
      add(std::integral_constant<int, 0>{}, std::integral_constant<int, kCount>{});
      if constexpr (kVecs > 4) {
        add(std::integral_constant<int, 4>{}, std::integral_constant<int, kVecs - 4>{});
      }
    }
    keep_first(x[kVecs - 1], share.last_cols);
    if constexpr (kResidual) {
      store_shifted<X, kWidth, kVecs>(row.residual_out, team, share, valid_row ? share.cols : 0,
                                      [&](int k) { return x[k]; });
    }
  }

  template <typename Share>
  __device__ __forceinline__ void load_shared(const X* row, const Share& share) {
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      x[k] = {};
      if (share.has(k)) {
        x[k] = fused_layernorm::load<Use::kPlain, kWidth>(row + share.vector(k) * kWidth);
      }
    }
  }

  // Sum of x - pivot, which is used first, for where it is loaded first. Any element of the row is
  // a good pivot: the sum stays of the order of the deviations, however large the mean, and that of
  // a constant row is exactly zero.
  template <typename Share>
  __device__ __forceinline__ Acc sum(Acc pivot, const Share& share) const {
    // A thread's own sum of half-precision values is exact in float32: one subtraction will do.
    constexpr bool kExact = sizeof(X) == 2;
    Acc total[kWidth];
    Acc count = 0;
#pragma unroll
    for (int k = 0; k < kVecs; ++k) count += share.template count<Acc, kWidth>(k);
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      Acc values[kWidth];
      unpack(values, x[k]);
      if (kExact && k == 0) values[0] -= count * pivot;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const Acc from = share.has_column(k, j) ? pivot : Acc(0);
        const Acc v = kExact ? values[j] : values[j] - from;
        total[j] = k == 0 ? v : total[j] + v;
      }
    }
    return tree_sum(total);
  }

  template <typename Share>
  __device__ __forceinline__ Acc squared_deviations(Acc mean, const Share& share) const {
    Acc total[kWidth];
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      Acc values[kWidth];
      unpack(values, x[k]);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const Acc from = share.has_column(k, j) ? mean : Acc(0);
        const Acc d = values[j] - from;
        total[j] = k == 0 ? d * d : total[j] + d * d;
      }
    }
    return tree_sum(total);
  }
};

// y of `kWidth` columns from x, the last step of every forward kernel.
template <Fusion kFusion, typename Y, typename X, typename W, int kWidth, typename Acc>
__device__ __forceinline__ Vec<Y, kWidth> finish(const ForwardParams& p, const Vec<X, kWidth>& x,
                                                 Acc mean, Acc rstd, const Vec<W, kWidth>& weight,
                                                 const Vec<W, kWidth>& bias) {
  Acc values[kWidth], w[kWidth], b[kWidth];
  unpack(values, x);
  unpack(w, weight);
  unpack(b, bias);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) values[j] = (values[j] - mean) * rstd * w[j] + b[j];
  if constexpr (kFusion == Fusion::kEpilogue) {
    activate<Y>(values, p.activation, p.scale.as<Acc>());
  } else if constexpr (kFusion == Fusion::kResidual) {
    if (p.has_epilogue) activate<Y>(values, p.activation, p.scale.as<Acc>());
  }
  return round_to<Y>(values);
}

// weight and bias of a thread's vectors, read where they are used. A missing vector reads the first
// one's columns.
template <typename T, int kWidth, typename Share>
struct LateParameters {
  const ForwardRow<T>& row;
  const Share& share;

  __device__ __forceinline__ auto weight(int k) const {
    return row.weight.template load<kWidth>(share.template col<kWidth>(k));
  }
  __device__ __forceinline__ auto bias(int k) const {
    return row.bias.template load<kWidth>(share.template col<kWidth>(k));
  }
};

// The same, on their way while the row is and while its sums are taken.
template <typename T, int kWidth, int kVecs>
struct EarlyParameters {
  using W = typename T::W;
  Vec<W, kWidth> weights[kVecs], biases[kVecs];

  template <typename Share>
  __device__ __forceinline__ explicit EarlyParameters(
      const LateParameters<T, kWidth, Share>& parameters) {
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      weights[k] = parameters.weight(k);
      biases[k] = parameters.bias(k);
    }
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      hold(weights[k]);
      hold(biases[k]);
    }
  }
  __device__ __forceinline__ const Vec<W, kWidth>& weight(int k) const { return weights[k]; }
  __device__ __forceinline__ const Vec<W, kWidth>& bias(int k) const { return biases[k]; }
};

// The same by addresses that walk along the row, for which weight and bias are asked once for each
// vector, in order: fewer instructions, but each address waits for the one before. In place of a
// missing vector that before it is read again.
template <typename T, int kWidth, typename Share>
struct WalkedParameters {
  using W = typename T::W;
  const Share& share;
  const W* weights;
  const W* biases;
  int weight_step, bias_step;

  __device__ __forceinline__ explicit WalkedParameters(
      const LateParameters<T, kWidth, Share>& parameters)
      : share(parameters.share),
        weights(start(parameters.row.weight)),
        biases(start(parameters.row.bias)),
        weight_step(share.step * kWidth & parameters.row.weight.mask),
        bias_step(share.step * kWidth & parameters.row.bias.mask) {}
  __device__ __forceinline__ const W* start(const Parameter<W>& parameter) const {
    return hidden(element(parameter.at, share.first * kWidth & parameter.mask));
  }
  __device__ __forceinline__ auto weight(int k) {
    if (k > 0) weights = element(weights, share.has(k) ? weight_step : 0);
    return load<Use::kAgain, kWidth>(weights);
  }
  __device__ __forceinline__ auto bias(int k) {
    if (k > 0) biases = element(biases, share.has(k) ? bias_step : 0);
    return load<Use::kAgain, kWidth>(biases);
  }
};

template <Fusion kFusion, typename T, int kWidth, int kVecs, typename Parameters, typename Share,
          typename Acc>
__device__ __forceinline__ void finish_row(const ForwardParams& p, const ForwardRow<T>& row,
                                           const RowVectors<T, kWidth, kVecs>& values,
                                           Parameters parameters, const Share& share, Acc mean,
                                           Acc rstd) {
  using Y = typename T::Y;
  if constexpr (kFusion != Fusion::kEpilogue) {
    if (kFusion == Fusion::kResidual && !p.has_epilogue) {
      return finish_row<Fusion::kNone>(p, row, values, parameters, share, mean, rstd);
    }
    constexpr Fusion kLast = kFusion == Fusion::kNone ? Fusion::kNone : Fusion::kEpilogue;
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      const auto y =
          finish<kLast, Y>(p, values.x[k], mean, rstd, parameters.weight(k), parameters.bias(k));
      if (share.has(k)) store_once<Y, kWidth>(element(row.y, share.vector(k) * kWidth), y);
    }
  } else {
    // Nothing moves over the branches of an activation by itself: the next vector's parameters are
    // on their way before them if there are registers, and y's address is not computed anew behind.
    constexpr bool kAhead = kVecs < 8;
    Y* y_row = hidden(element(row.y, share.first * kWidth));
    auto weight = parameters.weight(0), bias = parameters.bias(0);
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      if (!kAhead && k > 0) {
        weight = parameters.weight(k);
        bias = parameters.bias(k);
      }
      const auto w = weight, b = bias;
      if (kAhead && k + 1 < kVecs) {
        weight = parameters.weight(k + 1);
        bias = parameters.bias(k + 1);
        hold(weight);
        hold(bias);
      }
      const auto y = finish<kFusion, Y>(p, values.x[k], mean, rstd, w, b);
      if (share.has(k)) store_once<Y, kWidth>(element(y_row, k * share.step * kWidth), y);
    }
  }
}

// The same for a row that begins anywhere.
template <Fusion kFusion, typename T, int kWidth, int kVecs, typename Team, typename Acc>
__device__ __forceinline__ void finish_shifted_row(const ForwardParams& p, const ForwardRow<T>& row,
                                                   const RowVectors<T, kWidth, kVecs>& values,
                                                   const Team& team,
                                                   const RaggedShare<kVecs, kWidth>& share,
                                                   bool valid_row, Acc mean, Acc rstd) {
  using Y = typename T::Y;
  using W = typename T::W;
  const auto y_of = [&](int k) {
    const int col = share.template col<kWidth>(k);
    const auto load = [&](const Parameter<W>& from) {
      return k + 1 < kVecs ? from.template load<kWidth>(col)
                           : from.template load_until<kWidth>(col, share.cols);
    };
    return finish<kFusion, Y>(p, values.x[k], mean, rstd, load(row.weight), load(row.bias));
  };
  store_shifted<Y, kWidth, kVecs>(row.y, team, share, valid_row ? share.cols : 0, y_of);
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
// (`row` is past the last) goes along with the last row for the sake of the others in its warp.
// kForget: of the row nothing but its packed elements stays in registers between sums and result.
template <typename T, int kVecs, Fusion kFusion, bool kShifted, bool kForget = false, typename Team>
__device__ __forceinline__ void forward_row(const ForwardParams& p, const Team& team,
                                            uint32_t row) {
  using Acc = typename T::Acc;
  constexpr bool kResidual = kFusion == Fusion::kResidual;
  constexpr int kWidth = kVectorWidth<T>;
  const Reciprocal<Acc> inverse_cols(p.inverse_cols);
  const uint32_t rows = static_cast<uint32_t>(p.rows);
  const bool valid_row = row < rows;
  const uint32_t read_row = valid_row ? row : rows - 1;
  const ForwardRow<T> place(p, read_row, 0, std::bool_constant<kResidual>{});
  // plan.cpp sees to it that of a thread's vectors at most the last is missing.
  const auto share = [&] {
    if constexpr (kShifted) {
      return RaggedShare<kVecs, kWidth>(team.thread(), team.threads(), p.cols);
    } else {
      return Share<kVecs, true>{team.thread(), team.threads(), p.cols / kWidth};
    }
  }();

  RowVectors<T, kWidth, kVecs> values;
  Acc pivot;
  if constexpr (kShifted) {
    // Read before the row: what comes after its branches waits for the row.
    pivot = place.template first_element<kResidual>();
    values.template load_shifted<kResidual>(place, team, share, valid_row);
  } else {
    // Before all else where it pays (bfloat16: 32768 x 4096 137.9 us, 131.2, with a residual 268.0,
    // 259.4; 65536 x 2048 131.7, 128.7; but with five vectors 130.1, 130.8, eight 264, 283, an
    // activation 136.6, 143.4).
    constexpr bool kInOrder =
        sizeof(typename T::X) == 2 && (kResidual || (kVecs == 4 && kFusion == Fusion::kNone));
    if constexpr (Team::template kPivotFirst<kVecs, kFusion>) {
      pivot = place.template first_element<kResidual>();
      if (kInOrder) __syncwarp();
      values.template load<kResidual, kInOrder ? Use::kInOrder : Use::kOnce>(place, share);
    } else {
      values.template load<kResidual>(place, share);
    }
  }
  const auto parameters = [&] {
    using Late = LateParameters<T, kWidth, decltype(share)>;
    constexpr int kWords = 2 * kVecs * kWidth * sizeof(typename T::W) / 4;
    if constexpr (!kShifted && kFusion == Fusion::kEpilogue && Team::kWalks) {
      return WalkedParameters<T, kWidth, decltype(share)>(Late{place, share});
    } else if constexpr (kShifted || kFusion != Fusion::kNone || kWords > Team::kMostEarlyWords) {
      return Late{place, share};
    } else {
      return EarlyParameters<T, kWidth, kVecs>(Late{place, share});
    }
  }();
  if constexpr (!kShifted && !Team::template kPivotFirst<kVecs, kFusion>) {
    pivot = team.template pivot<kResidual>(place, values.x[0].at[0]);
  }
  const Acc mean = inverse_cols.mean(pivot, team.sum(values.sum(pivot, share), 0));
  const Acc m2 = team.sum(values.squared_deviations(mean, share), 1);
  if constexpr (kForget) {
    if constexpr (sizeof(typename T::X) < sizeof(Acc)) values.forget_unpacked();
    asm("" : "+r"(row));
  }
  const Acc rstd = reciprocal_sqrt(m2 * inverse_cols.rounded + p.eps.as<Acc>());
  // Rows that begin anywhere are stored by all lanes together.
  if (!kShifted && !valid_row) return;
  if (valid_row && team.thread() == 0) store_statistics(p, row, mean, rstd);
  if constexpr (kShifted) {
    finish_shifted_row<kFusion>(p, place, values, team, share, valid_row, mean, rstd);
  } else if constexpr (kForget) {
    const ForwardRow<T> again(p, row, 0, std::bool_constant<kResidual>{});
    const LateParameters<T, kWidth, decltype(share)> read_again = {again, share};
    finish_row<kFusion>(p, again, values, read_again, share, mean, rstd);
  } else {
    finish_row<kFusion>(p, place, values, parameters, share, mean, rstd);
  }
}

__device__ __forceinline__ float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double rounded_product(double a, double b) { return __dmul_rn(a, b); }

// The gradients at `kWidth` columns of one row: xhat; dz, the gradient at the affine output
// z = xhat * weight + bias (dy itself without activation and scale); and g = dz * weight.
template <typename T, int kWidth, bool kMayActivate>
struct Gradients {
  using Acc = typename T::Acc;
  Acc xhat[kWidth], dz[kWidth], g[kWidth];

  __device__ __forceinline__ Gradients(const BackwardParams& p, const Vec<typename T::X, kWidth>& x,
                                       const Vec<typename T::Y, kWidth>& dy, Acc mean, Acc rstd,
                                       const Vec<typename T::W, kWidth>& weight,
                                       const Vec<typename T::W, kWidth>& bias) {
    Acc w[kWidth];
    unpack(w, weight);
    unpack(xhat, x);
    unpack(dz, dy);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) xhat[j] = (xhat[j] - mean) * rstd;
    if constexpr (kMayActivate) {
      if (p.has_epilogue) {
        Acc z[kWidth], b[kWidth];
        unpack(b, bias);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) z[j] = xhat[j] * w[j] + b[j];
        activate_backward<typename T::Y>(dz, z, p.activation, p.scale.as<Acc>());
      }
    }
    // Rounded, so that the g of dx is the g of its mean: a row of one column has no gradient.
#pragma unroll
    for (int j = 0; j < kWidth; ++j) g[j] = rounded_product(dz[j], w[j]);
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

// Where the dx of one row, or of a part of it from `first_col` on, goes, and the gradient that may
// come in beside it through a residual.
template <typename X, bool kResidual>
struct DxRow {
  X* dx;
  const X* dresidual;

  __device__ __forceinline__ DxRow(const BackwardParams& p, int64_t row, int first_col)
      : dx(static_cast<X*>(p.dx) + row * p.cols + first_col), dresidual(nullptr) {
    if (kResidual && p.dresidual != nullptr) {
      dresidual = static_cast<const X*>(p.dresidual) + p.dresidual_rows(row) + first_col;
    }
  }

  template <int kWidth>
  __device__ __forceinline__ Vec<X, kWidth> added(int col) const {
    if (kResidual && dresidual != nullptr) return load<Use::kOnce, kWidth>(element(dresidual, col));
    return negative_zeros<X, kWidth>();
  }

  // dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + dresidual.
  template <int kWidth, typename Acc>
  __device__ __forceinline__ Vec<X, kWidth> vector(const Acc (&xhat)[kWidth],
                                                   const Acc (&g)[kWidth], Pair<Acc> means,
                                                   Acc rstd, const Vec<X, kWidth>& added) const {
    Acc values[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      values[j] = (g[j] - means.first - xhat[j] * means.second) * rstd;
    }
    if constexpr (kResidual) {
      Acc more[kWidth];
      unpack(more, added);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) values[j] += more[j];
    }
    return round_to<X>(values);
  }

  template <int kWidth, typename Acc>
  __device__ __forceinline__ void store(int col, const Acc (&xhat)[kWidth], const Acc (&g)[kWidth],
                                        Pair<Acc> means, Acc rstd,
                                        const Vec<X, kWidth>& added) const {
    store_once<X, kWidth>(element(dx, col), vector(xhat, g, means, rstd, added));
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
      fused_layernorm::store<Acc, kWidth>(dweight_partial + col, round_to<Acc>(dw));
      fused_layernorm::store<Acc, kWidth>(dbias_partial + col, round_to<Acc>(db));
      return;
    }
    if (dweight != nullptr) store_once<W, kWidth>(dweight + col, round_to<W>(dw));
    if (dbias != nullptr) store_once<W, kWidth>(dbias + col, round_to<W>(db));
  }
};

}  // namespace fused_layernorm

// The affine map behind the normalization: z = xhat * weight + bias, with parameters that belong to
// columns.
#pragma once

#include "device/share.cuh"
#include "device/vec.cuh"
#include "layernorm.h"

namespace fused_layernorm {

// One vector of ones and one of zeros of each type. An absent weight or bias is read from here,
// again and again, so the loops over columns need no branch for it.
alignas(16) static __device__ const float kFloatOnes[8] = {1, 1, 1, 1, 1, 1, 1, 1};
alignas(16) static __device__ const double kDoubleOnes[2] = {1, 1};
alignas(16) static __device__ const uint32_t kHalfOnes[4] = {0x3c003c00, 0x3c003c00, 0x3c003c00,
                                                             0x3c003c00};
alignas(16) static __device__ const uint32_t kBFloat16Ones[4] = {0x3f803f80, 0x3f803f80, 0x3f803f80,
                                                                 0x3f803f80};
alignas(16) static __device__ const uint32_t kZeros[8] = {};

enum class Absent { kOnes, kZeros };

template <typename W>
__device__ __forceinline__ const W* vector_of(Absent absent) {
  const void* ones = kFloatOnes;
  if constexpr (std::is_same_v<W, double>) ones = kDoubleOnes;
  if constexpr (std::is_same_v<W, __half>) ones = kHalfOnes;
  if constexpr (std::is_same_v<W, __nv_bfloat16>) ones = kBFloat16Ones;
  return static_cast<const W*>(absent == Absent::kOnes ? ones : kZeros);
}

// weight or bias from a row's column `first_col` on.
template <typename W>
struct Parameter {
  const W* at;
  int mask;  // of a column: all columns of an absent parameter are read from one vector

  __device__ __forceinline__ Parameter(const void* given, int first_col, Absent absent)
      : at(given != nullptr ? static_cast<const W*>(given) + first_col : vector_of<W>(absent)),
        mask(given != nullptr ? -1 : 0) {}

  template <int kWidth>
  __device__ __forceinline__ Vec<W, kWidth> load(int col) const {
    return fused_layernorm::load<Use::kAgain, kWidth>(element(at, col & mask));
  }

  // Loads a vector that may reach past the parameter's end. A piece that lies wholly behind the end
  // is not read; the columns behind the end get any value.
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

// weight and bias from a row's column `first_col` on.
template <typename W>
struct ColumnParameters {
  Parameter<W> weight, bias;

  __device__ __forceinline__ ColumnParameters(const void* given_weight, const void* given_bias,
                                              int first_col)
      : weight(given_weight, first_col, Absent::kOnes),
        bias(given_bias, first_col, Absent::kZeros) {}
};

// Copies the first `vectors` vectors of a parameter to shared memory, which has room for `room`;
// the last vector fills up the rest. All threads of the block call, and a barrier must follow.
template <int kWidth, typename W>
__device__ __forceinline__ void copy_parameter(W* shared, const Parameter<W>& from, int vectors,
                                               int room) {
#pragma unroll 4
  for (int v = threadIdx.x; v < room; v += blockDim.x) {
    store(shared + v * kWidth, from.template load<kWidth>(min(v, vectors - 1) * kWidth));
  }
}

// The next three give weight and bias of the vectors of a thread's share, and differ in when and
// how these are loaded.

// Loaded where they are used. For a missing vector the first columns are read.
template <typename W, int kWidth, typename Share>
struct LateParameters {
  const ColumnParameters<W>& columns;
  const Share& share;

  __device__ __forceinline__ auto weight(int k) const {
    return columns.weight.template load<kWidth>(share.template col<kWidth>(k));
  }
  __device__ __forceinline__ auto bias(int k) const {
    return columns.bias.template load<kWidth>(share.template col<kWidth>(k));
  }
};

// Loaded together with the row, so that they arrive while the row's sums are taken.
template <typename W, int kWidth, int kVecs>
struct EarlyParameters {
  Vec<W, kWidth> weights[kVecs], biases[kVecs];

  template <typename Share>
  __device__ __forceinline__ explicit EarlyParameters(
      const LateParameters<W, kWidth, Share>& parameters) {
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

// Loaded where they are used, by addresses that walk along the row: fewer instructions, but each
// address waits for the one before. Each of weight(k) and bias(k) must be called once for each k,
// in order. In the place of a missing vector the one before it is read again.
template <typename W, int kWidth, typename Share>
struct WalkedParameters {
  const Share& share;
  const W* weights;
  const W* biases;
  int weight_step, bias_step;

  __device__ __forceinline__ explicit WalkedParameters(
      const LateParameters<W, kWidth, Share>& parameters)
      : share(parameters.share),
        weights(start(parameters.columns.weight)),
        biases(start(parameters.columns.bias)),
        weight_step(share.step * kWidth & parameters.columns.weight.mask),
        bias_step(share.step * kWidth & parameters.columns.bias.mask) {}
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

// The affine policy: every row has the parameters of the columns.
struct ColumnAffine {
  // The parameters of one row from `first_col` on.
  template <typename W>
  static __device__ __forceinline__ ColumnParameters<W> row(const ForwardParams& p, int64_t,
                                                            int first_col) {
    return {p.weight, p.bias, first_col};
  }
  template <typename Acc>
  static __device__ __forceinline__ Acc apply(Acc xhat, Acc weight, Acc bias) {
    return xhat * weight + bias;
  }
};

}  // namespace fused_layernorm

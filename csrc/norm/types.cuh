// SPDX-License-Identifier: Apache-2.0
// The data types of a norm, and the step from run-time types to those of a kernel.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <iterator>
#include <type_traits>

#include "base/params.h"
#include "device/vec.cuh"

namespace fused_layernorm {

template <typename X_, typename W_, typename Y_>
struct Types {
  using X = X_;  // of x, residual, residual_out, dx, dresidual
  using W = W_;  // of weight, bias, dweight, dbias
  using Y = Y_;  // of y, dy
  // Of the input to which a residual is added: a float32 residual stream takes half-precision
  // input and gives half-precision output; otherwise both summands are of one type.
  using In = std::conditional_t<std::is_same_v<X, float>, Y, X>;
  using Acc = acc_t<X>;
};

// Elements of x in a vector.
template <typename T>
constexpr int kVectorWidth = vector_width(static_cast<int>(sizeof(typename T::X)));

// Whether the input that is added to a residual is of x's type.
template <typename T>
constexpr bool kSummandIsX = std::is_same_v<typename T::In, typename T::X>;

// The type of CUDA that stands for a data type, and the other way round.
template <DataType kType>
using Of = std::conditional_t<
    kType == DataType::kFloat32, float,
    std::conditional_t<kType == DataType::kFloat16, __half,
                       std::conditional_t<kType == DataType::kFloat64, double, __nv_bfloat16>>>;
template <typename V>
constexpr DataType kTypeOf = std::is_same_v<V, float>    ? DataType::kFloat32
                             : std::is_same_v<V, __half> ? DataType::kFloat16
                             : std::is_same_v<V, double> ? DataType::kFloat64
                                                         : DataType::kBFloat16;

template <typename T>
constexpr bool kIsFloat64 = std::is_same_v<typename T::X, double>;

// Whether the types are common: y is of x's type, and not float64. Nearly all models have them, so
// kernels that fuse something have more variants for them (norm.cuh).
template <typename T>
constexpr bool kIsCommon = std::is_same_v<typename T::X, typename T::Y> && !kIsFloat64<T>;

template <typename T>
constexpr bool kIsNarrowed = is_narrowed(kTypeOf<typename T::X>, kTypeOf<typename T::Y>);

template <typename T>
constexpr bool kIsOneType =
    is_one_type(kTypeOf<typename T::X>, kTypeOf<typename T::W>, kTypeOf<typename T::Y>);

// Calls launch(Types{}) for the entry of kTypesWithKernels that these types are.
template <size_t kEntry = 0>
cudaError_t dispatch_types(const DataTypes& types, const auto& launch) {
  if constexpr (kEntry < std::size(kTypesWithKernels)) {
    constexpr DataType x = kTypesWithKernels[kEntry][0], weight = kTypesWithKernels[kEntry][1],
                       y = kTypesWithKernels[kEntry][2];
    if (types.x == x && types.weight == weight && types.y == y) {
      return launch(Types<Of<x>, Of<weight>, Of<y>>{});
    }
    return dispatch_types<kEntry + 1>(types, launch);
  } else {
    return cudaErrorInvalidValue;
  }
}

// The same for strategies that have no kernels of float64.
cudaError_t dispatch_types_but_float64(const DataTypes& types, const auto& launch) {
  return dispatch_types(types, [&](auto t) -> cudaError_t {
    if constexpr (kIsFloat64<decltype(t)>) {
      return cudaErrorInvalidValue;
    } else {
      return launch(t);
    }
  });
}

}  // namespace fused_layernorm

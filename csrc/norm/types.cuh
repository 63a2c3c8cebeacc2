// SPDX-License-Identifier: Apache-2.0
// The data types of a norm, and the step from run-time data types to the types that a kernel is
// compiled for.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

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

template <typename V>
constexpr DataType kTypeOf = std::is_same_v<V, float>    ? DataType::kFloat32
                             : std::is_same_v<V, __half> ? DataType::kFloat16
                             : std::is_same_v<V, double> ? DataType::kFloat64
                                                         : DataType::kBFloat16;

template <typename T>
constexpr bool kIsFloat64 = std::is_same_v<typename T::X, double>;

// Whether the types are common: y is of x's type, and not float64. Nearly all models have common
// types, so kernels that fuse something have more variants for them (norm.cuh). float64 is not
// common, because nobody trains in it.
template <typename T>
constexpr bool kIsCommon = std::is_same_v<typename T::X, typename T::Y> && !kIsFloat64<T>;

template <typename T>
constexpr bool kIsOneType =
    is_one_type(kTypeOf<typename T::X>, kTypeOf<typename T::W>, kTypeOf<typename T::Y>);

// The combinations that have kernels. bindings/cuda converts the others to one of them (a weight
// to float32, an output from float32), which gives the same result to the bit.
template <typename Launch>
cudaError_t dispatch_types(const DataTypes& types, const Launch& launch) {
  using F = float;
  using H = __half;
  using B = __nv_bfloat16;
  const auto is = [&](DataType x, DataType weight, DataType y) {
    return types.x == x && types.weight == weight && types.y == y;
  };
  constexpr DataType f = DataType::kFloat32, h = DataType::kFloat16, b = DataType::kBFloat16,
                     d = DataType::kFloat64;
  if (is(f, f, f)) return launch(Types<F, F, F>{});
  if (is(f, f, h)) return launch(Types<F, F, H>{});
  if (is(f, f, b)) return launch(Types<F, F, B>{});
  if (is(h, h, h)) return launch(Types<H, H, H>{});
  if (is(h, f, h)) return launch(Types<H, F, H>{});
  if (is(h, f, f)) return launch(Types<H, F, F>{});
  if (is(b, b, b)) return launch(Types<B, B, B>{});
  if (is(b, f, b)) return launch(Types<B, F, B>{});
  if (is(b, f, f)) return launch(Types<B, F, F>{});
  if (is(d, d, d)) return launch(Types<double, double, double>{});
  return cudaErrorInvalidValue;
}

// The same for strategies that have no kernels of float64.
template <typename Launch>
cudaError_t dispatch_types_but_float64(const DataTypes& types, const Launch& launch) {
  return dispatch_types(types, [&](auto t) -> cudaError_t {
    if constexpr (kIsFloat64<decltype(t)>) {
      return cudaErrorInvalidValue;
    } else {
      return launch(t);
    }
  });
}

}  // namespace fused_layernorm

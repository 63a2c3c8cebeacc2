// SPDX-License-Identifier: Apache-2.0
// Maps PyTorch's data types to those of the kernels, and back, and tensors to their descriptions.
#pragma once

#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "call/description.h"

namespace fused_layernorm {

// kNoDataType for a type that no kernel computes with.
constexpr DataType data_type_or_none(torch::headeronly::ScalarType type) {
  using torch::headeronly::ScalarType;
  return type == ScalarType::Float      ? DataType::kFloat32
         : type == ScalarType::Half     ? DataType::kFloat16
         : type == ScalarType::BFloat16 ? DataType::kBFloat16
         : type == ScalarType::Double   ? DataType::kFloat64
                                        : kNoDataType;
}

// Throws for such a type.
inline DataType data_type(torch::headeronly::ScalarType type) {
  const DataType found = data_type_or_none(type);
  STD_TORCH_CHECK(found != kNoDataType,
                  "fused_layernorm: expected float32, float16, bfloat16 or float64, got ",
                  torch::headeronly::toString(type));
  return found;
}

inline torch::headeronly::ScalarType scalar_type(DataType type) {
  using torch::headeronly::ScalarType;
  constexpr ScalarType kTypes[] = {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16,
                                   ScalarType::Double};
  return kTypes[static_cast<int>(type)];
}

// A tensor of either library in a description.
template <class Tensor>
RawTensor raw_of(const Tensor& tensor, int16_t device) {
  return {tensor.const_data_ptr(),
          tensor.sizes().data(),
          tensor.strides().data(),
          tensor.dim(),
          data_type_or_none(tensor.scalar_type()),
          device,
          tensor.is_contiguous()};
}

}  // namespace fused_layernorm

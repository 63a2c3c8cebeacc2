// SPDX-License-Identifier: Apache-2.0
// Maps PyTorch's data types to those of the kernels, and back.
#pragma once

#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "base/types.h"

namespace fused_layernorm {

// Throws for a type that no kernel computes with.
inline DataType data_type(torch::headeronly::ScalarType type) {
  using torch::headeronly::ScalarType;
  switch (type) {
    case ScalarType::Float:
      return DataType::kFloat32;
    case ScalarType::Half:
      return DataType::kFloat16;
    case ScalarType::BFloat16:
      return DataType::kBFloat16;
    case ScalarType::Double:
      return DataType::kFloat64;
    default:
      STD_TORCH_CHECK(false,
                      "fused_layernorm: expected float32, float16, bfloat16 or float64, got ",
                      torch::headeronly::toString(type));
  }
}

inline torch::headeronly::ScalarType scalar_type(DataType type) {
  using torch::headeronly::ScalarType;
  constexpr ScalarType kTypes[] = {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16,
                                   ScalarType::Double};
  return kTypes[static_cast<int>(type)];
}

}  // namespace fused_layernorm

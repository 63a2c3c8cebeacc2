// SPDX-License-Identifier: Apache-2.0
// Maps PyTorch's data types to those of the kernels.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <optional>

#include "base/types.h"

namespace fused_layernorm {

// std::nullopt for a type that no kernel computes with.
inline std::optional<DataType> known_data_type(torch::headeronly::ScalarType type) {
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
      return std::nullopt;
  }
}

}  // namespace fused_layernorm

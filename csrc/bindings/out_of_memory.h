// SPDX-License-Identifier: Apache-2.0
// The exception of a failed allocation.
#pragma once

#include <stdexcept>

namespace fused_layernorm {

// The message begins with "CUDA out of memory", as PyTorch's own does, because programs look for
// that. "fused_layernorm" follows: by it fused_layernorm/ops/arguments.py recognises the error and
// turns it into a torch.OutOfMemoryError.
struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace fused_layernorm

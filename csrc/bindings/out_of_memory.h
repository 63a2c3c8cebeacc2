// The exception of a failed allocation.
#pragma once

#include <stdexcept>

namespace fused_layernorm {

// Its sentence begins as PyTorch's own does, for programs that look for it, and then with
// "fused_layernorm", for fused_layernorm/ops/arguments.py, which makes torch.OutOfMemoryError of
// it.
struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace fused_layernorm

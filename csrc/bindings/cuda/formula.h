// SPDX-License-Identifier: Apache-2.0
// Calls that no kernel takes: an operator gives what its formula does, the operator _formula_NAME
// of the same schema, which Python registers (fused_layernorm/ops/fallback.py).
#pragma once

#include <string>

#include "bindings/cuda/call.h"

namespace [[gnu::visibility("hidden")]] fused_layernorm {

// Thrown for a valid call that no kernel takes.
struct NoKernel {};

// Runs an operator's function. Where it throws NoKernel, `put_back` puts the arguments back into
// the call, and the formula's results take their place.
void call_formula(const std::string& name, StableIValue* stack);
template <typename Run, typename PutBack>
void run_or_formula(const std::string& name, StableIValue* stack, const Run& run,
                    const PutBack& put_back) {
  try {
    return run();
  } catch (const NoKernel&) {
  }
  put_back();
  call_formula(name, stack);
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// Calls that no kernel takes: an operator gives what its formula does, the operator _formula_NAME
// of the same schema, which Python registers (fused_layernorm/ops/load.py).
#pragma once

#include <string>

#include "bindings/cuda/call.h"

namespace [[gnu::visibility("hidden")]] fused_layernorm {

// Thrown for a valid call that no kernel takes.
struct NoKernel {};

// Ends a call, whose arguments have been read, with the results of its formula.
void call_formula(const std::string& name, Call& call);
// Ends it by run(), or if that throws NoKernel by the formula.
template <typename Run>
void run_or_formula(const std::string& name, Call& call, const Run& run) {
  try {
    return run();
  } catch (const NoKernel&) {
  }
  call_formula(name, call);
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// Autocast of the forward operators. The results are those of PyTorch's autocast, which runs
// layer_norm in float32 on every device but the CPU, where it does not change layer_norm. The
// kernels compute in float32 anyway, so the input is not converted: only the output is made
// float32.
#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <torch/headeronly/version.h>

#include "operators.h"

namespace fused_layernorm {

inline bool is_half(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

// PyTorch's autocast runs rms_norm in float32 from torch 2.12 on; before, it does not change it.
constexpr bool kRmsNormInFloat32 = TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 12;

template <class Op>
void autocast(const OperatorHandle& op, DispatchKeySet /*keys*/, Stack* stack) {
  IValue* arguments = arguments_on<Op>(stack);
  const Tensor& input = arguments[Op::kInput].toTensor();
  const at::ScalarType dtype = input.scalar_type();
  if (arguments[Op::kOutDtype].isNone() && !input.is_cpu() && is_half(dtype) &&
      (kRmsNormInFloat32 || !options_of<Op>(arguments).is_rms)) {
    arguments[Op::kOutDtype] = at::kFloat;
  }
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  const auto type_of = [&](size_t i) {
    return address_of(arguments[i]) ? arguments[i].toTensor().scalar_type() : dtype;
  };
  const auto unlike = [&](size_t i) { return is_half(type_of(i)) && type_of(i) != dtype; };
  const auto widen = [&](size_t i) {
    if (address_of(arguments[i]) && is_half(type_of(i))) {
      arguments[i] = arguments[i].toTensor().to(at::kFloat);
    }
  };
  for (const size_t i :
       {Op::kGatesSum ? size_t{Op::kGate} : kAbsent, size_t{Op::kShift}, size_t{Op::kScale}}) {
    if (i != kAbsent && unlike(i)) widen(i);
  }
  // The operators take weight and bias of one dtype only.
  const bool differ = address_of(arguments[Op::kWeight]) && address_of(arguments[Op::kBias]) &&
                      type_of(Op::kWeight) != type_of(Op::kBias);
  if (differ || unlike(Op::kWeight) || unlike(Op::kBias)) {
    widen(Op::kWeight);
    widen(Op::kBias);
  }
  op.callBoxed(stack);
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// The operators of schemas.cpp on CUDA: each passes its arguments to a function of ops.h.
#include "bindings/cuda/call.h"
#include "bindings/cuda/ops.h"
#include "bindings/driver.h"

namespace fused_layernorm {
namespace {

const Tensor* address_of(const std::optional<Tensor>& tensor) {
  return tensor ? &*tensor : nullptr;
}

// (add_)(ada_)layer_norm, or the same with _forward, which gives the statistics.
template <bool kHasResidual, bool kHasModulation, bool kGivesStatistics>
void forward_operator(StableIValue* stack, uint64_t arguments, uint64_t results) {
  Call call(stack, arguments, results);
  ForwardArguments a{call.take<Tensor>()};
  a.needs_statistics = kGivesStatistics;
  if (kHasResidual) a.residual = call.take<Tensor>();
  if (kHasResidual && kHasModulation) call.read(a.modulation.gate);
  call.read(a.normalized_ndim);
  if (kHasModulation) call.read(a.modulation.shift, a.modulation.scale);
  call.read(a.weight, a.bias, a.eps);
  if (!kHasModulation) call.read(a.activation, a.scale);
  call.read(a.out_dtype);
  const auto statistic = call.take<std::string>();
  const auto offset = call.take<double>();
  const auto rounds = call.take<bool>();
  if (!kHasModulation && !kHasResidual) call.read(a.keeps_order);
  a.kind = NormKind(statistic, offset, rounds);
  const ForwardResult result = run_forward(a);
  call.give({&result.y, address_of(result.residual_out), address_of(result.mean),
             address_of(result.rstd)});
}

// layer_norm_backward, ada_layer_norm_backward, or with a gate add_ada_layer_norm_backward.
template <bool kHasModulation, bool kHasGate>
void backward_operator(StableIValue* stack, uint64_t arguments, uint64_t results) {
  Call call(stack, arguments, results);
  const auto dy = call.take<Tensor>(), x = call.take<Tensor>();
  std::optional<Tensor> input, gate;
  if (kHasGate) input = call.take<Tensor>();
  if (kHasGate) gate = call.take<Tensor>();
  const auto normalized_ndim = call.take<int64_t>();
  const auto mean = call.take<Tensor>(), rstd = call.take<Tensor>();
  BackwardArguments a{dy, x, normalized_ndim, mean, rstd};
  a.modulation.gate = gate;
  bool needs_dinput = false, needs_dgate = false;
  if (kHasModulation) call.read(a.modulation.shift, a.modulation.scale);
  call.read(a.weight, a.bias, a.dresidual);
  if (!kHasModulation) call.read(a.activation, a.scale);
  call.read(a.needs_dx);
  if (kHasGate) call.read(needs_dinput, needs_dgate);
  if (kHasModulation) call.read(a.needs_dshift, a.needs_dscale);
  call.read(a.needs_dweight, a.needs_dbias);
  const auto statistic = call.take<std::string>();
  const auto offset = call.take<double>();
  if (!kHasModulation) call.read(a.keeps_order);
  a.kind = NormKind(statistic, offset);
  if constexpr (kHasGate) {
    const auto [n, dinput, dgate] = run_gated_backward(a, *input, needs_dinput, needs_dgate);
    call.give({&n.dx, &dinput, &dgate, &n.dshift, &n.dscale, &n.dweight, &n.dbias});
  } else {
    const BackwardResult n = run_backward(a);
    call.give({&n.dx, kHasModulation ? &n.dshift : nullptr, kHasModulation ? &n.dscale : nullptr,
               &n.dweight, &n.dbias});
  }
}

}  // namespace

void register_cuda_kernels(torch::stable::detail::StableLibrary& library) {
  library.impl("layer_norm", &forward_operator<false, false, false>);
  library.impl("layer_norm_forward", &forward_operator<false, false, true>);
  library.impl("add_layer_norm", &forward_operator<true, false, false>);
  library.impl("add_layer_norm_forward", &forward_operator<true, false, true>);
  library.impl("layer_norm_backward", &backward_operator<false, false>);
  library.impl("ada_layer_norm", &forward_operator<false, true, false>);
  library.impl("ada_layer_norm_forward", &forward_operator<false, true, true>);
  library.impl("add_ada_layer_norm", &forward_operator<true, true, false>);
  library.impl("add_ada_layer_norm_forward", &forward_operator<true, true, true>);
  library.impl("ada_layer_norm_backward", &backward_operator<true, false>);
  library.impl("add_ada_layer_norm_backward", &backward_operator<true, true>);
  library.impl("gate_backward", TORCH_BOX(&run_gate_backward));
  register_head_kernels(library);
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// The operators of schemas.cpp on CUDA: each passes its arguments to a function of ops.h.
#include "bindings/cuda/call.h"
#include "bindings/cuda/ops.h"
#include "bindings/driver.h"
#include "call/arguments.h"

namespace fused_layernorm {
namespace {

using MaybeTensor = std::optional<Tensor>;

const Tensor* address_of(const MaybeTensor& tensor) { return tensor ? &*tensor : nullptr; }

// (add_)(ada_)layer_norm, or the same with _forward, which gives the statistics.
template <class Op, bool kGivesStatistics>
void forward_operator(StableIValue* stack, uint64_t arguments, uint64_t results) {
  Call call(stack, arguments, results);
  ForwardArguments a{call.at<Tensor>(Op::kInput)};
  a.needs_statistics = kGivesStatistics;
  if constexpr (Op::kHasResidual) a.residual = call.at<Tensor>(Op::kResidual);
  if constexpr (Op::kHasGate) a.gate = call.at<MaybeTensor>(Op::kGate);
  if constexpr (Op::kHasModulation) {
    a.shift = call.at<MaybeTensor>(Op::kShift);
    a.scale = call.at<MaybeTensor>(Op::kScale);
  }
  a.weight = call.at<MaybeTensor>(Op::kWeight);
  a.bias = call.at<MaybeTensor>(Op::kBias);
  a.out_dtype = call.at<std::optional<ScalarType>>(Op::kOutDtype);
  a.options = read_options<Op>(call);
  const ForwardResult result = run_forward(a);
  call.give({&result.y, address_of(result.residual_out), address_of(result.mean),
             address_of(result.rstd)});
}

template <class Op>
void backward_operator(StableIValue* stack, uint64_t arguments, uint64_t results) {
  Call call(stack, arguments, results);
  BackwardArguments a{call.at<Tensor>(Op::kDy), call.at<Tensor>(Op::kX), call.at<Tensor>(Op::kMean),
                      call.at<Tensor>(Op::kRstd)};
  a.weight = call.at<MaybeTensor>(Op::kWeight);
  a.bias = call.at<MaybeTensor>(Op::kBias);
  a.dresidual = call.at<MaybeTensor>(Op::kDresidual);
  a.needs.dx = call.flag(Op::kNeedsDx);
  a.needs.dweight = call.flag(Op::kNeedsDweight);
  a.needs.dbias = call.flag(Op::kNeedsDbias);
  if constexpr (Op::kHasModulation) {
    a.shift = call.at<MaybeTensor>(Op::kShift);
    a.scale = call.at<MaybeTensor>(Op::kScale);
    a.needs.dshift = call.flag(Op::kNeedsDshift);
    a.needs.dscale = call.flag(Op::kNeedsDscale);
  }
  if constexpr (Op::kHasGate) {
    a.input = call.at<Tensor>(Op::kInput);
    a.gate = call.at<Tensor>(Op::kGate);
    a.needs.dinput = call.flag(Op::kNeedsDinput);
    a.needs.dgate = call.flag(Op::kNeedsDgate);
  }
  a.options = read_options<Op>(call);
  const BackwardResult n = run_backward(a);
  call.give({&n.dx, address_of(n.dinput), address_of(n.dgate),
             Op::kHasModulation ? &n.dshift : nullptr, Op::kHasModulation ? &n.dscale : nullptr,
             &n.dweight, &n.dbias});
}

template <bool kWithModulation, bool kWithResidual>
void register_forward(torch::stable::detail::StableLibrary& library) {
  using Op = NormForward<kWithModulation, kWithResidual>;
  library.impl(Op::name(false).c_str(), &forward_operator<Op, false>);
  library.impl(Op::name(true).c_str(), &forward_operator<Op, true>);
}

template <bool kWithModulation, bool kWithGate>
void register_backward(torch::stable::detail::StableLibrary& library) {
  using Op = NormBackward<kWithModulation, kWithGate>;
  library.impl(Op::kName, &backward_operator<Op>);
}

}  // namespace

void register_cuda_kernels(torch::stable::detail::StableLibrary& library) {
  register_forward<false, false>(library);
  register_forward<false, true>(library);
  register_forward<true, false>(library);
  register_forward<true, true>(library);
  register_backward<false, false>(library);
  register_backward<true, false>(library);
  register_backward<true, true>(library);
  library.impl("gate_backward", TORCH_BOX(&run_gate_backward));
  register_head_kernels(library);
  register_group_kernels(library);
  register_gated_kernels(library);
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// The operators of call/schemas.h on CUDA: each reads its arguments, whichever it has, and runs
// (ops.h).
#include <array>
#include <string>
#include <type_traits>

#include "bindings/cuda/call.h"
#include "bindings/cuda/formula.h"
#include "bindings/cuda/ops.h"
#include "bindings/driver.h"
#include "call/arguments.h"

namespace fused_layernorm {
namespace {

using MaybeTensor = std::optional<Tensor>;

const Tensor* address_of(const MaybeTensor& tensor) { return tensor ? &*tensor : nullptr; }

template <class Op>
NormArguments read(Call& call) {
  NormArguments a;
  each_tensor<Op, MaybeTensor>([&](size_t position, bool is_optional, auto member) {
    a.*member = is_optional ? call.at<MaybeTensor>(position) : call.at<Tensor>(position);
  });
  a.backward = Op::kDy != kAbsent;
  each_gradient<Op, MaybeTensor>(
      [&](size_t position, const auto& field) { a.needs.*field.needed = call.flag(position); });
  // In front of the options, one of which may be refused: what is not read then, leaks.
  if constexpr (Op::kOutDtype != kAbsent) {
    a.out_dtype = call.at<std::optional<ScalarType>>(Op::kOutDtype);
  }
  a.options = read_options<Op>(call);
  return a;
}

template <class Op, bool kGivesStatistics>
void norm_operator(StableIValue* stack, uint64_t arguments, uint64_t results) {
  static_assert(kIsForward<Op> || is_backward<Op>(), "every operator has these arguments");
  Call call(stack, arguments, results);
  NormArguments a = read<Op>(call);
  a.needs_statistics = kGivesStatistics;
  static const std::string name = kGivesStatistics ? name_with_statistics<Op>() : Op::kName;
  const auto by_kernel = [&] {
    const Results given = run(a);
    std::array<const Tensor*, std::size(kGradientFields<int>)> addresses = {};
    size_t count = 0;
    if (!a.backward) {
      for (const auto* each : {&given.y, &given.residual_out, &given.mean, &given.rstd}) {
        addresses[count++] = address_of(*each);
      }
    }
    each_gradient<Op, MaybeTensor>(
        [&](size_t, const auto& field) { addresses[count++] = address_of(given.*field.member); });
    call.give(addresses);
  };
  run_or_formula(name, call, by_kernel);
}

void gate_backward(StableIValue* stack, uint64_t arguments, uint64_t results) {
  Call call(stack, arguments, results);
  const Tensor dsum = call.at<Tensor>(0), input = call.at<Tensor>(1), gate = call.at<Tensor>(2);
  bool needs_dinput = false, needs_dgate = false;
  call.read(needs_dinput, needs_dgate);
  const auto by_kernel = [&] {
    const auto [dinput, dgate] = run_gate_backward(dsum, input, gate, needs_dinput, needs_dgate);
    call.give(std::array{&dinput, &dgate});
  };
  run_or_formula(schemas::GateBackward::kName, call, by_kernel);
}

}  // namespace

void register_cuda_kernels(torch::stable::detail::StableLibrary& library) {
  ForwardOperators::each([&](auto op) {
    using Op = decltype(op);
    library.impl(Op::kName, &norm_operator<Op, false>);
    library.impl(name_with_statistics<Op>().c_str(), &norm_operator<Op, true>);
  });
  BackwardOperators::each(
      [&](auto op) { library.impl(op.kName, &norm_operator<decltype(op), false>); });
  library.impl(schemas::GateBackward::kName, &gate_backward);
  register_head_kernels(library);
}

}  // namespace fused_layernorm

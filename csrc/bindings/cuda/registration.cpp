// SPDX-License-Identifier: Apache-2.0
// The operators of call/schemas.h on CUDA: each reads its arguments, whichever it has, and passes
// them to its family's function of ops.h. Also what these functions share.
#include <torch/csrc/stable/ops.h>

#include <array>
#include <iterator>
#include <limits>
#include <string>
#include <type_traits>

#include "bindings/cuda/call.h"
#include "bindings/cuda/formula.h"
#include "bindings/cuda/ops.h"
#include "bindings/driver.h"
#include "call/arguments.h"
#include "call/types.h"

namespace fused_layernorm {
namespace {

using MaybeTensor = std::optional<Tensor>;

const Tensor* address_of(const MaybeTensor& tensor) { return tensor ? &*tensor : nullptr; }

template <class Op>
void read_norm(Call& call, NormArguments& into) {
  for (const auto& [position, member] : kParameters<Op, NormArguments>) {
    if (position == kAbsent) continue;
    const bool is_tensor = position == Op::kGate && !Op::kGateIsOptional;
    into.*member = is_tensor ? call.at<Tensor>(position) : call.at<MaybeTensor>(position);
  }
  into.options = read_options<Op>(call);
}

// The reverse of read_norm.
template <class Op>
void put_norm(Call& call, const NormArguments& a) {
  for (const auto& [position, member] : kParameters<Op, NormArguments>) {
    if (position == Op::kGate && Op::kHasGate && !Op::kGateIsOptional) {
      call.put(position, *(a.*member));
    } else {
      call.put(position, a.*member);
    }
  }
  write_options<Op>(a.options, [&](size_t position, const auto& value) {
    using Value = std::decay_t<decltype(value)>;
    if constexpr (std::is_same_v<Value, std::string_view>) {
      call.put(position, std::string(value));
    } else if constexpr (std::is_same_v<Value, std::optional<std::string_view>>) {
      call.put(position, value ? std::optional(std::string(*value)) : std::nullopt);
    } else {
      call.put(position, value);
    }
  });
}

template <class Op, typename Given>
auto run(const Given& a) {
  if constexpr (Op::kHasGroups) {
    return run_groups(a);
  } else if constexpr (Op::kHasGate && !Op::kGatesSum) {
    return run_gated(a);
  } else if constexpr (std::is_same_v<Given, ForwardArguments>) {
    return run_forward(a);
  } else {
    return run_backward(a);
  }
}

template <class Op, bool kGivesStatistics>
void forward_operator(StableIValue* stack, uint64_t arguments, uint64_t results) {
  static_assert(kIsForward<Op>, "every forward operator has these arguments");
  Call call(stack, arguments, results);
  ForwardArguments a{{}, call.at<Tensor>(Op::kInput)};
  if constexpr (Op::kHasResidual) a.residual = call.at<Tensor>(Op::kResidual);
  // In front of the options, one of which may be refused: what is not read then, leaks.
  a.out_dtype = call.at<std::optional<ScalarType>>(Op::kOutDtype);
  read_norm<Op>(call, a);
  a.needs_statistics = kGivesStatistics;
  static const std::string name = kGivesStatistics ? name_with_statistics<Op>() : Op::kName;
  const auto by_kernel = [&] {
    const ForwardResult result = run<Op>(a);
    call.give(std::array{&result.y, address_of(result.residual_out), address_of(result.mean),
                         address_of(result.rstd)});
  };
  run_or_formula(name, stack, by_kernel, [&] {
    put_norm<Op>(call, a);
    call.put(Op::kInput, a.input);
    if constexpr (Op::kHasResidual) call.put(Op::kResidual, *a.residual);
    call.put(Op::kOutDtype, a.out_dtype);
  });
}

template <class Op>
void backward_operator(StableIValue* stack, uint64_t arguments, uint64_t results) {
  static_assert(is_backward<Op>(), "every backward operator has these arguments");
  Call call(stack, arguments, results);
  BackwardArguments a{
      {}, call.at<Tensor>(Op::kDy), call.at<Tensor>(Op::kX), call.at<Tensor>(Op::kRstd)};
  if constexpr (Op::kMean != kAbsent) a.mean = call.at<Tensor>(Op::kMean);
  if constexpr (Op::kGatesSum) a.input = call.at<Tensor>(Op::kInput);
  if constexpr (Op::kDresidual != kAbsent) a.dresidual = call.at<MaybeTensor>(Op::kDresidual);
  read_norm<Op>(call, a);
  for (const auto& flag : kGradientFlags<Op, MaybeTensor>) {
    if (flag.position != kAbsent) a.needs.*flag.needed = call.flag(flag.position);
  }
  const auto by_kernel = [&] {
    const BackwardResult gradients = run<Op>(a);
    std::array<const Tensor*, std::size(kGradientFlags<Op, MaybeTensor>)> given = {};
    for (size_t i = 0; i < given.size(); ++i) {
      const auto& flag = kGradientFlags<Op, MaybeTensor>[i];
      if (flag.position != kAbsent) given[i] = address_of(gradients.*flag.gradient);
    }
    call.give(given);
  };
  run_or_formula(Op::kName, stack, by_kernel, [&] {
    put_norm<Op>(call, a);
    call.put_all(Op::kDy, a.dy, a.x);
    call.put(Op::kRstd, a.rstd);
    if constexpr (Op::kMean != kAbsent) call.put(Op::kMean, *a.mean);
    if constexpr (Op::kGatesSum) call.put(Op::kInput, *a.input);
    call.put(Op::kDresidual, a.dresidual);
    for (const auto& flag : kGradientFlags<Op, MaybeTensor>) {
      if (flag.position != kAbsent) call.put(flag.position, a.needs.*flag.needed);
    }
  });
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
  run_or_formula(schemas::GateBackward::kName, stack, by_kernel,
                 [&] { call.put_all(0, dsum, input, gate, needs_dinput, needs_dgate); });
}

}  // namespace

void describe(const NormArguments& a, NormCall& call) {
  call.options = a.options;
  describe_parameters(a, call, [](const MaybeTensor& tensor) { return raw(tensor); });
}

void new_statistics(const Tensor& x, const std::vector<int64_t>& sizes, DataType type, bool is_rms,
                    ForwardResult& result) {
  const ScalarType of = scalar_type(statistics_type(type));
  const auto statistic = [&](double of_nothing) {
    Tensor made = empty(x, sizes.data(), static_cast<int64_t>(sizes.size()), of);
    if (x.numel() == 0) torch::stable::fill_(made, of_nothing);
    return made;
  };
  result.mean = is_rms ? none(x, of) : statistic(0.0);
  result.rstd = statistic(std::numeric_limits<double>::quiet_NaN());
}

Tensor new_gradient(bool needed, const MaybeTensor& parameter, ScalarType type, const Tensor& x,
                    bool is_empty, void*& data) {
  if (!needed) return none(x, parameter ? parameter->scalar_type() : x.scalar_type());
  CHECK_ARGUMENT(parameter, "a gradient is asked for of a parameter that is not there");
  Tensor result = empty_like(*parameter, type);
  if (is_empty) torch::stable::zero_(result);
  data = result.mutable_data_ptr();
  return result;
}

void register_cuda_kernels(torch::stable::detail::StableLibrary& library) {
  ForwardOperators::each([&](auto op) {
    using Op = decltype(op);
    library.impl(Op::kName, &forward_operator<Op, false>);
    library.impl(name_with_statistics<Op>().c_str(), &forward_operator<Op, true>);
  });
  BackwardOperators::each(
      [&](auto op) { library.impl(op.kName, &backward_operator<decltype(op)>); });
  library.impl(schemas::GateBackward::kName, &gate_backward);
  register_head_kernels(library);
}

}  // namespace fused_layernorm

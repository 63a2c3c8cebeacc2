// SPDX-License-Identifier: Apache-2.0
// What the overrides of all norms share (override.h): which are in force, and which parameters they
// take.
#pragma once

#include <ATen/autocast_mode.h>

#include <atomic>
#include <optional>

#include "autocast.h"
#include "autograd.h"

namespace fused_layernorm {

using OptionalTensor = std::optional<Tensor>;
inline const OptionalTensor kNoTensor;

struct Override {
  std::atomic<bool> is_on = false;
  std::atomic<int64_t> taken = 0;  // calls, also those that asked; for tests
};

template <c10::DeviceType device>
Override& override_of() {
  static Override instance;
  return instance;
}

template <c10::DeviceType device>
bool is_on() {
  return override_of<device>().is_on.load(std::memory_order_relaxed);
}

// Whether this thread is inside a call that was taken: the composite operators call these operators
// themselves.
inline thread_local bool is_inside = false;

class Taken {
 public:
  explicit Taken(Override& entry) : entry_(entry) { is_inside = true; }
  ~Taken() {
    is_inside = false;
    ++entry_.taken;
  }

 private:
  Override& entry_;
};

template <c10::DeviceType device>
constexpr c10::DispatchKey kBackendKey =
    device == at::kCUDA ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;

// ---- What is valid by PyTorch's own rules.

inline bool is_known(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble || is_half(type);
}

// `type`: of the parameter beside x, or whether autocast makes both float32.
enum class Beside { kSame, kSameOrFloat, kAnyFloat };

inline bool takes_parameter(const OptionalTensor& p, const Tensor& x, at::IntArrayRef shape,
                            Beside beside = Beside::kSame) {
  if (!p || !p->defined()) return true;
  const at::ScalarType type = p->scalar_type();
  const bool fits =
      beside == Beside::kAnyFloat
          ? type == at::kFloat || is_half(type) || type == x.scalar_type()
          : type == x.scalar_type() ||
                (beside == Beside::kSameOrFloat && type == at::kFloat && is_half(x.scalar_type()));
  return fits && p->device() == x.device() && p->sizes() == shape;
}

// ---- What a call at an Autograd or Autocast key goes on to. `Norm` is what it is given: RowsNorm
// ---- (override.h) or GroupsNorm (override_groups.h).

// The call of our operator.
template <class Norm>
ForwardCall call_of(const Norm& norm, const Tensor& input) {
  ForwardCall call;
  call.options = norm.options();
  call.input = &input;
  call.weight = address_of(norm.weight);
  call.bias = address_of(norm.bias);
  return call;
}

// The result of a call that asks for our kernels, by our operator, which knows modes and
// transforms. Most of what that would refuse is refused before autograd has saved a tensor of it.
template <class Norm>
Tensor by_operator(const Norm& norm) {
  static const OperatorHandle op = find_operator(Norm::Op::kName);
  const bool autocast = at::autocast::is_autocast_enabled(norm.x.device().type());
  TORCH_CHECK_VALUE(norm.is_taken(autocast ? Beside::kAnyFloat : Beside::kSameOrFloat),
                    "the kernels do not take such a norm");
  Stack stack = stack_of<typename Norm::Op>(call_of(norm, norm.x));
  op.callBoxed(stack);
  return stack[0].toTensor();
}

// Our result, undefined if the call is not taken. It has asked, or the override is on.
template <c10::DeviceType device, bool kUnderAutocast, class Norm>
Tensor by_kernel(DispatchKeySet keys, const Norm& norm, bool asked) {
  using Op = typename Norm::Op;
  const Beside beside = kUnderAutocast                ? Beside::kAnyFloat
                        : asked || norm.takes_float() ? Beside::kSameOrFloat
                                                      : Beside::kSame;
  if (is_inside || !is_next(keys, kBackendKey<device>) ||
      (kUnderAutocast && norm.x.scalar_type() == at::kDouble) || !norm.is_taken(beside)) {
    return asked ? by_operator(norm) : Tensor();
  }
  static const OperatorHandle op = find_operator(Op::kName);
  const Tensor input = asked ? norm.x : norm.pytorchs_input();
  const ForwardCall call = call_of(norm, input);
  Tensor y;
  const Taken guard(override_of<device>());
  naming_out_of_memory([&] {
    if (kUnderAutocast) {
      Stack stack = stack_of<Op>(call);
      autocast<Op>(op, keys, &stack);
      y = std::move(stack[0]).toTensor();
    } else {
      y = differentiate_forward<Op, false>(op, keys, call).y;
    }
  });
  return y;
}

// PyTorch's own kernels at AutocastCUDA cast every argument to float32 and call the operator.
inline Tensor as_autocast_casts(const Tensor& t) {
  return at::autocast::cached_cast(at::kFloat, t, at::kCUDA);
}
inline OptionalTensor as_autocast_casts(const OptionalTensor& t) {
  return at::autocast::cached_cast(at::kFloat, t, at::kCUDA);
}
template <class Other>
const Other& as_autocast_casts(const Other& no_tensor) {
  return no_tensor;
}

// A call without our kernel. At autograd's key it goes to PyTorch's composite, or if another
// package has registered a kernel for the backend, to whatever comes next.
template <class Aten, c10::DeviceType device, bool kUnderAutocast, class... Arguments>
Tensor by_pytorch(DispatchKeySet keys, const Arguments&... arguments) {
  if constexpr (kUnderAutocast) {
    const c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::AutocastCUDA);
    return Aten::call(as_autocast_casts(arguments)...);
  } else {
    static const OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(Aten::name, "");
    const bool has_kernel = op.hasKernelForDispatchKey(kBackendKey<device>);
    return Aten::redispatch(
        has_kernel ? keys & c10::after_autograd_keyset : DispatchKeySet(kBackendKey<device>),
        arguments...);
  }
}

}  // namespace fused_layernorm

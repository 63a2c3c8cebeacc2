// SPDX-License-Identifier: Apache-2.0
// What the overrides of all norms share (override.h): which are in force, what stands behind them,
// and which parameters they take.
#pragma once

#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "autocast.h"
#include "autograd.h"

namespace fused_layernorm {

using OptionalTensor = std::optional<Tensor>;

enum Native {
  kForward,
  kBackward,
  kRmsForward,
  kRmsBackward,
  kGroupForward,
  kGroupBackward,
  kNatives
};
constexpr const char* kNativeNames[kNatives] = {
    "aten::native_layer_norm", "aten::native_layer_norm_backward",
    "aten::_fused_rms_norm",   "aten::_fused_rms_norm_backward",
    "aten::native_group_norm", "aten::native_group_norm_backward"};

struct Override {
  std::atomic<bool> is_on = false;
  std::atomic<int64_t> taken = 0;  // calls, also those that asked; for tests
  // The kernels that ours replaced, where PyTorch has them for the key.
  std::array<std::optional<c10::SafeKernelFunction>, kNatives> replaced;
  std::vector<torch::Library> libraries;
};

// Never destroyed, because the dispatcher may be destroyed first when the process exits.
template <c10::DeviceType device>
Override& override_of() {
  static auto* const instance = new Override;
  return *instance;
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

inline OptionalTensor optional_of(const IValue& value) {
  return is_defined(value) ? OptionalTensor(value.toTensor()) : std::nullopt;
}

// ---- What a call that is not taken goes on to.

// PyTorch's own kernels at AutocastCUDA cast every argument to float32 and call the operator.
template <class Tensors>
Tensors as_autocast_casts(const Tensors& t) {
  return at::autocast::cached_cast(at::kFloat, t, at::kCUDA);
}

inline OperatorHandle aten(const std::string& name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(("aten::" + name).c_str(), "");
}

// Where a call goes without our kernel at autograd's key: to PyTorch's composite, or if another
// package has registered a kernel for the backend, to whatever comes next.
template <c10::DeviceType device>
DispatchKeySet below(const OperatorHandle& op, DispatchKeySet keys) {
  return op.hasKernelForDispatchKey(kBackendKey<device>) ? keys & c10::after_autograd_keyset
                                                         : DispatchKeySet(kBackendKey<device>);
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// override_aten(): PyTorch's layer_norm, rms_norm and group_norm on this package's kernels; those
// of group_norm are in override_groups.h.
//
// The first override of a process registers kernels for `aten`; they stay, and a flag says whether
// they act. A call that they do not take, and every call while the flag is off, goes on to what
// PyTorch runs without them. A call that has begun ends as it began, and a graph that our nodes are
// part of runs backward on our kernels, whatever the flag says by then.
//
//   layer_norm, rms_norm at Autograd    our forward and our node. PyTorch has composites there,
//                                       which modes, transforms and FakeTensors get, as before.
//   the same at AutocastCUDA            input is not cast: the kernel writes float32 from it.
//   the same at BackendSelect           calls under inference_mode that ask (below).
//   native_layer_norm, _fused_rms_norm  what reaches them otherwise: inference_mode, vmap, calls by
//   and their backwards at CUDA         name, nodes that PyTorch made.
//
// Those of layer_norm and its like are registered when the library is loaded, because this package
// calls them itself: no other call from Python takes the host as little time. It asks for our
// kernels, whatever the flag says, by a number that nobody else writes (kAsks).
//
// The CPU's keys are for tests: there composite operators stand for the kernels.
#pragma once

#include <ATen/ops/layer_norm.h>
#include <ATen/ops/layer_norm_ops.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/rms_norm_ops.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/chip.h"
#include "override_entry.h"
#include "override_groups.h"

namespace fused_layernorm {

// ---- Which calls are taken: only such as are valid by PyTorch's own rules. All others go to
// ---- PyTorch, which raises its own errors.

inline bool takes_input(const Tensor& x, at::IntArrayRef shape) {
  const int64_t leading = x.dim() - static_cast<int64_t>(shape.size());
  if (!is_known(x.scalar_type()) || shape.empty() || leading < 0 ||
      x.sizes().slice(leading) != shape) {
    return false;
  }
  return c10::multiply_integers(x.sizes().slice(0, leading)) <= kMostExtent &&
         c10::multiply_integers(shape) <= kMostExtent;
}

inline bool takes_statistic(const Tensor& t, const Tensor& x, at::IntArrayRef shape) {
  return t.scalar_type() == statistics_type(x.scalar_type()) && t.device() == x.device() &&
         t.sizes() == statistics_shape(x.sizes(), shape.size());
}

// PyTorch's epsilon where the caller gives none: that of the type in which it computes.
inline double eps_of(std::optional<double> eps, const Tensor& x) {
  if (eps) return *eps;
  return x.scalar_type() == at::kDouble ? std::numeric_limits<double>::epsilon()
                                        : std::numeric_limits<float>::epsilon();
}

// What layer_norm or rms_norm is given.
struct RowsNorm {
  using Op = LayerNorm;
  const Tensor& x;
  const std::optional<at::IntArrayRef> shape;  // none if it is symbolic
  const OptionalTensor &weight, &bias;
  const std::optional<double> eps;
  const bool is_rms;

  // PyTorch's rms_norm takes a float32 weight beside half precision.
  bool takes_float() const { return is_rms; }
  bool is_taken(Beside beside) const {
    return shape && takes_input(x, *shape) && takes_parameter(weight, x, *shape, beside) &&
           takes_parameter(bias, x, *shape, beside) && !std::isnan(eps_of(eps, x));
  }
  const Tensor& pytorchs_input() const { return x; }
  NormOptions options() const {
    NormOptions options;
    options.normalized_ndim = static_cast<int64_t>(shape->size());
    options.eps = eps_of(eps, x);
    options.is_rms = is_rms;
    return options;
  }
};

// ---- PyTorch's norms: what they are given, and what becomes of a call.

// By this a caller asks for our kernels (calls.ASKS): it stands behind the sizes of
// normalized_shape, or is added to the number of groups. PyTorch refuses a call that does not come
// here. Smaller numbers would cost an allocation: c10::SymInt does not hold them itself.
constexpr int64_t kAsks = -(int64_t{1} << 62);

inline bool asks(c10::SymIntArrayRef shape) {
  return !shape.empty() && shape.back().maybe_as_int() == kAsks;
}

inline bool asks(int64_t groups) { return kAsks < groups && groups <= kAsks + kMostExtent; }

inline std::optional<at::IntArrayRef> sizes_of(c10::SymIntArrayRef shape) {
  return c10::asIntArrayRefSlowOpt(shape.slice(0, shape.size() - asks(shape)));
}

inline RowsNorm norm_of(const Tensor& x, c10::SymIntArrayRef shape, const OptionalTensor& weight,
                        const OptionalTensor& bias, double eps, bool /*cudnn_enable*/) {
  return {x, sizes_of(shape), weight, bias, eps, /*is_rms=*/false};
}
inline RowsNorm norm_of(const Tensor& x, c10::SymIntArrayRef shape, const OptionalTensor& weight,
                        std::optional<double> eps) {
  return {x, sizes_of(shape), weight, kNoTensor, eps, /*is_rms=*/true};
}
inline GroupsNorm norm_of(const Tensor& x, int64_t groups, const OptionalTensor& weight,
                          const OptionalTensor& bias, double eps, bool /*cudnn_enabled*/) {
  return {x, asks(groups) ? groups - kAsks : groups, weight, bias, eps};
}

// Our kernels for a norm of PyTorch's. Its second argument (a shape, a number of groups) says
// whether a call asks for them.
template <class Aten, class Schema = typename Aten::schema>
struct AtenNorm;
template <class Aten, class Second, class... Rest>
struct AtenNorm<Aten, Tensor(const Tensor&, Second, Rest...)> {
  template <c10::DeviceType device, bool kUnderAutocast>
  static Tensor at_autograd(DispatchKeySet keys, const Tensor& x, Second second, Rest... rest) {
    const bool asked = asks(second);
    if (asked || is_on<device>()) {
      const Tensor y = by_kernel<device, kUnderAutocast>(keys, norm_of(x, second, rest...), asked);
      if (y.defined()) return y;
    }
    return by_pytorch<Aten, device, kUnderAutocast>(keys, x, second, rest...);
  }
  // What inference mode leads to, which skips autograd's keys, for calls that ask.
  template <c10::DeviceType device>
  static Tensor at_select(DispatchKeySet keys, const Tensor& x, Second second, Rest... rest) {
    if (asks(second) && x.device().type() == device) {
      return by_operator(norm_of(x, second, rest...));
    }
    return Aten::redispatch(keys & kBelowSelect, x, second, rest...);
  }
};
using AtenLayerNorm = AtenNorm<at::_ops::layer_norm>;
using AtenRmsNorm = AtenNorm<at::_ops::rms_norm>;
using AtenGroupNorm = AtenNorm<at::_ops::group_norm>;

// ---- The native operators. The stack holds an operator's arguments, for which its results are put
// ---- in place.

// native_layer_norm(x, shape, weight, bias, eps), _fused_rms_norm(x, shape, weight, eps).
inline bool take_forward(DispatchKeySet keys, Stack* stack, bool is_rms, Override& entry) {
  const size_t count = is_rms ? 4 : 5;
  const IValue* const a = stack->data() + stack->size() - count;
  const Tensor& x = a[0].toTensor();
  const auto shape = a[1].toIntVector();
  const OptionalTensor weight = optional_of(a[2]), bias = is_rms ? std::nullopt : optional_of(a[3]);
  const RowsNorm norm = {x, shape, weight, bias, a[count - 1].toOptional<double>(), is_rms};
  if (!norm.is_taken(Beside::kSame)) return false;
  const Taken taken(entry);
  DirectOutputs out = with_statistics(keys, norm, x);
  torch::jit::drop(*stack, count);
  stack->emplace_back(std::move(out.y));
  if (!is_rms) stack->emplace_back(std::move(out.mean));
  stack->emplace_back(std::move(out.rstd));
  return true;
}

// native_layer_norm_backward(dy, x, shape, mean, rstd, weight, bias, mask),
// _fused_rms_norm_backward(dy, x, shape, rstd, weight, mask).
inline bool take_backward(Stack* stack, bool is_rms, Override& entry) {
  const size_t count = is_rms ? 6 : 8;
  const IValue* const a = stack->data() + stack->size() - count;
  const Tensor &dy = a[0].toTensor(), &x = a[1].toTensor();
  const auto shape = a[2].toIntVector();
  const IValue* const rest = a + (is_rms ? 3 : 4);  // from rstd on
  const Tensor &mean = a[3].toTensor(), &rstd = rest[0].toTensor();
  const OptionalTensor weight = optional_of(rest[1]),
                       bias = is_rms ? std::nullopt : optional_of(rest[2]);
  const auto mask = a[count - 1].toBoolList();
  const Needs needs = {mask[0], mask[1], !is_rms && mask[2]};
  if (!takes_input(x, shape) || dy.scalar_type() != x.scalar_type() || dy.device() != x.device() ||
      dy.sizes() != x.sizes() || !takes_statistic(mean, x, shape) ||
      !takes_statistic(rstd, x, shape) || !takes_parameter(weight, x, shape) ||
      !takes_parameter(bias, x, shape) || (!weight && needs.dweight) || (!bias && needs.dbias)) {
    return false;
  }
  NormOptions options;
  options.normalized_ndim = static_cast<int64_t>(shape.size());
  options.is_rms = is_rms;
  const SavedNorm saved = {dy,
                           x,
                           is_rms ? Tensor() : mean,
                           rstd,
                           weight.value_or(Tensor()),
                           bias.value_or(Tensor()),
                           Tensor()};
  const Taken taken(entry);
  GradientsOfNorm found = gradients_of<LayerNorm>(saved, options, needs);
  torch::jit::drop(*stack, count);
  stack->emplace_back(std::move(found.dx));
  stack->emplace_back(std::move(found.dweight));
  if (!is_rms) stack->emplace_back(std::move(found.dbias));
  return true;
}

template <Native which>
bool take(DispatchKeySet keys, Stack* stack, Override& entry) {
  if constexpr (which == kGroupForward) return take_group_forward(keys, stack, entry);
  if constexpr (which == kGroupBackward) return take_group_backward(stack, entry);
  constexpr bool kIsRms = which == kRmsForward || which == kRmsBackward;
  if (which == kForward || which == kRmsForward) return take_forward(keys, stack, kIsRms, entry);
  return take_backward(stack, kIsRms, entry);
}

template <c10::DeviceType device, Native which>
void native_operator(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  Override& entry = override_of<device>();
  if (entry.is_on.load(std::memory_order_relaxed) && !is_inside &&
      take<which>(keys, stack, entry)) {
    return;
  }
  const auto& replaced = entry.replaced[which];
  TORCH_CHECK_NOT_IMPLEMENTED(replaced, op.operator_name(), " has no kernel for ", keys);
  replaced->callBoxed(op, keys, stack);
}

// ---- On and off.

class NoWarnings : public c10::WarningHandler {
 public:
  void process(const c10::Warning& /*warning*/) override {}
};

template <c10::DeviceType device, Native which>
void register_native(torch::Library& library, Override& entry) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(kNativeNames[which], "");
  if (op.hasComputedKernelForDispatchKey(kBackendKey<device>)) {
    entry.replaced[which].emplace(op.getComputedKernelForDispatchKey(kBackendKey<device>));
  }
  library.impl(kNativeNames[which],
               torch::CppFunction::makeFromBoxedFunction<&native_operator<device, which>>());
}

using Libraries = std::vector<torch::Library>;

inline torch::Library& aten_at(c10::DispatchKey key, Libraries& libraries) {
  return libraries.emplace_back(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
}

template <c10::DeviceType device>
constexpr c10::DispatchKey kAutogradKey =
    device == at::kCUDA ? c10::DispatchKey::AutogradCUDA : c10::DispatchKey::AutogradCPU;

template <c10::DeviceType device>
Libraries register_norms() {
  // PyTorch warns once in a process, of the first kernel that replaces another.
  NoWarnings silent;
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  Libraries libraries;
  auto& autograd = aten_at(kAutogradKey<device>, libraries);
  autograd.impl("layer_norm", TORCH_FN((AtenLayerNorm::at_autograd<device, false>)));
  autograd.impl("rms_norm", TORCH_FN((AtenRmsNorm::at_autograd<device, false>)));
  autograd.impl("group_norm", TORCH_FN((AtenGroupNorm::at_autograd<device, false>)));
  if constexpr (device == at::kCUDA) {
    auto& autocast = aten_at(c10::DispatchKey::AutocastCUDA, libraries);
    autocast.impl("layer_norm", TORCH_FN((AtenLayerNorm::at_autograd<device, true>)));
    if (kRmsNormInFloat32) {
      autocast.impl("rms_norm", TORCH_FN((AtenRmsNorm::at_autograd<device, true>)));
    }
    autocast.impl("group_norm", TORCH_FN((AtenGroupNorm::at_autograd<device, true>)));
    auto& select = aten_at(c10::DispatchKey::BackendSelect, libraries);
    select.impl("layer_norm", TORCH_FN((AtenLayerNorm::at_select<device>)));
    select.impl("rms_norm", TORCH_FN((AtenRmsNorm::at_select<device>)));
    select.impl("group_norm", TORCH_FN((AtenGroupNorm::at_select<device>)));
  }
  return libraries;
}

template <c10::DeviceType device>
void register_override(Override& entry) {
  if constexpr (device == at::kCPU) entry.libraries = register_norms<device>();
  NoWarnings silent;
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  auto& natives = aten_at(kBackendKey<device>, entry.libraries);
  register_native<device, kForward>(natives, entry);
  register_native<device, kBackward>(natives, entry);
  register_native<device, kGroupForward>(natives, entry);
  register_native<device, kGroupBackward>(natives, entry);
  // On the CPU _fused_rms_norm is a composite, and its backward has no kernel.
  if constexpr (device == at::kCUDA) {
    register_native<device, kRmsForward>(natives, entry);
    register_native<device, kRmsBackward>(natives, entry);
  }
}

template <c10::DeviceType device>
void switch_override_of(bool on) {
  static std::once_flag registered;
  Override& entry = override_of<device>();
  if (on) std::call_once(registered, [&] { register_override<device>(entry); });
  entry.is_on = on;
}

inline bool is_cuda(const std::string& key) {
  TORCH_CHECK(key == "CUDA" || key == "CPU", "override_aten: no kernels for the dispatch key ",
              key);
  return key == "CUDA";
}

inline void switch_override(std::string key, bool on) {
  is_cuda(key) ? switch_override_of<at::kCUDA>(on) : switch_override_of<at::kCPU>(on);
}

inline int64_t override_calls(std::string key) {
  return is_cuda(key) ? override_of<at::kCUDA>().taken : override_of<at::kCPU>().taken;
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// override_aten(): PyTorch's layer_norm, rms_norm and group_norm on this package's kernels; those
// of group_norm are in override_groups.h.
//
// A flag says whether our kernels act. A call that they do not take, and every call while the flag
// is off, goes on to what PyTorch runs without them. A call that has begun ends as it began, and a
// graph that our nodes are part of runs backward on our kernels, whatever the flag says by then.
//
//   at Autograd      our forward and our node. PyTorch has composites there, which modes,
//                    transforms and FakeTensors get, as before.
//   at AutocastCUDA  input is not cast: the kernel writes float32 from it.
//   at BackendSelect what autograd does not see, as calls under inference_mode.
//
// The operators below them (native_layer_norm and its like) stay PyTorch's.
//
// The kernels are registered when the library is loaded, because this package calls them itself: no
// other call from Python takes the host as little time. It asks for our kernels, whatever the flag
// says, by a number that nobody else writes (kAsks), also for a modulated norm (kAsksModulated).
//
// The CPU's keys are for tests: there composite operators stand for the kernels.
#pragma once

#include <ATen/ExpandUtils.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/layer_norm_ops.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/rms_norm_ops.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
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

// The modulated norm that layer_norm is asked for: scale stands in the place of weight, shift in
// that of bias.
struct ModulatedNorm : RowsNorm {
  using Op = Operator<schemas::AdaLayerNorm>;
  bool is_taken(Beside /*beside*/) const {
    const auto takes = [&](const OptionalTensor& m) {
      return !address_of(m) || (m->scalar_type() == x.scalar_type() && m->device() == x.device() &&
                                at::is_expandable_to(m->sizes(), x.sizes()));
    };
    return shape && takes_input(x, *shape) && takes(weight) && takes(bias) && !std::isnan(*eps);
  }
};
inline ForwardCall call_of(const ModulatedNorm& norm, const Tensor& input) {
  ForwardCall call = call_of<RowsNorm>(norm, input);
  call.scale = std::exchange(call.weight, nullptr);
  call.shift = std::exchange(call.bias, nullptr);
  return call;
}

// ---- PyTorch's norms: what they are given, and what becomes of a call.

// By this a caller asks for our kernels (calls.ASKS): it stands behind the sizes of
// normalized_shape, or is added to the number of groups. PyTorch refuses a call that does not come
// here. Smaller numbers would cost an allocation: c10::SymInt does not hold them itself.
constexpr int64_t kAsks = -(int64_t{1} << 62);
// This one, behind layer_norm's sizes, asks for a modulated norm. Where the kernels do not take it,
// the result is undefined, which is None in Python: to raise would take the host longer.
constexpr int64_t kAsksModulated = kAsks + 1;

inline bool asks(c10::SymIntArrayRef shape, int64_t number = kAsks) {
  return !shape.empty() && shape.back().maybe_as_int() == number;
}

inline bool asks(int64_t groups) { return kAsks < groups && groups <= kAsks + kMostExtent; }

inline std::optional<at::IntArrayRef> sizes_of(c10::SymIntArrayRef shape) {
  return c10::asIntArrayRefSlowOpt(shape.slice(0, shape.size() - asks(shape)));
}

inline RowsNorm norm_of(const Tensor& x, c10::SymIntArrayRef shape, const OptionalTensor& weight,
                        const OptionalTensor& bias, double eps, bool /*cudnn_enable*/) {
  return {x, sizes_of(shape), weight, bias, eps, /*is_rms=*/false};
}
inline ModulatedNorm modulated_of(const Tensor& x, c10::SymIntArrayRef shape,
                                  const OptionalTensor& scale, const OptionalTensor& shift,
                                  double eps, bool cudnn_enable) {
  return {norm_of(x, shape.slice(0, shape.size() - 1), scale, shift, eps, cudnn_enable)};
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
  static constexpr bool kIsLayerNorm = std::is_same_v<Aten, at::_ops::layer_norm>;
  template <c10::DeviceType device, bool kUnderAutocast>
  static Tensor at_autograd(DispatchKeySet keys, const Tensor& x, Second second, Rest... rest) {
    const bool asked = asks(second);
    if constexpr (kIsLayerNorm) {
      if (asks(second, kAsksModulated)) {
        const ModulatedNorm norm = modulated_of(x, second, rest...);
        const bool is_taken = norm.is_taken(Beside::kSame);
        return is_taken ? by_kernel<device, kUnderAutocast>(keys, norm, /*asked=*/true) : Tensor();
      }
    }
    if (asked || is_on<device>()) {
      const Tensor y = by_kernel<device, kUnderAutocast>(keys, norm_of(x, second, rest...), asked);
      if (y.defined()) return y;
    }
    return by_pytorch<Aten, device, kUnderAutocast>(keys, x, second, rest...);
  }
  // What inference mode leads to, which skips autograd's keys. One kernel serves all devices.
  static Tensor at_select(DispatchKeySet keys, const Tensor& x, Second second, Rest... rest) {
    if constexpr (kIsLayerNorm) {
      if (asks(second, kAsksModulated) && x.is_cuda()) {
        const ModulatedNorm norm = modulated_of(x, second, rest...);
        return norm.is_taken(Beside::kSame) ? by_operator(norm) : Tensor();
      }
    }
    if (asks(second) && x.is_cuda()) return by_operator(norm_of(x, second, rest...));
    Tensor y;
    if (x.is_cuda() && is_on<at::kCUDA>()) {
      y = by_kernel<at::kCUDA, false>(keys, norm_of(x, second, rest...), /*asked=*/false);
    } else if (x.is_cpu() && is_on<at::kCPU>()) {
      y = by_kernel<at::kCPU, false>(keys, norm_of(x, second, rest...), /*asked=*/false);
    }
    return y.defined() ? y : Aten::redispatch(keys & kBelowSelect, x, second, rest...);
  }
};
using AtenLayerNorm = AtenNorm<at::_ops::layer_norm>;
using AtenRmsNorm = AtenNorm<at::_ops::rms_norm>;
using AtenGroupNorm = AtenNorm<at::_ops::group_norm>;
// GCC makes no member that only an argument of a template names (at_select, below).
template struct AtenNorm<at::_ops::layer_norm>;
template struct AtenNorm<at::_ops::rms_norm>;
template struct AtenNorm<at::_ops::group_norm>;

// ---- On and off.

class NoWarnings : public c10::WarningHandler {
 public:
  void process(const c10::Warning& /*warning*/) override {}
};

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
    select.impl("layer_norm", TORCH_FN(AtenLayerNorm::at_select));
    select.impl("rms_norm", TORCH_FN(AtenRmsNorm::at_select));
    select.impl("group_norm", TORCH_FN(AtenGroupNorm::at_select));
  }
  return libraries;
}

inline bool is_cuda(const std::string& key) {
  TORCH_CHECK(key == "CUDA" || key == "CPU", "override_aten: no kernels for the dispatch key ",
              key);
  return key == "CUDA";
}

inline void switch_override(std::string key, bool on) {
  if (is_cuda(key)) {
    override_of<at::kCUDA>().is_on = on;
    return;
  }
  static const Libraries libraries = register_norms<at::kCPU>();
  override_of<at::kCPU>().is_on = on;
}

inline int64_t override_calls(std::string key) {
  return is_cuda(key) ? override_of<at::kCUDA>().taken : override_of<at::kCPU>().taken;
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// override_aten(): runs aten::native_layer_norm, aten::_fused_rms_norm and their backwards on this
// package's kernels.
//
// Kernels registered for `aten` at run time replace PyTorch's own for one dispatch key, below
// PyTorch's C++ autograd. Deleting their library object brings PyTorch's kernels back. A call that
// our kernels do not take goes to the kernel that they replaced, which only Python can reach
// (torch.library.get_kernel): override.py registers it as fused_layernorm::_aten_*.
//
// PyTorch does not guard its dispatch table against calls from other threads while the table is
// written. Python threads are kept out: the table is written with the GIL held, after a pause in
// which threads that are already inside PyTorch leave it and wait for the GIL. The threads of a
// running backward need no GIL: if they call our kernels, the table is written right after one of
// these calls has ended, long before the next call. override.py keeps removed kernels alive, for
// calls that are still inside them.

#include <dlfcn.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/namespace.h"
#include "bindings/out_of_memory.h"
#ifdef FUSED_LAYERNORM_CUDA
#include "bindings/cuda/ops.h"
#endif

// PyTorch's exception for a Python type, declared as in torch/csrc/Exceptions.h of torch 2.10 to
// 2.15: PyTorch's Python bindings catch it by this name and raise python_type(). No stable header
// declares it. PyObject is declared here because the library includes no header of Python's.
struct _object;
using PyObject = _object;
namespace torch {
struct PyTorchError : std::exception {
  explicit PyTorchError(std::string message) : msg(std::move(message)) {}
  virtual PyObject* python_type() = 0;
  const char* what() const noexcept override { return msg.c_str(); }
  std::string msg;
};
}  // namespace torch

namespace fused_layernorm {
namespace {

using torch::headeronly::DeviceType;
using torch::stable::Tensor;
using torch::stable::detail::from;
using torch::stable::detail::StableLibrary;
using torch::stable::detail::to;
using Shape = std::vector<int64_t>;

// The override of one dispatch key. That of the CPU is for tests: it runs the composite operators.
struct Override {
  explicit Override(DeviceType d) : device(d) {}

  const DeviceType device;
  std::atomic<int64_t> left{0};            // calls that have returned or thrown
  std::unique_ptr<StableLibrary> library;  // the registration
};

// Never destroyed, because the dispatcher may be destroyed first when the process exits.
template <DeviceType device>
Override& override_of() {
  static auto* const instance = new Override(device);
  return *instance;
}

class CountedCall {
 public:
  explicit CountedCall(Override& entry) : entry_(entry) {}
  ~CountedCall() { ++entry_.left; }

 private:
  Override& entry_;
};

// Whether this thread is inside a composite operator that the CPU override runs. The composite may
// call these operators itself; such a call goes to the replaced kernel.
thread_local bool inside = false;

class Inside {
 public:
  Inside() { inside = true; }
  ~Inside() { inside = false; }
};

// ---- Which calls our kernels take: only calls that are valid by PyTorch's own rules. All others
// ---- go to PyTorch's kernel, which raises PyTorch's errors.

// The dtype as a plain number: torch::stable's enumeration lacks some of PyTorch's dtypes, and
// conversion to it throws for them.
int32_t dtype_of(const Tensor& t) {
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &dtype));
  return dtype;
}

bool equal(const Shape& shape, const Tensor& t, int64_t from_dim) {
  if (t.dim() - from_dim != static_cast<int64_t>(shape.size())) return false;
  for (size_t i = 0; i < shape.size(); ++i) {
    if (t.size(from_dim + static_cast<int64_t>(i)) != shape[i]) return false;
  }
  return true;
}

// Rows, and columns, are counted in 32 bits.
bool takes_extent(const Tensor& x, int64_t begin, int64_t end) {
  int64_t extent = 1;
  for (int64_t i = begin; i < end; ++i) extent *= x.size(i);
  return extent <= std::numeric_limits<int32_t>::max();
}

bool takes_input(const Tensor& x, const Shape& shape, DeviceType device) {
  const int32_t dtype = dtype_of(x);
  const int64_t leading = x.dim() - static_cast<int64_t>(shape.size());
  return (dtype == aoti_torch_dtype_bfloat16() || dtype == aoti_torch_dtype_float32() ||
          dtype == aoti_torch_dtype_float16() || dtype == aoti_torch_dtype_float64()) &&
         x.device().type() == device && !shape.empty() && leading >= 0 &&
         equal(shape, x, leading) && takes_extent(x, 0, leading) &&
         takes_extent(x, leading, x.dim());
}

bool like(const Tensor& t, const Tensor& x) {
  return dtype_of(t) == dtype_of(x) && t.device() == x.device();
}

// Autograd passes an absent weight or bias as an undefined tensor.
std::optional<Tensor> if_defined(const std::optional<Tensor>& p) {
  return p && p->defined() ? p : std::nullopt;
}

bool takes_parameter(const std::optional<Tensor>& p, const Tensor& x, const Shape& shape) {
  return !p || (like(*p, x) && equal(shape, *p, 0));
}

bool takes_statistic(const Tensor& t, const Tensor& x, const Shape& shape) {
  const int32_t dtype = dtype_of(x) == aoti_torch_dtype_float64() ? aoti_torch_dtype_float64()
                                                                  : aoti_torch_dtype_float32();
  const int64_t leading = x.dim() - static_cast<int64_t>(shape.size());
  if (dtype_of(t) != dtype || t.device() != x.device() || t.dim() != x.dim()) return false;
  for (int64_t i = 0; i < t.dim(); ++i) {
    if (t.size(i) != (i < leading ? x.size(i) : 1)) return false;
  }
  return true;
}

bool same_sizes(const Tensor& a, const Tensor& b) {
  if (a.dim() != b.dim()) return false;
  for (int64_t i = 0; i < a.dim(); ++i) {
    if (a.size(i) != b.size(i)) return false;
  }
  return true;
}

// ---- Calls by way of the dispatcher.

template <size_t size>
void call(const char* op, std::array<StableIValue, size>& stack) {
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(op, "", stack.data(), TORCH_ABI_VERSION));
}

using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

// An error that the replaced kernel raised. override.py keeps its Python type alive.
class ReplacedKernelError : public torch::PyTorchError {
 public:
  ReplacedKernelError(const std::string& message, PyObject* type)
      : PyTorchError(message), type_(type) {}
  PyObject* python_type() override { return type_; }

 private:
  PyObject* type_;
};

// Calls the operator `op`, which runs the replaced kernel, and returns the kernel's tensors, a Two
// or a Three. The C interface would lose an error, so the operator returns it as two further
// tensors: the bytes of its text (empty without an error), and the address of its Python type
// (empty where the text is to be raised as std::runtime_error).
template <typename Result, size_t size>
Result call_replaced(const char* op, std::array<StableIValue, size>& stack) {
  constexpr size_t count = std::tuple_size_v<Result>;
  static_assert(size >= count + 2, "the stack holds the arguments, then the results");
  call(op, stack);
  Result result;
  std::get<0>(result) = to<Tensor>(stack[0]);
  std::get<1>(result) = to<Tensor>(stack[1]);
  if constexpr (count == 3) std::get<2>(result) = to<Tensor>(stack[2]);
  const auto error = to<Tensor>(stack[count]);
  const auto type = to<Tensor>(stack[count + 1]);
  if (error.numel() > 0) {
    const std::string text(static_cast<const char*>(error.const_data_ptr()),
                           static_cast<size_t>(error.numel()));
    if (type.numel() == 0) throw std::runtime_error(text);
    throw ReplacedKernelError(text, *static_cast<PyObject* const*>(type.const_data_ptr()));
  }
  return result;
}

// ---- The kernels.

enum class Norm { kLayer, kRms };

std::string name_of(Norm norm) { return norm == Norm::kRms ? "rms" : "layer"; }

// The primary templates call the operators, which run the composite on the CPU. RMSNorm's mean is a
// tensor of shape (0,).
template <DeviceType device>
Three our_forward(Norm norm, const Tensor& x, int64_t ndim, const std::optional<Tensor>& weight,
                  const std::optional<Tensor>& bias, double eps) {
  const Inside guard;
  std::array<StableIValue, 11> stack{from(x),    from(ndim),         from(weight),
                                     from(bias), from(eps),          from(std::nullopt),
                                     from(1.0),  from(std::nullopt), from(name_of(norm)),
                                     from(0.0),  from(false)};
  call(FUSED_LAYERNORM_OPERATOR("layer_norm_forward"), stack);
  return {to<Tensor>(stack[0]), to<Tensor>(stack[1]), to<Tensor>(stack[2])};
}

template <DeviceType device>
Three our_backward(Norm norm, const Tensor& dy, const Tensor& x, int64_t ndim, const Tensor& mean,
                   const Tensor& rstd, const std::optional<Tensor>& weight,
                   const std::optional<Tensor>& bias, bool needs_dx, bool needs_dweight,
                   bool needs_dbias) {
  const Inside guard;
  std::array<StableIValue, 15> stack{from(dy),           from(x),
                                     from(ndim),         from(mean),
                                     from(rstd),         from(weight),
                                     from(bias),         from(std::nullopt),
                                     from(std::nullopt), from(1.0),
                                     from(needs_dx),     from(needs_dweight),
                                     from(needs_dbias),  from(name_of(norm)),
                                     from(0.0)};
  call(FUSED_LAYERNORM_OPERATOR("layer_norm_backward"), stack);
  return {to<Tensor>(stack[0]), to<Tensor>(stack[1]), to<Tensor>(stack[2])};
}

#ifdef FUSED_LAYERNORM_CUDA
template <>
Three our_forward<DeviceType::CUDA>(Norm norm, const Tensor& x, int64_t ndim,
                                    const std::optional<Tensor>& weight,
                                    const std::optional<Tensor>& bias, double eps) {
  const NormKind kind(name_of(norm), 0.0);
  const ForwardResult result = run_forward(
      {x, std::nullopt, ndim, weight, bias, eps, std::nullopt, 1.0, std::nullopt, true, kind});
  return {result.y, *result.mean, *result.rstd};
}

template <>
Three our_backward<DeviceType::CUDA>(Norm norm, const Tensor& dy, const Tensor& x, int64_t ndim,
                                     const Tensor& mean, const Tensor& rstd,
                                     const std::optional<Tensor>& weight,
                                     const std::optional<Tensor>& bias, bool needs_dx,
                                     bool needs_dweight, bool needs_dbias) {
  const NormKind kind(name_of(norm), 0.0);
  const BackwardResult result =
      run_backward({dy, x, ndim, mean, rstd, weight, bias, std::nullopt, std::nullopt, 1.0,
                    needs_dx, needs_dweight, needs_dbias, kind});
  return {result.dx, result.dweight, result.dbias};
}
#endif

template <DeviceType device>
Three native_layer_norm(const Tensor& x, const Shape& shape, const std::optional<Tensor>& weight,
                        const std::optional<Tensor>& bias, double eps) {
  Override& entry = override_of<device>();
  const CountedCall counted(entry);
  if (!inside && takes_input(x, shape, device) && takes_parameter(weight, x, shape) &&
      takes_parameter(bias, x, shape)) {
    try {
      const auto ndim = static_cast<int64_t>(shape.size());
      return our_forward<device>(Norm::kLayer, x, ndim, weight, bias, eps);
    } catch (const OutOfMemory&) {
      // PyTorch's kernel may need less memory. If it fails as well, its error is the one that
      // programs look for.
    }
  }
  std::array<StableIValue, 5> stack{from(x), from(shape), from(weight), from(bias), from(eps)};
  return call_replaced<Three>(FUSED_LAYERNORM_OPERATOR("_aten_native_layer_norm"), stack);
}

template <DeviceType device>
Three native_layer_norm_backward(const Tensor& dy, const Tensor& x, const Shape& shape,
                                 const Tensor& mean, const Tensor& rstd,
                                 const std::optional<Tensor>& maybe_weight,
                                 const std::optional<Tensor>& maybe_bias,
                                 const std::vector<bool>& output_mask) {
  Override& entry = override_of<device>();
  const CountedCall counted(entry);
  const std::optional<Tensor> weight = if_defined(maybe_weight), bias = if_defined(maybe_bias);
  const bool needs_dx = output_mask[0], needs_dweight = output_mask[1],
             needs_dbias = output_mask[2];
  if (!inside && takes_input(x, shape, device) && like(dy, x) && same_sizes(dy, x) &&
      takes_statistic(mean, x, shape) && takes_statistic(rstd, x, shape) &&
      takes_parameter(weight, x, shape) && takes_parameter(bias, x, shape) &&
      (weight || !needs_dweight) && (bias || !needs_dbias)) {
    try {
      auto [dx, dweight, dbias] =
          our_backward<device>(Norm::kLayer, dy, x, static_cast<int64_t>(shape.size()), mean, rstd,
                               weight, bias, needs_dx, needs_dweight, needs_dbias);
      // Autograd expects an undefined tensor in place of a gradient that it did not ask for.
      return {needs_dx ? dx : Tensor(), needs_dweight ? dweight : Tensor(),
              needs_dbias ? dbias : Tensor()};
    } catch (const OutOfMemory&) {
      // PyTorch's kernel may need less memory. If it fails as well, its error is the one that
      // programs look for.
    }
  }
  std::array<StableIValue, 10> stack{
      from(dy),     from(x),    from(shape),    from(mean),          from(rstd),
      from(weight), from(bias), from(needs_dx), from(needs_dweight), from(needs_dbias)};
  return call_replaced<Three>(FUSED_LAYERNORM_OPERATOR("_aten_native_layer_norm_backward"), stack);
}

// PyTorch's epsilon where the caller gives none: that of the type in which it computes.
double default_eps(const Tensor& x) {
  return dtype_of(x) == aoti_torch_dtype_float64() ? std::numeric_limits<double>::epsilon()
                                                   : std::numeric_limits<float>::epsilon();
}

template <DeviceType device>
Two fused_rms_norm(const Tensor& x, const Shape& shape, const std::optional<Tensor>& weight,
                   std::optional<double> eps) {
  Override& entry = override_of<device>();
  const CountedCall counted(entry);
  if (!inside && takes_input(x, shape, device) && takes_parameter(weight, x, shape)) {
    try {
      const auto ndim = static_cast<int64_t>(shape.size());
      auto [y, mean, rstd] = our_forward<device>(Norm::kRms, x, ndim, weight, std::nullopt,
                                                 eps.value_or(default_eps(x)));
      return {y, rstd};
    } catch (const OutOfMemory&) {
      // PyTorch's kernel may need less memory. If it fails as well, its error is the one that
      // programs look for.
    }
  }
  std::array<StableIValue, 4> stack{from(x), from(shape), from(weight), from(eps)};
  return call_replaced<Two>(FUSED_LAYERNORM_OPERATOR("_aten_fused_rms_norm"), stack);
}

template <DeviceType device>
Two fused_rms_norm_backward(const Tensor& dy, const Tensor& x, const Shape& shape,
                            const Tensor& rstd, const std::optional<Tensor>& maybe_weight,
                            const std::vector<bool>& output_mask) {
  Override& entry = override_of<device>();
  const CountedCall counted(entry);
  const std::optional<Tensor> weight = if_defined(maybe_weight);
  const bool needs_dx = output_mask[0], needs_dweight = output_mask[1];
  if (!inside && takes_input(x, shape, device) && like(dy, x) && same_sizes(dy, x) &&
      takes_statistic(rstd, x, shape) && takes_parameter(weight, x, shape) &&
      (weight || !needs_dweight)) {
    try {
      const Tensor no_mean = torch::stable::new_empty(rstd, {0});
      auto [dx, dweight, dbias] =
          our_backward<device>(Norm::kRms, dy, x, static_cast<int64_t>(shape.size()), no_mean, rstd,
                               weight, std::nullopt, needs_dx, needs_dweight, false);
      // Autograd expects an undefined tensor in place of a gradient that it did not ask for.
      return {needs_dx ? dx : Tensor(), needs_dweight ? dweight : Tensor()};
    } catch (const OutOfMemory&) {
      // PyTorch's kernel may need less memory. If it fails as well, its error is the one that
      // programs look for.
    }
  }
  std::array<StableIValue, 7> stack{from(dy),     from(x),        from(shape),        from(rstd),
                                    from(weight), from(needs_dx), from(needs_dweight)};
  return call_replaced<Two>(FUSED_LAYERNORM_OPERATOR("_aten_fused_rms_norm_backward"), stack);
}

template <DeviceType device>
void register_kernels(StableLibrary& library) {
  library.impl("native_layer_norm", TORCH_BOX(&native_layer_norm<device>));
  library.impl("native_layer_norm_backward", TORCH_BOX(&native_layer_norm_backward<device>));
  library.impl("_fused_rms_norm", TORCH_BOX(&fused_rms_norm<device>));
  library.impl("_fused_rms_norm_backward", TORCH_BOX(&fused_rms_norm_backward<device>));
}

// ---- On and off.

// Holds Python's GIL. The GIL's functions are looked up in the running process, so the library
// loads without Python and works with every version of Python.
class Gil {
 public:
  Gil() : state_(find<int (*)()>("PyGILState_Ensure")()) {}
  ~Gil() { find<void (*)(int)>("PyGILState_Release")(state_); }
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;

 private:
  template <class Function>
  static Function find(const char* name) {
    void* const found = dlsym(RTLD_DEFAULT, name);
    if (found == nullptr) {
      throw std::runtime_error(std::string("override_aten: no ") + name + " in this process");
    }
    return reinterpret_cast<Function>(found);
  }

  const int state_;  // a PyGILState_STATE
};

Override& find_override(const std::string& key) {
  if (key == "CUDA") return override_of<DeviceType::CUDA>();
  if (key == "CPU") return override_of<DeviceType::CPU>();
  throw std::runtime_error("override_aten: no kernels for the dispatch key " + key);
}

// Waits twice `pause_us`, so that other threads can leave PyTorch. If a call of `entry`'s kernels
// ends during the second half, waits for the end of one more call, for at most 10 ms. Does not wait
// with `pause_us` = 0, which means that there is no other Python thread.
void pause(const Override& entry, int64_t pause_us) {
  if (pause_us == 0) return;
  const auto sleep = [pause_us] {
    std::this_thread::sleep_for(std::chrono::microseconds(pause_us));
  };
  sleep();
  const int64_t left = entry.left;
  sleep();
  if (entry.left == left) return;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(10);
  const int64_t last = entry.left;
  while (entry.left == last && std::chrono::steady_clock::now() < deadline) {
  }
}

void begin_override(std::string key, int64_t pause_us) {
  Override& entry = find_override(key);
  const Gil gil;
  pause(entry, pause_us);
  entry.library = std::make_unique<StableLibrary>(StableLibrary::Kind::IMPL, "aten", key.c_str(),
                                                  __FILE__, __LINE__);
  if (entry.device == DeviceType::CUDA) {
    register_kernels<DeviceType::CUDA>(*entry.library);
  } else {
    register_kernels<DeviceType::CPU>(*entry.library);
  }
}

void end_override(std::string key, int64_t pause_us) {
  Override& entry = find_override(key);
  const Gil gil;
  pause(entry, pause_us);
  entry.library.reset();
}

// The number of calls of the aten operators that our kernels for a dispatch key have finished,
// those that they passed on to PyTorch's kernels included.
int64_t override_calls(std::string key) { return find_override(key).left; }

}  // namespace
}  // namespace fused_layernorm

STABLE_TORCH_LIBRARY_FRAGMENT(FUSED_LAYERNORM_NAMESPACE, m) {
  m.def("_begin_override(str key, int pause_us) -> ()");
  m.def("_end_override(str key, int pause_us) -> ()");
  m.def("_override_calls(str key) -> int");
  // These run the replaced kernels. The last two tensors are the text of an error in UTF-8, empty
  // if there was none, and the address of the error's Python type (see call_replaced).
  m.def(
      "_aten_native_layer_norm(Tensor input, int[] normalized_shape, Tensor? weight, Tensor? bias, "
      "float eps) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "_aten_native_layer_norm_backward(Tensor grad_out, Tensor input, int[] normalized_shape, "
      "Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, bool needs_dx, bool needs_dweight, "
      "bool needs_dbias) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "_aten_fused_rms_norm(Tensor input, int[] normalized_shape, Tensor? weight, float? eps) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "_aten_fused_rms_norm_backward(Tensor grad_out, Tensor input, int[] normalized_shape, Tensor "
      "rstd, Tensor? weight, bool needs_dx, bool needs_dweight) -> (Tensor, Tensor, Tensor, "
      "Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(FUSED_LAYERNORM_NAMESPACE, CompositeExplicitAutograd, m) {
  m.impl("_begin_override", TORCH_BOX(&fused_layernorm::begin_override));
  m.impl("_end_override", TORCH_BOX(&fused_layernorm::end_override));
  m.impl("_override_calls", TORCH_BOX(&fused_layernorm::override_calls));
}

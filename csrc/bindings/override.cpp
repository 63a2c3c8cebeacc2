// override_aten(): this package's kernels under aten::native_layer_norm and its backward.
//
// Kernels registered for `aten` at run time take the place of PyTorch's own for one dispatch key,
// with PyTorch's C++ autograd still around them, and give it back when their library object is
// deleted. A call that they do not take goes to the kernel they replaced, which only Python can
// reach (torch.library.get_kernel): override.py registers it as fused_layernorm::_aten_*.
//
// PyTorch does not guard its dispatch table against calls from other threads while it is written.
// Those from Python are kept out: the table is written with the GIL held, after a pause in which
// threads already inside PyTorch come out and wait. The threads of a running backward need no GIL:
// after a call by one of them the table is written at once, long before its next. And override.py
// keeps kernels that were taken out alive, for calls still inside them.

#include <dlfcn.h>
#include <torch/csrc/stable/library.h>
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

// PyTorch's exception for a Python type, as torch/csrc/Exceptions.h of torch 2.10 to 2.15 has it:
// its bindings catch it by this name and raise python_type(). No stable header declares it, and the
// library includes none of Python's, of which it needs the name of one type.
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

// What stands in one dispatch key. The CPU's is for tests: it runs the composite operators.
struct Override {
  explicit Override(DeviceType d) : device(d) {}

  const DeviceType device;
  std::atomic<int64_t> left{0};            // calls that have returned or thrown
  std::unique_ptr<StableLibrary> library;  // the registration
};

// Never destroyed: at exit the dispatcher may be gone before.
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

// The composite operators that the tests' CPU override runs may themselves reach native_layer_norm.
thread_local bool inside = false;

class Inside {
 public:
  Inside() { inside = true; }
  ~Inside() { inside = false; }
};

// ---- What our kernels take: what PyTorch's take, by its own rules. The rest is PyTorch's, and so
// ---- are its errors.

// Plain numbers: torch::stable's enumeration lacks some of PyTorch's types, and throws on them.
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

using Three = std::tuple<Tensor, Tensor, Tensor>;

// What the replaced kernel has raised: override.py keeps the type alive.
class ReplacedKernelError : public torch::PyTorchError {
 public:
  ReplacedKernelError(const std::string& message, PyObject* type)
      : PyTorchError(message), type_(type) {}
  PyObject* python_type() override { return type_; }

 private:
  PyObject* type_;
};

// The replaced kernel's result: three tensors, and its error, which the C interface would lose: its
// text as the bytes of a tensor, and its type as an address in another, which is empty where only
// the text is to be raised.
template <size_t size>
Three call_replaced(const char* op, std::array<StableIValue, size>& stack) {
  call(op, stack);
  Three result{to<Tensor>(stack[0]), to<Tensor>(stack[1]), to<Tensor>(stack[2])};
  const auto error = to<Tensor>(stack[3]);
  if (error.numel() > 0) {
    const std::string text(static_cast<const char*>(error.const_data_ptr()),
                           static_cast<size_t>(error.numel()));
    const auto type = to<Tensor>(stack[4]);
    if (type.numel() == 0) throw std::runtime_error(text);
    throw ReplacedKernelError(text, *static_cast<PyObject* const*>(type.const_data_ptr()));
  }
  return result;
}

// ---- The kernels.

// The general ones run the composite operators.
template <DeviceType device>
Three our_forward(const Tensor& x, int64_t ndim, const std::optional<Tensor>& weight,
                  const std::optional<Tensor>& bias, double eps) {
  const Inside guard;
  std::array<StableIValue, 8> stack{from(x),    from(ndim),        from(weight),
                                    from(bias), from(eps),         from(std::nullopt),
                                    from(1.0),  from(std::nullopt)};
  call(FUSED_LAYERNORM_OPERATOR("layer_norm_forward"), stack);
  return {to<Tensor>(stack[0]), to<Tensor>(stack[1]), to<Tensor>(stack[2])};
}

template <DeviceType device>
Three our_backward(const Tensor& dy, const Tensor& x, int64_t ndim, const Tensor& mean,
                   const Tensor& rstd, const std::optional<Tensor>& weight,
                   const std::optional<Tensor>& bias, bool needs_dx, bool needs_dweight,
                   bool needs_dbias) {
  const Inside guard;
  std::array<StableIValue, 13> stack{
      from(dy),           from(x),      from(ndim),     from(mean),
      from(rstd),         from(weight), from(bias),     from(std::nullopt),
      from(std::nullopt), from(1.0),    from(needs_dx), from(needs_dweight),
      from(needs_dbias)};
  call(FUSED_LAYERNORM_OPERATOR("layer_norm_backward"), stack);
  return {to<Tensor>(stack[0]), to<Tensor>(stack[1]), to<Tensor>(stack[2])};
}

#ifdef FUSED_LAYERNORM_CUDA
template <>
Three our_forward<DeviceType::CUDA>(const Tensor& x, int64_t ndim,
                                    const std::optional<Tensor>& weight,
                                    const std::optional<Tensor>& bias, double eps) {
  const ForwardResult result = run_forward({x, std::nullopt, ndim, weight, bias, eps});
  return {result.y, *result.mean, *result.rstd};
}

template <>
Three our_backward<DeviceType::CUDA>(const Tensor& dy, const Tensor& x, int64_t ndim,
                                     const Tensor& mean, const Tensor& rstd,
                                     const std::optional<Tensor>& weight,
                                     const std::optional<Tensor>& bias, bool needs_dx,
                                     bool needs_dweight, bool needs_dbias) {
  const BackwardResult result =
      run_backward({dy, x, ndim, mean, rstd, weight, bias, std::nullopt, std::nullopt, 1.0,
                    needs_dx, needs_dweight, needs_dbias});
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
      return our_forward<device>(x, static_cast<int64_t>(shape.size()), weight, bias, eps);
    } catch (const OutOfMemory&) {
      // PyTorch's kernel may get by with less, and else says what programs look for in an error.
    }
  }
  std::array<StableIValue, 5> stack{from(x), from(shape), from(weight), from(bias), from(eps)};
  return call_replaced(FUSED_LAYERNORM_OPERATOR("_aten_native_layer_norm"), stack);
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
          our_backward<device>(dy, x, static_cast<int64_t>(shape.size()), mean, rstd, weight, bias,
                               needs_dx, needs_dweight, needs_dbias);
      // Autograd expects no tensor at all where it asked for none.
      return {needs_dx ? dx : Tensor(), needs_dweight ? dweight : Tensor(),
              needs_dbias ? dbias : Tensor()};
    } catch (const OutOfMemory&) {
      // PyTorch's kernel may get by with less, and else says what programs look for in an error.
    }
  }
  std::array<StableIValue, 10> stack{
      from(dy),     from(x),    from(shape),    from(mean),          from(rstd),
      from(weight), from(bias), from(needs_dx), from(needs_dweight), from(needs_dbias)};
  return call_replaced(FUSED_LAYERNORM_OPERATOR("_aten_native_layer_norm_backward"), stack);
}

template <DeviceType device>
void register_kernels(StableLibrary& library) {
  library.impl("native_layer_norm", TORCH_BOX(&native_layer_norm<device>));
  library.impl("native_layer_norm_backward", TORCH_BOX(&native_layer_norm_backward<device>));
}

// ---- On and off.

// Python's lock. Its functions are found in the running process: so the library needs no Python to
// load, and runs under every version of it.
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

// Lets other threads come out of PyTorch, for a time without calls of `entry`'s kernels, or else
// just after one. Nothing to wait for with `pause_us` = 0: no other Python thread runs.
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

// Calls of the two aten operators that came by the kernels of a dispatch key so far.
int64_t override_calls(std::string key) { return find_override(key).left; }

}  // namespace
}  // namespace fused_layernorm

STABLE_TORCH_LIBRARY_FRAGMENT(FUSED_LAYERNORM_NAMESPACE, m) {
  m.def("_begin_override(str key, int pause_us) -> ()");
  m.def("_end_override(str key, int pause_us) -> ()");
  m.def("_override_calls(str key) -> int");
  // The kernels that were replaced, the text of their error in UTF-8, empty if there was none, and
  // the address of its type.
  m.def(
      "_aten_native_layer_norm(Tensor input, int[] normalized_shape, Tensor? weight, Tensor? bias, "
      "float eps) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "_aten_native_layer_norm_backward(Tensor grad_out, Tensor input, int[] normalized_shape, "
      "Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, bool needs_dx, bool needs_dweight, "
      "bool needs_dbias) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(FUSED_LAYERNORM_NAMESPACE, CompositeExplicitAutograd, m) {
  m.impl("_begin_override", TORCH_BOX(&fused_layernorm::begin_override));
  m.impl("_end_override", TORCH_BOX(&fused_layernorm::end_override));
  m.impl("_override_calls", TORCH_BOX(&fused_layernorm::override_calls));
}

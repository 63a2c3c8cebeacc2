// The operators on CUDA: checks -> device guard -> plan -> allocate -> launch. Tensors stop here.
//
// The checks guard memory: nothing launches on arguments that do not fit together. The sentences
// that users read are those of fused_layernorm/_checks.py.
#include "bindings/ops_cuda.h"

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <mutex>
#include <vector>

#include "bindings/driver.h"
#include "bindings/namespace.h"
#include "layernorm.h"

// Weak: a torch without CUDA has no such function, and the library must load there too.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                             void** ret_stream)
    __attribute__((weak));

namespace fused_layernorm {
namespace {

using torch::headeronly::IntHeaderOnlyArrayRef;

constexpr int64_t kMaxExtent = std::numeric_limits<int32_t>::max();
constexpr uintptr_t kAlignment = 16;

#define CHECK_ARGUMENT(condition, ...) STD_TORCH_CHECK(condition, "fused_layernorm: ", __VA_ARGS__)

void check_cuda(cudaError_t error) {
  CHECK_ARGUMENT(error == cudaSuccess, "CUDA error: ", cudaGetErrorString(error));
}

class CurrentDevice {
 public:
  explicit CurrentDevice(int index) {
    int current = -1;
    check_cuda(cudaGetDevice(&current));
    if (current != index) {
      STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_create_device_guard(index, &guard_));
    }
  }
  ~CurrentDevice() {
    if (guard_ != nullptr) aoti_torch_delete_device_guard(guard_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  DeviceGuardHandle guard_ = nullptr;
};

const Device& device_properties(int index) {
  constexpr int kMaxDevices = 64;
  static std::array<Device, kMaxDevices> devices;
  static std::array<std::once_flag, kMaxDevices> read;
  CHECK_ARGUMENT(index >= 0 && index < kMaxDevices, "no device has the index ", index);
  std::call_once(read[index], [index] {
    const auto attribute = [index](cudaDeviceAttr which) {
      int value = 0;
      check_cuda(cudaDeviceGetAttribute(&value, which, index));
      return value;
    };
    devices[index].capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor) +
                                attribute(cudaDevAttrComputeCapabilityMinor);
    devices[index].sms = attribute(cudaDevAttrMultiProcessorCount);
    devices[index].shared_memory = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  });
  return devices[index];
}

cudaStream_t current_stream(int device_index) {
  CHECK_ARGUMENT(aoti_torch_get_current_cuda_stream != nullptr, "this torch has no CUDA");
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
  return static_cast<cudaStream_t>(stream);
}

DataType data_type(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return DataType::kFloat32;
    case ScalarType::Half:
      return DataType::kFloat16;
    case ScalarType::BFloat16:
      return DataType::kBFloat16;
    case ScalarType::Double:
      return DataType::kFloat64;
    default:
      CHECK_ARGUMENT(false, "expected float32, float16, bfloat16 or float64, got ",
                     torch::headeronly::toString(type));
      return DataType::kFloat32;
  }
}

bool is_half(ScalarType type) { return type == ScalarType::Half || type == ScalarType::BFloat16; }

Activation activation_of(const std::optional<std::string>& name) {
  if (!name) return Activation::kNone;
  if (*name == "gelu") return Activation::kGelu;
  if (*name == "gelu_tanh") return Activation::kGeluTanh;
  if (*name == "silu") return Activation::kSilu;
  if (*name == "relu") return Activation::kRelu;
  CHECK_ARGUMENT(false, "activation must be None, 'gelu', 'gelu_tanh', 'silu' or 'relu', got '",
                 *name, "'");
  return Activation::kNone;
}

// A contiguous tensor of `like`'s device.
Tensor empty(const Tensor& like, const int64_t* sizes, int64_t dims, ScalarType type) {
  std::array<int64_t, 16> small;
  std::vector<int64_t> large;
  int64_t* strides = small.data();
  if (dims > static_cast<int64_t>(small.size())) {
    large.resize(dims);
    strides = large.data();
  }
  int64_t stride = 1;
  for (int64_t d = dims - 1; d >= 0; --d) {
    strides[d] = stride;
    stride *= sizes[d] > 1 ? sizes[d] : 1;
  }
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      dims, sizes, strides, torch::stable::detail::to<int32_t>(torch::stable::detail::from(type)),
      aoti_torch_device_type_cuda(), like.get_device_index(), &handle));
  return Tensor(handle);
}

Tensor empty_like(const Tensor& like, ScalarType type) {
  return empty(like, like.sizes().data(), like.dim(), type);
}

Tensor cast(const Tensor& tensor, ScalarType type) {
  return tensor.scalar_type() == type ? tensor : torch::stable::to(tensor, type);
}

std::optional<Tensor> cast_param(const std::optional<Tensor>& param, ScalarType type) {
  return param ? std::optional<Tensor>(cast(*param, type)) : std::nullopt;
}

// Asks first: PyTorch's operator is called by name, which takes as long as an allocation.
Tensor contiguous_of(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

uintptr_t address_of(const Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
}

// Leading dimensions and normalized dimensions as rows and columns.
struct Shape {
  int64_t rows = 1, cols = 1;
  int64_t leading;  // dimensions

  Shape(const Tensor& input, int64_t normalized_ndim) : leading(input.dim() - normalized_ndim) {
    CHECK_ARGUMENT(normalized_ndim >= 1 && leading >= 0, "cannot normalize the last ",
                   normalized_ndim, " of ", input.dim(), " dimensions");
    const auto sizes = input.sizes();
    for (int64_t d = 0; d < input.dim(); ++d) (d < leading ? rows : cols) *= sizes[d];
    CHECK_ARGUMENT(rows <= kMaxExtent && cols <= kMaxExtent, "expected at most ", kMaxExtent,
                   " rows and columns, got ", rows, " rows of ", cols);
  }
  bool empty() const { return rows == 0 || cols == 0; }
};

// Where the rows of a tensor begin, if each of them is contiguous inside and they stand at no more
// than two strides.
std::optional<RowMap> row_map(const Tensor& tensor, int64_t leading) {
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  int64_t expected = 1;
  for (int64_t d = tensor.dim() - 1; d >= leading; --d) {
    if (sizes[d] != 1 && strides[d] != expected) return std::nullopt;
    expected *= sizes[d];
  }
  int levels = 0;
  int64_t inner_stride = expected, outer_stride = 0;
  int64_t inner_rows = 1, outer_rows = 1;
  for (int64_t d = leading - 1; d >= 0; --d) {
    if (sizes[d] == 1) continue;
    if (levels == 0) {
      inner_stride = strides[d];
      inner_rows = sizes[d];
      levels = 1;
    } else if (levels == 1 && strides[d] == inner_stride * inner_rows) {
      inner_rows *= sizes[d];
    } else if (levels == 1) {
      outer_stride = strides[d];
      outer_rows = sizes[d];
      levels = 2;
    } else if (strides[d] == outer_stride * outer_rows) {
      outer_rows *= sizes[d];
    } else {
      return std::nullopt;
    }
  }
  return levels == 2 ? RowMap(inner_rows, inner_stride, outer_stride) : RowMap(inner_stride);
}

// Reads the tensor where it lies, or a contiguous copy of it where that cannot be.
struct RowsOf {
  Tensor tensor;
  RowMap map;

  RowsOf(const Tensor& original, int64_t leading) : tensor(original) {
    auto found = row_map(tensor, leading);
    if (!found) {
      tensor = contiguous_of(tensor);
      found = row_map(tensor, leading);
    }
    map = *found;
  }
  bool aligned() const {
    const auto bytes = static_cast<int64_t>(tensor.element_size());
    return address_of(tensor) % kAlignment == 0 && map.stride * bytes % kAlignment == 0 &&
           map.jump * bytes % kAlignment == 0;
  }
};

void check_param(const std::optional<Tensor>& param, const char* name, const Tensor& input,
                 int64_t leading) {
  if (!param) return;
  const auto sizes = input.sizes();
  bool fits = param->dim() == input.dim() - leading;
  for (int64_t d = 0; fits && d < param->dim(); ++d) {
    fits = param->sizes()[d] == sizes[leading + d];
  }
  CHECK_ARGUMENT(fits, name, " must have the shape of the normalized dimensions");
  CHECK_ARGUMENT(param->is_cuda() && param->get_device_index() == input.get_device_index(), name,
                 " must be on the input's device");
}

// A parameter as kernels read it: contiguous and aligned.
std::optional<Tensor> prepare_param(const std::optional<Tensor>& param, ScalarType type) {
  if (!param) return std::nullopt;
  Tensor ready = contiguous_of(cast(*param, type));
  if (address_of(ready) % kAlignment != 0) ready = torch::stable::clone(ready);
  return ready;
}

const void* data_of(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr() : nullptr;
}

// The types a kernel is launched with, for x and the types asked of weight and y. Kernels exist
// for the combinations in dispatch.h; to reach one, the weight may be taken in float32 and the
// output computed in the arithmetic's type, neither of which changes the result.
struct KernelTypes {
  ScalarType x, weight, y;

  KernelTypes(ScalarType x_type, std::optional<ScalarType> weight_type, ScalarType y_type)
      : x(x_type), weight(weight_type.value_or(x_type)), y(y_type) {
    if (x == ScalarType::Double) {
      weight = y = x;
      return;
    }
    if (y == ScalarType::Double || (is_half(x) && y != x)) y = ScalarType::Float;
    if (!is_half(x) || y != x) weight = ScalarType::Float;
    if (weight != x) weight = ScalarType::Float;
  }
  DataTypes data_types() const { return {data_type(x), data_type(weight), data_type(y)}; }
};

std::optional<ScalarType> type_of_params(const std::optional<Tensor>& weight,
                                         const std::optional<Tensor>& bias) {
  if (weight && bias) {
    CHECK_ARGUMENT(weight->scalar_type() == bias->scalar_type(),
                   "weight and bias must be of one dtype");
  }
  if (weight) return weight->scalar_type();
  if (bias) return bias->scalar_type();
  return std::nullopt;
}

// Parameters are of x's type, or float32 beside half precision; with a residual they may also be
// of the input's type.
void check_params_type(std::optional<ScalarType> params, ScalarType x, ScalarType input) {
  const bool fits = !params || *params == x || *params == input ||
                    (*params == ScalarType::Float && (is_half(x) || is_half(input)));
  CHECK_ARGUMENT(fits,
                 "weight and bias must be of the input's dtype, or float32 beside half "
                 "precision input");
}

Tensor allocate_workspace(const Tensor& like, int64_t bytes) {
  return empty(like, &bytes, 1, ScalarType::Byte);
}

struct ForwardResult {
  Tensor y, residual_out, mean, rstd;
};

ForwardResult run_forward(const Tensor& input, const std::optional<Tensor>& residual,
                          int64_t normalized_ndim, const std::optional<Tensor>& weight,
                          const std::optional<Tensor>& bias, double eps,
                          const std::optional<std::string>& activation, double scale,
                          std::optional<ScalarType> out_dtype, bool needs_statistics) {
  const Shape shape(input, normalized_ndim);
  check_param(weight, "weight", input, shape.leading);
  check_param(bias, "bias", input, shape.leading);
  if (residual) check_param(residual, "residual", input, 0);
  const ScalarType y_type = out_dtype.value_or(input.scalar_type());
  data_type(input.scalar_type());
  data_type(y_type);
  const ScalarType x_type = residual ? residual->scalar_type() : input.scalar_type();
  const auto params_type = type_of_params(weight, bias);
  check_params_type(params_type, x_type, input.scalar_type());
  KernelTypes types(x_type, params_type, y_type);
  CHECK_ARGUMENT(std::isfinite(scale), "scale must be a finite number");
  CHECK_ARGUMENT(!std::isnan(eps), "eps must be a number");
  const Activation act = activation_of(activation);
  const CurrentDevice guard(input.get_device_index());

  if (residual) {
    const ScalarType in = types.x == ScalarType::Float ? types.y : types.x;
    if (in == ScalarType::Float && input.scalar_type() != in && is_half(input.scalar_type())) {
      // The sum of a half and a float32 is that of two float32.
      return run_forward(cast(input, in), residual, normalized_ndim, weight, bias, eps, activation,
                         scale, y_type, needs_statistics);
    }
    if (in != input.scalar_type()) {
      if (types.x == ScalarType::Float && input.scalar_type() == ScalarType::Float) {
        types.y = ScalarType::Float;
      } else {
        // Two types that no kernel adds: the sum first, rounded to the residual's; then, with
        // float64 on either side, everything in float64.
        const bool wide =
            types.x == ScalarType::Double || input.scalar_type() == ScalarType::Double;
        const ScalarType sum_type = wide ? ScalarType::Double : ScalarType::Float;
        const Tensor sum =
            cast(torch::stable::subtract(cast(input, sum_type), cast(*residual, sum_type), -1.0),
                 x_type);
        ForwardResult result =
            run_forward(wide ? cast(sum, sum_type) : sum, std::nullopt, normalized_ndim,
                        cast_param(weight, sum_type), cast_param(bias, sum_type), eps, activation,
                        scale, y_type, needs_statistics);
        result.residual_out = contiguous_of(sum);
        if (needs_statistics && types.x != ScalarType::Double) {
          result.mean = cast(result.mean, ScalarType::Float);
          result.rstd = cast(result.rstd, ScalarType::Float);
        }
        return result;
      }
    }
  }

  ForwardResult result{empty_like(input, types.y), input, input, input};
  if (residual) result.residual_out = empty_like(input, types.x);
  if (needs_statistics) {
    const ScalarType type = types.x == ScalarType::Double ? types.x : ScalarType::Float;
    std::vector<int64_t> sizes(input.sizes().data(), input.sizes().data() + input.dim());
    std::fill(sizes.begin() + shape.leading, sizes.end(), 1);
    result.mean = empty(input, sizes.data(), input.dim(), type);
    result.rstd = empty(input, sizes.data(), input.dim(), type);
    if (shape.cols == 0) {
      // As PyTorch has it: the mean of nothing.
      torch::stable::fill_(result.mean, std::numeric_limits<double>::quiet_NaN());
      torch::stable::fill_(result.rstd, std::numeric_limits<double>::quiet_NaN());
    }
  }
  if (!shape.empty()) {
    const RowsOf rows(input, shape.leading);
    std::optional<RowsOf> residual_rows;
    if (residual) residual_rows.emplace(*residual, shape.leading);
    const auto ready_weight = prepare_param(weight, types.weight);
    const auto ready_bias = prepare_param(bias, types.weight);

    Problem problem;
    problem.rows = shape.rows;
    problem.cols = shape.cols;
    const DataTypes data_types = types.data_types();
    problem.x = data_types.x;
    problem.weight = data_types.weight;
    problem.y = data_types.y;
    problem.residual = residual.has_value();
    problem.has_epilogue = act != Activation::kNone || scale != 1.0;
    const int64_t least = std::min(size_of(problem.x), size_of(problem.y));
    problem.aligned = rows.aligned() && (!residual_rows || residual_rows->aligned()) &&
                      shape.cols * least % int64_t{kAlignment} == 0;
    const forward::Plan plan =
        make_forward_plan(problem, device_properties(input.get_device_index()));

    ForwardParams params;
    params.input = rows.tensor.const_data_ptr();
    params.input_rows = rows.map;
    if (residual) {
      params.residual = residual_rows->tensor.const_data_ptr();
      params.residual_rows = residual_rows->map;
      params.residual_out = result.residual_out.mutable_data_ptr();
    }
    params.weight = data_of(ready_weight);
    params.bias = data_of(ready_bias);
    params.y = result.y.mutable_data_ptr();
    if (needs_statistics) {
      params.mean = result.mean.mutable_data_ptr();
      params.rstd = result.rstd.mutable_data_ptr();
    }
    params.rows = shape.rows;
    params.cols = static_cast<int32_t>(shape.cols);
    params.inverse_cols = Scalar(1.0 / static_cast<double>(shape.cols));
    params.eps = Scalar(eps);
    params.scale = Scalar(scale);
    params.has_epilogue = problem.has_epilogue;
    params.activation = act;
    std::optional<Tensor> workspace;
    if (launch_of(plan).workspace_bytes > 0) {
      workspace = allocate_workspace(input, launch_of(plan).workspace_bytes);
      params.workspace = workspace->mutable_data_ptr();
    }
    check_cuda(launch_layer_norm_forward(params, data_types, plan,
                                         current_stream(input.get_device_index())));
  }
  result.y = cast(result.y, y_type);
  return result;
}

}  // namespace

Tensor layer_norm(const Tensor& input, int64_t normalized_ndim, const std::optional<Tensor>& weight,
                  const std::optional<Tensor>& bias, double eps,
                  const std::optional<std::string>& activation, double scale,
                  std::optional<ScalarType> out_dtype) {
  return run_forward(input, std::nullopt, normalized_ndim, weight, bias, eps, activation, scale,
                     out_dtype, false)
      .y;
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_forward(const Tensor& input, int64_t normalized_ndim,
                                                      const std::optional<Tensor>& weight,
                                                      const std::optional<Tensor>& bias, double eps,
                                                      const std::optional<std::string>& activation,
                                                      double scale,
                                                      std::optional<ScalarType> out_dtype) {
  const auto result = run_forward(input, std::nullopt, normalized_ndim, weight, bias, eps,
                                  activation, scale, out_dtype, true);
  return {result.y, result.mean, result.rstd};
}

std::tuple<Tensor, Tensor> add_layer_norm(const Tensor& input, const Tensor& residual,
                                          int64_t normalized_ndim,
                                          const std::optional<Tensor>& weight,
                                          const std::optional<Tensor>& bias, double eps,
                                          const std::optional<std::string>& activation,
                                          double scale, std::optional<ScalarType> out_dtype) {
  const auto result = run_forward(input, residual, normalized_ndim, weight, bias, eps, activation,
                                  scale, out_dtype, false);
  return {result.y, result.residual_out};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm_forward(
    const Tensor& input, const Tensor& residual, int64_t normalized_ndim,
    const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, double eps,
    const std::optional<std::string>& activation, double scale,
    std::optional<ScalarType> out_dtype) {
  const auto result = run_forward(input, residual, normalized_ndim, weight, bias, eps, activation,
                                  scale, out_dtype, true);
  return {result.y, result.residual_out, result.mean, result.rstd};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(
    const Tensor& dy, const Tensor& x, int64_t normalized_ndim, const Tensor& mean,
    const Tensor& rstd, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& dresidual, const std::optional<std::string>& activation,
    double scale, bool needs_dx, bool needs_dweight, bool needs_dbias) {
  const Shape shape(x, normalized_ndim);
  check_param(weight, "weight", x, shape.leading);
  check_param(bias, "bias", x, shape.leading);
  check_param(dy, "dy", x, 0);
  if (dresidual) {
    check_param(dresidual, "dresidual", x, 0);
    CHECK_ARGUMENT(dresidual->scalar_type() == x.scalar_type(), "dresidual must be of x's dtype");
  }
  const auto params_type = type_of_params(weight, bias);
  const KernelTypes types(x.scalar_type(), params_type, dy.scalar_type());
  const ScalarType statistics =
      types.x == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  for (const Tensor* each : {&mean, &rstd}) {
    CHECK_ARGUMENT(each->numel() == shape.rows && each->scalar_type() == statistics &&
                       each->is_cuda() && each->get_device_index() == x.get_device_index(),
                   "mean and rstd must be those of the forward pass");
  }
  const Activation act = activation_of(activation);
  const CurrentDevice guard(x.get_device_index());

  const int64_t none = 0;
  const auto normalized_sizes = x.sizes().data() + shape.leading;
  const ScalarType param_out = params_type.value_or(x.scalar_type());
  const auto param_grad = [&](bool needed) {
    return needed ? empty(x, normalized_sizes, normalized_ndim, types.weight)
                  : empty(x, &none, 1, param_out);
  };
  Tensor dx = needs_dx ? empty_like(x, types.x) : empty(x, &none, 1, types.x);
  Tensor dweight = param_grad(needs_dweight);
  Tensor dbias = param_grad(needs_dbias);
  if (shape.empty()) {
    if (needs_dweight) torch::stable::zero_(dweight);
    if (needs_dbias) torch::stable::zero_(dbias);
  } else if (needs_dx || needs_dweight || needs_dbias) {
    const RowsOf x_rows(x, shape.leading);
    const RowsOf dy_rows(cast(dy, types.y), shape.leading);
    std::optional<RowsOf> dresidual_rows;
    if (dresidual) dresidual_rows.emplace(*dresidual, shape.leading);
    const auto ready_weight = prepare_param(weight, types.weight);
    const auto ready_bias = prepare_param(bias, types.weight);
    const Tensor ready_mean = contiguous_of(mean);
    const Tensor ready_rstd = contiguous_of(rstd);

    Problem problem;
    problem.rows = shape.rows;
    problem.cols = shape.cols;
    const DataTypes data_types = types.data_types();
    problem.x = data_types.x;
    problem.weight = data_types.weight;
    problem.y = data_types.y;
    problem.residual = dresidual.has_value();
    problem.needs_dparams = needs_dweight || needs_dbias;
    problem.has_epilogue = act != Activation::kNone || scale != 1.0;
    const int64_t least = std::min(size_of(problem.x), size_of(problem.y));
    problem.aligned = x_rows.aligned() && dy_rows.aligned() &&
                      (!dresidual_rows || dresidual_rows->aligned()) &&
                      shape.cols * least % int64_t{kAlignment} == 0;
    const backward::Plan plan =
        make_backward_plan(problem, device_properties(x.get_device_index()));

    BackwardParams params;
    params.dy = dy_rows.tensor.const_data_ptr();
    params.dy_rows = dy_rows.map;
    params.x = x_rows.tensor.const_data_ptr();
    params.x_rows = x_rows.map;
    params.mean = ready_mean.const_data_ptr();
    params.rstd = ready_rstd.const_data_ptr();
    params.weight = data_of(ready_weight);
    params.bias = data_of(ready_bias);
    if (dresidual) {
      params.dresidual = dresidual_rows->tensor.const_data_ptr();
      params.dresidual_rows = dresidual_rows->map;
    }
    params.dx = needs_dx ? dx.mutable_data_ptr() : nullptr;
    params.dweight = needs_dweight ? dweight.mutable_data_ptr() : nullptr;
    params.dbias = needs_dbias ? dbias.mutable_data_ptr() : nullptr;
    params.rows = shape.rows;
    params.cols = static_cast<int32_t>(shape.cols);
    params.inverse_cols = Scalar(1.0 / static_cast<double>(shape.cols));
    params.scale = Scalar(scale);
    params.has_epilogue = problem.has_epilogue;
    params.activation = act;
    std::optional<Tensor> workspace;
    if (launch_of(plan).workspace_bytes > 0) {
      workspace = allocate_workspace(x, launch_of(plan).workspace_bytes);
      params.workspace = workspace->mutable_data_ptr();
    }
    check_cuda(
        launch_layer_norm_backward(params, data_types, plan, current_stream(x.get_device_index())));
  }
  return {dx, needs_dweight ? cast(dweight, param_out) : dweight,
          needs_dbias ? cast(dbias, param_out) : dbias};
}

void register_cuda_kernels(torch::stable::detail::StableLibrary& library) {
  library.impl("layer_norm", TORCH_BOX(&layer_norm));
  library.impl("layer_norm_forward", TORCH_BOX(&layer_norm_forward));
  library.impl("add_layer_norm", TORCH_BOX(&add_layer_norm));
  library.impl("add_layer_norm_forward", TORCH_BOX(&add_layer_norm_forward));
  library.impl("layer_norm_backward", TORCH_BOX(&layer_norm_backward));
}

}  // namespace fused_layernorm

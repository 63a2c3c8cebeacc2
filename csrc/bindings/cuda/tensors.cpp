// SPDX-License-Identifier: Apache-2.0
// Prepares tensors and the device for kernels; tensors.h has the contract.
#include "bindings/cuda/tensors.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "base/margin.h"
#include "call/layout.h"

// Weak: a torch without CUDA has no such function, and the library must load there too.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                             void** ret_stream)
    __attribute__((weak));

namespace fused_layernorm {
namespace {

uintptr_t address_of(const Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
}

Tensor copy(const Tensor& tensor, ScalarType type) {
  Tensor result = empty_like(tensor, type);
  torch::stable::copy_(result, tensor);
  return result;
}

// The message begins as PyTorch's own does, because programs look for that; by "fused_layernorm"
// after it fused_layernorm/ops/arguments.py and per_torch/operators.h recognise the error, which
// they turn into an OutOfMemoryError.
[[noreturn]] void throw_out_of_memory(int device_index, int64_t bytes) {
  constexpr double kMiB = 1 << 20;
  size_t free = 0, total = 0;
  check_cuda(cudaMemGetInfo(&free, &total));  // throws an earlier error of the device
  std::ostringstream text;
  text.precision(1);
  text << std::fixed << "CUDA out of memory: fused_layernorm could not allocate "
       << static_cast<double>(bytes) / kMiB << " MiB on cuda:" << device_index << ", where "
       << static_cast<double>(free) / kMiB << " MiB are free";
  throw std::runtime_error(text.str());
}

}  // namespace

void check_cuda(cudaError_t error) {
  CHECK_ARGUMENT(error == cudaSuccess, "CUDA error: ", cudaGetErrorString(error));
}

CurrentDevice::CurrentDevice(const Tensor& tensor) {
  const int index = tensor.get_device_index();
  int current = -1;
  check_cuda(cudaGetDevice(&current));
  if (current != index) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_create_device_guard(index, &guard_));
  }
}

CurrentDevice::~CurrentDevice() {
  if (guard_ != nullptr) aoti_torch_delete_device_guard(guard_);
}

Device device_of(int index) {
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
    devices[index].l2_bytes = attribute(cudaDevAttrL2CacheSize);
    // Drivers from CUDA 12.4 on support the early start of a kernel in CUDA graphs as well.
    constexpr int kLeastDriver = 12040;
    int driver = 0;
    check_cuda(cudaDriverGetVersion(&driver));
    devices[index].starts_early = devices[index].capability >= 90 && driver >= kLeastDriver;
  });
  return without_margin(devices[index]);
}

cudaStream_t current_stream(int device_index) {
  CHECK_ARGUMENT(aoti_torch_get_current_cuda_stream != nullptr, "this torch has no CUDA");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
  return static_cast<cudaStream_t>(stream);
}

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
  return empty_strided(like, sizes, strides, dims, type);
}

Tensor empty_strided(const Tensor& like, const int64_t* sizes, const int64_t* strides, int64_t dims,
                     ScalarType type) {
  const int device_index = like.get_device_index();
  AtenTensorHandle handle = nullptr;
  const AOTITorchError error = aoti_torch_empty_strided(
      dims, sizes, strides, torch::stable::detail::to<int32_t>(torch::stable::detail::from(type)),
      aoti_torch_device_type_cuda(), device_index, &handle);
  if (error != AOTI_TORCH_SUCCESS) {
    int64_t numel = 1;
    for (int64_t d = 0; d < dims; ++d) numel *= sizes[d];
    throw_out_of_memory(device_index,
                        numel * (type == ScalarType::Byte ? 1 : size_of(data_type(type))));
  }
  return Tensor(handle);
}

Tensor empty_in_order(const Tensor& like, ScalarType type) {
  const auto sizes = like.sizes(), old = like.strides();
  // The dimensions from the innermost to the outermost, sorted as torch.empty_like sorts them: a
  // dimension of stride zero stays in its place, and of equal strides the shorter is further in.
  std::vector<int64_t> order(like.dim()), strides(like.dim());
  std::iota(order.rbegin(), order.rend(), 0);
  const auto compare = [&](int64_t a, int64_t b) {
    if (old[a] == 0 || old[b] == 0) return 0;
    if (old[a] != old[b]) return old[a] < old[b] ? -1 : 1;
    return sizes[a] > sizes[b] ? 1 : 0;
  };
  for (int64_t i = 1; i < like.dim(); ++i) {
    int64_t inner = i;
    for (int64_t j = i - 1; j >= 0; --j) {
      const int found = compare(order[j], order[inner]);
      if (found > 0) {
        std::swap(order[j], order[inner]);
        inner = j;
      } else if (found < 0) {
        break;
      }
    }
  }
  int64_t stride = 1;
  bool same = true;
  for (const int64_t d : order) {
    strides[d] = stride;
    same = same && (sizes[d] == 1 || old[d] == stride);
    stride *= sizes[d] > 1 ? sizes[d] : 1;
  }
  return empty_strided(like, sizes.data(), same ? old.data() : strides.data(), like.dim(), type);
}

Tensor empty_like(const Tensor& like, ScalarType type) {
  return empty(like, like.sizes().data(), like.dim(), type);
}

Tensor none(const Tensor& like, ScalarType type) {
  const int64_t size = 0;
  return empty(like, &size, 1, type);
}

Tensor cast(const Tensor& tensor, ScalarType type) {
  return tensor.scalar_type() == type ? tensor : copy(tensor, type);
}

Tensor contiguous_of(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : copy(tensor, tensor.scalar_type());
}

Tensor aligned_of(const Tensor& tensor) {
  const bool ready = tensor.is_contiguous() && address_of(tensor) % kVectorBytes == 0;
  return ready ? tensor : copy(tensor, tensor.scalar_type());
}

Tensor with_rows(const Tensor& tensor, int64_t leading) {
  return rows_of(raw(tensor), leading) ? tensor : contiguous_of(tensor);
}
Tensor view(const Tensor& tensor, const int64_t* sizes, const int64_t* strides, int64_t dims,
            int64_t from) {
  AtenTensorHandle handle = nullptr;
  // The offset is from the tensor's first element.
  TORCH_ERROR_CODE_CHECK(
      aoti_torch__reinterpret_tensor(tensor.get(), dims, sizes, strides, from, &handle));
  return Tensor(handle);
}

bool is_beside(const Tensor& tensor, const Tensor& x) {
  return tensor.is_cuda() && tensor.get_device_index() == x.get_device_index();
}

RawTensor raw(const Tensor& tensor) {
  const int32_t device = tensor.is_cuda() ? tensor.get_device_index() : kNoDevice;
  return raw_of(tensor, static_cast<int16_t>(device));
}
RawTensor raw(const std::optional<Tensor>& tensor) { return tensor ? raw(*tensor) : RawTensor(); }

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// Prepares tensors and the device for kernels: current device and stream, new tensors, copies.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <optional>

#include "base/chip.h"
#include "base/cuda_types.h"
#include "bindings/data_types.h"
#include "call/description.h"

// The namespace is hidden, as torch::stable is: no other library uses these types.
namespace [[gnu::visibility("hidden")]] fused_layernorm {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Throws std::runtime_error unless `condition` holds. The other arguments make up the message.
#define CHECK_ARGUMENT(condition, ...) STD_TORCH_CHECK(condition, "fused_layernorm: ", __VA_ARGS__)

void check_cuda(cudaError_t error);

// Makes a tensor's device the current one for the lifetime of the object.
class CurrentDevice {
 public:
  explicit CurrentDevice(const Tensor& tensor);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  DeviceGuardHandle guard_ = nullptr;
};

// The properties of a device that a plan needs, queried once for each device, without the margin
// of multiprocessors that plans are to leave free.
Device device_of(int index);
inline Device device_of(const Tensor& tensor) { return device_of(tensor.get_device_index()); }

// PyTorch's current stream of a device.
cudaStream_t current_stream(int device_index);
inline cudaStream_t current_stream(const Tensor& tensor) {
  return current_stream(tensor.get_device_index());
}

// New tensors on the device of `like`, contiguous but for the first. All throw if memory
// is short.
Tensor empty_strided(const Tensor& like, const int64_t* sizes, const int64_t* strides, int64_t dims,
                     ScalarType type);
Tensor empty(const Tensor& like, const int64_t* sizes, int64_t dims, ScalarType type);
Tensor empty_like(const Tensor& like, ScalarType type);
// An empty tensor of shape (0,).
Tensor none(const Tensor& like, ScalarType type);

// A new tensor with the strides that torch.empty_like(like) gives it: those of `like` where its
// elements lie without gaps, else dense ones in the order of its dimensions in memory.
Tensor empty_in_order(const Tensor& like, ScalarType type);

// The tensor itself where it is of this type, else a contiguous copy.
Tensor cast(const Tensor& tensor, ScalarType type);

// The tensor itself where it is contiguous, else a copy.
Tensor contiguous_of(const Tensor& tensor);
// The same, where it also begins at a multiple of 16 bytes.
Tensor aligned_of(const Tensor& tensor);

// A tensor whose rows kernels read: this one, or a contiguous copy if no RowMap describes where
// its rows begin. The first `leading` dimensions count rows, the others columns.
Tensor with_rows(const Tensor& tensor, int64_t leading);

// A view of the tensor's memory from one of its elements on, with these sizes and strides.
Tensor view(const Tensor& tensor, const int64_t* sizes, const int64_t* strides, int64_t dims,
            int64_t from = 0);

// Whether a tensor is on the device of x, a CUDA tensor.
bool is_beside(const Tensor& tensor, const Tensor& x);

// A tensor in a description.
RawTensor raw(const Tensor& tensor);
RawTensor raw(const std::optional<Tensor>& tensor);

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// Prepares tensors and the device for kernels: current device and stream, new tensors, copies,
// rows.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>

#include "backward/plan.h"
#include "base/json.h"
#include "base/planes.h"
#include "bindings/data_types.h"
#include "forward/plan.h"

// The namespace is hidden, as torch::stable is: no other library uses these types.
namespace fused_layernorm __attribute__((visibility("hidden"))) {

  using torch::headeronly::ScalarType;
  using torch::stable::Tensor;

// Throws std::runtime_error unless `condition` holds. The other arguments make up the message.
#define CHECK_ARGUMENT(condition, ...) STD_TORCH_CHECK(condition, "fused_layernorm: ", __VA_ARGS__)

  void check_cuda(cudaError_t error);

  bool is_half(ScalarType type);

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

  // The properties of a device that a plan needs, queried once for each device.
  const Device& device_of(int index);

  // PyTorch's current stream of a device.
  cudaStream_t current_stream(int device_index);

  // New tensors on the device of `like`, contiguous but for the first. All throw if memory
  // is short.
  Tensor empty_strided(const Tensor& like, const int64_t* sizes, const int64_t* strides,
                       int64_t dims, ScalarType type);
  Tensor empty(const Tensor& like, const int64_t* sizes, int64_t dims, ScalarType type);
  Tensor empty_like(const Tensor& like, ScalarType type);

  // A new tensor with the strides that torch.empty_like(like) gives it: those of `like` where its
  // elements lie without gaps, else dense ones in the order of its dimensions in memory.
  Tensor empty_in_order(const Tensor& like, ScalarType type);

  // The tensor itself where it is of this type, else a contiguous copy.
  Tensor cast(const Tensor& tensor, ScalarType type);

  // The tensor itself where it is contiguous, else a copy.
  Tensor contiguous_of(const Tensor& tensor);
  // The same, where it also begins at a multiple of 16 bytes.
  Tensor aligned_of(const Tensor& tensor);

  // A parameter as kernels read it: of this type, contiguous and aligned.
  std::optional<Tensor> prepare_parameter(const std::optional<Tensor>& parameter, ScalarType type);

  // Where the rows of a tensor begin. The tensor's first `leading` dimensions count rows.
  // std::nullopt unless each row is contiguous inside and the rows stand at no more than two
  // strides.
  std::optional<RowMap> row_map(const int64_t* sizes, const int64_t* strides, int64_t dims,
                                int64_t leading);

  // Where the rows of a tensor lie whose columns lie apart and whose neighbouring rows side by
  // side. std::nullopt for other tensors, rows of one column among them.
  std::optional<Planes> planes_of(const Tensor& tensor, int64_t leading);

  // Whether the tensor has the same planes and no gaps between them.
  bool has_dense_planes(const Tensor& tensor, const Planes& planes, int64_t leading);

  // The greatest number of elements, a power of two up to those of 16 bytes, at whose multiples all
  // planes begin.
  int64_t unit_of(const Tensor& tensor, const Planes& planes);

  // Whether each sample is one run of memory that begins at a multiple of 16 bytes.
  bool is_run(const Tensor& tensor, const Planes& planes, int64_t cols);

  // Whether every row of the tensor, placed as `map` says, begins at a multiple of 16 bytes. The
  // tensor may be given by the address and the size of an element.
  bool is_aligned(const void* data, int64_t bytes, const RowMap& map);
  bool is_aligned(const Tensor& tensor, const RowMap& map);

  // A view of the tensor's memory from its first element on, with these sizes and strides.
  Tensor view(const Tensor& tensor, const int64_t* sizes, const int64_t* strides, int64_t dims);

  // Whether a tensor is on the device of x, a CUDA tensor.
  bool is_beside(const Tensor& tensor, const Tensor& x);

  // The address of the data, or null.
  const void* data_of(const std::optional<Tensor>& tensor);

  // Scratch memory for a launch, which may need none.
  class Workspace {
   public:
    Workspace(const Tensor& like, int64_t bytes);
    void* data() const { return tensor_ ? tensor_->mutable_data_ptr() : nullptr; }

   private:
    std::optional<Tensor> tensor_;
  };

  // A plan, and one whose blocks do not wait for each other. It is launched if the first is refused
  // because its blocks cannot all be resident at once: the caller may have only a part of the
  // device (a green context, a limit of MPS), which no attribute tells.
  template <typename Plan>
  struct Planned {
    Plan plan;
    std::optional<Plan> apart;  // if blocks of `plan` wait for each other
  };
  template <typename Plan>
  int64_t workspace_bytes_of(const Plan& plan) {
    return launch_of(plan).workspace_bytes;
  }
  template <typename Plan>
  int64_t workspace_bytes_of(const Planned<Plan>& planned) {
    const int64_t bytes = workspace_bytes_of(planned.plan);
    return planned.apart ? std::max(bytes, workspace_bytes_of(*planned.apart)) : bytes;
  }

  template <typename Params, typename Plan>
  cudaError_t enqueue(const Params& params, const DataTypes& types, const Plan& plan,
                      cudaStream_t stream) {
    if constexpr (std::is_same_v<Params, ForwardParams>) {
      return launch_layer_norm_forward(params, types, plan, stream);
    } else if constexpr (std::is_same_v<Params, BackwardParams>) {
      return launch_layer_norm_backward(params, types, plan, stream);
    } else {
      return launch_gate_backward(params, types, plan, stream);
    }
  }
  // Throws unless the launch of a plan succeeded; the message says which plan, for which rows and
  // types.
  template <typename Params, typename Plan>
  void check_launch(cudaError_t error, const Params& params, const DataTypes& types,
                    const Plan& plan) {
    if (error == cudaSuccess) return;
    const char* const direction = std::is_same_v<Params, ForwardParams>    ? "forward"
                                  : std::is_same_v<Params, BackwardParams> ? "backward"
                                                                           : "gate_backward";
    CHECK_ARGUMENT(false, "CUDA error: ", cudaGetErrorString(error), ", at the launch of ",
                   direction, " for ", params.rows, " rows of ", params.cols, " columns, x ",
                   name_of(types.x), ", weight ", name_of(types.weight), ", y ", name_of(types.y),
                   ", by the plan ", describe(plan));
  }

  // Launches a plan, or the one that takes its place.
  template <typename Params, typename Plan>
  void launch(const Params& params, const DataTypes& types, const Plan& plan, cudaStream_t stream) {
    check_launch(enqueue(params, types, plan, stream), params, types, plan);
  }
  template <typename Params, typename Plan>
  void launch(const Params& params, const DataTypes& types, const Planned<Plan>& planned,
              cudaStream_t stream) {
    const cudaError_t error = enqueue(params, types, planned.plan, stream);
    if (error == cudaErrorCooperativeLaunchTooLarge && planned.apart) {
      (void)cudaGetLastError();  // else the next check of PyTorch's would find it
      launch(params, types, *planned.apart, stream);
    } else {
      check_launch(error, params, types, planned.plan);
    }
  }
  // The same on the device of `x`, with the workspace that the plan asks for.
  template <typename Params, typename Plan>
  void launch(Params params, const DataTypes& types, const Plan& plan, const Tensor& x) {
    const Workspace workspace(x, workspace_bytes_of(plan));
    params.workspace = workspace.data();
    launch(params, types, plan, current_stream(x.get_device_index()));
  }

  // A tensor whose rows kernels read, if there is one: the original, or a contiguous copy if no
  // RowMap describes where the original's rows begin.
  struct Rows {
    std::optional<Tensor> tensor;
    RowMap map;

    // A tensor as it lies, for kernels that need no map.
    explicit Rows(const Tensor& original) : tensor(original) {}
    // The first `leading` dimensions count rows, the others columns.
    Rows(const std::optional<Tensor>& original, int64_t leading);
    const void* data() const { return data_of(tensor); }
    // Whether every row begins at a multiple of 16 bytes.
    bool aligned() const { return !tensor || is_aligned(*tensor, map); }
  };

}  // namespace fused_layernorm

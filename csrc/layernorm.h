// The contract between host code and kernels: what a launch is given, and who launches.
// Kernels know rows and columns, not tensors; tensors stop in ops_cuda.cpp.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "plan.h"

namespace fused_layernorm {

enum class Activation : int32_t { kNone, kGelu, kGeluTanh, kSilu, kRelu };

// Where a row begins. Rows that are contiguous inside may stand at two strides:
// row = outer * inner_rows + inner; inner_rows = 0 means one stride for all.
struct RowMap {
  int64_t inner_rows = 0;
  int64_t inner_stride = 0;
  int64_t outer_stride = 0;

#ifdef __CUDACC__
  // `use(start)`, on each of the two ways to it.
  template <typename Use>
  __device__ __forceinline__ auto visit(int64_t row, const Use& use) const {
    if (inner_rows == 0) return use(row * inner_stride);
    const uint32_t outer = static_cast<uint32_t>(row) / static_cast<uint32_t>(inner_rows);
    return use(outer * outer_stride + (row - outer * inner_rows) * inner_stride);
  }
  __device__ __forceinline__ int64_t operator()(int64_t row) const {
    return visit(row, [](int64_t start) { return start; });
  }
#endif
};

// A number as float32 and float64 arithmetic take it: kernels convert nothing.
struct Scalar {
  double exact = 0;
  float rounded = 0;
  float rest = 0;  // exact = rounded + rest

  Scalar() = default;
  explicit Scalar(double value)
      : exact(value),
        rounded(static_cast<float>(value)),
        rest(static_cast<float>(value - static_cast<double>(rounded))) {}
#ifdef __CUDACC__
  template <typename Acc>
  __device__ __forceinline__ Acc as() const {
    if constexpr (sizeof(Acc) == sizeof(float)) {
      return rounded;
    } else {
      return exact;
    }
  }
#endif
};

// The data types of a launch: x is what is normalized, y the output (dy in backward).
struct DataTypes {
  DataType x = DataType::kFloat32;
  DataType weight = DataType::kFloat32;  // of bias too
  DataType y = DataType::kFloat32;
};

struct ForwardParams {
  // Inputs. With a residual, x = input + residual, rounded to residual's type (DataTypes::x), and
  // input has the type that dispatch.h derives; without, x = input.
  const void* input = nullptr;
  const void* residual = nullptr;  // optional
  const void* weight = nullptr;    // optional
  const void* bias = nullptr;      // optional
  RowMap input_rows;
  RowMap residual_rows;

  // Outputs, contiguous.
  void* y = nullptr;
  void* residual_out = nullptr;  // with residual
  void* mean = nullptr;          // optional, of the arithmetic's type
  void* rstd = nullptr;          // optional

  int64_t rows = 0;
  int32_t cols = 0;
  Scalar inverse_cols;  // 1 / cols
  Scalar eps;
  Scalar scale;
  bool has_epilogue = false;  // an activation, or a scale that is not 1
  Activation activation = Activation::kNone;

  // Plan::workspace_bytes of scratch memory.
  void* workspace = nullptr;
};

struct BackwardParams {
  // Inputs.
  const void* dy = nullptr;
  const void* x = nullptr;
  const void* mean = nullptr;
  const void* rstd = nullptr;
  const void* weight = nullptr;     // optional
  const void* bias = nullptr;       // optional; read only under an activation
  const void* dresidual = nullptr;  // optional, of x's type, added to dx
  RowMap dy_rows;
  RowMap x_rows;
  RowMap dresidual_rows;

  // Outputs, contiguous; null where not asked for.
  void* dx = nullptr;
  void* dweight = nullptr;
  void* dbias = nullptr;

  int64_t rows = 0;
  int32_t cols = 0;
  Scalar inverse_cols;
  Scalar scale;
  bool has_epilogue = false;
  Activation activation = Activation::kNone;

  void* workspace = nullptr;
};

// Each enqueues its kernels on `stream` of the current device and returns the first error.
cudaError_t launch_layer_norm_forward(const ForwardParams& params, const DataTypes& types,
                                      const Plan& plan, cudaStream_t stream);
cudaError_t launch_layer_norm_backward(const BackwardParams& params, const DataTypes& types,
                                       const Plan& plan, cudaStream_t stream);

}  // namespace fused_layernorm

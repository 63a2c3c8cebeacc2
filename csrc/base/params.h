// SPDX-License-Identifier: Apache-2.0
// The contract between host code and kernels: the parameters of a launch. Kernels know rows and
// columns; tensors end in bindings/ and per_torch/. docs/architecture.md has a picture of the
// whole.
#pragma once

#include <cstdint>

#include "base/types.h"

namespace fused_layernorm {

// kLeakyRelu (groups/params.h) and kSigmoid (gated/params.h), which only those families have, are
// the two numbers after these.
enum class Activation : int32_t { kNone, kGelu, kGeluTanh, kSilu, kRelu };

// To which type xhat is rounded before it is multiplied by weight.
enum class XhatRounding : int32_t { kNone, kFloat16, kBFloat16 };

// Where a row begins, in elements. A row's own elements are contiguous. Rows may have two strides:
// row outer * inner_rows + inner begins at outer * outer_stride + inner * inner_stride. A kernel
// computes this with neither a branch nor a division, because the loads of a row would wait for a
// branch. (Granlund and Montgomery, "Division by invariant integers using multiplication", 1994,
// for rows below 2^31.)
struct RowMap {
  int64_t stride = 0;       // from one row to the next
  int64_t jump = 0;         // outer_stride - inner_rows * stride
  uint32_t multiplier = 0;  // outer = row * multiplier / 2^(32 + shift)
  uint32_t shift = 0;

  RowMap() = default;
  explicit RowMap(int64_t row_stride) : stride(row_stride) {}
  // 2 <= inner_rows < 2^31.
  RowMap(int64_t inner_rows, int64_t inner_stride, int64_t outer_stride)
      : stride(inner_stride), jump(outer_stride - inner_rows * inner_stride) {
    while (int64_t{2} << shift < inner_rows) ++shift;
    multiplier =
        static_cast<uint32_t>(((int64_t{1} << (32 + shift)) + inner_rows - 1) / inner_rows);
  }
#ifdef __CUDACC__
  __device__ __forceinline__ int64_t operator()(int64_t row) const {
    const uint32_t low = static_cast<uint32_t>(row);
    const uint32_t outer = __umulhi(low, multiplier) >> shift;
    return low * stride + outer * jump;
  }
#endif
};

// A number in two forms, for float32 and for float64 arithmetic, so that kernels convert nothing.
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

// What a modulation adds to a norm: z * (1 + scale) + shift after the affine map, whose result is
// z, and x = residual + gate * input before the norm. Each RowMap says where the columns for a row
// begin; rows that share parameters share this place. All columns begin at multiples of 16 bytes.
struct Modulation {
  const void* shift = nullptr;  // each optional, of weight's type
  const void* scale = nullptr;
  const void* gate = nullptr;
  RowMap shift_rows;
  RowMap scale_rows;
  RowMap gate_rows;
};

// The parameters of a launch begin with those of the bare norm, because what lies further back
// reaches a kernel later (kNearArgumentBytes in base/launch.cuh).
struct ForwardParams {
  // Inputs. Without a residual, x = input.
  const void* input = nullptr;
  const void* weight = nullptr;  // optional
  const void* bias = nullptr;    // optional
  RowMap input_rows;

  // Outputs, contiguous.
  void* y = nullptr;
  void* mean = nullptr;  // optional, of the arithmetic's type
  void* rstd = nullptr;  // optional

  int64_t rows = 0;
  int32_t cols = 0;
  bool stays_in_l2 = false;  // as the plan says (InRegisters in forward/row.h)
  bool is_rms = false;       // RMSNorm: the mean counts as zero and is not written
  Scalar inverse_cols;       // 1 / cols
  Scalar eps;

  // As much scratch memory as the plan asks for (Launch::workspace_bytes).
  void* workspace = nullptr;

  // With a residual, x = input + residual, rounded to residual's type (DataTypes::x), and input is
  // of the type Types::In (norm/types.cuh). residual_out is contiguous and gets x.
  const void* residual = nullptr;  // optional
  RowMap residual_rows;
  void* residual_out = nullptr;

  // has_epilogue: the norm needs a kernel with an epilogue, because it activates or because its
  // weight is not plain.
  bool has_epilogue = false;
  bool activates = false;  // there is an activation, or a scale that is not 1
  Activation activation = Activation::kNone;
  Scalar scale;

  // A weight is not plain if something is added to it, or if xhat is rounded before they are
  // multiplied. Negative zero is added otherwise: it changes no number.
  bool plain_weight = true;
  XhatRounding xhat_rounding = XhatRounding::kNone;
  Scalar weight_offset{-0.0};

  bool is_modulated = false;
  Modulation modulation;
};

struct BackwardParams {
  // Inputs.
  const void* dy = nullptr;
  const void* x = nullptr;
  const void* mean = nullptr;
  const void* rstd = nullptr;
  const void* weight = nullptr;  // optional
  const void* bias = nullptr;    // optional; read only under an activation
  RowMap dy_rows;
  RowMap x_rows;

  // Outputs, contiguous; null where not asked for.
  void* dx = nullptr;
  void* dweight = nullptr;
  void* dbias = nullptr;

  int64_t rows = 0;
  int32_t cols = 0;
  bool is_rms = false;  // RMSNorm: the mean counts as zero and is not read
  Scalar inverse_cols;

  void* workspace = nullptr;

  const void* dresidual = nullptr;  // optional, of x's type, added to dx
  RowMap dresidual_rows;

  bool has_epilogue = false;  // as in ForwardParams
  bool activates = false;
  Activation activation = Activation::kNone;
  Scalar scale;
  Scalar weight_offset{-0.0};  // added to weight; the rounding of xhat counts as the identity

  // With a modulation, every group_rows consecutive rows are a group, and the rows of a group share
  // shift, scale and gate. dshift and dscale are [groups][cols], optional, of weight's type, or of
  // the arithmetic's type (`is_wide`) where further sums follow.
  bool is_modulated = false;
  Modulation modulation;
  int64_t group_rows = 0;
  void* dshift = nullptr;
  void* dscale = nullptr;
  bool dshift_is_wide = false;
  bool dscale_is_wide = false;

  // With a gate, x = residual + gate * input, and dx is the gradient of residual. Both input and
  // dinput are of x's type.
  const void* input = nullptr;
  RowMap input_rows;
  void* dinput = nullptr;  // optional
  void* dgate = nullptr;   // optional, [groups][cols], as dshift
  bool dgate_is_wide = false;
};

// Backward of the gated sum residual + gate * input, from the gradient of its result.
struct GateParams {
  const void* dsum = nullptr;  // of the residual's type
  const void* input = nullptr;
  const void* gate = nullptr;
  RowMap dsum_rows;
  RowMap input_rows;
  RowMap gate_rows;

  void* dinput = nullptr;  // optional
  void* dgate = nullptr;   // optional, [groups][cols], as dshift
  bool dgate_is_wide = false;

  int64_t rows = 0;
  int32_t cols = 0;
  int64_t group_rows = 0;

  void* workspace = nullptr;
};

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// What a launch of a gated RMSNorm is given: rows of `groups` groups of `cols` columns, each of
// which is normalized by itself, with a gate behind the norm or in front of it.
#pragma once

#include <cstdint>

#include "base/params.h"

namespace fused_layernorm {

// The gate's other activation, beside kSilu. Only gated norms have it.
constexpr Activation kSigmoid{6};

// Norm first: y = (norm(x) * weight + bias) * activation(gate). Gate first: y = norm(x *
// activation(gate)) * weight + bias. Rows of x, gate or dy are contiguous each; y, dx, dgate
// altogether.
struct GatedParams {
  const void* x = nullptr;
  const void* gate = nullptr;    // of x's type
  const void* weight = nullptr;  // optional, for all columns of a row
  const void* bias = nullptr;    // optional, of weight's type
  RowMap x_rows;
  RowMap gate_rows;
  void* y = nullptr;     // in backward dx, which is optional
  void* rstd = nullptr;  // [rows][groups]; optional in forward
  int32_t rows = 0;
  int32_t cols = 0;  // of a group
  int32_t groups = 1;
  bool silu = true;
  bool weight_is_float = false;  // float32, beside x of any type; else of x's type
  bool gate_first = false;
  // Forward: x, weight and y have one type of half precision, to which xhat and the affine map's
  // result are rounded, and there is neither bias nor offset.
  bool is_one_type = false;
  // To which type xhat is rounded before it is multiplied by weight, and to which the result of the
  // affine map is. They are small so that what forward reads lies in three lines of constant
  // memory, of 64 bytes, each of which takes time to come.
  XhatRounding xhat_rounding : 8 = XhatRounding::kNone;
  XhatRounding affine_rounding : 8 = XhatRounding::kNone;
  DataType y_type = DataType::kFloat32;  // forward's; dy is of x's type
  Scalar inverse_cols;                   // 1 / cols
  Scalar eps;
  Scalar weight_offset{0.0};

  // Backward.
  const void* dy = nullptr;
  RowMap dy_rows;
  void* dgate = nullptr;  // optional, as all gradients
  void* dweight = nullptr;
  void* dbias = nullptr;
  void* workspace = nullptr;
};

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// A call of a norm: what it computes, and its tensors as they lie in memory. An operator describes
// its call in this way once kernels can read all of its tensors, a direct call as it comes; what
// follows (prepare.h) is the same for both.
//
// This is plain data, because the kernels' library and those of csrc/per_torch share it: these
// launch kernels without the dispatcher, by the table of C functions at the end of this file.
#pragma once

#include <cstdint>

#include "base/params.h"

namespace fused_layernorm {

// The type of a tensor whose own type no kernel computes with, or of none.
constexpr DataType kNoDataType = static_cast<DataType>(-1);
// The index of a device that is not CUDA's.
constexpr int16_t kNoDevice = -1;

// A tensor as it lies in memory; without sizes there is none. Before the launch, `data` of a tensor
// that is written may be null. Of a contiguous tensor no stride is read.
struct RawTensor {
  const void* data = nullptr;
  const int64_t *sizes = nullptr, *strides = nullptr;
  int64_t dims = 0;
  DataType type = kNoDataType;
  int16_t device = kNoDevice;
  bool is_contiguous = false;

  explicit operator bool() const { return sizes != nullptr; }
};

// Where a gate is, and what it multiplies.
enum class GatePlace : int32_t {
  kInput,  // x = residual + gate * input
  kFirst,  // x = input * activation(gate)
  kLast,   // y = norm(x) * activation(gate)
};

// The arguments of an operator that are no tensors. An operator that lacks one has the default.
struct NormOptions {
  int64_t normalized_ndim = 1;
  double eps = 0;  // forward
  Activation activation = Activation::kNone;
  double output_scale = 1;
  bool is_rms = false;
  double weight_offset = 0;
  bool round_before_weight = false;  // forward
  bool keeps_order = false;          // y lies in memory as input does, dx as x
  bool has_unknown_name = false;     // of an activation or a statistic: the operators refuse it

  // GroupNorm: x is (samples, channels, ...), and the channels of a sample are so many groups,
  // which are normalized each by itself; weight and bias have a number for each channel, shift and
  // scale for each channel of each sample. 0: there are no groups.
  int64_t num_groups = 0;
  // Gated norms: a statistic is taken of so many columns; 0: of the whole row.
  int64_t group_size = 0;
  GatePlace gate_place = GatePlace::kInput;
};

// The tensors that a call is given, in any library's type of a tensor. One that is not there is an
// empty T.
template <class T>
struct NormTensors {
  T input = T(), residual = T();  // forward; backward of a gated sum has the input, too
  T dy = T(), x = T(), mean = T(), rstd = T(), dresidual = T();      // backward
  T weight = T(), bias = T(), shift = T(), scale = T(), gate = T();  // the parameters
};

// What a call gives: forward the first four, backward the gradients.
template <class T>
struct NormResults {
  T y = T(), residual_out = T(), mean = T(), rstd = T();
  T dx = T(), dinput = T(), dgate = T(), dshift = T(), dscale = T(), dweight = T(), dbias = T();
};

// Which results are asked for beside y and residual_out.
struct Needs : NormResults<bool> {
  bool columns() const { return dweight || dbias; }
  bool any() const { return dx || columns() || dshift || dscale || dinput || dgate; }
};

// A call. Forward normalizes x, which is input, or with a residual the sum of the two. Weight and
// bias are contiguous; shift, scale and gate broadcast to x. With groups all four parameters may
// have any strides. The input of a gated sum is there in backward only with a gate, where the
// gradient of either is wanted. RMSNorm has no mean.
struct NormCall : NormTensors<RawTensor> {
  NormOptions options;
  bool backward = false;
  int32_t device = 0;
  Needs needs;  // backward

  // Forward. The type to which round_before_weight rounds, and that to which a gated norm rounds
  // the affine map's result. An operator sets them where it may have cast tensors; with kNoDataType
  // they are input's type, and the promoted type of input and weight.
  DataType rounded_to = kNoDataType, affine_rounded_to = kNoDataType;
  // Backward. How many consecutive rows share all of shift, scale and gate; the caller then takes
  // whatever sums of their gradients must follow the launch. 0: prepare() finds the number from
  // their sizes, and declines if sums would have to follow.
  int64_t group_rows = 0;

  // How y lies, or dx, which with groups is always written. All other results are contiguous.
  RawTensor written;
  // The results, once they are allocated. The gradient of a modulation has one row for each group
  // of rows, in the parameter's type, or where further sums follow in the arithmetic's (`is_wide`).
  NormResults<void*> to;
  bool dshift_is_wide = false, dscale_is_wide = false, dgate_is_wide = false;

  const RawTensor& normalized() const { return backward ? x : residual ? residual : input; }
  bool is_modulated() const { return shift || scale || gate; }
};

// The sizes of mean and rstd, from those of x: sets them, one for each dimension, and returns how
// many there are.
inline int64_t statistics_sizes(const NormOptions& options, const int64_t* x, int64_t dims,
                                int64_t* into) {
  const bool gated = options.gate_place != GatePlace::kInput;
  const int64_t leading = dims - (gated ? 1 : options.normalized_ndim);
  for (int64_t d = 0; d < dims; ++d) into[d] = d < leading ? x[d] : 1;
  if (options.group_size > 0) into[leading] = x[leading] / options.group_size;
  if (options.num_groups == 0) return dims;
  into[1] = options.num_groups;
  return 2;
}

// ---- Direct calls

// Raised whenever a struct of this file or the meaning of a field changes.
constexpr int64_t kKernelTableVersion = 6;

// What `prepare` found, for `launch`.
struct DirectLaunch {
  alignas(16) unsigned char bytes[1536];
};

// The operator _kernel_table gives the table's address, 0 without CUDA kernels. A caller checks
// `version` and `size` before it reads on.
//
// prepare: the bytes of workspace that the launch needs, or -1 for a call that needs a conversion
// or a copy, takes more than one launch, or is not valid; the operator then takes it, or says what
// is wrong with it. launch: the same call with its outputs, on the current device; gives null, or
// what went wrong, which is kept until the thread's next launch.
struct KernelTable {
  int64_t version, size;
  int64_t (*prepare)(const NormCall*, DirectLaunch*);
  const char* (*launch)(const NormCall*, DirectLaunch*, void* workspace);
};

}  // namespace fused_layernorm

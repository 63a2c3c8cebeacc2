// SPDX-License-Identifier: Apache-2.0
// The table of C functions by which the libraries of csrc/per_torch launch kernels without the
// dispatcher. They and the kernels' library share this file alone: plain data and addresses.
//
// The operator _kernel_table gives the table's address, 0 without CUDA kernels. A caller checks
// `version` and `size` before it reads on, and raises kKernelTableVersion whenever a struct or the
// meaning of a field changes.
#pragma once

#include <cstdint>

namespace fused_layernorm {

constexpr int64_t kKernelTableVersion = 2;

// A tensor as it lies in memory; without sizes there is none.
struct RawTensor {
  const void* data = nullptr;
  const int64_t *sizes = nullptr, *strides = nullptr;
  int64_t dims = 0;
};

// What a norm computes; the arguments of the operators in schemas.cpp. Types are numbers of
// c10::ScalarType; all parameters are of weight_type. Null is a tensor that is not there. All
// tensors but the modulations are contiguous.
struct DirectNorm {
  RawTensor x;
  int64_t leading = 0;  // the first `leading` dimensions of x count rows
  int64_t rows = 0, cols = 0;
  double eps = 0, output_scale = 1, weight_offset = 0;
  const char* activation = nullptr;  // null: none
  int32_t device = 0;
  int32_t input_type = 0, x_type = 0, weight_type = 0, y_type = 0;  // x: the residual, else input
  bool is_rms = false;
  bool round_before_weight = false;
  const void *weight = nullptr, *bias = nullptr;
  RawTensor shift, scale, gate;  // each broadcasts to x

  bool is_modulated() const { return shift.sizes || scale.sizes || gate.sizes; }
};

// What a launch writes is contiguous, each gradient of the shape and type of its tensor.
struct DirectForward {
  DirectNorm norm;
  const void *input = nullptr, *residual = nullptr;
  void *y = nullptr, *residual_out = nullptr, *mean = nullptr, *rstd = nullptr;
};

struct NeedsOfNorm {
  bool dx = false, dweight = false, dbias = false;
  bool dshift = false, dscale = false, dinput = false, dgate = false;  // dinput: beside a gate

  bool columns() const { return dweight || dbias; }
  bool any() const { return dx || columns() || dshift || dscale || dinput || dgate; }
};

// A gate is there only with the input that it multiplied, where the gradient of either is wanted.
struct DirectBackward {
  DirectNorm norm;
  NeedsOfNorm needs;
  const void *dy = nullptr, *x = nullptr, *mean = nullptr, *rstd = nullptr, *dresidual = nullptr;
  const void* input = nullptr;
  void *dx = nullptr, *dweight = nullptr, *dbias = nullptr;
  void *dshift = nullptr, *dscale = nullptr, *dinput = nullptr, *dgate = nullptr;
};

// What `prepare` found, for `launch`.
struct DirectLaunch {
  alignas(16) unsigned char bytes[1024];
};

// prepare: the bytes of workspace that the launch needs, or -1 for a call that the table does not
// take; the operator then takes it, or says what is wrong with it. The outputs are not there yet.
// launch: the same call with its outputs; gives null, or what went wrong, which is kept until the
// thread's next launch. The call's device is the current one.
struct KernelTable {
  int64_t version, size;
  int64_t (*prepare_forward)(const DirectForward*, DirectLaunch*);
  const char* (*launch_forward)(const DirectForward*, const DirectLaunch*, void* workspace);
  int64_t (*prepare_backward)(const DirectBackward*, DirectLaunch*);
  const char* (*launch_backward)(const DirectBackward*, const DirectLaunch*, void* workspace);
};

}  // namespace fused_layernorm

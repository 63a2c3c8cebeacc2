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

constexpr int64_t kKernelTableVersion = 1;

// What a norm computes; the arguments of the operators in schemas.cpp. Types are numbers of
// c10::ScalarType.
struct DirectNorm {
  int64_t rows = 0, cols = 0;
  double eps = 0, scale = 1, weight_offset = 0;
  const char* activation = nullptr;  // null: none
  int32_t device = 0;
  int32_t input_type = 0, x_type = 0, weight_type = 0, y_type = 0;  // x: the residual, else input
  bool is_rms = false;
  bool round_before_weight = false;
};

// All tensors are contiguous. Null is a tensor that is not there, or not wanted.
struct DirectForward {
  DirectNorm norm;
  const void *input = nullptr, *residual = nullptr, *weight = nullptr, *bias = nullptr;
  void *y = nullptr, *residual_out = nullptr, *mean = nullptr, *rstd = nullptr;
};

struct DirectBackward {
  DirectNorm norm;
  const void *dy = nullptr, *x = nullptr, *mean = nullptr, *rstd = nullptr, *weight = nullptr;
  const void *bias = nullptr, *dresidual = nullptr;
  void *dx = nullptr, *dweight = nullptr, *dbias = nullptr;
};

// What `prepare` found, for `launch`.
struct DirectLaunch {
  alignas(16) unsigned char bytes[1024];
};

// prepare: the bytes of workspace that the launch needs, or -1 for a call that the table does not
// take; the operator then takes it, or says what is wrong with it. launch: null, or what went
// wrong, which is kept until the thread's next launch. The call's device is the current one.
struct KernelTable {
  int64_t version, size;
  int64_t (*prepare_forward)(const DirectForward*, DirectLaunch*);
  const char* (*launch_forward)(const DirectLaunch*, void* workspace);
  int64_t (*prepare_backward)(const DirectBackward*, DirectLaunch*);
  const char* (*launch_backward)(const DirectLaunch*, void* workspace);
};

}  // namespace fused_layernorm

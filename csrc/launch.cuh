// How kernels are launched: template parameters from a plan, dynamic shared memory, errors.
#pragma once

#include <cuda_runtime.h>

#include <map>
#include <type_traits>
#include <utility>

#include "layernorm.h"
#include "norm/rows.cuh"

namespace fused_layernorm {

// One function a strategy, each in the file of its kernels.
cudaError_t launch_layer_norm_forward_warp(const ForwardParams&, const DataTypes&, const Plan&,
                                           cudaStream_t);
cudaError_t launch_layer_norm_backward_warp(const BackwardParams&, const DataTypes&, const Plan&,
                                            cudaStream_t);
cudaError_t launch_layer_norm_forward_block(const ForwardParams&, const DataTypes&, const Plan&,
                                            cudaStream_t);
cudaError_t launch_layer_norm_backward_block(const BackwardParams&, const DataTypes&, const Plan&,
                                             cudaStream_t);
cudaError_t launch_layer_norm_forward_split(const ForwardParams&, const DataTypes&, const Plan&,
                                            cudaStream_t);
cudaError_t launch_layer_norm_forward_stream(const ForwardParams&, const DataTypes&, const Plan&,
                                             cudaStream_t);
cudaError_t launch_layer_norm_backward_stream(const BackwardParams&, const DataTypes&, const Plan&,
                                              cudaStream_t);
// In place of backward's kWarp and kBlock where there are few rows (Plan::few_rows).
cudaError_t launch_layer_norm_backward_few_rows(const BackwardParams&, const DataTypes&,
                                                const Plan&, cudaStream_t);
// Adds up the partial dweight and dbias in the workspace, where there is more than one.
cudaError_t launch_param_grad(const BackwardParams&, const DataTypes&, const Plan&, cudaStream_t);

// A thread moves 16 bytes of x at once, or single elements where rows are not so aligned.
template <typename T, typename Launch>
cudaError_t dispatch_width(int width, const Launch& launch) {
  constexpr int kAligned = kVectorWidth<T>;
  if (width == kAligned) return launch(std::integral_constant<int, kAligned>{});
  if (width == 1) return launch(std::integral_constant<int, 1>{});
  return cudaErrorInvalidValue;
}

// A value of `kFirst, kRest...`, as a template parameter.
template <int kFirst, int... kRest, typename Launch>
cudaError_t dispatch_vecs(int vecs, const Launch& launch) {
  if (vecs == kFirst) return launch(std::integral_constant<int, kFirst>{});
  if constexpr (sizeof...(kRest) > 0) {
    return dispatch_vecs<kRest...>(vecs, launch);
  } else {
    return cudaErrorInvalidValue;
  }
}

// A run-time bool as a template parameter; where `kMay` is false, false.
template <bool kMay, typename Launch>
cudaError_t dispatch_bool(bool value, const Launch& launch) {
  if constexpr (kMay) {
    if (value) return launch(std::true_type{});
  }
  return launch(std::false_type{});
}

// What of the Fusion of rows.cuh a launch needs.
inline bool has_residual(const ForwardParams& params) { return params.residual != nullptr; }
inline bool has_residual(const BackwardParams& params) { return params.dresidual != nullptr; }

template <typename Params, typename Launch>
cudaError_t dispatch_fusion(const Params& params, const Launch& launch) {
  if (has_residual(params)) return launch(std::integral_constant<Fusion, Fusion::kResidual>{});
  if (params.has_epilogue) return launch(std::integral_constant<Fusion, Fusion::kEpilogue>{});
  return launch(std::integral_constant<Fusion, Fusion::kNone>{});
}

// The same for backward kernels that are not worth one for an epilogue alone: the one for a
// residual, which may be missing, does for both.
template <typename Launch>
cudaError_t dispatch_any_fusion(const BackwardParams& params, const Launch& launch) {
  if (has_residual(params) || params.has_epilogue) {
    return launch(std::integral_constant<Fusion, Fusion::kResidual>{});
  }
  return launch(std::integral_constant<Fusion, Fusion::kNone>{});
}

// A block has 48 KB without asking, its static shared memory included.
constexpr int kFreeSharedMemory = 40 * 1024;

// Asks for more, once a kernel, device and thread of the host rather than at every launch.
inline cudaError_t allow_shared_memory(const void* kernel, int bytes) {
  thread_local std::map<std::pair<int, const void*>, int> allowed;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  int& most = allowed[{device, kernel}];
  if (bytes <= most) return cudaSuccess;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) most = bytes;
  return error;
}

// kCooperative: all blocks are resident at once.
template <bool kCooperative = false, typename... Params, typename... Args>
cudaError_t launch(void (*kernel)(Params...), const Plan& plan, int block_threads,
                   cudaStream_t stream, const Args&... args) {
  if (plan.shared_bytes > kFreeSharedMemory) {
    const cudaError_t error =
        allow_shared_memory(reinterpret_cast<const void*>(kernel), plan.shared_bytes);
    if (error != cudaSuccess) return error;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(plan.blocks + plan.column_blocks));
  config.blockDim = dim3(static_cast<unsigned>(block_threads));
  config.dynamicSmemBytes = static_cast<size_t>(plan.shared_bytes);
  config.stream = stream;
  cudaLaunchAttribute cooperative;
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  if (kCooperative) {
    config.attrs = &cooperative;
    config.numAttrs = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
}

}  // namespace fused_layernorm

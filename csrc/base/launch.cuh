// SPDX-License-Identifier: Apache-2.0
// How kernels are launched: the numbers of a plan become template parameters and dynamic shared
// memory, and errors are returned.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <set>
#include <type_traits>
#include <utility>

#include "base/choices.h"
#include "base/params.h"
#include "base/problem.h"

namespace fused_layernorm {

// A number of a list, mostly of vectors, as a template parameter. It is an error if the list does
// not have it.
template <int kFirst, int... kRest, typename Then>
cudaError_t dispatch_vecs(VecsList<kFirst, kRest...>, int vecs, const Then& then) {
  if (vecs == kFirst) return then(std::integral_constant<int, kFirst>{});
  if constexpr (sizeof...(kRest) > 0) {
    return dispatch_vecs(VecsList<kRest...>{}, vecs, then);
  } else {
    return cudaErrorInvalidValue;
  }
}

// A run-time bool as a template parameter. Where `kMay` is false, so is the parameter.
template <bool kMay = true, typename Then>
cudaError_t dispatch_bool(bool value, const Then& then) {
  if constexpr (kMay) {
    if (value) return then(std::true_type{});
  }
  return then(std::false_type{});
}

// A thread moves a vector of x at once, or single elements where rows are not aligned.
template <int kVectorWidth, typename Then>
cudaError_t dispatch_width(int width, const Then& then) {
  return dispatch_vecs(VecsList<kVectorWidth, 1>{}, width, then);
}

constexpr int log2_of(int power_of_two) {
  int log = 0;
  while (1 << log < power_of_two) ++log;
  return log;
}

// The most dynamic shared memory for which nothing is requested. Without a request a block has 48
// KB, which include its static shared memory.
constexpr int kFreeSharedMemory = 40 * 1024;

// Allows a kernel all the shared memory that a block of the current device can have. The driver
// keeps one allowance for each kernel and device for the whole process, and lowers it as readily as
// it raises it. So every thread of the host asks for the same number of bytes, whatever its plan
// needs, and no thread takes away what another one relies on. Each thread asks once.
inline cudaError_t allow_shared_memory(const void* kernel) {
  thread_local std::set<std::pair<int, const void*>> allowed;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess || allowed.count({device, kernel}) > 0) return error;
  int most = 0;
  error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  cudaFuncAttributes attributes;
  error = cudaFuncGetAttributes(&attributes, kernel);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               most - static_cast<int>(attributes.sharedSizeBytes));
  if (error == cudaSuccess) allowed.emplace(device, kernel);
  return error;
}

// So many bytes of its arguments a kernel has when it starts. One that reads an argument further
// back waits for it, 0.11 to 0.14 us (8 rows of 512 float32 elements, copied: 1.24 us, with an
// argument at byte 240 or later 1.36). So a kernel takes what its plan says before the parameters
// of the norm, which begin with what every norm needs.
constexpr int kNearArgumentBytes = 240;
constexpr int kMostPlanArguments = 40;  // bytes; persistent blocks, which take a whole plan, wait
static_assert(kMostPlanArguments + offsetof(ForwardParams, workspace) <= kNearArgumentBytes &&
                  kMostPlanArguments + offsetof(BackwardParams, workspace) <= kNearArgumentBytes,
              "no kernel of a bare norm for few rows waits for an argument");

enum class Start {
  kPlain,
  kCooperative,  // all blocks are resident at once
  kCluster,      // the blocks of each cluster are resident at once
  kEarly,        // before the previous kernel has ended; the new one waits (device/pdl.cuh)
};

template <Start kStart = Start::kPlain, typename... Params, typename... Args>
cudaError_t launch(void (*kernel)(Params...), const Launch& plan, cudaStream_t stream,
                   const Args&... args) {
  if (plan.shared_bytes > kFreeSharedMemory) {
    const cudaError_t error = allow_shared_memory(reinterpret_cast<const void*>(kernel));
    if (error != cudaSuccess) return error;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(plan.blocks));
  config.blockDim = dim3(static_cast<unsigned>(plan.threads));
  config.dynamicSmemBytes = static_cast<size_t>(plan.shared_bytes);
  config.stream = stream;
  cudaLaunchAttribute attribute;
  if constexpr (kStart == Start::kCooperative) {
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  } else if constexpr (kStart == Start::kCluster) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(plan.cluster);
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  } else if constexpr (kStart == Start::kEarly) {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (kStart != Start::kPlain) {
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
}

// Launches a kernel whose blocks wait for each other if the plan says so.
template <typename Plan, typename... Params, typename... Args>
cudaError_t launch_meeting(void (*kernel)(Params...), const Plan& plan, cudaStream_t stream,
                           const Args&... args) {
  return plan.meets() ? launch<Start::kCooperative>(kernel, plan, stream, args...)
                      : launch(kernel, plan, stream, args...);
}

// Launches a kernel that itself waits for the previous kernel (device/pdl.cuh): early, if it
// `may` (the plan's starts_early).
template <typename... Params, typename... Args>
cudaError_t launch_early(bool may, void (*kernel)(Params...), const Launch& plan,
                         cudaStream_t stream, const Args&... args) {
  return may ? launch<Start::kEarly>(kernel, plan, stream, args...)
             : launch(kernel, plan, stream, args...);
}

// Presets `bytes` of slots, in which the blocks of each row meet, to all ones.
inline cudaError_t clear_slots(void* slots, int64_t bytes, cudaStream_t stream) {
  return bytes > 0 ? cudaMemsetAsync(slots, 0xff, static_cast<size_t>(bytes), stream) : cudaSuccess;
}

}  // namespace fused_layernorm

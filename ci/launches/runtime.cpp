// SPDX-License-Identifier: Apache-2.0
// A CUDA runtime that launches nothing, and keeps what it was asked to launch (launches.h).
#include <cuda_runtime.h>

#include <map>

#include "launches.h"

std::vector<std::string> launches;
int most_shared_memory = 0;
bool blocks_meet = true;

namespace {

std::map<const void*, std::string>& kernels() {
  static std::map<const void*, std::string> names;
  return names;
}

}  // namespace

extern "C" {

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*,
                            uint3*, dim3*, dim3*, int*) {
  kernels()[function] = name;
}

// What stands for a <<<>>> in the compiler's stubs, which nothing calls.
cudaError_t __cudaGetKernel(cudaKernel_t*, const void*) { return cudaErrorUnknown; }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
  return cudaErrorUnknown;
}
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return cudaErrorUnknown; }

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = most_shared_memory;
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

cudaError_t cudaMemsetAsync(void*, int, size_t bytes, cudaStream_t) {
  launches.push_back("memset " + std::to_string(bytes));
  return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void**) {
  const auto kernel = kernels().find(function);
  const unsigned blocks = config->gridDim.x, threads = config->blockDim.x;
  if (kernel == kernels().end() || blocks == 0 || threads == 0 || threads > 1024 ||
      config->dynamicSmemBytes > static_cast<size_t>(most_shared_memory)) {
    return cudaErrorInvalidConfiguration;
  }
  std::string launch = kernel->second + " blocks " + std::to_string(blocks) + " by " +
                       std::to_string(config->gridDim.y) + " threads " + std::to_string(threads) +
                       " shared " + std::to_string(config->dynamicSmemBytes);
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const auto id = config->attrs[i].id;
    if (id == cudaLaunchAttributeCooperative && !blocks_meet) {
      return cudaErrorCooperativeLaunchTooLarge;
    }
    if (id == cudaLaunchAttributeClusterDimension && !blocks_meet) {
      return cudaErrorInvalidClusterSize;
    }
    launch += " attribute " + std::to_string(id);
  }
  launches.push_back(launch);
  return cudaSuccess;
}

}  // extern "C"

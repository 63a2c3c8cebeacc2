// SPDX-License-Identifier: Apache-2.0
// The functions of the kernel table (call/description.h).
#include <exception>
#include <new>
#include <string>

#include "bindings/cuda/tensors.h"
#include "bindings/driver.h"
#include "call/prepare.h"

namespace fused_layernorm {
namespace {

static_assert(sizeof(Prepared) <= sizeof(DirectLaunch) &&
              alignof(Prepared) <= alignof(DirectLaunch));

int64_t prepare_directly(const NormCall* call, DirectLaunch* into) {
  if (driver_is_too_old()) return -1;
  try {
    auto& prepared = *new (into->bytes) Prepared;
    const bool is_taken = check(*call) && prepare(*call, device_of(call->device), prepared);
    return is_taken ? prepared.workspace_bytes() : -1;
  } catch (const std::exception&) {
    return -1;
  }
}

const char* launch_directly(const NormCall* call, DirectLaunch* prepared, void* workspace) {
  thread_local std::string wrong;
  try {
    launch(*std::launder(reinterpret_cast<Prepared*>(prepared->bytes)), *call, workspace,
           current_stream(call->device));
    return nullptr;
  } catch (const std::exception& error) {
    wrong = error.what();
    return wrong.c_str();
  }
}

constexpr KernelTable kTable = {kKernelTableVersion, sizeof(KernelTable), &prepare_directly,
                                &launch_directly};

}  // namespace

int64_t kernel_table() { return reinterpret_cast<int64_t>(&kTable); }

}  // namespace fused_layernorm

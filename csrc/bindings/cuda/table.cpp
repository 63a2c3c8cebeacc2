// SPDX-License-Identifier: Apache-2.0
// The functions of the kernel table (call/description.h).
#include <exception>
#include <new>
#include <string>
#include <type_traits>

#include "bindings/cuda/tensors.h"
#include "bindings/driver.h"
#include "call/prepare.h"

namespace fused_layernorm {
namespace {

// What lies in the bytes of a DirectLaunch.
template <typename Call>
using PreparedOf =
    std::conditional_t<std::is_same_v<Call, ForwardCall>, PreparedForward, PreparedBackward>;

template <typename Call>
int64_t prepare_directly(const Call* call, DirectLaunch* into) {
  using Prepared = PreparedOf<Call>;
  static_assert(sizeof(Prepared) <= sizeof(DirectLaunch) &&
                alignof(Prepared) <= alignof(DirectLaunch));
  static_assert(std::is_trivially_destructible_v<Prepared>);
  if (driver_is_too_old()) return -1;
  try {
    auto& prepared = *new (into->bytes) Prepared;
    return prepare(*call, device_of(call->device), prepared) ? prepared.workspace_bytes() : -1;
  } catch (const std::exception&) {
    return -1;
  }
}

template <typename Call>
const char* launch_directly(const Call* call, DirectLaunch* prepared, void* workspace) {
  thread_local std::string wrong;
  try {
    launch(*std::launder(reinterpret_cast<PreparedOf<Call>*>(prepared->bytes)), *call, workspace,
           current_stream(call->device));
    return nullptr;
  } catch (const std::exception& error) {
    wrong = error.what();
    return wrong.c_str();
  }
}

constexpr KernelTable kTable = {kKernelTableVersion,
                                sizeof(KernelTable),
                                &prepare_directly<ForwardCall>,
                                &launch_directly<ForwardCall>,
                                &prepare_directly<BackwardCall>,
                                &launch_directly<BackwardCall>};

}  // namespace

int64_t kernel_table() { return reinterpret_cast<int64_t>(&kTable); }

}  // namespace fused_layernorm

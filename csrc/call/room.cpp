// SPDX-License-Identifier: Apache-2.0
// Asks the driver for a launch's multiprocessors; room.h has the contract.
#include "call/room.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdint>

#include "base/margin.h"

namespace fused_layernorm {
namespace {

// The types of the driver's API (cuda.h), declared here because the driver is loaded at run time.
using Context = void*;
using GreenContext = void*;
struct Resource {
  int type = 0;
  unsigned char padding[92] = {};
  unsigned int sms = 0, least = 0, coscheduled = 0;
  unsigned char rest[256] = {};
};
static_assert(offsetof(Resource, sms) == 96);
constexpr int kMultiprocessors = 1;  // CU_DEV_RESOURCE_TYPE_SM

struct Driver {
  int (*current)(Context*) = nullptr;
  int (*id_of)(Context, unsigned long long*) = nullptr;
  int (*of_context)(Context, Resource*, int) = nullptr;
  int (*green_of)(cudaStream_t, GreenContext*) = nullptr;
  int (*of_green)(GreenContext, Resource*, int) = nullptr;

  Driver() {
    void* const driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (driver == nullptr) return;
    const auto find = [driver](auto& function, const char* name) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(driver, name));
    };
    find(current, "cuCtxGetCurrent");
    find(id_of, "cuCtxGetId");
    find(of_context, "cuCtxGetDevResource");
    find(green_of, "cuStreamGetGreenCtx");
    find(of_green, "cuGreenCtxGetDevResource");
  }
  bool knows_parts() const { return current && id_of && of_context && green_of && of_green; }
};

// No chip has more GPCs than this; a cluster of blocks must fit into one. Of the multiprocessors
// that the margin leaves, some GPC has at least this part.
constexpr int kMostChipClusters = 12;

// What the current context has. The last answer is kept, for the context that gave it: its number
// is never given again.
Resource resource_of_current(const Driver& driver) {
  thread_local unsigned long long known = 0;
  thread_local Resource resource;
  Context context = nullptr;
  unsigned long long id = 0;
  if (driver.current(&context) != 0 || context == nullptr || driver.id_of(context, &id) != 0) {
    return {};
  }
  thread_local Context known_context = nullptr;
  if (id == known && context == known_context) return resource;
  Resource found;
  if (driver.of_context(context, &found, kMultiprocessors) != 0) return {};
  resource = found;
  known = id;
  known_context = context;
  return found;
}

}  // namespace

Room room_of(cudaStream_t stream) {
  static const Driver driver;
  int device = 0, all = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&all, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
    return {0, 0};
  }
  const int margin = sm_margin.load(std::memory_order_relaxed);
  Room room = {all, all};
  if (driver.knows_parts()) {
    const auto limit = [&](const Resource& resource) {
      const int sms = static_cast<int>(resource.sms);
      if (sms == 0 || sms >= all) return;
      room.sms = std::min(room.sms, sms);
      room.coscheduled = std::min(room.coscheduled, static_cast<int>(resource.coscheduled));
    };
    limit(resource_of_current(driver));
    GreenContext green = nullptr;
    Resource of_stream;
    if (driver.green_of(stream, &green) == 0 && green != nullptr &&
        driver.of_green(green, &of_stream, kMultiprocessors) == 0) {
      limit(of_stream);
    }
  }
  room.sms = std::max(0, room.sms - margin);
  if (margin > 0) {
    room.coscheduled = room.coscheduled < all ? 0 : ceil_div(room.sms, kMostChipClusters);
  }
  return room;
}

}  // namespace fused_layernorm

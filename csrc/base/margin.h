// SPDX-License-Identifier: Apache-2.0
// How many multiprocessors plans leave free for kernels of others that hold them meanwhile
// (fused_layernorm/margin.py).
#pragma once

#include <atomic>

#include "base/planning.h"

namespace fused_layernorm {

inline std::atomic<int> sm_margin = 0;  // of the process

// The device without the margin. Throws std::invalid_argument if nothing is left of it.
inline Device without_margin(Device device) {
  const int margin = sm_margin.load(std::memory_order_relaxed);
  if (margin >= device.sms) {
    fail("expected a margin of fewer multiprocessors than the ", device.sms, " of the device, got ",
         margin);
  }
  device.sms -= margin;
  return device;
}

}  // namespace fused_layernorm

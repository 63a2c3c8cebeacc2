// SPDX-License-Identifier: Apache-2.0
// The multiprocessors that a launch has: those of its context, which may be a part of the device (a
// green context), without the margin.
#pragma once

#include "base/cuda_types.h"
#include "base/problem.h"

namespace fused_layernorm {

struct Room {
  int sms;          // multiprocessors on which a block finds room
  int coscheduled;  // so many of them at least belong to one cluster of the chip

  // Whether blocks that wait for each other find room at once. A multiprocessor has one of them.
  bool has(const Launch& plan) const {
    return plan.cluster > 1 ? plan.cluster <= coscheduled : plan.blocks <= sms;
  }
};

// On the current device, in a capture as out of it. Everything that cannot be asked for, as before
// CUDA 12.4, is as if the context were the whole device.
Room room_of(cudaStream_t stream);

}  // namespace fused_layernorm

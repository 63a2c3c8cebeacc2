// SPDX-License-Identifier: Apache-2.0
// The meeting of the blocks that share a row, in global memory: each leaves eight bytes in a slot
// of its own, which is preset to all ones, and reads the slots of the others. A slot is written at
// once, so it needs no flag and no counter. The blocks of a launch must all be resident.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>
#include <utility>

#include "base/problem.h"
#include "device/reduce.cuh"

namespace fused_layernorm {

static_assert(kMaxBlocksPerRow <= kSlotsPerLane * kWarpSize,
              "the lanes of one warp collect the slots of a row");

constexpr uint64_t kEmptySlot = ~uint64_t{0};

FUSED_DEVICE void publish(uint64_t* slot, Pair<float> value) {
  uint64_t bits = uint64_t{__float_as_uint(value.first)} | uint64_t{__float_as_uint(value.second)}
                                                               << 32;
  // A pair of NaNs of all ones would look like an empty slot. Another pair of NaNs replaces it.
  if (bits == kEmptySlot) bits = 0x7fffffff7fffffffu;
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(slot), "l"(bits) : "memory");
}

// A barrier of all `threads` of a block, once one of its warps has collected the sums of a row, so
// that the other warps may read them. This is hardware barrier 15; the block's only team has
// barrier 1.
FUSED_DEVICE void meet_when_collected(int threads) {
  asm volatile("bar.sync 15, %0;" ::"r"(threads) : "memory");
}

// How slots are polled. Polls in quick succession may hold up the stores that they wait for.
enum class Polls {
  kWithNaps,  // all of them, with naps
  kAll,       // all of them
  kEmpty      // those that are still empty
};

// The `count` slots of a row, read by one warp, which waits until all of them are written. A lane
// has the slots lane, lane + 32, ...; for a slot that does not exist its pair is zero.
template <Polls kPolls = Polls::kWithNaps>
struct CollectedSlots {
  Pair<float> values[kSlotsPerLane];

  FUSED_DEVICE CollectedSlots(const uint64_t* slots, int count,
                              int lane = threadIdx.x % kWarpSize) {
    uint64_t bits[kSlotsPerLane];
    FUSED_UNROLL for (int i = 0; kPolls == Polls::kEmpty && i < kSlotsPerLane; ++i) {
      bits[i] = lane + i * kWarpSize < count ? kEmptySlot : 0;
    }
    bool missing = false;
    do {
      if (kPolls == Polls::kWithNaps && missing) __nanosleep(100);
      missing = false;
      FUSED_UNROLL for (int i = 0; i < kSlotsPerLane; ++i) {
        if (kPolls != Polls::kEmpty) bits[i] = 0;
        if (kPolls == Polls::kEmpty ? bits[i] == kEmptySlot : lane + i * kWarpSize < count) {
          asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];"
                       : "=l"(bits[i])
                       : "l"(slots + lane + i * kWarpSize)
                       : "memory");
        }
        missing |= bits[i] == kEmptySlot;
      }
      missing = __any_sync(kFullWarp, missing);
    } while (missing);
    FUSED_UNROLL for (int i = 0; i < kSlotsPerLane; ++i) {
      values[i] = {__uint_as_float(static_cast<uint32_t>(bits[i])),
                   __uint_as_float(static_cast<uint32_t>(bits[i] >> 32))};
    }
  }

  // The sum of all slots. Every lane gets it.
  FUSED_DEVICE Pair<float> sum() const {
    Pair<float> sum = values[0];
    FUSED_UNROLL for (int i = 1; i < kSlotsPerLane; ++i) sum += values[i];
    return warp_sum(sum);
  }
};

// The one grid barrier of a launch, after which all slots are empty; the blocks pass it while the
// first rows come. All threads of a block, which has emptied its own slots, arrive, after a call of
// prepare(); later each waits, where its role needs the slots. takes_place() says whether there is
// a meeting, and is asked each time.
template <typename TakesPlace>
struct GridMeeting {
  const TakesPlace takes_place;
  cooperative_groups::grid_group::arrival_token token{};

  FUSED_DEVICE GridMeeting(const TakesPlace& its_takes_place, const auto& prepare)
      : takes_place(its_takes_place) {
    if (!takes_place()) return;
    prepare();
    token = cooperative_groups::this_grid().barrier_arrive();
  }
  FUSED_DEVICE void wait() const {
    auto own = token;
    if (takes_place()) cooperative_groups::this_grid().barrier_wait(std::move(own));
  }
};

}  // namespace fused_layernorm

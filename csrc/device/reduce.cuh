// SPDX-License-Identifier: Apache-2.0
// Sums that compose into larger ones: lane -> logical warp -> team. The order of every sum follows
// from the team's size alone, so a row's result does not depend on where the row stands.
#pragma once

#include <cstdint>
#include <type_traits>

#include "base/chip.h"
#include "device/macros.cuh"

namespace fused_layernorm {

constexpr unsigned kFullWarp = 0xffffffffu;
constexpr int kWarpSize = kWarpThreads;
constexpr int kMaxWarps = 1024 / kWarpSize;

FUSED_DEVICE float shuffle_xor(float v, int offset) {
  return __shfl_xor_sync(kFullWarp, v, offset);
}
FUSED_DEVICE double shuffle_xor(double v, int offset) {
  return __shfl_xor_sync(kFullWarp, v, offset);
}

template <typename Acc>
struct Pair {
  Acc first = 0, second = 0;

  FUSED_DEVICE Pair& operator+=(const Pair& other) {
    first += other.first;
    second += other.second;
    return *this;
  }
};

template <typename Acc>
FUSED_DEVICE Pair<Acc> shuffle_xor(Pair<Acc> v, int offset) {
  return {shuffle_xor(v.first, offset), shuffle_xor(v.second, offset)};
}

template <typename Value>
FUSED_DEVICE Value warp_sum(Value v) {
  FUSED_UNROLL for (int offset = 1; offset < kWarpSize; offset *= 2) v += shuffle_xor(v, offset);
  return v;
}

// The sum over a logical warp of `lanes` neighbouring lanes (a power of two up to 32). Every lane
// gets it, and all lanes of the warp must call. A branch takes longer than a shuffle whose result
// is not wanted, so there is only one: it ends the sums of up to four lanes.
template <typename Value>
FUSED_DEVICE Value logical_warp_sum(Value v, int lanes) {
  if (lanes == kWarpSize) return warp_sum(v);
  FUSED_UNROLL for (int offset = 1; offset < kWarpSize / 2; offset *= 2) {
    if (offset == 4 && lanes <= offset) break;
    const Value other = shuffle_xor(v, offset);
    if (offset < lanes) v += other;
  }
  return v;
}

// A team of whole warps that works on one row: a block, or one of several teams of a block.
struct BlockTeam {
  int index;    // of the team in its block
  int threads;  // of the team
  int thread;   // of this thread in the team

  // The whole block.
  FUSED_DEVICE BlockTeam() : index(0), threads(blockDim.x), thread(threadIdx.x) {}
  FUSED_DEVICE explicit BlockTeam(int team_threads)
      : BlockTeam(team_threads, threadIdx.x / team_threads) {}
  FUSED_DEVICE BlockTeam(int team_threads, int team_index)
      : index(team_index), threads(team_threads), thread(threadIdx.x - team_index * team_threads) {}
  FUSED_DEVICE int warps() const { return static_cast<unsigned>(threads) / kWarpSize; }
  FUSED_DEVICE int warp() const { return static_cast<unsigned>(thread) / kWarpSize; }
  FUSED_DEVICE int lane() const { return threadIdx.x % kWarpSize; }
  // Hardware barrier 0 is __syncthreads(); teams take the barriers from 1 on.
  FUSED_DEVICE void sync() const {
    asm volatile("bar.sync %0, %1;" ::"r"(index + 1), "r"(threads) : "memory");
  }
};

// The values in the scratch memory of a team of so many warps: a thread reads four at once.
constexpr __host__ __device__ int scratch_values(int warps) { return (warps + 3) / 4 * 4; }

// Values of a team's warps that one thread reads at once.
template <typename Value>
struct alignas(16) Four {
  Value at[4];
};

// The sum of the values of a team's warps, `scratch[warp]`. Every thread gets it.
template <typename Value>
FUSED_DEVICE Value sum_of_warps(const Value* scratch, int warps) {
  const auto* fours = reinterpret_cast<const Four<Value>*>(scratch);
  const auto sum_of_four = [&] {
    const Four<Value> four = *fours++;
    Value low = four.at[0], high = four.at[2];
    low += four.at[1];
    high += four.at[3];
    low += high;
    return low;
  };
  // The first four values are added outside the loop (16 x 4194304 float32 forward: 200.3 us, all
  // in the loop 203.0). Backward, which adds up pairs, has no register for that.
  constexpr int kOutside = std::is_floating_point_v<Value> ? 4 : 0;
  Value sum{};
  if constexpr (kOutside > 0) sum = sum_of_four();
#pragma unroll 1
  for (int i = kOutside; i < warps; i += 4) sum += sum_of_four();
  return sum;
}

// The sum over a team. Every thread gets it, after one barrier. `scratch` holds scratch_values of
// the team's warps, and must not be written again before another barrier of the team.
template <typename Acc>
FUSED_DEVICE Acc team_sum(Acc v, const BlockTeam& team, Acc* scratch) {
  v = warp_sum(v);
  // The lanes after the first write the zeros that fill up the last four values.
  const int warps = team.warps();
  const int at = team.warp() + team.lane() * warps;
  if (at < scratch_values(warps)) scratch[at] = team.lane() == 0 ? v : Acc(0);
  team.sync();
  return sum_of_warps(scratch, warps);
}

// Both sums of a pair at 1.5 times the cost of one: each half of a warp adds up one of them.
template <typename Acc>
FUSED_DEVICE Pair<Acc> team_sum(Pair<Acc> v, const BlockTeam& team, Pair<Acc>* scratch) {
  constexpr int kHalf = kWarpSize / 2;
  const bool upper = team.lane() >= kHalf;
  Acc sum = upper ? v.second : v.first;
  sum += shuffle_xor(upper ? v.first : v.second, kHalf);
  FUSED_UNROLL for (int offset = 1; offset < kHalf; offset *= 2) sum += shuffle_xor(sum, offset);
  const int warps = team.warps(), lane = team.lane() % kHalf;
  const int at = team.warp() + lane * warps;
  if (at < scratch_values(warps)) {
    reinterpret_cast<Acc*>(scratch + at)[upper] = lane == 0 ? sum : Acc(0);
  }
  team.sync();
  return sum_of_warps(scratch, warps);
}

}  // namespace fused_layernorm

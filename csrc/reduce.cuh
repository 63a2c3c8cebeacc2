// Small reductions that compose into larger ones: lanes -> warps of a group -> slices of a row.
// The order of every sum follows from the group's size alone, so a row's result does not depend
// on where the row stands.
#pragma once

#include <cstdint>

namespace fused_layernorm {

constexpr unsigned kFullWarp = 0xffffffffu;
constexpr int kWarpSize = 32;
constexpr int kMaxWarps = 32;

// Sum over `lanes` neighbouring lanes (a power of two up to 32); every lane gets it.
template <typename Acc>
__device__ __forceinline__ Acc lanes_sum(Acc v, int lanes) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    v += __shfl_xor_sync(kFullWarp, v, offset);
  }
  return v;
}

template <typename Acc>
__device__ __forceinline__ Acc warp_sum(Acc v) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    v += __shfl_xor_sync(kFullWarp, v, offset);
  }
  return v;
}

// Threads that work on one row: a whole number of warps, the whole block or a part of it.
struct Group {
  int index;    // of the group in its block
  int threads;  // in the group
  int thread;   // of this thread in the group

  __device__ __forceinline__ Group(int group_threads)
      : index(threadIdx.x / group_threads),
        threads(group_threads),
        thread(threadIdx.x % group_threads) {}
  __device__ __forceinline__ int warps() const { return threads / kWarpSize; }
  __device__ __forceinline__ int warp() const { return thread / kWarpSize; }
  __device__ __forceinline__ int lane() const { return thread % kWarpSize; }
  // Hardware barrier 0 is __syncthreads; groups take 1 to 15.
  __device__ __forceinline__ void sync() const {
    asm volatile("bar.sync %0, %1;" ::"r"(index + 1), "r"(threads) : "memory");
  }
};

// Sum over a group; every thread gets it. One barrier; `scratch` holds a value per warp of the
// group and must not be written again before another barrier of the group.
template <typename Acc>
__device__ __forceinline__ Acc group_sum(Acc v, const Group& group, Acc* scratch) {
  v = warp_sum(v);
  if (group.lane() == 0) {
    scratch[group.warp()] = v;
  }
  group.sync();
  return warp_sum(group.lane() < group.warps() ? scratch[group.lane()] : Acc(0));
}

template <typename Acc>
struct Pair {
  Acc first, second;
};

template <typename Acc>
__device__ __forceinline__ Pair<Acc> group_sum(Pair<Acc> v, const Group& group,
                                               Pair<Acc>* scratch) {
  v = {warp_sum(v.first), warp_sum(v.second)};
  if (group.lane() == 0) {
    scratch[group.warp()] = v;
  }
  group.sync();
  const bool mine = group.lane() < group.warps();
  v = mine ? scratch[group.lane()] : Pair<Acc>{Acc(0), Acc(0)};
  return {warp_sum(v.first), warp_sum(v.second)};
}

// Mean and sum of squared deviations of `count` values; merging is Chan, Golub and LeVeque,
// "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
template <typename Acc>
struct Moments {
  Acc mean = 0, m2 = 0, count = 0;

  __device__ __forceinline__ void merge(const Moments& other) {
    const Acc total = count + other.count;
    const Acc share = total > Acc(0) ? other.count / total : Acc(0);
    const Acc delta = other.mean - mean;
    mean += delta * share;
    m2 += other.m2 + delta * delta * (count * share);
    count = total;
  }
};

template <typename Acc>
__device__ __forceinline__ Moments<Acc> warp_merge(Moments<Acc> v) {
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const Moments<Acc> other = {__shfl_xor_sync(kFullWarp, v.mean, offset),
                                __shfl_xor_sync(kFullWarp, v.m2, offset),
                                __shfl_xor_sync(kFullWarp, v.count, offset)};
    // Both lanes of a pair merge the same two in the same order, and so agree to the bit.
    const bool upper = threadIdx.x & offset;
    Moments<Acc> lower = {upper ? other.mean : v.mean, upper ? other.m2 : v.m2,
                          upper ? other.count : v.count};
    lower.merge({upper ? v.mean : other.mean, upper ? v.m2 : other.m2,
                 upper ? v.count : other.count});
    v = lower;
  }
  return v;
}

template <typename Acc>
__device__ __forceinline__ Moments<Acc> group_merge(Moments<Acc> v, const Group& group,
                                                    Moments<Acc>* scratch) {
  v = warp_merge(v);
  if (group.lane() == 0) {
    scratch[group.warp()] = v;
  }
  group.sync();
  return warp_merge(group.lane() < group.warps() ? scratch[group.lane()] : Moments<Acc>{});
}

__device__ __forceinline__ float reciprocal_sqrt(float v) { return 1.0f / sqrtf(v); }
__device__ __forceinline__ double reciprocal_sqrt(double v) { return 1.0 / sqrt(v); }

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// What a chip has: threads, registers, shared memory and multiprocessors.
//
// All times in csrc are microseconds of device time, on an H200 unless another card is named. A
// measurement reads "32768 x 4096 211, 222": rows x columns, then one time for each alternative, in
// the order in which the comment names them. docs/tuning-log.md tells what else was tried. To tune,
// force plans with `python -m benchmarks.tune`, change a limit or a range, and put the new numbers
// in place of the old.
#pragma once

#include <algorithm>
#include <cstdint>

namespace fused_layernorm {

struct Device {
  int capability = 90;         // 10 * major + minor
  int sms = 132;               // streaming multiprocessors
  int shared_memory = 232448;  // bytes that one block may have
  int64_t l2_bytes = int64_t{50} << 20;
  bool starts_early = true;  // a kernel may start before the one in front of it has ended
  bool blocks_meet = true;   // a block on each multiprocessor can be resident at once
};

// What L2 decides. The numbers were measured on Hopper, on an H200 (60 MB of L2), and hold on an
// H100 (50 MB). Other chips, and slices of a Hopper, have the same in proportion: nobody measured
// them.
struct L2Limits {
  int64_t large_call;  // a call that moves so many bytes lets them stay, as other data does
  int64_t read_again;  // so many bytes are found in L2 when they are read a second time
};
constexpr L2Limits l2_limits(const Device& device) {
  constexpr int64_t kMB = 1 << 20;
  if (device.capability == 90 && device.l2_bytes >= 48 * kMB) return {96 * kMB, 32 * kMB};
  return {device.l2_bytes * 7 / 4, device.l2_bytes * 3 / 5};
}

constexpr int kWarpThreads = 32;
constexpr int kMostBlockThreads = 1024;
// Rows and columns are 32-bit numbers in kernels, and so are the blocks of a launch.
constexpr int64_t kMostExtent = (int64_t{1} << 31) - 1;
constexpr int64_t kMostBlocks = (int64_t{1} << 31) - 1;
static_assert(kMostExtent <= kMostBlocks, "a launch may have a block for each row");

// A multiprocessor has this many registers, and one block can have all of them. The compiler gives
// each thread a multiple of eight.
constexpr int kRegisters = 65536;
constexpr int registers_of(int block_threads, int blocks) {
  return kRegisters / (block_threads * blocks) / 8 * 8;
}

// The blocks that a multiprocessor has registers for. Each of its quarters has a fourth of them,
// and a fourth of the warps.
constexpr int blocks_with(int block_threads, int registers) {
  constexpr int kQuarters = 4;
  const int warps = kRegisters / kQuarters / (kWarpThreads * registers) * kQuarters;
  return warps * kWarpThreads / block_threads;
}

// The most threads of a block, and the least number of blocks that a multiprocessor has registers
// for.
struct BlockBounds {
  int threads;
  int blocks;
};
constexpr int registers_of(BlockBounds bounds) {
  return registers_of(bounds.threads, bounds.blocks);
}

// Dynamic shared memory that a block can have on every chip for which kernels are compiled
// (capability 7.5 has the least).
constexpr int kLeastSharedMemory = 64 * 1024;
// The plan leaves this much of a block's shared memory to what kernels declare (scratch memory of
// sums, collected sums, and the barriers and statistics of rings). backward/teams.h proves that it
// suffices; forward's ring leaves less (kRingStateBytes).
constexpr int kReservedSharedMemory = 3072;

// A block's shared memory without the part that is reserved for what its kernel declares.
constexpr int64_t room_of(const Device& device) {
  return device.shared_memory - kReservedSharedMemory;
}

// The most bytes that memory and L2 move at once.
constexpr int kCacheLineBytes = 128;

}  // namespace fused_layernorm

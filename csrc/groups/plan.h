// SPDX-License-Identifier: Apache-2.0
// How groups are laid over the chip: the plan of GroupNorm, forward and backward, and its limits.
//
// A block or a cluster of blocks holds a group of planes (held.cu), or more blocks share it
// (split.cu): one kernel reads x, and dy, once. Anything else is cut into tiles and read twice: one
// kernel measures tiles, a second one combines these parts to the totals of each group, and a third
// one applies them. There no block waits for another: each kernel waits for the one before it, so
// blocks need not be resident at once.
//
//   planes         each channel is a run of memory. A tile has some channels of a group, or a piece
//                  of one (planes.cu).
//   channels_last  a tile has all channels of some positions (channels_last.cu).
//
// With one position both layouts are the same. If the registers of a cluster have room for a group
// and there is no modulation, one_position.cu serves. Else backward of short groups is that of
// channels_last.
//
// How a sample is cut depends on its channels, its positions, the types and the alignment, never on
// the number of samples, so the bits of y and dx do not depend on the batch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "base/cuda_types.h"
#include "base/problem.h"
#include "groups/params.h"

namespace fused_layernorm {

struct GroupProblem {
  int64_t samples = 0, positions = 0;
  int64_t channels = 0, groups = 0;
  GroupLayout layout = GroupLayout::kPlanes;
  DataType x = DataType::kFloat32, y = DataType::kFloat32;  // y: of dy in backward
  bool aligned = true;  // x, y and dy begin at multiples of 16 bytes
  bool backward = false;
  bool modulated = false;  // a sample has numbers of its own

  int64_t channels_of_group() const { return channels / groups; }
};

// Whether there are kernels for these types, of x, and of y or dy.
constexpr bool groups_have_kernels(DataType x, DataType y) {
  return y == x || (is_half(x) && y == DataType::kFloat32);
}

enum class GroupStrategy : int32_t { kHeld, kSplit, kTiles, kOnePosition };
inline const char* name_of(GroupStrategy strategy) {
  constexpr const char* kNames[] = {"held", "split", "tiles", "one_position"};
  return kNames[static_cast<int>(strategy)];
}

struct GroupPlan : Launch {
  GroupStrategy strategy = GroupStrategy::kTiles;
  GroupLayout layout = GroupLayout::kPlanes;
  int width = 1;  // elements that a thread moves at once

  // Planes. Channels are counted in vectors or, where they begin within some, in elements.
  int vector_units = 1;  // of a vector
  int64_t channel_units = 0;
  int tile_channels = 1;  // channels of a tile; of a group, where blocks hold or share groups
  // Pieces of a channel, of which each tile has one, or a warp of a split group some.
  int pieces = 1, piece_vectors = 0;
  int tiles = 1;  // of a group; of a sample of channels_last; one position: shares of the samples

  // Blocks that hold or share a group.
  int blocks_per_group = 1;
  int slice_vectors = 0;                                 // held: of a block
  int dy_offset = 0, pairs_offset = 0, maps_offset = 0;  // held: in shared memory
  int segments_of_warp = 0, slots = 0, lag = 0;          // split: as split.cuh says

  // channels_last: the channels of a position are cut into `slices` of `columns` vectors; a block
  // has one slice of `tile_positions`, and `rows` of them side by side.
  int columns = 1, slices = 1, rows = 1;
  int tile_positions = 0;
  int groups_of_slice = 1;  // that a slice has, in whole or in part
  bool has_totals = true;   // of more parts than one a group, which a kernel of its own combines

  // One position: the threads of a group. `rows` samples of `groups_of_slice` groups are side by
  // side in a block or a cluster, `slices` of these have all channels, and there are `tiles` times
  // as many, each of which has some samples.
  int lanes = 1;

  // The workspace: parts of groups, or slots in which blocks meet; parts of channels, of which each
  // channel of a sample (with one position, each channel) has up to so many; totals.
  int64_t parts_offset = 0, totals_offset = 0;
  int parts_of_channel = 1;
  bool starts_early = true;

  // by_channel divides by channel_units, each of the others by the number that it is named after.
  Divisor by_channel, by_pieces, by_tiles, by_blocks_per_group, by_columns, by_slices, by_rows,
      by_groups_of_slice;

  bool meets() const { return blocks_per_group > 1 || cluster > 1; }
};

// Whether a block that holds a group gets its single elements by whole vectors (bfloat16 5 x 30 x
// 37 x 41 in 5 groups, forward 9.6 -> 6.8, backward 18.3 -> 12.5; four bytes are slower so by 7%).
constexpr bool is_copied_by_vectors(int width, int size) { return width * size < 4; }

// Threads of a block and vectors of each thread: of x and, in backward, of dy too.
constexpr int kTileThreads = 256, kTileVecs = 8, kTileBackwardVecs = 4;
constexpr int kHeldThreads = 1024, kHeldVecs = 5;
constexpr int kSplitWarps = 16, kSplitThreads = (kSplitWarps + 1) * kWarpThreads;
constexpr int kSegmentVectors = 128, kBackwardSegmentVectors = 64;
// Segments that a warp has asked for ahead of the one that it measures. Backward's ring has room
// for little more than a group, and with one more step the blocks meet meanwhile.
constexpr int kSplitAhead = 2, kSplitBackwardAhead = 1;
// The most segments of a group that a warp can have.
constexpr int kMostWarpSegments = 5;
// What the warps of a block tell each other of a group is kept for so many groups.
constexpr int kGroupsKept = 8;
// The most segments that a warp's ring holds.
constexpr int kMostSplitSlots = 8;
constexpr int kLastThreads = 256, kLastVecs = 4, kLastBackwardVecs = 2;
constexpr int kTotalsThreads = 256;
// One position: the threads of a block of several groups, and the most of a block.
constexpr int kOneThreads = 256, kMostOneThreads = 512;
// The elements of a thread, whose registers have room for the next sample's too.
constexpr int one_position_elements(int size) { return size > 4 ? 4 : 8; }

// Positions are 32-bit numbers in kernels.
constexpr int64_t kMostPositions = int64_t{1} << 30;

// Nothing for a problem that kernels cannot count.
std::optional<GroupPlan> make_group_plan(const GroupProblem& problem, const Device& device);
// The plan in words, as JSON.
std::string describe(const GroupPlan& plan);

// y is dy in backward.
cudaError_t launch_group_norm(const GroupParams& params, DataType x, DataType y,
                              const GroupPlan& plan, cudaStream_t stream);

}  // namespace fused_layernorm

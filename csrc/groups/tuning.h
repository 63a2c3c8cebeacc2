// SPDX-License-Identifier: Apache-2.0
// What was measured to be best for groups, on an H100 (bfloat16, 32 groups, SiLU; us).
#pragma once

#include <cstdint>

namespace fused_layernorm::groups {

// Planes. A block holds a group of up to so many bytes of x (64 x 256 x 56 x 56, groups of 49 KB:
// one block 82, a cluster of two 99, tiles 114). Backward it has a cluster of two up to twice as
// many (160, one block 169, tiles 189).
constexpr int64_t kHeldBytes = 56 << 10, kHeldBackwardBytes = 28 << 10;
// A group of up to so many is held by a cluster of eight blocks (2 x 640 x 64 x 64, 160 KB: 14.4,
// tiles 16.8; 2 x 1280 x 32 x 32, 80 KB: 10.2, 11.2).
constexpr int kMostCluster = 8, kMostBackwardCluster = 2;
constexpr int64_t kClusterBytes = 192 << 10, kClusterBackwardBytes = 56 << 10;
// Longer groups are shared by blocks, backward those of so many elements on (SiLU, blocks that
// share and tiles: 1 x 640 x 64 x 64 16.6, 15.7, and eight samples 62, 80; with less of a group for
// each block, 1 x 512 x 64 x 64 16.0, 13.7).
constexpr int64_t kSplitBackwardElements = 75 << 10;
// The most segments of a group that a warp has. With fewer, more segments are measured while the
// blocks meet (1 x 128 x 1024 x 1024 by 4 segments 258, by 2 218; backward no fewer fit).
constexpr int kMostSegments = 2, kMostBackwardSegments = 4;

// channels_last. The bytes of x in a tile, of samples of fewer bytes and of more, before they are
// rounded up to whole loads of all threads (2 x 320 x 64 x 64 by 9 positions a thread 15.2, by 12
// 12.9; 2 x 2560 x 32 x 32 by 6 28.4, by 8 18.7; 2 x 640 x 64 x 64 by 12 21.5, by 16 19.5; 8 x 1280
// x 32 x 32 by 12 38.0, by 16 30.3; 2 x 320 x 128 x 128 by 32 KB 38.7, by 64 KB 31.6; backward, 2 x
// 640 x 64 x 64 by 9 positions 37.9, by 12 29.2, and 2 x 320 x 128 x 128 by 48 KB 53.6, by 96 KB
// 49.6). A sample has at the most so many tiles (1 x 128 x 1024 x 1024 by 512 327, by 1024 308).
constexpr int64_t kLargeSample = 8 << 20;
constexpr int64_t kLastTileBytes = 32 << 10, kLargeLastTileBytes = 60 << 10;
constexpr int64_t kBackwardLastTileBytes = 40 << 10, kLargeBackwardLastTileBytes = 90 << 10;
constexpr int64_t kMostLastTiles = 1024;
// Groups of one position and up to so many channels are short (plan.cpp's is_better_last).
constexpr int64_t kShortLastGroup = 32;
// Threads that move single elements have as many of them as others have vectors, while a sample has
// fewer tiles than so many (backward on an H200, 1 x 150 x 37 x 37 in 5 groups by 11 tiles 54.6).
constexpr int64_t kFewLastTiles = 128;

// One position: so many threads of a multiprocessor should be resident (on an H200, 1000 x 8192
// bfloat16 in 512 groups 13, backward 30; held by a block for each group 317, 355).
constexpr int kOneResident = 1024, kOneBackwardResident = 512;
// Clusters of more than two blocks do not fit on all multiprocessors at once, so there are as many
// as for so many of eight (512 x 12288 in one group, of three blocks, 48, as for all 66; 64 x
// 16384, of four, 22, 27).
constexpr int kOfEightClustered = 7;
// Backward, a row that has up to so many samples goes through all of them, which saves the kernel
// for parts. Else a part costs a twentieth of a sample: n / parts + parts / 20 is least for sqrt(20
// n) parts of n samples a row (256 x 1024 in one group by 256 parts 12.0, by 71 8.1; 64 x 512 by 16
// 7.0, by 35 5.8). No row has more than the last number, so that sums of float32 stay short.
constexpr int64_t kFewOneSamples = 4, kOnePartsOfSample = 20, kMostOneSamples = 256;

}  // namespace fused_layernorm::groups

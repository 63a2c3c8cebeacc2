// SPDX-License-Identifier: Apache-2.0
// What was measured of norms over channels, on an H100: how many threads, pixels and registers a
// tile has, and which images are left to other strategies. Nobody has measured other chips.
#pragma once

#include <cstdint>

#include "base/problem.h"

namespace fused_layernorm {

// The channels of a thread, and the most threads that share a pixel, where they are too many. These
// follow from the channels and the pixels alone: they fix the order of a pixel's sums.
constexpr int kMostChannelStep = 256;
constexpr int kThreadChannels = 8;
// A thread has so many bytes of pixels that are moved one by one. In bfloat16, by 16 bytes, 8 and
// 4: backward, 64 x 384 x 15 x 15 54, 42, 49; 1 x 64 x 15 x 15 12.7, 7.3, -; 64 x 1024 x 15 x 15
// 119, 137, -; forward, 8 x 64 x 255 x 255 98, 100, 116; 32 x 96 x 35 x 35 25.9, 17.8, 18.2.
constexpr int kScatteredBytes = 8;
// The bytes of a channel that a tile has: a cache line or two; up to four where all channels
// together then have no more than kSmallTile; and down to a sector where they would have more than
// kLargeTile a line, or where tiles are fewer than kTilesASm for each multiprocessor. But a tile of
// less than a line, or whose sectors others share, is not made smaller if the busiest
// multiprocessor has no fewer pixels then. (32 x 384 x 14 x 14 bfloat16, 28 pixels and 16: backward
// 16.3, 18.6; 1 x 256 x 64 x 64, 32 pixels and 16: forward 5.4, 5.8; an H100, as all times of
// tiles.) Where the tiles are fewer than half the multiprocessors, they may be narrower than a
// sector (TileNeeds; 1 x 384 x 14 x 14 NHWC backward, 16 pixels and 4: 9.1, 7.6).
constexpr int kMostLines = 4;
constexpr int kSmallTile = 16 * 1024;
constexpr int kLargeTile = 96 * 1024;
constexpr int kTilesASm = 2;
constexpr int kSectorBytes = 32;
constexpr int kLeastTilePixels = 4;
// Tiles of two lines have to be as many as this for each multiprocessor. In bfloat16 by one line
// and by two: backward, 4 x 256 x 256 x 256 169, 160; 8 x 64 x 256 x 256 92.8, 88.9; 8 x 256 x 64 x
// 64, with two tiles a multiprocessor, 28.7, 29.8; forward, 1 x 96 x 480 x 832 60.4, 58.4.
constexpr int kManyTiles = 15;
// Elements of two bytes are not copied asynchronously: a thread loads so many at once, and where
// tiles are few, as many threads load as there are elements for. (bfloat16 8 x 768 x 7 x 7 forward
// 13.3, with more threads 10.9.) Of transposed and scattered elements, and in backward, whose last
// sums go by channels, there are kMovers threads then. (float32 1 x 384 x 14 x 14 NHWC backward by
// 96 threads 10.3, by 256 8.3.)
constexpr int kLoadsAtOnce = 8;
constexpr int kMovers = 256, kMostMovers = 512;
// Samples whose pixels no vector divides are tiles where there are as many as this for each
// multiprocessor.
constexpr int kRunsASm = 4;
// Images for which copies of the rows before or after another strategy take less time: those of
// few pixels beside channels_last tensors, where one copy suffices, and some that are moved pixel
// by pixel. The samples do not count, as a pixel's result may not depend on them. Copied and not,
// bfloat16 NHWC: 8 x 768 x 7 x 7 forward 5.9, 8.0 and backward 7.7, 14.8; the same of 64 samples
// 19.3, 16.4 and 26.5, 26.6; 8 x 768 x 4 x 4 5.0, 5.7 and 5.6, 10.7. NCHW: 64 x 768 x 1 x 2 7.7,
// 7.5 and 11.4, 15.2.
constexpr int kFewPixels = 100;
inline bool favors_copies(const Problem& problem, int64_t pixels, int width, bool channels_last,
                          bool backward) {
  const bool single = width == 1, halves = size_of(problem.x) == 2;
  if (!channels_last) return single && halves && pixels < 8;
  const int least = single && (halves || backward) ? kFewPixels : backward ? 32 : 16;
  return pixels < least;
}

namespace forward {

// The most threads of a block. (64 x 384 x 14 x 14 bfloat16 by 640 12.7 us, by 480 13.3; 16 x 768 x
// 24 x 24 by 384 16.0, by 768 21.8.) Where pixels are moved one by one, more of them have room
// beside fewer channels at once. (64 x 2048 x 7 x 7 by 128 threads a pixel 37, by 256 43.)
constexpr int kMostTileThreads = 640;
constexpr int kMostScatteredStep = 128;

// Registers of a thread whose pixels take `bytes` bytes: with more, fewer blocks have room; with
// fewer, some kernels spill. `bare`: the norm has no epilogue.
constexpr int tile_registers(int64_t bytes, bool bare) {
  return bytes < kVectorBytes ? 40 : bare ? 48 : 56;
}

}  // namespace forward

namespace backward {

// Registers of a thread whose pixels take `bytes` bytes: with more, fewer blocks would have room
// than shared memory allows; with fewer, some kernels spill.
constexpr int tile_registers(int64_t bytes) { return bytes == kVectorBytes ? 128 : 80; }

// Blocks of a multiprocessor that the plan asks for at most.
constexpr int kMostTileBlocks = 8;

}  // namespace backward

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// Rows whose columns lie apart, as the channels of an NCHW image do, and the tiles into which the
// strategies called channels cut such images. A row is a pixel, its columns are its channels.
#pragma once

#include <algorithm>
#include <cstdint>

#include "plan/layout.h"
#include "plan/plan.h"

namespace fused_layernorm {

// Row n * pixels + p has its column c at n * sample_stride + c * channel_stride + p, in elements.
struct Planes {
  int64_t samples = 1;
  int64_t pixels = 1;
  int64_t sample_stride = 0;
  int64_t channel_stride = 0;
};

// How a block's tile lies: all channels of some pixels of one sample.
struct Tiles {
  int width = 1;        // pixels that a thread moves at once
  int tile_pixels = 1;  // a multiple of width; the last tile of a plane may have fewer
  int tiles = 1;        // of a plane
  int groups = 1;       // of threads that stand side by side on a tile's pixels
  bool is_run = false;  // the tile is a whole sample, which is one run of memory
};

// The bytes of a channel that a tile has, if the channels are few enough: a cache line, and up to
// four where all channels together then have no more than kSmallTile.
constexpr int kTileLineBytes = kCacheLineBytes;
constexpr int kMostTileLines = 4;
constexpr int kSmallTile = 16 * 1024;
// A larger tile is made narrower, down to a sector, so that a multiprocessor has several.
constexpr int kLargeTile = 48 * 1024;
constexpr int kSectorBytes = 32;
constexpr int kTileThreads = 512;  // the most of a block
// The channels of a thread.
constexpr int kThreadChannels = 8;

// The widest vector at whose multiples every plane begins. `unit` is the greatest number of
// elements, a power of two, at whose multiples the planes of every tensor begin.
constexpr int plane_width(int64_t unit, int64_t pixels, int size) {
  for (int width = vector_width(size); width * size >= 8 && width > 1; width /= 2) {
    if (pixels % width == 0 && unit % width == 0) return width;
  }
  return 1;
}

// The tiles for `channels` channels whose tile takes `bytes` bytes an element, with all its
// tensors. `may_be_run`: samples are runs of memory that begin at multiples of 16 bytes.
inline Tiles tiles_of(int64_t channels, int64_t pixels, int64_t unit, int size, int bytes,
                      bool may_be_run, int64_t room) {
  Tiles tiles;
  tiles.width = plane_width(unit, pixels, size);
  const int line = kTileLineBytes / size;
  int64_t most = line;
  if (may_be_run && pixels <= line && tiles.width * size < kVectorBytes &&
      channels * pixels * bytes <= room) {
    tiles.is_run = true;
    most = pixels;
  } else {
    while (most < kMostTileLines * line && 2 * most * channels * bytes <= kSmallTile) most *= 2;
    while (most * size > kSectorBytes && most * channels * bytes > kLargeTile) most /= 2;
    while (most > tiles.width && most * channels * bytes > room) most /= 2;
  }
  tiles.tiles = static_cast<int>(ceil_div(pixels, most));
  tiles.tile_pixels = static_cast<int>(round_up(ceil_div(pixels, tiles.tiles), tiles.width));
  tiles.tiles = static_cast<int>(ceil_div(pixels, tiles.tile_pixels));
  const int units = tiles.tile_pixels / tiles.width;
  const int64_t wanted = ceil_div(channels, kThreadChannels);
  tiles.groups =
      static_cast<int>(std::clamp<int64_t>(wanted, 1, std::max(1, kTileThreads / units)));
  return tiles;
}

}  // namespace fused_layernorm

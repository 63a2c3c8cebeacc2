// SPDX-License-Identifier: Apache-2.0
// Rows whose columns lie apart, as the channels of an NCHW image do, and the tiles into which the
// strategies called channels cut such images. A row is a pixel, its columns are its channels.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/problem.h"

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

  template <typename Json>
  void describe(Json& json) const {
    json.add("width", width).add("tile_pixels", tile_pixels).add("tiles", tiles);
    json.add("groups", groups).add("is_run", is_run);
  }
};

// The channels of a thread, where they are not too many for kMostTileGroups. The groups follow from
// the channels alone: they fix the order of a pixel's sums.
constexpr int kMostTileGroups = 256;
constexpr int kTileThreads = 512;  // the most of a block
constexpr int kThreadChannels = 8;
// The bytes of a channel that a tile has: a cache line; up to four where all channels together then
// have no more than kSmallTile; and down to a sector where they would have more than kLargeTile, or
// where there would be fewer than kTilesASm tiles for each multiprocessor.
constexpr int kMostLines = 4;
constexpr int kSmallTile = 16 * 1024;
constexpr int kLargeTile = 96 * 1024;
constexpr int kTilesASm = 2;
constexpr int kSectorBytes = 32;
// Samples of odd planes are tiles where there are as many as this for each multiprocessor.
constexpr int kRunsASm = 4;
// Planes of few pixels with many channels: their tiles are narrow, and copies of the rows before
// and after another strategy take less time than they.
constexpr int kFewPixels = 100;
constexpr int kManyChannels = 128;
inline bool favors_copies(int64_t channels, const Planes& planes) {
  return planes.pixels < kFewPixels && channels > kManyChannels;
}

inline int tile_groups(int64_t channels) {
  return static_cast<int>(std::min<int64_t>(ceil_div(channels, kThreadChannels), kMostTileGroups));
}

// The widest vector at whose multiples every plane begins: of 16 bytes, in half precision also of
// 8, as planes of 14 x 14 pixels have it. `unit` is the greatest number of elements, a power of
// two, at whose multiples the planes of every tensor begin.
constexpr int plane_width(int64_t unit, int64_t pixels, int size) {
  for (int width = vector_width(size); width * size == kVectorBytes || width == 4; width /= 2) {
    if (pixels % width == 0 && unit % width == 0) return width;
  }
  return 1;
}

// A thread has this many pixels; where they are moved one by one, they lie apart.
constexpr int64_t thread_pixels(const Tiles& tiles, int size) {
  return tiles.width == 1 ? vector_width(size) : tiles.width;
}
// The pixels of all threads, some of which may lie behind the tile.
constexpr int64_t room_pixels(const Tiles& tiles, int size) {
  return round_up(tiles.tile_pixels, thread_pixels(tiles, size));
}
// The threads that stand side by side on all pixels.
constexpr int64_t tile_units(const Tiles& tiles, int size) {
  return room_pixels(tiles, size) / thread_pixels(tiles, size);
}
constexpr int tile_threads(const Tiles& tiles, int size) {
  const int64_t threads = tiles.groups * tile_units(tiles, size);
  const int64_t movers = tiles.width == 1 ? tiles.tile_pixels : 1;  // one for each pixel
  return static_cast<int>(round_up(std::max(threads, movers), kWarpThreads));
}
// The numbers that the threads leave in shared memory for one sum over the channels of each pixel
// (PixelSums in device/planes.cuh).
constexpr int64_t left_sums(const Tiles& tiles, int size) {
  return thread_pixels(tiles, size) * (tile_threads(tiles, size) + tile_units(tiles, size));
}

// The tiles for a problem whose tiles take `bytes` bytes an element, with all their tensors.
// `may_be_run`: samples are runs of memory that begin at multiples of 16 bytes.
inline Tiles tiles_of(const Problem& problem, const Planes& planes, int64_t unit, int bytes,
                      bool may_be_run, const Device& device) {
  const int size = size_of(problem.x);
  const int64_t channels = problem.cols, pixels = planes.pixels;
  Tiles tiles;
  tiles.width = plane_width(unit, pixels, size);
  tiles.groups = tile_groups(channels);
  const int64_t most_pixels = kTileThreads / tiles.groups * thread_pixels(tiles, size);
  const auto bytes_of = [&](int64_t tile_pixels) { return tile_pixels * channels * bytes; };
  int64_t most = kCacheLineBytes / size;
  if (may_be_run && pixels * size <= kCacheLineBytes && pixels <= most_pixels &&
      tiles.width * size < kVectorBytes && bytes_of(pixels) <= room_of(device) * 3 / 4 &&
      planes.samples >= int64_t{kRunsASm} * device.sms) {
    tiles.is_run = true;
    most = pixels;
  } else {
    while (most * size < kMostLines * kCacheLineBytes && bytes_of(2 * most) <= kSmallTile)
      most *= 2;
    while (most * size > kSectorBytes && bytes_of(most) > kLargeTile) most /= 2;
    while (most * size > kSectorBytes &&
           ceil_div(pixels, most) * planes.samples < int64_t{kTilesASm} * device.sms) {
      most /= 2;
    }
    most = std::min(most, most_pixels);
    while (most > tiles.width && bytes_of(most) > room_of(device) * 3 / 4) most /= 2;
  }
  tiles.tiles = static_cast<int>(ceil_div(pixels, most));
  tiles.tile_pixels = static_cast<int>(round_up(ceil_div(pixels, tiles.tiles), tiles.width));
  tiles.tiles = static_cast<int>(ceil_div(pixels, tiles.tile_pixels));
  return tiles;
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// Rows whose columns lie apart, as the channels of an NCHW image do, and the tiles into which the
// strategies called channels cut such images. A row is a pixel, its columns are its channels.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/planning.h"

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
  int movers = 1;       // threads that a block has at least, to move pixels
  bool is_run = false;  // the tile is a whole sample, which is one run of memory

  template <typename Json>
  void describe(Json& json) const {
    json.add("width", width).add("tile_pixels", tile_pixels).add("tiles", tiles);
    json.add("groups", groups).add("movers", movers).add("is_run", is_run);
  }
};

// The channels of a thread, where they are not too many for the groups. These follow from the
// channels and the pixels alone: they fix the order of a pixel's sums.
constexpr int kMostTileGroups = 256;
constexpr int kThreadChannels = 8;
// A thread has so many bytes of pixels that are moved one by one. In bfloat16, by 16 bytes, 8 and
// 4: backward, 64 x 384 x 15 x 15 54, 42, 49; 1 x 64 x 15 x 15 12.7, 7.3, -; 64 x 1024 x 15 x 15
// 119, 137, -; forward, 8 x 64 x 255 x 255 98, 100, 116; 32 x 96 x 35 x 35 25.9, 17.8, 18.2.
constexpr int kScatteredBytes = 8;
// The threads of so many registers for which a multiprocessor has room.
constexpr int sm_threads(int registers) {
  return blocks_with(kWarpThreads, registers) * kWarpThreads;
}
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
// Samples of odd planes are tiles where there are as many as this for each multiprocessor.
constexpr int kRunsASm = 4;
// Planes for which copies of the rows before or after another strategy take less time: those of few
// pixels beside channels_last tensors, where one copy suffices, and some that are moved pixel by
// pixel. The samples do not count, as a pixel's result may not depend on them. Copied and not,
// bfloat16 NHWC: 8 x 768 x 7 x 7 forward 5.9, 8.0 and backward 7.7, 14.8; the same of 64 samples
// 19.3, 16.4 and 26.5, 26.6; 8 x 768 x 4 x 4 5.0, 5.7 and 5.6, 10.7. NCHW: 64 x 768 x 1 x 2 7.7,
// 7.5 and 11.4, 15.2.
constexpr int kFewPixels = 100;
inline bool favors_copies(const Problem& problem, const Planes& planes, int width,
                          bool channels_last, bool backward) {
  const bool single = width == 1, halves = size_of(problem.x) == 2;
  if (!channels_last) return single && halves && planes.pixels < 8;
  const int least = single && (halves || backward) ? kFewPixels : backward ? 32 : 16;
  return planes.pixels < least;
}

// What both directions ask of a problem: planes serve norms alone, and y no narrower than x.
inline bool serves_planes(const Problem& problem, const Planes& planes, int width,
                          bool channels_last, bool backward) {
  return forced_now().strategy.empty() && !problem.residual && !problem.modulated &&
         !is_narrowed(problem.x, problem.y) &&
         !favors_copies(problem, planes, width, channels_last, backward);
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
constexpr int64_t thread_pixels(int width, int size) {
  return width == 1 ? kScatteredBytes / size : width;
}
constexpr int64_t thread_pixels(const Tiles& tiles, int size) {
  return thread_pixels(tiles.width, size);
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
  return static_cast<int>(round_up(std::max<int64_t>(threads, tiles.movers), kWarpThreads));
}
// The numbers that the threads leave in shared memory for one sum over the channels of each pixel
// (PixelSums in channels/tiles.cuh).
constexpr int64_t left_sums(const Tiles& tiles, int size) {
  return thread_pixels(tiles, size) * (tile_threads(tiles, size) + tile_units(tiles, size));
}

// What a strategy's tiles are made for.
struct TileNeeds {
  int width;        // pixels that a thread moves at once
  int bytes;        // of an element, in all tensors
  int registers;    // of a thread
  bool may_be_run;  // samples are runs of memory that begin at multiples of 16 bytes
  int most_threads;
  int most_groups;
  int least_pixels;  // of the narrowest tile
  int movers;        // threads that move pixels, where tiles are few

  int groups(int64_t channels) const {
    return static_cast<int>(std::min<int64_t>(ceil_div(channels, kThreadChannels), most_groups));
  }
};

// Whether vectors of pixels are moved, but planes do not begin at sectors of memory, so that tiles
// share sectors with their neighbours.
inline bool shares_sectors_of(const Planes& planes, int width, int size) {
  return width > 1 && planes.pixels * size % kSectorBytes != 0;
}

// Planes in tiles of at most so many pixels, as equal as vectors allow.
inline Tiles cut(const Problem& problem, const Planes& planes, const TileNeeds& needs,
                 int64_t most) {
  Tiles tiles;
  tiles.width = needs.width;
  tiles.groups = needs.groups(problem.cols);
  tiles.tiles = static_cast<int>(ceil_div(planes.pixels, most));
  tiles.tile_pixels = static_cast<int>(round_up(ceil_div(planes.pixels, tiles.tiles), needs.width));
  tiles.tiles = static_cast<int>(ceil_div(planes.pixels, tiles.tile_pixels));
  if (needs.width == 1) tiles.movers = tiles.tile_pixels;
  return tiles;
}

inline int64_t most_tile_pixels(const Problem& problem, const TileNeeds& needs) {
  return needs.most_threads / needs.groups(problem.cols) *
         thread_pixels(needs.width, size_of(problem.x));
}

// The narrowest tiles. A strategy has a plan if these fit into shared memory, and only then: a
// pixel's result may not depend on how many samples there are.
inline Tiles least_tiles(const Problem& problem, const Planes& planes, const TileNeeds& needs,
                         const Device& device) {
  const int64_t bytes = problem.cols * needs.bytes;
  int64_t most = std::min<int64_t>(needs.least_pixels, most_tile_pixels(problem, needs));
  while (most > needs.width && most * bytes > room_of(device) * 3 / 4) most /= 2;
  return cut(problem, planes, needs, most);
}

// The tiles for a problem, of up to so many lines. `fits` says whether tiles fit into shared
// memory, as the least have to.
template <typename Fits>
Tiles tiles_of(const Problem& problem, const Planes& planes, const TileNeeds& needs, int lines,
               const Device& device, const Fits& fits) {
  const int size = size_of(problem.x);
  const int64_t channels = problem.cols, pixels = planes.pixels, samples = planes.samples;
  const int64_t most_pixels = most_tile_pixels(problem, needs);
  const int64_t few = int64_t{kTilesASm} * device.sms;
  const auto bytes_of = [&](int64_t tile_pixels) { return tile_pixels * channels * needs.bytes; };
  const auto tiles_with = [&](int64_t most) { return cut(problem, planes, needs, most); };
  const auto busiest = [&](int64_t most) {
    const Tiles tiles = tiles_with(most);
    return ceil_div(tiles.tiles * samples, device.sms) * tiles.tile_pixels;
  };
  const bool shares_sectors = shares_sectors_of(planes, needs.width, size);
  const bool single_halves = needs.width == 1 && size == 2;
  const auto are_too_wide = [&](int64_t most) {
    if (bytes_of(most) > int64_t{lines} * kLargeTile) return true;
    if (!shares_sectors && most > most_pixels) return true;
    if (tiles_with(most).tiles * samples >= few) return false;
    const bool always = needs.width == 1 || (!shares_sectors && most * size >= kCacheLineBytes);
    return always || busiest(most / 2) < busiest(most);
  };
  if (needs.may_be_run && pixels * size <= kCacheLineBytes && pixels <= most_pixels &&
      needs.width * size < kVectorBytes && samples >= int64_t{kRunsASm} * device.sms) {
    Tiles run = tiles_with(pixels);
    run.is_run = true;
    if (bytes_of(pixels) <= room_of(device) * 3 / 4 && fits(run)) return run;
  }
  int64_t most = lines * kCacheLineBytes / size;
  while (most * size < kMostLines * kCacheLineBytes && bytes_of(2 * most) <= kSmallTile) most *= 2;
  if (shares_sectors) most = std::min(most, most_pixels);
  while (most * size > kSectorBytes && are_too_wide(most)) most /= 2;
  while (most > needs.least_pixels && tiles_with(most).tiles * samples * 2 <= device.sms) most /= 2;
  most = std::min(most, most_pixels);
  const Tiles least = least_tiles(problem, planes, needs, device);
  while (most > least.tile_pixels &&
         (bytes_of(most) > room_of(device) * 3 / 4 || !fits(tiles_with(most)))) {
    most /= 2;
  }
  const Tiles tiles = most > least.tile_pixels ? tiles_with(most) : least;
  const int64_t loads = single_halves ? ceil_div(channels * tiles.tile_pixels, kLoadsAtOnce) : 1;
  const int64_t movers = std::max<int64_t>(needs.movers, loads);
  if (tiles.tiles * samples >= few || movers <= tile_threads(tiles, size)) return tiles;
  const int64_t room = sm_threads(needs.registers) / ceil_div(tiles.tiles * samples, device.sms);
  Tiles moved = tiles;
  moved.movers = std::max<int>(tiles.movers, std::min<int64_t>({movers, room, kMostMovers}));
  return fits(moved) ? moved : tiles;
}

inline bool are_many(const Tiles& tiles, const Planes& planes, const Device& device) {
  return planes.samples * tiles.tiles >= int64_t{kManyTiles} * device.sms;
}

}  // namespace fused_layernorm

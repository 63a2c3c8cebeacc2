// SPDX-License-Identifier: Apache-2.0
// Rows whose columns lie apart, as the channels of an NCHW image do, and the tiles into which the
// strategies called channels cut such images. A row is a pixel, its columns are its channels.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/planning.h"
#include "channels/tuning.h"

namespace fused_layernorm {

// Row n * pixels + p has its column c at n * sample_stride + c * channel_stride + p, in elements.
struct ChannelMap {
  int64_t samples = 1;
  int64_t pixels = 1;
  int64_t sample_stride = 0;
  int64_t channel_stride = 0;
};

// How a block's tile lies: all channels of some pixels of one sample.
struct Tiles {
  int width = 1;         // pixels that a thread moves at once
  int tile_pixels = 1;   // a multiple of width; the last tile of a sample may have fewer
  int tiles = 1;         // of a sample
  int channel_step = 1;  // from a thread's channel to its next; so many threads share a pixel
  int movers = 1;        // threads that a block has at least, to move pixels
  bool is_run = false;   // the tile is a whole sample, which is one run of memory

  template <typename Json>
  void describe(Json& json) const {
    json.add("width", width).add("tile_pixels", tile_pixels).add("tiles", tiles);
    json.add("channel_step", channel_step).add("movers", movers).add("is_run", is_run);
  }
};

// The threads of so many registers for which a multiprocessor has room.
constexpr int sm_threads(int registers) {
  return blocks_with(kWarpThreads, registers) * kWarpThreads;
}

// What both directions ask of a problem: norms alone, and y no narrower than x.
inline bool serves_channels(const Problem& problem, const ChannelMap& map, int width,
                            bool channels_last, bool backward) {
  return forced_now().strategy.empty() && !problem.residual && !problem.modulated &&
         !is_narrowed(problem.x, problem.y) &&
         !favors_copies(problem, map.pixels, width, channels_last, backward);
}

// The widest vector at whose multiples every channel of a sample begins: of 16 bytes, in half
// precision also of 8, as images of 14 x 14 pixels have it. `unit` is the greatest number of
// elements, a power of two, at whose multiples those of every tensor begin.
constexpr int pixel_width(int64_t unit, int64_t pixels, int size) {
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
// What lies in a block's shared memory, one after the other, each at a multiple of 16 bytes.
struct SharedLayout {
  int64_t bytes = 0;

  // Where so many bytes lie.
  int add(int64_t size) {
    const int64_t begin = bytes;
    bytes += round_up(size, kVectorBytes);
    return static_cast<int>(begin);
  }
};

// The pixels of all threads, some of which may lie past the end of the tile.
constexpr int64_t room_pixels(const Tiles& tiles, int size) {
  return round_up(tiles.tile_pixels, thread_pixels(tiles, size));
}
// How many threads it takes to have all pixels of a tile once.
constexpr int64_t tile_units(const Tiles& tiles, int size) {
  return room_pixels(tiles, size) / thread_pixels(tiles, size);
}
constexpr int tile_threads(const Tiles& tiles, int size) {
  const int64_t threads = tiles.channel_step * tile_units(tiles, size);
  return static_cast<int>(round_up(std::max<int64_t>(threads, tiles.movers), kWarpThreads));
}
// The numbers that threads leave in shared memory for one sum over channels (PixelSums).
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
  int most_step;
  int least_pixels;  // of the narrowest tile
  int movers;        // threads that move pixels, where tiles are few

  int channel_step(int64_t channels) const {
    return static_cast<int>(std::min<int64_t>(ceil_div(channels, kThreadChannels), most_step));
  }
};

// Whether vectors of pixels are moved, but channels do not begin at sectors of memory, so that
// tiles share sectors with their neighbours.
inline bool shares_sectors_of(const ChannelMap& map, int width, int size) {
  return width > 1 && map.pixels * size % kSectorBytes != 0;
}

// ChannelMap in tiles of at most so many pixels, as equal as vectors allow.
inline Tiles cut(const Problem& problem, const ChannelMap& map, const TileNeeds& needs,
                 int64_t most) {
  Tiles tiles;
  tiles.width = needs.width;
  tiles.channel_step = needs.channel_step(problem.cols);
  tiles.tiles = static_cast<int>(ceil_div(map.pixels, most));
  tiles.tile_pixels = static_cast<int>(round_up(ceil_div(map.pixels, tiles.tiles), needs.width));
  tiles.tiles = static_cast<int>(ceil_div(map.pixels, tiles.tile_pixels));
  if (needs.width == 1) tiles.movers = tiles.tile_pixels;
  return tiles;
}

inline int64_t most_tile_pixels(const Problem& problem, const TileNeeds& needs) {
  return needs.most_threads / needs.channel_step(problem.cols) *
         thread_pixels(needs.width, size_of(problem.x));
}

// The narrowest tiles. A strategy has a plan if these fit into shared memory, and only then: a
// pixel's result may not depend on how many samples there are.
inline Tiles least_tiles(const Problem& problem, const ChannelMap& map, const TileNeeds& needs,
                         const Device& device) {
  const int64_t bytes = problem.cols * needs.bytes;
  int64_t most = std::min<int64_t>(needs.least_pixels, most_tile_pixels(problem, needs));
  while (most > needs.width && most * bytes > room_of(device) * 3 / 4) most /= 2;
  return cut(problem, map, needs, most);
}

// The tiles for a problem, of up to so many lines, of which fits(tiles) is true, or the least.
template <typename Fits>
Tiles tiles_of(const Problem& problem, const ChannelMap& map, const TileNeeds& needs, int lines,
               const Device& device, const Fits& fits) {
  const int size = size_of(problem.x);
  const int64_t channels = problem.cols, pixels = map.pixels, samples = map.samples;
  const int64_t most_pixels = most_tile_pixels(problem, needs);
  const int64_t few = int64_t{kTilesASm} * device.sms;
  const auto bytes_of = [&](int64_t tile_pixels) { return tile_pixels * channels * needs.bytes; };
  const auto tiles_with = [&](int64_t most) { return cut(problem, map, needs, most); };
  const auto busiest = [&](int64_t most) {
    const Tiles tiles = tiles_with(most);
    return ceil_div(tiles.tiles * samples, device.sms) * tiles.tile_pixels;
  };
  const bool shares_sectors = shares_sectors_of(map, needs.width, size);
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
  const Tiles least = least_tiles(problem, map, needs, device);
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

inline bool are_many(const Tiles& tiles, const ChannelMap& map, const Device& device) {
  return map.samples * tiles.tiles >= int64_t{kManyTiles} * device.sms;
}

}  // namespace fused_layernorm

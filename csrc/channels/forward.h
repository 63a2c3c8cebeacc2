// SPDX-License-Identifier: Apache-2.0
// Forward over channels: its plan, and when it declines. A block holds all channels of some pixels
// in shared memory between the statistics and y.
#pragma once

#include <optional>

#include "base/cuda_types.h"
#include "base/planning.h"
#include "channels/tiles.h"

namespace fused_layernorm {
namespace forward {

struct Channels : Launch {
  static constexpr const char* kName = "channels";
  ChannelMap map;  // of x
  Tiles tiles;
  // In shared memory, after the tile: what threads leave for a sum; mean and rstd of each pixel;
  // weight and bias.
  int sums_offset = 0;
  int weights_offset = 0;
  int weight_bytes = 0;        // of one of the two
  int y_offset = 0;            // of the tile of y: that of x, but where y is wider
  bool channels_last = false;  // y has the channels of a pixel side by side, x has not

  template <typename Json>
  void describe(Json& json) const {
    json.add(tiles).add("channels_last", channels_last);
  }
};

}  // namespace forward

// The plan with these tiles, for which the tensors are set.
inline std::optional<forward::Channels> plan_of_tiles(forward::Channels plan, const Tiles& t,
                                                      const Problem& problem, int y_bytes,
                                                      const Device& device) {
  const int size = size_of(problem.x), acc = acc_size_of(problem.x);
  plan.tiles = t;
  const int64_t elements = problem.cols * t.tile_pixels;
  plan.weight_bytes =
      static_cast<int>(round_up(problem.cols * size_of(problem.weight), kVectorBytes));
  SharedLayout shared;
  shared.add(elements * size);
  plan.sums_offset = shared.add((left_sums(t, size) + 2 * room_pixels(t, size)) * acc);
  plan.weights_offset = shared.add(int64_t{2} * plan.weight_bytes);
  plan.y_offset = y_bytes > 0 ? static_cast<int>(shared.bytes) : 0;
  shared.bytes += elements * y_bytes;
  if (shared.bytes > room_of(device)) return std::nullopt;
  plan.shared_bytes = static_cast<int>(shared.bytes);
  plan.blocks = plan.map.samples * t.tiles;
  plan.threads = tile_threads(t, size);
  if (plan.blocks > kMostBlocks) return std::nullopt;
  return plan;
}

inline std::optional<forward::Channels> make_channels_plan(const Problem& problem,
                                                           const ChannelMap& map, int64_t unit,
                                                           bool may_be_run, bool channels_last,
                                                           const Device& device) {
  const int size = size_of(problem.x);
  const int width = pixel_width(unit, map.pixels, size);
  if (!serves_channels(problem, map, width, channels_last, /*backward=*/false)) return std::nullopt;
  forward::Channels plan;
  plan.map = map;
  plan.channels_last = channels_last;
  const int64_t bytes = thread_pixels(width, size) * size;
  const int y_bytes = channels_last && size_of(problem.y) != size ? size_of(problem.y) : 0;
  // By the pixels alone, as strides may differ with the number of samples.
  const bool is_odd = pixel_width(kVectorBytes, map.pixels, size) == 1;
  const TileNeeds needs = {
      .width = width,
      .bytes = size + y_bytes,
      .registers = forward::tile_registers(bytes, !problem.has_epilogue),
      .may_be_run = may_be_run,
      .most_threads = forward::kMostTileThreads,
      .most_step = is_odd ? forward::kMostScatteredStep : kMostChannelStep,
      .least_pixels = width == 1 ? kLeastTilePixels : std::max(width, kSectorBytes / size),
      .movers = channels_last || width == 1 ? kMovers : 1};
  const auto with = [&](const Tiles& tiles) {
    return plan_of_tiles(plan, tiles, problem, y_bytes, device);
  };
  if (!with(least_tiles(problem, map, needs, device))) return std::nullopt;
  const bool shares_sectors = shares_sectors_of(map, width, size);
  Tiles tiles = tiles_of(problem, map, needs, shares_sectors ? 2 : 1, device, with);
  if (!shares_sectors && !channels_last && are_many(tiles, map, device)) {
    const Tiles wide = tiles_of(problem, map, needs, 2, device, with);
    if (are_many(wide, map, device)) tiles = wide;
  }
  return with(tiles);
}

ForwardLaunch<forward::Channels> launch_layer_norm_forward;

}  // namespace fused_layernorm

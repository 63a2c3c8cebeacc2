// SPDX-License-Identifier: Apache-2.0
// Backward over channels: its plan, and when it declines. Persistent blocks take tiles of all
// channels of some pixels, whose dweight and dbias they keep in shared memory.
#pragma once

#include <optional>

#include "base/cuda_types.h"
#include "base/partial_sums.h"
#include "base/planning.h"
#include "channels/tiles.h"

namespace fused_layernorm {
namespace backward {

struct Channels : Launch {
  static constexpr const char* kName = "channels";
  ChannelMap x;
  ChannelMap dy;                  // where its channels lie apart, as those of x
  bool dy_channels_last = false;  // dy has the channels of a pixel side by side
  bool dx_channels_last = false;
  Tiles tiles;
  int all_tiles = 0;  // of all samples
  // In shared memory, after the tile of x: that of dy; the running dweight and dbias of threads;
  // what they leave for two sums over channels; four numbers a pixel; weight and bias.
  int dy_offset = 0;
  int params_offset = 0;
  int sums_offset = 0;
  int weights_offset = 0;
  int weight_bytes = 0;  // of one of the two
  PartialSums partials;

  template <typename Json>
  void describe(Json& json) const {
    json.add(tiles).add("dy_channels_last", dy_channels_last);
    json.add("dx_channels_last", dx_channels_last).add(partials);
  }
};

}  // namespace backward

constexpr int kMostTiles = 1 << 30;  // a block's next tile has a number, too

// The plan with these tiles, for which the tensors are set.
inline std::optional<backward::Channels> plan_of_tiles(backward::Channels plan, const Tiles& t,
                                                       const Problem& problem, int registers,
                                                       const Device& device) {
  const int size = size_of(problem.x), dy_size = size_of(problem.y);
  const int acc = acc_size_of(problem.x);
  plan.tiles = t;
  plan.threads = tile_threads(t, size);
  const int64_t elements = problem.cols * t.tile_pixels;
  plan.weight_bytes =
      static_cast<int>(round_up(problem.cols * size_of(problem.weight), kVectorBytes));
  SharedLayout shared;
  shared.add(elements * size);
  plan.dy_offset = shared.add(elements * dy_size);
  plan.params_offset = shared.add(ceil_div(problem.cols, t.channel_step) * plan.threads * 2 * acc);
  plan.sums_offset = shared.add((2 * left_sums(t, size) + 4 * room_pixels(t, size)) * acc);
  plan.weights_offset = shared.add(int64_t{problem.has_epilogue ? 2 : 1} * plan.weight_bytes);
  if (shared.bytes > room_of(device)) return std::nullopt;
  plan.shared_bytes = static_cast<int>(shared.bytes);
  if (plan.x.samples > kMostTiles / t.tiles) return std::nullopt;
  plan.all_tiles = static_cast<int>(plan.x.samples * t.tiles);
  const int64_t fitting =
      std::min<int64_t>({room_of(device) / shared.bytes, blocks_with(plan.threads, registers),
                         backward::kMostTileBlocks});
  const int64_t blocks =
      std::min<int64_t>(plan.all_tiles, std::max<int64_t>(1, fitting) * device.sms);
  // As many blocks as finish at once, each with the same number of tiles or one fewer.
  plan.blocks = ceil_div(int64_t{plan.all_tiles}, ceil_div(int64_t{plan.all_tiles}, blocks));
  lay_out_partials(plan, plan.blocks, problem);
  plan.partials.starts_early = device.starts_early;
  return plan;
}

// `unit` and `may_be_run` are those of x and, where it has a map, of dy (call/layout.h).
inline std::optional<backward::Channels> make_channels_plan(
    const Problem& problem, const ChannelMap& x, const std::optional<ChannelMap>& dy, int64_t unit,
    bool may_be_run, bool dx_channels_last, const Device& device) {
  const int size = size_of(problem.x), acc = acc_size_of(problem.x);
  const int width = pixel_width(unit, x.pixels, size);
  if (!serves_channels(problem, x, width, !dy, /*backward=*/true)) return std::nullopt;
  const int pixels = static_cast<int>(thread_pixels(width, size));
  const int registers = backward::tile_registers(pixels * size);
  // The pixels of a thread take two running sums of a channel beside their elements.
  const TileNeeds needs = {.width = width,
                           .bytes = size + size_of(problem.y) + 2 * acc / pixels,
                           .registers = registers,
                           .may_be_run = may_be_run,
                           .most_threads = sm_threads(registers),
                           .most_step = kMostChannelStep,
                           .least_pixels = std::max(width, kLeastTilePixels),
                           .movers = kMovers};

  backward::Channels plan;
  plan.x = x;
  plan.dy = dy.value_or(ChannelMap{});
  plan.dy_channels_last = !dy;
  plan.dx_channels_last = dx_channels_last;
  const auto with = [&](const Tiles& tiles) {
    return plan_of_tiles(plan, tiles, problem, registers, device);
  };
  if (!with(least_tiles(problem, x, needs, device))) return std::nullopt;
  const auto narrow = with(tiles_of(problem, x, needs, 1, device, with));
  if (!dy || dx_channels_last || !are_many(narrow->tiles, x, device)) return narrow;
  // Tiles of two lines, unless a multiprocessor then has many more pixels, in its last turn.
  const auto wide = with(tiles_of(problem, x, needs, 2, device, with));
  const auto most_pixels = [&](const backward::Channels& p) {
    const int64_t turns = ceil_div(int64_t{p.all_tiles}, p.blocks);
    return static_cast<double>(turns * ceil_div(p.blocks, device.sms) * p.tiles.tile_pixels);
  };
  const bool takes_wide =
      are_many(wide->tiles, x, device) && most_pixels(*wide) <= 1.05 * most_pixels(*narrow);
  return takes_wide ? wide : narrow;
}

BackwardLaunch<backward::Channels> launch_layer_norm_backward;

}  // namespace fused_layernorm

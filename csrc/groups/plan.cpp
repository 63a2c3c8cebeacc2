// SPDX-License-Identifier: Apache-2.0
// The plan of GroupNorm.
#include "groups/plan.h"

#include <cmath>

#include "base/json.h"
#include "groups/tuning.h"

namespace fused_layernorm {
namespace {

// Whether blocks can wait for each other, those of a cluster or of a whole launch.
bool has_meetings(const Device& device) { return device.capability >= 90 && device.blocks_meet; }

// A block or a cluster for each group, if shared memory has room for it.
bool hold_planes(GroupPlan& plan, const GroupProblem& problem, const Device& device) {
  const int64_t channels = problem.channels_of_group();
  const int64_t vectors = channels * plan.channel_units / plan.vector_units;
  const int size = size_of(problem.x), acc = acc_size_of(problem.x);
  const int64_t bytes = vectors * plan.width * size;
  const bool backward = problem.backward;
  int blocks = 1;
  if (bytes > (backward ? groups::kHeldBackwardBytes : groups::kHeldBytes)) {
    const bool by_two = backward && bytes <= groups::kClusterBackwardBytes;
    // Backward, longer groups are held only where tiles would move them by single elements
    // (float32, 1024 x 16 x 10933 in 4 groups: tiles 1388, clusters 721).
    const bool fits =
        by_two || (bytes <= groups::kClusterBytes && !(backward && plan.vector_units == 1));
    if (!has_meetings(device) || !fits) return false;
    blocks = by_two ? groups::kMostBackwardCluster : groups::kMostCluster;
  }
  plan.slice_vectors = static_cast<int>(ceil_div(vectors, blocks));
  if (ceil_div(vectors, plan.slice_vectors) != blocks) return false;
  const int64_t elements = int64_t{plan.slice_vectors} * plan.width;
  // Of a tensor's slice; a vector more where its elements lie as in global memory.
  const auto room_for = [&](int size) {
    const int more = is_copied_by_vectors(plan.width, size) ? kVectorBytes : 0;
    return round_up(elements * size + more, kVectorBytes);
  };
  int64_t shared = room_for(size);
  plan.dy_offset = static_cast<int>(shared);
  if (backward) {
    shared += room_for(size_of(problem.y));
    plan.pairs_offset = static_cast<int>(shared);
    shared += int64_t{plan.slice_vectors} * 2 * acc;
  }
  plan.maps_offset = static_cast<int>(round_up(shared, kVectorBytes));
  const int64_t units = int64_t{plan.slice_vectors} * plan.vector_units;
  const int64_t touched = std::min(channels, (units - 1) / plan.channel_units + 2);
  const bool has_tails = backward && plan.vector_units > 1;
  shared = plan.maps_offset + touched * 2 * acc * (has_tails ? 2 : 1);
  if (shared > room_of(device)) return false;
  plan.strategy = GroupStrategy::kHeld;
  plan.blocks_per_group = plan.cluster = blocks;
  plan.shared_bytes = static_cast<int>(shared);
  plan.tile_channels = static_cast<int>(channels);
  plan.threads = static_cast<int>(std::min<int64_t>(
      kHeldThreads, round_up(ceil_div(plan.slice_vectors, kHeldVecs), kWarpThreads)));
  plan.blocks = problem.samples * problem.groups * blocks;
  plan.parts_of_channel =
      static_cast<int>(std::min<int64_t>(blocks, (plan.channel_units - 1) / units + 2));
  plan.workspace_bytes =
      backward ? problem.samples * problem.channels * plan.parts_of_channel * 2 * acc : 0;
  return true;
}

// Blocks that share a group, if the device has room for them all at once.
bool split_planes(GroupPlan& plan, const GroupProblem& problem, const Device& device) {
  const int size = size_of(problem.x);
  const int64_t channels = problem.channels_of_group();
  const bool backward = problem.backward;
  if (!has_meetings(device) || problem.x == DataType::kFloat64 || plan.width < vector_width(size) ||
      plan.channel_units < kWarpThreads / 2 ||
      (backward && channels * problem.positions < groups::kSplitBackwardElements)) {
    return false;
  }
  const int segment = backward ? kBackwardSegmentVectors : kSegmentVectors;
  const int ahead = backward ? kSplitBackwardAhead : kSplitAhead;
  const int64_t pieces = ceil_div(plan.channel_units, segment), segments = channels * pieces;
  const int64_t slot_bytes =
      int64_t{kSplitWarps} * segment * plan.width * (size + (backward ? size_of(problem.y) : 0));
  const int slots =
      static_cast<int>(std::min<int64_t>(room_of(device) / slot_bytes, kMostSplitSlots));
  const int most = std::min({backward ? groups::kMostBackwardSegments : groups::kMostSegments,
                             slots - ahead, kMostWarpSegments});
  if (most < 1) return false;
  const int64_t least = ceil_div(segments, int64_t{kSplitWarps} * most);
  if (least > most_blocks_per_row(device)) return false;
  const int64_t of_warp =
      ceil_div(segments, int64_t{widen(static_cast<int>(least), device)} * kSplitWarps);
  plan.strategy = GroupStrategy::kSplit;
  plan.pieces = static_cast<int>(pieces);
  plan.piece_vectors = static_cast<int>(ceil_div(plan.channel_units, pieces));
  plan.tile_channels = static_cast<int>(channels);
  plan.segments_of_warp = static_cast<int>(of_warp);
  plan.blocks_per_group = static_cast<int>(ceil_div(segments, of_warp * kSplitWarps));
  plan.slots = static_cast<int>(std::min<int64_t>(slots, ahead + (kGroupsKept - 1) * of_warp));
  plan.lag = plan.slots - ahead - 1;
  plan.threads = kSplitThreads;
  plan.shared_bytes = static_cast<int>(plan.slots * slot_bytes);
  const int64_t all = problem.samples * problem.groups;
  plan.blocks = std::min<int64_t>(device.sms / plan.blocks_per_group, all) * plan.blocks_per_group;
  plan.parts_of_channel = static_cast<int>((pieces - 1) / of_warp + 2);
  plan.parts_offset = plan.meets() ? round_up(all * plan.blocks_per_group * 8, kVectorBytes) : 0;
  plan.workspace_bytes = plan.parts_offset;
  if (backward) {
    plan.workspace_bytes += problem.samples * problem.channels * plan.parts_of_channel * 8;
  }
  return true;
}

void cut_planes(GroupPlan& plan, const GroupProblem& problem) {
  const int64_t channels = problem.channels_of_group();
  const int64_t tile = kTileThreads * (problem.backward ? kTileBackwardVecs : kTileVecs);
  plan.threads = kTileThreads;
  if (plan.channel_units * 2 > tile) {
    plan.pieces = static_cast<int>(ceil_div(plan.channel_units, tile));
    plan.piece_vectors = static_cast<int>(ceil_div(plan.channel_units, plan.pieces));
    plan.tiles = static_cast<int>(channels * plan.pieces);
  } else {
    const int64_t tiles = ceil_div(channels, tile / plan.channel_units);
    plan.tile_channels = static_cast<int>(ceil_div(channels, tiles));
    plan.piece_vectors = static_cast<int>(plan.channel_units);
    plan.tiles = static_cast<int>(ceil_div(channels, plan.tile_channels));
  }
}

void cut_channels_last(GroupPlan& plan, const GroupProblem& problem) {
  const int64_t vectors = problem.channels / plan.width;
  plan.slices = static_cast<int>(ceil_div(vectors, kLastThreads));
  plan.columns = static_cast<int>(ceil_div(vectors, plan.slices));
  plan.rows = kLastThreads / plan.columns;
  plan.threads = static_cast<int>(round_up(int64_t{plan.columns} * plan.rows, kWarpThreads));
  const int64_t position_bytes = problem.channels * size_of(problem.x);
  const bool large = position_bytes * problem.positions >= groups::kLargeSample;
  const int64_t bytes =
      problem.backward
          ? (large ? groups::kLargeBackwardLastTileBytes : groups::kBackwardLastTileBytes)
          : (large ? groups::kLargeLastTileBytes : groups::kLastTileBytes);
  int64_t wanted = bytes / position_bytes;
  if (plan.width == 1) {
    const int64_t least = wanted / vector_width(size_of(problem.x));
    wanted = std::min(wanted, std::max(least, ceil_div(problem.positions, groups::kFewLastTiles)));
  }
  wanted = std::max({wanted, ceil_div(problem.positions, groups::kMostLastTiles), int64_t{1}});
  // A thread loads some positions while it works on as many.
  const int at_once = 2 * plan.rows * (problem.backward ? kLastBackwardVecs : kLastVecs);
  plan.tile_positions =
      static_cast<int>(std::min(round_up(wanted, at_once), round_up(problem.positions, plan.rows)));
  plan.tiles = static_cast<int>(ceil_div(problem.positions, plan.tile_positions));
  const int64_t of_group = problem.channels_of_group(), slice = int64_t{plan.columns} * plan.width;
  plan.groups_of_slice =
      static_cast<int>(std::min(problem.groups, (slice + of_group - 2) / of_group + 1));
  const bool has_whole_groups = plan.slices == 1 || slice % of_group == 0;
  plan.has_totals = plan.tiles > 1 || !has_whole_groups;
}

// Whether there are kernels of half vectors (dispatch_group_types).
bool has_half_vectors(const GroupProblem& problem) {
  return problem.layout == GroupLayout::kPlanes && problem.positions > 1 && is_half(problem.x) &&
         problem.y == problem.x;
}

// Elements that a thread moves at once, of runs of `extent` elements.
int group_width(const GroupProblem& problem, int64_t extent) {
  const int full = vector_width(size_of(problem.x));
  if (!problem.aligned) return 1;
  if (extent % full == 0) return full;
  return has_half_vectors(problem) && extent % (full / 2) == 0 ? full / 2 : 1;
}

// Samples of one position: lanes of a warp, a block or a cluster for each group.
bool hold_positions(GroupPlan& plan, const GroupProblem& problem, const Device& device) {
  const int size = size_of(problem.x);
  // In a kernel, a channel's offset in bytes within a sample has 32 bits.
  if (problem.positions != 1 || problem.modulated || problem.channels > kMostExtent / size) {
    return false;
  }
  const int64_t of_group = problem.channels_of_group();
  plan.width = group_width(problem, of_group);
  int64_t threads = ceil_div(of_group, one_position_elements(size));
  // Single elements are spread over a whole warp first, so that loads coalesce.
  if (plan.width == 1) threads = std::max(threads, std::min<int64_t>(of_group, kWarpThreads));
  const int64_t blocks = ceil_div(threads, kMostOneThreads);
  // Clusters are slower for float64 forward (1024 x 8192 in one group 145, held 93).
  const bool by_clusters = has_meetings(device) && (problem.backward || size <= 4);
  if (blocks > (by_clusters ? groups::kMostCluster : 1)) return false;
  plan.strategy = GroupStrategy::kOnePosition;
  plan.layout = GroupLayout::kChannelsLast;  // parts of channels lie side by side
  plan.lanes = 1;
  while (plan.lanes < threads && plan.lanes < kWarpThreads) plan.lanes *= 2;
  plan.threads = kOneThreads;
  if (threads > kWarpThreads) {
    plan.threads = static_cast<int>(round_up(ceil_div(threads, blocks), kWarpThreads));
    plan.lanes = plan.threads * static_cast<int>(blocks);
  }
  plan.cluster = static_cast<int>(blocks);
  const int64_t teams = plan.threads * blocks / plan.lanes;
  plan.groups_of_slice = static_cast<int>(std::min(teams, problem.groups));
  plan.rows = static_cast<int>(teams / plan.groups_of_slice);
  plan.slices = static_cast<int>(ceil_div(problem.groups, plan.groups_of_slice));
  const int64_t of_row = ceil_div(problem.samples, plan.rows);
  // As many blocks or clusters of each slice as should be resident at once.
  const int resident = problem.backward ? groups::kOneBackwardResident : groups::kOneResident;
  const int sms = blocks > 2 ? device.sms * groups::kOfEightClustered / 8 : device.sms;
  const int64_t room = std::max<int64_t>(
      int64_t{sms} * std::max(resident / plan.threads, 1) / (plan.slices * blocks), 1);
  int64_t wanted = std::min(room, of_row);
  if (problem.backward) {
    const auto most = std::sqrt(groups::kOnePartsOfSample * static_cast<double>(of_row));
    wanted = of_row <= groups::kFewOneSamples ? 1 : std::min(wanted, static_cast<int64_t>(most));
  } else if (of_row > room / 2) {
    // Two samples a row, so that weights are loaded less often, but at least half of the blocks.
    wanted = std::clamp(of_row / 2, ceil_div(room, 2), room);
  }
  plan.tiles = static_cast<int>(std::max(wanted, ceil_div(of_row, groups::kMostOneSamples)));
  plan.blocks = plan.slices * blocks * plan.tiles;
  plan.parts_of_channel = plan.tiles;
  if (problem.backward && plan.tiles > 1) {
    plan.workspace_bytes = plan.tiles * problem.channels * 2 * acc_size_of(problem.x);
  }
  return true;
}

// Whether a block that holds a group should move whole vectors although channels begin in the midst
// of some. A vector then has elements of two channels at most, for a channel is longer than it.
// Backward does so only where half vectors cannot make up a channel (64 x 1024 x 14 x 14 56, by
// whole vectors 61; forward 24.7, 23.9).
bool vectors_straddle(const GroupProblem& problem) {
  const int full = vector_width(size_of(problem.x));
  const int whole = problem.backward && has_half_vectors(problem) ? full / 2 : full;
  return problem.aligned && problem.x != DataType::kFloat64 && problem.positions > full &&
         problem.positions % whole != 0 &&
         problem.channels_of_group() * problem.positions % full == 0;
}

// Whether backward should take planes of one position, which lie as channels_last does, for that,
// where hold_positions does not take them: if a block has work for all its threads, and many groups
// because they are short (float32, 1024 x 8192 in 512 groups: a block for each group 685, so 280).
bool is_better_last(const GroupProblem& problem) {
  const int64_t slice = int64_t{kLastThreads} * vector_width(size_of(problem.x));
  return problem.backward && problem.aligned && problem.positions == 1 &&
         problem.channels % slice == 0 && problem.channels_of_group() <= groups::kShortLastGroup &&
         slice % problem.channels_of_group() == 0;
}

// Sets the unit in which channels of planes are counted: a vector of `width` elements
// (vector_units 1), or an element (vector_units = width).
void count_channels(GroupPlan& plan, const GroupProblem& problem, int width, int vector_units) {
  plan.width = width;
  plan.vector_units = vector_units;
  plan.channel_units = problem.positions * vector_units / width;
}

std::optional<GroupPlan> plan_of(const GroupProblem& given, const Device& device) {
  GroupProblem problem = given;
  if (is_better_last(problem)) problem.layout = GroupLayout::kChannelsLast;
  GroupPlan plan;
  plan.starts_early = device.starts_early;
  plan.layout = problem.layout;
  const bool planes = problem.layout == GroupLayout::kPlanes;
  if (problem.positions > kMostPositions || problem.channels > kMostPositions ||
      problem.samples * problem.groups > kMostExtent / 2) {
    return std::nullopt;
  }
  if (hold_positions(plan, problem, device)) return plan;
  if (planes) {
    bool found = false;
    if (vectors_straddle(problem)) {
      const int full = vector_width(size_of(problem.x));
      count_channels(plan, problem, full, full);
      found = hold_planes(plan, problem, device);
    }
    if (!found) {
      count_channels(plan, problem, group_width(problem, problem.positions), 1);
      found = hold_planes(plan, problem, device) || split_planes(plan, problem, device);
    }
    if (found) return plan.blocks <= kMostBlocks ? std::optional(plan) : std::nullopt;
    plan.blocks_per_group = plan.cluster = 1;
    cut_planes(plan, problem);
  } else {
    plan.width = group_width(problem, problem.channels);
    cut_channels_last(plan, problem);
  }
  const int64_t all_groups = problem.samples * problem.groups;
  // Parts, each of two numbers: of tiles, and in backward of each channel in a tile.
  const int64_t pair = 2 * acc_size_of(problem.x);
  const int64_t parts = !planes ? problem.samples * plan.tiles * plan.slices * plan.groups_of_slice
                        : problem.backward ? 0
                                           : all_groups * plan.tiles;
  plan.parts_of_channel = planes ? plan.pieces : plan.tiles;
  const int64_t channel_parts =
      problem.backward ? problem.samples * problem.channels * plan.parts_of_channel : 0;
  plan.parts_offset = round_up(parts * pair, kVectorBytes);
  // No line has both parts and totals, which different kernels write and read.
  plan.totals_offset = round_up(plan.parts_offset + channel_parts * pair, kCacheLineBytes);
  plan.workspace_bytes = plan.totals_offset + all_groups * pair;
  plan.blocks = planes ? all_groups * plan.tiles : problem.samples * plan.tiles * plan.slices;
  return plan.blocks < kMostExtent / 2 ? std::optional(plan) : std::nullopt;
}

}  // namespace

std::optional<GroupPlan> make_group_plan(const GroupProblem& problem, const Device& device) {
  std::optional<GroupPlan> plan = plan_of(problem, device);
  if (plan) {
    plan->by_channel = Divisor(plan->channel_units);
    plan->by_pieces = Divisor(plan->pieces);
    plan->by_tiles = Divisor(plan->tiles);
    plan->by_blocks_per_group = Divisor(plan->blocks_per_group);
    plan->by_columns = Divisor(plan->columns);
    plan->by_slices = Divisor(plan->slices);
    plan->by_rows = Divisor(plan->rows);
    plan->by_groups_of_slice = Divisor(plan->groups_of_slice);
  }
  return plan;
}

std::string describe(const GroupPlan& plan) {
  Json json(name_of(plan.strategy));
  json.add("width", plan.width);
  if (plan.strategy == GroupStrategy::kTiles) {
    json.add("tiles", plan.tiles).add("tile_channels", plan.tile_channels);
    json.add("pieces", plan.pieces).add("columns", plan.columns).add("slices", plan.slices);
    json.add("rows", plan.rows).add("tile_positions", plan.tile_positions);
  } else if (plan.strategy == GroupStrategy::kOnePosition) {
    json.add("lanes", plan.lanes).add("groups_of_slice", plan.groups_of_slice);
    json.add("rows", plan.rows).add("slices", plan.slices).add("tiles", plan.tiles);
  } else {
    json.add("blocks_per_group", plan.blocks_per_group);
  }
  if (plan.strategy == GroupStrategy::kHeld) {
    json.add("slice_vectors", plan.slice_vectors).add("vector_units", plan.vector_units);
  }
  if (plan.strategy == GroupStrategy::kSplit) {
    json.add("pieces", plan.pieces).add("segments_of_warp", plan.segments_of_warp);
    json.add("slots", plan.slots).add("lag", plan.lag);
  }
  json.add("cluster", plan.cluster).add("blocks", plan.blocks).add("threads", plan.threads);
  json.add("shared_bytes", plan.shared_bytes).add("workspace_bytes", plan.workspace_bytes);
  return json.end();
}

}  // namespace fused_layernorm

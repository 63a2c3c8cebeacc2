// SPDX-License-Identifier: Apache-2.0
// What both directions' plans share at run time: what is forced, what is refused, and plans in
// words. The ladders themselves stand in forward.cpp and backward.cpp.
#include "plan/plan.h"

#include <charconv>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string_view>

#include "backward/channels.h"
#include "forward/channels.h"
#include "plan/ladders.h"
#include "plan/layout.h"

namespace fused_layernorm {
namespace {

// As JSON strings.
constexpr const char* kMoves[] = {"\"vectors\"", "\"shifted\""};

constexpr const char* kStrategies[] = {"warp",   "spread",   "block", "split", "ring",
                                       "stream", "few_rows", "group", "rows"};

// The fields that can be forced beside the strategy, in the order of Field. No problem can have a
// value outside of its field's range.
struct FieldRange {
  const char* name;
  int least;
  int most;
};
constexpr FieldRange kFieldRanges[kFields] = {
    {"vecs", 1, most_backward_block_vecs(1)},
    {"teams", 1, kBackwardThreads},  // few rows: a team may be one lane

    {"bulk", 0, 1},
    {"stages", 1, kMostStages},
    {"lag", 1, kMostCollected - 1},
    {"blocks_per_row", 1, kMaxBlocksPerRow},
};
static_assert(most_backward_block_vecs(1) >= most_backward_block_vecs(vector_width(8)),
              "every kernel's vectors can be forced");

const char* name_of(Strategy strategy) { return kStrategies[static_cast<int>(strategy)]; }

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  message << "fused_layernorm: ";
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

// "a, b or c", of the names of `items`.
template <typename Items, typename NameOf>
std::string list_of(const Items& items, const NameOf& name_of_item) {
  std::ostringstream list;
  const size_t count = std::size(items);
  for (size_t i = 0; i < count; ++i) {
    if (i > 0) list << (i + 1 < count ? ", " : " or ");
    list << name_of_item(items[i]);
  }
  return list.str();
}

Strategy parse_strategy(std::string_view name) {
  for (size_t i = 0; i < std::size(kStrategies); ++i) {
    if (name == kStrategies[i]) return static_cast<Strategy>(i);
  }
  fail("no strategy is called '", name, "': expected ",
       list_of(kStrategies, [](const char* known) { return known; }));
}

int parse_value(const FieldRange& range, std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool is_number = error == std::errc() && end == text.data() + text.size();
  if (!is_number || value < range.least || value > range.most) {
    fail("expected ", range.name, " to be a whole number from ", range.least, " to ", range.most,
         ", got '", text, "'");
  }
  return value;
}

// Parses words such as "strategy=split stages=3".
Forced parse(const std::string& options) {
  Forced forced;
  forced.words = options;
  std::istringstream words(options);
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    const std::string_view key = std::string_view(word).substr(0, equals);
    const std::string_view value =
        equals == std::string::npos ? "" : std::string_view(word).substr(equals + 1);
    bool again = false;
    if (key == "strategy") {
      again = forced.strategy.has_value();
      forced.strategy = parse_strategy(value);
    } else {
      int field = 0;
      while (field < kFields && key != kFieldRanges[field].name) ++field;
      if (field == kFields) {
        fail("no part of a plan is called '", key, "': expected strategy, ",
             list_of(kFieldRanges, [](const FieldRange& range) { return range.name; }));
      }
      again = forced.values[field].has_value();
      forced.values[field] = parse_value(kFieldRanges[field], value);
    }
    if (again) fail("expected ", key, " once, got '", options, "'");
  }
  return forced;
}

std::mutex forced_mutex;
Forced forced_plan;

// ---- A plan in words.

// Members of a JSON object.
class Json {
 public:
  explicit Json(Strategy strategy) : Json(name_of(strategy)) {}
  explicit Json(const char* strategy) { text_ << "{\"strategy\": \"" << strategy << '"'; }

  Json& add(const char* name, Moves value) { return append(name, kMoves[static_cast<int>(value)]); }
  Json& add(const char* name, bool value) { return append(name, value ? "true" : "false"); }
  Json& add(const char* name, int value) { return append(name, value); }
  Json& add(const char* name, int64_t value) { return append(name, value); }
  Json& add(const Slices& slices) {
    return add("blocks_per_row", slices.blocks_per_row).add("slice_cols", slices.slice_cols);
  }
  Json& add(const Tiles& tiles) {
    return add("width", tiles.width)
        .add("tile_pixels", tiles.tile_pixels)
        .add("tiles", tiles.tiles)
        .add("groups", tiles.groups)
        .add("is_run", tiles.is_run);
  }
  Json& add(const backward::PartialSums& partials) {
    return add("partials", partials.count).add("partials_offset", partials.offset);
  }
  Json& add(const backward::GroupParts& parts) {
    return add("parts", parts.partials.count)
        .add("partials_offset", parts.partials.offset)
        .add("sums_offset", parts.sums_offset)
        .add("sets", parts.sets);
  }
  Json& add(const backward::OneRowATeam& plan) {
    return add("width", plan.width)
        .add("vecs", plan.vecs)
        .add("team_threads", plan.team_threads)
        .add("teams", plan.threads / plan.team_threads)
        .add("by_lanes", plan.by_lanes);
  }
  Json& add(const backward::Persistent& plan) {
    return add("width", plan.width)
        .add("vecs", plan.vecs)
        .add("team_threads", plan.team_threads)
        .add("teams", plan.teams)
        .add("stage_cols", plan.stage_cols)
        .add("bulk", plan.bulk)
        .add("stages", plan.stages)
        .add("stays_in_l2", plan.stays_in_l2);
  }
  std::string with(const Launch& launch) {
    add("blocks", launch.blocks)
        .add("threads", launch.threads)
        .add("shared_bytes", launch.shared_bytes)
        .add("workspace_bytes", launch.workspace_bytes);
    text_ << '}';
    return text_.str();
  }

 private:
  template <typename Value>
  Json& append(const char* name, const Value& value) {
    text_ << ", \"" << name << "\": " << value;
    return *this;
  }

  std::ostringstream text_;
};

std::string to_json(const forward::Warp& plan) {
  return Json(Strategy::kWarp)
      .add("vecs", plan.vecs)
      .add("lanes", plan.lanes)
      .add("moves", plan.moves)
      .with(plan);
}

std::string to_json(const forward::Spread& plan) {
  return Json(Strategy::kSpread)
      .add("lanes", plan.lanes)
      .add("warps", plan.warps)
      .add("thread_vecs", plan.thread_vecs)
      .with(plan);
}

std::string to_json(const forward::Block& plan) {
  return Json(Strategy::kBlock)
      .add("vecs", plan.vecs)
      .add("moves", plan.moves)
      .add("early", plan.early)
      .with(plan);
}

std::string to_json(const forward::Ring& plan) {
  return Json(Strategy::kRing)
      .add("blocks_per_row", plan.blocks_per_row)
      .add("groups", plan.groups)
      .add("slots", plan.slots)
      .add("is_long", plan.is_long)
      .with(plan);
}

std::string to_json(const forward::Stream& plan) {
  return Json(Strategy::kStream)
      .add("width", plan.width)
      .add(plan.chunks)
      .add("totals_offset", plan.totals_offset)
      .with(plan);
}

// Adds the partial sums of a plan, which are parts of groups if the norm is modulated.
template <typename Plan>
Json& add_sums(Json& json, const Plan& plan) {
  return plan.parts.sets > 0 ? json.add(plan.parts) : json.add(plan.partials);
}

std::string to_json(const backward::Warp& plan) {
  Json json(Strategy::kWarp);
  json.add("width", plan.width).add("vecs", plan.vecs).add("lanes", plan.lanes);
  json.add("chain_rows", plan.chain_rows).add("second_sums_offset", plan.second_sums_offset);
  return add_sums(json, plan).with(plan);
}

std::string to_json(const backward::FewRows& plan) {
  return Json(Strategy::kFewRows)
      .add(plan)
      .add("sharers", plan.sharers)
      .add("column_blocks", plan.column_blocks)
      .with(plan);
}

std::string to_json(const backward::Rows& plan) {
  return Json(Strategy::kRows).add(plan).with(plan);
}

std::string to_json(const backward::Block& plan) {
  return Json(Strategy::kBlock).add(plan).add(plan.partials).with(plan);
}

std::string to_json(const backward::Group& plan) {
  return Json(Strategy::kGroup).add(plan).add(plan.parts).with(plan);
}

std::string to_json(const backward::Split& plan) {
  return Json(Strategy::kSplit)
      .add(plan)
      .add(plan.partials)
      .add(plan.slices)
      .add("lag", plan.lag)
      .add("has_collector", plan.has_collector)
      .with(plan);
}

std::string to_json(const backward::Stream& plan) {
  Json json(Strategy::kStream);
  json.add("width", plan.width).add(plan.chunks).add("totals_offset", plan.totals_offset);
  return add_sums(json, plan).with(plan);
}

}  // namespace

Forced forced_now() {
  const std::lock_guard<std::mutex> lock(forced_mutex);
  return forced_plan;
}

void force_plan(std::optional<std::string> options) {
  const Forced forced = parse(options.value_or(""));
  const std::lock_guard<std::mutex> lock(forced_mutex);
  forced_plan = forced;
}

void refuse(const Forced& forced, const Problem& problem, bool backward) {
  std::ostringstream with;
  if (problem.residual) with << ", a residual";
  if (problem.has_epilogue) with << ", an epilogue";
  if (problem.modulated) with << ", a modulation";
  if (backward && problem.modulated) with << " of groups of " << problem.group_rows << " rows";
  if (backward && !problem.needs_dparams) with << ", no dweight and no dbias";
  fail("the forced plan '", forced.words, "' cannot run ", backward ? "backward" : "forward",
       " of ", problem.rows, " rows of ", problem.cols, " columns (x of ", name_of(problem.x),
       ", weight of ", name_of(problem.weight), backward ? ", dy of " : ", y of ",
       name_of(problem.y), problem.aligned ? ", aligned" : ", not aligned", with.str(),
       ") on this device");
}

int lag_of(std::optional<int> stages, const Forced& forced) {
  const int lag = stages ? ladders::rung_of(ladders::kLags, *stages).lag : ladders::kLagWithoutRing;
  return forced.value_or(Field::kLag, lag);
}

const char* name_of(DataType type) {
  constexpr const char* kNames[] = {"float32", "float16", "bfloat16", "float64"};
  return kNames[static_cast<int>(type)];
}

std::string describe(const forward::Channels& plan) {
  return Json("channels").add(plan.tiles).add("channels_last", plan.channels_last).with(plan);
}
std::string describe(const backward::Channels& plan) {
  return Json("channels")
      .add(plan.tiles)
      .add("dy_channels_last", plan.dy_channels_last)
      .add("dx_channels_last", plan.dx_channels_last)
      .add(plan.partials)
      .with(plan);
}
std::string describe(const forward::Plan& plan) {
  return std::visit([](const auto& strategy) { return to_json(strategy); }, plan);
}
std::string describe(const backward::Plan& plan) {
  return std::visit([](const auto& strategy) { return to_json(strategy); }, plan);
}
std::string describe(const backward::Gate& plan) {
  return Json("gate")
      .add("width", plan.width)
      .add("chunks", plan.chunks)
      .add(plan.parts)
      .with(plan);
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// The words that force parts of plans, and the ranges of their values.
#include "bindings/force_plan.h"

#include <algorithm>
#include <charconv>
#include <sstream>
#include <string_view>
#include <variant>
#include <vector>

#include "backward/plan.h"
#include "forward/plan.h"

namespace fused_layernorm {
namespace {

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
    {"long", 0, 1},
};
static_assert(most_backward_block_vecs(1) >= most_backward_block_vecs(vector_width(8)),
              "every kernel's vectors can be forced");

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

// What can be forced as a strategy: the names of both directions, each once.
template <typename... Forward, typename... Backward>
std::vector<std::string_view> names_of(const std::variant<Forward...>*,
                                       const std::variant<Backward...>*) {
  std::vector<std::string_view> names;
  for (const std::string_view name : {Forward::kName..., Backward::kName...}) {
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  names.push_back(kFormula);
  return names;
}

std::string parse_strategy(std::string_view text) {
  const auto names =
      names_of(static_cast<forward::Plan*>(nullptr), static_cast<backward::Plan*>(nullptr));
  if (std::find(names.begin(), names.end(), text) != names.end()) return std::string(text);
  fail("no strategy is called '", text, "': expected ",
       list_of(names, [](std::string_view name) { return name; }));
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
      again = !forced.strategy.empty();
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

}  // namespace

void force_plan(std::optional<std::string> options) { set_forced(parse(options.value_or(""))); }

}  // namespace fused_layernorm

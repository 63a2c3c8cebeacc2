// SPDX-License-Identifier: Apache-2.0
// What the plans of both directions are made with: what is forced, and how rows are cut into slices
// that persistent blocks share.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "plan/geometry.h"
#include "plan/plan.h"

namespace fused_layernorm {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
constexpr int power_of_two_from(int64_t n) {
  int power = 1;
  while (power < n) power *= 2;
  return power;
}

// ---- What is forced.

enum class Strategy { kWarp, kSpread, kBlock, kSplit, kRing, kStream, kFewRows, kGroup, kRows };

// The fields of plans that can be forced.
enum class Field { kVecs, kTeams, kBulk, kStages, kLag, kBlocksPerRow };
constexpr int kFields = 6;

// The forced parts of a plan. A ladder takes the first strategy that can have all of them. It never
// replaces a forced part that cannot be had.
struct Forced {
  std::string words;  // as they were given to force_plan
  std::optional<Strategy> strategy;
  std::array<std::optional<int>, kFields> values;

  std::optional<int> of(Field field) const { return values[static_cast<int>(field)]; }
  bool has(Field field) const { return of(field).has_value(); }
  int value_or(Field field, int otherwise) const { return of(field).value_or(otherwise); }
  // Whether `field` is not forced, or is forced to `value`.
  bool allows(Field field, int value) const { return value_or(field, value) == value; }
  // Whether no strategy but `wanted` is forced, and no fields but `fields`, which that strategy
  // has.
  bool allows(Strategy wanted, std::initializer_list<Field> fields) const {
    if (strategy.value_or(wanted) != wanted) return false;
    int own = 0;
    for (const Field field : fields) own += has(field);
    return own == std::count_if(values.begin(), values.end(),
                                [](const auto& value) { return value.has_value(); });
  }
};

// What force_plan has set.
Forced forced_now();

// Throws std::invalid_argument: no strategy can have all that is forced.
[[noreturn]] void refuse(const Forced& forced, const Problem& problem, bool backward);

// ---- How rows are cut.

constexpr int acc_size_of(DataType x) { return acc_size_of(size_of(x)); }

// A block's shared memory without the part that is reserved for what its kernel declares.
constexpr int64_t room_of(const Device& device) {
  return device.shared_memory - kReservedSharedMemory;
}
// The number of stages of `bytes` bytes each for which `room` bytes suffice.
constexpr int stages_in(int64_t room, int64_t bytes) {
  return room < bytes ? 0 : static_cast<int>(std::min<int64_t>(kMostStages, room / bytes));
}

// Slices begin at multiples of this number of columns. Single elements can be moved from anywhere.
inline int64_t slice_unit(const Problem& problem, int width) {
  return width == 1 ? 1 : aligned_cols(size_of(problem.x), size_of(problem.y));
}

// The slices of rows for `blocks_per_row` blocks. They begin at multiples of `unit` columns or, if
// that would leave the last slice empty, at multiples of slice_unit(). If the last slice would
// still be empty, there are none.
inline std::optional<Slices> slices_of(const Problem& problem, int width, int blocks_per_row,
                                       int64_t unit) {
  const int64_t share = ceil_div(problem.cols, blocks_per_row);
  for (const int64_t begin : {unit, slice_unit(problem, width)}) {
    const int64_t cols = round_up(share, begin);
    if (cols * (blocks_per_row - 1) < problem.cols) {
      return Slices{blocks_per_row, static_cast<int>(cols)};
    }
  }
  return std::nullopt;
}

// The most blocks a row with which as many rows are in work at once as with `least` blocks a row,
// so that few multiprocessors are idle.
inline int widen(int least, const Device& device) {
  return std::min(kMaxBlocksPerRow, device.sms / (device.sms / least));
}

// The limits of first_sliced(): the least blocks a row, the least columns a slice, and the unit of
// slices_of().
struct SliceLimits {
  int least_blocks;
  int least_cols;
  int64_t unit;
};

// The plan with the fewest blocks a row for which `plan_of(slices)` has one. If the number of
// blocks a row is forced, only that number is tried.
template <typename PlanOf>
auto first_sliced(const Problem& problem, const Device& device, int width,
                  const SliceLimits& limits, const Forced& forced, const PlanOf& plan_of)
    -> decltype(plan_of(Slices())) {
  const int least = limits.least_blocks, most = std::min(device.sms, kMaxBlocksPerRow);
  const auto number = forced.of(Field::kBlocksPerRow);
  if (number && (*number < least || *number > most)) return std::nullopt;
  for (int n = number.value_or(least); n <= number.value_or(most); ++n) {
    const auto slices = slices_of(problem, width, number ? n : widen(n, device), limits.unit);
    if (!slices) continue;
    // More blocks a row never have longer slices.
    if (slices->slice_cols < limits.least_cols) return std::nullopt;
    if (auto plan = plan_of(*slices)) return plan;
  }
  return std::nullopt;
}

// The number of sets of blocks: as many as the device has room for, but no more than the rows need.
// A set works on one row for each of its teams at a time.
inline int64_t persistent_sets(const Problem& problem, const Device& device, int blocks_per_row,
                               int teams) {
  const int64_t room = device.sms / blocks_per_row;
  return std::max<int64_t>(1, std::min(room, ceil_div(problem.rows, teams)));
}

// The lag of rows that several blocks share. `stages` is empty for a kernel without a ring.
int lag_of(std::optional<int> stages, const Forced& forced);

// Whether the ring holds enough rows for its lag, and the kernel enough collected sums for the rows
// that wait.
constexpr bool is_valid_ring(int stages, int lag) {
  return stages >= least_stages(false, lag) && stages <= kMostStages && lag < kMostCollected;
}

}  // namespace fused_layernorm

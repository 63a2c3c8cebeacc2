// SPDX-License-Identifier: Apache-2.0
// What plans are made with: what is forced of them, for tests and tuning (bindings/force_plan.cpp
// reads the words), and which strategy takes a problem.
#pragma once

#include <algorithm>
#include <array>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <variant>

#include "base/problem.h"

namespace fused_layernorm {

// The fields of plans that can be forced.
enum class Field { kVecs, kTeams, kBulk, kStages, kLag, kBlocksPerRow, kLong };
constexpr int kFields = 7;

// The forced parts of a plan. The plan is that of the first strategy that can have all of them; a
// forced part that cannot be had is never replaced.
struct Forced {
  std::string words;     // as they were given to force_plan
  std::string strategy;  // its name; empty if none is forced
  std::array<std::optional<int>, kFields> values;

  std::optional<int> of(Field field) const { return values[static_cast<int>(field)]; }
  bool has(Field field) const { return of(field).has_value(); }
  int value_or(Field field, int otherwise) const { return of(field).value_or(otherwise); }
  // Whether `field` is not forced, or is forced to `value`.
  bool allows(Field field, int value) const { return value_or(field, value) == value; }
  // Whether no strategy but `wanted` is forced, and no fields but `fields`, which that strategy
  // has.
  bool allows(std::string_view wanted, std::initializer_list<Field> fields) const {
    if (!strategy.empty() && strategy != wanted) return false;
    int own = 0;
    for (const Field field : fields) own += has(field);
    return own == std::count_if(values.begin(), values.end(),
                                [](const auto& value) { return value.has_value(); });
  }
};

Forced forced_now();
void set_forced(Forced forced);
// The name of no strategy: where it is forced, no call is prepared, and the operators' formulas
// serve.
constexpr std::string_view kFormula = "formula";
bool is_formula_forced();

// Throws std::invalid_argument with a message of these parts: a plan, or a forced part of one, that
// nobody can have.
template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  message << "fused_layernorm: ";
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

// Fails: no strategy can have all that is forced.
[[noreturn]] void refuse(const Forced& forced, const Problem& problem, bool backward);

// The plan of the first alternative of a variant that can run the problem.
template <typename Plan, size_t kFirst = 0>
std::optional<Plan> first_plan(const Problem& problem, const Device& device, const Forced& forced) {
  if constexpr (kFirst < std::variant_size_v<Plan>) {
    using Strategy = std::variant_alternative_t<kFirst, Plan>;
    if (const auto plan = Strategy::make(problem, device, forced)) return *plan;
    return first_plan<Plan, kFirst + 1>(problem, device, forced);
  } else {
    return std::nullopt;
  }
}

inline const Launch& launch_of(const Launch& plan) { return plan; }
template <typename... Strategies>
const Launch& launch_of(const std::variant<Strategies...>& plan) {
  return std::visit([](const Launch& strategy) -> const Launch& { return strategy; }, plan);
}

}  // namespace fused_layernorm

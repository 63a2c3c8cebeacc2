// SPDX-License-Identifier: Apache-2.0
// A plan in words, as a JSON object: for tests, error messages and `python -m fused_layernorm`. A
// strategy says its fields by a template `describe(json)`.
#pragma once

#include <sstream>
#include <string>
#include <type_traits>
#include <variant>

#include "base/problem.h"

namespace fused_layernorm {

class Json {
 public:
  explicit Json(const char* strategy) { text_ << "{\"strategy\": \"" << strategy << '"'; }

  template <typename Value>
  Json& add(const char* name, const Value& value) {
    text_ << ", \"" << name << "\": ";
    if constexpr (std::is_same_v<Value, bool>) {
      text_ << (value ? "true" : "false");
    } else if constexpr (std::is_enum_v<Value>) {
      text_ << '"' << name_of(value) << '"';
    } else {
      text_ << value;
    }
    return *this;
  }
  // The fields of a part of a plan.
  template <typename Part>
  Json& add(const Part& part) {
    part.describe(*this);
    return *this;
  }
  std::string end() {
    text_ << '}';
    return text_.str();
  }

 private:
  std::ostringstream text_;
};

template <typename Strategy>
std::string describe(const Strategy& plan) {
  return Json(Strategy::kName)
      .add(plan)
      .add("blocks", plan.blocks)
      .add("threads", plan.threads)
      .add("shared_bytes", plan.shared_bytes)
      .add("workspace_bytes", plan.workspace_bytes)
      .end();
}
template <typename... Strategies>
std::string describe(const std::variant<Strategies...>& plan) {
  return std::visit([](const auto& strategy) { return describe(strategy); }, plan);
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// A call of an operator, as the dispatcher makes it: its arguments, in the order of its schema
// (call/schemas.h; of heads bindings/schemas.cpp), give place to its results. An argument is read
// once.
#pragma once

#include <torch/csrc/stable/library.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "bindings/cuda/tensors.h"

namespace [[gnu::visibility("hidden")]] fused_layernorm {

class Call {
 public:
  Call(StableIValue* stack, uint64_t arguments, uint64_t results)
      : stack_(stack), arguments_(arguments), results_(results) {
    taken_.reserve(arguments);
  }

  // The argument of a position. T is the type that the schema gives it: a tensor that the schema
  // does not call optional is a Tensor.
  template <typename T>
  T at(uint64_t position) {
    CHECK_ARGUMENT(position < arguments_, "the schema has too few arguments");
    ++read_;
    T value = torch::stable::detail::to<T>(stack_[position]);
    if constexpr (!std::is_arithmetic_v<T>) taken_.emplace_back(position, value);
    return value;
  }
  // The arguments that follow those already read, of the types of these variables.
  template <typename... T>
  void read(T&... into) {
    ((into = at<T>(read_)), ...);
  }

  // As read_options reads them.
  int64_t integer(uint64_t position) { return at<int64_t>(position); }
  double real(uint64_t position) { return at<double>(position); }
  bool flag(uint64_t position) { return at<bool>(position); }
  std::string name(uint64_t position) { return at<std::string>(position); }
  std::optional<std::string> name_if_any(uint64_t position) {
    return at<std::optional<std::string>>(position);
  }
  void refuse(const char* choices, const std::string& name) {
    CHECK_ARGUMENT(false, choices, ", got '", name, "'");
  }

  // The stack, with what was read in its place again.
  StableIValue* put_back() {
    for (const auto& [position, value] : taken_) {
      StableIValue& place = stack_[position];
      std::visit([&](const auto& each) { place = torch::stable::detail::from(each); }, value);
    }
    return stack_;
  }

  // Ends the call. Null stands for a result that the operator does not have.
  template <size_t kResults>
  void give(const std::array<const Tensor*, kResults>& results) {
    uint64_t given = 0;
    for (const Tensor* result : results) {
      if (result != nullptr) stack_[given++] = torch::stable::detail::from(*result);
    }
    CHECK_ARGUMENT(read_ == arguments_ && given == results_, "the schema has other arguments");
  }

 private:
  StableIValue* const stack_;
  const uint64_t arguments_, results_;
  uint64_t read_ = 0;
  // What the stack does not own any more.
  using Taken = std::variant<Tensor, std::optional<Tensor>, std::string, std::optional<std::string>,
                             std::optional<ScalarType>, std::vector<int64_t>>;
  std::vector<std::pair<uint64_t, Taken>> taken_;
};

}  // namespace fused_layernorm

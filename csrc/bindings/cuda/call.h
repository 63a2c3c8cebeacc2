// SPDX-License-Identifier: Apache-2.0
// A call of an operator, as the dispatcher makes it: its arguments, in the order of its schema
// (call/schemas.h; of heads bindings/schemas.cpp), give place to its results. An argument is read
// once.
#pragma once

#include <torch/csrc/stable/library.h>

#include <array>
#include <cstdint>
#include <string>

#include "bindings/cuda/tensors.h"

namespace [[gnu::visibility("hidden")]] fused_layernorm {

class Call {
 public:
  Call(StableIValue* stack, uint64_t arguments, uint64_t results)
      : stack_(stack), arguments_(arguments), results_(results) {}

  // The argument of a position. T is the type that the schema gives it: a tensor that the schema
  // does not call optional is a Tensor.
  template <typename T>
  T at(uint64_t position) {
    CHECK_ARGUMENT(position < arguments_, "the schema has too few arguments");
    ++read_;
    return torch::stable::detail::to<T>(stack_[position]);
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

  // Puts an argument that was read back into its place, if the operator has it.
  template <typename T>
  void put(uint64_t position, const T& value) {
    if (position < arguments_) stack_[position] = torch::stable::detail::from(value);
  }
  // The same in the order of the schema, from a position on.
  template <typename... T>
  void put_all(uint64_t position, const T&... values) {
    (put(position++, values), ...);
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
};

}  // namespace fused_layernorm

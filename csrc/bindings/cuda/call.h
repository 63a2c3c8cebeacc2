// SPDX-License-Identifier: Apache-2.0
// A call of an operator, as the dispatcher makes it: its arguments, in the order of its schema
// (bindings/schemas.cpp), give place to its results.
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <initializer_list>

#include "bindings/cuda/tensors.h"

namespace fused_layernorm __attribute__((visibility("hidden"))) {

  class Call {
   public:
    Call(StableIValue* stack, uint64_t arguments, uint64_t results)
        : stack_(stack), arguments_(arguments), results_(results) {}

    // The next argument. T is the type that the schema gives it: a tensor that the schema does not
    // call optional is a Tensor.
    template <typename T>
    T take() {
      CHECK_ARGUMENT(taken_ < arguments_, "the schema has too few arguments");
      return torch::stable::detail::to<T>(stack_[taken_++]);
    }
    // The next arguments, of the types of these variables.
    template <typename... T>
    void read(T&... into) {
      ((into = take<T>()), ...);
    }

    // Ends the call. Null stands for a result that the operator does not have.
    void give(std::initializer_list<const Tensor*> results) {
      uint64_t given = 0;
      for (const Tensor* result : results) {
        if (result != nullptr) stack_[given++] = torch::stable::detail::from(*result);
      }
      CHECK_ARGUMENT(taken_ == arguments_ && given == results_, "the schema has other arguments");
    }

   private:
    StableIValue* const stack_;
    const uint64_t arguments_, results_;
    uint64_t taken_ = 0;
  };

}  // namespace fused_layernorm

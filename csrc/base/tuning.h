// SPDX-License-Identifier: Apache-2.0
// How what was measured is written down: a rule, and the ranges of a length in which something else
// is better by more than noise. forward/tuning.h, backward/tuning.h and channels/tuning.h have the
// rules, with a time beside each exception; docs/tuning-log.md has all times.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fused_layernorm {

template <typename Value>
struct Exception {
  int64_t from, to;  // both lengths belong to the range
  Value value;
};

template <typename Value>
struct Rule {
  Value value;
  const Exception<Value>* exceptions = nullptr;
  size_t count = 0;

  constexpr Rule(Value of_all) : value(of_all) {}
  // Does not compile unless the ranges ascend.
  template <size_t kCount>
  constexpr Rule(Value else_, const Exception<Value> (&in_ranges)[kCount])
      : value(else_), exceptions(in_ranges), count(kCount) {
    for (size_t i = 1; i < kCount; ++i) {
      if (in_ranges[i].from <= in_ranges[i - 1].to) throw "ranges overlap";
    }
  }

  constexpr const Value& at(int64_t length) const {
    for (size_t i = 0; i < count; ++i) {
      if (exceptions[i].from <= length && length <= exceptions[i].to) return exceptions[i].value;
    }
    return value;
  }
};

}  // namespace fused_layernorm

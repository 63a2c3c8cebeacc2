// SPDX-License-Identifier: Apache-2.0
// The forced parts of plans, of the whole process, and what is said where they cannot be had.
#include "base/planning.h"

#include <atomic>
#include <mutex>
#include <utility>

namespace fused_layernorm {
namespace {

std::mutex forced_mutex;
Forced forced_plan;
// Every plan asks these two, and hardly any process forces one.
std::atomic<bool> is_any_forced = false, formula_is_forced = false;

}  // namespace

Forced forced_now() {
  if (!is_any_forced.load(std::memory_order_relaxed)) return {};
  const std::lock_guard<std::mutex> lock(forced_mutex);
  return forced_plan;
}

void set_forced(Forced forced) {
  const std::lock_guard<std::mutex> lock(forced_mutex);
  forced_plan = std::move(forced);
  is_any_forced = !forced_plan.words.empty();
  formula_is_forced = forced_plan.strategy == kFormula;
}

bool is_formula_forced() { return formula_is_forced.load(std::memory_order_relaxed); }

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

}  // namespace fused_layernorm

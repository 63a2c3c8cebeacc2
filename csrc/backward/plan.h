// SPDX-License-Identifier: Apache-2.0
// Which kernel runs backward of a problem, and how it is laid out, as forward/plan.h says.
#pragma once

#include <optional>
#include <variant>

#include "backward/block.h"
#include "backward/few_rows.h"
#include "backward/gate.h"
#include "backward/group.h"
#include "backward/rows.h"
#include "backward/split.h"
#include "backward/stream.h"
#include "backward/warp.h"

namespace fused_layernorm {

namespace backward {

// In the order in which they are asked: few rows by one launch; short rows by logical warps, longer
// ones by teams of a block or by whole blocks, the longest by several blocks a row or by two reads;
// and rows with a modulation by themselves, group by group, or by two reads.
using Plan = std::variant<FewRows, Warp, Block, Split, Rows, Group, Stream>;

}  // namespace backward

backward::Plan make_backward_plan(const Problem& problem, const Device& device);

// The plan of a problem with `gated`, if one launch can compute it. Otherwise there is none, and
// the norm and its gate take a launch each.
std::optional<backward::Plan> make_gated_plan(const Problem& problem, const Device& device);

}  // namespace fused_layernorm

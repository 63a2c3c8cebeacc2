// SPDX-License-Identifier: Apache-2.0
// Which kernel runs forward of a problem, and how it is laid out: plain host code that needs no
// GPU.
//
// A plan is one of several alternatives, one for each strategy, each with its own fields. The
// numbers that fix the order of a row's sums (strategy, width, vecs, threads of a team,
// blocks_per_row) follow from the row's length, the types, what is fused and the device, never from
// the number of rows: a row's result is the same in any batch. (The number of rows decides between
// strategies only where both take the same sums in the same order. One exception: in backward, a
// modulated row of more than 6,144 columns that is alone in its batch is a group of one row, and is
// summed as such.)
#pragma once

#include <variant>

#include "forward/block.h"
#include "forward/ring.h"
#include "forward/stream.h"
#include "forward/warp.h"

namespace fused_layernorm {

namespace forward {

// In the order in which they are asked: short rows by logical warps, longer ones by blocks, the
// longest by several blocks a row or by two reads.
using Plan = std::variant<Warp, Block, Ring, Stream>;

}  // namespace forward

// The plan of a problem of at least one row and one column, of types that have kernels
// (has_kernels), with `aligned` only where the columns allow it. Throws std::invalid_argument, with
// a message of one sentence, if the forced parts cannot run the problem.
forward::Plan make_forward_plan(const Problem& problem, const Device& device);

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// Forcing parts of plans by words.
#pragma once

#include <optional>
#include <string>

namespace fused_layernorm {

// Forces parts of every later plan, for tests and tuning; process-wide, until the next call.
// `options` are words such as "strategy=split stages=3", each at most once:
//   strategy        warp, block, stream; forward: ring; backward: few_rows,
//                   split, group, rows; formula: no kernel, of any family
//   vecs            vectors of a row that a thread owns
//   teams           backward: rows that a block works on at once
//   bulk            backward: 1 or 0, whether rows come to shared memory by bulk copies
//   stages          backward: rows or slices that a team keeps in flight in shared memory
//   lag             backward: rows between publishing a row's sums and collecting them
//   blocks_per_row  of rows by ring and split
//   long            of ring: 1 or 0, whether parameters lie in registers
// What is not forced is planned as always. If no strategy is forced, the plan has the first one, in
// their order, that can have all that is forced. Unless few_rows is forced, backward takes it only
// for as few rows as it is made for; warp and block force the persistent kernels for any number of
// rows. Throws std::invalid_argument, with a message of one sentence, for a word that is unknown or
// repeated, or whose value is out of range. An empty text or none forces nothing.
void force_plan(std::optional<std::string> options);

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// Which kernel runs a problem, and how it is laid out: plain host code that needs no GPU.
//
// A plan is one of several alternatives, one for each strategy, each with its own fields. The
// numbers that fix the order of a row's sums (strategy, width, vecs, threads of a team,
// blocks_per_row) follow from the row's length, the types, what is fused and the device, never from
// the number of rows: a row's result is the same in any batch. (The number of rows decides between
// strategies only where both take the same sums in the same order. One exception: in backward, a
// modulated row of more than 6,144 columns that is alone in its batch is a group of one row, and is
// summed as such.)
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>

#include "plan/geometry.h"

namespace fused_layernorm {

struct Device {
  int capability = 90;         // 10 * major + minor
  int sms = 132;               // streaming multiprocessors
  int shared_memory = 232448;  // bytes that one block may have
  bool starts_early = true;    // a kernel may start before the one in front of it has ended
};

// What is to be computed, as far as the plan depends on it.
struct Problem {
  int64_t rows = 0;
  int64_t cols = 0;
  DataType x = DataType::kFloat32;
  DataType weight = DataType::kFloat32;  // of bias too
  DataType y = DataType::kFloat32;       // of dy in backward
  bool aligned = true;    // every row of every tensor begins at a multiple of 16 bytes
  bool residual = false;  // forward: a second input; backward: a gradient added to dx
  // An activation, a scale that is not 1, or a weight that is not plain (ForwardParams).
  bool has_epilogue = false;
  bool needs_dparams = true;  // backward: a gradient of a parameter is asked for
  bool modulated = false;     // by shift and scale of groups of rows, or by a gate

  // Backward of a modulated norm.
  int64_t group_rows = 0;           // rows of a group; 1 where each row has its own shift and scale
  bool needs_column_grads = false;  // dweight or dbias is asked for
  bool gated = false;               // x was a gated sum, whose gradients are asked for too
};

// What every launch needs.
struct Launch {
  int64_t blocks = 1;
  int threads = kWarpThreads;  // of a block
  int shared_bytes = 0;        // of dynamic shared memory, of a block
  int64_t workspace_bytes = 0;
};

// How a row is cut into slices, one for each of several blocks.
struct Slices {
  int blocks_per_row = 1;
  int slice_cols = 0;  // of each slice but the last, which may be shorter
};

namespace forward {

// A logical warp (a power-of-two part of a warp) holds a row in registers.
struct Warp : Launch {
  int vecs = 1;   // vectors of a row that a lane owns
  int lanes = 1;  // on one row
  Moves moves = Moves::kVectors;
};

// A row of a logical warp, spread over several warps: warp w has vector w of each lane. Or one warp
// has all vectors of each lane. The sums are taken in the order of the logical warp.
struct Spread : Launch {
  int lanes = 1;        // of a logical warp, on one row
  int warps = 1;        // on the same rows
  int thread_vecs = 1;  // vectors of a row that a thread owns; follows from the lanes
};

// A block holds a row in registers.
struct Block : Launch {
  int vecs = 3;
  Moves moves = Moves::kVectors;
  bool early = false;  // weight and bias are loaded with the row
};

// Persistent blocks with warps by role and a ring of slots in shared memory (forward/ring.h).
struct Ring : Launch {
  int blocks_per_row = 1;
  int groups = 0;          // of vectors of a row that a block has
  int last_of_block = 0;   // vectors of a block's last group
  int last_of_worker = 0;  // vectors of a worker's part of it
  int slots = 0;           // of the ring, each with a group
  bool is_long = false;    // most of weight and bias lie in registers
};

// Rows of any length: the sums of chunks, their combination, then a second read of the row.
struct Stream : Launch {
  int width = 1;  // elements that a thread moves at once: a whole vector, or one
  Slices chunks;
  int64_t totals_offset = 0;  // in the workspace: mean and rstd of every row
};

using Plan = std::variant<Warp, Spread, Block, Ring, Stream>;

}  // namespace forward

namespace backward {

// The dweight and dbias of persistent blocks, [dweight, dbias][count][cols] of the arithmetic's
// type in the workspace, which a second kernel adds up. With a count of one the first kernel
// writes dweight and dbias themselves.
struct PartialSums {
  int count = 1;
  int64_t offset = 0;
  bool starts_early = false;  // the second kernel starts before the first has ended
};

// The parts of groups of rows. Set s of the `sets` has the rows from s * rows / sets up to those of
// the next set. The sums over its rows of one group are a part, and s + group is the number of that
// part among the partial sums, so that the parts of a group follow each other.
struct GroupParts {
  PartialSums partials{0, 0, false};  // [dscale, dshift, dgate][parts][cols], of the arithmetic's
                                      // type; without a gate the first two, for a gate alone dgate
  int64_t sums_offset = 0;            // of [dscale, dshift][groups][cols], for dweight and dbias
  int sets = 0;  // blocks, or sets of blocks that share rows, over which rows are spread
};

// A logical warp holds a row in registers.
struct Warp : Launch {
  int width = 1;
  int vecs = 2;
  int lanes = 1;
  // After this many rows a logical warp adds its sums to second sums in shared memory; 0: all of
  // its rows are one chain.
  int chain_rows = 0;
  int second_sums_offset = 0;
  PartialSums partials;
  GroupParts parts;  // of a modulated norm, in place of partials
};

// Blocks whose teams have one row each and keep nothing for a next one.
struct OneRowATeam : Launch {
  int width = 1;
  int vecs = 2;
  int team_threads = 1;   // on one row: a logical warp's lanes, or whole warps
  bool by_lanes = false;  // the team is a logical warp
};

// Few rows: blocks on rows compute dx, and blocks on columns beside them dweight and dbias, in one
// launch and without partial sums.
struct FewRows : OneRowATeam {
  // Teams that share a row: each computes a part of the elements that each thread of one team would
  // own.
  int sharers = 1;
  int64_t column_blocks = 0;  // of the launch's blocks, those on columns
};

// Rows that each have a modulation of their own: no sums over rows.
struct Rows : OneRowATeam {};

// Rows or slices of them in persistent blocks.
struct Persistent : Launch {
  int width = 1;
  int vecs = 2;
  int team_threads = kWarpThreads;  // on one row
  int teams = 1;                    // rows that a block works on at once
  int stage_cols = 0;               // columns of a row or slice that a stage has room for
  bool bulk = false;                // rows come to shared memory by Hopper's bulk copies
  int stages = 0;                   // bulk: rows or slices that a team keeps in flight
  bool stays_in_l2 = false;         // bulk: x and dy stay in L2 as other data does
  PartialSums partials;
};

// Each block has whole rows.
struct Block : Persistent {};

// Each block has whole rows, of one group after the other.
struct Group : Persistent {
  GroupParts parts;
  int sums_offset = 0;  // in shared memory: where the teams of a block add up their sums
};

// Several blocks share a row and meet in global memory.
struct Split : Persistent {
  Slices slices;
  int lag = 1;                // rows between publishing a row's sums and collecting them
  bool has_collector = true;  // a warp beside the team collects sums; else the team's first does
};

// Rows of any length: the sums of chunks, their combination, then a second read of the row.
struct Stream : Launch {
  int width = 1;
  Slices chunks;
  int64_t totals_offset = 0;  // in the workspace: the two means of every row
  PartialSums partials;
  GroupParts parts;  // of a modulated norm, in place of partials
};

using Plan = std::variant<Warp, FewRows, Block, Group, Rows, Split, Stream>;

// The gradient of a gate: blocks on some columns of a range of rows.
struct Gate : Launch {
  int width = 1;
  int chunks = 1;  // blocks side by side on one row
  GroupParts parts;
};

}  // namespace backward

// The plan of a problem of at least one row and one column, of types that have kernels
// (has_kernels), with `aligned` only where the columns allow it. Both throw std::invalid_argument,
// with a message of one sentence, if the forced parts cannot run the problem.
forward::Plan make_forward_plan(const Problem& problem, const Device& device);
// Whether what forward reads and writes once stays in L2 as other data does (ForwardParams).
bool stays_in_l2(const Problem& problem);
backward::Plan make_backward_plan(const Problem& problem, const Device& device);

// The plan of a problem with `gated`, if one launch can compute it. Otherwise there is none, and
// the norm and its gate take a launch each.
std::optional<backward::Plan> make_gated_plan(const Problem& problem, const Device& device);

// The plan of a gate's gradient alone: of the problem it reads rows, cols, x, aligned,
// needs_dparams, needs_column_grads and group_rows. No part of it can be forced.
backward::Gate make_gate_plan(const Problem& problem, const Device& device);

template <typename Plan>
const Launch& launch_of(const Plan& plan) {
  return std::visit([](const auto& strategy) -> const Launch& { return strategy; }, plan);
}

// Forces parts of every later plan, for tests and tuning; process-wide, until the next call.
// `options` are words such as "strategy=split stages=3", each at most once:
//   strategy        warp, block, stream; forward: spread, ring; backward: few_rows,
//                   split, group, rows
//   vecs            vectors of a row that a thread owns
//   teams           backward: rows that a block works on at once
//   bulk            backward: 1 or 0, whether rows come to shared memory by bulk copies
//   stages          backward: rows or slices that a team keeps in flight in shared memory
//   lag             backward: rows between publishing a row's sums and collecting them
//   blocks_per_row  of rows by ring and split
// What is not forced is planned as always. If no strategy is forced, the plan has the first
// strategy of the ladder that can have all that is forced. Unless few_rows is forced, backward
// takes it only for as few rows as it is made for; warp and block force the persistent kernels for
// any number of rows. Throws std::invalid_argument, with a message of one sentence, for a word that
// is unknown or repeated, or whose value is out of range. An empty text or none forces nothing.
void force_plan(std::optional<std::string> options);

const char* name_of(DataType type);

// The plan as a JSON object, for tests, error messages and `python -m fused_layernorm`.
std::string describe(const forward::Plan& plan);
std::string describe(const backward::Plan& plan);
std::string describe(const backward::Gate& plan);

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// The strategy "stream", for any length: sums of chunks, their combination, a second read.
#pragma once

#include "backward/teams.h"

namespace fused_layernorm {

// Threads of a block, each warp of which writes its part of a row's sums to the workspace.
constexpr int kBackwardStreamThreads = 256;
// Blocks of the first stream kernel that a multiprocessor has registers for.
constexpr int kBackwardStreamBlocks = 2;
constexpr int backward_stream_vecs(int width) { return 16 / width; }
constexpr int backward_stream_cols(int width) {
  return kBackwardStreamThreads * backward_stream_vecs(width) * width;
}
// As in forward/stream.h.
static_assert(backward_stream_cols(1) >= 4096 && backward_stream_cols(8) >= 4096,
              "a launch has enough blocks for all chunks of all rows that a device holds");

namespace backward {

struct Stream : Launch {
  static constexpr const char* kName = "stream";
  int width = 1;
  Slices chunks;
  int64_t totals_offset = 0;  // in the workspace: the two means of every row
  PartialSums partials;
  GroupParts parts;  // of a modulated norm, in place of partials

  static std::optional<Stream> make(const Problem& problem, const Device& device,
                                    const Forced& forced);
  template <typename Json>
  void describe(Json& json) const {
    json.add("width", width).add(chunks).add("totals_offset", totals_offset);
    add_sums(json, *this);
  }
};

// The number of sets of rows that takes the least time; a set has a block for each chunk of the
// columns. Time is counted in rows: blocks run in rounds, a block takes the time of its rows, and
// partial sums take the time of some rows more.
inline int64_t stream_sets(const Problem& problem, const Device& device, int64_t chunks) {
  const BackwardTuning& tuning = tuning_of(device);
  const int64_t room = int64_t{kBackwardStreamBlocks} * device.sms;
  const auto time_of = [&](int64_t sets) {
    const int64_t rounds = ceil_div(sets * chunks, room);
    const int64_t partials = sets > 1 ? tuning.partial_sums_rows * sets * chunks / room : 0;
    return rounds * ceil_div(problem.rows, sets) + partials;
  };
  const int64_t most =
      std::min<int64_t>({problem.rows, device.sms, ceil_div(tuning.stream_rounds * room, chunks)});
  int64_t best = 1, least_time = time_of(1);
  for (int64_t sets = 2; sets <= most; ++sets) {
    const int64_t time = time_of(sets);
    if (time < least_time) {
      best = sets;
      least_time = time;
    }
  }
  return best;
}

inline std::optional<Stream> Stream::make(const Problem& problem, const Device& device,
                                          const Forced& forced) {
  if (!forced.allows(kName, {})) return std::nullopt;
  Stream plan;
  plan.width = width_of(problem);
  plan.threads = kBackwardStreamThreads;
  const int cols = backward_stream_cols(plan.width);
  const int64_t chunks = ceil_div(problem.cols, cols);
  plan.chunks = {static_cast<int>(chunks), cols};
  const int64_t sets = stream_sets(problem, device, chunks);
  plan.blocks = sets * chunks;
  const int64_t sums = int64_t{2} * acc_size_of(problem.x);
  const int64_t parts = problem.rows * chunks * (kBackwardStreamThreads / kWarpThreads);
  plan.totals_offset = round_up(parts * sums, 256);
  plan.workspace_bytes = round_up(plan.totals_offset + problem.rows * sums, 256);
  if (problem.modulated) {
    lay_out_parts(plan.parts, plan, sets, 2, problem, device);
  } else {
    lay_out_partials(plan, sets, problem);
  }
  return plan;
}

}  // namespace backward

BackwardLaunch<backward::Stream> launch_layer_norm_backward;

}  // namespace fused_layernorm

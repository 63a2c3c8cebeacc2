// SPDX-License-Identifier: Apache-2.0
// The strategy "warp": a logical warp (a power-of-two part of a warp) holds a row in registers.
#pragma once

#include "backward/teams.h"

namespace fused_layernorm {

// Whether a launch takes the warp kernel that always has an epilogue, and no residual. (The others
// test for an epilogue at run time, or have none.) It does not exist for single elements, nor where
// y is not of x's type.
constexpr bool backward_warp_activates(int width, bool residual, bool epilogue, bool same_type) {
  return width > 1 && epilogue && !residual && same_type;
}
// A thread keeps its columns' running dweight and dbias in registers, and the next row. It may have
// fewer vectors than its kernel is compiled for.
constexpr int backward_warp_vecs(int width) { return width == 1 ? 8 : 2; }
// The warp kernel adds up dweight and dbias of its warps in shared memory.
constexpr int64_t backward_warp_shared_bytes(int block_threads, int64_t cols, int x_size) {
  return int64_t{2} * (block_threads / kWarpThreads) * cols * acc_size_of(x_size);
}
// Where rows are many, shared memory also has a second sum for each running sum of each thread.
constexpr int64_t backward_warp_second_sums_bytes(int block_threads, int vecs, int width,
                                                  int x_size) {
  return int64_t{2} * vecs * width * block_threads * acc_size_of(x_size);
}
constexpr bool backward_warp_fits(int x_size) {
  for (const int width : {1, vector_width(x_size)}) {
    const int64_t cols = int64_t{kWarpThreads} * backward_warp_vecs(width) * width;
    for (const bool epilogue : {false, true}) {
      const bool activates = backward_warp_activates(width, false, epilogue, true);
      const int threads = backward_warp_threads(x_size, activates);
      if (backward_warp_shared_bytes(threads, cols, x_size) > kLeastSharedMemory) return false;
    }
  }
  return true;
}
static_assert(backward_warp_fits(2) && backward_warp_fits(4) && backward_warp_fits(8),
              "the longest rows of the warp kernel fit the smallest shared memory; the kernel has "
              "no other");

namespace backward {

struct Warp : Launch {
  static constexpr const char* kName = "warp";
  int width = 1;
  int vecs = 2;
  int lanes = 1;
  // After so many rows a logical warp adds its sums to second sums in shared memory; 0: never.
  int chain_rows = 0;
  int second_sums_offset = 0;
  PartialSums partials;
  GroupParts parts;  // of a modulated norm, in place of partials

  static std::optional<Warp> make(const Problem& problem, const Device& device,
                                  const Forced& forced);
  template <typename Json>
  void describe(Json& json) const {
    json.add("width", width).add("vecs", vecs).add("lanes", lanes);
    json.add("chain_rows", chain_rows).add("second_sums_offset", second_sums_offset);
    add_sums(json, *this);
  }
};

inline std::optional<Lanes> lanes_of(const Problem& problem, const Forced& forced) {
  const int width = width_of(problem);
  const int64_t vectors = ceil_div(problem.cols, width);
  const int vecs = backward_warp_vecs(width);
  if (vectors > int64_t{kWarpThreads} * vecs || !forced.allows(Field::kVecs, vecs)) {
    return std::nullopt;
  }
  return Lanes{vecs, static_cast<int>(power_of_two_from(ceil_div(vectors, vecs)))};
}

// Whether logical warps take modulated rows: those so short that whole warps would have idle lanes.
inline bool has_warp_kernel_for_groups(const Problem& problem, const Device& device,
                                       const Forced& forced) {
  const bool is_short =
      problem.cols <= tuning_of(device).group_warp_vectors * vector_width(size_of(problem.x));
  return problem.aligned && problem.x != DataType::kFloat64 && !problem.gated &&
         (is_short || forced.strategy == Warp::kName);
}

// Lays out second sums where a logical warp has more than one chain and memory has room.
inline void lay_out_second_sums(Warp& plan, const Problem& problem, const Device& device) {
  int64_t rows = ceil_div(problem.rows, plan.blocks);
  if (problem.modulated) rows = std::min(rows, problem.group_rows);
  rows = ceil_div(rows, plan.threads / plan.lanes);
  const BackwardTuning& tuning = tuning_of(device);
  const int64_t chain_rows = std::clamp<int64_t>(
      ceil_div(rows, tuning.chains), tuning.fewest_rows_of_chain, tuning.most_rows_of_chain);
  const int64_t offset = round_up(plan.shared_bytes, kVectorBytes);
  const int64_t bytes = offset + backward_warp_second_sums_bytes(plan.threads, plan.vecs,
                                                                 plan.width, size_of(problem.x));
  if (!problem.needs_dparams || rows <= chain_rows || bytes > room_of(device)) return;
  plan.chain_rows = static_cast<int>(chain_rows);
  plan.second_sums_offset = static_cast<int>(offset);
  plan.shared_bytes = static_cast<int>(bytes);
}

inline std::optional<Warp> Warp::make(const Problem& problem, const Device& device,
                                      const Forced& forced) {
  if (!forced.allows(kName, {Field::kVecs})) return std::nullopt;
  const bool takes_groups =
      !is_of_rows(problem) && has_warp_kernel_for_groups(problem, device, forced);
  if (problem.modulated && !takes_groups) return std::nullopt;
  const auto lanes = lanes_of(problem, forced);
  if (!lanes) return std::nullopt;
  Warp plan;
  plan.width = width_of(problem);
  plan.vecs = lanes->vecs;
  plan.lanes = lanes->lanes;
  const int x_size = size_of(problem.x);
  plan.threads = backward_warp_threads(
      x_size, backward_warp_activates(plan.width, problem.residual, problem.has_epilogue,
                                      problem.x == problem.y));
  plan.blocks = persistent_sets(problem, device, 1, plan.threads / plan.lanes);
  plan.shared_bytes =
      static_cast<int>(backward_warp_shared_bytes(plan.threads, problem.cols, x_size));
  lay_out_second_sums(plan, problem, device);
  if (problem.modulated) {
    lay_out_parts(plan.parts, plan, plan.blocks, 2, problem, device);
  } else {
    lay_out_partials(plan, plan.blocks, problem);
  }
  return plan;
}

}  // namespace backward

BackwardLaunch<backward::Warp> launch_layer_norm_backward;

}  // namespace fused_layernorm

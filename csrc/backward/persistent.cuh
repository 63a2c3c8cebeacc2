// SPDX-License-Identifier: Apache-2.0
// What backward's persistent blocks share, of whole rows (layernorm_kernel.cu), of groups of rows
// (backward/group.cu) and of slices of rows (backward/split.cu): how x and dy come, and the
// gradients of a thread's share of a row.
#pragma once

#include "backward/running_param_grads.cuh"
#include "backward/teams.h"
#include "device/async.cuh"
#include "device/bulk.cuh"
#include "device/slices.cuh"
#include "norm/row_gradient.cuh"

namespace fused_layernorm {

// The shared memory of a block whose rows come by bulk copies: weight, and bias where an activation
// reads it, or with a modulation the combined weight and the gate; then each team's x of all stages
// and dy of all stages. A parameter, and a stage of x or dy, has room for `stage_cols` columns.
template <typename N, int kWidth>
struct BackwardRing {
  using X = typename N::X;
  using Y = typename N::Y;
  using W = typename N::W;
  using Weight = std::conditional_t<N::Affine::kModulates, typename N::Acc, W>;
  static constexpr int kStageBytes = static_cast<int>(sizeof(X) + sizeof(Y));  // of a column

  Weight* weight;
  Weight* gate;
  W* bias;
  X* x;                     // this team's
  Y* dy;                    // this team's
  Pair<float>* statistics;  // mean and rstd of the rows in this team's stages
  uint64_t* full;           // this team's barriers, one a stage
  int stage_cols, stages;
  const backward::Persistent& plan;  // among the kernel's arguments, so it takes no registers

  // A stage's barrier waits for the bulk copies and for the statistics.
  static constexpr int kArrivals = 2;

  FUSED_DEVICE BackwardRing(unsigned char* shared, Pair<float>* all_statistics, uint64_t* barriers,
                            const backward::Persistent& its_plan, int team, bool has_bias)
      : statistics(all_statistics + team * kMostStages),
        full(barriers + team * kMostStages),
        stage_cols(its_plan.stage_cols),
        stages(its_plan.stages),
        plan(its_plan) {
    weight = reinterpret_cast<Weight*>(shared);
    gate = weight + stage_cols;
    bias = reinterpret_cast<W*>(weight + stage_cols);
    const int param_bytes = static_cast<int>((N::Prologue::kGated ? 2 : 1) * sizeof(Weight) +
                                             (has_bias ? sizeof(W) : 0));
    const int params = (param_bytes * stage_cols + 15) / 16 * 16;
    const int ring = stage_cols * stages;
    auto* rows = shared + params + size_t(team) * ring * kStageBytes;
    x = reinterpret_cast<X*>(rows);
    dy = reinterpret_cast<Y*>(rows + size_t(ring) * sizeof(X));
  }

  // The bytes between `row` and the multiple of 16 bytes at or before it. Bulk copies begin and end
  // at such multiples, and bring up to 15 bytes more, which never lie outside an allocation: these
  // begin and end at larger powers of two.
  template <typename V>
  static FUSED_DEVICE uint32_t skipped(const V* row) {
    return kWidth > 1 ? 0 : static_cast<uint32_t>(reinterpret_cast<uintptr_t>(row)) % 16;
  }
  template <typename V>
  static FUSED_DEVICE uint32_t copied(const V* row, int cols) {
    const uint32_t bytes = skipped(row) + cols * static_cast<uint32_t>(sizeof(V));
    return kWidth > 1 ? bytes : (bytes + 15) / 16 * 16;
  }
  template <typename V>
  static FUSED_DEVICE const V* before(const V* row, uint32_t bytes) {
    return reinterpret_cast<const V*>(reinterpret_cast<const char*>(row) - bytes);
  }

  // Starts the copies of a row to a stage that no thread reads any more. One thread of the team
  // calls, after a barrier that all threads of the team have reached once they had used what they
  // read there: their loads are then over, and the fence orders the copies after them.
  FUSED_DEVICE void fill(const BackwardParams& p, int first_col, int cols, int stage, int64_t row,
                         bool reads_x) const {
    const X* x_row = x_row_of<N>(p, row, first_col);
    const Y* dy_row = dy_row_of<N>(p, row, first_col);
    const uint32_t x_bytes = reads_x ? copied(x_row, cols) : 0;
    const uint32_t dy_bytes = copied(dy_row, cols);
    fence_before_bulk_load();
    barrier_expect(full + stage, x_bytes + dy_bytes);
    if (!p.is_rms) {
      copy_vector<1>(&statistics[stage].first, static_cast<const float*>(p.mean) + row);
    }
    copy_vector<1>(&statistics[stage].second, static_cast<const float*>(p.rstd) + row);
    barrier_arrive_with_copies(full + stage);
    const bool stays = plan.stays_in_l2;
    if (reads_x) {
      bulk_load(x + stage * stage_cols, before(x_row, skipped(x_row)), x_bytes, full + stage,
                stays);
    }
    bulk_load(dy + stage * stage_cols, before(dy_row, skipped(dy_row)), dy_bytes, full + stage,
              stays);
  }

  // mean and rstd of the row in a stage.
  FUSED_DEVICE Pair<float> statistics_of(int stage) const {
    return {statistics[stage].first, statistics[stage].second};
  }

  // Sets to zero the columns that no copy writes, in all stages, so that a thread's missing vectors
  // add nothing to its sums. All threads of the team call, and a barrier must follow.
  FUSED_DEVICE void clear_behind(int cols, const BlockTeam& team) const {
    for (int stage = 0; stage < stages; ++stage) {
      const int first = stage * stage_cols;
      for (int col = cols + team.thread; col < stage_cols; col += team.threads) {
        x[first + col] = from_acc<X>(0.0f);
        dy[first + col] = from_acc<Y>(0.0f);
      }
    }
  }

  // Initializes the team's barriers, and the means of RMSNorm, which no copy writes. One thread of
  // the team calls, and __syncthreads() must follow.
  FUSED_DEVICE void init(const BackwardParams& p) const {
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
      barrier_init(full + i, kArrivals);
      if (p.is_rms) statistics[i].first = 0;
    }
    barrier_init_fence();
  }
};

// Stages of all teams of a block.
constexpr int kAllStages = kMostTeams * kMostStages;

// The rows of a team, or a slice of each, and the gradients at a thread's share.
// kBulk: the rows come through a ring in shared memory; otherwise straight from global memory.
template <typename N, int kWidth, int kVecs, bool kBulk>
struct PersistentRows {
  using Acc = typename N::Acc;
  using X = typename N::X;
  using Y = typename N::Y;
  using W = typename N::W;
  using Ring = BackwardRing<N, kWidth>;

  const BackwardParams& p;
  const int first_col, cols;
  const bool activates;
  const Ring ring;
  const int vectors;
  const Share<kVecs> share;
  // Weight and bias of the slice. Modulated rows combine the weight with their scale instead.
  const ColumnParameters<W> parameters;
  const bool reads_x;

  FUSED_DEVICE PersistentRows(const BackwardParams& params, const backward::Persistent& plan,
                              int from, int count, const BlockTeam& team, int team_index,
                              unsigned char* shared, Pair<float>* stage_statistics,
                              uint64_t* barriers)
      : p(params),
        first_col(from),
        cols(count),
        activates(N::Epilogue::kMayActivate && p.has_epilogue),
        ring(shared, stage_statistics, barriers, plan, team_index, activates),
        vectors(cols / kWidth),
        share{team.thread, team.threads, vectors},
        parameters(parameters_of<N>(p, first_col)),
        reads_x(N::Affine::kModulates || needs_x(p)) {}

  // With a ring, copies the parameters to shared memory and prepares the ring, which one thread of
  // each team fills by fill_first(). All threads of the block call, also those `in_team` = false.
  FUSED_DEVICE void start(const BlockTeam& team, bool in_team, const auto& fill_first) const {
    if constexpr (kBulk) {
      if constexpr (!N::Affine::kModulates) {
        const int room = ring.stage_cols / kWidth;
        copy_parameter<kWidth>(ring.weight, parameters.factor, vectors, room);
        if (activates) copy_parameter<kWidth>(ring.bias, parameters.summand, vectors, room);
      }
      if (kWidth > 1 && in_team) ring.clear_behind(cols, team);
      const bool fills = team.thread == 0 && in_team;
      if (fills) ring.init(p);
      __syncthreads();
      if (fills) fill_first();
    }
  }
  FUSED_DEVICE void start(const BlockTeam& team, bool in_team, const SliceWork& work) const {
    start(team, in_team, [&] {
#pragma unroll 1
      for (int i = 0; i < ring.stages && i < work.rows; ++i) fill(i, work.row(i));
    });
  }

  // Starts the copies of a row to a stage that no thread reads any more (BackwardRing::fill).
  FUSED_DEVICE void fill(int stage, int64_t row) const {
    ring.fill(p, first_col, cols, stage, row, reads_x);
  }
  // In iteration i: refills the stage of the row of `held` iterations ago, which nobody reads.
  FUSED_DEVICE void refill(const BlockTeam& team, const SliceWork& work, const RingPosition& at,
                           int i, int held) const {
    if (kBulk && team.thread == 0 && i >= held) {
      const int next = i - held + ring.stages;
      if (next < work.rows) fill(at.stage_of(held, ring.stages), work.row(next));
    }
  }
  FUSED_DEVICE void wait(const RingPosition& at) const {
    if constexpr (kBulk) barrier_wait(ring.full + at.stage, at.parity);
  }

  // mean and rstd of a row.
  FUSED_DEVICE Pair<Acc> statistics_of(int stage, int64_t row) const {
    if constexpr (kBulk) {
      return ring.statistics_of(stage);
    } else {
      return load_statistics<Acc>(p, row);
    }
  }

  // Calls use(k, gradients) for this thread's vectors of a row; at missing ones dz and g are zero.
  FUSED_DEVICE void with_gradients(int stage, int64_t row, Pair<Acc> statistics,
                                   const auto& use) const {
    const X* x_row = x_row_of<N>(p, row, first_col);
    const Y* dy_row = dy_row_of<N>(p, row, first_col);
    if constexpr (kBulk) {
      x_row = ring.x + stage * ring.stage_cols + Ring::skipped(x_row) / sizeof(X);
      dy_row = ring.dy + stage * ring.stage_cols + Ring::skipped(dy_row) / sizeof(Y);
    }
    // All loads from global memory come before the first use. In the place of a missing vector the
    // last vector is read, with a dy of zero. A ring of whole vectors has room for missing vectors
    // instead, which clear_behind() has set to zero.
    constexpr int kAtOnce = kBulk ? 1 : kVecs;
    constexpr bool kHasRoom = kBulk && kWidth > 1;
    constexpr Use kUse = kBulk ? Use::kPlain : Use::kReadOnly;
    const int last_col = (share.vectors - 1) * kWidth;
    FUSED_UNROLL for (int from = 0; from < kVecs; from += kAtOnce) {
      Vec<X, kWidth> x[kAtOnce] = {};
      Vec<Y, kWidth> dy[kAtOnce];
      FUSED_UNROLL for (int i = 0; i < kAtOnce; ++i) {
        int col = share.vector(from + i) * kWidth;
        if (!kHasRoom) col = min(col, last_col);
        if (kBulk || reads_x) x[i] = load<kUse, kWidth>(element(x_row, col));
        dy[i] = load<kUse, kWidth>(element(dy_row, col));
        if (!kHasRoom && !share.has(from + i)) dy[i] = {};
      }
      FUSED_UNROLL for (int i = 0; i < kAtOnce; ++i) {
        const int k = from + i;
        int col = share.vector(k) * kWidth;
        if (!kHasRoom) col = min(col, last_col);
        const auto at = parameters_at(row, col);
        use(k, Gradients<N, kWidth>(p, x[i], dy[i], statistics.first, statistics.second, at.weight,
                                    at.bias));
      }
    }
  }

  // The first read of a row: adds its gradients to the two sums over the row that dx needs and to
  // the running sums, and keeps xhat and g (kKeep).
  template <bool kKeep>
  FUSED_DEVICE void add_row(int stage, int64_t row, const Pair<Acc>& statistics, Pair<Acc>& sums,
                            RunningParamGrads<Acc, kWidth, kVecs>& grads,
                            KeptRow<N, kWidth, kVecs>& kept) const {
    with_gradients(stage, row, statistics, [&](int k, const auto& gradients) {
      gradients.add_sums(sums);
      gradients.add_dparams(grads.dweight(k), grads.dbias(k));
      if constexpr (kKeep) kept.keep(k, gradients);
    });
  }

  // The second read of a row: stores dx, from gradients that are computed again. In half precision
  // the store is predicated, because the next vectors would wait for a branch (8192 x 32768
  // bfloat16: 504 us with branches, 487 without; but 128 x 1048576 float32: 533 with branches, 553
  // without). With half-precision dy beside float32 x, branches would make the compiler spill.
  template <bool kBranch = (sizeof(X) > 2 && sizeof(Y) > 2) || kWidth == 1>
  FUSED_DEVICE void store_dx(int stage, const DxRow<N>& dx_row, int64_t row, Pair<Acc> statistics,
                             Pair<Acc> means) const {
    with_gradients(stage, row, statistics, [&](int k, const auto& gradients) {
      if (kBranch && !share.has(k)) return;
      const int col = share.template col<kWidth>(k);
      const auto dx = dx_row.vector(gradients.xhat, gradients.g, means, statistics.second,
                                    dx_row.template added<kWidth>(col));
      store_once_if(share.has(k), element(dx_row.dx, col), dx);
    });
  }

 private:
  // The parameters at the vector of the slice's column `col`.
  FUSED_DEVICE auto parameters_at(int64_t row, int col) const {
    VectorParameters<typename Ring::Weight, W, kWidth> at = {};
    if constexpr (kBulk) {
      at.weight = load<Use::kPlain, kWidth>(ring.weight + col);
      if (activates) at.bias = load<Use::kPlain, kWidth>(ring.bias + col);
    } else if constexpr (N::Affine::kModulates) {
      at.weight =
          combined_weight<N, kWidth>(p, col, scale_of_row<N>(p, row).template load<kWidth>(col));
    } else {
      at.weight = parameters.factor.template load<kWidth>(col);
      if (activates) at.bias = parameters.summand.template load<kWidth>(col);
    }
    return at;
  }
};

}  // namespace fused_layernorm

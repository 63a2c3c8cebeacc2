// SPDX-License-Identifier: Apache-2.0
// Backward of rows whose shift and scale belong to groups of rows: persistent blocks, each with the
// groups in a range of rows, one after the other, and the group's running dscale and dshift in
// registers, and dgate where x was a gated sum. (rows.cu has groups of one row.)
#include "backward/group.h"
#include "backward/persistent.cuh"
#include "base/launch.cuh"
#include "device/pdl.cuh"

namespace fused_layernorm {
namespace {

// The rows of one team in its block's range: every `teams`-th row of each group.
struct TeamRows {
  uint32_t row, group_end;
  const GroupRange& range;
  const int teams, team;

  FUSED_DEVICE TeamRows(const GroupRange& its_range, int all_teams, int team_index)
      : row(its_range.begin + team_index),
        group_end(its_range.end_of_group(its_range.begin)),
        range(its_range),
        teams(all_teams),
        team(team_index) {
    skip_to_own_group();
  }
  FUSED_DEVICE bool is_valid() const { return row < group_end; }
  FUSED_DEVICE void advance() {
    row += teams;
    skip_to_own_group();
  }

 private:
  // Goes on to the next group that has a row for this team.
  FUSED_DEVICE void skip_to_own_group() {
    while (row >= group_end && group_end < range.end) {
      row = group_end + team;
      group_end = range.end_of_group(group_end);
    }
  }
};

template <typename N, int kWidth, int kVecs, bool kBulk>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    layer_norm_backward_group_kernel(const backward::Group plan, const BackwardParams p) {
  using Acc = typename N::Acc;
  using X = typename N::X;
  using W = typename N::W;
  constexpr bool kGated = N::Prologue::kGated;
  // Whether xhat and g of a row stay in registers until its dx, or are computed again.
  constexpr bool kKeep = group_holds_row(kVecs * kWidth <= kKeptColsPerThread, kGated);
  static_assert(kVecs * kWidth <= kBackwardColsPerThread, "a thread has registers for so many");
  static_assert(kBulk || kKeep, "only a ring holds a row for a second read");
  if constexpr (kBulk && !kHasBulk) return;  // Never launched on chips without bulk copies.
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ alignas(16) Pair<Acc> scratch[2][kBackwardScratch];
  __shared__ Pair<float> stage_statistics[kAllStages];
  __shared__ __align__(8) uint64_t barriers[kAllStages];

  const BlockTeam team(plan.team_threads);
  const GroupRange range(p, blockIdx.x, gridDim.x);
  const PersistentRows<N, kWidth, kVecs, kBulk> rows(p, plan, 0, p.cols, team, team.index, shared,
                                                     stage_statistics, barriers);
  const auto& ring = rows.ring;
  const auto& share = rows.share;
  const bool fills = kBulk && team.thread == 0;
  const int first_scratch = team.index * scratch_values(team.warps());

  TeamRows next(range, plan.teams, team.index);  // the row to be copied to the ring next
  rows.start(team, true, [&] {
#pragma unroll 1
    for (int i = 0; i < ring.stages && next.is_valid(); ++i, next.advance()) {
      rows.fill(i, next.row);
    }
  });

  RunningParamGrads<Acc, kWidth, kVecs> grads;
  RunningGateGrad<Acc, kWidth, kVecs> dgate;
  // The barrier that follows a row's last read comes so many iterations after its first read.
  constexpr int kHeld = kKeep ? 0 : 1;
  RingPosition read;
  int i = 0;
  const auto work_on = [&](int64_t row) {
    const DxRow<N> dx_row(p, row, 0);
    KeptRow<N, kWidth, kVecs> kept;
    Vec<X, kWidth> added[kVecs] = {};
    Vec<X, kWidth> input[kVecs] = {};
    constexpr bool kAddedEarly = kKeep || kGated;
    if (kAddedEarly && (kGated || p.dx != nullptr)) dx_row.load_added(added, share);
    if constexpr (kGated) {
      const auto* input_row = static_cast<const X*>(p.input) + p.input_rows(row);
      FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
        if (share.has(k)) {
          input[k] = load<Use::kReadOnly, kWidth>(element(input_row, share.vector(k) * kWidth));
        }
      }
    }
    rows.wait(read);
    const Pair<Acc> statistics = rows.statistics_of(read.stage, row);
    Pair<Acc> sums;
    rows.template add_row<kKeep>(read.stage, row, statistics, sums, grads, kept);
    sums = team_sum(sums, team, scratch[i & 1] + first_scratch);
    // After the barrier in team_sum() no thread reads the row of kHeld iterations ago any more.
    if (fills && i >= kHeld && next.is_valid()) {
      rows.fill(read.stage_of(kHeld, ring.stages), next.row);
      next.advance();
    }
    if (kGated || p.dx != nullptr) {
      const Pair<Acc> means = means_of(p, sums);
      if constexpr (kGated) {
        X* const dinput = static_cast<X*>(p.dinput) + row * p.cols;
        rows.with_gradients(read.stage, row, statistics, [&](int k, const auto& gradients) {
          const int col = share.vector(k) * kWidth;
          Acc dx[kWidth], inputs[kWidth], gate[kWidth];
          dx_row.compute(dx, gradients.xhat, gradients.g, means, statistics.second, added[k]);
          store_once_if(share.has(k) && p.dx != nullptr, element(dx_row.dx, col), round_to<X>(dx));
          unpack(inputs, input[k]);
          unpack(gate, load<Use::kPlain, kWidth>(ring.gate + col));
          FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
            dgate.sums[0][k][j] += dx[j] * inputs[j];
            dx[j] *= gate[j];
          }
          store_once_if(share.has(k) && p.dinput != nullptr, element(dinput, col), round_to<X>(dx));
        });
      } else if constexpr (kKeep) {
        kept.store(dx_row, share, means, statistics.second, added);
      } else {
        rows.template store_dx<false>(read.stage, dx_row, row, statistics, means);
      }
    }
    read.advance(plan.stages);
    ++i;
  };

  const bool wanted = p.dscale || p.dshift || p.dweight || p.dbias || p.dgate;
  uint32_t part = blockIdx.x + range.group_of(range.begin);
  for (uint32_t from = range.begin; from < range.end; ++part) {
    const uint32_t to = range.end_of_group(from);
    __syncthreads();  // No thread reads the previous group's weight or sums any more.
    if constexpr (kBulk) {
      const auto scale = scale_of_row<N>(p, from);
      // The room of missing vectors is filled with the last vector.
      for (int v = threadIdx.x; v < ring.stage_cols / kWidth; v += blockDim.x) {
        const int col = min(v, rows.vectors - 1) * kWidth;
        store(ring.weight + v * kWidth,
              combined_weight<N, kWidth>(p, col, scale.template load<kWidth>(col)));
        if constexpr (kGated) {
          const auto gate =
              row_parameter<W>(p.modulation.gate, p.modulation.gate_rows, from, 0, Absent::kOnes);
          Acc values[kWidth];
          unpack(values, gate.template load<kWidth>(col));
          store(ring.gate + v * kWidth, round_to<Acc>(values));
        }
      }
      __syncthreads();
    }
    for (uint32_t row = from + team.index; row < to; row += plan.teams) work_on(row);
    if (to == range.end) let_next_kernel_start();
    if (wanted) {
      const PartSink<N> sink(p, plan.parts.partials, part);
      const auto leave = [&](const auto& sums, const auto& its_sink) {
        if (plan.teams == 1) {
          sums.store(its_sink, share, 0);
        } else {
          sums.store_sum_of_teams(its_sink, share, 0, team, plan.teams, shared + plan.sums_offset);
        }
      };
      leave(grads, sink);
      grads = {};
      if constexpr (kGated) {
        leave(dgate, PartSink<N>(p, plan.parts.partials, part, /*first=*/2));
        dgate = {};
      }
    }
    from = to;
  }
}

// Chooses the norm of a launch. A gradient beside dx costs registers, so common types also have a
// kernel without it, for rows that come through a ring and whose xhat and g stay in registers.
template <typename T, bool kMayBeBare>
cudaError_t dispatch_group(const BackwardParams& p, const auto& launch) {
  if (p.modulation.gate != nullptr) {
    return launch(NormOf<T, GatedGradient, Identity, MayBeAffineAndModulate>{});
  }
  if constexpr (kMayBeBare && kIsCommon<T>) {
    if (p.dresidual == nullptr) {
      return launch(NormOf<T, NoOtherGradient, Identity, MayBeAffineAndModulate>{});
    }
  }
  return launch(NormOf<T, MayAddGradient, Identity, MayBeAffineAndModulate>{});
}

template <typename N, int kWidth, int kVecs, bool kBulk>
cudaError_t launch_group(const BackwardParams& params, const backward::Group& plan,
                         cudaStream_t stream) {
  constexpr bool kKeep = kVecs * kWidth <= kKeptColsPerThread;
  constexpr bool kHasKernel = N::Prologue::kGated
                                  ? has_gated_kernel(kWidth, sizeof(typename N::X), kBulk, kKeep)
                                  : has_group_kernel(kWidth, sizeof(typename N::X), kBulk, kKeep);
  if constexpr (kHasKernel && !(N::Prologue::kGated && !kSummandIsX<typename N::Types>)) {
    return launch(layer_norm_backward_group_kernel<N, kWidth, kVecs, kBulk>, plan, stream, plan,
                  params);
  } else {
    return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t launch_layer_norm_backward(const BackwardParams& params, const DataTypes& types,
                                       const backward::Group& plan, cudaStream_t stream) {
  const cudaError_t error = dispatch_types_but_float64(types, [&](auto t) {
    using T = decltype(t);
    return dispatch_width<kVectorWidth<T>>(plan.width, [&](auto width) {
      using Vecs = BackwardBlockVecs<width(), sizeof(typename T::X)>;
      return dispatch_vecs(Vecs{}, plan.vecs, [&](auto vecs) {
        return dispatch_bool(plan.bulk, [&](auto bulk) {
          constexpr bool kMayBeBare = bulk() && vecs() * width() <= kKeptColsPerThread;
          return dispatch_group<T, kMayBeBare>(params, [&](auto norm) {
            return launch_group<decltype(norm), width(), vecs(), bulk()>(params, plan, stream);
          });
        });
      });
    });
  });
  return error == cudaSuccess ? launch_sums(params, types, plan, stream) : error;
}

}  // namespace fused_layernorm

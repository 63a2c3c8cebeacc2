// SPDX-License-Identifier: Apache-2.0
// Block per row, with reductions in shared memory.
//
// Forward: one block holds one row in registers. Backward: persistent blocks; each thread owns the
// same columns of all rows of its block, and keeps their dweight and dbias in registers. Of short
// rows a block works on several at once, one for each of its teams. Rows come by bulk copies
// through a ring in shared memory; where there are none (older chips, float64, few rows) from
// global memory.
#include "backward/block.h"
#include "backward/persistent.cuh"
#include "backward/split.h"
#include "base/launch.cuh"
#include "device/pdl.cuh"
#include "forward/block.h"
#include "forward/row.cuh"

namespace fused_layernorm {
namespace {

// ---- Forward

template <bool kEarly>
struct RowBlock : ForwardTeam {
  // Without kEarly the row leaves no registers for parameters that are loaded early.
  static constexpr int kMostEarlyWords = kEarly ? 64 : 0;
  static constexpr Use kEarlyUse = Use::kAhead;  // ahead of the barrier in sum()
  // Eight vectors beside a residual leave no registers for the cache policy.
  template <typename N, int kVecs>
  static constexpr bool kChoosesL2 = kVecs < 8 || !N::Prologue::kMayStore;
  BlockTeam team;

  FUSED_DEVICE int first_piece() const { return team.thread; }
  FUSED_DEVICE int step() const { return team.threads; }
  template <typename Acc>
  FUSED_DEVICE Acc sum(Acc v, int n) const {
    __shared__ alignas(16) Acc scratch[2][kMaxWarps];
    return team_sum(v, team, scratch[n]);
  }

  // If the first elements were loaded after the row, their load would also wait for the stores of
  // residual_out (bfloat16 with a residual: 32768 x 4096 271 us, loaded before the row 260). But
  // eight vectors beside a residual leave no register for a pivot that is loaded before the row.
  template <typename N, int kVecs, bool kRagged>
  static constexpr bool kPivotFirst = kRagged || kVecs < 8 || !N::Prologue::kMayStore;
  template <typename N, int kWidth>
  FUSED_DEVICE auto pivot(const auto& row, const Vec<typename N::X, kWidth>&) const {
    return N::Statistic::template pivot<typename N::X>(row.first_elements(kWidth));
  }

  template <int kPieces, int kVecs, typename Words>
  using Boundaries = BlockBoundaries<
      kPieces, forward_block_bounds(kVecs, ForwardLoad::kHeavy, false).threads / kWarpSize, Words>;
};

template <typename N, int kVecs_, Moves kMoves_, bool kNarrow, bool kEarly_>
struct ForwardBlockGeometry {
  static constexpr bool kEarly = kEarly_;
  static constexpr int kVecs = kVecs_;
  static constexpr Moves kMoves = kMoves_;
  static constexpr ForwardLoad kLoad =
      forward_load(sizeof(typename N::X), sizeof(typename N::W), N::Prologue::kMayStore,
                   N::Epilogue::kMayActivate, kMoves != Moves::kVectors, N::Affine::kModulates);
  static constexpr BlockBounds kBounds =
      kEarly ? kEarlyForwardBounds : forward_block_bounds(kVecs, kLoad, kNarrow);
  static constexpr bool kMayBeEarly =
      kIsBare<N> && kMoves == Moves::kVectors &&
      has_early_forward(kTypeOf<typename N::X>, kTypeOf<typename N::W>, kTypeOf<typename N::Y>,
                        kVecs);
  static_assert(!kEarly || kMayBeEarly, "there is a kernel that loads parameters early");
  // Only eight vectors of a bare row have a kernel for narrow blocks beside that for wide ones.
  static constexpr bool kMayBeNarrow = kLoad == ForwardLoad::kBare && kVecs == 8;
};

template <typename N, typename G>
__global__ void __launch_bounds__(G::kBounds.threads, G::kBounds.blocks)
    layer_norm_forward_block_kernel(const ForwardParams p) {
  forward_row<N, G::kVecs, G::kMoves, G::kEarly, !G::kEarly && G::kMayBeNarrow>(
      p, RowBlock<G::kEarly>(), blockIdx.x);
}

// ---- Backward

// kKeep: xhat and g of a row stay in registers until its dx, or they are computed again.
template <typename N, int kWidth, int kVecs, bool kBulk, bool kKeep>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    layer_norm_backward_block_kernel(const backward::Persistent plan, const BackwardParams p) {
  static_assert(kVecs * kWidth <= (kKeep ? kKeptColsPerThread : kBackwardColsPerThread),
                "a thread has registers for so many columns");
  static_assert(!kBulk || !kIsFloat64<typename N::Types>, "a ring's statistics are float32");
  using Acc = typename N::Acc;
  if constexpr (kBulk && !kHasBulk) return;  // It is never launched on such chips.
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ alignas(16) Pair<Acc> scratch[2][kBackwardScratch];
  __shared__ Pair<float> stage_statistics[kAllStages];
  __shared__ __align__(8) uint64_t barriers[kAllStages];

  const BlockTeam team(plan.team_threads);
  // Every thread belongs to a team, so the bound changes only which registers the compiler takes
  // (32768 x 4096, without and with it: bfloat16 216 us, 214; float16 218, 215).
  const int team_index = min(team.index, plan.teams - 1);
  const SliceWork work(plan.teams, team_index, p.rows, p.cols);
  const PersistentRows<N, kWidth, kVecs, kBulk> rows(p, plan, 0, p.cols, team, team_index, shared,
                                                     stage_statistics, barriers);
  const auto& share = rows.share;
  rows.start(team, team.index < plan.teams, work);

  RunningParamGrads<Acc, kWidth, kVecs> grads;
  const int first_scratch = team_index * scratch_values(team.warps());
  // The barrier that follows a row's last read comes so many iterations after its first read.
  constexpr int kHeld = kKeep ? 0 : 1;
  RingPosition read;
  for (int i = 0; i < work.rows; ++i) {
    const int64_t row = work.row(i);
    KeptRow<N, kWidth, kVecs> kept;
    Vec<typename N::X, kWidth> added[kVecs] = {};
    if constexpr (kKeep && N::Prologue::kMayAdd) {
      if (p.dx != nullptr) DxRow<N>(p, row, 0).load_added(added, share);
    }
    rows.wait(read);
    const Pair<Acc> statistics = rows.statistics_of(read.stage, row);
    Pair<Acc> sums;
    rows.template add_row<kKeep>(read.stage, row, statistics, sums, grads, kept);
    sums = team_sum(sums, team, scratch[i & 1] + first_scratch);
    // After the barrier in team_sum() no thread reads the row of kHeld iterations ago any more.
    rows.refill(team, work, read, i, kHeld);
    if (p.dx != nullptr) {
      const Pair<Acc> means = means_of(p, sums);
      if constexpr (kKeep) {
        kept.store(DxRow<N>(p, row, 0), share, means, statistics.second, added);
      } else {
        // The statistics are read again: there are no registers to keep them.
        const Pair<Acc> again = rows.statistics_of(read.stage, row);
        rows.store_dx(read.stage, DxRow<N>(p, row, 0), row, again, means);
      }
    }
    read.advance(plan.stages);
  }

  if constexpr (kKeep) let_next_kernel_start();
  const ParamGradSink<N> sink(p, plan.partials, work.set);
  if (!sink.wanted()) return;
  if (plan.teams == 1) {
    grads.store(sink, share, 0);
  } else {
    grads.store_sum_of_teams(sink, share, 0, team, plan.teams, shared);
  }
}

// Runs the strategy split's kernel with a single slice, which is the whole row.
cudaError_t launch_as_slices(const BackwardParams& params, const DataTypes& types,
                             const backward::Block& plan, cudaStream_t stream) {
  backward::Split whole;
  static_cast<backward::Persistent&>(whole) = plan;
  whole.slices = {1, params.cols};
  whole.lag = 0;
  whole.has_collector = false;
  return launch_layer_norm_backward(params, types, whole, stream);
}

template <typename T, int kWidth, int kVecs>
cudaError_t launch_backward(const BackwardParams& params, const backward::Block& plan,
                            cudaStream_t stream) {
  constexpr bool kKeep = kVecs * kWidth <= kKeptColsPerThread;
  const auto start = [&](auto norm, auto bulk) {
    const auto kernel =
        layer_norm_backward_block_kernel<decltype(norm), kWidth, kVecs, bulk(), kKeep>;
    return launch(kernel, plan, stream, plan, params);
  };
  if constexpr (kKeep) {
    return dispatch_bool<!kIsFloat64<T>>(plan.bulk, [&](auto bulk) {
      if constexpr (bulk() && kWidth > 1) {
        return dispatch_backward<T>(params, [&](auto norm) { return start(norm, bulk); });
      } else {
        return dispatch_backward_shared<T>(params, [&](auto norm) -> cudaError_t {
          if constexpr (bulk() && !has_ring_kernels(kWidth, sizeof(typename T::X),
                                                    kIsBareBackward<decltype(norm)>)) {
            return cudaErrorInvalidValue;
          } else {
            return start(norm, bulk);
          }
        });
      }
    });
  } else if constexpr (kIsNarrowed<T>) {
    return cudaErrorInvalidValue;
  } else {
    return start(BareBackward<T>{}, std::true_type{});
  }
}

}  // namespace

cudaError_t launch_layer_norm_forward(const ForwardParams& params, const DataTypes& types,
                                      const forward::Block& plan, cudaStream_t stream) {
  return dispatch_types(types, [&](auto t) {
    using T = decltype(t);
    return dispatch_vecs(ForwardBlockVecs{}, plan.vecs, [&](auto vecs) {
      return dispatch_rows<T>(params, plan.moves, [&](auto norm, auto moves) -> cudaError_t {
        if constexpr (!has_block_kernels(vecs(), moves())) {
          return cudaErrorInvalidValue;
        } else {
          using N = decltype(norm);
          using Narrow = ForwardBlockGeometry<N, vecs(), moves(), true, false>;
          return dispatch_bool<Narrow::kMayBeEarly>(plan.early, [&](auto early) {
            const bool narrow = plan.threads <= Narrow::kBounds.threads;
            constexpr bool kMayBeNarrow = Narrow::kMayBeNarrow && !early();
            return dispatch_bool<kMayBeNarrow>(narrow, [&](auto is_narrow) {
              using G = ForwardBlockGeometry<N, vecs(), moves(), is_narrow(), early()>;
              return launch(layer_norm_forward_block_kernel<N, G>, plan, stream, params);
            });
          });
        }
      });
    });
  });
}

cudaError_t launch_layer_norm_backward(const BackwardParams& params, const DataTypes& types,
                                       const backward::Block& plan, cudaStream_t stream) {
  if (plan.as_slices) return launch_as_slices(params, types, plan, stream);
  const cudaError_t error = dispatch_types(types, [&](auto t) {
    using T = decltype(t);
    return dispatch_width<kVectorWidth<T>>(plan.width, [&](auto width) {
      return dispatch_vecs(
          BackwardBlockVecs<width(), sizeof(typename T::X)>{}, plan.vecs,
          [&](auto vecs) { return launch_backward<T, width(), vecs()>(params, plan, stream); });
    });
  });
  return error == cudaSuccess ? launch_param_grad(params, types, plan.partials, stream) : error;
}

}  // namespace fused_layernorm

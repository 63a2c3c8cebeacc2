// SPDX-License-Identifier: Apache-2.0
// Backward of rows that several blocks share: persistent blocks, each with one slice of its rows,
// whose dweight and dbias stay in registers. Blocks publish their sums of a row and collect those
// of the others a row or two later, so that none waits. The collector, a warp of its own, collects
// them, or the first warp does so beside its work, where that is faster.
#include "backward/persistent.cuh"
#include "backward/split.h"
#include "base/launch.cuh"
#include "device/meeting.cuh"
#include "device/pdl.cuh"

namespace fused_layernorm {
namespace {

template <typename N, int kWidth, int kVecs, bool kBulk>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    layer_norm_backward_split_kernel(const backward::Split plan, const BackwardParams p) {
  static_assert(kVecs * kWidth <= kBackwardColsPerThread,
                "a thread has registers for so many columns");
  static_assert(!kIsFloat64<typename N::Types>, "a slot holds two float32");
  if constexpr (kBulk && !kHasBulk) return;  // Never launched on chips without bulk copies.
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ alignas(16) Pair<float> scratch[2][kBackwardScratch];
  __shared__ Pair<float> stage_statistics[kAllStages];
  __shared__ __align__(8) uint64_t barriers[kAllStages];
  __shared__ Pair<float> collected[kMostCollected];

  const BlockTeam team(plan.team_threads);
  const Slices& slices = plan.slices;
  const SliceWork work(slices, p.rows, p.cols);
  const PersistentRows<N, kWidth, kVecs, kBulk> rows(p, plan, work.first_col, work.cols, team, 0,
                                                     shared, stage_statistics, barriers);
  const bool is_collector = team.index > 0;
  auto* slots = static_cast<uint64_t*>(p.workspace);
  rows.start(team, !is_collector, work);

  // Collects the sums of the block's i-th row. One warp calls.
  const auto collect = [&](int i) {
    const CollectedSlots slot(slots + work.row(i) * slices.count, slices.count);
    const Pair<float> sums = slot.sum();
    if (team.lane() == 0) collected[i % kMostCollected] = sums;
  };
  if (is_collector) {
    for (int i = 0; p.dx != nullptr && i < work.rows; ++i) {
      collect(i);
      meet_when_collected(plan.threads);
    }
    return;
  }

  RunningParamGrads<float, kWidth, kVecs> grads;
  // A row's two sums are collected `lag` iterations after they were published. Where a block has
  // whole rows, there is no meeting, and the lag is zero.
  const int lag = plan.lag;
  // The barrier that follows a row's last read comes so many iterations after its first read.
  const int held = 1 + lag;
  RingPosition read;
  for (int i = 0; i < work.rows + lag; ++i) {
    Pair<float> sums;
    if (i < work.rows) {
      const int64_t row = work.row(i);
      rows.wait(read);
      const Pair<float> statistics = rows.statistics_of(read.stage, row);
      rows.with_gradients(read.stage, row, statistics, [&](int k, const auto& gradients) {
        gradients.add_sums(sums);
        gradients.add_dparams(grads.dweight(k), grads.dbias(k));
      });
      sums = team_sum(sums, team, scratch[i & 1]);
      // After the barrier in team_sum() no thread reads the row of `held` iterations ago any more.
      rows.refill(team, work, read, i, held);
      if (lag > 0 && team.thread == 0) {
        publish(slots + row * slices.count + work.slice, sums);
      }
    }
    if (i >= lag && p.dx != nullptr) {
      const int64_t row = work.row(i - lag);
      const int stage = read.stage_of(lag, plan.stages);
      if (lag > 0) {
        if (!plan.has_collector && team.warp() == 0) collect(i - lag);
        meet_when_collected(plan.threads);
        sums = collected[(i - lag) % kMostCollected];
      }
      const Pair<float> means = means_of(p, sums), again = rows.statistics_of(stage, row);
      rows.store_dx(stage, DxRow<N>(p, row, work.first_col), row, again, means);
    }
    read.advance(plan.stages);
  }

  let_next_kernel_start();
  const ParamGradSink<N> sink(p, plan.partials, work.set);
  if (sink.wanted()) grads.store(sink, rows.share, work.first_col);
}

// Without bulk copies there are kernels only for whole vectors of the longest slices.
template <typename N, int kWidth, int kVecs, bool kBulk>
cudaError_t launch_split(const BackwardParams& params, const backward::Split& plan,
                         cudaStream_t stream) {
  constexpr bool kHasKernel =
      !kIsNarrowed<typename N::Types> &&
      (kBulk ? has_ring_kernels(kWidth, sizeof(typename N::X), kIsBareBackward<N>)
             : kWidth > 1 && kVecs >= split_least_vecs(kWidth, false));
  if constexpr (kHasKernel) {
    const auto kernel = layer_norm_backward_split_kernel<N, kWidth, kVecs, kBulk>;
    return launch_meeting(kernel, plan, stream, plan, params);
  } else {
    return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t launch_layer_norm_backward(const BackwardParams& params, const DataTypes& types,
                                       const backward::Split& plan, cudaStream_t stream) {
  const auto& slices = plan.slices;
  if (slices.count > 1) {
    const int64_t slots = params.rows * slices.count * int64_t{sizeof(uint64_t)};
    const cudaError_t cleared = clear_slots(params.workspace, slots, stream);
    if (cleared != cudaSuccess) return cleared;
  }
  const cudaError_t error = dispatch_types_but_float64(types, [&](auto t) {
    using T = decltype(t);
    return dispatch_width<kVectorWidth<T>>(plan.width, [&](auto width) {
      using Vecs = BackwardBlockVecs<width(), sizeof(typename T::X)>;
      return dispatch_vecs(Vecs{}, plan.vecs, [&](auto vecs) {
        return dispatch_bool(plan.bulk, [&](auto bulk) {
          return dispatch_backward_shared<T>(params, [&](auto norm) {
            return launch_split<decltype(norm), width(), vecs(), bulk()>(params, plan, stream);
          });
        });
      });
    });
  });
  return error == cudaSuccess ? launch_param_grad(params, types, plan.partials, stream) : error;
}

}  // namespace fused_layernorm

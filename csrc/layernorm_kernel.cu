// Block per row: shared-memory reductions.
//
// Forward: one block holds one row in registers. Backward: persistent blocks; each thread owns the
// same columns of all rows its block works on, and keeps their dweight and dbias in registers. A
// block works on several rows at once where they are short (groups), and several blocks share a
// row where it is long (slices). Rows come through a ring in shared memory by bulk copies, or, on
// chips and for alignments that have none, straight from global memory.
#include "dispatch.h"
#include "launch.cuh"
#include "rows.cuh"
#include "slices.cuh"

namespace fused_layernorm {
namespace {

struct BlockTeam {
  Group group;

  __device__ __forceinline__ int thread() const { return group.thread; }
  __device__ __forceinline__ int threads() const { return group.threads; }
  // Each of a row's two sums has scratch memory of its own.
  template <typename Acc>
  __device__ __forceinline__ Acc sum(Acc v, int which) const {
    __shared__ Acc scratch[2][kMaxWarps];
    return group_sum(v, group, scratch[which]);
  }
  template <typename T, typename Acc>
  __device__ __forceinline__ Acc pivot(const ForwardRow<T>& row, Acc) const {
    return row.first_element();
  }
};

template <typename T, int kWidth, int kVecs, bool kFused>
__global__ void __launch_bounds__(most_forward_threads(kVecs))
    layer_norm_forward_block_kernel(const ForwardParams p) {
  const BlockTeam team;
  forward_row<T, kWidth, kVecs, kFused>(p, team, blockIdx.x);
}

// Slices of weight (and bias, which only an activation reads), and then, group by group and stage
// by stage, of x and dy.
template <typename T, bool kEpilogue>
struct BackwardRing {
  using X = typename T::X;
  using Y = typename T::Y;
  using W = typename T::W;

  W* weight;
  W* bias;
  X* x;   // this group's
  Y* dy;  // this group's
  uint64_t* full;
  int slice_cols, stages;

  __device__ __forceinline__ BackwardRing(unsigned char* shared, uint64_t* barriers,
                                          const SliceLayout& layout, int group)
      : slice_cols(layout.slice_cols), stages(layout.stages) {
    weight = reinterpret_cast<W*>(shared);
    bias = weight + slice_cols;
    constexpr int kParamBytes = (kEpilogue ? 2 : 1) * static_cast<int>(sizeof(W));
    const int params = (kParamBytes * slice_cols + 15) / 16 * 16;
    const int ring = slice_cols * stages;
    auto* rows = shared + params + size_t(group) * ring * (sizeof(X) + sizeof(Y));
    x = reinterpret_cast<X*>(rows);
    dy = reinterpret_cast<Y*>(rows + size_t(ring) * sizeof(X));
    full = barriers + group * kMaxStages;
  }

  // By one thread of the group, once all have left the stage.
  __device__ __forceinline__ void fill(const BackwardParams& p, const SliceWork& work, int stage,
                                       int64_t row, bool reads_x) const {
    const uint32_t x_bytes = reads_x ? work.cols * sizeof(X) : 0;
    const uint32_t dy_bytes = work.cols * sizeof(Y);
    barrier_expect(full + stage, x_bytes + dy_bytes);
    if (reads_x) {
      bulk_load(x + stage * slice_cols, static_cast<const X*>(p.x) + p.x_rows(row) + work.first_col,
                x_bytes, full + stage);
    }
    bulk_load(dy + stage * slice_cols,
              static_cast<const Y*>(p.dy) + p.dy_rows(row) + work.first_col, dy_bytes,
              full + stage);
  }
};

// What the collecting warp hands on of a row.
template <typename Acc>
struct CollectedRow {
  Acc first_sum, second_sum, mean, rstd;
};

// kKeep: xhat and g stay in registers between the row's sums and its dx; else both are computed
// again from the row.
template <typename T, int kWidth, int kVecs, bool kBulk, bool kKeep, bool kEpilogue>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    layer_norm_backward_block_kernel(const BackwardParams p, const SliceLayout layout) {
  using Acc = typename T::Acc;
  using X = typename T::X;
  using Y = typename T::Y;
  using W = typename T::W;
  if constexpr (kBulk && !kHasBulk) return;  // never launched there
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ Pair<Acc> scratch[2][kMaxGroups][kBackwardThreads / kWarpSize];
  __shared__ CollectedRow<Acc> collected[kCollected];
  __shared__ __align__(8) uint64_t barriers[kMaxGroups * kMaxStages];

  const Group group(layout.threads);
  const SliceWork work(layout, min(group.index, layout.groups - 1), p.rows, p.cols);
  const BackwardRing<T, kEpilogue> ring(shared, barriers, layout,
                                        min(group.index, layout.groups - 1));
  const int vectors = work.cols / kWidth;
  const bool has_weight = p.weight != nullptr, has_bias = kEpilogue && p.bias != nullptr;
  const W* weight = static_cast<const W*>(p.weight) + work.first_col;
  const W* bias = static_cast<const W*>(p.bias) + work.first_col;
  const bool reads_x = needs_x(p);
  auto* slots = static_cast<uint64_t*>(p.workspace);
  // With several blocks a row, its two sums are collected `lag` rows after they were published.
  const int lag = kKeep ? 0 : layout.lag;
  // Iterations from a row's first read to the barrier behind its last.
  const int held = kKeep ? 0 : 1 + lag;
  const Acc inverse_cols = p.inverse_cols.as<Acc>();

  if constexpr (kBulk) {
    for (int col = threadIdx.x; col < work.cols; col += blockDim.x) {
      if (has_weight) ring.weight[col] = weight[col];
      if (has_bias) ring.bias[col] = bias[col];
    }
    if (threadIdx.x == 0) {
      for (int i = 0; i < kMaxGroups * kMaxStages; ++i) barrier_init(barriers + i, 1);
      barrier_init_fence();
    }
    __syncthreads();
    if (group.thread == 0 && group.index < layout.groups) {
      for (int i = 0; i < layout.stages && i < work.rows; ++i) {
        ring.fill(p, work, i, work.row(i), reads_x);
      }
    }
  }

  Acc dweight[kVecs][kWidth] = {};
  Acc dbias[kVecs][kWidth] = {};

  // The gradients at all of this thread's vectors of a row.
  const auto with_gradients = [&](int stage, int64_t row, Acc mean, Acc rstd, const auto& use) {
    [[maybe_unused]] Vec<X, kWidth> loaded_x[kBulk ? 1 : kVecs];
    [[maybe_unused]] Vec<Y, kWidth> loaded_dy[kBulk ? 1 : kVecs];
    if constexpr (!kBulk) {
      // All loads before the first use.
      const X* x_row = static_cast<const X*>(p.x) + p.x_rows(row) + work.first_col;
      const Y* dy_row = static_cast<const Y*>(p.dy) + p.dy_rows(row) + work.first_col;
#pragma unroll
      for (int k = 0; k < kVecs; ++k) {
        const int v = group.thread + k * group.threads;
        loaded_x[k] = {};
        if (v < vectors) {
          if (reads_x) loaded_x[k] = load_again<X, kWidth>(element(x_row, v * kWidth));
          loaded_dy[k] = load_again<Y, kWidth>(element(dy_row, v * kWidth));
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      const int v = group.thread + k * group.threads;
      if (v < vectors) {
        const int col = v * kWidth;
        Vec<X, kWidth> x = {};
        Vec<Y, kWidth> dy;
        if constexpr (kBulk) {
          if (reads_x) x = load_plain<X, kWidth>(ring.x + stage * ring.slice_cols + col);
          dy = load_plain<Y, kWidth>(ring.dy + stage * ring.slice_cols + col);
        } else {
          x = loaded_x[k];
          dy = loaded_dy[k];
        }
        Acc w[kWidth], b[kWidth];
        load_param<kBulk>(w, kBulk ? ring.weight : weight, has_weight, col, 1.0f);
        load_param<kBulk>(b, kBulk ? ring.bias : bias, has_bias, col, 0.0f);
        use(k, col, Gradients<T, kWidth, kEpilogue>(p, x, dy, mean, rstd, w, b));
      }
    }
  };

  if (!kKeep && group.index >= layout.groups) {
    // The collecting warp; there is none where a block has whole rows.
    if constexpr (std::is_same_v<Acc, float>) {
      for (int64_t i = 0; p.dx != nullptr && i < work.rows; ++i) {
        const CollectedSlots slot(slots + work.row(i) * layout.blocks_per_row,
                                  layout.blocks_per_row);
        Pair<float> sum = slot.values[0];
#pragma unroll
        for (int s = 1; s < kSlotsPerLane; ++s) sum += slot.values[s];
        sum = warp_sum(sum);
        const float mean = static_cast<const float*>(p.mean)[work.row(i)];
        const float rstd = static_cast<const float*>(p.rstd)[work.row(i)];
        if (group.lane() == 0) {
          collected[i % kCollected] = {sum.first, sum.second, mean, rstd};
        }
        meet_collector(layout.threads);
      }
    }
    return;
  }

  Acc mean = 0, rstd = 0;
  Acc next_mean = 0, next_rstd = 0;
  if (work.rows > 0) {
    next_mean = static_cast<const Acc*>(p.mean)[work.row(0)];
    next_rstd = static_cast<const Acc*>(p.rstd)[work.row(0)];
  }
  RingPosition first_read, second_read, freed;
  for (int64_t i = 0; i < work.rows + lag; ++i) {
    Acc xhat[kVecs][kWidth], g[kVecs][kWidth];
    Pair<Acc> sums;
    if (i < work.rows) {
      const int64_t row = work.row(i);
      mean = next_mean;
      rstd = next_rstd;
      if (i + 1 < work.rows) {
        next_mean = static_cast<const Acc*>(p.mean)[work.row(i + 1)];
        next_rstd = static_cast<const Acc*>(p.rstd)[work.row(i + 1)];
      }
      if constexpr (kBulk) barrier_wait(ring.full + first_read.stage, first_read.parity);
      with_gradients(first_read.stage, row, mean, rstd, [&](int k, int, const auto& gradients) {
        gradients.add_sums(sums);
        gradients.add_dparams(dweight[k], dbias[k]);
        if constexpr (kKeep) {
#pragma unroll
          for (int j = 0; j < kWidth; ++j) {
            xhat[k][j] = gradients.xhat[j];
            g[k][j] = gradients.g[j];
          }
        }
      });
      first_read.advance(layout.stages);
      sums = group_sum(sums, group, scratch[i & 1][group.index]);
      // Behind that barrier nobody reads the row of `held` iterations ago any more.
      if (kBulk && group.thread == 0 && i >= held) {
        const int64_t refill = i - held + layout.stages;
        if (refill < work.rows) ring.fill(p, work, freed.stage, work.row(refill), reads_x);
        freed.advance(layout.stages);
      }
      if (lag > 0 && group.thread == 0) {
        if constexpr (std::is_same_v<Acc, float>) {
          publish(slots + row * layout.blocks_per_row + work.slice, sums);
        }
      }
    }
    if (i >= lag && p.dx != nullptr) {
      const int64_t row = work.row(i - lag);
      Acc row_mean = mean, row_rstd = rstd;
      if (lag > 0) {
        meet_collector(layout.threads);
        const CollectedRow<Acc>& all = collected[(i - lag) % kCollected];
        sums = {all.first_sum, all.second_sum};
        row_mean = all.mean;
        row_rstd = all.rstd;
      }
      const Pair<Acc> means = {sums.first * inverse_cols, sums.second * inverse_cols};
      const DxRow<X> dx_row(p, row, work.first_col);
      if constexpr (kKeep) {
#pragma unroll
        for (int k = 0; k < kVecs; ++k) {
          const int v = group.thread + k * group.threads;
          if (v < vectors) dx_row.store(v * kWidth, xhat[k], g[k], means, row_rstd);
        }
      } else {
        with_gradients(second_read.stage, row, row_mean, row_rstd,
                       [&](int, int col, const auto& gradients) {
                         dx_row.store(col, gradients.xhat, gradients.g, means, row_rstd);
                       });
      }
    }
    if (i >= lag) second_read.advance(layout.stages);
  }

  const ParamGradSink<T> sink(p, layout.dparams_offset, layout.partials, work.set);
  if (!sink.wanted()) return;
  if (layout.groups == 1) {
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      const int v = group.thread + k * group.threads;
      if (v < vectors) sink.store(work.first_col + v * kWidth, dweight[k], dbias[k]);
    }
    return;
  }
  // The sums over the groups, in order, in the memory of the ring that nobody needs any more:
  // [dweight, dbias][group][place in a thread][thread]. The pitch spreads neighbouring columns,
  // which are neighbouring places of one thread, over the banks.
  constexpr int kPlaces = kVecs * kWidth;
  const int pitch = group.threads + kGroupSumsPadding;
  Acc* dweight_sums = reinterpret_cast<Acc*>(shared);
  Acc* dbias_sums = dweight_sums + layout.groups * kPlaces * pitch;
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kVecs; ++k) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const int at = (group.index * kPlaces + k * kWidth + j) * pitch + group.thread;
      dweight_sums[at] = dweight[k][j];
      dbias_sums[at] = dbias[k][j];
    }
  }
  __syncthreads();
  for (int col = threadIdx.x; col < work.cols; col += blockDim.x) {
    const int v = col / kWidth;
    const int k = v / group.threads;
    const int at = (k * kWidth + col % kWidth) * pitch + v - k * group.threads;
    Acc dw[1] = {dweight_sums[at]};
    Acc db[1] = {dbias_sums[at]};
    for (int g = 1; g < layout.groups; ++g) {
      dw[0] += dweight_sums[g * kPlaces * pitch + at];
      db[0] += dbias_sums[g * kPlaces * pitch + at];
    }
    sink.store(work.first_col + col, dw, db);
  }
}

template <typename T, int kWidth, int kVecs>
cudaError_t launch_backward(const BackwardParams& params, const Plan& plan, cudaStream_t stream) {
  constexpr bool kMayBulk = kWidth > 1 && !std::is_same_v<typename T::X, double>;
  constexpr bool kMayKeep = kVecs * kWidth <= kKeptColsPerThread;
  const SliceLayout layout(plan);
  const int threads = plan.threads * plan.groups + (plan.blocks_per_row > 1 ? kWarpSize : 0);
  if (plan.blocks_per_row > 1) {
    const size_t slots = size_t(params.rows) * plan.blocks_per_row * sizeof(uint64_t);
    const cudaError_t error = cudaMemsetAsync(params.workspace, 0xff, slots, stream);
    if (error != cudaSuccess) return error;
  }
  return dispatch_bool<kMayBulk>(plan.bulk, [&](auto bulk) {
    return dispatch_bool<kMayKeep>(plan.blocks_per_row == 1, [&](auto keep) {
      return dispatch_bool<true>(params.has_epilogue, [&](auto epilogue) {
        const auto kernel =
            layer_norm_backward_block_kernel<T, kWidth, kVecs, bulk(), keep(), epilogue()>;
        return plan.blocks_per_row > 1 ? launch<true>(kernel, plan, threads, stream, params, layout)
                                       : launch(kernel, plan, threads, stream, params, layout);
      });
    });
  });
}

}  // namespace

cudaError_t launch_layer_norm_forward_block(const ForwardParams& params, const DataTypes& types,
                                            const Plan& plan, cudaStream_t stream) {
  return dispatch_types(types, [&](auto t) {
    using T = decltype(t);
    return dispatch_width<T>(plan.width, [&](auto width) {
      const auto start = [&](auto vecs) {
        return dispatch_bool<true>(is_fused(params), [&](auto fused) {
          const auto kernel = layer_norm_forward_block_kernel<T, width(), vecs(), fused()>;
          return launch(kernel, plan, plan.threads, stream, params);
        });
      };
      if constexpr (width() == 1) {
        return dispatch_vecs<8, 16>(plan.vecs, start);
      } else {
        return dispatch_vecs<3, 4, 5, 8>(plan.vecs, start);
      }
    });
  });
}

cudaError_t launch_layer_norm_backward_block(const BackwardParams& params, const DataTypes& types,
                                             const Plan& plan, cudaStream_t stream) {
  return dispatch_types(types, [&](auto t) {
    using T = decltype(t);
    return dispatch_width<T>(plan.width, [&](auto width) {
      const auto start = [&](auto vecs) {
        return launch_backward<T, width(), vecs()>(params, plan, stream);
      };
      constexpr int kMost = kBackwardColsPerThread / width();
      if constexpr (width() == 1) {
        return dispatch_vecs<8, 16>(plan.vecs, start);
      } else if constexpr (std::is_same_v<typename T::X, double>) {
        return dispatch_vecs<kMost>(plan.vecs, start);
      } else {
        return dispatch_vecs<kMost / 4, kMost / 2, kMost>(plan.vecs, start);
      }
    });
  });
}

}  // namespace fused_layernorm

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

constexpr int kForwardThreads = 1024;
constexpr int kBackwardThreads = 512;

template <typename T, int kWidth, int kVecs>
__global__ void __launch_bounds__(kForwardThreads)
    layer_norm_forward_block_kernel(const ForwardParams p) {
  using Acc = typename T::Acc;
  __shared__ Acc scratch[2][kMaxWarps];
  const Group group;
  const int64_t row = blockIdx.x;
  const int vectors = p.cols / kWidth;
  const Acc inverse_cols = p.inverse_cols.as<Acc>();

  RowShare<T, kWidth, kVecs> share;
  share.load(p, row, group.thread, group.threads, vectors);
  const Acc pivot = first_element<T>(p, row);
  const Acc sum =
      group_sum(share.sum(pivot, group.thread, group.threads, vectors), group, scratch[0]);
  const Acc mean = pivot + sum * inverse_cols;
  const Acc m2 = group_sum(share.squared_deviations(mean, group.thread, group.threads, vectors),
                           group, scratch[1]);
  const Acc rstd = reciprocal_sqrt(m2 * inverse_cols + p.eps.as<Acc>());
  if (group.thread == 0) store_statistics(p, row, mean, rstd);
  finish_row(p, row, share, 0, group.thread, group.threads, vectors, mean, rstd);
}

// Slices of weight and bias, and then, group by group and stage by stage, of x and dy.
template <typename T>
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
    const int params = (2 * slice_cols * static_cast<int>(sizeof(W)) + 15) / 16 * 16;
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
      bulk_load(x + stage * slice_cols,
                static_cast<const X*>(p.x) + p.x_rows(row) + work.first_col, x_bytes, full + stage);
    }
    bulk_load(dy + stage * slice_cols,
              static_cast<const Y*>(p.dy) + p.dy_rows(row) + work.first_col, dy_bytes,
              full + stage);
  }
};

// kKeep: xhat and g stay in registers between the row's sums and its dx; else both are computed
// again from the row.
template <typename T, int kWidth, int kVecs, bool kBulk, bool kKeep>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    layer_norm_backward_block_kernel(const BackwardParams p, const SliceLayout layout) {
  using Acc = typename T::Acc;
  using X = typename T::X;
  using Y = typename T::Y;
  using W = typename T::W;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ Pair<Acc> scratch[2][kMaxGroups][kBackwardThreads / kWarpSize];
  __shared__ Pair<Acc> collected[2];
  __shared__ __align__(8) uint64_t barriers[kMaxGroups * kMaxStages];

  const Group group(layout.threads);
  const SliceWork work(layout, group.index, p.rows, p.cols);
  const BackwardRing<T> ring(shared, barriers, layout, group.index);
  const int vectors = work.cols / kWidth;
  const W* weight = static_cast<const W*>(p.weight);
  const W* bias =
      static_cast<const W*>(p.activation == Activation::kNone ? nullptr : p.bias);
  const bool has_weight = weight != nullptr, has_bias = bias != nullptr;
  const bool reads_x = needs_x(p);
  auto* slots = static_cast<uint64_t*>(p.workspace);
  // With several blocks a row, its two sums are collected one row after they were published.
  const int lag = !kKeep && layout.blocks_per_row > 1 ? 1 : 0;
  // Iterations from a row's first read to the barrier behind its last.
  const int held = kKeep ? 0 : 1 + lag;
  const Acc inverse_cols = p.inverse_cols.as<Acc>();

  if constexpr (kBulk) {
    for (int col = threadIdx.x; col < work.cols; col += blockDim.x) {
      if (has_weight) ring.weight[col] = weight[work.first_col + col];
      if (has_bias) ring.bias[col] = bias[work.first_col + col];
    }
    if (threadIdx.x == 0) {
      for (int i = 0; i < kMaxGroups * kMaxStages; ++i) barrier_init(barriers + i, 1);
      barrier_init_fence();
    }
    __syncthreads();
    if (group.thread == 0) {
      for (int i = 0; i < layout.stages && i < work.rows; ++i) {
        ring.fill(p, work, i, work.row(i), reads_x);
      }
    }
  }

  Acc dweight[kVecs][kWidth] = {};
  Acc dbias[kVecs][kWidth] = {};

  // The gradients at this thread's vector `k` of a row.
  const auto with_gradients = [&](int k, int stage, int64_t x_row, int64_t dy_row, Acc mean,
                                  Acc rstd, const auto& use) {
    const int v = group.thread + k * group.threads;
    if (v >= vectors) return;
    const int col = v * kWidth;
    Vec<X, kWidth> x = {};
    Vec<Y, kWidth> dy;
    Acc w[kWidth], b[kWidth];
    if constexpr (kBulk) {
      // One vector after the other: all at once would need more registers than there are.
      asm volatile("" ::: "memory");
      if (reads_x) x = load_plain<X, kWidth>(ring.x + stage * ring.slice_cols + col);
      dy = load_plain<Y, kWidth>(ring.dy + stage * ring.slice_cols + col);
      load_shared_param(w, ring.weight, col, has_weight, Acc(1));
      load_shared_param(b, ring.bias, col, has_bias, Acc(0));
    } else {
      if (reads_x) x = load_again<X, kWidth>(static_cast<const X*>(p.x) + x_row + col);
      dy = load_again<Y, kWidth>(static_cast<const Y*>(p.dy) + dy_row + col);
      load_param(w, weight, work.first_col + col, Acc(1));
      load_param(b, bias, work.first_col + col, Acc(0));
    }
    use(Gradients<T, kWidth>(p, x, dy, mean, rstd, w, b), work.first_col + col);
  };
  const auto x_start = [&](int64_t row) { return kBulk ? 0 : p.x_rows(row) + work.first_col; };
  const auto dy_start = [&](int64_t row) { return kBulk ? 0 : p.dy_rows(row) + work.first_col; };

  // By the first warp of the block: the two sums of a row, from all its blocks.
  const auto collect = [&](int64_t row, Pair<Acc>& result) {
    if constexpr (std::is_same_v<Acc, float>) {
      const CollectedSlots slot(slots + row * layout.blocks_per_row, layout.blocks_per_row);
      Pair<float> sum = slot.values[0];
#pragma unroll
      for (int i = 1; i < kSlotsPerLane; ++i) sum += slot.values[i];
      sum = warp_sum(sum);
      if (group.lane() == 0) result = sum;
    }
  };

  Acc mean = 0, rstd = 0, last_mean = 0, last_rstd = 0;
  Acc next_mean = 0, next_rstd = 0;
  if (work.rows > 0) {
    next_mean = static_cast<const Acc*>(p.mean)[work.row(0)];
    next_rstd = static_cast<const Acc*>(p.rstd)[work.row(0)];
  }
  RingPosition first_read, second_read, freed;
  for (int64_t i = 0; i < work.rows + lag; ++i) {
    Acc xhat[kVecs][kWidth], g[kVecs][kWidth];
    Pair<Acc> sums = {0, 0};
    last_mean = mean;
    last_rstd = rstd;
    const auto collect_last = [&] {
      if (lag == 1 && i > 0 && p.dx != nullptr && group.warp() == 0) {
        collect(work.row(i - 1), collected[i & 1]);
      }
    };
    if (i < work.rows) {
      const int64_t row = work.row(i);
      mean = next_mean;
      rstd = next_rstd;
      if (i + 1 < work.rows) {
        next_mean = static_cast<const Acc*>(p.mean)[work.row(i + 1)];
        next_rstd = static_cast<const Acc*>(p.rstd)[work.row(i + 1)];
      }
      if constexpr (kBulk) barrier_wait(ring.full + first_read.stage, first_read.parity);
      const int64_t x_row = x_start(row), dy_row = dy_start(row);
#pragma unroll
      for (int k = 0; k < kVecs; ++k) {
        with_gradients(k, first_read.stage, x_row, dy_row, mean, rstd,
                       [&](const Gradients<T, kWidth>& gradients, int) {
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
      }
      first_read.advance(layout.stages);
      sums = group_sum(sums, group, scratch[i & 1][group.index], collect_last);
      // Behind that barrier nobody reads the row of `held` iterations ago any more.
      if (kBulk && group.thread == 0 && i >= held) {
        const int64_t refill = i - held + layout.stages;
        if (refill < work.rows) ring.fill(p, work, freed.stage, work.row(refill), reads_x);
        freed.advance(layout.stages);
      }
      if (lag == 1 && group.thread == 0) {
        if constexpr (std::is_same_v<Acc, float>) {
          publish(slots + row * layout.blocks_per_row + work.slice, sums);
        }
      }
    } else {
      collect_last();
      group.sync();
    }
    if (i >= lag && p.dx != nullptr) {
      const int64_t row = work.row(i - lag);
      const Acc row_mean = lag ? last_mean : mean;
      const Acc row_rstd = lag ? last_rstd : rstd;
      if (lag == 1) sums = collected[i & 1];
      const Pair<Acc> means = {sums.first * inverse_cols, sums.second * inverse_cols};
      const int64_t x_row = x_start(row), dy_row = dy_start(row);
#pragma unroll
      for (int k = 0; k < kVecs; ++k) {
        if constexpr (kKeep) {
          const int v = group.thread + k * group.threads;
          if (v < vectors) {
            store_dx<T>(p, row, work.first_col + v * kWidth, xhat[k], g[k], means, row_rstd);
          }
        } else {
          with_gradients(k, second_read.stage, x_row, dy_row, row_mean, row_rstd,
                         [&](const Gradients<T, kWidth>& gradients, int col) {
                           store_dx<T>(p, row, col, gradients.xhat, gradients.g, means, row_rstd);
                         });
        }
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
  // The groups' sums, in order, in the memory of the ring that nobody needs any more.
  Acc* dweight_sum = reinterpret_cast<Acc*>(shared);
  Acc* dbias_sum = dweight_sum + layout.slice_cols;
  __syncthreads();
  for (int turn = 0; turn < layout.groups; ++turn) {
    if (group.index == turn) {
#pragma unroll
      for (int k = 0; k < kVecs; ++k) {
        const int v = group.thread + k * group.threads;
        if (v < vectors) {
#pragma unroll
          for (int j = 0; j < kWidth; ++j) {
            const int col = v * kWidth + j;
            dweight_sum[col] = turn == 0 ? dweight[k][j] : dweight_sum[col] + dweight[k][j];
            dbias_sum[col] = turn == 0 ? dbias[k][j] : dbias_sum[col] + dbias[k][j];
          }
        }
      }
    }
    __syncthreads();
  }
  for (int col = threadIdx.x; col < work.cols; col += blockDim.x) {
    const Acc dw[1] = {dweight_sum[col]};
    const Acc db[1] = {dbias_sum[col]};
    sink.store(work.first_col + col, dw, db);
  }
}

template <typename T, int kWidth, int kVecs>
cudaError_t launch_backward(const BackwardParams& params, const Plan& plan, cudaStream_t stream) {
  constexpr bool kMayBulk = kWidth > 1 && !std::is_same_v<typename T::X, double>;
  constexpr bool kMayKeep = kVecs * kWidth <= kKeptColsPerThread;
  const SliceLayout layout(plan);
  const int threads = plan.threads * plan.groups;
  if (plan.blocks_per_row > 1) {
    const size_t slots = size_t(params.rows) * plan.blocks_per_row * sizeof(uint64_t);
    const cudaError_t error = cudaMemsetAsync(params.workspace, 0xff, slots, stream);
    if (error != cudaSuccess) return error;
  }
  return dispatch_bool<kMayBulk>(plan.bulk, [&](auto bulk) {
    return dispatch_bool<kMayKeep>(plan.blocks_per_row == 1, [&](auto keep) {
      const auto kernel =
          layer_norm_backward_block_kernel<T, kWidth, kVecs, bulk(), keep()>;
      return plan.blocks_per_row > 1 ? launch<true>(kernel, plan, threads, stream, params, layout)
                                     : launch<false>(kernel, plan, threads, stream, params, layout);
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
        const auto kernel = layer_norm_forward_block_kernel<T, width(), vecs()>;
        return launch(kernel, plan, plan.threads, stream, params);
      };
      if constexpr (width() == 1) {
        return dispatch_vecs<8, 16>(plan.vecs, start);
      } else {
        return dispatch_vecs<2, 4>(plan.vecs, start);
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

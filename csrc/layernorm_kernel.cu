// Block per row: shared-memory reductions.
//
// Forward: one block holds one row in registers. Backward: persistent blocks; each thread owns the
// same columns of all rows its block works on, and keeps their dweight and dbias in registers. A
// block works on several rows at once where they are short (groups), and several blocks share a
// row where it is long (slices). Rows come through a ring in shared memory by bulk copies, or, on
// chips and for alignments that have none, straight from global memory.
#include "dispatch.h"
#include "launch.cuh"
#include "norm/rows.cuh"
#include "device/slices.cuh"

namespace fused_layernorm {
namespace {

struct BlockTeam {
  static constexpr int kMostEarlyWords = 0;  // they are for the row
  // In bfloat16 with GELU: 32768 x 4096 142.0 us, walked 141.1; 16384 x 8192 144.7, 142.7.
  static constexpr bool kWalks = true;
  Group group;

  __device__ __forceinline__ int thread() const { return group.thread; }
  __device__ __forceinline__ int threads() const { return group.threads; }
  // Each of a row's two sums has scratch memory of its own.
  template <typename Acc>
  __device__ __forceinline__ Acc sum(Acc v, int which) const {
    __shared__ alignas(16) Acc scratch[2][kMaxWarps];
    return group_sum(v, group, scratch[which]);
  }

  // Read behind the row, the first element is behind the stores of residual_out, too (bfloat16 with
  // a residual: 32768 x 4096 271 us, before the row 260). Eight vectors beside a residual leave no
  // register for it.
  template <int kVecs, Fusion kFusion>
  static constexpr bool kPivotFirst = kVecs < 8 || kFusion != Fusion::kResidual;

  template <bool kResidual, typename T>
  __device__ __forceinline__ auto pivot(const ForwardRow<T>& row, typename T::X) const {
    return row.template first_element<kResidual>();
  }

  // Between a row's vectors, lane to lane; from warp to warp there are seams, closed at the end.
  template <int kVecs, typename Words>
  struct Seams {
    static constexpr int kMost =
        1 + kVecs * (most_forward_threads(kVecs, false, false) / kWarpSize);
    const Group& group;
    Words* lows;  // of each seam the words before it, and those behind it
    Words* highs;
    Words* own;  // of a warp's first and last lane, the place of its words at k = 0

    // Its scratch memory must not be taken again before another barrier of the block.
    __device__ __forceinline__ explicit Seams(const BlockTeam& team) : group(team.group) {
      __shared__ Words scratch[2][kMost];
      lows = scratch[0];
      highs = scratch[1];
      own = group.lane() == 0 ? highs + group.warp() : lows + group.warp() + 1;
    }
    // The last words of the vector before this thread's k-th, which has the words `first` to
    // `last`; of a warp's first lane, any.
    __device__ __forceinline__ Words before(int k, const Words& first, const Words& last) const {
      if (group.lane() == 0 || group.lane() == kWarpSize - 1) {
        own[k * group.warps()] = group.lane() == 0 ? first : last;
      }
      return shuffle(last, group.lane() - 1, kWarpSize);
    }
    __device__ __forceinline__ bool is_at(int) const { return group.lane() == 0; }
    // `store(v, low, high)` for each seam: what is before vector v, and its own beginning.
    template <typename Store>
    __device__ __forceinline__ void close(const Store& store) const {
      __syncthreads();
      const int seam = group.thread;
      if (seam <= kVecs * group.warps()) store(seam * kWarpSize, lows[seam], highs[seam]);
    }
  };
};

// Threads of a block at most, and blocks that a multiprocessor has registers for at least.
template <typename T, int kVecs, Fusion kFusion, bool kShifted, bool kNarrow>
struct ForwardBlock {
  using X = typename T::X;
  static constexpr bool kPlain = kFusion == Fusion::kNone && !kShifted &&
                                 std::is_same_v<X, typename T::W> && !std::is_same_v<X, double>;
  static constexpr bool kEight = kPlain && kVecs == 8;
  static constexpr bool kLean = is_lean(kFusion != Fusion::kNone, kFusion == Fusion::kResidual,
                                        sizeof(X), sizeof(typename T::W));
  static constexpr int kThreads =
      kEight && kNarrow ? kNarrowForwardThreads : most_forward_threads(kVecs, kPlain, kLean);
  static constexpr int kBlocks = kEight && kNarrow                               ? 3
                                 : kEight || kVecs == 5 || (kVecs == 4 && kLean) ? 2
                                                                                 : 1;
};

template <typename T, int kVecs, Fusion kFusion, bool kShifted, bool kNarrow>
__global__ void __launch_bounds__(ForwardBlock<T, kVecs, kFusion, kShifted, kNarrow>::kThreads,
                                  ForwardBlock<T, kVecs, kFusion, kShifted, kNarrow>::kBlocks)
    layer_norm_forward_block_kernel(const ForwardParams p) {
  constexpr bool kForget = ForwardBlock<T, kVecs, kFusion, kShifted, kNarrow>::kEight;
  forward_row<T, kVecs, kFusion, kShifted, kForget>(p, BlockTeam(), blockIdx.x);
}

// Slices of weight (and bias, which only an activation reads), and then, group by group and stage
// by stage, of x and dy, each with room for `stage_cols` columns.
template <typename T, int kWidth>
struct BackwardRing {
  using X = typename T::X;
  using Y = typename T::Y;
  using W = typename T::W;

  W* weight;
  W* bias;
  X* x;                     // this group's
  Y* dy;                    // this group's
  Pair<float>* statistics;  // mean and rstd of this group's stages
  uint64_t* full;
  int stage_cols, stages;

  // Each barrier waits for the bulk copies and for the statistics.
  static constexpr int kArrivals = 2;

  __device__ __forceinline__ BackwardRing(unsigned char* shared, Pair<float>* all_statistics,
                                          uint64_t* barriers, const SliceLayout& layout, int group,
                                          bool has_bias)
      : statistics(all_statistics + group * kMaxStages),
        full(barriers + group * kMaxStages),
        stage_cols(layout.stage_cols),
        stages(layout.stages) {
    weight = reinterpret_cast<W*>(shared);
    bias = weight + stage_cols;
    const int param_bytes = (has_bias ? 2 : 1) * static_cast<int>(sizeof(W));
    const int params = (param_bytes * stage_cols + 15) / 16 * 16;
    const int ring = stage_cols * stages;
    auto* rows = shared + params + size_t(group) * ring * (sizeof(X) + sizeof(Y));
    x = reinterpret_cast<X*>(rows);
    dy = reinterpret_cast<Y*>(rows + size_t(ring) * sizeof(X));
  }

  static __device__ __forceinline__ const X* x_of(const BackwardParams& p, const SliceWork& work,
                                                  int64_t row) {
    return static_cast<const X*>(p.x) + p.x_rows(row) + work.first_col;
  }
  static __device__ __forceinline__ const Y* dy_of(const BackwardParams& p, const SliceWork& work,
                                                   int64_t row) {
    return static_cast<const Y*>(p.dy) + p.dy_rows(row) + work.first_col;
  }

  // Bytes between the multiple of 16 before `row` and `row`. Bulk copies begin and end at such
  // multiples: a row that does not is copied with what is around it, up to 15 bytes on either side,
  // which are never beyond an allocation, as all begin and end at larger powers of two.
  template <typename V>
  static __device__ __forceinline__ uint32_t skipped(const V* row) {
    return kWidth > 1 ? 0 : static_cast<uint32_t>(reinterpret_cast<uintptr_t>(row)) % 16;
  }
  template <typename V>
  static __device__ __forceinline__ uint32_t copied(const V* row, int cols) {
    const uint32_t bytes = skipped(row) + cols * static_cast<uint32_t>(sizeof(V));
    return kWidth > 1 ? bytes : (bytes + 15) / 16 * 16;
  }
  template <typename V>
  static __device__ __forceinline__ const V* before(const V* row, uint32_t bytes) {
    return reinterpret_cast<const V*>(reinterpret_cast<const char*>(row) - bytes);
  }

  // By one thread of the group, once all have left the stage.
  __device__ __forceinline__ void fill(const BackwardParams& p, const SliceWork& work, int stage,
                                       int64_t row, bool reads_x) const {
    const X* x_row = x_of(p, work, row);
    const Y* dy_row = dy_of(p, work, row);
    const uint32_t x_bytes = reads_x ? copied(x_row, work.cols) : 0;
    const uint32_t dy_bytes = copied(dy_row, work.cols);
    barrier_expect(full + stage, x_bytes + dy_bytes);
    float_load(&statistics[stage].first, static_cast<const float*>(p.mean) + row);
    float_load(&statistics[stage].second, static_cast<const float*>(p.rstd) + row);
    barrier_arrive_with_float_loads(full + stage);
    if (reads_x) {
      bulk_load(x + stage * stage_cols, before(x_row, skipped(x_row)), x_bytes, full + stage);
    }
    bulk_load(dy + stage * stage_cols, before(dy_row, skipped(dy_row)), dy_bytes, full + stage);
  }
};

// What blocks of backward work on, and what becomes of xhat and g between a row's sums and its dx.
enum class RowUse {
  kKept,    // whole rows: xhat and g stay in registers
  kTwice,   // whole rows: xhat and g are computed again from the row
  kSliced,  // slices of rows, or whole rows: xhat and g are computed again
};

template <typename T, int kWidth, int kVecs, bool kBulk, RowUse kRowUse, Fusion kFusion>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    layer_norm_backward_block_kernel(const BackwardParams p, const SliceLayout layout) {
  using Acc = typename T::Acc;
  using X = typename T::X;
  using Y = typename T::Y;
  using W = typename T::W;
  constexpr bool kMayActivate = kFusion != Fusion::kNone;
  constexpr bool kKeep = kRowUse == RowUse::kKept, kMaySplit = kRowUse == RowUse::kSliced;
  if constexpr (kBulk && !kHasBulk) return;  // never launched there
  extern __shared__ __align__(16) unsigned char shared[];
  // For all groups, each of which has up to three values more than warps.
  constexpr int kScratch = scratch_values(kBackwardThreads / kWarpSize + 3 * kMaxGroups);
  __shared__ alignas(16) Pair<Acc> scratch[2][kScratch];
  __shared__ Pair<Acc> collected[kCollected];
  __shared__ Pair<float> stage_statistics[kMaxGroups * kMaxStages];
  __shared__ __align__(8) uint64_t barriers[kMaxGroups * kMaxStages];

  const Group group(layout.threads);
  // Slices have no groups. (Nor have rows that are read twice; but told so, the compiler spills:
  // 8192 x 12288 bfloat16 174 us, 181.)
  constexpr bool kMayGroup = kRowUse != RowUse::kSliced || std::is_same_v<X, double>;
  const int groups = kMayGroup ? layout.groups : 1;
  // The warp that collects (kSplit) is beside the last group, and belongs to none.
  const int group_index = kMayGroup ? min(group.index, groups - 1) : 0;
  const SliceWork work(layout, group_index, p.rows, p.cols, std::bool_constant<!kMaySplit>{});
  const bool activates = kMayActivate && p.has_epilogue;
  using Ring = BackwardRing<T, kWidth>;
  const Ring ring(shared, stage_statistics, barriers, layout, group_index, activates);
  const int vectors = work.cols / kWidth;
  const Share<kVecs, false> share = {group.thread, group.threads, vectors};
  const Parameter<W> weight(p.weight, work.first_col, Otherwise::kOnes);
  const Parameter<W> bias(activates ? p.bias : nullptr, work.first_col, Otherwise::kZeros);
  const bool reads_x = needs_x(p);
  auto* slots = static_cast<uint64_t*>(p.workspace);
  // With several blocks a row, its two sums are collected `lag` rows after they were published.
  const int lag = kMaySplit ? layout.lag : 0;
  // Iterations from a row's first read to the barrier behind its last.
  const int held = kKeep ? 0 : 1 + lag;
  const Acc inverse_cols = p.inverse_cols.as<Acc>();

  if constexpr (kBulk) {
    const int room = ring.stage_cols / kWidth;
    copy_parameter<kWidth>(ring.weight, weight, vectors, room);
    if (activates) copy_parameter<kWidth>(ring.bias, bias, vectors, room);
    // What no copy writes is zero, and so are the sums of columns that a thread does not have.
    if (kWidth > 1 && group.index < groups) {
      for (int stage = 0; stage < ring.stages; ++stage) {
        X* x = ring.x + stage * ring.stage_cols;
        Y* dy = ring.dy + stage * ring.stage_cols;
        for (int col = work.cols + group.thread; col < ring.stage_cols; col += group.threads) {
          x[col] = from_acc<X>(0.0f);
          dy[col] = from_acc<Y>(0.0f);
        }
      }
    }
    const bool fills = group.thread == 0 && group.index < groups;
    if (fills) {
#pragma unroll 1
      for (int i = 0; i < layout.stages; ++i) barrier_init(ring.full + i, Ring::kArrivals);
      barrier_init_fence();
    }
    __syncthreads();
    if (fills) {
#pragma unroll 1
      for (int i = 0; i < layout.stages && i < work.rows; ++i) {
        ring.fill(p, work, i, work.row(i), reads_x);
      }
    }
  }

  Acc dweight[kVecs][kWidth] = {};
  Acc dbias[kVecs][kWidth] = {};

  const auto statistics_of = [&](int stage, int64_t row) -> Pair<Acc> {
    if constexpr (kBulk) {
      return {ring.statistics[stage].first, ring.statistics[stage].second};
    } else {
      return {static_cast<const Acc*>(p.mean)[row], static_cast<const Acc*>(p.rstd)[row]};
    }
  };
  // The gradients at all of this thread's vectors of a row; at those it does not have, zero.
  const auto with_gradients = [&](int stage, int64_t row, Pair<Acc> statistics, const auto& use) {
    const X* x_row = Ring::x_of(p, work, row);
    const Y* dy_row = Ring::dy_of(p, work, row);
    if constexpr (kBulk) {
      x_row = ring.x + stage * ring.stage_cols + Ring::skipped(x_row) / sizeof(X);
      dy_row = ring.dy + stage * ring.stage_cols + Ring::skipped(dy_row) / sizeof(Y);
    }
    // From memory, all loads before the first use. A missing vector reads the last one, with a dy
    // of zero; a ring has room for it.
    constexpr int kAtOnce = kBulk ? 1 : kVecs;
    constexpr bool kHasRoom = kBulk && kWidth > 1;
    const int last_col = (vectors - 1) * kWidth;
#pragma unroll
    for (int from = 0; from < kVecs; from += kAtOnce) {
      Vec<X, kWidth> x[kAtOnce] = {};
      Vec<Y, kWidth> dy[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        int col = share.vector(from + i) * kWidth;
        if (!kHasRoom) col = min(col, last_col);
        constexpr Use kUse = kBulk ? Use::kPlain : Use::kAgain;
        if (kBulk || reads_x) x[i] = load<kUse, kWidth>(element(x_row, col));
        dy[i] = load<kUse, kWidth>(element(dy_row, col));
        if (!kHasRoom && !share.has(from + i)) dy[i] = {};
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int k = from + i;
        int col = share.vector(k) * kWidth;
        if (!kHasRoom) col = min(col, last_col);
        Vec<W, kWidth> w, b = {};
        if constexpr (kBulk) {
          w = load<Use::kPlain, kWidth>(ring.weight + col);
          if (activates) b = load<Use::kPlain, kWidth>(ring.bias + col);
        } else {
          w = weight.template load<kWidth>(col);
          if (activates) b = bias.template load<kWidth>(col);
        }
        use(k, Gradients<T, kWidth, kMayActivate>(p, x[i], dy[i], statistics.first,
                                                  statistics.second, w, b));
      }
    }
  };

  if (kMaySplit && group.index >= groups) {
    // The collecting warp.
    if constexpr (std::is_same_v<Acc, float>) {
      for (int i = 0; p.dx != nullptr && i < work.rows; ++i) {
        const CollectedSlots slot(slots + work.row(i) * layout.blocks_per_row,
                                  layout.blocks_per_row);
        Pair<float> sum = slot.values[0];
#pragma unroll
        for (int s = 1; s < kSlotsPerLane; ++s) sum += slot.values[s];
        sum = warp_sum(sum);
        if (group.lane() == 0) collected[i % kCollected] = sum;
        meet_collector(layout.threads);
      }
    }
    return;
  }

  const int first_scratch = group_index * scratch_values(group.warps());
  RingPosition read;
  for (int i = 0; i < work.rows + lag; ++i) {
    Acc xhat[kVecs][kWidth], g[kVecs][kWidth];
    Vec<X, kWidth> added[kVecs] = {};
    Pair<Acc> statistics, sums;
    if (i < work.rows) {
      const int64_t row = work.row(i);
      if constexpr (kKeep && kFusion == Fusion::kResidual) {
        if (p.dx != nullptr) {
          const DxRow<X, true> dx_row(p, row, work.first_col);
#pragma unroll
          for (int k = 0; k < kVecs; ++k) {
            if (share.has(k)) {
              added[k] = dx_row.template added<kWidth>(share.vector(k) * kWidth);
            }
          }
        }
      }
      if constexpr (kBulk) barrier_wait(ring.full + read.stage, read.parity);
      statistics = statistics_of(read.stage, row);
      with_gradients(read.stage, row, statistics, [&](int k, const auto& gradients) {
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
      sums = group_sum(sums, group, scratch[i & 1] + first_scratch);
      // Behind that barrier nobody reads the row of `held` iterations ago any more.
      if (kBulk && group.thread == 0 && i >= held) {
        const int next = i - held + layout.stages;
        if (next < work.rows) {
          ring.fill(p, work, read.stage_of(held, layout.stages), work.row(next), reads_x);
        }
      }
      if (lag > 0 && group.thread == 0) {
        if constexpr (std::is_same_v<Acc, float>) {
          publish(slots + row * layout.blocks_per_row + work.slice, sums);
        }
      }
    }
    if (i >= lag && p.dx != nullptr) {
      const int64_t row = work.row(i - lag);
      const int stage = read.stage_of(lag, layout.stages);
      if (lag > 0) {
        meet_collector(layout.threads);
        sums = collected[(i - lag) % kCollected];
        statistics = statistics_of(stage, row);
      }
      const Pair<Acc> means = {sums.first * inverse_cols, sums.second * inverse_cols};
      const DxRow<X, kFusion == Fusion::kResidual> dx_row(p, row, work.first_col);
      if constexpr (kKeep) {
#pragma unroll
        for (int k = 0; k < kVecs; ++k) {
          if (share.has(k)) {
            dx_row.store(share.vector(k) * kWidth, xhat[k], g[k], means, statistics.second,
                         added[k]);
          }
        }
      } else {
        with_gradients(stage, row, statistics, [&](int k, const auto& gradients) {
          // In half precision no branch holds up the vectors behind (8192 x 32768 bfloat16: 504 us
          // with branches, 487; but 128 x 1048576 float32: 533, 553). Beside float32 x with them
          // the compiler spills.
          constexpr bool kBranch = (sizeof(X) > 2 && sizeof(Y) > 2) || kWidth == 1;
          if (kBranch && !share.has(k)) return;
          const int col = share.template col<kWidth>(k);
          const auto dx = dx_row.vector(gradients.xhat, gradients.g, means, statistics.second,
                                        dx_row.template added<kWidth>(col));
          store_once_if(share.has(k), element(dx_row.dx, col), dx);
        });
      }
    }
    read.advance(layout.stages);
  }

  const ParamGradSink<T> sink(p, layout.dparams_offset, layout.partials, work.set);
  if (!sink.wanted()) return;
  if (groups == 1) {
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      if (share.has(k)) {
        sink.store(work.first_col + share.vector(k) * kWidth, dweight[k], dbias[k]);
      }
    }
    return;
  }
  // The sums over the groups, in order, in the memory of the ring that nobody needs any more, piece
  // by piece of a thread's columns: [dweight, dbias][group][piece][thread].
  constexpr int kFourCols = 16 / static_cast<int>(sizeof(Acc));
  constexpr int kPieceCols = kWidth < kFourCols ? kWidth : kFourCols;
  constexpr int kPiecesOfVec = kWidth / kPieceCols, kPieces = kVecs * kPiecesOfVec;
  using Piece = Vec<Acc, kPieceCols>;
  const int group_pieces = kPieces * group.threads, all_pieces = groups * group_pieces;
  Piece* const dweight_sums = reinterpret_cast<Piece*>(shared) + group.thread;
  Piece* const dbias_sums = dweight_sums + all_pieces;
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kVecs; ++k) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const int piece = k * kPiecesOfVec + j / kPieceCols;
      const int at = group.index * group_pieces + piece * group.threads;
      dweight_sums[at].at[j % kPieceCols] = dweight[k][j];
      dbias_sums[at].at[j % kPieceCols] = dbias[k][j];
    }
  }
  __syncthreads();
  // Each group takes its share of the pieces.
  for (int piece = group.index; piece < kPieces; piece += groups) {
    const int vector = share.vector(piece / kPiecesOfVec);
    if (vector >= vectors) continue;
    Acc dw[kPieceCols] = {}, db[kPieceCols] = {};
#pragma unroll 2
    for (int at = piece * group.threads; at < all_pieces; at += group_pieces) {
      const Piece w = dweight_sums[at], b = dbias_sums[at];
#pragma unroll
      for (int j = 0; j < kPieceCols; ++j) {
        dw[j] += w.at[j];
        db[j] += b.at[j];
      }
    }
    sink.store(work.first_col + vector * kWidth + piece % kPiecesOfVec * kPieceCols, dw, db);
  }
}

template <typename T, int kWidth, int kVecs>
cudaError_t launch_backward(const BackwardParams& params, const Plan& plan, cudaStream_t stream) {
  constexpr bool kMayBulk = !std::is_same_v<typename T::X, double>;
  constexpr bool kMayKeep = kVecs * kWidth <= kKeptColsPerThread;
  const SliceLayout layout(plan);
  const int threads = plan.threads * plan.groups + (plan.blocks_per_row > 1 ? kWarpSize : 0);
  if (plan.blocks_per_row > 1) {
    const size_t slots = size_t(params.rows) * plan.blocks_per_row * sizeof(uint64_t);
    const cudaError_t error = cudaMemsetAsync(params.workspace, 0xff, slots, stream);
    if (error != cudaSuccess) return error;
  }
  return dispatch_bool<kMayBulk>(plan.bulk, [&](auto bulk) {
    return dispatch_bool<true>(plan.blocks_per_row > 1, [&](auto split) {
      const auto start = [&](auto fusion) {
        // Without what slices need the compiler does better (8192 x 16384 bfloat16: 247 us, 241),
        // but not beside a residual (369.0, 368.9).
        constexpr bool kOwn = bulk() && fusion() == Fusion::kNone;
        constexpr RowUse kWhole = kMayKeep ? RowUse::kKept
                                  : kOwn   ? RowUse::kTwice
                                           : RowUse::kSliced;
        constexpr RowUse kRowUse = split() ? RowUse::kSliced : kWhole;
        const auto kernel =
            layer_norm_backward_block_kernel<T, kWidth, kVecs, bulk(), kRowUse, fusion()>;
        return launch<split()>(kernel, plan, threads, stream, params, layout);
      };
      if constexpr (bulk() && kMayKeep && !split() && kWidth > 1) {
        return dispatch_fusion(params, start);
      } else if constexpr (kWidth == 1 && !bulk() && split()) {
        return cudaErrorInvalidValue;
      } else {
        return dispatch_any_fusion(params, start);
      }
    });
  });
}

}  // namespace

cudaError_t launch_layer_norm_forward_block(const ForwardParams& params, const DataTypes& types,
                                            const Plan& plan, cudaStream_t stream) {
  return dispatch_types(types, [&](auto t) {
    using T = decltype(t);
    if (plan.width != kVectorWidth<T>) return cudaErrorInvalidValue;
    return dispatch_vecs<3, 4, 5, 8>(plan.vecs, [&](auto vecs) {
      return dispatch_fusion(params, [&](auto fusion) {
        return dispatch_bool<true>(plan.shifted, [&](auto shifted) {
          using Block = ForwardBlock<T, vecs(), fusion(), shifted(), true>;
          const bool narrow = plan.threads <= Block::kThreads;
          return dispatch_bool<Block::kEight>(narrow, [&](auto n) {
            const auto kernel =
                layer_norm_forward_block_kernel<T, vecs(), fusion(), shifted(), n()>;
            return launch(kernel, plan, plan.threads, stream, params);
          });
        });
      });
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
        return dispatch_vecs<16>(plan.vecs, start);
      } else if constexpr (std::is_same_v<typename T::X, double>) {
        return dispatch_vecs<kMost>(plan.vecs, start);
      } else {
        return dispatch_vecs<kMost / 2, kMost>(plan.vecs, start);
      }
    });
  });
}

}  // namespace fused_layernorm

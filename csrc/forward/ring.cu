// SPDX-License-Identifier: Apache-2.0
// Forward of rows that several blocks share, or that one block cannot keep in its registers, by
// persistent blocks with warps by role (forward/ring.h). Measurers and collector work ahead of the
// workers, as far as the ring holds rows, so these do not wait for the meeting of the blocks.
#include <utility>

#include "base/launch.cuh"
#include "device/async.cuh"
#include "device/bulk.cuh"
#include "device/meeting.cuh"
#include "device/slices.cuh"
#include "forward/ring.h"
#include "norm/norm.cuh"

namespace fused_layernorm {
namespace {

// Warps that need few registers give some to those that need many; four warps at a time call. Only
// code for Hopper alone (sm_90a, see setup.py) can; elsewhere the workers spill some.
FUSED_DEVICE void take_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kLongRingWorkerRegisters));
#endif
}
FUSED_DEVICE void give_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kLongRingOtherRegisters));
#endif
}

// Which of a row's vectors a block and its workers have. The spans of blocks lie side by side.
struct RingColumns {
  int blocks, block, spans;
  int rest, last_of_block, last_of_worker;

  FUSED_DEVICE RingColumns(const forward::Ring& plan, int own_block)
      : blocks(plan.blocks_per_row),
        block(own_block),
        spans(plan.spans),
        rest(plan.rest),
        last_of_block(plan.last_of_block),
        last_of_worker(plan.last_of_worker) {}
  FUSED_DEVICE int last_vectors_of(int its_block) const {
    return min(max(rest - its_block * last_of_block, 0), last_of_block);
  }
  FUSED_DEVICE int last_vectors_of(int its_block, int worker) const {
    return min(max(last_vectors_of(its_block) - worker * last_of_worker, 0), last_of_worker);
  }
  FUSED_DEVICE int vectors_of(int its_block) const {
    return (spans - 1) * kRingSpanVectors + last_vectors_of(its_block);
  }
  // Where a worker's piece of a span begins.
  FUSED_DEVICE int first(int span, int worker) const {
    if (span == spans - 1) {
      return span * blocks * kRingSpanVectors + block * last_of_block + worker * last_of_worker;
    }
    return (span * blocks + block) * kRingSpanVectors + worker * kRingPieceVectors;
  }
};

// What the warps of a block tell each other. All barriers change their phase once a row or, `full`,
// once a round of the ring. A wait names a phase by its parity, so it is right only if the phase
// before has ended when the wait begins, and the next phase cannot end before the wait is over:
//
//   full, by a worker: it waits for every round of its pair's barrier, and both workers of the pair
//     must arrive before the next round can end.
//   full, by a measurer: three measurers take turns at four pairs, so it has not seen the round
//     before itself. It first waits for the row that had the stage to be published: all measurers
//     have measured that row then, each of its units behind a wait for that round. (A stage is
//     refilled only behind the same row's statistics, so this is no longer wait.) The next round
//     begins behind this row's statistics, which need this measurer.
//   full, in a block with a feeder: there is one barrier a stage, for whose rounds all workers and
//     measurers wait, since each measurer has a turn at each span. The next round begins when all
//     workers have left the stage, so behind the row's statistics.
//   left, by the feeder: it waits for every round, and begins the next one itself.
//   measured, published, collected: each is waited for row by row, in order. A ring holds less than
//     kRingRowsKept rows: what a phase of row i + kRingRowsKept needs has come to stages that
//     workers left behind row i + 1, so all have left row i. The same holds for parts, moments and
//     statistics of row i, whose places the later row takes.
//
// A stage is refilled by its worker, by a bulk copy, which is of another proxy than the loads that
// have read the stage before (PTX ISA, "async proxy"). Its own loads are ordered by the fence and
// __syncwarp(); those of the measurers come before their moments, which the statistics that the
// worker has waited for were made of, and the same fence stands between these and the copy. A
// feeder waits until all workers have arrived at `left`, behind their loads and those statistics;
// its own fence stands between these and the copy.
struct RingState {
  // A unit of x has come. With a feeder: a span has come, and, in the second line, it has been
  // left.
  alignas(8) uint64_t full[kRingWorkers / 2][kMostRingStages];
  uint64_t measured[kRingRowsKept];   // all measurers have left their moments
  uint64_t published[kRingRowsKept];  // the block has published its moments
  uint64_t collected[kRingRowsKept];  // the row's statistics are there
  // Columns that each measurer has of a row, and one over these and over the block's columns. (In
  // registers they would take some from the vectors of x.)
  float counts[kRingMeasurers];
  double inverse_counts[kRingMeasurers];
  double inverse_block_cols;
  Moments<double> parts[kRingRowsKept][kRingMeasurers];
  Pair<float> moments[kRingRowsKept];  // of the block, if it has the whole row
  float2 statistics[kRingRowsKept];    // mean and rstd
};
static_assert(sizeof(RingState) <= kRingStateBytes, "the plan leaves room for it");

// Moments in float64, so that those of parts combine without loss; about the pivot, so that one sum
// over the warp does (Chan, Golub and LeVeque, 1979, for many parts at once). `each(f)` calls
// f(columns, moments) for each of a lane's parts.
FUSED_DEVICE Moments<double> combine_at_once(const auto& each, double pivot, double inverse_cols) {
  Pair<double> sums;
  each([&](double cols, const Pair<float>& part) {
    const double delta = part.first - pivot;
    sums.first += cols * delta;
    sums.second += part.second + cols * delta * delta;
  });
  sums = warp_sum(sums);
  const double delta = sums.first * inverse_cols;
  return {pivot + delta, sums.second - sums.first * delta};
}

// The vectors that a lane has of a unit, the pieces of two workers in the last span.
struct UnitShare {
  int lane, first_piece, second_piece;  // vectors of the pieces

  FUSED_DEVICE bool has(int k) const {
    return (k % kRingLaneVecs) * kWarpSize + lane <
           (k < kRingLaneVecs ? first_piece : second_piece);
  }
  FUSED_DEVICE bool has_column(int k, int) const { return has(k); }
  template <typename Acc, int kWidth>
  FUSED_DEVICE Acc count(int k) const {
    return has(k) ? Acc(kWidth) : Acc(0);
  }
  template <int kWidth>
  FUSED_DEVICE int columns() const {
    int count = 0;
    FUSED_UNROLL for (int k = 0; k < 2 * kRingLaneVecs; ++k) count += has(k) ? kWidth : 0;
    return count;
  }
};

// A place in the ring.
struct RingPlace : RingPosition {
  FUSED_DEVICE void skip(int spans, int stages) {
    stage += spans;
    if (stage >= stages) {
      stage -= stages;
      parity ^= 1;
    }
  }
};

// The moments of all that a lane has measured so far of a row (Chan, Golub and LeVeque, 1979).
struct LaneMoments {
  float count = 0;
  Moments<float> sum = {0, 0};

  FUSED_DEVICE void add(float more, const Moments<float>& part) {
    const float share = __fdividef(more, fmaxf(count + more, 1.0f));
    const float delta = part.mean - sum.mean;
    sum.mean = fmaf(delta, share, sum.mean);
    sum.m2 += fmaf(count * share * delta, delta, part.m2);
    count += more;
  }
};

template <typename N, bool kLong>
struct RingBlock {
  using X = typename N::X;
  using W = typename N::W;
  using Y = typename N::Y;
  static constexpr int kWidth = kVectorWidth<typename N::Types>;
  static constexpr int kUnitVecs = 2 * kRingLaneVecs;
  static constexpr int kUnits = kRingWorkers / 2;  // of a span
  static constexpr int kPieceCols = kRingPieceVectors * kWidth;
  static constexpr int kStageCols = kRingSpanVectors * kWidth;
  static constexpr bool kFed = ring_is_fed(sizeof(X), kLong);
  static_assert(!kFed || kRingMeasurers <= kUnits, "each measurer has a turn at each span");

  const forward::Ring& plan;
  const ForwardParams& p;
  const SliceWork work;
  const RingColumns columns;
  RingState& state;
  X* ring;
  const int warp, lane;

  FUSED_DEVICE uint64_t* full(int pair, int stage) const {
    return &state.full[kFed ? 0 : pair][stage];
  }
  FUSED_DEVICE uint64_t* left(int stage) const { return &state.full[1][stage]; }
  // The vectors of a worker's place in a stage. What a feeder brings lies side by side.
  FUSED_DEVICE int place_vectors(bool last_span) const {
    return kFed && last_span ? columns.last_of_worker : kRingPieceVectors;
  }

  // ---- Measurers

  FUSED_DEVICE float pivot_of(const Vec<X, kWidth>& x) const {
    return N::Statistic::template pivot<X>(Pair<float>{to_acc(x.at[0]), to_acc(x.at[1])});
  }

  // Adds the moments of a lane's vectors of one unit.
  FUSED_DEVICE void measure(LaneMoments& moments, float& pivot, bool first, const X* x, int place,
                            const auto& share, const Reciprocal<float>& inverse,
                            float count) const {
    Vec<X, kWidth> values[kUnitVecs];
    FUSED_UNROLL for (int k = 0; k < kUnitVecs; ++k) {
      values[k] = {};
      if (share.has(k)) {
        const int begin =
            kFed ? k / kRingLaneVecs * place + k % kRingLaneVecs * kWarpSize : k * kWarpSize;
        values[k] = load<Use::kPlain, kWidth>(x + (begin + lane) * kWidth);
      }
    }
    if (first) pivot = pivot_of(values[0]);
    moments.add(count, N::Statistic::template measure<1>(
                           p.is_rms, values, share, pivot, [&] { return inverse; },
                           [](float v, int) { return v; }));
  }

  // What a lane has of the last span's unit of this pair of workers.
  FUSED_DEVICE UnitShare last_unit(int pair) const {
    return {lane, columns.last_vectors_of(work.slice, 2 * pair),
            columns.last_vectors_of(work.slice, 2 * pair + 1)};
  }

  FUSED_DEVICE void run_measurer(int measurer, const auto& meeting) {
    const int units = kUnits * columns.spans, whole = units - kUnits;
    constexpr int kWholeCols = kUnitVecs * kWidth;
    float cols = 0;
    for (int unit = measurer; unit < units; unit += kRingMeasurers) {
      cols += unit < whole ? kWholeCols : last_unit(unit - whole).template columns<kWidth>();
    }
    cols = warp_sum(cols);
    if (lane == 0) {
      state.counts[measurer] = cols;
      state.inverse_counts[measurer] = 1.0 / fmaxf(cols, 1.0f);
      if (measurer == 0) {
        state.inverse_block_cols = 1.0 / max(columns.vectors_of(work.slice) * kWidth, 1);
      }
    }
    __syncwarp();
    RingPlace row_begin;
    int left_rows = 0;  // the first rows, to whose stages this measurer's spans have come again
#pragma unroll 1
    for (int i = 0; i < work.rows; ++i) {
      LaneMoments moments;
      float pivot = 0;
      int end = units;  // hidden, so that no number of iterations is kept in a register
      asm volatile("" : "+r"(end));
#pragma unroll 1
      for (int unit = measurer; unit < end; unit += kRingMeasurers) {
        const int span = unit / kUnits, pair = unit % kUnits;
        RingPlace at = row_begin;
        at.skip(span, plan.stages);
        if (!kFed && (i - left_rows) * columns.spans + span >= plan.stages) {
          barrier_wait(&state.published[left_rows % kRingRowsKept], left_rows / kRingRowsKept & 1);
          ++left_rows;
        }
        barrier_wait(full(pair, at.stage), at.parity);
        const int place = place_vectors(unit >= whole);
        const X* x = ring + at.stage * kStageCols + 2 * pair * place * kWidth;
        const bool first = unit == measurer;
        if (unit < whole) {
          measure(moments, pivot, first, x, kRingPieceVectors, Share<kUnitVecs, 0>{},
                  Reciprocal<float>(1.0f / kWholeCols, 0), kWholeCols);
        } else {
          const UnitShare share = last_unit(pair);
          const int count = share.template columns<kWidth>();
          measure(moments, pivot, first, x, place, share, Reciprocal<float>(max(count, 1)), count);
        }
      }
      row_begin.skip(columns.spans, plan.stages);
      const auto of_warp = combine_at_once(
          [&](const auto& use) {
            use(moments.count, Pair<float>{moments.sum.mean, moments.sum.m2});
          },
          __shfl_sync(kFullWarp, moments.sum.mean, 0), state.inverse_counts[measurer]);
      const int kept = i % kRingRowsKept;
      if (lane == 0) {
        state.parts[kept][measurer] = of_warp;
        barrier_arrive(&state.measured[kept]);
      }
      __syncwarp();
      if (i == 0) meeting.wait();
      if (measurer == 0) publish_block(i);
    }
  }

  FUSED_DEVICE void publish_block(int i) {
    const int kept = i % kRingRowsKept;
    barrier_wait(&state.measured[kept], i / kRingRowsKept & 1);
    const auto& parts = state.parts[kept];
    double sum = 0, m2 = parts[0].m2;
    FUSED_UNROLL for (int k = 1; k < kRingMeasurers; ++k) {
      const double delta = parts[k].mean - parts[0].mean, part = state.counts[k] * delta;
      sum += part;
      m2 += parts[k].m2 + part * delta;
    }
    const double delta = sum * state.inverse_block_cols;
    const Pair<float> moments = {float(parts[0].mean + delta), float(m2 - sum * delta)};
    if (lane == 0) {
      if (columns.blocks > 1) {
        publish(static_cast<uint64_t*>(p.workspace) + work.row(i) * columns.blocks + work.slice,
                moments);
      } else {
        state.moments[kept] = moments;
      }
      barrier_arrive(&state.published[kept]);
    }
    __syncwarp();
  }

  // ---- The collector

  FUSED_DEVICE void run_collector(const auto& meeting) {
    meeting.wait();
#pragma unroll 1
    for (int i = 0; i < work.rows; ++i) {
      const int kept = i % kRingRowsKept;
      const int64_t row = work.row(i);
      barrier_wait(&state.published[kept], i / kRingRowsKept & 1);
      Moments<double> moments;
      if (columns.blocks > 1) {
        const CollectedSlots<Polls::kEmpty> slots(
            static_cast<const uint64_t*>(p.workspace) + row * columns.blocks, columns.blocks, lane);
        moments = combine_at_once(
            [&](const auto& use) {
              // Hidden, so that no number is kept in registers from row to row.
              int block = lane;
              asm volatile("" : "+r"(block));
              FUSED_UNROLL for (int k = 0; k < kSlotsPerLane; ++k, block += kWarpSize) {
                const int cols = block < columns.blocks ? columns.vectors_of(block) * kWidth : 0;
                use(cols, slots.values[k]);
              }
            },
            __shfl_sync(kFullWarp, slots.values[0].first, 0), p.inverse_cols.exact);
      } else {
        moments = {state.moments[kept].first, state.moments[kept].second};
      }
      const float mean = moments.mean;
      const float rstd = N::Statistic::rstd(moments.m2, p.inverse_cols.exact, p.eps.exact);
      if (lane == 0) {
        state.statistics[kept] = {mean, rstd};
        barrier_arrive(&state.collected[kept]);
        if (work.slice == 0) store_statistics(p, row, mean, rstd);
      }
      __syncwarp();
    }
  }

  // ---- Workers and the feeder

  FUSED_DEVICE int piece_vectors(int span) const {
    return span < columns.spans - 1 ? kRingPieceVectors : columns.last_vectors_of(work.slice, warp);
  }
  // What is brought at once: a feeder's span, or a worker's piece of it.
  FUSED_DEVICE int bringer() const { return kFed ? 0 : warp; }
  FUSED_DEVICE uint32_t bytes_of(int span) const {
    if constexpr (!kFed) return piece_vectors(span) * kVectorBytes;
    if (span < columns.spans - 1) return kRingStageBytes;
    return columns.last_vectors_of(work.slice) * kVectorBytes;
  }
  // A span that is brought next. All lanes know it, and one acts: it is in uniform registers.
  struct Feed {
    const X* row = nullptr;
    int i = 0, span = 0;
  };
  struct Feeds {
    Feed to_ring, to_l2;
  };
  FUSED_DEVICE void enter_row(Feed& feed) const {
    feed.row = static_cast<const X*>(p.input) + p.input_rows(work.row(feed.i));
  }
  FUSED_DEVICE void advance(Feed& feed) const {
    if (++feed.span == columns.spans) {
      feed.span = 0;
      ++feed.i;
      enter_row(feed);
    }
  }
  FUSED_DEVICE const X* piece_of(const Feed& feed) const {
    return element(feed.row, columns.first(feed.span, bringer()) * kWidth);
  }
  FUSED_DEVICE void bring(const Feed& feed, int stage, uint32_t bytes) const {
    uint64_t* has_come = full(warp / 2, stage);
    barrier_expect(has_come, bytes);
    if (bytes > 0) {
      bulk_load(ring + stage * kStageCols + bringer() * kPieceCols, piece_of(feed), bytes, has_come,
                false);
    }
  }
  FUSED_DEVICE void feed_ring(Feed& feed, int stage, bool acts) const {
    if (feed.i >= work.rows) return;
    if (acts) bring(feed, stage, bytes_of(feed.span));
    advance(feed);
  }
  FUSED_DEVICE void feed_l2(Feed& feed, bool acts) const {
    if (feed.i >= work.rows) return;
    const uint32_t bytes = bytes_of(feed.span);
    const X* x = piece_of(feed);
    if (acts && bytes > 0) bulk_prefetch_to_stay(x, bytes);
    advance(feed);
  }
  // The `n`-th span of the block's work.
  FUSED_DEVICE Feed nth(int n) const {
    Feed feed;
    feed.i = n / columns.spans;
    feed.span = n - feed.i * columns.spans;
    enter_row(feed);
    return feed;
  }
  // Fills the ring: each lane brings one span, to a stage or, behind the last stage, to L2.
  FUSED_DEVICE Feeds start() const {
    static_assert(kMostRingStages + kRingAhead <= kWarpSize);
    const Feed own = nth(lane);
    if (lane < plan.stages + kRingAhead && own.i < work.rows) {
      const uint32_t bytes = bytes_of(own.span);
      if (lane < plan.stages) {
        bring(own, lane, bytes);
      } else if (bytes > 0) {
        bulk_prefetch_to_stay(piece_of(own), bytes);
      }
    }
    __syncwarp();
    return {nth(plan.stages), nth(plan.stages + kRingAhead)};
  }

  FUSED_DEVICE void run_feeder(Feeds feeds, const auto& meeting) const {
    meeting.wait();
    RingPosition next;
#pragma unroll 1
    while (feeds.to_ring.i < work.rows) {
      barrier_wait(left(next.stage), next.parity);
      fence_before_bulk_load();
      feed_ring(feeds.to_ring, next.stage, lane == 0);
      feed_l2(feeds.to_l2, lane == 0);
      __syncwarp();
      next.advance(plan.stages);
    }
  }

  // A lane's weights and biases: the first in registers, the others in its part of shared memory.
  static constexpr LongRing kKept = long_ring(sizeof(W) > sizeof(X));
  static constexpr int kWeights = kLong ? kKept.weights : 0;
  static constexpr int kBiases = kLong ? kKept.biases : 0;

  // body(span) for all spans, each with code of its own if parameters lie in registers.
  FUSED_DEVICE void each_span(const auto& body) const {
    if constexpr (kLong) {
      each_span(body, std::make_integer_sequence<int, kKept.spans>{});
    } else {
#pragma unroll 1
      for (int span = 0; span < columns.spans; ++span) body(span);
    }
  }
  template <int... kSpans>
  FUSED_DEVICE void each_span(const auto& body, std::integer_sequence<int, kSpans...>) const {
    (void)((kSpans < columns.spans && (body(kSpans), true)) && ...);
  }

  FUSED_DEVICE void run_worker(W* shared, Feeds feeds, const auto& meeting) const {
    using WVec = Vec<W, kWidth>;
    constexpr int kStep = kRingWorkers * kWarpSize * kWidth;
    const int vecs = kRingLaneVecs * columns.spans;
    WVec weights[kLong ? kWeights : 1], biases[kLong ? kBiases : 1];
    const int last_lanes = max(columns.last_of_worker - (kRingLaneVecs - 1) * kWarpSize, 0);
    // Where vector `number` of a lane lies in shared memory, behind the `first` in registers.
    int own = lane * kWidth;
    const auto place = [&](int number, int first) {
      const int lanes = number == vecs - 1 ? last_lanes : kWarpSize;
      return (number - first) * kStep + warp * lanes * kWidth + own;
    };
    W* const shared_biases =
        shared +
        (vecs > kWeights ? (vecs - 1 - kWeights) * kStep + kRingWorkers * last_lanes * kWidth : 0);
    const ColumnParameters<W> given(p.weight, p.bias, 0);
    // All vectors of an absent parameter are one, so the copies go through L1: past it, those of
    // all blocks would read one address, one after the other.
    const auto bring_parameter = [&](W* to, const Parameter<W>& from, int col) {
      copy_vector<kWidth, true>(to, element(from.at, col & from.mask));
    };
    each_span([&](int span) {
      FUSED_UNROLL for (int k = 0; k < kRingLaneVecs; ++k) {
        if (k * kWarpSize + lane >= piece_vectors(span)) continue;
        const int col = (columns.first(span, warp) + k * kWarpSize + lane) * kWidth;
        const int number = kRingLaneVecs * span + k;
        if (number < kWeights) {
          weights[min(number, kWeights - 1)] = given.factor.template load<kWidth>(col);
        } else {
          bring_parameter(shared + place(number, kWeights), given.factor, col);
        }
        if (number < kBiases) {
          biases[min(number, kBiases - 1)] = given.summand.template load<kWidth>(col);
        } else {
          bring_parameter(shared_biases + place(number, kBiases), given.summand, col);
        }
      }
    });
    wait_for_copies();
    meeting.wait();
    RingPosition read;
#pragma unroll 1
    for (int i = 0; i < work.rows; ++i) {
      const int kept = i % kRingRowsKept;
      barrier_wait(&state.collected[kept], i / kRingRowsKept & 1);
      const float2 statistics = state.statistics[kept];
      Y* const y = static_cast<Y*>(p.y) + work.row(i) * p.cols;
      // Hidden, so that the compiler does not compute all spans' addresses in advance.
      asm volatile("" : "+r"(own));
      int col = columns.first(0, warp) * kWidth + own;
      asm volatile("" : "+r"(col));
      each_span([&](int span) {
        const bool is_last = span == columns.spans - 1;
        if (is_last) col = columns.first(span, warp) * kWidth + own;
        barrier_wait(full(warp / 2, read.stage), read.parity);
        const X* x = ring + read.stage * kStageCols + warp * place_vectors(is_last) * kWidth + own;
        Vec<X, kWidth> values[kRingLaneVecs];
        FUSED_UNROLL for (int k = 0; k < kRingLaneVecs; ++k) {
          values[k] = load<Use::kPlain, kWidth>(x + k * kWarpSize * kWidth);
        }
        // Once all lanes have read the stage, it is refilled.
        if constexpr (kFed) {
          __syncwarp();
          if (own == 0) barrier_arrive(left(read.stage));
        } else if (feeds.to_ring.i < work.rows) {
          fence_before_bulk_load();
          __syncwarp();
          feed_ring(feeds.to_ring, read.stage, own == 0);
          feed_l2(feeds.to_l2, own == 0);
          __syncwarp();
        }
        read.advance(plan.stages);
        FUSED_UNROLL for (int k = 0; k < kRingLaneVecs; ++k) {
          const int number = kRingLaneVecs * span + k;
          const bool has = own < (piece_vectors(span) - k * kWarpSize) * kWidth;
          // A branch delays the next vector. With a feeder a lane without a vector goes on, reads
          // some parameter, and does not store.
          if (!kFed && !has) continue;
          WVec weight, bias;
          if (number < kWeights) weight = weights[min(number, kWeights - 1)];
          if (number >= kWeights) {
            weight =
                load<Use::kPlain, kWidth>(shared + (!kFed || has ? place(number, kWeights) : 0));
          }
          if (number < kBiases) bias = biases[min(number, kBiases - 1)];
          if (number >= kBiases) {
            bias = load<Use::kPlain, kWidth>(shared_biases +
                                             (!kFed || has ? place(number, kBiases) : 0));
          }
          // In half precision, the compiler must not keep unpacked parameters from row to row.
          hold(weight);
          hold(bias);
          const auto result = N::template finish<typename N::Epilogue, typename N::Affine>(
              p, values[k], statistics.x, statistics.y, weight, bias);
          Y* const to = element(y, col + k * kWarpSize * kWidth);
          if constexpr (kFed) {
            store_once_if(has, to, result);
          } else {
            store_once(to, result);
          }
        }
        col += columns.blocks * kStageCols;
      });
    }
  }
};

template <typename N, bool kLong>
__global__ void __launch_bounds__(ring_threads(ring_is_fed(sizeof(typename N::X), kLong)), 1)
    layer_norm_forward_ring_kernel(const __grid_constant__ forward::Ring plan,
                                   const __grid_constant__ ForwardParams p) {
  if constexpr (!kHasBulk) return;  // Never launched on chips without bulk copies.
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ RingState state;
  constexpr bool kFed = RingBlock<N, kLong>::kFed;
  constexpr int kThreads = ring_threads(kFed);
  const int warp = __shfl_sync(kFullWarp, threadIdx.x / kWarpSize, 0);
  const SliceWork work({plan.blocks_per_row, 0}, p.rows, p.cols);
  RingBlock<N, kLong> block = {plan,  p,
                               work,  RingColumns(plan, work.slice),
                               state, reinterpret_cast<typename N::X*>(shared),
                               warp,  static_cast<int>(threadIdx.x % kWarpSize)};
  // Each warp by one lane: the barriers of several lanes would be made one after the other.
  if (block.lane == 0) {
#pragma unroll 1
    for (int i = warp; i < kRingWorkers / 2 * kMostRingStages; i += kThreads / kWarpSize) {
      barrier_init(&state.full[0][0] + i, !kFed ? 2 : i < kMostRingStages ? 1 : kRingWorkers);
    }
    if (warp < kRingRowsKept) {
      barrier_init(state.measured + warp, kRingMeasurers);
      barrier_init(state.published + warp, 1);
      barrier_init(state.collected + warp, 1);
    }
    barrier_init_fence();
  }
  if (plan.blocks_per_row > 1) {
    auto* slots = static_cast<uint64_t*>(p.workspace) + work.slice;
#pragma unroll 1
    for (int i = threadIdx.x; i < work.rows; i += kThreads) {
      slots[work.row(i) * plan.blocks_per_row] = kEmptySlot;
    }
  }
  __syncthreads();
  // Hidden, so that the answer takes no register in between.
  const auto is_shared = [&] {
    int blocks = plan.blocks_per_row;
    asm volatile("" : "+r"(blocks));
    return blocks > 1;
  };
  const GridMeeting meeting(is_shared, [] {});
  typename RingBlock<N, kLong>::Feeds feed;
  const bool brings = kFed ? warp == kThreads / kWarpSize - 1 : warp < kRingWorkers;
  if (brings) feed = block.start();
  if (warp < kRingWorkers) {
    if constexpr (kLong) take_registers();
    auto* parameters = reinterpret_cast<typename N::W*>(shared + plan.stages * kRingStageBytes);
    block.run_worker(parameters, feed, meeting);
  } else {
    if constexpr (kLong) give_registers();
    if (warp < kRingWorkers + kRingMeasurers) {
      block.run_measurer(warp - kRingWorkers, meeting);
    } else if (kFed && brings) {
      block.run_feeder(feed, meeting);
    } else {
      block.run_collector(meeting);
    }
  }
}

}  // namespace

cudaError_t launch_layer_norm_forward(const ForwardParams& params, const DataTypes& types,
                                      const forward::Ring& plan, cudaStream_t stream) {
  return dispatch_types_but_float64(types, [&](auto t) {
    using T = decltype(t);
    return dispatch_forward_plain<T>(params, [&](auto norm) {
      using N = decltype(norm);
      constexpr bool kMayBeLong =
          has_long_ring(kTypeOf<typename T::X>, kTypeOf<typename T::Y>, !kIsBare<N>);
      return dispatch_bool<kMayBeLong>(plan.is_long, [&](auto is_long) {
        return launch_meeting(layer_norm_forward_ring_kernel<N, is_long()>, plan, stream, plan,
                              params);
      });
    });
  });
}

}  // namespace fused_layernorm

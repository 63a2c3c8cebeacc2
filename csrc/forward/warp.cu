// SPDX-License-Identifier: Apache-2.0
// Forward of short rows: a logical warp (a power-of-two part of a warp) holds a row in registers.
// Its lanes exchange data by shuffles alone.
#include "base/launch.cuh"
#include "forward/row.cuh"
#include "forward/warp.h"

namespace fused_layernorm {
namespace {

struct LogicalWarp : ForwardTeam {
  // Up to so many words of a thread's parameters are loaded together with the row, more of them
  // where they are used. (bfloat16, early and late: 12608 x 768 11.5, 12.2; 1 x 768 1.5, 1.9; 32768
  // x 768 26.3, 26.9; 128 x 1024 2.2, 2.6.)
  static constexpr int kMostEarlyWords = 32;
  // Elsewhere the choice costs more than it gains (4096 x 1024 bfloat16 6.18 us, with it 6.27).
  template <typename N, int kVecs>
  static constexpr bool kChoosesL2 = kIsBareOfOneType<N> && kVecs <= 2;
  const int lanes, lane;

  FUSED_DEVICE LogicalWarp(int all_lanes, int own) : lanes(all_lanes), lane(own) {}
  FUSED_DEVICE int first_piece() const { return lane; }
  FUSED_DEVICE int step() const { return lanes; }
  // In bare rows of one type each vector is summed up by itself; elsewhere all vectors column by
  // column, which is faster there (by vectors and by columns, 32768 x 768 bfloat16 with float32
  // weight 26.94 us, 26.30; 32 x 1024 x 1024 float16 with a modulation 38.1, 36.9).
  template <typename N, int kPieces, int kPiecesOfVector>
  static constexpr int kColumnSumGroup = kIsBareOfOneType<N> ? kPiecesOfVector : kPieces;
  template <typename Acc>
  FUSED_DEVICE Acc sum(Acc v, int) const {
    return logical_warp_sum(v, lanes);
  }

  // The first lane has the row's first elements, and others can get the pivot by a shuffle. But it
  // waits for the row, and all later loads wait for it. So in half precision without a residual
  // each lane loads the first element itself (32768 x 512 bfloat16 18.9 us by a shuffle, 18.3).
  // Elsewhere the shuffle is faster (float32 4194304 x 64 516, by a load 521; 1000003 x 37 170,
  // 176; 32768 x 1024 with a residual 67.4, 69.2). Behind a row of one element lie zeros.
  template <typename N, int kVecs, bool kRagged>
  static constexpr bool kPivotFirst = kRagged && sizeof(typename N::X) == 2;
  template <typename N, int kWidth>
  FUSED_DEVICE auto pivot(const auto& row, const Vec<typename N::X, kWidth>& first) const {
    using X = typename N::X;
    using Acc = typename N::Acc;
    if constexpr (sizeof(X) == 2 && !N::Prologue::kMayStore) {
      return N::Statistic::template pivot<X>(row.first_elements(kWidth));
    } else {
      const Pair<Acc> elements = {to_acc(first.at[0]), to_acc(first.at[1])};
      return __shfl_sync(kFullWarp, N::Statistic::template pivot<X>(elements), 0, lanes);
    }
  }

  // A row's vectors follow each other from lane to lane, and from the last lane on to the first, so
  // only the row's two ends are boundaries.
  template <int kPieces, int, typename Words>
  struct Boundaries {
    const LogicalWarp& team;
    Words begin;         // the first words of the row, in its first lane
    Words of_neighbour;  // the last words of the lane before; in the first lane, of the last lane

    FUSED_DEVICE explicit Boundaries(const LogicalWarp& warp) : team(warp) {}
    // The words of the vector before this lane's k-th vector, whose words are `own`.
    FUSED_DEVICE Words before(int k, const Words& own) {
      Words words = of_neighbour;
      if (k == 0) begin = own;
      of_neighbour = shuffle(own, team.lane - 1, team.lanes);
      if (team.lane > 0) words = of_neighbour;
      return words;
    }
    FUSED_DEVICE bool is_at(int k) const { return k == 0 && team.lane == 0; }
    // Calls store(v, words before vector v, its first words) for each boundary.
    FUSED_DEVICE void close(const auto& store) const {
      if (team.lane > 0) return;
      store(0, of_neighbour, begin);
      store(kPieces * team.lanes, of_neighbour, begin);
    }
  };
};

template <typename N, int kVecs, Moves kMoves>
constexpr int kWarpBlocks = kIsBareOfOneType<N> && kMoves == Moves::kVectors
                                ? forward_warp_bare_blocks(kVecs, sizeof(typename N::X))
                                : forward_warp_blocks(sizeof(typename N::X), sizeof(typename N::W),
                                                      sizeof(typename N::Y), N::Affine::kModulates);

// kLanes is a template constant where a lane has one vector, otherwise (0) an argument. (4096 x 64
// bfloat16: 2.41 us by an argument, 2.14 by a constant; 1000000 x 64 float32 124.8 and 123.8. With
// more vectors the compiler then orders the loads worse: 4096 x 768 bfloat16 5.04 and 5.53.)
template <typename N, int kVecs, Moves kMoves>
using KnownLanes =
    std::conditional_t<kVecs == 1 && kMoves == Moves::kVectors && kIsBareOfOneType<N>,
                       OneVectorLanes<sizeof(typename N::X)>, VecsList<0>>;

// kLanes: the lanes of a logical warp, or 0 where they are the kernel's argument.
template <typename N, int kVecs, Moves kMoves, int kLanes>
__global__ void __launch_bounds__(kForwardWarpThreads, kWarpBlocks<N, kVecs, kMoves>)
    layer_norm_forward_warp_kernel(const int launched_log2_lanes, const ForwardParams p) {
  const int log2_lanes = kLanes > 0 ? log2_of(kLanes) : launched_log2_lanes;
  const int lanes = 1 << log2_lanes;
  const LogicalWarp team(lanes, static_cast<int>(threadIdx.x) & (lanes - 1));
  const uint32_t teams = kForwardWarpThreads >> log2_lanes;
  const uint32_t row = blockIdx.x * teams + (threadIdx.x >> log2_lanes);
  forward_row<N, kVecs, kMoves, kMoves != Moves::kShifted, false>(p, team, row);
}

template <typename N, int kVecs, Moves kMoves>
cudaError_t launch_warp(const ForwardParams& params, const forward::Warp& plan,
                        cudaStream_t stream) {
  using X = typename N::X;
  constexpr bool kHasKernel = kVecs <= most_forward_warp_vecs(sizeof(X), !N::Prologue::kMayBePlain);
  if constexpr (!kHasKernel) {
    return cudaErrorInvalidValue;
  } else {
    using Lanes = KnownLanes<N, kVecs, kMoves>;
    const int known = contains(Lanes{}, plan.lanes) ? plan.lanes : 0;
    return dispatch_vecs(Lanes{}, known, [&](auto lanes) {
      return launch(layer_norm_forward_warp_kernel<N, kVecs, kMoves, lanes()>, plan, stream,
                    log2_of(plan.lanes), params);
    });
  }
}

}  // namespace

cudaError_t launch_layer_norm_forward(const ForwardParams& params, const DataTypes& types,
                                      const forward::Warp& plan, cudaStream_t stream) {
  return dispatch_types(types, [&](auto t) {
    using T = decltype(t);
    return dispatch_vecs(ForwardWarpVecs{}, plan.vecs, [&](auto vecs) {
      return dispatch_rows<T>(params, plan.moves, [&](auto norm, auto moves) {
        return launch_warp<decltype(norm), vecs(), moves()>(params, plan, stream);
      });
    });
  });
}

}  // namespace fused_layernorm

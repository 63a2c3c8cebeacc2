// SPDX-License-Identifier: Apache-2.0
// The running sums that threads of backward's persistent blocks keep in registers (dweight and
// dbias, or dgate), and how those of a block's teams or logical warps are added up.
#pragma once

#include "norm/param_grad.cuh"

namespace fused_layernorm {

// kSums running sums for each column of a thread's share of a row.
template <typename Acc, int kSums, int kWidth, int kVecs>
struct RunningSums {
  Acc sums[kSums][kVecs][kWidth] = {};

  // Stores the sums, of columns that no other thread of the block has. `first_col` is the column of
  // the row at which the block's slice or chunk begins.
  FUSED_DEVICE void store(const auto& sink, const auto& share, int first_col) const {
    FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
      if (!share.has(k)) continue;
      const int col = first_col + share.vector(k) * kWidth;
      if constexpr (kSums == 2) {
        sink.store(col, sums[0][k], sums[1][k]);
      } else {
        sink.store(col, sums[0][k]);
      }
    }
  }

  // Adds up the sums of a block's teams, in order, and stores the totals. `shared` is memory that
  // no thread needs any more, with room for [sum][team][piece][thread], where a piece is a part of
  // a thread's columns.
  FUSED_DEVICE void store_sum_of_teams(const auto& sink, const auto& share, int first_col,
                                       const BlockTeam& team, int teams, void* shared) const {
    constexpr int kVectorCols = vector_width(sizeof(Acc));
    constexpr int kPieceCols = kWidth < kVectorCols ? kWidth : kVectorCols;
    constexpr int kPiecesOfVec = kWidth / kPieceCols, kPieces = kVecs * kPiecesOfVec;
    using Piece = Vec<Acc, kPieceCols>;
    const int team_pieces = kPieces * team.threads, all_pieces = teams * team_pieces;
    Piece* of_teams[kSums];
    FUSED_UNROLL for (int s = 0; s < kSums; ++s) {
      of_teams[s] = static_cast<Piece*>(shared) + team.thread + s * all_pieces;
    }
    __syncthreads();
    FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
      FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
        const int piece = k * kPiecesOfVec + j / kPieceCols;
        const int at = team.index * team_pieces + piece * team.threads;
        FUSED_UNROLL for (int s = 0; s < kSums; ++s) {
          of_teams[s][at].at[j % kPieceCols] = sums[s][k][j];
        }
      }
    }
    __syncthreads();
    // Each team adds up every `teams`-th piece.
    for (int piece = team.index; piece < kPieces; piece += teams) {
      const int vector = share.vector(piece / kPiecesOfVec);
      if (vector >= share.vectors) continue;
      Acc totals[kSums][kPieceCols] = {};
#pragma unroll 2
      for (int at = piece * team.threads; at < all_pieces; at += team_pieces) {
        Piece pieces[kSums];
        FUSED_UNROLL for (int s = 0; s < kSums; ++s) pieces[s] = of_teams[s][at];
        FUSED_UNROLL for (int j = 0; j < kPieceCols; ++j) {
          FUSED_UNROLL for (int s = 0; s < kSums; ++s) totals[s][j] += pieces[s].at[j];
        }
      }
      const int col = first_col + vector * kWidth + piece % kPiecesOfVec * kPieceCols;
      if constexpr (kSums == 2) {
        sink.store(col, totals[0], totals[1]);
      } else {
        sink.store(col, totals[0]);
      }
    }
  }
};

// The running dgate of a thread's share of the columns.
template <typename Acc, int kWidth, int kVecs>
using RunningGateGrad = RunningSums<Acc, 1, kWidth, kVecs>;

// The running dweight and dbias of a thread's share of the columns.
template <typename Acc, int kWidth, int kVecs>
struct RunningParamGrads : RunningSums<Acc, 2, kWidth, kVecs> {
  using Columns = Acc[kWidth];
  FUSED_DEVICE Columns& dweight(int k) { return this->sums[0][k]; }
  FUSED_DEVICE Columns& dbias(int k) { return this->sums[1][k]; }

  // A thread may have a second sum in shared memory for each of its running sums, stored as
  // [column][dweight, dbias][thread of the block]. add_to() adds the running sums to the second
  // sums and sets the running sums to zero; take() does the opposite.
  FUSED_DEVICE void add_to(Acc* second_sums) {
    with_second(second_sums, [](Acc& sum, Acc& second) {
      second += sum;
      sum = 0;
    });
  }
  FUSED_DEVICE void take(Acc* second_sums) {
    with_second(second_sums, [](Acc& sum, Acc& second) {
      sum += second;
      second = 0;
    });
  }
  static FUSED_DEVICE void clear(Acc* second_sums) {
    RunningParamGrads any;
    any.with_second(second_sums, [](Acc&, Acc& second) { second = 0; });
  }

  // Adds up the sums of a block's logical warps, first within each warp, then over the warps, and
  // stores the totals. `shared` has room for [dweight, dbias][warp][cols].
  template <int kWarps>
  FUSED_DEVICE void store_sum_of_logical_warps(const auto& sink, const auto& share, int lanes,
                                               int cols, void* shared) {
    FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
      FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
        for (int offset = lanes; offset < kWarpSize; offset *= 2) {
          dweight(k)[j] += shuffle_xor(dweight(k)[j], offset);
          dbias(k)[j] += shuffle_xor(dbias(k)[j], offset);
        }
      }
    }
    Acc* of_warps = static_cast<Acc*>(shared);
    const int warp = threadIdx.x / kWarpSize;
    if (threadIdx.x % kWarpSize < lanes) {
      FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
        const int col = share.vector(k) * kWidth;
        if (share.has(k)) {
          FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
            of_warps[warp * cols + col + j] = dweight(k)[j];
            of_warps[(kWarps + warp) * cols + col + j] = dbias(k)[j];
          }
        }
      }
    }
    __syncthreads();
    for (int col = threadIdx.x; col < cols; col += kWarps * kWarpSize) {
      // Four short chains of additions are rounded less than one long chain.
      Acc of_weight[4] = {}, of_bias[4] = {};
      FUSED_UNROLL for (int w = 0; w < kWarps; ++w) {
        of_weight[w % 4] += of_warps[w * cols + col];
        of_bias[w % 4] += of_warps[(kWarps + w) * cols + col];
      }
      const Acc dw[1] = {tree_sum(of_weight)}, db[1] = {tree_sum(of_bias)};
      sink.store(col, dw, db);
    }
  }

 private:
  // Calls use(sum, second) for each running sum and its second sum.
  FUSED_DEVICE void with_second(Acc* second_sums, const auto& use) {
    Acc* at = second_sums + threadIdx.x;
    FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
      FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
        use(dweight(k)[j], at[(2 * (k * kWidth + j)) * blockDim.x]);
        use(dbias(k)[j], at[(2 * (k * kWidth + j) + 1) * blockDim.x]);
      }
    }
  }
};

}  // namespace fused_layernorm

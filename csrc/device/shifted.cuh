// SPDX-License-Identifier: Apache-2.0
// Unaligned rows, moved by vectors all the same. A thread owns the columns that it would own of an
// aligned row, so a row's sums do not depend on where it stands. Shifted rows begin at any address:
// they move in aligned pieces (of 16 bytes, or of a vector, if it has fewer), and a thread's vector
// lies across two of them. Rows by halves begin at multiples of half a vector.
#pragma once

#include <cstdint>

#include "device/reduce.cuh"
#include "device/share.cuh"
#include "device/vec.cuh"

namespace fused_layernorm {

template <int kWords>
struct alignas(4 * kWords) Words {
  uint32_t at[kWords];
};

template <int kWords>
FUSED_DEVICE Words<kWords> shuffle(const Words<kWords>& words, int lane, int lanes) {
  Words<kWords> out;
  FUSED_UNROLL for (int i = 0; i < kWords; ++i) {
    out.at[i] = __shfl_sync(0xffffffffu, words.at[i], lane, lanes);
  }
  return out;
}

enum class Shift { kDown, kUp };

// Cuts one piece out of each of `kCount` pairs of neighbouring pieces: with kDown it begins `bytes`
// (less than a piece) behind the beginning of the pair, with kUp it ends `bytes` before its end.
// One branch for all pairs decides which words are taken: selecting them one by one would cost more
// than all else in moving a row. The assembly keeps the compiler from doing so.
template <Shift kShift, int kElementBytes, int kCount, int kWords>
FUSED_DEVICE void shift_pieces(Words<kWords> (&out)[kCount], const Words<kWords> (&low)[kCount],
                               const Words<kWords> (&high)[kCount], int bytes) {
  constexpr int kStep = kElementBytes > 4 ? kElementBytes / 4 : 1;
  const uint32_t bits = (bytes & 2) * 8;
  const auto shift_words = [&](auto words) {
    constexpr int kFirst = kShift == Shift::kDown ? words() : kWords - words();
    FUSED_UNROLL for (int n = 0; n < kCount; ++n) {
      const auto word = [&](int i) { return i < kWords ? low[n].at[i] : high[n].at[i - kWords]; };
      FUSED_UNROLL for (int i = 0; i < kWords; ++i) {
        uint32_t& to = out[n].at[i];
        const int from = kFirst + i;
        if constexpr (kElementBytes > 2) {
          asm volatile("mov.b32 %0, %1;" : "=r"(to) : "r"(word(from)));
        } else if constexpr (kShift == Shift::kDown) {
          asm volatile("shf.r.wrap.b32 %0, %1, %2, %3;"
                       : "=r"(to)
                       : "r"(word(from)), "r"(word(from + 1)), "r"(bits));
        } else {
          asm volatile("shf.l.wrap.b32 %0, %1, %2, %3;"
                       : "=r"(to)
                       : "r"(word(from - 1)), "r"(word(from)), "r"(bits));
        }
      }
    }
  };
  const int words = bytes / 4;
  if (words < kStep) {
    shift_words(std::integral_constant<int, 0>{});
  } else if (kStep >= kWords / 2 || words < 2) {
    shift_words(std::integral_constant<int, kStep>{});
  } else if (words < 3) {
    shift_words(std::integral_constant<int, kWords / 2>{});
  } else {
    shift_words(std::integral_constant<int, kWords - 1>{});
  }
}

// Makes the elements of a vector from `cols` on (all, if it is negative) zero.
template <typename T, int kWidth>
FUSED_DEVICE void keep_first(Vec<T, kWidth>& v, int cols) {
  constexpr int kSize = static_cast<int>(sizeof(T));
  auto* words = reinterpret_cast<uint32_t*>(v.at);
  FUSED_UNROLL for (int i = 0; i < kWidth * kSize / 4; ++i) {
    const uint32_t first_half = kSize == 2 && cols == 2 * i + 1 ? words[i] & 0xffffu : 0;
    words[i] = cols * kSize >= 4 * i + 4 ? words[i] : first_half;
  }
}

// Makes the elements of a thread's vectors that lie behind the row's last column zero.
template <typename T, int kWidth, int kVecs>
FUSED_DEVICE void keep_columns(Vec<T, kWidth> (&vectors)[kVecs], const auto& share) {
  FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
    if (!share.is_whole(k)) keep_first(vectors[k], share.cols_from(k));
  }
}

template <typename T, int kWidth>
struct ShiftedRow {
  using V = Vec<std::remove_const_t<T>, kWidth>;
  static constexpr int kSize = static_cast<int>(sizeof(T));
  static constexpr int kPieceBytes = V::kPieceBytes;
  static constexpr int kPieces = V::kBytes / kPieceBytes;  // of a vector
  static constexpr int kWords = kPieceBytes / 4;           // of a piece
  static constexpr int kPieceCols = kPieceBytes / kSize;
  using Piece = Vec<std::remove_const_t<T>, kPieceCols>;

  T* start;   // of the piece in which the row begins
  int shift;  // bytes from `start` to the row

  FUSED_DEVICE explicit ShiftedRow(T* row)
      : shift(static_cast<int>(reinterpret_cast<uintptr_t>(row) % kPieceBytes)) {
    start = row - shift / kSize;
  }

  FUSED_DEVICE T* piece(int index) const {
    using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
    return reinterpret_cast<T*>(reinterpret_cast<Byte*>(start) +
                                static_cast<uint32_t>(index) * kPieceBytes);
  }

  FUSED_DEVICE Words<kWords> load(int index) const {
    // Two neighbouring threads read this piece, and the second of them finds it in L1.
    const Piece words = fused_layernorm::load<Use::kReadOnly, kPieceCols>(piece(index));
    return *reinterpret_cast<const Words<kWords>*>(words.at);
  }

  // Stores the part of piece `index` in the row, which ends `end` bytes behind `start`.
  FUSED_DEVICE void store_part(int index, const Words<kWords>& words, int end) const {
    const Piece values = *reinterpret_cast<const Piece*>(words.at);
    T* const to = piece(index);
    const int first = index == 0 ? shift : 0;
    const int last = end - index * kPieceBytes;
    FUSED_UNROLL for (int j = 0; j < kPieceCols; ++j) {
      if (first <= j * kSize && j * kSize < last) to[j] = values.at[j];
    }
  }
};

// Loads a thread's vectors `kFirst, kFirst + 1, ...` of a row. What lies behind the row's last
// column gets any values. Up to 15 bytes before and behind the row are read, which never lie
// outside an allocation: these begin and end at larger powers of two. then() is called behind the
// loads and before the branch that waits for them.
template <int kFirst, typename T, int kWidth, int kCount>
FUSED_DEVICE void load_shifted(Vec<T, kWidth> (&vectors)[kCount],
                               const ShiftedRow<const T, kWidth>& from, const auto& share,
                               const auto& then) {
  using Row = ShiftedRow<const T, kWidth>;
  static_assert(Row::kPieces == 1);
  using RowWords = Words<Row::kWords>;
  RowWords low[kCount], high[kCount], words[kCount];
  const int end = from.shift + share.cols * Row::kSize;
  FUSED_UNROLL for (int n = 0; n < kCount; ++n) {
    const int k = kFirst + n;
    const int piece = share.vector(k);
    low[n] = high[n] = {};
    if (share.has(k)) low[n] = from.load(piece);
    if (share.is_whole(k) || (piece + 1) * Row::kPieceBytes < end) high[n] = from.load(piece + 1);
  }
  then();
  shift_pieces<Shift::kDown, Row::kSize>(words, low, high, from.shift);
  FUSED_UNROLL for (int n = 0; n < kCount; ++n) {
    vectors[n] = *reinterpret_cast<const Vec<T, kWidth>*>(words[n].at);
  }
}

// Calls body(first, count) for `kAll` vectors, at most `kMost` of them at once.
template <int kAll, int kMost, int kFirst = 0>
FUSED_DEVICE void in_turn(const auto& body) {
  if constexpr (kFirst < kAll) {
    constexpr int kCount = kAll - kFirst < kMost ? kAll - kFirst : kMost;
    body(std::integral_constant<int, kFirst>{}, std::integral_constant<int, kCount>{});
    in_turn<kAll, kMost, kFirst + kMost>(body);
  }
}

// Stores a row of `cols` columns (nothing, if there are none); `vector(k)` gives a thread's k-th
// vector. All threads of the team must call, and so must the other threads of their warps.
template <typename T, int kWidth, int kVecs, typename Team, int kMayMiss>
FUSED_DEVICE void store_shifted(T* row, const Team& team,
                                const RaggedShare<kVecs, kWidth, kMayMiss>& share, int cols,
                                const auto& vector) {
  using Row = ShiftedRow<T, kWidth>;
  static_assert(Row::kPieces == 1);
  using RowWords = Words<Row::kWords>;
  const Row to(row);
  const int end = cols > 0 ? to.shift + cols * Row::kSize : 0;
  // A piece holds the end of one vector and the beginning of the next, whose thread stores it.
  // Where no shuffle gives this thread the end of the vector before, there is a boundary.
  typename Team::template Boundaries<kVecs, kVecs / kMayMiss, RowWords> boundaries(team);
  RowWords last_words = {};
  int last_piece = 0;
  const auto store = [&](auto first, auto count) {
    RowWords before[count()], own[count()], words[count()];
    FUSED_UNROLL for (int n = 0; n < count(); ++n) {
      const auto values = vector(first() + n);
      own[n] = *reinterpret_cast<const RowWords*>(values.at);
    }
    FUSED_UNROLL for (int n = 0; n < count(); ++n) {
      before[n] = boundaries.before(first() + n, own[n]);
    }
    shift_pieces<Shift::kUp, Row::kSize>(words, before, own, to.shift);
    FUSED_UNROLL for (int n = 0; n < count(); ++n) {
      const int k = first() + n;
      const int piece = share.vector(k);
      if (boundaries.is_at(k)) continue;
      if (share.is_whole(k) ? end > 0 : (piece + 1) * Row::kPieceBytes <= end) {
        store_once<T, Row::kPieceCols>(to.piece(piece),
                                       *reinterpret_cast<const typename Row::Piece*>(words[n].at));
      } else if (!share.is_whole(k) && piece * Row::kPieceBytes < end) {
        last_words = words[n];
        last_piece = piece;
      }
    }
  };
  // As many pieces at once as there are registers for.
  in_turn<kVecs, 4>(store);
  if (last_piece > 0) to.store_part(last_piece, last_words, end);
  boundaries.close([&](int piece, const RowWords& low, const RowWords& high) {
    if (piece * Row::kPieceBytes >= end) return;
    const RowWords lows[1] = {low}, highs[1] = {high};
    RowWords words[1];
    shift_pieces<Shift::kUp, Row::kSize>(words, lows, highs, to.shift);
    to.store_part(piece, words[0], end);
  });
}

// Rows that begin at multiples of half a vector and end at one, moved by such halves: a thread owns
// the columns that it would own of any other row. Missing halves are zero.
template <typename T, int kWidth, int kCount, typename Policy>
FUSED_DEVICE void load_halves(Vec<T, kWidth> (&vectors)[kCount], const T* row, const auto& share,
                              Policy policy) {
  constexpr int kHalf = kWidth / 2;
  using Half = Vec<T, kHalf>;
  FUSED_UNROLL for (int k = 0; k < kCount; ++k) {
    auto* const halves = reinterpret_cast<Half*>(vectors[k].at);
    FUSED_UNROLL for (int h = 0; h < 2; ++h) {
      halves[h] = {};
      if (share.is_whole(k) || share.cols_from(k) > h * kHalf) {
        const T* const at = element(row, share.vector(k) * kWidth + h * kHalf);
        halves[h] = load<Use::kOnce, kHalf>(at, policy);
      }
    }
  }
}
// Stores a thread's k-th vector of such a row.
template <typename T, int kWidth, typename Policy>
FUSED_DEVICE void store_halves(T* row, const auto& share, int k, const Vec<T, kWidth>& vector,
                               Policy policy) {
  constexpr int kHalf = kWidth / 2;
  const auto* const halves = reinterpret_cast<const Vec<T, kHalf>*>(vector.at);
  FUSED_UNROLL for (int h = 0; h < 2; ++h) {
    if (!share.is_whole(k) && share.cols_from(k) <= h * kHalf) continue;
    store_once(element(row, share.vector(k) * kWidth + h * kHalf), halves[h], policy);
  }
}

// The boundaries of a row that a block of at most kMostWarps warps has. Within a warp, neighbouring
// lanes have neighbouring vectors of the row. Between warps there are boundaries, which are closed
// at the end. kPieces is the number of pieces that a thread stores.
template <int kPieces, int kMostWarps, typename Words>
struct BlockBoundaries {
  static constexpr int kMost = 1 + kPieces * kMostWarps;
  const BlockTeam& team;
  Words* lows;   // of each boundary the words before it
  Words* highs;  // of each boundary the words behind it
  Words* own;    // in a warp's first and last lane: where its words of vector 0 belong

  // The scratch memory must not be written again before another barrier of the block.
  FUSED_DEVICE explicit BlockBoundaries(const auto& row) : team(row.team) {
    __shared__ Words scratch[2][kMost];
    lows = scratch[0];
    highs = scratch[1];
    own = team.lane() == 0 ? highs + team.warp() : lows + team.warp() + 1;
  }
  // The words of the vector before this thread's k-th (`words`); a warp's first lane gets any.
  FUSED_DEVICE Words before(int k, const Words& words) const {
    if (team.lane() == 0 || team.lane() == kWarpSize - 1) own[k * team.warps()] = words;
    return shuffle(words, team.lane() - 1, kWarpSize);
  }
  FUSED_DEVICE bool is_at(int) const { return team.lane() == 0; }
  // Calls store(v, words before vector v, its first words) for each boundary.
  FUSED_DEVICE void close(const auto& store) const {
    __syncthreads();
    const int boundary = team.thread;
    if (boundary <= kPieces * team.warps())
      store(boundary * kWarpSize, lows[boundary], highs[boundary]);
  }
};

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// Forward of one row in a team's registers: load (prologue) -> statistics -> normalize -> affine ->
// epilogue -> store. The strategies warp and block run this, with a type of team each.
#pragma once

#include "forward/row.h"
#include "norm/norm.cuh"

namespace fused_layernorm {

// What a team is: the contract of its types, which derive from it, define what is only declared
// here, and replace what they have otherwise.
struct ForwardTeam {
  // A thread's pieces of the row: the number of the first, and from one to the next.
  int first_piece() const;
  int step() const;
  // The sum over the team. The sums n = 0 and n = 1 of a row must not share scratch memory.
  template <typename Acc>
  Acc sum(Acc v, int n) const;
  // How many of a thread's kPieces pieces are added column by column before the tree sum, where a
  // vector has kPiecesOfVector pieces (norm/statistic.cuh).
  template <typename N, int kPieces, int kPiecesOfVector>
  static constexpr int kColumnSumGroup = kPieces;

  // Whether the row's first elements, from which the pivot is made, are loaded before the row.
  // Otherwise pivot() makes it; `first` is the thread's first vector.
  template <typename N, int kVecs, bool kRagged>
  static constexpr bool kPivotFirst = kRagged;
  template <typename N, typename Row, int kWidth>
  typename N::Acc pivot(const Row& row, const Vec<typename N::X, kWidth>& first) const;

  // Parameters of no more words than this are loaded with the row, in this way, and wait.
  static constexpr int kMostEarlyWords = 0;
  static constexpr Use kEarlyUse = Use::kReadOnly;
  // Whether a launch chooses what becomes of x and y in L2 (L2Policy), or all is evict_first.
  template <typename N, int kVecs>
  static constexpr bool kChoosesL2 = false;

  // The places of a shifted row at which two threads' vectors share an aligned piece of memory,
  // though no shuffle connects the threads (device/shifted.cuh).
  template <int kPieces, int kVecs, typename Words>
  struct Boundaries;
};

// Stores y of a thread's share of a row.
template <typename N, typename Epilogue, typename Affine, int kWidth, int kVecs,
          typename Parameters, typename Share, typename Policy>
FUSED_DEVICE void finish_vectors(const ForwardParams& p, typename N::Y* y_row,
                                 const Vec<typename N::X, kWidth> (&x)[kVecs],
                                 Parameters& parameters, const Share& share, typename N::Acc mean,
                                 typename N::Acc rstd, Policy policy) {
  using Y = typename N::Y;
  const auto finish = [&](int k, const auto& weight, const auto& bias) {
    return N::template finish<Epilogue, Affine>(
        p, x[k], mean, rstd, weight, bias, [&](const void* given, Absent absent) {
          return load_share<kWidth>(Parameter<typename N::W>(given, 0, absent), share, k);
        });
  };
  if constexpr (!N::Epilogue::kBranches) {
    FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
      const auto y = finish(k, parameters.factor(k), parameters.summand(k));
      if constexpr (Share::kRagged) {
        store_halves(y_row, share, k, y, policy);
      } else {
        if (share.has(k)) store_once(element(y_row, share.vector(k) * kWidth), y, policy);
      }
    }
  } else {
    // The compiler moves nothing across the branches of an activation. So the next vector's
    // parameters come before them, if registers allow it, and y's address stays in a register.
    constexpr bool kAhead = kVecs * kWidth < 8 * kVectorWidth<typename N::Types>;
    Y* y_start = hidden(element(y_row, share.first * kWidth));
    auto weight = parameters.factor(0), bias = parameters.summand(0);
    FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
      if (!kAhead && k > 0) {
        weight = parameters.factor(k);
        bias = parameters.summand(k);
      }
      const auto w = weight, b = bias;
      if (kAhead && k + 1 < kVecs) {
        weight = parameters.factor(k + 1);
        bias = parameters.summand(k + 1);
        hold(weight);
        hold(bias);
      }
      const auto y = finish(k, w, b);
      if (share.has(k)) store_once(element(y_start, k * share.step * kWidth), y, policy);
    }
  }
}

// Stores y of a thread's share of a row.
template <typename N, int kWidth, int kVecs, typename Parameters, typename Policy>
FUSED_DEVICE void finish_row(const ForwardParams& p, const ForwardRow<N>& row,
                             const Vec<typename N::X, kWidth> (&x)[kVecs], Parameters parameters,
                             const auto& share, typename N::Acc mean, typename N::Acc rstd,
                             Policy policy) {
  N::Epilogue::for_row(p, [&](auto epilogue) {
    N::Affine::for_row(p, [&](auto affine) {
      finish_vectors<N, decltype(epilogue), decltype(affine)>(p, row.y, x, parameters, share, mean,
                                                              rstd, policy);
    });
  });
}

// Stores y of a thread's share of a shifted row, or nothing if `valid_row` is false.
template <typename N, int kWidth, int kVecs>
FUSED_DEVICE void finish_shifted_row(const ForwardParams& p, const ForwardRow<N>& row,
                                     const Vec<typename N::X, kWidth> (&x)[kVecs],
                                     const auto& parameters, const auto& team, const auto& share,
                                     bool valid_row, typename N::Acc mean, typename N::Acc rstd) {
  N::Affine::for_row(p, [&](auto affine) {
    const auto y_of = [&](int k) {
      return N::template finish<typename N::Epilogue, decltype(affine)>(
          p, x[k], mean, rstd, parameters.factor(k), parameters.summand(k),
          [&](const void* given, Absent absent) {
            return load_share<kWidth>(Parameter<typename N::W>(given, 0, absent), share, k);
          });
    };
    store_shifted<typename N::Y, kWidth, kVecs>(row.y, team, share, valid_row ? share.cols : 0,
                                                y_of);
  });
}

// The registers that weight and bias of a thread's kVecs vectors of a row take.
template <typename N, int kVecs>
constexpr int kParameterWords =
    2 * kVecs * kVectorWidth<typename N::Types> * static_cast<int>(sizeof(typename N::W)) / 4;

// Calls start(norm, moves) with the norm, and with the way in which a row's elements are moved.
template <typename T>
cudaError_t dispatch_rows(const ForwardParams& p, Moves moves, const auto& start) {
  using Vectors = std::integral_constant<Moves, Moves::kVectors>;
  using Halves = std::integral_constant<Moves, Moves::kHalves>;
  using Shifted = std::integral_constant<Moves, Moves::kShifted>;
  if constexpr (has_halves(kTypeOf<typename T::X>, kTypeOf<typename T::W>,
                           kTypeOf<typename T::Y>)) {
    if (moves == Moves::kHalves) return start(BareForward<T>{}, Halves{});
  }
  if (moves == Moves::kVectors) {
    return dispatch_forward<T, false>(p, [&](auto norm) { return start(norm, Vectors{}); });
  }
  return dispatch_forward<T, true>(p, [&](auto norm) { return start(norm, Shifted{}); });
}

// Forward of one row by a team. A thread has kVecs vectors of the row, which it moves piece by
// piece. A team whose `row` is past the last one reads the last row and stores no y, because the
// shuffles of the other teams in its warp need its lanes.
// kEarly: the affine parameters are loaded with a row without residual and epilogue, if registers
// allow it.
// kForget: between the row's sums and y only the packed elements of the row stay in registers.
template <typename N, int kVecs, Moves kMoves, bool kEarly, bool kForget, typename Team>
FUSED_DEVICE void forward_row(const ForwardParams& p, const Team& team, uint32_t row) {
  using Acc = typename N::Acc;
  using X = typename N::X;
  using W = typename N::W;
  constexpr bool kShifted = kMoves == Moves::kShifted, kRagged = kMoves != Moves::kVectors;
  constexpr int kWidth = kRowWidth<N, kVecs>;
  constexpr int kPiecesOfVector = kVectorWidth<typename N::Types> / kWidth;
  constexpr int kPieces = kVecs * kPiecesOfVector;
  const Reciprocal<Acc> inverse_cols(p.inverse_cols);
  const uint32_t rows = static_cast<uint32_t>(p.rows);
  const bool valid_row = row < rows;
  const uint32_t read_row = valid_row ? row : rows - 1;
  const ForwardRow<N> place(p, read_row, 0);
  // The plan makes sure that at most the last of a thread's vectors, all its pieces, is missing.
  const auto share = [&] {
    if constexpr (kRagged) {
      return RaggedShare<kPieces, kWidth, kPiecesOfVector>(team.first_piece(), team.step(), p.cols);
    } else {
      return Share<kPieces, kPiecesOfVector>{team.first_piece(), team.step(), p.cols / kWidth};
    }
  }();

  using Late = LateParameters<W, kWidth, decltype(share)>;
  constexpr bool kLoadsEarly = kEarly && !N::Prologue::kMayStore && !N::Epilogue::kMayActivate &&
                               kParameterWords<N, kVecs> <= Team::kMostEarlyWords;
  using Parameters =
      std::conditional_t<kLoadsEarly, EarlyParameters<W, kWidth, kPieces, Team::kEarlyUse>, Late>;
  const auto columns = [&] {
    if constexpr (kLoadsEarly && !N::Affine::kModulates) {
      return ColumnParameters<W>::loaded_first(p);
    } else {
      return place.parameters;
    }
  }();
  const Late late = {columns, share};
  Parameters parameters(late);
  const auto load_early = [&] {
    if constexpr (kLoadsEarly) parameters.load(late);
  };

  using Policy = std::conditional_t<Team::template kChoosesL2<N, kVecs>, L2Policy, EvictFirst>;
  const auto policy = [&] {
    if constexpr (std::is_same_v<Policy, L2Policy>) {
      return Policy(p.stays_in_l2);
    } else {
      return Policy{};
    }
  }();
  Vec<X, kWidth> x[kPieces];
  Acc pivot;
  constexpr bool kPivotFirst = Team::template kPivotFirst<N, kVecs, kRagged>;
  if constexpr (kShifted) {
    // After the branches of load_shifted(), a load of the first elements would wait for the row.
    if (kPivotFirst) pivot = N::Statistic::template pivot<X>(place.x.first_elements(p.cols));
    place.x.load_shifted(x, team, share, valid_row, load_early);
  } else if constexpr (kMoves == Moves::kHalves) {
    pivot = N::Statistic::template pivot<X>(place.x.first_elements(p.cols));
    load_halves(x, place.x.x, share, policy);
    load_early();
  } else if constexpr (kPivotFirst) {
    // With a pivot that is loaded before all else some kernels are faster (bfloat16, without and
    // with: 32768 x 4096 137.9 us and 131.2, with a residual 268.0 and 259.4; 65536 x 2048 131.7
    // and 128.7), others slower (five vectors 130.1 and 130.8, eight 264 and 283, an activation
    // 136.6 and 143.4).
    constexpr bool kInOrder =
        sizeof(X) == 2 && (N::Prologue::kMayStore || (kVecs == 4 && !N::Epilogue::kBranches));
    pivot = N::Statistic::template pivot<X>(place.x.first_elements(p.cols));
    if (kInOrder) __syncwarp();
    place.x.template load<kInOrder ? Use::kInOrder : Use::kOnce>(x, share, policy);
    load_early();
  } else {
    place.x.template load<Use::kOnce>(x, share, policy);
    load_early();
  }
  if constexpr (!kPivotFirst) {
    pivot = team.template pivot<N>(place.x, x[0]);
  }
  constexpr int kColumnSumGroup = Team::template kColumnSumGroup<N, kPieces, kPiecesOfVector>;
  const auto [mean, m2] = N::Statistic::template measure<kColumnSumGroup>(
      p.is_rms, x, share, pivot, [&] { return inverse_cols; },
      [&](Acc v, int n) { return team.sum(v, n); });
  if constexpr (kForget) {
    if constexpr (sizeof(X) < sizeof(Acc)) {
      FUSED_UNROLL for (int k = 0; k < kPieces; ++k) hold(x[k]);
    }
    asm("" : "+r"(row));
  }
  const Acc rstd = N::Statistic::rstd(m2, inverse_cols.rounded, p.eps.as<Acc>());
  // The lanes of a warp store shifted rows together, so none of them may return before.
  if (!kShifted && !valid_row) return;
  if (valid_row && share.first == 0) store_statistics(p, row, mean, rstd);
  if constexpr (kShifted) {
    finish_shifted_row(p, place, x, parameters, team, share, valid_row, mean, rstd);
  } else if constexpr (kForget) {
    const ForwardRow<N> again(p, row, 0);
    const LateParameters<W, kWidth, decltype(share)> read_again = {again.parameters, share};
    finish_row(p, again, x, read_again, share, mean, rstd, policy);
  } else {
    finish_row(p, place, x, parameters, share, mean, rstd, policy);
  }
}

}  // namespace fused_layernorm

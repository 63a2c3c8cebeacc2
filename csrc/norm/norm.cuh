// SPDX-License-Identifier: Apache-2.0
// A norm: the policies that together say what a kernel computes of a row. The strategies in
// forward/ and backward/ say how rows are laid over the chip; they are templates over any norm.
// This file also chooses the norm that a launch needs, among those that there are kernels for.
#pragma once

#include "norm/affine.cuh"
#include "norm/epilogue.cuh"
#include "norm/prologue.cuh"
#include "norm/statistic.cuh"
#include "norm/types.cuh"

namespace fused_layernorm {

// Stands for `columns` (affine.cuh) where the affine policy never calls it.
struct NoColumns {};

template <typename Types_, typename Statistic_, typename Prologue_, typename Affine_,
          typename Epilogue_>
struct Norm {
  using Types = Types_;
  using Statistic = Statistic_;
  using Prologue = Prologue_;
  using Affine = Affine_;
  using Epilogue = Epilogue_;
  using X = typename Types::X;
  using W = typename Types::W;
  using Y = typename Types::Y;
  using Acc = typename Types::Acc;

  // y of `kWidth` columns from x, the last step of every forward kernel. `EpilogueOfRow` and
  // `AffineOfRow` are the norm's policies, or those that their for_row() has chosen for this row.
  template <typename EpilogueOfRow, typename AffineOfRow, int kWidth, typename Columns = NoColumns>
  static FUSED_DEVICE Vec<Y, kWidth> finish(const ForwardParams& p, const Vec<X, kWidth>& x,
                                            Acc mean, Acc rstd, const Vec<W, kWidth>& weight,
                                            const Vec<W, kWidth>& bias,
                                            const Columns& columns = {}) {
    Acc values[kWidth], w[kWidth], b[kWidth];
    unpack(values, x);
    unpack(w, weight);
    unpack(b, bias);
    FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
      values[j] = Statistic::normalize(values[j], mean, rstd);
    }
    if constexpr (!Affine::kModulates) EpilogueOfRow::template before_affine<X>(p, values, w);
    AffineOfRow::apply(p, values, w, b, columns);
    EpilogueOfRow::template apply<Y>(p, values);
    return round_to<Y>(values);
  }
};

// Whether nothing is fused.
template <typename N>
constexpr bool kIsBare =
    !N::Prologue::kMayStore && !N::Epilogue::kMayActivate && !N::Affine::kModulates;

// Whether nothing is fused and all tensors are of one type.
template <typename N>
constexpr bool kIsBareOfOneType = kIsBare<N> && kIsOneType<typename N::Types>;

// The columns of a piece: what a thread of forward that has kVecs vectors of a row moves at once.
template <typename N, int kVecs>
constexpr int kRowWidth = row_width(sizeof(typename N::X), sizeof(typename N::W),
                                    sizeof(typename N::Y), kVecs, kIsBare<N>);

// One row of forward, or a part of it from `first_col` on.
template <typename N>
struct ForwardRow {
  typename N::Prologue::template Row<typename N::Types> x;
  ColumnParameters<typename N::W> parameters;
  typename N::Y* y;

  FUSED_DEVICE ForwardRow(const ForwardParams& p, int64_t row, int first_col)
      : x(p, row, first_col),
        parameters(N::Affine::template row<typename N::W>(p, row, first_col)),
        y(static_cast<typename N::Y*>(p.y) + (row * p.cols + first_col)) {}
};

template <typename T, typename Prologue, typename Epilogue, typename Affine = ColumnAffine>
using NormOf = Norm<T, MeanAndVariance, Prologue, Affine, Epilogue>;

// The norms that there are kernels for.
//
// What is fused costs registers: for common types there is a kernel for the bare norm, one for an
// epilogue, and one for a residual, which may have an epilogue as well. But each is some 20 KB in
// the binary. So types that few models have, and shifted rows, have two kernels: the bare one and
// one for whatever is fused. Shifted rows of such types have only the second.
template <typename T>
using BareForward = NormOf<T, Plain, Identity>;
template <typename T>
using SharedForward = NormOf<T, MayAdd, MayActivate>;

// A modulated norm has no activation. In float64, and for shifted rows whose types are not all the
// same, only the stream strategy has kernels for it.
template <typename T, typename Prologue, typename Affine = MayBeAffineAndModulate>
using ModulatedForward = NormOf<T, Prologue, Identity, Affine>;

template <typename T, bool kShifted>
cudaError_t dispatch_forward_modulated(const ForwardParams& p, const auto& launch) {
  if constexpr (!has_modulated_forward(kTypeOf<typename T::X>, kTypeOf<typename T::W>,
                                       kTypeOf<typename T::Y>, kShifted)) {
    return cudaErrorInvalidValue;
  } else if constexpr (kShifted || !kIsCommon<T>) {
    return launch(ModulatedForward<T, MayAddGated>{});
  } else {
    return p.residual != nullptr ? launch(ModulatedForward<T, AddGated>{})
                                 : launch(ModulatedForward<T, Plain>{});
  }
}

template <typename T, bool kShifted>
cudaError_t dispatch_forward(const ForwardParams& p, const auto& launch) {
  if (p.is_modulated) return dispatch_forward_modulated<T, kShifted>(p, launch);
  if constexpr (kShifted && !kIsCommon<T>) {
    return launch(SharedForward<T>{});
  } else if constexpr (kShifted || !kIsCommon<T>) {
    const bool bare = p.residual == nullptr && !p.has_epilogue;
    return bare ? launch(BareForward<T>{}) : launch(SharedForward<T>{});
  } else {
    if (p.residual != nullptr) return launch(NormOf<T, Add, MayActivate>{});
    if (p.has_epilogue) return launch(NormOf<T, Plain, Activate>{});
    return launch(BareForward<T>{});
  }
}

// Forward of strategies that take neither a residual nor a modulation.
template <typename T>
cudaError_t dispatch_forward_plain(const ForwardParams& p, const auto& launch) {
  if (p.residual != nullptr || p.is_modulated) return cudaErrorInvalidValue;
  if (p.has_epilogue) return launch(NormOf<T, Plain, Activate>{});
  return launch(BareForward<T>{});
}

// A backward kernel that fuses anything tests for it at run time: dresidual, too, may be absent.
template <typename T>
using BareBackward = NormOf<T, NoOtherGradient, Identity>;
template <typename T>
using SharedBackward = NormOf<T, MayAddGradient, MayActivate>;
template <typename N>
constexpr bool kIsBareBackward =
    !N::Prologue::kMayAdd && !N::Epilogue::kMayActivate && !N::Affine::kModulates;

// Backward of strategies that share one kernel for all that is fused.
template <typename T>
cudaError_t dispatch_backward_shared(const BackwardParams& p, const auto& launch) {
  if (p.is_modulated) return cudaErrorInvalidValue;
  const bool bare = p.dresidual == nullptr && !p.has_epilogue;
  return bare ? launch(BareBackward<T>{}) : launch(SharedBackward<T>{});
}

// Backward of strategies that have a separate kernel for an epilogue alone, if types are common.
template <typename T>
cudaError_t dispatch_backward(const BackwardParams& p, const auto& launch) {
  if (p.is_modulated) return cudaErrorInvalidValue;
  if constexpr (kIsCommon<T>) {
    if (p.dresidual == nullptr && p.has_epilogue) {
      return launch(NormOf<T, NoOtherGradient, MayActivate>{});
    }
  }
  return dispatch_backward_shared<T>(p, launch);
}

}  // namespace fused_layernorm

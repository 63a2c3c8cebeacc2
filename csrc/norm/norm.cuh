// A norm: the policies that together say what a kernel computes of a row. How rows are laid over
// the chip is the matter of the strategies in forward/ and backward/, which are written once over
// any norm. This file also chooses the norm that a launch needs, among those that there are kernels
// for.
#pragma once

#include "norm/affine.cuh"
#include "norm/epilogue.cuh"
#include "norm/prologue.cuh"
#include "norm/statistic.cuh"
#include "norm/types.cuh"

namespace fused_layernorm {

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

  // y of `kWidth` columns from x, the last step of every forward kernel. `EpilogueOfRow` is the
  // epilogue, or what Epilogue::for_row() made of it.
  template <typename EpilogueOfRow, int kWidth>
  static __device__ __forceinline__ Vec<Y, kWidth> finish(const ForwardParams& p,
                                                          const Vec<X, kWidth>& x, Acc mean,
                                                          Acc rstd, const Vec<W, kWidth>& weight,
                                                          const Vec<W, kWidth>& bias) {
    Acc values[kWidth], w[kWidth], b[kWidth];
    unpack(values, x);
    unpack(w, weight);
    unpack(b, bias);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      values[j] = Affine::apply(Statistic::normalize(values[j], mean, rstd), w[j], b[j]);
    }
    EpilogueOfRow::template apply<Y>(p, values);
    return round_to<Y>(values);
  }
};

// One row of forward, or a part of it from `first_col` on.
template <typename N>
struct ForwardRow {
  typename N::Prologue::template Row<typename N::Types> x;
  ColumnParameters<typename N::W> parameters;
  typename N::Y* y;

  __device__ __forceinline__ ForwardRow(const ForwardParams& p, int64_t row, int first_col)
      : x(p, row, first_col),
        parameters(N::Affine::template row<typename N::W>(p, row, first_col)),
        y(static_cast<typename N::Y*>(p.y) + (row * p.cols + first_col)) {}
};

template <typename T, typename Prologue, typename Epilogue>
using LayerNormOf = Norm<T, LayerNorm, Prologue, ColumnAffine, Epilogue>;

// Forward has kernels of their own for the bare norm, for one with an epilogue, and for one with a
// residual, which may have an epilogue as well.
template <typename T, typename Launch>
cudaError_t dispatch_forward(const ForwardParams& p, const Launch& launch) {
  if (p.residual != nullptr) return launch(LayerNormOf<T, Add, MayActivate>{});
  if (p.has_epilogue) return launch(LayerNormOf<T, Plain, Activate>{});
  return launch(LayerNormOf<T, Plain, Identity>{});
}

// Backward likewise, and there all that is fused is only possible: dresidual, too, may be absent.
template <typename T, typename Launch>
cudaError_t dispatch_backward(const BackwardParams& p, const Launch& launch) {
  if (p.dresidual != nullptr) return launch(LayerNormOf<T, MayAddGradient, MayActivate>{});
  if (p.has_epilogue) return launch(LayerNormOf<T, NoGradientBeside, MayActivate>{});
  return launch(LayerNormOf<T, NoGradientBeside, Identity>{});
}

// The same for backward kernels of which an epilogue alone is not worth one of its own.
template <typename T, typename Launch>
cudaError_t dispatch_backward_shared(const BackwardParams& p, const Launch& launch) {
  if (p.dresidual != nullptr || p.has_epilogue) {
    return launch(LayerNormOf<T, MayAddGradient, MayActivate>{});
  }
  return launch(LayerNormOf<T, NoGradientBeside, Identity>{});
}

}  // namespace fused_layernorm

// The gradients of the parameters: where dweight and dbias of a set of rows go.
#pragma once

#include "norm/row_gradient.cuh"
#include "plan/plan.h"

namespace fused_layernorm {

// Where the dweight and dbias of one set of rows go: to the outputs themselves if there is but one
// set, else to the set's place among the partial sums in the workspace.
template <typename N>
struct ParamGradSink {
  using Acc = typename N::Acc;
  using W = typename N::W;
  W* dweight;
  W* dbias;
  Acc* dweight_partial;
  Acc* dbias_partial;

  __device__ __forceinline__ ParamGradSink(const BackwardParams& p,
                                           const backward::PartialSums& partials, int set)
      : dweight(static_cast<W*>(p.dweight)),
        dbias(static_cast<W*>(p.dbias)),
        dweight_partial(nullptr),
        dbias_partial(nullptr) {
    if (partials.count > 1) {
      auto* sums = reinterpret_cast<Acc*>(static_cast<char*>(p.workspace) + partials.offset);
      dweight_partial = sums + int64_t{set} * p.cols;
      dbias_partial = sums + (int64_t{partials.count} + set) * p.cols;
    }
  }

  __device__ __forceinline__ bool wanted() const { return dweight || dbias; }

  template <int kWidth>
  __device__ __forceinline__ void store(int col, const Acc (&dw)[kWidth],
                                        const Acc (&db)[kWidth]) const {
    if (dweight_partial != nullptr) {
      fused_layernorm::store<Acc, kWidth>(dweight_partial + col, round_to<Acc>(dw));
      fused_layernorm::store<Acc, kWidth>(dbias_partial + col, round_to<Acc>(db));
      return;
    }
    if (dweight != nullptr) store_once<W, kWidth>(dweight + col, round_to<W>(dw));
    if (dbias != nullptr) store_once<W, kWidth>(dbias + col, round_to<W>(db));
  }
};

}  // namespace fused_layernorm

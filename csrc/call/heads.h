// SPDX-License-Identifier: Apache-2.0
// A call for heads: q and k are normalized by heads and rotated. As description.h and prepare.h
// have it for norms.
#pragma once

#include <optional>

#include "call/description.h"
#include "heads/backward.h"
#include "heads/forward.h"

namespace fused_layernorm {

// q or k: (batch, positions, heads, columns), or with seq_dim 2 (batch, heads, positions, columns).
struct HeadTensors {
  RawTensor x, weight, bias;
  RawTensor y;   // in backward dx
  RawTensor dy;  // backward
  void *dweight = nullptr, *dbias = nullptr;
};

// The tensors fit together, as the operators check (bindings/cuda/heads.cpp).
struct HeadsCall {
  HeadTensors q, k;    // k may be absent
  RawTensor cos, sin;  // of a rotated part
  int64_t rotary_dim = 0, seq_dim = 1;
  double eps = 0, weight_offset = 0;
  HeadStatistic statistic = HeadStatistic::kNone;
  bool round_before_weight = false;
  bool interleaved = false;
  bool inverse = false;  // rotates the other way
};

template <typename Plan>
struct PreparedHeads {
  HeadsParams params;
  Plan plan;
};
using PreparedHeadsForward = PreparedHeads<forward::Heads>;
using PreparedHeadsBackward = PreparedHeads<backward::Heads>;

// Whether rows are contiguous, and no two of them in one place, as kernels need it of q, k and
// their gradients.
bool has_rows(const RawTensor& x);

// False if there are no kernels for such heads. q has rows and positions.
bool prepare(const HeadsCall& call, PreparedHeadsForward& into);
bool prepare(const HeadsCall& call, const Device& device, PreparedHeadsBackward& into);

// As for norms.
void launch(const PreparedHeadsForward& prepared, cudaStream_t stream);
void launch(PreparedHeadsBackward& prepared, void* workspace, cudaStream_t stream);

}  // namespace fused_layernorm

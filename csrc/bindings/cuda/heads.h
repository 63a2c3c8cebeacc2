// SPDX-License-Identifier: Apache-2.0
// A call for heads on CUDA: its arguments, what describes q, k and v for the kernels, and launches.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <array>
#include <deque>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

#include "bindings/cuda/call.h"
#include "bindings/cuda/formula.h"
#include "bindings/driver.h"
#include "call/layout.h"
#include "heads/plan.h"

namespace [[gnu::visibility("hidden")]] fused_layernorm {

// Whether rows are contiguous, and no two of them in one place, as kernels need it of q, k and
// their gradients.
inline bool has_rows(const Tensor& x) {
  bool fits = x.strides()[3] == 1;
  for (int d = 0; d < 3; ++d) fits = fits && (x.sizes()[d] <= 1 || x.strides()[d] != 0);
  return fits;
}

// The strides of three dimensions; a dimension that is not there, or of size 1, has none.
inline HeadStrides strides_of(const Tensor& x, int64_t batch, int64_t position, int64_t head) {
  const auto at = [&](int64_t d) { return d >= 0 && x.sizes()[d] > 1 ? x.strides()[d] : 0; };
  return {at(batch), at(position), at(head)};
}

// Where q, k and v stand in one tensor of all their heads (bindings/schemas.cpp).
struct Packing {
  int64_t kv_heads = 0;
  bool by_head = false;

  // With by_head, how many heads stand together: those of q that belong to one of k, k and v.
  int64_t together(const Tensor& packed) const {
    return kv_heads > 0 ? packed.sizes()[2] / kv_heads : 3;
  }
  // How many heads of q follow each other, where others come between them; 0 where they lie as if
  // at one stride.
  int64_t group(const Tensor& packed) const {
    return by_head && together(packed) > 3 ? together(packed) - 2 : 0;
  }
  // A view of q, k or v: part 0, 1 or 2. Heads of q that are in groups are as if none came
  // between.
  Tensor part(const Tensor& packed, int i, int64_t seq_dim) const {
    const auto sizes = packed.sizes(), strides = packed.strides();
    const int64_t q_heads = sizes[2] - 2 * kv_heads, heads = i == 0 ? q_heads : kv_heads;
    const bool apart = by_head && !(i == 0 && group(packed) > 0);
    const int64_t step = apart ? together(packed) : 1;
    const int64_t first = i == 0 ? 0 : by_head ? step - 3 + i : q_heads + (i - 1) * kv_heads;
    std::array of_sizes{sizes[0], sizes[1], heads, sizes[3]};
    std::array of_strides{strides[0], strides[1], step * strides[2], strides[3]};
    if (seq_dim == 2) {
      std::swap(of_sizes[1], of_sizes[2]);
      std::swap(of_strides[1], of_strides[2]);
    }
    return view(packed, of_sizes.data(), of_strides.data(), 4, first * strides[2]);
  }
};

// What the operators have in common: their arguments, and the parameters of the launch that
// describe() fills in. Side 0 is q, side 1 is k: (batch, positions, heads, columns), or with
// seq_dim 2 (batch, heads, positions, columns). Side 2 is v, whose gradient is copied.
struct Heads {
  using Optional = std::optional<Tensor>;
  Tensor q;
  Optional k, weight[2], bias[2], cos, sin;
  int64_t rotary_dim = 0, seq_dim = 1;
  double eps = 0, weight_offset = 0;
  std::optional<std::string> statistic;
  bool round_before_weight = false, interleaved = false;
  bool inverse = false;  // rotates the other way
  Packing packing;
  bool is_packed = false;  // whether the launch needs more than q and k
  PackedHeadsParams params;

  // Of qk_norm_rope and its backward.
  Heads(Call& of, bool is_backward) : q(of.at<Tensor>(is_backward ? 2 : 0)) {
    of.read(k);
    read_norm(of, is_backward);
    of.read(inverse);
    if (is_backward) inverse = !inverse;
  }
  // Of qkv_norm_rope and its backward, without q and k.
  static Heads of_packed(Call& of, bool is_backward) {
    Heads a;
    a.read_norm(of, is_backward);
    of.read(a.packing.kv_heads, a.packing.by_head);
    a.inverse = is_backward;
    return a;
  }
  // Makes q and k parts of one tensor.
  void take_parts(const Tensor& packed) {
    CHECK_ARGUMENT(packed.dim() == 4 && packing.kv_heads >= 0 &&
                       packed.sizes()[2] >= 2 * packing.kv_heads &&
                       (!packing.by_head || packing.kv_heads == 0 ||
                        packed.sizes()[2] % packing.kv_heads == 0),
                   "qkv must have four dimensions, and the heads of q, k and v");
    const Tensor read = has_rows(packed) ? packed : contiguous_of(packed);
    q = packing.part(read, 0, seq_dim);
    k = packing.part(read, 1, seq_dim);
    const int64_t group = packing.group(read);
    if (group == 0) return;
    if (heads(0) > (1 << 16)) throw NoKernel();  // the kernels' division would be wrong
    is_packed = true;
    params.inverse_group = static_cast<uint32_t>(((int64_t{1} << 32) + group - 1) / group);
    params.x_group = 2 * read.strides()[2];
  }
  bool has(int side) const { return side == 0 || k; }
  const Tensor& x(int side) const { return side == 0 ? q : *k; }
  ScalarType type() const { return q.scalar_type(); }
  int64_t positions() const { return q.sizes()[0] * q.sizes()[seq_dim]; }
  int64_t heads(int side) const { return has(side) ? x(side).sizes()[3 - seq_dim] : 0; }
  int64_t cols() const { return q.sizes()[3]; }
  bool has_work() const { return positions() != 0 && heads(0) + heads(1) != 0; }

  // Points the parameters to the tensors, or to contiguous copies of those that kernels do not
  // read where they lie.
  void describe() {
    params.type = data_type(type());
    params.positions = static_cast<int32_t>(positions());
    params.seq = static_cast<int32_t>(q.sizes()[seq_dim]);
    params.cols = static_cast<int32_t>(cols());
    params.rotary = static_cast<int32_t>(rotary_dim);
    params.statistic = !statistic            ? HeadStatistic::kNone
                       : *statistic == "rms" ? HeadStatistic::kRms
                                             : HeadStatistic::kLayer;
    params.interleaved = interleaved;
    params.sin_sign = inverse ? -1.0f : 1.0f;
    params.weight_offset = static_cast<float>(weight_offset);
    params.eps = static_cast<float>(eps);
    params.inverse_cols = Scalar(1.0 / static_cast<double>(cols()));
    if (cos) {
      params.cos = place_angles(*cos, params.cos_strides);
      params.sin = place_angles(*sin, params.sin_strides);
      params.angles_are_float = cos->scalar_type() == ScalarType::Float;
      params.doubled = cos->sizes()[cos->dim() - 1] == rotary_dim;
    }
    for (int i = 0; i < 2 && has(i); ++i) {
      HeadSide& side = params.side[i];
      side.heads = static_cast<int32_t>(heads(i));
      side.x = place_rows(x(i), side.x_strides);
      side.rounds = round_before_weight && weight[i];
      side.weight = hold_parameter(weight[i], side.weight_is_float);
      side.bias = hold_parameter(bias[i], side.bias_is_float);
    }
  }
  const void* place_rows(const Tensor& rows, HeadStrides& strides) {
    const Tensor& read = hold(has_rows(rows) ? rows : contiguous_of(rows));
    strides = strides_of(read, 0, seq_dim, 3 - seq_dim);
    return placed(read, strides);
  }

  // A new tensor for the results of one side, of x's shape, type and, where x has rows, order of
  // dimensions in memory. It has rows itself: those of x may overlap, so that another dimension
  // would come after the columns.
  Tensor result(int i) {
    if (!has(i)) return none(q, type());
    Tensor y = has_rows(x(i)) ? empty_in_order(x(i), type()) : empty_like(x(i), type());
    if (!has_rows(y)) y = empty_like(x(i), type());
    params.side[i].y = y.mutable_data_ptr();
    params.side[i].y_strides = strides_of(y, 0, seq_dim, 3 - seq_dim);
    return y;
  }

  // A new gradient of a parameter, or an empty tensor.
  Tensor gradient(bool needed, const Optional& parameter, void*& data) const {
    const ScalarType own = parameter ? parameter->scalar_type() : type();
    if (!needed || !parameter) return none(q, own);
    Tensor result = empty_like(*parameter, own);
    if (!has_work()) torch::stable::zero_(result);
    data = result.mutable_data_ptr();
    return result;
  }

  std::string words() const {
    std::ostringstream text;
    text << positions() << " positions of " << heads(0) << " and " << heads(1) << " heads of "
         << cols() << " columns of " << name_of(data_type(type()));
    return text.str();
  }
  void launch_forward(const char* direction) {
    const auto run = [&](auto& params) {
      const auto plan = forward::make_heads_plan(params);
      if (!plan || is_formula_forced()) throw NoKernel();
      check_launch(launch_heads_forward(params, *plan, current_stream(q)), direction);
    };
    HeadsParams both = q_and_k(params);
    is_packed ? run(params) : run(both);
  }
  void launch_backward() {
    const auto run = [&](auto& params) {
      const auto plan = backward::make_heads_plan(params, device_of(q));
      if (!plan || is_formula_forced()) throw NoKernel();
      Optional workspace;
      if (plan->workspace_bytes > 0) {
        workspace = empty(q, &plan->workspace_bytes, 1, ScalarType::Byte);
        params.workspace = workspace->mutable_data_ptr();
      }
      check_launch(launch_heads_backward(params, *plan, current_stream(q)), "backward");
    };
    HeadsParams both = q_and_k(params);
    is_packed ? run(params) : run(both);
  }

 private:
  Heads() = default;
  void read_norm(Call& of, bool is_backward) {
    of.read(weight[0], weight[1], bias[0], bias[1], cos, sin, rotary_dim, seq_dim, eps, statistic,
            weight_offset);
    if (!is_backward) of.read(round_before_weight);
    of.read(interleaved);
  }
  void check_launch(cudaError_t error, const char* direction) const {
    if (error == cudaSuccess) return;
    throw std::runtime_error(std::string("fused_layernorm: CUDA error: ") +
                             cudaGetErrorString(error) + ", at the launch of " + direction +
                             " for " + words());
  }
  const void* place_angles(const Tensor& angles, HeadStrides& strides) {
    const int64_t last = angles.dim() - 1;
    const bool fits = angles.sizes()[last] == 1 || angles.strides()[last] == 1;
    const Tensor& read = hold(fits ? angles : contiguous_of(angles));
    strides = strides_of(read, last - 2, last - 1, -1);
    return placed(read, strides);
  }
  // The address of a tensor's rows, which say whether all begin at multiples of 16 bytes.
  const void* placed(const Tensor& rows, const HeadStrides& strides) {
    const int64_t bytes = size_of(data_type(rows.scalar_type()));
    for (const int64_t stride : {strides.batch, strides.position, strides.head}) {
      params.aligned = params.aligned && stride * bytes % kVectorBytes == 0;
    }
    params.aligned = params.aligned && is_aligned(rows.const_data_ptr());
    return rows.const_data_ptr();
  }
  const void* hold_parameter(const Optional& parameter, bool& is_float) {
    if (!parameter) return nullptr;
    is_float = parameter->scalar_type() == ScalarType::Float;
    return hold(aligned_of(*parameter)).const_data_ptr();
  }
  const Tensor& hold(const Tensor& tensor) { return held_.emplace_back(tensor); }
  std::deque<Tensor> held_;
};

}  // namespace fused_layernorm

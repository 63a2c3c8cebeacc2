// SPDX-License-Identifier: Apache-2.0
// The operators of heads on CUDA: check, describe q and k, allocate, plan, launch. Heads have no
// direct call, so that this file alone describes them.
#include <torch/csrc/stable/ops.h>

#include <array>
#include <cmath>
#include <deque>
#include <sstream>
#include <stdexcept>
#include <string>

#include "bindings/cuda/call.h"
#include "bindings/cuda/formula.h"
#include "bindings/cuda/ops.h"
#include "bindings/driver.h"
#include "call/layout.h"
#include "heads/plan.h"

namespace fused_layernorm {
namespace {

using Optional = std::optional<Tensor>;

// Whether rows are contiguous, and no two of them in one place, as kernels need it of q, k and
// their gradients.
bool has_rows(const Tensor& x) {
  bool fits = x.strides()[3] == 1;
  for (int d = 0; d < 3; ++d) fits = fits && (x.sizes()[d] <= 1 || x.strides()[d] != 0);
  return fits;
}

// The strides of three dimensions; a dimension that is not there, or of size 1, has none.
HeadStrides strides_of(const Tensor& x, int64_t batch, int64_t position, int64_t head) {
  const auto at = [&](int64_t d) { return d >= 0 && x.sizes()[d] > 1 ? x.strides()[d] : 0; };
  return {at(batch), at(position), at(head)};
}

// What qk_norm_rope and its backward have in common: their arguments, and the parameters of the
// launch that describe() fills in. Side 0 is q, side 1 is k: (batch, positions, heads, columns), or
// with seq_dim 2 (batch, heads, positions, columns).
struct Heads {
  Tensor q;
  Optional k, weight[2], bias[2], cos, sin;
  int64_t rotary_dim = 0, seq_dim = 1;
  double eps = 0, weight_offset = 0;
  std::optional<std::string> statistic;
  bool round_before_weight = false, interleaved = false;
  bool inverse = false;  // rotates the other way
  HeadsParams params;

  Heads(Call& of, bool is_backward) : q(of.at<Tensor>(is_backward ? 2 : 0)) {
    of.read(k, weight[0], weight[1], bias[0], bias[1], cos, sin, rotary_dim, seq_dim, eps,
            statistic, weight_offset);
    if (!is_backward) of.read(round_before_weight);
    of.read(interleaved, inverse);
    if (is_backward) inverse = !inverse;
  }
  bool has(int side) const { return side == 0 || k; }
  const Tensor& x(int side) const { return side == 0 ? q : *k; }
  ScalarType type() const { return q.scalar_type(); }
  int64_t positions() const { return q.sizes()[0] * q.sizes()[seq_dim]; }
  int64_t heads(int side) const { return has(side) ? x(side).sizes()[3 - seq_dim] : 0; }
  int64_t cols() const { return q.sizes()[3]; }
  bool has_work() const { return positions() != 0 && heads(0) + heads(1) != 0; }

  // Points the parameters to the tensors, or to contiguous copies of those that kernels do not read
  // where they lie.
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
  // would come behind the columns.
  Tensor result(int i) {
    if (!has(i)) return none(q, type());
    Tensor y = has_rows(x(i)) ? empty_in_order(x(i), type()) : empty_like(x(i), type());
    if (!has_rows(y)) y = empty_like(x(i), type());
    params.side[i].y = y.mutable_data_ptr();
    params.side[i].y_strides = strides_of(y, 0, seq_dim, 3 - seq_dim);
    return y;
  }

  std::string words() const {
    std::ostringstream text;
    text << positions() << " positions of " << heads(0) << " and " << heads(1) << " heads of "
         << cols() << " columns of " << name_of(data_type(type()));
    return text.str();
  }
  // Puts the arguments back into their places.
  void put_back(Call& call, bool is_backward) const {
    call.put_all(is_backward ? 2 : 0, q, k, weight[0], weight[1], bias[0], bias[1], cos, sin,
                 rotary_dim, seq_dim, eps, statistic, weight_offset);
    if (is_backward) {
      call.put_all(15, interleaved, !inverse);
    } else {
      call.put_all(13, round_before_weight, interleaved, inverse);
    }
  }
  void check_launch(cudaError_t error, const char* direction) const {
    if (error == cudaSuccess) return;
    throw std::runtime_error(std::string("fused_layernorm: CUDA error: ") +
                             cudaGetErrorString(error) + ", at the launch of " + direction +
                             " for " + words());
  }

 private:
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

// Whether kernels read a parameter, cos or sin of this type and device.
bool is_read(const Tensor& tensor, const Tensor& q) {
  const ScalarType type = tensor.scalar_type();
  return is_beside(tensor, q) && (type == q.scalar_type() || type == ScalarType::Float);
}

void check_angles(const Heads& a, const Optional& angles, const char* name) {
  CHECK_ARGUMENT(angles.has_value() == (a.rotary_dim > 0), name, " belongs to a rotated part");
  if (!angles) return;
  const int64_t dims = angles->dim();
  const auto sizes = angles->sizes();
  const bool of_samples = dims == 3 && (sizes[0] == a.q.sizes()[0] || sizes[0] == 1);
  const bool fits = (dims == 2 || of_samples) && sizes[dims - 2] == a.q.sizes()[a.seq_dim] &&
                    (sizes[dims - 1] == a.rotary_dim || 2 * sizes[dims - 1] == a.rotary_dim);
  CHECK_ARGUMENT(fits && is_read(*angles, a.q) && angles->scalar_type() == a.cos->scalar_type() &&
                     sizes[dims - 1] == a.cos->sizes()[a.cos->dim() - 1],
                 name,
                 " must have rotary_dim values or half of them for each position, be of q's "
                 "dtype or float32, and be as cos is");
}

void check(const Heads& a) {
  CHECK_ARGUMENT(a.q.dim() == 4 && (a.seq_dim == 1 || a.seq_dim == 2),
                 "q must have four dimensions, and seq_dim be 1 or 2");
  CHECK_ARGUMENT(a.rotary_dim >= 0 && a.rotary_dim <= a.cols() && a.cols() <= kMostExtent,
                 "rotary_dim must be at most the size of a head");
  const bool named = !a.statistic || *a.statistic == "rms" || *a.statistic == "layer";
  CHECK_ARGUMENT(named && !std::isnan(a.eps) && std::isfinite(a.weight_offset),
                 "statistic must be None, 'rms' or 'layer', eps and weight_offset numbers");
  CHECK_ARGUMENT(a.statistic || a.cos, "without a statistic there must be cos and sin");
  for (int side = 0; side < 2; ++side) {
    for (const Optional* parameter : {&a.weight[side], &a.bias[side]}) {
      if (!*parameter) continue;
      CHECK_ARGUMENT(a.statistic && a.has(side) && (*parameter)->dim() == 1 &&
                         (*parameter)->sizes()[0] == a.cols() && is_read(**parameter, a.q),
                     "weight and bias must belong to a norm, have a head's size and be of q's "
                     "device, and of its dtype or float32");
    }
    if (!a.has(side)) continue;
    CHECK_ARGUMENT(a.weight_offset == 0 || a.weight[side], "weight_offset belongs to a weight");
    const Tensor& x = a.x(side);
    bool fits = x.dim() == 4 && x.scalar_type() == a.type() && is_beside(x, a.q);
    for (const int64_t d : {int64_t{0}, a.seq_dim, int64_t{3}}) {
      fits = fits && x.sizes()[d] == a.q.sizes()[d];
    }
    CHECK_ARGUMENT(fits, "q and k may differ in their heads only");
    if (a.positions() > kMostExtent || x.sizes()[3 - a.seq_dim] > kMostExtent) throw NoKernel();
  }
  check_angles(a, a.cos, "cos");
  check_angles(a, a.sin, "sin");
}

void qk_norm_rope(StableIValue* stack, uint64_t arguments, uint64_t results) {
  Call call(stack, arguments, results);
  Heads a(call, false);
  const auto by_kernel = [&] {
    check(a);
    const CurrentDevice guard(a.q);
    a.describe();
    const Tensor q_out = a.result(0), k_out = a.result(1);
    if (a.has_work()) {
      const auto plan = forward::make_heads_plan(a.params);
      if (!plan || is_formula_forced()) throw NoKernel();
      a.check_launch(launch_heads_forward(a.params, *plan, current_stream(a.q)), "forward");
    }
    call.give(std::array{&q_out, &k_out});
  };
  run_or_formula("qk_norm_rope", stack, by_kernel, [&] { a.put_back(call, false); });
}

void run_backward(Heads& a, const Optional (&dy)[2], bool needs_dweight, bool needs_dbias,
                  Call& call) {
  const Tensor& q = a.q;
  check(a);
  CHECK_ARGUMENT(a.statistic, "a rotation alone is its own backward, with inverse");
  CHECK_ARGUMENT(dy[1].has_value() == a.k.has_value(), "dk_out belongs to k");
  const CurrentDevice guard(q);
  a.describe();
  const auto gradient = [&](bool needed, const Optional& parameter, void*& data) {
    const ScalarType type = parameter ? parameter->scalar_type() : a.type();
    if (!needed || !parameter) return none(q, type);
    Tensor result = empty_like(*parameter, type);
    if (!a.has_work()) torch::stable::zero_(result);
    data = result.mutable_data_ptr();
    return result;
  };
  std::array<Optional, 2> dx, dweight, dbias;
  for (int i = 0; i < 2; ++i) {
    HeadSide& side = a.params.side[i];
    if (a.has(i)) {
      bool fits = dy[i]->dim() == 4 && dy[i]->scalar_type() == a.type() && is_beside(*dy[i], q);
      for (int64_t d = 0; fits && d < 4; ++d) fits = dy[i]->sizes()[d] == a.x(i).sizes()[d];
      CHECK_ARGUMENT(fits, "gradients must be as the results are");
      side.dy = a.place_rows(*dy[i], side.dy_strides);
    }
    dx[i] = a.result(i);
    dweight[i] = gradient(needs_dweight, a.weight[i], side.dweight);
    dbias[i] = gradient(needs_dbias, a.bias[i], side.dbias);
  }
  if (a.has_work()) {
    const auto plan = backward::make_heads_plan(a.params, device_of(q));
    if (!plan || is_formula_forced()) throw NoKernel();
    Optional workspace;
    if (plan->workspace_bytes > 0) {
      workspace = empty(q, &plan->workspace_bytes, 1, ScalarType::Byte);
      a.params.workspace = workspace->mutable_data_ptr();
    }
    a.check_launch(launch_heads_backward(a.params, *plan, current_stream(q)), "backward");
  }
  call.give<6>({&*dx[0], &*dx[1], &*dweight[0], &*dweight[1], &*dbias[0], &*dbias[1]});
}

void qk_norm_rope_backward(StableIValue* stack, uint64_t arguments, uint64_t results) {
  Call call(stack, arguments, results);
  const Optional dy[2] = {call.at<Tensor>(0), call.at<Optional>(1)};
  Heads a(call, true);
  bool needs_dweight = false, needs_dbias = false;
  call.read(needs_dweight, needs_dbias);
  run_or_formula(
      "qk_norm_rope_backward", stack,
      [&] { run_backward(a, dy, needs_dweight, needs_dbias, call); },
      [&] {
        call.put_all(0, *dy[0], dy[1]);
        a.put_back(call, true);
        call.put_all(17, needs_dweight, needs_dbias);
      });
}

}  // namespace

void register_head_kernels(torch::stable::detail::StableLibrary& library) {
  library.impl("qk_norm_rope", &qk_norm_rope);
  library.impl("qk_norm_rope_backward", &qk_norm_rope_backward);
}

}  // namespace fused_layernorm

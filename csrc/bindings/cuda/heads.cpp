// SPDX-License-Identifier: Apache-2.0
// The operators of heads on CUDA: check, describe q and k, allocate, plan, launch.
#include <torch/csrc/stable/ops.h>

#include <array>
#include <cmath>
#include <deque>
#include <string>
#include <utility>

#include "bindings/cuda/call.h"
#include "bindings/cuda/ops.h"
#include "bindings/driver.h"
#include "call/heads.h"

namespace fused_layernorm {
namespace {

using Optional = std::optional<Tensor>;

// What qk_norm_rope and its backward have in common: their arguments, and the description that
// describe() completes. Side 0 is q, side 1 is k.
struct Heads {
  Tensor q;
  Optional k, weight[2], bias[2], cos, sin;
  std::optional<std::string> statistic;
  HeadsCall call;

  Heads(Call& of, bool is_backward) : q(of.at<Tensor>(is_backward ? 2 : 0)) {
    of.read(k, weight[0], weight[1], bias[0], bias[1], cos, sin, call.rotary_dim, call.seq_dim,
            call.eps, statistic, call.weight_offset);
    if (!is_backward) of.read(call.round_before_weight);
    of.read(call.interleaved, call.inverse);
    if (is_backward) call.inverse = !call.inverse;
    if (statistic) {
      call.statistic = *statistic == "rms" ? HeadStatistic::kRms : HeadStatistic::kLayer;
    }
  }
  bool has(int side) const { return side == 0 || k; }
  const Tensor& x(int side) const { return side == 0 ? q : *k; }
  HeadTensors& side(int side) { return side == 0 ? call.q : call.k; }
  ScalarType type() const { return q.scalar_type(); }
  int64_t positions() const { return q.sizes()[0] * q.sizes()[call.seq_dim]; }
  int64_t heads(int side) const { return has(side) ? x(side).sizes()[3 - call.seq_dim] : 0; }
  int64_t cols() const { return q.sizes()[3]; }
  bool has_rows() const { return positions() != 0 && heads(0) + heads(1) != 0; }

  // Points the description to the tensors, or to contiguous copies of those that kernels do not
  // read where they lie.
  void describe() {
    for (const auto& [angles, into] : {std::pair(&cos, &call.cos), std::pair(&sin, &call.sin)}) {
      if (!*angles) continue;
      const int64_t last = (*angles)->dim() - 1;
      const bool fits = (*angles)->sizes()[last] == 1 || (*angles)->strides()[last] == 1;
      *into = hold(fits ? **angles : contiguous_of(**angles));
    }
    for (int i = 0; i < 2 && has(i); ++i) {
      side(i).x = hold_rows(x(i));
      if (weight[i]) side(i).weight = hold(*prepare_parameter(weight[i], weight[i]->scalar_type()));
      if (bias[i]) side(i).bias = hold(*prepare_parameter(bias[i], bias[i]->scalar_type()));
    }
  }
  RawTensor hold_rows(const Tensor& rows) {
    return hold(fused_layernorm::has_rows(raw(rows)) ? rows : contiguous_of(rows));
  }

  // A new tensor for the results of one side, of x's shape, type and, where x has rows, order of
  // dimensions in memory. It has rows itself: those of x may overlap, so that another dimension
  // would come behind the columns.
  Tensor result(int i) {
    if (!has(i)) return none(q, type());
    Tensor y = fused_layernorm::has_rows(raw(x(i))) ? empty_in_order(x(i), type())
                                                    : empty_like(x(i), type());
    if (!fused_layernorm::has_rows(raw(y))) y = empty_like(x(i), type());
    side(i).y = raw(y);
    return y;
  }

  void check_is_ready(bool is_ready) const {
    CHECK_ARGUMENT(is_ready, "no kernel takes ", positions(), " positions of ", heads(0), " and ",
                   heads(1), " heads of ", cols(), " columns of ", name_of(data_type(type())));
  }

 private:
  RawTensor hold(const Tensor& tensor) { return raw(held_.emplace_back(tensor)); }
  std::deque<Tensor> held_;
};

// Whether kernels read a parameter, cos or sin of this type and device.
bool is_read(const Tensor& tensor, const Tensor& q) {
  const ScalarType type = tensor.scalar_type();
  return is_beside(tensor, q) && (type == q.scalar_type() || type == ScalarType::Float);
}

void check_angles(const Heads& a, const Optional& angles, const char* name) {
  CHECK_ARGUMENT(angles.has_value() == (a.call.rotary_dim > 0), name, " belongs to a rotated part");
  if (!angles) return;
  const int64_t dims = angles->dim();
  const auto sizes = angles->sizes();
  const bool of_samples = dims == 3 && (sizes[0] == a.q.sizes()[0] || sizes[0] == 1);
  const bool fits =
      (dims == 2 || of_samples) && sizes[dims - 2] == a.q.sizes()[a.call.seq_dim] &&
      (sizes[dims - 1] == a.call.rotary_dim || 2 * sizes[dims - 1] == a.call.rotary_dim);
  CHECK_ARGUMENT(fits && is_read(*angles, a.q) && angles->scalar_type() == a.cos->scalar_type() &&
                     sizes[dims - 1] == a.cos->sizes()[a.cos->dim() - 1],
                 name,
                 " must have rotary_dim values or half of them for each position, be of q's "
                 "dtype or float32, and be as cos is");
}

void check(const Heads& a) {
  CHECK_ARGUMENT(a.q.dim() == 4 && (a.call.seq_dim == 1 || a.call.seq_dim == 2),
                 "q must have four dimensions, and seq_dim be 1 or 2");
  CHECK_ARGUMENT(a.call.rotary_dim >= 0 && a.call.rotary_dim <= a.cols() && a.cols() <= kMostExtent,
                 "rotary_dim must be at most the size of a head");
  const bool named = !a.statistic || *a.statistic == "rms" || *a.statistic == "layer";
  CHECK_ARGUMENT(named && !std::isnan(a.call.eps) && std::isfinite(a.call.weight_offset),
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
    CHECK_ARGUMENT(a.call.weight_offset == 0 || a.weight[side],
                   "weight_offset belongs to a weight");
    const Tensor& x = a.x(side);
    bool fits = x.dim() == 4 && x.scalar_type() == a.type() && is_beside(x, a.q);
    for (const int64_t d : {int64_t{0}, a.call.seq_dim, int64_t{3}}) {
      fits = fits && x.sizes()[d] == a.q.sizes()[d];
    }
    CHECK_ARGUMENT(fits, "q and k may differ in their heads only");
    CHECK_ARGUMENT(a.positions() <= kMostExtent && x.sizes()[3 - a.call.seq_dim] <= kMostExtent,
                   "expected at most ", kMostExtent, " positions and heads");
  }
  check_angles(a, a.cos, "cos");
  check_angles(a, a.sin, "sin");
}

void qk_norm_rope(StableIValue* stack, uint64_t arguments, uint64_t results) {
  Call call(stack, arguments, results);
  Heads a(call, false);
  check(a);
  const CurrentDevice guard(a.q);
  a.describe();
  const Tensor q_out = a.result(0), k_out = a.result(1);
  if (a.has_rows()) {
    PreparedHeadsForward prepared;
    a.check_is_ready(prepare(a.call, prepared));
    launch(prepared, current_stream(a.q));
  }
  call.give({&q_out, &k_out});
}

void qk_norm_rope_backward(StableIValue* stack, uint64_t arguments, uint64_t results) {
  Call call(stack, arguments, results);
  const Optional dy[2] = {call.at<Tensor>(0), call.at<Optional>(1)};
  Heads a(call, true);
  bool needs_dweight = false, needs_dbias = false;
  call.read(needs_dweight, needs_dbias);
  const Tensor& q = a.q;
  check(a);
  CHECK_ARGUMENT(a.statistic, "a rotation alone is its own backward, with inverse");
  CHECK_ARGUMENT(dy[1].has_value() == a.k.has_value(), "dk_out belongs to k");
  const CurrentDevice guard(q);
  a.describe();
  const auto gradient = [&](bool needed, const Optional& parameter, void*& data) {
    const ScalarType type = parameter ? parameter->scalar_type() : a.type();
    return new_gradient(needed && parameter, parameter, type, q, !a.has_rows(), data);
  };
  std::array<Optional, 2> dx, dweight, dbias;
  for (int i = 0; i < 2; ++i) {
    HeadTensors& side = a.side(i);
    if (a.has(i)) {
      bool fits = dy[i]->dim() == 4 && dy[i]->scalar_type() == a.type() && is_beside(*dy[i], q);
      for (int64_t d = 0; fits && d < 4; ++d) fits = dy[i]->sizes()[d] == a.x(i).sizes()[d];
      CHECK_ARGUMENT(fits, "gradients must be as the results are");
      side.dy = a.hold_rows(*dy[i]);
    }
    dx[i] = a.result(i);
    dweight[i] = gradient(needs_dweight, a.weight[i], side.dweight);
    dbias[i] = gradient(needs_dbias, a.bias[i], side.dbias);
  }
  if (a.has_rows()) {
    PreparedHeadsBackward prepared;
    a.check_is_ready(prepare(a.call, device_of(q), prepared));
    const Workspace workspace(q, prepared.plan.workspace_bytes);
    launch(prepared, workspace.data(), current_stream(q));
  }
  call.give({&*dx[0], &*dx[1], &*dweight[0], &*dweight[1], &*dbias[0], &*dbias[1]});
}

}  // namespace

void register_head_kernels(torch::stable::detail::StableLibrary& library) {
  library.impl("qk_norm_rope", &qk_norm_rope);
  library.impl("qk_norm_rope_backward", &qk_norm_rope_backward);
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// The operators of heads on CUDA: check, describe q and k, allocate, plan, launch.
#include <torch/csrc/stable/ops.h>

#include <array>
#include <cmath>
#include <deque>
#include <string>

#include "bindings/cuda/call.h"
#include "bindings/driver.h"
#include "call/heads.h"

namespace fused_layernorm {
namespace {

using Optional = std::optional<Tensor>;

// The arguments that qk_norm_rope and its backward have in common. Side 0 is q, side 1 is k.
struct HeadArguments {
  Tensor q;
  Optional k, weight[2], bias[2], cos, sin;
  int64_t rotary_dim, seq_dim;
  double eps;
  std::optional<std::string> statistic;
  double weight_offset;
  bool rounds = false, interleaved, inverse;

  HeadArguments(Call& call, bool is_backward) : q(call.at<Tensor>(is_backward ? 2 : 0)) {
    call.read(k, weight[0], weight[1], bias[0], bias[1], cos, sin, rotary_dim, seq_dim, eps,
              statistic, weight_offset);
    if (!is_backward) call.read(rounds);
    call.read(interleaved, inverse);
    if (is_backward) inverse = !inverse;
  }
  bool has(int side) const { return side == 0 || k; }
  const Tensor& x(int side) const { return side == 0 ? q : *k; }
  ScalarType type() const { return q.scalar_type(); }
  int64_t positions() const { return q.sizes()[0] * q.sizes()[seq_dim]; }
  int64_t heads(int side) const { return has(side) ? x(side).sizes()[3 - seq_dim] : 0; }
  int64_t cols() const { return q.sizes()[3]; }
  bool has_rows() const { return positions() != 0 && heads(0) + heads(1) != 0; }
};

// Whether kernels read a parameter, cos or sin of this type and device.
bool is_read(const Tensor& tensor, const Tensor& q) {
  const ScalarType type = tensor.scalar_type();
  return is_beside(tensor, q) && (type == q.scalar_type() || type == ScalarType::Float);
}

void check_angles(const HeadArguments& a, const Optional& angles, const char* name) {
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

void check(const HeadArguments& a) {
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
    CHECK_ARGUMENT(a.positions() <= kMostExtent && x.sizes()[3 - a.seq_dim] <= kMostExtent,
                   "expected at most ", kMostExtent, " positions and heads");
  }
  check_angles(a, a.cos, "cos");
  check_angles(a, a.sin, "sin");
}

// A new tensor of x's shape, type and, where x has rows, order of dimensions in memory. It has rows
// itself: those of x may overlap, so that another dimension would come behind the columns.
Tensor dense_like(const Tensor& x) {
  if (has_rows(raw(x))) {
    const Tensor result = empty_in_order(x, x.scalar_type());
    if (has_rows(raw(result))) return result;
  }
  return empty_like(x, x.scalar_type());
}

// The description of a call, and the tensors that it points into.
class HeadOperands {
 public:
  HeadsCall call;

  explicit HeadOperands(const HeadArguments& a) {
    call.rotary_dim = a.rotary_dim;
    call.seq_dim = a.seq_dim;
    call.eps = a.eps;
    call.weight_offset = a.weight_offset;
    call.statistic = !a.statistic            ? HeadStatistic::kNone
                     : *a.statistic == "rms" ? HeadStatistic::kRms
                                             : HeadStatistic::kLayer;
    call.round_before_weight = a.rounds;
    call.interleaved = a.interleaved;
    call.inverse = a.inverse;
    if (a.cos) {
      call.cos = hold_angles(*a.cos);
      call.sin = hold_angles(*a.sin);
    }
    for (int i = 0; i < 2 && a.has(i); ++i) {
      side(i).x = hold_rows(a.x(i));
      side(i).weight = hold_parameter(a.weight[i]);
      side(i).bias = hold_parameter(a.bias[i]);
    }
  }

  HeadTensors& side(int i) { return i == 0 ? call.q : call.k; }

  // A new tensor for the results of one side.
  Tensor result(const HeadArguments& a, int i) {
    if (!a.has(i)) return none(a.q, a.type());
    const Tensor y = dense_like(a.x(i));
    side(i).y = raw(y);
    return y;
  }

  // A tensor, or a contiguous copy if it has no rows.
  RawTensor hold_rows(const Tensor& x) { return hold(has_rows(raw(x)) ? x : contiguous_of(x)); }

 private:
  RawTensor hold(const Tensor& tensor) { return raw(held_.emplace_back(tensor)); }

  RawTensor hold_angles(const Tensor& angles) {
    const int64_t last = angles.dim() - 1;
    const bool fits = angles.sizes()[last] == 1 || angles.strides()[last] == 1;
    return hold(fits ? angles : contiguous_of(angles));
  }

  RawTensor hold_parameter(const Optional& parameter) {
    if (!parameter) return {};
    return hold(*prepare_parameter(parameter, parameter->scalar_type()));
  }

  std::deque<Tensor> held_;
};

void check_is_ready(bool is_ready, const HeadArguments& a) {
  CHECK_ARGUMENT(is_ready, "no kernel takes ", a.positions(), " positions of ", a.heads(0), " and ",
                 a.heads(1), " heads of ", a.cols(), " columns of ", name_of(data_type(a.type())));
}

void qk_norm_rope(StableIValue* stack, uint64_t arguments, uint64_t results) {
  Call call(stack, arguments, results);
  const HeadArguments a(call, false);
  check(a);
  const CurrentDevice guard(a.q);
  HeadOperands operands(a);
  const Tensor q_out = operands.result(a, 0), k_out = operands.result(a, 1);
  if (a.has_rows()) {
    PreparedHeadsForward prepared;
    check_is_ready(prepare(operands.call, prepared), a);
    launch(prepared, current_stream(a.q));
  }
  call.give({&q_out, &k_out});
}

void qk_norm_rope_backward(StableIValue* stack, uint64_t arguments, uint64_t results) {
  Call call(stack, arguments, results);
  const auto dq_out = call.at<Tensor>(0);
  const auto dk_out = call.at<Optional>(1);
  const HeadArguments a(call, true);
  bool needs_dweight = false, needs_dbias = false;
  call.read(needs_dweight, needs_dbias);
  const Tensor& q = a.q;
  check(a);
  CHECK_ARGUMENT(a.statistic, "a rotation alone is its own backward, with inverse");
  CHECK_ARGUMENT(dk_out.has_value() == a.k.has_value(), "dk_out belongs to k");
  const CurrentDevice guard(q);
  HeadOperands operands(a);
  // The gradient of a weight or bias; of shape (0,) unless it is needed.
  const auto gradient = [&](bool needed, const Optional& parameter, void*& data) {
    if (!needed || !parameter) return none(q, parameter ? parameter->scalar_type() : a.type());
    const int64_t cols = a.cols();
    Tensor result = empty(q, &cols, 1, parameter->scalar_type());
    if (!a.has_rows()) torch::stable::zero_(result);
    data = result.mutable_data_ptr();
    return result;
  };
  std::array<Optional, 2> dx, dweight, dbias;
  for (int i = 0; i < 2; ++i) {
    HeadTensors& side = operands.side(i);
    if (a.has(i)) {
      const Tensor& dy = i == 0 ? dq_out : *dk_out;
      bool fits = dy.dim() == 4 && dy.scalar_type() == a.type() && is_beside(dy, q);
      for (int64_t d = 0; fits && d < 4; ++d) fits = dy.sizes()[d] == a.x(i).sizes()[d];
      CHECK_ARGUMENT(fits, "gradients must be as the results are");
      side.dy = operands.hold_rows(dy);
    }
    dx[i] = operands.result(a, i);
    dweight[i] = gradient(needs_dweight, a.weight[i], side.dweight);
    dbias[i] = gradient(needs_dbias, a.bias[i], side.dbias);
  }
  if (a.has_rows()) {
    PreparedHeadsBackward prepared;
    check_is_ready(prepare(operands.call, device_of(q), prepared), a);
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

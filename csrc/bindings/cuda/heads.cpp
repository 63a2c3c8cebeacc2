// SPDX-License-Identifier: Apache-2.0
// The operators of heads on CUDA: check, describe q and k, allocate, plan, launch.
#include <torch/csrc/stable/ops.h>

#include <array>
#include <cmath>
#include <deque>
#include <string>

#include "backward/heads.h"
#include "bindings/cuda/call.h"
#include "bindings/cuda/modulation.h"
#include "bindings/driver.h"
#include "forward/heads.h"

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

  HeadArguments(Call& call, bool is_backward) : q(call.take<Tensor>()) {
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
  int64_t cols() const { return q.sizes()[3]; }
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

// Whether rows are contiguous, and no two of them in one place.
bool has_rows(const Tensor& x) {
  bool fits = x.strides()[3] == 1;
  for (int d = 0; d < 3; ++d) fits = fits && (x.sizes()[d] <= 1 || x.strides()[d] != 0);
  return fits;
}

// A new tensor of x's shape, type and, where x has rows, order of dimensions in memory. It has rows
// itself: those of x may overlap, so that another dimension would come behind the columns.
Tensor dense_like(const Tensor& x) {
  if (has_rows(x)) {
    const Tensor result = empty_in_order(x, x.scalar_type());
    if (has_rows(result)) return result;
  }
  return empty_like(x, x.scalar_type());
}

// The strides of three dimensions; a dimension that is not there, or of size 1, has none.
HeadStrides strides_of(const Tensor& x, int64_t batch, int64_t position, int64_t head) {
  const auto at = [&](int64_t d) { return d >= 0 && x.sizes()[d] > 1 ? x.strides()[d] : 0; };
  return {at(batch), at(position), at(head)};
}

// The params of a call, and the tensors that they point into.
class HeadOperands {
 public:
  HeadsParams params;

  explicit HeadOperands(const HeadArguments& a) : seq_dim_(a.seq_dim) {
    params.type = data_type(a.type());
    params.positions = static_cast<int32_t>(a.positions());
    params.seq = static_cast<int32_t>(a.q.sizes()[a.seq_dim]);
    params.cols = static_cast<int32_t>(a.cols());
    params.rotary = static_cast<int32_t>(a.rotary_dim);
    params.statistic = !a.statistic            ? HeadStatistic::kNone
                       : *a.statistic == "rms" ? HeadStatistic::kRms
                                               : HeadStatistic::kLayer;
    params.interleaved = a.interleaved;
    params.sin_sign = a.inverse ? -1.0f : 1.0f;
    params.weight_offset = static_cast<float>(a.weight_offset);
    params.eps = static_cast<float>(a.eps);
    params.inverse_cols = Scalar(1.0 / static_cast<double>(a.cols()));
    if (a.cos) {
      params.cos = place_angles(*a.cos, params.cos_strides);
      params.sin = place_angles(*a.sin, params.sin_strides);
      params.angles_are_float = a.cos->scalar_type() == ScalarType::Float;
      params.doubled = a.cos->sizes()[a.cos->dim() - 1] == a.rotary_dim;
    }
    for (int i = 0; i < 2 && a.has(i); ++i) {
      HeadSide& side = params.side[i];
      side.heads = static_cast<int32_t>(a.x(i).sizes()[3 - a.seq_dim]);
      side.x = place(a.x(i), side.x_strides);
      side.weight = place_parameter(a.weight[i], side.weight_is_float);
      side.bias = place_parameter(a.bias[i], side.bias_is_float);
      side.rounds = a.rounds && a.weight[i];
    }
  }

  // A new tensor for the results of one side.
  Tensor result(const HeadArguments& a, int side) {
    if (!a.has(side)) return none(a.q, a.type());
    const Tensor y = dense_like(a.x(side));
    params.side[side].y_strides = strides_of(y, 0, seq_dim_, 3 - seq_dim_);
    params.side[side].y = y.mutable_data_ptr();
    return y;
  }

  // The address of a tensor's rows, or of a contiguous copy if it has none, and their strides.
  const void* place(const Tensor& x, HeadStrides& strides) {
    const Tensor& rows = held_.emplace_back(has_rows(x) ? x : contiguous_of(x));
    return placed(rows, strides = strides_of(rows, 0, seq_dim_, 3 - seq_dim_));
  }

  bool empty() const {
    return params.positions == 0 || (params.side[0].heads == 0 && params.side[1].heads == 0);
  }

  // Throws unless there is a plan.
  template <typename Plan>
  void check_plan(const std::optional<Plan>& plan) const {
    CHECK_ARGUMENT(plan, "no kernel takes ", describe());
  }
  void check_launch(cudaError_t error, const char* direction) const {
    CHECK_ARGUMENT(error == cudaSuccess, "CUDA error: ", cudaGetErrorString(error),
                   ", at the launch of ", direction, " for ", describe());
  }

 private:
  std::string describe() const {
    return std::to_string(params.positions) + " positions of " +
           std::to_string(params.side[0].heads) + " and " + std::to_string(params.side[1].heads) +
           " heads of " + std::to_string(params.cols) + " columns of " + name_of(params.type);
  }

  const void* placed(const Tensor& tensor, const HeadStrides& strides) {
    const auto bytes = static_cast<int64_t>(tensor.element_size());
    const void* data = tensor.const_data_ptr();
    params.aligned = params.aligned && reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0 &&
                     strides.batch * bytes % kVectorBytes == 0 &&
                     strides.position * bytes % kVectorBytes == 0 &&
                     strides.head * bytes % kVectorBytes == 0;
    return data;
  }

  const void* place_angles(const Tensor& angles, HeadStrides& strides) {
    const int64_t last = angles.dim() - 1;
    const bool fits = angles.sizes()[last] == 1 || angles.strides()[last] == 1;
    const Tensor& rows = held_.emplace_back(fits ? angles : contiguous_of(angles));
    return placed(rows, strides = strides_of(rows, last - 2, last - 1, -1));
  }

  const void* place_parameter(const Optional& parameter, bool& is_float) {
    if (!parameter) return nullptr;
    is_float = parameter->scalar_type() == ScalarType::Float;
    held_.push_back(*prepare_parameter(parameter, parameter->scalar_type()));
    return held_.back().const_data_ptr();
  }

  int64_t seq_dim_;
  std::deque<Tensor> held_;
};

void qk_norm_rope(StableIValue* stack, uint64_t arguments, uint64_t results) {
  Call call(stack, arguments, results);
  const HeadArguments a(call, false);
  check(a);
  const CurrentDevice guard(a.q);
  HeadOperands operands(a);
  const Tensor q_out = operands.result(a, 0), k_out = operands.result(a, 1);
  if (!operands.empty()) {
    const auto plan = forward::make_heads_plan(operands.params);
    operands.check_plan(plan);
    operands.check_launch(
        launch_heads_forward(operands.params, *plan, current_stream(a.q.get_device_index())),
        "forward");
  }
  call.give({&q_out, &k_out});
}

void qk_norm_rope_backward(StableIValue* stack, uint64_t arguments, uint64_t results) {
  Call call(stack, arguments, results);
  const auto dq_out = call.take<Tensor>();
  const auto dk_out = call.take<Optional>();
  const HeadArguments a(call, true);
  const auto needs_dweight = call.take<bool>(), needs_dbias = call.take<bool>();
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
    if (operands.empty()) torch::stable::zero_(result);
    data = result.mutable_data_ptr();
    return result;
  };
  std::array<Optional, 2> dx, dweight, dbias;
  for (int i = 0; i < 2; ++i) {
    HeadSide& side = operands.params.side[i];
    if (a.has(i)) {
      const Tensor& dy = i == 0 ? dq_out : *dk_out;
      bool fits = dy.dim() == 4 && dy.scalar_type() == a.type() && is_beside(dy, q);
      for (int64_t d = 0; fits && d < 4; ++d) fits = dy.sizes()[d] == a.x(i).sizes()[d];
      CHECK_ARGUMENT(fits, "gradients must be as the results are");
      side.dy = operands.place(dy, side.dy_strides);
    }
    dx[i] = operands.result(a, i);
    dweight[i] = gradient(needs_dweight, a.weight[i], side.dweight);
    dbias[i] = gradient(needs_dbias, a.bias[i], side.dbias);
  }
  if (!operands.empty()) {
    const auto plan = backward::make_heads_plan(operands.params, device_of(q.get_device_index()));
    operands.check_plan(plan);
    const Workspace workspace(q, plan->workspace_bytes);
    operands.params.workspace = workspace.data();
    operands.check_launch(
        launch_heads_backward(operands.params, *plan, current_stream(q.get_device_index())),
        "backward");
  }
  call.give({&*dx[0], &*dx[1], &*dweight[0], &*dweight[1], &*dbias[0], &*dbias[1]});
}

}  // namespace

void register_head_kernels(torch::stable::detail::StableLibrary& library) {
  library.impl("qk_norm_rope", &qk_norm_rope);
  library.impl("qk_norm_rope_backward", &qk_norm_rope_backward);
}

}  // namespace fused_layernorm

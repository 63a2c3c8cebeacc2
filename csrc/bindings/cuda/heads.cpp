// SPDX-License-Identifier: Apache-2.0
// Heads on CUDA: check, describe q and k, allocate, plan, launch. Tensors stop here.
#include "bindings/cuda/heads.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "backward/heads.h"
#include "bindings/cuda/modulation.h"
#include "forward/heads.h"

namespace fused_layernorm {
namespace {

// The arguments that both operators have; q and k at places 0 and 1.
struct HeadArguments {
  const Tensor* x[2];
  const OptionalTensor* weight[2];
  const OptionalTensor* bias[2];
  const OptionalTensor& cos;
  const OptionalTensor& sin;
  int64_t rotary_dim, seq_dim;
  double eps;
  const std::optional<std::string>& statistic;
  double weight_offset;
  bool rounds, interleaved, inverse;

  HeadArguments(const Tensor& q, const OptionalTensor& k, const OptionalTensor& q_weight,
                const OptionalTensor& k_weight, const OptionalTensor& q_bias,
                const OptionalTensor& k_bias, const OptionalTensor& given_cos,
                const OptionalTensor& given_sin, int64_t rotary, int64_t seq, double given_eps,
                const std::optional<std::string>& its_statistic, double offset, bool its_rounds,
                bool its_interleaved, bool its_inverse)
      : x{&q, k ? &*k : nullptr},
        weight{&q_weight, &k_weight},
        bias{&q_bias, &k_bias},
        cos(given_cos),
        sin(given_sin),
        rotary_dim(rotary),
        seq_dim(seq),
        eps(given_eps),
        statistic(its_statistic),
        weight_offset(offset),
        rounds(its_rounds),
        interleaved(its_interleaved),
        inverse(its_inverse) {}

  int64_t size(int side, int64_t dim) const { return x[side]->sizes()[dim]; }
  int64_t head_dim() const { return 3 - seq_dim; }
  int64_t cols() const { return size(0, 3); }
  ScalarType type() const { return x[0]->scalar_type(); }
};

bool is_beside(const Tensor& tensor, const Tensor& x) {
  return tensor.is_cuda() && tensor.get_device_index() == x.get_device_index();
}

// Whether a parameter, cos or sin has a type that kernels read.
bool is_read(const Tensor& tensor, ScalarType x) {
  return tensor.scalar_type() == x || tensor.scalar_type() == ScalarType::Float;
}

void check_angles(const HeadArguments& a, const OptionalTensor& angles, const char* name) {
  CHECK_ARGUMENT(angles.has_value() == (a.rotary_dim > 0), name, " belongs to a rotated part");
  if (!angles) return;
  const int64_t dims = angles->dim();
  const auto sizes = angles->sizes();
  const int64_t batch = a.size(0, 0), last = dims > 0 ? sizes[dims - 1] : 0;
  CHECK_ARGUMENT((dims == 2 || (dims == 3 && (sizes[0] == batch || sizes[0] == 1))) &&
                     sizes[dims - 2] == a.size(0, a.seq_dim) &&
                     (last == a.rotary_dim || 2 * last == a.rotary_dim),
                 name, " must have half of rotary_dim or rotary_dim values for each position");
  CHECK_ARGUMENT(is_beside(*angles, *a.x[0]) && is_read(*angles, a.type()) &&
                     angles->scalar_type() == a.cos->scalar_type() &&
                     last == a.cos->sizes()[a.cos->dim() - 1],
                 name, " must be on the device of q, of its dtype or float32, and as cos is");
}

void check(const HeadArguments& a) {
  CHECK_ARGUMENT(a.x[0]->dim() == 4 && (a.seq_dim == 1 || a.seq_dim == 2),
                 "q must have four dimensions, and seq_dim be 1 or 2");
  const ScalarType type = a.type();
  CHECK_ARGUMENT(type == ScalarType::Float || is_half(type), "q must be of float32 or of half ",
                 "precision: PyTorch's operators compute the rest");
  CHECK_ARGUMENT(a.cols() > 0 && a.cols() % 2 == 0 && a.cols() <= kMostHeadCols &&
                     a.rotary_dim >= 0 && a.rotary_dim % 2 == 0 && a.rotary_dim <= a.cols(),
                 "kernels take heads of an even size up to ", kMostHeadCols,
                 " and an even rotated part");
  if (a.x[1] != nullptr) {
    bool fits = a.x[1]->dim() == 4 && a.x[1]->scalar_type() == type && is_beside(*a.x[1], *a.x[0]);
    for (const int64_t dim : {int64_t{0}, a.seq_dim, int64_t{3}}) {
      fits = fits && a.size(1, dim) == a.size(0, dim);
    }
    CHECK_ARGUMENT(fits, "q and k may differ in their heads only");
  }
  for (int side = 0; side < 2; ++side) {
    for (const OptionalTensor* parameter : {a.weight[side], a.bias[side]}) {
      if (!*parameter) continue;
      CHECK_ARGUMENT((*parameter)->dim() == 1 && (*parameter)->sizes()[0] == a.cols() &&
                         is_beside(**parameter, *a.x[0]) && is_read(**parameter, type),
                     "weight and bias must have a head's size, q's device, and q's dtype or "
                     "float32");
      CHECK_ARGUMENT(a.statistic, "weight and bias belong to a statistic");
    }
  }
  CHECK_ARGUMENT(!a.statistic || *a.statistic == "rms" || *a.statistic == "layer",
                 "statistic must be None, 'rms' or 'layer'");
  CHECK_ARGUMENT(!std::isnan(a.eps) && std::isfinite(a.weight_offset),
                 "eps and weight_offset must be numbers");
  check_angles(a, a.cos, "cos");
  check_angles(a, a.sin, "sin");
}

// Whether rows are contiguous, and no two of them in one place.
bool has_rows(const Tensor& x) {
  bool fits = x.strides()[3] == 1;
  for (int d = 0; d < 3; ++d) fits = fits && (x.sizes()[d] <= 1 || x.strides()[d] != 0);
  return fits;
}

// A new tensor of x's shape, type and, where x has rows, order of dimensions in memory.
Tensor dense_like(const Tensor& x) {
  if (!has_rows(x)) return empty_like(x, x.scalar_type());
  const auto sizes = x.sizes();
  const auto strides = x.strides();
  std::array<int, 4> order = {0, 1, 2, 3};  // from the outermost
  std::stable_sort(order.begin(), order.end(),
                   [&](int i, int j) { return strides[i] > strides[j]; });
  std::array<int64_t, 4> dense;
  int64_t stride = 1;
  for (int i = 3; i >= 0; --i) {
    dense[order[i]] = stride;
    stride *= std::max<int64_t>(sizes[order[i]], 1);
  }
  return empty_strided(x, sizes.data(), dense.data(), 4, x.scalar_type());
}

bool is_aligned(const void* data, const HeadStrides& strides, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0 &&
         strides.batch * bytes % kVectorBytes == 0 &&
         strides.position * bytes % kVectorBytes == 0 && strides.head * bytes % kVectorBytes == 0;
}

// The strides of a dimension of size 1 count for nothing, and must not spoil the alignment.
HeadStrides strides_of(const Tensor& x, int64_t seq_dim) {
  const auto at = [&](int64_t d) { return x.sizes()[d] > 1 ? x.strides()[d] : 0; };
  return {at(0), at(seq_dim), at(3 - seq_dim)};
}

HeadStrides strides_of_angles(const Tensor& angles) {
  const int64_t dims = angles.dim();
  const auto at = [&](int64_t d) {
    return d >= 0 && angles.sizes()[d] > 1 ? angles.strides()[d] : 0;
  };
  return {at(dims - 3), at(dims - 2), 0};
}

// cos or sin with contiguous rows.
Tensor prepare_angles(const Tensor& angles) {
  const int64_t last = angles.dim() - 1;
  const bool fits = angles.sizes()[last] == 1 || angles.strides()[last] == 1;
  return fits ? angles : contiguous_of(angles);
}

// The params of a call, with the tensors that they point into.
struct HeadOperands {
  HeadsParams params;
  HeadsProblem problem;
  std::array<OptionalTensor, 10> held;
  int count = 0;

  explicit HeadOperands(const HeadArguments& a) {
    const int64_t positions = a.size(0, 0) * a.size(0, a.seq_dim);
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
    CHECK_ARGUMENT(positions <= kMost, "expected at most ", kMost, " positions");
    problem.x = data_type(a.type());
    problem.aligned = true;
    params.positions = static_cast<int32_t>(positions);
    params.seq = static_cast<int32_t>(a.size(0, a.seq_dim));
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
    if (a.rotary_dim > 0) {
      const Tensor& cos = hold(prepare_angles(*a.cos));
      const Tensor& sin = hold(prepare_angles(*a.sin));
      params.cos = cos.const_data_ptr();
      params.sin = sin.const_data_ptr();
      params.cos_strides = strides_of_angles(cos);
      params.sin_strides = strides_of_angles(sin);
      params.angles_are_float = cos.scalar_type() == ScalarType::Float;
      params.doubled = a.cos->sizes()[a.cos->dim() - 1] == a.rotary_dim;
      const auto bytes = static_cast<int64_t>(cos.element_size());
      problem.aligned = is_aligned(params.cos, params.cos_strides, bytes) &&
                        is_aligned(params.sin, params.sin_strides, bytes);
    }
    for (int side = 0; side < 2 && a.x[side] != nullptr; ++side) {
      HeadSide& s = params.side[side];
      const int64_t heads = a.size(side, a.head_dim());
      CHECK_ARGUMENT(heads <= kMost, "expected at most ", kMost, " heads");
      s.heads = static_cast<int32_t>(heads);
      s.x = place(*a.x[side], a.seq_dim, s.x_strides);
      if (const auto& weight = *a.weight[side]) {
        s.weight = hold(*prepare_parameter(weight, weight->scalar_type())).const_data_ptr();
        s.weight_is_float = weight->scalar_type() == ScalarType::Float;
      }
      if (const auto& bias = *a.bias[side]) {
        s.bias = hold(*prepare_parameter(bias, bias->scalar_type())).const_data_ptr();
        s.bias_is_float = bias->scalar_type() == ScalarType::Float;
      }
    }
  }

  const Tensor& hold(const Tensor& tensor) { return held[count++].emplace(tensor); }

  // The address of a tensor's rows, of a contiguous copy if it has none, and their strides.
  const void* place(const Tensor& given, int64_t seq_dim, HeadStrides& strides) {
    const Tensor& tensor = hold(has_rows(given) ? given : contiguous_of(given));
    strides = strides_of(tensor, seq_dim);
    problem.aligned = problem.aligned && is_aligned(tensor.const_data_ptr(), strides,
                                                    static_cast<int64_t>(tensor.element_size()));
    return tensor.const_data_ptr();
  }

  bool empty() const {
    return params.positions == 0 || (params.side[0].heads == 0 && params.side[1].heads == 0);
  }
};

template <typename Plan>
void check_planned(const std::optional<Plan>& plan, const HeadsParams& params) {
  CHECK_ARGUMENT(plan, "no kernel takes ", params.positions, " positions of ", params.side[0].heads,
                 " and ", params.side[1].heads, " heads of ", params.cols, " columns");
}

void check_launched(cudaError_t error, const char* direction, const HeadsParams& params,
                    const HeadsProblem& problem, int width) {
  CHECK_ARGUMENT(error == cudaSuccess, "CUDA error: ", cudaGetErrorString(error),
                 ", at the launch of ", direction, " for ", params.positions, " positions of ",
                 params.side[0].heads, " and ", params.side[1].heads, " heads of ", params.cols,
                 " columns, ", name_of(problem.x), ", width ", width);
}

}  // namespace

std::tuple<Tensor, Tensor> qk_norm_rope(
    const Tensor& q, const OptionalTensor& k, const OptionalTensor& q_weight,
    const OptionalTensor& k_weight, const OptionalTensor& q_bias, const OptionalTensor& k_bias,
    const OptionalTensor& cos, const OptionalTensor& sin, int64_t rotary_dim, int64_t seq_dim,
    double eps, const std::optional<std::string>& statistic, double weight_offset, bool rounds,
    bool interleaved, bool inverse) {
  const HeadArguments a(q, k, q_weight, k_weight, q_bias, k_bias, cos, sin, rotary_dim, seq_dim,
                        eps, statistic, weight_offset, rounds, interleaved, inverse);
  check(a);
  const CurrentDevice guard(q);
  HeadOperands operands(a);
  HeadsParams& params = operands.params;
  Tensor y[2] = {dense_like(q), k ? dense_like(*k) : none(q, a.type())};
  for (int side = 0; side < 2 && a.x[side] != nullptr; ++side) {
    params.side[side].y_strides = strides_of(y[side], seq_dim);
    params.side[side].y = y[side].mutable_data_ptr();
    params.side[side].rounds = rounds && a.weight[side]->has_value();
  }
  if (!operands.empty()) {
    const auto plan = forward::make_heads_plan(params, operands.problem);
    check_planned(plan, params);
    check_launched(launch_heads_forward(params, operands.problem.x, *plan, current_stream(q)),
                   "forward", params, operands.problem, plan->width);
  }
  return {y[0], y[1]};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> qk_norm_rope_backward(
    const Tensor& dq_out, const OptionalTensor& dk_out, const Tensor& q, const OptionalTensor& k,
    const OptionalTensor& q_weight, const OptionalTensor& k_weight, const OptionalTensor& q_bias,
    const OptionalTensor& k_bias, const OptionalTensor& cos, const OptionalTensor& sin,
    int64_t rotary_dim, int64_t seq_dim, double eps, const std::optional<std::string>& statistic,
    double weight_offset, bool interleaved, bool inverse, bool needs_dweight, bool needs_dbias) {
  const HeadArguments a(q, k, q_weight, k_weight, q_bias, k_bias, cos, sin, rotary_dim, seq_dim,
                        eps, statistic, weight_offset, false, interleaved, inverse);
  check(a);
  CHECK_ARGUMENT(statistic, "a rotation alone is its own backward, with inverse");
  const ScalarType type = a.type();
  const Tensor* dy[2] = {&dq_out, dk_out ? &*dk_out : nullptr};
  for (int side = 0; side < 2; ++side) {
    bool fits = (dy[side] == nullptr) == (a.x[side] == nullptr);
    if (fits && dy[side] != nullptr) {
      fits = dy[side]->dim() == 4 && dy[side]->scalar_type() == type && is_beside(*dy[side], q);
      for (int64_t d = 0; fits && d < 4; ++d) fits = dy[side]->sizes()[d] == a.size(side, d);
    }
    CHECK_ARGUMENT(fits, "gradients must be as the results are");
  }
  const CurrentDevice guard(q);
  HeadOperands operands(a);
  HeadsParams& params = operands.params;
  params.sin_sign = -params.sin_sign;
  Tensor dx[2] = {dense_like(q), k ? dense_like(*k) : none(q, type)};
  Tensor dweight[2] = {none(q, type), none(q, type)}, dbias[2] = {none(q, type), none(q, type)};
  const int64_t cols = a.cols();
  const auto gradient = [&](bool needed, const OptionalTensor& parameter, Tensor& result) {
    if (!parameter) return static_cast<void*>(nullptr);
    const int64_t size = needed ? cols : 0;
    result = empty(q, &size, 1, parameter->scalar_type());
    return needed ? result.mutable_data_ptr() : nullptr;
  };
  for (int side = 0; side < 2 && a.x[side] != nullptr; ++side) {
    HeadSide& s = params.side[side];
    s.dy = operands.place(*dy[side], seq_dim, s.dy_strides);
    s.y_strides = strides_of(dx[side], seq_dim);
    s.y = dx[side].mutable_data_ptr();
    s.dweight = gradient(needs_dweight, *a.weight[side], dweight[side]);
    s.dbias = gradient(needs_dbias, *a.bias[side], dbias[side]);
  }
  if (operands.empty()) {
    for (Tensor* each : {&dweight[0], &dweight[1], &dbias[0], &dbias[1]}) {
      if (each->numel() > 0) torch::stable::zero_(*each);
    }
  } else {
    const auto plan = backward::make_heads_plan(params, operands.problem, device_of(q));
    check_planned(plan, params);
    const Workspace workspace(q, plan->workspace_bytes);
    params.workspace = workspace.data();
    check_launched(launch_heads_backward(params, operands.problem.x, *plan, current_stream(q)),
                   "backward", params, operands.problem, plan->width);
  }
  return {dx[0], dx[1], dweight[0], dweight[1], dbias[0], dbias[1]};
}

}  // namespace fused_layernorm

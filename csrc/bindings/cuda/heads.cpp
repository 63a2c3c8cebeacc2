// SPDX-License-Identifier: Apache-2.0
// The operators of heads on CUDA: check, describe q and k, allocate, plan, launch. Heads have no
// direct call, so that these files alone describe them.
#include "bindings/cuda/heads.h"

#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "bindings/cuda/ops.h"

namespace fused_layernorm {
namespace {

using Optional = Heads::Optional;

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

void run_forward(Heads& a, Call& call) {
  check(a);
  const CurrentDevice guard(a.q);
  a.describe();
  const Tensor q_out = a.result(0), k_out = a.result(1);
  if (a.has_work()) a.launch_forward("forward");
  call.give(std::array{&q_out, &k_out});
}

void qk_norm_rope(StableIValue* stack, uint64_t arguments, uint64_t results) {
  Call call(stack, arguments, results);
  Heads a(call, false);
  run_or_formula("qk_norm_rope", call, [&] { run_forward(a, call); });
}

void qkv_norm_rope(StableIValue* stack, uint64_t arguments, uint64_t results) {
  Call call(stack, arguments, results);
  const Tensor qkv = call.at<Tensor>(0);
  Heads a = Heads::of_packed(call, false);
  run_or_formula("qkv_norm_rope", call, [&] {
    a.take_parts(qkv);
    run_forward(a, call);
  });
}

void check_gradient(const Tensor& dy, const Tensor& y) {
  bool fits = dy.dim() == 4 && dy.scalar_type() == y.scalar_type() && is_beside(dy, y);
  for (int64_t d = 0; fits && d < 4; ++d) fits = dy.sizes()[d] == y.sizes()[d];
  CHECK_ARGUMENT(fits, "gradients must be as the results are");
}

void run_backward(Heads& a, const Optional (&dy)[2], bool needs_dweight, bool needs_dbias,
                  Call& call) {
  const Tensor& q = a.q;
  check(a);
  CHECK_ARGUMENT(a.statistic, "a rotation alone is its own backward, with inverse");
  CHECK_ARGUMENT(dy[1].has_value() == a.k.has_value(), "dk_out belongs to k");
  const CurrentDevice guard(q);
  a.describe();
  std::array<Optional, 2> dx, dweight, dbias;
  for (int i = 0; i < 2; ++i) {
    HeadSide& side = a.params.side[i];
    if (a.has(i)) {
      check_gradient(*dy[i], a.x(i));
      side.dy = a.place_rows(*dy[i], side.dy_strides);
    }
    dx[i] = a.result(i);
    dweight[i] = a.gradient(needs_dweight, a.weight[i], side.dweight);
    dbias[i] = a.gradient(needs_dbias, a.bias[i], side.dbias);
  }
  if (a.has_work()) a.launch_backward();
  call.give<6>({&*dx[0], &*dx[1], &*dweight[0], &*dweight[1], &*dbias[0], &*dbias[1]});
}

void qk_norm_rope_backward(StableIValue* stack, uint64_t arguments, uint64_t results) {
  Call call(stack, arguments, results);
  const Optional dy[2] = {call.at<Tensor>(0), call.at<Optional>(1)};
  Heads a(call, true);
  bool needs_dweight = false, needs_dbias = false;
  call.read(needs_dweight, needs_dbias);
  run_or_formula("qk_norm_rope_backward", call,
                 [&] { run_backward(a, dy, needs_dweight, needs_dbias, call); });
}

// The gradient of qkv: each side's is written to its place there. A rotation alone is undone by
// the forward kernel, which reads what the backward kernel calls dy as x.
void run_packed_backward(Heads& a, const Optional (&dy)[3], const Optional& qkv,
                         const std::vector<int64_t>& size, const std::vector<int64_t>& stride,
                         bool needs_dweight, bool needs_dbias, Call& call) {
  const Tensor& like = dy[0] ? *dy[0] : dy[1] ? *dy[1] : *dy[2];
  CHECK_ARGUMENT(size.size() == 4 && stride.size() == 4 && qkv.has_value() == !!a.statistic,
                 "dqkv must have four dimensions, and qkv belongs to a statistic");
  const CurrentDevice guard(like);
  const Tensor dqkv = empty_strided(like, size.data(), stride.data(), 4, like.scalar_type());
  CHECK_ARGUMENT(has_rows(dqkv), "dqkv must have contiguous rows");
  a.take_parts(qkv ? *qkv : dqkv);
  check(a);
  a.describe();
  a.is_packed = true;
  a.params.y_group = 2 * dqkv.strides()[2];
  if (!a.statistic) a.params.x_group = 0;  // that of a gradient
  std::array<Optional, 2> dweight, dbias;
  for (int i = 0; i < 3; ++i) {
    HeadSide& side = a.params.side[i];
    const Tensor place = a.packing.part(dqkv, i, a.seq_dim);
    if (i < 2) check_gradient(place, a.x(i));
    side.heads = static_cast<int32_t>(place.sizes()[3 - a.seq_dim]);
    side.y = place.mutable_data_ptr();
    a.place_rows(place, side.y_strides);
    (a.statistic ? side.dy : side.x) = nullptr;
    if (dy[i]) {
      check_gradient(*dy[i], place);
      (a.statistic ? side.dy : side.x) =
          a.place_rows(*dy[i], a.statistic ? side.dy_strides : side.x_strides);
    }
    if (i == 2) continue;
    dweight[i] = a.gradient(needs_dweight && dy[i], a.weight[i], side.dweight);
    dbias[i] = a.gradient(needs_dbias && dy[i], a.bias[i], side.dbias);
  }
  if (a.has_work() && a.statistic) a.launch_backward();
  if (a.has_work() && !a.statistic) a.launch_forward("backward");
  call.give<5>({&dqkv, &*dweight[0], &*dweight[1], &*dbias[0], &*dbias[1]});
}

void qkv_norm_rope_backward(StableIValue* stack, uint64_t arguments, uint64_t results) {
  Call call(stack, arguments, results);
  Optional dy[3], qkv;
  call.read(dy[0], dy[1], dy[2], qkv);
  Heads a = Heads::of_packed(call, true);
  std::vector<int64_t> size, stride;
  bool needs_dweight = false, needs_dbias = false;
  call.read(size, stride, needs_dweight, needs_dbias);
  run_or_formula("qkv_norm_rope_backward", call, [&] {
    run_packed_backward(a, dy, qkv, size, stride, needs_dweight, needs_dbias, call);
  });
}

}  // namespace

void register_head_kernels(torch::stable::detail::StableLibrary& library) {
  library.impl("qk_norm_rope", &qk_norm_rope);
  library.impl("qk_norm_rope_backward", &qk_norm_rope_backward);
  library.impl("qkv_norm_rope", &qkv_norm_rope);
  library.impl("qkv_norm_rope_backward", &qkv_norm_rope_backward);
}

}  // namespace fused_layernorm

// SPDX-License-Identifier: Apache-2.0
// The operators as formulas in PyTorch's differentiable operators, for the derivatives that no
// kernel computes: forward mode and double backward, each of which can be differentiated again.
//
// One formula serves the operators with a modulation and those without:
//     residual_out = residual + gate * input,    x = residual_out, or input,
//     z = xhat * (weight + weight_offset) + bias,    xhat = (x - mean) * rstd,
//     y = activation(z) * output_scale * (1 + scale) + shift.
// RMSNorm is the same with a mean of zero.
// An undefined tensor stands for an argument that is not given, or for a gradient of zeros.
// Arithmetic is in float32, or in float64 where x is float64.
#pragma once

#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <cstdint>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

namespace fused_layernorm {

using at::Tensor;

inline Tensor as(const Tensor& tensor, at::ScalarType type) {
  return tensor.defined() ? tensor.to(type) : tensor;
}

inline Tensor plus(const Tensor& a, const Tensor& b) {
  if (!a.defined()) return b;
  return b.defined() ? a + b : a;
}

// a * b, where an undefined b stands for ones.
inline Tensor times(const Tensor& a, const Tensor& b) { return b.defined() ? a * b : a; }

// t summed over the dimensions along which `like` was broadcast, in like's shape and dtype.
inline Tensor reduce_to(const Tensor& t, const Tensor& like) {
  return at::sum_to(t, like.sym_sizes()).to(like.scalar_type());
}

// ---- Activations

using Activation = std::optional<std::string>;

[[noreturn]] inline void unknown(const std::string& activation) {
  TORCH_CHECK_VALUE(false, "expected activation None, 'gelu', 'gelu_tanh', 'silu' or 'relu', got '",
                    activation, "'");
}

inline const double kTanhRoot = std::sqrt(2 / M_PI);
constexpr double kTanhCubic = 0.044715;

inline Tensor gelu_tanh_of(const Tensor& z) {
  return (kTanhRoot * (z + kTanhCubic * z * z * z)).tanh();
}

inline Tensor activate(const Activation& activation, const Tensor& z) {
  if (!activation) return z;
  if (*activation == "gelu") return z * (z * -M_SQRT1_2).erfc() * 0.5;
  if (*activation == "gelu_tanh") return 0.5 * z * (1 + gelu_tanh_of(z));
  if (*activation == "silu") return z * z.sigmoid();
  if (*activation == "relu") return z.relu();
  unknown(*activation);
}

// An activation's first and second derivatives. An undefined first one stands for ones, an
// undefined second one for zeros.
struct Slopes {
  Tensor first, second;
};

inline Slopes slopes_of(const Activation& activation, const Tensor& z) {
  if (!activation) return {};
  if (*activation == "gelu") {
    const Tensor density = (z * z * -0.5).exp() / std::sqrt(2 * M_PI);
    return {(z * -M_SQRT1_2).erfc() * 0.5 + z * density, density * (2 - z * z)};
  }
  if (*activation == "gelu_tanh") {
    const Tensor t = gelu_tanh_of(z);
    const Tensor du = kTanhRoot * (1 + 3 * kTanhCubic * z * z);
    const Tensor dt = (1 - t * t) * du;
    const Tensor d2t = (1 - t * t) * (6 * kTanhCubic * kTanhRoot * z) - 2 * t * dt * du;
    return {0.5 * (1 + t) + 0.5 * z * dt, dt + 0.5 * z * d2t};
  }
  if (*activation == "silu") {
    const Tensor s = z.sigmoid();
    return {s * (1 + z * (1 - s)), s * (1 - s) * (2 + z * (1 - 2 * s))};
  }
  if (*activation == "relu") return {(z > 0).to(z.scalar_type()), Tensor()};
  unknown(*activation);
}

// ---- Rows

// Means over the normalized dimensions, and sums over the others.
struct Rows {
  int64_t normalized_ndim;

  Tensor mean(const Tensor& t) const {
    std::vector<int64_t> dims(normalized_ndim);
    std::iota(dims.begin(), dims.end(), -normalized_ndim);
    return t.mean(dims, /*keepdim=*/true);
  }
  Tensor sum(const Tensor& t) const {
    std::vector<int64_t> dims(t.dim() - normalized_ndim);
    std::iota(dims.begin(), dims.end(), 0);
    return dims.empty() ? t : t.sum(dims);
  }
};

// The normalized x; the mean of RMSNorm is undefined. project() applies P, the derivative of xhat
// with respect to x, which is a symmetric linear map on each row.
struct Normalized {
  Rows rows;
  Tensor xhat, mean, rstd;

  Tensor project(const Tensor& t) const {
    const Tensor along = xhat * rows.mean(t * xhat);
    return rstd * (mean.defined() ? t - rows.mean(t) - along : t - along);
  }
};

// What is normalized: x without its mean, which RMSNorm leaves in it.
struct Centered {
  Tensor mean, values;

  Centered(const Tensor& x, Rows rows, bool is_rms)
      : mean(is_rms ? Tensor() : rows.mean(x)), values(is_rms ? x : x - mean) {}
};

inline Normalized normalize(const Tensor& x, Rows rows, double eps, bool is_rms) {
  const Centered centered(x, rows, is_rms);
  const Tensor rstd = (rows.mean(centered.values * centered.values) + eps).rsqrt();
  return {rows, centered.values * rstd, centered.mean, rstd};
}

// The same from the forward pass's rstd instead of eps. eps is computed back from it as a constant,
// so that rstd is a function of x, with derivatives of any order.
inline Normalized normalize_as(const Tensor& x, Rows rows, const Tensor& rstd_of_forward,
                               bool is_rms) {
  const Centered centered(x, rows, is_rms);
  const Tensor variance = rows.mean(centered.values * centered.values);
  const Tensor eps = (rstd_of_forward.pow(-2) - variance).detach();
  const Tensor rstd = (variance + eps).rsqrt();
  return {rows, centered.values * rstd, centered.mean, rstd};
}

inline at::ScalarType arithmetic_type(at::ScalarType x, at::ScalarType other = at::kFloat) {
  return x == at::kDouble || other == at::kDouble ? at::kDouble : at::kFloat;
}

// ---- Arguments

struct Parameters {
  Tensor shift, scale, weight, bias;
};

// Arguments that are not tensors. The operators with a modulation have neither activation nor
// output scale.
struct Options {
  int64_t normalized_ndim = 0;
  Activation activation;
  double output_scale = 1;
  bool is_rms = false;
  double weight_offset = 0;
  bool keeps_order = false;
};

// weight + weight_offset, undefined without a weight.
inline Tensor weight_of(const Parameters& p, const Options& options, at::ScalarType acc) {
  const Tensor weight = as(p.weight, acc);
  return weight.defined() && options.weight_offset != 0 ? weight + options.weight_offset : weight;
}

inline Tensor affine(const Tensor& xhat, const Parameters& p, const Options& options,
                     at::ScalarType acc) {
  return plus(times(xhat, weight_of(p, options, acc)), as(p.bias, acc));
}

// t * output_scale * (1 + scale).
inline Tensor scaled(const Tensor& t, const Parameters& p, const Options& options) {
  const Tensor by_output = t * options.output_scale;
  return p.scale.defined() ? by_output * (1 + p.scale.to(t.scalar_type())) : by_output;
}

// ---- Forward

struct ForwardArguments {
  Tensor input, residual, gate;
  Parameters parameters;
  Options options;
  double eps;
  std::optional<at::ScalarType> out_dtype;
  bool round_before_weight;
};

struct ForwardResults {
  Tensor y, residual_out;  // residual_out is undefined without a residual
};

inline ForwardResults forward_formula(const ForwardArguments& a) {
  Tensor x = a.input, residual_out;
  if (a.residual.defined()) {
    const auto acc = arithmetic_type(a.input.scalar_type(), a.residual.scalar_type());
    const Tensor branch = times(a.input.to(acc), as(a.gate, acc));
    x = residual_out = (branch + a.residual.to(acc)).to(a.residual.scalar_type());
  }
  const auto acc = arithmetic_type(x.scalar_type());
  Tensor xhat = normalize(x.to(acc), {a.options.normalized_ndim}, a.eps, a.options.is_rms).xhat;
  if (a.round_before_weight && a.parameters.weight.defined()) {
    xhat = xhat.to(a.input.scalar_type()).to(acc);
  }
  const Tensor z = affine(xhat, a.parameters, a.options, acc);
  const Tensor y = scaled(activate(a.options.activation, z), a.parameters, a.options);
  return {plus(y, as(a.parameters.shift, acc)).to(a.out_dtype.value_or(a.input.scalar_type())),
          residual_out};
}

// ---- Backward

// The arguments of (ada_)layer_norm_backward. The formulas compute mean from x. The rounding of
// xhat counts as the identity.
struct BackwardArguments {
  Tensor dy, x, rstd, dresidual;
  Parameters parameters;
  Options options;
};

struct BackwardResults {
  Tensor dx;
  Parameters parameters;
};

inline BackwardResults backward_formula(const BackwardArguments& a) {
  const auto acc = arithmetic_type(a.x.scalar_type());
  const auto& [shift, scale, weight, bias] = a.parameters;
  const Rows rows = {a.options.normalized_ndim};
  const Normalized normalized = normalize_as(a.x.to(acc), rows, a.rstd, a.options.is_rms);
  const Tensor& xhat = normalized.xhat;
  const Tensor dy = a.dy.to(acc), z = affine(xhat, a.parameters, a.options, acc);
  const Tensor dz =
      times(scaled(dy, a.parameters, a.options), slopes_of(a.options.activation, z).first);

  BackwardResults results;
  const Tensor g = times(dz, weight_of(a.parameters, a.options, acc));
  const Tensor dx = plus(normalized.project(g), as(a.dresidual, acc));
  results.dx = dx.to(a.x.scalar_type());
  if (shift.defined()) results.parameters.shift = reduce_to(dy, shift);
  if (scale.defined()) {
    const Tensor activated = activate(a.options.activation, z) * a.options.output_scale;
    results.parameters.scale = reduce_to(dy * activated, scale);
  }
  // The operator gives dweight and dbias even where there is no weight and no bias.
  const auto parameter_type = weight.defined() ? weight.scalar_type()
                              : bias.defined() ? bias.scalar_type()
                                               : a.x.scalar_type();
  results.parameters.weight = rows.sum(dz * xhat).to(parameter_type);
  results.parameters.bias = rows.sum(dz).to(parameter_type);
  return results;
}

// ---- Backward of backward

// The gradients of the backward operator's arguments. That of dresidual is ddx itself, so it is not
// here; that of shift is zero.
struct BackwardGradients {
  Tensor dy, x;
  Parameters parameters;
};

// Computes the gradients of the backward operator's arguments from those of its results: ddx,
// ddshift, ddscale, ddweight and ddbias. With
//     g = dy * output_scale * (1 + scale),    dz = g * activation'(z),    d = dz * weight
// the results are
//     dx = P d,    dweight = sum of dz * xhat,    dbias = sum of dz,
//     dshift = sum of dy,    dscale = sum of dy * output_scale * activation(z),
// so the sum of all results times their gradients is that of q * dz + r * dy over all elements,
// with
//     q = weight * P ddx + ddweight * xhat + ddbias,
//     r = ddshift + ddscale * output_scale * activation(z).
// This sum depends on dy directly and through dz, on scale through dz, on z through dz and r, on
// weight and xhat through q, and on xhat and rstd through P.
inline BackwardGradients double_backward_formula(const BackwardArguments& a,
                                                 const BackwardResults& gradients) {
  const auto acc = arithmetic_type(a.x.scalar_type());
  const auto& [ddshift_given, ddscale_given, ddweight_given, ddbias_given] = gradients.parameters;
  const Tensor ddx = as(gradients.dx, acc);
  const Tensor ddshift = as(ddshift_given, acc), ddscale = as(ddscale_given, acc);
  const Tensor ddweight = as(ddweight_given, acc), ddbias = as(ddbias_given, acc);
  const Tensor dy = a.dy.to(acc), weight = weight_of(a.parameters, a.options, acc);
  const Rows rows = {a.options.normalized_ndim};
  const Normalized normalized = normalize_as(a.x.to(acc), rows, a.rstd, a.options.is_rms);
  const Tensor &xhat = normalized.xhat, &rstd = normalized.rstd;
  const Tensor z = affine(xhat, a.parameters, a.options, acc);
  const Slopes slopes = slopes_of(a.options.activation, z);
  const Tensor g = scaled(dy, a.parameters, a.options), dz = times(g, slopes.first);

  const Tensor projected = ddx.defined() ? normalized.project(ddx) : Tensor();
  Tensor q = projected.defined() ? times(projected, weight) : Tensor();
  if (ddweight.defined()) q = plus(q, ddweight * xhat);
  q = plus(q, ddbias);
  Tensor r = ddshift;
  if (ddscale.defined()) {
    r = plus(r, ddscale * a.options.output_scale * activate(a.options.activation, z));
  }

  Tensor by_dy = r, by_scale, by_z;
  if (q.defined()) {
    const Tensor by_g = times(q, slopes.first);
    by_dy = plus(by_dy, scaled(by_g, a.parameters, a.options));
    if (a.parameters.scale.defined()) by_scale = by_g * dy * a.options.output_scale;
    if (slopes.second.defined()) by_z = q * g * slopes.second;
  }
  if (ddscale.defined()) {
    by_z = plus(by_z, times(ddscale * dy * a.options.output_scale, slopes.first));
  }

  Tensor by_weight, by_x;
  Tensor by_xhat = ddweight.defined() ? ddweight * dz : Tensor();
  if (projected.defined()) {
    const Tensor d = times(dz, weight);
    const Tensor ddx_along = rows.mean(ddx * xhat), d_along = rows.mean(d * xhat);
    by_xhat = plus(by_xhat, -rstd * (ddx * d_along + d * ddx_along));
    Tensor by_rstd = rows.mean(ddx * d) - ddx_along * d_along;
    if (normalized.mean.defined()) by_rstd = by_rstd - rows.mean(ddx) * rows.mean(d);
    by_x = -rstd * rstd * by_rstd * xhat;
    if (weight.defined()) by_weight = projected * dz;
  }
  if (by_z.defined()) {
    by_xhat = plus(by_xhat, times(by_z, weight));
    if (weight.defined()) by_weight = plus(by_weight, by_z * xhat);
  }
  if (by_xhat.defined()) by_x = plus(by_x, normalized.project(by_xhat));

  BackwardGradients results;
  // by_dy may have a smaller shape than dy if only ddshift or ddbias is given.
  if (by_dy.defined()) results.dy = by_dy.expand_as(dy).to(a.dy.scalar_type());
  if (by_x.defined()) results.x = by_x.to(a.x.scalar_type());
  const auto reduce = [](const Tensor& t, const Tensor& like) {
    return t.defined() && like.defined() ? reduce_to(t, like) : Tensor();
  };
  results.parameters.scale = reduce(by_scale, a.parameters.scale);
  results.parameters.weight = reduce(by_weight, a.parameters.weight);
  results.parameters.bias = reduce(by_z, a.parameters.bias);
  return results;
}

// ---- The gate

// The arguments of gate_backward, or their gradients.
struct GateArguments {
  Tensor dresidual_out, input, gate;
};

struct GateResults {
  Tensor dinput, dgate;
};

inline GateResults gate_backward_formula(const GateArguments& a) {
  const auto acc = arithmetic_type(a.input.scalar_type(), a.dresidual_out.scalar_type());
  const Tensor dresidual_out = a.dresidual_out.to(acc);
  return {(dresidual_out * a.gate.to(acc)).to(a.input.scalar_type()),
          reduce_to(dresidual_out * a.input.to(acc), a.gate)};
}

// The sum of both results of gate_backward times their gradients is that of dresidual_out * q over
// all elements, with
//     q = ddinput * gate + ddgate * input.
inline GateArguments gate_double_backward_formula(const GateArguments& a,
                                                  const GateResults& gradients) {
  const auto acc = arithmetic_type(a.input.scalar_type(), a.dresidual_out.scalar_type());
  const Tensor dresidual_out = a.dresidual_out.to(acc);
  const Tensor ddinput = as(gradients.dinput, acc), ddgate = as(gradients.dgate, acc);
  GateArguments results;
  Tensor q;
  if (ddinput.defined()) {
    q = ddinput * a.gate.to(acc);
    results.gate = reduce_to(ddinput * dresidual_out, a.gate);
  }
  if (ddgate.defined()) {
    q = plus(q, ddgate * a.input.to(acc));
    results.input = (ddgate * dresidual_out).to(a.input.scalar_type());
  }
  if (q.defined()) results.dresidual_out = q.to(a.dresidual_out.scalar_type());
  return results;
}

}  // namespace fused_layernorm

// The operators in PyTorch's differentiable operators, for the derivatives that no kernel gives:
// forward mode, and backward of backward, each of which can be differentiated again.
//
// Names are those of fused_layernorm/reference.py: z = xhat * weight + bias,
// y = activation(z) * scale. An undefined tensor stands for a parameter that is not there, and for
// a gradient of zeros. Arithmetic is in float32, in float64 where x is.
#pragma once

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

// ---- Activations
// ----------------------------------------------------------------------------------

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

// An activation's first and second derivative; undefined for ones, and for zeros.
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
// -----------------------------------------------------------------------------------------

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

// x normalized, and P, the derivative of xhat for x, a symmetric operator on rows.
struct Normalized {
  Rows rows;
  Tensor xhat, mean, rstd;

  Tensor project(const Tensor& t) const {
    return rstd * (t - rows.mean(t) - xhat * rows.mean(t * xhat));
  }
};

inline Normalized normalize(const Tensor& x, Rows rows, double eps) {
  const Tensor mean = rows.mean(x), centered = x - mean;
  const Tensor rstd = (rows.mean(centered * centered) + eps).rsqrt();
  return {rows, centered * rstd, mean, rstd};
}

// The same where eps is not known but rstd is: as a function of x, for derivatives of any order.
inline Normalized normalize_as(const Tensor& x, Rows rows, const Tensor& rstd_of_forward) {
  const Tensor mean = rows.mean(x), centered = x - mean;
  const Tensor variance = rows.mean(centered * centered);
  const Tensor eps = (rstd_of_forward.pow(-2) - variance).detach();
  const Tensor rstd = (variance + eps).rsqrt();
  return {rows, centered * rstd, mean, rstd};
}

inline at::ScalarType arithmetic_type(at::ScalarType x, at::ScalarType other = at::kFloat) {
  return x == at::kDouble || other == at::kDouble ? at::kDouble : at::kFloat;
}

// ---- Forward
// --------------------------------------------------------------------------------------

struct ForwardArguments {
  Tensor input, residual, weight, bias;
  int64_t normalized_ndim;
  double eps;
  Activation activation;
  double scale;
  std::optional<at::ScalarType> out_dtype;
};

struct ForwardResults {
  Tensor y, residual_out, mean, rstd;  // residual_out is undefined without a residual
};

inline ForwardResults layer_norm_formula(const ForwardArguments& a) {
  ForwardResults results;
  Tensor x = a.input;
  if (a.residual.defined()) {
    const auto acc = arithmetic_type(a.input.scalar_type(), a.residual.scalar_type());
    x = (a.input.to(acc) + a.residual.to(acc)).to(a.residual.scalar_type());
    results.residual_out = x;
  }
  const auto acc = arithmetic_type(x.scalar_type());
  const Normalized normalized = normalize(x.to(acc), {a.normalized_ndim}, a.eps);
  const Tensor z = plus(times(normalized.xhat, as(a.weight, acc)), as(a.bias, acc));
  results.y = (activate(a.activation, z) * a.scale).to(a.out_dtype.value_or(a.input.scalar_type()));
  results.mean = normalized.mean;
  results.rstd = normalized.rstd;
  return results;
}

// ---- Backward
// -------------------------------------------------------------------------------------

// layer_norm_backward's; its mean is that of x.
struct BackwardArguments {
  Tensor dy, x, rstd, weight, bias, dresidual;
  int64_t normalized_ndim;
  Activation activation;
  double scale;
};

struct BackwardResults {
  Tensor dx, dweight, dbias;
};

inline BackwardResults layer_norm_backward_formula(const BackwardArguments& a) {
  const auto acc = arithmetic_type(a.x.scalar_type());
  const auto parameter_type = a.weight.defined() ? a.weight.scalar_type()
                              : a.bias.defined() ? a.bias.scalar_type()
                                                 : a.x.scalar_type();
  const Tensor weight = as(a.weight, acc);
  const Rows rows = {a.normalized_ndim};
  const Normalized normalized = normalize_as(a.x.to(acc), rows, a.rstd);
  const Tensor z = plus(times(normalized.xhat, weight), as(a.bias, acc));
  const Tensor dz = times(a.dy.to(acc) * a.scale, slopes_of(a.activation, z).first);
  const Tensor dx = plus(normalized.project(times(dz, weight)), as(a.dresidual, acc));
  return {dx.to(a.x.scalar_type()), rows.sum(dz * normalized.xhat).to(parameter_type),
          rows.sum(dz).to(parameter_type)};
}

// ---- Backward of backward
// -------------------------------------------------------------------------

struct ArgumentGradients {
  Tensor dy, x, weight, bias;  // that of dresidual is that of dx
};

// From the gradients ddx, ddweight and ddbias of layer_norm_backward's results to those of its
// arguments. With d = dz * weight, dz = dy * scale * activation'(z), the results are
//     dx = P d,   dweight = sum over rows of dz * xhat,   dbias = sum over rows of dz,
// so the sum of ddx * dx + ddweight * dweight + ddbias * dbias over all elements is that of q * dz,
//     q = weight * P ddx + ddweight * xhat + ddbias,
// which depends on dy, on z by dz, on weight and xhat by q, and on xhat and rstd by P.
inline ArgumentGradients layer_norm_double_backward_formula(const BackwardArguments& a,
                                                            const BackwardResults& gradients) {
  const auto acc = arithmetic_type(a.x.scalar_type());
  const Tensor dy = a.dy.to(acc), weight = as(a.weight, acc), bias = as(a.bias, acc);
  const Tensor ddx = as(gradients.dx, acc), ddweight = as(gradients.dweight, acc);
  const Tensor ddbias = as(gradients.dbias, acc);
  const Rows rows = {a.normalized_ndim};
  const Normalized normalized = normalize_as(a.x.to(acc), rows, a.rstd);
  const Tensor &xhat = normalized.xhat, &rstd = normalized.rstd;
  const Slopes slopes = slopes_of(a.activation, plus(times(xhat, weight), bias));
  const Tensor dz = times(dy * a.scale, slopes.first);

  const Tensor projected = ddx.defined() ? normalized.project(ddx) : Tensor();
  Tensor q = projected.defined() ? times(projected, weight) : Tensor();
  if (ddweight.defined()) q = plus(q, ddweight * xhat);
  q = plus(q, ddbias);
  if (!q.defined()) return {};

  Tensor by_weight, by_bias, by_x;
  Tensor by_xhat = ddweight.defined() ? ddweight * dz : Tensor();
  if (projected.defined()) {
    const Tensor d = times(dz, weight);
    const Tensor ddx_along = rows.mean(ddx * xhat), d_along = rows.mean(d * xhat);
    by_xhat = plus(by_xhat, -rstd * (ddx * d_along + d * ddx_along));
    const Tensor by_rstd = rows.mean(ddx * d) - rows.mean(ddx) * rows.mean(d) - ddx_along * d_along;
    by_x = -rstd * rstd * by_rstd * xhat;
    if (weight.defined()) by_weight = projected * dz;
  }
  if (slopes.second.defined()) {
    const Tensor by_z = q * dy * a.scale * slopes.second;
    by_xhat = plus(by_xhat, times(by_z, weight));
    if (weight.defined()) by_weight = plus(by_weight, by_z * xhat);
    if (bias.defined()) by_bias = by_z;
  }
  if (by_xhat.defined()) by_x = plus(by_x, normalized.project(by_xhat));

  ArgumentGradients result;
  // Of ddbias alone, q has the shape of one row.
  const Tensor by_dy = times(q * a.scale, slopes.first);
  result.dy = by_dy.expand_as(dy).to(a.dy.scalar_type());
  if (by_x.defined()) result.x = by_x.to(a.x.scalar_type());
  if (by_weight.defined()) result.weight = rows.sum(by_weight).to(a.weight.scalar_type());
  if (by_bias.defined()) result.bias = rows.sum(by_bias).to(a.bias.scalar_type());
  return result;
}

}  // namespace fused_layernorm

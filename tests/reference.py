# SPDX-License-Identifier: Apache-2.0
"""LayerNorm and RMSNorm by their formulas, in float64: the reference of all tests and docs.

Nothing here is fast, and nothing is shared with the rest of the package: the statistics, the
activations' derivatives and the backward pass are written out.

With cols the number of elements normalized over, and sums over them:

    mean = sum(x) / cols                      rstd = 1 / sqrt(sum((x - mean)^2) / cols + eps)
    xhat = (x - mean) * rstd                  z = xhat * weight + bias
    y = activation(z) * scale

    dz = dy * scale * activation'(z)
    dweight = sum over rows of dz * xhat      dbias = sum over rows of dz
    dxhat = dz * weight
    dx = rstd * (dxhat - sum(dxhat) / cols - xhat * sum(dxhat * xhat) / cols)

With a modulation in front of the activation (scale is a number above, and a tensor here):

    u = z * (1 + scale) + shift               y = activation(u) * output_scale
    residual_out = residual + gate * input

    du = dy * output_scale * activation'(u)   dz = du * (1 + scale)
    dshift = sum of du                        dscale = sum of du * z
    dinput = gate * dresidual_out             dgate = sum of dresidual_out * input

where these three sums run over the dimensions in which shift, scale or gate is broadcast.

A head's row, with a rotation behind the norm: of each pair of columns (a, b), by its angle,

    y_a = z_a * cos - z_b * sin               y_b = z_b * cos + z_a * sin
    dz_a = dy_a * cos + dy_b * sin            dz_b = dy_b * cos - dy_a * sin

Groups of channels: a group of a sample is a row, weight and bias have a number for each channel,
shift and scale one for each channel of each sample.

A gate, of x's shape, behind an RMSNorm or in front of it, whose mean of squares may be taken over
groups of columns:

    y = z * activation(gate)                  dgate = dy * z * activation'(gate)
                                              dz = dy * activation(gate)
    u = x * activation(gate) in x's place     dgate = du * x * activation'(gate)
                                              dx = du * activation(gate)

RMSNorm has a mean of zero, and the term sum(dxhat) / cols is zero too. Where a weight has an
offset, weight + weight_offset stands for weight.
"""

import math
from collections import namedtuple

import torch

# y, and mean and rstd of shape (*leading dimensions, 1, ..., 1).
Forward = namedtuple("Forward", "y mean rstd")
# The gradients; None for a modulation that is not there.
Backward = namedtuple("Backward", "dx dweight dbias dshift dscale", defaults=(None, None))
# The results and gradients of a norm over groups of channels; mean and rstd are (N, G).
Groups = namedtuple("Groups", "y mean rstd dx dshift dscale dweight dbias")
# Those of a gated RMSNorm; rstd is (*leading dimensions, groups).
Gated = namedtuple("Gated", "y rstd dx dgate dweight dbias")


def activation_value(z, activation):
    """activation(z)."""
    match activation:
        case None:
            return z
        case "gelu":
            return z * 0.5 * torch.erfc(-z / math.sqrt(2))
        case "gelu_tanh":
            return 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
        case "silu":
            return z / (1 + torch.exp(-z))
        case "relu":
            return torch.where(z < 0, 0, z)  # NaN stays
        case "leaky_relu":
            return torch.where(z < 0, z / 100, z)
        case "sigmoid":
            return 1 / (1 + torch.exp(-z))
    raise ValueError(activation)


def activation_derivative(z, activation):
    """d activation(z) / dz."""
    match activation:
        case None:
            return torch.ones_like(z)
        case "gelu":
            density = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
            return 0.5 * torch.erfc(-z / math.sqrt(2)) + z * density
        case "gelu_tanh":
            slope = math.sqrt(2 / math.pi)
            t = torch.tanh(slope * (z + 0.044715 * z**3))
            return 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * slope * (1 + 3 * 0.044715 * z**2)
        case "silu":
            sigmoid = 1 / (1 + torch.exp(-z))
            return sigmoid * (1 + z * (1 - sigmoid))
        case "relu":
            return torch.where(z > 0, 1.0, 0.0).to(z.dtype)
        case "leaky_relu":
            return torch.where(z > 0, 1.0, 0.01).to(z.dtype)
        case "sigmoid":
            sigmoid = 1 / (1 + torch.exp(-z))
            return sigmoid * (1 - sigmoid)
    raise ValueError(activation)


def _normalize(x, ndim, eps, statistic):
    """(xhat, mean, rstd) over the last ndim dimensions."""
    dims = tuple(range(-ndim, 0))
    cols = math.prod(x.shape[x.dim() - ndim :])
    total = x.sum(dims, keepdim=True)
    mean = torch.zeros_like(total) if statistic == "rms" else total / cols
    centered = x - mean
    rstd = 1 / torch.sqrt((centered * centered).sum(dims, keepdim=True) / cols + eps)
    return centered * rstd, mean, rstd


def _normalize_backward(dxhat, xhat, rstd, ndim, statistic):
    """The gradient of _normalize's x."""
    dims = tuple(range(-ndim, 0))
    cols = math.prod(xhat.shape[xhat.dim() - ndim :])
    mean = 0 if statistic == "rms" else dxhat.sum(dims, keepdim=True) / cols
    return rstd * (dxhat - mean - xhat * ((dxhat * xhat).sum(dims, keepdim=True) / cols))


def _affine(xhat, weight, bias, weight_offset=0.0):
    z = xhat if weight is None else xhat * (weight.double() + weight_offset)
    return z if bias is None else z + bias.double()


def _modulate(z, shift, scale):
    u = z if scale is None else z * (1 + scale.double())
    return u if shift is None else u + shift.double()


def layer_norm(
    x, normalized_ndim, weight=None, bias=None, eps=1e-5, activation=None, output_scale=1.0, *,
    shift=None, scale=None, statistic="layer", weight_offset=0.0, rounding=None,
):  # fmt: skip
    """y, mean and rstd in float64, from the values that the arguments hold.

    `rounding` is the dtype to which xhat is rounded before it is multiplied by weight.
    """
    xhat, mean, rstd = _normalize(x.double(), normalized_ndim, eps, statistic)
    if rounding is not None:
        xhat = xhat.to(rounding).double()
    u = _modulate(_affine(xhat, weight, bias, weight_offset), shift, scale)
    return Forward(activation_value(u, activation) * output_scale, mean, rstd)


def add(input, residual):
    """residual_out: the sum in float32 (float64 if either is), rounded to residual's dtype.

    A sum of two numbers is exact up to its rounding, so there is only one right result.
    """
    wide = torch.float64 in (input.dtype, residual.dtype)
    acc = torch.float64 if wide else torch.float32
    return (input.to(acc) + residual.to(acc)).to(residual.dtype)


def layer_norm_backward(
    dy, x, normalized_ndim, weight=None, bias=None, eps=1e-5, activation=None, output_scale=1.0,
    dresidual=None, *, shift=None, scale=None, statistic="layer", weight_offset=0.0,
):  # fmt: skip
    """The gradients in float64; dx with dresidual, if given."""
    xhat, _, rstd = _normalize(x.double(), normalized_ndim, eps, statistic)
    z = _affine(xhat, weight, bias, weight_offset)
    slope = activation_derivative(_modulate(z, shift, scale), activation)
    du = dy.double() * output_scale * slope
    dz = du if scale is None else du * (1 + scale.double())
    dxhat = dz if weight is None else dz * (weight.double() + weight_offset)
    dx = _normalize_backward(dxhat, xhat, rstd, normalized_ndim, statistic)
    rows_shape = (-1, *x.shape[x.dim() - normalized_ndim :])
    return Backward(
        dx if dresidual is None else dx + dresidual.double(),
        (dz * xhat).reshape(rows_shape).sum(0),
        dz.reshape(rows_shape).sum(0),
        None if shift is None else du.sum_to_size(shift.shape),
        None if scale is None else (du * z).sum_to_size(scale.shape),
    )


def gated_add(input, residual, gate):
    """residual + gate * input in float64; residual_out is this, rounded to residual's dtype."""
    return residual.double() + gate.double() * input.double()


def gate_backward(dresidual_out, input, gate):
    """(dinput, dgate) in float64: the gradients of what a gate multiplies, and of the gate."""
    dresidual_out = dresidual_out.double()
    dgate = (dresidual_out * input.double()).sum_to_size(gate.shape)
    return dresidual_out * gate.double(), dgate


def rotate(z, cos, sin, rotary_dim=None, interleaved=False, seq_dim=1):
    """The rotation of heads in float64; with -sin its transpose.

    cos and sin have a value for each pair, or each value twice.
    """
    y = z.double().clone()
    if cos is None or sin is None:
        return y
    rotary = z.shape[-1] if rotary_dim is None else rotary_dim
    for pair in range(rotary // 2):
        a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + rotary // 2)
        column = 2 * pair if interleaved and cos.shape[-1] == rotary else pair
        c, s = (angles.double()[..., column] for angles in (cos, sin))
        # (positions) or (batch, positions), beside the heads
        c, s = (t.unsqueeze(-1) if seq_dim == 1 else t.unsqueeze(-2) for t in (c, s))
        y[..., a] = z[..., a].double() * c - z[..., b].double() * s
        y[..., b] = z[..., b].double() * c + z[..., a].double() * s
    return y


def norm_rope(
    x, weight, cos, sin, eps, *, statistic="rms", bias=None, weight_offset=0.0, rounding=None, **how
):
    """y in float64. `rounding` is the dtype to which xhat and the norm's result are rounded; `how`
    are options of rotate."""
    z = x.double()
    if statistic is not None:
        kind = {"statistic": statistic, "weight_offset": weight_offset, "rounding": rounding}
        z = layer_norm(x, 1, weight, bias, eps, **kind).y
        z = z if rounding is None else z.to(rounding).double()
    return rotate(z, cos, sin, **how)


def norm_rope_backward(
    dy, x, weight, cos, sin, eps, *, statistic="rms", bias=None, weight_offset=0.0, **how
):
    """dx, dweight and dbias in float64; without a statistic the last two are empty."""
    dz = rotate(dy, cos, None if sin is None else -sin, **how)
    if statistic is None:
        return Backward(dz, dz.new_empty(0), dz.new_empty(0))
    kind = {"statistic": statistic, "weight_offset": weight_offset}
    return layer_norm_backward(dz, x, 1, weight, bias, eps, **kind)


def group_norm(
    x, num_groups, dy, shift=None, scale=None, weight=None, bias=None, eps=1e-5, activation=None,
    output_scale=1.0,
):  # fmt: skip
    """Everything in float64; dshift and dscale are (N, C) whatever the shape of shift and scale."""
    shape, (samples, channels) = x.shape, x.shape[:2]
    rows = (samples, num_groups, -1)
    x, dy = (t.double().reshape(samples, channels, -1) for t in (x, dy))
    xhat, mean, rstd = _normalize(x.reshape(rows), 1, eps, "layer")
    xhat = xhat.reshape(x.shape)
    one, zero = x.new_ones(samples, channels), x.new_zeros(samples, channels)
    w, b, s, t = (
        (absent if given is None else given.double().reshape(-1, channels) + zero)[..., None]
        for given, absent in ((weight, one), (bias, zero), (scale, zero), (shift, zero))
    )
    z = (xhat * w + b) * (1 + s) + t
    dz = dy * output_scale * activation_derivative(z, activation)
    dxhat = (dz * (1 + s) * w).reshape(rows)
    return Groups(
        (activation_value(z, activation) * output_scale).reshape(shape),
        mean[..., 0],
        rstd[..., 0],
        _normalize_backward(dxhat, xhat.reshape(rows), rstd, 1, "layer").reshape(shape),
        dz.sum(-1),
        (dz * (xhat * w + b)).sum(-1),
        (dz * (1 + s) * xhat).sum((0, 2)),
        (dz * (1 + s)).sum((0, 2)),
    )


def rms_norm_gated(
    x, gate, dy, weight=None, bias=None, eps=1e-5, *, gate_first=False, gate_activation="silu",
    group_size=None, weight_offset=0.0, rounding=None,
):  # fmt: skip
    """Everything in float64. `rounding` is what xhat and z are rounded to, if they are."""
    shape, columns = x.shape, x.shape[-1]
    x, gate, dy = (t.double().reshape(-1, columns) for t in (x, gate, dy))
    value, slope = (f(gate, gate_activation) for f in (activation_value, activation_derivative))
    u = x * value if gate_first else x
    groups = (len(u), -1, group_size or columns)
    of_groups, _, rstd = _normalize(u.reshape(groups), 1, eps, "rms")
    xhat = of_groups.reshape(u.shape)
    rounded = xhat if rounding is None else xhat.to(rounding[0]).double()
    z = _affine(rounded, weight, bias, weight_offset)
    z = z if rounding is None else z.to(rounding[1]).double()
    dz = dy if gate_first else dy * value
    dxhat = dz if weight is None else dz * (weight.double() + weight_offset)
    du = _normalize_backward(dxhat.reshape(groups), of_groups, rstd, 1, "rms").reshape(u.shape)
    return Gated(
        (z if gate_first else z * value).reshape(shape),
        rstd[..., 0],
        du * value if gate_first else du,
        du * x * slope if gate_first else dy * _affine(xhat, weight, bias, weight_offset) * slope,
        (dz * xhat).sum(0),
        dz.sum(0),
    )

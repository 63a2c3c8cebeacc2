# SPDX-License-Identifier: Apache-2.0
"""The norms by their formulas: the reference of all tests.

Nothing here is fast, and nothing is shared with the package. Whoever wants float64 passes tensors
of float64 (layer_norm, add and gated_add make them so); PyTorch differentiates the formulas, so
that no gradient is written out.

With a modulation scale and shift are tensors, and the activation's factor is output_scale:

    xhat = (x - mean) * rstd                    u = z * (1 + scale) + shift
    z = xhat * (weight + weight_offset) + bias  y = activation(u) * output_scale

RMSNorm has a mean of zero. A head's row has a rotation behind the norm. A group of a sample is a
row, weight and bias have a number for each channel, shift and scale one for each channel of each
sample. A gate, of x's shape, stands behind an RMSNorm or in front of it, whose mean of squares may
be taken over groups of columns.
"""

import math
from collections import namedtuple

import torch

# y, and mean and rstd of shape (*leading dimensions, 1, ..., 1).
Forward = namedtuple("Forward", "y mean rstd")


def activation_value(z, activation):
    """activation(z)."""
    match activation:
        case None:
            return z
        case "gelu":
            return z * 0.5 * torch.erfc(-z / math.sqrt(2))
        case "gelu_tanh":
            return 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
        case "silu" | "sigmoid":
            return (z if activation == "silu" else 1) / (1 + torch.exp(-z))
        case "relu" | "leaky_relu":
            return torch.where(z <= 0, z / 100 if activation == "leaky_relu" else 0, z)  # NaN stays
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


def _affine(xhat, weight, bias, weight_offset=0.0):
    z = xhat if weight is None else xhat * (weight.to(xhat.dtype) + weight_offset)
    return z if bias is None else z + bias.to(xhat.dtype)


def _modulate(z, shift, scale):
    u = z if scale is None else z * (1 + scale.to(z.dtype))
    return u if shift is None else u + shift.to(z.dtype)


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


def rotate(z, cos, sin, rotary_dim=None, interleaved=False, seq_dim=1):
    """The rotation of heads; cos and sin have a value for each pair, or each value twice."""
    if cos is None or sin is None:
        return z
    rotary = z.shape[-1] if rotary_dim is None else rotary_dim
    rotated = z[..., :rotary]
    pairs = rotated.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else rotated.chunk(2, -1)
    if cos.shape[-1] == rotary:
        step = slice(0, rotary, 2) if interleaved else slice(0, rotary // 2)
        cos, sin = cos[..., step], sin[..., step]
    # (positions) or (batch, positions), beside the heads
    c, s = (t.to(z.dtype).unsqueeze(-2 if seq_dim == 1 else -3) for t in (cos, sin))
    a, b = pairs
    turned = (a * c - b * s, b * c + a * s)
    y = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat([y, z[..., rotary:]], -1)


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


def group_norm(
    x, num_groups, shift=None, scale=None, weight=None, bias=None, eps=1e-5, activation=None,
    output_scale=1.0,
):  # fmt: skip
    """y, and mean and rstd of shape (N, G), in x's dtype; shift and scale in any shape of N x C."""
    channels = x.shape[:2]
    xhat, mean, rstd = _normalize(x.reshape(len(x), num_groups, -1), 1, eps, "layer")
    weight, bias = (t if t is None else t[:, None] for t in (weight, bias))
    shift, scale = (t if t is None else t.reshape(*channels, 1) for t in (shift, scale))
    z = _modulate(_affine(xhat.reshape(*channels, -1), weight, bias), shift, scale)
    y = activation_value(z, activation) * output_scale
    return Forward(y.reshape(x.shape), mean[..., 0], rstd[..., 0])


def rms_norm_gated(
    x, gate, weight=None, bias=None, eps=1e-5, *, gate_first=False, gate_activation="silu",
    group_size=None, weight_offset=0.0, rounding=None,
):  # fmt: skip
    """y in x's dtype. `rounding` is what xhat and z are rounded to, if they are."""
    gate = activation_value(gate.to(x.dtype), gate_activation)
    u = x * gate if gate_first else x
    groups = (*u.shape[:-1], -1, group_size or u.shape[-1])
    xhat = _normalize(u.reshape(groups), 1, eps, "rms")[0].reshape(u.shape)
    xhat = xhat if rounding is None else xhat.to(rounding[0]).to(x.dtype)
    z = _affine(xhat, weight, bias, weight_offset)
    z = z if rounding is None else z.to(rounding[1]).to(x.dtype)
    return z if gate_first else z * gate

"""The operators as differentiable expressions in PyTorch's own operators.

PyTorch differentiates them any number of times, in both modes. Its layer_norm would not do: the
double backward takes mean and rstd for constants, so its third derivative is wrong; and
silu_backward has no derivative.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .operators import Arguments, BackwardArguments, Gradients, Results

_aten = torch.ops.aten


def acc_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def to(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def activate(z: Tensor, activation: str | None) -> Tensor:
    """activation(z)."""
    match activation:
        case "gelu":
            return _aten.gelu(z)
        case "gelu_tanh":
            return _aten.gelu(z, approximate="tanh")
        case "silu":
            return _aten.silu(z)
        case "relu":
            return _aten.relu(z)
    return z


def slope(z: Tensor, activation: str | None) -> Tensor:
    """d activation(z) / dz."""
    match activation:
        case "gelu":
            density = torch.exp(-0.5 * z * z) * (2 * math.pi) ** -0.5
            return 0.5 * torch.erfc(z * -(2**-0.5)) + z * density
        case "gelu_tanh":
            root = (2 / math.pi) ** 0.5
            t = torch.tanh(root * (z + 0.044715 * z * z * z))
            return 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * root * (1 + 3 * 0.044715 * z * z)
        case "silu":
            sigmoid = torch.sigmoid(z)
            return sigmoid * (1 + z * (1 - sigmoid))
        case "relu":
            return (z > 0).to(z.dtype)
    return torch.ones_like(z)


def affine(xhat: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """xhat * weight + bias."""
    z = xhat if weight is None else xhat * weight
    return z if bias is None else z + bias


def add(input: Tensor, residual: Tensor) -> Tensor:
    """residual_out: the sum in the arithmetic's dtype, rounded to residual's.

    PyTorch adds half-precision tensors in float32, and rounds to the wider dtype of the two.
    """
    return (input + residual).to(residual.dtype).contiguous()


def _mean(x: Tensor, normalized_ndim: int) -> Tensor:
    return x.mean(dim=tuple(range(-normalized_ndim, 0)), keepdim=True)


def forward(a: Arguments) -> Results:
    """What the forward operators give."""
    _, eps, activation, scale, _ = a.options
    residual_out = None if a.residual is None else add(a.input, a.residual)
    rows = a.input if residual_out is None else residual_out
    acc = acc_dtype(rows.dtype)
    x = rows.to(acc)
    mean = _mean(x, a.options.normalized_ndim)
    centered = x - mean
    rstd = (_mean(centered.square(), a.options.normalized_ndim) + eps).rsqrt()
    z = affine(centered * rstd, to(a.weight, acc), to(a.bias, acc))
    return Results((activate(z, activation) * scale).to(a.y_dtype), residual_out, mean, rstd)


def backward(b: BackwardArguments, *, sum_from: int = 0) -> Gradients:
    """(dx, dweight, dbias), all three, as functions of the tensors with mean and rstd those of x.

    The parameters' gradients are summed over the leading dimensions from sum_from on. The operator
    is not told eps: it is what the forward pass's rstd = 1 / sqrt(var + eps) has beyond x's
    variance.
    """
    acc = acc_dtype(b.x.dtype)
    centered = b.x.to(acc)
    centered = centered - _mean(centered, b.normalized_ndim)
    variance = _mean(centered.square(), b.normalized_ndim)
    rstd = (variance + (b.rstd.pow(-2) - variance).detach()).rsqrt()

    weight = to(b.weight, acc)
    xhat = centered * rstd
    dz = b.dy.to(acc) * b.scale
    if b.activation is not None:
        dz = dz * slope(affine(xhat, weight, to(b.bias, acc)), b.activation)

    dweight, dbias = dz * xhat, dz
    leading = tuple(range(sum_from, b.x.dim() - b.normalized_ndim))
    if leading:
        dweight, dbias = dweight.sum(leading), dbias.sum(leading)
    dxhat = dz if weight is None else dz * weight
    dx = rstd * (
        dxhat - _mean(dxhat, b.normalized_ndim) - xhat * _mean(dxhat * xhat, b.normalized_ndim)
    )
    if b.dresidual is not None:
        dx = dx + b.dresidual.to(acc)
    dtype = b.parameter_dtype
    return dx.to(b.x.dtype), dweight.to(dtype), dbias.to(dtype)

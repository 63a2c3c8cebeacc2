# SPDX-License-Identifier: Apache-2.0
"""The operators as differentiable expressions in PyTorch's own operators.

PyTorch differentiates them any number of times, in reverse and in forward mode. Its own layer_norm
would not do: its double backward treats mean and rstd as constants, so the third derivative is
wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

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
        case None:
            return z
        case "gelu":
            return _aten.gelu(z)
        case "gelu_tanh":
            return _aten.gelu(z, approximate="tanh")
        case "silu":
            return _aten.silu(z)
        case "relu":
            return _aten.relu(z)
        case "leaky_relu":
            return _aten.leaky_relu(z)
        case "sigmoid":  # of a gate
            return _aten.sigmoid(z)
    raise ValueError(activation)


def activate_backward(da: Tensor, z: Tensor, activation: str | None) -> Tensor:
    """da times the derivative of activation at z."""
    match activation:
        case None:
            return da
        case "gelu":
            return _aten.gelu_backward(da, z)
        case "gelu_tanh":
            return _aten.gelu_backward(da, z, approximate="tanh")
        case "silu":
            if not (torch.is_grad_enabled() or forward_ad._current_level >= 0):
                return _aten.silu_backward(da, z)  # which has no derivative
            sigmoid = _aten.sigmoid(z)
            return da * sigmoid * (1 + z * (1 - sigmoid))
        case "relu":
            return _aten.threshold_backward(da, z, 0)
        case "leaky_relu":
            return _aten.leaky_relu_backward(da, z, 0.01, False)
        case "sigmoid":
            return _aten.sigmoid_backward(da, _aten.sigmoid(z))
    raise ValueError(activation)


def shifted(weight: Tensor | None, offset: float, dtype: torch.dtype) -> Tensor | None:
    """weight + offset in this dtype; None without a weight."""
    wide = to(weight, dtype)
    return wide if wide is None or offset == 0 else wide + offset


def affine(xhat: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """xhat * weight + bias."""
    z = xhat if weight is None else xhat * weight
    return z if bias is None else z + bias


def modulate(z: Tensor, shift: Tensor | None, scale: Tensor | None) -> Tensor:
    """z * (1 + scale) + shift."""
    if scale is None:
        return z if shift is None else z + shift
    return z * (1 + scale) if shift is None else torch.addcmul(shift, z, 1 + scale)


def sum_to(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """The sum over the dimensions in which a tensor of this shape is broadcast; never an alias."""
    leading = tensor.dim() - len(shape)
    dims = [d for d in range(tensor.dim()) if d < leading or tensor.shape[d] != shape[d - leading]]
    return tensor.sum(dims, keepdim=True).reshape(shape) if dims else tensor.clone()


def add(input: Tensor, residual: Tensor, gate: Tensor | None = None) -> Tensor:
    """residual_out: residual + gate * input in the arithmetic's dtype, rounded to residual's.

    PyTorch itself adds half-precision tensors in float32, and rounds to the wider dtype of the two.
    But it would round the product gate * input before the addition.
    """
    if gate is None:
        return (input + residual).to(residual.dtype).contiguous()
    acc = acc_dtype(input.dtype, residual.dtype, gate.dtype)
    total = torch.addcmul(residual.to(acc), gate.to(acc), input.to(acc))
    return total.to(residual.dtype).contiguous()


def laid_out(result: Tensor, like: Tensor, keeps_order: bool) -> Tensor:
    """The result contiguous, or with keeps_order in the strides of torch.empty_like(like)."""
    if not keeps_order:
        return result.contiguous()
    ordered = torch.empty_like(like, dtype=result.dtype)
    return result if result.stride() == ordered.stride() else ordered.copy_(result)


def _mean(x: Tensor, normalized_ndim: int) -> Tensor:
    return x.mean(dim=tuple(range(-normalized_ndim, 0)), keepdim=True)


def _centered(x: Tensor, normalized_ndim: int, is_rms: bool) -> tuple[Tensor, Tensor]:
    """The mean, and x without it. RMSNorm leaves x as it is, and its mean is an empty tensor."""
    if is_rms:
        return x.new_empty((0,)), x
    mean = _mean(x, normalized_ndim)
    return mean, x - mean


def normalized(
    x: Tensor, normalized_ndim: int, eps: float, is_rms: bool, *, corrects_mean: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The mean, xhat and rstd of x in the arithmetic's dtype.

    A large mean takes its digits from the sum: `corrects_mean` gives them back.
    """
    mean, centered = _centered(x, normalized_ndim, is_rms)
    if corrects_mean:
        mean = mean + _mean(centered, normalized_ndim)
        centered = x - mean
    rstd = (_mean(centered.square(), normalized_ndim) + eps).rsqrt()
    return mean, centered * rstd, rstd


def normalized_again(
    x: Tensor, normalized_ndim: int, rstd: Tensor, is_rms: bool
) -> tuple[Tensor, Tensor]:
    """xhat and rstd as functions of x in the arithmetic's dtype.

    eps is no argument of backward: it follows from the forward pass's rstd, as 1 / rstd^2 - var.
    """
    _, centered = _centered(x, normalized_ndim, is_rms)
    variance = _mean(centered.square(), normalized_ndim)
    rstd = (variance + (rstd.pow(-2) - variance).detach()).rsqrt()
    return centered * rstd, rstd


def project(t: Tensor, xhat: Tensor, rstd: Tensor, normalized_ndim: int, is_rms: bool) -> Tensor:
    """P t, where P is the derivative of xhat with respect to x: on each row a symmetric map."""
    along = _mean(t * xhat, normalized_ndim)
    centered = t if is_rms else t - _mean(t, normalized_ndim)
    return torch.addcmul(centered, xhat, along, value=-1) * rstd


def forward(a: Arguments) -> Results:
    """What the forward operators give."""
    residual_out = None if a.residual is None else add(a.input, a.residual, a.gate)
    rows = a.input if residual_out is None else residual_out
    acc = acc_dtype(rows.dtype)
    mean, xhat, rstd = normalized(rows.to(acc), a.normalized_ndim, a.eps, a.is_rms)
    if a.rounds_xhat:
        xhat = xhat.to(a.input.dtype).to(acc)
    z = affine(xhat, shifted(a.weight, a.weight_offset, acc), to(a.bias, acc))
    y = activate(modulate(z, to(a.shift, acc), to(a.scale, acc)), a.activation) * a.output_scale
    return Results(y.to(a.y_dtype), residual_out, mean, rstd)


def of_affine(
    b: BackwardArguments,
    dz: Tensor,
    xhat: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    sum_from: int = 0,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx, dweight and dbias, those that are needed, from the gradient of z = affine(xhat)."""
    dx = dweight = dbias = None
    leading = tuple(range(sum_from, b.x.dim() - b.normalized_ndim))
    if b.needs_dx:
        g = dz if weight is None else dz * weight
        dx = project(g, xhat, rstd, b.normalized_ndim, b.is_rms)
        dx = (dx if b.dresidual is None else dx + b.dresidual).to(b.x.dtype)
    if b.needs_dweight:
        dweight = dz * xhat
        dweight = (dweight.sum(leading) if leading else dweight).to(b.parameter_dtype)
    if b.needs_dbias:
        dbias = (dz.sum(leading) if leading else dz.clone()).to(b.parameter_dtype)
    return dx, dweight, dbias


def backward(b: BackwardArguments, *, sum_from: int = 0) -> Gradients:
    """The gradients that are needed, as functions of the tensors; mean and rstd depend on x.

    The parameters' gradients are summed over the leading dimensions from sum_from on. The rounding
    of xhat counts as the identity.
    """
    acc = acc_dtype(b.x.dtype)
    xhat, rstd = normalized_again(b.x.to(acc), b.normalized_ndim, b.rstd, b.is_rms)
    weight, bias = shifted(b.weight, b.weight_offset, acc), to(b.bias, acc)
    dz = b.dy.to(acc) * b.output_scale
    if b.activation is not None:
        dz = activate_backward(dz, affine(xhat, weight, bias), b.activation)
    dshift, dscale = modulation_gradients(b, dz, lambda: affine(xhat, weight, bias))
    if b.scale is not None:
        dz = dz * (1 + b.scale.to(acc))

    dx, dweight, dbias = of_affine(b, dz, xhat, rstd, weight, sum_from)
    return Gradients(dx, dshift, dscale, dweight, dbias)


def modulation_gradients(
    b: BackwardArguments, dy: Tensor, z: Callable[[], Tensor]
) -> tuple[Tensor | None, Tensor | None]:
    """dshift = sum dy and dscale = sum dy * z, if needed, from dy in the arithmetic's dtype."""
    dshift = dscale = None
    if b.needs_dshift and b.shift is not None:
        dshift = sum_to(dy, b.shift.shape).to(b.shift.dtype)
    if b.needs_dscale and b.scale is not None:
        dscale = sum_to(dy * z(), b.scale.shape).to(b.scale.dtype)
    return dshift, dscale


def gate_backward(
    dresidual_out: Tensor, input: Tensor, gate: Tensor, needs_dinput: bool, needs_dgate: bool
) -> tuple[Tensor, Tensor]:
    """What gate_backward gives."""
    acc = acc_dtype(dresidual_out.dtype, input.dtype, gate.dtype)
    d = dresidual_out.to(acc)
    dinput, dgate = input.new_empty((0,)), gate.new_empty((0,))
    if needs_dinput:
        dinput = (d * gate.to(acc)).to(input.dtype)
    if needs_dgate:
        dgate = sum_to(d * input.to(acc), gate.shape).to(gate.dtype)
    return dinput, dgate


def results(
    gradients: Sequence[Tensor | None], tensors: Sequence[Tensor | None], x: Tensor
) -> tuple[Tensor, ...]:
    """What a backward operator gives: the gradients of these tensors in their dtypes.

    An empty tensor is given for no gradient; x's dtype counts for a tensor that is not there.
    """
    dtypes = [x.dtype if tensor is None else tensor.dtype for tensor in tensors]
    return tuple(
        x.new_empty(0, dtype=dtype) if gradient is None else gradient.to(dtype)
        for gradient, dtype in zip(gradients, dtypes, strict=True)
    )

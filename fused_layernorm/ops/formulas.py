# SPDX-License-Identifier: Apache-2.0
"""The operators as differentiable expressions in PyTorch's own operators.

PyTorch differentiates them any number of times, in reverse and in forward mode. Its own layer_norm
would not do: its double backward treats mean and rstd as constants, so the third derivative is
wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

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
    if corrects_mean and not is_rms:
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


def epilogue(a: Any, z: Tensor, shift: Tensor | None, scale: Tensor | None) -> Tensor:
    """What follows the affine step of a call, in y's dtype."""
    y = activate(modulate(z, shift, scale), a.activation)
    return (y if a.output_scale == 1.0 else y * a.output_scale).to(a.y_dtype)


def forward(a: Arguments, *, corrects_mean: bool = False) -> Results:
    """What the forward operators give."""
    residual_out = None if a.residual is None else add(a.input, a.residual, a.gate)
    rows = a.input if residual_out is None else residual_out
    acc, norm = acc_dtype(rows.dtype), (a.normalized_ndim, a.eps, a.is_rms)
    mean, xhat, rstd = normalized(rows.to(acc), *norm, corrects_mean=corrects_mean)
    if a.rounds_xhat:
        xhat = xhat.to(a.input.dtype).to(acc)
    z = affine(xhat, shifted(a.weight, a.weight_offset, acc), to(a.bias, acc))
    return Results(epilogue(a, z, to(a.shift, acc), to(a.scale, acc)), residual_out, mean, rstd)


def sum_like(
    gradient: Tensor | None, wide: Tensor | None, parameter: Tensor | None
) -> Tensor | None:
    """The sum of a gradient over the dimensions in which a parameter, as it is used (`wide`), is
    broadcast, in the parameter's shape and dtype."""
    if gradient is None or wide is None or parameter is None:
        return None
    return sum_to(gradient, wide.shape).reshape(parameter.shape).to(parameter.dtype)


def of_output(
    b: Any, dy: Tensor, z: Callable[[], Tensor], shift: Tensor | None, scale: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dz, and dshift and dscale where they are needed, from the gradient of what `epilogue` gives.

    All but b's own tensors are in the arithmetic's dtype.
    """
    dz = dy if b.output_scale == 1.0 else dy * b.output_scale
    if b.activation is not None:
        dz = activate_backward(dz, modulate(z(), shift, scale), b.activation)
    dshift = sum_like(dz, shift, b.shift) if b.needs_dshift else None
    dscale = sum_like(dz * z(), scale, b.scale) if b.needs_dscale and scale is not None else None
    return dz if scale is None else dz * (1 + scale), dshift, dscale


def of_affine(
    needs: tuple[bool, bool, bool],
    dz: Tensor,
    xhat: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    normalized_ndim: int,
    is_rms: bool,
    view: Callable[[Tensor], Tensor] | None = None,
) -> list[Tensor | None]:
    """dx, dweight and dbias, those that are needed and the last two not summed, from the gradient
    of z = affine(xhat).

    view: how what is normalized together becomes the last dimensions.
    """
    needs_dx, needs_dweight, needs_dbias = needs
    dx = None
    if needs_dx:
        g = dz if weight is None else dz * weight
        rows, of_rows = (xhat, g) if view is None else (view(xhat), view(g))
        dx = project(of_rows, rows, rstd, normalized_ndim, is_rms).reshape(xhat.shape)
    return [dx, dz * xhat if needs_dweight else None, dz if needs_dbias else None]


def backward(b: BackwardArguments, *, sum_from: int = 0) -> Gradients:
    """The gradients that are needed, as functions of the tensors; mean and rstd depend on x.

    The parameters' gradients are summed over the leading dimensions from sum_from on. The rounding
    of xhat counts as the identity.
    """
    acc = acc_dtype(b.x.dtype)
    xhat, rstd = normalized_again(b.x.to(acc), b.normalized_ndim, b.rstd, b.is_rms)
    return backward_of(b, xhat, rstd, sum_from)


def backward_of(b: BackwardArguments, xhat: Tensor, rstd: Tensor, sum_from: int = 0) -> Gradients:
    acc = acc_dtype(b.x.dtype)
    weight, bias = shifted(b.weight, b.weight_offset, acc), to(b.bias, acc)
    shift, scale = to(b.shift, acc), to(b.scale, acc)
    z = functools.partial(affine, xhat, weight, bias)
    dz, dshift, dscale = of_output(b, b.dy.to(acc), z, shift, scale)
    needs, norm = (b.needs_dx, b.needs_dweight, b.needs_dbias), (b.normalized_ndim, b.is_rms)
    dx, *of_parameters = of_affine(needs, dz, xhat, rstd, weight, *norm)
    if dx is not None:
        dx = (dx if b.dresidual is None else dx + b.dresidual).to(b.x.dtype)
    kept, ones = b.x.shape[:sum_from], [1] * (b.x.dim() - b.normalized_ndim - sum_from)
    dweight, dbias = (
        None
        if gradient is None
        else sum_to(gradient, [*kept, *ones, *b.normalized_shape])
        .reshape(*kept, *b.normalized_shape)
        .to(b.parameter_dtype)
        for gradient in of_parameters
    )
    return Gradients(dx, dshift, dscale, dweight, dbias)


def gate_backward(
    dresidual_out: Tensor, input: Tensor, gate: Tensor, needs_dinput: bool, needs_dgate: bool
) -> tuple[Tensor, Tensor]:
    """What gate_backward gives."""
    acc = acc_dtype(dresidual_out.dtype, input.dtype, gate.dtype)
    dinput, dgate = input.new_empty((0,)), gate.new_empty((0,))
    if needs_dinput:
        # Of one dtype, a product is computed in float32 and rounded once, without copies.
        one_dtype = dresidual_out.dtype == input.dtype == gate.dtype
        d = dresidual_out if one_dtype else dresidual_out.to(acc)
        dinput = (d * gate).to(input.dtype)
    if needs_dgate:
        dgate = sum_to(dresidual_out.to(acc) * input, gate.shape).to(gate.dtype)
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

"""The operators through PyTorch's own, for every device without kernels: the same results.

As few of PyTorch's operators as will do, in input's dtype where its kernel rounds once: no float32
copies of half-precision tensors without an activation or a scale.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from . import arguments, formulas, load
from .formulas import acc_dtype, activate, affine, to
from .operators import FORWARD, Arguments, BackwardArguments, Gradients, Results, select

_aten = torch.ops.aten

_warned = False


def _warn_of_cuda(x: Tensor) -> None:
    global _warned
    if x.is_cuda and not _warned:
        _warned = True
        reason = torch.ops.fused_layernorm._driver_problem() or (
            "this build of fused_layernorm has no CUDA kernels: CUDA tensors take PyTorch's own "
            "operators, which are slower"
        )
        warnings.warn(f"{reason} (python -m fused_layernorm says what is installed)", stacklevel=2)


def forward(a: Arguments) -> Results:
    """What the forward operators give; the arguments are not checked."""
    acc = acc_dtype(a.x_dtype)
    _, eps, activation, scale, _ = a.options
    residual_out = None if a.residual is None else formulas.add(a.input, a.residual)
    rows = a.input if residual_out is None else residual_out
    z, mean, rstd = _aten.native_layer_norm(
        rows.to(acc).contiguous(), a.normalized_shape, to(a.weight, acc), to(a.bias, acc), eps
    )
    y = activate(z, activation)
    if scale != 1.0:
        y = y * scale
    return Results(y.to(a.y_dtype), residual_out, mean, rstd)


def _activate_backward(da: Tensor, z: Tensor, activation: str) -> Tensor:
    match activation:
        case "gelu":
            return _aten.gelu_backward(da, z)
        case "gelu_tanh":
            return _aten.gelu_backward(da, z, approximate="tanh")
        case "silu":
            return _aten.silu_backward(da, z)
    return _aten.threshold_backward(da, z, 0)


def backward(b: BackwardArguments) -> Gradients:
    """What layer_norm_backward gives."""
    if not any(b.needs):
        return select(b, (None, None, None))
    acc = acc_dtype(b.x.dtype)
    weight, bias = to(b.weight, acc), to(b.bias, acc)
    # PyTorch's backward takes x * rstd - mean * rstd for the normalised x, which cancels where the
    # mean is large. It is given x - mean, and a mean of zero.
    centered = b.x.to(acc) - b.mean
    dz = b.dy.to(acc)
    if b.scale != 1.0:
        dz = dz * b.scale
    if b.activation is not None:
        dz = _activate_backward(dz, affine(centered * b.rstd, weight, bias), b.activation)

    # A parameter that is not there has no gradient in PyTorch's operator: ones stand for it.
    if b.needs_dweight and weight is None:
        weight = b.x.new_ones(b.normalized_shape, dtype=acc)
    if b.needs_dbias and bias is None:
        bias = b.x.new_ones(b.normalized_shape, dtype=acc)
    dx, dweight, dbias = _aten.native_layer_norm_backward(
        dz.contiguous(),
        centered.contiguous(),
        b.normalized_shape,
        torch.zeros_like(b.mean, memory_format=torch.contiguous_format),
        b.rstd.contiguous(),
        weight,
        bias,
        b.needs,
    )
    if dx is not None:
        dx = (dx if b.dresidual is None else dx + b.dresidual.to(acc)).to(b.x.dtype)
    return select(b, (dx, to(dweight, b.parameter_dtype), to(dbias, b.parameter_dtype)))


def _checked_forward(a: Arguments) -> Results:
    arguments.check(a)
    _warn_of_cuda(a.input)
    return forward(a)


def _backward(*args: Any) -> Gradients:
    return backward(BackwardArguments(*args))


for _operator in FORWARD:
    load.library.impl(
        _operator.name, _operator.implemented_by(_checked_forward), "CompositeExplicitAutograd"
    )
load.library.impl("layer_norm_backward", _backward, "CompositeExplicitAutograd")

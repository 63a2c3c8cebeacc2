# SPDX-License-Identifier: Apache-2.0
"""The operators through PyTorch's own, for every device without kernels: the same results.

The implementations call as few of PyTorch's operators as possible, in x's dtype where PyTorch's
kernel rounds only once.
"""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from . import arguments, formulas, load
from .formulas import acc_dtype, affine, shifted, to
from .operators import Arguments, BackwardArguments, Gradients, Results

_aten = torch.ops.aten

_warned = False


def _has_kernels() -> bool:
    """Whether CUDA tensors come here only in calls that no kernel takes."""
    name = load.layer_norm._schema.name
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")


def _warn_of_cuda(x: Tensor) -> None:
    global _warned
    if x.is_cuda and not _warned and not _has_kernels():
        _warned = True
        reason = load.operators._driver_problem() or (
            "this build of fused_layernorm has no CUDA kernels: CUDA tensors take PyTorch's own "
            "operators, which are slower"
        )
        warnings.warn(f"{reason} (python -m fused_layernorm says what is installed)", stacklevel=2)


def forward(a: Arguments) -> Results:
    """What the forward operators give; the arguments are not checked."""
    keeps_order = a.keeps_order
    # PyTorch's layer_norm would read a contiguous copy of x.
    lies_apart = keeps_order and not a.input.is_contiguous()
    if a.is_rms or a.rounds_xhat or lies_apart:
        found = formulas.forward(a, corrects_mean=lies_apart)
        return found._replace(y=formulas.laid_out(found.y, a.input, keeps_order))
    residual_out = None if a.residual is None else formulas.add(a.input, a.residual, a.gate)
    x = a.input if residual_out is None else residual_out
    acc = acc_dtype(x.dtype)
    weight, bias = shifted(a.weight, a.weight_offset, acc), to(a.bias, acc)
    is_modulated = a.shift is not None or a.scale is not None
    is_plain = a.activation is None and a.output_scale == 1.0 and not is_modulated
    if is_plain and a.y_dtype == x.dtype and _takes_half(x, a.normalized_shape):
        # PyTorch's statistics are float32 only beside float32 parameters, so ones stand for a
        # missing weight.
        weight = x.new_ones(a.normalized_shape, dtype=acc) if weight is None else weight
    else:
        x = x.to(acc)
    y, mean, rstd = _aten.native_layer_norm(x.contiguous(), a.normalized_shape, weight, bias, a.eps)
    y = formulas.epilogue(a, y, to(a.shift, y.dtype), to(a.scale, y.dtype))
    y = formulas.laid_out(y, a.input, keeps_order)
    return Results(y, residual_out, mean, rstd)


def _takes_half(x: Tensor, normalized_shape: torch.Size) -> bool:
    """Whether PyTorch's kernel takes x of half precision beside float32 parameters.

    The kernel computes in float32, but takes x * rstd - mean * rstd for xhat. That loses digits in
    rows of one or two columns, where x is the mean or one standard deviation from it.
    """
    return x.is_cpu and x.dtype in arguments.HALF and math.prod(normalized_shape) > 2


def backward(b: BackwardArguments) -> Gradients:
    """What the backward operators give."""
    arguments.check_backward(b)
    # As the kernels do, this takes statistics of any shape that has one for each row.
    of_rows = (*b.x.shape[: b.x.dim() - b.normalized_ndim], *(1,) * b.normalized_ndim)
    if b.rstd.shape != of_rows or b.mean.shape != of_rows:
        mean = b.mean if b.is_rms else b.mean.reshape(of_rows)
        b = b._replace(mean=mean, rstd=b.rstd.reshape(of_rows))
    acc = acc_dtype(b.x.dtype)
    weight, bias = shifted(b.weight, b.weight_offset, acc), to(b.bias, acc)
    # PyTorch's backward takes x * rstd - mean * rstd for xhat, which cancels where the mean is
    # large. So it gets x - mean, in the wider dtype of the two, and a mean of zero. In half
    # precision it would also round intermediate values, so dy is widened first.
    centered = b.x.to(acc) if b.is_rms else b.x - b.mean
    if b.is_rms or (b.keeps_order and not b.x.is_contiguous()):  # x is read in place
        found = formulas.backward_of(b, centered * b.rstd, b.rstd)
        dx = found.dx if found.dx is None else formulas.laid_out(found.dx, b.x, b.keeps_order)
        return found._replace(dx=dx)
    dz, dshift, dscale = formulas.of_output(
        b,
        b.dy.to(acc),
        lambda: affine(centered * b.rstd, weight, bias),
        to(b.shift, acc),
        to(b.scale, acc),
    )
    needs = (b.needs_dx, b.needs_dweight, b.needs_dbias)
    if not any(needs):
        return Gradients(dshift=dshift, dscale=dscale)
    # A parameter that is not there has no gradient in PyTorch's operator: ones stand for it.
    if b.needs_dweight and weight is None:
        weight = centered.new_ones(b.normalized_shape)
    if b.needs_dbias and bias is None:
        bias = centered.new_ones(b.normalized_shape)
    dx, dweight, dbias = _aten.native_layer_norm_backward(
        dz.contiguous(),
        centered.contiguous(),
        b.normalized_shape,
        torch.zeros_like(b.mean, memory_format=torch.contiguous_format),
        b.rstd.contiguous(),
        weight,
        bias,
        needs,
    )
    if dx is not None:
        dx = (dx if b.dresidual is None else dx + b.dresidual).to(b.x.dtype)
        dx = formulas.laid_out(dx, b.x, b.keeps_order)
    dtype = b.parameter_dtype
    return Gradients(dx, dshift, dscale, to(dweight, dtype), to(dbias, dtype))


def checked_forward(a: Arguments) -> Results:
    arguments.check(a)
    _warn_of_cuda(a.input)
    return forward(a)


def gate_backward(
    dresidual_out: Tensor, input: Tensor, gate: Tensor, needs_dinput: bool, needs_dgate: bool
) -> tuple[Tensor, Tensor]:
    arguments.check_gate_backward(dresidual_out, input, gate)
    return formulas.gate_backward(dresidual_out, input, gate, needs_dinput, needs_dgate)

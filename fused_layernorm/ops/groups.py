# SPDX-License-Identifier: Apache-2.0
"""GroupNorm: the formula of group_norm, group_norm_forward and group_norm_backward.

input is (samples, channels, ...), and the channels of a sample form groups, each with a mean and a
variance of its own.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import arguments, formulas, load
from .family import Family, implement
from .formulas import acc_dtype, affine, is_backward, to

_aten = torch.ops.aten
group_norm = load.operators.group_norm.default

GroupArguments = formulas.call_of(group_norm)  # one call of group_norm


def _of_channels(parameter: Tensor | None, x: Tensor, dtype: torch.dtype) -> Tensor | None:
    """A parameter of channels, or of channels of samples, that broadcasts to x."""
    if parameter is None:
        return None
    shape = parameter.shape[:2] if parameter.dim() > 1 else (1, *parameter.shape)
    return parameter.to(dtype).reshape(*shape, *[1] * (x.dim() - 2))


def epilogue(a: Any, z: Tensor) -> Tensor:
    """The modulation of z and what follows it, in y's dtype."""
    modulation = (_of_channels(each, z, z.dtype) for each in (a.shift, a.scale))
    return formulas.epilogue(a, z, *modulation)


def _of(a: Any, input: Tensor, once: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    groups = a.num_groups
    x = input.to(acc_dtype(input.dtype)).unflatten(1, (groups, input.shape[1] // groups))
    mean, xhat, rstd = formulas.normalized(a, x, x.dim() - 2, once)
    xhat = xhat.flatten(1, 2)
    weight, bias = (_of_channels(each, xhat, xhat.dtype) for each in (a.weight, a.bias))
    y = epilogue(a, affine(xhat, weight, bias))
    return (y, mean, rstd) if once else (y, mean.flatten(1), rstd.flatten(1))


def formula(a: Any, once: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """What group_norm_forward gives, or what its backward operator differentiates."""
    if is_backward(a):
        return _of(a, a.x, once)
    input, groups = a.input, a.num_groups
    if not once:
        return _of(a, input)
    if input.numel() == 0:
        mean = input.new_zeros(input.shape[0], groups, dtype=acc_dtype(input.dtype))
        y = torch.empty_like(input, dtype=a.y_dtype)
        return y, mean, torch.full_like(mean, torch.nan)  # as PyTorch has it
    if not (input.is_cpu and input.is_contiguous()) or input.numel() <= 2 * len(input) * groups:
        return _of(a, input)
    # PyTorch's own. In other orders of memory it takes E[x^2] - E[x]^2 for the variance, and
    # x rstd - mean rstd for xhat, which loses digits where x is the mean.
    acc = acc_dtype(input.dtype)
    sizes = (*input.shape[:2], math.prod(input.shape[2:]))
    # The native operator reads parameters as if they were contiguous.
    weight, bias = (p if p is None else p.to(acc).contiguous() for p in (a.weight, a.bias))
    z, mean, rstd = _aten.native_group_norm(input.to(acc), weight, bias, *sizes, groups, a.eps)
    return epilogue(a, z), mean, rstd


class Groups(Family):
    """Groups of channels, whose results lie as input does."""

    folds = True
    keeps_order = True

    def statistics(self, a: Any) -> Any:
        return a.input.shape[0], a.num_groups

    def in_onnx(self, a: Any, is_tracing: bool) -> Tensor:
        dtypes = {t.dtype for t in (a.input, *a[2:6]) if t is not None}
        acc = a.input.dtype if a.is_plain and len(dtypes) == 1 else acc_dtype(a.input.dtype)
        weight, bias = to(a.weight, acc), to(a.bias, acc)
        return epilogue(a, torch.group_norm(a.input.to(acc), a.num_groups, weight, bias, a.eps))


FAMILY = Groups(
    "group_norm",
    arguments.check_group_norm,
    formula,
    load.operators.group_norm_backward.default,
)
implement(FAMILY)

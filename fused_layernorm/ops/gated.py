# SPDX-License-Identifier: Apache-2.0
"""Gated RMSNorm: the formula of rms_norm_gated, rms_norm_gated_forward and its backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import arguments, formulas, load
from .family import Family, implement
from .formulas import acc_dtype, activate, affine, is_backward, shifted, to

ACTIVATIONS = arguments.GATES

# One call of rms_norm_gated. A group_size of 0 is all columns.
GatedArguments = formulas.call_of(load.operators.rms_norm_gated.default)
_BackwardArguments = formulas.call_of(load.operators.rms_norm_gated_backward.default)
for _call in (GatedArguments, _BackwardArguments):
    _call.statistic, _call.normalized_ndim = "rms", 1


def _groups(x: Tensor, group_size: int) -> Tensor:
    """x as (..., groups, columns of a group)."""
    size = group_size or x.shape[-1]
    return x.reshape(*x.shape[:-1], x.shape[-1] // size if size else 1, size)


def formula(a: Any, once: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """What rms_norm_gated_forward gives, or what its backward operator differentiates."""
    input = a.x if is_backward(a) else a.input
    dtype, weight, acc = input.dtype, a.weight, acc_dtype(input.dtype)
    x, factor = input.to(acc), activate(a.gate.to(acc), a.gate_activation)
    u = _groups(x * factor if a.gate_first else x, a.group_size)
    mean, xhat, rstd = formulas.normalized(a, u, 1, once)
    z = xhat.flatten(-2)
    if a.rounds_xhat:
        z = z.to(dtype).to(acc)
    z = affine(z, shifted(weight, a.weight_offset, acc), to(a.bias, acc))
    if a.rounds_xhat:
        z = z.to(torch.promote_types(dtype, weight.dtype)).to(acc)
    y = z if a.gate_first else z * factor
    return formulas.epilogue(a, y, None, None), mean, rstd.squeeze(-1)


class Gated(Family):
    def statistics(self, a: Any) -> Any:
        columns = a.input.shape[-1]
        return (*a.input.shape[:-1], columns // a.group_size if a.group_size else 1)


FAMILY = Gated(
    "rms_norm_gated",
    arguments.check,
    formula,
    load.operators.rms_norm_gated_backward.default,
)
implement(FAMILY)

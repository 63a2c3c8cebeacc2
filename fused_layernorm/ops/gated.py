# SPDX-License-Identifier: Apache-2.0
"""Gated RMSNorm, the operators rms_norm_gated, rms_norm_gated_forward and rms_norm_gated_backward:
their Python half.

Here are the formulas in PyTorch's operators, which compute calls off CUDA and are differentiated
for higher orders, and what calls must satisfy. csrc/bindings/cuda has the operators on CUDA,
csrc/per_torch autograd and autocast in C++; csrc/call/schemas.h says what they give.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import arguments, composite, formulas, load
from .arguments import refuse
from .family import Family, implement_family
from .formulas import acc_dtype, activate, activate_backward, affine, shifted, sum_like, to
from .operators import Arguments, describe
from .operators import BackwardArguments as OfNorm

ACTIVATIONS = ("silu", "sigmoid")


class GatedArguments(NamedTuple):
    """One call of rms_norm_gated, in the order of its schema. A group_size of 0 is all columns."""

    input: Tensor
    gate: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    gate_first: bool = False
    gate_activation: str = "silu"
    group_size: int = 0
    out_dtype: torch.dtype | None = None
    weight_offset: float = 0.0
    round_before_weight: bool = False

    @property
    def norm(self) -> Arguments:
        """The norm without its gate and groups."""
        return describe(
            self.input,
            weight=self.weight,
            bias=self.bias,
            eps=self.eps,
            out_dtype=self.out_dtype,
            statistic="rms",
            weight_offset=self.weight_offset,
            round_before_weight=self.round_before_weight,
        )


BackwardArguments = load.call_of(load.operators.rms_norm_gated_backward.default)


# ---- The computation in PyTorch's operators.


def _groups(x: Tensor, group_size: int) -> Tensor:
    """x as (..., groups, columns of a group)."""
    size = group_size or x.shape[-1]
    return x.reshape(*x.shape[:-1], x.shape[-1] // size if size else 1, size)


def formula(a: GatedArguments) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, rstd) in PyTorch's operators, which differentiate them any number of times."""
    dtype, weight = a.input.dtype, a.weight
    acc = acc_dtype(dtype)
    x, factor = a.input.to(acc), activate(a.gate.to(acc), a.gate_activation)
    u = _groups(x * factor if a.gate_first else x, a.group_size)
    mean, xhat, rstd = formulas.normalized(u, 1, a.eps, True)
    z, rounds = xhat.flatten(-2), a.round_before_weight and weight is not None
    if rounds:
        z = z.to(dtype).to(acc)
    z = affine(z, shifted(weight, a.weight_offset, acc), to(a.bias, acc))
    if rounds and weight is not None:
        z = z.to(torch.promote_types(dtype, weight.dtype)).to(acc)
    y = z if a.gate_first else z * factor
    return y.to(a.out_dtype or dtype), mean, rstd.squeeze(-1)


def composite_forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    a = GatedArguments(*args)
    check(a)
    composite._warn_of_cuda(a.input)
    y, mean, rstd = formula(a)
    return y.contiguous(), mean, rstd.contiguous()


def gradients(*args: Any) -> tuple[Tensor, ...]:
    """What rms_norm_gated_backward gives, as functions of the tensors; rstd depends on x.

    The rounding of xhat and of z counts as the identity.
    """
    b = BackwardArguments(*args)
    acc = acc_dtype(b.x.dtype)
    x, gate, dy = b.x.to(acc), b.gate.to(acc), b.dy.to(acc)
    factor = activate(gate, b.gate_activation)
    u = _groups(x * factor if b.gate_first else x, b.group_size)
    xhat, rstd = formulas.normalized_again(u, 1, b.rstd.reshape(*u.shape[:-1], 1), True)
    xhat = xhat.flatten(-2)
    weight, bias = shifted(b.weight, b.weight_offset, acc), to(b.bias, acc)
    dz = dy if b.gate_first else dy * factor
    needs_du = b.needs_dx or (b.needs_dgate and b.gate_first)
    du, dweight, dbias = formulas.of_affine(
        (needs_du, b.needs_dweight, b.needs_dbias),
        *(dz, xhat, rstd, weight, 1, True),
        lambda t: _groups(t, b.group_size),
    )
    dx, dgate = du if b.needs_dx else None, None
    if du is not None and b.gate_first:
        dx, dgate = du * factor if b.needs_dx else None, du * x
    if b.needs_dgate:
        dgate = dy * affine(xhat, weight, bias) if dgate is None else dgate
        dgate = activate_backward(dgate, gate, b.gate_activation)
    of_parameters = (sum_like(dweight, weight, b.weight), sum_like(dbias, bias, b.bias))
    found = (dx, dgate if b.needs_dgate else None, *of_parameters)
    return formulas.results(found, b.differentiated, b.x)


def composite_backward(*args: Any) -> tuple[Tensor, ...]:
    _check_backward(BackwardArguments(*args))
    return tuple(gradient.contiguous() for gradient in gradients(*args))


def _fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    a = GatedArguments(*args)
    check(a)
    x, acc = a.input, acc_dtype(a.input.dtype)
    groups = x.shape[-1] // a.group_size if a.group_size else 1
    y = x.new_empty(x.shape, dtype=a.out_dtype or x.dtype)
    return y, x.new_empty((0,), dtype=acc), x.new_empty((*x.shape[:-1], groups), dtype=acc)


# ---- What a call must satisfy.


def check_group_size(group_size: Any, columns: Any) -> int:
    """The group size as an int; raises if columns are not so many groups. 0 is all of them."""
    if group_size is None:
        return 0
    size = arguments.check_int("group_size", group_size)
    if size < 1:
        raise ValueError(f"expected group_size of at least 1, got {size}")
    if columns is not None and columns % size != 0:
        raise ValueError(f"expected group_size that divides the {columns} columns, got {size}")
    return size


def check_activation(activation: Any) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"expected gate_activation 'silu' or 'sigmoid', got {activation!r}")


def check(a: GatedArguments) -> None:
    """Raises, with one sentence, if the operators cannot take these arguments."""
    input, gate = a.input, a.gate
    arguments.check_tensor("input", input)
    arguments.check_tensor("gate", gate)
    arguments.check_device("gate", gate, "input", input)
    if gate.shape != input.shape:
        expected = f"of the shape of input, {list(input.shape)}"
        raise arguments.shape_error("gate", expected, gate)
    arguments.check(a.norm)
    check_activation(a.gate_activation)
    check_group_size(a.group_size or None, input.shape[-1])


def _check_backward(b: Any) -> None:
    """Raises if rms_norm_gated_backward cannot take these arguments, as csrc/bindings/cuda does."""
    x, rstd, size = b.x, b.rstd, b.group_size
    arguments._check_given(x=x, dy=b.dy, gate=b.gate, rstd=rstd, weight=b.weight, bias=b.bias)
    if b.gate_activation not in ACTIVATIONS:
        refuse(f"gate_activation must be 'silu' or 'sigmoid', got '{b.gate_activation}'")
    if x.dim() < 1:
        refuse("the input must have a dimension")
    if size < 0 or (size > 0 and x.shape[-1] % size):
        refuse("group_size must be at least one and divide the last dimension")
    arguments._check_beside(x, gate=b.gate)
    if (b.needs_dweight and b.weight is None) or (b.needs_dbias and b.bias is None):
        refuse("a gradient is asked for of a parameter that is not there")
    if x.numel() == 0:
        return
    rows, groups = x.numel() // x.shape[-1], x.shape[-1] // size if size else 1
    if rstd.numel() != rows * groups or rstd.dtype != acc_dtype(x.dtype) or rstd.device != x.device:
        refuse("rstd must be that of the forward pass")
    # The rest is that of a norm of whole rows.
    none, rstd = x.new_empty(0), rstd.reshape(-1)[:1].expand(rows)
    norm = OfNorm(b.dy, x, 1, none, rstd, b.weight, b.bias, None, statistic="rms")
    arguments.check_backward(norm._replace(weight_offset=b.weight_offset))


FAMILY = Family(
    "rms_norm_gated",
    GatedArguments,
    check,
    formula,
    load.operators.rms_norm_gated_backward.default,
    statistic="rms",
)
implement_family(FAMILY, composite_forward, composite_backward, _fake, gradients)

# SPDX-License-Identifier: Apache-2.0
"""GroupNorm: the Python half of group_norm, group_norm_forward and group_norm_backward.

input is (samples, channels, ...), and the channels of a sample form groups, each with a mean and a
variance of its own. Here are the formulas in PyTorch's operators, which compute calls off CUDA and
are differentiated for higher orders, and what calls must satisfy. csrc/bindings/cuda/groups.cpp has
the operators on CUDA, csrc/per_torch autograd and autocast in C++; csrc/call/schemas.h says
what they give.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import arguments, composite, fakes, formulas, load
from .arguments import HALF, refuse
from .family import Family, implement_family
from .formulas import acc_dtype, affine, laid_out, sum_like

_aten = torch.ops.aten
group_norm = load.operators.group_norm.default

ACTIVATIONS = (*arguments.ACTIVATIONS, "leaky_relu")


class GroupArguments(NamedTuple):
    """One call of group_norm, in the order of its schema."""

    input: Tensor
    num_groups: int
    shift: Tensor | None
    scale: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    activation: str | None = None
    output_scale: float = 1.0
    out_dtype: torch.dtype | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return (self.input, *self[2:6])

    @property
    def y_dtype(self) -> torch.dtype:
        return self.out_dtype or self.input.dtype

    @property
    def is_plain(self) -> bool:
        """Whether nothing is fused to the norm."""
        return (
            self.activation is None
            and self.output_scale == 1.0
            and self.out_dtype is None
            and self.shift is None
            and self.scale is None
        )


# ---- The computation in PyTorch's operators.


def _grouped(x: Tensor, groups: int) -> Tensor:
    """A view of x, (samples, groups, channels of a group, ...)."""
    return x.unflatten(1, (groups, x.shape[1] // groups))


def _of_channels(parameter: Tensor | None, x: Tensor, dtype: torch.dtype) -> Tensor | None:
    """A parameter of channels, or of channels of samples, that broadcasts to x."""
    if parameter is None:
        return None
    shape = parameter.shape[:2] if parameter.dim() > 1 else (1, *parameter.shape)
    return parameter.to(dtype).reshape(*shape, *[1] * (x.dim() - 2))


def epilogue(a: GroupArguments, z: Tensor) -> Tensor:
    """The modulation of z and what follows it, in y's dtype."""
    modulation = (_of_channels(each, z, z.dtype) for each in (a.shift, a.scale))
    return formulas.epilogue(a, z, *modulation)


def formula(a: GroupArguments) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, rstd) in PyTorch's operators, which differentiate them any number of times."""
    x = _grouped(a.input.to(acc_dtype(a.input.dtype)), a.num_groups)
    ndim = x.dim() - 2
    mean, xhat, rstd = formulas.normalized(x, ndim, a.eps, False, corrects_mean=True)
    xhat = xhat.flatten(1, 2)
    weight, bias = (_of_channels(each, xhat, xhat.dtype) for each in (a.weight, a.bias))
    return epilogue(a, affine(xhat, weight, bias)), mean.flatten(1), rstd.flatten(1)


def _forward(a: GroupArguments) -> tuple[Tensor, Tensor, Tensor]:
    """What group_norm_forward gives."""
    input, groups = a.input, a.num_groups
    count = input.numel() // max(1, input.shape[0] * groups)
    if input.numel() == 0:
        y = torch.empty_like(input, dtype=a.y_dtype)
        mean = input.new_zeros(input.shape[0], groups, dtype=acc_dtype(input.dtype))
        rstd = torch.full_like(mean, torch.nan)  # as PyTorch has it
    elif input.is_cpu and input.is_contiguous() and count > 2:
        # PyTorch's own. In other orders of memory it takes E[x^2] - E[x]^2 for the variance, and
        # x rstd - mean rstd for xhat, which loses digits where x is the mean.
        acc = acc_dtype(input.dtype)
        sizes = (*input.shape[:2], math.prod(input.shape[2:]))
        x = input.to(acc).contiguous()
        # The native operator reads parameters as if they were contiguous.
        parameters = (None if p is None else p.to(acc).contiguous() for p in (a.weight, a.bias))
        z, mean, rstd = _aten.native_group_norm(x, *parameters, *sizes, groups, a.eps)
        y = epilogue(a, z)
    else:
        y, mean, rstd = formula(a)
    return laid_out(y, input, True), mean.contiguous(), rstd.contiguous()


def composite_forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    a = GroupArguments(*args)
    check(a)
    composite._warn_of_cuda(a.input)
    return _forward(a)


BackwardArguments = load.call_of(load.operators.group_norm_backward.default)


def gradients(*args: Any) -> tuple[Tensor, ...]:
    """What group_norm_backward gives, but for the order of memory.

    As functions of the tensors; mean and rstd depend on x.
    """
    b: Any = BackwardArguments(*args)
    acc = acc_dtype(b.x.dtype)
    x = _grouped(b.x.to(acc), b.num_groups)
    ndim = x.dim() - 2
    rstd = b.rstd.reshape(*x.shape[:2], *[1] * ndim)
    xhat, rstd = formulas.normalized_again(x, ndim, rstd, False)
    xhat = xhat.flatten(1, 2)
    weight, bias, shift, scale = (
        _of_channels(each, xhat, acc) for each in (b.weight, b.bias, b.shift, b.scale)
    )
    dz, dshift, dscale = formulas.of_output(
        b, b.dy.to(acc), lambda: affine(xhat, weight, bias), shift, scale
    )
    needs = (b.needs_dx, b.needs_dweight, b.needs_dbias)
    dx, dweight, dbias = formulas.of_affine(
        needs, dz, xhat, rstd, weight, ndim, False, lambda t: _grouped(t, b.num_groups)
    )
    of_parameters = (sum_like(dweight, weight, b.weight), sum_like(dbias, bias, b.bias))
    return formulas.results((dx, dshift, dscale, *of_parameters), b.differentiated, b.x)


def composite_backward(*args: Any) -> tuple[Tensor, ...]:
    b = BackwardArguments(*args)
    _check_backward(b)
    if b.x.numel() == 0:
        found = [
            None if not needed or like is None else torch.zeros_like(like)
            for needed, like in zip(b.needs, b.differentiated, strict=True)
        ]
        return formulas.results(found, b.differentiated, b.x)
    dx, *others = gradients(*args)
    return (laid_out(dx, b.x, True) if b.needs_dx else dx, *others)


def _fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    a = GroupArguments(*args)
    check(a)
    of_groups = (a.input.shape[0], a.num_groups)
    acc = acc_dtype(a.input.dtype)
    mean, rstd = (a.input.new_empty(of_groups, dtype=acc) for _ in range(2))
    return fakes.like(a.input, a.y_dtype, True), mean, rstd


# ---- What a call must satisfy.


def check_groups(num_groups: Any) -> int:
    groups = arguments.check_int("num_groups", num_groups)
    if groups < 1:
        raise RuntimeError(f"expected num_groups of at least 1, got {groups}")
    return groups


def check(a: GroupArguments) -> None:
    """Raises, with one sentence, if the operators cannot take these arguments."""
    input = a.input
    arguments.check_tensor("input", input)
    check_groups(a.num_groups)
    if input.dim() < 2:
        expected = "of at least two dimensions, (samples, channels, ...)"
        raise arguments.shape_error("input", expected, input)
    channels = input.shape[1]
    if channels % a.num_groups != 0:
        raise RuntimeError(
            f"expected num_groups that divides the {channels} channels of input, got {a.num_groups}"
        )
    allowed = (input.dtype, torch.float32) if input.dtype in HALF else (input.dtype,)
    for name, parameter in zip(a._fields[2:6], a[2:6], strict=True):
        if parameter is None:
            continue
        arguments.check_tensor(name, parameter)
        arguments.check_device(name, parameter, "input", input)
        if name in ("weight", "bias"):
            if parameter.shape != (channels,):
                expected = f"of shape {[channels]}, a number for each channel of input"
                raise arguments.shape_error(name, expected, parameter)
        elif parameter.shape[:2] != input.shape[:2] or any(n != 1 for n in parameter.shape[2:]):
            expected = (
                f"of shape {list(input.shape[:2])}, a number for each channel of each sample, "
                "which sizes of 1 may follow"
            )
            raise arguments.shape_error(name, expected, parameter)
        if parameter.dtype not in allowed:
            raise arguments.dtype_error(name, parameter, allowed, "input", [input.dtype])
    arguments.check_common(a.weight, a.bias, a.eps)
    arguments.check_options(a.activation, a.output_scale, a.out_dtype, ACTIVATIONS)


def _check_backward(b: Any) -> None:
    """Raises if group_norm_backward cannot take these arguments, as csrc/bindings/cuda does."""
    arguments._check_given(x=b.x, dy=b.dy, mean=b.mean, rstd=b.rstd)
    names = b._fields[5:9]
    arguments._check_given(**dict(zip(names, b.differentiated[1:], strict=True)))
    if b.x.dim() < 2:
        refuse("the input must have at least two dimensions")
    channels = b.x.shape[1]
    if b.num_groups < 1 or channels % b.num_groups != 0:
        refuse("num_groups must be at least one and divide the channels")
    for name, parameter in zip(names, b.differentiated[1:], strict=True):
        if parameter is None:
            continue
        if name in ("weight", "bias"):
            if parameter.shape != (channels,):
                refuse(f"{name} must have a number for each channel")
        elif parameter.shape[:2] != b.x.shape[:2] or any(n != 1 for n in parameter.shape[2:]):
            refuse(f"{name} must have a number for each channel of each sample")
        if parameter.device != b.x.device:
            refuse(f"{name} must be on the input's device")
    if b.weight is not None and b.bias is not None and b.weight.dtype is not b.bias.dtype:
        refuse("weight and bias must be of one dtype")
    arguments._check_beside(b.x, dy=b.dy)
    if any(
        needed and parameter is None
        for needed, parameter in zip(b.needs[1:], b.differentiated[1:], strict=True)
    ):
        refuse("a gradient is asked for of a parameter that is not there")
    groups, wide = b.x.shape[0] * b.num_groups, acc_dtype(b.x.dtype)
    for each in (b.mean, b.rstd):
        if each.numel() != groups or each.dtype is not wide or each.device != b.x.device:
            refuse("mean and rstd must be those of the forward pass")
    if b.activation is not None and b.activation not in ACTIVATIONS:
        known = arguments._either([repr(known) for known in ACTIVATIONS])
        refuse(f"activation must be None, {known}, got '{b.activation}'")


FAMILY = Family(
    "group_norm",
    GroupArguments,
    check,
    formula,
    load.operators.group_norm_backward.default,
    least_ndim=2,
    folds=True,
)
implement_family(FAMILY, composite_forward, composite_backward, _fake, gradients, keeps_order=True)

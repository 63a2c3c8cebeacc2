# SPDX-License-Identifier: Apache-2.0
"""What serves a call: an operator, or on the CPU PyTorch's own operators.

A call is described once, by `Arguments`, and `run` hands the description on. Before that stands
`plain`, for a norm with nothing fused to it: every step costs host time there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from . import stock
from .compile import choice
from .ops import arguments, autograd_library, formulas
from .ops.autograd import under_autocast
from .ops.family import Family
from .ops.operators import FORWARD, Arguments, GroupArguments, describe
from .stock import function_modes

is_compiling = torch.compiler.is_dynamo_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_tracing = torch._C._is_tracing
_in_transform = torch._C._are_functorch_transforms_active
_get_dispatch_mode = torch._C._get_dispatch_mode
_PROXY = torch._C._TorchDispatchModeKey.PROXY

# By this number, which nobody else writes, a call of PyTorch's function leads to our kernels
# (csrc/per_torch/override.h): torch.layer_norm and torch.rms_norm get it behind normalized_shape's
# sizes, torch.group_norm added to the number of groups. An operator of ours takes the host longer.
# By ASKS_MODULATED torch.layer_norm leads to the modulated norm.
ASKS = -(2**62)
ASKS_MODULATED = ASKS + 1
_BEHIND_SIZES = (ASKS,)

_OWN = (Parameter, type(None), Tensor)


def plain(
    is_rms: bool, input: Any, over: Any, weight: Any, bias: Any, eps: float | None,
    is_group: bool = False, hidden: bool = False,
) -> Any:  # fmt: skip
    """PyTorch's function for a norm with nothing fused to it, or None where `run` must decide.

    On CUDA the function leads to our kernels, on the CPU it is PyTorch's norm. Modes and transforms
    are to see our operators, and torch.jit.trace crashes where an operator has raised what is
    caught here. over: normalized shape (None: weight's) or number of groups. hidden: from modes.
    """
    if (
        type(input) is not Tensor
        or (type(weight) is not Parameter and type(weight) not in _OWN)
        or (bias is not None and type(bias) not in _OWN)
        or _in_transform()
    ):
        return None
    if function_modes() and not hidden:
        if not stock.has_device_mode_alone():
            return None
        with stock.without_function_modes():
            return plain(is_rms, input, over, weight, bias, eps, is_group, hidden=True)
    sizes = over
    try:
        if is_group:
            is_count = type(over) is int and 0 < over <= arguments.MAX_INDEX
            if not is_count or input.numel() == over:  # F.group_norm refuses one value a group
                return None
        elif over is None:
            if weight is None:
                return None
            sizes = weight.shape
        elif type(over) is not tuple:
            sizes = (over,) if type(over) is int else tuple(over)
        if input.is_cuda:
            if not autograd_library.active or _dispatch_modes() or _is_tracing():
                return None
            sizes = ASKS + over if is_group else sizes + _BEHIND_SIZES
        elif not (eps == eps and has_own_norm(input, weight, bias, is_rms)):
            return None
        elif is_group and (input.dim() < 2 or (weight is None and bias is not None)):
            return None  # PyTorch's backward wants weight beside bias
        if is_rms:
            return torch.rms_norm(input, sizes, weight, eps)
        if is_group:
            return torch.group_norm(input, sizes, weight, bias, eps)  # type: ignore[arg-type]
        return torch.layer_norm(input, sizes, weight, bias, eps)  # type: ignore[arg-type]
    except (RuntimeError, TypeError, ValueError) as error:
        if _DECLINES in str(error) or _NUMBER in str(error):
            return None
        given = (is_rms, input, over, weight, bias, eps, is_group)
        raise arguments.explain(error, given, _check_plain) from None


def plain_modulated(
    input: Any, shape: Sequence[int], shift: Any, scale: Any, eps: float
) -> Tensor | None:
    """layer_norm(input) * (1 + scale) + shift by PyTorch's function, which leads to our kernels on
    CUDA; None where `run` must decide, as for tensors of several dtypes."""
    if is_compiling() or function_modes() or not autograd_library.active:
        return None
    if type(input) is not Tensor or type(shift) not in _OWN or type(scale) not in _OWN:
        return None
    if not input.is_cuda or _dispatch_modes() or _is_tracing() or _in_transform():
        return None
    try:
        return torch.layer_norm(input, (*shape, ASKS_MODULATED), scale, shift, eps)
    except RuntimeError as error:
        if _NUMBER in str(error):
            return None
        raise arguments.out_of_memory(error) from None


# What csrc/per_torch says of a call that the kernels do not take. Where that is not reached,
# PyTorch refuses the number, to which at most arguments.MAX_INDEX was added, and names it.
_DECLINES, _NUMBER = "the kernels do not take such a norm", str(ASKS)[:9]


def _check_plain(given: Any) -> None:
    """Says what is wrong with a call of `plain`."""
    is_rms, input, over, weight, bias, eps, is_group = given
    if is_group:
        a = GroupArguments(input, over, None, None, weight, bias, eps)
        return arguments.check_group_norm(a)
    a = describe(input, weight=weight, bias=bias, statistic="rms" if is_rms else "layer")
    a.eps = arguments.rms_eps(eps, input) if is_rms else eps
    a.normalized_ndim = arguments.normalized_ndim(input, weight, bias, over)
    arguments.check(a)


def norm(
    a: Arguments, normalized_shape: Any, default: int | None = None, dim: int | None = None
) -> Any:
    """The norm that is described, over the dimensions that a user gives, or by default so many."""
    if dim is not None:  # that of a view in which it is the last, whose order y keeps
        dim, last = arguments.check_dim(a, dim, normalized_shape), a.input.dim() - 1
        a.input, a.keeps_order = a.input.movedim(dim, last), True  # ONNX counts from the front
        return run(a).movedim(last, dim)
    a.normalized_ndim = arguments.normalized_ndim(
        a.input, a.weight, a.bias, normalized_shape, default
    )
    return run(a)


def run(a: Arguments) -> Any:
    """The norm that is described: y, or with a residual (y, residual_out)."""
    gate = a.gate
    # No kernel fuses a gated sum with an activation, a scale or the rounding of xhat.
    if gate is not None and (
        a.activation is not None
        or a.round_before_weight
        or not (isinstance(a.output_scale, (int, float)) and a.output_scale == 1.0)
    ):
        return _with_sum_apart(a)
    # operator_of(a), written out: a call takes a tenth of a microsecond, and Dynamo traces none.
    is_modulated = gate is not None or a.shift is not None or a.scale is not None
    place = 2 * is_modulated + (a.residual is not None)
    # Dynamo does not trace the handling of exceptions in `call`.
    return choice.run(a, place) if is_compiling() else call(FORWARD[place], a, _in_pytorch)


def call(family: Family, a: Any, in_pytorch: Any = None) -> Any:
    """A call of a family's operator.

    On the CPU PyTorch differentiates the formula: its derivative keeps what forward has computed,
    which a backward operator would compute again.

    in_pytorch: what else PyTorch computes of a call of rows on the CPU, None of other calls.
    """
    # Dynamo does not trace the handling of exceptions; the fake checks the rest.
    if in_pytorch is None and is_compiling():
        arguments.check_types(family, a)
        return family.plain(*a)
    try:
        if (_dispatch_modes() or _is_tracing()) and torch.onnx.is_in_onnx_export():
            family.check(a)
            return family.in_onnx(a, _is_tracing())
        x = getattr(a, family.fields[0])
        if x.is_cpu and not stock._cpu_operators:
            if in_pytorch is not None and (found := in_pytorch(a)) is not None:
                return found
            if differentiates(x) and (found := family.differentiable(a)) is not None:
                return found
        return family.call(a)
    except Exception as error:
        raise arguments.explain(error, a, family.check) from None


def as_autocast_makes(a: Arguments) -> Arguments:
    """A call that PyTorch's operators serve in part, as autocast makes it; raises if it is bad."""
    arguments.check_tensor("input", a.input)
    device = a.input.device.type
    if choice.has_autocast(device) and torch.is_autocast_enabled(device):
        a = under_autocast(a)
    arguments.check(a)
    return a


def _with_sum_apart(a: Arguments) -> tuple[Tensor, Tensor]:
    """A gated sum by PyTorch's operators, then the norm of it."""
    a = as_autocast_makes(a)
    residual: Any = a.residual
    residual_out = formulas.add(a.input, residual, a.gate)
    if a.rounds_xhat and a.input.dtype != residual.dtype:
        return formulas.rows(a._replace(out_dtype=a.y_dtype))[0], residual_out
    acc = formulas.acc_dtype(residual.dtype)
    weight, bias = (
        parameter if parameter is None or parameter.dtype == residual.dtype else parameter.to(acc)
        for parameter in (a.weight, a.bias)
    )
    norm = a._replace(input=residual_out, residual=None, gate=None, weight=weight, bias=bias)
    return run(norm._replace(out_dtype=a.y_dtype)), residual_out


# ---- What PyTorch's operators compute on the CPU.


def has_own_norm(input: Tensor, weight: Tensor | None, bias: Tensor | None, is_rms: bool) -> bool:
    """Whether a norm of these tensors, with nothing fused to it, is PyTorch's here.

    Other devices, parameters of other dtypes, and tracing, where a compiler knows the operators by
    their name, are not. PyTorch may still refuse the call.
    """
    if not input.is_cpu or stock._cpu_operators or _get_dispatch_mode(_PROXY) is not None:
        return False
    dtype = input.dtype
    if is_rms:
        has_dtypes = bias is None and (weight is None or weight.dtype is dtype)
    elif weight is not None and bias is not None and weight.dtype is torch.float32 is bias.dtype:
        has_dtypes = dtype in _BESIDE_FLOAT32
    else:
        has_dtypes = weight is None or weight.dtype is dtype
        has_dtypes = has_dtypes and (bias is None or bias.dtype is dtype)
    return has_dtypes and not input.is_nested


_BESIDE_FLOAT32 = (torch.float32, *arguments.HALF)


def differentiates(input: Any) -> bool:
    """Whether a call is computed, and differentiated, by PyTorch's operators: on the CPU, where no
    mode, transform, tracer or autocast is to see an operator of ours."""
    return (
        type(input) is Tensor
        and input.is_cpu
        and not (stock._cpu_operators or _dispatch_modes() or _in_transform() or _is_tracing())
        and not torch.is_autocast_enabled("cpu")
    )


def _in_pytorch(a: Arguments) -> Any:
    """A plain or modulated call in PyTorch's operators, as a model would write it, or None.

    What the operators refuse is left to them, and so are transforms of torch.func, in which they
    have derivatives of every order.
    """
    input, residual, gate, weight = a.input, a.residual, a.gate, a.weight
    is_modulated, is_rms = a.is_modulated, a.is_rms
    if (
        not a.is_bare
        or not (is_modulated or residual is None)
        or not (is_rms or a.statistic == "layer")
        or a.keeps_order
        or a.eps != a.eps
        or type(input) is not Tensor
        or input.dim() < a.normalized_ndim
        or _in_transform()
        or not has_own_norm(input, weight, a.bias, is_rms)
    ):
        return None
    if not is_modulated:
        return formulas.norm_of(a, input)
    # Of tensors of one dtype, and of shapes that the operators take. Their composite would compute
    # in float32 throughout, and take longer.
    if weight is not None and weight.dtype is not input.dtype:
        return None
    for tensor in (residual, gate, a.shift, a.scale):
        if tensor is not None and not (
            tensor.is_cpu
            and tensor.dtype is input.dtype
            and not tensor.is_nested
            and tensor.layout is torch.strided
        ):
            return None
    x = input
    if residual is not None:
        if residual.shape != input.shape:
            return None
        x = residual + input if gate is None else torch.addcmul(residual, gate, input)
    y = formulas.modulate(formulas.norm_of(a, x), a.shift, a.scale)
    if y.shape != input.shape:  # A modulation, or residual, would enlarge input.
        return None
    return y if residual is None else (y, x)

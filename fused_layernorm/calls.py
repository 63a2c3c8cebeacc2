# SPDX-License-Identifier: Apache-2.0
"""Which operator serves a call.

A call is described once, by `Arguments`, and `run` hands the description on. Before that stands
`plain`, for a norm with nothing fused to it: every step costs host time there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import Parameter

from . import stock
from .compile import choice
from .ops import arguments, autograd_library, formulas, groups
from .ops.autocast import under_autocast
from .ops.operators import FORWARD, Arguments, Operator, describe

is_compiling = torch.compiler.is_dynamo_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_is_tracing = torch._C._is_tracing
_in_transform = torch._C._are_functorch_transforms_active

# By this number, which nobody else writes, a call of PyTorch's function leads to our kernels
# (csrc/per_torch/override.h): torch.layer_norm and torch.rms_norm get it behind normalized_shape's
# sizes, torch.group_norm added to the number of groups. To call an operator of ours takes the host
# longer.
ASKS = -(2**62)
_BEHIND_SIZES = (ASKS,)

_OWN = (Parameter, type(None), Tensor)


def plain(
    is_rms: bool,
    input: Any,
    over: Any,
    weight: Any,
    bias: Any,
    eps: float | None,
    is_group: bool = False,
    hidden: bool = False,
) -> Any:
    """PyTorch's function for a norm with nothing fused to it, or None where `run` must decide.

    What PyTorch or a kernel refuses raises this package's sentence about it. On CUDA the function
    leads to our kernels, on the CPU it is PyTorch's norm. over: the normalized shape, by default
    weight's, or the number of groups. hidden: from the modes in force. Modes and transforms are to
    see our operators, and torch.jit.trace crashes where an operator has raised what is caught here.
    Dynamo does not trace this function.
    """
    if (
        type(input) is not Tensor
        or (type(weight) is not Parameter and type(weight) not in _OWN)
        or (bias is not None and type(bias) not in _OWN)
        or _in_transform()
    ):
        return None
    if _function_modes() and not hidden:
        if not stock.has_device_mode_alone():
            return None
        with stock.without_function_modes():
            return plain(is_rms, input, over, weight, bias, eps, is_group, hidden=True)
    sizes = over
    try:
        if is_group:
            if type(over) is not int or not 0 < over <= arguments.MAX_INDEX:
                return None
            if input.numel() == over:  # of one value a group, which F.group_norm refuses
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
        elif not (eps == eps and stock.has_own_norm(input, weight, bias, is_rms)):
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


# What csrc/per_torch says of a call that the kernels do not take. Where that is not reached,
# PyTorch refuses the number, to which at most arguments.MAX_INDEX was added, and names it.
_DECLINES, _NUMBER = "the kernels do not take such a norm", str(ASKS)[:9]


def _check_plain(given: Any) -> None:
    """Says what is wrong with a call of `plain`."""
    is_rms, input, over, weight, bias, eps, is_group = given
    if is_group:
        arguments.check_group_norm(
            groups.GroupArguments(input, over, None, None, weight, bias, eps)
        )
        return
    ndim = arguments.normalized_ndim(input, weight, bias, over)
    eps, statistic = (arguments.rms_eps(eps, input), "rms") if is_rms else (eps, "layer")
    norm = {"weight": weight, "bias": bias, "normalized_ndim": ndim, "eps": eps}
    arguments.check(describe(input, **norm, statistic=statistic))


def _call_of(operator: Operator) -> Callable[[Arguments], Any]:
    """The call of an operator, of what is described, that takes the host least time.

    It is written out from the schema. Arguments that have their defaults, all of them or all from
    the statistic on, are not given: they would cost a microsecond. `_op` skips OpOverload.__call__,
    which costs half a one.
    """
    schema, fields = operator.overload._schema.arguments, [f"a.{name}" for name in operator.fields]

    def have_defaults(first: int) -> str:
        options = zip(fields[first:], schema[first:], strict=True)
        return " and ".join(
            f"{field} {'is' if a.default_value is None else '=='} {a.default_value!r}"
            for field, a in options
        )

    def call(count: int) -> str:
        return f"op({', '.join(fields[:count])})"

    optional = sum(not a.has_default_value() for a in schema)
    statistic = operator.fields.index("statistic")
    source = (
        f"lambda a: {call(len(fields))} if not ({have_defaults(statistic)}) else "
        f"{call(optional)} if {have_defaults(optional)} else {call(statistic)}"
    )
    return eval(source, {"op": operator.overload._op})


_layer_norm, _add_layer_norm, _ada_layer_norm, _add_ada_layer_norm = map(_call_of, FORWARD)


def run(a: Arguments) -> Any:
    """The norm that is described: y, or with a residual (y, residual_out)."""
    residual, gate = a.residual, a.gate
    if a.dim is not None:
        return _over_dim(a)
    if gate is not None and not _may_fuse_gate(a):
        return _with_sum_apart(a)
    if is_compiling():  # Dynamo does not trace the exception handling below
        return choice.run(a)
    try:
        if (_dispatch_modes() or _is_tracing()) and torch.onnx.is_in_onnx_export():
            return _in_onnx(a)
        if a.input.is_cpu:
            if (found := stock.run(a)) is not None:
                return found
            # A sum of half precision would round its gradient twice.
            is_half = residual is not None and residual.dtype in arguments.HALF
            if not is_half and stock.differentiates(a.input):
                arguments.check(a)
                y, *others = formulas.computed(formulas.forward, a)
                return y if residual is None else (y, others[0])
        if gate is None and a.shift is None and a.scale is None:
            return _layer_norm(a) if residual is None else _add_layer_norm(a)
        return _ada_layer_norm(a) if residual is None else _add_ada_layer_norm(a)
    except Exception as error:
        raise arguments.explain(error, a) from None


def _in_onnx(a: Arguments) -> Any:
    """A call in the operators that torch.onnx.export translates: the norm itself where nothing is
    fused to it. Without dynamo that knows no rms_norm, nor a layer_norm over sizes that are traced.
    """
    arguments.check(a)
    dtypes = {tensor.dtype for tensor in (a.input, a.weight, a.bias) if tensor is not None}
    is_plain = a.is_plain and not a.is_rms and not a.keeps_order
    if is_plain and len(dtypes) == 1 and not _is_tracing():
        return stock.norm_of(a.input, a)
    found = formulas.forward(a)
    return found[0] if a.residual is None else found[:2]


def call(
    operator: OpOverload,
    a: Any,
    check: Callable[[Any], None],
    in_pytorch: Callable[[Any], Any],
    family: Any = None,
) -> Any:
    """A call of another family's operator, for all but Dynamo, which does not trace the handling of
    exceptions here, and leaves the checks to the fake. `check` says what is wrong with a call.

    in_pytorch: the same in PyTorch's operators, which alone torch.onnx.export translates.
    family: whose formula PyTorch differentiates on the CPU. Its derivative keeps what forward has
    computed, which a backward operator would compute again.
    """
    if (_dispatch_modes() or _is_tracing()) and torch.onnx.is_in_onnx_export():
        check(a)
        return in_pytorch(a)
    try:
        if family is not None and stock.differentiates(a.input):
            check(a)
            return formulas.computed(family.formula, a, family.keeps_order)[0]
        return operator._op(*a)  # skips OpOverload.__call__, which costs half a microsecond
    except Exception as error:
        raise arguments.explain(error, a, check) from None


def _over_dim(a: Arguments) -> Tensor:
    """A norm over one dimension: that of a view in which it is the last."""
    end = a.input.dim() - 1  # ONNX has no dimensions counted from the end
    dim: Any = a.dim
    dim = dim if type(dim) is int else arguments.check_int("dim", dim)
    dim %= end + 1
    a.input, a.keeps_order, a.dim = a.input.movedim(dim, end), True, None
    return run(a).movedim(end, dim)


def _may_fuse_gate(a: Arguments) -> bool:
    """No kernel fuses a gated sum with an activation, a scale or the rounding of xhat."""
    is_bare = a.activation is None and isinstance(a.output_scale, (int, float))
    return is_bare and a.output_scale == 1.0 and not a.round_before_weight


def _with_sum_apart(a: Arguments) -> tuple[Tensor, Tensor]:
    """A gated sum by PyTorch's operators, then the norm of it."""
    arguments.check_tensor("input", a.input)
    device = a.input.device.type
    if choice.has_autocast(device) and torch.is_autocast_enabled(device):
        a = under_autocast(a)
    arguments.check(a)
    residual: Any = a.residual
    residual_out = formulas.add(a.input, residual, a.gate)
    if a.rounds_xhat and a.input.dtype != residual.dtype:
        return formulas.forward(a._replace(out_dtype=a.y_dtype))[0], residual_out
    acc = formulas.acc_dtype(residual.dtype)
    weight, bias = (
        parameter if parameter is None or parameter.dtype == residual.dtype else parameter.to(acc)
        for parameter in (a.weight, a.bias)
    )
    norm = a._replace(input=residual_out, residual=None, gate=None, weight=weight, bias=bias)
    return run(norm._replace(out_dtype=a.y_dtype)), residual_out

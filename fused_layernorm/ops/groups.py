# SPDX-License-Identifier: Apache-2.0
"""The operators group_norm, group_norm_forward and group_norm_backward: their Python half.

group_formulas.py computes them off CUDA, csrc/bindings/cuda/groups.cpp has them on CUDA,
csrc/per_torch autograd and autocast in C++. Where gradients are to be differentiated, and in
forward mode, PyTorch differentiates `formula` and `gradients`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import autocast, fakes, load
from .autograd import (
    Function,
    apply,
    call_operator,
    in_forward_mode,
    lower_levels,
    needs_grad,
    redispatch,
)
from .formulas import acc_dtype
from .group_formulas import (
    BackwardArguments,
    GroupArguments,
    check,
    composite_backward,
    composite_forward,
    formula,
    gradients,
)
from .operators import describe
from .vmap import one_by_one, to_front

group_norm = load.operators.group_norm.default
group_norm_forward = load.operators.group_norm_forward.default
group_norm_backward = load.operators.group_norm_backward.default

# ---- Fakes. As with norms, backward's arguments are not checked here.


def _fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    a = GroupArguments(*args)
    check(a)
    of_groups = (a.input.shape[0], a.num_groups)
    acc = acc_dtype(a.input.dtype)
    mean, rstd = (a.input.new_empty(of_groups, dtype=acc) for _ in range(2))
    return fakes._like(a.input, a.y_dtype, True), mean, rstd


def _fake_backward(*args: Any) -> tuple[Tensor, ...]:
    b = BackwardArguments(*args)
    found = [
        parameter.new_empty(parameter.shape) if needed and parameter is not None else None
        for needed, parameter in zip(b.needs[1:], b.parameters, strict=True)
    ]
    dx = fakes._like(b.x, b.x.dtype, True) if b.needs_dx else None
    return b.results((dx, *found))


# ---- Derivatives, where csrc/per_torch has none.


class _Forward(Function):
    """(y, mean, rstd)."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *args: Any) -> Any:
        a = GroupArguments(*args)
        with lower_levels():
            y, mean, rstd = redispatch(group_norm_forward, keyset, *a)
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(a.input, mean, rstd, *a[2:6])
        ctx.options = (a.num_groups, a.activation, a.output_scale)
        return y, mean, rstd

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: None) -> Any:
        needs: Any = GroupArguments(*ctx.needs_input_grad[1:])
        if dy is None:
            return (None,) * (1 + len(needs))
        x, mean, rstd, *parameters = ctx.saved_tensors
        groups, *options = ctx.options
        flags = (needs.input, *needs[2:6])
        found = call_operator(
            group_norm_backward, dy, x, groups, mean, rstd, *parameters, *options, *flags
        )
        dx, *others = (g if needed else None for g, needed in zip(found, flags, strict=True))
        return (None, dx, None, *others, None, None, None, None)


class _Backward(Function):
    """group_norm_backward, whose own derivatives are those of `gradients`."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *args: Any) -> Any:
        with lower_levels():
            found = redispatch(group_norm_backward, keyset, *args)
        b = BackwardArguments(*args)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(b.dy, b.x, b.mean, b.rstd, *b.parameters)
        ctx.options = (b.num_groups, b[9:])
        unneeded = (g for g, needed in zip(found, b.needs, strict=True) if not needed)
        ctx.mark_non_differentiable(*unneeded)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        dy, x, mean, rstd, *parameters = ctx.saved_tensors
        groups, options = ctx.options
        b = BackwardArguments(dy, x, groups, mean, rstd, *parameters, *options)
        used = [i for i, grad in enumerate(grads) if grad is not None]
        if not used:
            return (None,) * (1 + len(b))
        names = [n for n in ("dy", "x", *b._fields[5:9]) if getattr(b, n) is not None]

        def of(*tensors: Tensor) -> tuple[Tensor, ...]:
            fields: dict[str, Any] = dict(zip(names, tensors, strict=True))
            found = gradients(*b._replace(**fields))
            return tuple(found[i] for i in used)

        vjp = torch.func.vjp(of, *(getattr(b, name) for name in names))[1]
        found = dict(zip(names, vjp(tuple(grads[i] for i in used)), strict=True))
        return (None, *(found.get(name) for name in b._fields))


def _autograd(outputs: Callable[[Any], Any], operator: Any) -> Callable[..., Any]:
    def implementation(keyset: Any, *args: Any) -> Any:
        a = GroupArguments(*args)
        if in_forward_mode():
            check(a)
            y, mean, rstd = formula(a)
            return outputs((y, mean.detach(), rstd.detach()))
        if needs_grad(*a.tensors):
            return outputs(apply(_Forward, keyset, *a))
        return redispatch(operator, keyset, *args)

    return implementation


def _autograd_backward(keyset: Any, *args: Any) -> Any:
    b = BackwardArguments(*args)
    if in_forward_mode():
        return gradients(*args)
    if needs_grad(b.dy, b.x, *b.parameters):
        return apply(_Backward, keyset, *args)
    return redispatch(group_norm_backward, keyset, *args)


# ---- Autocast: as of layer_norm.


def _autocast(operator: Any) -> Callable[..., Any]:
    def implementation(*args: Any) -> Any:
        a = GroupArguments(*args)
        modulation: Any = {"shift": a.shift, "scale": a.scale}
        norm = describe(a.input, weight=a.weight, bias=a.bias, out_dtype=a.out_dtype, **modulation)
        with torch._C._ExcludeDispatchKeyGuard(autocast._KEYSET):
            of = autocast.under_autocast(norm)
            parameters = (of.shift, of.scale, of.weight, of.bias)
            return operator(*a[:2], *parameters, *a[6:9], of.out_dtype)

    return implementation


# ---- vmap: the batch is part of the samples. Where each sample of vmap has parameters of channels,
# ---- or a gradient of them, the operator is called for each.


def _folded(tensor: Any, dim: int | None, size: int) -> Any:
    """The tensor with the mapped dimension folded into its first one."""
    return None if tensor is None else to_front(tensor, dim, size).flatten(0, 1)


def _dims(call: Any, in_dims: Any) -> Any:
    """The mapped dimensions by the names of the arguments of a call."""
    return call(*in_dims)


def _vmap(operator: Any) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        a, dims = GroupArguments(*args), _dims(GroupArguments, in_dims)
        if dims.weight is not None or dims.bias is not None or a.input.dim() < 3:
            return one_by_one(operator, info, in_dims, *args)
        size = info.batch_size
        input, shift, scale = (
            _folded(t, dim, size)
            for t, dim in ((a.input, dims.input), (a.shift, dims.shift), (a.scale, dims.scale))
        )
        found = operator(*a._replace(input=input, shift=shift, scale=scale))
        if isinstance(found, Tensor):
            return found.unflatten(0, (size, -1)), 0
        return tuple(t.unflatten(0, (size, -1)) for t in found), (0,) * len(found)

    return rule


def _vmap_backward(info: Any, in_dims: Any, *args: Any) -> Any:
    b, dims = BackwardArguments(*args), _dims(BackwardArguments, in_dims)
    batched = dims.weight is not None or dims.bias is not None
    if batched or b.needs_dweight or b.needs_dbias:
        return one_by_one(group_norm_backward, info, in_dims, *args)
    size = info.batch_size
    folded = {
        name: _folded(getattr(b, name), getattr(dims, name), size)
        for name in ("dy", "x", "mean", "rstd", "shift", "scale")
    }
    found = group_norm_backward(*b._replace(**folded))
    outputs = tuple(
        t.unflatten(0, (size, -1)) if needed else t.expand(size, 0)
        for t, needed in zip(found, b.needs, strict=True)
    )
    return outputs, (0,) * len(outputs)


# ---- Registration.

torch.library.register_fake(group_norm, lambda *args: _fake(*args)[0])
torch.library.register_fake(group_norm_forward, _fake)
torch.library.register_fake(group_norm_backward, _fake_backward)
torch.library.register_vmap(group_norm, _vmap(group_norm))
torch.library.register_vmap(group_norm_forward, _vmap(group_norm_forward))
torch.library.register_vmap(group_norm_backward, _vmap_backward)
load.library.impl(
    "group_norm", lambda *args: composite_forward(*args)[0], "CompositeExplicitAutograd"
)
load.library.impl("group_norm_forward", composite_forward, "CompositeExplicitAutograd")
load.library.impl("group_norm_backward", composite_backward, "CompositeExplicitAutograd")


def register(beside_library: bool) -> None:
    """Autograd and autocast: of the operators, or of the names that csrc/per_torch's calls."""
    implementations: dict[str, Callable[..., Any]] = {
        "group_norm": _autograd(lambda found: found[0], group_norm),
        "group_norm_forward": _autograd(lambda found: found, group_norm_forward),
        "group_norm_backward": _autograd_backward,
    }
    prefix = "_differentiable_" if beside_library else ""
    for name, implementation in implementations.items():
        if prefix:
            load.define_like(name, prefix)
        load.library.impl(prefix + name, implementation, "Autograd", with_keyset=True)
    if not beside_library:
        for operator in (group_norm, group_norm_forward):
            for key in autocast.KEYS:
                load.library.impl(operator._opname, _autocast(operator), key)

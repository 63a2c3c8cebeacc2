# SPDX-License-Identifier: Apache-2.0
"""Families of three operators, NAME, NAME_forward and NAME_backward, and all that follows for them
from formulas: derivatives in Python, autocast, vmap, registration.

NAME_forward also gives the statistics that backward needs. Of the calls of a family (`Call`,
`BackwardCall`) the tensors and the flags needs_d... are found by their names. Autograd here serves
where csrc/per_torch has none. Where gradients are to be differentiated, and in forward mode,
PyTorch differentiates the formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from . import autocast, autograd, fakes, load
from .autograd import (
    Function,
    apply,
    backward_autograd,
    call_operator,
    in_forward_mode,
    lower_levels,
    needs_grad,
    redispatch,
)
from .formulas import results
from .operators import describe
from .vmap import one_by_one, to_front

Outputs = tuple[Tensor, ...]


@dataclass(eq=False)
class Family:
    """Three operators, and what is known of them. Arguments come in the order of the schemas."""

    name: str
    Call: Any
    BackwardCall: Any
    check: Callable[[Any], None]
    formula: Callable[[Any], Outputs]  # (y, mean, rstd) of a Call
    gradients: Callable[..., Outputs]  # backward's results, of its arguments
    least_ndim: int = 1  # of input
    folds: bool = False  # whether a batch of vmap belongs to the first dimension, or precedes it
    keeps_order: bool = False  # whether dx has the strides of torch.empty_like(x)
    statistic: str = "layer"  # the norm whose autocast this is

    plain: OpOverload = field(init=False)
    forward: OpOverload = field(init=False)
    backward: OpOverload = field(init=False)

    def __post_init__(self) -> None:
        self.plain, self.forward, self.backward = (
            getattr(load.operators, self.name + suffix).default
            for suffix in ("", "_forward", "_backward")
        )


def tensors_of(call: Any) -> tuple[Any, ...]:
    return tuple(value for value in call if isinstance(value, Tensor))


# ---- Derivatives.


class Forward(Function):
    """(y, mean, rstd)."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, family: Family, *args: Any) -> Any:
        with lower_levels():
            found = redispatch(family.forward, keyset, *args)
        return Forward.save(ctx, family, args, found)

    @staticmethod
    def save(ctx: Any, family: Family, args: Any, found: Outputs) -> Outputs:
        """Saves what backward needs of a call and its results; returns the results."""
        a = family.Call(*args)
        _, mean, rstd = found
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)
        given = {**a._asdict(), "x": a.input, "mean": mean, "rstd": rstd}
        of_backward = {name: given.get(name) for name in family.BackwardCall._fields}
        ctx.names = [name for name, value in of_backward.items() if isinstance(value, Tensor)]
        ctx.save_for_backward(*(of_backward.pop(name) for name in ctx.names))
        ctx.others = of_backward
        ctx.family = family
        return found

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: None) -> Any:
        family: Family = ctx.family
        needs = family.Call(*ctx.needs_input_grad[2:])._asdict()
        if dy is None:
            return (None,) * (2 + len(needs))
        needs["x"] = needs["input"]
        flags = {
            name: needs[name.removeprefix("needs_d")]
            for name in family.BackwardCall._fields
            if name.startswith("needs_")
        }
        tensors = zip(ctx.names, ctx.saved_tensors, strict=True)
        b = family.BackwardCall(**{**ctx.others, **dict(tensors), **flags, "dy": dy})
        found = call_operator(family.backward, *b)
        by_name: dict[str, Any] = {
            name.removeprefix("needs_d"): gradient
            for (name, needed), gradient in zip(flags.items(), found, strict=True)
            if needed
        }
        by_name["input"] = by_name.pop("x", None)
        return (None, None, *(by_name.get(name) for name in family.Call._fields))


def _autograd(
    family: Family, operator: OpOverload, outputs: Callable[[Any], Any]
) -> Callable[..., Any]:
    def implementation(keyset: Any, *args: Any) -> Any:
        a = family.Call(*args)
        if in_forward_mode():
            family.check(a)
            y, mean, rstd = family.formula(a)
            return outputs((y, mean.detach(), rstd.detach()))
        if needs_grad(*tensors_of(a)):
            return outputs(apply(Forward, keyset, family, *a))
        return redispatch(operator, keyset, *args)

    return implementation


# ---- Autocast.


def under_autocast(family: Family, operator: OpOverload) -> Callable[..., Any]:
    """An operator's implementation for the Autocast keys, which calls the operator again."""

    def implementation(*args: Any) -> Any:
        a = family.Call(*args)
        given = {
            name: getattr(a, name)
            for name in ("shift", "scale", "weight", "bias")
            if name in a._fields
        }
        norm = describe(a.input, out_dtype=a.out_dtype, statistic=family.statistic, **given)
        with torch._C._ExcludeDispatchKeyGuard(autocast._KEYSET):
            of = autocast.under_autocast(norm)
            cast = {name: getattr(of, name) for name in given}
            return operator(*a._replace(out_dtype=of.out_dtype, **cast))

    return implementation


# ---- vmap: where each sample has parameters of its own, or a gradient of them, the operator is
# ---- called for each.


def folded(tensor: Any, dim: int | None, size: int) -> Any:
    """The tensor with the mapped dimension folded into its first one."""
    return None if tensor is None else to_front(tensor, dim, size).flatten(0, 1)


def _batched(family: Family, call: Any, dims: Any, size: int) -> Any:
    """A call with the batch part of all tensors but the parameters."""
    at_front = folded if family.folds else to_front
    tensors = {
        name: at_front(value, getattr(dims, name), size)
        for name, value in call._asdict().items()
        if isinstance(value, Tensor) and name not in ("weight", "bias")
    }
    return call._replace(**tensors)


def _vmap(family: Family, operator: OpOverload) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        a, dims, size = family.Call(*args), family.Call(*in_dims), info.batch_size
        ndim = a.input.dim() - (dims.input is not None)
        if dims.weight is not None or dims.bias is not None or ndim < family.least_ndim:
            return one_by_one(operator, info, in_dims, *args)
        found = operator(*_batched(family, a, dims, size))
        if isinstance(found, Tensor):
            return (found.unflatten(0, (size, -1)) if family.folds else found), 0
        outputs = tuple(
            t.expand(size, 0)
            if t.shape == (0,)  # RMSNorm's mean
            else t.unflatten(0, (size, -1))
            if family.folds
            else t
            for t in found
        )
        return outputs, (0,) * len(outputs)

    return rule


def _vmap_backward(family: Family) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        b, size = family.BackwardCall(*args), info.batch_size
        dims = family.BackwardCall(*in_dims)
        batched = dims.weight is not None or dims.bias is not None
        if batched or b.needs_dweight or b.needs_dbias:
            return one_by_one(family.backward, info, in_dims, *args)
        found = family.backward(*_batched(family, b, dims, size))
        outputs = tuple(
            t.expand(size, 0) if not needed else t.unflatten(0, (size, -1)) if family.folds else t
            for t, needed in zip(found, b.needs, strict=True)
        )
        return outputs, (0,) * len(outputs)

    return rule


# ---- Registration.


def implement(
    family: Family,
    forward: Callable[..., Outputs],
    backward: Callable[..., Outputs],
    fake: Callable[..., Outputs],
) -> None:
    """Registers an implementation for every device, one without data, and vmap."""

    def fake_backward(*args: Any) -> Outputs:
        b = family.BackwardCall(*args)  # not checked, as with norms
        found = [
            None
            if tensor is None or not needed
            else fakes._like(tensor, tensor.dtype, family.keeps_order and tensor is b.x)
            for tensor, needed in zip(b.differentiated, b.needs, strict=True)
        ]
        return results(found, b.differentiated, b.x)

    def first(implementation: Callable[..., Outputs]) -> Callable[..., Tensor]:
        return lambda *args: implementation(*args)[0]

    for operator, implementation, without_data, rule in (
        (family.plain, first(forward), first(fake), _vmap(family, family.plain)),
        (family.forward, forward, fake, _vmap(family, family.forward)),
        (family.backward, backward, fake_backward, _vmap_backward(family)),
    ):
        load.library.impl(operator._opname, implementation, "CompositeExplicitAutograd")
        torch.library.register_fake(operator, without_data)
        torch.library.register_vmap(operator, rule)


def register(family: Family, beside_library: bool) -> None:
    """Autograd and autocast: of the operators, or of the names that csrc/per_torch's calls."""
    implementations = {
        family.plain: _autograd(family, family.plain, lambda found: found[0]),
        family.forward: _autograd(family, family.forward, lambda found: found),
        family.backward: backward_autograd(family.backward, family.gradients),
    }
    named = {operator._opname: one for operator, one in implementations.items()}
    autograd.register(named, beside_library)
    if not beside_library:
        for operator in (family.plain, family.forward):
            for key in autocast.KEYS:
                load.library.impl(operator._opname, under_autocast(family, operator), key)

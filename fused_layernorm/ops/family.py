# SPDX-License-Identifier: Apache-2.0
"""Families of two forward operators, NAME and NAME_forward, with the backward operator of a call,
and all that follows for them from formulas: derivatives in Python, autocast, vmap, registration.

NAME_forward also gives the statistics that backward needs. Of the calls of a family and of its
backward operator the tensors and the flags needs_d... are found by their names. Autograd here
serves where csrc/per_torch has none. Where gradients are to be differentiated, and in forward mode,
PyTorch differentiates the formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from . import autocast, fakes, fallback, load
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
    """Two forward operators, and what is known of them.

    Arguments come in the order of the schemas. y comes first of the outputs, mean and rstd last;
    between them an operator that takes a residual has the sum, which is what it normalizes.
    """

    name: str
    Call: Any
    check: Callable[[Any], None]
    formula: Callable[[Any], Outputs]  # what NAME_forward gives of a Call, to be differentiated
    backward: OpOverload  # of a call without a gate to be summed
    gated_backward: OpOverload | None = None  # of a call with one
    # As formula, of as few of PyTorch's operators as possible.
    composite: Any = None
    least_ndim: int = 1  # of input
    folds: bool = False  # whether a batch of vmap belongs to the first dimension, or precedes it
    statistic: str = "layer"  # the norm whose autocast this is, if calls do not say

    plain: OpOverload = field(init=False)
    forward: OpOverload = field(init=False)

    def __post_init__(self) -> None:
        self.plain, self.forward = (
            getattr(load.operators, self.name + suffix).default for suffix in ("", "_forward")
        )
        self.composite = self.composite or self.formula

    def without_statistics(self, found: Outputs) -> Any:
        """What NAME gives, of what NAME_forward gives."""
        return found[:-2] if len(found) > 3 else found[0]

    def both(self, implementation: Callable[..., Any]) -> dict[OpOverload, Callable[..., Any]]:
        """NAME and NAME_forward, of an implementation of the latter."""

        def plain(*args: Any) -> Any:
            return self.without_statistics(implementation(*args))

        return {self.plain: plain, self.forward: implementation}


FAMILIES: list[Family] = []
# From every backward operator to its formula, a function of its arguments.
GRADIENTS: dict[OpOverload, Callable[..., Outputs]] = {}
# Autograd of a backward operator that does not follow from its formula.
AUTOGRAD: dict[OpOverload, Callable[..., Outputs]] = {}


def tensors_of(call: Any) -> tuple[Any, ...]:
    return tuple(value for value in call if isinstance(value, Tensor))


# ---- Derivatives.


class Forward(Function):
    """What NAME_forward gives."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, family: Family, *args: Any) -> Any:
        with lower_levels():
            found = redispatch(family.forward, keyset, *args)
        return Forward.save(ctx, family, args, found)

    @staticmethod
    def save(ctx: Any, family: Family, args: Any, found: Outputs) -> Outputs:
        """Saves what backward needs of a call and its results; returns the results."""
        a = family.Call(*args)
        _, *residual_out, mean, rstd = found
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)
        is_gated = family.gated_backward is not None and a.gate is not None
        ctx.operator = family.gated_backward if is_gated else family.backward
        ctx.family, ctx.Call = family, load.call_of(ctx.operator)
        (x,) = residual_out or (a.input,)
        given = {**a._asdict(), "x": x, "mean": mean, "rstd": rstd}
        saved = {name: given.get(name) for name in ctx.Call._fields}
        ctx.names = [name for name, value in saved.items() if isinstance(value, Tensor)]
        ctx.save_for_backward(*(saved.pop(name) for name in ctx.names))
        ctx.others = saved
        ctx.input_dtype = a.input.dtype
        return found

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *others: Tensor | None) -> Any:
        family, Call = ctx.family, ctx.Call
        needs = family.Call(*ctx.needs_input_grad[2:])._asdict()
        dresidual = others[0] if len(others) > 2 else None
        tensors = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        is_gated = "needs_dinput" in Call._fields
        needs["x"] = needs.get("residual") or (needs["input"] and not is_gated)
        flags = {
            name: needs[name.removeprefix("needs_d")]
            for name in Call._fields
            if name.startswith("needs_d")
        }
        gradients: dict[str, Any] = {}
        if dy is None:  # only residual_out was used: its gradient bypasses the norm
            gradients["x"] = dresidual
            if is_gated and dresidual is not None:
                of_gate = (flags["needs_dinput"], flags["needs_dgate"])
                found = load.gate_backward(dresidual, tensors["input"], tensors["gate"], *of_gate)
                gradients |= zip(("input", "gate"), found, strict=True)
        else:
            if flags.get("needs_dshift") and _is_gradient(dy, tensors["shift"], Call):
                flags["needs_dshift"] = False
                gradients["shift"] = dy
            given = {**ctx.others, **tensors, **flags, "dy": dy}
            if "dresidual" in Call._fields:
                given["dresidual"] = dresidual
            found = call_operator(ctx.operator, *Call(**given))
            of_flags = zip(flags.items(), found, strict=True)
            gradients |= {
                name.removeprefix("needs_d"): gradient
                for (name, needed), gradient in of_flags
                if needed
            }
        gradients["residual"] = gradients.get("x")
        of_input = gradients.get("input" if is_gated else "x")
        gradients["input"] = None if of_input is None else of_input.to(ctx.input_dtype)
        of_call = (gradients.get(name) if needs[name] else None for name in family.Call._fields)
        return None, None, *of_call


def _is_gradient(dy: Tensor, shift: Tensor, Call: Any) -> bool:
    """Whether the gradient of shift is dy itself, as where each element of y has one of its own."""
    return "activation" not in Call._fields and (shift.shape, shift.dtype) == (dy.shape, dy.dtype)


def _autograd(family: Family, operator: OpOverload) -> Callable[..., Any]:
    def outputs(found: Any) -> Any:
        return family.without_statistics(found) if operator is family.plain else found

    def implementation(keyset: Any, *args: Any) -> Any:
        a = family.Call(*args)
        if in_forward_mode():
            family.check(a)
            *rows, mean, rstd = family.formula(a)
            return outputs((*rows, mean.detach(), rstd.detach()))
        if needs_grad(*tensors_of(a)):
            return outputs(apply(Forward, keyset, family, *a))
        return redispatch(operator, keyset, *args)

    return implementation


# ---- Autocast.

_CAST = ("shift", "scale", "weight", "bias")  # and a gate that is summed


def under_autocast(family: Family, operator: OpOverload) -> Callable[..., Any]:
    """An operator's implementation for the Autocast keys, which calls the operator again."""

    def implementation(*args: Any) -> Any:
        a = family.Call(*args)
        gate = ["gate"] if family.gated_backward is not None else []
        named = {name: getattr(a, name, None) for name in (*_CAST, *gate)}
        given: Any = {name: one for name, one in named.items() if isinstance(one, Tensor)}
        statistic = getattr(a, "statistic", family.statistic)
        norm = describe(a.input, out_dtype=a.out_dtype, statistic=statistic, **given)
        with torch._C._ExcludeDispatchKeyGuard(autocast.KEYSET):
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


def _unbatched(family: Family, found: Any, size: int) -> Any:
    """The results of a rule; an empty one, as RMSNorm's mean, has no batch yet."""

    def at_front(t: Tensor) -> Tensor:
        if t.shape == (0,):
            return t.expand(size, 0)
        return t.unflatten(0, (size, -1)) if family.folds else t

    if isinstance(found, Tensor):
        return at_front(found), 0
    return tuple(map(at_front, found)), (0,) * len(found)


def _vmap(family: Family, operator: OpOverload) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        a, dims, size = family.Call(*args), family.Call(*in_dims), info.batch_size
        ndim = a.input.dim() - (dims.input is not None)
        if dims.weight is not None or dims.bias is not None or ndim < family.least_ndim:
            return one_by_one(operator, info, in_dims, *args)
        return _unbatched(family, operator(*_batched(family, a, dims, size)), size)

    return rule


def _vmap_backward(family: Family) -> Callable[..., Any]:
    Call = load.call_of(family.backward)

    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        b, dims, size = Call(*args), Call(*in_dims), info.batch_size
        batched = dims.weight is not None or dims.bias is not None
        if batched or b.needs_dweight or b.needs_dbias:
            return one_by_one(family.backward, info, in_dims, *args)
        return _unbatched(family, family.backward(*_batched(family, b, dims, size)), size)

    return rule


# ---- Registration.


def implement(
    operator: OpOverload,
    implementation: Callable[..., Any],
    without_data: Callable[..., Any],
    vmap: Callable[..., Any] | None,
) -> None:
    """Registers an operator's implementation for every device, one without data, and vmap."""
    fallback.implement(operator, implementation)
    torch.library.register_fake(operator, without_data)
    if vmap is not None:
        torch.library.register_vmap(operator, vmap)


def fake_backward(operator: OpOverload, keeps_order: bool = False) -> Callable[..., Outputs]:
    """A backward operator without data, whose arguments are not checked: compiled autograd traces
    it with gradients of other shapes.

    keeps_order: whether dx has the strides of torch.empty_like(x).
    """
    Call = load.call_of(operator)

    def fake(*args: Any) -> Outputs:
        b = Call(*args)
        found = [
            None
            if tensor is None or not needed
            else fakes.like(tensor, tensor.dtype, keeps_order and tensor is b.x)
            for tensor, needed in zip(b.differentiated, b.needs, strict=True)
        ]
        return results(found, b.differentiated, b[0])

    return fake


def implement_family(
    family: Family,
    forward: Callable[..., Outputs],
    backward: Callable[..., Outputs],
    fake: Callable[..., Outputs],
    gradients: Callable[..., Outputs],
    keeps_order: bool = False,
) -> None:
    """The same for both operators of a family and for its backward operator."""
    FAMILIES.append(family)
    GRADIENTS[family.backward] = gradients
    of_backward = fake_backward(family.backward, keeps_order)
    fakes_of = family.both(fake)
    for operator, implementation in family.both(forward).items():
        implement(operator, implementation, fakes_of[operator], _vmap(family, operator))
    implement(family.backward, backward, of_backward, _vmap_backward(family))


def register(beside_library: bool) -> None:
    """Autograd and autocast: of the operators, or of what csrc/per_torch's autograd calls.

    It calls operators named _differentiable_... for a derivative of a backward operator, and in
    forward mode.
    """
    prefix = "_differentiable_" if beside_library else ""
    of_family = [(one, operator) for one in FAMILIES for operator in (one.plain, one.forward)]
    implementations = {operator: _autograd(*one) for one in of_family for operator in one[1:]}
    implementations |= {one: backward_autograd(one, GRADIENTS[one]) for one in GRADIENTS}
    implementations |= AUTOGRAD
    for operator, implementation in implementations.items():
        if prefix:
            load.define_like(operator._opname, prefix)
        load.library.impl(prefix + operator._opname, implementation, "Autograd", with_keyset=True)
    if not beside_library:
        for family, operator in of_family:
            register_autocast(operator, under_autocast(family, operator))


def register_autocast(operator: OpOverload, implementation: Callable[..., Any]) -> None:
    for key in autocast.KEYS:
        load.library.impl(operator._opname, implementation, key)

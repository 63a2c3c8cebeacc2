# SPDX-License-Identifier: Apache-2.0
"""Families of two forward operators, NAME and NAME_forward, with the backward operator of a call,
and all that follows for them from one formula: the implementation for devices without kernels,
derivatives in Python, autocast, vmap, registration.

NAME_forward also gives the statistics that backward needs. Of the calls of a family and of its
backward operator the tensors and the flags needs_d... are found by their names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import compute_elementwise_output_strides

from . import arguments, autocast, autograd, fallback, formulas, load
from .formulas import acc_dtype, complete, laid_out, results
from .vmap import vmap_of

Outputs = tuple[Tensor, ...]
_is_alias_of: Callable[[Tensor, Tensor], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]


@dataclass(eq=False)
class Family:
    """Two forward operators, and what is known of them.

    Arguments come in the order of the schemas. y comes first of the outputs, mean and rstd last;
    between them an operator that takes a residual has the sum, which is what it normalizes.
    """

    name: str
    check: Callable[[Any], None]
    # What NAME_forward gives of a call; with exact=False not to be differentiated.
    formula: Callable[..., Outputs]
    backward: OpOverload  # of a call without a gate to be summed
    gated_backward: OpOverload | None = None  # of a call with one
    # The shape of the statistics of a call's x.
    statistics: Callable[[Any], Any] = lambda a: _of_rows(a)
    folds: bool = False  # whether a batch of vmap belongs to the first dimension, or precedes it
    keeps_order: bool = False  # whether y and dx have it, whatever a call says

    plain: OpOverload = field(init=False)
    forward: OpOverload = field(init=False)
    Call: Any = field(init=False)

    def __post_init__(self) -> None:
        self.plain, self.forward = (
            getattr(load.operators, self.name + suffix).default for suffix in ("", "_forward")
        )
        self.Call = load.call_of(self.plain)

    def without_statistics(self, found: Outputs) -> Any:
        """What NAME gives, of what NAME_forward gives."""
        return found[:-2] if len(found) > 3 else found[0]

    def both(self, implementation: Callable[..., Any]) -> dict[OpOverload, Callable[..., Any]]:
        """NAME and NAME_forward, of an implementation of the latter."""

        def plain(*args: Any) -> Any:
            return self.without_statistics(implementation(*args))

        return {self.plain: plain, self.forward: implementation}


FAMILIES: list[Family] = []
# From every backward operator to what it gives by PyTorch's operators, a function of its arguments.
GRADIENTS: dict[OpOverload, Callable[..., Outputs]] = {}
# Autograd of a backward operator that does not follow from its formula.
AUTOGRAD: dict[OpOverload, Callable[..., Outputs]] = {}


def _of_rows(a: Any) -> Any:
    ndim = a.normalized_ndim
    return (*a.input.shape[: a.input.dim() - ndim], *[1] * ndim)


# ---- The computation in PyTorch's operators.


def composite(family: Family) -> Callable[..., Outputs]:
    """The implementation of NAME_forward for devices without kernels."""

    def implementation(*args: Any) -> Outputs:
        a = family.Call(*args)
        family.check(a)
        formulas.warn_of_cuda(a.input)
        found = formulas.computed(family.formula, a, family.keeps_order)
        return found[0], *(t.contiguous() for t in found[1:])

    return implementation


def gradients(
    operator: OpOverload, formula: Callable[[Any, bool], Outputs]
) -> Callable[..., Outputs]:
    """What a backward operator gives, but for the order of memory, by PyTorch's derivative of a
    formula of its call: of y, and what was normalized, whose gradients are dy and dresidual."""
    Call = load.call_of(operator)

    def implementation(*args: Any) -> Outputs:
        b = complete(Call(*args))
        wanted = b.wanted
        if not wanted:
            return results(b, {})
        count, once = 1 if b.dresidual is None else 2, formulas.is_once()

        def function(*leaves: Tensor) -> Outputs:
            return formula(b._replace(**dict(zip(wanted, leaves, strict=True))), once)[:count]

        leaves = [getattr(b, name) for name in wanted]
        grads = [b[0]] if b.dresidual is None else [b[0], b.dresidual.to(acc_dtype(b.x.dtype))]
        found = autograd.derivatives(function, leaves, grads)
        named = zip(wanted, leaves, found, strict=True)
        return results(b, {n: torch.zeros_like(t) if g is None else g for n, t, g in named})

    return implementation


def without_kernel(operator: OpOverload, family: Family) -> Callable[..., Outputs]:
    """The implementation of a backward operator for devices without kernels."""
    Call, implementation = load.call_of(operator), GRADIENTS[operator]

    def own(t: Tensor, b: Any) -> Tensor:
        """The gradient contiguous, and not dy or dresidual itself."""
        given = (b[0], b.dresidual)
        is_given = any(g is not None and _is_alias_of(t, g) for g in given)
        return t.clone(memory_format=torch.contiguous_format) if is_given else t.contiguous()

    def laid(*args: Any) -> Outputs:
        b = Call(*args)
        arguments.check_tensors(b)
        with torch.no_grad():
            first, *others = implementation(*args)
        in_order = getattr(b, "needs_dx", False) and (family.keeps_order or b.keeps_order)
        first = laid_out(first, b.x, True) if in_order else own(first, b)
        return first, *(own(t, b) for t in others)

    return laid


# ---- Shapes and dtypes without data, for compilers and meta tensors.


def like(x: Tensor, dtype: torch.dtype, keeps_order: bool) -> Tensor:
    if not keeps_order:
        return x.new_empty(x.shape, dtype=dtype)
    # A fake torch.empty_like loses the strides of dimensions of size 1, which the real one keeps.
    return x.new_empty_strided(x.shape, compute_elementwise_output_strides(x), dtype=dtype)


def fake(family: Family) -> Callable[..., Outputs]:
    """NAME_forward without data."""

    def implementation(*args: Any) -> Outputs:
        a = family.Call(*args)
        family.check(a)
        x, of_rows, acc = a.input, family.statistics(a), acc_dtype(a.x_dtype)
        return (
            like(x, a.y_dtype, family.keeps_order or a.keeps_order),
            *([] if a.residual is None else [x.new_empty(x.shape, dtype=a.residual.dtype)]),
            x.new_empty((0,) if a.is_rms else of_rows, dtype=acc),
            x.new_empty(of_rows, dtype=acc),
        )

    return implementation


def fake_backward(operator: OpOverload, family: Family) -> Callable[..., Outputs]:
    """A backward operator without data, whose arguments are not checked: compiled autograd traces
    it with gradients of other shapes."""
    Call = load.call_of(operator)

    def implementation(*args: Any) -> Outputs:
        b = complete(Call(*args))
        in_order = family.keeps_order or b.keeps_order
        given = {name: t for name in b.wanted if (t := getattr(b, name)) is not None}
        found = {n: like(t, t.dtype, n == "x" and in_order) for n, t in given.items()}
        return results(b, found)

    return implementation


# ---- Derivatives.


class Forward(autograd.Function):
    """What NAME_forward gives."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, family: Family, *args: Any) -> Any:
        with autograd.lower_levels():
            found = autograd.redispatch(family.forward, keyset, *args)
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
        for name in _unread(family, a, family.Call(*ctx.needs_input_grad[2:])):
            saved[name] = None
        # Backward reads the dtype of a weight at least.
        is_unread = saved["weight"] is None and a.weight is not None
        ctx.weight_like = (a.weight.shape, a.weight.dtype) if is_unread else None
        autograd.keep(ctx, saved)
        ctx.input_dtype = a.input.dtype
        return found

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *others: Tensor | None) -> Any:
        family, Call = ctx.family, ctx.Call
        needs = family.Call(*ctx.needs_input_grad[2:])._asdict()
        dresidual = others[0] if len(others) > 2 else None
        given = autograd.kept(ctx)
        if ctx.weight_like is not None:
            shape, dtype = ctx.weight_like
            given["weight"] = given["x"].new_empty(shape, dtype=dtype)
        is_gated = "needs_dinput" in Call._fields
        needs["x"] = needs.get("residual") or (needs["input"] and not is_gated)
        flags = {f"needs_d{name}": needs[name] for name in Call.differentiated}
        gradients: dict[str, Any] = {}
        if dy is None:  # only residual_out was used: its gradient bypasses the norm
            gradients["x"] = dresidual
            if is_gated and dresidual is not None:
                of_gate = (flags["needs_dinput"], flags["needs_dgate"])
                found = load.gate_backward(dresidual, given["input"], given["gate"], *of_gate)
                gradients |= zip(("input", "gate"), found, strict=True)
        else:
            if flags.get("needs_dshift") and _is_gradient(dy, given["shift"], Call):
                flags["needs_dshift"] = False
                gradients["shift"] = dy
            given |= {**flags, "dy": dy}
            if "dresidual" in Call._fields:
                given["dresidual"] = dresidual
            found = autograd.call_operator(ctx.operator, *Call(**given))
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


def _unread(family: Family, a: Any, needs: Any) -> list[str]:
    """The tensors whose values backward does not read.

    They are not saved, as PyTorch's functions do not save them: autograd refuses parameters that
    were made in inference mode.
    """
    activates = getattr(a, "activation", None) is not None
    reads_z = activates or hasattr(a, "gate_activation") or getattr(needs, "scale", False)
    reads_weight = reads_z or needs.input or getattr(needs, "residual", False)
    reads_weight = reads_weight or getattr(needs, "gate", False)
    unread = [] if reads_weight else ["weight"]
    # Backward operators of rows alone give a gradient to what is missing (formulas.complete).
    if not reads_z and a.weight is not None and "normalized_ndim" in a._fields:
        unread.append("bias")
    if "shift" in a._fields and not (activates or needs.shift):
        unread.append("shift")
    return unread


def _is_gradient(dy: Tensor, shift: Tensor, Call: Any) -> bool:
    """Whether the gradient of shift is dy itself, as where each element of y has one of its own."""
    return "activation" not in Call._fields and (shift.shape, shift.dtype) == (dy.shape, dy.dtype)


def _autograd(family: Family, operator: OpOverload) -> Callable[..., Any]:
    def outputs(found: Any) -> Any:
        return family.without_statistics(found) if operator is family.plain else found

    def implementation(keyset: Any, *args: Any) -> Any:
        a = family.Call(*args)
        if autograd.in_forward_mode():
            family.check(a)
            *rows, mean, rstd = family.formula(a)
            return outputs((*rows, mean.detach(), rstd.detach()))
        if autograd.needs_grad(*a):
            return outputs(autograd.apply(Forward, keyset, family, *a))
        return autograd.redispatch(operator, keyset, *args)

    return implementation


# ---- Autocast.


def under_autocast(family: Family, operator: OpOverload) -> Callable[..., Any]:
    """An operator's implementation for the Autocast keys, which calls the operator again."""

    def implementation(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(autocast.KEYSET):
            return operator(*autocast.under_autocast(family.Call(*args)))

    return implementation


# ---- Registration.


def implement(
    operator: OpOverload,
    implementation: Callable[..., Any],
    without_data: Callable[..., Any],
    vmap: Callable[..., Any],
) -> None:
    """Registers an operator's implementation for every device, one without data, and vmap."""
    fallback.implement(operator, implementation)
    torch.library.register_fake(operator, without_data)
    torch.library.register_vmap(operator, vmap)


def implement_backward(
    operator: OpOverload, by_formula: Callable[..., Outputs], family: Family
) -> None:
    """The same for a backward operator, and for its formula, which vmap calls."""
    GRADIENTS[operator] = by_formula
    formula = fallback.implement(operator, without_kernel(operator, family))
    for one in (operator, formula):
        torch.library.register_fake(one, fake_backward(operator, family))
        rule = vmap_of(operator, formula, family, always=one is formula)
        torch.library.register_vmap(one, rule)
    differentiated = autograd.backward_autograd(formula, by_formula)
    load.library.impl(formula._opname, differentiated, "Autograd", with_keyset=True)


def implement_forward(family: Family) -> None:
    """The same for both forward operators of a family."""
    FAMILIES.append(family)
    fakes = family.both(fake(family))
    formulas_of = family.both(lambda *args: family.formula(family.Call(*args)))
    for operator, implementation in family.both(composite(family)).items():
        rule = vmap_of(operator, formulas_of[operator], family)
        implement(operator, implementation, fakes[operator], rule)


def register(beside_library: bool) -> None:
    """Autograd and autocast: of the operators, or of what csrc/per_torch's autograd calls.

    It calls operators named _differentiable_... for a derivative of a backward operator, and in
    forward mode.
    """
    prefix = "_differentiable_" if beside_library else ""
    of_family = [(one, operator) for one in FAMILIES for operator in (one.plain, one.forward)]
    implementations = {operator: _autograd(*one) for one in of_family for operator in one[1:]}
    implementations |= {one: autograd.backward_autograd(one, GRADIENTS[one]) for one in GRADIENTS}
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

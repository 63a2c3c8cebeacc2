# SPDX-License-Identifier: Apache-2.0
"""Families: a forward operator NAME, perhaps NAME_forward, and the backward operators of their
calls, with all that follows from one formula: the implementation for devices without kernels,
derivatives in Python, vmap, fakes and their registration.

NAME_forward also gives the statistics that backward needs. Of the calls of a family and of its
backward operator the tensors and the flags needs_d... are found by their names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd import forward_ad

from . import arguments, autograd, formulas, load
from .autograd import complete, results
from .formulas import acc_dtype, like
from .vmap import vmap_of

Outputs = tuple[Tensor, ...]
_CONTIGUOUS = torch.contiguous_format
_is_alias_of: Callable[[Tensor, Tensor], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]


class Forward(autograd.Function):
    """What NAME_forward gives."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, family: Family, *args: Any) -> Any:
        a = family.Call(*args)
        with autograd.lower_levels():
            if keyset is None:  # of an aten_ variant
                found = family.computed(a)
            else:
                forward: Any = family.forward
                found = autograd.redispatch(forward, keyset, *args)
        _, *residual_out, mean, rstd = found
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)
        is_gated = family.gated_backward is not None and a.gate is not None
        ctx.operator = family.gated_backward if is_gated else family.backward
        ctx.family, ctx.Call = family, formulas.call_of(ctx.operator)
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
            if flags.get("needs_dshift") and "activation" not in Call._fields:
                shift = given["shift"]
                if (shift.shape, shift.dtype) == (dy.shape, dy.dtype):  # one for each element of y
                    flags["needs_dshift"] = False
                    gradients["shift"] = dy
            given |= {**flags, "dy": dy}
            if "dresidual" in Call._fields:
                given["dresidual"] = dresidual
            found = autograd.call_operator(ctx.operator, *Call(**given))
            named = zip(Call.differentiated, found, strict=True)
            gradients |= {name: gradient for name, gradient in named if flags[f"needs_d{name}"]}
        gradients["residual"] = gradients.get("x")
        of_input = gradients.get("input" if is_gated else "x")
        gradients["input"] = None if of_input is None else of_input.to(ctx.input_dtype)
        of_call = (gradients.get(name) if needs[name] else None for name in family.Call._fields)
        return None, None, *of_call


def _unread(family: Family, a: Any, needs: Any) -> list[str]:
    """The tensors whose values backward does not read. They are not saved, as PyTorch's functions
    do not: autograd refuses parameters that were made in inference mode."""
    activates = a.activation is not None
    reads_z = activates or "gate_activation" in a._fields or needs.scale
    reads_weight = reads_z or needs.input or needs.residual or needs.gate
    unread = [] if reads_weight else ["weight"]
    # Backward operators of rows alone give a gradient to what is missing (autograd.complete).
    if not reads_z and a.weight is not None and "normalized_ndim" in a._fields:
        unread.append("bias")
    if "shift" in a._fields and not (activates or needs.shift):
        unread.append("shift")
    return unread


def assume_constant_result(function: Any) -> Any:
    """As torch.compiler.assume_constant_result, which would import all of Dynamo: while it traces,
    Dynamo calls the function, and guards nothing that it reads. What a class is asked stands in
    such functions: to guard a class's attribute keeps Dynamo from skipping a module's guards."""
    function._dynamo_marked_constant = True
    return function


class Family:
    """Forward operators, and what is known of them.

    y comes first of the outputs, mean and rstd last; between them an operator that takes a residual
    has the sum, which is what it normalizes.
    """

    folds = False  # whether a batch of vmap belongs to the first dimension, or precedes it
    node: Any = Forward  # the autograd function of the forward operators

    def __init__(
        self, name: str, check: Callable[[Any], None], formula: Callable[..., Outputs]
    ) -> None:
        """formula: what NAME_forward (else NAME) gives of a call, and what is differentiated of a
        call of the backward operator: that of which it has gradients, in their order; with
        once=True it is not to be differentiated twice."""
        self.name, self.check, self.formula = name, check, formula
        self.plain, self.forward = load.operator(name), load.operator(f"{name}_forward")
        # The norm of a sum has the norm's, and one of its own for calls with a gate.
        self.backward = load.operator(f"{name.removeprefix('add_')}_backward")
        own = load.operator(f"{name}_backward")
        self.gated_backward: Any = own if name.startswith("add_") else None
        self.Call, self.fields = formulas.call_of(self.plain), formulas.fields_of(self.plain)
        schema = zip(self.fields, self.plain._schema.arguments, strict=True)
        types = {name: str(argument.type) for name, argument in schema}
        tensors = tuple((n, kind != "Tensor") for n, kind in types.items() if "Tensor" in kind)
        numbers = tuple(n for n, kind in types.items() if kind == "float")
        self._signature = (*self.fields,), tensors, numbers

    @assume_constant_result
    def signature(self) -> Any:
        """The arguments' names, the tensors, each with whether it is optional, and the numbers."""
        return self._signature

    def statistics(self, a: Any) -> Any:
        """The shape of the statistics of a call."""
        ndim = a.normalized_ndim
        return (*a.input.shape[: a.input.dim() - ndim], *[1] * ndim)

    def call(self, a: Any) -> Any:
        """Calls NAME, without OpOverload.__call__, which costs half a microsecond."""
        return self.plain._op(*a)

    def without_statistics(self, found: Outputs) -> Any:
        """What NAME gives, of what NAME_forward gives."""
        return found if self.forward is None else found[:-2] if len(found) > 3 else found[0]

    def each(self, implementation: Callable[..., Any]) -> dict[OpOverload, Callable[..., Any]]:
        """The forward operators, of an implementation that gives the statistics, if one does."""

        def plain(*args: Any) -> Any:
            return self.without_statistics(implementation(*args))

        return {self.plain: plain, **({self.forward: implementation} if self.forward else {})}

    def composite(self, *args: Any) -> Outputs:
        """The implementation of the forward operator for devices without kernels."""
        a = self.Call(*args)
        self.check(a)
        if a[0].is_cuda:
            formulas.warn_of_cuda(a[0])
        found = self.computed(a)
        if self.forward:
            return *found[:-2], found[-2].contiguous(), found[-1].contiguous()
        return found

    def by_formula(self, *args: Any) -> Outputs:
        """The same of arguments that were checked, but for the order of memory."""
        return self.formula(self.Call(*args))

    def fake(self, *args: Any) -> Outputs:
        """The forward operator without data, for compilers and meta tensors."""
        a = self.Call(*args)
        self.check(a)
        return self.empty(a)

    def computed(self, a: Any) -> Outputs:
        """What the formula gives of a call that was checked, not to be differentiated a second
        time: y contiguous, or in the strides of torch.empty_like(input)."""
        y, *others = self.formula(a, once=True)
        if not a.keeps_order:
            y = y.contiguous()
        else:
            ordered = torch.empty_like(a.input, dtype=y.dtype)
            y = y if y.stride() == ordered.stride() else ordered.copy_(y)
        return y, *others

    def empty(self, a: Any) -> Outputs:
        """The results of a call without data."""
        x, of_rows = a.input, self.statistics(a)
        acc = acc_dtype((x if a.residual is None else a.residual).dtype)
        return (
            like(x, a.y_dtype, a.keeps_order),
            *([] if a.residual is None else [x.new_empty(x.shape, dtype=a.residual.dtype)]),
            x.new_empty((0,) if a.is_rms else of_rows, dtype=acc),
            x.new_empty(of_rows, dtype=acc),
        )

    def order_of(self, b: Any, name: str) -> Tensor | None:
        """The gradient of a tensor of a backward call without data, or None if it is contiguous."""
        return like(b.x, b.x.dtype, True) if name == "x" and b.keeps_order else None

    def in_onnx(self, a: Any, is_tracing: bool) -> Any:
        """A call that was checked in the operators that torch.onnx.export translates, with its
        dynamo or else by tracing."""
        return self.without_statistics(self.formula(a))

    def differentiable(self, a: Any) -> Any:
        """What NAME gives by the formula, for PyTorch to differentiate once; None where its
        derivative would round gradients more often than ours."""
        if a.residual is not None and a.residual.dtype in arguments.HALF:
            return None  # a sum would round its gradient twice
        self.check(a)
        return self.without_statistics(self.computed(a))

    def is_by_formula(self, a: Any) -> bool:
        """Whether PyTorch differentiates the formula instead of `node`."""
        return autograd.in_forward_mode()

    vmap = vmap_of


FAMILIES: list[Family] = []
# From every backward operator to what it gives by PyTorch's operators, a function of its arguments.
GRADIENTS: dict[OpOverload, Callable[..., Outputs]] = {}
# Autograd of an operator that does not follow from its family.
AUTOGRAD: dict[OpOverload, Callable[..., Any]] = {}


# ---- Backward operators.


def gradients(operator: OpOverload, formula: Callable[..., Outputs]) -> Callable[..., Outputs]:
    """What a backward operator gives, but for the order of memory, by PyTorch's derivative of a
    family's formula of its call."""
    Call = formulas.call_of(operator)

    def implementation(*args: Any) -> Outputs:
        b = complete(Call(*args))
        wanted = b.wanted
        # Whether no mode or transform differentiates what is found.
        in_transform = torch._C._are_functorch_transforms_active()
        once = not (torch.is_grad_enabled() or in_transform or forward_ad._current_level >= 0)
        if not wanted:
            return results(b, {})

        def function(*leaves: Tensor) -> Outputs:
            found = formula(b._replace(**dict(zip(wanted, leaves, strict=True))), once)
            return tuple(y for y, dy in zip(found, b.grads, strict=False) if dy is not None)

        leaves = [getattr(b, name) for name in wanted]
        found = autograd.derivatives(function, leaves, [dy for dy in b.grads if dy is not None])
        named = zip(wanted, leaves, found, strict=True)
        return results(b, {n: torch.zeros_like(t) if g is None else g for n, t, g in named})

    return implementation


def without_kernel(operator: OpOverload, family: Family) -> Callable[..., Outputs]:
    """The implementation of a backward operator for devices without kernels."""
    Call, implementation = formulas.call_of(operator), GRADIENTS[operator]

    def laid(*args: Any) -> Outputs:
        b = Call(*args)
        for name, value in b._asdict().items():
            if isinstance(value, Tensor):
                arguments.check_tensor(name, value)
        with torch.no_grad():
            found = implementation(*args)
        given = [dy for dy in b.grads if dy is not None]

        def own(name: str, gradient: Tensor) -> Tensor:
            """The gradient in its order of memory, and none itself of those that were given."""
            ordered = family.order_of(b, name) if gradient.shape != (0,) else None
            if ordered is not None:
                is_laid = gradient.stride() == ordered.stride()
                return gradient if is_laid else ordered.copy_(gradient)
            is_given = any(_is_alias_of(gradient, dy) for dy in given)
            return gradient.clone(memory_format=_CONTIGUOUS) if is_given else gradient.contiguous()

        return tuple(map(own, b.differentiated, found))

    return laid


def fake_backward(operator: OpOverload, family: Family) -> Callable[..., Outputs]:
    """A backward operator without data, whose arguments are not checked: compiled autograd traces
    it with gradients of other shapes."""
    Call = formulas.call_of(operator)

    def empty(b: Any, name: str) -> Tensor:
        tensor, ordered = getattr(b, name), family.order_of(b, name)
        return tensor.new_empty(tensor.shape) if ordered is None else ordered

    def implementation(*args: Any) -> Outputs:
        b = complete(Call(*args))
        wanted = [name for name in b.wanted if getattr(b, name) is not None]
        return results(b, {name: empty(b, name) for name in wanted})

    return implementation


# ---- Derivatives.


def autograd_of(family: Family, operator: OpOverload) -> Callable[..., Any]:
    """Autograd of a forward operator, or without a keyset the whole of its aten_ variant."""

    def implementation(keyset: Any, *args: Any) -> Any:
        a = family.Call(*args)
        is_by_formula = family.is_by_formula(a)
        if is_by_formula or keyset is None:
            family.check(a)
        if is_by_formula:
            found = family.formula(a)
            if family.forward:
                found = (*found[:-2], *(t.detach() for t in found[-2:]))
        elif autograd.needs_grad(*a):
            found = autograd.apply(family.node, keyset, family, *a)
        elif keyset is None:
            found = family.computed(a)
        else:
            return autograd.redispatch(operator, keyset, *args)
        return family.without_statistics(found) if operator is family.plain else found

    return implementation


# ---- Registration.


def implement_backward(
    operator: OpOverload, by_formula: Callable[..., Outputs], of: Family
) -> None:
    """Registers a backward operator for every device, without data, and for vmap, which calls its
    formula for CUDA (load.py); and that formula."""
    GRADIENTS[operator] = by_formula
    formula = load.implement(operator, without_kernel(operator, of))
    for one in (operator, formula):
        torch.library.register_fake(one, fake_backward(operator, of))
        torch.library.register_vmap(one, of.vmap(operator, formula, always=one is formula))
    differentiated = autograd.backward_autograd(formula, by_formula)
    load.library.impl(formula._opname, differentiated, "Autograd", with_keyset=True)


def implement_forward(family: Family) -> None:
    """Registers the forward operators of a family in the same way."""
    FAMILIES.append(family)
    fakes, by_formula = family.each(family.fake), family.each(family.by_formula)
    for operator, implementation in family.each(family.composite).items():
        load.implement(operator, implementation)
        torch.library.register_fake(operator, fakes[operator])
        torch.library.register_vmap(operator, family.vmap(operator, by_formula[operator]))


def implement(family: Family) -> None:
    """Registers the operators of a family that has one of each kind."""
    implement_forward(family)
    by_formula = gradients(family.backward, family.formula)
    implement_backward(family.backward, by_formula, family)


def decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """A decomposition table from this package's operators to plain ATen, for every device.

    For a program that is to run where the package is not, such as an ONNX runtime::

        program = torch.export.export(model, args)
        program = program.run_decompositions(fused_layernorm.decompositions())
        torch.onnx.export(program, dynamo=True).save("model.onnx")

    Other operators are left as they are. To decompose to core ATen, ``update`` the table of
    ``torch.export.default_decompositions()`` with this one.
    """
    return {
        **{one: found for of in FAMILIES for one, found in of.each(of.by_formula).items()},
        **{one: torch.no_grad()(found) for one, found in GRADIENTS.items()},
    }

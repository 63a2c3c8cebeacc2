# SPDX-License-Identifier: Apache-2.0
"""The aten_ variants: forward pass in PyTorch's operators, backward pass in this package's.

Under torch.compile an opaque forward operator keeps Inductor from fusing the elementwise operations
around it, and at many widths Inductor's forward kernel is as fast. This package's backward kernels
are faster at every width. So each operator that users call has a variant of the same schema, such
as aten_layer_norm: a tracer sees PyTorch's operators in its forward pass, and layer_norm_backward
or another backward operator in its backward pass.

The variants are operators, not a torch.autograd.Function, so that AOTAutograd's cache can keep a
graph with them, each under a name of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload

from . import arguments, autocast, autograd, composite, family, formulas, gated, load
from .family import Family
from .operators import (
    ADA_LAYER_NORM,
    ADD_ADA_LAYER_NORM,
    ADD_LAYER_NORM,
    LAYER_NORM,
    Operator,
    Results,
    describe,
    values,
)


class _Forward(autograd.Forward):
    """As the operators' own autograd function, except for the forward pass."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *args: Any) -> Any:
        a = describe(*args)
        with autograd.lower_levels():
            found = composite.forward(a)
        return autograd.Forward.save(ctx, a, found)


def _implementation(operator: Operator) -> Callable[..., Any]:
    def implementation(*args: Any) -> Any:
        a = operator.arguments(*args)
        arguments.check(a)
        tensors = (a.input, a.residual, a.weight, a.bias, a.gate, a.shift, a.scale)
        if autograd.in_forward_mode():
            return operator.outputs(formulas.forward(a))
        if autograd.needs_grad(*tensors):
            return operator.outputs(Results(*autograd.apply(_Forward, None, *values(a))))
        return operator.outputs(composite.forward(a))

    return implementation


_variants: dict[Operator, Operator] = {}


def _define(operator: Operator) -> Operator:
    defined = Operator(load.define_like(operator.name, "aten_"))
    load.library.impl(defined.name, _implementation(defined), "CompositeImplicitAutograd")
    for key in autocast.KEYS:
        load.library.impl(defined.name, autocast.implementation(defined), key)
    return defined


for _operator in (LAYER_NORM, ADD_LAYER_NORM, ADA_LAYER_NORM, ADD_ADA_LAYER_NORM):
    _variants[_operator] = _define(_operator)


class _ForwardOfFamily(family.Forward):
    """As the family's own autograd function, except for the forward pass."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, of: Family, *args: Any) -> Any:
        with autograd.lower_levels():
            found = of.formula(of.Call(*args))
        return family.Forward.save(ctx, of, args, found)


def _define_of_family(of: Family) -> OpOverload:
    defined = load.define_like(of.name, "aten_")

    def implementation(*args: Any) -> Any:
        a = of.Call(*args)
        of.check(a)
        if not autograd.in_forward_mode() and autograd.needs_grad(*family.tensors_of(a)):
            return autograd.apply(_ForwardOfFamily, None, of, *a)[0]
        return of.formula(a)[0]

    load.library.impl(defined._opname, implementation, "CompositeImplicitAutograd")
    for key in autocast.KEYS:
        load.library.impl(defined._opname, family.under_autocast(of, defined), key)
    return defined


aten_rms_norm_gated = _define_of_family(gated.FAMILY)

# From the overload of each variant to that of its operator.
KERNELS = {defined.overload: operator.overload for operator, defined in _variants.items()}
KERNELS[aten_rms_norm_gated] = gated.FAMILY.plain


def aten_variant(operator: Operator) -> Operator:
    """The operator of the same schema and results whose forward pass is in PyTorch's operators."""
    return _variants[operator]

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

from typing import Any

from torch._ops import OpOverload

from . import autograd, family, formulas, gated, load
from .family import Family
from .norms import NORMS


class _Forward(family.Forward):
    """As the operators' own autograd function, except for the forward pass."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, of: Family, *args: Any) -> Any:
        with autograd.lower_levels():
            found = formulas.computed(of.formula, of.Call(*args))
        return family.Forward.save(ctx, of, args, found)


def _define(of: Family) -> OpOverload:
    defined = load.define_like(of.name, "aten_")

    def implementation(*args: Any) -> Any:
        a = of.Call(*args)
        of.check(a)
        if autograd.in_forward_mode():
            found = of.formula(a)
        elif autograd.needs_grad(*a):
            found = autograd.apply(_Forward, None, of, *a)
        else:
            found = formulas.computed(of.formula, a)
        return of.without_statistics(found)

    load.library.impl(defined._opname, implementation, "CompositeImplicitAutograd")
    family.register_autocast(defined, family.under_autocast(of, defined))
    return defined


# From each operator to its variant, and back.
VARIANTS = {of.plain: _define(of) for of in (*NORMS, gated.FAMILY)}
KERNELS = {variant: operator for operator, variant in VARIANTS.items()}

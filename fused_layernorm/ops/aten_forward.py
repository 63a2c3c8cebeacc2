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

import functools

from torch._ops import OpOverload

from . import autograd, family, load
from .family import Family
from .operators import FORWARD, RMS_NORM_GATED


def _define(of: Family) -> OpOverload:
    defined = load.define_like(of.name, "aten_")
    whole = functools.partial(family.autograd_of(of, of.plain), None)
    load.library.impl(defined._opname, whole, "CompositeImplicitAutograd")
    autograd.register_autocast(defined, of.Call)
    return defined


# From each operator to its variant, and back.
VARIANTS = {of.plain: _define(of) for of in (*FORWARD, RMS_NORM_GATED)}
KERNELS = {variant: operator for operator, variant in VARIANTS.items()}

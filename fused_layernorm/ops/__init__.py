# SPDX-License-Identifier: Apache-2.0
"""The operators' Python half: what csrc does not implement is registered here, by subject."""

from typing import Any

import torch

# These imports register what needs no autograd.
from . import autograd, autograd_library, heads, load, operators, packed  # noqa: F401
from .family import AUTOGRAD, FAMILIES, GRADIENTS, autograd_of


def _register() -> None:
    """Autograd and autocast: of the operators, or where csrc/per_torch has one's autograd, of the
    operator _differentiable_... that it calls for a derivative of a backward operator, and in
    forward mode."""
    implementations = {one: autograd_of(of, one) for of in FAMILIES for one in of.each(of.formula)}
    implementations |= {one: autograd.backward_autograd(one, GRADIENTS[one]) for one in GRADIENTS}
    for operator, implementation in (implementations | AUTOGRAD).items():
        prefix = "_differentiable_" if _is_in_library(operator, "Autograd") else ""
        if prefix:
            load.define_like(operator._opname, prefix)
        load.library.impl(prefix + operator._opname, implementation, "Autograd", with_keyset=True)
    for family in FAMILIES:
        for operator in family.each(family.formula) if family.forward else ():
            if not _is_in_library(operator, "AutocastCUDA"):
                autograd.register_autocast(operator, family.Call)


def _is_in_library(operator: Any, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator._schema.name, key)


autograd_library.load()
_register()

# SPDX-License-Identifier: Apache-2.0
"""decompositions(): the operators in terms of PyTorch's own, for runtimes without this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from .ops import head_formulas, heads, packed
from .ops.family import FAMILIES, GRADIENTS, Family


def decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """A decomposition table from this package's operators to plain ATen, for every device.

    For a program that is to run where the package is not, such as an ONNX runtime::

        program = torch.export.export(model, args)
        program = program.run_decompositions(fused_layernorm.decompositions())
        torch.onnx.export(program, dynamo=True).save("model.onnx")

    Other operators are left as they are. To decompose to core ATen, ``update`` the table of
    ``torch.export.default_decompositions()`` with this one.
    """

    def formula(of: Family) -> Callable[..., Any]:
        return lambda *args: of.formula(of.Call(*args))

    def once(gradients: Callable[..., Any]) -> Callable[..., Any]:
        return torch.no_grad()(gradients)

    return {
        **{one: found for of in FAMILIES for one, found in of.both(formula(of)).items()},
        **{one: once(found) for one, found in GRADIENTS.items()},
        heads.qk_norm_rope: lambda *args: head_formulas.by_formula(
            head_formulas.HeadArguments(*args)
        ),
        heads.qk_norm_rope_backward: once(head_formulas.backward_by_formula),
        packed.qkv_norm_rope: lambda *args: packed.by_formula(packed.PackedArguments(*args))[:2],
        packed.qkv_norm_rope_backward: once(packed.gradients),
    }

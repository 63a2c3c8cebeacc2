# SPDX-License-Identifier: Apache-2.0
"""decompositions(): the operators in terms of PyTorch's own, for runtimes without this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload

from .ops import composite, formulas, heads, load
from .ops.operators import BACKWARD, FORWARD

__all__ = ["decompositions"]


def decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """A decomposition table from this package's operators to plain ATen, for every device.

    For a program that is to run where the package is not, such as an ONNX runtime::

        program = torch.export.export(model, args)
        program = program.run_decompositions(fused_layernorm.decompositions())
        torch.onnx.export(program, dynamo=True).save("model.onnx")

    Other operators are left as they are. To decompose to core ATen, ``update`` the table of
    ``torch.export.default_decompositions()`` with this one.
    """
    table: dict[OpOverload, Callable[..., Any]] = {
        load.add_ada_layer_norm_backward: composite.add_ada_layer_norm_backward,
        load.gate_backward: formulas.gate_backward,
        heads.qk_norm_rope: lambda *args: heads.by_formula(heads.HeadArguments(*args)),
        heads.qk_norm_rope_backward: heads.backward_by_formula,
    }
    for operator in FORWARD:
        table[operator.overload] = operator.implemented_by(formulas.forward)
    for backward in BACKWARD:
        table[backward.overload] = backward.implemented_by(composite.backward)
    return table

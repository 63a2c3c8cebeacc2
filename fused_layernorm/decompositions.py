# SPDX-License-Identifier: Apache-2.0
"""decompositions(): the operators in terms of PyTorch's own, for runtimes without this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from .ops.family import FAMILIES, GRADIENTS


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

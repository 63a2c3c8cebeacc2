# SPDX-License-Identifier: Apache-2.0
"""Calls inside torch.onnx.export, which translates PyTorch's operators alone."""

from __future__ import annotations

from typing import Any

import torch

from . import stock
from .ops import arguments, formulas
from .ops.operators import Arguments


def is_exporting() -> bool:
    return torch.onnx.is_in_onnx_export()


def run(a: Arguments) -> Any:
    """The call in PyTorch's operators: the norm itself where nothing is fused to it.

    The exporter without dynamo knows no rms_norm, and no layer_norm over sizes that are traced.
    """
    arguments.check(a)
    dtypes = {tensor.dtype for tensor in (a.input, a.weight, a.bias) if tensor is not None}
    is_plain = a.is_plain and not a.is_rms and not a.keeps_order
    if is_plain and len(dtypes) == 1 and not torch._C._is_tracing():
        return stock.norm_of(a.input, a)
    found = formulas.forward(a)
    return found[0] if a.residual is None else found[:2]

# SPDX-License-Identifier: Apache-2.0
"""What tools are told of the operators and modules, once a program imports them.

fvcore, ptflops and thop count what they count of nn.LayerNorm, and eager static quantization makes
of LayerNorm and GroupNorm what it makes of PyTorch's.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..groups import FusedGroupNorm
from ..modules import FusedLayerNorm, is_bare
from ..ops.load import NAMESPACE
from ..ops.operators import LAYER_NORM
from .after_import import after_import

# ---- Counters.


def _register_with_fvcore() -> None:
    module: Any = importlib.import_module("fvcore.nn.flop_count")
    of_layer_norm = module._DEFAULT_SUPPORTED_OPS["aten::layer_norm"]

    def count(inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
        is_rms = len(inputs) > 8 and inputs[8].toIValue() == "rms"
        return 0 if is_rms else of_layer_norm(inputs, outputs)  # fvcore does not count F.rms_norm

    module._DEFAULT_SUPPORTED_OPS[f"{NAMESPACE}::{LAYER_NORM.name}"] = count


def _register_by_type(module: str, name: str) -> None:
    """With a tool that looks modules up by their exact class, in a table of this name."""
    table: Any = getattr(importlib.import_module(module), name)
    table[FusedLayerNorm] = table[torch.nn.LayerNorm]


# ---- Eager static quantization.


class _Quantized:
    """What torch.ao.quantization finds for a class: from_float makes the quantized module."""

    def __init__(self, of_pytorch: Any) -> None:
        self.of_pytorch = of_pytorch

    def from_float(self, module: Any) -> Any:
        return self.of_pytorch.from_float(module) if is_bare(module) else module


_QUANTIZATION = "torch.ao.quantization.quantization_mappings"


def _register_with_quantization() -> None:
    table = importlib.import_module(_QUANTIZATION).DEFAULT_STATIC_QUANT_MODULE_MAPPINGS
    for fused, of_pytorch in (
        (FusedLayerNorm, torch.nn.LayerNorm),
        (FusedGroupNorm, torch.nn.GroupNorm),
    ):
        table[fused] = _Quantized(table[of_pytorch])


def _tell(module: str, register: Callable[[], None]) -> None:
    after_import(module, register, f"{module} is not told of fused_layernorm")


_tell("fvcore.nn.flop_count", _register_with_fvcore)
_tell(_QUANTIZATION, _register_with_quantization)
for _tool, _table in (
    ("ptflops.pytorch_ops", "MODULES_MAPPING"),
    ("thop.profile", "register_hooks"),
):
    _tell(_tool, functools.partial(_register_by_type, _tool, _table))

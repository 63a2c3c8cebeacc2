# SPDX-License-Identifier: Apache-2.0
"""What tools are told of the operators and modules, once a program imports them.

ptflops, thop and eager static quantization look a module up by its exact class: where their table
has a class of PyTorch, it gets the class that a swap makes of it. fvcore goes by the names of
operators. Quantization by torch.fx looks classes up in many places, and is shown the stock ones.
"""

from __future__ import annotations

import copy
import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ..modules import is_bare
from ..ops.load import NAMESPACE
from ..ops.operators import LAYER_NORM, GroupArguments
from ..swap import classes
from .after_import import after_import


class _Quantized:
    """What torch.ao.quantization finds for a class: from_float makes the quantized module."""

    def __init__(self, of_pytorch: Any) -> None:
        self.of_pytorch = of_pytorch

    def from_float(self, module: Any, **options: Any) -> Any:
        computes_more = type(module) in classes.OURS and not is_bare(module)
        return module if computes_more else self.of_pytorch.from_float(module, **options)


# By module, the name of its table.
_TABLES = {
    "ptflops.pytorch_ops": "MODULES_MAPPING",
    "thop.profile": "register_hooks",
    "torch.ao.quantization.quantization_mappings": "DEFAULT_STATIC_QUANT_MODULE_MAPPINGS",
}


def _enter(stock: type[nn.Module], ours: type[nn.Module]) -> None:
    for tool, name in _TABLES.items():
        table: Any = getattr(sys.modules.get(tool), name, ())  # a tool may be imported later
        if stock in table:
            entry = table[stock]
            table.setdefault(ours, _Quantized(entry) if tool.startswith("torch.") else entry)


def _enter_all() -> None:
    for stock, ours in (*classes.PLAIN.items(), *classes.made_classes()):
        _enter(stock, ours)


def _register_with_fvcore() -> None:
    counts: Any = importlib.import_module("fvcore.nn.flop_count")._DEFAULT_SUPPORTED_OPS
    of_layer_norm, of_group_norm = counts["aten::layer_norm"], counts["aten::group_norm"]

    def count(inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
        is_rms = len(inputs) > 8 and inputs[8].toIValue() == "rms"
        return 0 if is_rms else of_layer_norm(inputs, outputs)  # fvcore does not count F.rms_norm

    def count_groups(inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
        # Theirs finds the weight, which says whether there are parameters, behind num_groups.
        return of_group_norm([*inputs[:2], inputs[GroupArguments._fields.index("weight")]], outputs)

    counts[f"{NAMESPACE}::{LAYER_NORM.name}"] = count
    counts[f"{NAMESPACE}::group_norm"] = count_groups


# ---- Quantization by torch.fx.


def _register_with_fx_quantization() -> None:
    quantize: Any = importlib.import_module("torch.ao.quantization.quantize_fx")
    prepare = quantize.prepare

    @functools.wraps(prepare)
    def prepare_stock(model: Any, *args: Any, **kwargs: Any) -> Any:
        _show_stock(model)
        return prepare(model, *args, **kwargs)

    quantize.prepare = prepare_stock


def _show_stock(graph_module: nn.Module) -> None:
    """Puts stock modules, which share all they have, in the places of swapped norms.

    The model from which the graph was traced keeps its own.
    """
    shown: dict[nn.Module, nn.Module] = {}
    for name, module in [*graph_module.named_modules(remove_duplicate=False)]:
        stock, own = classes.swapped_from(module), vars(module)
        if stock is None or "_taken_over" in own or any(True for _ in module.children()):
            continue
        if module not in shown:
            one = shown[module] = copy.copy(module)
            dicts = ("_parameters", "_buffers", "_modules")
            vars(one).update({name: copy.copy(own[name]) for name in dicts})
            classes.give_back(one, stock)
        parent, _, attribute = name.rpartition(".")
        graph_module.get_submodule(parent)._modules[attribute] = shown[module]


_TOLD: dict[str, Callable[[], None]] = {
    **dict.fromkeys(_TABLES, _enter_all),
    "fvcore.nn.flop_count": _register_with_fvcore,
    "torch.ao.quantization.quantize_fx": _register_with_fx_quantization,
}
for _module, _register in _TOLD.items():
    after_import(_module, _register, f"{_module} is not told of fused_layernorm")
classes.told_of_classes.append(_enter)

# SPDX-License-Identifier: Apache-2.0
"""What benchmarks.models does with each model: VARIANTS, a row of the table for each treatment."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.ours import package

Around = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Variant:
    """What is done with a model, and the words for it: `prepare` changes a copy of it, `call` may
    compile it, its steps run inside `around`. `applies` says whether a model has the variant."""

    title: str
    prepare: Callable[[nn.Module], object] = lambda model: model
    call: Callable[[nn.Module], Callable[..., Any]] = lambda model: model
    applies: Callable[[nn.Module], object] = lambda model: True
    around: Around = contextlib.nullcontext
    usual: bool = True  # measured where no variants are named


def swap(model: nn.Module, neighbours: bool = True) -> None:
    package().swap_norms(model, neighbours=neighbours)


def has_neighbours(model: nn.Module) -> bool:
    """Whether there is more to swap than norms."""
    found = []
    for neighbours in (False, True):
        swap(model, neighbours)
        found.append([type(module) for module in model.modules()])
        package().unswap_norms(model)
    return found[0] != found[1]


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers that a model repeats: the outermost lists of several modules of one class."""
    children = list(model.children())
    if (isinstance(model, (nn.ModuleList, nn.Sequential)) and len(children) > 1
            and len({*map(type, children)}) == 1 and any(children[0].children())):  # fmt: skip
        return children
    return [layer for child in children for layer in layers_of(child)]


def compile_layers(model: nn.Module) -> nn.Module:
    for layer in layers_of(model):
        layer.compile()
    return model


def liger(model: nn.Module, *, swapped: bool = False, **parts: bool) -> None:
    """Liger's kernels, all but those of `parts` that are False, and perhaps the swap behind them.
    Beside the model Liger changes names in the module of its class; see `prepared`."""
    kernels: Any = importlib.import_module("liger_kernel.transformers")
    kernels._apply_liger_kernel_to_instance(model, **parts)
    if swapped:
        swap(model)


def has_liger(model: nn.Module) -> bool:
    if importlib.util.find_spec("liger_kernel") is None:
        return False
    known: Any = importlib.import_module("liger_kernel.transformers.monkey_patch")
    kind = getattr(getattr(model, "config", None), "model_type", None)
    return kind in known.MODEL_TYPE_TO_APPLY_LIGER_FN


def _compiling(**how: Any) -> Callable[[nn.Module], Callable[..., Any]]:
    return lambda model: torch.compile(model, **how)


_layers: Any = {"call": compile_layers, "applies": layers_of}
_liger: Any = {"applies": has_liger}
_graphs: Any = {"call": _compiling(mode="reduce-overhead"), "usual": False}
_fused = functools.partial(_compiling, backend="fused_layernorm")
# By the names in a results file.
VARIANTS: dict[str, Variant] = {
    "eager": Variant("stock"),
    "compiled": Variant("compiled", call=_compiling()),
    "reduce_overhead": Variant('compiled, mode="reduce-overhead"', **_graphs),
    "layers": Variant("layers compiled", **_layers),
    "swap": Variant("swapped", functools.partial(swap, neighbours=False)),
    "swap_neighbours": Variant("swapped with neighbours", swap, applies=has_neighbours),
    "swap_compiled": Variant("swapped and compiled", swap, _compiling()),
    "swap_reduce_overhead": Variant(
        'swapped and compiled, mode="reduce-overhead"', swap, **_graphs),
    "swap_layers": Variant("swapped, then layers compiled", swap, **_layers),
    "override": Variant("override_aten()", around=lambda: package().override_aten()),
    "fused_compiled": Variant('backend="fused_layernorm", then Inductor', call=_fused()),
    "fused_reduce_overhead": Variant(
        'backend="fused_layernorm", with CUDA graphs', call=_fused(mode="reduce-overhead"),
        usual=False),
    "liger": Variant("Liger", liger, **_liger),
    "liger_rest_swap": Variant(
        "Liger without norms and rotations, then swapped",
        functools.partial(liger, swapped=True, rms_norm=False, rope=False), **_liger),
}  # fmt: skip


def prepared(model: nn.Module, variant: Variant) -> tuple[nn.Module, Around]:
    """A copy of the model as the variant has it, not yet compiled, and what its steps run inside.
    What the variant changed in the module of the model's class holds inside its steps alone."""
    model = copy.deepcopy(model)
    names = vars(sys.modules[type(model).__module__])
    before = dict(names)
    try:
        variant.prepare(model)
    finally:
        changes = {name: names[name] for name in before if names[name] is not before[name]}
        names.update({name: before[name] for name in changes})

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        with variant.around():
            names.update(changes)
            try:
                yield
            finally:
                names.update({name: before[name] for name in changes})

    return model, around

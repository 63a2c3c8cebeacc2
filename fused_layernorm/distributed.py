"""DTensor: how the operators may be sharded.

Rows are independent. An input sharded over any dimension that is not normalized over stays so, with
weight and bias replicated, and nothing is sent; the gradients of weight and bias come out as
partial sums. An input sharded over a normalized dimension is redistributed first.

torch.distributed.tensor takes the better part of a second to import and may be missing from a build
of PyTorch, so the rules are registered when somebody else has imported it.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from .ops import load
from .ops.operators import FORWARD, BackwardArguments, Operator

_DTENSOR = "torch.distributed.tensor"


def register_sharding_rules() -> None:
    """Tell DTensor the rules of every operator."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    def row_dims(x: Any, normalized_ndim: int) -> range:
        return range(x.ndim - normalized_ndim)

    def every(placement: Any, tensors: Sequence[Any]) -> list[Any]:
        return [None if tensor is None else placement for tensor in tensors]

    def forward_rules(operator: Operator) -> Callable[..., list[Any]]:
        def rules(*args: Any, **kwargs: Any) -> list[Any]:
            a = operator.arguments(*args)
            rows = [a.input, a.residual] if operator.takes_residual else [a.input]
            outputs = len(operator.overload._schema.returns)
            return [
                (
                    [placement] * outputs,
                    every(placement, rows) + every(Replicate(), [a.weight, a.bias]),
                )
                for placement in (Replicate(), *map(Shard, row_dims(a.input, a.options[0])))
            ]

        return rules

    for operator in FORWARD:
        register_sharding([operator.overload])(forward_rules(operator))

    @register_sharding([load.layer_norm_backward])
    def _(*args: Any, **kwargs: Any) -> list[Any]:
        b = BackwardArguments(*args)
        rules = []
        for dx in (Replicate(), *map(Shard, row_dims(b.x, b.normalized_ndim))):
            dparameter = Partial() if isinstance(dx, Shard) else Replicate()
            outputs = [
                placement if needed else Replicate()
                for placement, needed in zip((dx, dparameter, dparameter), b.needs, strict=True)
            ]
            inputs = every(dx, [b.dy, b.x, b.mean, b.rstd]) + every(Replicate(), [b.weight, b.bias])
            rules.append((outputs, inputs + every(dx, [b.dresidual])))
        return rules


def _register() -> None:
    try:
        register_sharding_rules()
    except Exception as error:  # an experimental part of PyTorch, which may move
        warnings.warn(
            f"fused_layernorm has no DTensor rules under torch {torch.__version__}: {error!r}",
            stacklevel=2,
        )


class _Finder(MetaPathFinder):
    """Calls a function once, after the module of a name has been imported."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._then)
        return spec


class _Loader(Loader):
    def __init__(self, loader: Loader, then: Callable[[], None]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._then()


if _DTENSOR in sys.modules:
    _register()
else:
    sys.meta_path.insert(0, _Finder(_DTENSOR, _register))

# SPDX-License-Identifier: Apache-2.0
"""The operators of norms over rows, and the one description of a call that all of them serve.

Every operator computes LayerNorm, or RMSNorm with statistic="rms". ada_layer_norm adds a modulation
to layer_norm, and the `add_` operator of each a residual (beside a modulation also a gate).
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torch._ops import OpOverload

from . import load

TENSORS = ("input", "residual", "gate", "shift", "scale", "weight", "bias")


class Arguments(load.Record):
    """One call of a norm: what a function describes once, by `describe`, and all layers below read.

    The fields are the arguments of the operators' schemas (csrc/call/schemas.h), by name; what an
    operator does not take has its default. A record with slots is read and freed in half the time
    of a named tuple.
    """

    __slots__ = _fields = (
        *TENSORS,
        *dict.fromkeys(
            name
            for operator in (load.operators.add_ada_layer_norm, load.operators.layer_norm)
            for name in load.fields_of(operator.default)
            if name not in TENSORS
        ),
        # The one dimension to normalize over, in place of the last ones. The operators do not know
        # it: calls.py moves it to the end of a view, and lets them keep its order.
        "dim",
    )
    dim: int | None

    def _replace(self, **changes: Any) -> Arguments:
        given = {name: getattr(self, name) for name in self._fields}
        return describe(**{**given, **changes})


def _maker() -> str:
    """The source of `describe`: of a function that takes the place of the class's constructor, in
    half its time."""
    defaults = {"normalized_ndim": 1, "eps": 1e-5, "dim": None}
    given = [f"{n}={defaults.get(n, getattr(load.Record, n, None))!r}" for n in Arguments._fields]
    lines = [f"def describe({', '.join(given).replace('input=None', 'input')}):"]
    lines += ["    a = Arguments()", *(f"    a.{name} = {name}" for name in Arguments._fields)]
    return "\n".join([*lines, "    return a"])


if TYPE_CHECKING:

    def describe(input: Any, *given: Any, **named: Any) -> Arguments: ...
else:
    exec(_maker())

# The fields of a description, in their order.
values: Callable[[Arguments], tuple[Any, ...]] = attrgetter(*Arguments._fields)


class Operator:
    """An operator, whose arguments are those of a description by name."""

    def __init__(self, name: str) -> None:
        self.name = name  # without the namespace, as torch.library takes it
        self.overload: OpOverload = getattr(load.operators, name).default
        self.fields = load.fields_of(self.overload)
        # The arguments of a description, in the order of the schema.
        self.lay_out: Callable[[Arguments], tuple[Any, ...]] = attrgetter(*self.fields)


LAYER_NORM, ADD_LAYER_NORM, ADA_LAYER_NORM, ADD_ADA_LAYER_NORM = FORWARD = tuple(
    map(Operator, ("layer_norm", "add_layer_norm", "ada_layer_norm", "add_ada_layer_norm"))
)


def operator_of(a: Arguments) -> Operator:
    """The operator for a call."""
    return FORWARD[2 * a.is_modulated + (a.residual is not None)]

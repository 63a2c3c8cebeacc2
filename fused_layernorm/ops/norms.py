# SPDX-License-Identifier: Apache-2.0
"""The operators of norms over rows, as families, and their backward operators.

Each computes LayerNorm or RMSNorm: layer_norm and ada_layer_norm, and both behind a sum (add_...).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from . import arguments, autograd, formulas, load
from .family import AUTOGRAD, GRADIENTS, Family, gradients, implement_backward, implement_forward
from .operators import FORWARD

_PLAIN, _MODULATED = load.layer_norm_backward, load.ada_layer_norm_backward
_GATED, _GATE = load.add_ada_layer_norm_backward, load.gate_backward
Backward = Callable[..., tuple[Tensor, ...]]

NORMS = tuple(
    Family(
        one.name,
        arguments.check,
        formulas.forward,
        _MODULATED if "shift" in one.fields else _PLAIN,
        _GATED if "gate" in one.fields else None,
    )
    for one in FORWARD
)
for _family in NORMS:
    implement_forward(_family)


def _of_gate(b: Any, once: bool) -> tuple[Tensor]:
    """The product of input and gate, of which gate_backward has the gradient."""
    acc = formulas.acc_dtype(b[0].dtype, b.input.dtype, b.gate.dtype)
    return ((b.input.to(acc) * b.gate.to(acc)).to(b[0].dtype),)


_OfNorm, _OfBoth = load.call_of(_MODULATED), load.call_of(_GATED)


def _in_turn(of_norm: Backward, of_gate: Backward) -> Backward:
    """add_ada_layer_norm_backward as the two operators whose work it does."""

    def implementation(*args: Any) -> tuple[Tensor, ...]:
        g = _OfBoth(*args)
        needs_gate = g.needs_dinput or g.needs_dgate
        norm = g._replace(needs_dx=g.needs_dx or needs_gate)
        dx, *others = of_norm(*(getattr(norm, name) for name in _OfNorm._fields))
        gates: Any = (g.input.new_empty((0,)), g.gate.new_empty((0,)))
        if needs_gate:
            gates = of_gate(dx, g.input, g.gate, g.needs_dinput, g.needs_dgate)
        return (dx if g.needs_dx else g.x.new_empty((0,)), *gates, *others)

    return implementation


for _operator, _of in (
    (_PLAIN, formulas.of_backward),
    (_MODULATED, formulas.of_backward),
    (_GATE, _of_gate),
):
    implement_backward(_operator, gradients(_operator, _of), NORMS[3])
implement_backward(_GATED, _in_turn(GRADIENTS[_MODULATED], GRADIENTS[_GATE]), NORMS[3])
_operators_in_turn = _in_turn(_MODULATED, _GATE)


def _autograd(keyset: Any, *args: Any) -> tuple[Tensor, ...]:
    if autograd.in_forward_mode() or autograd.needs_grad(*args):
        return _operators_in_turn(*args)
    return autograd.redispatch(_GATED, keyset, *args)


AUTOGRAD[_GATED] = _autograd

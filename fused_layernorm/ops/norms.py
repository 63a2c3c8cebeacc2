# SPDX-License-Identifier: Apache-2.0
"""The operators of norms as families, and their backward operators, implemented.

Each computes LayerNorm or RMSNorm: layer_norm and ada_layer_norm, and both behind a sum (add_...).
What the implementations share is in operators.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from . import arguments, composite, fakes, formulas, load, vmap
from .autograd import in_forward_mode, needs_grad, redispatch
from .family import AUTOGRAD, FAMILIES, GRADIENTS, Family, fake_backward, implement, tensors_of
from .operators import (
    ADA_LAYER_NORM_BACKWARD,
    BACKWARD,
    FORWARD,
    Arguments,
    Operator,
    Results,
    gated_backward,
)


def _family(plain: Operator, forward: Operator) -> Family:
    def as_outputs(implementation: Callable[[Arguments], Results]) -> Callable[[Any], Any]:
        of_operator = forward.implemented_by(implementation)
        return lambda a: of_operator(*a)

    return Family(
        plain.name,
        load.call_of(plain.overload),
        lambda a: arguments.check(plain.arguments(*a)),
        as_outputs(formulas.forward),
        load.ada_layer_norm_backward if plain.is_modulated else load.layer_norm_backward,
        load.add_ada_layer_norm_backward if "gate" in plain.fields else None,
        as_outputs(composite.forward),
    )


NORMS = tuple(map(_family, FORWARD[::2], FORWARD[1::2]))
FAMILIES += NORMS

for _operator in FORWARD:
    implement(
        _operator.overload,
        _operator.implemented_by(composite.checked_forward),
        _operator.implemented_by(fakes.forward),
        vmap.forward_rule(_operator),
    )
for _backward in BACKWARD:
    GRADIENTS[_backward.overload] = _backward.implemented_by(formulas.backward)
    implement(
        _backward.overload,
        _backward.implemented_by(composite.backward),
        _backward.implemented_by(fakes.backward),
        vmap.backward_rule(_backward),
    )
GRADIENTS[load.gate_backward] = formulas.gate_backward
_fake_gate = fake_backward(load.gate_backward)
implement(load.gate_backward, composite.gate_backward, _fake_gate, vmap.gate_backward_rule)
_ada = ADA_LAYER_NORM_BACKWARD.implemented_by
GRADIENTS[load.add_ada_layer_norm_backward] = gated_backward(
    _ada(formulas.backward), formulas.gate_backward
)
implement(
    load.add_ada_layer_norm_backward,
    gated_backward(_ada(composite.backward), composite.gate_backward, checks=True),
    gated_backward(_ada(fakes.backward), _fake_gate),
    None,
)
# Under vmap, and where the gradients are to be differentiated, it makes the two calls whose work it
# does; the operators called have rules and derivatives.
_two = gated_backward(load.ada_layer_norm_backward, load.gate_backward)
load.library.impl("add_ada_layer_norm_backward", _two, "FuncTorchBatched")


def _autograd(keyset: Any, *args: Any) -> tuple[Tensor, ...]:
    if in_forward_mode() or needs_grad(*tensors_of(args)):
        return _two(*args)
    return redispatch(load.add_ada_layer_norm_backward, keyset, *args)


AUTOGRAD[load.add_ada_layer_norm_backward] = _autograd

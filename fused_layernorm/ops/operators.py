# SPDX-License-Identifier: Apache-2.0
"""The operators of norms: of rows, of groups of channels, and gated.

Those of rows, whose calls one description serves, compute LayerNorm, or RMSNorm with
statistic="rms". ada_layer_norm adds a modulation to layer_norm, and the `add_` operator of each a
residual (beside a modulation also a gate).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from . import arguments, autograd, family, formulas, load
from .family import AUTOGRAD, GRADIENTS, Family, gradients, implement_backward

TENSORS = ("input", "residual", "gate", "shift", "scale", "weight", "bias")
_WIDEST = (load.operator("add_ada_layer_norm"), load.layer_norm)  # they take all between them
_FIELDS = [*TENSORS, *(name for one in _WIDEST for name in formulas.fields_of(one))]


class Arguments(formulas.Record):
    """One call of a norm: what a function describes once, by `describe`, and all layers below read.

    The fields are the arguments of the operators' schemas (csrc/call/schemas.h), by name; what an
    operator does not take has its default. Slots halve the time to read and free it.
    """

    __slots__ = _fields = tuple(dict.fromkeys(_FIELDS))

    def _replace(self, **changes: Any) -> Arguments:
        given = {name: getattr(self, name) for name in self._fields}
        return describe(**{**given, **changes})


def _maker() -> str:
    """The source of `describe`, which takes half the time of the class's constructor."""
    defaults = {"normalized_ndim": 1, "eps": 1e-5}
    given = [
        f"{n}={defaults.get(n, getattr(formulas.Record, n, None))!r}" for n in Arguments._fields
    ]
    lines = [f"def describe({', '.join(given).replace('input=None', 'input')}):"]
    lines += ["    a = Arguments()", *(f"    a.{name} = {name}" for name in Arguments._fields)]
    return "\n".join([*lines, "    return a"])


if TYPE_CHECKING:

    def describe(input: Any, *given: Any, **named: Any) -> Arguments: ...
else:
    exec(_maker())

# The fields of a description, in their order.
values: Callable[[Arguments], tuple[Any, ...]] = attrgetter(*Arguments._fields)


def _caller(of: Family) -> Callable[[Arguments], Any]:
    """The call of an operator, of what is described, that takes the host least time.

    It is written out from the schema. Arguments that have their defaults, all of them or all from
    the statistic on, are not given: they would cost a microsecond.
    """
    schema, fields = of.plain._schema.arguments, [f"a.{name}" for name in of.fields]

    def have_defaults(first: int) -> str:
        options = zip(fields[first:], schema[first:], strict=True)
        return " and ".join(
            f"{field} {'is' if a.default_value is None else '=='} {a.default_value!r}"
            for field, a in options
        )

    def call(count: int) -> str:
        return f"op({', '.join(fields[:count])})"

    optional = sum(not a.has_default_value() for a in schema)
    statistic = of.fields.index("statistic")
    source = (
        f"lambda a: {call(len(fields))} if not ({have_defaults(statistic)}) else "
        f"{call(optional)} if {have_defaults(optional)} else {call(statistic)}"
    )
    return eval(source, {"op": of.plain._op})


class Rows(Family):
    """The norms of rows: LayerNorm, or RMSNorm, with what `Arguments` has beside it."""

    call: Any = functools.cached_property(_caller)

    def in_onnx(self, a: Any, is_tracing: bool) -> Any:
        """The norm itself where nothing is fused to it. By tracing there is no rms_norm, nor a
        layer_norm over sizes that are traced."""
        dtypes = {tensor.dtype for tensor in (a.input, a.weight, a.bias) if tensor is not None}
        is_plain = a.is_plain and not a.is_rms and not a.keeps_order
        if is_plain and len(dtypes) == 1 and not is_tracing:
            return formulas.norm_of(a, a.input)
        return super().in_onnx(a, is_tracing)


# The operators for calls by whether they are modulated, and then by whether there is a residual.
LAYER_NORM, ADD_LAYER_NORM, ADA_LAYER_NORM, ADD_ADA_LAYER_NORM = FORWARD = tuple(
    Rows(name, arguments.check, formulas.rows)
    for name in ("layer_norm", "add_layer_norm", "ada_layer_norm", "add_ada_layer_norm")
)


class Groups(Family):
    """Groups of channels, whose results lie as input does."""

    folds = True

    def statistics(self, a: Any) -> Any:
        return a.input.shape[0], a.num_groups

    def in_onnx(self, a: Any, is_tracing: bool) -> Tensor:
        dtypes = {t.dtype for t in (a.input, *a[2:6]) if t is not None}
        is_one = a.is_plain and len(dtypes) == 1
        acc = a.input.dtype if is_one else formulas.acc_dtype(a.input.dtype)
        x, weight, bias = a.input.to(acc), formulas.to(a.weight, acc), formulas.to(a.bias, acc)
        return formulas.group_epilogue(a, torch.group_norm(x, a.num_groups, weight, bias, a.eps))


class Gated(Family):
    """RMSNorm with a gate. A group_size of 0 is all columns."""

    def statistics(self, a: Any) -> Any:
        columns = a.input.shape[-1]
        return (*a.input.shape[:-1], columns // a.group_size if a.group_size else 1)


GROUP_NORM = Groups("group_norm", arguments.check_group_norm, formulas.groups)
RMS_NORM_GATED = Gated("rms_norm_gated", arguments.check, formulas.gated)
GroupArguments, GatedArguments = GROUP_NORM.Call, RMS_NORM_GATED.Call
for _call in (GroupArguments, formulas.call_of(GROUP_NORM.backward)):
    _call.keeps_order = True
for _call in (GatedArguments, formulas.call_of(RMS_NORM_GATED.backward)):
    _call.statistic, _call.normalized_ndim = "rms", 1


def operator_of(a: Arguments) -> Family:
    """The operator for a call."""
    return FORWARD[2 * a.is_modulated + (a.residual is not None)]


def _of_gate(b: Any, once: bool) -> tuple[Tensor]:
    """The product of input and gate, of which gate_backward has the gradient."""
    acc = formulas.acc_dtype(b.dresidual_out.dtype, b.input.dtype, b.gate.dtype)
    return ((b.input.to(acc) * b.gate.to(acc)).to(b.dresidual_out.dtype),)


_PLAIN, _MODULATED = LAYER_NORM.backward, ADA_LAYER_NORM.backward
_GATED, _GATE = ADD_ADA_LAYER_NORM.gated_backward, load.gate_backward
_OfNorm, _OfBoth = formulas.call_of(_MODULATED), formulas.call_of(_GATED)


def _in_turn(of_norm: Any, of_gate: Any) -> Any:
    """add_ada_layer_norm_backward as the two operators whose work it does."""

    def implementation(*args: Any) -> tuple[Tensor, ...]:
        g = _OfBoth(*args)
        needs_gate = g.needs_dinput or g.needs_dgate
        norm = g._replace(needs_dx=g.needs_dx or needs_gate)
        dx, *others = of_norm(*(getattr(norm, name) for name in _OfNorm._fields))
        gates: Any = (g.input.new_empty((0,)), g.gate.new_empty((0,)))
        if needs_gate:
            gates = of_gate(dx, g.input, g.gate, g.needs_dinput, g.needs_dgate)
        return dx if g.needs_dx else g.x.new_empty((0,)), *gates, *others

    return implementation


_operators_in_turn = _in_turn(_MODULATED, _GATE)


def _autograd(keyset: Any, *args: Any) -> tuple[Tensor, ...]:
    if autograd.in_forward_mode() or autograd.needs_grad(*args):
        return _operators_in_turn(*args)
    return autograd.redispatch(_GATED, keyset, *args)


for _family in FORWARD:
    family.implement_forward(_family)
for _operator in (_PLAIN, _MODULATED):
    implement_backward(_operator, gradients(_operator, formulas.rows), ADD_ADA_LAYER_NORM)
implement_backward(_GATE, gradients(_GATE, _of_gate), ADD_ADA_LAYER_NORM)
implement_backward(_GATED, _in_turn(GRADIENTS[_MODULATED], GRADIENTS[_GATE]), ADD_ADA_LAYER_NORM)
AUTOGRAD[_GATED] = _autograd
family.implement(GROUP_NORM)
family.implement(RMS_NORM_GATED)


# ---- The aten_ variants: forward pass in PyTorch's operators, backward pass in this package's.
# ---- Under torch.compile an opaque forward operator keeps Inductor from fusing what is around it,
# ---- and at many widths Inductor's forward kernel is as fast; our backward kernels are faster at
# ---- every width. They are operators, not a torch.autograd.Function, so that AOTAutograd's cache
# ---- can keep a graph with them, each under a name of its own.


def _variant(of: Family) -> OpOverload:
    """The operator aten_NAME, of NAME's schema."""
    defined = load.define_like(of.name, "aten_")
    whole = functools.partial(family.autograd_of(of, of.plain), None)
    load.library.impl(defined._opname, whole, "CompositeImplicitAutograd")
    autograd.register_autocast(defined, of.Call)
    return defined


# From each operator to its variant, and back.
VARIANTS = {of.plain: _variant(of) for of in (*FORWARD, RMS_NORM_GATED)}
KERNELS = {variant: operator for operator, variant in VARIANTS.items()}

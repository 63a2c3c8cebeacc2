# SPDX-License-Identifier: Apache-2.0
"""One form for all forward operators, and one for all backward operators, with named values.

Every operator computes LayerNorm, or RMSNorm with statistic="rms". ada_layer_norm adds a modulation
to layer_norm. The `add_` operator of each adds a residual (beside a modulation also a gate), and
the `_forward` operator of each of these four also gives the statistics that backward needs. An
implementation (composite, fake, vmap rule) is written once, from `Arguments` to `Results`;
`Operator` knows how the operators lay these out. In the same way `BackwardOperator` goes with
`BackwardArguments` and `Gradients`. add_ada_layer_norm_backward does the work of two calls in turn,
and is built from implementations of the called operators by `gated_backward`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from . import load


@dataclasses.dataclass(slots=True, eq=False)
class Arguments:
    """One call of a norm: what a function describes once, by `describe`, and all layers below read.

    The fields are the arguments of the forward operators' schemas (csrc/call/schemas.h), by
    name; what an operator does not take has its default. (layer_norm's number `scale` is
    output_scale here, because `scale` is that of a modulation.) An argument that is added to a
    schema and here reaches every implementation.

    A record with slots is read and freed in half the time of a NamedTuple, whose _fields and
    _replace it has.
    """

    input: Tensor
    residual: Tensor | None = None
    gate: Tensor | None = None
    shift: Tensor | None = None
    scale: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    normalized_ndim: int = 1
    eps: float = 1e-5
    activation: str | None = None
    output_scale: float = 1.0
    out_dtype: torch.dtype | None = None
    statistic: str = "layer"
    weight_offset: float = 0.0
    round_before_weight: bool = False
    keeps_order: bool = False  # y has the strides of torch.empty_like(input)
    # The one dimension to normalize over, in place of the last ones. The operators do not know it:
    # calls.py moves it to the end of a view, and lets them keep its order.
    dim: int | None = None

    _fields = tuple(__annotations__)

    def _replace(self, **changes: Any) -> Arguments:
        given = {name: getattr(self, name) for name in self._fields}
        return describe(**{**given, **changes})

    @property
    def options(self) -> tuple[Any, ...]:
        """All that is no tensor."""
        return tuple(getattr(self, name) for name in self._fields if name not in TENSORS)

    @property
    def is_rms(self) -> bool:
        """Whether the norm is RMSNorm, which has no mean."""
        return self.statistic == "rms"

    @property
    def normalized_shape(self) -> torch.Size:
        return self.input.shape[self.input.dim() - self.normalized_ndim :]

    @property
    def is_modulated(self) -> bool:
        """Whether only the ada operators take this call."""
        return self.gate is not None or self.shift is not None or self.scale is not None

    @property
    def x_dtype(self) -> torch.dtype:
        """The dtype of what is normalized: the residual stream's, where there is one."""
        return self.input.dtype if self.residual is None else self.residual.dtype

    @property
    def y_dtype(self) -> torch.dtype:
        return self.out_dtype or self.input.dtype

    @property
    def rounds_xhat(self) -> bool:
        """Whether xhat is rounded to input's dtype, for the sake of a weight."""
        return self.round_before_weight and self.weight is not None


TENSORS = ("input", "residual", "gate", "shift", "scale", "weight", "bias")


def _maker() -> str:
    """The source of `describe`: of a function that takes the place of the class's constructor, in
    half its time."""
    given = [
        f.name if f.default is dataclasses.MISSING else f"{f.name}={f.default!r}"
        for f in dataclasses.fields(Arguments)
    ]
    lines = [f"def describe({', '.join(given)}):", "    a = Arguments()"]
    lines += [f"    a.{name} = {name}" for name in Arguments._fields]
    return "\n".join([*lines, "    return a"])


if TYPE_CHECKING:
    describe = Arguments
else:
    del Arguments.__init__
    exec(_maker())

# The fields of a description, in their order.
values: Callable[[Arguments], tuple[Any, ...]] = attrgetter(*Arguments._fields)


class Results(NamedTuple):
    """What the forward operators give; residual_out is None without a residual.

    RMSNorm's mean is an empty tensor of shape (0,).
    """

    y: Tensor
    residual_out: Tensor | None
    mean: Tensor
    rstd: Tensor


def _fields_of(overload: OpOverload) -> list[str]:
    """The fields of a description that an operator takes, in the order of its schema."""
    return [
        "output_scale" if a.name == "scale" and isinstance(a.type, torch.FloatType) else a.name
        for a in overload._schema.arguments
    ]


class _Laid:
    """An operator, whose arguments by name are converted to the layout of its schema, and back."""

    def __init__(self, overload: OpOverload) -> None:
        self.overload = overload
        self.name = overload._opname  # without the namespace, as torch.library takes it
        self.fields = _fields_of(overload)
        self._read = attrgetter(*self.fields)

    def lay_out(self, call: Any) -> tuple[Any, ...]:
        """The reverse of `arguments`."""
        return self._read(call)


class Operator(_Laid):
    """A forward operator."""

    def __init__(self, overload: OpOverload) -> None:
        super().__init__(overload)
        self.has_residual = "residual" in self.fields
        self.is_modulated = "shift" in self.fields
        self.gives_statistics = self.name.endswith("_forward")

    def arguments(self, *args: Any) -> Arguments:
        """The operator's arguments by name; the last ones may be absent."""
        return describe(**dict(zip(self.fields, args, strict=False)))

    def outputs(self, r: Results) -> Any:
        """The results that the operator gives: a tensor or a tuple of tensors."""
        rows = (r.y, r.residual_out) if self.has_residual else (r.y,)
        found = (*rows, r.mean, r.rstd) if self.gives_statistics else rows
        return found if len(found) > 1 else r.y

    def results(self, outputs: Sequence[Any]) -> Results:
        """The reverse of `outputs`, for an operator that gives statistics."""
        y, *residual_out, mean, rstd = outputs
        return Results(y, residual_out[0] if residual_out else None, mean, rstd)

    def implemented_by(self, implementation: Callable[[Arguments], Results]) -> Callable[..., Any]:
        """The implementation as a function of the operator's arguments."""

        def implemented(*args: Any) -> Any:
            return self.outputs(implementation(self.arguments(*args)))

        implemented.__name__ = self.name
        return implemented


FORWARD = tuple(
    Operator(getattr(load.operators, name + suffix).default)
    for name in ("layer_norm", "add_layer_norm", "ada_layer_norm", "add_ada_layer_norm")
    for suffix in ("", "_forward")
)
LAYER_NORM, ADD_LAYER_NORM, ADA_LAYER_NORM, ADD_ADA_LAYER_NORM = FORWARD[::2]
_BY_FLAGS = {(one.has_residual, one.gives_statistics, one.is_modulated): one for one in FORWARD}


def operator_of(a: Arguments, *, gives_statistics: bool = False) -> Operator:
    """The operator for a call, or the one for a forward pass that a backward pass follows."""
    return _BY_FLAGS[a.residual is not None, gives_statistics, a.is_modulated]


class Gradients(NamedTuple):
    """What the backward operators give; None stands for a gradient that is not needed."""

    dx: Tensor | None = None
    dshift: Tensor | None = None
    dscale: Tensor | None = None
    dweight: Tensor | None = None
    dbias: Tensor | None = None


class BackwardArguments(NamedTuple):
    """One call of a backward operator; what the operator does not take is None."""

    dy: Tensor
    x: Tensor
    normalized_ndim: int
    mean: Tensor
    rstd: Tensor
    weight: Tensor | None
    bias: Tensor | None
    dresidual: Tensor | None
    activation: str | None = None
    output_scale: float = 1.0
    shift: Tensor | None = None
    scale: Tensor | None = None
    statistic: str = "layer"
    weight_offset: float = 0.0
    keeps_order: bool = False
    needs_dx: bool = False
    needs_dshift: bool = False
    needs_dscale: bool = False
    needs_dweight: bool = False
    needs_dbias: bool = False

    @property
    def is_rms(self) -> bool:
        return self.statistic == "rms"

    @property
    def normalized_shape(self) -> torch.Size:
        return self.x.shape[self.x.dim() - self.normalized_ndim :]

    @property
    def parameter_dtype(self) -> torch.dtype:
        """The dtype of dweight and dbias: that of weight, else of bias, else of x."""
        if self.weight is not None:
            return self.weight.dtype
        return self.x.dtype if self.bias is None else self.bias.dtype

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of the gradients, in the order of `Gradients`."""
        dshift, dscale = (
            self.x.dtype if tensor is None else tensor.dtype for tensor in (self.shift, self.scale)
        )
        return self.x.dtype, dshift, dscale, self.parameter_dtype, self.parameter_dtype


class BackwardOperator(_Laid):
    """A backward operator."""

    def __init__(self, overload: OpOverload) -> None:
        super().__init__(overload)
        # The names of the gradients that the operator gives; needs_dx says if dx is asked for.
        self.gradients = [g for g in Gradients._fields if f"needs_{g}" in self.fields]

    def arguments(self, *args: Any) -> BackwardArguments:
        """The operator's arguments by name; the last ones may be absent."""
        return BackwardArguments(**dict(zip(self.fields, args, strict=False)))

    def outputs(self, b: BackwardArguments, found: Gradients) -> tuple[Tensor, ...]:
        """The gradients that the operator gives, with an empty tensor for each that is None."""
        dtypes = dict(zip(Gradients._fields, b.dtypes, strict=True))
        return tuple(
            b.x.new_empty((0,), dtype=dtypes[name]) if gradient is None else gradient
            for name in self.gradients
            for gradient in (getattr(found, name),)
        )

    def results(self, b: BackwardArguments, outputs: Sequence[Tensor]) -> Gradients:
        """The reverse of `outputs`."""
        named = dict(zip(self.gradients, outputs, strict=True))
        return Gradients(**{name: named[name] for name in named if getattr(b, f"needs_{name}")})

    def implemented_by(
        self, implementation: Callable[[BackwardArguments], Gradients]
    ) -> Callable[..., tuple[Tensor, ...]]:
        """The implementation as a function of the operator's arguments."""

        def implemented(*args: Any) -> tuple[Tensor, ...]:
            b = self.arguments(*args)
            return self.outputs(b, implementation(b))

        implemented.__name__ = self.name
        return implemented


LAYER_NORM_BACKWARD = BackwardOperator(load.layer_norm_backward)
ADA_LAYER_NORM_BACKWARD = BackwardOperator(load.ada_layer_norm_backward)
BACKWARD = (LAYER_NORM_BACKWARD, ADA_LAYER_NORM_BACKWARD)


_GatedBackward = load.call_of(load.add_ada_layer_norm_backward)


def gated_backward(
    ada_layer_norm_backward: Callable[..., Any],
    gate_backward: Callable[..., Any],
    *,
    checks: bool = False,
) -> Callable[..., tuple[Tensor, ...]]:
    """add_ada_layer_norm_backward as these two operators, one after the other.

    With `checks` gate_backward sees its arguments even where neither of its results is wanted.
    """

    def add_ada_layer_norm_backward(*args: Any) -> tuple[Tensor, ...]:
        g = _GatedBackward(*args)
        needs_gate_backward = g.needs_dinput or g.needs_dgate
        of_norm = g._replace(needs_dx=g.needs_dx or needs_gate_backward)
        dx, *gradients = ada_layer_norm_backward(
            *(getattr(of_norm, name) for name in ADA_LAYER_NORM_BACKWARD.fields)
        )
        if needs_gate_backward:
            of_gate = gate_backward(dx, g.input, g.gate, g.needs_dinput, g.needs_dgate)
        elif checks:  # x stands for its own gradient
            of_gate = gate_backward(g.x, g.input, g.gate, False, False)
        else:
            of_gate = (g.input.new_empty((0,)), g.gate.new_empty((0,)))
        return (dx if g.needs_dx else g.x.new_empty((0,)), *of_gate, *gradients)

    return add_ada_layer_norm_backward

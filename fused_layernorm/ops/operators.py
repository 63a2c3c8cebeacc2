# SPDX-License-Identifier: Apache-2.0
"""One form for all forward operators, and one for all backward operators, with named values.

Every operator computes LayerNorm, or RMSNorm with statistic="rms". ada_layer_norm adds a modulation
to layer_norm. The `add_` operator of each adds a residual (beside a modulation also a gate), and
the `_forward` operator of each of these four also gives the statistics that backward needs. An
implementation (composite, fake, vmap rule, autograd) is written once, from `Arguments` to
`Results`; `Operator` knows how the operators lay these out. In the same way `BackwardOperator` goes
with `BackwardArguments` and `Gradients`. add_ada_layer_norm_backward does the work of two calls in
turn, and is built from implementations of the called operators by `gated_backward`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from . import load


class Options(NamedTuple):
    """The arguments that are no tensors; output_scale is layer_norm's `scale`.

    The operators with a modulation have neither activation nor output_scale. Only layer_norm and
    layer_norm_forward have keeps_order, by which y has the strides of torch.empty_like(input).
    """

    normalized_ndim: int
    eps: float
    activation: str | None = None
    output_scale: float = 1.0
    out_dtype: torch.dtype | None = None
    statistic: str = "layer"
    weight_offset: float = 0.0
    round_before_weight: bool = False
    keeps_order: bool = False

    @property
    def is_rms(self) -> bool:
        """Whether the norm is RMSNorm, which has no mean."""
        return self.statistic == "rms"


class Arguments(NamedTuple):
    """One call of a forward operator; what the operator does not take is None."""

    input: Tensor
    residual: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    options: Options
    gate: Tensor | None = None
    shift: Tensor | None = None
    scale: Tensor | None = None

    @property
    def normalized_shape(self) -> torch.Size:
        return self.input.shape[self.input.dim() - self.options.normalized_ndim :]

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
        return self.options.out_dtype or self.input.dtype

    @property
    def rounds_xhat(self) -> bool:
        """Whether xhat is rounded to input's dtype, for the sake of a weight."""
        return self.options.round_before_weight and self.weight is not None


class Results(NamedTuple):
    """What the forward operators give; residual_out is None without a residual.

    RMSNorm's mean is an empty tensor of shape (0,).
    """

    y: Tensor
    residual_out: Tensor | None
    mean: Tensor
    rstd: Tensor


class Operator(NamedTuple):
    """A forward operator, with conversions from and to the layout of its schema."""

    overload: OpOverload
    takes_residual: bool
    gives_statistics: bool
    takes_modulation: bool = False

    @property
    def name(self) -> str:
        """The name without the namespace, as torch.library takes it."""
        return self.overload._opname

    def arguments(self, *args: Any) -> Arguments:
        """The operator's arguments by name; trailing defaults may be absent."""
        input, *rest = args
        residual = rest.pop(0) if self.takes_residual else None
        if not self.takes_modulation:
            normalized_ndim, weight, bias, *others = rest
            return Arguments(input, residual, weight, bias, Options(normalized_ndim, *others))
        gate = rest.pop(0) if self.takes_residual else None
        normalized_ndim, shift, scale, weight, bias, eps, *others = rest
        options = Options(normalized_ndim, eps, None, 1.0, *others)
        return Arguments(input, residual, weight, bias, options, gate, shift, scale)

    def lay_out(self, a: Arguments) -> tuple[Any, ...]:
        """The reverse of `arguments`."""
        rows = (a.input, a.residual) if self.takes_residual else (a.input,)
        ndim, eps, *others, keeps_order = a.options
        if not self.takes_modulation:
            order = () if self.takes_residual else (keeps_order,)
            return (*rows, ndim, a.weight, a.bias, eps, *others, *order)
        gate = (a.gate,) if self.takes_residual else ()
        return (*rows, *gate, ndim, a.shift, a.scale, a.weight, a.bias, eps, *others[2:])

    def outputs(self, r: Results) -> Any:
        """The results that the operator gives: a tensor or a tuple of tensors."""
        rows = (r.y, r.residual_out) if self.takes_residual else (r.y,)
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


LAYER_NORM = Operator(load.layer_norm, takes_residual=False, gives_statistics=False)
LAYER_NORM_FORWARD = Operator(load.layer_norm_forward, takes_residual=False, gives_statistics=True)
ADD_LAYER_NORM = Operator(load.add_layer_norm, takes_residual=True, gives_statistics=False)
ADD_LAYER_NORM_FORWARD = Operator(
    load.add_layer_norm_forward, takes_residual=True, gives_statistics=True
)
ADA_LAYER_NORM = Operator(load.ada_layer_norm, False, False, takes_modulation=True)
ADA_LAYER_NORM_FORWARD = Operator(load.ada_layer_norm_forward, False, True, takes_modulation=True)
ADD_ADA_LAYER_NORM = Operator(load.add_ada_layer_norm, True, False, takes_modulation=True)
ADD_ADA_LAYER_NORM_FORWARD = Operator(
    load.add_ada_layer_norm_forward, True, True, takes_modulation=True
)
FORWARD = (
    LAYER_NORM,
    LAYER_NORM_FORWARD,
    ADD_LAYER_NORM,
    ADD_LAYER_NORM_FORWARD,
    ADA_LAYER_NORM,
    ADA_LAYER_NORM_FORWARD,
    ADD_ADA_LAYER_NORM,
    ADD_ADA_LAYER_NORM_FORWARD,
)


_BY_FLAGS = {operator[1:]: operator for operator in FORWARD}


def operator_of(a: Arguments, *, gives_statistics: bool = False) -> Operator:
    """The operator for a call, or the one for a forward pass that a backward pass follows."""
    return _BY_FLAGS[a.residual is not None, gives_statistics, a.is_modulated]


class Needs(NamedTuple):
    """Which gradients a backward operator is asked for."""

    dx: bool
    dshift: bool
    dscale: bool
    dweight: bool
    dbias: bool


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
    needs: Needs
    activation: str | None = None
    output_scale: float = 1.0
    shift: Tensor | None = None
    scale: Tensor | None = None
    statistic: str = "layer"
    weight_offset: float = 0.0
    keeps_order: bool = False

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


class BackwardOperator(NamedTuple):
    """A backward operator, with conversions from and to the layout of its schema."""

    overload: OpOverload
    takes_modulation: bool

    @property
    def name(self) -> str:
        """The name without the namespace, as torch.library takes it."""
        return self.overload._opname

    @property
    def gradients(self) -> tuple[str, ...]:
        """The names of the gradients that the operator gives."""
        return Gradients._fields if self.takes_modulation else ("dx", "dweight", "dbias")

    def arguments(self, *args: Any) -> BackwardArguments:
        """The operator's arguments by name."""
        if self.takes_modulation:
            rows, (shift, scale), others = args[:5], args[5:7], args[7:10]
            needs, kind = Needs(*args[10:15]), args[15:]
            named = (*rows, *others, needs, None, 1.0, shift, scale, *kind)
            return BackwardArguments(*named)
        tensors, (activation, output_scale), kind = args[:8], args[8:10], args[13:]
        dx, dweight, dbias = args[10:13]
        needs = Needs(dx, False, False, dweight, dbias)
        named = (*tensors, needs, activation, output_scale, None, None, *kind)
        return BackwardArguments(*named)

    def lay_out(self, b: BackwardArguments) -> tuple[Any, ...]:
        """The reverse of `arguments`."""
        rows, kind = (b.dy, b.x, b.normalized_ndim, b.mean, b.rstd), (b.statistic, b.weight_offset)
        if self.takes_modulation:
            return (*rows, b.shift, b.scale, b.weight, b.bias, b.dresidual, *b.needs, *kind)
        needs = (b.needs.dx, b.needs.dweight, b.needs.dbias)
        others = (b.activation, b.output_scale, *needs, *kind, b.keeps_order)
        return (*rows, b.weight, b.bias, b.dresidual, *others)

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
        return Gradients(**{name: named[name] for name in named if getattr(b.needs, name)})

    def implemented_by(
        self, implementation: Callable[[BackwardArguments], Gradients]
    ) -> Callable[..., tuple[Tensor, ...]]:
        """The implementation as a function of the operator's arguments."""

        def implemented(*args: Any) -> tuple[Tensor, ...]:
            b = self.arguments(*args)
            return self.outputs(b, implementation(b))

        implemented.__name__ = self.name
        return implemented


LAYER_NORM_BACKWARD = BackwardOperator(load.layer_norm_backward, takes_modulation=False)
ADA_LAYER_NORM_BACKWARD = BackwardOperator(load.ada_layer_norm_backward, takes_modulation=True)
BACKWARD = (LAYER_NORM_BACKWARD, ADA_LAYER_NORM_BACKWARD)


def backward_of(shift: Tensor | None, scale: Tensor | None) -> BackwardOperator:
    """The backward operator of a norm with this modulation."""
    return LAYER_NORM_BACKWARD if shift is None and scale is None else ADA_LAYER_NORM_BACKWARD


class GatedBackwardArguments(NamedTuple):
    """One call of add_ada_layer_norm_backward, in the order of its schema."""

    dy: Tensor
    x: Tensor
    input: Tensor
    gate: Tensor
    normalized_ndim: int
    mean: Tensor
    rstd: Tensor
    shift: Tensor | None
    scale: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    dresidual: Tensor | None
    needs_dx: bool
    needs_dinput: bool
    needs_dgate: bool
    needs_dshift: bool
    needs_dscale: bool
    needs_dweight: bool
    needs_dbias: bool
    statistic: str = "layer"
    weight_offset: float = 0.0

    @property
    def needs_gate_backward(self) -> bool:
        return self.needs_dinput or self.needs_dgate

    @property
    def of_norm(self) -> tuple[Any, ...]:
        """The arguments of ada_layer_norm_backward, whose dx gate_backward may need."""
        return (*self[:2], *self[4:12], self.needs_dx or self.needs_gate_backward, *self[15:])


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
        g = GatedBackwardArguments(*args)
        dx, *gradients = ada_layer_norm_backward(*g.of_norm)
        if g.needs_gate_backward:
            of_gate = gate_backward(dx, g.input, g.gate, g.needs_dinput, g.needs_dgate)
        elif checks:  # x stands for its own gradient
            of_gate = gate_backward(g.x, g.input, g.gate, False, False)
        else:
            of_gate = (g.input.new_empty((0,)), g.gate.new_empty((0,)))
        return (dx if g.needs_dx else g.x.new_empty((0,)), *of_gate, *gradients)

    return add_ada_layer_norm_backward


def implementations(
    forward: Callable[[Arguments], Results],
    backward: Callable[[BackwardArguments], Gradients],
    gate_backward: Callable[..., Any],
) -> dict[OpOverload, Callable[..., Any]]:
    """Every operator of norms, by its overload, as these three implement it."""
    ada_layer_norm_backward = ADA_LAYER_NORM_BACKWARD.implemented_by(backward)
    return {
        **{operator.overload: operator.implemented_by(forward) for operator in FORWARD},
        **{operator.overload: operator.implemented_by(backward) for operator in BACKWARD},
        load.add_ada_layer_norm_backward: gated_backward(
            ada_layer_norm_backward, gate_backward, checks=True
        ),
        load.gate_backward: gate_backward,
    }

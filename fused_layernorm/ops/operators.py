"""The four forward operators as one, and the backward operator's arguments by name.

layer_norm and add_layer_norm differ by a residual, each of them and its `_forward` twin by the
statistics that backward needs. An implementation (composite, fake, vmap rule, autograd) is written
once, from `Arguments` to `Results`; `Operator` knows how the operators lay these out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from . import load


class Options(NamedTuple):
    """What is no tensor."""

    normalized_ndim: int
    eps: float
    activation: str | None = None
    scale: float = 1.0
    out_dtype: torch.dtype | None = None


class Arguments(NamedTuple):
    """One call of a forward operator; residual is None where the operator takes none."""

    input: Tensor
    residual: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    options: Options

    @property
    def normalized_shape(self) -> torch.Size:
        return self.input.shape[self.input.dim() - self.options.normalized_ndim :]

    @property
    def x_dtype(self) -> torch.dtype:
        """The dtype of what is normalized: the residual stream's, where there is one."""
        return self.input.dtype if self.residual is None else self.residual.dtype

    @property
    def y_dtype(self) -> torch.dtype:
        return self.options.out_dtype or self.input.dtype


class Results(NamedTuple):
    """What the forward operators give; residual_out is None without a residual."""

    y: Tensor
    residual_out: Tensor | None
    mean: Tensor
    rstd: Tensor


class Operator(NamedTuple):
    """A forward operator: from and to the layout of its schema."""

    overload: OpOverload
    takes_residual: bool
    gives_statistics: bool

    @property
    def name(self) -> str:
        """As torch.library wants it, without the namespace."""
        return self.overload._opname

    def arguments(self, *args: Any) -> Arguments:
        """The operator's arguments by name; trailing defaults may be absent."""
        input, *rest = args
        residual = rest.pop(0) if self.takes_residual else None
        normalized_ndim, weight, bias, *options = rest
        return Arguments(input, residual, weight, bias, Options(normalized_ndim, *options))

    def lay_out(self, a: Arguments) -> tuple[Any, ...]:
        """The reverse of `arguments`."""
        rows = (a.input, a.residual) if self.takes_residual else (a.input,)
        return (*rows, a.options.normalized_ndim, a.weight, a.bias, *a.options[1:])

    def outputs(self, r: Results) -> Any:
        """What the operator gives of these: a tensor or a tuple of them."""
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
FORWARD = (LAYER_NORM, LAYER_NORM_FORWARD, ADD_LAYER_NORM, ADD_LAYER_NORM_FORWARD)


def with_statistics(a: Arguments) -> Operator:
    """The operator for a forward pass that a backward pass follows."""
    return LAYER_NORM_FORWARD if a.residual is None else ADD_LAYER_NORM_FORWARD


class BackwardArguments(NamedTuple):
    """layer_norm_backward's arguments, in the order of its schema."""

    dy: Tensor
    x: Tensor
    normalized_ndim: int
    mean: Tensor
    rstd: Tensor
    weight: Tensor | None
    bias: Tensor | None
    dresidual: Tensor | None
    activation: str | None
    scale: float
    needs_dx: bool
    needs_dweight: bool
    needs_dbias: bool

    @property
    def normalized_shape(self) -> torch.Size:
        return self.x.shape[self.x.dim() - self.normalized_ndim :]

    @property
    def needs(self) -> tuple[bool, bool, bool]:
        return self.needs_dx, self.needs_dweight, self.needs_dbias

    @property
    def parameter_dtype(self) -> torch.dtype:
        """That of dweight and dbias."""
        if self.weight is not None:
            return self.weight.dtype
        return self.x.dtype if self.bias is None else self.bias.dtype


Gradients = tuple[Tensor, Tensor, Tensor]


def select(b: BackwardArguments, found: Sequence[Tensor | None]) -> Gradients:
    """(dx, dweight, dbias) of these, with an empty tensor for each that is not needed."""
    dtypes = (b.x.dtype, b.parameter_dtype, b.parameter_dtype)
    dx, dweight, dbias = (
        gradient if needed and gradient is not None else b.x.new_empty((0,), dtype=dtype)
        for gradient, needed, dtype in zip(found, b.needs, dtypes, strict=True)
    )
    return dx, dweight, dbias

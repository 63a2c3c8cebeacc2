"""vmap: a batch dimension is one more leading dimension.

Parameters that are batched themselves, and the gradients of shared ones, of which every sample has
its own, are beyond the kernels: PyTorch's operators do what follows the normalization.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import formulas, load
from .formulas import acc_dtype, activate, affine
from .operators import (
    FORWARD,
    Arguments,
    BackwardArguments,
    Gradients,
    Operator,
    Options,
    Results,
    select,
    with_statistics,
)


def _to_front(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """The tensor with its batch dimension first; one that has none, expanded."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _optional_to_front(tensor: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    return None if tensor is None else _to_front(tensor, dim, size)


def _parameter_to_front(
    parameter: Tensor | None, dim: int | None, size: int, ndim: int
) -> Tensor | None:
    """A parameter of shape (batch, 1, ..., 1, *normalized_shape), of ndim dimensions."""
    if parameter is None:
        return None
    parameter = _to_front(parameter, dim, size)
    ones = [1] * (ndim - parameter.dim())
    return parameter.reshape(size, *ones, *parameter.shape[1:])


def _forward_rule(operator: Operator) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        a, size = operator.arguments(*args), info.batch_size
        dims: Any = operator.arguments(*in_dims)
        input = _to_front(a.input, dims.input, size)
        residual = _optional_to_front(a.residual, dims.residual, size)
        rows = a._replace(input=input, residual=residual)
        if dims.weight is None and dims.bias is None:
            outputs = operator.overload(*operator.lay_out(rows))
        else:
            weight = _parameter_to_front(a.weight, dims.weight, size, input.dim())
            bias = _parameter_to_front(a.bias, dims.bias, size, input.dim())
            outputs = operator.outputs(_with_parameters_of_samples(rows, weight, bias))
        return outputs, (0,) * len(outputs) if isinstance(outputs, tuple) else 0

    return rule


def _with_parameters_of_samples(
    a: Arguments, weight: Tensor | None, bias: Tensor | None
) -> Results:
    ndim, eps, activation, scale, _ = a.options
    plain = a._replace(
        weight=None, bias=None, options=Options(ndim, eps, out_dtype=acc_dtype(a.x_dtype))
    )
    operator = with_statistics(a)
    normalized = operator.results(operator.overload(*operator.lay_out(plain)))
    z = affine(normalized.y, weight, bias)
    return normalized._replace(y=(activate(z, activation) * scale).to(a.y_dtype))


def _backward_rule(info: Any, in_dims: Any, *args: Any) -> tuple[Gradients, tuple[int, int, int]]:
    dims: Any = BackwardArguments(*in_dims)
    size = info.batch_size
    b = BackwardArguments(*args)
    b = b._replace(
        dy=_to_front(b.dy, dims.dy, size),
        x=_to_front(b.x, dims.x, size),
        mean=_to_front(b.mean, dims.mean, size).contiguous(),
        rstd=_to_front(b.rstd, dims.rstd, size).contiguous(),
        dresidual=_optional_to_front(b.dresidual, dims.dresidual, size),
    )
    by_kernel = b.needs_dx and dims.weight is None and dims.bias is None
    found: list[Tensor | None] = [None, None, None]
    if by_kernel:
        only_dx = b._replace(needs_dweight=False, needs_dbias=False)
        found[0] = load.layer_norm_backward(*only_dx)[0]
    if b.needs_dweight or b.needs_dbias or (b.needs_dx and not by_kernel):
        of_samples = b._replace(
            weight=_parameter_to_front(b.weight, dims.weight, size, b.x.dim()),
            bias=_parameter_to_front(b.bias, dims.bias, size, b.x.dim()),
        )
        dx, *dparameters = formulas.backward(of_samples, sum_from=1)
        found = [found[0] if by_kernel else dx, *dparameters]
    dx, dweight, dbias = (
        gradient if gradient.dim() > 1 else gradient.expand(size, 0)
        for gradient in select(b, found)
    )
    return (dx, dweight, dbias), (0, 0, 0)


for _operator in FORWARD:
    torch.library.register_vmap(_operator.overload, _forward_rule(_operator))
torch.library.register_vmap("fused_layernorm::layer_norm_backward", _backward_rule)

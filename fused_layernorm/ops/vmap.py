# SPDX-License-Identifier: Apache-2.0
"""vmap: a batch dimension is one more leading dimension.

A batched modulation has that dimension, too. The kernels neither take batched parameters nor give
a gradient of shared parameters for each sample: forward then computes what follows the
normalization in PyTorch's operators, and backward takes those gradients from the formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import formulas, load
from .formulas import acc_dtype, activate, affine, modulate, shifted, to
from .operators import (
    Arguments,
    BackwardArguments,
    BackwardOperator,
    Gradients,
    Operator,
    Results,
    describe,
    operator_of,
)


def to_front(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """The tensor with its batch dimension first; a tensor that has none is expanded."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def one_by_one(operator: Any, info: Any, in_dims: Any, *args: Any) -> Any:
    """A rule that calls the operator for each sample."""
    given = list(zip(args, in_dims, strict=True))
    samples = [
        operator(*(arg if dim is None else arg.select(dim, i) for arg, dim in given))
        for i in range(info.batch_size)
    ]
    if isinstance(samples[0], Tensor):
        return torch.stack(samples), 0
    stacked = tuple(torch.stack(same) for same in zip(*samples, strict=True))
    return stacked, (0,) * len(stacked)


def _broadcast_to_front(
    tensor: Tensor | None, dim: int | None, size: int, ndim: int
) -> Tensor | None:
    """A parameter or modulation as (batch, 1, ..., 1, *its shape), with ndim dimensions."""
    if tensor is None:
        return None
    tensor = to_front(tensor, dim, size)
    ones = [1] * (ndim - tensor.dim())
    return tensor.reshape(size, *ones, *tensor.shape[1:])


def _batched_to_front(
    tensor: Tensor | None, dim: int | None, size: int, ndim: int
) -> Tensor | None:
    """As _broadcast_to_front, but a modulation that all samples share is returned as it is.

    If a shared modulation has more dimensions than a sample, its first dimension would be aligned
    with the batch. It gets a batch dimension in front, and then has so many dimensions that the
    operator refuses it.
    """
    if dim is None and tensor is not None and tensor.dim() < ndim:
        return tensor
    return _broadcast_to_front(tensor, dim, size, ndim)


def forward_rule(operator: Operator) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        a, size = operator.arguments(*args), info.batch_size
        dims: Any = operator.arguments(*in_dims)
        input = to_front(a.input, dims.input, size)
        residual = None if a.residual is None else to_front(a.residual, dims.residual, size)
        ndim = input.dim()
        gate, shift, scale = (
            _batched_to_front(tensor, dim, size, ndim)
            for tensor, dim in (
                (a.gate, dims.gate),
                (a.shift, dims.shift),
                (a.scale, dims.scale),
            )
        )
        rows = a._replace(input=input, residual=residual, gate=gate, shift=shift, scale=scale)
        if dims.weight is None and dims.bias is None:
            outputs = operator.overload(*operator.lay_out(rows))
        else:
            weight = _broadcast_to_front(a.weight, dims.weight, size, ndim)
            bias = _broadcast_to_front(a.bias, dims.bias, size, ndim)
            outputs = operator.outputs(_with_parameters_of_samples(rows, weight, bias))
        if operator.gives_statistics and a.is_rms:
            found = operator.results(outputs)
            outputs = operator.outputs(found._replace(mean=found.mean.expand(size, 0)))
        return outputs, (0,) * len(outputs) if isinstance(outputs, tuple) else 0

    return rule


def _with_parameters_of_samples(
    a: Arguments, weight: Tensor | None, bias: Tensor | None
) -> Results:
    acc = acc_dtype(a.x_dtype)
    # The norm and the sum before it alone.
    plain = describe(
        a.input,
        a.residual,
        a.gate,
        normalized_ndim=a.normalized_ndim,
        eps=a.eps,
        out_dtype=acc,
        statistic=a.statistic,
    )
    operator = operator_of(plain, gives_statistics=True)
    normalized = operator.results(operator.overload(*operator.lay_out(plain)))
    xhat = normalized.y.to(a.input.dtype).to(acc) if a.rounds_xhat else normalized.y
    z = affine(xhat, shifted(weight, a.weight_offset, acc), bias)
    z = modulate(z, to(a.shift, acc), to(a.scale, acc))
    return normalized._replace(y=(activate(z, a.activation) * a.output_scale).to(a.y_dtype))


def backward_rule(operator: BackwardOperator) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        b, size = operator.arguments(*args), info.batch_size
        dims: Any = operator.arguments(*in_dims)
        x = to_front(b.x, dims.x, size)
        # Every sample has its own gradient of a modulation that all of them share.
        shift = _broadcast_to_front(b.shift, dims.shift, size, x.dim())
        scale = _broadcast_to_front(b.scale, dims.scale, size, x.dim())
        dresidual = None if b.dresidual is None else to_front(b.dresidual, dims.dresidual, size)
        rows = b._replace(
            dy=to_front(b.dy, dims.dy, size),
            x=x,
            mean=to_front(b.mean, dims.mean, size).contiguous(),
            rstd=to_front(b.rstd, dims.rstd, size).contiguous(),
            dresidual=dresidual,
            shift=shift,
            scale=scale,
        )

        def asks(of: BackwardArguments) -> bool:
            return any(getattr(of, f"needs_{name}") for name in operator.gradients)

        found = Gradients()
        of_samples = rows
        if dims.weight is None and dims.bias is None:
            of_rows = rows._replace(needs_dweight=False, needs_dbias=False)
            if asks(of_rows):
                found = operator.results(of_rows, operator.overload(*operator.lay_out(of_rows)))
            of_samples = rows._replace(needs_dx=False, needs_dshift=False, needs_dscale=False)
        if asks(of_samples):
            of_samples = of_samples._replace(
                weight=_broadcast_to_front(b.weight, dims.weight, size, x.dim()),
                bias=_broadcast_to_front(b.bias, dims.bias, size, x.dim()),
            )
            others = formulas.backward(of_samples, sum_from=1)
            either = (g if g is not None else other for g, other in zip(found, others, strict=True))
            found = Gradients(*either)
        for name, tensor, dim in (("shift", b.shift, dims.shift), ("scale", b.scale, dims.scale)):
            gradient = getattr(found, f"d{name}")
            if gradient is not None and tensor is not None:
                shape = to_front(tensor, dim, size).shape
                found = found._replace(**{f"d{name}": gradient.reshape(shape)})
        outputs = tuple(
            gradient if gradient.dim() > 1 else gradient.expand(size, 0)
            for gradient in operator.outputs(rows, found)
        )
        return outputs, (0,) * len(outputs)

    return rule


def gate_backward_rule(info: Any, in_dims: Any, *args: Any) -> Any:
    gate, needs_dinput, needs_dgate = args[2:]
    size = info.batch_size
    rows = [to_front(args[i], in_dims[i], size) for i in range(2)]
    shape = to_front(gate, in_dims[2], size).shape
    gates = _broadcast_to_front(gate, in_dims[2], size, rows[0].dim())
    dinput, dgate = load.gate_backward(*rows, gates, needs_dinput, needs_dgate)
    return (
        dinput if needs_dinput else dinput.expand(size, 0),
        dgate.reshape(shape) if needs_dgate else dgate.expand(size, 0),
    ), (0, 0)

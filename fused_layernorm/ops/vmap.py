# SPDX-License-Identifier: Apache-2.0
"""vmap: a batch dimension is one more leading dimension.

The operators take no parameters of samples, and give no gradients of them: there the formula does,
which broadcasts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from .autograd import complete
from .formulas import acc_dtype, call_of

_SHARED = ("weight", "bias")


def to_front(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """The tensor with its batch dimension first; a tensor that has none is expanded."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def folded(tensor: Any, dim: int | None, size: int) -> Any:
    """The tensor with the mapped dimension folded into its first one."""
    return None if tensor is None else to_front(tensor, dim, size).flatten(0, 1)


def one_by_one(operator: Any, info: Any, in_dims: Any, *args: Any) -> Any:
    """A rule that calls the operator for each sample."""
    given = list(zip(args, in_dims, strict=True))
    samples = [
        operator(*(arg if dim is None else arg.select(dim, i) for arg, dim in given))
        for i in range(info.batch_size)
    ]
    stacked = tuple(torch.stack(same) for same in zip(*samples, strict=True))
    return stacked, (0,) * len(stacked)


def vmap_of(
    family: Any, operator: OpOverload, formula: Callable[..., Any], always: bool = False
) -> Callable[..., Any]:
    """The rule of an operator. formula: for parameters that broadcast; `always`: for all calls."""
    Call = call_of(operator)
    is_backward = bool(Call.differentiated)
    broadcast = (*_SHARED, "shift", "scale", *(["gate"] if family.gated_backward else []))

    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        a, dims, size = Call(*args), Call(*in_dims), info.batch_size
        a = complete(a) if is_backward else a
        x = "x" if "x" in Call._fields else "input"
        first = to_front(getattr(a, x), getattr(dims, x), size)
        ndim = first.dim()
        of_samples = always or any(
            getattr(dims, name) is not None or name in a.wanted for name in _SHARED
        )
        if not is_backward:
            pairs = zip(args, in_dims, strict=True)
            family.check(family.Call(*(t if d is None else t.select(d, 0) for t, d in pairs)))

        def batched(name: str, tensor: Tensor, dim: int | None) -> Tensor:
            found: Tensor = to_front(tensor, dim, size)
            if family.folds:
                if name in _SHARED and found.dim() == 2:  # as a modulation, one for each sample
                    found = found.to(acc_dtype(found.dtype))
                    found = found[:, None].expand(size, first.shape[1], -1)
                return found.flatten(0, 1)
            if name in ("mean", "rstd"):
                return found.contiguous()
            if name not in broadcast:
                return found
            if dim is None and not is_backward:  # it broadcasts to each sample as it is
                return tensor
            return found.reshape(size, *[1] * (ndim - found.dim()), *found.shape[1:])

        tensors = {
            name: batched(name, value, getattr(dims, name))
            for name, value in a._asdict().items()
            if isinstance(value, Tensor) and value.shape != (0,)
            if of_samples or name not in _SHARED
        }
        found = (formula if of_samples else operator)(*a._replace(**tensors))

        def at_front(t: Tensor, name: str | None = None) -> Tensor:
            if t.shape == (0,):  # as RMSNorm's mean, it has no batch yet
                return t.expand(size, 0)
            if name in broadcast:
                like = getattr(a, name)
                shape = to_front(like, getattr(dims, name), size).shape
                if t.numel() != shape.numel():
                    t = t.unflatten(0, (size, -1)).sum(1).to(like.dtype)
                return t.reshape(shape)
            return t.unflatten(0, (size, -1)) if family.folds else t

        if isinstance(found, Tensor):
            return at_front(found), 0
        given = zip(found, Call.differentiated or [None] * len(found), strict=True)
        return tuple(at_front(*one) for one in given), (0,) * len(found)

    return rule

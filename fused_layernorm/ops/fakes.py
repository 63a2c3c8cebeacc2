# SPDX-License-Identifier: Apache-2.0
"""The operators without data: shapes and dtypes, for compilers and meta tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import compute_elementwise_output_strides

from . import load
from .formulas import acc_dtype, complete, results


def like(x: Tensor, dtype: torch.dtype, keeps_order: bool) -> Tensor:
    if not keeps_order:
        return x.new_empty(x.shape, dtype=dtype)
    # A fake torch.empty_like loses the strides of dimensions of size 1, which the real one keeps.
    return x.new_empty_strided(x.shape, compute_elementwise_output_strides(x), dtype=dtype)


def fake(family: Any) -> Callable[..., tuple[Tensor, ...]]:
    """NAME_forward without data."""

    def implementation(*args: Any) -> tuple[Tensor, ...]:
        a = family.Call(*args)
        family.check(a)
        x, of_rows, acc = a.input, family.statistics(a), acc_dtype(a.x_dtype)
        return (
            like(x, a.y_dtype, family.keeps_order or a.keeps_order),
            *([] if a.residual is None else [x.new_empty(x.shape, dtype=a.residual.dtype)]),
            x.new_empty((0,) if a.is_rms else of_rows, dtype=acc),
            x.new_empty(of_rows, dtype=acc),
        )

    return implementation


def fake_backward(operator: OpOverload, family: Any) -> Callable[..., tuple[Tensor, ...]]:
    """A backward operator without data, whose arguments are not checked: compiled autograd traces
    it with gradients of other shapes."""
    Call = load.call_of(operator)

    def implementation(*args: Any) -> tuple[Tensor, ...]:
        b = complete(Call(*args))
        in_order = family.keeps_order or b.keeps_order
        given = {name: t for name in b.wanted if (t := getattr(b, name)) is not None}
        found = {n: like(t, t.dtype, n == "x" and in_order) for n, t in given.items()}
        return results(b, found)

    return implementation

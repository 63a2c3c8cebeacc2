"""The operators without data: shapes and dtypes, for compilers and meta tensors."""

from __future__ import annotations

from typing import Any

import torch

from . import arguments
from .formulas import acc_dtype
from .operators import FORWARD, Arguments, BackwardArguments, Gradients, Results, select


def _forward(a: Arguments) -> Results:
    arguments.check(a)
    x = a.input
    leading = x.shape[: x.dim() - a.options.normalized_ndim]
    ones = [1] * a.options.normalized_ndim
    acc = acc_dtype(a.x_dtype)
    return Results(
        x.new_empty(x.shape, dtype=a.y_dtype),
        None if a.residual is None else x.new_empty(x.shape, dtype=a.residual.dtype),
        x.new_empty((*leading, *ones), dtype=acc),
        x.new_empty((*leading, *ones), dtype=acc),
    )


def _backward(*args: Any) -> Gradients:
    b = BackwardArguments(*args)
    return select(
        b,
        [
            b.x.new_empty(b.x.shape),
            *(b.x.new_empty(b.normalized_shape, dtype=b.parameter_dtype) for _ in range(2)),
        ],
    )


for _operator in FORWARD:
    torch.library.register_fake(_operator.overload, _operator.implemented_by(_forward))
torch.library.register_fake("fused_layernorm::layer_norm_backward", _backward)

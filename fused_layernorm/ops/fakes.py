# SPDX-License-Identifier: Apache-2.0
"""The operators without data: shapes and dtypes, for compilers and meta tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._prims_common import compute_elementwise_output_strides

from . import arguments
from .formulas import acc_dtype
from .operators import Arguments, BackwardArguments, Gradients, Results


def like(x: Tensor, dtype: torch.dtype, keeps_order: bool) -> Tensor:
    if not keeps_order:
        return x.new_empty(x.shape, dtype=dtype)
    # A fake torch.empty_like loses the strides of dimensions of size 1, which the real one keeps.
    return x.new_empty_strided(x.shape, compute_elementwise_output_strides(x), dtype=dtype)


def forward(a: Arguments) -> Results:
    arguments.check(a)
    x = a.input
    leading = x.shape[: x.dim() - a.normalized_ndim]
    ones = [1] * a.normalized_ndim
    acc = acc_dtype(a.x_dtype)
    return Results(
        like(x, a.y_dtype, a.keeps_order),
        None if a.residual is None else x.new_empty(x.shape, dtype=a.residual.dtype),
        x.new_empty((0,) if a.is_rms else (*leading, *ones), dtype=acc),
        x.new_empty((*leading, *ones), dtype=acc),
    )


# Backward's arguments are not checked: compiled autograd traces it with gradients of other shapes.
def backward(b: BackwardArguments) -> Gradients:
    def of(tensor: Tensor | None, needed: bool) -> Tensor | None:
        return tensor.new_empty(tensor.shape) if needed and tensor is not None else None

    def parameter(needed: bool) -> Tensor | None:
        return b.x.new_empty(b.normalized_shape, dtype=b.parameter_dtype) if needed else None

    return Gradients(
        like(b.x, b.x.dtype, b.keeps_order) if b.needs_dx else None,
        of(b.shift, b.needs_dshift),
        of(b.scale, b.needs_dscale),
        parameter(b.needs_dweight),
        parameter(b.needs_dbias),
    )

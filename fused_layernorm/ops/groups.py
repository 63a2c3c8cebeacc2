# SPDX-License-Identifier: Apache-2.0
"""The operators group_norm, group_norm_forward and group_norm_backward: their Python half.

group_formulas.py computes them off CUDA, csrc/bindings/cuda/groups.cpp has them on CUDA,
csrc/per_torch autograd and autocast in C++. What follows for all such families is family.py's.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import fakes, load
from .family import Family, implement
from .formulas import acc_dtype
from .group_formulas import (
    BackwardArguments,
    GroupArguments,
    check,
    composite_backward,
    composite_forward,
    formula,
    gradients,
)

group_norm = load.operators.group_norm.default

FAMILY = Family(
    "group_norm", GroupArguments, BackwardArguments, check, formula, gradients, 2, folds=True
)

# ---- Fakes. As with norms, backward's arguments are not checked here.


def _fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    a = GroupArguments(*args)
    check(a)
    of_groups = (a.input.shape[0], a.num_groups)
    acc = acc_dtype(a.input.dtype)
    mean, rstd = (a.input.new_empty(of_groups, dtype=acc) for _ in range(2))
    return fakes._like(a.input, a.y_dtype, True), mean, rstd


def _fake_backward(*args: Any) -> tuple[Tensor, ...]:
    b = BackwardArguments(*args)
    found = [
        parameter.new_empty(parameter.shape) if needed and parameter is not None else None
        for needed, parameter in zip(b.needs[1:], b.parameters, strict=True)
    ]
    dx = fakes._like(b.x, b.x.dtype, True) if b.needs_dx else None
    return b.results((dx, *found))


implement(FAMILY, composite_forward, composite_backward, _fake, _fake_backward)

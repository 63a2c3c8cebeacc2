# SPDX-License-Identifier: Apache-2.0
"""What computes a call of our functions in a graph that Dynamo traces: rules.py decides.

What surrounds a norm is not known here, so elementwise operations are assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from operator import index
from typing import Any

import torch
from torch import Tensor

from ..ops import arguments, formulas
from ..ops.autograd import needs_grad
from ..ops.family import assume_constant_result
from ..ops.operators import FORWARD, VARIANTS, Arguments
from . import rules

# Dynamo of torch 2.10 cannot follow the choice: there, every call keeps its kernel.
CHOOSES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)

_VARIANTS = tuple(VARIANTS[one.plain] for one in FORWARD)


def run(a: Arguments, place: int) -> Any:
    """The call by our operator (FORWARD[place]), its aten_ variant, or PyTorch's own norm."""
    operator = FORWARD[place]
    arguments.check_types(operator, a)
    choice = "KERNEL" if a.is_modulated else _choice_for(a)
    if choice == "PYTORCH" and _has_own_norm(a):
        return formulas.norm_of(a, a.input)
    if place and not a.keeps_order:
        # As in replace.apply: such kernels read rows, and the compiler may fuse a copy made here.
        from .sites import is_contiguous

        for name, x in (("input", a.input), ("residual", a.residual)):
            if x is not None and not is_contiguous(x, x.dim() - a.normalized_ndim):
                setattr(a, name, x.contiguous())
    overload = operator.plain if choice == "KERNEL" else _VARIANTS[place]
    return overload(*[getattr(a, name) for name in operator.signature()[0]])


def _has_own_norm(a: Arguments) -> bool:
    """Whether PyTorch's own norm has all that this one has, and gives it input's dtype."""
    if not (_is_one(a.output_scale) and a.is_bare):
        return False
    has_dtype = a.weight is None or a.weight.dtype is a.input.dtype
    return not a.is_rms or (a.bias is None and has_dtype)


def _is_one(scale: float) -> bool:
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return has_static_value(scale) and scale == 1.0


def leaves_groups(x: Tensor, num_groups: int, *others: Tensor | None, fuses: bool = False) -> bool:
    """Whether Dynamo traces a swapped group norm of x as its class writes it.

    others: what else may want a gradient. fuses: whether more than the norm is one call.
    """
    if not (CHOOSES and torch.compiler.is_dynamo_compiling()):
        return False
    size = prod(x.shape[1:]) // num_groups
    statistic = "instance" if num_groups == x.shape[1] else "layer"
    more = {"differentiates": needs_grad(x, *others), "has_neighbours": not fuses}
    return choice_of(x, size, "GROUPS", statistic, **more) == "PYTORCH"


def leaves_modulation(x: Tensor, norms: Sequence[Any]) -> bool:
    """Whether Dynamo is to trace swapped norms of x and their modulation as their class does."""
    more = {"has_parameters": any(getattr(one, "weight", None) is not None for one in norms)}
    return choice_of(x, x.shape[-1], "MODULATED", "layer", **more) == "PYTORCH"


def _choice_for(a: Arguments) -> str:
    if not CHOOSES or a.input.dim() < a.normalized_ndim or a.keeps_order:
        return "KERNEL"
    fusion = "RESIDUAL" if a.residual is not None else "ACTIVATED" if a.activation else "PLAIN"
    may_be_cast = fusion == "PLAIN" and a.out_dtype is None and _is_one(a.output_scale)
    more = {"differentiates": needs_grad(a.input, a.residual, a.weight, a.bias)}
    more["has_parameters"] = a.weight is not None or a.bias is not None
    cols = prod(a.normalized_shape)
    return choice_of(a.input, cols, fusion, a.statistic, may_be_cast, **more)


def choice_of(
    x: Tensor, cols: int, fusion: str, statistic: str, may_be_cast: bool = False, **more: bool
) -> str:
    """What the rules choose for a norm of x that Dynamo traces; the kernel, if they are not asked.

    may_be_cast: autocast casts x for PyTorch's norm, if it is on. more: fields of rules.Problem.
    """
    if not CHOOSES:
        return "KERNEL"
    from torch.fx.experimental.symbolic_shapes import has_static_value

    device, stride = x.device.type, x.stride(-1)
    if device not in rules.DEVICES or not has_static_value(cols):
        return "KERNEL"
    casts = may_be_cast and has_autocast(device) and torch.is_autocast_enabled(device)
    more["with_hidden_casts"] = casts
    more["is_apart"] = not has_static_value(stride) or index(stride) != 1
    more["deterministic"] = torch.are_deterministic_algorithms_enabled()
    more["is_small"] = has_static_value(size := prod(x.shape)) and size < rules.SMALL
    # In Dynamo of torch 2.11, int(cols) would be no constant.
    return _choice(fusion, index(cols), statistic=statistic, **more)


@assume_constant_result
def _choice(fusion: str, cols: int, **given: Any) -> str:
    # If Dynamo of torch 2.11 traced is_exporting(), it would be true in every graph.
    if torch.compiler.is_exporting():
        return rules.Choice.KERNEL.name
    problem = rules.Problem(rules.Fusion[fusion], cols, is_call=True, **given)
    return rules.choose(problem).choice.name


@assume_constant_result
def has_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type)  # Dynamo of torch 2.10 cannot trace it.

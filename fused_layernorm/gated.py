# SPDX-License-Identifier: Apache-2.0
"""Gated RMSNorm, and RMSNorm over groups of columns: what users call, and what serves a call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import calls
from .compile import choice
from .ops import arguments, gated
from .ops.aten_forward import VARIANTS
from .ops.autocast import under_autocast
from .ops.formulas import acc_dtype, affine, epilogue, shifted, to
from .ops.gated import GatedArguments
from .ops.operators import Arguments, describe


def rms_norm_gated(
    input: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    gate_first: bool = False,
    gate_activation: str = "silu",
    group_size: int | None = None,
    bias: Tensor | None = None,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    r"""Root mean square normalization over the last dimension and a gate, in one kernel.

    .. math::
        y = \left(\mathrm{norm}(x) \cdot (\mathrm{weight} + \mathrm{weight\_offset})
            + \mathrm{bias}\right) \cdot a(\mathrm{gate}),
        \qquad \mathrm{norm}(x) = \frac{x}{\sqrt{\mathrm{E}[x^2] + \epsilon}}

    as in linear attention (Gated DeltaNet, Qwen3-Next), or with ``gate_first``, as in Mamba 2,

    .. math::
        y = \mathrm{norm}(x \cdot a(\mathrm{gate})) \cdot (\mathrm{weight}
            + \mathrm{weight\_offset}) + \mathrm{bias}.

    The arithmetic is in float32 (float64 for a float64 input), whatever the dtypes, and the result
    is rounded once.

    Args:
        input: shape ``(*, columns)``, float32, float16, bfloat16 or float64, of any strides.
        gate: of input's shape, any of these dtypes, of any strides: a slice of a projection is read
            where it lies.
        weight, bias: shape ``(columns,)``, each optional; of input's dtype, or float32 beside a
            half-precision input; if both are given, of one dtype.
        eps: added to the mean of the squares. None is the default of
            ``torch.nn.functional.rms_norm``.
        gate_first: the gate is multiplied before the norm, not after it.
        gate_activation: a, ``"silu"`` or ``"sigmoid"``.
        group_size: the mean of squares is taken over so many columns in turn; by default all.
        weight_offset: as in :func:`rms_norm`.
        round_before_weight: the normalized value is rounded to input's dtype, and its product with
            weight to the dtype to which PyTorch promotes those of input and weight, as the classes
            of Qwen3-Next and Mamba 2 do. Gradients take the rounding for the identity. It has no
            effect without a weight.
        out_dtype: the result's dtype, any of the four. By default input's; under autocast that of
            :func:`rms_norm`.

    Returns:
        A contiguous tensor of input's shape.

    The errors are those of :func:`layer_norm`.
    """
    a = GatedArguments(
        input, gate, weight, bias, arguments.rms_eps(eps, input), bool(gate_first), gate_activation,
        group_size, out_dtype, weight_offset, bool(round_before_weight),
    )  # fmt: skip
    return run(a)


def run(a: GatedArguments) -> Tensor:
    """A gated norm; its group_size is what a user gives."""
    a = a._replace(group_size=arguments.check_group_size(a.group_size, None))
    if calls.is_compiling():
        arguments.check_types(gated.FAMILY, a)
        arguments.check_choice("gate_activation", a.gate_activation, arguments.GATES)
        input = a.input
        if input.dim() and choice.of_gated(input, a.group_size or input.shape[-1]) != "KERNEL":
            return VARIANTS[gated.FAMILY.plain](*a)
    found: Tensor = calls.call(gated.FAMILY, a)
    return found


def norm_in_groups(a: Arguments, group_size: Any, normalized_shape: Any, dim: Any) -> Tensor:
    """An RMSNorm that is described, over groups of columns: these are the rows of a norm, whose
    result PyTorch multiplies by a weight of all columns."""
    arguments.check_tensor("input", a.input)
    input, device = a.input, a.input.device.type
    given = (input, a.weight, a.bias, normalized_shape, 1)
    if dim is not None or arguments.normalized_ndim(*given) != 1:
        raise ValueError("expected group_size beside the last dimension alone to normalize over")
    if choice.has_autocast(device) and torch.is_autocast_enabled(device):
        a = under_autocast(a)
    arguments.check(a)
    size = arguments.check_group_size(group_size, input.shape[-1])
    rows = input.unflatten(-1, (input.shape[-1] // size, size))
    if a.weight is None and a.bias is None:
        found: Tensor = calls.run(a._replace(input=rows, out_dtype=a.y_dtype))
        return found.flatten(-2)
    acc = acc_dtype(input.dtype)
    xhat = calls.run(describe(rows, eps=a.eps, out_dtype=acc, statistic="rms")).flatten(-2)
    if a.rounds_xhat:
        xhat = xhat.to(input.dtype).to(acc)
    weight = shifted(a.weight, a.weight_offset, acc)
    return epilogue(a, affine(xhat, weight, to(a.bias, acc)), None, None)

# SPDX-License-Identifier: Apache-2.0
"""The public functions of norms: each describes its call, and calls.py finds what serves it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .calls import as_autocast_makes, call, is_compiling, norm, plain, run
from .compile import choice
from .ops import arguments
from .ops.arguments import rms_eps
from .ops.formulas import acc_dtype, affine, epilogue, shifted, to
from .ops.operators import RMS_NORM_GATED, VARIANTS, Arguments, GatedArguments, describe


def layer_norm(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    normalized_shape: int | Sequence[int] | None = None,
    activation: str | None = None,
    scale: float = 1.0,
    out_dtype: torch.dtype | None = None,
    dim: int | None = None,
) -> Tensor:
    r"""Layer normalization over the last dimensions, an activation and a scale, in one kernel.

    .. math::
        y = \mathrm{activation}\left(\frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}}
            \cdot \mathrm{weight} + \mathrm{bias}\right) \cdot \mathrm{scale}

    The arithmetic is in float32 (float64 for a float64 input), and the result is rounded once.

    Args:
        input: shape ``(*, *normalized_shape)``, float32, float16, bfloat16 or float64, of any
            strides.
        weight, bias: shape ``normalized_shape``, each optional; of input's dtype, or float32
            beside a half-precision input; if both are given, of one dtype.
        eps: added to the variance.
        normalized_shape: the sizes of the dimensions to normalize over. By default weight's shape,
            else bias's; it must be given if both are None.
        activation: None, ``"gelu"`` (exact, by erf), ``"gelu_tanh"``, ``"silu"`` or ``"relu"``.
        scale: a finite number that multiplies the result.
        out_dtype: the result's dtype, any of the four. By default input's; under autocast what
            ``torch.nn.functional.layer_norm`` gives (float32 on CUDA).
        dim: the one dimension to normalize over, instead of the last ones, such as 1 for the
            channels of ``(N, C, H, W)``; weight and bias then have its size. Contiguous and
            channels_last inputs are both read where they lie, but for some images of few pixels
            and those of some thousand channels, which are copied first.

    Returns:
        A contiguous tensor of input's shape; with dim in the order of input's memory.

    Raises:
        TypeError, ValueError, RuntimeError: the message says in one sentence what was expected and
            what was given. A dtype or layout that is not supported raises NotImplementedError, a
            RuntimeError.
    """
    is_bare = not is_compiling() and activation is None and out_dtype is None and dim is None
    if is_bare and type(scale) is float and scale == 1.0:
        y = plain(False, input, normalized_shape, weight, bias, eps)
        if y is not None:
            return y
    a = describe(
        input, weight=weight, bias=bias, eps=eps, activation=activation, output_scale=scale,
        out_dtype=out_dtype,
    )  # fmt: skip
    return norm(a, normalized_shape, dim=dim)


def rms_norm(
    input: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    group_size: int | None = None,
    normalized_shape: int | Sequence[int] | None = None,
    activation: str | None = None,
    scale: float = 1.0,
    out_dtype: torch.dtype | None = None,
    dim: int | None = None,
) -> Tensor:
    r"""Root mean square normalization over the last dimensions, an activation and a scale, fused.

    .. math::
        y = \mathrm{activation}\left(\frac{x}{\sqrt{\mathrm{E}[x^2] + \epsilon}}
            \cdot (\mathrm{weight} + \mathrm{weight\_offset}) + \mathrm{bias}\right)
            \cdot \mathrm{scale}

    (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.) The arithmetic, the result
    and the errors are those of :func:`layer_norm`.

    Args:
        input, weight, bias: as in :func:`layer_norm`.
        eps: added to the mean of the squares. None is ``torch.nn.functional.rms_norm``'s default:
            the float32 epsilon, for a float64 input that of float64.
        weight_offset: a finite number that is added to weight in the arithmetic's dtype, such as
            Gemma's 1. It needs a weight.
        round_before_weight: the normalized value is rounded to input's dtype before it is
            multiplied by weight, as Llama's norm does. Gradients take the rounding for the
            identity. It has no effect without a weight.
        group_size: the mean of squares is taken over so many of the last dimension's columns in
            turn. A weight of all columns is multiplied by PyTorch's operators.
        normalized_shape, activation, scale, dim: as in :func:`layer_norm`.
        out_dtype: the result's dtype, any of the four. By default input's; under autocast what
            ``torch.nn.functional.rms_norm`` gives (float32 on CUDA from torch 2.12 on).
    """
    is_bare = not is_compiling() and activation is None and out_dtype is None and dim is None
    is_bare = is_bare and bias is None and group_size is None and not round_before_weight
    is_bare = is_bare and type(scale) is float and type(weight_offset) is float
    if is_bare and scale == 1.0 and weight_offset == 0.0:
        y = plain(True, input, normalized_shape, weight, None, eps)
        if y is not None:
            return y
    a = describe(
        input, weight=weight, bias=bias, eps=rms_eps(eps, input), activation=activation,
        output_scale=scale, out_dtype=out_dtype, statistic="rms", weight_offset=weight_offset,
        round_before_weight=round_before_weight,
    )  # fmt: skip
    if group_size is not None:
        return norm_in_groups(a, group_size, normalized_shape, dim)
    return norm(a, normalized_shape, dim=dim)


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

    The arithmetic and the errors are those of :func:`layer_norm`.

    Args:
        input: shape ``(*, columns)``, float32, float16, bfloat16 or float64, of any strides.
        gate: of input's shape, any of these dtypes, of any strides: a slice of a projection is read
            where it lies.
        weight, bias: shape ``(columns,)``; their dtypes are as in :func:`layer_norm`.
        eps, weight_offset: as in :func:`rms_norm`.
        gate_first: the gate is multiplied before the norm, not after it.
        gate_activation: a, ``"silu"`` or ``"sigmoid"``.
        group_size: the mean of squares is taken over so many columns in turn; by default all.
        round_before_weight: the normalized value is rounded to input's dtype, and its product with
            weight to the dtype to which PyTorch promotes those of input and weight, as the classes
            of Qwen3-Next and Mamba 2 do. For gradients, and without weight, it is the identity.
        out_dtype: as in :func:`rms_norm`.

    Returns:
        A contiguous tensor of input's shape.
    """
    a = GatedArguments(
        input, gate, weight, bias, rms_eps(eps, input), bool(gate_first), gate_activation,
        group_size, out_dtype, weight_offset, bool(round_before_weight),
    )  # fmt: skip
    return norm_gated(a)


def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    gate: Tensor | None = None,
    normalized_shape: int | Sequence[int] | None = None,
    activation: str | None = None,
    scale: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Residual addition and layer normalization in one kernel: ``(output, residual_out)``.

    ``residual_out = residual + input``, or ``residual + gate * input``, computed in float32
    (float64 if a tensor is float64) and rounded to residual's dtype;
    ``output = layer_norm(residual_out, ...)`` in input's dtype (unless ``out_dtype`` says
    otherwise). A float32 residual stream under half-precision activations stays float32.

    Args:
        input, residual: of one shape and device; their dtypes may differ.
        weight, bias: shape ``normalized_shape``, each optional; of input's or residual's dtype, or
            float32 where input or residual is of half precision; if both are given, of one dtype.
        gate: multiplies input before the addition, as in :func:`add_ada_layer_norm`. With an
            activation or a scale, PyTorch's operators compute the gated sum, and it is not fused.

    The other arguments and the errors are those of :func:`layer_norm`.
    """
    a = describe(
        input, _given(residual), gate, weight=weight, bias=bias, eps=eps, activation=activation,
        output_scale=scale, out_dtype=out_dtype,
    )  # fmt: skip
    return norm(a, normalized_shape)


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: Tensor | None = None,
    normalized_shape: int | Sequence[int] | None = None,
    activation: str | None = None,
    scale: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Residual addition and RMS normalization in one kernel: ``(output, residual_out)``.

    As :func:`add_layer_norm`, with ``output = rms_norm(residual_out, ...)``. The other arguments
    and the errors are those of :func:`rms_norm`.
    """
    a = describe(
        input, _given(residual), gate, weight=weight, bias=bias, eps=rms_eps(eps, residual),
        activation=activation, output_scale=scale, out_dtype=out_dtype, statistic="rms",
        weight_offset=weight_offset, round_before_weight=round_before_weight,
    )  # fmt: skip
    return norm(a, normalized_shape)


def ada_layer_norm(
    input: Tensor,
    shift: Tensor | None = None,
    scale: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    statistic: str = "layer",
    normalized_shape: int | Sequence[int] | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    r"""Layer normalization with a modulation (AdaLN, as in diffusion transformers), in one kernel.

    .. math::
        y = \mathrm{layer\_norm}(x, \mathrm{weight}, \mathrm{bias}, \epsilon)
            \cdot (1 + \mathrm{scale}) + \mathrm{shift}

    The errors are those of :func:`layer_norm`, and so is the arithmetic, except on the CPU: where
    all tensors have one dtype and ``out_dtype`` is not given, PyTorch's operators compute the norm,
    then the modulation, and each operator rounds its result. Every tensor gets its gradient, summed
    over exactly the dimensions in which it is broadcast, in its own shape and dtype.

    Args:
        input, weight, bias, eps: as in :func:`layer_norm`.
        shift, scale: each optional, of a shape that broadcasts to input's, such as ``(D,)``,
            ``(B, 1, D)`` for a modulation of each sample or ``(B, S, D)`` for one of each token,
            and of any strides: a chunk of a larger tensor is read where it lies. Of input's dtype,
            or float32 beside a half-precision input.
        statistic: ``"layer"``, or ``"rms"`` for :func:`rms_norm` in the place of ``layer_norm``.
        normalized_shape: as in :func:`layer_norm`; of neither parameter, by default the last one.
        out_dtype: the result's dtype. By default input's, also beside a float32 modulation; under
            autocast on CUDA float32, as in :func:`layer_norm`.

    Returns:
        A tensor of input's shape, contiguous on CUDA.
    """
    a = describe(
        input, shift=shift, scale=scale, weight=weight, bias=bias, eps=eps, out_dtype=out_dtype,
        statistic=statistic,
    )  # fmt: skip
    return norm(a, normalized_shape, default=1)


def add_ada_layer_norm(
    input: Tensor,
    residual: Tensor,
    gate: Tensor | None = None,
    shift: Tensor | None = None,
    scale: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    statistic: str = "layer",
    normalized_shape: int | Sequence[int] | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Gated residual addition and modulated layer normalization: ``(output, residual_out)``.

    ``residual_out = residual + gate * input`` and
    ``output = ada_layer_norm(residual_out, shift, scale, ...)``, computed and rounded as in
    :func:`add_layer_norm`, in the same kernel.

    Args:
        input, residual: of one shape and device; their dtypes may differ.
        gate: optional, of a shape that broadcasts to input's, as shift and scale; without it
            ``residual_out = residual + input``.
        gate, shift, scale, weight, bias: of input's or residual's dtype, or float32 where input or
            residual is of half precision; weight and bias of one dtype.

    The other arguments and the errors are those of :func:`ada_layer_norm`.
    """
    a = describe(
        input, _given(residual), gate, shift, scale, weight, bias, eps=eps, out_dtype=out_dtype,
        statistic=statistic,
    )  # fmt: skip
    return norm(a, normalized_shape, default=1)


def _given(residual: Tensor) -> Tensor:
    """The residual of a function that needs one. An operator's description may have none."""
    if residual is None:
        arguments.check_tensor("residual", residual)
    return residual


def norm_gated(a: GatedArguments) -> Any:
    """A gated norm; its group_size is what a user gives."""
    a = a._replace(group_size=arguments.check_group_size(a.group_size, None))
    if is_compiling():
        arguments.check_types(RMS_NORM_GATED, a)
        arguments.check_choice("gate_activation", a.gate_activation, arguments.GATES)
        x = a.input
        if x.dim() and choice.choice_of(x, a.group_size or x.shape[-1], "GATED", "rms") != "KERNEL":
            return VARIANTS[RMS_NORM_GATED.plain](*a)
    return call(RMS_NORM_GATED, a)


def norm_in_groups(a: Arguments, group_size: Any, normalized_shape: Any, dim: Any) -> Any:
    """An RMSNorm that is described, over groups of columns: these are the rows of a norm, whose
    result PyTorch multiplies by a weight of all columns."""
    arguments.check_tensor("input", a.input)
    if dim is not None:
        arguments.check_dim(a, dim, normalized_shape)
    input = a.input
    given = (input, a.weight, a.bias, normalized_shape, 1)
    if dim is not None or arguments.normalized_ndim(*given) != 1:
        raise ValueError("expected group_size beside the last dimension alone to normalize over")
    a = as_autocast_makes(a)
    size = arguments.check_group_size(group_size, input.shape[-1])
    rows = input.unflatten(-1, (input.shape[-1] // size, size))
    if a.weight is None and a.bias is None:
        return run(a._replace(input=rows, out_dtype=a.y_dtype)).flatten(-2)
    acc = acc_dtype(input.dtype)
    xhat = run(describe(rows, eps=a.eps, out_dtype=acc, statistic="rms")).flatten(-2)
    if a.rounds_xhat:
        xhat = xhat.to(input.dtype).to(acc)
    weight = shifted(a.weight, a.weight_offset, acc)
    return epilogue(a, affine(xhat, weight, to(a.bias, acc)), None, None)

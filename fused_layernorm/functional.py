"""layer_norm and add_layer_norm: from a call to the operator that serves it.

A plain call on CUDA tensors goes straight to the operator: the hot path, in which every attribute
costs. Anything else (another device, autocast, a compiler, a transform) takes `_general`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _checks, _ops

_is_compiling = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled
_is_autocast_enabled = torch.is_autocast_enabled
_in_transform = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_layer_norm = _ops.layer_norm._op
_add_layer_norm = _ops.add_layer_norm._op
_eager_layer_norm: Callable[..., Tensor] = _ops.eager_layer_norm
_eager_add_layer_norm: Callable[..., tuple[Tensor, Tensor]] = _ops.eager_add_layer_norm

_INTS = {int}

# A subclass of Tensor may mean more than its data, and so does one that is negated lazily (is_neg,
# as the imaginary part of a conjugate): these go through the operators' dispatch.
_PLAIN = frozenset({Tensor, torch.nn.Parameter, torch.nn.Buffer, type(None)})


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
) -> Tensor:
    r"""Layer normalization over the last dimensions, with what often follows it, in one kernel.

    .. math::
        y = \mathrm{activation}\left(\frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}}
            \cdot \mathrm{weight} + \mathrm{bias}\right) \cdot \mathrm{scale}

    The arithmetic is in float32 (float64 for a float64 input), whatever the dtypes, and the result
    is rounded once.

    Args:
        input: shape ``(*, *normalized_shape)``, float32, float16, bfloat16 or float64, of any
            strides.
        weight, bias: shape ``normalized_shape``, each optional; of input's dtype, or float32
            beside a half-precision input.
        eps: added to the variance.
        normalized_shape: the sizes of the dimensions to normalize over. By default weight's shape,
            else bias's; without either it must be given.
        activation: None, ``"gelu"`` (exact, by erf), ``"gelu_tanh"``, ``"silu"`` or ``"relu"``.
        scale: a finite number that multiplies the result.
        out_dtype: the result's dtype, any of the four. By default input's; under autocast what
            ``torch.nn.functional.layer_norm`` gives (float32 on CUDA).

    Returns:
        A contiguous tensor of input's shape.

    Raises:
        TypeError, ValueError, RuntimeError: in one sentence that names what was expected and what
            came. NotImplementedError, a RuntimeError, for a dtype or layout that is not supported.
    """
    if _is_compiling():
        return _general(input, weight, bias, eps, normalized_shape, activation, scale, out_dtype)
    try:
        if not input.is_cuda or _is_autocast_enabled() or forward_ad._current_level >= 0:
            return _general(
                input, weight, bias, eps, normalized_shape, activation, scale, out_dtype
            )
        if normalized_shape is None:
            ndim = (bias if weight is None else weight).dim()  # type: ignore[union-attr]
        elif (
            type(normalized_shape) is tuple
            and {*map(type, normalized_shape)} == _INTS
            and input.shape[-len(normalized_shape) :] == normalized_shape
        ):
            ndim = len(normalized_shape)
        else:
            ndim = _checks.normalized_ndim(input, weight, bias, normalized_shape)
        if _is_grad_enabled() and (
            input.requires_grad
            or (weight is not None and weight.requires_grad)
            or (bias is not None and bias.requires_grad)
        ):
            if (
                type(input) in _PLAIN
                and type(weight) in _PLAIN
                and type(bias) in _PLAIN
                and not input.is_neg()
                and (weight is None or not weight.is_neg())
                and (bias is None or not bias.is_neg())
                and not _dispatch_modes()
                and not _in_transform()
            ):
                return _eager_layer_norm(
                    input, weight, bias, (ndim, eps, activation, scale, out_dtype)
                )
            return _general(
                input, weight, bias, eps, normalized_shape, activation, scale, out_dtype
            )
        return _layer_norm(input, ndim, weight, bias, eps, activation, scale, out_dtype)
    except Exception as error:
        raise _checks.explain(
            error, input, weight, bias, eps, normalized_shape, activation, scale, out_dtype
        ) from None


def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    normalized_shape: int | Sequence[int] | None = None,
    activation: str | None = None,
    scale: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Residual addition and layer normalization in one kernel: ``(output, residual_out)``.

    ``residual_out = input + residual``, added in float32 (float64 if either is float64) and
    rounded to residual's dtype; ``output = layer_norm(residual_out, ...)`` in input's dtype
    (unless ``out_dtype`` says otherwise). A float32 residual stream under half-precision
    activations stays float32.

    Args:
        input, residual: of one shape and device; their dtypes may differ.
        weight, bias: of input's or residual's dtype, or float32 where either is of half precision.

    The other arguments and the errors are those of :func:`layer_norm`.
    """
    if _is_compiling():
        return _add_general(
            input, residual, weight, bias, eps, normalized_shape, activation, scale, out_dtype
        )
    try:
        if not input.is_cuda or _is_autocast_enabled() or forward_ad._current_level >= 0:
            return _add_general(
                input, residual, weight, bias, eps, normalized_shape, activation, scale, out_dtype
            )
        if normalized_shape is None:
            ndim = (bias if weight is None else weight).dim()  # type: ignore[union-attr]
        elif (
            type(normalized_shape) is tuple
            and {*map(type, normalized_shape)} == _INTS
            and input.shape[-len(normalized_shape) :] == normalized_shape
        ):
            ndim = len(normalized_shape)
        else:
            ndim = _checks.normalized_ndim(input, weight, bias, normalized_shape)
        if _is_grad_enabled() and (
            input.requires_grad
            or residual.requires_grad
            or (weight is not None and weight.requires_grad)
            or (bias is not None and bias.requires_grad)
        ):
            if (
                type(input) in _PLAIN
                and type(residual) in _PLAIN
                and type(weight) in _PLAIN
                and type(bias) in _PLAIN
                and not input.is_neg()
                and not residual.is_neg()
                and (weight is None or not weight.is_neg())
                and (bias is None or not bias.is_neg())
                and not _dispatch_modes()
                and not _in_transform()
            ):
                return _eager_add_layer_norm(
                    input, residual, weight, bias, (ndim, eps, activation, scale, out_dtype)
                )
            return _add_general(
                input, residual, weight, bias, eps, normalized_shape, activation, scale, out_dtype
            )
        return _add_layer_norm(
            input, residual, ndim, weight, bias, eps, activation, scale, out_dtype
        )
    except Exception as error:
        raise _checks.explain(
            error,
            input,
            weight,
            bias,
            eps,
            normalized_shape,
            activation,
            scale,
            out_dtype,
            residual=residual,
            has_residual=True,
        ) from None


def _has_autocast(device_type: str) -> bool:
    """Of a device without it, is_autocast_enabled raises."""
    if _is_compiling():  # which cannot ask under torch 2.10, and compiles for none but meta
        return device_type != "meta"
    return torch.amp.is_autocast_available(device_type)


def _under_autocast(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor | None, Tensor | None, torch.dtype | None]:
    """(weight, bias, out_dtype) as autocast makes them, where it is enabled.

    PyTorch's autocast runs layer_norm in float32 on every device but the CPU, where it leaves it
    alone. The kernels compute in float32 anyway, so the input need not be converted.
    """
    device_type = input.device.type
    if not _has_autocast(device_type) or not torch.is_autocast_enabled(device_type):
        return weight, bias, out_dtype
    if out_dtype is None and device_type != "cpu" and input.dtype in _checks.HALF:
        out_dtype = torch.float32
    dtypes = [parameter.dtype for parameter in (weight, bias) if parameter is not None]
    if any(dtype in _checks.HALF and dtype != input.dtype for dtype in dtypes) or (
        len(dtypes) == 2 and dtypes[0] != dtypes[1]
    ):
        weight, bias = (
            parameter.float()
            if parameter is not None and parameter.dtype in _checks.HALF
            else parameter
            for parameter in (weight, bias)
        )
    return weight, bias, out_dtype


def _needs_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _is_plain(input: Tensor, *others: Tensor | None) -> bool:
    return (
        (input.is_cpu or input.is_cuda)
        and not _dispatch_modes()
        and type(input) in _PLAIN
        and not input.is_neg()
        and all(type(t) in _PLAIN and (t is None or not t.is_neg()) for t in others)
    )


def _general(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    normalized_shape: int | Sequence[int] | None,
    activation: str | None,
    scale: float,
    out_dtype: torch.dtype | None,
) -> Tensor:
    ndim = _checks.normalized_ndim(input, weight, bias, normalized_shape)
    _checks.check_numbers(eps=eps, scale=scale)  # the operators' schemas would say it worse
    weight, bias, out_dtype = _under_autocast(input, weight, bias, out_dtype)
    args = (input, ndim, weight, bias, eps, activation, scale, out_dtype)
    if forward_ad._current_level >= 0 or (_is_compiling() and _in_transform()):
        _checks.check_layer_norm(*args)
        return _ops.expression(*args)
    if not _needs_grad(input, weight, bias):
        return _ops.layer_norm(*args)
    if _in_transform():
        return _ops.LayerNorm.apply(*args)[0]
    if not _is_compiling() and _is_plain(input, weight, bias):
        return _eager_layer_norm(input, weight, bias, (ndim, *args[4:]))
    return _ops.layer_norm_forward(*args)[0]


def _add_general(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    normalized_shape: int | Sequence[int] | None,
    activation: str | None,
    scale: float,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    ndim = _checks.normalized_ndim(input, weight, bias, normalized_shape)
    _checks.check_numbers(eps=eps, scale=scale)  # the operators' schemas would say it worse
    weight, bias, out_dtype = _under_autocast(input, weight, bias, out_dtype)
    args = (input, residual, ndim, weight, bias, eps, activation, scale, out_dtype)
    if forward_ad._current_level >= 0 or (_is_compiling() and _in_transform()):
        _checks.check_add_layer_norm(*args)
        return _ops.add_expression(*args)
    if not _needs_grad(input, residual, weight, bias):
        return _ops.add_layer_norm(*args)
    if _in_transform():
        return _ops.AddLayerNorm.apply(*args)[:2]
    if not _is_compiling() and _is_plain(input, residual, weight, bias):
        return _eager_add_layer_norm(input, residual, weight, bias, (ndim, *args[5:]))
    return _ops.add_layer_norm_forward(*args)[:2]

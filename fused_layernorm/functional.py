# SPDX-License-Identifier: Apache-2.0
"""The public functions, which choose the operator that serves a call.

On the CPU a plain call goes to PyTorch's layer_norm or rms_norm, and a modulated call whose tensors
all have one dtype to PyTorch's operators.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import has_torch_function

from .compile import rules
from .ops import arguments, autograd_library, formulas
from .ops.arguments import rms_eps
from .ops.aten_forward import twin
from .ops.autocast import under_autocast
from .ops.operators import (
    ADA_LAYER_NORM,
    ADD_ADA_LAYER_NORM,
    ADD_LAYER_NORM,
    LAYER_NORM,
    Arguments,
    Operator,
    Options,
)

_is_compiling = torch.compiler.is_dynamo_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_is_tracing = torch._C._is_tracing
_get_dispatch_mode = torch._C._get_dispatch_mode
_PROXY = torch._C._TorchDispatchModeKey.PROXY
_in_transform = torch._C._are_functorch_transforms_active

# Calling `_op` skips OpOverload.__call__, which costs half a microsecond.
_layer_norm = LAYER_NORM.overload._op
_add_layer_norm = ADD_LAYER_NORM.overload._op
_ada_layer_norm = ADA_LAYER_NORM.overload._op
_add_ada_layer_norm = ADD_ADA_LAYER_NORM.overload._op

# What torch.layer_norm and torch.rms_norm get behind normalized_shape's sizes where a call asks for
# our kernels (csrc/per_torch/override.h). To call an operator of ours takes the host longer.
ASKS = (-0x4C4E,)


ATEN_LAYER_NORM = twin(LAYER_NORM)
ATEN_ADD_LAYER_NORM = twin(ADD_LAYER_NORM)


class Kind(NamedTuple):
    """Which norm a call wants: the last arguments of the operators."""

    statistic: str = "layer"
    weight_offset: float = 0.0
    round_before_weight: bool = False


LAYER = Kind()
RMS = Kind("rms")


def rms_kind(weight_offset: float, round_before_weight: bool) -> Kind:
    if weight_offset == 0.0 and not round_before_weight:
        return RMS
    return Kind("rms", weight_offset, round_before_weight)


def may_serve(x: Any, *others: Any) -> bool:
    """Whether the operators know all that a module's own forward would show to PyTorch's functions.

    The rule is that a swapped module accepts what the stock module accepts, with the stock result:
    swapped modules ask here about the tensors of a call, x first, and leave to the stock forward
    what is not known. That is a nested tensor, a tensor subclass of another library (it may hold
    its values in a way that only the operators of the stock forward can read), a TorchFunctionMode
    of another library, and every call while a tool has replaced F.layer_norm or F.rms_norm.
    """
    is_plain = type(x) is Tensor and not has_torch_function((x, *others)) and not x.is_nested
    if not is_plain and not _are_known((x, *others)):
        return False
    return F.layer_norm is torchs_layer_norm and F.rms_norm is torchs_rms_norm


def _unless_replaced(function: Any) -> Any:
    """The function, if it is PyTorch's own; None if a tool has replaced it before this import.

    None is no function, so that may_serve then leaves every call to the tool.
    """
    return function if getattr(function, "__globals__", None) is vars(F) else None


torchs_layer_norm = _unless_replaced(F.layer_norm)
torchs_rms_norm = _unless_replaced(F.rms_norm)


def _are_known(values: Sequence[Any]) -> bool:
    if not all(_is_known(type(value)) for value in values):
        return False
    if not _is_compiling():  # Dynamo traces through the modes that it knows
        # PyTorch has modes of its own: of torch.set_default_device, and of torch.export.
        for mode in torch.overrides._get_current_function_mode_stack():
            if not type(mode).__module__.startswith("torch."):
                return False
    return not any(isinstance(value, Tensor) and value.is_nested for value in values)


def _is_known(cls: type) -> bool:
    if cls is Tensor or cls is torch.nn.Parameter or not hasattr(cls, "__torch_function__"):
        return True
    return cls.__module__.startswith(("torch._subclasses.", "torch.distributed.", "torch.fx."))


def takes_norm(x: Any, weight: Any, bias: Any, eps: float | None) -> bool:
    """Whether the norms take what PyTorch's take; where not, swapped modules leave it to those."""
    if eps != eps or not may_serve(x, weight, bias):
        return False
    return isinstance(x, torch.fx.Proxy) or takes_dtypes(x, weight, bias)


def takes_dtypes(x: Any, weight: Any, bias: Any) -> bool:
    """Whether the norms take a tensor x and parameters of these dtypes."""
    if not isinstance(x, Tensor) or x.dtype not in arguments.DTYPES:
        return False
    dtypes = {p.dtype for p in (weight, bias) if p is not None}
    is_mixed = x.dtype in arguments.HALF and dtypes == {torch.float32}
    return is_mixed or dtypes <= {x.dtype}


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

    The arithmetic is in float32 (float64 for a float64 input), whatever the dtypes, and the result
    is rounded once.

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
    if dim is not None:
        return _serve_dim(
            input, dim, weight, bias, eps, normalized_shape, activation, scale, out_dtype, LAYER
        )
    return serve(input, None, weight, bias, eps, normalized_shape, activation, scale, out_dtype)


def rms_norm(
    input: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
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

    The arithmetic is in float32 (float64 for a float64 input), whatever the dtypes, and the result
    is rounded once. (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.)

    Args:
        input, weight, bias: as in :func:`layer_norm`.
        eps: added to the mean of the squares. None is the default of
            ``torch.nn.functional.rms_norm``: the float32 epsilon, for a float64 input that of
            float64.
        weight_offset: a finite number that is added to weight in the arithmetic's dtype, such as
            Gemma's 1. It needs a weight.
        round_before_weight: the normalized value is rounded to input's dtype before it is
            multiplied by weight, as Llama's norm does. Gradients take the rounding for the
            identity. It has no effect without a weight.
        normalized_shape, activation, scale, dim: as in :func:`layer_norm`.
        out_dtype: the result's dtype, any of the four. By default input's; under autocast what
            ``torch.nn.functional.rms_norm`` gives (float32 on CUDA from torch 2.12 on).

    The result and the errors are those of :func:`layer_norm`.
    """
    kind = rms_kind(weight_offset, round_before_weight)
    eps = rms_eps(eps, input)
    if dim is not None:
        return _serve_dim(
            input, dim, weight, bias, eps, normalized_shape, activation, scale, out_dtype, kind
        )
    return serve(
        input, None, weight, bias, eps, normalized_shape, activation, scale, out_dtype, kind
    )


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
    if gate is None and residual is not None:
        return serve(
            input, residual, weight, bias, eps, normalized_shape, activation, scale, out_dtype
        )
    return _serve_gated(
        input, residual, gate, weight, bias, eps, normalized_shape, activation, scale, out_dtype
    )


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
    eps, kind = rms_eps(eps, residual), rms_kind(weight_offset, round_before_weight)
    if gate is None and residual is not None:
        return serve(
            input, residual, weight, bias, eps, normalized_shape, activation, scale, out_dtype, kind
        )
    options = (activation, scale, out_dtype, kind)
    return _serve_gated(input, residual, gate, weight, bias, eps, normalized_shape, *options)


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
        normalized_shape: the sizes of the dimensions to normalize over. By default weight's shape,
            else bias's, else the last dimension.
        out_dtype: the result's dtype. By default input's, also beside a float32 modulation; under
            autocast on CUDA float32, as in :func:`layer_norm`.

    Returns:
        A tensor of input's shape, contiguous on CUDA.
    """
    kind = LAYER if statistic == "layer" else Kind(statistic)
    return _serve_ada(
        input, None, None, shift, scale, weight, bias, eps, normalized_shape, out_dtype, kind
    )


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

    ``residual_out = residual + gate * input``, computed in float32 (float64 if a tensor is
    float64) and rounded to residual's dtype;
    ``output = ada_layer_norm(residual_out, shift, scale, ...)`` in input's dtype (unless
    ``out_dtype`` says otherwise), in the same kernel.

    Args:
        input, residual: of one shape and device; their dtypes may differ.
        gate: optional, of a shape that broadcasts to input's, as shift and scale; without it
            ``residual_out = residual + input``.
        gate, shift, scale, weight, bias: of input's or residual's dtype, or float32 where input or
            residual is of half precision; weight and bias of one dtype.

    The other arguments and the errors are those of :func:`ada_layer_norm`.
    """
    if residual is None:
        arguments.check_tensor("residual", residual)
    kind = LAYER if statistic == "layer" else Kind(statistic)
    return _serve_ada(
        input, residual, gate, shift, scale, weight, bias, eps, normalized_shape, out_dtype, kind
    )


_OWN = (Tensor, torch.nn.Parameter, type(None))


def may_ask() -> bool:
    """Whether a call that ASKS would come to our kernels before a mode or a tracer sees it."""
    return autograd_library.active and not (_function_modes() or _in_transform() or _is_tracing())


# For tests without a GPU: calls on the CPU then go to the operators instead of PyTorch's.
_cpu_operators = os.environ.get("FUSED_LAYERNORM_CPU_OPERATORS") == "1"


def has_kernels(x: Any) -> bool:
    """Whether x is a tensor on a device that has kernels."""
    return isinstance(x, Tensor) and (x.is_cuda or _cpu_operators)


def serve(
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    normalized_shape: int | Sequence[int] | None,
    activation: str | None,
    scale: float,
    out_dtype: torch.dtype | None,
    kind: Kind = LAYER,
    keeps_order: bool = False,
) -> Any:
    """A norm of this kind: of input, or with a residual of the sum, which is then returned too."""
    if _is_compiling():  # Dynamo does not trace the exception handling below
        options = (activation, scale, out_dtype, *kind, keeps_order)
        a = arguments.settle(
            input, weight, bias, eps, normalized_shape, *options, residual=residual
        )
        operator = _compiled(LAYER_NORM if residual is None else ADD_LAYER_NORM, a)
        if operator is not None:
            return _call(operator, a)
        if a.options.is_rms:
            return torch.rms_norm(input, a.normalized_shape, weight, eps)
        return torch.layer_norm(input, a.normalized_shape, weight, bias, eps)
    try:
        is_plain = (
            residual is None
            and activation is None
            and out_dtype is None
            and scale == 1.0
            and not keeps_order
        )
        # The most common call comes first, since every check here costs host time. The operator
        # compares input's shape with weight's.
        if (
            is_plain
            and weight is not None
            and input.is_cuda
            and (normalized_shape is None or weight.shape == normalized_shape)
            and not _dispatch_modes()
        ):
            if type(input) is Tensor and type(weight) in _OWN and type(bias) in _OWN and may_ask():
                try:
                    if kind is LAYER:
                        return torch.layer_norm(input, weight.shape + ASKS, weight, bias, eps)
                    if kind is RMS and bias is None:
                        return torch.rms_norm(input, weight.shape + ASKS, weight, eps)
                except (RuntimeError, TypeError, ValueError):
                    pass  # the operator says what is wrong, or takes what did not come to us
            if kind is LAYER:
                return _layer_norm(input, weight.dim(), weight, bias, eps)
            return _layer_norm(input, weight.dim(), weight, bias, eps, None, 1.0, None, *kind)
        if is_plain and is_pytorchs(input, weight, bias, eps, kind):
            shape: Any = normalized_shape
            if shape is None:
                shape = (bias if weight is None else weight).shape  # type: ignore[union-attr]
            elif type(shape) is int:
                shape = (shape,)
            if kind is LAYER:
                return torch.layer_norm(input, shape, weight, bias, eps)
            return torch.rms_norm(input, shape, weight, eps)
        ndim = _trailing_dimensions(input, weight, bias, normalized_shape)
        if _dispatch_modes() and torch.onnx.is_in_onnx_export():
            settled = Options(ndim, eps, activation, scale, out_dtype, *kind)
            return _in_onnx(Arguments(input, residual, weight, bias, settled))
        if is_plain and kind is LAYER:  # passing the defaults would cost a microsecond
            return _layer_norm(input, ndim, weight, bias, eps)
        last = (*kind, True) if keeps_order else () if kind is LAYER else kind
        if residual is None:
            return _layer_norm(input, ndim, weight, bias, eps, activation, scale, out_dtype, *last)
        return _add_layer_norm(
            input, residual, ndim, weight, bias, eps, activation, scale, out_dtype, *last
        )
    except Exception as error:
        norm = (weight, bias, eps, normalized_shape, activation, scale, out_dtype, *kind)
        raise arguments.explain(error, input, *norm, residual=residual) from None


def _serve_dim(
    input: Tensor, dim: int, weight: Any, bias: Any, eps: float, normalized_shape: Any, *last: Any
) -> Tensor:
    """A norm over one dimension: that of a view in which it is the last; `last` is as serve's."""
    dim = arguments.check_dim(input, weight, bias, dim, normalized_shape)
    end = input.dim() - 1  # ONNX has no dimensions counted from the end
    x = input.movedim(dim, end)
    call: Any = (x, None, weight, bias, eps, (x.shape[end],), *last, True)
    y: Tensor = serve(*call)
    return y.movedim(end, dim)


def _call(operator: Operator, a: Arguments) -> Any:
    return operator.overload(*operator.lay_out(a))


def _serve_ada(
    input: Tensor,
    residual: Tensor | None,
    gate: Tensor | None,
    shift: Tensor | None,
    scale: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    normalized_shape: int | Sequence[int] | None,
    out_dtype: torch.dtype | None,
    kind: Kind,
) -> Any:
    """ada_layer_norm where residual is None, else add_ada_layer_norm."""
    norm = (weight, bias, eps, normalized_shape, None, 1.0, out_dtype, *kind)
    tensors: dict[str, Any] = {"residual": residual, "gate": gate, "shift": shift, "scale": scale}
    if _is_compiling():
        a = arguments.settle(input, *norm, **tensors, is_ada=True)
        return _call(ADA_LAYER_NORM if residual is None else ADD_ADA_LAYER_NORM, a)
    try:
        if normalized_shape is not None:
            ndim = _trailing_dimensions(input, weight, bias, normalized_shape)
        else:
            parameter = bias if weight is None else weight
            ndim = 1 if parameter is None else parameter.dim()
        by_pytorch = out_dtype is None and is_pytorchs(input, weight, bias, eps, kind)
        if by_pytorch or (_dispatch_modes() and torch.onnx.is_in_onnx_export()):
            options = Options(ndim, eps, None, 1.0, out_dtype, *kind)
            a = Arguments(input, residual, weight, bias, options, gate, shift, scale)
            found = _by_pytorch(a) if by_pytorch else _in_onnx(a)
            if found is not None:
                return found
        last: tuple[Any, ...] = () if kind is LAYER and out_dtype is None else (out_dtype, *kind)
        if residual is None:
            return _ada_layer_norm(input, ndim, shift, scale, weight, bias, eps, *last)
        return _add_ada_layer_norm(
            input, residual, gate, ndim, shift, scale, weight, bias, eps, *last
        )
    except Exception as error:
        raise arguments.explain(error, input, *norm, **tensors, is_ada=True) from None


def _serve_gated(
    input: Tensor,
    residual: Tensor,
    gate: Any,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    normalized_shape: Any,
    activation: str | None,
    scale: float,
    out_dtype: torch.dtype | None,
    kind: Kind = LAYER,
) -> tuple[Tensor, Tensor]:
    """add_layer_norm or add_rms_norm with a gate.

    No kernel fuses a gated sum with an activation, a scale or the rounding of xhat: there the sum
    is PyTorch's.
    """
    if residual is None:
        arguments.check_tensor("residual", residual)
    norm = (weight, bias, eps, normalized_shape)
    if normalized_shape is None:
        arguments.normalized_ndim(input, weight, bias, None)  # raises if no shape is given
    is_fused = activation is None and isinstance(scale, (int, float)) and scale == 1.0
    if is_fused and not kind.round_before_weight:
        return _serve_ada(input, residual, gate, None, None, *norm, out_dtype, kind)
    options = (activation, scale, out_dtype, *kind)
    a = arguments.settle(input, *norm, *options, residual=residual, gate=gate)
    device = input.device.type
    if _has_autocast(device) and torch.is_autocast_enabled(device):
        a = under_autocast(a)
    arguments.check(a)
    residual_out = formulas.add(input, residual, gate)
    if a.rounds_xhat and input.dtype != residual.dtype:
        found = formulas.forward(a._replace(options=a.options._replace(out_dtype=a.y_dtype)))
        return found.y, residual_out
    acc = formulas.acc_dtype(residual.dtype)
    weight, bias = (
        parameter if parameter is None or parameter.dtype == residual.dtype else parameter.to(acc)
        for parameter in (a.weight, a.bias)
    )
    shape = tuple(a.normalized_shape)
    y = serve(residual_out, None, weight, bias, eps, shape, activation, scale, a.y_dtype, kind)
    return y, residual_out


# Dynamo of torch 2.10 cannot follow the choice below: there, every call keeps its kernel.
CHOOSES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)


def _compiled(operator: Operator, a: Arguments) -> Operator | None:
    """The operator for a compiled graph: this one, its twin, or None for PyTorch's own norm.

    compile/rules.py decides. The operations around the call are not known here, so elementwise
    ones are assumed.
    """
    options = a.options
    if not CHOOSES or a.input.dim() == 0 or options.keeps_order:
        return operator
    choice = _choice_of(
        a.input,
        math.prod(a.normalized_shape),
        "RESIDUAL" if a.residual is not None else "ACTIVATED" if options.activation else "PLAIN",
        a.residual is None and options.activation is None and options.out_dtype is None,
        options.output_scale,
        options.statistic,
    )
    if choice == "KERNEL":
        return operator
    if choice == "PYTORCH" and (
        _is_pytorchs_rms_norm(a.input, a.weight, a.bias, options)
        if options.is_rms
        else options.weight_offset == 0 and not options.round_before_weight
    ):
        return None
    return ATEN_LAYER_NORM if a.residual is None else ATEN_ADD_LAYER_NORM


def is_inductors_rms_norm(x: Tensor) -> bool:
    """Whether a graph gets an RMSNorm over x's last dimension as its class writes it."""
    return CHOOSES and _choice_of(x, x.shape[-1], "PLAIN", False, 1.0, "rms") == "PYTORCH"


def _choice_of(
    x: Tensor, cols: int, kind: str, may_be_cast: bool, scale: float, statistic: str
) -> str:
    """What the rules choose for a norm of x that Dynamo traces; the kernel, if they are not asked.

    `may_be_cast`: autocast casts x for PyTorch's norm, if it is on and the scale is 1.
    """
    from torch.fx.experimental.symbolic_shapes import has_static_value

    device, stride = x.device.type, x.stride(-1)
    if device not in rules.DEVICES or not has_static_value(cols):
        return "KERNEL"
    has_hidden_casts = (
        may_be_cast
        and _has_autocast(device)
        and torch.is_autocast_enabled(device)
        and has_static_value(scale)
        and scale == 1.0
    )
    return _choice(
        kind,
        index(cols),  # In Dynamo of torch 2.11, int(cols) would be no constant.
        index(stride) if has_static_value(stride) else 0,
        bool(has_hidden_casts),
        torch.are_deterministic_algorithms_enabled(),
        statistic,
    )


def _choice(
    kind: str, cols: int, stride: int, hidden_casts: bool, deterministic: bool, statistic: str
) -> str:
    # If Dynamo of torch 2.11 traced is_exporting(), it would be true in every graph.
    if torch.compiler.is_exporting():
        return rules.Choice.KERNEL.name
    problem = rules.Problem(
        rules.Kind[kind],
        cols,
        has_neighbours=True,
        columns=rules.Columns.TOGETHER if stride == 1 else rules.Columns.APART,
        deterministic=deterministic,
        with_hidden_casts=hidden_casts,
        statistic=statistic,
        is_call=True,
    )
    return rules.choose(problem).choice.name


def _has_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type)  # Dynamo of torch 2.10 cannot trace it.


# torch.compiler.assume_constant_result does the same, but would import all of Dynamo.
for _function in (_choice, _has_autocast):
    _function._dynamo_marked_constant = True  # type: ignore[union-attr]


def _is_pytorchs_rms_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, kind: Kind | Options
) -> bool:
    """Whether PyTorch's rms_norm has all that this RMSNorm has, and gives it input's dtype."""
    return (
        bias is None
        and kind.weight_offset == 0
        and (weight is None or (weight.dtype is input.dtype and not kind.round_before_weight))
    )


def is_pytorchs(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float | None, kind: Kind
) -> bool:
    """Whether PyTorch's own norm computes the norm of this call; it may still refuse the call.

    Nested tensors and an eps of NaN go to the operators, which refuse them. The operators also
    serve what PyTorch does not: parameters of other dtypes, derivatives of every order under
    torch.func, and tracing, where a compiler knows them by their name.
    """
    return (
        input.is_cpu
        and _get_dispatch_mode(_PROXY) is None
        and not _cpu_operators
        and type(input) is Tensor
        and (
            _takes_parameters(input.dtype, weight, bias)
            if kind is LAYER
            else kind.statistic == "rms" and _is_pytorchs_rms_norm(input, weight, bias, kind)
        )
        and eps == eps
        and not input.is_nested
        and not _in_transform()
    )


def _by_pytorch(a: Arguments) -> Any:
    """A modulated norm on the CPU in PyTorch's operators, as a model would write it.

    None for mixed dtypes, and for shapes that the operators refuse. The operators' composite
    would compute in float32 throughout, and take longer.
    """
    input, residual, weight, bias, options, gate, shift, scale = a
    if weight is not None and weight.dtype is not input.dtype:
        return None
    for tensor in (residual, gate, shift, scale):
        if tensor is None:
            continue
        is_plain = tensor.is_cpu and tensor.dtype is input.dtype and not tensor.is_nested
        if not is_plain or tensor.layout is not torch.strided:
            return None
    x = input
    if residual is not None:
        if residual.shape != input.shape:
            return None
        x = residual + input if gate is None else torch.addcmul(residual, gate, input)
    shape = x.shape[x.dim() - options.normalized_ndim :]
    if options.is_rms:
        y = torch.rms_norm(x, shape, weight, options.eps)
    else:
        y = torch.layer_norm(x, shape, weight, bias, options.eps)
    y = formulas.modulate(y, shift, scale)
    if y.shape != input.shape:  # A modulation, or residual, would enlarge input.
        return None
    return y if residual is None else (y, x)


def _takes_parameters(dtype: torch.dtype, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether PyTorch's layer_norm on the CPU takes weight and bias with an input of this dtype."""
    if weight is not None and bias is not None and weight.dtype is torch.float32 is bias.dtype:
        return dtype in _BESIDE_FLOAT32
    return (weight is None or weight.dtype is dtype) and (bias is None or bias.dtype is dtype)


_BESIDE_FLOAT32 = (torch.float32, *arguments.HALF)


def _in_onnx(a: Arguments) -> Any:
    """A call in PyTorch's operators, which torch.onnx.export(..., dynamo=True) can translate."""
    arguments.check(a)
    ndim, eps, *_ = a.options
    dtypes = {t.dtype for t in (a.input, a.weight, a.bias) if t is not None}
    is_plain = a.options == Options(ndim, eps) and not a.is_modulated and len(dtypes) == 1
    if a.residual is None and is_plain:
        return torch.layer_norm(a.input, a.normalized_shape, a.weight, a.bias, eps)
    operator = LAYER_NORM if a.residual is None else ADD_LAYER_NORM
    return operator.outputs(formulas.forward(a))


_INTS = {int}


def _trailing_dimensions(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, normalized_shape: Any
) -> int:
    """How many dimensions to normalize over."""
    if (
        type(normalized_shape) is tuple
        and {*map(type, normalized_shape)} == _INTS
        and input.shape[-len(normalized_shape) :] == normalized_shape
    ):
        return len(normalized_shape)
    return arguments.normalized_ndim(input, weight, bias, normalized_shape)

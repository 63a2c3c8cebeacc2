# SPDX-License-Identifier: Apache-2.0
"""The calls of the operators as records, and the arithmetic of all families as differentiable
expressions in PyTorch's own operators.

A family has one formula, of a forward or of a backward operator's call: it computes what the
operators give where there are no kernels, and PyTorch differentiates it any number of times, in
reverse and in forward mode; with `once` only once, by fewer operators. PyTorch's own layer_norm
would not do: its double backward treats mean and rstd as constants, so the third derivative is
wrong. Where nothing is differentiated twice it serves.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections import namedtuple
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import compute_elementwise_output_strides

from . import load

_aten = torch.ops.aten


# ---- Calls.


class Record:
    """What a call has of fields that its operator does not take, and what follows from its fields.

    y = activation(norm(x) (weight + weight_offset) + bias, modulated) output_scale.
    """

    residual: Tensor | None = None
    gate: Tensor | None = None
    shift: Tensor | None = None
    scale: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    dresidual: Tensor | None = None
    activation: str | None = None
    output_scale: float = 1.0
    out_dtype: torch.dtype | None = None
    statistic: Any = "layer"
    weight_offset: float = 0.0
    round_before_weight: bool = False
    keeps_order: bool = False
    input: Any
    normalized_ndim: Any
    eps: Any

    @property
    def is_rms(self) -> bool:
        """Whether the norm is RMSNorm, which has no mean."""
        return self.statistic == "rms"

    @property
    def is_modulated(self) -> bool:
        """Whether only the ada operators take this call."""
        return self.gate is not None or self.shift is not None or self.scale is not None

    @property
    def is_plain(self) -> bool:
        """Whether it is a norm alone, which PyTorch's function computes of tensors of one dtype."""
        return self.residual is None and not self.is_modulated and self.is_bare

    @property
    def is_bare(self) -> bool:
        """Whether nothing but a sum before it and a modulation may be fused to the norm."""
        return (
            self.activation is None
            and self.output_scale == 1.0
            and self.out_dtype is None
            and self.weight_offset == 0.0
            and not (self.round_before_weight and self.weight is not None)
        )

    @property
    def rounds_xhat(self) -> bool:
        """Whether xhat is rounded to input's dtype, for the sake of a weight."""
        return self.round_before_weight and self.weight is not None

    @property
    def y_dtype(self) -> torch.dtype:
        return self.out_dtype or self.input.dtype

    @property
    def normalized_shape(self) -> torch.Size:
        return self.input.shape[self.input.dim() - self.normalized_ndim :]


def fields_of(operator: torch._ops.OpOverload) -> list[str]:
    """The arguments of an operator by the names that a record has: layer_norm's number `scale` is
    output_scale there, because `scale` is that of a modulation."""
    return [
        "output_scale" if a.name == "scale" and isinstance(a.type, torch.FloatType) else a.name
        for a in operator._schema.arguments
    ]


@functools.cache
def call_of(operator: torch._ops.OpOverload) -> Any:
    """The class of an operator's calls: a named tuple of the arguments of its schema, and a Record.

    Of a backward operator `grads` are the gradients that it is given, `differentiated` names the
    tensors whose gradients it gives, in the order of its results, and `wanted` those that a call
    asks for by its flags needs_d....
    """
    fields, arguments = fields_of(operator), operator._schema.arguments
    defaults = [a.default_value for a in arguments if a.has_default_value()]
    call: Any = namedtuple(operator._opname, fields, defaults=defaults)  # type: ignore[misc]
    members = {name: value for name, value in vars(Record).items() if name[:2] != "__"}
    names = tuple(name.removeprefix("needs_d") for name in fields if name.startswith("needs_d"))
    given = [name for name in fields if name[0] == "d"]
    members["grads"] = property(lambda self: [getattr(self, name) for name in given])
    members["differentiated"] = names
    members["wanted"] = property(lambda self: [n for n in names if getattr(self, f"needs_d{n}")])
    # Not as a base class: Dynamo knows a named tuple by its bases.
    for name in members.keys() - {*fields}:
        setattr(call, name, members[name])
    return call


# ---- What they compute.

_warned = False


def warn_of_cuda(x: Tensor) -> None:
    """Warns once in a process where PyTorch's operators serve CUDA, too. Where there are kernels,
    CUDA tensors come here only in calls that none takes."""
    global _warned
    name = load.layer_norm._schema.name
    if not _warned and not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"):
        _warned = True
        reason = load.operators._driver_problem() or (
            "this build of fused_layernorm has no CUDA kernels: CUDA tensors take PyTorch's own "
            "operators, which are slower"
        )
        warnings.warn(f"{reason} (python -m fused_layernorm says what is installed)", stacklevel=2)


def acc_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def to(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


_ACTIVATIONS: dict[str, Any] = {
    **{name: getattr(_aten, name) for name in ("gelu", "silu", "relu", "leaky_relu", "sigmoid")},
    "gelu_tanh": functools.partial(_aten.gelu, approximate="tanh"),
}


def activate(z: Tensor, activation: str | None) -> Tensor:
    """activation(z)."""
    return z if activation is None else _ACTIVATIONS[activation](z)


def shifted(weight: Tensor | None, offset: float, dtype: torch.dtype) -> Tensor | None:
    """weight + offset in this dtype; None without a weight."""
    wide = to(weight, dtype)
    return wide if wide is None or offset == 0 else wide + offset


def affine(xhat: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """xhat * weight + bias."""
    z = xhat if weight is None else xhat * weight
    return z if bias is None else z + bias


def modulate(z: Tensor, shift: Tensor | None, scale: Tensor | None) -> Tensor:
    """z * (1 + scale) + shift."""
    if scale is None:
        return z if shift is None else z + shift
    return z * (1 + scale) if shift is None else torch.addcmul(shift, z, 1 + scale)


def epilogue(a: Any, z: Tensor, shift: Tensor | None, scale: Tensor | None) -> Tensor:
    """What follows the affine step of a call; backward's y has dy's dtype."""
    y = activate(modulate(z, shift, scale), a.activation)
    y = y if a.output_scale == 1.0 else y * a.output_scale
    return y.to(a.dy.dtype if is_backward(a) else a.y_dtype)


def is_backward(a: Any) -> bool:
    """Whether a call is that of a backward operator."""
    return hasattr(a, "dy")


def add(input: Tensor, residual: Tensor, gate: Tensor | None = None) -> Tensor:
    """residual_out: residual + gate * input in the arithmetic's dtype, rounded to residual's.

    PyTorch itself adds half-precision tensors in float32, and rounds to the wider dtype of the two.
    But it would round the product gate * input before the addition.
    """
    if gate is None:
        return (input + residual).to(residual.dtype).contiguous()
    acc = acc_dtype(input.dtype, residual.dtype, gate.dtype)
    total = torch.addcmul(residual.to(acc), gate.to(acc), input.to(acc))
    return total.to(residual.dtype).contiguous()


def like(x: Tensor, dtype: torch.dtype, keeps_order: bool) -> Tensor:
    """An empty tensor of x's shape, contiguous or in the strides of torch.empty_like(x)."""
    if not keeps_order:
        return x.new_empty(x.shape, dtype=dtype)
    if type(x) is Tensor and not x.is_meta:
        return torch.empty_like(x, dtype=dtype)
    # A fake torch.empty_like loses the strides of dimensions of size 1, which the real one keeps.
    return x.new_empty_strided(x.shape, compute_elementwise_output_strides(x), dtype=dtype)


class _Xhat(torch.autograd.Function):
    """xhat of rows whose mean and rstd are known, to be differentiated once: by fewer operators."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor | None, rstd: Tensor, ndim: int) -> Tensor:
        centered = x if mean is None else x - mean
        ctx.save_for_backward(centered, rstd)
        ctx.ndim, ctx.is_rms = ndim, mean is None
        return centered * rstd

    @staticmethod
    def backward(ctx: Any, dxhat: Tensor) -> Any:
        centered, rstd = ctx.saved_tensors
        ndim = ctx.ndim
        if ctx.is_rms:
            xhat = centered * rstd
            along = (dxhat * xhat).mean(tuple(range(-ndim, 0)), keepdim=True)
            return torch.addcmul(dxhat, xhat, along, value=-1) * rstd, None, None, None
        # PyTorch's takes x rstd - mean rstd for xhat, which cancels where the mean is large. So it
        # gets x - mean and a mean of zero.
        rows = (dxhat.contiguous(), centered.contiguous(), centered.shape[centered.dim() - ndim :])
        rstd = rstd.contiguous()
        of_rows = (*rows, torch.zeros_like(rstd), rstd, None, None, [True, False, False])
        return _aten.native_layer_norm_backward(*of_rows)[0], None, None, None


def normalized(a: Any, x: Tensor, ndim: int, once: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """The mean, xhat and rstd of x, which has the arithmetic's dtype, over its last dimensions.

    RMSNorm's mean is an empty tensor. eps is no argument of backward: rstd has the value that the
    forward pass gave. once: whether what this gives in backward is differentiated no second time.
    """
    dims = tuple(range(-ndim, 0))
    if once and is_backward(a):
        shape = (*x.shape[: x.dim() - ndim], *[1] * ndim)
        given, rstd = None if a.is_rms else a.mean.reshape(shape), a.rstd.reshape(shape)
        return x.new_empty((0,)), _Xhat.apply(x, given, rstd, ndim), rstd
    mean, centered = x.new_empty((0,)), x
    if not a.is_rms:
        mean = x.mean(dims, keepdim=True)
        # A large mean takes its digits from the sum. Its derivative is that of the sum.
        mean = mean + (x - mean).mean(dims, keepdim=True).detach()
        centered = x - mean
    variance = centered.square().mean(dims, keepdim=True)
    if is_backward(a):
        rstd = a.rstd.reshape(variance.shape)
        rstd = rstd * (1 + rstd.square() * (variance - variance.detach())).rsqrt()
    else:
        rstd = (variance + a.eps).rsqrt()
    return mean, centered * rstd, rstd


def rows(a: Any, once: bool = False) -> tuple[Tensor, ...]:
    """What the forward operators of rows give: y, with a residual residual_out, mean and rstd; of a
    backward operator's call y, and what was normalized."""
    if is_backward(a):
        x = a.x.to(acc_dtype(a.x.dtype))
    else:
        x = a.input if a.residual is None else add(a.input, a.residual, a.gate)
    ndim, acc = a.normalized_ndim, acc_dtype(x.dtype)
    wide, weight, bias = x.to(acc), shifted(a.weight, a.weight_offset, acc), to(a.bias, acc)
    # PyTorch's layer_norm would read a contiguous copy of x.
    lies_apart = a.keeps_order and not x.is_contiguous()
    if not once or is_backward(a) or a.is_rms or a.rounds_xhat or lies_apart:
        mean, xhat, rstd = normalized(a, wide, ndim, once)
        z = affine(xhat.to(a.input.dtype).to(acc) if a.rounds_xhat else xhat, weight, bias)
    else:
        shape = x.shape[x.dim() - ndim :]
        z, mean, rstd = _aten.native_layer_norm(wide.contiguous(), shape, weight, bias, a.eps)
    y = epilogue(a, z, to(a.shift, acc), to(a.scale, acc))
    if is_backward(a):
        return y, x
    return (y, mean, rstd) if a.residual is None else (y, x, mean, rstd)


def _of_channels(parameter: Tensor | None, x: Tensor) -> Tensor | None:
    """A parameter of channels, or of channels of samples, that broadcasts to x, in its dtype."""
    if parameter is None:
        return None
    shape = parameter.shape[:2] if parameter.dim() > 1 else (1, *parameter.shape)
    return parameter.to(x.dtype).reshape(*shape, *[1] * (x.dim() - 2))


def group_epilogue(a: Any, z: Tensor) -> Tensor:
    """The modulation of z and what follows it, in y's dtype."""
    return epilogue(a, z, *(_of_channels(each, z) for each in (a.shift, a.scale)))


def groups(a: Any, once: bool = False) -> tuple[Tensor, ...]:
    """What group_norm_forward gives, or what its backward operator differentiates."""
    input = a.x if is_backward(a) else a.input
    count, acc = a.num_groups, acc_dtype(input.dtype)
    if once and not is_backward(a):
        if input.numel() == 0:
            mean = input.new_zeros(input.shape[0], count, dtype=acc)
            y = torch.empty_like(input, dtype=a.y_dtype)
            return y, mean, torch.full_like(mean, torch.nan)  # as PyTorch has it
        # PyTorch's own. In other orders of memory it takes E[x^2] - E[x]^2 for the variance, and
        # x rstd - mean rstd for xhat, which loses digits where x is the mean.
        if input.is_cpu and input.is_contiguous() and input.numel() > 2 * len(input) * count:
            sizes = (*input.shape[:2], math.prod(input.shape[2:]))
            # The native operator reads parameters as if they were contiguous.
            weight, bias = (p if p is None else p.to(acc).contiguous() for p in (a.weight, a.bias))
            given = (input.to(acc), weight, bias, *sizes, count, a.eps)
            z, mean, rstd = _aten.native_group_norm(*given)
            return group_epilogue(a, z), mean, rstd
    x = input.to(acc).unflatten(1, (count, input.shape[1] // count))
    mean, xhat, rstd = normalized(a, x, x.dim() - 2, once)
    xhat = xhat.flatten(1, 2)
    weight, bias = (_of_channels(each, xhat) for each in (a.weight, a.bias))
    y = group_epilogue(a, affine(xhat, weight, bias))
    return (y,) if is_backward(a) else (y, mean.flatten(1), rstd.flatten(1))


def gated(a: Any, once: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """What rms_norm_gated_forward gives, or what its backward operator differentiates."""
    input = a.x if is_backward(a) else a.input
    dtype, weight, acc = input.dtype, a.weight, acc_dtype(input.dtype)
    x, factor = input.to(acc), activate(a.gate.to(acc), a.gate_activation)
    u, size = x * factor if a.gate_first else x, a.group_size or x.shape[-1]
    u = u.reshape(*u.shape[:-1], u.shape[-1] // size if size else 1, size)
    mean, xhat, rstd = normalized(a, u, 1, once)
    z = xhat.flatten(-2)
    if a.rounds_xhat:
        z = z.to(dtype).to(acc)
    z = affine(z, shifted(weight, a.weight_offset, acc), to(a.bias, acc))
    if a.rounds_xhat:
        z = z.to(torch.promote_types(dtype, weight.dtype)).to(acc)
    y = z if a.gate_first else z * factor
    return epilogue(a, y, None, None), mean, rstd.squeeze(-1)


def norm_of(a: Any, x: Tensor) -> Tensor:
    """PyTorch's own norm of x, with what a call over rows has of it."""
    shape = x.shape[x.dim() - a.normalized_ndim :]
    if a.is_rms:
        return torch.rms_norm(x, shape, a.weight, a.eps)
    return torch.layer_norm(x, shape, a.weight, a.bias, a.eps)

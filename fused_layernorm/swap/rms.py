# SPDX-License-Identifier: Apache-2.0
"""The forwards that replace those of the RMSNorm classes of other libraries.

A forward keeps the order of casts and the result's dtype of the one that it replaces. It gives the
result's dtype to the operator, because autocast touches none of the operators that these classes
round with. The result lies in memory in the order of x, as elementwise operators leave it. A
forward returns None as those of forwards.py, and for every call on a device without kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import calls
from ..compile import choice
from ..functional import layer_norm, norm_gated, norm_in_groups, rms_norm
from ..ops.arguments import DTYPES, GATES
from ..ops.operators import GatedArguments, describe
from ..stock import dtypes_are_supported, has_kernels
from .classes import Forward, forward_of
from .forwards import parameter


class Variant(NamedTuple):
    """What the classes differ in, as rms_norm's arguments say it."""

    weight_offset: float = 0.0
    round_before_weight: bool = False


PLAIN, ROUNDED, PLUS_ONE = Variant(), Variant(round_before_weight=True), Variant(weight_offset=1.0)

_F32, _F16, _BF16 = torch.float32, torch.float16, torch.bfloat16

# By the dtypes of x and weight, the dtype of the result. What is not listed is not for the kernels.
# These classes compute float64 in float32, which the kernels do not.
Dtypes = dict[tuple[torch.dtype, torch.dtype | None], torch.dtype]
OF_X: Dtypes = {(x, weight): x for x in (_F32, _F16, _BF16) for weight in (x, _F32, None)}
PROMOTED: Dtypes = {(x, weight): torch.promote_types(x, weight or x) for x, weight in OF_X}
_WIDE: Dtypes = dict.fromkeys(OF_X, _F32)
ONE: Dtypes = {key: x for key, x in OF_X.items() if key[1] in (x, None)}
# For classes that round at every step in half precision.
FLOAT32: Dtypes = {key: x for key, x in OF_X.items() if x is _F32}


def normalized(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    variant: Variant,
    dtypes: Dtypes,
    keeps_order: bool = True,
    activation: str | None = None,
    size: int = 0,
) -> Tensor | None:
    """The norm over the last dimension, or groups of this size; None if no kernel takes it."""
    out_dtype = _out_dtype(x, weight, eps, dtypes, size)
    if out_dtype is None:
        return None
    compiling = calls.is_compiling()
    if compiling and choice.choice_of(x, x.shape[-1], "PLAIN", "rms") == "PYTORCH":
        return None
    if compiling and keeps_order and x.stride(-1) != 1:
        return None
    order = None if compiling or not keeps_order else _order_of_memory(x)
    rows = x if order is None else x.permute(order)
    has_gaps = order is None and not x.is_contiguous()
    is_in_groups = size not in (0, x.shape[-1])
    if is_in_groups and has_gaps:
        return None
    a = describe(
        rows, weight=weight, eps=eps, activation=activation, out_dtype=out_dtype, statistic="rms",
        weight_offset=variant.weight_offset, round_before_weight=variant.round_before_weight,
        keeps_order=keeps_order and has_gaps,
    )  # fmt: skip
    y = norm_in_groups(a, size, None, None) if is_in_groups else calls.run(a)
    return _permuted_back(y, order)


def _out_dtype(
    x: Tensor, weight: Tensor | None, eps: Any, dtypes: Dtypes, size: int
) -> torch.dtype | None:
    """The dtype of the result, or None if a norm of x is not for the kernels."""
    if not has_kernels(x) or type(eps) is not float or eps != eps or x.dim() == 0:
        return None
    if weight is not None and weight.shape != (x.shape[-1],):
        return None
    if size != 0 and (size < 0 or x.numel() == 0 or x.shape[-1] % size != 0):
        return None
    return dtypes.get((x.dtype, None if weight is None else weight.dtype))


def _order_of_memory(x: Tensor) -> list[int] | None:
    """The order of x's dimensions in memory, if it is not theirs and rows lie as the kernels write
    them, one after another."""
    if x.is_contiguous() or x.stride(-1) != 1 or 0 in x.stride():
        return None
    return [*sorted(range(x.dim() - 1), key=x.stride, reverse=True), x.dim() - 1]


def _permuted_back(y: Tensor, order: list[int] | None) -> Tensor:
    return y if order is None else y.permute([*map(order.index, range(y.dim()))])


# ---- Forwards, named by what they compute or by a model that has them.


class Norm(NamedTuple):
    """What a module computes of x alone: the further arguments of `normalized`."""

    weight: Tensor | None
    eps: float
    variant: Variant
    dtypes: Dtypes


# By forward, those that may become part of another kernel: the norm of a module, and of an x.
NORMS: dict[Forward | None, Callable[[Any, Tensor], Norm | None]] = {}


def norm_of(module: Any, x: Tensor) -> Norm | None:
    """The norm that a swapped module computes of x, if it may become part of another kernel."""
    of = NORMS.get(forward_of(type(module)))
    return None if of is None else of(module, x)


def norm(eps: str, variant: Variant = PLAIN, dtypes: Dtypes = OF_X) -> Forward:
    """A norm whose eps is in the attribute of this name."""

    def forward(self: Any, x: Tensor) -> Tensor | None:
        return normalized(x, parameter(self, "weight"), getattr(self, eps), variant, dtypes)

    NORMS[forward] = lambda module, x: Norm(module.weight, getattr(module, eps), variant, dtypes)
    return forward


rounded_once = norm("eps")


def of_rms_norm(self: Any, x: Tensor) -> Tensor | None:
    """What calls F.rms_norm, as subclasses of nn.RMSNorm that a predicate accepted."""
    weight, eps = parameter(self, "weight"), self.eps
    if eps != eps or not dtypes_are_supported(x, weight, None):
        return None
    return rms_norm(x, weight, eps, normalized_shape=tuple(self.normalized_shape))


def muse_spark(self: Any, x: Tensor, keeps_order: bool = True) -> Tensor | None:
    """1 + weight is rounded to weight's dtype, which only a float32 weight leaves to the kernel."""
    weight, variant = self.weight, PLUS_ONE
    if weight.dtype is not _F32:
        weight, variant = weight + 1.0, PLAIN
    return normalized(x, weight, self.eps, variant, OF_X, keeps_order)


def krea2(self: Any, x: Tensor) -> Tensor | None:
    return muse_spark(self, x, keeps_order=False)  # as F.rms_norm, which it calls


def gemma3n(self: Any, x: Tensor) -> Tensor | None:
    return (rounded_once if self.with_scale else weightless)(self, x)


def weightless(self: Any, x: Tensor) -> Tensor | None:
    return normalized(x, None, self.eps, PLAIN, OF_X)


def diffusers_without_bias(self: Any, x: Tensor, eps: str = "eps") -> Tensor | None:
    """xhat is rounded to the dtype of a weight of half precision, and else not at all."""
    weight = self.weight
    rounds = weight is None or weight.dtype is x.dtype
    how = (ROUNDED, OF_X) if rounds else (PLAIN, _WIDE)
    return normalized(x, weight, getattr(self, eps), *how)


def t5(self: Any, x: Tensor) -> Tensor | None:
    return diffusers_without_bias(self, x, "variance_epsilon")


def diffusers(self: Any, x: Tensor) -> Tensor | None:
    y = diffusers_without_bias(self, x)
    if y is None or self.weight is None or self.bias is None:
        return y
    return y + self.bias  # the class rounds before it adds the bias


NORMS[diffusers] = lambda self, x: (
    Norm(self.weight, self.eps, ROUNDED, ONE) if self.bias is None else None
)


def stable_audio3(self: Any, x: Tensor) -> Tensor | None:
    return normalized(x, self.gamma, self.eps, PLAIN, OF_X if self.force_fp32 else FLOAT32)


def timm(self: Any, x: Tensor) -> Tensor | None:
    """The class calls F.rms_norm, but for the fast norms of timm."""
    return None if self._fast_norm or not has_kernels(x) else of_rms_norm(self, x)


def timm_float32(self: Any, x: Tensor) -> Tensor | None:
    if len(self.normalized_shape) != 1:
        return None
    weight = parameter(self, "weight")
    return normalized(x, weight, self.eps, PLAIN, OF_X, False)  # as F.rms_norm, which it calls


# ---- A norm and its gate, and norms over groups of columns.


def gemma_groups(self: Any, x: Tensor) -> Tensor | None:
    weight, size = parameter(self, "weight"), self.group_size
    return normalized(x, weight, self.eps, PLUS_ONE, OF_X, size=size or 0)


class Groups(NamedTuple):
    """Over how many columns a class with a gate normalizes, 0 for all, and what its gate is."""

    size: int = 0
    gate_first: bool = False
    activation: str = "silu"
    is_optional: bool = True


def gated(variant: Variant, dtypes: Dtypes, groups: Callable[..., Groups | None]) -> Forward:
    """A norm with a gate behind or before it, as `groups` says of a module and x.

    A call is not for the kernels if the result is not contiguous in x's order of memory.
    """

    def forward(self: Any, x: Tensor, gate: Any = None) -> Tensor | None:
        weight, eps, of = parameter(self, "weight"), self.variance_epsilon, groups(self, x)
        if of is None:
            return None
        if gate is None and of.is_optional:
            return normalized(x, weight, eps, variant, dtypes, size=of.size)
        out_dtype = _out_dtype(x, weight, eps, dtypes, of.size)
        if out_dtype is None or of.activation not in GATES or not isinstance(gate, Tensor):
            return None
        if gate.shape != x.shape or gate.device != x.device or gate.dtype not in DTYPES:
            return None
        compiling, order = calls.is_compiling(), None
        if not x.is_contiguous():
            order = None if compiling else _order_of_memory(x)
            if order is None:
                return None
            x, gate = x.permute(order), gate.permute(order)
        if compiling and choice.choice_of(x, of.size or x.shape[-1], "GATED", "rms") == "PYTORCH":
            return None
        options: Any = (of.gate_first, of.activation, of.size or None, out_dtype)
        a = GatedArguments(x, gate, weight, None, eps, *options, *variant)
        return _permuted_back(norm_gated(a), order)

    return forward


def of_falcon_h1(self: Any, x: Tensor) -> Groups | None:
    groups = self.n_groups
    if x.dim() not in (2, 3) or groups < 1 or x.shape[-1] % groups:
        return None
    return Groups(x.shape[-1] // groups, gate_first=not self.norm_before_gate)


def of_falcon_h1_squeezed(self: Any, x: Tensor) -> Groups | None:
    """A sequence of one token loses its dimension."""
    return None if x.dim() == 3 and x.shape[1] == 1 else of_falcon_h1(self, x)


def whole(self: Any, x: Tensor) -> Groups:
    return Groups(activation=self.activation, is_optional=False)


def of_mamba2(self: Any, x: Tensor) -> Groups:
    return Groups(getattr(self, "group_size", 0), gate_first=True)


# ---- Norms over channels. The result has the strides of torch.empty_like(x). With an activation
# ---- behind the norm (neighbours.py) all is rounded once.


def _is_over_channels(x: Any, weight: Any, *, half: bool) -> bool:
    """Whether the kernels serve a norm over dimension 1 of x: float32, perhaps half precision."""
    if not has_kernels(x) or x.dim() < 2:
        return False
    return (x.dtype, None if weight is None else weight.dtype) in (OF_X if half else FLOAT32)


def timm_2d(self: Any, x: Tensor, wide: bool = False) -> Tensor | None:
    """In half precision RmsNorm2d rounds at every step, or autocast decides where it does."""
    weight, is_fast = self.weight, not wide and self._fast_norm
    if is_fast or not _is_over_channels(x, weight, half=wide):
        return None
    if x.dim() != 4 or len(self.normalized_shape) != 1:
        return None
    if weight is not None and weight.shape != x.shape[1:2]:
        return None
    return rms_norm(x, weight, self.eps, out_dtype=x.dtype, dim=1)


def timm_2d_float32(self: Any, x: Tensor) -> Tensor | None:
    return timm_2d(self, x, wide=True)


def _normalize(self: Any, x: Tensor, bias: Any, activation: str | None) -> Tensor | None:
    """As diffusers' VAEs: F.normalize, which divides by the length of the vector of channels or by
    1e-12, whichever is more; then the factors scale (the root of the number of channels) and gamma,
    and a bias."""
    gamma = self.gamma
    if not _is_over_channels(x, gamma, half=True):
        return None
    channels = x.shape[1]
    if gamma.shape != (channels, *(1,) * (x.dim() - 2)) or self.scale != channels**0.5:
        return None
    eps = 1e-24 / channels  # added to the mean of the squares, and so 1e-12 to the length at most
    if x.dtype is torch.float32 or activation is not None:
        offset = bias.flatten() if isinstance(bias, Tensor) else None
        if gamma.dtype is not x.dtype or (offset is not None and offset.dtype is not x.dtype):
            return None
        options: Any = {"bias": offset, "activation": activation, "out_dtype": x.dtype}
        return rms_norm(x, gamma.flatten(), eps, dim=1, **options)
    # The normalized vector is rounded, and so is each product.
    unit: Tensor = rms_norm(x, None, eps, scale=1 / self.scale, out_dtype=x.dtype, dim=1)
    return unit * self.scale * gamma + bias


def wan(self: Any, x: Tensor, activation: str | None = None) -> Tensor | None:
    return _normalize(self, x, self.bias, activation) if self.channel_first else None


def kandinsky6(self: Any, hidden_states: Tensor, activation: str | None = None) -> Tensor | None:
    return _normalize(self, hidden_states, 0.0, activation)


def per_channel(
    self: Any, x: Tensor, channel_dim: int | None = None, activation: str | None = None
) -> Tensor | None:
    """LTX-2's: it has no weight, and its own channel_dim counts, whatever forward is given."""
    if self.channel_dim != 1 or not _is_over_channels(x, None, half=activation is not None):
        return None
    return rms_norm(x, None, self.eps, activation=activation, out_dtype=x.dtype, dim=1)


# ---- Liger-Kernel's norms, which stand in a model as classes or as forwards of its instances. Of
# ---- its casting modes `llama` rounds the normalized value to x's dtype before it multiplies by
# ---- weight + offset, and `gemma` rounds once; the result has x's dtype, whatever autocast says.
# ---- Liger gathers a DTensor.


def _of_liger(self: Any, x: Tensor) -> Norm | None:
    weight, mode = self.weight, self.casting_mode
    if mode not in ("llama", "gemma"):
        return None
    variant = Variant(0.0 if weight is None else float(self.offset), mode == "llama")
    return Norm(weight, self.variance_epsilon, variant, OF_X)


def liger(self: Any, hidden_states: Tensor) -> Tensor | None:
    norm = _of_liger(self, hidden_states)
    if norm is None or type(hidden_states) is not Tensor:
        return None
    return normalized(hidden_states, *norm, keeps_order=False)


NORMS[liger] = _of_liger


def liger_layer_norm(self: Any, hidden_states: Tensor) -> Tensor | None:
    x, weight, bias = hidden_states, self.weight, self.bias
    if type(x) is not Tensor or not has_kernels(x) or weight is None or bias is None:
        return None
    fits = weight.shape == x.shape[-1:] and (x.dtype, weight.dtype) in OF_X
    if not fits or bias.dtype is not weight.dtype:
        return None
    return layer_norm(x, weight, bias, self.variance_epsilon, out_dtype=x.dtype)

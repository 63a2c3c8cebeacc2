# SPDX-License-Identifier: Apache-2.0
"""The RMSNorm classes of other libraries: the sources that are known, and the forwards on the fused
kernels that replace them.

Libraries write the same RMSNorm many times over, so a class is known by the digest of its forward
and of what that calls (source.digest), wherever it stands. A forward here keeps the order of
casts and the result's dtype of the one that it replaces. It gives the result's dtype to the
operator, because autocast touches none of the operators that these classes round with. The result
lies in memory in the order of x, as elementwise operators leave it. A forward returns None for what
the kernels do not take, and for every call on a device that has no kernels: then the class's own
forward runs (classes._or_stock).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import calls
from ..compile import choice
from ..functional import rms_norm
from ..ops.operators import describe
from ..stock import dtypes_are_supported, has_kernels
from .classes import Forward
from .forwards import named, parameter, then_act


class Variant(NamedTuple):
    """What the classes differ in, as rms_norm's arguments say it."""

    weight_offset: float = 0.0
    round_before_weight: bool = False


PLAIN = Variant()
ROUNDED = Variant(round_before_weight=True)
PLUS_ONE = Variant(weight_offset=1.0)

_F32, _F16, _BF16 = torch.float32, torch.float16, torch.bfloat16

# By the dtypes of x and weight, the dtype of the result. What is not listed is not for the kernels.
# These classes compute float64 in float32, which the kernels do not.
Dtypes = dict[tuple[torch.dtype, torch.dtype | None], torch.dtype]
OF_X: Dtypes = {(x, weight): x for x in (_F32, _F16, _BF16) for weight in (x, _F32, None)}
_PROMOTED: Dtypes = {(x, weight): torch.promote_types(x, weight or x) for x, weight in OF_X}
_WIDE: Dtypes = dict.fromkeys(OF_X, _F32)


def normalized(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    variant: Variant,
    dtypes: Dtypes,
    keeps_order: bool = True,
    activation: str | None = None,
) -> Tensor | None:
    """The norm over the last dimension, or None if it is not for the kernels."""
    if not has_kernels(x):
        return None
    if type(eps) is not float or eps != eps:
        return None
    out_dtype = dtypes.get((x.dtype, None if weight is None else weight.dtype))
    if out_dtype is None or x.dim() == 0:
        return None
    if weight is not None and weight.shape != (x.shape[-1],):
        return None
    compiling = calls.is_compiling()
    if compiling and (choice.is_inductors_rms_norm(x) or (keeps_order and x.stride(-1) != 1)):
        return None
    in_order, order = keeps_order and not x.is_contiguous(), None
    if in_order and not compiling and x.stride(-1) == 1 and 0 not in x.stride():
        # The kernels write rows one after another, so they get them in the order of x's memory.
        order = [*sorted(range(x.dim() - 1), key=x.stride, reverse=True), x.dim() - 1]
        x, in_order = x.permute(order), False
    a = describe(
        x,
        weight=weight,
        eps=eps,
        activation=activation,
        out_dtype=out_dtype,
        statistic="rms",
        weight_offset=variant.weight_offset,
        round_before_weight=variant.round_before_weight,
        keeps_order=in_order,
    )
    y: Tensor = calls.run(a)
    return y if order is None else y.permute([*map(order.index, range(x.dim()))])


def of_rms_norm(self: Any, x: Tensor) -> Tensor | None:
    """What calls F.rms_norm, as subclasses of nn.RMSNorm that a predicate accepted."""
    weight, eps = parameter(self, "weight"), self.eps
    if eps != eps or not dtypes_are_supported(x, weight, None):
        return None
    return rms_norm(x, weight, eps, normalized_shape=tuple(self.normalized_shape))


class Norm(NamedTuple):
    """What a module computes of x alone: the further arguments of `normalized`."""

    weight: Tensor | None
    eps: float
    variant: Variant
    dtypes: Dtypes


# By forward, those that may become part of a rotation's kernel: the norm of a module, if it is one.
NORMS: dict[Forward, Callable[[Any], Norm | None]] = {}


def _of_weight(name: str, eps: str, variant: Variant, dtypes: Dtypes) -> Forward:
    def forward(self: Any, x: Tensor) -> Tensor | None:
        return normalized(x, parameter(self, "weight"), getattr(self, eps), variant, dtypes)

    NORMS[forward] = lambda module: Norm(module.weight, getattr(module, eps), variant, dtypes)
    return named(__name__, name, forward)


# ---- Forwards, named by what they compute or by a model that has them.

llama = _of_weight("llama", "variance_epsilon", ROUNDED, _PROMOTED)
llama4 = _of_weight("llama4", "eps", ROUNDED, _PROMOTED)
rounded_once = _of_weight("rounded_once", "variance_epsilon", PLAIN, OF_X)
rounded_once_eps = _of_weight("rounded_once_eps", "eps", PLAIN, OF_X)
gemma = _of_weight("gemma", "eps", PLUS_ONE, OF_X)


def _plus_one(self: Any, x: Tensor, keeps_order: bool) -> Tensor | None:
    """1 + weight is rounded to weight's dtype, which only a float32 weight leaves to the kernel."""
    weight = self.weight
    if weight.dtype is _F32:
        return normalized(x, weight, self.eps, PLUS_ONE, OF_X, keeps_order)
    return normalized(x, weight + 1.0, self.eps, PLAIN, OF_X, keeps_order)


def muse_spark(self: Any, x: Tensor) -> Tensor | None:
    return _plus_one(self, x, True)


def krea2(self: Any, hidden_states: Tensor) -> Tensor | None:
    return _plus_one(self, hidden_states, False)  # as F.rms_norm, which it calls


def gemma3n(self: Any, hidden_states: Tensor) -> Tensor | None:
    weight = self.weight if self.with_scale else None
    return normalized(hidden_states, weight, self.eps, PLAIN, OF_X)


def weightless(self: Any, x: Tensor) -> Tensor | None:
    return normalized(x, None, self.eps, PLAIN, OF_X)


def _t5(x: Tensor, weight: Tensor | None, eps: float) -> Tensor | None:
    """xhat is rounded to the dtype of a weight of half precision, and else not at all."""
    if weight is None or weight.dtype is x.dtype:
        return normalized(x, weight, eps, ROUNDED, OF_X)
    return normalized(x, weight, eps, PLAIN, _WIDE)


def t5(self: Any, hidden_states: Tensor) -> Tensor | None:
    return _t5(hidden_states, self.weight, self.variance_epsilon)


def diffusers(self: Any, hidden_states: Tensor) -> Tensor | None:
    y = _t5(hidden_states, self.weight, self.eps)
    if y is None or self.weight is None or self.bias is None:
        return y
    return y + self.bias  # the class rounds before it adds the bias


NORMS[diffusers] = lambda module: (
    None
    if module.bias is not None
    else Norm(
        module.weight,
        module.eps,
        ROUNDED,
        {one: x for one, x in OF_X.items() if one[1] in (x, None)},
    )
)


def diffusers_without_bias(self: Any, hidden_states: Tensor) -> Tensor | None:
    return _t5(hidden_states, self.weight, self.eps)


def stable_audio3(self: Any, hidden_states: Tensor) -> Tensor | None:
    if self.force_fp32 or hidden_states.dtype is _F32:
        return normalized(hidden_states, self.gamma, self.eps, PLAIN, OF_X)
    return None


def imagegpt(self: Any, tensor: Tensor) -> Tensor | None:
    """The class rounds at every step in half precision, so that only float32 is served."""
    return rounded_once_eps(self, tensor) if tensor.dtype is _F32 else None


def timm(self: Any, x: Tensor) -> Tensor | None:
    """The class calls F.rms_norm, but for the fast norms of timm."""
    return None if self._fast_norm or not has_kernels(x) else of_rms_norm(self, x)


def timm_float32(self: Any, x: Tensor) -> Tensor | None:
    if len(self.normalized_shape) != 1:
        return None
    weight = parameter(self, "weight")
    return normalized(x, weight, self.eps, PLAIN, OF_X, False)  # as F.rms_norm, which it calls


timm_act = then_act(__name__, "timm_act", timm)
timm_float32_act = then_act(__name__, "timm_float32_act", timm_float32)


# ---- A norm and its gate: norm and weight are fused, and PyTorch multiplies by the gate.

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


def _gated(
    self: Any, x: Tensor, gate: Tensor | None, variant: Variant, dtypes: Dtypes
) -> Tensor | None:
    activation = _ACTIVATIONS.get(self.activation)
    if gate is None or activation is None:
        return None
    y = normalized(x, parameter(self, "weight"), self.variance_epsilon, variant, dtypes)
    return None if y is None else (y * activation(gate.to(_F32))).to(x.dtype)


def qwen3_next_gated(self: Any, hidden_states: Tensor, gate: Tensor) -> Tensor | None:
    return _gated(self, hidden_states, gate, ROUNDED, _PROMOTED)


def kimi_gated(self: Any, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor | None:
    return _gated(self, hidden_states, gate, PLAIN, _WIDE)


def _groups(x: Tensor, size: int, eps: float, out_dtype: torch.dtype) -> Tensor | None:
    """The norm, without a weight, of each group of this size in the last dimension."""
    if x.dim() == 0 or x.numel() == 0 or size <= 0 or x.shape[-1] % size != 0:
        return None
    dtypes: Dtypes = {(x.dtype, None): out_dtype}
    y = normalized(x.reshape(*x.shape[:-1], -1, size), None, eps, PLAIN, dtypes)
    return None if y is None else y.flatten(-2)


def _mamba2(self: Any, x: Tensor, gate: Tensor | None, size: int) -> Tensor | None:
    """The gate is multiplied before the norm, in float32, and the norm is over groups."""
    if (x.dtype, None) not in OF_X:
        return None
    gated = x.to(_F32)
    if gate is not None:
        gated = gated * F.silu(gate.to(_F32))
    y = _groups(gated, size, self.variance_epsilon, x.dtype)
    return None if y is None else self.weight * y


def mamba2_gated(self: Any, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor | None:
    return _mamba2(self, hidden_states, gate, self.group_size)


def mamba2_gated_whole(
    self: Any, hidden_states: Tensor, gate: Tensor | None = None
) -> Tensor | None:
    return _mamba2(self, hidden_states, gate, hidden_states.shape[-1])


def gemma_groups(self: Any, x: Tensor) -> Tensor | None:
    if self.group_size is None:
        return gemma(self, x)
    y = _groups(x, self.group_size, self.eps, _F32) if (x.dtype, None) in OF_X else None
    return None if y is None else (y * (1.0 + self.weight.float())).type_as(x)


# From the digest of a forward's source to the forward that replaces it, for classes of any module.
# These sources use nothing but torch, what the digest covers, and the libraries' ACT2FN.
SOURCES: dict[str, Forward] = {
    # transformers 4.49 and 5.24
    "9aaa8062417d9115": llama,
    "43a0d58fee9e76ef": gemma,
    "d6a51c3a5b31576c": rounded_once,
    "a31d41136392f84f": gemma3n,
    "0f0b35a595eff49a": qwen3_next_gated,
    "84f5ab0d60236efd": kimi_gated,
    "35a4d513b3aa44c0": mamba2_gated,
    "0f4f182eb64f10d5": mamba2_gated_whole,  # before there were groups
    "7ebb08f2bf238dc7": weightless,
    "eb467367c10653c2": rounded_once,
    "3d411fe6cc9e0759": weightless,
    "2c1a2de9d1a44734": rounded_once_eps,
    "25d06d4ab2c9feed": t5,
    "2af31c4f7ac50dc5": llama4,
    "c3c2aa5ebb8a73de": muse_spark,
    "ace041eee8c95f9c": gemma_groups,
    "123bdb1d786a09aa": llama4,
    "ed0eb72c0adec64b": imagegpt,
    # diffusers 0.30 to 0.42
    "4a55fc3e2c9bfd95": diffusers,
    "2daaa7b4d1199477": diffusers,  # 0.33 to 0.36, and later
    "bdcf2fe671f49cc9": diffusers_without_bias,  # to 0.31
    "2f02abc83856eb33": rounded_once_eps,
    "6a4f345d68fd8b59": rounded_once_eps,
    "1c7542beb3b9a42c": rounded_once_eps,
    "e86e9d2a242a4654": krea2,
    "74ab8bc808740333": gemma,
    "d7c8fcca5a00079e": stable_audio3,
}

# Classes whose forward calls functions of other modules, by (module, class).
CLASSES: dict[tuple[str, str], dict[str, Forward]] = {
    ("timm.layers.norm", "RmsNorm"): {"d0e2b3b49ca8e71a": timm},
    ("timm.layers.norm", "RmsNormFp32"): {"7f474bfa4b5a5f60": timm_float32},
    ("timm.layers.norm_act", "RmsNormAct"): {"975efdc84e7ee6e8": timm_act},
    ("timm.layers.norm_act", "RmsNormActFp32"): {"b9e5d6981e9b73e6": timm_float32_act},
}

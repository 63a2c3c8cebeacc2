# SPDX-License-Identifier: Apache-2.0
"""Layers for Hugging Face's `kernels`, which replaces other modules' forward by a layer's.

`kernels` calls `forward` with the other module as `self`, so a layer here has no state, no
constructor and no other method; it reads weight, bias and eps from that module.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from . import calls, stock
from .functional import layer_norm
from .ops import head_formulas
from .ops.operators import describe
from .stock import are_supported, norm_is_supported
from .swap import rms, rotations, source
from .swap.rotations import Rotation


class LayerNorm(nn.Module):
    """Forward of ``torch.nn.LayerNorm``: the same arguments, results and gradients."""

    has_backward = True
    can_torch_compile = True

    normalized_shape: tuple[int, ...]
    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if not norm_is_supported(input, weight, bias, self.eps):
            return stock.LayerNorm.forward(self, input)  # type: ignore[arg-type]
        return layer_norm(input, weight, bias, self.eps, normalized_shape=self.normalized_shape)


class RMSNorm(nn.Module):
    """Forward of a model's RMSNorm over the last dimension, with that class's own order of casts.

    Most classes round the normalized value to the input's dtype and then multiply it by weight
    (Llama's); others multiply in float32 and round once (OLMo 2's, gpt-oss's). At a class's first
    call, a trial of its own forward on a few numbers tells which. A class that computes something
    else, and a call with dtypes for which it would not compute in float32, keep the own forward.
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        return _rms_norm(self, hidden_states, 0.0)


class RMSNormZeroCentered(nn.Module):
    """As :class:`RMSNorm`, with the factor ``1 + weight``, as in Gemma and Qwen3.5."""

    has_backward = True
    can_torch_compile = True

    def forward(self, x: Tensor) -> Tensor:
        return _rms_norm(self, x, 1.0)


class RMSNormGated(nn.Module):
    """Forward of a model's RMSNorm with a gate behind it, with that class's own order of casts.

    Some classes round three times (Qwen3-Next's), others once (Kimi Linear's): the source of the
    class's forward tells. A class whose source is not known keeps the own forward, and so does a
    call that the kernels do not take.
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        cls: Any = type(self)
        rounds, y = _rounds_thrice(cls), None
        if rounds is not None and are_supported(hidden_states, gate, *self._parameters.values()):
            fused: Any = rms.qwen3_next_gated if rounds else rms.kimi_gated
            y = fused(self, hidden_states, gate)
        return cls.forward(self, hidden_states, gate) if y is None else y


class RotaryPosEmb(nn.Module):
    """Forward of transformers' functions ``apply_rotary_pos_emb``, hub name ``rotary_pos_emb``.

    `kernels` makes a module of such a function. A trial of it on a few numbers, at the first call,
    tells which columns are pairs and where cos and sin have their values. A function that computes
    something else, and a call that the kernels do not take, keep the own forward.
    """

    has_backward = True
    can_torch_compile = True

    def forward(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        cls: Any = type(self)
        rotation = _rotation(cls) if unsqueeze_dim == 1 else None
        if rotation is not None and rotations.is_supported(rotation, q, k, cos, sin):
            return rotations.rotate(rotation, q, k, None, cos, sin)
        given = () if unsqueeze_dim == 1 else (unsqueeze_dim,)  # as functions that have it default
        found: tuple[Tensor, Tensor] = cls.forward(self, q, k, cos, sin, *given)
        return found


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """For a trial: no mode sees it, and torch.jit.trace, which an error in it would crash."""
    C: Any = torch._C
    tracing = C._get_tracing_state()
    C._set_tracing_state(None)
    try:
        with _disable_current_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
            yield
    finally:
        C._set_tracing_state(tracing)


def _once(trial: Any) -> Any:
    """A trial of a class, made once for each forward of the class; it keeps no class alive."""
    tried: Any = weakref.WeakKeyDictionary()

    @functools.wraps(trial)
    def found(cls: Any, *args: Any) -> Any:
        forward = cls.forward
        read, results = tried.get(cls, (None, {}))
        if read is None or read() is not forward:
            results = {}
            tried[cls] = weakref.ref(forward), results
        if args not in results:
            results[args] = trial(cls, *args)
        return results[args]

    found.tried = tried  # type: ignore[attr-defined]
    return found


def _rotation(cls: Any) -> Rotation | None:
    """What the forward of a module that `kernels` made of a function rotates by, if it is known."""
    return _tried_rotation(cls)


_rotation._dynamo_marked_constant = True  # type: ignore[attr-defined]


@_once
def _tried_rotation(cls: Any) -> Rotation | None:
    numbers = [(7 * i + 3) % 43 / 16 - 1.3 for i in range(96)]
    with _unseen():
        q = torch.tensor(numbers, device="cpu").view(2, 3, 2, 8)
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        for rotation in (
            Rotation(),
            Rotation(interleaved=True),
            Rotation(interleaved=True, once=True),
        ):
            is_known = []
            for size in (8, 4):  # all columns are rotated, and half of them
                few = q[:, :2, :, : size // 2].unbind(1)
                spread = rotation.interleaved and not rotation.once
                cos, sin = (
                    t.repeat_interleave(2, -1) if spread else t.repeat(1, 1, 2) for t in few
                )
                expected = _rotated(rotation, q, cos, sin)
                try:
                    y, z = cls.forward(module, q, q + 1, cos, sin)
                    wide = cls.forward(module, q.bfloat16(), q.bfloat16(), cos, sin)[0]
                except Exception:
                    is_known.append(False)
                else:
                    of_k = _rotated(rotation, q + 1, cos, sin)
                    is_known.append(torch.allclose(y, expected) and torch.allclose(z, of_k))
                    keeps_dtype = wide.dtype is torch.bfloat16
            if is_known[0]:
                return rotation._replace(partial=is_known[1], keeps_dtype=keeps_dtype)
    return None


def _rotated(rotation: Rotation, q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    size = cos.shape[-1]
    if rotation.once:
        cos, sin = cos[..., : size // 2], sin[..., : size // 2]
    call = head_formulas.HeadArguments(
        q, None, None, None, None, None, cos, sin, size, 2, 0.0, None, 0.0, False,
        rotation.interleaved,
    )  # fmt: skip
    return head_formulas.formula(call)[0]


def _rounds_thrice(cls: Any) -> bool | None:
    """Whether a gated norm rounds three times, or once; None if its source is not known."""
    return _read(cls)


_rounds_thrice._dynamo_marked_constant = True  # type: ignore[attr-defined]


@_once
def _read(cls: Any) -> bool | None:
    found = source.read(cls)
    known = None if found is None else rms.SOURCES.get(found.digest)
    return {rms.qwen3_next_gated: True, rms.kimi_gated: False}.get(known)  # type: ignore[arg-type]


def _rms_norm(module: Any, x: Tensor, weight_offset: float) -> Tensor:
    order = _order_of_casts(type(module), weight_offset)
    weight: Any = getattr(module, "weight", None)
    if order is None or not _are_supported(x, weight):
        return type(module).forward(module, x)
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    # Named, because autocast, which does not change what such a class gives, would change it here.
    out_dtype = torch.promote_types(weight.dtype, x.dtype) if order[1] else x.dtype
    if weight.dtype is not x.dtype:
        weight = weight.float()
    a = describe(
        x,
        weight=weight,
        eps=eps,
        out_dtype=out_dtype,
        statistic="rms",
        weight_offset=weight_offset,
        round_before_weight=order[0],
    )
    y: Tensor = calls.run(a)
    return y


_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _are_supported(x: Tensor, weight: Any) -> bool:
    """Whether such classes compute in float32 with x and weight, as the kernels do."""
    return (
        isinstance(weight, Tensor)
        and are_supported(x, weight)
        and x.dtype in _DTYPES
        and weight.dtype in _DTYPES
        and x.layout is torch.strided
        and x.shape[-1:] == weight.shape
    )


def _order_of_casts(cls: Any, weight_offset: float) -> tuple[bool, bool] | None:
    """How the forward of a class casts, or None if it is no RMSNorm with this offset of weight.

    Whether it rounds the normalized value before it multiplies by weight, and whether a float32
    weight beside a half-precision input makes its result float32.
    """
    return _tried(cls, weight_offset)


# Dynamo calls it while it traces, as torch.compiler.assume_constant_result would have it.
_order_of_casts._dynamo_marked_constant = True  # type: ignore[attr-defined]


@_once
def _tried(cls: Any, weight_offset: float) -> tuple[bool, bool] | None:
    eps = 0.25  # of weight beside the squares below, so that a forward that ignores it is seen
    rows = [[(5 * i * i + 3 * i + row) % 61 / 16 - 1.85 for i in range(64)] for row in range(4)]
    factors = [(7 * i + 3) % 43 / 16 + 0.07 for i in range(64)]
    with _unseen():
        x = torch.tensor(rows, dtype=torch.bfloat16, device="cpu")
        weight = torch.tensor(factors, dtype=torch.bfloat16, device="cpu")
        try:
            module = cls.__new__(cls)
            nn.Module.__init__(module)
            module.variance_epsilon = module.eps = eps
            ys = []
            for parameter in (weight, weight.float()):
                module.weight = nn.Parameter(parameter)
                ys.append(cls.forward(module, x))
            promotes = ys[1].dtype is torch.float32
        except Exception:
            return None
        wide = x.float()
        xhat = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        for rounds_xhat in (True, False):
            factor = xhat.to(x.dtype).float() if rounds_xhat else xhat
            expected = factor * (weight.float() + weight_offset)
            # The two orders differ in a quarter of the numbers.
            dtypes = (x.dtype, torch.float32 if promotes else x.dtype)
            if all(map(_nearly_equals, ys, map(expected.to, dtypes))):
                return rounds_xhat, promotes
    return None


def _nearly_equals(y: Any, expected: Tensor) -> bool:
    """Whether y has expected's dtype and shape, and its value in nearly all elements."""
    if not isinstance(y, Tensor) or y.dtype is not expected.dtype or y.shape != expected.shape:
        return False
    # In float32, another order of summation changes the last bits.
    return torch.isclose(y, expected, rtol=2e-6, atol=0.0).float().mean().item() > 0.98

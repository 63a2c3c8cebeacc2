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

from . import stock
from .functional import layer_norm
from .ops import head_formulas
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
    (Llama's); others multiply in float32 and round once (OLMo 2's, gpt-oss's). The source of the
    class's forward tells, as it does for ``swap_norms``. A class whose source is not known keeps
    the own forward, and so does a call that the kernels do not take.
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        return _by_source(self, hidden_states)


class RMSNormZeroCentered(nn.Module):
    """As :class:`RMSNorm`, for the classes with the factor ``1 + weight`` (Gemma's, Qwen3.5's)."""

    has_backward = True
    can_torch_compile = True

    def forward(self, x: Tensor) -> Tensor:
        return _by_source(self, x)


class RMSNormGated(nn.Module):
    """As :class:`RMSNorm`, for the classes with a gate behind the norm (Qwen3-Next's)."""

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        return _by_source(self, hidden_states, gate)


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


def _by_source(module: Any, *args: Any) -> Tensor:
    """The norm by the forward that is known of its class's source, else by the class's own."""
    cls = type(module)
    fused: Any = rms.SOURCES.get(_digest(cls))
    y = None
    if fused is not None and are_supported(*args, *module._parameters.values()):
        y = fused(module, *args)
    return cls.forward(module, *args) if y is None else y


def _digest(cls: Any) -> str:
    """The digest of the class's source; empty if it cannot be read."""
    return _read(cls)


# Dynamo calls it while it traces, as torch.compiler.assume_constant_result would have it.
_digest._dynamo_marked_constant = True  # type: ignore[attr-defined]


@_once
def _read(cls: Any) -> str:
    found = source.read(cls)
    return "" if found is None else found.digest

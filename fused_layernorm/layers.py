# SPDX-License-Identifier: Apache-2.0
"""Layers for Hugging Face's `kernels`, which replaces other modules' forward by a layer's.

`kernels` calls `forward` with the other module as `self`, so a layer here has no state, no
constructor and no other method; it reads weight, bias and eps from that module.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from typing import Any

from torch import Tensor, nn

from . import stock
from .functional import layer_norm
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

    `kernels` makes a module of such a function. The function's source tells which columns are pairs
    and where cos and sin have their values. A function whose source is not known, and a call that
    the kernels do not take, keep the own forward.
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


def _once(read: Any) -> Any:
    """What is read of a class, once for each forward of the class; it keeps no class alive."""
    known: Any = weakref.WeakKeyDictionary()

    @functools.wraps(read)
    def found(cls: Any) -> Any:
        of, result = known.get(cls, (None, None))
        if of is None or of() is not cls.forward:
            result = read(cls)
            known[cls] = weakref.ref(cls.forward), result
        return result

    found.known = known  # type: ignore[attr-defined]
    # Dynamo calls it while it traces, as torch.compiler.assume_constant_result would have it.
    found._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return found


@_once
def _rotation(cls: Any) -> Rotation | None:
    """What the forward of a module that `kernels` made of a function rotates by, if it is known."""
    cells = [cell.cell_contents for cell in getattr(cls.forward, "__closure__", None) or ()]
    functions = [value for value in cells if isinstance(value, types.FunctionType)]
    if len(functions) != 1:
        return None
    (function,) = functions
    found = source.read_function(function.__globals__, function.__name__)
    if found is None or inspect.unwrap(found.parts[0].function) is not inspect.unwrap(function):
        return None
    return rotations.SOURCES.get(found.digest)


def _by_source(module: Any, *args: Any) -> Tensor:
    """The norm by the forward that is known of its class's source, else by the class's own."""
    cls = type(module)
    fused: Any = rms.SOURCES.get(_digest(cls))
    y = None
    if fused is not None and are_supported(*args, *module._parameters.values()):
        y = fused(module, *args)
    return cls.forward(module, *args) if y is None else y


@_once
def _digest(cls: Any) -> str:
    """The digest of the class's source; empty if it cannot be read."""
    found = source.read(cls)
    return "" if found is None else found.digest

# SPDX-License-Identifier: Apache-2.0
"""The forwards that replace those of diffusers' modules that modulate a norm's output.

Each of these modules holds a LayerNorm, multiplies its output by 1 + scale and adds shift. A linear
layer computes shift and scale from the model's conditioning. The forwards here compute norm and
modulation in one kernel. They are written as those in forwards.py are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..functional import ada_layer_norm, layer_norm
from ..modules import FusedLayerNorm
from ..ops.arguments import HALF, broadcasts
from ..stock import LAYER_NORM_FORWARD, LayerNorm, are_supported
from .classes import Forward, is_as_read, must_be_called
from .forwards import float32, matched, of_layer_norm

# For each forward, the names of the norms that it computes without calling them.
NORMS: dict[Forward, tuple[str, ...]] = {}

torch.fx.wrap("_modulated")


def _computes(*names: str) -> Callable[[Forward], Forward]:
    """Decorates a forward that computes these norms of its module without calling them.

    Where one of the norms must be called, because of a hook for example, it returns None: the
    class's own forward then runs (classes._or_stock).
    """

    def decorate(fused: Forward) -> Forward:
        @functools.wraps(fused)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            for name in names:
                if not _need_not_be_called(getattr(self, name)):
                    return None
            return fused(self, *args, **kwargs)

        NORMS[forward] = names
        return forward

    return decorate


def _need_not_be_called(norm: Any) -> bool:
    """Whether a call of the norm computes a layer norm from its attributes, and runs no hook."""
    cls: Any = type(norm)
    if cls.forward is FusedLayerNorm.forward:
        if norm.activation is not None or norm.scale != 1.0 or norm.out_dtype is not None:
            return False
        if norm._is_swapped and LayerNorm.forward is not LAYER_NORM_FORWARD:
            return False
    elif not (_forward_of(norm) in (float32, of_layer_norm) and is_as_read(cls)):
        return False
    return are_supported(norm.weight, norm.bias) and not must_be_called(norm)


def _forward_of(norm: Any) -> Forward | None:
    """The forward that a swap has given to a norm's class."""
    known = getattr(type(norm), "_known", None)
    return None if known is None else known.forward


def _modulate(
    norm: Any,
    x: Tensor,
    shift: Tensor | None,
    scale: Tensor | None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """norm(x) * (1 + scale) + shift, where norm(x) has this dtype, by default the norm's own."""
    if dtype is None and _forward_of(norm) is float32:
        dtype = x.dtype
    parameters = (norm.weight, norm.bias, norm.eps, norm.normalized_shape)
    return _modulated(x, shift, scale, *parameters, dtype)


def _modulated(
    x: Tensor,
    shift: Tensor | None,
    scale: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    normalized_shape: Sequence[int],
    norm_dtype: torch.dtype | None,
) -> Tensor:
    """The result has the dtype of PyTorch's own norm(x) * (1 + scale) + shift."""
    out_dtype = _dtype_of_result(x, shift, scale, norm_dtype)
    x, weight, bias = matched(x, weight, bias)
    if not (_suits(x, shift) and _suits(x, scale)):
        y = layer_norm(
            x, weight, bias, eps, normalized_shape=normalized_shape, out_dtype=norm_dtype
        )
        y = y if scale is None else y * (1 + scale)
        return y if shift is None else y + shift
    tensors = (_beside(x, shift), _beside(x, scale), weight, bias)
    return ada_layer_norm(x, *tensors, eps, normalized_shape=normalized_shape, out_dtype=out_dtype)


def _dtype_of_result(
    x: Tensor, shift: Tensor | None, scale: Tensor | None, norm_dtype: torch.dtype | None
) -> torch.dtype:
    """The dtype of PyTorch's own norm(x) * (1 + scale) + shift."""
    dtype = norm_dtype or _dtype_of_layer_norm(x)
    for modulation in (shift, scale):
        if modulation is not None:
            dtype = torch.promote_types(dtype, modulation.dtype)
    return dtype


def _dtype_of_layer_norm(x: Tensor) -> torch.dtype:
    """The dtype of PyTorch's layer_norm(x): autocast makes it float32, except on the CPU."""
    device = x.device.type
    if x.dtype in HALF and device != "cpu" and torch.is_autocast_enabled(device):
        return torch.float32
    return x.dtype


def _suits(x: Tensor, modulation: Tensor | None) -> bool:
    """Whether a modulation broadcasts to x without enlarging it, and is float64 only if x is."""
    if modulation is None:
        return True
    is_taken = modulation.dtype != torch.float64 or x.dtype == torch.float64
    return is_taken and broadcasts(modulation, x)


def _beside(x: Tensor, modulation: Tensor | None) -> Tensor | None:
    """The modulation in a dtype that ada_layer_norm takes beside x, never a narrower one."""
    if modulation is None or modulation.dtype == x.dtype:
        return modulation
    return modulation.to(torch.float32 if x.dtype in HALF else x.dtype)


def _with_rest(
    norm: Any, x: Tensor, chunks: Any, which: range, dtype: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    """norm(x), modulated by the first two of these chunks of (batch, columns), and the others.

    torch.fx traces chunks by index alone: it does not know how many there are.
    """
    shift, scale, *rest = [chunks[i] for i in which]
    return _modulate(norm, x, shift[:, None], scale[:, None], dtype), *rest


# ---- diffusers.models.normalization.


@_computes("norm")
def ada_layer_norm_by_timestep(
    self: Any, x: Tensor, timestep: Tensor | None = None, temb: Tensor | None = None
) -> Tensor:
    if self.emb is not None:
        temb = self.emb(timestep)
    temb = self.linear(self.silu(temb))
    if self.chunk_dim == 1:
        shift, scale = temb.chunk(2, dim=1)
        shift, scale = shift[:, None, :], scale[:, None, :]
    else:
        scale, shift = temb.chunk(2, dim=0)
    return _modulate(self.norm, x, shift, scale)


@_computes("norm")
def zero(
    self: Any,
    x: Tensor,
    timestep: Tensor | None = None,
    class_labels: Tensor | None = None,
    hidden_dtype: torch.dtype | None = None,
    emb: Any = None,
) -> tuple[Tensor, ...]:
    if self.emb is not None:
        emb = self.emb(timestep, class_labels, hidden_dtype=hidden_dtype)
    emb = self.linear(self.silu(emb))
    return _with_rest(self.norm, x, emb.chunk(6, dim=1), range(6))


@_computes("norm")
def zero_single(self: Any, x: Tensor, emb: Tensor | None = None) -> tuple[Tensor, ...]:
    return _with_rest(self.norm, x, self.linear(self.silu(emb)).chunk(3, dim=1), range(3))


@_computes("norm")
def zero_x(self: Any, hidden_states: Tensor, emb: Tensor | None = None) -> tuple[Tensor, ...]:
    """SD3.5's module: two modulations of one norm."""
    chunks = self.linear(self.silu(emb)).chunk(9, dim=1)
    first = _with_rest(self.norm, hidden_states, chunks, range(6))
    return *first, *_with_rest(self.norm, hidden_states, chunks, range(6, 9))


@_computes("norm")
def continuous(self: Any, x: Tensor, conditioning_embedding: Tensor) -> Tensor:
    emb = self.linear(self.silu(conditioning_embedding).to(x.dtype))
    scale, shift = emb.chunk(2, dim=1)
    return _modulate(self.norm, x, shift[:, None], scale[:, None])


@_computes("norm")
def lumina_continuous(self: Any, x: Tensor, conditioning_embedding: Tensor) -> Tensor:
    scale = self.linear_1(self.silu(conditioning_embedding).to(x.dtype))
    y = _modulate(self.norm, x, None, scale[:, None])
    return y if self.linear_2 is None else self.linear_2(y)


@_computes("norm_x", "norm_c")
def text_and_image(
    self: Any, x: Tensor, context: Tensor, emb: Tensor | None = None
) -> tuple[Tensor, ...]:
    chunks = self.linear(self.silu(emb)).chunk(12, dim=1)
    of_image = _with_rest(self.norm_x, x, chunks, range(6))
    return *of_image, *_with_rest(self.norm_c, context, chunks, range(6, 12))


@_computes("norm")
def cogvideox_zero(
    self: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor
) -> tuple[Tensor, ...]:
    y, encoder_y, gate, encoder_gate = _of_two(self, hidden_states, encoder_hidden_states, temb)
    return y, encoder_y, gate[:, None, :], encoder_gate[:, None, :]


def _of_two(self: Any, x: Tensor, encoder_x: Tensor, temb: Tensor) -> tuple[Tensor, ...]:
    chunks = self.linear(self.silu(temb)).chunk(6, dim=1)
    y, gate = _with_rest(self.norm, x, chunks, range(3))
    encoder_y, encoder_gate = _with_rest(self.norm, encoder_x, chunks, range(3, 6))
    return y, encoder_y, gate, encoder_gate


# ---- Modules of single models.


@_computes("norm")
def hunyuan_shift(self: Any, x: Tensor, emb: Tensor) -> Tensor:
    shift = self.linear(self.silu(emb.to(torch.float32)).to(emb.dtype))
    return _modulate(self.norm, x, shift.unsqueeze(1), None)


@_computes("norm")
def easyanimate_zero(
    self: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor
) -> tuple[Tensor, ...]:
    return _of_two(self, hidden_states, encoder_hidden_states, temb)


@_computes("norm")
def chroma_zero(
    self: Any,
    x: Tensor,
    timestep: Tensor | None = None,
    class_labels: Tensor | None = None,
    hidden_dtype: torch.dtype | None = None,
    emb: Any = None,
) -> tuple[Tensor, ...]:
    if self.emb is not None:
        emb = self.emb(timestep, class_labels, hidden_dtype=hidden_dtype)
    return _with_rest(self.norm, x, emb.flatten(1, 2).chunk(6, dim=1), range(6))


@_computes("norm")
def chroma_zero_single(self: Any, x: Tensor, emb: Any = None) -> tuple[Tensor, ...]:
    return _with_rest(self.norm, x, emb.flatten(1, 2).chunk(3, dim=1), range(3))


@_computes("norm")
def chroma_continuous(self: Any, x: Tensor, emb: Tensor) -> Tensor:
    shift, scale = emb.flatten(1, 2).to(x.dtype).chunk(2, dim=1)
    return _modulate(self.norm, x, shift[:, None], scale[:, None])


@_computes("norm", "norm_context")
def cogview4_zero(
    self: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor
) -> tuple[Tensor, ...]:
    dtype = hidden_states.dtype
    return _cogview4_zero(self, hidden_states, encoder_hidden_states, temb, dtype)


@_computes("norm", "norm_context")
def cogview4_zero_033(
    self: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor
) -> tuple[Tensor, ...]:
    """diffusers 0.33, where the norms' outputs are not cast."""
    return _cogview4_zero(self, hidden_states, encoder_hidden_states, temb, None)


def _cogview4_zero(
    self: Any, x: Tensor, encoder_x: Tensor, temb: Tensor, dtype: torch.dtype | None
) -> tuple[Tensor, ...]:
    chunks = self.linear(temb).chunk(12, dim=1)  # the image's chunks alternate with the text's
    of_image = _with_rest(self.norm, x, chunks, range(0, 12, 2), dtype)
    return *of_image, *_with_rest(self.norm_context, encoder_x, chunks, range(1, 12, 2), dtype)


@_computes("norm")
def cogview4_continuous(self: Any, x: Tensor, conditioning_embedding: Tensor) -> Tensor:
    scale, shift = self.linear(conditioning_embedding.to(x.dtype)).chunk(2, dim=1)
    return _modulate(self.norm, x, shift[:, None], scale[:, None])


@_computes("norm")
def cosmos(
    self: Any, hidden_states: Tensor, embedded_timestep: Tensor, temb: Tensor | None = None
) -> Tensor:
    temb = None if temb is None else temb[..., : 2 * self.embedding_dim]
    shift, scale = _cosmos_embedding(self, embedded_timestep, temb).chunk(2, dim=-1)
    return _modulate(self.norm, hidden_states, shift, scale)


@_computes("norm")
def cosmos_zero(
    self: Any, hidden_states: Tensor, embedded_timestep: Tensor, temb: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    shift, scale, gate = _cosmos_embedding(self, embedded_timestep, temb).chunk(3, dim=-1)
    return _modulate(self.norm, hidden_states, shift, scale), gate


def _cosmos_embedding(self: Any, embedded_timestep: Tensor, temb: Tensor | None) -> Tensor:
    emb: Tensor = self.linear_2(self.linear_1(self.activation(embedded_timestep)))
    if temb is not None:
        emb = emb + temb
    return emb.unsqueeze(1) if emb.ndim == 2 else emb


@_computes("norm")
def flux3(self: Any, hidden_states: Tensor, temb: Tensor) -> Tensor:
    scale, shift = self.linear(self.act_fn(temb)).chunk(2, dim=-1)
    return _modulate(self.norm, hidden_states, shift, scale)

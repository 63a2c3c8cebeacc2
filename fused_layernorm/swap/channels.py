# SPDX-License-Identifier: Apache-2.0
"""The forwards that replace those of the RMSNorms over channels of other libraries.

As in rms.py, a forward rounds where its class rounds, and returns None for what the kernels do not
take. The result has the strides that elementwise operators give it, those of torch.empty_like(x),
as with the class. With an activation behind the norm (neighbours.py) all is rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..functional import rms_norm
from ..ops.arguments import HALF
from ..stock import has_kernels
from .classes import Forward


def _is_supported(x: Any, weight: Any, *, half: bool) -> bool:
    """Whether the kernels serve a norm over dimension 1 of x: float32, perhaps half precision."""
    if not has_kernels(x) or x.dim() < 2:
        return False
    if weight is not None and weight.dtype not in (x.dtype, torch.float32):
        return False
    return x.dtype is torch.float32 or (half and x.dtype in HALF)


def _timm(*, wide: bool) -> Forward:
    """In half precision RmsNorm2d rounds at every step, or autocast decides where it does."""

    def forward(self: Any, x: Tensor) -> Tensor | None:
        is_fast = not wide and self._fast_norm
        if is_fast or not _is_supported(x, self.weight, half=wide) or x.dim() != 4:
            return None
        if len(self.normalized_shape) != 1:
            return None
        if self.weight is not None and self.weight.shape != x.shape[1:2]:
            return None
        return rms_norm(x, self.weight, self.eps, out_dtype=x.dtype, dim=1)

    return forward


timm, timm_float32 = _timm(wide=False), _timm(wide=True)


# ---- diffusers' VAEs: F.normalize, which divides by the length of the vector of channels or by
# 1e-12, whichever is more; then the factors scale (the root of the number of channels) and gamma,
# and a bias.


def _normalize(self: Any, x: Tensor, bias: Any, activation: str | None) -> Tensor | None:
    gamma = self.gamma
    if not _is_supported(x, gamma, half=True):
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
    if self.channel_dim != 1 or not _is_supported(x, None, half=activation is not None):
        return None
    return rms_norm(x, None, self.eps, activation=activation, out_dtype=x.dtype, dim=1)

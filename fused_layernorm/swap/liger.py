# SPDX-License-Identifier: Apache-2.0
"""The norms of Liger-Kernel, which stand in a model as classes or as forwards of its instances.

A forward here computes what Liger's kernel computes in its casting mode, as a call of the module
says it: `llama` rounds the normalized value to x's dtype before it multiplies by weight + offset,
`gemma` rounds once; the result has x's dtype, whatever autocast says. What our kernels do not take
runs on Liger's.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..functional import layer_norm as _layer_norm
from ..stock import has_kernels
from . import rms


def norm_of(self: Any, x: Tensor) -> rms.Norm | None:
    weight, mode = self.weight, self.casting_mode
    if mode not in ("llama", "gemma"):
        return None
    variant = rms.Variant(0.0 if weight is None else float(self.offset), mode == "llama")
    return rms.Norm(weight, self.variance_epsilon, variant, rms.OF_X)


def rms_norm(self: Any, hidden_states: Tensor) -> Tensor | None:
    norm = norm_of(self, hidden_states)
    if norm is None or type(hidden_states) is not Tensor:  # Liger gathers a DTensor
        return None
    return rms.normalized(hidden_states, *norm, keeps_order=False)


rms.NORMS[rms_norm] = norm_of


def layer_norm(self: Any, hidden_states: Tensor) -> Tensor | None:
    x, weight, bias = hidden_states, self.weight, self.bias
    if type(x) is not Tensor or not has_kernels(x) or weight is None or bias is None:
        return None
    if weight.shape != x.shape[-1:] or bias.dtype is not weight.dtype:
        return None
    if (x.dtype, weight.dtype) not in rms.OF_X:
        return None
    return _layer_norm(x, weight, bias, self.variance_epsilon, out_dtype=x.dtype)

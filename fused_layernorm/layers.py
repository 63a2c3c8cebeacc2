# SPDX-License-Identifier: Apache-2.0
"""Layers for Hugging Face's `kernels`, which replaces other modules' forward by a layer's.

`kernels` calls `forward` with the other module as `self`, so a layer here has no state, no
constructor and no other method; it reads weight, bias and eps from that module.
"""

from __future__ import annotations

from torch import Tensor, nn

from .functional import layer_norm


class LayerNorm(nn.Module):
    """Forward of ``torch.nn.LayerNorm``: the same arguments, results and gradients."""

    has_backward = True
    can_torch_compile = True

    normalized_shape: tuple[int, ...]
    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm(
            input, self.weight, self.bias, self.eps, normalized_shape=self.normalized_shape
        )

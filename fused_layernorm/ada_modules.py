# SPDX-License-Identifier: Apache-2.0
"""The modules of modulated norms: ada_layer_norm and add_ada_layer_norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .functional import ada_layer_norm, add_ada_layer_norm
from .modules import Norm
from .ops.arguments import check_statistic

# torch.fx.symbolic_trace records each of these as one call (modules.py).
torch.fx.wrap("ada_layer_norm")
torch.fx.wrap("add_ada_layer_norm")


class FusedAdaLayerNorm(Norm, nn.LayerNorm):
    """``forward(input, shift, scale)``: :func:`fused_layernorm.ada_layer_norm` as a module.

    ``y = layer_norm(input) * (1 + scale) + shift``, fused in forward and in backward. shift and
    scale broadcast against input, and either may be None. The defaults are those of diffusion
    transformers: no parameters, and an eps of 1e-6.

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as nn.LayerNorm's.
        statistic, out_dtype: as :func:`fused_layernorm.ada_layer_norm`'s.
    """

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-6,
        elementwise_affine: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        statistic: str = "layer",
        out_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self._take(None, 1.0, out_dtype)
        check_statistic(statistic, 0.0, self.weight)
        self.statistic = statistic

    def forward(
        self, input: Tensor, shift: Tensor | None = None, scale: Tensor | None = None
    ) -> Tensor:
        return ada_layer_norm(
            input, shift, scale, self.weight, self.bias, self.eps,
            statistic=self.statistic, normalized_shape=self.normalized_shape,
            out_dtype=self.out_dtype,
        )  # fmt: skip


class FusedAddAdaLayerNorm(FusedAdaLayerNorm):
    """``forward(input, residual, gate, shift, scale) -> (output, residual_out)``.

    ``residual_out = residual + gate * input`` and
    ``output = layer_norm(residual_out) * (1 + scale) + shift``, fused in forward and in backward:
    :func:`fused_layernorm.add_ada_layer_norm` as a module. gate, shift and scale broadcast against
    input, and any of them may be None. The arguments are those of :class:`FusedAdaLayerNorm`.
    """

    def forward(  # type: ignore[override]
        self,
        input: Tensor,
        residual: Tensor,
        gate: Tensor | None = None,
        shift: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        return add_ada_layer_norm(
            input, residual, gate, shift, scale, self.weight, self.bias, self.eps,
            statistic=self.statistic, normalized_shape=self.normalized_shape,
            out_dtype=self.out_dtype,
        )  # fmt: skip

# SPDX-License-Identifier: Apache-2.0
"""The modules of norms with a modulation (ada_layer_norm, add_ada_layer_norm) or a gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .functional import ada_layer_norm, add_ada_layer_norm, rms_norm, rms_norm_gated
from .modules import FusedRMSNorm, Norm
from .ops import arguments

# torch.fx.symbolic_trace records each of these as one call (modules.py).
for _norm in ("ada_layer_norm", "add_ada_layer_norm", "rms_norm", "rms_norm_gated"):
    torch.fx.wrap(_norm)


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
        arguments.check_statistic(statistic, 0.0, self.weight)
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


class FusedRMSNormGated(FusedRMSNorm):
    """RMSNorm over the last dimension with a gate: :func:`rms_norm_gated` as a module.

    ``forward(input, gate=None)``; without a gate it is the norm alone, in the same groups. It has
    the state of the classes of transformers (a weight), which ``swap_norms`` swaps in place.

    Args:
        hidden_size: the size of the last dimension.
        eps, elementwise_affine, device, dtype: as nn.RMSNorm's.
        bias, weight_offset: as :class:`FusedRMSNorm`'s.
        gate_first, gate_activation, group_size, round_before_weight, out_dtype: as
            :func:`rms_norm_gated`'s.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        gate_first: bool = False,
        gate_activation: str = "silu",
        group_size: int | None = None,
        bias: bool = False,
        weight_offset: float = 0.0,
        round_before_weight: bool = False,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        options: Any = {"round_before_weight": round_before_weight, "out_dtype": out_dtype}
        options |= {"bias": bias, "weight_offset": weight_offset}
        super().__init__(hidden_size, eps, elementwise_affine, device, dtype, **options)
        arguments.check_choice("gate_activation", gate_activation, arguments.GATES)
        arguments.check_group_size(group_size, self.normalized_shape[-1])
        self.gate_first, self.gate_activation = gate_first, gate_activation
        self.group_size = group_size

    def forward(self, input: Tensor, gate: Tensor | None = None) -> Tensor:
        given: Any = {
            "bias": self.bias, "weight_offset": self.weight_offset, "group_size": self.group_size,
            "round_before_weight": self.round_before_weight, "out_dtype": self.out_dtype,
        }  # fmt: skip
        if gate is None:
            shape = self.normalized_shape
            return rms_norm(input, self.weight, self.eps, normalized_shape=shape, **given)
        first: Any = {"gate_first": self.gate_first, "gate_activation": self.gate_activation}
        return rms_norm_gated(input, gate, self.weight, self.eps, **first, **given)

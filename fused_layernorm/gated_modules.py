# SPDX-License-Identifier: Apache-2.0
"""The module of gated RMSNorm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .functional import rms_norm, rms_norm_gated
from .modules import FusedRMSNorm
from .ops import arguments

# torch.fx.symbolic_trace records each of these as one call.
torch.fx.wrap("rms_norm")
torch.fx.wrap("rms_norm_gated")


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
        self.gate_first = gate_first
        self.gate_activation = gate_activation
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

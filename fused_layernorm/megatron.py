# SPDX-License-Identifier: Apache-2.0
"""A LayerNorm for the norm slots of Megatron-LM, which build it from (config, hidden_size, eps).

Nothing of Megatron is imported: a slot only needs a class with this signature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import modules
from .functional import layer_norm


class FusedLayerNorm(modules.FusedLayerNorm):
    r"""A norm for Megatron-LM's ``TransformerLayer`` and ``TransformerBlock`` slots.

    .. math::
        y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} \cdot w + \mathrm{bias}

    with :math:`w = \mathrm{weight}`, or :math:`w = 1 + \mathrm{weight}` where
    ``config.layernorm_zero_centered_gamma`` is set. Then weight is initialized to zero, and the sum
    is computed in float32 even where the parameters are of half precision, so that a small weight
    is not rounded away.

    The parameters have the attribute ``sequence_parallel``, from the config, by which Megatron
    knows which gradients it must sum over the tensor-parallel group. The result is never a view,
    so Megatron may free its memory (``deallocate_pipeline_outputs``). The shapes, dtypes and errors
    of a call are those of :func:`fused_layernorm.layer_norm`.

    Args:
        config: Megatron's ``TransformerConfig``. The class reads ``normalization``,
            ``sequence_parallel``, ``layernorm_zero_centered_gamma`` and
            ``memory_efficient_layer_norm``; the last three count as False where they are missing.
        hidden_size: the size of the last dimension, or the sizes of several.
        eps: added to the variance.
        persist_layer_norm: ignored; in Megatron it chooses between kernels of apex.
        zero_centered_gamma, normalization: may be given, but the config decides.

    Raises:
        ValueError: if the config asks for another normalization than ``"LayerNorm"``, or for
            ``memory_efficient_layer_norm``, or if an argument contradicts the config.
    """

    zero_centered_gamma: bool = False

    def __init__(
        self,
        config: Any,
        hidden_size: int | Sequence[int],
        eps: float = 1e-5,
        persist_layer_norm: bool | None = None,
        zero_centered_gamma: bool | None = None,
        normalization: str | None = None,
    ) -> None:
        in_config = bool(getattr(config, "layernorm_zero_centered_gamma", False))
        if zero_centered_gamma is not None and zero_centered_gamma != in_config:
            raise ValueError(
                "expected zero_centered_gamma to be config.layernorm_zero_centered_gamma, "
                f"{in_config}, got {zero_centered_gamma}"
            )
        for name, value in (
            ("config.normalization", config.normalization),
            ("normalization", normalization),
        ):
            if value not in ("LayerNorm", None):
                raise ValueError(f"expected {name} 'LayerNorm', got {value!r}")
        if getattr(config, "memory_efficient_layer_norm", False):
            raise ValueError(
                "expected config.memory_efficient_layer_norm False, got True: backward here needs "
                "the input, not the output"
            )
        super().__init__(hidden_size, eps)
        self.config = config
        self.zero_centered_gamma = in_config
        self.reset_parameters()
        sequence_parallel = bool(getattr(config, "sequence_parallel", False))
        for parameter in (self.weight, self.bias):
            parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def reset_parameters(self) -> None:
        """Sets the parameters so that the norm has a factor of one and a bias of zero."""
        super().reset_parameters()
        if self.zero_centered_gamma:
            nn.init.zeros_(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        if not self.zero_centered_gamma:
            return super().forward(input)
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        return layer_norm(
            input,
            self.weight.to(wide) + 1,
            self.bias.to(wide),
            self.eps,
            normalized_shape=self.normalized_shape,
        )

    def extra_repr(self) -> str:
        return super().extra_repr() + (
            ", zero_centered_gamma=True" if self.zero_centered_gamma else ""
        )

# SPDX-License-Identifier: Apache-2.0
"""Norms for the norm slots of Megatron-LM, which build them from (config, hidden_size, eps).

Nothing of Megatron is imported: a slot only needs a class with this signature.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import calls, modules
from .ops import arguments
from .ops.operators import describe


class _Slot(modules.Norm):
    def __init__(
        self,
        config: Any,
        hidden_size: Any,
        eps: float = 1e-5,
        persist_layer_norm: bool | None = None,
        zero_centered_gamma: bool | None = None,
        normalization: str | None = None,
    ) -> None:
        def option(name: str) -> bool:
            return bool(getattr(config, name, False))

        name, of_zero = self._stock.__name__, option("layernorm_zero_centered_gamma")
        for what, expected, given in (
            ("config.normalization", name, config.normalization),
            ("normalization", name, normalization),
            ("zero_centered_gamma to be config.layernorm_zero_centered_gamma,", of_zero,
             zero_centered_gamma),
            ("config.memory_efficient_layer_norm", False, option("memory_efficient_layer_norm")),
        ):  # fmt: skip
            arguments.check_choice(what, expected if given is None else given, (expected,))
        super().__init__(hidden_size, eps)
        self.config, self.weight_offset = config, float(of_zero)
        self.reset_parameters()
        for parameter in self.parameters():
            parameter.sequence_parallel = option("sequence_parallel")  # type: ignore[attr-defined]

    def forward(self, input: Tensor) -> Tensor:
        return self._fused(input) if self.weight_offset else super().forward(input)

    def _fused(self, input: Tensor) -> Tensor:
        norm: Any = self
        weight, bias = norm.weight, norm.bias
        if weight.dtype != input.dtype:  # as where the residual stream stays in float32
            wide = torch.promote_types(weight.dtype, torch.float32)
            weight, bias = (None if p is None else p.to(wide) for p in (weight, bias))
        a = describe(input, weight=weight, bias=bias, eps=norm.eps)
        a.statistic, a.weight_offset = "rms" if bias is None else "layer", norm.weight_offset
        return calls.norm(a, norm.normalized_shape)


class FusedLayerNorm(_Slot, modules.FusedLayerNorm):
    """A LayerNorm for Megatron-LM's ``TransformerLayer`` and ``TransformerBlock`` slots.

    Where ``config.layernorm_zero_centered_gamma`` is set, weight is initialized to zero, and the
    kernel adds the one in float32. The parameters are marked with ``config.sequence_parallel``. The
    result is never a view, so Megatron may free its memory. Calls are those of
    :func:`fused_layernorm.layer_norm`; parameters of half precision may stand beside a wider input.
    A config that asks for another normalization or for ``memory_efficient_layer_norm`` (backward
    needs the input), or that an argument contradicts, is a ValueError; ``persist_layer_norm``,
    which chooses between kernels of apex, is ignored.
    """


class FusedRMSNorm(_Slot, modules.FusedRMSNorm):
    """An RMSNorm for the same slots, where ``config.normalization`` is ``"RMSNorm"``."""


class FusedNorm:
    """The norm that ``config.normalization`` names, with :class:`FusedLayerNorm`'s arguments.

    It is a class, not a function, because a slot calls classes only.
    """

    def __new__(cls, config: Any, *args: Any, **kwargs: Any) -> Any:
        classes: Any = {"LayerNorm": FusedLayerNorm, "RMSNorm": FusedRMSNorm}
        arguments.check_choice("config.normalization", config.normalization, tuple(classes))
        return classes[config.normalization](config, *args, **kwargs)

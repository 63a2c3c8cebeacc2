# SPDX-License-Identifier: Apache-2.0
"""Norms for the norm slots of Megatron-LM, which build them from (config, hidden_size, eps).

Nothing of Megatron is imported: a slot only needs a class with this signature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import calls, modules
from .ops.operators import describe


class _Slot(modules.Norm):
    normalization: str  # the name of the kind in the config

    def __init__(
        self,
        config: Any,
        hidden_size: int | Sequence[int],
        eps: float = 1e-5,
        persist_layer_norm: bool | None = None,
        zero_centered_gamma: bool | None = None,
        normalization: str | None = None,
    ) -> None:
        of_zero = bool(getattr(config, "layernorm_zero_centered_gamma", False))
        is_efficient = bool(getattr(config, "memory_efficient_layer_norm", False))
        for what, expected, given in (
            ("config.normalization", self.normalization, config.normalization),
            ("normalization", self.normalization, normalization),
            ("zero_centered_gamma to be config.layernorm_zero_centered_gamma,", of_zero,
             zero_centered_gamma),
            # Backward here needs the input, not the output.
            ("config.memory_efficient_layer_norm", False, is_efficient),
        ):  # fmt: skip
            if given not in (expected, None):
                raise ValueError(f"expected {what} {expected!r}, got {given!r}")
        super().__init__(hidden_size, eps)
        self.config = config
        self.weight_offset = float(of_zero)
        self.reset_parameters()
        for parameter in self.parameters():
            is_parallel = bool(getattr(config, "sequence_parallel", False))
            parameter.sequence_parallel = is_parallel  # type: ignore[attr-defined]

    def forward(self, input: Tensor) -> Tensor:
        found: Any = self._fused(input) if self.weight_offset else super().forward(input)
        return found

    def _fused(self, input: Tensor) -> Tensor:
        norm: Any = self
        weight, bias, shape = norm.weight, norm.bias, norm.normalized_shape
        if weight.dtype != input.dtype:
            # As where a model of half precision keeps its residual stream in float32.
            wide = torch.promote_types(weight.dtype, torch.float32)
            weight, bias = (None if p is None else p.to(wide) for p in (weight, bias))
        found: Tensor = calls.run(
            describe(
                input,
                weight=weight,
                bias=bias,
                normalized_ndim=calls.normalized_ndim(input, weight, bias, shape),
                eps=norm.eps,
                statistic="rms" if bias is None else "layer",
                weight_offset=self.weight_offset,
            )
        )
        return found


class FusedLayerNorm(_Slot, modules.FusedLayerNorm):
    r"""A LayerNorm for Megatron-LM's ``TransformerLayer`` and ``TransformerBlock`` slots.

    Where ``config.layernorm_zero_centered_gamma`` is set, the factor is ``1 + weight``: weight is
    initialized to zero, and the kernel adds in float32, so that a small weight of half precision is
    not rounded away.

    The parameters have the attribute ``sequence_parallel``, from the config, by which Megatron
    knows which gradients it must sum over the tensor-parallel group. The result is never a view,
    so Megatron may free its memory (``deallocate_pipeline_outputs``). The shapes, dtypes and errors
    of a call are those of :func:`fused_layernorm.layer_norm`; parameters of half precision may also
    stand beside a wider input, as where ``config.fp32_residual_connection`` is set.

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

    normalization = "LayerNorm"


class FusedRMSNorm(_Slot, modules.FusedRMSNorm):
    """An RMSNorm for the same slots, where ``config.normalization`` is ``"RMSNorm"``.

    The parameters' marks, the arguments and the errors are :class:`FusedLayerNorm`'s.
    """

    normalization = "RMSNorm"


class FusedNorm:
    """The norm that ``config.normalization`` names: a FusedLayerNorm or a FusedRMSNorm.

    It is a class, not a function, because a slot calls classes only. The arguments are those of
    :class:`FusedLayerNorm`; another normalization is a ValueError.
    """

    def __new__(
        cls, config: Any, hidden_size: int | Sequence[int], *args: Any, **kwargs: Any
    ) -> Any:
        classes = {"LayerNorm": FusedLayerNorm, "RMSNorm": FusedRMSNorm}
        if (name := config.normalization) not in classes:
            raise ValueError(
                f"expected config.normalization 'LayerNorm' or 'RMSNorm', got {name!r}"
            )
        return classes[name](config, hidden_size, *args, **kwargs)

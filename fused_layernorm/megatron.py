# SPDX-License-Identifier: Apache-2.0
"""Norms for the norm slots of Megatron-LM, which build them from (config, hidden_size, eps).

Nothing of Megatron is imported: a slot only needs a class with this signature. FusedNorm serves
any config; FusedLayerNorm and FusedRMSNorm are what it makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import calls, modules
from .ops.operators import describe

_STATISTICS = {"LayerNorm": "layer", "RMSNorm": "rms"}


def _is_zero_centered(
    config: Any, expected: str, zero_centered_gamma: bool | None, normalization: str | None
) -> bool:
    """Whether the config wants zero-centered weights; raises if it wants what no norm here has."""
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
        if value not in (expected, None):
            raise ValueError(f"expected {name} {expected!r}, got {value!r}")
    if getattr(config, "memory_efficient_layer_norm", False):
        raise ValueError(
            "expected config.memory_efficient_layer_norm False, got True: backward here needs "
            "the input, not the output"
        )
    return in_config


class _Slot(nn.Module):
    """What the norms of both kinds have beside their PyTorch classes."""

    normalization: str  # the name of the kind in the config
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
        zero_centered = _is_zero_centered(
            config, self.normalization, zero_centered_gamma, normalization
        )
        super().__init__(hidden_size, eps)
        self.config = config
        self.zero_centered_gamma = zero_centered
        self.weight_offset = 1.0 if zero_centered else 0.0
        self.reset_parameters()
        sequence_parallel = bool(getattr(config, "sequence_parallel", False))
        for parameter in self.parameters():
            parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def reset_parameters(self) -> None:
        """Sets the parameters so that the norm has a factor of one and a bias of zero."""
        norm: Any = super()
        norm.reset_parameters()
        if self.zero_centered_gamma:
            nn.init.zeros_(self.weight)  # type: ignore[arg-type]

    def forward(self, input: Tensor) -> Tensor:
        norm: Any = self
        weight, bias = norm.weight, norm.bias
        if weight.dtype != input.dtype:
            # As where a model of half precision keeps its residual stream in float32.
            wide = torch.promote_types(weight.dtype, torch.float32)
            weight = weight.to(wide)
            bias = None if bias is None else bias.to(wide)
        statistic, shape = _STATISTICS[self.normalization], norm.normalized_shape
        if not (self.zero_centered_gamma or calls.is_compiling()):
            y = calls.plain(statistic == "rms", input, shape, weight, bias, norm.eps)
            if y is not None:
                return y
        a = describe(
            input,
            weight=weight,
            bias=bias,
            normalized_ndim=calls.normalized_ndim(input, weight, bias, shape),
            eps=norm.eps,
            statistic=statistic,
            weight_offset=1.0 if self.zero_centered_gamma else 0.0,
        )
        found: Tensor = calls.run(a)
        return found

    def extra_repr(self) -> str:
        return super().extra_repr() + (
            ", zero_centered_gamma=True" if self.zero_centered_gamma else ""
        )


class FusedLayerNorm(_Slot, modules.FusedLayerNorm):
    r"""A LayerNorm for Megatron-LM's ``TransformerLayer`` and ``TransformerBlock`` slots.

    .. math::
        y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} \cdot w + \mathrm{bias}

    with :math:`w = \mathrm{weight}`, or :math:`w = 1 + \mathrm{weight}` where
    ``config.layernorm_zero_centered_gamma`` is set. Then weight is initialized to zero, and the
    kernel computes the sum in float32 even where the parameters are of half precision, so that a
    small weight is not rounded away.

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
    r"""An RMSNorm for the same slots, where ``config.normalization`` is ``"RMSNorm"``.

    .. math::
        y = \frac{x}{\sqrt{\mathrm{E}[x^2] + \epsilon}} \cdot w

    with ``w``, the marked parameters, the arguments and the errors as :class:`FusedLayerNorm` has
    them; there is no bias.
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
        if config.normalization not in classes:
            raise ValueError(
                "expected config.normalization 'LayerNorm' or 'RMSNorm', "
                f"got {config.normalization!r}"
            )
        return classes[config.normalization](config, hidden_size, *args, **kwargs)

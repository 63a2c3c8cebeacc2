"""FusedLayerNorm and FusedAddLayerNorm: torch.nn.LayerNorm over the fused kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .functional import add_layer_norm, layer_norm
from .ops.arguments import check_options, name_of

# TorchScript compiles no function with keyword-only defaults: there the modules name the operators.
_is_scripting = torch.jit.is_scripting  # type: ignore[attr-defined]

# One call in the graph of torch.fx.symbolic_trace, which cannot follow a function that looks at its
# arguments.
torch.fx.wrap("layer_norm")
torch.fx.wrap("add_layer_norm")


class FusedLayerNorm(nn.LayerNorm):
    r"""A drop-in :class:`torch.nn.LayerNorm`: the same parameters, state_dict and results, faster.

    ``y = activation(layer_norm(x) * weight + bias) * scale``, in one kernel each way; see
    :func:`fused_layernorm.layer_norm`.

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as nn.LayerNorm's.
        activation: None, ``"gelu"``, ``"gelu_tanh"``, ``"silu"`` or ``"relu"``.
        scale: a finite number that multiplies the result.
        out_dtype: the result's dtype; by default what nn.LayerNorm gives.
    """

    # What torch.jit.script takes as it stands.
    __constants__ = [*nn.LayerNorm.__constants__, "activation", "scale", "out_dtype"]  # noqa: RUF012

    # Defaults for an nn.LayerNorm that swap_layer_norm has made a FusedLayerNorm.
    activation: str | None = None
    scale: float = 1.0
    out_dtype: torch.dtype | None = None

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = None,
        scale: float = 1.0,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        check_options(activation, scale, out_dtype)
        self.activation = activation
        self.scale = scale
        self.out_dtype = out_dtype

    def forward(self, input: Tensor) -> Tensor:
        if _is_scripting():
            return torch.ops.fused_layernorm.layer_norm(
                input,
                len(self.normalized_shape),
                self.weight,
                self.bias,
                self.eps,
                self.activation,
                self.scale,
                self.out_dtype,
            )
        return layer_norm(
            input,
            self.weight,
            self.bias,
            self.eps,
            normalized_shape=self.normalized_shape,
            activation=self.activation,
            scale=self.scale,
            out_dtype=self.out_dtype,
        )

    def extra_repr(self) -> str:
        options = ""
        if self.activation is not None:
            options += f", activation={self.activation!r}"
        if self.scale != 1.0:
            options += f", scale={self.scale}"
        if self.out_dtype is not None:
            options += f", out_dtype={name_of(self.out_dtype)}"
        return super().extra_repr() + options


class FusedAddLayerNorm(FusedLayerNorm):
    """``forward(input, residual) -> (output, residual_out)``: :func:`add_layer_norm` as a module.

    ``residual_out = input + residual`` and ``output = layer_norm(residual_out)``, in one kernel
    each way. The arguments are those of :class:`FusedLayerNorm`.
    """

    def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        if _is_scripting():
            return torch.ops.fused_layernorm.add_layer_norm(
                input,
                residual,
                len(self.normalized_shape),
                self.weight,
                self.bias,
                self.eps,
                self.activation,
                self.scale,
                self.out_dtype,
            )
        return add_layer_norm(
            input,
            residual,
            self.weight,
            self.bias,
            self.eps,
            normalized_shape=self.normalized_shape,
            activation=self.activation,
            scale=self.scale,
            out_dtype=self.out_dtype,
        )

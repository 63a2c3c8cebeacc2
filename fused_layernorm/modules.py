# SPDX-License-Identifier: Apache-2.0
"""The modules: torch.nn.LayerNorm on the fused kernels, also with a residual or a modulation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .functional import ada_layer_norm, add_ada_layer_norm, add_layer_norm, layer_norm
from .ops.arguments import check_options, name_of
from .ops.load import operators

# TorchScript compiles no function with keyword-only defaults: there the modules call the operators.
_is_scripting = torch.jit.is_scripting  # type: ignore[attr-defined]

# torch.fx.symbolic_trace records each of these as one call, for it cannot trace a function that
# branches on its arguments.
torch.fx.wrap("layer_norm")
torch.fx.wrap("add_layer_norm")
torch.fx.wrap("ada_layer_norm")
torch.fx.wrap("add_ada_layer_norm")


class FusedLayerNorm(nn.LayerNorm):
    r"""A drop-in :class:`torch.nn.LayerNorm`: the same parameters, state_dict and results, faster.

    ``y = activation(layer_norm(x) * weight + bias) * scale``, fused in forward and in backward;
    the shapes, dtypes and errors are those of :func:`fused_layernorm.layer_norm`.

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as nn.LayerNorm's.
        activation: None, ``"gelu"``, ``"gelu_tanh"``, ``"silu"`` or ``"relu"``.
        scale: a finite number that multiplies the result.
        out_dtype: the result's dtype; by default what nn.LayerNorm gives.
    """

    # Attributes that torch.jit.script compiles as constants.
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
            return operators.layer_norm(
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

    ``residual_out = input + residual`` and ``output = layer_norm(residual_out)``, fused in forward
    and in backward. The arguments are those of :class:`FusedLayerNorm`.
    """

    def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        if _is_scripting():
            return operators.add_layer_norm(
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


class FusedAdaLayerNorm(nn.LayerNorm):
    """``forward(input, shift, scale)``: :func:`fused_layernorm.ada_layer_norm` as a module.

    ``y = layer_norm(input) * (1 + scale) + shift``, fused in forward and in backward. shift and
    scale broadcast against input, and either may be None. The defaults are those of diffusion
    transformers: no parameters, and an eps of 1e-6.

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as nn.LayerNorm's.
        out_dtype: the result's dtype; by default input's, under autocast on CUDA float32.
    """

    # Attributes that torch.jit.script compiles as constants.
    __constants__ = [*nn.LayerNorm.__constants__, "out_dtype"]  # noqa: RUF012

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-6,
        elementwise_affine: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        check_options(None, 1.0, out_dtype)
        self.out_dtype = out_dtype

    def forward(
        self, input: Tensor, shift: Tensor | None = None, scale: Tensor | None = None
    ) -> Tensor:
        if _is_scripting():
            return operators.ada_layer_norm(
                input,
                len(self.normalized_shape),
                shift,
                scale,
                self.weight,
                self.bias,
                self.eps,
                self.out_dtype,
            )
        return ada_layer_norm(
            input,
            shift,
            scale,
            self.weight,
            self.bias,
            self.eps,
            normalized_shape=self.normalized_shape,
            out_dtype=self.out_dtype,
        )

    def extra_repr(self) -> str:
        shown = "" if self.out_dtype is None else f", out_dtype={name_of(self.out_dtype)}"
        return super().extra_repr() + shown


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
        if _is_scripting():
            return operators.add_ada_layer_norm(
                input,
                residual,
                gate,
                len(self.normalized_shape),
                shift,
                scale,
                self.weight,
                self.bias,
                self.eps,
                self.out_dtype,
            )
        return add_ada_layer_norm(
            input,
            residual,
            gate,
            shift,
            scale,
            self.weight,
            self.bias,
            self.eps,
            normalized_shape=self.normalized_shape,
            out_dtype=self.out_dtype,
        )

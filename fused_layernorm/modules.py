# SPDX-License-Identifier: Apache-2.0
"""The modules: torch.nn's LayerNorm and RMSNorm on the fused kernels, also with a residual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import stock
from .calls import plain
from .functional import (
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    rms_norm,
)
from .ops.arguments import check_options, check_statistic, name_of
from .ops.load import operators
from .stock import LayerNorm, RMSNorm

_is_compiling = torch.compiler.is_dynamo_compiling
_LAYER_NORM_FORWARD, _RMS_NORM_FORWARD = stock.LAYER_NORM_FORWARD, stock.RMS_NORM_FORWARD

Forward = TypeVar("Forward", bound=Callable[..., Tensor])

# TorchScript compiles no function with keyword-only defaults: there the modules call the operators.
_is_scripting = torch.jit.is_scripting  # type: ignore[attr-defined]

# torch.fx.symbolic_trace records each of these as one call, for it cannot trace a function that
# branches on its arguments.
for _norm in ("layer_norm", "rms_norm"):
    torch.fx.wrap(_norm)
    torch.fx.wrap(f"add_{_norm}")


def _scripted_as(scripted: Callable[..., Tensor]) -> Callable[[Forward], Forward]:
    """torch.jit.script compiles `scripted` in the place of a forward that it cannot parse.

    Like inspect, it reads the source of what a function says that it wraps.
    """

    def decorate(forward: Forward) -> Forward:
        forward.__wrapped__ = scripted  # type: ignore[attr-defined]
        return forward

    return decorate


# The options of modules, and their defaults.
_DEFAULTS: dict[str, Any] = {
    "statistic": "layer",
    "weight_offset": 0.0,
    "round_before_weight": False,
    "activation": None,
    "scale": 1.0,
    "out_dtype": None,
}


def _options(module: nn.Module, *names: str) -> dict[str, Any]:
    """These options of a module, which has none of them once another thread has unswapped it."""
    return {name: getattr(module, name, _DEFAULTS[name]) for name in names}


def is_bare(module: Any) -> bool:
    """Whether a FusedLayerNorm or FusedGroupNorm computes what PyTorch's class computes."""
    return module.activation is None and module.scale == 1.0 and module.out_dtype is None


class FusedLayerNorm(nn.LayerNorm):
    r"""A drop-in :class:`torch.nn.LayerNorm`: the same parameters, state_dict and results, faster.

    ``y = activation(layer_norm(x) * weight + bias) * scale``, fused in forward and in backward;
    the shapes, dtypes and errors are those of :func:`fused_layernorm.layer_norm`.

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as nn.LayerNorm's.
        activation: None, ``"gelu"``, ``"gelu_tanh"``, ``"silu"`` or ``"relu"``.
        scale: a finite number that multiplies the result.
        out_dtype: the result's dtype; by default what PyTorch's class gives.
    """

    # Attributes that torch.jit.script compiles as constants.
    __constants__ = [*nn.LayerNorm.__constants__, "activation", "scale", "out_dtype"]  # noqa: RUF012

    # Defaults for an nn.LayerNorm that swap_layer_norm has made a FusedLayerNorm. Such a one takes
    # what nn.LayerNorm takes.
    _stock = LayerNorm
    _is_swapped = False
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

    def _scripted_forward(self, input: Tensor) -> Tensor:
        norm = (len(self.normalized_shape), self.weight, self.bias, self.eps)
        return operators.layer_norm(input, *norm, self.activation, self.scale, self.out_dtype)

    @_scripted_as(_scripted_forward)
    def forward(self, input: Tensor) -> Tensor:
        # The shortest way. Attributes are read where nn.Module keeps them, because to find them
        # takes host time; one that is computed is not there. A tool that has replaced PyTorch's
        # function, or its class's forward, may want to see the call below.
        if (
            not _is_compiling()
            and F.layer_norm is stock.layer_norm
            and LayerNorm.forward is _LAYER_NORM_FORWARD
        ):
            try:
                module = self.__dict__
                parameters = module["_parameters"]
                weight, bias = parameters["weight"], parameters["bias"]
                shape, eps = module["normalized_shape"], module["eps"]
                is_plain = self.activation is None and self.out_dtype is None and self.scale == 1.0
            except (AttributeError, KeyError):  # also where another thread unswaps the module
                is_plain = False
            if is_plain:
                y = plain(False, input, shape, weight, bias, eps)
                if y is not None:
                    return y
        is_swapped = getattr(self, "_is_swapped", None)
        if is_swapped is None:  # a bound method that outlived unswap_norms
            return type(self).forward(self, input)
        weight, bias, eps = self.weight, self.bias, self.eps
        if is_swapped and (
            LayerNorm.forward is not stock.LAYER_NORM_FORWARD
            or not stock.norm_is_supported(input, weight, bias, eps)
        ):
            return LayerNorm.forward(self, input)
        options = _options(self, "activation", "scale", "out_dtype")
        return layer_norm(
            input, weight, bias, eps, normalized_shape=self.normalized_shape, **options
        )

    def extra_repr(self) -> str:
        return LayerNorm.extra_repr(self) + shown(self)


def shown(module: nn.Module) -> str:
    """The options that are not the defaults, as extra_repr shows them.

    A module that was unswapped while somebody kept its extra_repr has none of them.
    """
    shown = ""
    for name, value in _options(module, *_DEFAULTS).items():
        if value != _DEFAULTS[name]:
            shown += f", {name}={name_of(value) if name == 'out_dtype' else repr(value)}"
    return shown


class FusedAddLayerNorm(FusedLayerNorm):
    """``forward(input, residual) -> (output, residual_out)``: :func:`add_layer_norm` as a module.

    ``residual_out = input + residual`` and ``output = layer_norm(residual_out)``, fused in forward
    and in backward. The arguments are those of :class:`FusedLayerNorm`.
    """

    def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        if _is_scripting():
            norm = (len(self.normalized_shape), self.weight, self.bias, self.eps)
            options = (self.activation, self.scale, self.out_dtype)
            return operators.add_layer_norm(input, residual, *norm, *options)
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


def _scripted_eps(eps: float | None, x: Tensor) -> float:
    """arguments.rms_eps in what TorchScript compiles, which reads no number from a module."""
    if eps is not None:
        return eps
    return 2.220446049250313e-16 if x.dtype == torch.float64 else 1.1920928955078125e-07


class FusedRMSNorm(nn.RMSNorm):
    r"""A drop-in :class:`torch.nn.RMSNorm`: the same parameters, state_dict and results, faster.

    ``y = activation(rms_norm(x) * (weight + weight_offset) + bias) * scale``, fused in forward and
    in backward; the shapes, dtypes and errors are those of :func:`fused_layernorm.rms_norm`.

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype: as nn.RMSNorm's.
        bias: whether there is a bias beside weight, which nn.RMSNorm has not.
        weight_offset: a finite number that is added to weight. Weight is initialized so that the
            sum is one: to zero for Gemma's offset of 1.
        round_before_weight: whether the normalized value is rounded to input's dtype before it is
            multiplied by weight, as Llama's norm does.
        activation, scale, out_dtype: as :class:`FusedLayerNorm`'s.
    """

    # Attributes that torch.jit.script compiles as constants.
    __constants__ = [  # noqa: RUF012
        *nn.RMSNorm.__constants__,
        "weight_offset",
        "round_before_weight",
        "activation",
        "scale",
        "out_dtype",
    ]

    # Defaults for an nn.RMSNorm that swap_rms_norm has made a FusedRMSNorm. Such a one takes what
    # nn.RMSNorm takes.
    _stock = RMSNorm
    _is_swapped = False
    weight_offset: float = 0.0
    round_before_weight: bool = False
    activation: str | None = None
    scale: float = 1.0
    out_dtype: torch.dtype | None = None

    def __init__(
        self,
        normalized_shape: Any,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = False,
        weight_offset: float = 0.0,
        round_before_weight: bool = False,
        activation: str | None = None,
        scale: float = 1.0,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        check_options(activation, scale, out_dtype)
        check_statistic("rms", weight_offset, self.weight)
        if bias and elementwise_affine:
            self.bias = nn.Parameter(torch.zeros_like(self.weight))
        else:
            self.register_parameter("bias", None)
        self.weight_offset = weight_offset
        self.round_before_weight = round_before_weight
        self.activation = activation
        self.scale = scale
        self.out_dtype = out_dtype
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the parameters so that the norm has a factor of one and a bias of zero."""
        if self.elementwise_affine:
            nn.init.constant_(self.weight, 1.0 - getattr(self, "weight_offset", 0.0))
        # nn.RMSNorm calls this before there is a bias. After an unswap there is no offset either.
        if getattr(self, "bias", None) is not None:
            nn.init.zeros_(self.bias)

    def _scripted_forward(self, x: Tensor) -> Tensor:
        # A swapped nn.RMSNorm has no bias.
        bias = self.bias if hasattr(self, "bias") else None
        norm = (len(self.normalized_shape), self.weight, bias, _scripted_eps(self.eps, x))
        options = (self.activation, self.scale, self.out_dtype)
        kind = ("rms", self.weight_offset, self.round_before_weight)
        return operators.layer_norm(x, *norm, *options, *kind)

    @_scripted_as(_scripted_forward)
    def forward(self, x: Tensor) -> Tensor:
        # The shortest way, as in FusedLayerNorm.
        if (
            not _is_compiling()
            and F.rms_norm is stock.rms_norm
            and RMSNorm.forward is _RMS_NORM_FORWARD
        ):
            try:
                module = self.__dict__
                parameters = module["_parameters"]
                weight, shape, eps = parameters["weight"], module["normalized_shape"], module["eps"]
                is_plain = (
                    parameters.get("bias") is None
                    and self.activation is None
                    and self.out_dtype is None
                    and self.scale == 1.0
                    and self.weight_offset == 0.0
                    and not self.round_before_weight
                )
            except (AttributeError, KeyError):  # also where another thread unswaps the module
                is_plain = False
            if is_plain:
                y = plain(True, x, shape, weight, None, eps)
                if y is not None:
                    return y
        is_swapped = getattr(self, "_is_swapped", None)
        if is_swapped is None:  # a bound method that outlived unswap_norms
            return type(self).forward(self, x)
        if is_swapped and (
            RMSNorm.forward is not stock.RMS_NORM_FORWARD
            or not stock.norm_is_supported(x, self.weight, None, self.eps)
        ):
            return RMSNorm.forward(self, x)
        options = _options(
            self, "weight_offset", "round_before_weight", "activation", "scale", "out_dtype"
        )
        return rms_norm(
            x,
            self.weight,
            self.eps,
            bias=getattr(self, "bias", None),
            normalized_shape=self.normalized_shape,
            **options,
        )

    def extra_repr(self) -> str:
        bias = "" if getattr(self, "bias", None) is None else ", bias=True"
        return RMSNorm.extra_repr(self) + bias + shown(self)


class FusedAddRMSNorm(FusedRMSNorm):
    """``forward(input, residual) -> (output, residual_out)``: :func:`add_rms_norm` as a module.

    ``residual_out = input + residual`` and ``output = rms_norm(residual_out)``, fused in forward
    and in backward. The arguments are those of :class:`FusedRMSNorm`.
    """

    def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        if _is_scripting():
            eps = _scripted_eps(self.eps, residual)
            norm = (len(self.normalized_shape), self.weight, self.bias, eps)
            options = (self.activation, self.scale, self.out_dtype)
            kind = ("rms", self.weight_offset, self.round_before_weight)
            return operators.add_layer_norm(input, residual, *norm, *options, *kind)
        return add_rms_norm(
            input,
            residual,
            self.weight,
            self.eps,
            bias=self.bias,
            weight_offset=self.weight_offset,
            round_before_weight=self.round_before_weight,
            normalized_shape=self.normalized_shape,
            activation=self.activation,
            scale=self.scale,
            out_dtype=self.out_dtype,
        )


class _Norm2d(nn.Module):
    """What the norms over channels have beside their class."""

    def __init__(
        self,
        num_channels: int,
        eps: float = 1e-6,
        affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_channels, eps, affine, device=device, dtype=dtype)

    def extra_repr(self) -> str:
        norm: Any = self
        return f"{norm.normalized_shape[0]}, eps={norm.eps}, affine={norm.elementwise_affine}"


def _check_channels(channels: int, weight: Tensor | None, input: Tensor) -> None:
    """Without a weight, nothing else compares the channels of input with the module's."""
    if weight is None and input.dim() > 1 and input.shape[1] != channels:
        raise RuntimeError(
            f"expected input of {channels} channels, got input of shape {list(input.shape)}"
        )


class FusedLayerNorm2d(_Norm2d, FusedLayerNorm):
    """LayerNorm over the channels of ``(N, C, H, W)``: :func:`layer_norm` with ``dim=1``.

    The state is that of timm's LayerNorm2d. The result has input's memory format. Inputs of any two
    or more dimensions are served.

    Args:
        num_channels: the size of dimension 1.
        eps: added to the variance.
        affine: whether there are a weight and a bias.
        device, dtype: of the parameters.
    """

    def forward(self, input: Tensor) -> Tensor:
        _check_channels(self.normalized_shape[0], self.weight, input)
        if _is_scripting():
            x = input.movedim(1, -1)
            y = operators.layer_norm(x, 1, self.weight, self.bias, self.eps, keeps_order=True)
            return y.movedim(-1, 1)
        return layer_norm(input, self.weight, self.bias, self.eps, dim=1)


class FusedRMSNorm2d(_Norm2d, FusedRMSNorm):
    """RMSNorm over the channels of ``(N, C, H, W)``: :func:`rms_norm` with ``dim=1``.

    The state is that of timm's RmsNorm2d. The rest is as in :class:`FusedLayerNorm2d`.
    """

    def forward(self, x: Tensor) -> Tensor:
        _check_channels(self.normalized_shape[0], self.weight, x)
        if _is_scripting():
            eps = _scripted_eps(self.eps, x)
            y = operators.layer_norm(
                x.movedim(1, -1), 1, self.weight, None, eps, statistic="rms", keeps_order=True
            )
            return y.movedim(-1, 1)
        return rms_norm(x, self.weight, self.eps, dim=1)

# SPDX-License-Identifier: Apache-2.0
"""The modules: torch.nn's LayerNorm and RMSNorm on the fused kernels, also with a residual."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import stock
from .calls import is_compiling, plain
from .functional import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from .ops.arguments import ACTIVATIONS, check_options, check_statistic, shown
from .stock import LayerNorm, RMSNorm, function_modes

# torch.fx.symbolic_trace records each of these as one call, for it cannot trace a function that
# branches on its arguments.
for _norm in ("layer_norm", "rms_norm"):
    torch.fx.wrap(_norm)
    torch.fx.wrap(f"add_{_norm}")

_NONE: Any = None  # torch.jit.script does not know the annotations of attributes


class Norm(nn.Module):
    """What the modules have beside the class of PyTorch that each stands for.

    Its attributes are the options with their defaults. A module of PyTorch that a swap has made one
    of these has none, whatever attributes it has, and takes what PyTorch's class takes.
    """

    _stock: Any
    # The call of this package's function. A swapped module's gives numbers that are defaults, too,
    # because Dynamo may make symbols of a function's defaults.
    _fused: Any
    _is_swapped = False
    statistic = "layer"
    weight_offset = 0.0
    round_before_weight = False
    activation = _NONE
    scale = 1.0
    out_dtype = _NONE
    gate_first = False
    gate_activation = "silu"
    group_size = _NONE

    def _take(
        self, activation: Any, scale: Any, out_dtype: Any, known: Sequence[str] = ACTIVATIONS
    ) -> None:
        """Sets these options of a module that is made."""
        check_options(activation, scale, out_dtype, known)
        self.activation, self.scale, self.out_dtype = activation, scale, out_dtype

    def _is_known(self, input: Any) -> bool:
        """Whether `_fused` accepts a call of a swapped module as PyTorch's function does."""
        norm: Any = self
        bias = getattr(self, "bias", None)  # a swapped nn.RMSNorm has none
        return stock.norm_is_supported(input, norm.weight, bias, norm.eps)

    def reset_parameters(self) -> None:
        """Sets the parameters so that the norm has a factor of one and a bias of zero."""
        norm: Any = self
        if norm.weight is not None:
            # A method that somebody kept finds no class of ours after an unswap.
            is_stock = getattr(self, "_is_swapped", True)
            nn.init.constant_(norm.weight, 1.0 - (0.0 if is_stock else self.weight_offset))
        if getattr(self, "bias", None) is not None:  # nn.RMSNorm calls this before there is one
            nn.init.zeros_(norm.bias)

    def extra_repr(self) -> str:
        norm: Any = super()
        text = norm.extra_repr()
        if isinstance(self, RMSNorm) and getattr(self, "bias", None) is not None:
            text += ", bias=True"
        for name, default in _OPTIONS.items():
            if not self._is_swapped and (value := getattr(self, name)) != default:
                text += f", {name}={shown(value)}"
        return text

    def __prepare_scriptable__(self) -> Norm:
        """torch.jit.script asks for what it compiles: the forward of PyTorch's class."""
        if not (hasattr(type(self).forward, "__wrapped__") and is_bare(self)):
            raise NotImplementedError(
                "expected a module that computes what a class of torch.nn computes, whose forward "
                f"torch.jit.script compiles, got {self}"
            )
        return self


_OPTIONS = {n: value for n, value in vars(Norm).items() if n[0] != "_" and not callable(value)}


def is_bare(module: Any) -> bool:
    """Whether a module computes what PyTorch's class computes."""
    if module._is_swapped:
        return True
    if module._stock is RMSNorm and getattr(module, "bias", None) is not None:
        return False
    return [getattr(module, name) for name in _OPTIONS] == [*_OPTIONS.values()]


def forward_of(
    cls: Any, function: str, over: str, read: Any = None, argument: str = "input"
) -> Callable[..., Tensor]:
    """The forward of the module that stands for a class of PyTorch, which calls this function.

    over: the attribute with what is normalized over. read: gives the input of a swapped module in
    the order of memory of the class's result. argument: the name of the forward's argument.
    """
    is_rms, is_group = cls is RMSNorm, over == "num_groups"
    functions, own = vars(F), getattr(stock, function)
    own_forward = stock.FORWARDS[cls]

    def forward(self: Any, input: Tensor) -> Tensor:
        is_tried = not is_compiling()
        # A mode of a tool is to see the stock call alone. Asked first: under a mode each access to
        # a tensor costs the host microseconds. The call is written out, without
        # nn.Module.__getattr__, so that it takes no more time than in PyTorch's class.
        if (
            is_tried
            and (modes := function_modes())
            and getattr(self, "_is_swapped", False)
            and stock.has_foreign_mode(modes)
        ):
            found = self._parameters
            is_whole = "weight" in found and (is_rms or "bias" in found)
            if not (is_whole and cls.forward is own_forward):
                return cls.forward(self, input)
            sizes, weight = getattr(self, over), found["weight"]
            if is_rms:
                return functions[function](input, sizes, weight, self.eps)
            return functions[function](input, sizes, weight, found["bias"], self.eps)
        # The shortest way. Attributes are read where nn.Module keeps them, because to find them
        # takes host time; one that is computed is not there. A tool that has replaced PyTorch's
        # function, or its class's forward, may want to see the call below.
        if is_tried and functions[function] is own and cls.forward is own_forward:
            try:
                module = self.__dict__
                parameters = module["_parameters"]
                sizes, weight, eps = module[over], parameters["weight"], module["eps"]
                is_plain = self._is_swapped
                bias = None if is_rms and is_plain else parameters["bias"]
                if is_plain and read is not None and type(input) is Tensor:
                    input = read(input)
                elif not is_plain and self.activation is None and self.out_dtype is None:
                    is_plain = self.scale == 1.0
                    if is_rms and is_plain:
                        is_plain = bias is None and self.weight_offset == 0.0
                        is_plain = is_plain and not self.round_before_weight
            except (AttributeError, KeyError):
                is_plain = False
            if is_plain:
                try:
                    y: Tensor | None = plain(is_rms, input, sizes, weight, bias, eps, is_group)
                except Exception:
                    if not self._is_swapped or self._is_known(input):
                        raise
                    return cls.forward(self, input)
                if y is not None:
                    return y
        if not isinstance(self, Norm):  # a bound method that outlived unswap_norms
            return type(self).forward(self, input)
        if self._is_swapped and not (cls.forward is own_forward and self._is_known(input)):
            return cls.forward(self, input)
        return self._fused(input)

    # Each has code of its own, for the interpreter keeps beside it how it found the attributes.
    code: Any = forward.__code__
    names = tuple(argument if name == "input" else name for name in code.co_varnames)
    forward.__code__ = code.replace(co_varnames=names)
    forward.__wrapped__ = cls.forward  # type: ignore[attr-defined]  # for torch.jit.script
    return forward


class FusedLayerNorm(Norm, nn.LayerNorm):
    r"""A drop-in :class:`torch.nn.LayerNorm`: the same parameters, state_dict and results, faster.

    ``y = activation(layer_norm(x) * weight + bias) * scale``, fused in forward and in backward;
    the shapes, dtypes and errors are those of :func:`fused_layernorm.layer_norm`.

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as nn.LayerNorm's.
        activation, scale, out_dtype: as :func:`fused_layernorm.layer_norm`'s.
    """

    _stock = LayerNorm

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
        self._take(activation, scale, out_dtype)

    forward = forward_of(LayerNorm, "layer_norm", "normalized_shape")

    def _fused(self, input: Tensor) -> Tensor:
        shape = self.normalized_shape
        if self._is_swapped:
            given = self.weight, self.bias, self.eps
            return layer_norm(input, *given, normalized_shape=shape, scale=1.0)
        return layer_norm(
            input, self.weight, self.bias, self.eps, normalized_shape=shape,
            activation=self.activation, scale=self.scale, out_dtype=self.out_dtype,
        )  # fmt: skip


class FusedAddLayerNorm(FusedLayerNorm):
    """``forward(input, residual) -> (output, residual_out)``: :func:`add_layer_norm` as a module.

    ``residual_out = input + residual`` and ``output = layer_norm(residual_out)``, fused in forward
    and in backward. The arguments are those of :class:`FusedLayerNorm`.
    """

    def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return add_layer_norm(
            input, residual, self.weight, self.bias, self.eps,
            normalized_shape=self.normalized_shape, activation=self.activation, scale=self.scale,
            out_dtype=self.out_dtype,
        )  # fmt: skip


class FusedRMSNorm(Norm, nn.RMSNorm):
    r"""A drop-in :class:`torch.nn.RMSNorm`: the same parameters, state_dict and results, faster.

    ``y = activation(rms_norm(x) * (weight + weight_offset) + bias) * scale``, fused in forward and
    in backward; the shapes, dtypes and errors are those of :func:`fused_layernorm.rms_norm`.

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype: as nn.RMSNorm's.
        bias: whether there is a bias beside weight, which nn.RMSNorm has not.
        weight_offset: a finite number that is added to weight. Weight is initialized so that the
            sum is one: to zero for Gemma's offset of 1.
        round_before_weight, activation, scale, out_dtype: as :func:`fused_layernorm.rms_norm`'s.
    """

    _stock = RMSNorm

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
        self._take(activation, scale, out_dtype)
        check_statistic("rms", weight_offset, self.weight)
        if bias and elementwise_affine:
            self.bias = nn.Parameter(torch.zeros_like(self.weight))
        else:
            self.register_parameter("bias", None)
        self.weight_offset = weight_offset
        self.round_before_weight = round_before_weight
        self.reset_parameters()

    forward = forward_of(RMSNorm, "rms_norm", "normalized_shape", argument="x")

    def _fused(self, input: Tensor) -> Tensor:
        shape = self.normalized_shape
        if self._is_swapped:
            given: Any = {"normalized_shape": shape, "weight_offset": 0.0, "scale": 1.0}
            return rms_norm(input, self.weight, self.eps, **given)
        return rms_norm(
            input, self.weight, self.eps, bias=self.bias, normalized_shape=shape,
            weight_offset=self.weight_offset, round_before_weight=self.round_before_weight,
            activation=self.activation, scale=self.scale, out_dtype=self.out_dtype,
        )  # fmt: skip


class FusedAddRMSNorm(FusedRMSNorm):
    """``forward(input, residual) -> (output, residual_out)``: :func:`add_rms_norm` as a module.

    ``residual_out = input + residual`` and ``output = rms_norm(residual_out)``, fused in forward
    and in backward. The arguments are those of :class:`FusedRMSNorm`.
    """

    def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return add_rms_norm(
            input, residual, self.weight, self.eps, bias=self.bias,
            weight_offset=self.weight_offset, round_before_weight=self.round_before_weight,
            normalized_shape=self.normalized_shape, activation=self.activation, scale=self.scale,
            out_dtype=self.out_dtype,
        )  # fmt: skip


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
        shape = list(input.shape)
        raise RuntimeError(f"expected input of {channels} channels, got input of shape {shape}")


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
        return layer_norm(input, self.weight, self.bias, self.eps, dim=1)


class FusedRMSNorm2d(_Norm2d, FusedRMSNorm):
    """RMSNorm over the channels of ``(N, C, H, W)``: :func:`rms_norm` with ``dim=1``.

    The state is that of timm's RmsNorm2d. The rest is as in :class:`FusedLayerNorm2d`.
    """

    def forward(self, x: Tensor) -> Tensor:
        _check_channels(self.normalized_shape[0], self.weight, x)
        return rms_norm(x, self.weight, self.eps, dim=1)


def checked(cls: Any) -> tuple[type[nn.Module], str]:
    """What torch.load(weights_only=True) is to find under the name of a class of the package.

    It sets on a module whatever attributes the file has. This subclass, which no module keeps,
    looks at them first, and takes data but nothing that runs.
    """

    def __setstate__(self: Any, state: dict[str, Any]) -> None:
        for name, value in state.items():
            runs = callable(value) or callable(getattr(cls, name, None))
            if runs or ("_hooks" in name and value):
                raise pickle.UnpicklingError(
                    f"expected the data of a {cls.__name__}, got a {name} that calls of it would "
                    "run: torch.load(weights_only=False) loads it, if you trust the file"
                )
        self.__class__ = cls
        self.__setstate__(state)

    name = f"{cls.__module__}.{cls.__qualname__}"
    return type(cls.__name__, (cls,), {"__setstate__": __setstate__}), name

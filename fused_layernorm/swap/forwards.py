# SPDX-License-Identifier: Apache-2.0
"""The forwards, on the fused kernels, that replace those of the classes in table.py.

Each is written as a method of the swapped class, with the parameters of the forward that it
replaces, of which the first may have another name. It returns None where the kernels cannot serve a
call, or where an option of the library asks for another computation: the class's own forward then
runs (classes._or_stock).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..functional import layer_norm
from ..ops.arguments import HALF
from ..stock import dtypes_are_supported
from .classes import Forward

# torch.fx.symbolic_trace records each of these as one call, for it cannot trace a function that
# branches on dtypes or strides.
torch.fx.wrap("layer_norm")
torch.fx.wrap("_in_input_dtype")
torch.fx.wrap("_float32_without_bias")
torch.fx.wrap("_in_promoted_dtype")


def named(module: str, name: str, forward: Any) -> Forward:
    """A forward that a function made, under the name by which pickle finds it in this module."""
    forward.__module__, forward.__name__, forward.__qualname__ = module, name, name
    made: Forward = forward
    return made


def then_act(norm: Forward) -> Forward:
    """The forward of timm's norms that an activation follows, from that of the norm alone."""

    def forward(self: Any, x: Tensor) -> Any:
        y = norm(self, x)
        return None if y is None else self.act(self.drop(y))

    return named(norm.__module__, f"{norm.__name__}_act", forward)


def parameter(module: Any, name: str) -> Any:
    """module.weight, for example, without the half microsecond of nn.Module.__getattr__.

    For a forward that does nothing with it but hand it on: torch.fx sees the getattr alone.
    """
    try:
        return module._parameters[name]
    except KeyError:
        return getattr(module, name)


def matched(
    x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """x, weight and bias in dtypes that layer_norm takes together, none of them narrowed."""
    given = [p.dtype for p in (weight, bias) if p is not None]
    if not given:
        return x, weight, bias
    dtype = torch.promote_types(given[0], given[-1])
    if dtype != x.dtype and not (dtype == torch.float32 and x.dtype in HALF):
        dtype = torch.promote_types(x.dtype, dtype)
        if not (dtype == torch.float32 and x.dtype in HALF):
            x = x.to(dtype)
    weight, bias = (None if p is None else p.to(dtype) for p in (weight, bias))
    return x, weight, bias


def _last(x: Tensor) -> int | None:
    """The `dim` of a norm over the last dimension that a library writes out.

    The library's elementwise operators leave the result in the order of x's memory, as layer_norm
    does with a dim. Without one it is contiguous, and cheaper.
    """
    return None if x.is_contiguous() else -1


def _in_input_dtype(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    shape: int | Sequence[int] | None,
    dim: int | None = None,
) -> Tensor:
    """F.layer_norm in float32, its result in x's dtype."""
    if x.dtype in HALF:
        found, weight, bias = matched(x, weight, bias)
    else:
        found = x.float()
        weight, bias = (None if p is None else p.float() for p in (weight, bias))
    out_dtype = x.dtype if x.dtype in HALF else torch.float32  # given, for autocast would change it
    norm = (weight, bias, eps)
    y = layer_norm(found, *norm, normalized_shape=shape, out_dtype=out_dtype, dim=dim)
    return y.to(x.dtype)


def _float32_without_bias(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """A norm over the last dimension; a weight of two dimensions has a row for each head."""
    if weight.dim() == 1:
        return _in_input_dtype(x, weight, None, eps, None, _last(x))
    found, dim = x if x.dtype in HALF else x.float(), _last(x)
    shape = weight.shape[-1:] if dim is None else None
    y = layer_norm(found, eps=eps, normalized_shape=shape, out_dtype=torch.float32, dim=dim)
    return (weight.float() * y).to(x.dtype)


def _in_promoted_dtype(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    autocast_widens: bool,
    dim: int | None = None,
) -> Tensor:
    """A layer norm that a library writes out: the result has the dtype of x * weight + bias.

    It lies in memory in the order of x, as the library's elementwise operators leave it, and the
    following layers may rely on it. Autocast makes rsqrt and pow float32 on every device but the
    CPU. That widens the result too, unless the library rounds to x's dtype before it multiplies by
    weight.
    """
    dtype = x.dtype
    for parameter in (weight, bias):
        dtype = torch.promote_types(dtype, parameter.dtype)
    if autocast_widens and x.device.type != "cpu" and torch.is_autocast_enabled(x.device.type):
        dtype = torch.promote_types(dtype, torch.float32)
    dim = _last(x) if dim is None else dim
    return layer_norm(*matched(x, weight, bias), eps, out_dtype=dtype, dim=dim)


# ---- Over the last dimensions.


def last_dims(self: Any, input: Tensor) -> Tensor:
    weight, bias = parameter(self, "weight"), parameter(self, "bias")
    return layer_norm(input, weight, bias, self.eps, normalized_shape=self.normalized_shape)


def of_layer_norm(self: Any, input: Tensor) -> Tensor | None:
    """What calls F.layer_norm, as subclasses of nn.LayerNorm that a predicate accepted."""
    weight, bias, eps = parameter(self, "weight"), parameter(self, "bias"), self.eps
    if eps != eps or not dtypes_are_supported(input, weight, bias):
        return None
    return layer_norm(input, weight, bias, eps, normalized_shape=tuple(self.normalized_shape))


def timm_last_dims(self: Any, x: Tensor) -> Tensor | None:
    return None if self._fast_norm else last_dims(self, x)


timm_last_dims_act = then_act(timm_last_dims)


def float32(self: Any, x: Tensor) -> Tensor:
    return _in_input_dtype(x, self.weight, self.bias, self.eps, self.normalized_shape)


float32_act = then_act(float32)


def input_dtype(self: Any, hidden_states: Tensor) -> Tensor:
    norm = (self.weight, self.bias, self.eps)
    shape, dtype = self.normalized_shape, hidden_states.dtype
    return layer_norm(hidden_states, *norm, normalized_shape=shape, out_dtype=dtype)


def without_parameters(self: Any, hidden_states: Tensor) -> Tensor:
    return _in_input_dtype(hidden_states, None, None, 1e-5, self.normalized_shape)


def shape_of_weight(self: Any, input: Tensor) -> Tensor:
    return layer_norm(input, parameter(self, "weight"), parameter(self, "bias"), 1e-5)


def weight_plus_one(self: Any, hidden_states: Tensor) -> Tensor:
    norm = (self.weight + 1.0, self.bias, self.eps)
    return layer_norm(hidden_states, *norm, normalized_shape=self.normalized_shape)


def weight_plus_one_outside_autocast(self: Any, input: Tensor) -> Tensor | None:
    if torch.is_autocast_enabled() or torch.is_autocast_enabled(input.device.type):
        return None
    return weight_plus_one(self, input)


def parameters_of_heads(self: Any, hidden_states: Tensor) -> Tensor:
    """Weight and bias have more dimensions than are normalized over."""
    y = layer_norm(hidden_states, None, None, 1e-5, normalized_shape=self.normalized_shape)
    return y * self.weight + self.bias


def float32_without_bias(self: Any, hidden_states: Tensor) -> Tensor:
    return _float32_without_bias(hidden_states, self.weight, self.variance_epsilon)


def by_hand(self: Any, hidden_states: Tensor) -> Tensor:
    return _in_promoted_dtype(hidden_states, self.weight, self.bias, self.variance_epsilon, False)


def esmfold(self: Any, x: Tensor) -> Tensor | None:
    if x.dtype is torch.bfloat16:
        return None
    return layer_norm(
        x, parameter(self, "weight"), parameter(self, "bias"), self.eps, normalized_shape=self.c_in
    )


# ---- Over the channels, which are permuted to the last dimension and back, as in the classes
# themselves. A channels_last input is not copied, and the result is channels_last, as theirs is.


def channels_first(self: Any, x: Tensor) -> Tensor:
    x = x.permute(0, 2, 3, 1)
    x = layer_norm(x, self.weight, self.bias, self.eps, normalized_shape=self.normalized_shape)
    return x.permute(0, 3, 1, 2)


def channels_first_1d(self: Any, x: Tensor) -> Tensor:
    x = x.permute(0, 2, 1)
    x = layer_norm(x, self.weight, self.bias, self.eps, normalized_shape=self.normalized_shape)
    return x.permute(0, 2, 1)


def timm_channels_first(self: Any, x: Tensor) -> Tensor | None:
    return None if self._fast_norm else channels_first(self, x)


timm_channels_first_act = then_act(timm_channels_first)


def float32_channels_first(self: Any, x: Tensor) -> Tensor:
    return float32(self, x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


float32_channels_first_act = then_act(float32_channels_first)


def timm_exp2d(self: Any, x: Tensor) -> Tensor:
    if x.is_contiguous():
        return channels_first(self, x)
    return channels_first_by_hand(self, x)


def channels_first_by_hand(self: Any, x: Tensor) -> Tensor:
    return _in_promoted_dtype(x, self.weight, self.bias, self.eps, True, dim=1)


def data_format(self: Any, features: Tensor) -> Tensor:
    if self.data_format == "channels_first":
        return channels_first(self, features)
    return last_dims(self, features)


def data_format_by_hand(self: Any, x: Tensor) -> Tensor:
    """transformers before 5.0."""
    if self.data_format == "channels_first":
        return _in_promoted_dtype(x, self.weight, self.bias, self.eps, False, dim=1)
    return last_dims(self, x)

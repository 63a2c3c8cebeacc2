# SPDX-License-Identifier: Apache-2.0
"""The forwards that replace those of LayerNorms of other libraries.

Most say what the classes differ in, as arguments of `norm` in known.txt. The others are written as
methods of the swapped class, with the parameters of the forward that they replace, of which the
first may have another name. A forward returns None where the kernels cannot serve a call, or where
an option of the library asks for another computation: the class's own forward then runs
(classes._or_stock).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..functional import layer_norm
from ..modules import FusedLayerNorm, is_bare
from ..ops.arguments import HALF
from ..ops.family import assume_constant_result
from ..stock import are_supported, dtypes_are_supported
from .classes import Forward, forward_of, has_own_call, runs_fused, runs_hooks

# torch.fx.symbolic_trace records each of these as one call (modules.py).
for _traced in ("layer_norm", "_in_input_dtype", "_float32_without_bias", "_in_promoted_dtype"):
    torch.fx.wrap(_traced)


def parameter(module: Any, name: str) -> Any:
    """module.weight, for example, without the half microsecond of nn.Module.__getattr__.

    For a forward that does nothing with it but hand it on: torch.fx sees the getattr alone.
    """
    try:
        return module._parameters[name]
    except KeyError:
        return getattr(module, name)


def parameters(module: Any) -> tuple[Any, Any]:
    """weight and bias, as `parameter` gives them."""
    try:
        found = module._parameters
        return found["weight"], found["bias"]
    except KeyError:
        return module.weight, module.bias


def matched(
    x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """x, weight and bias in dtypes that layer_norm takes together, none of them narrowed."""
    dtype = x.dtype
    for one in (weight, bias):
        dtype = dtype if one is None else torch.promote_types(dtype, one.dtype)
    if dtype != x.dtype and not (dtype == torch.float32 and x.dtype in HALF):
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
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, autocast_widens: bool, dim: int | None
) -> Tensor:
    """A layer norm that a library writes out: the result has the dtype of x * weight + bias.

    Autocast makes rsqrt and pow float32 on every device but the CPU. That widens the result too,
    unless the library rounds to x's dtype before it multiplies by weight.
    """
    dtype = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), bias.dtype)
    if autocast_widens and x.device.type != "cpu" and torch.is_autocast_enabled(x.device.type):
        dtype = torch.promote_types(dtype, torch.float32)
    dim = _last(x) if dim is None else dim
    return layer_norm(*matched(x, weight, bias), eps, out_dtype=dtype, dim=dim)


CHANNELS, CHANNELS_1D = (0, 2, 3, 1), (0, 2, 1)

# The forwards that compute F.layer_norm of weight, bias, eps and normalized_shape, with the dtype
# of the result as `norm` takes it.
OF_ATTRIBUTES: dict[Forward | None, str] = {}


def norm(
    eps: str | float = "eps",
    dtype: str = "",
    *,
    shape: str | None = "normalized_shape",
    affine: bool = True,
    plus_one: bool = False,
    order: tuple[int, ...] | None = None,
    dim: int | None = None,
    unless: str | None = None,
) -> Forward:
    """A forward that computes F.layer_norm of the module's attributes.

    Args:
        eps: an attribute, or the number.
        dtype: the result's: "" as PyTorch gives it, "x" whatever autocast says; "float32" computes
            in float32 and gives x's; "promoted" is that of x * weight + bias, and "widened" is the
            same where autocast counts.
        shape: an attribute; None for weight's.
        order: to which x is permuted, and the result back. A channels_last input is not copied, and
            the result is channels_last, as the classes' own are.
        dim: the dimension that a class which writes the norm out normalizes over.
        unless: an attribute that is true where the class computes something else.
    """
    back = None if order is None else [*map(order.index, range(len(order)))]
    # torch.fx sees what getattr reads, as it does in the classes.
    read: Any = getattr if dtype or plus_one or order is not None else parameter

    def forward(self: Any, x: Tensor) -> Tensor | None:
        if unless is not None and getattr(self, unless):
            return None
        x = x if order is None else x.permute(order)  # first, as the classes do
        weight: Any = read(self, "weight") if affine else None
        bias: Any = read(self, "bias") if affine else None
        weight = weight + 1.0 if plus_one else weight
        number = getattr(self, eps) if isinstance(eps, str) else eps
        sizes = None if shape is None else getattr(self, shape)
        if dtype == "float32":
            y = _in_input_dtype(x, weight, bias, number, sizes)
        elif dtype in ("promoted", "widened"):
            y = _in_promoted_dtype(x, weight, bias, number, dtype == "widened", dim)
        else:
            out_dtype = x.dtype if dtype == "x" else None
            y = layer_norm(x, weight, bias, number, normalized_shape=sizes, out_dtype=out_dtype)
        return y if back is None else y.permute(back)

    if (eps, shape, affine, plus_one, order) == ("eps", "normalized_shape", True, False, None):
        OF_ATTRIBUTES[forward] = dtype
    return forward


last_dims, channels_first, weight_plus_one = norm(), norm(order=CHANNELS), norm(plus_one=True)
channels_first_by_hand = norm(dtype="widened", shape=None, dim=1)


def of_layer_norm(self: Any, input: Tensor) -> Tensor | None:
    """What calls F.layer_norm, as subclasses of nn.LayerNorm that a predicate accepted."""
    weight, bias = parameters(self)
    if self.eps != self.eps or not dtypes_are_supported(input, weight, bias):
        return None
    return layer_norm(input, weight, bias, self.eps, normalized_shape=tuple(self.normalized_shape))


OF_ATTRIBUTES[of_layer_norm] = ""


@assume_constant_result
def result_of_class(cls: Any, is_stock_swapped: bool) -> str | None:
    """`result_of`, as far as the class says it. is_stock_swapped: whether the module was one of
    PyTorch's class before a swap."""
    if has_own_call(cls) or not runs_fused(cls, is_stock_swapped):
        return None
    return "" if cls.forward is FusedLayerNorm.forward else OF_ATTRIBUTES.get(forward_of(cls))


def result_of(module: Any) -> str | None:
    """The dtype of a norm's result, as `norm` takes it, if a call of the module computes
    F.layer_norm of its attributes and runs nothing else; None if it may not."""
    own = module.__dict__
    result = result_of_class(type(module), "_is_swapped" in own)
    if result is None or own.get("_fast_norm", False) or runs_hooks(module):
        return None
    # Dynamo guards what is read by its name, and nothing of __dict__.
    if isinstance(module, FusedLayerNorm) and not (module._is_swapped or is_bare(module)):
        return None
    weight, bias = parameters(module)
    return result if weight is None is bias or are_supported(weight, bias) else None


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


_esmfold = norm(shape="c_in")


def esmfold(self: Any, x: Tensor) -> Tensor | None:
    return None if x.dtype is torch.bfloat16 else _esmfold(self, x)


def timm_exp2d(self: Any, x: Tensor) -> Any:
    return channels_first(self, x) if x.is_contiguous() else channels_first_by_hand(self, x)


def data_format(first: Forward) -> Forward:
    """`first` is the forward for channels_first."""

    def forward(self: Any, x: Tensor) -> Any:
        return (first if self.data_format == "channels_first" else last_dims)(self, x)

    return forward

# SPDX-License-Identifier: Apache-2.0
"""What users call for groups of channels: GroupNorm, also with a modulation, and its module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch.nn import functional as F

from . import calls, stock
from .calls import is_compiling, plain
from .compile import choice
from .modules import Norm, forward_of
from .ops import arguments
from .ops.operators import GROUP_NORM, GroupArguments
from .stock import GroupNorm

# torch.fx.symbolic_trace records each of these as one call.
torch.fx.wrap("group_norm")
torch.fx.wrap("ada_group_norm")

# From this release on PyTorch's kernels for CUDA read channels_last where it lies; before, they
# read and write contiguous tensors.
KEEPS_CHANNELS_LAST = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
    scale: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    r"""Group normalization, an activation and a scale, in one call of the kernels.

    The channels of each sample are ``num_groups`` groups of neighbours, over each of which and over
    all positions mean and variance are taken (Wu and He, "Group Normalization", 2018):

    .. math::
        y = \mathrm{activation}\left(\frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}}
            \cdot \mathrm{weight} + \mathrm{bias}\right) \cdot \mathrm{scale}

    With as many groups as channels this is instance normalization, with one group a layer
    normalization of whole samples. The arithmetic and the errors are those of :func:`layer_norm`,
    and a ValueError where a group has one value.

    Args:
        input: ``(N, C, *)`` of two dimensions or more; float32, float16, bfloat16 or float64, of
            any strides. Contiguous and channels_last tensors are read where they lie, and so are
            others of such an order of memory, as a transposed ``(N, L, C)`` is.
        num_groups: how many groups; it divides C.
        weight, bias: shape ``(C,)``; their dtypes are as in :func:`layer_norm`.
        activation: one of those of :func:`layer_norm`, or ``"leaky_relu"`` (slope 0.01).
        eps, scale: as in :func:`layer_norm`.
        out_dtype: the result's dtype, any of the four. By default input's; under autocast what
            ``torch.nn.functional.group_norm`` gives (float32 on CUDA).

    Returns:
        A tensor of input's shape, in the order of memory that ``torch.empty_like(input)`` has: that
        of input, where its elements lie without gaps. (``torch.nn.functional.group_norm``, which
        serves plain calls on the CPU, gives contiguous or channels_last tensors.)
    """
    is_bare = activation is None and out_dtype is None and not is_compiling()
    if is_bare and type(scale) is float and scale == 1.0:
        y = plain(False, input, num_groups, weight, bias, eps, True)
        if y is not None:
            return y
    return _run(input, num_groups, None, None, weight, bias, eps, activation, scale, out_dtype)


def ada_group_norm(
    input: Tensor,
    num_groups: int,
    shift: Tensor | None = None,
    scale: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    r"""Group normalization with a modulation and an activation, in one call of the kernels.

    .. math::
        y = \mathrm{activation}\left(\mathrm{group\_norm}(x) \cdot (1 + \mathrm{scale})
            + \mathrm{shift}\right)

    where group_norm has weight and bias: AdaGN of diffusion models (Dhariwal and Nichol, "Diffusion
    Models Beat GANs on Image Synthesis", 2021). Each tensor's gradient has its shape and dtype.

    Args:
        shift, scale: each optional, a number for each channel of each sample: ``(N, C)``, which
            sizes of 1 may follow, as ``(N, C, 1, 1)``; of any strides, so a chunk of a larger
            tensor is read where it lies. Of input's dtype, or float32 beside a half-precision
            input.

    The other arguments, the result and the errors are those of :func:`group_norm`.
    """
    return _run(input, num_groups, shift, scale, weight, bias, eps, activation, 1.0, out_dtype)


def _run(input: Tensor, num_groups: Any, *others: Any) -> Any:
    # The operator checks all else.
    if not isinstance(input, Tensor) or type(num_groups) is not int or num_groups < 1:
        arguments.check_tensor("input", input)
        num_groups = arguments.check_count("num_groups", num_groups, RuntimeError)
    a = GroupArguments(input, num_groups, *others)
    if has_one_value(input, num_groups):
        arguments.check_group_norm(a)
        got = f"input of shape {[*input.shape]} and num_groups {num_groups}"
        raise ValueError(f"expected more than one value in a group, got {got}")
    return calls.call(GROUP_NORM, a)


def has_one_value(x: Tensor, num_groups: int) -> bool:
    """Whether each group would have one value, which F.group_norm refuses."""
    count = x.numel()
    return isinstance(count, int) and count == num_groups  # a symbolic size is not to be guarded


def as_pytorch_reads(x: Tensor) -> Tensor:
    """x in the order of memory in which PyTorch's group_norm reads it, and gives its result."""
    if not isinstance(x, Tensor) or x.is_nested or x.is_contiguous():
        return x
    if x.is_cuda and not KEEPS_CHANNELS_LAST:
        return x.contiguous()
    return x.contiguous(memory_format=suggest_memory_format(x))


class FusedGroupNorm(Norm, nn.GroupNorm):
    r"""A drop-in :class:`torch.nn.GroupNorm`: the same parameters, state_dict and results, faster.

    ``y = activation(group_norm(x) * weight + bias) * scale``, fused in forward and in backward; the
    shapes, dtypes and errors are those of :func:`fused_layernorm.group_norm`.

    Args:
        num_groups, num_channels, eps, affine, device, dtype, bias: as nn.GroupNorm's.
        activation, scale, out_dtype: as :func:`fused_layernorm.group_norm`'s.
    """

    _stock = GroupNorm

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        activation: str | None = None,
        scale: float = 1.0,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        if num_groups < 1:
            raise ValueError(f"expected num_groups of at least 1, got {num_groups}")
        super().__init__(num_groups, num_channels, eps, affine, device, dtype)
        if not bias:
            self.register_parameter("bias", None)
        self._take(activation, scale, out_dtype, arguments.OF_GROUPS)

    # The result of a swapped module lies as that of nn.GroupNorm.
    forward = forward_of(GroupNorm, "group_norm", "num_groups", as_pytorch_reads)

    def _is_known(self, input: Any) -> bool:
        is_known = F.group_norm is stock.group_norm and Norm._is_known(self, input)
        if not is_known or has_one_value(input, self.num_groups):
            return False
        return not choice.leaves_groups(input, self.num_groups, self.weight, self.bias)

    def _fused(self, input: Tensor) -> Tensor:
        given = self.num_groups, self.weight, self.bias, self.eps
        if self._is_swapped:
            return group_norm(as_pytorch_reads(input), *given, scale=1.0)
        return group_norm(
            input, *given, activation=self.activation, scale=self.scale, out_dtype=self.out_dtype
        )

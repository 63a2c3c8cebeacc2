# SPDX-License-Identifier: Apache-2.0
"""Group norms of a graph with what follows them, and their replacement.

A group norm is a Site whose normalized shape is its channels: weight and bias have a number for
each. A modulation of channels of samples, an activation and a factor may follow it, in this order,
and become one operator with it. What else there is to say of a site, replace.py says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node
from torch.fx.node import map_arg
from torch.nn import functional as F

from ..ops.operators import GROUP_NORM, Arguments, GroupArguments
from . import patterns, sites
from .patterns import Viewed
from .reading import Call, is_tensor, read, reads, value_of
from .replace import have_same_strides, is_contiguous
from .rules import Fusion
from .sites import Site, are_equal

_aten = torch.ops.aten


# fmt: off
reads(F.group_norm, torch.group_norm, _aten.group_norm.default)(
    lambda input, num_groups, weight=None, bias=None, eps=1e-5, cudnn_enabled=True:
    Call("group_norm", (input, num_groups, weight, bias, eps)))
reads(torch.native_group_norm, _aten.native_group_norm.default)(
    lambda input, weight, bias, N, C, HxW, group, eps:
    Call("native_group_norm", (input, group, weight, bias, eps)))
# fmt: on


@reads(F.instance_norm)
def _instance_norm(
    input: Any, running_mean: Any = None, running_var: Any = None, weight: Any = None,
    bias: Any = None, use_input_stats: Any = True, momentum: Any = 0.1, eps: Any = 1e-5,
) -> Call | None:  # fmt: skip
    """Without running statistics: as many groups as channels."""
    if running_mean is not None or running_var is not None or use_input_stats is not True:
        return None
    if not is_tensor(input) or value_of(input).dim() < 3:
        return None
    return Call("group_norm", (input, value_of(input).shape[1], weight, bias, eps))


@reads(GROUP_NORM.plain)
def _fused_group_norm(*args: Any, **kwargs: Any) -> Call | None:
    """This package's operator, which a swapped module calls."""
    a = GroupArguments(*args, **kwargs)
    if a.output_scale != 1.0 or any(x is not None for x in (a.activation, a.shift, a.scale)):
        return None
    return Call("group_norm", (a.input, a.num_groups, a.weight, a.bias, a.eps))


@dataclass
class GroupSite(Site):
    num_groups: Any = 1
    has_rows = False
    is_activated_after_modulation = True
    activations = patterns.GROUP_ACTIVATIONS
    fusion = Fusion.GROUPS
    cols = None

    @property
    def normalized_shape(self) -> torch.Size:
        return value_of(self.norm).shape[1:2]

    def takes(self, modulation: Node | Viewed) -> bool:
        """Whether a shift or scale has a number for each channel of each sample."""
        shape = value_of(self.norm).shape
        return are_equal(sites.shape_of(modulation), [*shape[:2], *[1] * (len(shape) - 2)])

    def candidates(self) -> Iterator[GroupSite]:
        grown = sites.cast(sites.activated(sites.modulated(self)))
        yield from [self] if grown.y is self.y else [grown, self]

    def overload(self, a: Arguments) -> OpOverload:
        return GROUP_NORM.plain

    def lay_out(self, a: Arguments) -> tuple[Any, ...]:
        last = (a.eps, a.activation, a.output_scale, a.out_dtype)
        return (a.input, self.num_groups, a.shift, a.scale, a.weight, a.bias, *last)

    def as_read(self, y: Node, make: Any) -> Node:
        if have_same_strides(*map(value_of, (self.y, y))) or _users_do_not_mind(self.y, y):
            return y
        return make(_aten.contiguous.default, (y,))


def find(node: Node) -> GroupSite | None:
    """The group norm whose result this node gives, without the operations behind it."""
    call = read(node)
    if call is None or call.name != "group_norm" or not is_tensor(node):
        return None
    input, num_groups, weight, bias, eps = call.operands
    if not is_tensor(input) or value_of(node).dim() < 2:
        return None
    form = getattr(node.target, "__name__", str(node.target)).removesuffix(".default")
    site = GroupSite(node, form, input, 1, weight, bias, eps, y=node, nodes=frozenset({node}))
    site.num_groups = num_groups
    if is_contiguous(value_of(input)):
        site.saved = input  # of other inputs PyTorch saves a copy
    return sites.with_statistics(site, "native_group_norm")


def _users_do_not_mind(old: Node, new: Node) -> bool:
    """Whether what reads the old node gives results of the same strides from the new one.

    A convolution with a channels_last weight does. PyTorch's group_norm gives a contiguous tensor
    from one of channels_last, which the convolution behind it would copy.
    """
    for user in old.users:
        if "conv" not in getattr(user.target, "__name__", "") or user.op != "call_function":
            return False
        args, kwargs = map_arg(
            (user.args, user.kwargs), lambda node: value_of(new if node is old else node)
        )
        with torch.no_grad():
            found = user.target(*args, **kwargs)  # type: ignore[operator]
        if not is_tensor(user) or not are_equal(found.stride(), value_of(user).stride()):
            return False
    return True

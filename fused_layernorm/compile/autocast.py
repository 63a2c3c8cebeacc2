# SPDX-License-Identifier: Apache-2.0
"""Results that autocast casts to half precision wherever they are used.

Under autocast a layer norm gives float32, and a matrix product or a convolution casts what it reads
to half precision. The captured graph does not show these casts, but the dtypes do: such a function
returns half precision from float32 operands. Where only such functions read a norm's result, as it
is or in another layout, the kernel may round the result itself: the numbers are the same, and half
as many bytes are written and read, in backward too.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.fx import Node

from ..ops.arguments import HALF
from .reading import dtype_of, is_tensor

# Functions, and methods by name, that autocast runs in half precision.
_CASTING: set[Any] = {
    *(F.linear, operator.matmul, torch.matmul, torch.mm, torch.bmm),
    *(torch.addmm, torch.baddbmm, torch.addbmm, torch.conv1d, torch.conv2d, torch.conv3d),
    F.scaled_dot_product_attention,
    *("matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm"),
}
# Functions and methods that return the elements of their first argument in another layout; those of
# _PADS count only if they add nothing but zeros.
_PADS: set[Any] = {F.pad, torch._C._nn.pad}
_MOVING: set[Any] = {
    *(operator.getitem, torch.reshape, torch.flatten, torch.unflatten, torch.squeeze),
    *(torch.unsqueeze, torch.permute, torch.transpose, torch.movedim, torch.clone, torch.roll),
    *("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "expand", "permute"),
    *("transpose", "movedim", "contiguous", "clone", "roll"),
    *_PADS,
}


class Narrowed(NamedTuple):
    """The dtype to round a result to, and the nodes that change its layout before it is cast."""

    dtype: torch.dtype
    moved: tuple[Node, ...]  # in the order of the graph


def narrowed(y: Node) -> Narrowed | None:
    """How the kernel may round the result y; None if something reads y in float32.

    The gradients of several readers are then summed in half precision. float16 lacks the range for
    that, so there only one reader is allowed.
    """
    if dtype_of(y) is not torch.float32:
        return None
    readers: list[Node] = []
    moved: list[Node] = []
    pending = [y]
    while pending:
        node = pending.pop()
        for user in node.users:
            if user.op not in ("call_function", "call_method") or not is_tensor(user):
                return None
            if user.target in _CASTING and dtype_of(user) in HALF:
                readers.append(user)
            elif _is_moved(user, node):
                if user not in moved:
                    moved.append(user)
                    pending.append(user)
            else:
                return None
    dtypes = {dtype_of(reader) for reader in readers}
    if len(dtypes) != 1 or (torch.float16 in dtypes and len(readers) > 1):
        return None
    return Narrowed(dtypes.pop(), tuple(sorted(moved)))


def _is_moved(user: Node, node: Node) -> bool:
    """Whether user is the node's result in another layout."""
    if not user.args or user.args[0] is not node or user.all_input_nodes != [node]:
        return False
    given = [*user.args[1:], *user.kwargs.values()]
    if user.target not in _MOVING or any(isinstance(value, torch.dtype) for value in given):
        return False  # a view in another dtype shows the bytes, not the numbers
    return user.target not in _PADS or all(v in ("constant", None, 0) for v in given[1:])

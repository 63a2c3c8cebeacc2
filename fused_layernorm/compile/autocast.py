# SPDX-License-Identifier: Apache-2.0
"""Results that autocast casts to half precision wherever they are used.

A captured graph does not show the casts of autocast, but its dtypes do: a matrix product or a
convolution returns half precision from float32 operands. Where only such functions read a norm's
result, as it is or in another layout, the kernel may round the result itself: the numbers are the
same, and half as many bytes are written and read, in backward too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.fx import Node

from ..ops.arguments import HALF
from .reading import dtype_of, is_tensor, read, spellings

# What autocast runs in half precision.
_CASTING = {
    *spellings("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm"),
    *spellings("conv1d", "conv2d", "conv3d", "scaled_dot_product_attention"),
}
# What returns, as views do, the elements of its first argument in another layout; pads count only
# if they add nothing but zeros.
_PADS = {*spellings("pad")}
_MOVING = {*spellings("getitem", "movedim", "contiguous", "clone", "roll"), *_PADS}


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
    dtypes: list[torch.dtype] = []  # of the readers
    moved = [y]
    for node in moved:  # grows
        for user in node.users:
            if user.op not in ("call_function", "call_method") or not is_tensor(user):
                return None
            if user.target in _CASTING and dtype_of(user) in HALF:
                dtypes.append(dtype_of(user))
            elif not _is_moved(user, node):
                return None
            elif user not in moved:
                moved.append(user)
    if len(set(dtypes)) != 1 or (torch.float16 in dtypes and len(dtypes) > 1):
        return None
    return Narrowed(dtypes[0], tuple(sorted(moved[1:])))


def _is_moved(user: Node, node: Node) -> bool:
    """Whether user is the node's result in another layout."""
    call, given = read(user), [*user.args[1:], *user.kwargs.values()]
    return (
        (user.target in _MOVING or (call is not None and call.name == "view"))
        and user.args[:1] == (node,)
        and user.all_input_nodes == [node]
        # A view in another dtype shows the bytes, not the numbers.
        and not any(isinstance(value, torch.dtype) for value in given)
        and (user.target not in _PADS or all(v in ("constant", None, 0) for v in given[1:]))
    )

"""Results that autocast casts to half precision wherever they are used.

Under autocast a layer norm gives float32, and a matrix product or a convolution casts what it reads
to half precision. The captured graph does not show these casts; they show in the dtypes: such a
function gives half precision of float32 operands. Where every use of a norm's result is one of
these, behind nothing but changes of the layout, the kernel may round the result itself: the
numbers are the same, and half as many bytes are written and read, backward too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.fx import Node

from ..ops.arguments import HALF
from .effects import name_of_target
from .reading import dtype_of, is_tensor

# The functions that autocast runs in half precision, by the last part of their names.
_CASTING = {
    *("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm"),
    *("conv1d", "conv2d", "conv3d", "scaled_dot_product_attention"),
}
# Those that give the elements of their first argument and nothing else but zeros.
_MOVING = {
    *("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "expand", "getitem"),
    *("permute", "transpose", "movedim", "contiguous", "clone", "roll", "pad"),
}


class Narrowed(NamedTuple):
    """What a result may be rounded to, and the nodes that change its layout before it is cast."""

    dtype: torch.dtype
    moved: tuple[Node, ...]  # in the order of the graph


def narrowed(y: Node) -> Narrowed | None:
    """How the result may be rounded already when it is written; None if something reads float32."""
    if dtype_of(y) is not torch.float32 or not y.users:
        return None
    dtypes: set[torch.dtype] = set()
    moved: list[Node] = []
    pending = [y]
    while pending:
        node = pending.pop()
        for user in node.users:
            if user.op not in ("call_function", "call_method") or not is_tensor(user):
                return None
            if name_of_target(user.target) in _CASTING and dtype_of(user) in HALF:
                dtypes.add(dtype_of(user))
            elif _is_moved(user, node):
                if user not in moved:
                    moved.append(user)
                    pending.append(user)
            else:
                return None
    return Narrowed(dtypes.pop(), tuple(sorted(moved))) if len(dtypes) == 1 else None


def _is_moved(user: Node, node: Node) -> bool:
    """Whether this is the node's result in another layout."""
    if not user.args or user.args[0] is not node or user.all_input_nodes != [node]:
        return False
    name = name_of_target(user.target)
    if name == "pad":
        given = [*user.args[2:], *user.kwargs.values()]
        return all(value in ("constant", None, 0) for value in given)
    return name in _MOVING and dtype_of(user) is dtype_of(node)

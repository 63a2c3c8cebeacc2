# SPDX-License-Identifier: Apache-2.0
"""Rotations of q and k in a graph, as transformers writes them, each pair as one operator.

A rotation is ``x * cos + cat((-x2, x1), -1) * sin``, where x1 and x2 are the halves of x's last
dimension. The operator reads a value of cos and sin for each pair of columns, so it has to follow
from the graph that both have each value twice: that each is computed, element by element, from a
tensor ``cat((angle, angle), -1)``. A norm of x's rows that stands right before the rotation, and
that the graph pass has made an operator, becomes part of the new one.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..ops import heads
from ..ops.aten_forward import KERNELS
from ..ops.operators import LAYER_NORM, Arguments
from . import replace, rules
from .effects import Effects
from .reading import dtype_of, is_tensor, value_of
from .sites import are_equal

_aten = torch.ops.aten
_ADD = {operator.add, torch.add, "add", _aten.add.Tensor}
_MUL = {operator.mul, torch.mul, "mul", _aten.mul.Tensor, _aten.mul.Scalar}
_NEG = {operator.neg, torch.neg, "neg", _aten.neg.default}
_CAT = {torch.cat, _aten.cat.default}
# What leaves an element in its column, and computes it from this one element.
_ELEMENTWISE = {
    *_MUL, "to", "float", "half", "bfloat16", "type_as", "contiguous", "cos", "sin", torch.cos,
    torch.sin, _aten.cos.default, _aten.sin.default, "unsqueeze", torch.unsqueeze,
}  # fmt: skip
_TRANSPOSES = {"transpose", torch.transpose, _aten.permute.default, "permute", torch.permute}
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Rotation(NamedTuple):
    """A rotation in the graph; its nodes but for x, cos and sin are replaced."""

    y: Node
    x: Node
    cos: Node  # of x's dimensions
    sin: Node
    seq_dim: int
    nodes: frozenset[Node]


class Norm(NamedTuple):
    """The norm of a rotation's x: the operator's node, its arguments, and the views behind it."""

    node: Node
    arguments: Arguments
    views: tuple[Node, ...]  # from the norm to x


def _operands(node: Any, targets: set[Any]) -> tuple[Any, ...]:
    """The operands of a node of one of these targets; none of any other."""
    if not isinstance(node, Node) or node.target not in targets or node.kwargs.keys() - {"dim"}:
        return ()
    return node.args


def _either_order(node: Any, targets: set[Any]) -> Iterator[tuple[Any, Any]]:
    operands = _operands(node, targets)
    if len(operands) == 2:
        yield operands
        yield operands[::-1]


def _halves_of(node: Any) -> tuple[Node, frozenset[Node]] | None:
    """x of cat((-x2, x1), -1), and the nodes of this expression."""
    operands = _operands(node, _CAT)
    parts = operands[0] if operands else ()
    if not isinstance(parts, (tuple, list)) or len(parts) != 2 or not _is_last(node, operands):
        return None
    (second,), first = _operands(parts[0], _NEG)[:1] or (None,), parts[1]
    found = [_slice_of(part) for part in (first, second)]
    if found[0] is None or found[1] is None or found[0][0] is not found[1][0]:
        return None
    x, half = found[0][0], value_of(found[0][0]).shape[-1] // 2
    if [part[1:] for part in found if part is not None] != [(None, half), (half, None)]:
        return None
    return x, frozenset({node, parts[0], first, second})


def _is_last(node: Node, operands: tuple[Any, ...]) -> bool:
    dim = node.kwargs.get("dim", operands[1] if len(operands) > 1 else 0)
    return dim in (-1, value_of(node).dim() - 1)


def _slice_of(node: Any) -> tuple[Node, Any, Any] | None:
    """x, start and stop of x[..., start:stop]."""
    operands = _operands(node, {operator.getitem})
    if len(operands) != 2 or not is_tensor(operands[0]) or not isinstance(operands[1], tuple):
        return None
    *first, last = operands[1]
    if first != [...] or not isinstance(last, slice) or last.step is not None:
        return None
    return operands[0], last.start or None, last.stop


def _is_doubled(node: Any) -> bool:
    """Whether the second half of a tensor's last dimension holds the same values as the first."""
    while isinstance(node, Node) and is_tensor(node):
        operands = _operands(node, _CAT)
        if operands:
            parts = operands[0]
            is_pair = isinstance(parts, (tuple, list)) and len(parts) == 2
            return is_pair and parts[0] is parts[1] and _is_last(node, operands)
        if node.target not in _ELEMENTWISE or not node.args:
            return False
        if node.target in ("unsqueeze", torch.unsqueeze):
            dim = node.args[1] if len(node.args) > 1 else None
            if not isinstance(dim, int) or dim % value_of(node).dim() == value_of(node).dim() - 1:
                return False
        others = [arg for arg in node.args[1:] if is_tensor(arg)]
        if others and node.target in _MUL:
            return False
        node = node.args[0]
    return False


def find(y: Node) -> Rotation | None:
    """The rotation whose sum this node is; its result may be a cast of the sum."""
    for turned, straight in _either_order(y, _ADD):
        for cat, sin in _either_order(turned, _MUL):
            halves = _halves_of(cat)
            if halves is None:
                continue
            x, nodes = halves
            for given, cos in _either_order(straight, _MUL):
                if given is x and is_tensor(cos) and is_tensor(sin):
                    nodes |= {y, turned, straight}
                    return _checked(Rotation(y, x, cos, sin, 0, nodes))
    return None


def _checked(found: Rotation) -> Rotation | None:
    """The rotation with its seq_dim, if the operator computes it."""
    x, angles = value_of(found.x), [value_of(found.cos), value_of(found.sin)]
    cols = x.shape[-1]
    if x.dim() != 4 or x.dtype not in _DTYPES or x.device.type not in rules.DEVICES:
        return None
    if not isinstance(cols, int) or cols % 2 or cols > heads.MOST_KERNEL_COLS:
        return None
    if value_of(found.y).dtype != x.dtype:
        # cos and sin are of float32 beside x in half precision, and the result is cast to that.
        users = list(found.y.users)
        if [user.target for user in users] != ["to"] or dtype_of(users[0]) != x.dtype:
            return None
        (cast,) = users
        found = found._replace(y=cast, nodes=found.nodes | {cast})
    if not are_equal(value_of(found.y).shape, x.shape):
        return None
    if not (_is_doubled(found.cos) and _is_doubled(found.sin)):
        return None
    for seq_dim in (2, 1):
        if all(
            angle.dim() == 4
            and angle.dtype in (x.dtype, torch.float32)
            and angle.dtype == angles[0].dtype
            and angle.device == x.device
            and not angle.requires_grad
            and are_equal(angle.shape[3 - seq_dim :: 4], [1])
            and are_equal([angle.shape[seq_dim], angle.shape[3]], [x.shape[seq_dim], cols])
            and any(statically_known_true(angle.shape[0] == size) for size in (1, x.shape[0]))
            for angle in angles
        ):
            return found._replace(seq_dim=seq_dim)
    return None


def norm_of(found: Rotation) -> Norm | None:
    """The norm whose result the rotation alone reads, if the operator can have it."""
    node: Any = found.x
    views: list[Node] = []
    if not set(found.x.users) <= found.nodes:
        return None
    while node.target in _TRANSPOSES and is_tensor(node.args[0]):
        views.insert(0, node)
        node = node.args[0]
        if len(node.users) != 1:
            return None
    if KERNELS.get(node.target, node.target) is not LAYER_NORM.overload or node.kwargs:
        return None
    a = LAYER_NORM.arguments(*node.args)
    options = a.options
    is_last = all(value_of(view).stride(-1) == 1 for view in [node, *views])
    fits = (
        options.normalized_ndim == 1
        and is_last
        and options.activation is None
        and options.output_scale == 1.0
        and dtype_of(a.input) == dtype_of(node) == dtype_of(found.x)
        and value_of(a.input).stride(-1) == 1
    )
    return Norm(node, a, tuple(views)) if fits else None


def run(graph: Graph, effects: Effects) -> list[tuple[Rotation, list[str], str]]:
    """Replaces rotations; returns each operator's first one with what was fused, or with the reason
    why it was left."""
    pending = [found for node in graph.nodes if (found := find(node)) is not None]
    rows: list[tuple[Rotation, list[str], str]] = []
    while pending:
        first = pending.pop(0)
        pair = [first, *(other for other in pending[:1] if _is_pair(first, other))]
        try:
            fused = _replace(pair, graph, effects)
        except replace.Left as left:
            rows.append((first, [], str(left)))
            continue
        pending = [other for other in pending if other not in pair]
        rows.append((first, [*fused, *["k"] * (len(pair) - 1)], ""))
    return rows


def _is_pair(q: Rotation, k: Rotation) -> bool:
    """Whether both are rotated by the same angles, and differ in their heads alone."""
    dims = [0, q.seq_dim, 3]
    shapes = [[value_of(one.x).shape[d] for d in dims] for one in (q, k)]
    return (
        (q.cos, q.sin, q.seq_dim) == (k.cos, k.sin, k.seq_dim)
        and are_equal(*shapes)
        and dtype_of(q.x) == dtype_of(k.x)
        and k.x < q.y
    )


def _replace(pair: list[Rotation], graph: Graph, effects: Effects) -> list[str]:
    q = pair[0]
    norms: list[Norm | None] = [norm_of(one) for one in pair]
    if len({None if norm is None else norm.arguments.options for norm in norms}) > 1:
        norms = [None] * len(pair)
    nodes = {node for one in pair for node in one.nodes}
    nodes |= {n for norm in norms if norm is not None for n in (norm.node, *norm.views)}
    operands = _operands_of(pair, norms)
    start = min(nodes)
    _check_effects(nodes, operands, start, q.y, effects)
    maker = replace._Maker(graph, q.y, effects)
    try:
        with graph.inserting_before(q.y):
            cos, sin = (
                maker.make(_aten.select.int, (angle, 3 - q.seq_dim, 0)) for angle in (q.cos, q.sin)
            )
            rows = [_rows(maker, one, norm) for one, norm in zip(pair, norms, strict=True)]
            call = _call(q, rows, norms, cos, sin)
            result = maker.make(heads.qk_norm_rope, call)
            ys = [maker.make(operator.getitem, (result, i)) for i in range(len(pair))]
        for one, y in zip(pair, ys, strict=True):
            replace._check_alike(one.y, y, dtype_of(one.y))
    except BaseException:
        maker.undo()
        raise
    for one, y in zip(pair, ys, strict=True):
        maker.set_example(y, value_of(one.y))
        one.y.replace_all_uses_with(y)
    for node in sorted(nodes, reverse=True):
        if not node.users:
            graph.erase_node(node)
    return ["norm"] * (norms[0] is not None)


def _operands_of(pair: list[Rotation], norms: list[Norm | None]) -> list[Node]:
    found: list[Any] = [pair[0].cos, pair[0].sin]
    for one, norm in zip(pair, norms, strict=True):
        a = None if norm is None else norm.arguments
        found += [one.x] if a is None else [a.input, a.weight, a.bias]
    return [node for node in found if isinstance(node, Node)]


def _check_effects(
    nodes: Iterable[Node], operands: list[Node], start: Node, end: Node, effects: Effects
) -> None:
    if any(effects.in_transform(node) for node in nodes):
        raise replace.Left("it is inside a torch.func transform")
    if any(effects.is_written(node) for node in nodes):
        raise replace.Left("a part of it is written into")
    if not effects.in_one_region(nodes):
        raise replace.Left("a mode of PyTorch changes between its operations")
    if effects.write_between(operands, start, None) is not None:
        raise replace.Left("an operand is written into behind it")
    if not all(operand < end for operand in operands):
        raise replace.Left("an operand is computed behind it")


def _rows(maker: Any, one: Rotation, norm: Norm | None) -> Node:
    """What the operator reads: x, or the norm's input in x's order of dimensions."""
    if norm is None:
        return one.x
    row: Node = norm.arguments.input  # type: ignore[assignment]
    for view in norm.views:
        row = maker.make(view.target, (row, *view.args[1:]), view.kwargs, view.op)
    return row


def _call(
    q: Rotation, rows: list[Node], norms: list[Norm | None], cos: Node, sin: Node
) -> tuple[Any, ...]:
    cols = value_of(q.x).shape[-1]
    parameters: list[Any] = [None] * 4
    options: tuple[Any, ...] = (0.0, None, 0.0, False)
    for i, norm in enumerate(norms):
        if norm is not None:
            parameters[i], parameters[2 + i] = norm.arguments.weight, norm.arguments.bias
            o = norm.arguments.options
            options = (o.eps, o.statistic, o.weight_offset, o.round_before_weight)
    k = rows[1] if len(rows) > 1 else None
    return (rows[0], k, *parameters, cos, sin, cols, q.seq_dim, *options, False, False)

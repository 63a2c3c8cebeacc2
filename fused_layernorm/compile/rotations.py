# SPDX-License-Identifier: Apache-2.0
"""Rotations of q and k in a graph, as transformers and diffusers write them, each pair as one
operator.

    x * cos + cat((-x2, x1), -1) * sin               x1 and x2 are the halves of x's last dimension
    x * cos + stack((-x2, x1), -1).flatten(-2) * sin   they are its even and odd elements
    view_as_complex(pairs of x) * freqs              as real numbers again
    out[..., 0::2] = x1 * cos - x2 * sin; out[..., 1::2] = x1 * sin + x2 * cos

The operator reads a value of cos and sin for each pair of columns. In the first two forms it has to
follow from the graph that both have each value twice: that each is computed, element by element,
from ``cat((angle, angle), -1)``, or from ``angle.repeat_interleave(2, -1)``. A norm of x's rows
that stands right before the rotation, and that the graph pass has made an operator, becomes part of
the new one.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..ops import head_formulas, heads
from ..ops.arguments import HALF
from ..ops.aten_forward import KERNELS
from ..ops.operators import LAYER_NORM, Arguments
from . import patterns, replace, rules
from .effects import Effects
from .patterns import PARSED, Match, matches
from .reading import before_casts, cut, dtype_of, is_tensor, read, value_of
from .sites import are_equal

_aten = torch.ops.aten
_MUL = {operator.mul, torch.mul, "mul", _aten.mul.Tensor, _aten.mul.Scalar}
_CAT = {torch.cat, _aten.cat.default}
_VIEWS = {"reshape", "view", "unflatten", torch.reshape, torch.unflatten}
_REPEATS = {"repeat_interleave", torch.repeat_interleave}
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
    cos: Node  # of x's dimensions; complex if it is sin, too
    sin: Node
    seq_dim: int
    nodes: frozenset[Node]
    interleaved: bool = False
    once: bool = False  # cos and sin have one value for each pair of columns


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


class Turned(NamedTuple):
    """x by a right angle: (-b, a) where x has (a, b)."""

    x: Node
    nodes: frozenset[Node]
    interleaved: bool


def _turned(node: Any) -> Turned | None:
    """x of cat((-b, a), -1) or stack((-b, a), -1).flatten(-2)."""
    *casts, node = before_casts(node, only_widening=True)
    nodes = {*casts, node}
    stacked = isinstance(node, Node) and node.target in ("flatten", torch.flatten)
    if stacked:
        if node.kwargs or len(node.args) != 2 or node.args[1] not in (-2, value_of(node).dim() - 1):
            return None
        node = node.args[0]
        nodes.add(node)
    operands = _operands(node, {torch.stack} if stacked else _CAT)
    parts = operands[0] if operands else ()
    if not isinstance(parts, (tuple, list)) or len(parts) != 2 or not _is_last(node, operands):
        return None
    negated, first = read(parts[0]), parts[1]
    if negated is None or negated.name != "neg":
        return None
    (second,) = negated.operands
    found = _halves_of(first, second) or _pairs_of(first, second)
    if found is None or found.interleaved != stacked:
        return None
    return found._replace(nodes=found.nodes | nodes | {parts[0]})


def _halves_of(first: Any, second: Any) -> Turned | None:
    """x whose halves, cut out of its last dimension, these are."""
    one, other = cut(first, -1), cut(second, -1)
    if one is None or other is None:
        return None
    x = one[0]
    half = value_of(x).shape[-1] // 2
    if one != (x, None, half) or other != (x, half, None):
        return None
    return Turned(x, frozenset({first, second}), False)


def _pairs_of(first: Any, second: Any) -> Turned | None:
    """x whose last dimension was viewed as two, (pairs, 2) or (2, pairs), of which these are the
    two elements of that of size two."""
    indices = [_operands(part, {operator.getitem})[1:] for part in (first, second)]
    if indices != [(0,), (1,)] or first.args[0] is not second.args[0]:
        return None
    unbind = first.args[0]
    if unbind.target not in ("unbind", torch.unbind) or not isinstance(unbind.args[0], Node):
        return None
    dim = unbind.kwargs.get("dim", unbind.args[1] if len(unbind.args) > 1 else 0)
    view: Any = unbind.args[0]
    if view.target not in _VIEWS or not is_tensor(view.args[0]) or not is_tensor(view):
        return None
    x, shape = view.args[0], value_of(view).shape
    dim = dim if dim < 0 else dim - len(shape)
    if not are_equal(shape[:-2], value_of(x).shape[:-1]) or dim not in (-1, -2) or shape[dim] != 2:
        return None
    return Turned(x, frozenset({first, second, unbind, view}), dim == -1)


def _is_last(node: Node, operands: tuple[Any, ...]) -> bool:
    dim = node.kwargs.get("dim", operands[1] if len(operands) > 1 else 0)
    return dim in (-1, value_of(node).dim() - 1)


def _is_doubled(node: Any, interleaved: bool) -> bool:
    """Whether a tensor's last dimension holds each value twice: in its second half again, or
    interleaved."""
    while isinstance(node, Node) and is_tensor(node):
        operands = _operands(node, _CAT)
        if operands:
            parts = operands[0]
            if not isinstance(parts, (tuple, list)) or not _is_last(node, operands):
                return False
            if interleaved:
                return all(_is_doubled(part, True) for part in parts)
            return len(parts) == 2 and parts[0] is parts[1]
        if node.target in _REPEATS:
            dim = node.kwargs.get("dim", node.args[2] if len(node.args) > 2 else None)
            is_last = dim in (-1, value_of(node).dim() - 1)
            return interleaved and is_last and type(node.args[1]) is int and node.args[1] == 2
        if node.target is operator.getitem:
            index = node.args[1]
            if not isinstance(index, tuple) or index[-1] not in (slice(None), ...):
                return False
            if any(part not in (None, ..., slice(None)) for part in index):
                return False
        elif node.target not in _ELEMENTWISE or not node.args:
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
    """The rotation whose sum, flattened product or output this node is; the result may be a cast
    of it."""
    return _of_sum(y) or _of_complex_product(y) or _of_written_pairs(y)


def _of_sum(y: Node) -> Rotation | None:
    call = read(y)
    if call is None or call.name != "add":  # but a cast of one
        return None
    for match in matches(PARSED[patterns.ROTATION], y, Match({})):
        cos, sin, turned = (match.values[name] for name in ("cos", "sin", "turned"))
        found = _turned(turned)
        casts = before_casts(match.values["x"], only_widening=True)
        if found is None or found.x not in casts:
            continue
        if _is_doubled(cos, found.interleaved) and _is_doubled(sin, found.interleaved):
            nodes = found.nodes | match.nodes | {*casts[: casts.index(found.x)]}
            return _checked(Rotation(y, found.x, cos, sin, 0, nodes, found.interleaved))
    return None


def _of_complex_product(y: Node) -> Rotation | None:
    """view_as_real(view_as_complex(x as pairs) * freqs).flatten(-2)."""
    if y.target not in ("flatten", torch.flatten) or y.kwargs or len(y.args) != 2:
        return None
    real = y.args[0]
    if not is_tensor(real) or y.args[1] not in (-2, value_of(real).dim() - 2):
        return None
    for match in matches(PARSED[patterns.COMPLEX_ROTATION], real, Match({})):
        pairs, freqs = match.values["pairs"], match.values["freqs"]
        if pairs.target not in _VIEWS or not value_of(freqs).is_complex():
            continue
        *casts, x = before_casts(pairs.args[0], only_widening=True)
        nodes = match.nodes | {y, pairs, *casts}
        if is_tensor(x) and are_equal(value_of(pairs).shape[:-2], value_of(x).shape[:-1]):
            return _checked(Rotation(y, x, freqs, freqs, 0, nodes, True, once=True))
    return None


def _of_written_pairs(out: Node) -> Rotation | None:
    """An empty tensor that gets x1 * cos - x2 * sin in its even and x1 * sin + x2 * cos in its odd
    columns before anything reads it."""
    if out.target is not torch.empty_like or len(out.args) != 1 or out.kwargs:
        return None
    writes = [node for node in out.users if node.target is operator.setitem]
    if len(writes) != 2 or not all(max(writes) < n for n in out.users if n not in writes):
        return None
    values = {}
    for node in writes:
        index: Any = node.args[1]
        if not isinstance(index, tuple) or index[:-1] != (...,) or not _is_every_second(index[-1]):
            return None
        values[index[-1].start or 0] = node.args[2]
    if values.keys() != {0, 1}:
        return None
    for even in matches(PARSED[patterns.ROTATION_OF_A], values[0], Match({})):
        for match in matches(PARSED[patterns.ROTATION_OF_B], values[1], even):
            a, b, cos, sin = (match.values[name] for name in ("a", "b", "cos", "sin"))
            found = _pairs_of(a, b)
            if found is not None and found.interleaved:
                nodes = found.nodes | match.nodes | {out, *writes}
                return _checked(Rotation(out, found.x, cos, sin, 0, nodes, True, once=True))
    return None


def _is_every_second(index: Any) -> bool:
    return isinstance(index, slice) and index.step == 2 and index.stop is None


def _checked(found: Rotation) -> Rotation | None:
    """The rotation with its seq_dim, if the operator computes it."""
    x, angles = value_of(found.x), [value_of(found.cos), value_of(found.sin)]
    cols = x.shape[-1]
    if x.dim() != 4 or x.dtype not in _DTYPES or x.device.type not in rules.DEVICES:
        return None
    if not isinstance(cols, int) or cols % 2 or cols > head_formulas.MOST_KERNEL_COLS:
        return None
    # cos and sin may be of float32 beside x in half precision: then the result is cast to that.
    users = [user for user in found.y.users if user not in found.nodes]
    casts = before_casts(users[0], only_widening=False) if len(users) == 1 else []
    is_cast = found.y in casts and dtype_of(users[0]) == x.dtype
    if is_cast and (x.dtype in HALF or value_of(found.y).dtype == x.dtype):
        found = found._replace(y=users[0], nodes=found.nodes | {users[0]})
    elif value_of(found.y).dtype != x.dtype:
        return None
    if not are_equal(value_of(found.y).shape, x.shape):
        return None
    angle_cols = cols // 2 if found.once else cols
    is_complex = found.cos is found.sin and angles[0].dtype is torch.complex64
    for seq_dim, seq, heads_dim in ((2, -2, -3), (1, -3, -2)):
        if all(
            angle.dim() in (3, 4)
            and (angle.dtype in (x.dtype, torch.float32) or is_complex)
            and angle.dtype == angles[0].dtype
            and angle.device == x.device
            and not angle.requires_grad
            and are_equal([angle.shape[heads_dim]], [1])
            and are_equal([angle.shape[seq], angle.shape[-1]], [x.shape[seq_dim], angle_cols])
            and any(
                angle.dim() == 3 or statically_known_true(angle.shape[0] == size)
                for size in (1, x.shape[0])
            )
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
    is_last = all(value_of(view).stride(-1) == 1 for view in [node, *views])
    fits = (
        a.normalized_ndim == 1
        and is_last
        and a.activation is None
        and a.output_scale == 1.0
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
        except replace.NotFused as reason:
            rows.append((first, [], str(reason)))
            continue
        pending = [other for other in pending if other not in pair]
        rows.append((first, [*fused, *["k"] * (len(pair) - 1)], ""))
    return rows


def _is_same(a: Any, b: Any) -> bool:
    """Whether both are one value, or are computed from one by the same views and functions."""
    if not (isinstance(a, Node) and isinstance(b, Node)):
        return type(a) is type(b) and a == b
    return a is b or (
        a.target == b.target
        and a.target in {operator.getitem, *_ELEMENTWISE}
        and a.kwargs == b.kwargs
        and len(a.args) == len(b.args)
        and all(map(_is_same, a.args, b.args))
    )


def _is_pair(q: Rotation, k: Rotation) -> bool:
    """Whether both are rotated by the same angles, and differ in their heads alone."""
    dims = [0, q.seq_dim, 3]
    shapes = [[value_of(one.x).shape[d] for d in dims] for one in (q, k)]
    return (
        (q.seq_dim, q.interleaved, q.once) == (k.seq_dim, k.interleaved, k.once)
        and _is_same(q.cos, k.cos)
        and _is_same(q.sin, k.sin)
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
    with replace.making(graph, q.y, q.y, effects) as maker:
        cos, sin = (_angle(maker, q, part) for part in (0, 1))
        rows = [
            one.x if norm is None else maker.make_views(norm.arguments.input, norm.views)
            for one, norm in zip(pair, norms, strict=True)
        ]
        call = _call(q, rows, norms, cos, sin)
        result = maker.make(heads.qk_norm_rope, call)
        ys = [maker.make(operator.getitem, (result, i)) for i in range(len(pair))]
        for one, y in zip(pair, ys, strict=True):
            replace.check_alike(one.y, y, dtype_of(one.y))
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
    nodes: set[Node], operands: list[Node], start: Node, end: Node, effects: Effects
) -> None:
    if any(effects.in_transform(node) for node in nodes):
        raise replace.NotFused("it is inside a torch.func transform")
    if any(effects.writers(node) - nodes for node in nodes):
        raise replace.NotFused("a part of it is written into")
    if not effects.in_one_region(nodes):
        raise replace.NotFused("a mode of PyTorch changes between its operations")
    if effects.write_between(operands, start, None) is not None:
        raise replace.NotFused("an operand is written into behind it")
    if not all(operand < end for operand in operands):
        raise replace.NotFused("an operand is computed behind it")


def _angle(maker: replace.Maker, q: Rotation, part: int) -> Node:
    """cos (part 0) or sin (part 1) without the dimension of heads."""
    angle = (q.cos, q.sin)[part]
    if value_of(angle).is_complex():
        angle = maker.make(_aten.select.int, (maker.make(torch.view_as_real, (angle,)), -1, part))
    return maker.make(_aten.select.int, (angle, -2 if q.seq_dim == 1 else -3, 0))


def _call(
    q: Rotation, rows: list[Node], norms: list[Norm | None], cos: Node, sin: Node
) -> tuple[Any, ...]:
    cols = value_of(q.x).shape[-1]
    parameters: list[Any] = [None] * 4
    options: tuple[Any, ...] = (0.0, None, 0.0, False)
    for i, norm in enumerate(norms):
        if norm is not None:
            parameters[i], parameters[2 + i] = norm.arguments.weight, norm.arguments.bias
            a = norm.arguments
            options = (a.eps, a.statistic, a.weight_offset, a.round_before_weight)
    k = rows[1] if len(rows) > 1 else None
    return (rows[0], k, *parameters, cos, sin, cols, q.seq_dim, *options, q.interleaved, False)

# SPDX-License-Identifier: Apache-2.0
"""The norms of a graph, each a Site with the operations around it, found by the patterns.

A Site is not yet known to be safe to replace: replace.py checks that.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..ops.arguments import HALF
from ..ops.operators import Arguments, operator_of
from . import patterns
from .patterns import PARSED, Match, Viewed, matches
from .reading import (
    Call,
    before_casts,
    dtype_of,
    is_finite_number,
    is_tensor,
    origin,
    read,
    value_of,
)
from .rules import Fusion


@dataclass
class Site:
    """One norm. The fields named as in the patterns are nodes of the graph, or None."""

    norm: Node  # the node that gives the normalized values
    form: str  # how it is written
    input: Node
    normalized_ndim: int
    weight: Node | None
    bias: Node | None
    eps: Any
    y: Node  # the last of the nodes that become one operator
    saved: Node | None = None  # the node whose value the norm's own backward reads
    nodes: frozenset[Node] = frozenset()  # the nodes that are replaced
    residual_out: Node | None = None
    residual: Node | None = None
    gate: Node | None = None
    shift: Node | None = None
    scale: Node | Viewed | None = None
    activation: str | None = None
    factor: float = 1.0
    statistic: str = "layer"
    weight_offset: float = 0.0
    rounded: torch.dtype | None = None  # half precision, to which xhat is rounded before weight
    dim: int | None = None  # the one dimension that is normalized, if it is not among the last
    notes: list[str] = field(default_factory=list)  # what was left, and why

    # Whether the operator takes rows in any order of memory, and copies none of them.
    has_rows = True
    is_activated_after_modulation = False  # whether an operator has both, in this order
    activations = patterns.ACTIVATIONS

    @property
    def normalized_shape(self) -> torch.Size:
        shape = value_of(self.norm).shape
        first = len(shape) - self.normalized_ndim if self.dim is None else self.dim
        return shape[first : first + self.normalized_ndim]

    @property
    def cols(self) -> Any:
        """How many columns are normalized together, or None where the rules do not ask."""
        return math.prod(self.normalized_shape)

    @property
    def fusion(self) -> Fusion:
        if self.is_modulated or self.gate is not None:
            return Fusion.MODULATED
        if self.activation is not None:
            return Fusion.ACTIVATED
        return Fusion.PLAIN if self.residual is None else Fusion.RESIDUAL

    @property
    def is_modulated(self) -> bool:
        return self.shift is not None or self.scale is not None

    def overload(self, a: Arguments) -> OpOverload:
        """The operator that computes the site, of which these are the arguments."""
        return operator_of(a).overload

    def lay_out(self, a: Arguments) -> tuple[Any, ...]:
        """The operator's arguments in the order of its schema."""
        return operator_of(a).lay_out(a)

    def as_read(self, y: Node, maker: Any) -> Node:
        """What takes the place of the site's result, of what the operator gives."""
        return y

    def takes(self, modulation: Node | Viewed) -> bool:
        """Whether a gate, shift or scale has an element for each column, as the kernels read it."""
        shape = shape_of(modulation)
        columns = shape[max(0, len(shape) - self.normalized_ndim) :]
        return broadcasts(shape, value_of(self.norm).shape) and are_equal(
            columns, self.normalized_shape
        )

    @property
    def fused(self) -> list[str]:
        """What is computed together with the normalization, by name."""
        names = ("residual", "gate", "scale", "shift", "activation")
        found = [name for name in names if getattr(self, name) is not None]
        return found + ["factor"] * (self.factor != 1.0)


S = TypeVar("S", bound=Site)


def are_equal(one: Iterable[Any], other: Iterable[Any]) -> bool:
    """Whether two shapes are known to be equal, without a guard."""
    one, other = tuple(one), tuple(other)
    return len(one) == len(other) and all(
        statically_known_true(a == b) for a, b in zip(one, other, strict=True)
    )


def broadcasts(one: Iterable[Any], to: Iterable[Any]) -> bool:
    """Whether a shape is known to broadcast to another without enlarging it."""
    one, to = tuple(one), tuple(to)
    return len(one) <= len(to) and all(
        statically_known_true(a == b) or statically_known_true(a == 1)
        for a, b in zip(reversed(one), reversed(to), strict=False)
    )


def is_parameter(value: Node, site: Site) -> bool:
    """Whether a weight or bias has the normalized shape, or broadcasts along the one dimension."""
    if site.dim is None:
        return are_equal(shape_of(value), site.normalized_shape)
    shape = list(shape_of(value))
    along = [1] * value_of(site.norm).dim()
    shape = [1] * (len(along) - len(shape)) + shape
    along[site.dim : site.dim + 1] = site.normalized_shape
    return are_equal(shape, along)


def shape_of(value: Node | Viewed) -> torch.Size:
    node = value.views[-1] if isinstance(value, Viewed) else value
    return value_of(node).shape


def find(node: Node) -> Site | None:
    """The norm whose result this node gives, without the operations around it."""
    call = read(node)
    if call is None or not is_tensor(node):
        return None
    if call.name in ("layer_norm", "rms_norm"):
        return _called(node, call)
    for statistic, expressions in _NORMALIZED.items():
        for expression in expressions:
            pattern = PARSED[expression]
            if pattern.name == call.name:
                for match in matches(pattern, node, Match({})):
                    return _written_out(node, match, statistic)
    return None


def _called(node: Node, call: Call) -> Site | None:
    input, weight, bias, eps, weight_offset, rounds = call.operands
    if not is_tensor(input):
        return None
    form = getattr(node.target, "__name__", str(node.target))
    nodes, is_rms = frozenset({node}), call.name == "rms_norm"
    site = Site(node, form, input, call.over, weight, bias, eps, y=node, nodes=nodes)
    if is_rms:
        site.form, site.statistic = call.name, "rms"
    else:
        site.saved = input  # PyTorch's rms_norm may save a float32 copy instead
    site.weight_offset = weight_offset
    if rounds and dtype_of(input) in HALF:
        site.rounded = dtype_of(input)
    return with_statistics(site, "_fused_rms_norm" if is_rms else "native_layer_norm")


def with_statistics(site: S, form: str) -> S:
    """The site, of this form if the norm is the first of several results of its operator."""
    if site.norm.target is operator.getitem:
        site.form = form
        if len(site.norm.all_input_nodes[0].users) > 1:
            site.notes.append("its statistics are used")
    return site


_NORMALIZED = {"layer": patterns.NORMALIZED, "rms": patterns.RMS_NORMALIZED}
_WRITTEN_OUT = {"layer": "written out", "rms": "RMSNorm written out"}


def _written_out(node: Node, match: Match, statistic: str) -> Site | None:
    input, eps = match.values["x"], match.values["eps"]
    ndim, dims = value_of(input).dim(), match.over
    form = _WRITTEN_OUT[statistic]
    site = Site(node, form, input, len(dims), None, None, eps, y=node, nodes=match.nodes)
    site.statistic = statistic
    if dims == tuple(range(ndim - len(dims), ndim)):
        return site
    if len(dims) == 1:
        (site.dim,) = dims
        site.form += f" over dimension {site.dim}"
    else:
        site.notes.append(f"it normalizes over dimensions {list(dims)}, which are not the last")
    return site


def grow(site: Site) -> Site:
    """The site with the operations after it that may be fused with it.

    A norm over a dimension that is not the last takes neither a modulation nor a residual.
    """
    has_no_affine = site.weight is None and site.bias is None
    # The 1 + weight of an RMSNorm, such as Gemma's, is no modulation: its affine step comes first.
    if site.statistic == "layer" or not has_no_affine:
        site = modulated(site)
    if has_no_affine and not site.is_modulated:
        site = modulated(_affine(site))
    return cast(site if site.is_modulated else activated(site))


def cast(site: S) -> S:
    """The site with the casts behind it, until one widens: that one must read rounded numbers."""
    while len(site.y.users) == 1:
        (user,) = site.y.users
        call = read(user)
        if call is None or call.name not in ("cast", "same"):
            break
        if dtype_of(site.y) in HALF and dtype_of(user) not in HALF:
            break
        site = replace(site, y=user, nodes=site.nodes | {user})
    return site


def _behind(
    site: Site, expressions: Iterable[str], fits: Callable[[Site, dict[str, Any]], bool]
) -> Iterator[tuple[str, Node, Match]]:
    """The matches of these expressions among the nodes after the site, the longest first.

    fits: whether the values that the names stand for are as the operators take them.
    """
    roots, frontier = [], [site.y]
    for _ in range(6):  # deeper than any pattern, with casts between its steps
        frontier = [user for node in frontier for user in node.users if read(user) is not None]
        roots += frontier
    found = [
        (expression, root, match)
        for expression in expressions
        for root in dict.fromkeys(roots)
        if is_tensor(root)
        for match in matches(PARSED[expression], root, Match({"norm": site.y}))
        if are_equal(value_of(root).shape, value_of(site.norm).shape) and fits(site, match.values)
    ]
    found.sort(key=lambda way: len(way[2].nodes), reverse=True)
    for expression, root, match in found:
        if _is_closed(site.y, root, match.nodes):
            yield expression, root, match
        else:
            note = f"{site.y.name} is used beside {expression!r}, too"
            if note not in site.notes:
                site.notes.append(note)


def _up_to(root: Node, site: S, match: Match, **found: Any) -> S:
    """The site with the nodes of a match, of which this is the last, and what they give."""
    return replace(site, y=root, nodes=site.nodes | match.nodes, **found)


def _is_closed(start: Node, root: Node, nodes: frozenset[Node]) -> bool:
    """Whether start and the nodes between start and root are used nowhere else."""
    pending = [start]
    while pending:
        users = pending.pop().users
        if not all(user in nodes for user in users):
            return False
        pending += [user for user in users if user is not root]
    return True


def modulated(site: S) -> S:
    def fits(site: Site, values: dict[str, Any]) -> bool:
        return all(site.takes(values[name]) for name in ("scale", "shift") if name in values)

    for _, root, match in () if site.dim is not None else _behind(site, patterns.MODULATIONS, fits):
        scale, shift = match.values.get("scale"), match.values.get("shift")
        return _up_to(root, site, match, scale=scale, shift=shift)
    return site


def _affine(site: Site) -> Site:
    def fits(site: Site, values: dict[str, Any]) -> bool:
        return all(is_parameter(values[p], site) for p in ("weight", "bias") if p in values)

    is_rms = site.statistic == "rms"
    expressions = patterns.RMS_AFFINES if is_rms else patterns.AFFINES
    for expression, root, match in _behind(site, expressions, fits):
        weight, bias = match.values.get("weight"), match.values.get("bias")
        found = _up_to(root, site, match, weight=weight, bias=bias)
        if is_rms and weight is not None:
            halves = _dtypes_of_casts(site.y, match.nodes).intersection(HALF)
            if len(halves) > 1:
                continue  # no operator rounds twice
            found.rounded = next(iter(halves), None)
        if "(1 + weight)" in expression:
            if _is_rounded_sum(weight, match.nodes):
                continue  # the sum itself is the weight
            found.weight_offset = 1.0
        return found
    return site


def _dtypes_of_casts(node: Node, nodes: frozenset[Node]) -> set[torch.dtype]:
    """The dtypes of a node, of the casts of it among these nodes, of the casts of these, etc."""
    found, pending = set(), [node]
    while pending:
        node = pending.pop()
        found.add(dtype_of(node))
        for user in node.users:
            call = read(user)
            if user in nodes and call is not None and call.name in ("cast", "same"):
                pending.append(user)
    return found


def _is_rounded_sum(weight: Any, nodes: frozenset[Node]) -> bool:
    """Whether 1 + weight is rounded to half precision, which no operator does."""
    sums = [user for user in weight.users if user in nodes]
    return any(_dtypes_of_casts(node, nodes).intersection(HALF) for node in sums)


def activated(site: S) -> S:
    for expression, root, match in _behind(site, site.activations, lambda *_: True):
        site = _up_to(root, site, match, activation=site.activations[expression])
        break

    def fits(site: Site, values: dict[str, Any]) -> bool:
        return is_finite_number(values["factor"])

    for _, root, match in _behind(site, patterns.FACTORS, fits):
        return _up_to(root, site, match, factor=float(match.values["factor"]))
    return site


def candidates(site: Site) -> Iterator[Site]:
    """What may be one operator, the most first: all around the norm, then without the sum before
    it; then the same two without the operations after the norm."""
    grown = grow(site)
    for start in [site] if grown.y is site.y else [grown, site]:
        yield from with_sum(start)


def with_sum(site: Site) -> Iterator[Site]:
    """The site with each sum, gated or not, that may give its input; last, the site alone."""
    x = origin(site.input)
    casts = frozenset(before_casts(site.input, only_widening=True)) - {x}
    for expression in () if site.dim is not None else patterns.SUMS:
        for match in matches(PARSED[expression], x, Match({})):
            input, residual = match.values["input"], match.values["residual"]
            gate = match.values.get("gate")
            path = before_casts(residual, only_widening=True)
            residual = next((n for n in path[::-1] if dtype_of(n) == dtype_of(x)), None)
            if (
                residual is not None
                and are_equal(shape_of(residual), shape_of(x))
                and are_equal(shape_of(input), shape_of(x))
                and (gate is None or site.takes(gate))
            ):
                yield replace(
                    site,
                    nodes=site.nodes | match.nodes | casts | {*path[: path.index(residual)]},
                    input=input,
                    residual=residual,
                    gate=gate,
                    residual_out=x,
                    notes=list(site.notes),
                )
    yield site

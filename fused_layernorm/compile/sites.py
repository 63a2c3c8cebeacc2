# SPDX-License-Identifier: Apache-2.0
"""The norms of a graph, each a Site with the operations around it, found by the patterns.

A Site is not yet known to be safe to replace: replace.py checks that.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..ops.arguments import HALF
from ..ops.operators import TENSORS
from . import patterns
from .patterns import Match, matches, parse
from .reading import before_casts, dtype_of, is_tensor, name_of_target, origin, read, value_of
from .rules import Fusion


@dataclass
class Site:
    """One norm. The fields named as in the patterns are nodes of the graph, or None."""

    norm: Node  # the node that gives the normalized values
    y: Node  # the last of the nodes that become one operator
    nodes: frozenset[Node]  # that are replaced
    form: str  # how it is written
    input: Node
    eps: Any
    weight: Node | None = None
    bias: Node | None = None
    normalized_ndim: int = 1
    num_groups: Any = None  # of a norm of groups, whose weight has a number for each channel
    saved: Node | None = None  # the node whose value the norm's own backward reads
    residual_out: Node | None = None
    residual: Node | None = None
    gate: Node | None = None
    shift: Node | None = None
    scale: Node | None = None
    scale_views: tuple[Node, ...] = ()  # what the graph makes of 1 + scale, in this order
    activation: str | None = None
    factor: float = 1.0
    statistic: str = "layer"
    weight_offset: float = 0.0
    rounded: torch.dtype | None = None  # half precision, to which xhat is rounded before weight
    notes: list[str] = field(default_factory=list)  # what was left, and why

    @property
    def operands(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in TENSORS}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def of_groups(self) -> bool:
        return self.num_groups is not None

    @property
    def normalized_shape(self) -> torch.Size:
        """The shape of weight and bias."""
        shape = value_of(self.norm).shape
        return shape[1:2] if self.of_groups else shape[len(shape) - self.normalized_ndim :]

    @property
    def fusion(self) -> Fusion:
        if self.of_groups:
            return Fusion.GROUPS
        if self.is_modulated or self.gate is not None:
            return Fusion.MODULATED
        if self.activation is not None:
            return Fusion.ACTIVATED
        return Fusion.PLAIN if self.residual is None else Fusion.RESIDUAL

    @property
    def is_modulated(self) -> bool:
        return self.shift is not None or self.scale is not None

    def candidates(self) -> Iterator[Site]:
        """What may be one operator, the most first: all around the norm, then without the sum
        before it; then the same two without the operations after the norm."""
        grown = grow(self)
        for start in [self] if grown.y is self.y else [grown, self]:
            yield from [start] if self.of_groups else with_sum(start)

    def takes(self, modulation: Node) -> bool:
        """Whether a gate, shift or scale has an element for each column (of groups a number for
        each channel of each sample), as the kernels read it."""
        shape, whole = value_of(modulation).shape[::-1], value_of(self.norm).shape[::-1]
        if self.of_groups:
            return are_equal(shape, [*[1] * (len(whole) - 2), *whole[-2:]])
        ndim = self.normalized_ndim
        return ndim <= len(shape) <= len(whole) and all(
            statically_known_true(a == b) or (i >= ndim and statically_known_true(a == 1))
            for i, (a, b) in enumerate(zip(shape, whole, strict=False))
        )

    @property
    def fused(self) -> list[str]:
        """What is computed together with the normalization, by name."""
        names = ("residual", "gate", "scale", "shift", "activation")
        found = [name for name in names if getattr(self, name) is not None]
        return found + ["factor"] * (self.factor != 1.0)


def are_equal(one: Iterable[Any], other: Iterable[Any]) -> bool:
    """Whether two shapes are known to be equal, without a guard."""
    one, other = tuple(one), tuple(other)
    return len(one) == len(other) and all(
        statically_known_true(a == b) for a, b in zip(one, other, strict=True)
    )


def is_contiguous(value: Tensor, first: int = 0) -> bool:
    """Whether a tensor's dimensions, from the first of them on, are known to be contiguous."""
    expected = (math.prod(value.shape[i + 1 :]) for i in range(first, value.dim()))
    return are_equal(value.stride()[first:], expected)


def find(node: Node) -> Site | None:
    """The norm whose result this node gives, without the operations around it."""
    call = read(node)
    if call is None or not is_tensor(node):
        return None
    if call.name == "norm":
        return _called(node, call.operands)
    for statistic, expressions in patterns.NORMALIZED.items():
        for pattern in map(parse, expressions):
            if pattern.name == call.name:
                for match in matches(pattern, node, Match({})):
                    return _written_out(node, match, statistic)
    return None


def _called(node: Node, fields: dict[str, Any]) -> Site | None:
    is_first = node.target is operator.getitem  # of several results
    called = node.all_input_nodes[0] if is_first else node
    form = name_of_target(called.target).split(".")[0].removeprefix("aten_")
    site = Site(node, node, frozenset({node}), form, **fields)
    site.form = form.replace("layer", site.statistic)
    if not all(map(is_tensor, site.operands.values())):
        return None
    # PyTorch's rms_norm may save a float32 copy, and group_norm saves one of other inputs.
    if site.statistic != "rms" and (not site.of_groups or is_contiguous(value_of(site.input))):
        site.saved = site.input
    if is_first and len(called.users) > 1:
        site.notes.append("its statistics are used")
    return site


def _written_out(node: Node, match: Match, statistic: str) -> Site:
    input, eps, dims = match.values["x"], match.values["eps"], match.over
    form = "RMSNorm written out" if statistic == "rms" else "written out"
    site = Site(node, node, match.nodes, form, input, eps, normalized_ndim=len(dims))
    site.statistic = statistic
    ndim = value_of(input).dim()
    if dims != tuple(range(ndim - len(dims), ndim)):
        site.notes.append(f"it normalizes over dimensions {list(dims)}, which are not the last")
    return site


def grow(site: Site) -> Site:
    """The site with the operations after it that may be fused with it."""
    if site.of_groups:
        return cast(activated(_behind(site, patterns.MODULATIONS)))
    has_no_affine = site.weight is None and site.bias is None
    # The 1 + weight of an RMSNorm, such as Gemma's, is no modulation: it is the weight, as a sum.
    if site.statistic == "layer" or not has_no_affine:
        site = _behind(site, patterns.MODULATIONS)
    if has_no_affine and not site.is_modulated:
        site = _behind(_behind(site, patterns.AFFINES), patterns.MODULATIONS)
    return cast(site if site.is_modulated else activated(site))


def activated(site: Site) -> Site:
    activations = patterns.GROUP_ACTIVATIONS if site.of_groups else patterns.ACTIVATIONS
    return _behind(_behind(site, activations), patterns.FACTORS)


def cast(site: Site) -> Site:
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


def _behind(site: Site, expressions: Iterable[str]) -> Site:
    """The site with what is computed from it by one of these expressions, the longest that may."""
    roots, frontier = [], [site.y]
    for _ in range(6):  # deeper than any pattern, with casts between its steps
        frontier = [user for node in frontier for user in node.users if read(user) is not None]
        roots += frontier
    found = [
        (expression, root, match)
        for expression in expressions
        for root in dict.fromkeys(roots)
        if is_tensor(root)
        for match in matches(parse(expression), root, Match({"norm": site.y}))
        if are_equal(value_of(root).shape, value_of(site.norm).shape) and _fit(site, match.values)
    ]
    found.sort(key=lambda way: len(way[2].nodes), reverse=True)
    for expression, root, match in found:
        if not _is_closed(site.y, root, match.nodes):
            note = f"{site.y.name} is used beside {expression!r}, too"
            if note not in site.notes:
                site.notes.append(note)
            continue
        # The fields of a site have the names of the patterns.
        given = {name: value for name, value in match.values.items() if name != "norm"}
        if expression in patterns.GROUP_ACTIVATIONS:
            given["activation"] = patterns.GROUP_ACTIVATIONS[expression]
        if site.statistic == "rms" and expression in patterns.AFFINES and "weight" in given:
            # Of the norm's result, and of its casts in front of the weight.
            casts = (n for n in match.nodes if site.y in before_casts(n, only_widening=False))
            halves = {*map(dtype_of, (site.y, *casts))}.intersection(HALF)
            if len(halves) > 1:
                continue  # no operator rounds twice
            given["rounded"] = next(iter(halves), None)
        return replace(site, y=root, nodes=site.nodes | match.nodes, **given)
    return site


def _fit(site: Site, values: dict[str, Any]) -> bool:
    """Whether what the names stand for is as the operators take it."""
    views, factor = values.get("scale_views"), values.get("factor", 1.0)
    modulation = [views[-1] if views else values.get("scale"), values.get("shift")]
    shapes = [value_of(values[name]).shape for name in ("weight", "bias") if name in values]
    return (
        all(site.takes(node) for node in modulation if node is not None)
        and all(are_equal(shape, site.normalized_shape) for shape in shapes)
        and isinstance(factor, (int, float))
        and math.isfinite(factor)
    )


def _is_closed(start: Node, root: Node, nodes: frozenset[Node]) -> bool:
    """Whether start and the nodes between start and root are used nowhere else."""
    pending = [start]
    while pending:
        users = pending.pop().users
        if not all(user in nodes for user in users):
            return False
        pending += [user for user in users if user is not root]
    return True


def with_sum(site: Site) -> Iterator[Site]:
    """The site with each sum, gated or not, that may give its input; last, the site alone."""
    x = origin(site.input)
    casts = frozenset(before_casts(site.input, only_widening=True)) - {x}
    for expression in patterns.SUMS:
        for match in matches(parse(expression), x, Match({})):
            path = before_casts(match.values["residual"], only_widening=True)
            residual = next((n for n in path[::-1] if dtype_of(n) == dtype_of(x)), None)
            found = {**match.values, "residual": residual, "residual_out": x}
            nodes = site.nodes | match.nodes | casts
            if (
                residual is not None
                and are_equal(value_of(residual).shape, value_of(x).shape)
                and are_equal(value_of(found["input"]).shape, value_of(x).shape)
                and ("gate" not in found or site.takes(found["gate"]))
            ):
                nodes |= {*path[: path.index(residual)]}
                yield replace(site, nodes=nodes, notes=list(site.notes), **found)
    yield site

# SPDX-License-Identifier: Apache-2.0
"""The norms of a graph, each a Site with the operations around it, found by the patterns.

A Site is not yet known to be safe to replace: replace.py checks that.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..ops.arguments import HALF
from ..ops.operators import TENSORS, Arguments, operator_of
from . import patterns
from .patterns import PARSED, Match, Viewed, matches
from .reading import Call, before_casts, dtype_of, is_finite, is_tensor, origin, read, value_of
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
    notes: list[str] = field(default_factory=list)  # what was left, and why

    # Whether the operator takes rows in any order of memory, and copies none of them.
    has_rows = True
    is_activated_after_modulation = False  # whether an operator has both, in this order
    activations = patterns.ACTIVATIONS

    @property
    def operands(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in TENSORS}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def normalized_shape(self) -> torch.Size:
        shape = value_of(self.norm).shape
        return shape[len(shape) - self.normalized_ndim :]

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

    def candidates(self) -> Iterator[Site]:
        """What may be one operator, the most first: all around the norm, then without the sum
        before it; then the same two without the operations after the norm."""
        grown = grow(self)
        for start in [self] if grown.y is self.y else [grown, self]:
            yield from with_sum(start)

    def overload(self, a: Arguments) -> OpOverload:
        """The operator that computes the site, of which these are the arguments."""
        return operator_of(a).plain

    def lay_out(self, a: Arguments) -> tuple[Any, ...]:
        """The operator's arguments in the order of its schema."""
        return tuple(getattr(a, name) for name in operator_of(a).fields)

    def as_read(self, y: Node, make: Any) -> Node:
        """What takes the place of the site's result, of what the operator gives."""
        return y

    def takes(self, modulation: Node | Viewed) -> bool:
        """Whether a gate, shift or scale has an element for each column, as the kernels read it."""
        shape, whole = shape_of(modulation)[::-1], value_of(self.norm).shape[::-1]
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


S = TypeVar("S", bound=Site)


def are_equal(one: Iterable[Any], other: Iterable[Any]) -> bool:
    """Whether two shapes are known to be equal, without a guard."""
    one, other = tuple(one), tuple(other)
    return len(one) == len(other) and all(
        statically_known_true(a == b) for a, b in zip(one, other, strict=True)
    )


def base_of(value: Any) -> Any:
    """The node of a Viewed; any other value itself."""
    return value.base if isinstance(value, Viewed) else value


def shape_of(value: Node | Viewed) -> torch.Size:
    return value_of(value.views[-1] if isinstance(value, Viewed) else value).shape


def find(node: Node) -> Site | None:
    """The norm whose result this node gives, without the operations around it."""
    call = read(node)
    if call is None or not is_tensor(node):
        return None
    if call.name in ("layer_norm", "rms_norm"):
        return _called(node, call)
    for statistic, expressions in patterns.NORMALIZED.items():
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
    is_rms, form = call.name == "rms_norm", getattr(node.target, "__name__", str(node.target))
    site = Site(node, call.name if is_rms else form, input, call.over, weight, bias, eps, y=node,
                nodes=frozenset({node}), weight_offset=weight_offset)  # fmt: skip
    site.statistic = "rms" if is_rms else "layer"
    site.saved = None if is_rms else input  # PyTorch's rms_norm may save a float32 copy
    site.rounded = dtype_of(input) if rounds and dtype_of(input) in HALF else None
    return with_statistics(site, "_fused_rms_norm" if is_rms else "native_layer_norm")


def with_statistics(site: S, form: str) -> S:
    """The site, of this form if the norm is the first of several results of its operator."""
    if site.norm.target is operator.getitem:
        site.form = form
        if len(site.norm.all_input_nodes[0].users) > 1:
            site.notes.append("its statistics are used")
    return site


def _written_out(node: Node, match: Match, statistic: str) -> Site | None:
    input, eps, dims = match.values["x"], match.values["eps"], match.over
    form = "RMSNorm written out" if statistic == "rms" else "written out"
    site = Site(node, form, input, len(dims), None, None, eps, y=node, nodes=match.nodes)
    site.statistic = statistic
    ndim = value_of(input).dim()
    if dims != tuple(range(ndim - len(dims), ndim)):
        site.notes.append(f"it normalizes over dimensions {list(dims)}, which are not the last")
    return site


def grow(site: Site) -> Site:
    """The site with the operations after it that may be fused with it."""
    has_no_affine = site.weight is None and site.bias is None
    # The 1 + weight of an RMSNorm, such as Gemma's, is no modulation: it is the weight, as a sum.
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


def _behind(site: S, expressions: Iterable[str]) -> Iterator[tuple[str, S]]:
    """The site with what is computed from it by one of these expressions, the longest first."""
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
        if are_equal(value_of(root).shape, value_of(site.norm).shape)
        and all(_fits(site, *value) for value in match.values.items())
    ]
    found.sort(key=lambda way: len(way[2].nodes), reverse=True)
    for expression, root, match in found:
        if _is_closed(site.y, root, match.nodes):
            # The fields of a site have the names of the patterns.
            given = {name: value for name, value in match.values.items() if name != "norm"}
            yield expression, replace(site, y=root, nodes=site.nodes | match.nodes, **given)
        else:
            note = f"{site.y.name} is used beside {expression!r}, too"
            if note not in site.notes:
                site.notes.append(note)


def _fits(site: Site, name: str, value: Any) -> bool:
    """Whether the value that a name stands for is as the operators take it."""
    if name in ("scale", "shift"):
        return site.takes(value)
    if name in ("weight", "bias"):
        return are_equal(shape_of(value), site.normalized_shape)
    return name == "norm" or is_finite(value)


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
    return next((found for _, found in _behind(site, patterns.MODULATIONS)), site)


def _affine(site: Site) -> Site:
    for _, found in _behind(site, patterns.AFFINES):
        if site.statistic == "rms" and found.weight is not None:
            # Of the norm's result, and of its casts in front of the weight.
            casts = (n for n in found.nodes if site.y in before_casts(n, only_widening=False))
            halves = {*map(dtype_of, (site.y, *casts))}.intersection(HALF)
            if len(halves) > 1:
                continue  # no operator rounds twice
            found.rounded = next(iter(halves), None)
        return found
    return site


def activated(site: S) -> S:
    for expression, found in _behind(site, site.activations):
        site = replace(found, activation=site.activations[expression])
        break
    return next((found for _, found in _behind(site, patterns.FACTORS)), site)


def with_sum(site: Site) -> Iterator[Site]:
    """The site with each sum, gated or not, that may give its input; last, the site alone."""
    x = origin(site.input)
    casts = frozenset(before_casts(site.input, only_widening=True)) - {x}
    for expression in patterns.SUMS:
        for match in matches(PARSED[expression], x, Match({})):
            path = before_casts(match.values["residual"], only_widening=True)
            residual = next((n for n in path[::-1] if dtype_of(n) == dtype_of(x)), None)
            found = {**match.values, "residual": residual, "residual_out": x}
            nodes = site.nodes | match.nodes | casts
            if (
                residual is not None
                and are_equal(shape_of(residual), shape_of(x))
                and are_equal(shape_of(found["input"]), shape_of(x))
                and ("gate" not in found or site.takes(found["gate"]))
            ):
                nodes |= {*path[: path.index(residual)]}
                yield replace(site, nodes=nodes, notes=list(site.notes), **found)
    yield site

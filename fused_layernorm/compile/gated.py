# SPDX-License-Identifier: Apache-2.0
"""RMSNorms of a graph with a gate behind them or in front of them, and their replacement.

A gated norm is a Site whose norm has its weight and bias. One over groups of columns is written on
a view: its site begins behind the view back, as a norm of all columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from torch._ops import OpOverload
from torch.fx import Node

from ..ops.gated import FAMILY
from ..ops.operators import Arguments
from . import patterns, sites
from .patterns import PARSED, Match, matches
from .reading import before_casts, origin, read, value_of
from .rules import Fusion
from .sites import Site, are_equal, shape_of


@dataclass
class GatedSite(Site):
    gate_first: bool = False
    gate_activation: str = "silu"
    group_size: Any = 0  # of all columns

    has_rows = False
    fusion = Fusion.GATED

    @property
    def cols(self) -> Any:
        return self.group_size or super().cols

    def overload(self, a: Arguments) -> OpOverload:
        return FAMILY.plain

    def lay_out(self, a: Arguments) -> tuple[Any, ...]:
        form = (self.gate_first, self.gate_activation, self.group_size, a.out_dtype)
        last = (a.weight_offset, a.round_before_weight)
        return (a.input, a.gate, a.weight, a.bias, a.eps, *form, *last)


def candidates(site: Site) -> Iterator[GatedSite]:
    """The norm of this site with its gate, if it has one."""
    if site.statistic != "rms" or site.dim is not None or site.normalized_ndim != 1:
        return
    given = {field.name: getattr(site, field.name) for field in fields(Site)}
    whole = GatedSite(**{**given, "notes": list(site.notes)})
    for start in _in_columns(whole):
        found: Any = start if start.weight is not None else sites._affine(start)
        first = _with_gate_before(found)
        for gated in _with_gate_behind(found) if first is None else (first,):
            yield replace(sites.cast(gated), form=f"{gated.form}, gated")
            return


def _in_columns(site: GatedSite) -> Iterator[GatedSite]:
    """The site as a norm of all columns, if it is one over groups of them; and as it is."""
    base = origin(site.input)
    call, shape = read(base), shape_of(site.norm)
    if call is not None and call.name == "view" and len(shape) > 1 and site.weight is None:
        (source,) = call.operands
        columns = shape_of(source)
        if are_equal([*shape[:-2], shape[-2] * shape[-1]], columns):
            for step in (_with_weight_of_groups(site, columns[-1:]), site):
                back = _view_back(step, columns)
                if back is not None:
                    nodes = step.nodes | {base, back} | _path(step.y, back)
                    whole = replace(step, norm=back, y=back, input=source, nodes=nodes)
                    yield replace(whole, group_size=shape[-1])
    yield site


def _with_weight_of_groups(site: GatedSite, columns: Any) -> GatedSite:
    """The site with a weight that is multiplied as a view of (groups, columns of a group)."""

    def fits(site: Site, values: dict[str, Any]) -> bool:
        call = read(origin(values["weight"]))
        is_view = call is not None and call.name == "view"
        return bool(is_view and are_equal(shape_of(call.operands[0]), columns))  # type: ignore[union-attr]

    for _, root, match in sites._behind(site, ("norm * weight",), fits):
        call: Any = read(origin(match.values["weight"]))
        return replace(site, y=root, nodes=site.nodes | match.nodes, weight=call.operands[0])
    return site


def _view_back(site: GatedSite, columns: Any) -> Node | None:
    """The view in which the groups are columns again, behind casts."""
    node = site.y
    while len(node.users) == 1:
        (node,) = node.users
        call = read(node)
        if call is not None and call.name == "view" and are_equal(shape_of(node), columns):
            return node
        if call is None or call.name not in ("cast", "same"):
            break
    return None


def _path(start: Node, end: Node) -> frozenset[Node]:
    """The nodes between the two, each of which is used by the next alone."""
    found = []
    while start is not end:
        (start,) = start.users
        found.append(start)
    return frozenset(found)


def _with_gate_before(site: GatedSite) -> GatedSite | None:
    product, nodes = origin(site.input), frozenset(before_casts(site.input, only_widening=True))
    for expression, activation in patterns.GATES.items():
        pattern = PARSED[expression.replace("norm", "input")]
        for match in matches(pattern, product, Match({})):
            input, gate = match.values["input"], match.values["gate"]
            shape = shape_of(product)
            inside = site.nodes | match.nodes | nodes
            if not (are_equal(shape_of(input), shape) and are_equal(shape_of(gate), shape)):
                continue
            if origin(gate) is origin(input) or not all(user in inside for user in product.users):
                continue
            gated = replace(site, input=input, gate=gate, nodes=inside, gate_first=True)
            return replace(gated, gate_activation=activation)
    return None


def _with_gate_behind(site: GatedSite) -> Iterator[GatedSite]:
    def fits(site: Site, values: dict[str, Any]) -> bool:
        gate = values["gate"]
        is_other = before_casts(gate, only_widening=False)[-1] not in site.nodes
        return is_other and are_equal(shape_of(gate), value_of(site.norm).shape)

    for expression, root, match in sites._behind(site, patterns.GATES, fits):
        gate, nodes = match.values["gate"], site.nodes | match.nodes
        activation = patterns.GATES[expression]
        yield replace(site, y=root, nodes=nodes, gate=gate, gate_activation=activation)

# SPDX-License-Identifier: Apache-2.0
"""The graph pass: finds the norms of a graph and its sub-graphs and replaces them."""

from __future__ import annotations

import math
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from ..ops.operators import GROUP_NORM, KERNELS, VARIANTS, operator_of
from . import replace, rules, sites
from .effects import Effects
from .reading import name_of_target, origin, read, value_of
from .replace import NotFused
from .rules import Choice, Problem
from .sites import Site


class Settings(NamedTuple):
    """What the caller decides."""

    with_inductor: bool = True  # whether Inductor compiles the graph; else it runs as it is
    deterministic: bool = False  # whether this package computes every forward pass


@dataclass
class Row:
    """What became of one norm."""

    name: str  # of its node
    where: str  # in the model
    shape: tuple[object, ...] = ()
    dtype: torch.dtype | None = None
    form: str = ""  # how it was written
    statistic: str = "layer"  # or "rms": what the operator computes
    fused: list[str] = field(default_factory=list)
    operator: str | None = None  # None where it was left
    reason: str = ""  # of the rule that decided
    notes: list[str] = field(default_factory=list)  # what was left, and why
    error: Exception | None = None


_ELEMENTWISE = re.compile(
    r"^(_?(add|sub|mul|div|pow|sqrt|rsqrt|square|neg|abs|exp|tanh|sigmoid|erf|dropout|gelu|silu|relu"
    r"|leaky_relu|hardswish|hardtanh|mish|elu|softplus|where|clamp|masked_fill|addcmul|lerp"
    r"|iadd|isub|imul|itruediv|truediv|maximum|minimum)_?)$"
)


def run(graph_module: GraphModule, settings: Settings) -> list[Row]:
    """Replaces norms in place, as the rules decide; returns a row for each."""
    rows: list[Row] = []
    for module in graph_module.modules():
        if isinstance(module, GraphModule):
            found = _run_graph(module.graph, settings)
            if found:
                module.recompile()
            rows += found
    failed = [row for row in rows if row.error is not None]
    if failed:
        names = ", ".join(dict.fromkeys(f"{row.name} {row.where}".strip() for row in failed))
        what = f"its graph pass failed with {type(failed[0].error).__name__}: {failed[0].error}"
        warnings.warn(f"fused_layernorm leaves {names} to PyTorch: {what}", stacklevel=2)
    return rows


def _run_graph(graph: Graph, settings: Settings) -> list[Row]:
    rows: list[Row] = []
    effects = None
    for node in list(graph.nodes):
        try:
            if settings.deterministic or not settings.with_inductor:
                # aten_ variants leave the forward pass to Inductor.
                node.target = KERNELS.get(node.target, node.target)
            site = None if node._erased else sites.find(node)
            if site is not None and value_of(node).device.type in rules.DEVICES:
                effects = effects or Effects(graph)
                rows.append(_replace(site, graph, effects, settings))
        except Exception as error:  # it must not stop the user's model
            rows.append(Row(node.name, _where(node), notes=["the pass failed"], error=error))
    return rows


def _replace(site: Site, graph: Graph, effects: Effects, settings: Settings) -> Row:
    value, node = value_of(site.norm), site.norm
    row = Row(node.name, _where(node), tuple(value.shape), value.dtype, site.form, site.statistic)
    row.notes = site.notes
    for candidate in [] if site.notes else site.candidates():
        try:
            checked = replace.check(candidate, effects, settings.with_inductor)
            rule = rules.choose(_problem(candidate, settings))
            if rule.choice is not Choice.PYTORCH:
                family = GROUP_NORM if site.of_groups else operator_of(checked.arguments)
                overload = family.plain
                if rule.choice is Choice.INDUCTOR:
                    overload = VARIANTS[overload]
                replace.apply(checked, overload, graph, effects)
                row.operator = overload._opname
                row.fused = candidate.fused + ["cast"] * (checked.narrowed is not None)
            row.reason = rule.reason
            break
        except NotFused as reason:
            if str(reason) not in row.notes:
                row.notes.append(str(reason))
    return row


def _problem(site: Site, settings: Settings) -> Problem:
    cols = None if site.of_groups else math.prod(site.normalized_shape)
    cols = cols if isinstance(cols, int) else None
    has_neighbours = any(map(_is_elementwise, [origin(site.input), *site.y.users]))
    is_apart = replace.is_apart(site.input, site) or _may_be_laid_out(site, settings.with_inductor)
    given = (site.fusion, cols, has_neighbours, is_apart)
    return Problem(*given, statistic=site.statistic, **settings._asdict())


def _may_be_laid_out(site: Site, with_inductor: bool) -> bool:
    """Whether Inductor may choose how the columns lie, whatever they do in the examples: in a graph
    with convolutions, whose results it lays out, of a view."""
    call = read(origin(site.input))
    if not with_inductor or call is None or call.name != "view":
        return False
    return any("conv" in name_of_target(node.target) for node in site.norm.graph.nodes)


def _is_elementwise(node: Any) -> bool:
    call = read(node)
    if call is not None and call.name in ("view", "cast"):
        return call.name == "cast" or _is_elementwise(call.operands[0])
    name = name_of_target(node.target).split(".")[0] if isinstance(node, Node) else ""
    return _ELEMENTWISE.match(name) is not None


def _where(node: Node) -> str:
    """The path in the model of the module that made the node; else the line of its source."""
    modules = list((node.meta.get("nn_module_stack") or {}).values())
    words = re.findall(r"\w+", modules[-1][0]) if modules else []
    if words[:1] == ["L"]:  # Dynamo's L['self'].__dict__['_modules']['norm']
        words = [word for word in words[2:] if word not in ("__dict__", "_modules")]
    path = ".".join(words)
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return path or (f"{Path(lines[-1][0]).name}:{lines[-1][1]}" if lines else "")

# SPDX-License-Identifier: Apache-2.0
"""The graph pass: finds the norms of a graph and its sub-graphs and replaces them."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from ..ops import aten_forward
from . import groups, replace, rules, sites
from .effects import Effects, name_of_target
from .reading import origin, read, value_of
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
    failed = {f"{row.name} {row.where}".strip(): row.error for row in rows if row.error is not None}
    for error in list(failed.values())[:1]:
        what = f"its graph pass failed with {type(error).__name__}: {error}"
        warnings.warn(
            f"fused_layernorm leaves {', '.join(failed)} to PyTorch: {what}", stacklevel=2
        )
    return rows


def _run_graph(graph: Graph, settings: Settings) -> list[Row]:
    rows: list[Row] = []
    node = next(iter(graph.nodes))
    try:
        effects = Effects(graph)
        for node in list(graph.nodes):
            if settings.deterministic or not settings.with_inductor:
                # aten_ variants leave the forward pass to Inductor.
                node.target = aten_forward.KERNELS.get(node.target, node.target)
    except Exception as error:
        return [_failed(node, error)]
    for node in list(graph.nodes):
        try:
            site = None if node._erased else sites.find(node) or groups.find(node)
            if site is not None and value_of(node).device.type in rules.DEVICES:
                rows.append(_replace(site, graph, effects, settings))
        except Exception as error:
            rows.append(_failed(node, error))
    return rows


def _failed(node: Node, error: Exception) -> Row:
    """The row of an error of the pass, which must not stop the user's model."""
    return Row(node.name, _where(node), notes=["the pass failed"], error=error)


def _replace(site: Site, graph: Graph, effects: Effects, settings: Settings) -> Row:
    notes = site.notes
    if notes:  # no operator computes this norm
        return _row(site, None, "", notes)
    for candidate in site.candidates():
        try:
            checked = replace.check(candidate, effects, settings.with_inductor)
            problem = _problem(candidate, settings)
            rule = rules.choose(problem)
            if rule.choice is Choice.PYTORCH:
                return _row(candidate, None, rule.reason, notes)
            overload = candidate.overload(checked.arguments)
            if rule.choice is Choice.INDUCTOR:
                overload = aten_forward.VARIANTS[overload]
            row = _row(candidate, overload, rule.reason, notes)
            row.fused += ["cast"] * (checked.narrowed is not None)
            replace.apply(checked, overload, graph, effects)
            return row
        except NotFused as reason:
            if str(reason) not in notes:
                notes.append(str(reason))
    return _row(site, None, "", notes)


def _problem(site: Site, settings: Settings) -> Problem:
    neighbours, cols = [origin(site.input), *site.y.users], site.cols
    return Problem(
        site.fusion,
        cols if isinstance(cols, int) else None,
        any(map(_is_elementwise, neighbours)),
        replace.is_apart(site.input, site) or _may_be_laid_out(site, settings.with_inductor),
        statistic=site.statistic,
        **settings._asdict(),
    )


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


def _row(site: Site, overload: OpOverload | None, reason: str, notes: list[str]) -> Row:
    value, node = value_of(site.norm), site.norm
    row = Row(node.name, _where(node), tuple(value.shape), value.dtype, site.form, site.statistic)
    row.reason, row.notes = reason, notes
    if overload is not None:
        row.fused, row.operator = site.fused, overload._opname
    return row


def _where(node: Node) -> str:
    """The path in the model of the module that made the node; else the line of its source."""
    modules = list((node.meta.get("nn_module_stack") or {}).values())
    words = re.findall(r"\w+", modules[-1][0]) if modules else []
    if words[:1] == ["L"]:  # Dynamo's L['self'].__dict__['_modules']['norm']
        words = [word for word in words[2:] if word not in ("__dict__", "_modules")]
    path = ".".join(words)
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return path or (f"{Path(lines[-1][0]).name}:{lines[-1][1]}" if lines else "")

# SPDX-License-Identifier: Apache-2.0
"""The graph pass: finds the norms of a graph and its sub-graphs and replaces them."""

from __future__ import annotations

import contextlib
import itertools
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from ..ops import aten_forward
from . import gated, groups, replace, rotations, rules, sites
from .effects import Effects, name_of_target
from .reading import dtype_of, origin, read, value_of
from .replace import NotFused
from .rules import Choice, Columns, Problem
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
    fused: list[str] = field(default_factory=list)
    operator: str | None = None  # None where it was left
    reason: str = ""
    notes: list[str] = field(default_factory=list)
    error: Exception | None = None
    statistic: str = "layer"  # or "rms": what the operator computes


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
    errors = [row for row in rows if row.error is not None]
    if errors:
        names = ", ".join(f"{row.name} ({row.where})" if row.where else row.name for row in errors)
        error = errors[0].error
        warnings.warn(
            f"fused_layernorm leaves {names} to PyTorch: its graph pass failed with "
            f"{type(error).__name__}: {error}",
            stacklevel=2,
        )
    return rows


def _run_graph(graph: Graph, settings: Settings) -> list[Row]:
    rows: list[Row] = []
    node = next(iter(graph.nodes))
    try:
        effects = Effects(graph)
        _join(graph, effects)
        if settings.deterministic or not settings.with_inductor:
            # aten_ variants leave the forward pass to Inductor.
            for node in graph.nodes:
                node.target = aten_forward.KERNELS.get(node.target, node.target)
    except Exception as error:
        return [_failed(node, error)]
    for node in list(graph.nodes):
        if node._erased:
            continue
        try:
            site = sites.find(node) or groups.find(node)
            if site is not None and value_of(node).device.type in rules.DEVICES:
                rows.append(_replace(site, graph, effects, settings))
        except Exception as error:
            rows.append(_failed(node, error))
    try:
        rows += _rotations(graph, effects)
    except Exception as error:
        rows.append(_failed(node, error))
    return rows


def _rotations(graph: Graph, effects: Effects) -> list[Row]:
    rows = []
    for found, fused, reason in rotations.run(graph, effects):
        row = _row_of(found.y, "rotation", "rotation")
        row.fused, row.notes = fused, [reason] if reason else []
        row.operator = None if reason else "qk_norm_rope"
        rows.append(row)
    return rows


def _row_of(node: Node, form: str, statistic: str) -> Row:
    value = value_of(node)
    shape = tuple(value.shape)
    return Row(node.name, _where(node), shape, value.dtype, form, statistic=statistic)


def _failed(node: Node, error: Exception) -> Row:
    """The row of an error of the pass, which must not stop the user's model."""
    return Row(node.name, _where(node), notes=["the pass failed"], error=error)


def _join(graph: Graph, effects: Effects) -> None:
    """Removes a cat of a tensor's two parts, where it cannot be told from the tensor itself."""
    outputs = graph.find_nodes(op="output")
    for node in graph.nodes:
        call = read(node) if node.op == "call_function" and node.target in _CATS else None
        if call is None or effects.is_written(node) or effects.is_written(call.operands[0]):
            continue
        (whole,) = call.operands
        device = value_of(node).device.type
        if device in rules.DEVICES and not any(user in outputs for user in node.users):
            with contextlib.suppress(NotFused):
                replace.check_alike(node, whole, dtype_of(node))
                node.replace_all_uses_with(whole)
                replace.erase(node, graph)


_CATS = (torch.cat, torch.ops.aten.cat.default)


def _replace(site: Site, graph: Graph, effects: Effects, settings: Settings) -> Row:
    notes = site.notes
    if notes:  # no operator computes this norm
        return _row(site, None, "", notes)
    kinds = [gated.candidates, sites.candidates]
    if isinstance(site, groups.GroupSite):
        kinds = [groups.candidates]
    for candidate in itertools.chain.from_iterable(kind(site) for kind in kinds):
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
            replace.apply(checked, overload, graph, effects, problem.columns)
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
        _columns(site, settings),
        site.dim is not None,
        statistic=site.statistic,
        **settings._asdict(),
    )


def _columns(site: Site, settings: Settings) -> Columns:
    """How columns lie when the graph runs.

    In a graph with convolutions Inductor chooses the layouts of their results, and of what is
    computed elementwise from them: there the strides of examples tell nothing of images.
    """
    found = replace.columns_of(site.input, site)
    is_image = (
        site.dim is not None
        or found is Columns.CHANNELS
        or _is_permuted(site.input, site.normalized_ndim)
    )
    if settings.with_inductor and is_image:
        names = (name_of_target(node.target) for node in site.norm.graph.nodes)
        if any("conv" in name for name in names):
            return Columns.APART
    return found


def _is_permuted(node: Any, normalized_ndim: int) -> bool:
    """Whether a node is a view that permutes a tensor's dimensions, normalized ones among them."""
    node = origin(node)
    first = value_of(node).dim() - normalized_ndim
    while (call := read(node)) is not None and call.name == "view":
        name = name_of_target(node.target)
        if name == "permute":
            given = [*node.args[1:], *node.kwargs.values()]
            dims = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
            moved = [d for i, d in enumerate(dims) if isinstance(d, int) and d % len(dims) != i]
            return any(d % len(dims) >= first for d in moved)
        if name == "transpose":
            ndim = value_of(node).dim()
            dims = [*node.args[1:], *node.kwargs.values()]
            return any(isinstance(d, int) and d % ndim >= first for d in dims)
        if name in ("view", "reshape", "flatten", "unflatten"):
            first = 0  # these mix dimensions: all count as normalized
        (node,) = map(origin, call.operands)
    return False


def _is_elementwise(node: Any) -> bool:
    if not isinstance(node, Node):
        return False
    call = read(node)
    if call is not None and call.name == "view":
        return _is_elementwise(call.operands[0])
    name = getattr(node.target, "__name__", str(node.target)).split(".")[0]
    return _ELEMENTWISE.match(name) is not None or (call is not None and call.name == "cast")


def _row(site: Site, overload: OpOverload | None, reason: str, notes: list[str]) -> Row:
    row = _row_of(site.norm, site.form, site.statistic)
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

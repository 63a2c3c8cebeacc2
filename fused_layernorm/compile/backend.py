# SPDX-License-Identifier: Apache-2.0
"""The entry points: the backend "fused_layernorm" of torch.compile, fuse and explain."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch.fx import GraphModule

from ..ops.arguments import name_of

_PREFIX = "fused_layernorm."
_THEN = ("inductor", "eager")
# The values of each option; the first is the default.
OPTIONS: dict[str, tuple[object, ...]] = {
    "fused_layernorm.then": _THEN,
    "fused_layernorm.deterministic": (False, True),
}


def backend(
    graph_module: GraphModule,
    example_inputs: list[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """What ``torch.compile(model, backend="fused_layernorm")`` calls with each captured graph.

    ``mode`` and ``options`` are Inductor's. ``options`` may also have
    ``"fused_layernorm.then"``: ``"inductor"``, which compiles the rewritten graph, or ``"eager"``,
    which runs it as it stands; and ``"fused_layernorm.deterministic"``: True keeps every forward
    pass on this package's kernels, as ``torch.use_deterministic_algorithms(True)`` does.
    """
    ours, inductors = _split(options or {})
    then = ours["fused_layernorm.then"]
    if then == "eager" and (inductors or mode not in (None, "default")):
        given = ", ".join(map(repr, [*inductors, *([mode] if mode else [])]))
        raise ValueError(
            f'expected no mode and no options of Inductor\'s beside "fused_layernorm.then": '
            f'"eager", got {given}'
        )
    fuse(graph_module, then=then, deterministic=ours["fused_layernorm.deterministic"])
    if then == "eager":
        return graph_module.forward
    # This is how torch.compile passes mode and options to Inductor.
    inductor = torch._TorchCompileInductorWrapper(mode, inductors, None)
    with _cache_key():
        return inductor(graph_module, example_inputs)


def _reset() -> None:
    """Frees the CUDA graphs of mode="reduce-overhead"; torch._dynamo.reset() calls it."""
    if torch.cuda.is_available():
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        reset_cudagraph_trees()


backend.reset = _reset  # type: ignore[attr-defined]


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """This package's options, each given or its default, and Inductor's."""
    ours = {name: values[0] for name, values in OPTIONS.items()}
    inductors = {}
    for name, value in options.items():
        if not name.startswith(_PREFIX):
            inductors[name] = value
        elif name not in OPTIONS:
            raise ValueError(f"expected an option of {list(OPTIONS)} or of Inductor, got {name!r}")
        elif value not in OPTIONS[name]:
            raise ValueError(f"expected {name!r} to be one of {OPTIONS[name]}, got {value!r}")
        else:
            ours[name] = value
    return ours, inductors


def _cache_key() -> Any:
    """Puts the package's version and its rules into the keys of torch.compile's caches."""
    from . import rules

    try:
        release = version("fused_layernorm")
    except PackageNotFoundError:
        release = "unknown"
    config: Any = torch.compiler.config
    tag = f"{config.cache_key_tag} fused_layernorm {release} {rules.digest()}"
    return config.patch(cache_key_tag=tag.strip())


def fuse(
    graph_module: GraphModule, *, then: str = "inductor", deterministic: bool = False
) -> GraphModule:
    """Puts this package's operators into a graph, in place, and returns it.

    It is for authors of other backends. The graph is one that Dynamo captured (as a backend of
    torch.compile gets it) or one of ``torch.export`` (``program.module()``). The nodes' metadata
    must have the example values that both record there; a norm without them stays as it is.

    Args:
        graph_module: the graph; its sub-graphs (checkpoint bodies and the like) are rewritten too.
        then: what runs the graph. ``"inductor"``: a compiler that fuses elementwise operations;
            the rules leave it the forward passes that it computes as fast. ``"eager"``: no
            compiler, so the rules give every norm to this package.
        deterministic: keep every forward pass on this package's kernels, which are
            batch-invariant.

    Raises:
        ValueError: if ``then`` is neither of these.
    """
    _run(graph_module, then, deterministic)
    return graph_module


def _run(graph_module: GraphModule, then: str, deterministic: bool) -> list[Any]:
    if then not in _THEN:
        raise ValueError(f"expected then to be one of {_THEN}, got {then!r}")
    from . import graph_pass  # late, for it imports much that most programs do not need

    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    settings = graph_pass.Settings(then == "inductor", deterministic)
    return graph_pass.run(graph_module, settings)


@dataclass
class Explanation:
    """What `explain` found, with a row for each norm; it prints as a table."""

    rows: list[Any]
    graphs: int

    def __str__(self) -> str:
        if not self.rows:
            return f"no norm on CUDA in {_count(self.graphs, 'graph')}"
        table = [("where", "shape", "dtype", "written as", "fused with it", "operator")]
        reasons: dict[str, int] = {}
        notes: dict[str, int] = {}
        for row in self.rows:
            marks = []
            if row.reason:
                marks.append(str(reasons.setdefault(row.reason, len(reasons) + 1)))
            marks += [_letter(notes.setdefault(note, len(notes))) for note in row.notes]
            table.append(
                (
                    row.where or row.name,
                    " x ".join(map(str, row.shape)),
                    name_of(row.dtype),
                    row.form,
                    ", ".join(row.fused) or "-",
                    f"{_operator(row)} [{','.join(marks)}]" if marks else _operator(row),
                )
            )
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in table]
        lines.insert(1, "  ".join("-" * width for width in widths))
        rotations = [row for row in self.rows if row.form == "rotation"]
        norms = [row for row in self.rows if row.form != "rotation"]
        counts = f"{_count(len(norms), 'norm')} in {_count(self.graphs, 'graph')}, {_fused(norms)}"
        if rotations:
            counts += f"; {_count(len(rotations), 'rotation')}, {_fused(rotations)}"
        lines += ["", counts]
        lines += [f"[{number}] {reason}" for reason, number in reasons.items()]
        lines += [f"[{_letter(number)}] {note}" for note, number in notes.items()]
        return "\n".join(lines)


def _operator(row: Any) -> str:
    """What takes the place of a norm; the operators' names are those of layer norms."""
    if row.operator is None:
        return "left"
    return f'{row.operator}, "rms"' if row.statistic == "rms" else row.operator


def _fused(rows: list[Any]) -> str:
    return f"{sum(row.operator is not None for row in rows)} replaced"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" + "s" * (count != 1)


def _letter(number: int) -> str:
    return chr(ord("a") + number % 26) * (1 + number // 26)


def explain(
    model: Callable[..., Any],
    *args: Any,
    then: str = "inductor",
    **kwargs: Any,
) -> Explanation:
    """Runs ``model(*args, **kwargs)`` once and says what became of every norm in it.

    The result prints as a table: where each norm stands, what is fused with it, which
    operator takes its place and by which rule, and what was left and why. An operator whose name
    begins with ``aten_`` leaves the forward pass to Inductor and has this package's backward pass.
    Functions that torch.compile has compiled in this process are compiled again at their next
    call, as after ``torch._dynamo.explain``.

    Args:
        model: a module or a function.
        then: as in :func:`fuse`.
    """
    rows: list[Any] = []
    graphs = 0

    def collect(graph_module: GraphModule, example_inputs: Iterable[Any]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        rows.extend(_run(graph_module, then, False))
        return graph_module.forward

    torch._dynamo.reset()
    try:
        torch.compile(model, backend=collect)(*args, **kwargs)
    finally:
        torch._dynamo.reset()
    return Explanation(rows, graphs)

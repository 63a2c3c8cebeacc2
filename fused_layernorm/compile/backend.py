# SPDX-License-Identifier: Apache-2.0
"""The entry points: the backend "fused_layernorm" of torch.compile, fuse and explain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch.fx import GraphModule

from ..ops import arguments
from . import rules

try:
    VERSION = version("fused_layernorm")
except PackageNotFoundError:  # imported from a folder that was built but not installed
    VERSION = "0+unknown"

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
    inductors = dict(options or {})
    ours = {name: inductors.pop(name, values[0]) for name, values in OPTIONS.items()}
    for name in inductors:
        if name.startswith("fused_layernorm."):
            raise ValueError(f"expected an option of {list(OPTIONS)} or of Inductor, got {name!r}")
    for name, value in ours.items():
        arguments.check_choice(repr(name), value, OPTIONS[name])
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
    # The package's version and its rules are in the keys of torch.compile's caches.
    config: Any = torch.compiler.config
    tag = f"{config.cache_key_tag} fused_layernorm {VERSION} {rules.digest()}"
    with config.patch(cache_key_tag=tag.strip()):
        return inductor(graph_module, example_inputs)


def _reset() -> None:
    """Frees the CUDA graphs of mode="reduce-overhead"; torch._dynamo.reset() calls it."""
    if torch.cuda.is_available():
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        reset_cudagraph_trees()


backend.reset = _reset  # type: ignore[attr-defined]


def fuse(
    graph_module: GraphModule, *, then: str = "inductor", deterministic: bool = False
) -> GraphModule:
    """Puts this package's operators into a graph, in place, and returns it: for other backends.

    The graph is one that Dynamo captured (as a backend of torch.compile gets it) or one of
    ``torch.export`` (``program.module()``). A norm whose nodes' metadata lack the example values
    that both record stays as it is.

    Args:
        graph_module: the graph; its sub-graphs (checkpoint bodies and the like) are rewritten too.
        then: what runs the graph. ``"inductor"``: a compiler that fuses elementwise operations;
            the rules leave it the forward passes that it computes as fast. ``"eager"``: no
            compiler, so the rules give every norm to this package. Else a ValueError is raised.
        deterministic: keep every forward pass on this package's kernels, which are
            batch-invariant.
    """
    _run(graph_module, then, deterministic)
    return graph_module


def _run(graph_module: GraphModule, then: str, deterministic: bool) -> list[Any]:
    arguments.check_choice("then", then, _THEN)
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
        norms, graphs = (
            f"{count} {what}" + "s" * (count != 1)
            for count, what in ((len(self.rows), "norm"), (self.graphs, "graph"))
        )
        if not self.rows:
            return f"no norm on CUDA in {graphs}"
        table = [("where", "shape", "dtype", "written as", "fused with it", "operator")]
        remarks: dict[str, int] = {}  # by number: a rule's reason, or what was left and why
        for row in self.rows:
            said = filter(None, [row.reason, *row.notes])
            marks = [str(remarks.setdefault(remark, len(remarks) + 1)) for remark in said]
            # The operators' names are those of layer norms.
            operator = row.operator or "left"
            operator += ', "rms"' * (row.statistic == "rms" and row.operator is not None)
            operator += f" [{','.join(marks)}]" * bool(marks)
            shape, fused = " x ".join(map(str, row.shape)), ", ".join(row.fused) or "-"
            named = (row.where or row.name, shape, arguments.name_of(row.dtype), row.form)
            table.append((*named, fused, operator))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in table]
        lines.insert(1, "  ".join("-" * width for width in widths))
        replaced = sum(row.operator is not None for row in self.rows)
        lines += ["", f"{norms} in {graphs}, {replaced} replaced"]
        return "\n".join([*lines, *(f"[{number}] {remark}" for remark, number in remarks.items())])


def explain(
    model: Callable[..., Any], *args: Any, then: str = "inductor", **kwargs: Any
) -> Explanation:
    """Runs ``model(*args, **kwargs)`` once and says what became of every norm in it.

    ``model`` is a module or a function, ``then`` as in :func:`fuse`. The result prints as a table:
    where each norm stands, what is fused with it, which operator takes its place and by which rule,
    and what was left and why. An operator whose name begins with ``aten_`` leaves the forward pass
    to Inductor and has this package's backward pass. Functions that torch.compile has compiled in
    this process are compiled again at their next call.
    """
    found = Explanation([], 0)

    def collect(graph_module: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        found.graphs += 1
        found.rows += _run(graph_module, then, False)
        return graph_module.forward

    torch._dynamo.reset()
    try:
        torch.compile(model, backend=collect)(*args, **kwargs)
    finally:
        torch._dynamo.reset()
    return found

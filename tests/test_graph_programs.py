# SPDX-License-Identifier: Apache-2.0
"""The pass keeps the results of random programs of norms, what surrounds them, views and writes.

Unlike the tests of the patterns, these programs combine operations at random and write anywhere,
also into views, by in-place functions, and where the gradient mode changes. A program is made as a
graph, without Dynamo, whose examples are its values on the CPU.

    FUSED_LAYERNORM_PROGRAMS=100000 pytest tests/test_graph_programs.py
"""

import collections
import operator
import os
import random
from typing import Any

import torch
import torch.nn.functional as F
from captured import FUNCTIONS, by_position
from torch.fx import Graph, GraphModule, Proxy
from torch.fx.node import map_aggregate

from fused_layernorm.compile import graph_pass, rules

PROGRAMS = int(os.environ.get("FUSED_LAYERNORM_PROGRAMS", 300))
D, RESULTS = 8, 3
GRAD = torch._C._set_grad_enabled

# x, y and z are drawn from the tensors so far, m and n from the modulations, k from those of
# channels. `f` calls a function as its arguments stand here.
NORMS = (
    "f(F.layer_norm, {x}, (8,), None, None, 1e-3)",
    "f(F.layer_norm, {x}, (8,), w, b, 1e-3)",
    "f(F.layer_norm, {x}.float(), (8,), None, None, 1e-3).to({x}.dtype)",
    "f(F.rms_norm, {x}, (8,), w, 1e-3)",
    "f(torch.native_layer_norm, {x}, (8,), w, None, 1e-3)[0]",
    "f(F.group_norm, {x}, 3, v, v, 1e-3)",
    "f(F.group_norm, {x}, 1, None, None, 1e-3)",
    "f(F.layer_norm, {x}.transpose(1, 2), (3,), v, None, 1e-3).transpose(1, 2)",
    "({x} - {x}.mean(-1, True)) * f(torch.rsqrt, {x}.var(-1, False, True) + 1e-3)",
    "({x} - {x}.mean(1, True)) / f(torch.sqrt, {x}.var(1, False, True) + 1e-3) * k[0]",
    "w * ({x} * f(torch.rsqrt, {x}.pow(2).mean(-1, True) + 1e-3)) + b",
    "({x} * f(torch.rsqrt, {x}.pow(2).mean(-1, True) + 1e-3)) * (1 + w)",
)
# What is fused with a norm: most lines of a program.
AROUND = (
    "{x} * (1 + {m}) + {n}", "{n} + {x} + {x} * {m}", "{x} * (1 + {m}.squeeze(1)).unsqueeze(1)",
    "{x} * (1 + {k}) + {k}", "{x} + {z}", "{x} + {m} * {z}", "f(torch.addcmul, {x}, {m}, {z})",
    "f(F.gelu, {x})", "f(F.silu, {x})", "f(F.silu, {x}) * 0.5", "{x} * {x}.sigmoid()",
    "f(F.relu, {x})",
)  # fmt: skip
OTHERS = (
    "w * {x} + w", "{x}.float().to({x}.dtype)", "{x}.view(3, 2, 8).view(2, 3, 8)",
    "{x}[(slice(None),)]", "{x}.transpose(0, 1).transpose(0, 1)", "{x}.contiguous()", "{x} * 1",
    "f(F.dropout, {x}, 0.0, True)", "f(torch.cat, [{x}[:, :1], {x}[:, 1:]], dim=1)",
    "f(by_position({name!r}, False), {x})",
)  # fmt: skip
WRITES = (
    "{x}.mul_(1.5)", "{x}.view(-1).narrow(0, 2, 9).add_(0.5)",
    "f(operator.setitem, {x}, (slice(0, 1), slice(None), 3), 0.5)", "{m}.mul_(1.5)",
    "{m}.view(-1).add_(0.5)", "{k}.add_(0.5)", "f(operator.iadd, {x}, {z})",
    "f(operator.imul, {x}, {m})", "f(torch._foreach_add_, [{x}, {y}], [{z}, {z}])",
    "f(torch.ops.aten.add_.Tensor, {x}, {z})", "{x}.copy_({z})", "{x}.transpose(0, 1).sub_(0.25)",
    *3 * ("f(by_position({name!r}, True), {x})",),
)  # fmt: skip
# In programs without gradients alone.
UNDIFFERENTIATED = (
    "f(torch.add, {y}, {z}, out={x})",
    "f(torch.cat, [{y}[:, :1], {y}[:, 1:]], 1, out={x})",
    "f(F.batch_norm, {z}.transpose(1, 2), {x}[0, 0, :], {x}[1, 0, :].abs(), None, None, True)",
    "f(F.embedding, f(torch.tensor, [0, 3]), {x}.view(6, 8), None, 0.5)",
)
ANY_SHAPE = [name for name in FUNCTIONS if name[-2:] not in ("1d", "2d", "3d")]
SHAPES = {"x": (2, 3, D), "y": (2, 3, D), "m": (2, 1, D), "n": (2, 1, D), "k": (2, 3, 1)}
PARAMETERS = {"w": (D,), "b": (D,), "v": (3,)}


def program(seed: int) -> tuple[Graph, list[torch.Tensor], bool, bool]:
    """A random program, its arguments, and whether it has gradients and goes to Inductor."""
    choose = random.Random(seed)
    graph, with_gradients = Graph(), choose.random() < 0.5
    with_inductor = not with_gradients and choose.random() < 0.3
    generator = torch.Generator().manual_seed(seed)

    def f(target: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(target, tuple):  # of by_position
            target, args = target[0], (*args, *target[1:])
        raw = map_aggregate((args, kwargs), lambda a: getattr(a, "node", a))
        return Proxy(graph.call_function(target, *raw))

    names = {**SHAPES, **PARAMETERS}
    inputs: dict[str, Any] = {name: Proxy(graph.placeholder(name)) for name in names}
    args = [torch.randn(s, generator=generator, dtype=torch.float64) for s in names.values()]
    # Leaves are not written into where gradients are asked for.
    own = {name: inputs[name] * 1.5 if with_gradients else inputs[name] for name in SHAPES}
    xs, space = [own["x"], own["y"]], {"torch": torch, "F": F, "f": f, "operator": operator}
    space |= {"by_position": by_position, **{name: inputs[name] for name in PARAMETERS}}
    space |= {"k": own["k"], "m": own["m"], "n": own["n"]}
    is_off = False
    for _ in range(choose.randint(4, 14)):
        space |= {"xs": xs}
        drawn = {name: f"xs[{choose.randrange(len(xs))}]" for name in "xyz"}
        drawn |= {"m": choose.choice("mn"), "n": choose.choice("mn"), "k": "k"}
        drawn["name"] = choose.choice(ANY_SHAPE)
        kind = choose.random()
        if kind < 0.03:
            f(GRAD, is_off)
            is_off = not is_off
        elif kind < 0.2:
            more = () if with_gradients else UNDIFFERENTIATED
            # The last few tensors are those that an operator may replace.
            if choose.random() < 0.5:
                drawn["x"] = f"xs[{max(0, len(xs) - choose.randint(1, 3))}]"
            eval(choose.choice((*WRITES, *more)).format(**drawn), space)
        else:
            # x is mostly the latest tensor, so that the operations form chains.
            if choose.random() < 0.75:
                drawn["x"] = f"xs[{len(xs) - 1}]"
            lines = NORMS if kind < 0.45 else AROUND if kind < 0.88 else OTHERS
            xs.append(eval(choose.choice(lines).format(**drawn), space))
    if is_off:
        f(GRAD, True)
    results: list[Any] = [xs[-1], xs[-2], choose.choice(xs)]
    assert len(results) == RESULTS
    graph.output(tuple(proxy.node for proxy in results))
    return graph, args, with_gradients, with_inductor


class Examples(torch.fx.Interpreter):
    """Runs a graph once for the examples of its nodes: values that share memory as they do."""

    def run_node(self, n):
        n.meta["example_value"] = super().run_node(n)
        return n.meta["example_value"]


def step(function: Any, args: list[torch.Tensor], with_gradients: bool) -> list[Any]:
    """The results, the arguments afterwards and, where asked for, the arguments' gradients."""
    args = [arg.clone().requires_grad_(with_gradients) for arg in args]
    try:
        outputs = function(*args)
    finally:
        GRAD(True)
    found = [*(out.detach() for out in outputs), *(arg.detach() for arg in args)]
    outputs = [out for out in outputs if out.requires_grad]
    if not outputs:
        return found
    weights = torch.linspace(-1, 2, D, dtype=torch.float64)
    loss: Any = sum((out * weights).square().mean() for out in outputs)
    return [*found, *torch.autograd.grad(loss, args, allow_unused=True)]


def difference(found: list[Any], expected: list[Any], rounding: float) -> str:
    """What differs between two lists of tensors, or nothing; gradients may have other strides."""
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        atol = 0.0 if other is None else rounding * max(1.0, other.abs().max().item())
        try:
            torch.testing.assert_close(one, other, rtol=0, atol=atol, check_stride=i < RESULTS)
        except AssertionError as error:
            return f"value {i}: {error}"
    return ""


def compare(seed: int) -> tuple[str, list[graph_pass.Row]]:
    """What differs between a program and what the pass makes of it ("skipped": PyTorch refuses the
    program itself, or it overflows), and the pass's rows."""
    graph, args, with_gradients, with_inductor = program(seed)
    try:
        stock = step(GraphModule({}, graph).forward, args, with_gradients)
        Examples(GraphModule({}, graph)).run(*(arg.clone() for arg in args))
    except (RuntimeError, IndexError):  # such as a write into what PyTorch's own backward reads
        return "skipped", []
    finally:
        GRAD(True)
    if any(t is not None and not (t.abs().max() < 1e4) for t in stock):
        return "skipped", []
    # Casts to float32 are a rounding that an operator need not make. The pass erases them.
    is_rounded = any(node.target == "float" for node in graph.nodes)
    module = GraphModule({}, graph)
    rows = graph_pass.run(module, graph_pass.Settings(with_inductor))
    module.graph.lint()
    errors = [repr(row.error) for row in rows if row.error is not None]
    if errors:
        return errors[0], rows
    try:
        found = step(module.forward, args, with_gradients)
    except RuntimeError as error:
        return str(error), rows
    return difference(found, stock, 1e-3 if is_rounded else 1e-6), rows


def test_random_programs(monkeypatch):
    """No program is changed by the pass, and enough is fused in them."""
    monkeypatch.setattr(rules, "DEVICES", {"cpu", "cuda"})
    fused: collections.Counter[str] = collections.Counter()
    wrong = []
    for seed in range(PROGRAMS):
        error, rows = compare(seed)
        fused["skipped" if error == "skipped" else "compared"] += 1
        fused.update(name for row in rows for name in row.fused)
        fused.update(row.operator or "left" for row in rows)
        if error not in ("", "skipped"):
            wrong.append(f"seed {seed}: {error}")
    assert wrong == []
    assert fused["compared"] > PROGRAMS / 2
    names = ("residual", "gate", "scale", "shift", "activation", "factor", "group_norm")
    assert all(fused[name] > PROGRAMS / 100 for name in names), fused

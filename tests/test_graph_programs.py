# SPDX-License-Identifier: Apache-2.0
"""The pass keeps the results of random programs of norms, sums, modulations, casts, views, writes.

Unlike the tests of the patterns, these programs combine operations at random and write anywhere.
They have found two wrong results.
"""

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fused_layernorm.compile import graph_pass, rules

PROGRAMS = 50
D = 8

# x and z are drawn from the tensors so far, m and n from the modulations.
VALUES = (
    "F.layer_norm({x}, (8,), None, None, 1e-3)",
    "F.layer_norm({x}, (8,), w, None, 1e-3)",
    "F.layer_norm({x}.float(), (8,), w, w, 1e-3)",
    "({x} - {x}.mean(-1, True)) * torch.rsqrt({x}.var(-1, False, True) + 1e-3)",
    "{x} * (1 + {m}) + {n}",
    "{n} + {x} + {x} * {m}",
    "{x} * (1 + {m}.squeeze(1)).unsqueeze(1)",
    "{x} + {z}",
    "{x} + {m} * {z}",
    "torch.addcmul({x}, {m}, {z})",
    "w * {x} + w",
    "F.gelu({x})",
    "F.silu({x}) * 0.5",
    "{x}.double().float()",
    "{x}.view(3, 2, 8).view(2, 3, 8)",
    "{x}[:]",
    "torch.cat([{x}[:, :1], {x}[:, 1:]], dim=1)",
)
# The values that most lines of a program are drawn from.
USUAL = (VALUES[0], VALUES[4], VALUES[8], VALUES[11], VALUES[12])
WRITES = (
    "{x}.mul_(1.5)",
    "{x}.view(-1)[:3] = 0.5",
    "{m}.mul_(1.5)",
    "{m}.view(-1).add_(0.5)",
    "x = {x}; x += {z}",
)


def program(seed):
    choose = random.Random(seed)
    lines = [
        "def program(x0, x1, m0, m1, w):",
        "xs, ms = [x0 * 1.5, x1 * 1.5], [m0 * 1.5, m1 * 1.5]",
    ]
    count = 2
    for _ in range(choose.randint(4, 14)):
        names = {name: f"xs[{choose.randrange(count)}]" for name in "xz"}
        names |= {name: f"ms[{choose.randrange(2)}]" for name in "mn"}
        if choose.random() < 0.12:
            lines.append(choose.choice(WRITES).format(**names))
        else:
            # x is mostly the latest tensor, so that the operations form chains.
            if choose.random() < 0.7:
                names["x"] = f"xs[{count - 1}]"
            values = VALUES if choose.random() < 0.6 else USUAL
            lines.append(f"xs.append({choose.choice(values).format(**names)})")
            count += 1
    return "\n    ".join([*lines, f"return xs[-1], xs[-2], xs[{choose.randrange(count)}]"])


@pytest.mark.parametrize("with_gradients", [False, True])
def test_random_programs(monkeypatch, with_gradients):
    monkeypatch.setattr(rules, "DEVICES", {"cpu", "cuda"})
    rows: list[graph_pass.Row] = []

    def backend(graph_module, example_inputs):
        rows.extend(graph_pass.run(graph_module, graph_pass.Settings(with_inductor=False)))
        graph_module.graph.lint()
        return graph_module.forward

    def step(function, args):
        args = [arg.clone().requires_grad_(with_gradients) for arg in args]
        outputs = function(*args)
        if not with_gradients:
            return outputs
        loss = sum((out * torch.linspace(-1, 2, D)).square().mean() for out in outputs)
        return (*outputs, *torch.autograd.grad(loss, args, allow_unused=True))

    compared = 0
    for seed in range(PROGRAMS):
        source = program(seed + PROGRAMS * with_gradients)
        namespace: dict[str, Any] = {"torch": torch, "F": F}
        exec(source, namespace)
        torch.manual_seed(seed)
        shapes = ((2, 3, D), (2, 3, D), (2, 1, D), (2, 1, D), (D,))
        args = [torch.randn(shape) for shape in shapes]
        try:
            expected = step(namespace["program"], args)
        except RuntimeError:  # the program writes into a tensor that PyTorch's own backward reads
            continue
        torch._dynamo.reset()
        found = step(torch.compile(namespace["program"], backend=backend), args)
        compared += 1
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            if other is not None:
                assert one.stride() == other.stride(), source
                scale = other.abs().max().clamp(min=1)
                torch.testing.assert_close(
                    one / scale, other / scale, rtol=1e-3, atol=1e-3, msg=source
                )
    assert compared > PROGRAMS / 2
    assert not any(row.error for row in rows)
    fused = {name for row in rows for name in row.fused}
    assert fused >= {"residual", "gate", "scale", "activation"}

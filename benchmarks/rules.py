# SPDX-License-Identifier: Apache-2.0
"""The times behind the rules of fused_layernorm/compile/rules.py: `python -m benchmarks.rules`.

For each shape and each surrounding of a norm (`SURROUNDINGS`) it prints the device time of a
compiled training step (forward and backward) in three variants: stock; with this package's forward
and backward; with Inductor's forward and this package's backward. The variants take turns; each
time is the median of the rounds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import timing
from fused_layernorm.compile import rules
from fused_layernorm.compile.backend import backend

# rows x columns, of some 100 MB in bfloat16: more than L2 holds.
SHAPES = ((524288, 96), (262144, 192), (131072, 384), (65536, 768), (49152, 1024), (49152, 1152),
          (40960, 1280), (24576, 2048), (16384, 3072), (12288, 4096), (8192, 5120),
          (6144, 8192))  # fmt: skip
VARIANTS = ("stock", "kernel", "inductor")
Tensors = dict[str, Tensor]


def norm(x: Tensor, t: Tensors) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), t["weight"], t["bias"])


def modulated(x: Tensor, t: Tensors) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],)) * (1 + t["scale"]) + t["shift"]


def rms(x: Tensor, t: Tensors) -> Tensor:
    """RMSNorm as Llama's class writes it."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return t["weight"] * wide.to(x.dtype)


def of_sum(total: Tensor, normed: Callable[[Tensor, Tensors], Tensor], t: Tensors) -> Any:
    return normed(total, t), total


# The norm with the operations before and behind it.
SURROUNDINGS: dict[str, Callable[[Tensors], Any]] = {
    "alone": lambda t: norm(t["x"], t),
    "GELU before": lambda t: norm(F.gelu(t["x"]), t),
    "tanh behind": lambda t: torch.tanh(norm(t["x"], t)),
    "GELU behind": lambda t: F.gelu(norm(t["x"], t)),
    "residual": lambda t: of_sum(t["residual"] + t["x"], norm, t),
    "dropout, residual": lambda t: of_sum(t["residual"] + F.dropout(t["x"], 0.1), norm, t),
    "modulated": lambda t: modulated(t["x"], t),
    "gated, modulated": lambda t: of_sum(t["residual"] + t["gate"] * t["x"], modulated, t),
    "RMSNorm": lambda t: rms(t["x"], t),
    "RMSNorm, residual": lambda t: of_sum(t["residual"] + t["x"], rms, t),
}


def tensors(rows: int, cols: int, dtype: torch.dtype, samples: int = 8) -> Tensors:
    """The operands, each sample with its own modulation."""
    shapes = {"x": (samples, rows // samples, cols), "gate": (samples, 1, cols), "weight": (cols,)}
    alike = {"residual": "x", "shift": "gate", "scale": "gate", "bias": "weight"}
    return {name: torch.randn(shapes[alike.get(name, name)], device=timing.DEVICE).to(dtype)
            .requires_grad_() for name in (*shapes, *alike)}  # fmt: skip


def compiled(function: Callable[..., Any], variant: str) -> Callable[..., Any]:
    """The function as a variant compiles it; it compiles at its first call."""
    if variant == "stock":
        return torch.compile(function, fullgraph=True)

    def by_rule(graph_module: Any, example_inputs: Any) -> Any:
        forced = rules.Rule(rules.Choice[variant.upper()], "forced")
        with mock.patch.object(rules, "RULES", (forced,)):
            return backend(graph_module, example_inputs)

    return torch.compile(function, fullgraph=True, backend=by_rule)


def step(run: Callable[..., Any], t: Tensors) -> None:
    """Forward and backward, with one gradient for every output."""
    outputs = run(t)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = [t["residual"].detach() for _ in outputs]
    torch.autograd.grad(outputs, list(t.values()), grads, allow_unused=True)


def measure(rows: int, cols: int, name: str, dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """Device microseconds of a step, by variant."""
    torch._dynamo.reset()
    t = tensors(rows, cols, dtype)
    runs = {variant: compiled(SURROUNDINGS[name], variant) for variant in VARIANTS}
    for run in runs.values():
        step(run, t)
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for variant in timing.turns(VARIANTS, rounds):
        kernels = timing.kernels_of(lambda run=runs[variant]: step(run, t))  # type: ignore[misc]
        times[variant].append(sum(kernel.us for kernel in kernels))
    return {variant: statistics.median(found) for variant, found in times.items()}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cols", type=int, nargs="*", help="of SHAPES, those of these columns")
    parser.add_argument("--surroundings", nargs="*", choices=list(SURROUNDINGS))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(argv)
    print(f"{'rows x cols':>14}  {'surroundings':<18}" + "".join(f"{v:>10}" for v in VARIANTS))
    for rows, cols in SHAPES:
        for name in options.surroundings or SURROUNDINGS:
            if not options.cols or cols in options.cols:
                times = measure(rows, cols, name, getattr(torch, options.dtype), options.rounds)
                line = "".join(f"{times[variant]:>10.1f}" for variant in VARIANTS)
                print(f"{rows:>8} x {cols:<5}  {name:<18}{line}", flush=True)


if __name__ == "__main__":
    main()

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

from fused_layernorm.compile import rules
from fused_layernorm.compile.backend import backend

from . import timing

# rows x columns, of some 100 MB in bfloat16: more than L2 holds.
SHAPES = ((524288, 96), (262144, 192), (131072, 384), (65536, 768), (49152, 1024), (49152, 1152),
          (40960, 1280), (24576, 2048), (16384, 3072), (12288, 4096), (8192, 5120),
          (6144, 8192))  # fmt: skip
VARIANTS = ("stock", "kernel", "inductor")


def _norm(x: Tensor, t: dict[str, Tensor]) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), t["weight"], t["bias"])


def _modulated(x: Tensor, t: dict[str, Tensor]) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],)) * (1 + t["scale"]) + t["shift"]


def _gated(t: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    h = t["residual"] + t["gate"] * t["x"]
    return _modulated(h, t), h


def _residual(t: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    h = t["residual"] + t["x"]
    return _norm(h, t), h


def _rms(x: Tensor, t: dict[str, Tensor]) -> Tensor:
    """RMSNorm as Llama's class writes it."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return t["weight"] * wide.to(x.dtype)


def _rms_residual(t: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    h = t["residual"] + t["x"]
    return _rms(h, t), h


# The norm with the operations before and behind it.
SURROUNDINGS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "alone": lambda t: _norm(t["x"], t),
    "GELU before": lambda t: _norm(F.gelu(t["x"]), t),
    "tanh behind": lambda t: torch.tanh(_norm(t["x"], t)),
    "GELU behind": lambda t: F.gelu(_norm(t["x"], t)),
    "residual": _residual,
    "dropout, residual": lambda t: _residual({**t, "x": F.dropout(t["x"], 0.1)}),
    "modulated": lambda t: _modulated(t["x"], t),
    "gated, modulated": _gated,
    "RMSNorm": lambda t: _rms(t["x"], t),
    "RMSNorm, residual": _rms_residual,
}


def tensors(rows: int, cols: int, dtype: torch.dtype, samples: int = 8) -> dict[str, Tensor]:
    """The operands, each sample with its own modulation."""

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, device=timing.DEVICE).to(dtype).requires_grad_()

    found = {name: make(samples, rows // samples, cols) for name in ("x", "residual")}
    found |= {name: make(samples, 1, cols) for name in ("gate", "shift", "scale")}
    return found | {name: make(cols) for name in ("weight", "bias")}


def compiled(function: Callable[..., Any], variant: str) -> Callable[..., Any]:
    """The function as a variant compiles it; it compiles at its first call."""
    if variant == "stock":
        return torch.compile(function, fullgraph=True)

    def by_rule(graph_module: Any, example_inputs: Any) -> Any:
        forced = rules.Rule(rules.Choice[variant.upper()], "forced")
        with mock.patch.object(rules, "RULES", (forced,)):
            return backend(graph_module, example_inputs)

    return torch.compile(function, fullgraph=True, backend=by_rule)


def step(run: Callable[..., Any], t: dict[str, Tensor]) -> Callable[[], None]:
    """Forward and backward, with one gradient for every output."""
    outputs = run(t)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = [torch.randn_like(out) for out in outputs]
    leaves = [tensor for tensor in t.values() if tensor.requires_grad]

    def call() -> None:
        outputs = run(t)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.grad(outputs, leaves, grads, allow_unused=True)

    return call


def measure(rows: int, cols: int, name: str, dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """Device microseconds of a step, by variant."""
    torch._dynamo.reset()
    t = tensors(rows, cols, dtype)
    calls = {v: step(compiled(SURROUNDINGS[name], v), t) for v in VARIANTS}
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for variant in timing.turns(VARIANTS, rounds):
        times[variant].append(sum(kernel.us for kernel in timing.kernels_of(calls[variant])))
    return {variant: statistics.median(found) for variant, found in times.items()}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cols", type=int, nargs="*", help="of SHAPES, those of these columns")
    parser.add_argument("--surroundings", nargs="*", choices=list(SURROUNDINGS))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(argv)
    dtype = getattr(torch, options.dtype)
    print(f"{'rows x cols':>14}  {'surroundings':<18}" + "".join(f"{v:>10}" for v in VARIANTS))
    for rows, cols in SHAPES:
        if options.cols and cols not in options.cols:
            continue
        for name in options.surroundings or SURROUNDINGS:
            times = measure(rows, cols, name, dtype, options.rounds)
            line = "".join(f"{times[variant]:>10.1f}" for variant in VARIANTS)
            print(f"{rows:>8} x {cols:<5}  {name:<18}{line}", flush=True)


if __name__ == "__main__":
    main()

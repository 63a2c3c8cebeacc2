# SPDX-License-Identifier: Apache-2.0
"""The times behind the rules of fused_layernorm/compile/rules.py: `python -m benchmarks.rules`.

For each shape and each surrounding of a norm (`SURROUNDINGS`) it prints the device time of a
compiled training step (forward and backward) in three variants: stock; with this package's forward
and backward; with Inductor's forward and this package's backward. The variants take turns; each
time is the median of the rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import results, timing
from benchmarks.cases import Case, parse_case
from benchmarks.ours import make_inputs
from benchmarks.providers import Backward
from fused_layernorm.compile import rules
from fused_layernorm.compile.backend import backend

# rows x columns, of some 100 MB in bfloat16: more than L2 holds.
SHAPES = ((524288, 96), (262144, 192), (131072, 384), (65536, 768), (49152, 1024), (49152, 1152),
          (40960, 1280), (24576, 2048), (16384, 3072), (12288, 4096), (8192, 5120),
          (6144, 8192))  # fmt: skip
VARIANTS = ("stock", "kernel", "inductor")
# A family of operators as models write it, what is done before it with x, and with y behind it.
Function = Callable[[Tensor], Tensor]
SURROUNDINGS: dict[str, tuple[str, Function | None, Function | None]] = {
    "alone": ("", None, None),
    "GELU before": ("", F.gelu, None),
    "tanh behind": ("", None, torch.tanh),
    "GELU behind": ("", None, F.gelu),
    "residual": ("add_", None, None),
    "dropout, residual": ("add_", lambda x: F.dropout(x, 0.1), None),
    "modulated": ("ada_", None, None),
    "gated, modulated": ("add_ada_", None, None),
    "RMSNorm": ("rms_", None, None),
    "RMSNorm, residual": ("add_rms_", None, None),
}


def case_of(rows: int, cols: int, name: str, dtype: str, samples: int = 8) -> Case:
    """The backward case; of a modulated norm each sample has its own modulation."""
    family = SURROUNDINGS[name][0]
    size = f"{samples}x{rows // samples}x{cols}" if "ada" in family else f"{rows}x{cols}"
    return parse_case(f"{size} {dtype} {family}backward")


def compiled(case: Case, name: str, variant: str) -> Callable[..., Any]:
    """The norm and its surroundings as a variant compiles them, at the first call."""
    _, before, behind = SURROUNDINGS[name]

    def function(t: dict[str, Tensor]) -> Any:
        y = case.family.stock(case, {**t, "x": before(t["x"])} if before else t)
        return behind(y) if behind else y

    def by_rule(graph_module: Any, example_inputs: Any) -> Any:
        forced = rules.Rule(rules.Choice[variant.upper()], "forced")
        with mock.patch.object(rules, "RULES", (forced,)):
            return backend(graph_module, example_inputs)

    how: Any = "inductor" if variant == "stock" else by_rule
    return torch.compile(function, fullgraph=True, backend=how)


def measure(rows: int, cols: int, name: str) -> dict[str, float]:
    """Device microseconds of a step, by variant."""
    torch._dynamo.reset()
    case = case_of(rows, cols, name, "bfloat16")
    t = make_inputs(case, limit=1)[0]
    runs = {variant: compiled(case, name, variant) for variant in VARIANTS}

    def step(variant: str) -> float:
        kernels = timing.kernels_of(Backward(runs[variant], case, t))  # forward, too
        return sum(kernel.us for kernel in kernels)

    times = timing.in_turns(VARIANTS, 10, step)  # the first round compiles
    return {variant: statistics.median(found[1:]) for variant, found in times.items()}


def main(argv: list[str] | None = None) -> None:
    parser = results.parser("rules", __doc__)
    parser.add_argument("--cols", type=int, nargs="*", help="of SHAPES, those of these columns")
    parser.add_argument("--surroundings", nargs="*", choices=list(SURROUNDINGS))
    options = parser.parse_args(argv)
    print(f"{'rows x cols':>14}  {'surroundings':<18}" + "".join(f"{v:>10}" for v in VARIANTS))
    for rows, cols in SHAPES:
        for name in options.surroundings or SURROUNDINGS:
            if not options.cols or cols in options.cols:
                times = measure(rows, cols, name)
                line = "".join(f"{times[variant]:>10.1f}" for variant in VARIANTS)
                print(f"{rows:>8} x {cols:<5}  {name:<18}{line}", flush=True)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""KernelBench's chains with a norm: is a swap ever slower than without it, compiled or not?

    python -m benchmarks.kernelbench [--problems 2/27,3/] [--add]

Chains like those of its problems, at their shapes, in float32, forward, without TF32: the stock
chain, swapped with neighbours, compiled, and both, each problem in a process as in
benchmarks.models. A time is the median wall time of the rounds, in milliseconds. Shown are the
ratios swapped / stock and both / compiled, the largest first, SLOWER where one is above 1.02, and
DIFFERS where one is not the stock chain's result. A full run, or one with --add, stands under
"kernelbench" in the results file.
"""

from __future__ import annotations

import copy
import functools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import results, timing, turns
from benchmarks.ours import package, require_kernels

LIMIT = 1.02
TOLERANCE = 1e-4  # of the largest value, or of one, between a variant and the stock chain
ROUNDS = 21
VARIANTS = ("eager", "swapped", "compiled", "swapped_compiled")


class Chain(nn.Module):
    """Functions and modules, each a class with its arguments, one after the other; `is_residual`
    adds x to what they give."""

    def __init__(self, *steps: Any, is_residual: bool = False) -> None:
        super().__init__()
        self.steps = [step[0](*step[1:]) if isinstance(step, tuple) else step for step in steps]
        self.modules_ = nn.ModuleList(step for step in self.steps if isinstance(step, nn.Module))
        self.is_residual = is_residual

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for step in self.steps:
            y = step(y)
        return x + y if self.is_residual else y


class Parameter(nn.Module):
    """Adds a parameter, or multiplies by it."""

    def __init__(self, how: Callable[..., Tensor], *shape: int) -> None:
        super().__init__()
        self.how, self.value = how, nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.how(x, self.value)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


_residual = functools.partial(Chain, is_residual=True)


def _blocks(count: int, width: int, heads: int, causal: bool = False) -> list[Any]:
    """Transformer blocks with the norms in front."""
    return count * [
        (_residual, (nn.LayerNorm, width), (Attention, width, heads, causal)),
        (_residual, (nn.LayerNorm, width), (nn.Linear, width, 4 * width), F.gelu,
         (nn.Linear, 4 * width, width)),
    ]  # fmt: skip


_IMAGES, _ROWS, _VOLUMES = (112, 64, 512, 512), (1024, 8192), (128, 3, 16, 32, 32)
_LINEAR = (nn.Linear, 8192, 8192)
# Level and number: the shape of x, and the chain.
PROBLEMS: dict[str, tuple[tuple[int, ...], list[Any]]] = {
    "1/34": (_IMAGES, [(nn.InstanceNorm2d, 64)]),
    "2/3": ((32, 32, 16, 32, 32), [(nn.ConvTranspose3d, 32, 64, 3, 2, 1, 1),
                                   (Parameter, torch.add, 1), (nn.LayerNorm, 64),
                                   (nn.AvgPool3d, 2), F.gelu]),
    "2/11": ((512, 64, 32, 32), [(nn.ConvTranspose2d, 64, 128, 5, 1, 1), torch.tanh,
                                 (nn.MaxPool2d, 2), (nn.GroupNorm, 8, 128)]),
    "2/17": ((128, 64, 128, 128), [(nn.Conv2d, 64, 128, 3), (nn.InstanceNorm2d, 128),
                                   lambda x: x / 2.0]),
    "2/19": ((128, 64, 256, 256), [(nn.ConvTranspose2d, 64, 64, 3), F.gelu, (nn.GroupNorm, 8, 64)]),
    "1/35": (_IMAGES, [(nn.GroupNorm, 8, 64)]),
    "2/21": ((128, 8, 256, 256), [(nn.Conv2d, 8, 32, 3), (Parameter, torch.add, 32, 1, 1),
                                  (Parameter, torch.mul, 32, 1, 1), torch.sigmoid,
                                  (nn.GroupNorm, 8, 32)]),
    "2/23": ((128, 3, 24, 32, 32), [(nn.Conv3d, 3, 24, 3), (nn.GroupNorm, 8, 24),
                                    lambda x: x.mean((1, 2, 3, 4))]),
    "2/27": ((1024, 3, 16, 32, 32), [(nn.Conv3d, 3, 16, 4), F.hardswish, (nn.GroupNorm, 4, 16),
                                     lambda x: x.mean((2, 3, 4))]),
    "2/28": (_ROWS, [_LINEAR, lambda x: x[:, None, None], (nn.InstanceNorm2d, 1),
                     lambda x: x[:, 0, 0], (Parameter, torch.add, 8192),
                     (Parameter, torch.mul, 8192)]),
    "2/30": (_ROWS, [_LINEAR, (nn.GroupNorm, 16, 8192), lambda x: F.hardtanh(x, -2.0, 2.0)]),
    "2/34": ((32, 32, 16, 32, 32), [(nn.ConvTranspose3d, 32, 64, 4, 2, 1), (nn.LayerNorm, 64),
                                    F.gelu, lambda x: x * 2.0]),
    "2/37": ((32768, 1024), [(nn.Linear, 1024, 4096), F.silu, (Parameter, torch.add, 4096),
                             (nn.GroupNorm, 64, 4096)]),
    "2/60": (_VOLUMES, [(nn.ConvTranspose3d, 3, 16, 3, 2, 1), F.silu, (nn.GroupNorm, 4, 16),
                        F.hardswish]),
    "2/61": ((16, 64, 32, 32, 32), [(nn.ConvTranspose3d, 64, 128, 3, 1, 0, 0, 1, False),
                                    torch.relu, (nn.GroupNorm, 8, 128)]),
    "1/36": (_IMAGES, [lambda x: x / torch.sqrt(torch.mean(x**2, dim=1, keepdim=True) + 1e-5)]),
    "2/62": (_ROWS, [_LINEAR, (nn.GroupNorm, 512, 8192), F.leaky_relu, lambda x: x + x]),
    "2/75": (_ROWS, [_LINEAR, (nn.GroupNorm, 512, 8192), lambda x: x.amin(1, keepdim=True),
                     (Parameter, torch.add, 8192, 1, 1)]),
    "2/79": (_VOLUMES, [(nn.Conv3d, 3, 16, 3), (Parameter, torch.mul, 16, 1, 1, 1),
                        (nn.InstanceNorm3d, 16), lambda x: x.clamp(-1.0, 1.0),
                        (Parameter, torch.mul, 16, 1, 1, 1), lambda x: x.amax(1)]),
    "2/83": ((128, 3, 16, 64, 64), [(nn.Conv3d, 3, 16, 3), (nn.GroupNorm, 8, 16),
                                    lambda x: x.clamp(max=0.5), lambda x: x.clamp(0.0, 1.0)]),
    "2/85": ((128, 8, 128, 128), [(nn.Conv2d, 8, 64, 3), (nn.GroupNorm, 16, 64),
                                  (Parameter, torch.mul, 64, 1, 1), (nn.MaxPool2d, 4),
                                  lambda x: x.clamp(0.0, 1.0)]),
    "2/88": (_ROWS, [_LINEAR, (nn.GroupNorm, 256, 8192), F.silu, (Parameter, torch.mul, 8192),
                     F.silu]),
    "2/92": ((128, 8, 128, 128), [(nn.Conv2d, 8, 64, 3),
                                  (_residual, (nn.GroupNorm, 16, 64), torch.tanh, F.hardswish),
                                  lambda x: x.logsumexp(1, keepdim=True)]),
    "2/94": (_ROWS, [_LINEAR, (Parameter, torch.add, 8192), F.hardtanh, F.mish,
                     (nn.GroupNorm, 256, 8192)]),
    "1/40": ((16, 64, 256, 256), [(nn.LayerNorm, (64, 256, 256))]),
    "3/28": ((2, 197, 512), [*_blocks(6, 512, 8), (nn.LayerNorm, 512)]),
    "3/31": ((2, 16384, 128), [(_residual, (Attention, 128, 4)), (nn.LayerNorm, 128)]),
    "3/32": ((10, 3, 128, 128), [(nn.Conv2d, 3, 128, 4, 4), lambda x: x.flatten(2).transpose(1, 2),
                                 *_blocks(6, 128, 4), (nn.LayerNorm, 128)]),
    "3/44": ((128, 512, 768), _blocks(1, 768, 8, causal=True)),
}  # fmt: skip


@torch.no_grad()
def measure(name: str, rounds: int, lock: Path) -> dict[str, Any]:
    """A problem's row: the median time of each variant, and how far it is from the stock chain."""
    shape, steps = PROBLEMS[name]
    row: dict[str, Any] = {"problem": name, "shape": list(shape)}
    with turns.preparing(lock):
        torch.manual_seed(0)
        with torch.device(timing.DEVICE):
            chain, x = Chain(*steps), torch.rand(shape)
        swapped = package().swap_norms(copy.deepcopy(chain), neighbours=True)
        chains = (chain, swapped, torch.compile(chain), torch.compile(copy.deepcopy(swapped)))
        calls = dict(zip(VARIANTS, chains, strict=True))
        expected = timing.patiently(lambda: chain(x))
        most = expected.abs().max().clamp_min(1)  # a mean of normalized values is near zero
        for variant, call in calls.items():
            off = timing.patiently(lambda: call(x).sub_(expected).abs_().max())  # noqa: B023
            row[f"{variant}_error"] = round(float(off / most), 8)
        expected = None
        torch.cuda.empty_cache()  # others prepare beside it
    with turns.measuring(lock):
        runs = {variant: [functools.partial(call, x)] for variant, call in calls.items()}
        walls = timing.in_turns(runs, rounds, lambda one: timing.wall_time(runs[one], 3) / 1e3)
    for variant, times in walls.items():
        row |= timing.summary(variant, times, "ms")
    return row


def ratios_of(row: dict[str, Any]) -> tuple[float, float]:
    """Swapped over stock, and the same of both compiled."""
    return row["swapped_ms"] / row["eager_ms"], row["swapped_compiled_ms"] / row["compiled_ms"]


def text(rows: list[dict[str, Any]]) -> str:
    heads = ("stock", "swapped", "compiled", "both", "swapped", "both")
    lines = [f"{'problem':<10}{''.join(f'{head:>10}' for head in heads)}"]
    for row in sorted(rows, key=lambda row: -max(ratios_of(row))):
        cells = (*(row[f"{variant}_ms"] for variant in VARIANTS), *ratios_of(row))
        wrong = max(row[f"{variant}_error"] for variant in VARIANTS)
        notes = ["SLOWER" * (max(ratios_of(row)) > LIMIT),
                 f"DIFFERS by {wrong:.1e}" * (not wrong < TOLERANCE)]  # fmt: skip
        line = "".join(f"{cell:>10.3f}" for cell in cells)
        lines.append(f"{row['problem']:<10}{line} {', '.join(filter(None, notes))}".rstrip())
    means = map(statistics.geometric_mean, zip(*map(ratios_of, rows), strict=True))
    return "\n".join([*lines, "geometric means " + ", ".join(f"{mean:.3f}" for mean in means)])


def main(argv: list[str] | None = None) -> int:
    parser = results.parser("kernelbench", __doc__, seconds=540)
    parser.add_argument("--problems", help='names or beginnings: "2/3,3/"')
    turns.add_arguments(parser, jobs=6)
    arguments = parser.parse_args(argv)
    names = results.chosen("problem", arguments.problems, PROBLEMS)
    require_kernels()
    if arguments.lock is not None:  # the process of one problem
        torch.backends.cudnn.allow_tf32 = False
        results.write(arguments.output, {"rows": [measure(names[0], ROUNDS, arguments.lock)]})
        return 0
    calls = {name: ["--problems", name] for name in names}
    part = turns.collect("benchmarks.kernelbench", calls, arguments.jobs, arguments.budget_seconds)
    rows, skipped = part["rows"], part["skipped"]
    print("\n".join([text(rows) if rows else "", *(f"left out: {line}" for line in skipped)]))
    if arguments.add or not arguments.problems:
        results.update({"kernelbench": {**results.stamp(), **part}}, arguments.output)
    return 1 if skipped or any(max(ratios_of(row)) > LIMIT for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())

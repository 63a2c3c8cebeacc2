# SPDX-License-Identifier: Apache-2.0
"""Is it ever slower than eager? A coarse sweep over shapes, forward and backward.

    python -m benchmarks.sweep                  rows and columns, into the results file
    python -m benchmarks.sweep --compile 250    250 of its points against torch.compile
    python -m benchmarks.sweep --groups         300 odd shapes of group norms; prints them alone

Columns from 1 to 4200 in odd steps (and the usual sizes with their neighbours), rows from 1 to
100,000: LayerNorm in bfloat16 and float32, RMSNorm in bfloat16. Points with a ratio ours / eager
near 1 or above, and the 30 worst, are timed again, for longer and in several places of memory. Of
many points the first measurement has so few inputs that they stay in L2: a point that is slower
from memory alone, and faster by more than 10% from L2, is missed. The results file gets the slower
points, at least the worst ten.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import statistics
import time
from typing import Any

import torch

from benchmarks import providers, report, results, timing
from benchmarks.cases import Case, parse_case
from benchmarks.ours import make_inputs, require_kernels
from benchmarks.run import configure_compile, precompile

HEIGHTS = (1, 8, 64, 512, 4096, 32_768, 100_000)
WIDTHS = sorted(
    {*range(1, 4201, 71)}
    | {2, 3, 4, 8, 16, 31, 32, 33, 64, 65, 96, 127, 128, 192, 256, 320, 384, 512, 640, 768, 1023}
    | {1024, 1025, 1152, 1280, 1536, 2047, 2048, 2560, 3072, 4095, 4096, 4097}
)
OPS = tuple((f"{norm}{way}", dtype) for norm, way, dtype in (
    *itertools.product([""], report.WAYS, ("bfloat16", "float32")),
    *itertools.product(["rms_"], report.WAYS, ["bfloat16"])))  # fmt: skip
WORST = 10
NEAR = 0.9  # a point whose first ratio is above this is timed again
MANY_POINTS = 1000  # of more points, the first measurement has at most FEW_INPUTS inputs
FEW_INPUTS = 32
# The median over places in memory counts (8 x 384 float32 in three 1.53, 1.53 and 1.69 us).
PLACES = 5
PLACE_ELEMENTS = 1 << 20  # from one place to the next


def points() -> list[Case]:
    """All points in a fixed random order, so that a sweep cut short is still spread out."""
    cases = [Case(op, (rows, cols), dtype)
             for (op, dtype), rows, cols in itertools.product(OPS, HEIGHTS, WIDTHS)]  # fmt: skip
    random.Random(0).shuffle(cases)
    return cases


def group_points(count: int = 300, seed: int = 72) -> list[Case]:
    """Groups of odd shapes: channels and positions that are no multiple of 8, small tensors, one
    group, one position, in both layouts and both ways."""
    choice = random.Random(seed).choice
    cases: dict[str, Case] = {}
    while len(cases) < count:
        per_group = choice((1, 2, 3, 5, 6, 8, 12, 24, 30, 64))
        groups = choice((1, 1, 2, 3, 4, 5, 8, 16, 32))
        height, width = (choice((1, 2, 3, 5, 7, 8, 9, 14, 15, 31, 37, 56)) for _ in range(2))
        image = (choice((1, 2, 3, 5, 8, 32, 64)), groups * per_group, height, width)
        if per_group * height * width == 1 or math.prod(image) > 1 << 23:
            continue  # PyTorch refuses to normalize one value
        dtype = choice(("bfloat16", "bfloat16", "float32", "float16"))
        silu, order, way = (choice(two) for two in (("", "silu_"), ("", "nhwc_"), report.WAYS))
        size = f"{'x'.join(map(str, image))}/{groups}"
        case = parse_case(f"{size} {dtype} group_{silu}{order}{way}")
        cases[case.name] = case
    return [*cases.values()]


@torch.no_grad()
def measure(case: Case, other: str, most: int | None = None) -> dict[str, Any]:
    """The row of one point: our time, that of the other provider, and their ratio; with at most
    `most` inputs if that is given, else for long and in several places of memory."""
    options: dict[str, Any] = {"seconds": 0.01, "min_replays": 10, "max_replays": 30}
    if most is not None:
        options = {"seconds": 0.003, "min_replays": 5, "max_replays": 12}
    times: dict[str, list[float]] = {"ours": [], other: []}
    for place in range(PLACES if most is None else 1):
        # With more memory taken, inputs and outputs lie elsewhere.
        taken = torch.empty(PLACE_ELEMENTS * place, device=timing.DEVICE)
        inputs = make_inputs(case, most and timing.input_count(case.bytes, most))
        for name, found in times.items():
            calls = providers.PROVIDERS[name](case, inputs)
            assert calls is not None
            found.append(timing.graph_time(calls, case.bytes, 2e-4, FEW_INPUTS, **options))
        del taken
    row = results.row_of(case)
    row |= {f"{name}_us": round(statistics.median(found), 3) for name, found in times.items()}
    return {**row, "ratio": round(row["ours_us"] / row[f"{other}_us"], 3)}


def sweep(cases: list[Case], seconds: float, other: str = "eager") -> dict[str, Any]:
    """The part of the results file: how many points were timed and were slower, and the worst."""
    start = time.monotonic()
    most = FEW_INPUTS if len(cases) > MANY_POINTS else timing.MAX_INPUTS
    first: list[tuple[float, Case]] = []
    for number, case in enumerate(cases):
        spent = time.monotonic() - start
        if spent > 0.9 * seconds:
            break
        if number % 400 == 0:
            print(f"{number} of {len(cases)} points, {spent:.0f} s", flush=True)
        first.append((measure(case, other, most)["ratio"], case))
    first.sort(key=lambda pair: -pair[0])
    again = [measure(case, other) for number, (ratio, case) in enumerate(first)
             if ratio > NEAR or number < 3 * WORST]  # fmt: skip
    again.sort(key=lambda row: -row["ratio"])
    slower = sum(row["ratio"] > 1 for row in again)
    return {**results.stamp(), "against": other, "points": len(first),
            "left_out": len(cases) - len(first), "timed_again": len(again), "slower": slower,
            "worst": again[: max(WORST, slower)]}  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = results.parser("sweep", __doc__, seconds=230)
    parser.add_argument("--compile", type=int, metavar="POINTS", help="against torch.compile")
    parser.add_argument("--groups", action="store_true", help="odd shapes of group norms")
    arguments = parser.parse_args(argv)
    require_kernels()

    start = time.monotonic()
    cases, other = group_points() if arguments.groups else points(), "eager"
    if arguments.compile:
        cases, other = cases[: arguments.compile], "compile"
        configure_compile()
        precompile(cases, min(14, os.cpu_count() or 1), arguments.budget_seconds / 2)
    left = arguments.budget_seconds - (time.monotonic() - start)
    part = sweep(cases, left, other)
    print(f"{part['left_out']} points left out for time, {part['timed_again']} timed again")
    if arguments.groups:
        for row in part["worst"]:
            print(f"{row['ratio']:.3f} {results.case_of(row).name}: {row['ours_us']:.2f} us, "
                  f"{other} {row[f'{other}_us']:.2f}")  # fmt: skip
        return
    print("\n".join(report.swept(part, other)))
    name = "sweep_compile" if arguments.compile else "sweep"
    results.update({name: part}, arguments.output)


if __name__ == "__main__":
    main()

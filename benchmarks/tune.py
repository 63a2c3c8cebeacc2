# SPDX-License-Identifier: Apache-2.0
"""Times this package alone under forced plans, for tuning.

    python -m benchmarks.tune "8192x12288 bf16 gelu_forward | vecs=5 | vecs=8" \\
                              "32768x4096 bf16 backward | teams=1 | bulk=0 | stages=3"
    python -m benchmarks.tune "2048x2048 bf16 backward | strategy=* vecs=* teams=*"

Each argument is a case, "ROWSxCOLS DTYPE OP", and after bars the options to force one after the
other (parts of a plan, in the words of `force_plan` in csrc/bindings/force_plan.h). The plan's own
choice is timed first, and no plan twice. A * stands for every value that its part can have, and for
none; the fastest plans are named at the end. --list prints the plans alone, also without a GPU.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks import results, timing
from benchmarks.cases import Case, parse_case
from benchmarks.ours import make_inputs, ours, package, require_kernels

PLANNED = "(plan)"  # the label of the plan's own choice
FASTEST = 8  # plans that are named
HOPPER = {"capability": 90, "sms": 132, "shared_memory": 232448, "l2_bytes": 50 << 20}
# What a * stands for. Numbers go up to the kernels' limits or beyond them. Of blocks_per_row: for
# each number of rows that run at once, the most blocks that each row can have.
VALUES: dict[str, tuple[str | int, ...]] = {
    "strategy": ("warp", "block", "ring", "split", "stream", "few_rows", "group", "rows"),
    "vecs": tuple(range(1, 33)), "teams": tuple(range(1, 17)), "stages": tuple(range(1, 9)),
    "bulk": (0, 1), "long": (0, 1), "lag": (1, 2, 3),
    "blocks_per_row": tuple(sorted({132 // (132 // blocks) for blocks in range(1, 133)})),
}  # fmt: skip


def tune(case: Case, forces: list[str], seconds: float) -> None:
    """Times one case as planned and under each of the options, and prints a line for each."""
    force = torch.ops.fused_layernorm._force
    copy_us = timing.copy_time(case.rows, case.cols, case.torch_dtype, seconds=seconds)
    target = "" if case.target is None else f", target {case.target:.2f}"
    print(f"\n{case.name}: copy {copy_us:.1f} us{target}", flush=True)
    inputs = make_inputs(case)
    calls, times = [ours(case, one) for one in inputs], []
    for label, _ in options_of(case, forces):
        try:
            force(None if label == PLANNED else label)
            us = timing.graph_time(calls, case.bytes, seconds=seconds)
            said = f"{us:9.2f} us  ratio {case.ratio(us, copy_us):.3f}"
            times.append((us, label))
        except (RuntimeError, ValueError) as problem:
            said = f"failed: {timing.sentence(problem)}"
        finally:
            force(None)
        print(f"  {label:<48} {said}", flush=True)
    if any("*" in options for options in forces):
        fastest = "; ".join(f"{us:.2f} us {label}" for us, label in sorted(times)[:FASTEST])
        print(f"  the fastest: {fastest}", flush=True)


def options_of(case: Case, forces: list[str]) -> Iterator[tuple[str, str]]:
    """The options to time, each with its plan: the plan's own choice first, and no plan twice.
    Prints why options of `forces` without a * are left out."""
    names: dict[str, str] = {}
    for forced in ["", *forces]:
        for options in expanded(forced):
            label = options or PLANNED
            try:
                plan = plan_of(case, options or None)
                said = f"is {names[plan]}" if plan in names else ""
            except (RuntimeError, ValueError) as problem:
                said = f"failed: {str(problem).splitlines()[0]}"
            if not said:
                names[plan] = label
                yield label, plan
            elif "*" not in forced:
                print(f"  {label:<48} {said}", flush=True)


def expanded(options: str) -> Iterator[str]:
    """The options with values, and with nothing, in the place of every *."""
    choices = []
    for word in options.split():
        part, _, value = word.partition("=")
        if value == "*" and part not in VALUES:
            raise ValueError(f"expected one of {', '.join(VALUES)} before =*, got {part!r}")
        choices.append([f"{part}={one}" for one in VALUES[part]] + [""] if value == "*" else [word])
    for words in itertools.product(*choices):
        yield " ".join(filter(None, words))


def plan_of(case: Case, options: str | None) -> str:
    """The plan of a case under these options, on this device or, without one, on an H100; raises
    ValueError if there is none."""
    problem: dict[str, Any] = {
        "backward": case.backward, "residual": case.family.residual,
        "y_dtype": case.torch_out_dtype, "weight_dtype": case.torch_weight_dtype,
        "has_epilogue": case.family.activation is not None or case.family.scale != 1.0, **HOPPER,
    }  # fmt: skip
    if torch.cuda.is_available():
        device: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
        problem |= {"capability": 10 * device.major + device.minor,
                    "sms": device.multi_processor_count, "l2_bytes": device.L2_cache_size,
                    "shared_memory": device.shared_memory_per_block_optin}  # fmt: skip
    # Without a plan for both, the norm and its gate have a launch each.
    gates = [True, False] if case.modulation and case.backward and case.family.residual else [False]
    if case.modulation:
        *groups, _ = case.modulation_shape
        problem["weight_dtype"] = case.torch_modulation_dtype
        problem["group_rows"] = case.rows // math.prod(groups)
    ops = torch.ops.fused_layernorm
    ops._force(options)
    try:
        plans = (ops._plan(case.rows, case.cols, case.torch_dtype, **problem, gated=gated)
                 for gated in gates)  # fmt: skip
        return next((plan for plan in plans if plan != "null"), "null")
    finally:
        ops._force(None)


def main(argv: list[str] | None = None) -> None:
    parser = results.parser("tune", __doc__)
    parser.add_argument("lines", nargs="*", metavar="CASE | FORCE | ...")
    parser.add_argument("--list", action="store_true", help="print the plans, time nothing")
    arguments = parser.parse_args(argv)
    package() if arguments.list else require_kernels()  # both register the operators
    for line in arguments.lines:
        text, *forces = (part.strip() for part in line.split("|"))
        case = parse_case(text)
        if arguments.list:
            print(f"\n{case.name}")
            for label, plan in options_of(case, forces):
                print(f"  {label:<48} {plan}")
        else:
            tune(case, forces, 0.03)  # of device time
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

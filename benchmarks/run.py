# SPDX-License-Identifier: Apache-2.0
"""The benchmark: ours, PyTorch eager and torch.compile at every case, on one CUDA device.

    python -m benchmarks.run                              the full run, writes the results file
    python -m benchmarks.run --quick                      ours and copy speed only, under a minute
    python -m benchmarks.run --ops backward --rows 32768x --providers ours,eager

A full run times every case with every provider, the call overhead and a training step of the
module, prints the table and writes benchmarks/results/<device>.json. With two GPUs one times
LayerNorm, another everything else. A run of a part writes a file only where --output names one:
numbers of two runs never stand in one table.
"""

from __future__ import annotations

import argparse
import functools
import gc
import multiprocessing
import os
import sys
import time
from typing import Any
from unittest import mock

import torch

from benchmarks import overhead, providers, report, results, timing, turns
from benchmarks.cases import CASES, Case
from benchmarks.families import OPS
from benchmarks.ours import make_inputs, require_kernels
from benchmarks.timing import sentence

say = functools.partial(print, flush=True)


def configure_compile() -> None:
    """Makes all processes compile alike, and each choose the fastest configurations by itself:
    the helpers that compile ahead disturb each other, so their choices must not reach the run
    through the cache."""
    import torch._functorch.config
    import torch._inductor.config

    torch._inductor.config.autotune_local_cache = False
    torch._functorch.config.donated_buffer = False  # a backward pass is timed many times


def precompile(cases: list[Case], jobs: int, seconds: float) -> None:
    """Fills torch.compile's cache on disk from several processes, only to make the run faster."""
    say(f"compiling {len(cases)} functions in {jobs} processes")
    spawn = multiprocessing.get_context("spawn")
    with (mock.patch.dict(os.environ, TORCHINDUCTOR_COMPILE_THREADS="1"),
          spawn.Pool(min(jobs, len(cases)), configure_compile) as pool):  # fmt: skip
        pool.map_async(precompile_case, cases, chunksize=1).wait(seconds)


@torch.no_grad()
def precompile_case(case: Case) -> None:
    """Runs in a helper process: compiles a case and calls it once."""
    try:
        for call in providers.compile_calls(case, make_inputs(case, limit=1)):
            call()
    except Exception as problem:  # the run itself will meet it and report it
        print(f"{case.name}: {type(problem).__name__}", file=sys.stderr)
    torch.cuda.empty_cache()


@torch.no_grad()
def run_cases(
    cases: list[Case], names: list[str], end: float, seconds: float
) -> tuple[list[dict[str, Any]], list[str]]:
    """Times every case, provider after provider, until `end`: (rows, what was skipped and why)."""
    rows = [results.row_of(case) for case in cases]
    skipped: list[str] = []
    copy_time = functools.cache(timing.copy_time)
    for name in names:
        say(f"timing {name}, {end - time.monotonic():.0f} s left")
        before = len(skipped)
        for number, (case, row) in enumerate(zip(cases, rows, strict=True)):
            if time.monotonic() > end:
                skipped.append(f"{name}: {len(cases) - number} cases from {case.name} on: no time")
                break
            if name == names[0]:
                copy_us = copy_time(case.rows, case.cols, case.torch_dtype, seconds=seconds)
                row["copy_us"] = round(copy_us, 3)
            try:
                calls = providers.PROVIDERS[name](case, make_inputs(case))
                us: Any = calls and timing.graph_time(calls, case.bytes, seconds=seconds)
            except Exception as problem:
                skipped.append(f"{name}: {case.name}: {sentence(problem)}")
                if name != "ours":
                    row[f"{name}_us"] = None  # it was tried, and failed
            else:
                if us is not None:  # else it has no such operator
                    row[f"{name}_us"] = round(us, 3)
            if case.tensor_bytes > 1 << 28:
                gc.collect()
                torch.cuda.empty_cache()
        if len(skipped) > before:
            say(f"  skipped {len(skipped) - before}, see the end")
    return rows, skipped


def on_two_gpus(seconds: float) -> dict[str, Any]:
    """The rows of a full run, and what was skipped, of a process for each half of the operators."""
    halves = [",".join(op for op in OPS if (op in report.WAYS) is first) for first in (True, False)]
    calls = {half: ["--ops", half, "--budget-seconds", str(seconds)] for half in halves}
    found = turns.collect("benchmarks.run", calls, 2, seconds + 30)
    if len(found["rows"]) < len(CASES):
        raise SystemExit("\n".join(found["skipped"]))
    return {**found, "skipped": [*dict.fromkeys(found["skipped"])]}


def main(argv: list[str] | None = None) -> None:
    parser = results.parser("run", __doc__, seconds=440)
    parser.add_argument("--providers", help="comma-separated; all that are installed if not given")
    parser.add_argument("--ops", help=f"comma-separated: {', '.join(OPS)}")
    parser.add_argument("--rows", help='part of a case\'s name, e.g. "32768x1024" or "float32"')
    parser.add_argument("--lock", help=argparse.SUPPRESS)  # of turns.collect; a GPU has one half
    parser.add_argument("--quick", action="store_true", help="ours only, shorter measurements")
    parser.add_argument("--jobs", type=int, default=min(14, os.cpu_count() or 1),
                        help="processes that compile ahead; 0 for none")  # fmt: skip
    arguments = parser.parse_args(argv)

    built = require_kernels()
    known, problems = providers.available()
    chosen = arguments.providers or ("ours" if arguments.quick else None)
    names = results.chosen("provider that is installed", chosen, known)
    ops = results.chosen("operator", arguments.ops, OPS)
    cases = [case for case in CASES if case.op in ops and (arguments.rows or "") in case.name]
    full = not (arguments.providers or arguments.quick or arguments.ops or arguments.rows)
    end = time.monotonic() + arguments.budget_seconds
    seconds = 0.01 if arguments.quick else 0.03

    measured: dict[str, Any] = {**results.machine(), **results.stamp()}
    say(f"{measured['device']}, driver {measured['driver']}, torch {measured['torch']}, {built}")
    if full and torch.cuda.device_count() > 1:
        measured |= on_two_gpus(arguments.budget_seconds)
    else:
        if "compile" in names:
            configure_compile()
            if arguments.jobs > 1:
                precompile(cases, arguments.jobs, arguments.budget_seconds / 3)
        timing.warm_up_device()
        measured["rows"], skipped = run_cases(cases, names, end, seconds)
        measured["skipped"] = [*problems, *skipped]
    if full and time.monotonic() < end:
        say("timing overhead")
        try:
            measured |= overhead.measure()
        except Exception as problem:
            measured["skipped"].append(f"overhead: {sentence(problem)}")

    say("\n" + summary(measured))
    if arguments.output or full:
        path = arguments.output or results.default_path(measured["device"])
        old = results.read(path)  # of which the parts stay that have a stamp of their own
        own = ("sweep", "sweep_compile", "models", "kernelbench", *overhead.PARTS)
        kept = {key: old[key] for key in own if key in old and key not in measured}
        results.write(path, {**measured, **kept})
        say(f"written: {path}")


def summary(measured: dict[str, Any]) -> str:
    """Everything a run measured, as text: the page's tables, and what misses its target."""
    verdicts = {(case := results.case_of(row)).name: results.verdict(case, row)
                for row in measured["rows"]}  # fmt: skip
    misses = [f"{name}: {said}" for name, said in verdicts.items() if said.startswith("MISS")]
    passed = sum(said == "PASS" for said in verdicts.values())
    return "\n".join([
        *report.cases(measured), *misses,
        f"{passed} of {len(verdicts)} rows pass, {len(misses)} miss",
        *(f"skipped {line}" for line in measured["skipped"]), "", *report.host(measured),
    ])  # fmt: skip


if __name__ == "__main__":
    main()

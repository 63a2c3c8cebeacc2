# SPDX-License-Identifier: Apache-2.0
"""The benchmark: ours, PyTorch eager and torch.compile at every case, on one CUDA device.

    python -m benchmarks.run                              the full run, writes the results file
    python -m benchmarks.run --quick                      ours and copy speed only, under a minute
    python -m benchmarks.run --ops backward --rows 32768x --providers ours,eager

A full run times every case with every provider, the call overhead and a training step of the
module, prints the table, writes benchmarks/results/<device>.json and draws the README's picture. A
run of a part writes a file only where --output names one: numbers of two runs never stand in one
table.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import overhead, plot, providers, results, timing
from benchmarks.cases import CASES, HEAD_OPS, OPS, Case, parse_case
from benchmarks.ours import make_inputs, require_kernels, time_calls

PARTS = ("cases", "overhead")


class Clock:
    """The run's time budget."""

    def __init__(self, seconds: float) -> None:
        self.start = time.monotonic()
        self.seconds = seconds

    @property
    def spent(self) -> float:
        return time.monotonic() - self.start

    @property
    def left(self) -> float:
        return self.seconds - self.spent


def say(text: str) -> None:
    print(text, flush=True)


def select(ops: str | None, rows: str | None) -> list[Case]:
    """The cases of the named operators whose name has `rows` in it."""
    wanted = ops.split(",") if ops else [*OPS, *HEAD_OPS]
    for op in wanted:
        if op not in OPS + HEAD_OPS:
            raise SystemExit(f"unknown op {op!r}: known are {', '.join(OPS + HEAD_OPS)}")
    return [case for case in CASES if case.op in wanted and (not rows or rows in case.name)]


def configure_compile() -> None:
    """Makes all processes compile alike, and each choose the fastest configurations by itself.

    Inductor times a kernel's configurations on the device, where the helpers that compile ahead
    disturb each other. Their choices must therefore not reach the run through the cache.
    """
    import torch._inductor.config as config

    config.autotune_local_cache = False


def precompile(cases: list[Case], jobs: int, seconds: float) -> None:
    """Fills torch.compile's cache on disk from several processes, only to make the run faster."""
    say(f"compiling {len(cases)} functions in {jobs} processes")
    arguments = [sys.executable, "-m", "benchmarks.run", "--precompile"]
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    helpers = [
        subprocess.Popen(
            [*arguments, ",".join(case.text for case in cases[job::jobs])],
            cwd=results.ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        for job in range(min(jobs, len(cases)))
    ]
    deadline = time.monotonic() + seconds
    for helper in helpers:
        try:
            helper.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            helper.kill()
            helper.wait()


@torch.no_grad()
def precompile_cases(cases: list[Case]) -> None:
    """Runs in a helper process: compiles each case and calls it once."""
    configure_compile()
    for case in cases:
        try:
            for call in providers.compile_calls(case, make_inputs(case, limit=1)):
                call()
        except Exception as problem:  # the run itself will meet it and report it
            print(f"{case.name}: {type(problem).__name__}", file=sys.stderr)
        torch.cuda.empty_cache()


def sentence(problem: BaseException) -> str:
    """The first line of the problem's text. Raises the problem if it lost the CUDA context."""
    text = str(problem).strip() or type(problem).__name__
    if "CUDA error" in text or "device-side assert" in text:
        raise problem
    return text.splitlines()[0]


def time_case(case: Case, name: str, seconds: float) -> float | None:
    """Device microseconds of one provider's call; None where it has no such operator."""
    calls = providers.PROVIDERS[name](case, make_inputs(case))
    return None if calls is None else time_calls(case, calls, seconds=seconds)


@torch.no_grad()
def run_cases(
    cases: list[Case], names: list[str], clock: Clock, seconds: float
) -> tuple[list[dict[str, Any]], list[str]]:
    """Times every case, provider after provider: (rows, what was skipped and why)."""
    rows = [results.row_of(case) for case in cases]
    skipped: list[str] = []
    copies: dict[tuple[int, int, str], float] = {}
    for name in names:
        say(f"timing {name}, {clock.left:.0f} s left")
        before = len(skipped)
        for number, (case, row) in enumerate(zip(cases, rows, strict=True)):
            if clock.left < 0:
                skipped.append(f"{name}: {len(cases) - number} cases from {case.name} on: no time")
                break
            if name == names[0]:
                size = (case.rows, case.cols, case.dtype)
                if size not in copies:
                    copies[size] = timing.copy_time(
                        case.rows, case.cols, case.torch_dtype, seconds=seconds
                    )
                row["copy_us"] = round(copies[size], 3)
            try:
                us = time_case(case, name, seconds)
            except Exception as problem:
                skipped.append(f"{name}: {case.name}: {sentence(problem)}")
                if name != "ours":
                    row[f"{name}_us"] = None  # it was tried, and failed
            else:
                if us is not None:
                    row[f"{name}_us"] = round(us, 3)
            if case.tensor_bytes > 1 << 28:
                gc.collect()
                torch.cuda.empty_cache()
        if len(skipped) > before:
            say(f"  skipped {len(skipped) - before}, see the end")
    return rows, skipped


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--providers", help="comma-separated; all that are installed if not given")
    parser.add_argument("--ops", help=f"comma-separated: {', '.join(OPS + HEAD_OPS)}")
    parser.add_argument("--rows", help='part of a case\'s name, e.g. "32768x1024" or "float32"')
    parser.add_argument(
        "--no-compile", action="store_true", help="leave out torch.compile, whose rows take longest"
    )
    parser.add_argument("--parts", help=f"comma-separated: {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="ours only, shorter measurements")
    parser.add_argument("--budget-seconds", type=float, default=440, help="skip what is left then")
    parser.add_argument("--jobs", type=int, default=min(14, os.cpu_count() or 1),
                        help="processes that compile ahead; 0 for none")  # fmt: skip
    parser.add_argument("--output", type=Path, help="the results file")
    parser.add_argument("--precompile", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)

    if arguments.precompile:
        precompile_cases([parse_case(text) for text in arguments.precompile.split(",")])
        return
    built = require_kernels()
    known, problems = providers.available()
    names = known
    if arguments.quick:
        names = ["ours"]
    if arguments.providers:
        names = arguments.providers.split(",")
        for name in names:
            if name not in known:
                raise SystemExit(f"provider {name!r} is not known, not installed or broken")
    if arguments.no_compile:
        names = [name for name in names if name != "compile"]
    parts = arguments.parts.split(",") if arguments.parts else list(PARTS)
    cases = select(arguments.ops, arguments.rows)
    full = not (arguments.providers or arguments.no_compile or arguments.quick or arguments.ops
                or arguments.rows or arguments.parts)  # fmt: skip
    clock = Clock(arguments.budget_seconds)
    seconds = 0.01 if arguments.quick else 0.03

    report: dict[str, Any] = {**results.machine(), **results.stamp(), "rows": []}
    say(f"{report['device']}, driver {report['driver']}, torch {report['torch']}, {built}")
    if "cases" in parts:
        if "compile" in names:
            configure_compile()
            if arguments.jobs > 1:
                precompile(cases, arguments.jobs, clock.seconds / 3)
        timing.warm_up_device()
        report["rows"], report["skipped"] = run_cases(cases, names, clock, seconds)
    report["skipped"] = [*problems, *report.get("skipped", [])]
    if "overhead" in parts:
        if clock.left < 0:
            report["skipped"].append("overhead: no time")
        else:
            say(f"timing overhead, {clock.left:.0f} s left")
            try:
                report |= overhead.measure()
            except Exception as problem:
                report["skipped"].append(f"overhead: {sentence(problem)}")

    path = arguments.output or (results.default_path(report["device"]) if full else None)
    old = results.read(path) if path is not None else {}
    report["skipped"] += missing_peers(old, names)
    say("\n" + summary(report))
    say(f"\n{clock.spent:.0f} s")
    if path is not None:
        results.write(path, {**report, **kept(old, report)})
        say(f"written: {path}")
    if full and importlib.util.find_spec("matplotlib") is not None:
        plot.plot(report, plot.PICTURE)
        say(f"drawn: {plot.PICTURE}")


def kept(old: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    """The parts of the old results that this run did not measure, if they have a stamp."""
    names = ["sweep", "sweep_compile", "models"]
    if "overhead_stamp" in old:
        names += overhead.PARTS
    return {key: old[key] for key in names if key in old and key not in report}


def missing_peers(old: dict[str, Any], names: list[str]) -> list[str]:
    """A line for each provider that the results file has times of, but this run has not.

    The run replaces the file's rows, and with them that provider's column in the README.
    """
    timed = [name for name in providers.PROVIDERS
             if any(f"{name}_us" in row for row in old.get("rows", []))]  # fmt: skip
    return [
        f"{name}: not timed; the results of {old['date'][:10]}, which these replace, have it"
        for name in timed
        if name not in names
    ]


def summary(report: dict[str, Any]) -> str:
    """Everything a run measured, as text."""
    blocks = []
    rows = report["rows"]
    if rows:
        verdicts = [results.verdict(results.case_of(row), row) for row in rows]
        missed = sum(verdict.startswith("MISS") for verdict in verdicts)
        judged = sum(bool(verdict) for verdict in verdicts)
        blocks.append(results.table(rows) + f"\n{judged - missed} of {judged} rows pass")
        low = [
            row
            for row in rows
            if (floor := results.case_of(row).floor) is not None
            and "ours_us" in row
            and results.case_of(row).ratio(row["ours_us"], row["copy_us"]) < floor
        ]
        if low:
            names = "\n".join(f"  {results.case_of(row).name}" for row in low)
            blocks.append(f"below the floor for large tensors:\n{names}")
    if report.get("skipped"):
        blocks.append("skipped:\n" + "\n".join(f"  {line}" for line in report["skipped"]))
    if "call_overhead" in report:
        blocks.append(overhead.overhead_text(report["call_overhead"]))
    if "training_step" in report:
        blocks.append(overhead.steps_text(report["training_step"]))
    return "\n\n".join(blocks)


if __name__ == "__main__":
    main()

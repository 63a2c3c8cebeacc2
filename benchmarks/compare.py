# SPDX-License-Identifier: Apache-2.0
"""Two builds of the kernels side by side: is any case slower than it was?

    python -m benchmarks.compare --old OLD --new NEW [--sweep 200] [--seconds 480]

OLD and NEW are each a library (libfused_layernorm.so), a folder that has one, or a wheel. A process
for each loads it without the Python package and calls the raw operators. Both prepare the same case
from the same random numbers and are timed in turns, old new, new old, ... A case's ratio, new time
over old time, is the median over the rounds; one that looks slower is timed once more, for longer.

Every case of benchmarks/cases.py is compared, forward also with the statistics that training needs,
and --sweep adds so many points of the sweep, chosen at random. A case that fails in the old build,
which may lack the operator, is skipped. The exit status is 1 if a case is slower by more than 1%
and 0.1 us, if it fails in the new build alone, or if one was left out for time. $OUT/compare.json
holds all results. Comparing a build with itself shows the noise.

Both processes also sum up a result's bits, which leaves other data in L2, as the kernels of a model
do. What makes room first in L2 then takes some 5% longer than in the benchmark
(docs/tuning-log.md, "What holds everywhere").
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks import results, sweep, timing
from benchmarks.cases import CASES, Case
from benchmarks.ours import make_inputs, missing_operator, ours

SLOWER = 1.01  # a case counts as slower if its ratio is above this
SLOWER_US = 0.1  # and it takes more than this many microseconds longer
ROUNDS, AGAIN = 8, 20  # rounds of a case, and of its second measurement if it looked slower
SECONDS = 0.015  # device time of one measurement
ANSWER = 90.0  # seconds after which a process that does not answer is given up


@dataclasses.dataclass(frozen=True)
class Job:
    """One comparison: a case, and whether forward gives mean and rstd too."""

    case: Case
    statistics: bool = False

    @property
    def name(self) -> str:
        return self.case.name.replace("forward", "forward+stats" if self.statistics else "forward")


def jobs_of(cases: Iterable[Case]) -> list[Job]:
    jobs = []
    for case in cases:
        jobs.append(Job(case))
        if not case.backward and "x" in case.family.inputs:
            jobs.append(Job(case, statistics=True))
    return jobs


def find_library(path: Path, folder: Path) -> Path:
    """The library that `path` names or contains; one that lies in a wheel is unpacked to folder."""
    name = "libfused_layernorm.so"
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return Path(wheel.extract(f"fused_layernorm/{name}", folder)).resolve()
    for found in (path, path / name, path / "fused_layernorm" / name):
        if found.is_file():
            return found.resolve()
    raise SystemExit(f"no {name} in {path}")


# --- in the process of one build ----------------------------------------------------------------


def fingerprint(outputs: Any) -> list[int]:
    """Sums of the outputs' bits: over all, and weighted by row and by column."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = []
    for output in (outputs,) if isinstance(outputs, torch.Tensor) else outputs:
        if output.numel() == 0:  # a statistic that the norm does not have
            continue
        bits = output.contiguous().view(integers[output.element_size()])
        bits = bits.reshape(-1, bits.shape[-1] if bits.dim() else 1)
        for axis in (0, 1):
            along = bits.sum(axis, dtype=torch.int64)
            places = torch.arange(1, along.numel() + 1, device=along.device)
            sums += [int(along.sum()), int((along * places).sum())]
    return sums


class Bench:
    """One build's side: prepares a case, times it as often as asked, and frees it."""

    def __init__(self) -> None:
        self.graph: timing.Graph | None = None

    @torch.no_grad()
    def prepare(self, job: Job, seed: int) -> list[int]:
        if missing := missing_operator(job.case, statistics=job.statistics):
            raise RuntimeError(f"this build has no {missing}")
        torch.manual_seed(seed)
        inputs = make_inputs(job.case)
        calls = [ours(job.case, one, statistics=job.statistics) for one in inputs]
        bits = fingerprint(calls[0]())
        self.graph = timing.Graph(calls, timing.call_count(len(calls), job.case.bytes))
        return bits

    def time(self, seconds: float) -> float:
        assert self.graph is not None
        self.graph.time(0.0, 2, 2)  # replaces what the other process left in the caches
        return self.graph.time(seconds, 5, 60)

    def free(self) -> None:
        if self.graph is not None:
            self.graph.free()
        self.graph = None
        torch.cuda.empty_cache()


def work(library: str, commands: Connection) -> None:
    """Runs in the process of one build: loads its library and answers commands until the end."""
    torch.ops.load_library(library)
    torch.randn(8, device=timing.DEVICE).sum().item()
    commands.send(str(torch.ops.fused_layernorm._build_info()))
    bench = Bench()
    while True:
        name, *arguments = commands.recv()
        try:
            commands.send(getattr(bench, name)(*arguments))
        except Exception as problem:
            text = str(problem).strip() or type(problem).__name__
            if "CUDA error" in text:  # the context is lost: only a new process can continue
                raise
            del problem
            bench.free()
            commands.send(Failed(text.splitlines()[0]))


# --- in the process that compares ----------------------------------------------------------------


class Failed(Exception):
    """A build could not do what it was asked."""


class Side:
    """One build's process, which is started again if it has ended."""

    def __init__(self, label: str, library: Path) -> None:
        self.label = label
        self.library = library
        self.process: Any = None

    def start(self) -> str:
        """Starts the process and returns what its library was built for."""
        context = multiprocessing.get_context("spawn")
        self.commands, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(str(self.library), theirs), daemon=True)
        self.process.start()
        theirs.close()
        return str(self._answer())

    def ask(self, *command: Any) -> Any:
        """What the method of `Bench` gives that the command names."""
        if self.process is None:
            self.start()
        try:
            self.commands.send(command)
        except OSError:
            self.stop()
            raise Failed("the process ended") from None
        return self._answer()

    def _answer(self) -> Any:
        try:
            if not self.commands.poll(ANSWER):
                self.stop()
                raise Failed(f"no answer within {ANSWER:.0f} s")
            answer = self.commands.recv()
        except (EOFError, OSError):
            self.stop()
            raise Failed("the process ended") from None
        if isinstance(answer, Failed):
            raise answer
        return answer

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
        self.process = None


def measure(job: Job, old: Side, new: Side, rounds: int) -> dict[str, Any]:
    """A case's row: both times, their ratio, its range over the rounds, whether the bits agree."""
    row: dict[str, Any] = {**results.row_of(job.case), "statistics": job.statistics}
    seed = hash((job.case.rows, job.case.cols)) % (1 << 31)
    bits, problems = [], {}
    for side in (old, new):
        try:
            bits.append(side.ask("prepare", job, seed))
        except Failed as problem:
            problems[side.label] = str(problem)
    times: dict[str, list[float]] = {old.label: [], new.label: []}
    try:
        for number in range(0 if problems else rounds):
            for side in (old, new) if number % 2 == 0 else (new, old):
                times[side.label].append(side.ask("time", SECONDS))
    except Failed as problem:
        problems[side.label] = str(problem)
    for side in (old, new):
        try:
            side.ask("free")
        except Failed as problem:
            problems.setdefault(side.label, str(problem))
    if problems:
        return {**row, "problems": problems}
    ratios = [b / a for a, b in zip(times[old.label], times[new.label], strict=True)]
    return {
        **row,
        "old_us": round(statistics.median(times[old.label]), 3),
        "new_us": round(statistics.median(times[new.label]), 3),
        "ratio": round(statistics.median(ratios), 4),
        "least": round(min(ratios), 4),
        "most": round(max(ratios), 4),
        "same_bits": bits[0] == bits[1],
    }


def slower(row: dict[str, Any]) -> bool:
    """Whether the new build is slower by more than 1% and 0.1 us, or fails and the old does not."""
    if "problems" in row:
        return "new" in row["problems"] and "old" not in row["problems"]
    ratio, old_us = row["ratio"], row["old_us"]
    return bool(ratio > SLOWER and (ratio - 1) * old_us > SLOWER_US)


def compare(jobs: list[Job], old: Side, new: Side, seconds: float) -> dict[str, Any]:
    """Measures the jobs in order, then once more those that looked slower, within `seconds`."""
    start = time.monotonic()
    measured: list[tuple[Job, dict[str, Any]]] = []
    left: list[str] = []
    for number, job in enumerate(jobs):
        if time.monotonic() - start > 0.8 * seconds:
            left = [job.name for job in jobs[number:]]
            break
        if number % 25 == 0:
            print(f"{number} of {len(jobs)}, {time.monotonic() - start:.0f} s", flush=True)
        measured.append((job, measure(job, old, new, ROUNDS)))
    rows = []
    for job, row in measured:
        if slower(row) and "problems" not in row and time.monotonic() - start < seconds:
            row = {**measure(job, old, new, AGAIN), "first_ratio": row["ratio"]}
        rows.append({**row, "slower": slower(row)})
    return {"rows": rows, "left_out": left}


def line(job: Job, row: dict[str, Any]) -> str:
    if "problems" in row:
        said = "; ".join(f"{side}: {text}" for side, text in row["problems"].items())
        return f"{job.name:<52} {'FAILED' if row['slower'] else 'skipped'} {said}"
    first = f", at first {row['first_ratio']:.3f}" if "first_ratio" in row else ""
    return (
        f"{job.name:<52}{row['old_us']:>10.2f}{row['new_us']:>10.2f}{row['ratio']:>8.3f}"
        f"  {row['least']:.3f}-{row['most']:.3f}  {'same' if row['same_bits'] else 'differ':<7}"
        f"{'SLOWER' if row['slower'] else ''}{first}"
    )


def text(report: dict[str, Any], most: int) -> str:
    """A summary, and of the rows the `most` that differ most and those that are SLOWER."""
    pairs = [(Job(results.case_of(row), row["statistics"]), row) for row in report["rows"]]
    timed = [row for _, row in pairs if "ratio" in row]
    far = sorted(timed, key=lambda row: -abs(math.log(row["ratio"])))[:most]
    head = f"{'case':<52}{'old us':>10}{'new us':>10}{'ratio':>8}  {'range':<11}  {'bits':<7}"
    shown = [line(job, row) for job, row in pairs if row["slower"] or row in far]
    skipped = [line(job, row) for job, row in pairs if "problems" in row and not row["slower"]]
    lines = [head, *shown, *skipped[:most], f"{len(timed) - len(far)} rows differ less", ""]
    groups: dict[str, list[float]] = {}
    for job, row in pairs:
        if "ratio" in row:
            kind = "mixed " if job.case.mixed else ""
            groups.setdefault(f"{kind}{row['op']}", []).append(row["ratio"])
    for group, ratios in groups.items():
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        lines.append(
            f"{group:<28}{len(ratios):>4} cases: mean ratio {mean:.4f}, "
            f"{min(ratios):.3f} to {max(ratios):.3f}"
        )
    differ = sum(not row["same_bits"] for row in timed)
    return "\n".join([
        *lines,
        f"{len(timed)} compared, {len(pairs) - len(timed)} not, {len(report['left_out'])} left out "
        f"for time; {differ} differ in some bit; {sum(row['slower'] for _, row in pairs)} SLOWER",
    ])  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--old", type=Path, required=True)
    parser.add_argument("--new", type=Path, required=True)
    parser.add_argument("--cases", help='part of the names to compare, e.g. "backward 32768x"')
    parser.add_argument("--sweep", type=int, default=0, help="so many sizes of the sweep too")
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--lines", type=int, default=80, help="rows shown; the file holds all")
    arguments = parser.parse_args(argv)

    start = time.monotonic()
    cases = [case for case in CASES if not arguments.cases or arguments.cases in case.name]
    points = sweep.points()  # in a random order
    jobs = jobs_of([*cases, *points[: arguments.sweep]])
    with tempfile.TemporaryDirectory() as folder:
        old, new = (
            Side(label, find_library(path, Path(folder) / label))
            for label, path in (("old", arguments.old), ("new", arguments.new))
        )
        try:
            for side in (old, new):
                print(f"{side.label}: {side.start()}", flush=True)
            spent = time.monotonic() - start
            report = compare(jobs, old, new, arguments.seconds - spent)
        finally:
            for side in (old, new):
                side.stop()
    out = Path(os.environ.get("OUT", results.ROOT / "build"))
    out.mkdir(parents=True, exist_ok=True)
    results.write(out / "compare.json", {**results.stamp(), **report})
    print(text(report, arguments.lines))
    print(f"{time.monotonic() - start:.0f} s; written: {out / 'compare.json'}")
    return 1 if report["left_out"] or any(row["slower"] for row in report["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())

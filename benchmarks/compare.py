# SPDX-License-Identifier: Apache-2.0
"""Two builds of the kernels side by side: is any case slower than it was?

    python -m benchmarks.compare --old OLD --new NEW [--sweep 200] [--seconds 480]

OLD and NEW are each a library (libfused_layernorm.so), a folder that has one, or a wheel. A process
for each build loads the library alone, without the Python package, and calls the raw operators.
Both processes prepare the same case from the same random numbers and are then timed in turns, old
new, new old, ..., so that a change in the machine's speed affects both. The ratio of a case, new
time over old time, is the median over the rounds. A case that looks slower is prepared and timed
once more, for longer, and the second result counts.

Every case of benchmarks/cases.py is compared, forward also with the statistics that training
needs, and --sweep adds this number of the sweep's sizes, chosen at random, with random operators
and dtypes. "bits" says whether both builds gave the same result to the bit. A case that fails in
the old build, which may lack the operator, is skipped. The exit status is 1 if a case is slower by
more than 1% and 0.1 us, if it fails in the new build alone, or if one was left out for time.
$OUT/compare.json holds all results. Comparing a build with itself shows the noise.

Both processes also sum up a result's bits, which leaves other data in L2, as the kernels of a model
do. What makes room first in L2 then has less of it for itself, and takes some 5% longer than in the
benchmark (docs/tuning-log.md, "What holds everywhere").
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import queue
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks import results, sweep, timing
from benchmarks.cases import CASES, Case, parse_case
from benchmarks.ours import make_inputs, missing_operator, ours

SLOWER = 1.01  # a case counts as slower if its ratio is above this
SLOWER_US = 0.1  # and it takes more than this many microseconds longer
ROUNDS, AGAIN = 8, 20  # rounds of a case, and of its second measurement if it looked slower
SECONDS = 0.015  # device time of one measurement
# Dtypes of the cases that --sweep adds.
TYPES = ("bfloat16", "float32", "float16", "float64", "bf16+fp32", "bf16+fp32>fp32",
         "fp16+fp32>fp32")  # fmt: skip
MODULATED_TYPES = ("bfloat16", "float32", "float16", "bf16*fp32")
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
        if not case.backward:
            jobs.append(Job(case, statistics=True))
    return jobs


def sample(count: int, seed: int) -> list[Job]:
    """Sizes of the sweep, each with an operator and dtypes, all chosen at random."""
    choose = random.Random(seed)
    points = sweep.points()
    jobs = []
    for point in choose.sample(points, min(count, len(points))):
        kinds = ("", "", "add_", "gelu_scale_", "ada_", "add_ada_")
        kind = choose.choice(("", "add_", "ada_") if point.is_rms else kinds)
        types = choose.choice(MODULATED_TYPES if "ada" in kind else TYPES)
        size = f"{point.rows}x{point.cols}"
        per = ""
        if "ada" in kind:
            samples = choose.choice([n for n in (1, 2, 4, 32) if point.rows % n == 0])
            size = f"{samples}x{point.rows // samples}x{point.cols}"
            per = choose.choice(("", "", " per-token"))
        case = parse_case(f"{size} {types} {kind}{point.op}{per}")
        jobs.append(Job(case, statistics=not case.backward and choose.random() < 0.5))
    return jobs


def find_library(path: Path, folder: Path) -> Path:
    """The library that `path` names or contains; one that lies in a wheel is unpacked to folder."""
    if path.is_dir():
        for pattern in ("libfused_layernorm.so", "fused_layernorm/libfused_layernorm.so"):
            if found := sorted(path.glob(pattern)):
                return found[0].resolve()
        raise SystemExit(f"no libfused_layernorm.so in {path} or {path}/fused_layernorm")
    if not path.is_file():
        raise SystemExit(f"no file {path}")
    if path.suffix != ".whl":
        return path.resolve()
    with zipfile.ZipFile(path) as wheel:
        for name in wheel.namelist():
            if name == "fused_layernorm/libfused_layernorm.so":
                return Path(wheel.extract(name, folder)).resolve()
    raise SystemExit(f"no fused_layernorm/libfused_layernorm.so in {path}")


# --- in the process of one build ----------------------------------------------------------------


def fingerprint(outputs: Any) -> list[int]:
    """Sums of the outputs' bits: over all, and weighted by row and by column."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = []
    for output in (outputs,) if isinstance(outputs, torch.Tensor) else outputs:
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


def serve(bench: Bench, lines: Iterable[str], answer: Callable[[dict[str, Any]], None]) -> None:
    """Runs the command in each line, a JSON object, and answers it."""
    for line in lines:
        asked = json.loads(line)
        try:
            if asked["do"] == "prepare":
                case = Case(**asked["case"])
                answer({"bits": bench.prepare(Job(case, asked["statistics"]), asked["seed"])})
            elif asked["do"] == "time":
                answer({"us": bench.time(asked["seconds"])})
            else:
                bench.free()
                answer({})
        except Exception as problem:
            text = str(problem).strip() or type(problem).__name__
            answer({"error": text.splitlines()[0]})
            if "CUDA error" in text:  # the context is lost: only a new process can continue
                return
            del problem
            bench.free()


def work(library: str) -> None:
    """Runs in the process of one build: loads its library and serves the commands on stdin."""
    # Answers go to the original stdout; everything else that is printed goes to stderr.
    stdout = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.ops.load_library(library)
    torch.randn(8, device=timing.DEVICE).sum().item()

    def answer(message: dict[str, Any]) -> None:
        stdout.write(json.dumps(message) + "\n")

    answer({"info": str(torch.ops.fused_layernorm._build_info())})
    serve(Bench(), sys.stdin, answer)


# --- in the process that compares ----------------------------------------------------------------


class Failed(Exception):
    """A build could not do what it was asked."""


class Side:
    """One build's process, which is started again if it has ended."""

    def __init__(self, label: str, command: list[str]) -> None:
        self.label = label
        self.command = command
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> str:
        """Starts the process and returns what its library was built for."""
        self.process = subprocess.Popen(
            self.command, cwd=results.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        # A thread reads the answers, so that waiting for one can time out.
        self.answers: queue.Queue[str] = queue.Queue()
        threading.Thread(
            target=_read, args=(self.process.stdout, self.answers), daemon=True
        ).start()
        return str(self._answer()["info"])

    def ask(self, **message: Any) -> dict[str, Any]:
        if self.process is None:
            self.start()
        assert self.process is not None
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            self.stop()
            raise Failed("the process ended") from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        try:
            line = self.answers.get(timeout=ANSWER)
        except queue.Empty:
            self.stop()
            raise Failed(f"no answer within {ANSWER:.0f} s") from None
        if not line:
            self.stop()
            raise Failed("the process ended")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            if "CUDA error" in answer["error"]:
                self.stop()
            raise Failed(answer["error"])
        return answer

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.process = None


def side_of(label: str, library: Path) -> Side:
    return Side(label, [sys.executable, "-m", "benchmarks.compare", "--work", str(library)])


def _read(lines: Any, answers: queue.Queue[str]) -> None:
    for line in lines:
        answers.put(line)
    answers.put("")  # the end


def measure(job: Job, old: Side, new: Side, rounds: int) -> dict[str, Any]:
    """A case's row: both times, their ratio, its range over the rounds, whether the bits agree."""
    row: dict[str, Any] = {**results.row_of(job.case), "statistics": job.statistics}
    asked = {
        "case": dataclasses.asdict(job.case),
        "statistics": job.statistics,
        "seed": hash((job.case.rows, job.case.cols)) % (1 << 31),
    }
    bits, problems = [], {}
    for side in (old, new):
        try:
            bits.append(side.ask(do="prepare", **asked)["bits"])
        except Failed as problem:
            problems[side.label] = str(problem)
    times: dict[str, list[float]] = {old.label: [], new.label: []}
    try:
        for number in range(0 if problems else rounds):
            for side in (old, new) if number % 2 == 0 else (new, old):
                times[side.label].append(side.ask(do="time", seconds=SECONDS)["us"])
    except Failed as problem:
        problems[side.label] = str(problem)
    for side in (old, new):
        try:
            side.ask(do="free")
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


def job_of(row: dict[str, Any]) -> Job:
    return Job(results.case_of(row), row["statistics"])


def problems(row: dict[str, Any]) -> str:
    return "; ".join(f"{side}: {text}" for side, text in row["problems"].items())


def line(row: dict[str, Any]) -> str:
    name = job_of(row).name
    if "problems" in row:
        return f"{name:<52} FAILED {problems(row)}"
    first = f", at first {row['first_ratio']:.3f}" if "first_ratio" in row else ""
    return (
        f"{name:<52}{row['old_us']:>10.2f}{row['new_us']:>10.2f}{row['ratio']:>8.3f}"
        f"  {row['least']:.3f}-{row['most']:.3f}  {'same' if row['same_bits'] else 'differ':<7}"
        f"{'SLOWER' if row['slower'] else ''}{first}"
    )


def text(report: dict[str, Any], most: int) -> str:
    """The table and a summary; of a long table the `most` rows that differ most and SLOWER ones."""
    rows = report["rows"]
    timed = [row for row in rows if "ratio" in row]
    # A case that the old build cannot run has no row; such cases share a line for each reason.
    skipped: dict[str, list[str]] = {}
    for row in rows:
        if "problems" in row and not row["slower"]:
            skipped.setdefault(problems(row), []).append(job_of(row).name)
    shown = [row for row in rows if "ratio" in row or row["slower"]]
    if len(shown) > most:
        far = sorted(timed, key=lambda row: -abs(math.log(row["ratio"])))[:most]
        shown = [row for row in rows if row in far or row["slower"]]
    head = f"{'case':<52}{'old us':>10}{'new us':>10}{'ratio':>8}  {'range':<11}  {'bits':<7}"
    lines = [head, *(line(row) for row in shown)]
    if less := sum("ratio" in row for row in rows) - sum("ratio" in row for row in shown):
        lines.append(f"... and {less} that differ less")
    for said, names in skipped.items():
        lines.append(f"skipped {len(names)}, the first {names[0]}: {said}")
    groups: dict[str, list[float]] = {}
    for row in timed:
        kind = "mixed " if results.case_of(row).mixed else ""
        groups.setdefault(f"{kind}{row['op']}", []).append(row["ratio"])
    lines.append("")
    for group, ratios in groups.items():
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        lines.append(
            f"{group:<28}{len(ratios):>4} cases: mean ratio {mean:.4f}, "
            f"{min(ratios):.3f} to {max(ratios):.3f}"
        )
    differ = sum(not row["same_bits"] for row in timed)
    lines.append(
        f"{len(timed)} compared, {len(rows) - len(timed)} not, {len(report['left_out'])} left out "
        f"for time; {differ} differ in some bit; {sum(row['slower'] for row in rows)} SLOWER"
    )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--old", type=Path)
    parser.add_argument("--new", type=Path)
    parser.add_argument("--cases", help='part of the names to compare, e.g. "backward 32768x"')
    parser.add_argument("--sweep", type=int, default=0, help="so many sizes of the sweep too")
    parser.add_argument("--seed", type=int, default=0, help="chooses these")
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--lines", type=int, default=80, help="rows shown; the file holds all")
    parser.add_argument("--work", metavar="LIBRARY", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.work:
        work(arguments.work)
        return 0
    if arguments.old is None or arguments.new is None:
        parser.error("--old and --new are needed")

    start = time.monotonic()
    cases = [case for case in CASES if not arguments.cases or arguments.cases in case.name]
    jobs = jobs_of(cases)
    jobs += sample(arguments.sweep, arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        old, new = (
            side_of(label, find_library(path, Path(folder) / label))
            for label, path in (("old", arguments.old), ("new", arguments.new))
        )
        try:
            for side in (old, new):
                try:
                    print(f"{side.label}: {side.start()}", flush=True)
                except Failed as problem:
                    raise SystemExit(f"{side.label}: {problem}") from None
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

# SPDX-License-Identifier: Apache-2.0
"""Two builds of the kernels side by side: is any case slower than it was, or than eager PyTorch?

    python -m benchmarks.compare --old OLD --new NEW [--eager] [--cases 8192x,per-token]

OLD and NEW are each a library (libfused_layernorm.so), a folder that has one, or a wheel. One
process loads both, each in a namespace of its own, and calls their raw operators on the same
inputs, in turns. A case's ratio, new time over old time, is the median over the rounds. A case that
is SLOWER, by more than 3% and more than 0.3 us (--percent, --us), is timed once more, for longer.
With --eager PyTorch's time stands beside them, and what the new build does more slowly is named.

The cases are those of `the_list` in benchmarks/cases.py, forward of those of the benchmark page
also with the statistics that training needs; --sweep and --sweep-groups add so many points of the
sweeps. A case that fails in the old build, which may lack the operator, is skipped. The exit status
is 1 if a case is SLOWER, fails in the new build alone, or was left out for time. $OUT/compare.json
holds all results.
"""

from __future__ import annotations

import faulthandler
import os
import re
import statistics
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import providers, results, sweep, timing
from benchmarks.cases import CASES, Case, the_list
from benchmarks.ours import make_inputs, missing_operator, ours

ROUNDS, AGAIN = 8, 20  # rounds of a case, and of its second measurement if it looked slower
SECONDS = 0.012  # device time of one measurement
MIN_REPLAYS = 4  # of one measurement
LEVEL = 1.01  # a time within 1% of eager PyTorch's is not slower


class Job(NamedTuple):
    """One comparison: a case, and whether forward gives mean and rstd too."""

    case: Case
    statistics: bool = False

    @property
    def name(self) -> str:
        return self.case.name.replace("forward", "forward+stats" if self.statistics else "forward")


def jobs_of(cases: Iterable[Case], parts: str = "") -> list[Job]:
    """The jobs of the cases whose names have one of these parts, which commas separate."""
    jobs = []
    for case in cases:
        if any(one in case.name for one in parts.split(",")):
            jobs.append(Job(case))
            if not case.backward and "x" in case.family.inputs and case in CASES:
                jobs.append(Job(case, statistics=True))
    return jobs


def load(path: Path, number: int, folder: Path) -> str:
    """Loads a copy of the library that `path` names or contains, a wheel too, whose operators have
    a namespace of their own, and returns it.

    The name has the same length: the copy differs in the bytes of these strings alone.
    """
    name, namespace = "libfused_layernorm.so", f"fused_layernor{number}"
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            path = Path(wheel.extract(f"fused_layernorm/{name}", folder))
    places = (path, path / name, path / "fused_layernorm" / name)
    library = next((place for place in places if place.is_file()), None)
    if library is None:
        raise SystemExit(f"no {name} in {path}")
    known = rb"(?<![0-9A-Za-z_])fused_layernorm(?=\0|::)"
    copied, count = re.subn(known, namespace.encode(), library.read_bytes())
    if count == 0:
        raise SystemExit(f"{library} has no operators of fused_layernorm")
    copy = folder / f"{namespace}.so"
    copy.write_bytes(copied)
    torch.ops.load_library(str(copy))
    return namespace


class Side:
    """One build, or eager PyTorch: prepares a case, times it as often as asked, and frees it."""

    graph: Any = None

    def __init__(self, label: str, namespace: str = "") -> None:
        self.label, self.namespace = label, namespace

    @torch.no_grad()
    def prepare(self, job: Job, inputs: list[Any]) -> None:
        how: dict[str, Any] = {"statistics": job.statistics, "namespace": self.namespace}
        if not self.namespace:
            calls = providers.eager_calls(job.case, inputs)
        elif missing := missing_operator(job.case, **how):
            raise RuntimeError(f"this build has no {missing}")
        else:
            calls = [ours(job.case, one, **how) for one in inputs]
        self.graph = timing.Graph(calls, job.case.bytes)

    def time(self) -> float:
        self.graph.time(0.0, 1, 1)  # replaces what the other side left in the caches
        return float(self.graph.time(SECONDS, MIN_REPLAYS, 60))

    def bits(self) -> list[torch.Tensor]:
        """The bits of what the last calls gave, on every input."""
        given = [(one,) if isinstance(one, torch.Tensor) else one for one in self.graph.outputs]
        return [one.contiguous().view(torch.uint8) if one.dim() else one
                for outputs in given for one in outputs]  # fmt: skip

    def free(self) -> None:
        if self.graph is not None:
            self.graph.free()
        self.graph = None


def measure(job: Job, sides: Sequence[Side], rounds: int) -> dict[str, Any]:
    """A case's row: the times, new over old, its range over the rounds, whether the bits agree."""
    row: dict[str, Any] = {**results.row_of(job.case), "statistics": job.statistics}
    torch.manual_seed(0)
    inputs, problems = make_inputs(job.case), {}
    for side in sides:
        try:
            side.prepare(job, inputs)
        except Exception as problem:
            problems[side.label] = timing.sentence(problem)
    ready = [side for side in sides if side.label not in problems]
    both = [side for side in ready if side.label != "eager"]
    times: dict[str, list[float]] = {side.label: [] for side in ready}
    if len(both) == 2:
        for number in range(rounds):
            for side in both if number % 2 == 0 else both[::-1]:
                times[side.label].append(side.time())
        row["same_bits"] = all(map(torch.equal, *(side.bits() for side in both)))
        ratios = [b / a for a, b in zip(times["old"], times["new"], strict=True)]
        found = {"ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
        row |= {name: round(ratio, 4) for name, ratio in found.items()}
    for side in ready:
        if not times[side.label]:  # eager, and a build whose other half failed
            times[side.label] += [side.time() for _ in range(2)]
    for side in sides:
        side.free()
    row |= {f"{label}_us": round(statistics.median(of_one), 3) for label, of_one in times.items()}
    return {**row, "problems": problems} if problems else row


def is_slower(row: dict[str, Any], percent: float, us: float) -> bool:
    """Whether the new build is slower by more than both, or fails and the old one does not."""
    problems, more = row.get("problems", {}), row.get("ratio", 1.0) - 1
    fails = "new" in problems and "old" not in problems
    return fails or bool(more > percent / 100 and more * row["old_us"] > us)


def is_beaten(row: dict[str, Any]) -> bool:
    """Whether eager PyTorch is faster than the new build."""
    return "eager_us" in row and row.get("new_us", 0.0) > LEVEL * row["eager_us"]


def compare(
    jobs: list[Job], sides: Sequence[Side], seconds: float, percent: float = 3.0, us: float = 0.3
) -> dict[str, Any]:
    """Measures the jobs in order, then once more those that looked slower, within `seconds`."""
    measured: list[tuple[Job, dict[str, Any]]] = []
    end, rows = time.monotonic() + seconds, []
    for job in jobs:
        left = end - time.monotonic()
        if left < 0.15 * seconds:
            break
        if len(measured) % 50 == 0:
            print(f"{len(measured)} of {len(jobs)}, {left:.0f} s left", flush=True)
        measured.append((job, measure(job, sides, ROUNDS)))
    for job, row in sorted(measured, key=lambda pair: -pair[1].get("ratio", 0.0)):
        if is_slower(row, percent, us) and "ratio" in row and time.monotonic() < end:
            row = {**measure(job, sides, AGAIN), "first_ratio": row["ratio"]}
        rows.append({**row, "slower": is_slower(row, percent, us)})
    rows.sort(key=lambda row: (-row["slower"], -row.get("ratio", 0.0)))
    return {"percent": percent, "us": us, "rows": rows,
            "left_out": [job.name for job in jobs[len(measured) :]]}  # fmt: skip


def line(row: dict[str, Any]) -> str:
    name = Job(results.case_of(row), row["statistics"]).name
    problems = "; ".join(f"{side}: {said}" for side, said in row.get("problems", {}).items())
    if "ratio" not in row:
        return f"{name:<52} {'FAILED' if row['slower'] else 'skipped'} {problems}"
    said = f"{name:<52}{row['old_us']:>10.2f}{row['new_us']:>10.2f}{row['ratio']:>8.3f}  "
    said += f"{row['least']:.3f}-{row['most']:.3f}  {'same' if row['same_bits'] else 'differ':<7}"
    if "eager_us" in row:
        said += f"{row['eager_us']:>10.2f}{row['new_us'] / row['eager_us']:>8.3f} "
    first = f"at first {row['first_ratio']:.3f}" if "first_ratio" in row else ""
    notes = ["SLOWER" * row["slower"], "EAGER" * is_beaten(row), first, problems]
    return f"{said} {', '.join(filter(None, notes))}".rstrip()


def text(report: dict[str, Any], most: int) -> str:
    """The rows with the largest ratios first, those slower than eager, and a summary."""
    timed = [row for row in report["rows"] if "ratio" in row]
    failed = [row for row in report["rows"] if "ratio" not in row]
    beaten = sorted(filter(is_beaten, timed), key=lambda row: -row["new_us"] / row["eager_us"])
    slow = sum(row["slower"] for row in report["rows"])
    differ = sum(not row["same_bits"] for row in timed)
    of_op: dict[str, list[float]] = {}
    for row in timed:
        mixed = "mixed " * results.case_of(row).mixed
        of_op.setdefault(f"{mixed}{row['op']}", []).append(row["ratio"])
    return "\n".join([
        f"{'case':<52}{'old us':>10}{'new us':>10}{'ratio':>8}  {'range':<11}  {'bits':<7}"
        f"{'eager us':>10}{'ratio':>8}",
        *map(line, timed[: max(most, slow)]),
        *(["", f"slower than eager PyTorch: {len(beaten)}"] if beaten else []),
        *map(line, beaten[:most]),
        "",
        *map(line, failed[:most]),
        *(f"{op:<28}{len(ratios):>4} cases: mean ratio {statistics.geometric_mean(ratios):.4f}, "
          f"{min(ratios):.3f} to {max(ratios):.3f}" for op, ratios in of_op.items()),
        f"{len(timed)} compared, {len(failed)} not, {len(report['left_out'])} left out for time; "
        f"{differ} differ in some bit; {slow} SLOWER by more than {report['percent']:g}% and "
        f"{report['us']:g} us",
    ])  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = results.parser("compare", __doc__, seconds=480)
    parser.add_argument("--old", type=Path, required=True)
    parser.add_argument("--new", type=Path, required=True)
    parser.add_argument("--eager", action="store_true", help="time eager PyTorch too")
    parser.add_argument("--cases", default="", help='parts of names: "8192x,per-token"')
    parser.add_argument("--page", action="store_true", help="the benchmark page's cases alone")
    parser.add_argument("--sweep", type=int, default=0, help="so many points of the sweep too")
    parser.add_argument("--sweep-groups", type=int, default=0, help="and of groups of odd shapes")
    parser.add_argument("--percent", type=float, default=3.0, help="SLOWER is by more than this")
    parser.add_argument("--us", type=float, default=0.3, help="and by more microseconds than this")
    arguments = parser.parse_args(argv)

    start = time.monotonic()
    cases = [*(CASES if arguments.page else the_list()), *sweep.points()[: arguments.sweep],
             *sweep.group_points()[: arguments.sweep_groups]]  # fmt: skip
    jobs = jobs_of(cases, arguments.cases)
    if not jobs:
        parser.error("no case is left by these filters")
    sides: list[Side] = []
    with tempfile.TemporaryDirectory() as folder:
        for label, path in (("old", arguments.old), ("new", arguments.new)):
            sides.append(Side(label, load(path, len(sides), Path(folder))))
            built = getattr(torch.ops, sides[-1].namespace)._build_info()
            print(f"{label}: {built}", flush=True)
    sides += [Side("eager")] * arguments.eager
    # A kernel that never ends would hold the process for ever.
    faulthandler.dump_traceback_later(arguments.budget_seconds + 60, exit=True)
    timing.warm_up_device()
    spent = time.monotonic() - start
    report = compare(jobs, sides, arguments.budget_seconds - spent, arguments.percent, arguments.us)
    faulthandler.cancel_dump_traceback_later()
    path = arguments.output or Path(os.environ.get("OUT", results.ROOT / "build"), "compare.json")
    results.write(path, {**results.stamp(), **report})
    print(text(report, 40))  # rows; the file holds all
    print(f"{time.monotonic() - start:.0f} s; written: {path}")
    return 1 if report["left_out"] or any(row["slower"] for row in report["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""The results file: what it says of code and machine, how it is written, a verdict on each row."""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib
import json
import platform
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import KNOWN, Case
from benchmarks.families import HEADS, IMAGE, SAMPLES, family_of

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def parser(module: str, doc: str | None, seconds: float | None = None) -> argparse.ArgumentParser:
    """The parser of a command, whose help is the docstring of its module; of one that measures for
    so many seconds with what that needs."""
    raw = argparse.RawDescriptionHelpFormatter
    name = f"python -m benchmarks.{module}"
    made = argparse.ArgumentParser(prog=name, description=doc, formatter_class=raw)
    if seconds is not None:
        made.add_argument("--budget-seconds", "--limit-seconds", type=float, default=seconds,
                          help="what is not measured by then is left out")  # fmt: skip
        made.add_argument("--output", type=Path, help="the results file")
    return made


def chosen(kind: str, names: str | None, known: Iterable[str]) -> list[str]:
    """The known names that a list with commas chooses: one by its whole name, or all that have a
    part of it, in any case; all where there is no list. Ends the program at a name of nothing."""
    found: set[str] = set()
    for part in (names or "").lower().split(","):
        same = {name for name in known if part == name.lower()}
        found |= (more := same or {name for name in known if part in name.lower()})
        if not more:
            raise SystemExit(f"no {kind} has {part!r} in its name: known are {', '.join(known)}")
    return [name for name in known if name in found]


def _said(*command: str, root: Path = ROOT) -> list[str]:
    """The lines that a command prints; none where it fails."""
    try:
        said = subprocess.check_output(command, cwd=root, text=True, stderr=subprocess.DEVNULL)
        return said.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []


def csrc_sha256(root: Path = ROOT) -> str:
    """One SHA-256 over the kernels' sources: each file's path, a zero byte and its content, without
    lines of C++ that are comments alone. The files are those that git tracks or would track,
    sorted by path; outside a git checkout, all files there."""
    listed = _said("git", "ls-files", "--cached", "--others", "--exclude-standard", "csrc",
                   root=root)  # fmt: skip
    found = {root / name for name in listed} or {*(root / "csrc").rglob("*")}
    digest = hashlib.sha256()
    # A copy of the tree may come with an index that is older than its files.
    for name in sorted(path.relative_to(root).as_posix() for path in found if path.is_file()):
        lines = (root / name).read_bytes().splitlines(keepends=True)
        if name.endswith((".h", ".cuh", ".cpp", ".cu")):
            lines = [line for line in lines if not line.lstrip().startswith(b"//")]
        digest.update(name.encode() + b"\0" + b"".join(lines))
    return digest.hexdigest()


def stamp() -> dict[str, Any]:
    """What a part of the results file needs to be judged later: the code and the time."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return {"date": now.isoformat(timespec="seconds"), "csrc_sha256": csrc_sha256()}


def machine() -> dict[str, Any]:
    """The device, the driver and the versions the numbers were taken with."""
    asked = "clocks.max.sm,clocks.max.memory,power.limit,driver_version"
    found = _said("nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader")
    *clocks, driver = found[0].split(", ") if found else ["unknown"]
    return {
        "device": torch.cuda.get_device_name(),
        "clocks": "SM {}, memory {} at most, {}".format(*clocks) if clocks else "unknown",
        "driver": driver, "torch": torch.__version__, "python": platform.python_version(),
        "rms_norm": "QuACK" if _runs_quack() else "ATen",
    }  # fmt: skip


def _runs_quack() -> bool:
    """Whether PyTorch replaces its RMSNorm by QuACK's kernels: since 2.13, with their packages."""
    try:
        return bool(importlib.import_module("torch._native.cutedsl_utils").runtime_available())
    except ImportError:
        return False


def cpu() -> dict[str, Any]:
    """The processor and the versions that numbers of a CPU were taken with."""
    try:
        name = re.findall(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())[0]
    except (OSError, IndexError):
        name = platform.processor() or platform.machine()
    return {"device": name, "torch": torch.__version__, "python": platform.python_version()}


def default_path(device: str) -> Path:
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return RESULTS / f"{name}.json"


def read(path: Path) -> dict[str, Any]:
    """The results file, or nothing where there is none."""
    return json.loads(path.read_text()) if path.exists() else {}


def by_card() -> list[Path]:
    """The results files that have cases, of each card one."""
    return [path for path in sorted(RESULTS.glob("*.json")) if "rows" in read(path)]


def write(path: Path, results: dict[str, Any]) -> None:
    """Writes one line per measurement, so that a change of the file can be read."""
    lines = []
    for key, value in results.items():
        text = json.dumps(value)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n  {}\n ]".format(",\n  ".join(map(json.dumps, value)))
        lines.append(f"{json.dumps(key)}: {text}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n " + ",\n ".join(lines) + "\n}\n")


def update(parts: dict[str, Any], path: Path | None = None) -> None:
    """Replaces parts of a results file, by default this card's, and leaves the rest."""
    path = path or default_path(torch.cuda.get_device_name())
    write(path, {**(read(path) or machine()), **parts})
    print(f"written: {path}")


# The keys of a row that are fields of its case, beside its sizes.
KEYS = ("op", "dtype", "weight_dtype", "out_dtype", "modulation", "modulation_dtype")


def row_of(case: Case) -> dict[str, Any]:
    """A case as a row of the results file, without its times: "shape" is an image's, "packed"
    stands in the rows of heads, and what a case lacks is left out."""
    layout, sizes = case.family.layout, case.sizes
    row = {"op": case.op, "rows": case.rows, "cols": case.cols}
    row |= {key: getattr(case, key) for key in KEYS}
    row["samples"] = sizes[0] if layout in (SAMPLES, HEADS) else None
    row |= {"heads": sizes[2], "packed": True} if layout == HEADS else {}
    row |= {"shape": list(sizes) if layout == IMAGE else None, "bytes": case.bytes}
    return {key: value for key, value in row.items() if value is not None}


def case_of(row: dict[str, Any]) -> Case:
    """The case of a row, with the target it has today."""
    family, samples, heads = family_of(row["op"]), row.get("samples"), row.get("heads")
    parts = (samples or 1) * (2 * heads if heads else 1)
    of_one = (row["rows"] // parts, *([heads] if heads else []), row["cols"])
    sizes = tuple(row.get("shape") or ((samples, *of_one) if samples else of_one))
    groups = row["rows"] // sizes[0] if family.groups else None
    plain = Case(sizes=sizes, of_groups=None if groups == family.groups else groups,
                 **{key: row[key] for key in KEYS if key in row})  # fmt: skip
    return KNOWN.get(plain.name, plain)


def verdict(case: Case, row: dict[str, Any]) -> str:
    """PASS or MISS: the target, never slower than eager, a fused operator never than compile. Empty
    where there is nothing to judge by."""
    ours, copy = row.get("ours_us"), row.get("copy_us")
    if ours is None or copy is None or (case.target is None and "eager_us" not in row):
        return ""
    is_fused = case.op not in ("forward", "backward")
    misses = {
        # The target has three digits: what rounds to it has reached it.
        "target": round(case.ratio(ours, copy), 3) < round(case.target or 0.0, 3),
        "eager": ours > (row.get("eager_us") or ours),
        "compile": is_fused and ours > (row.get("compile_us") or ours),
    }
    found = ", ".join(name for name, misses_it in misses.items() if misses_it)
    return f"MISS {found}" if found else "PASS"

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
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import KNOWN, Case

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """The parser of a command, whose help is the docstring of its module."""
    raw = argparse.RawDescriptionHelpFormatter
    name = f"python -m benchmarks.{module}"
    return argparse.ArgumentParser(prog=name, description=doc, formatter_class=raw)


def csrc_sha256(root: Path = ROOT) -> str:
    """One SHA-256 over the kernels' sources: each file's path, a zero byte and its content, without
    lines of C++ that are comments alone.

    The files are those that git tracks or would track, sorted, as `git ls-files csrc` names them
    once they are committed; outside a git checkout, all files there.
    """
    digest = hashlib.sha256()
    for path in csrc_files(root):
        lines = (root / path).read_bytes().splitlines(keepends=True)
        if path.endswith((".h", ".cuh", ".cpp", ".cu")):
            lines = [line for line in lines if not line.lstrip().startswith(b"//")]
        digest.update(path.encode() + b"\0" + b"".join(lines))
    return digest.hexdigest()


def csrc_files(root: Path) -> list[str]:
    try:
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", "csrc"],
            cwd=root,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        listed = []
    if not listed:
        found = (path for path in (root / "csrc").rglob("*") if path.is_file())
        listed = [path.relative_to(root).as_posix() for path in found]
    # A copy of the tree may come with an index that is older than its files.
    return sorted({path for path in listed if (root / path).is_file()})


def stamp() -> dict[str, Any]:
    """What a part of the results file needs to be judged later: the code and the time."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return {"date": now.isoformat(timespec="seconds"), "csrc_sha256": csrc_sha256()}


def machine() -> dict[str, Any]:
    """The device, the driver and the versions the numbers were taken with."""
    return {
        "device": torch.cuda.get_device_name(),
        "clocks": _smi(
            "clocks.max.sm,clocks.max.memory,power.limit", "SM {}, memory {} at most, {}"
        ),
        "driver": _smi("driver_version", "{}"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rms_norm": "QuACK" if _runs_quack() else "ATen",
    }


def _runs_quack() -> bool:
    """Whether PyTorch replaces its RMSNorm by QuACK's kernels: since 2.13, with their packages."""
    try:
        utils = importlib.import_module("torch._native.cutedsl_utils")
    except ImportError:
        return False
    return bool(utils.runtime_available())


def cpu() -> dict[str, Any]:
    """The processor and the versions that numbers of a CPU were taken with."""
    try:
        name = re.findall(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())[0]
    except (OSError, IndexError):
        name = platform.processor() or platform.machine()
    return {"device": name, "torch": torch.__version__, "python": platform.python_version()}


def _smi(query: str, form: str) -> str:
    """What nvidia-smi says of the first GPU, or "unknown"."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return form.format(*map(str.strip, output.splitlines()[0].split(",")))


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
        if isinstance(value, list) and value and isinstance(value[0], dict):
            items = ",\n  ".join(json.dumps(item) for item in value)
            lines.append(f"{json.dumps(key)}: [\n  {items}\n ]")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n " + ",\n ".join(lines) + "\n}\n")


def update(path: Path, part: str, value: Any) -> None:
    """Replaces one part of the results file (the sweep, the models) and leaves the rest."""
    results = read(path) or machine()
    results[part] = value
    write(path, results)


# The keys of a row that say which case it is. Those of what a case lacks are left out.
KEYS = ("op", "rows", "cols", "dtype", "weight_dtype", "out_dtype", "samples", "heads",
        "modulation", "modulation_dtype")  # fmt: skip


def row_of(case: Case) -> dict[str, Any]:
    """A case as a row of the results file, without its times.

    "shape" is an image's, "packed" stands in the rows of heads.
    """
    row = {key: getattr(case, key) for key in KEYS}
    row |= {"shape": case.image and list(case.image), "packed": bool(case.heads) or None}
    row["bytes"] = case.bytes
    return {key: value for key, value in row.items() if value is not None}


def case_of(row: dict[str, Any]) -> Case:
    """The case of a row, with the target it has today."""
    plain = Case(
        **{key: row[key] for key in KEYS if key in row},
        image=tuple(row["shape"]) if "shape" in row else None,
    )
    return KNOWN.get(plain.name, plain)


def verdict(case: Case, row: dict[str, Any]) -> str:
    """PASS or MISS: the target, never slower than eager, a fused operator never than compile.

    Empty where there is nothing to judge by.
    """
    ours = row.get("ours_us")
    if ours is None or "copy_us" not in row or (case.target is None and "eager_us" not in row):
        return ""
    misses = []
    # The target has three digits: what rounds to it has reached it.
    if case.target is not None and (
        round(case.ratio(ours, row["copy_us"]), 3) < round(case.target, 3)
    ):
        misses.append("target")
    if ours > (row.get("eager_us") or ours):
        misses.append("eager")
    if case.op not in ("forward", "backward") and ours > (row.get("compile_us") or ours):
        misses.append("compile")
    return "MISS " + ", ".join(misses) if misses else "PASS"

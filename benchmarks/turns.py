# SPDX-License-Identifier: Apache-2.0
"""Processes that prepare side by side and measure one at a time.

Compiling a model takes a minute of one processor core and hardly any of the GPU; measuring needs
the machine to itself. So each process holds a shared lock while it prepares and the exclusive lock
while it measures. A process that still imports its modules holds no lock.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch


@contextlib.contextmanager
def _holding(how: int, lock: Path) -> Iterator[None]:
    with lock.open("w") as file:  # closing the file releases the lock
        fcntl.flock(file, how)
        start, done = time.monotonic(), "prepared" if how == fcntl.LOCK_SH else "measured"
        yield
        print(f"{done} in {time.monotonic() - start:.0f} s")


preparing = functools.partial(_holding, fcntl.LOCK_SH)  # others may prepare too
measuring = functools.partial(_holding, fcntl.LOCK_EX)  # no other prepares or measures


def add_arguments(parser: argparse.ArgumentParser, jobs: int) -> None:
    """The arguments of a command whose processes take turns; the last is theirs."""
    parser.add_argument("--jobs", type=int, default=jobs, help="processes that run side by side")
    parser.add_argument("--add", action="store_true", help="into the results file, though a part")
    parser.add_argument("--lock", type=Path, help="measure here, one process at a time")


def collect(
    module: str, calls: dict[str, list[str]], jobs: int, seconds: float
) -> dict[str, list[Any]]:
    """Runs `python -m module` with the arguments of each call and with "--output" and "--lock".

    At most `jobs` run at a time, the GPUs in turns, and after `seconds` they are killed. Returns
    "rows" and "skipped" of the files that they wrote, in the order of the calls; a call that failed
    adds a line. A process's output is shown when it has ended.
    """
    start = time.monotonic()
    every = ",".join(map(str, range(torch.cuda.device_count())))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", every).split(",")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max(jobs, 1)) as pool:

        def one(number: int, name: str, call: list[str]) -> dict[str, list[Any]]:
            left = seconds - (time.monotonic() - start)
            if left <= 0:
                return {"skipped": [f"{name}: no time"]}
            file = Path(folder) / f"{number}.json"
            files = ["--output", str(file), "--lock", str(Path(folder) / "lock")]
            try:
                ended = subprocess.run(
                    [sys.executable, "-m", module, *call, *files], timeout=left, check=False,
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                    env=os.environ | {"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]},
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return {"skipped": [f"{name}: no time: it was killed"]}
            said = f"{time.monotonic() - start:.0f} s: {' '.join(call)}"
            print(f"{said}\n{ended.stdout}", flush=True)
            last = ended.stdout.strip().splitlines()[-1:] or [""]
            if ended.returncode == 0:
                return json.loads(file.read_text())
            found = json.loads(file.read_text()) if file.exists() else {}  # it may have measured
            failed = f"{name}: ended with {ended.returncode}: {last[0]}"
            return {**found, "skipped": [*found.get("skipped", []), failed]}

        parts = [*pool.map(one, range(len(calls)), calls, calls.values())]
    return {key: [line for part in parts for line in part.get(key, [])]
            for key in ("rows", "skipped")}  # fmt: skip

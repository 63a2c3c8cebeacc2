# SPDX-License-Identifier: Apache-2.0
"""Processes that prepare side by side and measure one at a time.

Compiling a model takes a minute of one processor core and hardly any of the GPU; measuring needs
the machine to itself. So each process holds a shared lock while it prepares and the exclusive lock
while it measures: no process measures while another prepares. A process that still imports its
modules holds no lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def _holding(lock: Path | None, how: int) -> Iterator[None]:
    if lock is None:
        yield
        return
    with lock.open("w") as file:  # closing the file releases the lock
        fcntl.flock(file, how)
        yield


def preparing(lock: Path | None) -> contextlib.AbstractContextManager[None]:
    """Holds the shared lock: others may prepare too. Does nothing if `lock` is None."""
    return _holding(lock, fcntl.LOCK_SH)


def measuring(lock: Path | None) -> contextlib.AbstractContextManager[None]:
    """Holds the exclusive lock: no other process prepares or measures. Does nothing for None."""
    return _holding(lock, fcntl.LOCK_EX)


def collect(
    module: str, calls: Sequence[Sequence[str]], jobs: int, seconds: float
) -> list[tuple[dict[str, Any], str | None]]:
    """As `run`: for each call what it wrote to the JSON file behind its "--output", and why not."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{number}.json" for number in range(len(calls))]
        with_files = [[*call, "--output", str(file)]
                      for call, file in zip(calls, files, strict=True)]  # fmt: skip
        problems = run(module, with_files, jobs, seconds)
        return [(json.loads(file.read_text()) if problem is None else {}, problem)
                for file, problem in zip(files, problems, strict=True)]  # fmt: skip


def run(module: str, calls: Sequence[Sequence[str]], jobs: int, seconds: float) -> list[str | None]:
    """Runs `python -m module` once with the arguments of each call, and with "--lock FILE".

    At most `jobs` processes run at a time. Processes that have not ended after `seconds` are
    killed. Returns for each call None, or why it gave no result. A process's output is shown when
    the process has ended.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max(jobs, 1)) as pool:
        lock = ["--lock", str(Path(folder) / "lock")]

        def one(call: Sequence[str]) -> str | None:
            left = seconds - (time.monotonic() - start)
            if left <= 0:
                return "no time"
            command = [sys.executable, "-m", module, *call, *lock]
            output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            try:
                ended = subprocess.run(command, timeout=left, check=False, **output)  # type: ignore[call-overload]
            except subprocess.TimeoutExpired:
                return "no time: it was killed"
            said = f"{time.monotonic() - start:.0f} s: {' '.join(call)}"
            print(f"{said}\n{ended.stdout}", flush=True)
            last = ended.stdout.strip().splitlines()[-1:] or [""]
            return f"ended with {ended.returncode}: {last[0]}" if ended.returncode else None

        return list(pool.map(one, calls))

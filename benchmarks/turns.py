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
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path


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


def run(module: str, calls: Sequence[Sequence[str]], jobs: int, seconds: float) -> list[str | None]:
    """Runs `python -m module` once with the arguments of each call, and with "--lock FILE".

    At most `jobs` processes run at a time. Processes that have not ended after `seconds` are
    killed. Returns for each call None, or why it gave no result. A process's output is shown when
    the process has ended.
    """
    start = time.monotonic()
    waiting = list(range(len(calls)))
    running: dict[int, subprocess.Popen[bytes]] = {}
    problems: list[str | None] = [None] * len(calls)
    with tempfile.TemporaryDirectory() as folder:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    number = waiting.pop(0)
                    if time.monotonic() - start > seconds:
                        problems[number] = "no time"
                        continue
                    command = [sys.executable, "-m", module, *calls[number]]
                    command += ["--lock", str(Path(folder) / "lock")]
                    with (Path(folder) / str(number)).open("wb") as out:
                        running[number] = subprocess.Popen(command, stdout=out, stderr=out)
                for number, process in list(running.items()):
                    if time.monotonic() - start > seconds:
                        process.kill()
                        process.wait()
                    if process.poll() is None:
                        continue
                    del running[number]
                    said = (Path(folder) / str(number)).read_text(errors="replace")
                    print(f"{time.monotonic() - start:.0f} s: {' '.join(calls[number])}\n{said}",
                          flush=True)  # fmt: skip
                    if process.returncode != 0:
                        last = said.strip().splitlines()[-1:] or [""]
                        problems[number] = f"ended with {process.returncode}: {last[0]}"
                time.sleep(0.05)
        finally:
            for process in running.values():
                process.kill()
    return problems

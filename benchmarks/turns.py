"""Processes that prepare side by side and measure one at a time.

Compiling a model takes a minute of one processor core and next to nothing of the GPU; measuring
needs the machine alone. So each process holds a lock with the others while it prepares, and by
itself while it measures: nobody measures as long as anyone prepares. A process that has not begun
to prepare, but imports its modules, does not count.
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
    with lock.open("w") as file:  # closed, it is given back
        fcntl.flock(file, how)
        yield


def preparing(lock: Path | None) -> contextlib.AbstractContextManager[None]:
    """While this is held others may prepare too. Without a lock there are no others."""
    return _holding(lock, fcntl.LOCK_SH)


def measuring(lock: Path | None) -> contextlib.AbstractContextManager[None]:
    """While this is held nobody else prepares or measures."""
    return _holding(lock, fcntl.LOCK_EX)


def run(module: str, calls: Sequence[Sequence[str]], jobs: int, seconds: float) -> list[str | None]:
    """Runs `python -m module` with each of these arguments, and with "--lock FILE".

    At most `jobs` of them at a time. Those that have not ended when the seconds are over are
    killed. For each: None, or why it gave no result. What a process prints is shown when it has
    ended.
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

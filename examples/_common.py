"""What the examples share: progress lines, the device, timing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def say(text: str = "") -> None:
    """A line that is seen at once."""
    print(text, flush=True)


def device() -> torch.device:
    """The GPU where there is one that this PyTorch can use."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name(where: torch.device) -> str:
    return torch.cuda.get_device_name(where) if where.type == "cuda" else "the CPU"


def milliseconds(call: Callable[[], Any], where: torch.device, repeats: int = 20) -> float:
    """Median time of a call: between events on a GPU, by the clock elsewhere."""
    times = []
    for repeat in range(repeats + 2):  # two to warm up
        if where.type == "cuda":
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            torch.cuda.synchronize(where)
            elapsed = start.elapsed_time(end)
        else:
            began = time.perf_counter()
            call()
            elapsed = (time.perf_counter() - began) * 1e3
        if repeat >= 2:
            times.append(elapsed)
    return statistics.median(times)

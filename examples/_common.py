# SPDX-License-Identifier: Apache-2.0
"""What the examples share: progress lines, the device, errors, timing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def say(text: str = "") -> None:
    """Prints a line without buffering it."""
    print(text, flush=True)


def device() -> torch.device:
    """The GPU if there is one that this PyTorch can use, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name(where: torch.device) -> str:
    return torch.cuda.get_device_name(where) if where.type == "cuda" else "the CPU"


def largest_error(stock: dict[str, torch.Tensor], fused: dict[str, torch.Tensor]) -> float:
    """The largest relative error, in the 2-norm, over the output and all gradients."""
    return max(float((fused[name] - want).norm() / want.norm()) for name, want in stock.items())


def graphed(call: Callable[[], Any], where: torch.device) -> Callable[[], Any]:
    """On a GPU, the call as a CUDA graph, whose time is the device's alone, without launches."""
    if where.type != "cuda":
        return call
    stream = torch.cuda.Stream(where)
    stream.wait_stream(torch.cuda.current_stream(where))
    with torch.cuda.stream(stream):
        for _ in range(3):  # first calls choose kernels and allocate
            call()
    torch.cuda.current_stream(where).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def milliseconds(call: Callable[[], Any], where: torch.device, repeats: int = 20) -> float:
    """Median time of a call: between events on a GPU, by the clock elsewhere."""
    times = []
    for repeat in range(repeats + 2):  # two to warm up
        if where.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
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

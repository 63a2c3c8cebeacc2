"""How device time and call overhead are measured, in one place.

Device time: several distinct inputs, together larger than the L2 cache, are worked through by
calls captured in one CUDA graph; the time is the median over replays divided by the calls. The
outputs of as many calls as there are inputs stay alive, so that writes do not land in one cached
buffer either. Data is random, never zeros.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

Call = Callable[[], Any]

# One replay lasts about this long: long enough to hide what a graph launch costs.
REPLAY_SECONDS = 1e-3
MAX_INPUTS = 256
MAX_CALLS = 512
# Memory of finished graphs goes back to the device when the allocator holds more than this.
MAX_RESERVED = 24 << 30

DEVICE = "cuda"


def input_count(bytes_per_call: int, l2_bytes: int, limit: int = MAX_INPUTS) -> int:
    """How many distinct inputs make calls of `bytes_per_call` overflow L2 three times, at least 2.

    Tiny tensors stop at `limit`: a graph of ten thousand calls measures nothing better.
    """
    return max(2, min(limit, math.ceil(3 * l2_bytes / max(bytes_per_call, 1))))


def call_count(inputs: int, bytes_per_call: int, seconds: float = REPLAY_SECONDS) -> int:
    """Calls in one graph: each input at least once, and about `seconds` of work at 4 TB/s."""
    wanted = math.ceil(seconds * 4e12 / max(bytes_per_call, 1))
    return max(inputs, min(wanted, MAX_CALLS))


def l2_bytes() -> int:
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)


class Graph:
    """`count` calls captured in one CUDA graph, cycling over `calls`, one per distinct input."""

    def __init__(self, calls: Sequence[Call], count: int | None = None) -> None:
        self.count = max(count or 0, len(calls))
        self.calls = calls  # their inputs live as long as the graph that reads them
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # lazy initialisation and compilation stay out of the capture
                calls[0]()
        torch.cuda.synchronize()

        # Not `with torch.cuda.graph(...)`: that empties the allocator's cache at every capture.
        self.graph = torch.cuda.CUDAGraph()
        self.outputs: deque[Any] = deque(maxlen=len(calls))
        with torch.cuda.stream(stream):
            self.graph.capture_begin()
            try:
                for call in itertools.islice(itertools.cycle(calls), self.count):
                    self.outputs.append(call())
            finally:
                self.graph.capture_end()
        torch.cuda.synchronize()
        self.first = _replay_times(self.graph, 3)[-1]  # microseconds of one replay, warm

    def time(self, seconds: float = 0.03, min_replays: int = 10, max_replays: int = 60) -> float:
        """Median device microseconds of one call; as many replays as fit in `seconds`."""
        replays = int(max(min_replays, min(max_replays, seconds * 1e6 / max(self.first, 1e-3))))
        return statistics.median(_replay_times(self.graph, replays)) / self.count

    def free(self) -> None:
        """Gives the graph's memory back to the allocator, and from there if it holds much."""
        self.outputs.clear()
        self.calls = ()
        self.graph.reset()
        if torch.cuda.memory_reserved() > MAX_RESERVED:
            torch.cuda.empty_cache()


def graph_time(calls: Sequence[Call], *, count: int | None = None, **options: Any) -> float:
    """Median device microseconds of one call: see `Graph` and its `time`."""
    graph = Graph(calls, count)
    try:
        return graph.time(**options)
    finally:
        graph.free()


def _replay_times(graph: torch.cuda.CUDAGraph, replays: int) -> list[float]:
    """Microseconds of each replay, all enqueued before the first is waited for."""
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(replays)
    ]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in events]


def copy_time(rows: int, cols: int, dtype: torch.dtype, **options: Any) -> float:
    """Device microseconds of an elementwise kernel that reads and writes one rows x cols tensor."""
    size = rows * cols * dtype.itemsize
    inputs = input_count(2 * size, l2_bytes())
    xs = [torch.randn(rows, cols, device=DEVICE, dtype=dtype) for _ in range(inputs)]
    ys = [torch.empty_like(x) for x in xs]

    def call(x: torch.Tensor, y: torch.Tensor) -> Call:
        return lambda: torch.mul(x, 2, out=y)

    calls = [call(x, y) for x, y in zip(xs, ys, strict=True)]
    return graph_time(calls, count=call_count(inputs, 2 * size), **options)


def overhead(call: Call, *, calls: int = 100, repeats: int = 40) -> float:
    """Host microseconds of one call: what the caller waits for while the device works behind.

    Calls go in batches that the launch queue holds, so the device never pushes back.
    """
    times = []
    for _ in range(repeats + 5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times[5:])


def wall_time(calls: Sequence[Call], *, rounds: int = 20, repeats: int = 9) -> float:
    """Wall microseconds of one call in a loop that is waited for at its end."""
    times = []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(rounds):
            for call in calls:
                call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / (rounds * len(calls)) * 1e6)
    return statistics.median(times[2:])

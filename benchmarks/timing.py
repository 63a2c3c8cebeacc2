# SPDX-License-Identifier: Apache-2.0
"""How device time, host time and wall time are measured, in one place.

Device time: one CUDA graph captures calls on several distinct inputs of random data, together
larger than the L2 cache; the time is the median over replays divided by the number of calls. As
many outputs stay alive as there are inputs, so that writes do not go to one cached buffer either.
Host and wall time: a shared host's speed changes by the minute, so compared variants take turns.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

Call = Callable[[], Any]
T = TypeVar("T")

# One replay lasts about this long: long enough to hide what a graph launch costs.
REPLAY_SECONDS = 1e-3
MAX_INPUTS = 256
MAX_CALLS = 512
PATIENCE = 30  # attempts at a call for which there is not enough memory
MAX_RESERVED = 24 << 30  # more than this of the allocator goes back to the device
DEVICE = "cuda"


def input_count(bytes_per_call: int, limit: int = MAX_INPUTS) -> int:
    """The number of distinct inputs, 2 to `limit`, whose calls overflow L2 three times. Only tiny
    tensors reach `limit`: a graph of ten thousand calls would not measure any better."""
    l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(2, min(limit, math.ceil(3 * l2_bytes / max(bytes_per_call, 1))))


class Graph:
    """Calls, one per distinct input, captured in one CUDA graph: each at least once, then again
    from the first, until they make `work` seconds at 4 TB/s, or are as many as `most`."""

    def __init__(self, calls: Sequence[Call], bytes_per_call: int, work: float = REPLAY_SECONDS,
                 most: int = MAX_CALLS) -> None:  # fmt: skip
        wanted = math.ceil(work * 4e12 / max(bytes_per_call, 1))
        self.count = max(len(calls), min(wanted, most))
        self.calls = calls  # keeps the inputs alive as long as the graph that reads them
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in [*calls, calls[0], calls[0]]:
                call()  # compilation, and a backward's forward, stay out of the capture
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
        """Gives the graph's memory to the allocator, which frees its cache if that is large."""
        self.outputs.clear()
        self.calls = ()
        self.graph.reset()
        if torch.cuda.memory_reserved() > MAX_RESERVED:
            torch.cuda.empty_cache()


def sentence(problem: BaseException) -> str:
    """The first line of the problem's text. Raises the problem if it lost the CUDA context."""
    text = str(problem).strip() or type(problem).__name__
    if "CUDA error" in text or "device-side assert" in text:
        raise problem
    return text.splitlines()[0]


def patiently(call: Callable[[], Any], free: Callable[[], Any] = lambda: None) -> Any:
    """A call's result. Without memory it waits: other processes free theirs once prepared."""
    for _ in range(PATIENCE - 1):
        with contextlib.suppress(torch.OutOfMemoryError):
            return call()
        free()
        torch.cuda.empty_cache()
        time.sleep(2)
    return call()


def graph_time(calls: Sequence[Call], bytes_per_call: int, work: float = REPLAY_SECONDS,
               most: int = MAX_CALLS, **options: Any) -> float:  # fmt: skip
    """Median device microseconds of one call: see `Graph` and its `time`, which has the options."""
    graph = Graph(calls, bytes_per_call, work, most)
    try:
        return graph.time(**options)
    finally:
        graph.free()


def _replay_times(graph: torch.cuda.CUDAGraph, replays: int) -> list[float]:
    """Microseconds of each replay, all enqueued before the first is waited for."""
    event = functools.partial(torch.cuda.Event, enable_timing=True)
    events = [(event(), event()) for _ in range(replays)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in events]


def copy_time(rows: int, cols: int, dtype: torch.dtype, **options: Any) -> float:
    """Device microseconds of an elementwise kernel that reads and writes one rows x cols tensor."""
    size = 2 * rows * cols * dtype.itemsize
    made = functools.partial(torch.randn, rows, cols, device=DEVICE, dtype=dtype)
    xs = [made() for _ in range(input_count(size))]
    calls = [functools.partial(torch.mul, x, 2, out=torch.empty_like(x)) for x in xs]
    return graph_time(calls, size, **options)


def wall_time(calls: Sequence[Call], rounds: int = 5) -> float:
    """Wall microseconds of one call in a loop that is synchronized at its end, after a warm-up."""
    for call in calls:
        call()
    synchronize()
    start = time.perf_counter()
    for _ in range(rounds):
        for call in calls:
            call()
    synchronize()
    return (time.perf_counter() - start) / (rounds * len(calls)) * 1e6


def synchronize() -> None:
    if DEVICE == "cuda":  # a CPU has nothing to wait for
        torch.cuda.synchronize()


def warm_up_device(seconds: float = 0.5) -> None:
    """Brings the clocks up before the first measurement."""
    x = torch.randn(1 << 26, device=DEVICE)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(20):
            torch.mul(x, 2)
        torch.cuda.synchronize()


def in_turns(names: Iterable[str], rounds: int, measure: Callable[[str], T],
             seconds: float = math.inf, least: int = 0) -> dict[str, list[T]]:  # fmt: skip
    """What is measured of every name in each round, by name; after `seconds`, and at least `least`
    rounds, no further round begins. Each begins with the next name, so that none is favoured. The
    garbage collector is off, and what exists is frozen, so that gc.collect() takes no time."""
    found: dict[str, list[T]] = {name: [] for name in names}
    start = time.perf_counter()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        order = deque(found)
        for number in range(rounds):
            if number >= least and time.perf_counter() - start > seconds:
                break
            for name in order:
                found[name].append(measure(name))
            order.rotate(-1)
    finally:
        gc.enable()
        gc.unfreeze()
    return found


def summary(name: str, times: Sequence[float], unit: str = "us") -> dict[str, float]:
    """The median and the best of several measurements, as a results file names them."""
    return {f"{name}_{unit}": round(statistics.median(times), 3),
            f"{name}_best_{unit}": round(min(times), 3)}  # fmt: skip


@dataclass(frozen=True)
class Kernel:
    """The runs of all kernels of one name: microseconds in total, and their number."""

    name: str
    us: float
    count: int


def kernels_of(call: Callable[[], Any]) -> list[Kernel]:
    """The kernels, copies and fills that the device runs for a call, by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as run:
        call()
        torch.cuda.synchronize()
    # Without the host's calls and without PyTorch's annotations that span several kernels.
    return [Kernel(event.key, event.self_device_time_total, event.count)
            for event in run.key_averages()
            if event.device_type.name == "CUDA" and not event.is_user_annotation]  # fmt: skip

# SPDX-License-Identifier: Apache-2.0
"""How device time, host time and wall time are measured, in one place.

Device time: one CUDA graph captures calls on several distinct inputs, which together are larger
than the L2 cache; the time is the median over replays divided by the number of calls. The outputs
of as many calls as there are inputs stay alive, so that writes do not go to one cached buffer
either. Data is random, never zeros.

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
from collections.abc import Callable, Iterator, Sequence
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
# Memory of finished graphs goes back to the device when the allocator holds more than this.
MAX_RESERVED = 24 << 30

DEVICE = "cuda"


def input_count(bytes_per_call: int, l2_bytes: int, limit: int = MAX_INPUTS) -> int:
    """The number of distinct inputs, 2 to `limit`, whose calls overflow L2 three times.

    Only tiny tensors reach `limit`: a graph of ten thousand calls would not measure any better.
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
    for left in reversed(range(PATIENCE)):
        try:
            return call()
        except torch.OutOfMemoryError:
            if left == 0:
                raise
        free()
        torch.cuda.empty_cache()
        time.sleep(2)


def graph_time(calls: Sequence[Call], *, count: int | None = None, **options: Any) -> float:
    """Median device microseconds of one call: see `Graph` and its `time`."""
    graph = Graph(calls, count)
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
    size = rows * cols * dtype.itemsize
    inputs = input_count(2 * size, l2_bytes())
    xs = [torch.randn(rows, cols, device=DEVICE, dtype=dtype) for _ in range(inputs)]
    ys = [torch.empty_like(x) for x in xs]

    def call(x: torch.Tensor, y: torch.Tensor) -> Call:
        return lambda: torch.mul(x, 2, out=y)

    calls = [call(x, y) for x, y in zip(xs, ys, strict=True)]
    return graph_time(calls, count=call_count(inputs, 2 * size), **options)


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
    """Waits for the device; a CPU has nothing to wait for."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def warm_up_device(seconds: float = 0.5) -> None:
    """Brings the clocks up before the first measurement."""
    x = torch.randn(1 << 26, device=DEVICE)
    y = torch.empty_like(x)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(20):
            torch.mul(x, 2, out=y)
        torch.cuda.synchronize()


def turns(names: Sequence[str], rounds: int) -> Iterator[str]:
    """Every name once a round; each round begins with the next name, so that none is favoured."""
    for number in range(rounds):
        for place in range(len(names)):
            yield names[(number + place) % len(names)]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Disables the garbage collector, which would otherwise run at any time.

    Existing objects are frozen, so that an explicit gc.collect() in between takes no time.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def in_turns(names: Sequence[str], rounds: int, measure: Callable[[str], T]) -> dict[str, list[T]]:
    """What is measured of every name in each of the rounds, by name."""
    found: dict[str, list[T]] = {name: [] for name in names}
    with quiet():
        for name in turns(names, rounds):
            found[name].append(measure(name))
    return found


def summary(name: str, times: Sequence[float], unit: str = "us") -> dict[str, float]:
    """The median and the best of several measurements, as a results file names them."""
    return {
        f"{name}_{unit}": round(statistics.median(times), 3),
        f"{name}_best_{unit}": round(min(times), 3),
    }


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
    return [
        Kernel(event.key, event.self_device_time_total, event.count)
        for event in run.key_averages()
        # Without the host's calls and without PyTorch's annotations that span several kernels.
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]

# SPDX-License-Identifier: Apache-2.0
"""What a LayerNorm costs its caller: host time a layer, a training step, a large norm on a CPU.

    python -m benchmarks.overhead                 on the GPU, into its results file
    python -m benchmarks.overhead --device cpu    on the CPU, into benchmarks/results/cpu.json

Host time is taken on a chain of 100 norms over a tiny tensor, so that the device never holds the
host up. The variants (nn.LayerNorm, FusedLayerNorm, on the CPU a swapped nn.LayerNorm, on the GPU
nn.LayerNorm under override_aten, and the same of RMSNorm) take turns, round after round, and the
median and the best of the rounds are kept; the device time beside them is the sum of all kernels,
by the profiler.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import results, timing

LAYERS = 100
SHAPE = (4, 256)
ROUNDS = 31
# Activations of a BERT-base and a ViT-L training step: (name, shape).
STEPS = (("BERT-base", (8, 512, 768)), ("ViT-L", (32, 577, 1024)))
CPU_SHAPE = (4096, 768)
# What measure() adds to the results file.
PARTS = ("overhead_stamp", "call_overhead", "training_step")

RMS = "rms_"
Norm = Callable[..., nn.Module]

# Runs a call and returns its cost in microseconds and its result.
Measure = Callable[[Callable[[], Any]], "tuple[float, Any]"]


def host_us(call: Callable[[], Any]) -> tuple[float, Any]:
    """Microseconds until the call returns, though the device may still work, and its result."""
    timing.synchronize()
    start = time.perf_counter()
    result = call()
    end = time.perf_counter()
    timing.synchronize()
    return (end - start) * 1e6, result


def device_us(call: Callable[[], Any]) -> tuple[float, Any]:
    """Device microseconds of the call, the sum over its kernels, and its result."""
    kept: list[Any] = []
    kernels = timing.kernels_of(lambda: kept.append(call()))
    return sum(kernel.us for kernel in kernels), kept[0]


@contextlib.contextmanager
def variant_of(name: str) -> Iterator[Norm]:
    """What makes a variant's module; "override" has override_aten() in force inside the context.

    The variants of RMSNorm have a name that begins with "rms_".
    """
    import fused_layernorm

    is_rms = name.startswith(RMS)
    stock: Norm = nn.RMSNorm if is_rms else nn.LayerNorm
    if name.endswith("override"):
        with fused_layernorm.override_aten():
            yield stock
    elif name.endswith("ours"):
        yield fused_layernorm.FusedRMSNorm if is_rms else fused_layernorm.FusedLayerNorm
    elif name.endswith("swapped"):
        yield lambda *args, **kwargs: fused_layernorm.swap_norms(stock(*args, **kwargs))
    else:
        yield stock


def variants() -> tuple[str, ...]:
    """The variants on this device; override_aten() is for CUDA alone."""
    return ("eager", "ours", "swapped" if timing.DEVICE == "cpu" else "override")


class Chain:
    """LAYERS norms of one class, and every way they are called."""

    def __init__(self, module: Norm) -> None:
        self.norms = [module(SHAPE[-1], device=timing.DEVICE) for _ in range(LAYERS)]
        self.x = torch.randn(SHAPE, device=timing.DEVICE)
        self.dy = torch.randn(SHAPE, device=timing.DEVICE)
        self.halves = [self.x.bfloat16().requires_grad_() for _ in self.norms]

    def run(self) -> torch.Tensor:
        y = self.x
        for norm in self.norms:
            y = norm(y)
        return y

    def run_half(self) -> list[torch.Tensor]:
        """Each norm by itself: under autocast only the first of a chain has half-precision x."""
        with torch.autocast(timing.DEVICE, torch.bfloat16):
            return [norm(x) for norm, x in zip(self.norms, self.halves, strict=True)]

    def visit(self, measure: Measure) -> dict[str, float]:
        """Microseconds a layer of each way of calling, each measured once.

        "no_grad" is forward without gradients, "inference" the same under inference_mode. "grad" is
        forward with gradients, "backward" the backward pass after it, "step" the sum of both;
        "autocast" and "autocast_backward" are the same as "grad" and "backward" with half-precision
        x under autocast.
        """
        found: dict[str, float] = {}

        def note(name: str, call: Callable[[], Any]) -> Any:
            us, result = measure(call)
            found[name] = us / LAYERS
            return result

        with torch.no_grad():
            note("no_grad", self.run)
        with torch.inference_mode():
            note("inference", self.run)
        y = note("grad", self.run)
        note("backward", lambda: y.backward(self.dy))
        found["step"] = found["grad"] + found["backward"]
        self.forget()
        ys = note("autocast", self.run_half)
        dys = [torch.ones_like(y) for y in ys]
        note("autocast_backward", lambda: torch.autograd.backward(ys, dys))
        self.forget()
        return found

    def forget(self) -> None:
        for x in self.halves:
            x.grad = None
        for norm in self.norms:
            norm.zero_grad()


def make_chains() -> dict[str, Chain]:
    chains = {}
    for name in (*variants(), *(RMS + variant for variant in variants())):
        with variant_of(name) as module:
            chains[name] = Chain(module)
            chains[name].visit(host_us)
    return chains


def call_overhead(chains: dict[str, Chain], rounds: int) -> dict[str, dict[str, float]]:
    """Host microseconds a layer: for each way of calling, each variant's median and best.

    The keys of an entry are "ours_us", "ours_best_us", "rms_ours_us" and so on.
    """
    host: dict[str, list[dict[str, float]]] = {name: [] for name in chains}
    with quiet():
        for name in timing.turns(tuple(chains), rounds):
            with variant_of(name):
                chains[name].visit(host_us)  # warms up after the switch
                host[name].append(chains[name].visit(host_us))
    entries: dict[str, dict[str, float]] = {}
    for way in host["eager"][0]:
        entries[way] = {}
        for name, visits in host.items():
            entries[way] |= timing.summary(name, [visit[way] for visit in visits])
    return entries


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


@dataclass
class Step:
    """A training step of the module alone: its entry of the results file, and calls to time."""

    entry: dict[str, Any]
    calls: dict[str, list[timing.Call]]  # by variant


def make_steps() -> Iterator[Step]:
    """Forward and backward of the module, ours and nn.LayerNorm, one size after the other.

    bfloat16 activations with float32 weights go through autocast, as in training: on CUDA
    nn.LayerNorm accepts this mixture in no other way.
    """
    for name, shape in STEPS:
        for dtype, weight_dtype in (
            (torch.bfloat16, torch.float32),
            (torch.bfloat16, torch.bfloat16),
            (torch.float32, torch.float32),
        ):
            autocast = dtype != weight_dtype
            calls = {}
            for key in ("ours", "eager"):
                with variant_of(key) as module:
                    norm = module(shape[-1], device=timing.DEVICE, dtype=weight_dtype)
                calls[key] = _step_calls(norm, shape, dtype, autocast)
            size = "x".join(str(length) for length in shape)
            kinds = f"{_short(dtype)}, weights {_short(weight_dtype)}"
            entry = {
                "name": f"{name} {size} {kinds}" + (", autocast" if autocast else ""),
                "shape": list(shape),
                "dtype": _short(dtype),
                "weight_dtype": _short(weight_dtype),
                "autocast": autocast,
            }
            yield Step(entry, calls)


def measure(rounds: int = ROUNDS) -> dict[str, Any]:
    """PARTS of the results file: the stamp of "call_overhead" and "training_step", and these two,
    with device times.

    The wall time of a step is that of forward and backward in microseconds, taken over many steps
    with one synchronization at the end.
    """
    chains = make_chains()
    overhead = call_overhead(chains, rounds)
    entries = []
    for step in make_steps():
        walls: dict[str, list[float]] = {key: [] for key in step.calls}
        with quiet():
            for key in timing.turns(tuple(step.calls), rounds):
                walls[key].append(timing.wall_time(step.calls[key]))
        entries.append(step.entry)
        for key, times in walls.items():
            step.entry.update(timing.summary(key, times))

    # The profiler may leave the host slower than it was: it comes last.
    for name, chain in chains.items():
        with variant_of(name):
            for way, us in chain.visit(device_us).items():
                overhead[way][f"{name}_device_us"] = round(us, 3)
    for entry, step in zip(entries, make_steps(), strict=True):
        for key, calls in step.calls.items():
            us = sum(kernel.us for kernel in timing.kernels_of(functools.partial(_all, calls)))
            entry[f"{key}_device_us"] = round(us / len(calls), 3)
    return dict(zip(PARTS, (results.stamp(), overhead, entries), strict=True))


def _all(calls: Sequence[timing.Call]) -> None:
    for call in calls:
        call()


def _step_calls(
    module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype, autocast: bool
) -> list[timing.Call]:
    """Steps over distinct inputs, together larger than L2."""
    size = dtype.itemsize
    for length in shape:
        size *= length
    out_dtype = torch.float32 if autocast else dtype

    def step(x: torch.Tensor, dy: torch.Tensor) -> timing.Call:
        def call() -> None:
            with torch.autocast(timing.DEVICE, torch.bfloat16, enabled=autocast):
                y = module(x)
            y.backward(dy)
            x.grad = None
            for parameter in module.parameters():
                parameter.grad = None

        return call

    calls = []
    for _ in range(timing.input_count(2 * size, timing.l2_bytes())):
        x = torch.randn(shape, device=timing.DEVICE, dtype=dtype, requires_grad=True)
        calls.append(step(x, torch.randn(shape, device=timing.DEVICE, dtype=out_dtype)))
    return calls


def cpu_tensors(rounds: int) -> list[dict[str, Any]]:
    """Wall microseconds of one large norm on the CPU, forward and backward, the variants in turns.

    "forward" is without gradients, "backward" the backward pass after a forward with them.
    """
    entries = []
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(CPU_SHAPE, dtype=dtype, requires_grad=True)
        dy = torch.randn(CPU_SHAPE, dtype=dtype)
        norms = {}
        for name in variants():
            with variant_of(name) as module:
                norms[name] = module(CPU_SHAPE[-1], dtype=dtype)

        def visit(norm: nn.Module, x: torch.Tensor = x, dy: torch.Tensor = dy) -> dict[str, float]:
            with torch.no_grad():
                forward, _ = host_us(lambda: norm(x))
            y = norm(x)
            backward, _ = host_us(lambda: y.backward(dy))
            x.grad = None
            norm.zero_grad()
            return {"forward": forward, "backward": backward}

        times: dict[str, list[dict[str, float]]] = {name: [] for name in norms}
        with quiet():
            for name in timing.turns(tuple(norms), rounds):
                visit(norms[name])
                times[name].append(visit(norms[name]))
        for way in ("forward", "backward"):
            entry: dict[str, Any] = {"shape": list(CPU_SHAPE), "dtype": _short(dtype), "way": way}
            for name, visits in times.items():
                entry |= timing.summary(name, [found[way] for found in visits])
            entries.append(entry)
    return entries


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def overhead_text(entries: dict[str, dict[str, float]]) -> str:
    """The table of call_overhead: median (best) host microseconds, ratio, device microseconds."""
    lines = []
    for prefix, norm in (("", "LayerNorm"), (RMS, "RMSNorm")):
        labels = {"eager": f"nn.{norm}", "ours": f"Fused{norm}", "swapped": "swapped",
                  "override": "override_aten"}  # fmt: skip
        names = [prefix + name for name in labels
                 if any(f"{prefix}{name}_us" in entry for entry in entries.values())]  # fmt: skip
        if not names:
            continue
        head = "".join(f"{labels[name.removeprefix(prefix)]:>40}" for name in names)
        lines.append(f"{'host us a layer':<20}" + head)
        for way, entry in entries.items():
            line = f"  {way:<18}"
            for name in names:
                us, best = entry.get(f"{name}_us"), entry.get(f"{name}_best_us")
                if us is None:
                    line += f"{'-':>40}"
                    continue
                said = f"{us:.2f}" + ("" if best is None else f" ({best:.2f})")
                said += "" if name == names[0] else f" x{us / entry[names[0] + '_us']:.2f}"
                device = entry.get(f"{name}_device_us")
                said += "" if device is None else f", device {device:.2f}"
                line += f"{said:>40}"
            lines.append(line)
    return "\n".join(lines)


def entries_text(head: str, entries: list[tuple[str, dict[str, Any]]]) -> str:
    """A line for each (name, entry): the wall times of ours and of nn.LayerNorm."""
    lines = [f"{head}{'FusedLayerNorm':>20}{'nn.LayerNorm':>22}"]
    for name, entry in entries:
        line = f"  {name:<58}"
        for key in ("ours", "eager"):
            best = entry.get(f"{key}_best_us")
            said = f"{entry[f'{key}_us']:.1f}" + ("" if best is None else f" ({best:.1f})")
            line += f"{said:>20}"
        line += f"   {entry['eager_us'] / entry['ours_us']:.2f} times faster"
        if "ours_device_us" in entry:
            line += f", device {entry['eager_device_us'] / entry['ours_device_us']:.2f}"
        lines.append(line)
    return "\n".join(lines)


def steps_text(entries: list[dict[str, Any]]) -> str:
    head = "forward + backward of the module, wall us: median (best)"
    return entries_text(f"{head:<60}", [(entry["name"], entry) for entry in entries])


def cpu_text(part: dict[str, Any]) -> str:
    named = [
        (f"{entry['way']} {'x'.join(map(str, entry['shape']))} {entry['dtype']}", entry)
        for entry in part["tensors"]
    ]
    head = f"on the CPU, {part['threads']} threads, us: median (best)"
    return overhead_text(part["call_overhead"]) + "\n\n" + entries_text(f"{head:<60}", named)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of every measurement")
    parser.add_argument("--output", type=Path, help="the results file")
    arguments = parser.parse_args(argv)
    rounds = arguments.rounds
    if arguments.device == "cpu":
        timing.DEVICE = "cpu"
        part = {
            **results.stamp(),
            "threads": torch.get_num_threads(),
            "call_overhead": call_overhead(make_chains(), rounds),
            "tensors": cpu_tensors(rounds),
        }
        print(cpu_text(part))
        path = arguments.output or results.RESULTS / "cpu.json"
        results.write(path, {**results.cpu(), "cpu": part})
    else:
        from benchmarks.ours import require_kernels

        require_kernels()
        timing.warm_up_device()
        parts = measure(rounds)
        print(overhead_text(parts["call_overhead"]) + "\n\n" + steps_text(parts["training_step"]))
        path = arguments.output or results.default_path(torch.cuda.get_device_name())
        for name, value in parts.items():
            results.update(path, name, value)
    print(f"written: {path}")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""What a norm costs its caller: host time a layer, and a training step on a GPU.

    python -m benchmarks.overhead                 on the GPU, into its results file
    python -m benchmarks.overhead --device cpu    on the CPU, into benchmarks/results/cpu.json

Host time is taken on a chain of 100 norms over a tiny tensor, so that the device never holds the
host up. The variants (the stock module, ours, on the CPU a swapped one, on the GPU the stock one
under override_aten) take turns, round after round, and the median and the best of the rounds are
kept; the device time beside them is the sum of all kernels, by the profiler.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import time
from collections.abc import Callable, Iterator, Sequence
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
STEP_DTYPES = ((torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16),
               (torch.float32, torch.float32))  # fmt: skip
# What measure() adds to the results file.
PARTS = ("overhead_stamp", "call_overhead", "training_step")

# The variants of each norm by their prefix in a results file, with their labels.
NORMS = {
    "": {"eager": "nn.LayerNorm", "ours": "FusedLayerNorm", "swapped": "swapped LayerNorm",
         "override": "override_aten()"},
    "rms_": {"eager": "nn.RMSNorm", "ours": "FusedRMSNorm", "swapped": "swapped RMSNorm",
             "override": "override_aten() of RMSNorm"},
    "group_": {"eager": "nn.GroupNorm", "ours": "FusedGroupNorm", "swapped": "swapped GroupNorm",
               "override": "override_aten() of GroupNorm"},
}  # fmt: skip
GROUPS = 32  # of the channels of a GroupNorm
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
    """What makes a variant's module; "override" has override_aten() in force inside the context."""
    import fused_layernorm

    kind = name.split("_")[0]
    stock: Norm = nn.LayerNorm
    ours: Norm = fused_layernorm.FusedLayerNorm
    if kind == "rms":
        stock, ours = nn.RMSNorm, fused_layernorm.FusedRMSNorm
    elif kind == "group":
        stock, ours = (
            functools.partial(norm, GROUPS)
            for norm in (nn.GroupNorm, fused_layernorm.FusedGroupNorm)
        )
    if name.endswith("override"):
        with fused_layernorm.override_aten():
            yield stock
    elif name.endswith("ours"):
        yield ours
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

        "no_grad" and "inference" are forward alone, "grad" is forward with gradients, "backward"
        what follows it, "step" both; "autocast..." the same of half-precision x under autocast.
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
    for name in (f"{prefix}{variant}" for prefix in NORMS for variant in variants()):
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


def make_steps() -> Iterator[tuple[dict[str, Any], dict[str, list[timing.Call]]]]:
    """Training steps of the module alone: the entry of the results file, and the calls of ours and
    of nn.LayerNorm, one size after the other.

    bfloat16 activations with float32 weights go through autocast, as in training: on CUDA
    nn.LayerNorm accepts this mixture in no other way.
    """
    for name, shape in STEPS:
        for dtype, weight_dtype in STEP_DTYPES:
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
            yield entry, calls


def measure(rounds: int = ROUNDS) -> dict[str, Any]:
    """PARTS of the results file, with device times. The wall time of a step is that of forward and
    backward in microseconds, taken over many steps with one synchronization at the end."""
    chains = make_chains()
    overhead = call_overhead(chains, rounds)
    entries = []
    for entry, calls in make_steps():
        walls: dict[str, list[float]] = {key: [] for key in calls}
        with quiet():
            for key in timing.turns(tuple(calls), rounds):
                walls[key].append(timing.wall_time(calls[key]))
        for key, times in walls.items():
            entry.update(timing.summary(key, times))
        entries.append(entry)

    # The profiler may leave the host slower than it was: it comes last.
    for name, chain in chains.items():
        with variant_of(name):
            for way, us in chain.visit(device_us).items():
                overhead[way][f"{name}_device_us"] = round(us, 3)
    for entry, (_, calls) in zip(entries, make_steps(), strict=True):
        for key, steps in calls.items():
            us = sum(kernel.us for kernel in timing.kernels_of(functools.partial(_all, steps)))
            entry[f"{key}_device_us"] = round(us / len(steps), 3)
    return dict(zip(PARTS, (results.stamp(), overhead, entries), strict=True))


def _all(calls: Sequence[timing.Call]) -> None:
    for call in calls:
        call()


def _step_calls(
    module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype, autocast: bool
) -> list[timing.Call]:
    """Steps over distinct inputs, together larger than L2."""
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

    calls: list[timing.Call] = []
    size = torch.Size(shape).numel() * dtype.itemsize
    for _ in range(timing.input_count(2 * size, timing.l2_bytes())):
        x = torch.randn(shape, device=timing.DEVICE, dtype=dtype, requires_grad=True)
        calls.append(step(x, torch.randn(shape, device=timing.DEVICE, dtype=out_dtype)))
    return calls


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def text(head: str, entries: dict[str, dict[str, Any]], prefix: str = "") -> str:
    """A line for each entry: median (best), the ratio to the stock module, device microseconds."""
    labels = {f"{prefix}{name}": label for name, label in NORMS[prefix].items()}
    names = [name for name in labels if any(f"{name}_us" in entry for entry in entries.values())]
    lines = [f"{head:<58}" + "".join(f"{labels[name]:>40}" for name in names)] if names else []
    for way, entry in entries.items() if names else ():
        line = f"  {way:<56}"
        for name in names:
            us, best = entry.get(f"{name}_us"), entry.get(f"{name}_best_us")
            said = "-" if us is None else f"{us:.2f}"
            said += "" if best is None else f" ({best:.2f})"
            if us is not None and f"{prefix}eager_us" in entry and not name.endswith("eager"):
                said += f" x{us / entry[f'{prefix}eager_us']:.2f}"
            device = entry.get(f"{name}_device_us")
            said += "" if device is None else f", device {device:.2f}"
            line += f"{said:>40}"
        lines.append(line)
    return "\n".join(lines)


def overhead_text(entries: dict[str, dict[str, float]]) -> str:
    return "\n".join(filter(None, (text("host us a layer", entries, norm) for norm in NORMS)))


def steps_text(entries: list[dict[str, Any]]) -> str:
    return text("forward + backward of the module, wall us",
                {entry["name"]: entry for entry in entries})  # fmt: skip


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
        }
        print(overhead_text(part["call_overhead"]))
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

# SPDX-License-Identifier: Apache-2.0
"""What a norm costs its caller: host time a layer, and a training step on a GPU.

    python -m benchmarks.overhead                 on the GPU, into its results file
    python -m benchmarks.overhead --device cpu    on the CPU, into benchmarks/results/cpu.json

Host time is taken on a chain of 100 norms over a tiny tensor, so that the device never holds the
host up. The variants (the stock module, ours, a swapped one, on the GPU the stock one under
override_aten) take turns; kept are the median and the best of the rounds, and the device time by
the profiler. --norms chooses norms, to print their times alone.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import BaseTorchFunctionMode

from benchmarks import results, timing
from benchmarks.ours import package, require_kernels

LAYERS = 100
ROUNDS = 31
# Activations of a BERT-base and a ViT-L training step: (name, shape).
STEPS = (("BERT-base", (8, 512, 768)), ("ViT-L", (32, 577, 1024)))
STEP_DTYPES = ((torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16),
               (torch.float32, torch.float32))  # fmt: skip
# What measure() adds to the results file.
PARTS = ("overhead_stamp", "call_overhead", "training_step")
# The variants of a norm, as people read them.
LABELS = {"eager": "nn.{0}", "ours": "Fused{0}", "swapped": "swapped {0}",
          "override": "override_aten(){1}"}  # fmt: skip


class Norm(NamedTuple):
    """A stock module, the arguments that it is made with, the shape of x, and what is timed."""

    name: str
    arguments: tuple[int, ...]
    shape: tuple[int, ...] = (4, 256)
    variants: tuple[str, ...] = tuple(LABELS)
    channels_last: bool = False

    def make(self, variant: str, *arguments: Any, **options: Any) -> nn.Module:
        if variant == "ours":
            return getattr(package(), f"Fused{self.name}")(*arguments, **options)
        module = getattr(nn, self.name)(*arguments, **options)
        return package().swap_norms(module) if variant == "swapped" else module


_IMAGE: Any = {"shape": (2, 32, 8, 8), "variants": ("eager", "swapped")}
# By the prefix of their variants in a results file.
NORMS = {
    "": Norm("LayerNorm", (256,)),
    "rms_": Norm("RMSNorm", (256,)),
    "group_": Norm("GroupNorm", (32, 256)),
    "instance_": Norm("InstanceNorm2d", (32,), **_IMAGE),
    "instance_nhwc_": Norm("InstanceNorm2d", (32,), channels_last=True, **_IMAGE),
}


class PassedOn(BaseTorchFunctionMode):
    """A mode that is not PyTorch's own, and changes nothing."""


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


class Chain:
    """LAYERS norms of one variant, and every way they are called."""

    def __init__(self, norm: Norm, variant: str) -> None:
        self.norms = [norm.make(variant, *norm.arguments, device=timing.DEVICE)
                      for _ in range(LAYERS)]  # fmt: skip
        order = torch.channels_last if norm.channels_last else torch.contiguous_format
        self.x, self.dy = (torch.randn(norm.shape, device=timing.DEVICE)
                           .contiguous(memory_format=order) for _ in range(2))  # fmt: skip
        self.halves = [self.x.bfloat16().requires_grad_() for _ in self.norms]
        self.x.requires_grad_(not [*self.norms[0].parameters()])
        self.around = package().override_aten if variant == "override" else contextlib.nullcontext

    def run(self) -> torch.Tensor:
        y = self.x
        for norm in self.norms:
            y = norm(y)
        return y

    def run_half(self) -> list[torch.Tensor]:
        """Each norm by itself: under autocast only the first of a chain has half-precision x."""
        with torch.autocast(timing.DEVICE, torch.bfloat16):
            return [norm(x) for norm, x in zip(self.norms, self.halves, strict=True)]

    def visit(self, measure: Callable[[Callable[[], Any]], tuple[float, Any]]) -> dict[str, float]:
        with self.around():
            return self._visit(measure)

    def _visit(self, measure: Callable[[Callable[[], Any]], tuple[float, Any]]) -> dict[str, float]:
        """Microseconds a layer of each way of calling, each measured once, by host_us or device_us.

        "no_grad" and "inference" are forward alone, "grad" is forward with gradients, "backward"
        what follows it, "step" both; "autocast..." the same of half-precision x under autocast;
        "device_..." under the mode of `torch.device` and of `torch.set_default_device`, "mode_..."
        under another.
        """
        found: dict[str, float] = {}

        def note(name: str, call: Callable[[], Any], *modes: Any) -> Any:
            with contextlib.ExitStack() as stack:
                for mode in modes:
                    stack.enter_context(mode)
                us, result = measure(call)
            found[name] = us / LAYERS
            return result

        note("no_grad", self.run, torch.no_grad())
        note("inference", self.run, torch.inference_mode())
        y = note("grad", self.run)
        note("backward", lambda: y.backward(self.dy))
        found["step"] = found["grad"] + found["backward"]
        ys = note("autocast", self.run_half)
        dys = [torch.ones_like(y) for y in ys]
        note("autocast_backward", lambda: torch.autograd.backward(ys, dys))
        modes = {"device": torch.device(timing.DEVICE), "mode": PassedOn()}
        for name, mode in modes.items():
            note(f"{name}_no_grad", self.run, mode, torch.no_grad())
            note(f"{name}_grad", self.run, mode)
        for tensor in (*self.halves, self.x):
            tensor.grad = None
        for norm in self.norms:
            norm.zero_grad()
        return found


def make_chains(norms: Iterable[str] = NORMS) -> dict[str, Chain]:
    """The chains of the norms' variants; override_aten() is for CUDA alone."""
    chains = {f"{prefix}{variant}": Chain(NORMS[prefix], variant)
              for prefix in norms for variant in NORMS[prefix].variants
              if timing.DEVICE == "cuda" or variant != "override"}  # fmt: skip
    for chain in chains.values():
        chain.visit(host_us)
    return chains


def call_overhead(chains: dict[str, Chain], rounds: int) -> dict[str, dict[str, float]]:
    """Host microseconds a layer: for each way of calling, each variant's median and best, under
    "ours_us", "ours_best_us", "rms_ours_us" and so on."""

    def measure(name: str) -> dict[str, float]:
        chains[name].visit(host_us)  # warms up after the switch
        return chains[name].visit(host_us)

    entries: dict[str, dict[str, float]] = {}
    for name, visits in timing.in_turns(chains, rounds, measure).items():
        for way in visits[0]:
            times = [visit[way] for visit in visits]
            entries.setdefault(way, {}).update(timing.summary(name, times))
    return entries


Calls = dict[str, list[timing.Call]]


def training_steps() -> list[tuple[dict[str, Any], Calls]]:
    """Training steps of the module alone: what each is, and the calls of ours and of nn.LayerNorm.

    bfloat16 activations with float32 weights go through autocast, as in training: on CUDA
    nn.LayerNorm accepts this mixture in no other way.
    """
    found = []
    for (name, shape), dtypes in itertools.product(STEPS, STEP_DTYPES):
        x, weights = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        title = f"{name} {'x'.join(map(str, shape))} {x}, weights {weights}"
        entry = {"name": title + ", autocast" * (x != weights), "shape": list(shape), "dtype": x,
                 "weight_dtype": weights, "autocast": x != weights}  # fmt: skip
        calls = {variant: step_calls(variant, shape, *dtypes) for variant in ("ours", "eager")}
        found.append((entry, calls))
    return found


def step_calls(
    variant: str, shape: tuple[int, ...], dtype: torch.dtype, weight_dtype: torch.dtype
) -> list[timing.Call]:
    """Steps over distinct inputs, together larger than L2."""
    module = NORMS[""].make(variant, shape[-1], device=timing.DEVICE, dtype=weight_dtype)

    def step(x: torch.Tensor, dy: torch.Tensor) -> None:
        with torch.autocast(timing.DEVICE, torch.bfloat16, enabled=dtype != weight_dtype):
            y = module(x)
        y.backward(dy)
        x.grad = None
        module.zero_grad()

    made = functools.partial(torch.randn, shape, device=timing.DEVICE)
    count = timing.input_count(2 * torch.Size(shape).numel() * dtype.itemsize)
    return [functools.partial(step, made(dtype=dtype, requires_grad=True), made(dtype=weight_dtype))
            for _ in range(count)]  # fmt: skip


def measure(rounds: int = ROUNDS) -> dict[str, Any]:
    """PARTS of the results file, with device times. The wall time of a step, forward and backward,
    is taken over many steps with one synchronization at the end."""
    chains, steps = make_chains(), training_steps()
    overhead = call_overhead(chains, rounds)
    for entry, calls in steps:
        walls = timing.in_turns(calls, rounds, lambda name: timing.wall_time(calls[name]))  # noqa: B023
        for name, times in walls.items():
            entry |= timing.summary(name, times)
    # The profiler may leave the host slower than it was: it comes last.
    for name, chain in chains.items():
        for way, us in chain.visit(device_us).items():
            overhead[way][f"{name}_device_us"] = round(us, 3)
    for entry, calls in steps:
        for name, some in calls.items():
            us, _ = device_us(lambda: [step() for step in some])  # noqa: B023
            entry[f"{name}_device_us"] = round(us / len(some), 3)
    return dict(zip(PARTS, (results.stamp(), overhead, [entry for entry, _ in steps]), strict=True))


def text(head: str, entries: dict[str, dict[str, Any]], prefix: str = "") -> str:
    """A line for each entry: median (best), the ratio to the stock module, device microseconds."""
    norm = NORMS[prefix]
    of = f" of {norm.name}" if prefix else ""
    title = norm.name + ", channels_last" * norm.channels_last
    columns = {f"{prefix}{name}": LABELS[name].format(title, of) for name in norm.variants
               if any(f"{prefix}{name}_us" in entry for entry in entries.values())}  # fmt: skip

    def cell(entry: dict[str, Any], name: str) -> str:
        us, device = entry[f"{name}_us"], entry.get(f"{name}_device_us")
        said = f"{us:.2f} ({entry[f'{name}_best_us']:.2f})"
        said += "" if name.endswith("eager") else f" x{us / entry[f'{prefix}eager_us']:.2f}"
        return said if device is None else f"{said}, device {device:.2f}"

    lines = [f"{head:<58}" + "".join(f"{label:>40}" for label in columns.values())]
    lines += [f"  {way:<56}" + "".join(f"{cell(entry, name):>40}" for name in columns)
              for way, entry in entries.items()]  # fmt: skip
    return "\n".join(lines) if columns else ""


def overhead_text(entries: dict[str, dict[str, float]]) -> str:
    return "\n".join(filter(None, (text("host us a layer", entries, norm) for norm in NORMS)))


def steps_text(entries: list[dict[str, Any]]) -> str:
    by_name = {entry["name"]: entry for entry in entries}
    return text("forward + backward of the module, wall us", by_name)


def main(argv: list[str] | None = None) -> None:
    parser = results.parser("overhead", __doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--norms", help='parts of names, "rms,instance"; writes no file')
    parser.add_argument("--output", type=Path, help="the results file")
    arguments = parser.parse_args(argv)
    timing.DEVICE = arguments.device
    if timing.DEVICE == "cuda":
        require_kernels()
        timing.warm_up_device()
    if arguments.norms or timing.DEVICE == "cpu":
        names = {f"{prefix}{norm.name}": prefix for prefix, norm in NORMS.items()}
        chosen = [names[name] for name in results.chosen("norm", arguments.norms, names)]
        entries = call_overhead(make_chains(chosen), ROUNDS)
        print(overhead_text(entries))
        if not arguments.norms:
            path = arguments.output or results.RESULTS / "cpu.json"
            part = {**results.stamp(), "threads": torch.get_num_threads(), "call_overhead": entries}
            results.write(path, {**results.cpu(), "cpu": part})
            print(f"written: {path}")
        return
    measured = measure()
    print(f"{overhead_text(measured['call_overhead'])}\n\n{steps_text(measured['training_step'])}")
    results.update(measured, arguments.output)


if __name__ == "__main__":
    main()

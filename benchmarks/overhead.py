# SPDX-License-Identifier: Apache-2.0
"""What a norm costs its caller: host time a layer, and a training step on a GPU.

    python -m benchmarks.overhead                 on the GPU, into its results file
    python -m benchmarks.overhead --device cpu    on the CPU, into benchmarks/results/cpu.json

Host time is taken on a chain of 100 norms over a tiny tensor, so that the device never holds the
host up. The variants (the stock module, ours, a swapped one, on the GPU the stock one under
override_aten) take turns, round after round, and the median and the best of the rounds are kept;
the device time beside them is the sum of all kernels, by the profiler. --norms chooses norms, to
print their times alone.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from benchmarks import results, timing
from benchmarks.ours import require_kernels

LAYERS = 100
ROUNDS = 31
# Activations of a BERT-base and a ViT-L training step: (name, shape).
STEPS = (("BERT-base", (8, 512, 768)), ("ViT-L", (32, 577, 1024)))
STEP_DTYPES = ((torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16),
               (torch.float32, torch.float32))  # fmt: skip
# What measure() adds to the results file.
PARTS = ("overhead_stamp", "call_overhead", "training_step")


class Norm(NamedTuple):
    """A stock module, the arguments that it is made with, the shape of x, and what is timed."""

    name: str
    arguments: tuple[int, ...]
    shape: tuple[int, ...] = (4, 256)
    variants: tuple[str, ...] = ("eager", "ours", "swapped", "override")
    channels_last: bool = False

    def make(self, variant: str, *arguments: Any, **options: Any) -> nn.Module:
        package: Any = importlib.import_module("fused_layernorm")
        if variant == "ours":
            return getattr(package, f"Fused{self.name}")(*arguments, **options)
        module = getattr(nn, self.name)(*arguments, **options)
        return package.swap_norms(module) if variant == "swapped" else module


_IMAGE: Any = {"shape": (2, 32, 8, 8), "variants": ("eager", "swapped")}
# By the prefix of their variants in a results file.
NORMS = {
    "": Norm("LayerNorm", (256,)),
    "rms_": Norm("RMSNorm", (256,)),
    "group_": Norm("GroupNorm", (32, 256)),
    "instance_": Norm("InstanceNorm2d", (32,), **_IMAGE),
    "instance_nhwc_": Norm("InstanceNorm2d", (32,), channels_last=True, **_IMAGE),
}


def labels(prefix: str) -> dict[str, str]:
    """The columns of a norm: its variants as a results file has them, and as people read them."""
    norm, of = NORMS[prefix], f" of {NORMS[prefix].name}" if prefix else ""
    forms = {"eager": "nn.{}", "ours": "Fused{}", "swapped": "swapped {}",
             "override": f"override_aten(){of}"}  # fmt: skip
    order = ", channels_last" if norm.channels_last else ""
    return {f"{prefix}{name}": forms[name].format(norm.name) + order for name in norm.variants}


class PassedOn(TorchFunctionMode):
    """A mode that is not PyTorch's own, and changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


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


class Chain:
    """LAYERS norms of one variant, and every way they are called."""

    def __init__(self, norm: Norm, variant: str) -> None:
        made = functools.partial(norm.make, variant, *norm.arguments, device=timing.DEVICE)
        self.norms = [made() for _ in range(LAYERS)]
        self.x, self.dy = torch.randn((2, *norm.shape), device=timing.DEVICE)
        if norm.channels_last:
            self.x, self.dy = (t.contiguous(memory_format=torch.channels_last)
                               for t in (self.x, self.dy))  # fmt: skip
        self.halves = [self.x.bfloat16().requires_grad_() for _ in self.norms]
        self.x.requires_grad_(not any(True for _ in self.norms[0].parameters()))
        package: Any = importlib.import_module("fused_layernorm")
        is_override = variant == "override"
        self.around = package.override_aten if is_override else contextlib.nullcontext

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
        with self.around():
            return self._visit(measure)

    def _visit(self, measure: Measure) -> dict[str, float]:
        """Microseconds a layer of each way of calling, each measured once.

        "no_grad" and "inference" are forward alone, "grad" is forward with gradients, "backward"
        what follows it, "step" both; "autocast..." the same of half-precision x under autocast;
        "device_..." under the mode of `torch.device` and of `torch.set_default_device`, "mode_..."
        under another.
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
        ys = note("autocast", self.run_half)
        dys = [torch.ones_like(y) for y in ys]
        note("autocast_backward", lambda: torch.autograd.backward(ys, dys))
        for name, mode in (("device", torch.device(timing.DEVICE)), ("mode", PassedOn())):
            with mode:
                with torch.no_grad():
                    note(f"{name}_no_grad", self.run)
                note(f"{name}_grad", self.run)
        for tensor in (*self.halves, self.x):
            tensor.grad = None
        for norm in self.norms:
            norm.zero_grad()
        return found


def make_chains(norms: Sequence[str] = tuple(NORMS)) -> dict[str, Chain]:
    """The chains of the norms' variants; override_aten() is for CUDA alone."""
    names = [(prefix, variant) for prefix in norms for variant in NORMS[prefix].variants
             if timing.DEVICE == "cuda" or variant != "override"]  # fmt: skip
    chains = {f"{prefix}{variant}": Chain(NORMS[prefix], variant) for prefix, variant in names}
    for chain in chains.values():
        chain.visit(host_us)
    return chains


def call_overhead(chains: dict[str, Chain], rounds: int) -> dict[str, dict[str, float]]:
    """Host microseconds a layer: for each way of calling, each variant's median and best.

    The keys of an entry are "ours_us", "ours_best_us", "rms_ours_us" and so on.
    """

    def measure(name: str) -> dict[str, float]:
        chains[name].visit(host_us)  # warms up after the switch
        return chains[name].visit(host_us)

    entries: dict[str, dict[str, float]] = {}
    for name, visits in timing.in_turns(tuple(chains), rounds, measure).items():
        for way in visits[0]:
            times = timing.summary(name, [visit[way] for visit in visits])
            entries[way] = entries.get(way, {}) | times
    return entries


def make_steps() -> Iterator[tuple[dict[str, Any], dict[str, list[timing.Call]]]]:
    """Training steps of the module alone: the entry of the results file, and the calls of ours and
    of nn.LayerNorm, one size after the other.

    bfloat16 activations with float32 weights go through autocast, as in training: on CUDA
    nn.LayerNorm accepts this mixture in no other way.
    """
    for name, shape in STEPS:
        for dtypes in STEP_DTYPES:
            autocast = dtypes[0] != dtypes[1]
            x, weights = (str(dtype).removeprefix("torch.") for dtype in dtypes)
            size = "x".join(map(str, shape))
            title = f"{name} {size} {x}, weights {weights}" + (", autocast" if autocast else "")
            calls = {variant: step_calls(variant, shape, *dtypes) for variant in ("ours", "eager")}
            yield {"name": title, "shape": list(shape), "dtype": x, "weight_dtype": weights,
                   "autocast": autocast}, calls  # fmt: skip


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
    count = timing.input_count(2 * torch.Size(shape).numel() * dtype.itemsize, timing.l2_bytes())
    return [functools.partial(step, made(dtype=dtype, requires_grad=True), made(dtype=weight_dtype))
            for _ in range(count)]  # fmt: skip


def measure(rounds: int = ROUNDS) -> dict[str, Any]:
    """PARTS of the results file, with device times. The wall time of a step is that of forward and
    backward in microseconds, taken over many steps with one synchronization at the end."""
    chains = make_chains()
    overhead = call_overhead(chains, rounds)
    entries = []
    for entry, calls in make_steps():
        walls = timing.in_turns(tuple(calls), rounds, lambda key: timing.wall_time(calls[key]))  # noqa: B023
        for key, times in walls.items():
            entry |= timing.summary(key, times)
        entries.append(entry)

    # The profiler may leave the host slower than it was: it comes last.
    for name, chain in chains.items():
        for way, us in chain.visit(device_us).items():
            overhead[way][f"{name}_device_us"] = round(us, 3)
    for entry, (_, calls) in zip(entries, make_steps(), strict=True):
        for key, steps in calls.items():
            us, _ = device_us(lambda steps=steps: [step() for step in steps])  # type: ignore[misc]
            entry[f"{key}_device_us"] = round(us / len(steps), 3)
    return dict(zip(PARTS, (results.stamp(), overhead, entries), strict=True))


def text(head: str, entries: dict[str, dict[str, Any]], prefix: str = "") -> str:
    """A line for each entry: median (best), the ratio to the stock module, device microseconds."""
    columns = {name: label for name, label in labels(prefix).items()
               if any(f"{name}_us" in entry for entry in entries.values())}  # fmt: skip
    if not columns:
        return ""

    def cell(entry: dict[str, Any], name: str) -> str:
        us, stock = entry.get(f"{name}_us"), entry.get(f"{prefix}eager_us")
        said = "-" if us is None else f"{us:.2f}"
        if (best := entry.get(f"{name}_best_us")) is not None:
            said += f" ({best:.2f})"
        if us is not None and stock is not None and not name.endswith("eager"):
            said += f" x{us / stock:.2f}"
        device = entry.get(f"{name}_device_us")
        return said if device is None else f"{said}, device {device:.2f}"

    lines = [f"{head:<58}" + "".join(f"{label:>40}" for label in columns.values())]
    lines += [f"  {way:<56}" + "".join(f"{cell(entry, name):>40}" for name in columns)
              for way, entry in entries.items()]  # fmt: skip
    return "\n".join(lines)


def overhead_text(entries: dict[str, dict[str, float]]) -> str:
    return "\n".join(filter(None, (text("host us a layer", entries, norm) for norm in NORMS)))


def steps_text(entries: list[dict[str, Any]]) -> str:
    return text("forward + backward of the module, wall us",
                {entry["name"]: entry for entry in entries})  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = results.parser("overhead", __doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of every measurement")
    parser.add_argument("--norms", help='parts of names, "rms,instance"; writes no file')
    parser.add_argument("--output", type=Path, help="the results file")
    arguments = parser.parse_args(argv)
    timing.DEVICE = arguments.device
    if timing.DEVICE == "cuda":
        require_kernels()
        timing.warm_up_device()
    if arguments.norms:
        parts = arguments.norms.lower().split(",")
        chosen = [prefix for prefix, norm in NORMS.items()
                  if any(part in f"{prefix}{norm.name}".lower() for part in parts)]  # fmt: skip
        print(overhead_text(call_overhead(make_chains(chosen), arguments.rounds)))
        return
    if timing.DEVICE == "cpu":
        entries = call_overhead(make_chains(), arguments.rounds)
        print(overhead_text(entries))
        path = arguments.output or results.RESULTS / "cpu.json"
        part = {**results.stamp(), "threads": torch.get_num_threads(), "call_overhead": entries}
        results.write(path, {**results.cpu(), "cpu": part})
    else:
        measured = measure(arguments.rounds)
        print(overhead_text(measured["call_overhead"]) + "\n")
        print(steps_text(measured["training_step"]))
        path = arguments.output or results.default_path(torch.cuda.get_device_name())
        for name, value in measured.items():
            results.update(path, name, value)
    print(f"written: {path}")


if __name__ == "__main__":
    main()

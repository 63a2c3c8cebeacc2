# SPDX-License-Identifier: Apache-2.0
"""Real models end to end: stock, swapped, compiled, by peers, and by more than one of these.

    python -m benchmarks.models
    python -m benchmarks.models --models BERT --variants eager,compiled,swap_compiled
    python -m benchmarks.models --models dit,flux --modes inference --seconds 3 --add

benchmarks/networks.py has the table of the models, VARIANTS is that of what is done with each, in
half precision, in a training step (forward, backward, SGD; float32 weights under autocast, or half-
precision weights) and in inference.

Each model in each mode has a process of its own. The processes compile side by side, with their
weights on the GPU together, and measure one at a time, the variants in turns. A variant's results
are the median and the best wall time of a step, the most memory that it takes, the time of all its
kernels and of those named after LayerNorm, by the profiler, and the loss of the first step, which
should be the same in all variants.

They stand under "models" in the results file, a row for each variant; --add keeps the rows of other
models and modes that were measured on the same code. What cannot run is left out, and a line says
why.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import gc
import importlib
import importlib.util
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import results, timing, turns
from benchmarks.networks import MODELS, MODES, Model
from benchmarks.ours import require_kernels
from benchmarks.overhead import quiet
from benchmarks.run import sentence

STEPS = 2  # timed steps of a turn; one step before them is not timed
MIN_ROUNDS, MAX_ROUNDS = 3, 31
PROFILES = 3  # of each variant; the variants take turns here too
PATIENCE = 30  # attempts at a step for which there is not enough memory
# Parts of the names of LayerNorm kernels, PyTorch's and ours, in lower case.
KERNELS = ("layer_norm", "layernorm", "gammabeta", "param_grad", "rowwisemoments", "group_norm")


def select(names: str | None) -> dict[str, Model]:
    """The models whose name contains one of the parts in `names`, in any case; None for all."""
    parts = names.lower().split(",") if names else [""]
    chosen = {
        name: model for name, model in MODELS.items() if any(part in name.lower() for part in parts)
    }
    for part in parts:
        if not any(part in name.lower() for name in chosen):
            raise SystemExit(f"no model has {part!r} in its name: known are {', '.join(MODELS)}")
    return chosen


def halved(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Casts the model, except modules that must stay in float32 (diffusers' Wan)."""
    kept = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    wide = {id(tensor) for name, tensor in named if not kept.isdisjoint(name.split("."))}

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        is_cast = tensor.is_floating_point() and id(tensor) not in wide
        return tensor.to(dtype) if is_cast else tensor

    return model._apply(cast)  # not by .data: a buffer may be a view, whose base keeps its dtype


@dataclass(frozen=True)
class Variant:
    """What is done with a model: `prepare` changes a copy of it, `call` may compile it, its steps
    run inside `around`. `applies` says whether a model has the variant at all."""

    title: str
    prepare: Callable[[nn.Module], object] = lambda model: model
    call: Callable[[nn.Module], Callable[..., Any]] = lambda model: model
    applies: Callable[[nn.Module], bool] = lambda model: True
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


def swap(model: nn.Module, neighbours: bool = False) -> None:
    importlib.import_module("fused_layernorm").swap_norms(model, neighbours=neighbours)


def liger(model: nn.Module, *, swapped: bool = False, **parts: bool) -> None:
    """Liger's kernels, all but those of `parts` that are False, and perhaps the swap behind them.

    Beside the model Liger changes names in the module of its class; see `patched`.
    """
    kernels: Any = importlib.import_module("liger_kernel.transformers")
    kernels._apply_liger_kernel_to_instance(model, **parts)
    if swapped:
        swap(model, neighbours=True)


def has_liger(model: nn.Module) -> bool:
    if importlib.util.find_spec("liger_kernel") is None:
        return False
    known: Any = importlib.import_module("liger_kernel.transformers.monkey_patch")
    kind = getattr(getattr(model, "config", None), "model_type", None)
    return kind in known.MODEL_TYPE_TO_APPLY_LIGER_FN


def has_neighbours(model: nn.Module) -> bool:
    """Whether there are modules whose rotation or activation can be swapped."""
    swap(model, neighbours=True)
    found = [getattr(type(module), "_known", None) for module in model.modules()]
    importlib.import_module("fused_layernorm").unswap_norms(model)
    return any(known is not None and known.kind in ("rotation", "activation") for known in found)


def override() -> contextlib.AbstractContextManager[Any]:
    return importlib.import_module("fused_layernorm").override_aten()


_by_backend = functools.partial(torch.compile, backend="fused_layernorm")
_liger_rest = functools.partial(liger, swapped=True, rms_norm=False, rope=False)
VARIANTS: dict[str, Variant] = {
    "eager": Variant("stock"),
    "compiled": Variant("compiled", call=torch.compile),
    "swap": Variant("swapped", swap),
    "swap_compiled": Variant("swapped and compiled", swap, torch.compile),
    "swap_neighbours": Variant("swapped with neighbours", functools.partial(swap, neighbours=True),
                               applies=has_neighbours),
    "override": Variant("override_aten()", around=override),
    "fused_compiled": Variant('backend="fused_layernorm", then Inductor', call=_by_backend),
    "liger": Variant("Liger", liger, applies=has_liger),
    "liger_swap": Variant("Liger, then swapped", functools.partial(liger, swapped=True),
                          applies=has_liger),
    "liger_rest_swap": Variant("Liger without norms and rotations, then swapped", _liger_rest,
                               applies=has_liger),
}  # fmt: skip


@contextlib.contextmanager
def patched(names: dict[str, Any], changes: dict[str, Any]) -> Iterator[None]:
    """The names with these changes inside the context, and as they were behind it."""
    before = {name: names[name] for name in changes}
    names.update(changes)
    try:
        yield
    finally:
        names.update(before)


def prepared(
    model: nn.Module, variant: str
) -> tuple[nn.Module, Callable[[], contextlib.AbstractContextManager[Any]]]:
    """A copy of the model as the variant has it, not yet compiled, and what its steps run inside.

    What the variant changed in the module of the model's class holds inside its steps alone.
    """
    model = copy.deepcopy(model)
    names = vars(sys.modules[type(model).__module__])
    before = dict(names)
    try:
        VARIANTS[variant].prepare(model)
    finally:
        changes = {name: names[name] for name in before if names[name] is not before[name]}
        names.update({name: before[name] for name in changes})

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        with VARIANTS[variant].around(), patched(names, changes):
            yield

    return model, around


Inputs = dict[str, torch.Tensor]


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    return {name: value.to(dtype) if value.is_floating_point() else value
            for name, value in inputs.items()}  # fmt: skip


def training(own: nn.Module, inputs: Inputs, loss: Any, variant: str, model: Model) -> Any:
    """A step: forward, backward, SGD; with weights of model.dtype if `half`, else autocast."""
    if model.half:
        own, inputs = halved(own, model.dtype), cast(inputs, model.dtype)
    optimizer = torch.optim.SGD(own.parameters(), lr=1e-3, foreach=True)
    own.train()
    call = VARIANTS[variant].call(own)

    def step() -> torch.Tensor:
        with torch.autocast(timing.DEVICE, model.dtype, enabled=not model.half):
            value = loss(call(**inputs))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return step


def inference(own: nn.Module, inputs: Inputs, loss: Any, variant: str, model: Model) -> Any:
    call = VARIANTS[variant].call(halved(own, model.dtype).eval())
    halves = cast(inputs, model.dtype)

    @torch.no_grad()
    def step() -> torch.Tensor:
        return loss(call(**halves))

    return step


@dataclass
class Measured:
    """One variant of a model in one mode: its step, and what was measured of it."""

    model: str
    mode: str
    variant: str
    step: Callable[[], Any]
    around: Callable[[], contextlib.AbstractContextManager[Any]]
    loss: float
    own_bytes: int = 0  # of its weights, and what else stays between steps
    peak_bytes: int = 0  # the most beside what was there before a step
    walls: list[float] = field(default_factory=list)  # milliseconds
    profiles: list[list[timing.Kernel]] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "mode": self.mode,
            "variant": self.variant,
            **timing.summary("wall", self.walls, "ms"),
            "peak_gib": round((self.own_bytes + self.peak_bytes) / 2**30, 3),
            "device_ms": _median_ms(self.profiles, lambda name: True),
            "layer_norm_ms": _median_ms(
                self.profiles, lambda name: any(part in name.lower() for part in KERNELS)
            ),
            "kernels": sum(kernel.count for kernel in self.profiles[0]),
            "loss": self.loss,
        }


def prepare(
    name: str, mode: str, model: Model, built: Any, variants: Sequence[str]
) -> tuple[list[Measured], list[str]]:
    """Returns a model's variants in one mode, after one step each, and what is left out and why."""
    module, inputs, loss = built
    found: list[Measured] = []
    skipped = []
    for variant in variants:
        if not VARIANTS[variant].applies(module):
            continue
        try:
            before = allocated()
            own, around = prepared(module, variant)
            make = training if mode == "training" else inference
            step = make(own, inputs, loss, variant, model)
            with around():
                first = round(_with_patience(own, step), 5)
        except Exception as problem:
            skipped.append(f"{name}, {mode}, {variant}: {sentence(problem)}")
        else:
            one = Measured(name, mode, variant, step, around, first)
            one.own_bytes = allocated() - before
            found.append(one)
        if timing.DEVICE == "cuda":
            torch.cuda.empty_cache()
    return found, skipped


def allocated() -> int:
    return torch.cuda.memory_allocated() if timing.DEVICE == "cuda" else 0


def peak_of(step: Callable[[], Any]) -> int:
    """The most bytes that a step has beside those that were there before it."""
    if timing.DEVICE != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    before = allocated()
    step()
    return torch.cuda.max_memory_allocated() - before


def _with_patience(model: nn.Module, step: Callable[[], Any]) -> float:
    """The loss of a step. Without memory it waits: other processes free theirs once prepared."""
    for _ in range(PATIENCE):
        try:
            return float(step())
        except torch.OutOfMemoryError:
            model.zero_grad()  # some parameters may have their gradients already
            torch.cuda.empty_cache()
            time.sleep(2)
    return float(step())


def measure(group: list[Measured], seconds: float) -> None:
    """Measures the wall times of a model's variants in one mode."""
    by_variant = {one.variant: one for one in group}
    with quiet():
        start = time.perf_counter()
        for number, variant in enumerate(timing.turns(tuple(by_variant), MAX_ROUNDS)):
            rounds, at = divmod(number, len(by_variant))
            if at == 0 and rounds >= MIN_ROUNDS and time.perf_counter() - start > seconds:
                break
            gc.collect()  # a reference cycle may keep a step's activations alive
            with by_variant[variant].around():
                us = timing.wall_time([by_variant[variant].step], STEPS)
            by_variant[variant].walls.append(us / 1e3)


def profile(group: list[Measured]) -> list[dict[str, Any]]:
    """Profiles the kernels of a model's variants in one mode, and returns the variants' rows."""
    by_variant = {one.variant: one for one in group}
    for variant in timing.turns(tuple(by_variant), PROFILES):
        one = by_variant[variant]
        with one.around():
            one.peak_bytes = peak_of(one.step)
            one.profiles.append(timing.kernels_of(one.step))
    torch.cuda.empty_cache()
    return [one.row() for one in group]


def in_channels_last(module: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}

    def laid(tensor: torch.Tensor) -> torch.Tensor:
        how = formats.get(tensor.dim(), torch.preserve_format)
        return tensor.to(memory_format=how)

    return module._apply(laid), {name: laid(value) for name, value in inputs.items()}


def _median_ms(profiles: list[list[timing.Kernel]], counts: Callable[[str], bool]) -> float:
    """The median over profiles of the device time of the kernels whose name `counts` accepts."""
    totals = [sum(k.us for k in kernels if counts(k.name)) for kernels in profiles]
    return round(statistics.median(totals) / 1e3, 4)


def run(
    chosen: dict[str, Model], variants: Sequence[str], modes: Sequence[str], seconds: float,
    lock: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measures the models in this process and returns the part of the results file."""
    rows: list[dict[str, Any]] = []
    skipped: list[str] = []
    for name, model in chosen.items():
        if importlib.util.find_spec(model.package) is None:
            skipped.append(f"{name}: {model.package} is not installed")
            continue
        for mode in (mode for mode in modes if mode in model.modes):
            with turns.preparing(lock):
                try:
                    torch.manual_seed(0)
                    module, inputs, loss = model.build()
                    module = module.to(timing.DEVICE)
                    inputs = {key: value.to(timing.DEVICE) for key, value in inputs.items()}
                    if model.channels_last:
                        module, inputs = in_channels_last(module, inputs)
                except Exception as problem:
                    skipped.append(f"{name}, {mode}: {sentence(problem)}")
                    continue
                group, problems = prepare(name, mode, model, (module, inputs, loss), variants)
                skipped += problems
            with turns.measuring(lock):
                measure(group, seconds)
                rows += profile(group)
    return {**results.stamp(), "rows": rows, "skipped": skipped}


def run_each_alone(
    chosen: dict[str, Model], variants: Sequence[str], modes: Sequence[str], seconds: float,
    jobs: int, budget: float,
) -> dict[str, Any]:  # fmt: skip
    """Measures each model in each mode in its own process; returns the part of the results file."""
    tasks = [
        (name, mode) for name, model in chosen.items() for mode in modes if mode in model.modes
    ]
    part: dict[str, Any] = {**results.stamp(), "rows": [], "skipped": []}
    if importlib.util.find_spec("liger_kernel") is None:
        part["skipped"] += [f"{name}: liger-kernel is not installed"
                            for name in variants if name.startswith("liger")]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{number}.json" for number in range(len(tasks))]
        calls = [
            # --models is split at commas. No other name contains this one's text before its comma.
            ["--models", name.split(",")[0], "--modes", mode, "--variants", ",".join(variants),
             "--seconds", str(seconds), "--output", str(file)]
            for (name, mode), file in zip(tasks, files, strict=True)
        ]  # fmt: skip
        problems = turns.run("benchmarks.models", calls, jobs, budget)
        for (name, mode), file, problem in zip(tasks, files, problems, strict=True):
            if problem is not None:
                part["skipped"].append(f"{name}, {mode}: {problem}")
            else:
                measured = results.read(file)["models"]
                part["rows"] += measured["rows"]
                part["skipped"] += measured["skipped"]
    return part


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The new part, with the old part's rows of other models or modes if its code is the same."""
    if old.get("csrc_sha256") != new["csrc_sha256"]:
        return new
    measured = {(row["model"], row["mode"]) for row in new["rows"]}
    kept = [row for row in old["rows"] if (row["model"], row["mode"]) not in measured]
    order = list(MODELS)
    rows = sorted(
        [*kept, *new["rows"]],
        key=lambda row: order.index(row["model"]) if row["model"] in order else len(order),
    )
    return {**new, "rows": rows}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", help='comma-separated parts of names, in any case: "dit,flux"')
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated")
    parser.add_argument("--modes", default=",".join(MODES), help="comma-separated")
    parser.add_argument("--seconds", type=float, default=4, help="of turns, a model and mode")
    parser.add_argument("--jobs", type=int, default=24, help="processes that compile side by side")
    parser.add_argument("--budget-seconds", type=float, default=520,
                        help="what is not measured by then is left out")  # fmt: skip
    parser.add_argument("--output", type=Path, help="the results file")
    parser.add_argument(
        "--add", action="store_true", help="keep the others of the results file, if of this code"
    )
    parser.add_argument("--lock", type=Path, help="measure here, one process at a time")
    arguments = parser.parse_args(argv)
    variants = tuple(arguments.variants.split(","))
    modes = tuple(arguments.modes.split(","))
    for kind, given, known in (("variant", variants, VARIANTS), ("mode", modes, MODES)):
        for name in given:
            if name not in known:
                parser.error(f"unknown {kind} {name!r}: known are {', '.join(known)}")
    chosen = select(arguments.models)
    require_kernels()
    # Every variant of a model compiles the same functions anew.
    torch._dynamo.config.recompile_limit = 64

    if arguments.lock is not None:
        part = run(chosen, variants, modes, arguments.seconds, arguments.lock)
    else:
        part = run_each_alone(
            chosen, variants, modes, arguments.seconds, arguments.jobs, arguments.budget_seconds
        )
    from benchmarks import report  # which knows the variants

    print("\n".join(report.models({"models": part})))
    # A run of a part writes a results file only with --output or --add.
    full = not arguments.models and modes == MODES and variants == VARIANTS
    path = arguments.output
    if path is None and (full or arguments.add):
        path = results.default_path(torch.cuda.get_device_name())
    if path is not None:
        if arguments.add:
            old = results.read(path).get("models", {})
            part = merged(old, part)
            if old and old["csrc_sha256"] != part["csrc_sha256"]:
                print(f"left out: {len(old['rows'])} rows of other code than this")
        results.update(path, "models", part)
        print(f"written: {path}")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Real models end to end: stock, swapped, compiled, by peers, and by more than one of these.

    python -m benchmarks.models --models BERT --variants eager,compiled,swap_compiled
    python -m benchmarks.models --models dit,flux --modes inference --seconds 3 --add
    python -m benchmarks.models --again       what the results file has, in its variants

benchmarks/networks.py has the table of the models, benchmarks/variants.py that of what is done with
each, in half precision, in a training step (forward, backward, SGD; float32 weights under autocast,
or half-precision weights) and in inference. Each model in each mode has a process of its own: they
compile side by side, with their weights on the GPU together, and measure one at a time, the
variants in turns.

A variant's row under "models" in the results file has the median, the fastest tenth and the best
wall time of a step, the most memory that it takes, the time of all its kernels and of those named
after a norm, by the profiler, and the loss of the first step, which should be the same in all
variants. --add keeps the rows of other models and modes that were measured on the same code. What
cannot run is left out, and a line says why.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks import report, results, timing, turns
from benchmarks.networks import MODELS, MODES, Built, Model
from benchmarks.ours import require_kernels
from benchmarks.timing import sentence
from benchmarks.variants import VARIANTS, Around, prepared

STEPS = 2  # timed steps of a turn; one step before them is not timed
MIN_ROUNDS, MAX_ROUNDS = 3, 31
PROFILES = 3  # of each variant; the variants take turns here too
# Parts of the names of the norms' kernels, PyTorch's and ours, in lower case.
KERNELS = ("layer_norm", "layernorm", "gammabeta", "param_grad", "rowwisemoments", "group_norm")
USUAL = [name for name, variant in VARIANTS.items() if variant.usual]


def halved(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Casts the model, except modules that must stay in float32 (diffusers' Wan)."""
    kept = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    wide = {id(tensor) for name, tensor in named if not kept.isdisjoint(name.split("."))}

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        is_cast = tensor.is_floating_point() and id(tensor) not in wide
        return tensor.to(dtype) if is_cast else tensor

    return model._apply(cast)  # not by .data: a buffer may be a view, whose base keeps its dtype


def in_channels_last(tensor: torch.Tensor) -> torch.Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.to(memory_format=formats.get(tensor.dim(), torch.preserve_format))


def built(model: Model, trains: bool) -> Built:
    """The model, its inputs and its loss; of model.dtype but for training under autocast."""
    torch.manual_seed(0)
    with torch.device(timing.DEVICE):
        module, inputs, loss = model.build()
    if model.half or not trains:
        module = halved(module, model.dtype)
        inputs = {name: value.to(model.dtype) if value.is_floating_point() else value
                  for name, value in inputs.items()}  # fmt: skip
    if model.channels_last:
        module = module._apply(in_channels_last)
        inputs = {name: in_channels_last(value) for name, value in inputs.items()}
    return module.train(trains), inputs, loss


class Step(NamedTuple):
    """A variant of a model after its first step, which gave `loss`: a step, what it runs inside,
    and the bytes of what stays between steps."""

    run: Callable[[], torch.Tensor]
    around: Around
    loss: float
    own_bytes: int


def step_of(variant: str, made: Built, model: Model, trains: bool) -> Step:
    """A step of inference, or of forward, backward and SGD, with float32 weights under autocast."""
    before = torch.cuda.memory_allocated()
    own, around = prepared(made[0], VARIANTS[variant])
    optimizer = torch.optim.SGD(own.parameters(), lr=1e-3, foreach=True)
    call = VARIANTS[variant].call(own)

    def run() -> torch.Tensor:
        autocast = torch.autocast(timing.DEVICE, model.dtype, enabled=trains and not model.half)
        with torch.set_grad_enabled(trains), autocast:
            value = made[2](call(**made[1]))
        if trains:
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
        return value.detach()

    with around():
        # Without memory some parameters may have their gradients already.
        loss = round(float(timing.patiently(run, own.zero_grad)), 5)
    return Step(run, around, loss, torch.cuda.memory_allocated() - before)


def measure(steps: dict[str, Step], seconds: float) -> list[dict[str, Any]]:
    """The rows of a model's variants in one mode: wall times first, then memory and kernels."""

    def wall_ms(variant: str) -> float:
        gc.collect()  # a reference cycle may keep a step's activations alive
        with steps[variant].around():
            return timing.wall_time([steps[variant].run], STEPS) / 1e3

    def profile(variant: str) -> tuple[int, list[timing.Kernel]]:
        """The most memory beside what was there before a step, and the step's kernels."""
        gc.collect()
        with steps[variant].around():
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            steps[variant].run()
            most = torch.cuda.max_memory_allocated()
            return most - before, timing.kernels_of(steps[variant].run)

    walls = timing.in_turns(steps, MAX_ROUNDS, wall_ms, seconds, MIN_ROUNDS)
    profiles = timing.in_turns(steps, PROFILES, profile)
    torch.cuda.empty_cache()
    return [row_of(name, step, walls[name], profiles[name]) for name, step in steps.items()]


def row_of(
    variant: str, step: Step, walls: list[float], profiles: list[tuple[int, list[timing.Kernel]]]
) -> dict[str, Any]:
    def device_ms(*parts: str) -> float:
        """The median of the kernels' time, of those with one of the parts in their names."""
        totals = [sum(kernel.us for kernel in kernels
                      if any(part in kernel.name.lower() for part in parts))
                  for _, kernels in profiles]  # fmt: skip
        return round(statistics.median(totals) / 1e3, 4)

    fastest = sorted(walls)[: max(1, len(walls) // 10)]
    return {
        "variant": variant, **timing.summary("wall", walls, "ms"),
        "wall_tenth_ms": round(statistics.fmean(fastest), 3),
        "peak_gib": round((step.own_bytes + profiles[-1][0]) / 2**30, 3),
        "device_ms": device_ms(""), "layer_norm_ms": device_ms(*KERNELS),
        "kernels": sum(kernel.count for kernel in profiles[0][1]), "loss": step.loss,
    }  # fmt: skip


def run(name: str, mode: str, variants: list[str], seconds: float, lock: Path) -> dict[str, Any]:
    """Measures a model in a mode in this process: its rows, and what is left out and why."""
    model, trains = MODELS[name], mode == "training"
    steps: dict[str, Step] = {}
    skipped = []
    with turns.preparing(lock):
        made = built(model, trains)
        variants = [variant for variant in variants if VARIANTS[variant].applies(made[0])]
        for variant in variants:
            try:
                steps[variant] = step_of(variant, made, model, trains)
            except Exception as problem:
                skipped.append(f"{name}, {mode}, {variant}: {sentence(problem)}")
            torch.cuda.empty_cache()
    with turns.measuring(lock):
        rows = [{"model": name, "mode": mode, **row} for row in measure(steps, seconds)]
    return {"rows": rows, "skipped": skipped}


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The new part, with the old part's rows of other models or modes if its code is the same."""
    if old.get("csrc_sha256", new["csrc_sha256"]) != new["csrc_sha256"]:
        print(f"left out: {len(old['rows'])} rows of other code than this")
        old = {}
    measured = {(row["model"], row["mode"]) for row in new["rows"]}
    kept = [row for row in old.get("rows", []) if (row["model"], row["mode"]) not in measured]
    order = [*MODELS, *(row["model"] for row in kept)]
    rows = sorted([*kept, *new["rows"]], key=lambda row: order.index(row["model"]))
    return {**new, "rows": rows}


def main(argv: Sequence[str] | None = None) -> None:
    parser = results.parser("models", __doc__, seconds=520)
    parser.add_argument("--models", help='comma-separated parts of names, in any case: "dit,flux"')
    parser.add_argument("--variants", default=",".join(USUAL), help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--modes", help=f"of {', '.join(MODES)}")
    parser.add_argument("--seconds", type=float, default=4, help="of turns, a model and mode")
    parser.add_argument("--again", action="store_true", help="in the results file's variants")
    turns.add_arguments(parser, jobs=24)
    arguments = parser.parse_args(argv)
    names = results.chosen("model", arguments.models, MODELS)
    modes = results.chosen("mode", arguments.modes, MODES)
    variants = results.chosen("variant", arguments.variants, VARIANTS)
    require_kernels()
    # Every variant of a model compiles the same functions anew.
    torch._dynamo.config.recompile_limit = 64
    if arguments.lock is not None:  # the process of one model in one mode
        one = run(names[0], modes[0], variants, arguments.seconds, arguments.lock)
        results.write(arguments.output, one)
        print("\n".join(report.models({"models": {**results.stamp(), **one}})))
        return

    path = arguments.output or results.default_path(torch.cuda.get_device_name())
    old = results.read(path)
    known = report.variants_of(old) if arguments.again else {}
    chosen = {(name, mode): [one for one in known.get((name, mode), variants) if one in VARIANTS]
              for name in names for mode in MODELS[name].modes
              if mode in modes and (not known or (name, mode) in known)}  # fmt: skip
    # --models is split at commas. No other name contains this one's text before its comma.
    calls = {f"{name}, {mode}": ["--models", name.split(",")[0], "--modes", mode, "--variants",
                                 ",".join(some), "--seconds", str(arguments.seconds)]
             for (name, mode), some in chosen.items()}  # fmt: skip
    found = turns.collect("benchmarks.models", calls, arguments.jobs, arguments.budget_seconds)
    part = {**results.stamp(), **found}
    if importlib.util.find_spec("liger_kernel") is None:
        part["skipped"] += [f"{variant}: liger-kernel is not installed"
                            for variant in VARIANTS if variant.startswith("liger")]  # fmt: skip
    print("\n".join(report.models({"models": part})))
    # A run of a part writes a results file only with --output or --add.
    full = not arguments.models and len(modes) == len(MODES) and variants == USUAL
    if not part["rows"]:
        raise SystemExit("nothing was measured")
    if arguments.output or arguments.add or full:
        kept = old.get("models", {}) if arguments.add or arguments.again else {}
        results.update({"models": merged(kept, part)}, path)


if __name__ == "__main__":
    main()

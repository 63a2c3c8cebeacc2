# SPDX-License-Identifier: Apache-2.0
"""Real models end to end: stock, swapped, compiled, by peers, and by more than one of these.

    python -m benchmarks.models
    python -m benchmarks.models --models BERT --variants eager,compiled,swap_compiled
    python -m benchmarks.models --models dit,flux --modes inference --seconds 3 --add

benchmarks/networks.py has the table of the models, VARIANTS is that of what is done with each, in
half precision, in a training step (forward, backward, SGD; float32 weights under autocast, or half-
precision weights) and in inference. `*reduce_overhead` are compiled with CUDA graphs; `*layers`
compile each of a model's repeated layers by itself.

Each model in each mode has a process of its own. The processes compile side by side, with their
weights on the GPU together, and measure one at a time, the variants in turns. A variant's results
are the median, the fastest tenth and the best wall time of a step, the most memory that it takes,
the time of all its kernels and of those named after a norm, by the profiler, and the loss of the
first step, which should be the same in all variants.

They stand under "models" in the results file, a row for each variant; --add keeps the rows of other
models and modes that were measured on the same code. What cannot run is left out, and a line says
why.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import importlib
import importlib.util
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import report, results, timing, turns
from benchmarks.networks import MODELS, MODES, TITLES, Model
from benchmarks.ours import require_kernels
from benchmarks.timing import sentence

STEPS = 2  # timed steps of a turn; one step before them is not timed
MIN_ROUNDS, MAX_ROUNDS = 3, 31
PROFILES = 3  # of each variant; the variants take turns here too
# Parts of the names of the norms' kernels, PyTorch's and ours, in lower case.
KERNELS = ("layer_norm", "layernorm", "gammabeta", "param_grad", "rowwisemoments", "group_norm")
Around = Callable[[], contextlib.AbstractContextManager[Any]]
Inputs = dict[str, torch.Tensor]


# --- the variants -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """What is done with a model: `prepare` changes a copy of it, `call` may compile it, its steps
    run inside `around`. `applies` says whether a model has the variant at all."""

    prepare: Callable[[nn.Module], object] = lambda model: model
    call: Callable[[nn.Module], Callable[..., Any]] = lambda model: model
    applies: Callable[[nn.Module], bool] = lambda model: True
    around: Around = contextlib.nullcontext
    usual: bool = True  # measured where no variants are named


def package() -> Any:
    return importlib.import_module("fused_layernorm")


def swap(model: nn.Module, neighbours: bool = True) -> None:
    package().swap_norms(model, neighbours=neighbours)


def has_neighbours(model: nn.Module) -> bool:
    """Whether there is more to swap than norms."""
    swap(model, neighbours=False)
    norms = [type(module) for module in model.modules()]
    package().unswap_norms(model)
    swap(model)
    found = [type(module) for module in model.modules()] != norms
    package().unswap_norms(model)
    return found


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers that a model repeats: the outermost lists of several modules of one class."""
    children = list(model.children())
    if (isinstance(model, (nn.ModuleList, nn.Sequential)) and len(children) > 1
            and len({*map(type, children)}) == 1 and any(children[0].children())):  # fmt: skip
        return children
    return [layer for child in children for layer in layers_of(child)]


def compile_layers(model: nn.Module) -> nn.Module:
    for layer in layers_of(model):
        layer.compile()
    return model


def liger(model: nn.Module, *, swapped: bool = False, **parts: bool) -> None:
    """Liger's kernels, all but those of `parts` that are False, and perhaps the swap behind them.

    Beside the model Liger changes names in the module of its class; see `prepared`.
    """
    kernels: Any = importlib.import_module("liger_kernel.transformers")
    kernels._apply_liger_kernel_to_instance(model, **parts)
    if swapped:
        swap(model)


def has_liger(model: nn.Module) -> bool:
    if importlib.util.find_spec("liger_kernel") is None:
        return False
    known: Any = importlib.import_module("liger_kernel.transformers.monkey_patch")
    kind = getattr(getattr(model, "config", None), "model_type", None)
    return kind in known.MODEL_TYPE_TO_APPLY_LIGER_FN


def _compiling(**how: Any) -> Callable[[nn.Module], Callable[..., Any]]:
    return lambda model: torch.compile(model, **how)


_has_layers: Any = {"call": compile_layers, "applies": lambda model: bool(layers_of(model))}
_graphs, _fused = {"mode": "reduce-overhead"}, {"backend": "fused_layernorm"}
_liger_rest = functools.partial(liger, swapped=True, rms_norm=False, rope=False)
VARIANTS: dict[str, Variant] = {
    "eager": Variant(),
    "compiled": Variant(call=_compiling()),
    "reduce_overhead": Variant(call=_compiling(**_graphs), usual=False),
    "layers": Variant(**_has_layers),
    "swap": Variant(functools.partial(swap, neighbours=False)),
    "swap_neighbours": Variant(swap, applies=has_neighbours),
    "swap_compiled": Variant(swap, _compiling()),
    "swap_reduce_overhead": Variant(swap, _compiling(**_graphs), usual=False),
    "swap_layers": Variant(swap, **_has_layers),
    "override": Variant(around=lambda: package().override_aten()),
    "fused_compiled": Variant(call=_compiling(**_fused)),
    "fused_reduce_overhead": Variant(call=_compiling(**_fused, **_graphs), usual=False),
    "liger": Variant(liger, applies=has_liger),
    "liger_swap": Variant(functools.partial(liger, swapped=True), applies=has_liger),
    "liger_rest_swap": Variant(_liger_rest, applies=has_liger),
}
USUAL = tuple(name for name, variant in VARIANTS.items() if variant.usual)
assert list(VARIANTS) == list(TITLES)


def prepared(model: nn.Module, variant: str) -> tuple[nn.Module, Around]:
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
        with VARIANTS[variant].around():
            names.update(changes)
            try:
                yield
            finally:
                names.update({name: before[name] for name in changes})

    return model, around


# --- a step -----------------------------------------------------------------------------------


def halved(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Casts the model, except modules that must stay in float32 (diffusers' Wan)."""
    kept = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    wide = {id(tensor) for name, tensor in named if not kept.isdisjoint(name.split("."))}

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        is_cast = tensor.is_floating_point() and id(tensor) not in wide
        return tensor.to(dtype) if is_cast else tensor

    return model._apply(cast)  # not by .data: a buffer may be a view, whose base keeps its dtype


def in_channels_last(module: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}

    def laid(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(memory_format=formats.get(tensor.dim(), torch.preserve_format))

    return module._apply(laid), {name: laid(value) for name, value in inputs.items()}


def step_of(
    own: nn.Module, inputs: Inputs, loss: Any, variant: str, model: Model, mode: str
) -> Callable[[], torch.Tensor]:
    """A step: inference with weights of model.dtype, or forward, backward and SGD, with weights of
    model.dtype if `half`, else under autocast."""
    trains = mode == "training"
    if model.half or not trains:
        own = halved(own, model.dtype)
        inputs = {name: value.to(model.dtype) if value.is_floating_point() else value
                  for name, value in inputs.items()}  # fmt: skip
    optimizer = torch.optim.SGD(own.parameters(), lr=1e-3, foreach=True)
    call = VARIANTS[variant].call(own.train(trains))

    def step() -> torch.Tensor:
        autocast = torch.autocast(timing.DEVICE, model.dtype, enabled=trains and not model.half)
        with torch.set_grad_enabled(trains), autocast:
            value = loss(call(**inputs))
        if trains:
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
        return value.detach()

    return step


# --- measuring --------------------------------------------------------------------------------


@dataclass
class Measured:
    """One variant of a model in one mode: its step, and what was measured of it."""

    model: str
    mode: str
    variant: str
    step: Callable[[], Any]
    around: Around
    loss: float
    own_bytes: int = 0  # of its weights, and what else stays between steps
    peak_bytes: int = 0  # the most beside what was there before a step
    walls: list[float] = field(default_factory=list)  # milliseconds
    profiles: list[list[timing.Kernel]] = field(default_factory=list)

    def device_ms(self, *parts: str) -> float:
        """The median of the kernels' time, of those with one of the parts in their names."""
        totals = [sum(kernel.us for kernel in kernels
                      if any(part in kernel.name.lower() for part in parts or [""]))
                  for kernels in self.profiles]  # fmt: skip
        return round(statistics.median(totals) / 1e3, 4)

    def row(self) -> dict[str, Any]:
        fastest = sorted(self.walls)[: max(1, len(self.walls) // 10)]
        return {
            "model": self.model, "mode": self.mode, "variant": self.variant,
            **timing.summary("wall", self.walls, "ms"),
            "wall_tenth_ms": round(statistics.fmean(fastest), 3),
            "peak_gib": round((self.own_bytes + self.peak_bytes) / 2**30, 3),
            "device_ms": self.device_ms(), "layer_norm_ms": self.device_ms(*KERNELS),
            "kernels": sum(kernel.count for kernel in self.profiles[0]), "loss": self.loss,
        }  # fmt: skip


def allocated() -> int:
    return torch.cuda.memory_allocated() if timing.DEVICE == "cuda" else 0


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
            step = step_of(own, inputs, loss, variant, model, mode)
            with around():
                # Without memory some parameters may have their gradients already.
                first = round(float(timing.patiently(step, own.zero_grad)), 5)
        except Exception as problem:
            skipped.append(f"{name}, {mode}, {variant}: {sentence(problem)}")
        else:
            own_bytes = allocated() - before
            found.append(Measured(name, mode, variant, step, around, first, own_bytes))
        if timing.DEVICE == "cuda":
            torch.cuda.empty_cache()
    return found, skipped


def measure(group: list[Measured], seconds: float) -> list[dict[str, Any]]:
    """The rows of a model's variants in one mode: wall times first, then memory and kernels."""
    by_variant = {one.variant: one for one in group}
    with timing.quiet():
        start = time.perf_counter()
        for number, variant in enumerate(timing.turns(tuple(by_variant), MAX_ROUNDS)):
            rounds, at = divmod(number, len(by_variant))
            if at == 0 and rounds >= MIN_ROUNDS and time.perf_counter() - start > seconds:
                break
            gc.collect()  # a reference cycle may keep a step's activations alive
            with by_variant[variant].around():
                us = timing.wall_time([by_variant[variant].step], STEPS)
            by_variant[variant].walls.append(us / 1e3)
    for variant in timing.turns(tuple(by_variant), PROFILES):
        one = by_variant[variant]
        with one.around():
            if timing.DEVICE == "cuda":
                torch.cuda.reset_peak_memory_stats()
                before = allocated()
                one.step()
                one.peak_bytes = torch.cuda.max_memory_allocated() - before
            one.profiles.append(timing.kernels_of(one.step))
    torch.cuda.empty_cache()
    return [one.row() for one in group]


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
                    with torch.device(timing.DEVICE):
                        module, inputs, loss = model.build()
                    if model.channels_last:
                        module, inputs = in_channels_last(module, inputs)
                except Exception as problem:
                    skipped.append(f"{name}, {mode}: {sentence(problem)}")
                    continue
                group, problems = prepare(name, mode, model, (module, inputs, loss), variants)
                skipped += problems
            with turns.measuring(lock):
                rows += measure(group, seconds)
    return {**results.stamp(), "rows": rows, "skipped": skipped}


def run_each_alone(
    chosen: dict[str, Model], variants: Sequence[str], modes: Sequence[str], seconds: float,
    jobs: int, budget: float,
) -> dict[str, Any]:  # fmt: skip
    """Measures each model in each mode in its own process; returns the part of the results file."""
    tasks = [(name, mode) for name in chosen for mode in modes if mode in chosen[name].modes]
    part: dict[str, Any] = {**results.stamp(), "rows": [], "skipped": []}
    if importlib.util.find_spec("liger_kernel") is None:
        part["skipped"] += [f"{name}: liger-kernel is not installed"
                            for name in variants if name.startswith("liger")]  # fmt: skip
    # --models is split at commas. No other name contains this one's text before its comma.
    calls = [["--models", name.split(",")[0], "--modes", mode, "--variants", ",".join(variants),
              "--seconds", str(seconds)] for name, mode in tasks]  # fmt: skip
    found = turns.collect("benchmarks.models", calls, jobs, budget)
    for (name, mode), (measured, problem) in zip(tasks, found, strict=True):
        one = measured.get("models", {"rows": [], "skipped": [f"{name}, {mode}: {problem}"]})
        part = {**part, **{key: part[key] + one[key] for key in ("rows", "skipped")}}
    return part


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The new part, with the old part's rows of other models or modes if its code is the same."""
    if old.get("csrc_sha256") != new["csrc_sha256"]:
        return new
    measured = {(row["model"], row["mode"]) for row in new["rows"]}
    kept = [row for row in old["rows"] if (row["model"], row["mode"]) not in measured]
    order = {name: number for number, name in enumerate(MODELS)}
    return {**new, "rows": sorted([*kept, *new["rows"]],
                                  key=lambda row: order.get(row["model"], len(order)))}  # fmt: skip


def select(names: str | None) -> dict[str, Model]:
    """The models whose name contains one of the parts in `names`, in any case; None for all."""
    parts = names.lower().split(",") if names else [""]
    for part in parts:
        if not any(part in name.lower() for name in MODELS):
            raise SystemExit(f"no model has {part!r} in its name: known are {', '.join(MODELS)}")
    return {name: model for name, model in MODELS.items()
            if any(part in name.lower() for part in parts)}  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = results.parser("models", __doc__)
    parser.add_argument("--models", help='comma-separated parts of names, in any case: "dit,flux"')
    parser.add_argument("--variants", default=",".join(USUAL),
                        help=f"comma-separated, of {', '.join(VARIANTS)}")  # fmt: skip
    parser.add_argument("--modes", default=",".join(MODES), help="comma-separated")
    parser.add_argument("--seconds", type=float, default=4, help="of turns, a model and mode")
    parser.add_argument("--jobs", type=int, default=24, help="processes that compile side by side")
    parser.add_argument("--budget-seconds", type=float, default=520,
                        help="what is not measured by then is left out")  # fmt: skip
    parser.add_argument("--output", type=Path, help="the results file")
    parser.add_argument("--add", action="store_true",
                        help="keep the others of the results file, if of this code")  # fmt: skip
    parser.add_argument("--lock", type=Path, help="measure here, one process at a time")
    arguments = parser.parse_args(argv)
    variants, modes = (tuple(given.split(",")) for given in (arguments.variants, arguments.modes))
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
        limits = (arguments.seconds, arguments.jobs, arguments.budget_seconds)
        part = run_each_alone(chosen, variants, modes, *limits)
    print("\n".join(report.models({"models": part})))
    # A run of a part writes a results file only with --output or --add.
    full = not arguments.models and modes == MODES and variants == USUAL
    path = arguments.output
    if path is None and (full or arguments.add):
        path = results.default_path(torch.cuda.get_device_name())
    if path is not None:
        old = results.read(path).get("models", {}) if arguments.add else {}
        if old and old["csrc_sha256"] != part["csrc_sha256"]:
            print(f"left out: {len(old['rows'])} rows of other code than this")
        results.update(path, "models", merged(old, part))
        print(f"written: {path}")


if __name__ == "__main__":
    main()

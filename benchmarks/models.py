# SPDX-License-Identifier: Apache-2.0
"""Real models end to end: stock, swapped, under override_aten, compiled, fused by the graph pass.

    python -m benchmarks.models
    python -m benchmarks.models --models BERT --variants eager,compiled,swap_compiled
    python -m benchmarks.models --models dit,flux --modes inference --seconds 3 --add

The models are transformers' BERT, GPT-2, ViT and ConvNeXt, its decoders Qwen3, Llama and Gemma 3
with a few layers each, timm's ViT, ConvNeXt and Swin at their real sizes, diffusers' DiT-XL/2,
Flux, Stable Diffusion 3.5 and Wan with a few layers each, blocks of NAFNet, and blocks of DiT,
which the variant "operators" computes with this package's operators. All have random weights and
run in bfloat16 in two modes: a training step (forward, backward, SGD; float32 weights under
autocast, or for decoders, diffusion transformers and NAFNet bfloat16 weights) and inference
(bfloat16 weights).

Each model in each mode has a process of its own. The processes compile side by side, with their
weights on the GPU together, and measure one at a time. In a process the variants take turns, round
after round. The results of a variant are the median and the best wall time of a step, the time of
all its kernels and their number, by the profiler, and the loss of the first step, which should be
the same in all variants. "layer_norm_ms" is the time of the kernels named after LayerNorm
(Inductor's also compute neighbouring operations), "products_ms" that of matrix products and
attention.

The results file has the results under "models", one row for each variant. All rows of a model in a
mode come from one run; --add keeps the rows of other models and modes that earlier runs of the same
code have measured. A variant that cannot run is left out, and a line says why.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import importlib.util
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import diffusion, images, results, timing, turns
from benchmarks.ours import require_kernels
from benchmarks.overhead import quiet
from benchmarks.run import sentence

VARIANTS = ("eager", "compiled", "swap", "swap_compiled", "swap_rotations", "override",
            "fused_eager", "fused_compiled", "operators", "operators_compiled")  # fmt: skip
MODES = ("training", "inference")
BACKEND = "fused_layernorm"  # torch.compile's backend in the variants fused_...
STEPS = 2  # timed steps of a turn; one step before them is not timed
MIN_ROUNDS, MAX_ROUNDS = 3, 31
PROFILES = 3  # of each variant; the variants take turns here too
PATIENCE = 30  # attempts at a step for which there is not enough memory
# Parts of the names of LayerNorm kernels, PyTorch's and ours, in lower case.
KERNELS = ("layer_norm", "layernorm", "gammabeta", "param_grad", "rowwisemoments")
# Parts of the names of matrix product and attention kernels of cuBLAS, cuDNN and PyTorch.
PRODUCTS = ("gemm", "nvjet", "cutlass", "xmma", "flash", "fmha", "sdpa")

# A model, its inputs as keyword arguments, and the loss of its output.
Build = Callable[[], tuple[nn.Module, dict[str, torch.Tensor], Callable[[Any], torch.Tensor]]]


def bert(batch: int = 16, length: int = 512) -> Any:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    tokens = torch.randint(config.vocab_size, (batch, length))
    return BertForMaskedLM(config), {"input_ids": tokens}, _token_loss(tokens)


def gpt2(batch: int = 8, length: int = 1024) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    tokens = torch.randint(config.vocab_size, (batch, length))
    return GPT2LMHeadModel(config), {"input_ids": tokens}, _token_loss(tokens)


def decoder(name: str, width: int, layers: int, heads: int, batch: int = 4) -> Any:
    """A decoder of transformers at its real width, with few layers: "Qwen3", "Llama", "Gemma3"."""
    import transformers

    prefix = f"{name}Text" if name == "Gemma3" else name
    config = getattr(transformers, f"{prefix}Config")(
        vocab_size=32_768, hidden_size=width, intermediate_size=3 * width,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=max(1, heads // 4),
        head_dim=128, max_position_embeddings=4096, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    tokens = torch.randint(config.vocab_size, (batch, 4096))
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    return model, {"input_ids": tokens}, _token_loss(tokens)


def vit(batch: int = 64) -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config.num_labels = 1000
    return (
        ViTForImageClassification(config),
        {"pixel_values": torch.randn(batch, 3, 224, 224)},
        _class_loss(batch, lambda output: output.logits),
    )


def convnext(batch: int = 64) -> Any:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig()
    config.num_labels = 1000
    return (
        ConvNextForImageClassification(config),
        {"pixel_values": torch.randn(batch, 3, 224, 224)},
        _class_loss(batch, lambda output: output.logits),
    )


def timm_model(name: str, batch: int = 64) -> Any:
    import timm

    images = {"x": torch.randn(batch, 3, 224, 224)}
    model = timm.create_model(name, drop_path_rate=0.0)  # no random drops: losses can be compared
    return model, images, _class_loss(batch, lambda output: output)


def _token_loss(tokens: torch.Tensor) -> Callable[[Any], torch.Tensor]:
    return lambda output: F.cross_entropy(
        output.logits.flatten(0, 1).float(), tokens.to(output.logits.device).flatten()
    )


def _class_loss(batch: int, logits: Callable[[Any], torch.Tensor]) -> Callable[[Any], torch.Tensor]:
    labels = torch.randint(1000, (batch,))

    def loss(output: Any) -> torch.Tensor:
        scores = logits(output)
        return F.cross_entropy(scores.float(), labels.to(scores.device))

    return loss


@dataclass(frozen=True)
class Model:
    """How a model is built and measured; `package` is the Python package that it needs."""

    package: str
    build: Build
    half: bool = False  # trained with bfloat16 weights, not under autocast
    modes: tuple[str, ...] = MODES


MODELS: dict[str, Model] = {
    "transformers BERT-base 16x512": Model("transformers", bert),
    "transformers GPT-2 8x1024": Model("transformers", gpt2),
    "transformers ViT-B/16 64x224": Model("transformers", vit),
    "transformers Qwen3, 2048 wide, 6 layers, 4x4096": Model(
        "transformers", lambda: decoder("Qwen3", 2048, 6, 16), half=True
    ),
    "transformers Llama, 4096 wide, 4 layers, 4x4096": Model(
        "transformers", lambda: decoder("Llama", 4096, 4, 32), half=True
    ),
    "transformers Gemma3, 2560 wide, 6 layers, 4x4096": Model(
        "transformers", lambda: decoder("Gemma3", 2560, 6, 8), half=True
    ),
    "transformers ConvNeXt-T 64x224": Model("transformers", convnext),
    "NAFNet blocks, 4 layers, 8x64x256x256": Model("transformers", images.nafnet, half=True),
    "transformers SAM, neck and mask decoder, 8x64x64": Model(
        "transformers", images.sam, half=True
    ),
    "torchvision ConvNeXt-T 64x224": Model("torchvision", images.torchvision_convnext),
    "timm ViT-B/16 64x224": Model("timm", lambda: timm_model("vit_base_patch16_224")),
    "timm ConvNeXt-T 64x224": Model("timm", lambda: timm_model("convnext_tiny")),
    "timm Swin-T 64x224": Model("timm", lambda: timm_model("swin_tiny_patch4_window7_224")),
    diffusion.BLOCKS: Model("torch", diffusion.blocks, half=True),
    "diffusers DiT-XL/2, 8 layers": Model("diffusers", diffusion.dit, half=True),
    # In torch 2.11 its backward pass ends in an illegal address, even stock and in eager mode.
    "diffusers Flux, 2+4 layers": Model(
        "diffusers", diffusion.flux, half=True, modes=("inference",)
    ),
    "diffusers SD3.5-large, 6 layers": Model("diffusers", diffusion.sd3, half=True),
    "diffusers Wan 1.3B, 4 layers": Model("diffusers", diffusion.wan, half=True),
}


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


def registered() -> bool:
    """Whether torch.compile knows this package's backend."""
    import fused_layernorm  # noqa: F401

    return BACKEND in torch._dynamo.list_backends(exclude_tags=())


def halved(model: nn.Module) -> nn.Module:
    """Casts the model to bfloat16, except modules that must stay in float32 (diffusers' Wan)."""
    kept = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_floating_point() and kept.isdisjoint(name.split(".")):
            tensor.data = tensor.data.bfloat16()
    return model


def applies(variant: str, model: nn.Module) -> bool:
    """Whether the model has this variant.

    A model written with this package's operators has the variants "operators" but no modules to
    swap. All other models have the variants "swap" instead, and "swap_rotations" if they have
    attention modules whose rotation can be swapped.
    """
    from fused_layernorm.swap import rotations

    if variant == "swap_rotations":
        found = (rotations.class_of(type(module)) for module in model.modules())
        return any(isinstance(cls, type) for cls in found)
    written = hasattr(model, "operators")
    return not (variant.startswith("swap") if written else variant.startswith("operators"))


def prepared(model: nn.Module, variant: str) -> nn.Module:
    """A copy of the model as the variant has it, not yet compiled; see `around` and `compiled`."""
    import fused_layernorm

    model = copy.deepcopy(model)
    if variant.startswith("swap"):
        model = fused_layernorm.swap_norms(model, rotations=variant == "swap_rotations")
    elif variant.startswith("operators"):
        model.operators = True  # type: ignore[assignment]
    return model


def compiled(model: nn.Module, variant: str) -> Callable[..., Any]:
    """The model as the variant calls it."""
    if variant == "fused_eager":
        options: dict[str, str | int | bool | Callable[..., Any]]
        options = {f"{BACKEND}.then": "eager"}
        return torch.compile(model, backend=BACKEND, options=options)
    if variant == "fused_compiled":
        return torch.compile(model, backend=BACKEND)
    return torch.compile(model) if variant.endswith("compiled") else model


def around(variant: str) -> contextlib.AbstractContextManager[Any]:
    """The context manager in which a variant's steps run."""
    import fused_layernorm

    return fused_layernorm.override_aten() if variant == "override" else contextlib.nullcontext()


def halved_inputs(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: value.bfloat16() if value.is_floating_point() else value
        for name, value in inputs.items()
    }


def training(
    model: nn.Module, inputs: dict[str, torch.Tensor], loss: Any, variant: str, half: bool
) -> Callable[[], Any]:
    """A step: forward, backward, SGD; with bfloat16 weights if `half`, else under autocast."""
    if half:
        model, inputs = halved(model), halved_inputs(inputs)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
    model.train()
    call = compiled(model, variant)

    def step() -> torch.Tensor:
        with torch.autocast(timing.DEVICE, torch.bfloat16, enabled=not half):
            value = loss(call(**inputs))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return step


def inference(
    model: nn.Module, inputs: dict[str, torch.Tensor], loss: Any, variant: str
) -> Callable[[], Any]:
    call = compiled(halved(model).eval(), variant)
    halves = halved_inputs(inputs)

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
    loss: float
    walls: list[float] = field(default_factory=list)  # milliseconds
    profiles: list[list[timing.Kernel]] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "mode": self.mode,
            "variant": self.variant,
            **timing.summary("wall", self.walls, "ms"),
            "device_ms": _median_ms(self.profiles, lambda name: True),
            "layer_norm_ms": _median_ms(self.profiles, lambda name: _has(name, KERNELS)),
            # Inductor names its kernels after all operations in them or next to them.
            "products_ms": _median_ms(
                self.profiles,
                lambda name: _has(name, PRODUCTS) and not name.startswith("triton_"),
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
        if not applies(variant, module):
            continue
        if variant.startswith("fused") and not registered():
            skipped.append(f"{name}, {mode}, {variant}: no backend {BACKEND!r} is registered")
            continue
        try:
            own = prepared(module, variant)
            if mode == "training":
                step = training(own, inputs, loss, variant, model.half)
            else:
                step = inference(own, inputs, loss, variant)
            with around(variant):
                first = round(_with_patience(own, step), 5)
        except Exception as problem:
            skipped.append(f"{name}, {mode}, {variant}: {sentence(problem)}")
        else:
            found.append(Measured(name, mode, variant, step, first))
        torch.cuda.empty_cache()
    return found, skipped


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
            with around(variant):
                us = timing.wall_time([by_variant[variant].step], STEPS)
            by_variant[variant].walls.append(us / 1e3)


def profile(group: list[Measured]) -> list[dict[str, Any]]:
    """Profiles the kernels of a model's variants in one mode, and returns the variants' rows."""
    by_variant = {one.variant: one for one in group}
    for variant in timing.turns(tuple(by_variant), PROFILES):
        one = by_variant[variant]
        with around(variant):
            one.step()
            one.profiles.append(timing.kernels_of(one.step))
    torch.cuda.empty_cache()
    return [one.row() for one in group]


def _has(name: str, parts: Sequence[str]) -> bool:
    return any(part in name.lower() for part in parts)


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


def text(part: dict[str, Any]) -> str:
    """The table; in brackets the ratio to the stock model in eager mode."""
    lines = [
        f"{'model':<32}{'mode':<11}{'variant':<19}{'wall ms':>18}{'best':>18}{'device':>18}"
        f"{'(norm)':>8}{'kernels':>9}  loss"
    ]
    stock = {(row["model"], row["mode"]): row for row in part["rows"]
             if row["variant"] == "eager"}  # fmt: skip
    for row in part["rows"]:
        line = f"{row['model']:<32}{row['mode']:<11}{row['variant']:<19}"
        for key in ("wall_ms", "wall_best_ms", "device_ms"):
            other = stock.get((row["model"], row["mode"]), {}).get(key)
            said = f"{row[key]:.2f}" if key in row else "-"
            line += f"{said + (f' (x{row[key] / other:.3f})' if other and key in row else ''):>18}"
        line += f"{row['layer_norm_ms']:>8.2f}{row.get('kernels', '-'):>9}  {row['loss']:.4f}"
        lines.append(line)
    return "\n".join([*lines, *(f"skipped {line}" for line in part["skipped"])])


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
    print(text(part))
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

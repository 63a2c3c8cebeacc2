"""Real models end to end: stock, swapped, under override_aten, and compiled if asked.

    python -m benchmarks.models
    python -m benchmarks.models --models BERT --variants eager,compiled,swap_compiled

transformers' BERT, GPT-2 and ViT and timm's ViT, ConvNeXt and Swin at their real sizes with random
weights, in bfloat16: a training step (float32 weights under autocast; forward, backward, SGD) and
inference (bfloat16 weights). The variants of a model stand in memory side by side and take turns,
round after round. For each: the median and the best wall time of a step, the time of all its
kernels and their number, by the profiler, and the loss of the first step, which must not change.
Kept in the results file under "models", one row a variant.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import results, timing
from benchmarks.ours import require_kernels
from benchmarks.overhead import quiet
from benchmarks.run import sentence

VARIANTS = ("eager", "swap", "override", "compiled", "swap_compiled")
DEFAULT = ("eager", "swap", "override")
STEPS = 2  # of each turn, behind one that is not timed
MIN_ROUNDS, MAX_ROUNDS = 7, 31
PROFILES = 3  # of each variant, in turns too
# Names of LayerNorm kernels, PyTorch's and ours, in lower case.
KERNELS = ("layer_norm", "layernorm", "gammabeta", "param_grad", "rowwisemoments")

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


def vit(batch: int = 64) -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config.num_labels = 1000
    return (
        ViTForImageClassification(config),
        {"pixel_values": torch.randn(batch, 3, 224, 224)},
        _class_loss(batch, lambda output: output.logits),
    )


def timm_model(name: str, batch: int = 64) -> Any:
    import timm

    images = {"x": torch.randn(batch, 3, 224, 224)}
    model = timm.create_model(name, drop_path_rate=0.0)  # nothing random, for the losses' sake
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


MODELS: dict[str, tuple[str, Build]] = {
    "transformers BERT-base 16x512": ("transformers", bert),
    "transformers GPT-2 8x1024": ("transformers", gpt2),
    "transformers ViT-B/16 64x224": ("transformers", vit),
    "timm ViT-B/16 64x224": ("timm", lambda: timm_model("vit_base_patch16_224")),
    "timm ConvNeXt-T 64x224": ("timm", lambda: timm_model("convnext_tiny")),
    "timm Swin-T 64x224": ("timm", lambda: timm_model("swin_tiny_patch4_window7_224")),
}


def prepared(model: nn.Module, variant: str) -> nn.Module:
    """A copy of the model as the variant has it; the override is entered around its steps."""
    import fused_layernorm

    model = copy.deepcopy(model)
    if variant.startswith("swap"):
        model = fused_layernorm.swap_layer_norm(model)
    return model


def around(variant: str) -> contextlib.AbstractContextManager[Any]:
    """What a variant's steps run in."""
    import fused_layernorm

    return fused_layernorm.override_aten() if variant == "override" else contextlib.nullcontext()


def training(
    model: nn.Module, inputs: dict[str, torch.Tensor], loss: Any, compiled: bool
) -> Callable[[], Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
    model.train()
    call = torch.compile(model) if compiled else model

    def step() -> torch.Tensor:
        with torch.autocast(timing.DEVICE, torch.bfloat16):
            value = loss(call(**inputs))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return step


def inference(
    model: nn.Module, inputs: dict[str, torch.Tensor], loss: Any, compiled: bool
) -> Callable[[], Any]:
    model.eval().bfloat16()
    call = torch.compile(model) if compiled else model
    halved = {
        name: value.bfloat16() if value.is_floating_point() else value
        for name, value in inputs.items()
    }

    @torch.no_grad()
    def step() -> torch.Tensor:
        return loss(call(**halved))

    return step


def wall_ms(step: Callable[[], Any]) -> float:
    """Wall milliseconds of a step, behind one that is not timed."""
    return timing.wall_time([step], STEPS) / 1e3


def measure(build: Build, variants: Sequence[str], seconds: float) -> list[dict[str, Any]]:
    """The rows of one model: both modes, each in all variants. `seconds` are those of a mode."""
    torch.manual_seed(0)
    model, inputs, loss = build()
    model = model.to(timing.DEVICE)
    inputs = {name: value.to(timing.DEVICE) for name, value in inputs.items()}
    rows = []
    for mode, make in (("training", training), ("inference", inference)):
        steps: dict[str, Callable[[], Any]] = {}
        losses: dict[str, float] = {}
        torch._dynamo.reset()
        for variant in variants:
            step = make(prepared(model, variant), inputs, loss, variant.endswith("compiled"))
            steps[variant] = step
            with around(variant):
                losses[variant] = round(float(step()), 5)
        walls: dict[str, list[float]] = {variant: [] for variant in variants}
        with quiet():
            start = time.perf_counter()
            for number, variant in enumerate(timing.turns(variants, MAX_ROUNDS)):
                rounds, at = divmod(number, len(variants))
                if at == 0 and rounds >= MIN_ROUNDS and time.perf_counter() - start > seconds:
                    break
                with around(variant):
                    walls[variant].append(wall_ms(steps[variant]))
        profiles: dict[str, list[list[timing.Kernel]]] = {variant: [] for variant in variants}
        for variant in timing.turns(variants, PROFILES):
            with around(variant):
                steps[variant]()
                profiles[variant].append(timing.kernels_of(steps[variant]))
        for variant in variants:
            rows.append(
                {
                    "mode": mode,
                    "variant": variant,
                    **timing.summary("wall", walls[variant], "ms"),
                    "device_ms": _median_ms(profiles[variant]),
                    "layer_norm_ms": _median_ms(profiles[variant], KERNELS),
                    "kernels": sum(kernel.count for kernel in profiles[variant][0]),
                    "loss": losses[variant],
                }
            )
        del steps, step
        torch.cuda.empty_cache()
    return rows


def _median_ms(profiles: list[list[timing.Kernel]], names: Sequence[str] = ("",)) -> float:
    """The device time of the kernels with one of these in their names, over several profiles."""
    totals = [
        sum(k.us for k in kernels if any(name in k.name.lower() for name in names))
        for kernels in profiles
    ]
    return round(statistics.median(totals) / 1e3, 4)


def text(part: dict[str, Any]) -> str:
    """The table; in brackets the ratio to the stock model in eager mode."""
    lines = [
        f"{'model':<32}{'mode':<11}{'variant':<15}{'wall ms':>18}{'best':>18}{'device':>18}"
        f"{'(norm)':>8}{'kernels':>9}  loss"
    ]
    stock = {(row["model"], row["mode"]): row for row in part["rows"]
             if row["variant"] == "eager"}  # fmt: skip
    for row in part["rows"]:
        line = f"{row['model']:<32}{row['mode']:<11}{row['variant']:<15}"
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
    parser.add_argument("--models", help="part of a model's name")
    parser.add_argument("--variants", default=",".join(DEFAULT),
                        help=f"comma-separated: {', '.join(VARIANTS)}")  # fmt: skip
    parser.add_argument("--budget-seconds", type=float, default=240)
    parser.add_argument("--mode-seconds", type=float, default=6, help="of one model in one mode")
    parser.add_argument("--output", type=Path, help="the results file")
    arguments = parser.parse_args(argv)
    variants = arguments.variants.split(",")
    for variant in variants:
        if variant not in VARIANTS:
            parser.error(f"unknown variant {variant!r}: known are {', '.join(VARIANTS)}")
    require_kernels()

    start = time.monotonic()
    part: dict[str, Any] = {**results.stamp(), "rows": [], "skipped": []}
    for name, (package, build) in MODELS.items():
        if arguments.models and arguments.models not in name:
            continue
        if importlib.util.find_spec(package) is None:
            part["skipped"].append(f"{name}: {package} is not installed")
            continue
        if time.monotonic() - start > arguments.budget_seconds:
            part["skipped"].append(f"{name}: no time")
            continue
        print(f"{name}, {time.monotonic() - start:.0f} s", flush=True)
        try:
            rows = measure(build, variants, arguments.mode_seconds)
            part["rows"] += [{"model": name, **row} for row in rows]
        except Exception as problem:
            part["skipped"].append(f"{name}: {sentence(problem)}")
        torch.cuda.empty_cache()
    print(text(part))
    # Numbers of two runs never stand in one table: a run of a part writes only where it is told to.
    full = not arguments.models and tuple(variants) == DEFAULT
    path = arguments.output
    if path is None and full:
        path = results.default_path(torch.cuda.get_device_name())
    if path is not None:
        results.update(path, "models", part)
        print(f"written: {path}")


if __name__ == "__main__":
    main()

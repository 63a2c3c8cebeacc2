"""Real models end to end: stock, with swap_layer_norm, and under override_aten.

    python -m benchmarks.models

transformers' BERT, GPT-2 and ViT and timm's ViT and ConvNeXt at their real sizes with random
weights, in bfloat16: a training step (float32 weights under autocast; forward, backward, SGD) and
inference (bfloat16 weights). Wall time of a step, the device time of its LayerNorm kernels, and
the loss, which must not change. Kept in the results file under "models".
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.util
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import results, timing
from benchmarks.ours import require_kernels
from benchmarks.run import sentence

VARIANTS = ("stock", "swap", "override")
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
    return timm.create_model(name), images, _class_loss(batch, lambda output: output)


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
}


@contextlib.contextmanager
def variant_of(model: nn.Module, variant: str) -> Iterator[nn.Module]:
    """A copy of the model in one of the three variants."""
    import fused_layernorm

    model = copy.deepcopy(model)
    if variant == "override":
        with fused_layernorm.override_aten():
            yield model
        return
    yield fused_layernorm.swap_layer_norm(model) if variant == "swap" else model


def training(model: nn.Module, inputs: dict[str, torch.Tensor], loss: Any) -> Callable[[], Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
    model.train()

    def step() -> torch.Tensor:
        with torch.autocast(timing.DEVICE, torch.bfloat16):
            value = loss(model(**inputs))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return step


def inference(model: nn.Module, inputs: dict[str, torch.Tensor], loss: Any) -> Callable[[], Any]:
    model.eval().bfloat16()
    halved = {
        name: value.bfloat16() if value.is_floating_point() else value
        for name, value in inputs.items()
    }

    @torch.no_grad()
    def step() -> torch.Tensor:
        return loss(model(**halved))

    return step


def kernel_ms(step: Callable[[], Any]) -> float:
    """Device milliseconds of the LayerNorm kernels of one step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as run:
        step()
        torch.cuda.synchronize()
    total = sum(
        event.self_device_time_total
        for event in run.key_averages()
        if any(name in event.key.lower() for name in KERNELS)
    )
    return total / 1e3


def measure(build: Build, seconds: float) -> list[dict[str, Any]]:
    """Both modes of one model, in all variants."""
    torch.manual_seed(0)
    model, inputs, loss = build()
    model = model.to(timing.DEVICE)
    inputs = {name: value.to(timing.DEVICE) for name, value in inputs.items()}
    rows = []
    for mode, make in (("training", training), ("inference", inference)):
        row: dict[str, Any] = {"mode": mode}
        for variant in VARIANTS:
            with variant_of(model, variant) as one:
                step = make(one, inputs, loss)
                row[f"{variant}_loss"] = round(float(step()), 5)
                start = time.perf_counter()
                step()
                torch.cuda.synchronize()
                once = time.perf_counter() - start
                rounds = max(2, min(20, int(seconds / 7 / once)))
                row[f"{variant}_ms"] = round(
                    timing.wall_time([step], rounds=rounds, repeats=5) / 1e3, 3
                )
                row[f"{variant}_layer_norm_ms"] = round(kernel_ms(step), 4)
            torch.cuda.empty_cache()
        rows.append(row)
    return rows


def text(part: dict[str, Any]) -> str:
    """The table."""
    lines = [
        f"{'model':<32}{'mode':<11}"
        + "".join(f"{variant + ' ms':>12}{'(norm)':>9}" for variant in VARIANTS)
        + "   loss"
    ]
    for row in part["rows"]:
        times = "".join(
            f"{row[f'{variant}_ms']:>12.2f}{row[f'{variant}_layer_norm_ms']:>9.3f}"
            for variant in VARIANTS
        )
        losses = " ".join(f"{row[f'{variant}_loss']:.4f}" for variant in VARIANTS)
        lines.append(f"{row['model']:<32}{row['mode']:<11}{times}   {losses}")
    return "\n".join([*lines, *(f"skipped {line}" for line in part["skipped"])])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", help="part of a model's name")
    parser.add_argument("--budget-seconds", type=float, default=110)
    parser.add_argument("--output", type=Path, help="the results file")
    arguments = parser.parse_args(argv)
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
            part["rows"] += [{"model": name, **row} for row in measure(build, 1.2)]
        except Exception as problem:
            part["skipped"].append(f"{name}: {sentence(problem)}")
        torch.cuda.empty_cache()
    print(text(part))
    path = arguments.output or results.default_path(torch.cuda.get_device_name())
    results.update(path, "models", part)
    print(f"written: {path}")


if __name__ == "__main__":
    main()

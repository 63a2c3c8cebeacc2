"""What a call costs beyond the device's work: call overhead, and a training step in wall time."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import timing

# Activations of a BERT-base and a ViT-L training step: (name, shape).
STEPS = (("BERT-base", (8, 512, 768)), ("ViT-L", (32, 577, 1024)))


def call_overhead() -> dict[str, dict[str, float]]:
    """Host microseconds per call on a tiny tensor, ours against F.layer_norm, measured in turns.

    "no_grad" and "grad" are forward alone; "step" is forward and backward; "override_*" is
    F.layer_norm itself under override_aten() against stock.
    """
    import fused_layernorm

    x = torch.randn(8, 64, device=timing.DEVICE)
    weight = torch.rand(64, device=timing.DEVICE) + 0.5
    bias = torch.randn(64, device=timing.DEVICE)
    dy = torch.randn_like(x)

    def ours() -> torch.Tensor:
        return fused_layernorm.layer_norm(x, weight, bias, 1e-5)

    def eager() -> torch.Tensor:
        return F.layer_norm(x, (64,), weight, bias, 1e-5)

    def ours_step() -> Any:
        return torch.autograd.grad(ours(), (x, weight, bias), dy)

    def eager_step() -> Any:
        return torch.autograd.grad(eager(), (x, weight, bias), dy)

    measured: dict[str, dict[str, float]] = {}
    with torch.no_grad():
        measured["no_grad"] = _pair(ours, eager)
    for tensor in (x, weight, bias):
        tensor.requires_grad_()
    measured["grad"] = _pair(ours, eager)
    measured["step"] = _pair(ours_step, eager_step)

    stock = dict(measured)
    with fused_layernorm.override_aten():
        with torch.no_grad():
            ours_us = {"no_grad": timing.overhead(eager)}
        ours_us["grad"] = timing.overhead(eager)
        ours_us["step"] = timing.overhead(eager_step)
    for name, entry in stock.items():
        measured[f"override_{name}"] = {
            "ours_us": round(ours_us[name], 3),
            "eager_us": entry["eager_us"],
        }
    return measured


def _pair(ours: timing.Call, eager: timing.Call) -> dict[str, float]:
    """Two runs each, in turns; the lower, as what disturbs a host only adds."""
    first = (timing.overhead(ours), timing.overhead(eager))
    second = (timing.overhead(ours), timing.overhead(eager))
    return {
        "ours_us": round(min(first[0], second[0]), 3),
        "eager_us": round(min(first[1], second[1]), 3),
    }


def training_steps(repeats: int = 9) -> list[dict[str, Any]]:
    """Wall microseconds of forward and backward of the module, ours against nn.LayerNorm, eager.

    bfloat16 activations with float32 weights go through autocast, as in training: nn.LayerNorm
    takes that mixture no other way on CUDA.
    """
    import fused_layernorm

    entries = []
    for name, shape in STEPS:
        for dtype, weight_dtype in (
            (torch.bfloat16, torch.float32),
            (torch.bfloat16, torch.bfloat16),
            (torch.float32, torch.float32),
        ):
            autocast = dtype != weight_dtype
            options: dict[str, Any] = {"device": timing.DEVICE, "dtype": weight_dtype}
            times = {}
            for key, module in (
                ("ours_us", fused_layernorm.FusedLayerNorm(shape[-1], **options)),
                ("eager_us", torch.nn.LayerNorm(shape[-1], **options)),
            ):
                calls = _step_calls(module, shape, dtype, autocast)
                times[key] = round(timing.wall_time(calls, repeats=repeats), 3)
            size = "x".join(str(length) for length in shape)
            kinds = f"{_short(dtype)}, weights {_short(weight_dtype)}"
            entries.append(
                {
                    "name": f"{name} {size} {kinds}" + (", autocast" if autocast else ""),
                    "shape": list(shape),
                    "dtype": _short(dtype),
                    "weight_dtype": _short(weight_dtype),
                    "autocast": autocast,
                    **times,
                }
            )
    return entries


def _step_calls(
    module: torch.nn.Module, shape: tuple[int, ...], dtype: torch.dtype, autocast: bool
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


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

# SPDX-License-Identifier: Apache-2.0
"""Inputs for a case, and this package's operators called on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import timing
from benchmarks.cases import EPS, Case
from benchmarks.timing import Call


@dataclass
class Inputs:
    """Tensors of one call. Those that the case's operator does not use are None."""

    x: torch.Tensor  # for a fused add in backward: the sum, residual_out
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    dy: torch.Tensor | None = None
    dresidual: torch.Tensor | None = None
    mean: torch.Tensor | None = None
    rstd: torch.Tensor | None = None
    shift: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    gate: torch.Tensor | None = None
    input: torch.Tensor | None = None  # in backward: the tensor that the gate multiplied


def make_inputs(case: Case, limit: int | None = None) -> list[Inputs]:
    """Distinct random inputs for a case, together larger than L2, or `limit` of them.

    weight and bias are shared, as they are between the calls of a real model. shift, scale and gate
    are views of one tensor of six, as diffusion transformers cut them out of one layer's output.
    """
    count = limit or timing.input_count(case.bytes, timing.l2_bytes())
    options: dict[str, Any] = {"device": timing.DEVICE, "dtype": case.torch_dtype}
    columns: dict[str, Any] = {**options, "dtype": case.torch_weight_dtype}
    shape = case.shape
    weight = bias = None
    if not case.modulated:
        weight = torch.rand(case.cols, **columns) + 0.5
        bias = None if case.is_rms else torch.randn(case.cols, **columns)
    inputs = []
    for _ in range(count):
        one = Inputs(torch.randn(shape, **options), weight, bias)
        if case.modulated:
            *groups, cols = case.modulation_shape
            six = torch.randn(*groups, 6 * cols, device=timing.DEVICE,
                              dtype=case.torch_modulation_dtype)  # fmt: skip
            one.shift, one.scale, gate = six.chunk(6, dim=-1)[:3]
            if case.residual:
                one.gate = gate
                one.input = torch.randn(shape, **options) if case.backward else None
        if case.backward:
            one.dy = torch.randn(shape, device=timing.DEVICE, dtype=case.torch_out_dtype)
            one.mean, one.rstd = _statistics(one.x, case.is_rms)
            if case.residual:
                one.dresidual = torch.randn(shape, **options)
        elif case.residual:
            one.residual = torch.randn(shape, **options)
        inputs.append(one)
    return inputs


def _statistics(x: torch.Tensor, is_rms: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """mean and rstd as forward saves them: one each per row, float64 for float64, else float32.

    RMSNorm's mean is an empty tensor.
    """
    if is_rms:
        rstd = (x.float().square().mean(-1, keepdim=True) + EPS).rsqrt()
        return rstd.new_empty((0,)), rstd
    _, mean, rstd = torch.ops.aten.native_layer_norm(x, x.shape[-1:], None, None, EPS)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return mean.to(wide), rstd.to(wide)


def require_kernels() -> str:
    """Ends the program if the kernels cannot run here; returns what the binary was built for."""
    import fused_layernorm  # noqa: F401  (registers the operators)

    if not torch.cuda.is_available():
        raise SystemExit("the benchmarks need a CUDA device: torch.cuda.is_available() is False")
    built = str(torch.ops.fused_layernorm._build_info())
    if built == "cpu only":
        raise SystemExit("the benchmarks need the kernels: this build of fused_layernorm has none")
    return built


def operators(case: Case, *, statistics: bool = False) -> tuple[str, ...]:
    """The names of the operators that `ours` calls."""
    if case.backward:
        if not case.modulated:
            return ("layer_norm_backward",)
        return ("add_ada_layer_norm_backward" if case.residual else "ada_layer_norm_backward",)
    name = ("add_" if case.residual else "") + ("ada_" if case.modulated else "") + "layer_norm"
    return (f"{name}_forward" if statistics else name,)


def missing_operator(case: Case, *, statistics: bool = False) -> str | None:
    """The first of `operators` for which the loaded library has no kernel here, or None."""
    for name in operators(case, statistics=statistics):
        if not hasattr(torch.ops.fused_layernorm, name):
            return name
        if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(
            f"fused_layernorm::{name}", timing.DEVICE.upper()
        ):
            return name
    return None


def ours(case: Case, t: Inputs, *, statistics: bool = False) -> Call:
    """A call of this package's operator on one input; forward with mean and rstd if `statistics`.

    The operators must be registered, by `import fused_layernorm` or by loading the library alone.
    Arguments are passed by name, so that libraries of several versions accept them.
    """
    if case.modulated:
        return _modulated(case, t, statistics)
    ops = torch.ops.fused_layernorm
    activation, scale = case.activation
    arguments: dict[str, Any] = {"normalized_ndim": 1, "weight": t.weight, "bias": t.bias}
    if case.is_rms:
        arguments["statistic"] = "rms"
    if case.backward:
        arguments |= {
            "dy": t.dy, "x": t.x, "mean": t.mean, "rstd": t.rstd, "dresidual": t.dresidual,
            "activation": activation, "scale": scale,
            "needs_dx": True, "needs_dweight": True, "needs_dbias": not case.is_rms,
        }  # fmt: skip
        if case.is_rms:  # dbias is not asked for
            return lambda: ops.layer_norm_backward.default(**arguments)[:2]
        return lambda: ops.layer_norm_backward.default(**arguments)
    arguments |= {"input": t.x, "eps": EPS, "activation": activation, "scale": scale}
    if case.out_dtype is not None:
        arguments["out_dtype"] = case.torch_out_dtype
    if case.residual:
        arguments["residual"] = t.residual
    operator = getattr(ops, operators(case, statistics=statistics)[0]).default
    return lambda: operator(**arguments)


def _modulated(case: Case, t: Inputs, statistics: bool) -> Call:
    """As `ours`, for a modulated case. Backward gives (dx, dshift, dscale), or with a gate (dinput,
    dresidual, dgate, dshift, dscale).
    """
    ops = torch.ops.fused_layernorm
    arguments: dict[str, Any] = {
        "normalized_ndim": 1, "shift": t.shift, "scale": t.scale, "weight": None, "bias": None,
    }  # fmt: skip
    if case.is_rms:
        arguments["statistic"] = "rms"
    if not case.backward:
        arguments |= {"input": t.x, "eps": EPS}
        if case.out_dtype is not None:
            arguments["out_dtype"] = case.torch_out_dtype
        if case.residual:
            arguments |= {"residual": t.residual, "gate": t.gate}
        operator = getattr(ops, operators(case, statistics=statistics)[0]).default
        return lambda: operator(**arguments)

    arguments |= {
        "dy": t.dy, "x": t.x, "mean": t.mean, "rstd": t.rstd, "dresidual": t.dresidual,
        "needs_dx": True, "needs_dshift": not case.is_dshift_dy, "needs_dscale": True,
        "needs_dweight": False, "needs_dbias": False,
    }  # fmt: skip
    operator = getattr(ops, operators(case)[0]).default
    if case.residual:
        arguments |= {"input": t.input, "gate": t.gate, "needs_dinput": True, "needs_dgate": True}

    def call() -> tuple[torch.Tensor, ...]:
        gradients = list(operator(**arguments)[: 5 if case.residual else 3])
        if case.residual:
            gradients[:2] = reversed(gradients[:2])
        if case.is_dshift_dy:
            gradients[-2] = t.dy
        return tuple(gradients)

    return call


def time_calls(case: Case, calls: list[Call], **options: Any) -> float:
    """Device microseconds of one call of a case."""
    return timing.graph_time(calls, count=timing.call_count(len(calls), case.bytes), **options)

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
    weight: torch.Tensor
    bias: torch.Tensor
    residual: torch.Tensor | None = None
    dy: torch.Tensor | None = None
    dresidual: torch.Tensor | None = None
    mean: torch.Tensor | None = None
    rstd: torch.Tensor | None = None


def make_inputs(case: Case, limit: int | None = None) -> list[Inputs]:
    """Distinct random inputs for a case, together larger than L2, or `limit` of them.

    weight and bias are shared, as they are between the calls of a real model.
    """
    count = limit or timing.input_count(case.bytes, timing.l2_bytes())
    options: dict[str, Any] = {"device": timing.DEVICE, "dtype": case.torch_dtype}
    columns: dict[str, Any] = {**options, "dtype": case.torch_weight_dtype}
    shape = (case.rows, case.cols)
    weight = torch.rand(case.cols, **columns) + 0.5
    bias = torch.randn(case.cols, **columns)
    inputs = []
    for _ in range(count):
        one = Inputs(torch.randn(shape, **options), weight, bias)
        if case.backward:
            one.dy = torch.randn(shape, device=timing.DEVICE, dtype=case.torch_out_dtype)
            one.mean, one.rstd = _statistics(one.x)
            if case.residual:
                one.dresidual = torch.randn(shape, **options)
        elif case.residual:
            one.residual = torch.randn(shape, **options)
        inputs.append(one)
    return inputs


def _statistics(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """mean and rstd as forward saves them: shape (rows, 1), float32 for half precision."""
    _, mean, rstd = torch.ops.aten.native_layer_norm(x, x.shape[1:], None, None, EPS)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return mean.to(wide), rstd.to(wide)


def require_kernels() -> str:
    """Ends the program where there is nothing to measure; what the binary was built for."""
    import fused_layernorm  # noqa: F401  (registers the operators)

    if not torch.cuda.is_available():
        raise SystemExit("the benchmarks need a CUDA device: torch.cuda.is_available() is False")
    built = str(torch.ops.fused_layernorm._build_info())
    if built == "cpu only":
        raise SystemExit("the benchmarks need the kernels: this build of fused_layernorm has none")
    return built


def ours(case: Case, t: Inputs, *, statistics: bool = False) -> Call:
    """This package's operator on one input; forward, if asked, with mean and rstd for backward.

    The operators must be registered: `import fused_layernorm`, or the library alone. Arguments go
    by name, so that libraries of several versions understand them.
    """
    ops = torch.ops.fused_layernorm
    activation, scale = case.activation
    arguments: dict[str, Any] = {"normalized_ndim": 1, "weight": t.weight, "bias": t.bias}
    if case.backward:
        arguments |= {
            "dy": t.dy, "x": t.x, "mean": t.mean, "rstd": t.rstd, "dresidual": t.dresidual,
            "activation": activation, "scale": scale,
            "needs_dx": True, "needs_dweight": True, "needs_dbias": True,
        }  # fmt: skip
        return lambda: ops.layer_norm_backward.default(**arguments)
    arguments |= {"input": t.x, "eps": EPS, "activation": activation, "scale": scale}
    if case.out_dtype is not None:
        arguments["out_dtype"] = case.torch_out_dtype
    name = "layer_norm"
    if case.residual:
        name = "add_layer_norm"
        arguments["residual"] = t.residual
    operator = getattr(ops, f"{name}_forward" if statistics else name).default
    return lambda: operator(**arguments)


def time_calls(case: Case, calls: list[Call], **options: Any) -> float:
    """Device microseconds of one call of a case."""
    return timing.graph_time(calls, count=timing.call_count(len(calls), case.bytes), **options)

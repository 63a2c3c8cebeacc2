"""decompositions(): the operators in terms of PyTorch's own, for runtimes without this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from . import _ops

__all__ = ["decompositions"]


def decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """A decomposition table from this package's operators to plain ATen, for every device.

    For a program that is to run where the package is not, such as an ONNX runtime::

        program = torch.export.export(model, args)
        program = program.run_decompositions(fused_layernorm.decompositions())
        torch.onnx.export(program, dynamo=True).save("model.onnx")

    Operators of other origin are left as they are; to go on to core ATen, add the table to
    ``torch.export.default_decompositions()``, which takes ``update``.
    """
    return {
        _ops.layer_norm: _ops.expression,
        _ops.layer_norm_forward: _layer_norm_forward,
        _ops.add_layer_norm: _ops.add_expression,
        _ops.add_layer_norm_forward: _add_layer_norm_forward,
        _ops.layer_norm_backward: _ops._layer_norm_backward_composite,
    }


def _layer_norm_forward(
    input: Tensor,
    normalized_ndim: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str | None = None,
    scale: float = 1.0,
    out_dtype: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = out_dtype or input.dtype
    return _ops._norm(input, normalized_ndim, weight, bias, eps, activation, scale, dtype)


def _add_layer_norm_forward(
    input: Tensor,
    residual: Tensor,
    normalized_ndim: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str | None = None,
    scale: float = 1.0,
    out_dtype: Any = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = out_dtype or input.dtype
    x = _ops._add(input, residual)
    y, mean, rstd = _ops._norm(x, normalized_ndim, weight, bias, eps, activation, scale, dtype)
    return y, x, mean, rstd

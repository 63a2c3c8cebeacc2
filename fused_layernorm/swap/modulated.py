# SPDX-License-Identifier: Apache-2.0
"""The forwards that replace those of diffusers' modules that modulate a norm's output.

Each of these modules holds a LayerNorm, multiplies its output by 1 + scale and adds shift, which it
computes from the model's conditioning. A swapped module computes norm and modulation in one kernel,
and all else by the source of its class's own forward.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..functional import ada_layer_norm, layer_norm
from ..modules import FusedLayerNorm
from ..ops.arguments import HALF, broadcasts
from ..stock import LAYER_NORM_FORWARD, LayerNorm, are_supported
from . import source
from .classes import Forward, is_as_read, must_be_called
from .forwards import float32, matched, of_layer_norm
from .rewritten import attribute_of_self, before, method_of_self

torch.fx.wrap("_modulated")


def _need_not_be_called(norm: Any) -> bool:
    """Whether a call of the norm computes a layer norm from its attributes, and runs no hook."""
    cls: Any = type(norm)
    if cls.forward is FusedLayerNorm.forward:
        if norm.activation is not None or norm.scale != 1.0 or norm.out_dtype is not None:
            return False
        if norm._is_swapped and LayerNorm.forward is not LAYER_NORM_FORWARD:
            return False
    elif not (_forward_of(norm) in (float32, of_layer_norm) and is_as_read(cls)):
        return False
    return are_supported(*_affine(norm)) and not must_be_called(norm)


def _affine(norm: Any) -> tuple[Tensor | None, Tensor | None]:
    """A norm's weight and bias. An attribute of a module takes ten times as long as an item."""
    own = norm._parameters
    if "weight" in own and "bias" in own:
        return own["weight"], own["bias"]
    return norm.weight, norm.bias


def _forward_of(norm: Any) -> Forward | None:
    """The forward that a swap has given to a norm's class."""
    known = getattr(type(norm), "_known", None)
    return None if known is None else known.forward


def _modulate(
    norm: Any,
    x: Tensor,
    shift: Tensor | None = None,
    scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """norm(x) * (1 + scale) + shift, where norm(x) has this dtype, by default the norm's own."""
    if dtype is None and _forward_of(norm) is float32:
        dtype = x.dtype
    return _modulated(x, shift, scale, *_affine(norm), norm.eps, norm.normalized_shape, dtype)


def _modulated(
    x: Tensor,
    shift: Tensor | None,
    scale: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    normalized_shape: Sequence[int],
    norm_dtype: torch.dtype | None,
) -> Tensor:
    """The result has the dtype of PyTorch's own norm(x) * (1 + scale) + shift."""
    out_dtype = _dtype_of_result(x, shift, scale, norm_dtype)
    x, weight, bias = matched(x, weight, bias)
    if not (_suits(x, shift) and _suits(x, scale)):
        y = layer_norm(
            x, weight, bias, eps, normalized_shape=normalized_shape, out_dtype=norm_dtype
        )
        y = y if scale is None else y * (1 + scale)
        return y if shift is None else y + shift
    tensors = (_beside(x, shift), _beside(x, scale), weight, bias)
    return ada_layer_norm(x, *tensors, eps, normalized_shape=normalized_shape, out_dtype=out_dtype)


def _dtype_of_result(
    x: Tensor, shift: Tensor | None, scale: Tensor | None, norm_dtype: torch.dtype | None
) -> torch.dtype:
    """The dtype of PyTorch's own norm(x) * (1 + scale) + shift."""
    dtype = norm_dtype or _dtype_of_layer_norm(x)
    for modulation in (shift, scale):
        if modulation is not None and modulation.dtype != dtype:
            dtype = torch.promote_types(dtype, modulation.dtype)
    return dtype


def _dtype_of_layer_norm(x: Tensor) -> torch.dtype:
    """The dtype of PyTorch's layer_norm(x): autocast makes it float32, except on the CPU."""
    device = x.device.type
    if x.dtype in HALF and device != "cpu" and torch.is_autocast_enabled(device):
        return torch.float32
    return x.dtype


def _suits(x: Tensor, modulation: Tensor | None) -> bool:
    """Whether a modulation broadcasts to x without enlarging it, and is float64 only if x is."""
    if modulation is None:
        return True
    is_taken = modulation.dtype != torch.float64 or x.dtype == torch.float64
    return is_taken and broadcasts(modulation, x)


def _beside(x: Tensor, modulation: Tensor | None) -> Tensor | None:
    """The modulation in a dtype that ada_layer_norm takes beside x, never a narrower one."""
    if modulation is None or modulation.dtype == x.dtype:
        return modulation
    return modulation.to(torch.float32 if x.dtype in HALF else x.dtype)


# ---- The forwards.


def derived(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The class's own forward with each norm and its modulation in one call of `_modulate`.

    Where a norm must be called, because of a hook for example, it is None: the class's own forward
    then runs (classes._or_stock).
    """
    cls: Any = type(self)
    for name in cls._known.norms:
        if not _need_not_be_called(getattr(self, name)):
            return None
    return cls._derived(self, *args, **kwargs)


def members(cls: type[nn.Module]) -> dict[str, Any]:
    """What a swapped class needs for `derived`, from the source of the class's forward."""
    made = source.decorated(cls.forward)
    forward = source.rebuilt(made, _Rewrite().visit(made.tree))
    return {"_derived": forward, "_modulate": staticmethod(_modulate)}


class _Rewrite(ast.NodeTransformer):
    """Puts `self._modulate(self.norm, x, shift, scale)` for `self.norm(x) * (1 + scale) + shift`.

    The norm may have been given a name before: then the name is given to x, and the norm waits.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, tuple[ast.expr, list[ast.keyword]]] = {}

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        norm, target = _norm(node.value), node.targets[0]
        if norm is None or not isinstance(target, ast.Name):
            return self.generic_visit(node)
        attribute, node.value, dtype = norm
        self.waiting[target.id] = attribute, dtype
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        x: ast.expr = node
        operands: dict[str, ast.expr] = {}
        for operation, name in ((ast.Add, "shift"), (ast.Mult, "scale")):
            if isinstance(x, ast.BinOp) and isinstance(x.op, operation):
                operands[name], x = x.right, x.left
        norm = _norm(x)
        if norm is None and isinstance(x, ast.Name) and x.id in self.waiting:
            attribute, dtype = self.waiting[x.id]
            norm = attribute, x, dtype
        if norm is None:
            return self.generic_visit(node)
        if "scale" in operands:
            operands["scale"] = _scale(operands["scale"])
        given = [ast.keyword(*operand) for operand in operands.items()]
        return ast.Call(method_of_self("_modulate"), [*norm[:2]], [*given, *norm[2]])


def _norm(node: ast.expr) -> tuple[ast.expr, ast.expr, list[ast.keyword]] | None:
    """self.norm, x and [dtype=dtype], of self.norm(x) or self.norm(x).to(dtype=dtype)."""
    call, dtype = before(".to(dtype=dtype)", node), []
    if call is not node:
        dtype = node.keywords  # type: ignore[attr-defined]
    is_norm = isinstance(call, ast.Call) and (attribute_of_self(call.func) or "").startswith("norm")
    return (call.func, call.args[0], dtype) if is_norm else None


def _scale(factor: Any) -> ast.expr:
    """scale, of 1 + scale; scale[index], of (1 + scale)[index]."""
    if isinstance(factor, ast.Subscript):
        return ast.Subscript(_scale(factor.value), factor.slice, ast.Load())
    scale: ast.expr = factor.right
    return scale

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
from ..ops.arguments import HALF, broadcasts
from . import source
from .forwards import matched, parameter, result_of
from .rewrite import Bound, Rewriter, Rules, Template, attribute_of_self, target_of

torch.fx.wrap("_modulated")


def _modulate(
    norm: Any,
    x: Tensor,
    shift: Tensor | None,
    scale: Tensor | None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """norm(x) * (1 + scale) + shift, where norm(x) has this dtype, by default the norm's own."""
    if dtype is None and result_of(norm):
        dtype = x.dtype
    parameters = parameter(norm, "weight"), parameter(norm, "bias")
    return _modulated(x, shift, scale, *parameters, norm.eps, norm.normalized_shape, dtype)


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
    """The result has the dtype of PyTorch's own norm(x) * (1 + scale) + shift, in which autocast
    makes norm(x) float32, except on the CPU."""
    device, modulations = x.device.type, [one for one in (shift, scale) if one is not None]
    is_widened = x.dtype in HALF and device != "cpu" and torch.is_autocast_enabled(device)
    out_dtype = norm_dtype or (torch.float32 if is_widened else x.dtype)
    for one in modulations:
        out_dtype = torch.promote_types(out_dtype, one.dtype)
    x, weight, bias = matched(x, weight, bias)
    is_double = x.dtype == torch.float64
    options: Any = {"normalized_shape": normalized_shape}
    if not all((is_double or m.dtype != torch.float64) and broadcasts(m, x) for m in modulations):
        y = layer_norm(x, weight, bias, eps, out_dtype=norm_dtype, **options)
        y = y if scale is None else y * (1 + scale)
        return y if shift is None else y + shift
    # Beside x ada_layer_norm takes this dtype, too. No modulation is narrowed.
    wide = torch.float32 if x.dtype in HALF else x.dtype
    shift, scale = (m if m is None or m.dtype == x.dtype else m.to(wide) for m in (shift, scale))
    return ada_layer_norm(x, shift, scale, weight, bias, eps, out_dtype=out_dtype, **options)


def derived(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The class's own forward with each norm and its modulation in one call of `_modulate`.

    Where a norm must be called, because of a hook for example, it is None: the class's own forward
    then runs (classes._or_stock).
    """
    cls: Any = type(self)
    for name in cls._known.norms:
        if result_of(getattr(self, name)) is None:
            return None
    return cls._derived(self, *args, **kwargs)


# ---- Their source.

_OF_NORM = Template("NORM(X)"), Template("NORM(X).to(dtype=DTYPE)")
_MODULATIONS = (
    Template("N * FACTOR + SHIFT", "self._modulate(NORM, X, SHIFT, SCALE, DTYPE)"),
    Template("N * FACTOR", "self._modulate(NORM, X, None, SCALE, DTYPE)"),
    Template("N + SHIFT", "self._modulate(NORM, X, SHIFT, None, DTYPE)"),
)
_RULES: Rules = {
    "NORM": lambda node: attribute_of_self(node).startswith("norm"),
    "DTYPE": lambda node: isinstance(node, ast.Name),
}


class _Modulations(Rewriter):
    """Puts `self._modulate(self.norm, x, ...)` for `self.norm(x) * (1 + scale) + shift`.

    The norm may have been given a name before: then the name is given to x, and the norm waits.
    """

    def __init__(self) -> None:
        super().__init__({"N": self._norm}, *_MODULATIONS)
        self.waiting: dict[str, Bound] = {}

    def visit(self, node: Any) -> Any:
        target, norm = target_of(node), self._norm(getattr(node, "value", None))
        if target is not None and norm is not None:
            self.waiting[target], node.value = norm, norm["X"]
            return node
        for template in self.templates:
            bound = template.match(node, self.rules)
            if bound is not None:
                bound |= self._norm(bound["N"]) or {}
                return template.fill({**bound, "SCALE": _scale(bound.get("FACTOR"))})
        return self.generic_visit(node)

    def _norm(self, node: Any) -> Bound | None:
        """self.norm, x and the dtype to which its result is cast."""
        if isinstance(node, ast.Name) and node.id in self.waiting:
            return {**self.waiting[node.id], "X": node}
        found = (template.match(node, _RULES) for template in _OF_NORM)
        return next(({"DTYPE": ast.Constant(None), **bound} for bound in found if bound), None)


def _scale(factor: Any) -> Any:
    """scale, of 1 + scale; scale[index], of (1 + scale)[index]."""
    if isinstance(factor, ast.Subscript):
        return ast.Subscript(_scale(factor.value), factor.slice, ast.Load())
    return getattr(factor, "right", None)


def members(cls: type[nn.Module]) -> dict[str, Any]:
    """The members with which a swapped class modulates its norms."""
    made = source.decorated(cls.forward)
    forward = source.rebuilt(made, _Modulations().visit(made.tree))
    return {"_derived": forward, "_modulate": staticmethod(_modulate)}

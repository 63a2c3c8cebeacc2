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

from ..calls import is_compiling, plain_modulated
from ..compile.choice import leaves_modulation
from ..functional import ada_layer_norm, layer_norm
from ..modules import FusedLayerNorm
from ..ops.arguments import HALF, broadcasts
from ..ops.family import assume_constant_result
from . import source
from .forwards import matched, parameters, result_of, result_of_class
from .rewrite import Rewriter, Rules, Template, attribute_of_self, postpone

torch.fx.wrap("_modulated")


def _modulate(norm: Any, x: Tensor, shift: Any, scale: Any, dtype: torch.dtype | None) -> Tensor:
    """norm(x) * (1 + scale) + shift, where norm(x) has this dtype, or if None the norm's own."""
    # Other libraries' classes may give x's dtype whatever autocast says.
    if dtype is None and type(norm) is not FusedLayerNorm:
        dtype = x.dtype if result_of_class(type(norm), is_stock_swapped=False) else None
    weight, bias = parameters(norm)
    eps, shape = norm.eps, norm.normalized_shape
    if weight is None is bias is dtype:  # the most common, by what takes the host least time
        y = plain_modulated(x, shape, shift, scale, eps)
        if y is not None:
            return y
    return _modulated(x, shift, scale, weight, bias, eps, shape, dtype)


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
    device = x.device.type
    options: Any = {"normalized_shape": normalized_shape}
    is_widened = x.dtype in HALF and device != "cpu" and torch.is_autocast_enabled(device)
    out_dtype = norm_dtype or (torch.float32 if is_widened else x.dtype)
    x, weight, bias = matched(x, weight, bias)
    modulations = [one for one in (shift, scale) if one is not None]
    for one in modulations:
        out_dtype = torch.promote_types(out_dtype, one.dtype)
    is_double = x.dtype == torch.float64
    if not all((is_double or m.dtype != torch.float64) and broadcasts(m, x) for m in modulations):
        y = layer_norm(x, weight, bias, eps, out_dtype=norm_dtype, **options)
        y = y if scale is None else y * (1 + scale)
        return y if shift is None else y + shift
    # Beside x ada_layer_norm takes this dtype, too. No modulation is narrowed.
    wide = torch.float32 if x.dtype in HALF else x.dtype
    shift, scale = (m if m is None or m.dtype == x.dtype else m.to(wide) for m in (shift, scale))
    return ada_layer_norm(x, shift, scale, weight, bias, eps, out_dtype=out_dtype, **options)


_norms_of = assume_constant_result(lambda cls: cls._known.norms)


def derived(self: Any, x: Tensor, /, *args: Any, **kwargs: Any) -> Any:
    """The class's own forward with each norm and its modulation in one call of `_modulate`.

    Where a norm must be called, because of a hook for example, or a compiler does better with the
    class's own forward, it is None: that forward then runs (classes._or_stock).
    """
    names = _norms_of(type(self))
    if is_compiling() and leaves_modulation(x, [getattr(self, name) for name in names]):
        return None
    for name in names:
        if result_of(getattr(self, name)) is None:
            return None
    return self._derived(x, *args, **kwargs)


# ---- Their source.

_OF_NORM = Template("NORM(*X)"), Template("NORM(*X).to(dtype=DTYPE)")
_MODULATIONS = [
    Template(norm + modulation, f"self._modulate(NORM, X, {shift}, {scale}, {dtype})")
    for norm, dtype in (("NORM(X)", "None"), ("NORM(X).to(dtype=DTYPE)", "DTYPE"))
    for modulation, shift, scale in (
        (" * (1 + SCALE) + SHIFT", "SHIFT", "SCALE"),
        (" * (1 + SCALE)[INDEX] + SHIFT", "SHIFT", "SCALE[INDEX]"),
        (" * (1 + SCALE)", "None", "SCALE"),
        (" * (1 + SCALE)[INDEX]", "None", "SCALE[INDEX]"),
        (" + SHIFT", "SHIFT", "None"),
    )
]
_RULES: Rules = {
    "NORM": lambda node: attribute_of_self(node).startswith("norm"),
    "DTYPE": lambda node: isinstance(node, ast.Name),
}


def members(cls: type[nn.Module]) -> dict[str, Any]:
    """The members with which a swapped class modulates its norms."""
    made = source.decorated(cls.forward)
    postpone(made.tree.body, _OF_NORM, _MODULATIONS, _RULES, is_known=True)
    tree = Rewriter(_RULES, *_MODULATIONS).visit(made.tree)
    return {"_derived": source.rebuilt(made, tree), "_modulate": staticmethod(_modulate)}

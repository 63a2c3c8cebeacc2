# SPDX-License-Identifier: Apache-2.0
"""The norms as functions of their tensors, and the same by reference.py."""

from typing import Any

import reference
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fused_layernorm
from fused_layernorm.ops import packed

# By kind, the tensors in the order of the functions' and the operators' arguments.
NAMES = {
    "plain": ("x", "weight", "bias"),
    "residual": ("x", "residual", "weight", "bias"),
    "modulated": ("x", "shift", "scale", "weight", "bias"),
    "gated": ("x", "residual", "gate", "shift", "scale", "weight", "bias"),
}
OPERATORS = {
    "plain": "layer_norm", "residual": "add_layer_norm", "modulated": "ada_layer_norm",
    "gated": "add_ada_layer_norm",
}  # fmt: skip
# Norms whose functions have other arguments: of groups of channels, with a gate behind or in front,
# over one dimension.
OTHERS = {
    "groups": ("x", "shift", "scale", "weight", "bias"),
    "gates": ("x", "gate", "weight", "bias"),
    "channels": ("x", "weight", "bias"),
}
ALL_NAMES = NAMES | OTHERS
# Of heads, two of q beside one of k, and of v, by the operator and by the packed ones' node: the
# functions take float64 to PyTorch's operators.
HEADS = {
    "heads": ("q", "k", "q_weight", "k_weight", "q_bias", "k_bias"),
    "packed": ("qkv", "q_weight", "k_weight", "q_bias", "k_bias"),
}
WITH_HEADS = ALL_NAMES | HEADS
TAKE_ACTIVATIONS = ("plain", "residual", "groups", "channels")
ROWS = {"plain": 1, "residual": 2, "modulated": 1, "gated": 3}  # tensors before normalized_ndim


def tensors(kind, device="cpu", shape=(2, 3, 4), dtype=torch.float64, other=False):
    """The tensors of a kind. Each modulation broadcasts differently, and otherwise if `other`."""
    batch, rows, cols = shape
    sizes = {"x": shape, "residual": shape, "weight": (cols,), "bias": (cols,)}
    if other:
        sizes |= {"gate": (batch, 1, 1), "shift": (), "scale": shape}
    else:
        sizes |= {"gate": (cols,), "shift": (batch, 1, cols), "scale": (rows, 1)}
    if kind == "gates":
        sizes["gate"] = shape
    elif kind in OTHERS:
        channels = 2 * rows
        sizes = {"x": (batch, channels, cols), "weight": (channels,), "bias": (channels,)}
        sizes |= {"shift": (batch, channels, 1), "scale": (batch, channels)}
    elif kind in HEADS:
        sizes = dict.fromkeys(HEADS[kind], (4,))
        sizes |= {name: (batch, rows, n, 4) for name, n in (("q", 2), ("k", 1), ("qkv", 4))}
    return tuple(torch.randn(sizes[name], device=device, dtype=dtype) for name in WITH_HEADS[kind])


def _angles(x):
    """cos and sin of the first two columns of heads."""
    angles = torch.linspace(0.5, 2.5, x.shape[1], device=x.device, dtype=x.dtype)[:, None]
    return angles.cos(), angles.sin()


def _of_heads(kind, *, statistic="rms", interleaved=False, by_groups=False):
    kinds = (2, 1, 1e-3, statistic, 0.0, False, interleaved)

    def call(*given):
        angles = _angles(given[0])
        if kind == "packed":
            return packed.run(*given, *angles, *kinds, 1, by_groups)
        return torch.ops.fused_layernorm.qk_norm_rope(*given, *angles, *kinds, False)

    return call


def _stock_of_heads(kind, *, statistic="rms", interleaved=False, by_groups=False):
    """With a single k and v, groups of heads lie as q, k and v do."""
    how: Any = {"statistic": statistic, "rotary_dim": 2, "interleaved": interleaved}
    of: Any = reference

    def call(*given):
        *rows, q_weight, k_weight, q_bias, k_bias = given
        q, k, *v = rows[0].split((2, 1, 1), 2) if kind == "packed" else rows
        sides = ((q, q_weight, q_bias), (k, k_weight, k_bias))
        angles = _angles(q)
        return (*(of.norm_rope(x, weight, *angles, 1e-3, bias=bias, **how)
                  for x, weight, bias in sides), *v)  # fmt: skip

    return call


def stock(kind, **how):
    """A function of the kind's tensors that gives (y,), or (y, residual_out).

    It is reference.py's, which PyTorch differentiates any number of times. The double backward of
    F.layer_norm takes mean and rstd as constants, so that its third derivative is wrong.
    """

    if kind in HEADS:
        return _stock_of_heads(kind, **how)
    of: Any = reference  # without types: mypy cannot count tensors that are passed with a star

    def call(x, *given):
        if kind == "groups":
            y = of.group_norm(x, 2, *given, 1e-5, **how).y
        elif kind == "gates":
            y = of.rms_norm_gated(x, *given, **how)
        else:
            y = of.layer_norm(x.movedim(1, -1), 1, *given, 1e-5, **how).y.movedim(-1, 1)
        return (y,)

    return call if kind in OTHERS else _stock(kind, **how)


def _stock(kind, *, statistic="layer", activation=None, factor=1.0, offset=0.0):
    def call(*given):
        t = dict(zip(NAMES[kind], given, strict=True))
        total = t["x"]
        if "residual" in t:
            gate = t.get("gate")
            total = t["residual"] + (total if gate is None else gate * total)
        y = reference.layer_norm(
            total, 1, t["weight"], t["bias"], 1e-5, activation, factor, shift=t.get("shift"),
            scale=t.get("scale"), statistic=statistic, weight_offset=offset,
        ).y.to(total.dtype)  # fmt: skip
        return (y, total) if "residual" in t else (y,)

    return call


def ours(kind, **how):
    """The same by this package's function of that kind."""
    if kind in HEADS:
        return _of_heads(kind, **how)
    functions: dict[str, Any] = {
        "groups": lambda x, *given: fused_layernorm.ada_group_norm(x, 2, *given, **how),
        "gates": lambda x, gate, weight, bias: fused_layernorm.rms_norm_gated(
            x, gate, weight, 1e-5, bias=bias, **how
        ),
        "channels": lambda x, *given: fused_layernorm.layer_norm(x, *given, dim=1, **how),
    }
    return (lambda *given: (functions[kind](*given),)) if kind in OTHERS else _ours(kind, **how)


def _ours(kind, *, statistic="layer", activation=None, factor=1.0, offset=0.0, eps=1e-5, **options):
    if kind in ("modulated", "gated"):
        name, fused = OPERATORS[kind], {"statistic": statistic}
    else:
        name = OPERATORS[kind].replace("layer", statistic)
        fused = {"activation": activation, "scale": factor}
    function = getattr(fused_layernorm, name)

    def call(*given):
        rows, (*modulations, weight, bias) = given[: ROWS[kind]], given[ROWS[kind] :]
        named: dict[str, Any] = {"normalized_shape": given[0].shape[-1:], **fused, **options}
        if name.endswith("rms_norm"):
            out = function(*rows, weight, eps, bias=bias, weight_offset=offset, **named)
        else:
            out = function(*rows, *modulations, weight, bias, eps, **named)
        return out if isinstance(out, tuple) else (out,)

    return call


def operator(kind, suffix="", *, activation=None, factor=1.0):
    """The same by the operator, called by its name; "_forward" is that with statistics."""
    overload = getattr(torch.ops.fused_layernorm, OPERATORS[kind] + suffix).default
    options = (activation, factor) if kind in ("plain", "residual") else ()

    def call(*given):
        rows = ROWS[kind]
        out = overload(*given[:rows], 1, *given[rows:], 1e-5, *options)
        return (out,) if isinstance(out, torch.Tensor) else out[: 1 + ("residual" in NAMES[kind])]

    return call


def leaves(tensors, mask=None):
    mask = [True] * len(tensors) if mask is None else mask
    return [t.detach().requires_grad_(m) for t, m in zip(tensors, mask, strict=True)]


def saved_by(function):
    """The tensors that autograd saves for backward in a call of the function."""
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        function()
    return kept


class Names(TorchDispatchMode):
    """Records the names of all operators that torch dispatches below autograd and transforms."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Calls(TorchDispatchMode):
    """Records the package's operators that torch dispatches below autograd and transforms."""

    def __init__(self):
        super().__init__()
        self.seen = []

    @property
    def names(self):
        return [name for name, _ in self.seen]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fused_layernorm":
            self.seen.append((func._opname, args))
        return func(*args, **(kwargs or {}))

# SPDX-License-Identifier: Apache-2.0
"""The norms of numerics.py and families.py as functions of their tensors, and their formulas."""

from dataclasses import replace
from typing import Any

import torch
from families import F64, Channels, Gated, Groups, Heads, Packed
from numerics import Problem, Tensors, make
from numerics import ours as results_of
from torch.utils._python_dispatch import TorchDispatchMode

from fused_layernorm.ops import packed

# By kind, the tensors in the order of the functions' and the operators' arguments.
NAMES = {
    "plain": ("x", "weight", "bias"),
    "residual": ("x", "residual", "weight", "bias"),
    "modulated": ("x", "shift", "scale", "weight", "bias"),
    "gated": ("x", "residual", "gate", "shift", "scale", "weight", "bias"),
}
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


def problem(kind, shape=(2, 3, 4), *, other=False, **options) -> Any:
    """A call. Each modulation broadcasts differently, and otherwise if `other`."""
    batch, rows, cols = shape
    if kind == "groups":
        sizes = (batch, 2 * rows, cols)
        return Groups(sizes, F64, groups=2, modulation="both", **options)
    if kind == "gates":
        return Gated(shape, F64, **options)
    if kind == "channels":
        return Channels((batch, cols, 2 * rows), F64, **options)
    if kind in HEADS:
        of = Heads if kind == "heads" else Packed
        return of((batch, rows, 4), F64, heads=(2, 1), rotary=2, eps=1e-3, **options)
    if "residual" in NAMES[kind]:
        options["residual_dtype"] = F64
    if "shift" in NAMES[kind]:
        options |= {"shift": () if other else (batch, 1, cols)}
        options |= {"scale_by": shape if other else (rows, 1)}
    if "gate" in NAMES[kind]:
        options["gate"] = (batch, 1, 1) if other else (cols,)
    return Problem(shape, F64, **options)


def tensors(kind, device="cpu", shape=(2, 3, 4), dtype=torch.float64, other=False):
    """The tensors of a kind."""
    batch, rows, _ = shape
    if kind in HEADS:
        sizes: dict[str, Any] = dict.fromkeys(HEADS[kind], (4,))
        sizes |= {name: (batch, rows, n, 4) for name, n in (("q", 2), ("k", 1), ("qkv", 4))}
        return tuple(torch.randn(sizes[n], device=device, dtype=dtype) for n in HEADS[kind])
    t = make(problem(kind, shape, other=other), device)
    if kind == "channels":
        t.x = t.x.movedim(-1, 1)
    return tuple(getattr(t, name).to(dtype).contiguous() for name in ALL_NAMES[kind])


def named(kind, given, options):
    """The tensors of a call of a kind, by name."""
    t = Tensors(problem(kind, **options), **dict(zip(WITH_HEADS[kind], given, strict=True)))
    if kind in HEADS:
        cos, sin = _angles(given[0])
        return t.but(cos=cos, sin=sin, **{"qkv": t.qkv.flatten(2)} if kind == "packed" else {})
    if kind == "channels":
        t.x = t.x.movedim(1, -1)
    return t.but(problem=replace(t.problem, shape=tuple(t.x.shape)))


def _angles(x):
    """cos and sin of the first two columns of heads."""
    angles = torch.linspace(0.5, 2.5, x.shape[1], device=x.device, dtype=x.dtype)[:, None]
    return angles.cos(), angles.sin()


def _of_heads(kind, *, statistic="rms", interleaved=False, packing="3hd"):
    kinds = (2, 1, 1e-3, statistic, 0.0, False, interleaved)

    def call(*given):
        angles = _angles(given[0])
        if kind == "packed":
            return packed.run(*given, *angles, *kinds, 1, packing == "h3d")
        return torch.ops.fused_layernorm.qk_norm_rope(*given, *angles, *kinds, False)

    return call


def stock(kind, **how):
    """A function of the kind's tensors that gives (y,), or (y, residual_out).

    It is reference.py's, which PyTorch differentiates any number of times. The double backward of
    F.layer_norm takes mean and rstd as constants, so that its third derivative is wrong.
    """

    def call(*given):
        t = named(kind, given, how)
        if kind in HEADS:
            return t.problem.formula(t)
        has_residual = "residual" in ALL_NAMES[kind]
        if has_residual:
            gate = getattr(t, "gate", None)
            t.x = t.residual + (t.x if gate is None else gate * t.x)
        y = t.problem.formula(t)[0].to(t.x.dtype)
        y = y.movedim(-1, 1) if kind == "channels" else y
        return (y, t.x) if has_residual else (y,)

    return call


def ours(kind, **how):
    """The same by this package's function of that kind."""

    def call(*given):
        t = named(kind, given, how)
        out = t.problem.forward(t)
        return (out[0].movedim(-1, 1),) if kind == "channels" else out

    return _of_heads(kind, **how) if kind in HEADS else call


def operator(kind, suffix="", *, activation=None, scale=1.0):
    """The same by the operator, called by its name; "_forward" is that with statistics."""
    name = "add_" * ("residual" in NAMES[kind]) + "ada_" * ("shift" in NAMES[kind]) + "layer_norm"
    overload = getattr(torch.ops.fused_layernorm, name + suffix).default
    options = (activation, scale) if kind in ("plain", "residual") else ()

    def call(*given):
        rows = ROWS[kind]
        out = overload(*given[:rows], 1, *given[rows:], 1e-5, *options)
        assert not suffix or not any(statistic.requires_grad for statistic in out[-2:])
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


class Names(Calls):
    """Records the names of all operators that torch dispatches there."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append((str(func), ()))
        return func(*args, **(kwargs or {}))


def calls_of(problem, device):
    """The arguments of the operators by name that a problem calls, without gradients, with them,
    and for a graph of them."""
    t = make(problem, device)
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in t.inputs().items()}
    with Calls() as seen:
        results_of(t, backward=False)
        results_of(t)
        out = problem.forward(t.but(**leaves))
        torch.autograd.grad(out, [*leaves.values()], t.gradients(), create_graph=True)
    return dict(reversed(seen.seen))


def arguments_of(operator, args):
    """(name, its type, value) of every argument of a call."""
    arguments = operator._schema.arguments
    values = [*args, *(a.default_value for a in arguments[len(args) :])]
    return [(a.name, str(a.type), v) for a, v in zip(arguments, values, strict=True)]

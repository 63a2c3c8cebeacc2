# SPDX-License-Identifier: Apache-2.0
"""Norm and rotation of heads: the operators qk_norm_rope and qk_norm_rope_backward.

A rotation is linear and its transpose is the reverse rotation, so a rotation alone (statistic None)
is differentiated by the forward operator itself, any number of times. The norm's gradients come
from qk_norm_rope_backward; where they are to be differentiated, and where cos or sin asks for a
gradient, PyTorch differentiates the formula.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from . import arguments, autograd, load
from .arguments import name_of
from .family import Family, implement
from .formulas import acc_dtype, affine, call_of, normalized, shifted, to
from .vmap import folded, one_by_one

MOST_KERNEL_COLS = load.operators._limit("head_cols")

qk_norm_rope = load.operators.qk_norm_rope.default
qk_norm_rope_backward = load.operators.qk_norm_rope_backward.default

HeadArguments = call_of(qk_norm_rope)


def wanted(b: Any) -> list[str]:
    """The names of the tensors whose gradients a backward call asks for; of a result without a
    gradient no parameter has one."""
    sides = [side for side in "qk" if getattr(b, f"d{side}_out") is not None]
    weights = [f"{side}_weight" for side in sides * b.needs_dweight]
    biases = [f"{side}_bias" for side in sides * b.needs_dbias]
    return [n for n in ("qkv", "q", "k", *weights, *biases) if getattr(b, n, None) is not None]


def name_gradients(Call: Any) -> None:
    """Says of the calls of a backward operator whose gradients it gives, in their order."""
    tensors = ("qkv", "q", "k", "q_weight", "k_weight", "q_bias", "k_bias")
    Call.differentiated = tuple(name for name in tensors if name in Call._fields)
    Call.wanted = property(wanted)


name_gradients(call_of(qk_norm_rope_backward))


def sides(a: Any) -> list[tuple[str, Tensor, Tensor | None, Tensor | None]]:
    """The name, tensor, weight and bias of q and, where it is there, of k. (No property of the
    call, for Dynamo of torch 2.10 reads none.)"""
    found = [("q", a.q, a.q_weight, a.q_bias)]
    if a.k is not None:
        found.append(("k", a.k, a.k_weight, a.k_bias))
    return found


def has_kernel(x: Tensor, cos: Tensor | None) -> bool:
    """Whether there are kernels for rows such as those of x."""
    cols = x.shape[3]
    return (
        x.dtype is not torch.float64
        and 0 < cols <= MOST_KERNEL_COLS
        and cols % 2 == 0
        and (cos is None or cos.dtype in (x.dtype, torch.float32))
    )


# ---- The computation in PyTorch's operators.


def _angles(a: Any, angles: Tensor, acc: torch.dtype) -> Tensor:
    """cos or sin of each pair, of the dimensions of q and k."""
    if angles.shape[-1] != a.rotary_dim // 2:
        angles = angles[..., ::2] if a.interleaved else angles[..., : a.rotary_dim // 2]
    return angles.to(acc).unsqueeze(-2 if a.seq_dim == 1 else -3)


def rotate(a: Any, z: Tensor) -> Tensor:
    """z with its first rotary_dim columns rotated, in z's dtype."""
    if a.cos is None or a.sin is None:
        return z
    cos, sin = _angles(a, a.cos, z.dtype), _angles(a, a.sin, z.dtype)
    if a.inverse:
        sin = -sin
    turned = z[..., : a.rotary_dim]
    if a.interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
    else:
        first, second = turned.chunk(2, -1)
    pairs = (first * cos - second * sin, second * cos + first * sin)
    found = torch.stack(pairs, -1).flatten(-2) if a.interleaved else torch.cat(pairs, -1)
    return found if a.rotary_dim == z.shape[-1] else torch.cat((found, z[..., a.rotary_dim :]), -1)


def has_rows(x: Tensor) -> bool:
    """Whether rows are contiguous, and no two of them in one place."""
    return x.stride(3) == 1 and all(x.shape[d] <= 1 or x.stride(d) != 0 for d in range(3))


def dense_like(x: Tensor) -> Tensor:
    """The layout of a result: x's order of dimensions, where x has rows; else contiguous."""
    if has_rows(x):
        return torch.empty_like(x)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def formula(a: Any, once: bool = False) -> tuple[Tensor, ...]:
    """The results of a call of either operator, which PyTorch differentiates any number of times:
    without k, q's alone. Backward has no rounding of xhat: it counts as the identity."""
    found = []
    for _, x, weight, bias in sides(a):
        acc = acc_dtype(x.dtype)
        z = x.to(acc)
        if a.statistic is not None:
            rounds = a.round_before_weight and weight is not None
            xhat = normalized(a, z, 1)[1]
            xhat = xhat.to(x.dtype).to(acc) if rounds else xhat
            z = affine(xhat, shifted(weight, a.weight_offset, acc), to(bias, acc))
            z = z.to(x.dtype).to(acc) if rounds else z
        found.append(rotate(a, z).to(x.dtype))
    return tuple(found)


# ---- The family.


class HeadNorms(autograd.Function):
    """What a call gives: q's result, k's where it is there, of a packed one also v."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, family: Any, *args: Any) -> Any:
        a, operator = family.Call(*args), family.plain
        with autograd.lower_levels():
            found = autograd.redispatch(operator, keyset, *args) if keyset else operator(*args)
        ctx.set_materialize_grads(False)
        # A rotation alone does not need what it rotates for its backward.
        cos = a._fields.index("cos")
        tensors = a[:cos] if a.statistic is not None else [None] * cos
        ctx.save_for_backward(*tensors, a.cos, a.sin)
        ctx.family, ctx.options = family, a[cos + 2 :]
        return family.results(ctx, a, found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        family, found = ctx.family, dict[str, Any]()
        needs = family.Call(*ctx.needs_input_grad[2:])
        if any(dy is not None for dy in grads):
            a = family.Call(*ctx.saved_tensors, *ctx.options)
            flags = needs.q_weight or needs.k_weight, needs.q_bias or needs.k_bias
            found = family.gradients(ctx, a, grads, flags)
        pairs = zip(needs._fields, needs, strict=True)
        return None, None, *(found.get(name) if needed else None for name, needed in pairs)


class Heads(Family):
    """One forward operator, of q and k or of the tensor that holds them."""

    node = HeadNorms

    def without_statistics(self, found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return found if len(found) > 1 else (*found, found[0].new_empty(0))

    def computed(self, a: Any) -> tuple[Tensor, ...]:
        # Copies, since interleaved rows are views: autograd refuses writing into one of no_grad.
        return tuple(z.copy_(y) for y, z in zip(self.formula(a), self.empty(a), strict=False))

    def empty(self, a: Any) -> tuple[Tensor, ...]:
        return tuple(dense_like(x) for _, x, *_ in sides(a))

    def order_of(self, b: Any, name: str) -> Tensor | None:
        return dense_like(getattr(b, name)) if name in ("q", "k") else None

    def differentiable(self, a: Any) -> Any:
        return None if a[0].dtype in arguments.HALF else super().differentiable(a)

    def is_by_formula(self, a: Any) -> bool:
        return autograd.in_forward_mode() or autograd.needs_grad(a.cos, a.sin)

    def vmap(self, operator: OpOverload, formula: Any, always: bool = False) -> Any:
        return _vmap if operator is qk_norm_rope else functools.partial(one_by_one, operator)

    def results(self, ctx: Any, a: Any, found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What autograd's node gives of what the operator gives."""
        return found if a.k is not None else found[:1]

    def gradients(self, ctx: Any, a: Any, grads: Any, flags: Any) -> dict[Any, Any]:
        """The gradients of a call's tensors by their names, for those at the node's results."""
        # A side without a gradient is left out: where q has none, k takes its place.
        present = [side for side, dy in enumerate(grads) if dy is not None]

        def of(pair: Any) -> Any:
            return (*(pair[side] for side in present), None)[:2]

        dq, dk = of(grads)
        if a.statistic is None:
            call = a._replace(q=dq, k=dk, inverse=not a.inverse)
            found = autograd.call_operator(qk_norm_rope, *call)
        else:
            tensors = *of(a[0:2]), *of(a[2:4]), *of(a[4:6])
            call = (dq, dk, *tensors, *a[6:13], *a[14:], *flags)  # all but the rounding
            found = autograd.call_operator(qk_norm_rope_backward, *call)
        names = *of(("q", "k")), *of(("q_weight", "k_weight")), *of(("q_bias", "k_bias"))
        return dict(zip(names, found, strict=False))


# ---- vmap: the batch is in the first dimension. A sample's parameters and angles go one by one.


def _vmap(info: Any, in_dims: Any, *args: Any) -> Any:
    a, size = HeadArguments(*args), info.batch_size
    dims: Any = HeadArguments(*in_dims)
    of_samples = any(dim is not None for dim in dims[2:8])
    if of_samples or any(t is not None and t.dim() == 3 for t in (a.cos, a.sin)):
        return one_by_one(qk_norm_rope, info, in_dims, *args)
    call = a._replace(q=folded(a.q, dims.q, size), k=folded(a.k, dims.k, size))
    q, k = qk_norm_rope(*call)
    k = k.expand(size, 0) if a.k is None else k.unflatten(0, (size, -1))
    return (q.unflatten(0, (size, -1)), k), (0, 0)


# ---- What a call must satisfy.


def check(a: Any) -> None:
    """Raises, with one sentence, if the operators cannot take these arguments.

    Without k, the names are those of norm_rope.
    """
    q = "input" if a.k is None else "q"
    arguments.check_choice("statistic", a.statistic, arguments.OF_HEADS)
    arguments.check_eps(a.eps)

    def misfit(name: str, parameter: Tensor) -> str | None:
        cols = a.q.shape[3]
        return None if parameter.shape == (cols,) else f"of shape {[cols]}, the size of a head"

    for side, x, weight, bias in sides(a):
        name, prefix = (q, "") if a.k is None else (side, f"{side}_")
        arguments.check_tensor(name, x)
        if x.dim() != 4:
            order = "positions, heads" if a.seq_dim == 1 else "heads, positions"
            raise arguments.shape_error(name, f"of shape (batch, {order}, columns)", x)
        arguments.check_device(name, x, "q", a.q)
        if x.dtype != a.q.dtype:
            given = f"{name_of(a.q.dtype)}, got {name_of(x.dtype)}"
            raise RuntimeError(f"expected k of q's dtype, {given}")
        heads = 3 - a.seq_dim
        if any(x.shape[d] != a.q.shape[d] for d in range(4) if d != heads):
            raise RuntimeError(
                f"expected q and k that differ only in dimension {heads}, their heads, "
                f"got shapes {list(a.q.shape)} and {list(x.shape)}"
            )
        for what, parameter in ((f"{prefix}weight", weight), (f"{prefix}bias", bias)):
            if parameter is None:
                continue
            if a.statistic is None:
                raise ValueError(f"expected no {what} beside statistic None, got one")
            arguments.check_parameter(what, parameter, q, a.q, misfit)
        if a.weight_offset != 0 and a.statistic is not None and weight is None:
            raise ValueError(
                f"expected a {prefix}weight beside weight_offset {a.weight_offset}, got none"
            )
    if a.k is None and (a.k_weight is not None or a.k_bias is not None):
        raise ValueError("expected k beside k_weight and k_bias, got none")
    if a.weight_offset != 0 and a.statistic is None:
        raise ValueError(f"expected no weight_offset beside statistic None, got {a.weight_offset}")
    arguments.check_finite("weight_offset", a.weight_offset)
    _check_angles(a, q)


def _check_angles(a: Any, q: str) -> None:
    cos, sin = a.cos, a.sin
    if (cos is None) != (sin is None):
        given, other = ("sin", "cos") if cos is None else ("cos", "sin")
        raise ValueError(f"expected {other} beside {given}, got None")
    if cos is None or sin is None:
        if a.statistic is None:
            raise ValueError("expected cos and sin beside statistic None, got neither")
        return
    batch, positions, cols = a.q.shape[0], a.q.shape[a.seq_dim], a.q.shape[3]
    rotary = a.rotary_dim
    if rotary % 2 != 0 or not 0 < rotary <= cols:
        raise ValueError(
            f"expected rotary_dim to be an even number from 2 to {cols}, the size of a head, "
            f"got {rotary}"
        )

    def misfit(name: str, angles: Tensor) -> str | None:
        shape = angles.shape
        fits = (
            angles.dim() in (2, 3)
            and shape[-2] == positions
            and shape[-1] in (rotary // 2, rotary)
            and (angles.dim() == 2 or shape[0] in (1, batch))
        )
        if fits:
            return None
        return (
            f"of shape (positions, n) or (batch, positions, n), with {positions} positions, batch "
            f"{batch}{'' if batch == 1 else ' or 1'}, and n {rotary // 2} or {rotary}"
        )

    for name, angles in (("cos", cos), ("sin", sin)):
        arguments.check_parameter(name, angles, q, a.q, misfit, others=[torch.float32])
    if cos.shape[-1] != sin.shape[-1] or cos.dtype != sin.dtype:
        raise RuntimeError(
            "expected cos and sin of one dtype and one last size, got "
            f"{name_of(cos.dtype)} {list(cos.shape)} and {name_of(sin.dtype)} {list(sin.shape)}"
        )


FAMILY = Heads("qk_norm_rope", check, formula)
implement(FAMILY)

# SPDX-License-Identifier: Apache-2.0
"""Norm and rotation of heads in PyTorch's operators, forward and backward, and the checks of calls.

q and k are (batch, positions, heads, columns), or (batch, heads, positions, columns) with
seq_dim=2. Each row, the last dimension, is normalized and rotated; csrc/bindings/schemas.cpp
says what the operators give.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import arguments, composite, load
from .arguments import HALF, name_of
from .autograd import needs_grad
from .formulas import acc_dtype, affine, normalized, of_affine, results, shifted, sum_like, to

STATISTICS = (*arguments.STATISTICS, None)
MOST_KERNEL_COLS = load.operators._limit("head_cols")


class HeadArguments(NamedTuple):
    """One call of qk_norm_rope, in the order of its schema."""

    q: Tensor
    k: Tensor | None
    q_weight: Tensor | None
    k_weight: Tensor | None
    q_bias: Tensor | None
    k_bias: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    rotary_dim: int
    seq_dim: int
    eps: float
    statistic: str | None
    weight_offset: float
    round_before_weight: bool
    interleaved: bool
    inverse: bool = False


# Functions and no properties, which Dynamo of torch 2.10 does not read.


def sides(a: HeadArguments) -> list[tuple[str, Tensor, Tensor | None, Tensor | None]]:
    """The name, tensor, weight and bias of q and, where it is there, of k."""
    found = [("q", a.q, a.q_weight, a.q_bias)]
    if a.k is not None:
        found.append(("k", a.k, a.k_weight, a.k_bias))
    return found


def has_kernel(a: HeadArguments) -> bool:
    """Whether there are kernels for such rows."""
    cols = a.q.shape[3]
    return (
        a.q.dtype is not torch.float64
        and 0 < cols <= MOST_KERNEL_COLS
        and cols % 2 == 0
        and (a.cos is None or a.cos.dtype in (a.q.dtype, torch.float32))
    )


def needs_grad_of_angles(a: HeadArguments) -> bool:
    return needs_grad(a.cos, a.sin)


# ---- The computation in PyTorch's operators.


def _angles(a: HeadArguments, angles: Tensor, acc: torch.dtype) -> Tensor:
    """cos or sin of each pair, of the dimensions of q and k."""
    if angles.shape[-1] != a.rotary_dim // 2:
        angles = angles[..., ::2] if a.interleaved else angles[..., : a.rotary_dim // 2]
    return angles.to(acc).unsqueeze(-2 if a.seq_dim == 1 else -3)


def rotate(a: HeadArguments, z: Tensor) -> Tensor:
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


def normalize(
    a: HeadArguments, x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm's result, xhat and rstd of one of q and k, in the arithmetic's dtype."""
    acc = acc_dtype(x.dtype)
    _, xhat, rstd = normalized(x.to(acc), 1, a.eps, a.statistic == "rms")
    rounds = a.round_before_weight and weight is not None
    z = xhat.to(x.dtype).to(acc) if rounds else xhat
    z = affine(z, shifted(weight, a.weight_offset, acc), to(bias, acc))
    return z.to(x.dtype).to(acc) if rounds else z, xhat, rstd


def dense_like(x: Tensor) -> Tensor:
    """The layout of a result: x's order of dimensions, where x has rows; else contiguous."""
    has_rows = x.stride(3) == 1 and all(x.shape[d] <= 1 or x.stride(d) != 0 for d in range(3))
    if has_rows:
        return torch.empty_like(x)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _laid_out(y: Tensor, x: Tensor) -> Tensor:
    """y in x's dtype and in the layout of a result."""
    return dense_like(x).copy_(y)


def formula(a: HeadArguments) -> tuple[Tensor, ...]:
    """The results in PyTorch's operators, which differentiate them any number of times."""
    found = []
    for _, x, weight, bias in sides(a):
        z = x.to(acc_dtype(x.dtype))
        if a.statistic is not None:
            z = normalize(a, x, weight, bias)[0]
        found.append(rotate(a, z).to(x.dtype))
    return tuple(found)


def with_k(a: HeadArguments, found: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    return (found[0], found[1] if len(found) > 1 else a.q.new_empty(0))


def by_formula(a: HeadArguments) -> tuple[Tensor, Tensor]:
    """What qk_norm_rope gives, but for the order of memory, of arguments that were checked."""
    return with_k(a, formula(a))


def composite_forward(*args: Any) -> tuple[Tensor, Tensor]:
    a = HeadArguments(*args)
    check(a)
    composite._warn_of_cuda(a.q)
    found = formula(a)
    laid_out = tuple(_laid_out(y, x) for y, (_, x, *_) in zip(found, sides(a), strict=True))
    return with_k(a, laid_out)


_BackwardCall: Any = load.call_of(load.operators.qk_norm_rope_backward.default)


class BackwardArguments(_BackwardCall):  # type: ignore[misc]
    """One call of qk_norm_rope_backward."""

    @property
    def forward(self) -> HeadArguments:
        """The forward call. The rounding of xhat counts as the identity."""
        call: Any = (*self[2:15], False, *self[15:17])
        return HeadArguments(*call)

    @classmethod
    def of(
        cls, a: HeadArguments, dq: Tensor, dk: Tensor | None, dweight: bool, dbias: bool
    ) -> BackwardArguments:
        # All but round_before_weight.
        return cls(*(dq, dk, *a[:13], *a[14:], dweight, dbias))

    def results(self, found: list[tuple[Tensor, Tensor | None, Tensor | None]]) -> Any:
        """The operator's results from (dx, dweight, dbias) of q and k; None becomes empty."""
        none = (None, None, None)
        q, k = (*found, none)[:2]
        parameters = (self.q_weight, self.k_weight, self.q_bias, self.k_bias)
        laid_out = (q[0], k[0], q[1], k[1], q[2], k[2])
        return results(laid_out, (self.q, self.q, *parameters), self.q)


def _backward(b: BackwardArguments) -> list[tuple[Tensor, Tensor | None, Tensor | None]]:
    """(dx, dweight, dbias) of q and k in PyTorch's operators."""
    a = b.forward
    back = a._replace(inverse=not a.inverse)
    found = []
    for dy, (_, x, weight, bias) in zip((b.dq_out, b.dk_out), sides(a), strict=False):
        assert dy is not None
        acc = acc_dtype(x.dtype)
        dz = rotate(back, dy.to(acc))
        _, xhat, rstd = normalize(a, x, weight, None)
        wide = shifted(weight, a.weight_offset, acc)
        needs = (True, b.needs_dweight, b.needs_dbias)
        is_rms = a.statistic == "rms"
        dx, dweight, dbias = of_affine(needs, dz, xhat, rstd, wide, 1, is_rms)
        assert dx is not None
        found.append((dx, sum_like(dweight, weight, weight), sum_like(dbias, bias, bias)))
    return found


def backward_by_formula(
    *args: Any, layout: Callable[[Tensor, Tensor], Tensor] = lambda dx, x: dx.to(x.dtype)
) -> Any:
    """What qk_norm_rope_backward gives, but for the order of memory."""
    b = BackwardArguments(*args)
    found = [
        (layout(dx, x), dweight, dbias)
        for (dx, dweight, dbias), (_, x, *_) in zip(_backward(b), sides(b.forward), strict=True)
    ]
    return b.results(found)


def composite_backward(*args: Any) -> Any:
    _check_backward(BackwardArguments(*args))
    return backward_by_formula(*args, layout=_laid_out)


# ---- What a call must satisfy.


def check(a: HeadArguments) -> None:
    """Raises, with one sentence, if the operators cannot take these arguments.

    Without k, the names are those of norm_rope.
    """
    q = "input" if a.k is None else "q"
    if a.statistic not in STATISTICS:
        raise ValueError(f"expected statistic 'rms', 'layer' or None, got {a.statistic!r}")
    for side, x, weight, bias in sides(a):
        name, prefix = (q, "") if a.k is None else (side, f"{side}_")
        arguments.check_tensor(name, x)
        if x.dim() != 4:
            expected = (
                "of four dimensions, (batch, positions, heads, columns) or with seq_dim=2 (batch, "
                "heads, positions, columns)"
            )
            raise arguments.shape_error(name, expected, x)
        if side == "k":
            _check_beside_q(a, x)
        for what, parameter in ((f"{prefix}weight", weight), (f"{prefix}bias", bias)):
            if parameter is None:
                continue
            arguments.check_tensor(what, parameter)
            if a.statistic is None:
                raise ValueError(f"expected no {what} beside statistic None, got one")
            if parameter.shape != x.shape[3:]:
                expected = f"of shape {[x.shape[3]]}, the size of a head"
                raise arguments.shape_error(what, expected, parameter)
            _check_device_and_dtype(what, parameter, q, a.q)
        if a.weight_offset != 0 and a.statistic is not None and weight is None:
            raise ValueError(
                f"expected a {prefix}weight beside weight_offset {a.weight_offset}, got none"
            )
    if a.k is None and (a.k_weight is not None or a.k_bias is not None):
        raise ValueError("expected k beside k_weight and k_bias, got none")
    if a.weight_offset != 0 and a.statistic is None:
        raise ValueError(f"expected no weight_offset beside statistic None, got {a.weight_offset}")
    arguments.check_statistic("rms", a.weight_offset, a.q_weight)
    _check_angles(a)


def _check_beside_q(a: HeadArguments, k: Tensor) -> None:
    q = a.q
    arguments.check_device("k", k, "q", q)
    if k.dtype != q.dtype:
        raise RuntimeError(f"expected k of q's dtype, {name_of(q.dtype)}, got {name_of(k.dtype)}")
    heads = 3 - a.seq_dim
    same = [d for d in range(4) if d != heads]
    if any(k.shape[d] != q.shape[d] for d in same):
        raise RuntimeError(
            f"expected q and k that differ only in dimension {heads}, their heads, "
            f"got shapes {list(q.shape)} and {list(k.shape)}"
        )


def _check_device_and_dtype(
    name: str, tensor: Tensor, beside: str, q: Tensor, *, may_be_float32: bool = False
) -> None:
    arguments.check_device(name, tensor, beside, q)
    wider = q.dtype in HALF or (may_be_float32 and q.dtype is torch.float64)
    allowed = (q.dtype, torch.float32) if wider else (q.dtype,)
    if tensor.dtype not in allowed:
        raise arguments.dtype_error(name, tensor, allowed, beside, [q.dtype])


def _check_angles(a: HeadArguments) -> None:
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
    for name, angles in (("cos", cos), ("sin", sin)):
        arguments.check_tensor(name, angles)
        shape = list(angles.shape)
        fits = (
            angles.dim() in (2, 3)
            and shape[-2] == positions
            and shape[-1] in (rotary // 2, rotary)
            and (angles.dim() == 2 or shape[0] in (1, batch))
        )
        if not fits:
            expected = (
                f"of shape (positions, n) or (batch, positions, n), with {positions} positions, "
                f"batch {batch}{'' if batch == 1 else ' or 1'}, and n {rotary // 2} or {rotary}"
            )
            raise arguments.shape_error(name, expected, angles)
        beside = "input" if a.k is None else "q"
        _check_device_and_dtype(name, angles, beside, a.q, may_be_float32=True)
    if cos.shape[-1] != sin.shape[-1] or cos.dtype != sin.dtype:
        raise RuntimeError(
            "expected cos and sin of one dtype and one last size, got "
            f"{name_of(cos.dtype)} {list(cos.shape)} and {name_of(sin.dtype)} {list(sin.shape)}"
        )


def _check_backward(b: BackwardArguments) -> None:
    """Raises if qk_norm_rope_backward cannot take these arguments, as csrc/bindings/cuda does."""
    check(b.forward)
    if b.statistic is None:
        arguments.refuse("a rotation alone is its own backward, with inverse")
    if (b.dk_out is None) != (b.k is None):
        arguments.refuse("dk_out belongs to k")
    for dy, x in ((b.dq_out, b.q), (b.dk_out, b.k)):
        if dy is None or x is None:
            continue
        arguments.check_tensor("the gradient of a result", dy)
        if dy.shape != x.shape or dy.dtype != x.dtype or dy.device != x.device:
            arguments.refuse("gradients must be as the results are")

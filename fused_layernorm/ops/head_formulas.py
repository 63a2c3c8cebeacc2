# SPDX-License-Identifier: Apache-2.0
"""Norm and rotation of heads in PyTorch's operators, forward and backward, and the checks of calls.

q and k are (batch, positions, heads, columns), or (batch, heads, positions, columns) with
seq_dim=2. Each row, the last dimension, is normalized and rotated; csrc/bindings/schemas.cpp
says what the operators give.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from . import arguments, load
from .arguments import name_of
from .autograd import derivatives
from .formulas import acc_dtype, affine, normalized, shifted, to, warn_of_cuda

STATISTICS = (*arguments.STATISTICS, None)
MOST_KERNEL_COLS = load.operators._limit("head_cols")

_QK = load.operators.qk_norm_rope.default
HeadArguments = load.call_of(_QK)  # one call of qk_norm_rope
BackwardArguments: Any = load.call_of(load.operators.qk_norm_rope_backward.default)

# Functions and no properties, which Dynamo of torch 2.10 does not read.


def sides(a: Any) -> list[tuple[str, Tensor, Tensor | None, Tensor | None]]:
    """The name, tensor, weight and bias of q and, where it is there, of k."""
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


def _normalize(a: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """The norm's result of one of q and k, in the arithmetic's dtype."""
    acc = acc_dtype(x.dtype)
    xhat = normalized(a, x.to(acc), 1)[1]
    rounds = a.round_before_weight and weight is not None
    z = xhat.to(x.dtype).to(acc) if rounds else xhat
    z = affine(z, shifted(weight, a.weight_offset, acc), to(bias, acc))
    return z.to(x.dtype).to(acc) if rounds else z


def has_rows(x: Tensor) -> bool:
    """Whether rows are contiguous, and no two of them in one place."""
    return x.stride(3) == 1 and all(x.shape[d] <= 1 or x.stride(d) != 0 for d in range(3))


def dense_like(x: Tensor) -> Tensor:
    """The layout of a result: x's order of dimensions, where x has rows; else contiguous."""
    if has_rows(x):
        return torch.empty_like(x)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _laid_out(y: Tensor, x: Tensor) -> Tensor:
    """y in x's dtype and in the layout of a result."""
    return dense_like(x).copy_(y)


def formula(a: Any) -> tuple[Tensor, ...]:
    """The results in PyTorch's operators, which differentiate them any number of times."""
    found = []
    for _, x, weight, bias in sides(a):
        z = x.to(acc_dtype(x.dtype))
        if a.statistic is not None:
            z = _normalize(a, x, weight, bias)
        found.append(rotate(a, z).to(x.dtype))
    return tuple(found)


def with_k(a: Any, found: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    return (found[0], found[1] if len(found) > 1 else a.q.new_empty(0))


def by_formula(a: Any) -> tuple[Tensor, Tensor]:
    """What qk_norm_rope gives, but for the order of memory, of arguments that were checked."""
    return with_k(a, formula(a))


def composite_forward(*args: Any) -> tuple[Tensor, Tensor]:
    a = HeadArguments(*args)
    check(a)
    warn_of_cuda(a.q)
    found = formula(a)
    laid_out = tuple(_laid_out(y, x) for y, (_, x, *_) in zip(found, sides(a), strict=True))
    return with_k(a, laid_out)


# ---- Backward, of q and k or of the tensor (qkv) of which they are parts.


def of_forward(operator: OpOverload, b: Any) -> Any:
    """The call of a forward operator whose backward call is b. The rounding of xhat counts as the
    identity."""
    Call = load.call_of(operator)
    return Call(*(getattr(b, name, False) for name in Call._fields))


def wanted(b: Any) -> list[str]:
    """The names of the tensors whose gradients a backward call asks for; of a result without a
    gradient no parameter has one."""
    sides = [side for side in "qk" if getattr(b, f"d{side}_out") is not None]
    weights = [f"{side}_weight" for side in sides * b.needs_dweight]
    biases = [f"{side}_bias" for side in sides * b.needs_dbias]
    return [n for n in ("qkv", "q", "k", *weights, *biases) if getattr(b, n, None) is not None]


def gradients_of(b: Any) -> list[str]:
    """The names of the tensors whose gradients a backward operator gives, in their order."""
    tensors = ("qkv", "q", "k", "q_weight", "k_weight", "q_bias", "k_bias")
    return [name for name in tensors if name in b._fields]


def results(b: Any, found: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """What a backward operator gives: gradients by name, and empty tensors for the others."""
    some: Tensor = next(dy for dy in b if dy is not None)

    def empty(name: str) -> Tensor:
        like = getattr(b, name)
        return some.new_empty(0, dtype=some.dtype if like is None else like.dtype)

    return tuple(found[n] if n in found else empty(n) for n in gradients_of(b))


def gradients(operator: OpOverload, formula: Callable[[Any], Any], b: Any) -> tuple[Tensor, ...]:
    """What a backward operator gives, but for the order of memory, by PyTorch's derivative of a
    formula of its forward operator's calls."""
    a, names = of_forward(operator, b), wanted(b)
    grads = [dy for name, dy in zip(b._fields[:3], b[:3], strict=True) if name[0] == "d"]

    def function(*leaves: Tensor) -> tuple[Tensor, ...]:
        found = formula(a._replace(**dict(zip(names, leaves, strict=True))))
        return tuple(y for y, dy in zip(found, grads, strict=False) if dy is not None)

    leaves = [getattr(a, name) for name in names]
    found = derivatives(function, leaves, [dy for dy in grads if dy is not None])
    named = zip(names, found, strict=True)
    return results(b, {name: gradient for name, gradient in named if gradient is not None})


def backward_by_formula(*args: Any) -> tuple[Tensor, ...]:
    """What qk_norm_rope_backward gives, but for the order of memory."""
    return gradients(_QK, formula, BackwardArguments(*args))


def composite_backward(*args: Any) -> tuple[Tensor, ...]:
    b = BackwardArguments(*args)
    arguments.check_tensors(b)
    with torch.no_grad():
        dq, dk, *others = backward_by_formula(*args)
    dk = dk if b.k is None else _laid_out(dk, b.k)
    return _laid_out(dq, b.q), dk, *(t.contiguous() for t in others)


# ---- What a call must satisfy.


def check(a: Any) -> None:
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
            _check_beside(what, parameter, q, a.q)
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


def _check_beside_q(a: Any, k: Tensor) -> None:
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


def _check_beside(name: str, tensor: Tensor, q: str, of: Tensor, *others: torch.dtype) -> None:
    """Raises unless a tensor goes with q, by device and dtype; it may also be of other dtypes."""
    arguments.check_device(name, tensor, q, of)
    if tensor.dtype is of.dtype or tensor.dtype in others:
        return
    allowed = [*dict.fromkeys((*arguments.beside(of.dtype), *others))]
    if tensor.dtype not in allowed:
        raise arguments.dtype_error(name, tensor, allowed, q, [of.dtype])


def _check_angles(a: Any) -> None:
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
        _check_beside(name, angles, "input" if a.k is None else "q", a.q, torch.float32)
    if cos.shape[-1] != sin.shape[-1] or cos.dtype != sin.dtype:
        raise RuntimeError(
            "expected cos and sin of one dtype and one last size, got "
            f"{name_of(cos.dtype)} {list(cos.shape)} and {name_of(sin.dtype)} {list(sin.shape)}"
        )

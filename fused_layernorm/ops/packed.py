# SPDX-License-Identifier: Apache-2.0
"""q, k and v in one tensor: the operators qkv_norm_rope, qkv_norm_rope_backward, and their node.

qkv is (batch, positions, heads, columns); csrc/bindings/schemas.cpp says which of its heads are
q's, k's and v's, and what the operators give. v is a view, which no operator gives: one that said
so would be refused by torch.compile, one that did not would be wrong there. So autograd's node is
made here and not for a dispatch key: `run` gives q, k and v, and their gradients come back as one
tensor. Writing into v, or using it after writing into qkv, is refused by autograd, as of all nodes
that give several results, one of them a view.

Where the node cannot serve (transforms of torch.func, tensor subclasses, cos or sin that ask for a
gradient), the results are those of qk_norm_rope of the parts, with autograd's own gradient of qkv.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..integrations.after_import import after_import
from . import arguments, fallback, load
from .autograd import (
    Function,
    apply,
    backward_autograd,
    call_operator,
    in_forward_mode,
    lower_levels,
    needs_grad,
    redispatch,
)
from .head_formulas import (
    BackwardArguments,
    HeadArguments,
    backward_by_formula,
    composite_forward,
    dense_like,
    formula,
    has_rows,
    needs_grad_of_angles,
)
from .head_formulas import check as check_heads
from .heads import qk_norm_rope
from .vmap import one_by_one

qkv_norm_rope = load.operators.qkv_norm_rope.default
qkv_norm_rope_backward = load.operators.qkv_norm_rope_backward.default

PackedArguments = load.call_of(qkv_norm_rope)
PackedBackward: Any = load.call_of(qkv_norm_rope_backward)

# ---- The parts. p is a call of either operator.


def _part(p: Any, qkv: Tensor, which: int) -> Tensor:
    """q, k or v: part 0, 1 or 2. All are views but q with by_head and several heads beside one of
    k. (A qkv of five dimensions is one whose heads do not follow each other.)"""
    kv, every = p.num_kv_heads, qkv.shape[2]
    if qkv.dim() == 5:
        part = qkv.select(3 if p.by_head else 2, which)
    elif p.by_head:
        beside = every // kv - 2 if kv else 1
        groups = qkv.unflatten(2, (kv, beside + 2))
        if which > 0:
            part = groups.select(3, beside + which - 1)
        else:
            part = groups.select(3, 0) if beside == 1 else groups[:, :, :, :beside].flatten(2, 3)
    else:
        first = (0, every - 2 * kv, every - kv)[which]
        part = qkv.narrow(2, first, kv if which else every - 2 * kv)
    return part.transpose(1, 2) if p.seq_dim == 2 else part


def parts(p: Any, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _part(p, qkv, 0), _part(p, qkv, 1), _part(p, qkv, 2)


def _together(p: Any, of_parts: list[Tensor]) -> Tensor:
    """The reverse of `parts`, in new memory."""
    q, k, v = (x.transpose(1, 2) if p.seq_dim == 2 else x for x in of_parts)
    if not p.by_head:
        return torch.cat((q, k, v), 2)
    q = q.unflatten(2, (k.shape[2], -1)) if k.shape[2] else q.unsqueeze(3)
    return torch.cat((q, k.unsqueeze(3), v.unsqueeze(3)), 3).flatten(2, 3)


def heads(p: Any, q: Tensor, k: Tensor) -> Any:
    """The call of qk_norm_rope."""
    return HeadArguments(q, k, *p[1:14], False)


def of_parts(p: Any) -> Any:
    return heads(p, _part(p, p.qkv, 0), _part(p, p.qkv, 1))


def check(p: Any) -> None:
    """Raises, with one sentence, if the operator cannot take these arguments."""
    arguments.check_tensor("qkv", p.qkv)
    check_heads(of_parts(p))


def composite(*args: Any) -> tuple[Tensor, Tensor]:
    p = PackedArguments(*args)
    found = composite_forward(*of_parts(p))
    like = _like(p)
    pairs = zip(found, like, strict=True)
    return tuple(y if y.stride() == z.stride() else z.copy_(y) for y, z in pairs)  # type: ignore[return-value]


def _like(p: Any) -> tuple[Tensor, Tensor]:
    """Empty tensors of the results' layout: as of q and k whose heads follow each other."""
    qkv = p.qkv if has_rows(p.qkv) else p.qkv.contiguous()
    q, k, _ = parts(p, qkv)
    if p.by_head and q.shape[3 - p.seq_dim] != k.shape[3 - p.seq_dim]:
        q = _part(p._replace(by_head=False), qkv, 0)
    return dense_like(q), dense_like(k)


def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    p = PackedArguments(*args)
    check(p)
    return _like(p)


# ---- Backward.


def _results(b: Any, dqkv: Tensor, of_parameters: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """What the backward operator gives; of a result without a gradient no parameter has one."""

    def one(name: str, needed: bool, dy: Tensor | None) -> Tensor:
        parameter = getattr(b, name)
        if not needed or dy is None or parameter is None:
            return dqkv.new_empty(0, dtype=None if parameter is None else parameter.dtype)
        return of_parameters[name]

    sides = (("q", b.dq_out), ("k", b.dk_out))
    return (
        dqkv,
        *(one(f"{side}_weight", b.needs_dweight, dy) for side, dy in sides),
        *(one(f"{side}_bias", b.needs_dbias, dy) for side, dy in sides),
    )


def gradients(*args: Any) -> tuple[Tensor, ...]:
    """What qkv_norm_rope_backward gives, but for the order of memory, by q's and k's formulas."""
    b = PackedBackward(*args)
    given = b[:3]
    some = next(dy for dy in given if dy is not None)
    zeros = parts(b, some.new_zeros(b.size))
    dq, dk, dv = (z if dy is None else dy for z, dy in zip(zeros, given, strict=True))
    named: dict[str, Tensor] = {}
    if b.statistic is None:
        found = [*formula(HeadArguments(dq, dk, *b[4:15], False, b.interleaved, True))]
    else:
        q, k, _ = parts(b, b.qkv)
        flags = b.needs_dweight, b.needs_dbias
        call = BackwardArguments(dq, dk, q, k, *b[4:15], b.interleaved, False, *flags)
        *found, q_weight, k_weight, q_bias, k_bias = backward_by_formula(*call)
        named = {"q_weight": q_weight, "k_weight": k_weight, "q_bias": q_bias, "k_bias": k_bias}
    pairs = zip(zeros, given, (*found, dv), strict=True)
    return _results(b, _together(b, [z if dy is None else d for z, dy, d in pairs]), named)


def _empty(b: Any) -> Tensor:
    some: Tensor = next(dy for dy in b[:3] if dy is not None)
    return some.new_empty_strided(b.size, b.stride)


def _composite_backward(*args: Any) -> tuple[Tensor, ...]:
    b = PackedBackward(*args)
    arguments.check_tensors(b)
    with torch.no_grad():
        dqkv, *others = gradients(*args)
    return _empty(b).copy_(dqkv), *(t.contiguous() for t in others)


def _fake_backward(*args: Any) -> tuple[Tensor, ...]:
    b = PackedBackward(*args)
    named = {n: torch.empty_like(t) for n in b._fields[4:8] if (t := getattr(b, n)) is not None}
    return _results(b, _empty(b), named)


# ---- Autograd.


class _Packed(Function):
    """q, k and v of a call of qkv_norm_rope."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        p = PackedArguments(*args)
        with lower_levels():
            q, k = qkv_norm_rope(*p)
        ctx.set_materialize_grads(False)
        # A rotation alone does not need qkv for its backward.
        tensors = p[:5] if p.statistic is not None else (None,) * 5
        ctx.save_for_backward(*tensors, p.cos, p.sin)
        ctx.options = (*p[7:12], *p[13:])  # all but the rounding
        order = p.qkv if p.qkv.is_contiguous() else dense_like(p.qkv)
        ctx.layout = (*order.shape,), (*order.stride(),)
        return q, k, _part(p, p.qkv, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        needs: Any = PackedArguments(*ctx.needs_input_grad)
        if all(dy is None for dy in grads):
            return (None,) * len(needs)
        flags = needs.q_weight or needs.k_weight, needs.q_bias or needs.k_bias
        call = PackedBackward(*grads, *ctx.saved_tensors, *ctx.options, *ctx.layout, *flags)
        found = call_operator(qkv_norm_rope_backward, *call)
        present = (True, *(dy is not None for dy in (*grads[:2], *grads[:2])))
        wanted = zip(found, needs[:5], present, strict=True)
        of_tensors = (d if needed and is_there else None for d, needed, is_there in wanted)
        return (*of_tensors, *[None] * (len(needs) - 5))


def _has_node(p: Any) -> bool:
    """Whether q, k and v get their gradients from one node."""
    return (
        needs_grad(p.qkv)
        and not torch.utils._python_dispatch.is_traceable_wrapper_subclass(p.qkv)
        and not torch._C._are_functorch_transforms_active()
        and not in_forward_mode()
        and not needs_grad_of_angles(p)
    )


def run(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of a call of qkv_norm_rope."""
    p = PackedArguments(*args)
    if _has_node(p):
        found: tuple[Tensor, Tensor, Tensor] = apply(_Packed, *p)
        return found
    return *qkv_norm_rope(*p), _part(p, p.qkv, 2)


def _autograd(keyset: Any, *args: Any) -> Any:
    """The operator called by itself."""
    p = PackedArguments(*args)
    if in_forward_mode() or needs_grad(*p[:7]):
        check(p)
        return qk_norm_rope(*of_parts(p))
    return redispatch(qkv_norm_rope, keyset, *args)


def _allow_in_graph() -> None:
    # Dynamo takes `run` as it is, and AOTAutograd sees the node inside.
    torch._dynamo.allow_in_graph(run)


after_import(
    "torch._dynamo", _allow_in_graph,
    f"fused_layernorm's qkv_norm_rope breaks graphs under torch {torch.__version__}",
)  # fmt: skip
torch.library.register_fake(qkv_norm_rope, _fake)
torch.library.register_fake(qkv_norm_rope_backward, _fake_backward)
for _operator in (qkv_norm_rope, qkv_norm_rope_backward):
    torch.library.register_vmap(_operator, functools.partial(one_by_one, _operator))
fallback.implement(qkv_norm_rope, composite)
fallback.implement(qkv_norm_rope_backward, _composite_backward)
load.library.impl("qkv_norm_rope", _autograd, "Autograd", with_keyset=True)
load.library.impl(
    "qkv_norm_rope_backward",
    backward_autograd(qkv_norm_rope_backward, gradients),
    "Autograd",
    with_keyset=True,
)

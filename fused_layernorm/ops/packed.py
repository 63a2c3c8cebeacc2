# SPDX-License-Identifier: Apache-2.0
"""q, k and v in one tensor: the operators qkv_norm_rope, qkv_norm_rope_backward, and their node.

qkv is (batch, positions, heads, columns); csrc/bindings/schemas.cpp says which of its heads are
q's, k's and v's, and what the operators give. v is a view, which no operator gives: one that said
so would be refused by torch.compile, one that did not would be wrong there. So autograd's node is
made here, not for a dispatch key: `run` gives q, k and v, whose gradients come back as one tensor.

Where the node cannot serve (transforms of torch.func, tensor subclasses, cos or sin that ask for a
gradient), the results are those of qk_norm_rope of the parts, with autograd's own gradient of qkv.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..integrations.after_import import after_import
from . import arguments, autograd, heads, load
from .family import AUTOGRAD, implement
from .formulas import call_of
from .heads import HeadArguments, dense_like, has_rows, qk_norm_rope

qkv_norm_rope = load.operators.qkv_norm_rope.default
qkv_norm_rope_backward = load.operators.qkv_norm_rope_backward.default

PackedArguments = call_of(qkv_norm_rope)
heads.name_gradients(call_of(qkv_norm_rope_backward))

# ---- The parts. p is a call of either operator.


def part(p: Any, which: int) -> Tensor:
    """q, k or v: part 0, 1 or 2. All are views but q with by_head and several heads beside one of
    k. (A qkv of five dimensions is one whose heads do not follow each other.)"""
    qkv, kv, every = p.qkv, p.num_kv_heads, p.qkv.shape[2]
    if qkv.dim() == 5:
        found = qkv.select(3 if p.by_head else 2, which)
    elif p.by_head:
        beside = every // kv - 2 if kv else 1
        groups = qkv.unflatten(2, (kv, beside + 2))
        if which > 0:
            found = groups.select(3, beside + which - 1)
        else:
            found = groups.select(3, 0) if beside == 1 else groups[:, :, :, :beside].flatten(2, 3)
    else:
        first = (0, every - 2 * kv, every - kv)[which]
        found = qkv.narrow(2, first, kv if which else every - 2 * kv)
    return found.transpose(1, 2) if p.seq_dim == 2 else found


def of_parts(p: Any) -> Any:
    """The call of qk_norm_rope. Backward has no rounding: it counts as the identity."""
    first = p._fields.index("q_weight")
    given = (*p[first : first + 11], p.round_before_weight, p.interleaved, False)
    return HeadArguments(part(p, 0), part(p, 1), *given)


def check(p: Any) -> None:
    """Raises, with one sentence, if the operator cannot take these arguments."""
    arguments.check_tensor("qkv", p.qkv)
    heads.check(of_parts(p))


def formula(p: Any, once: bool = False) -> tuple[Tensor, ...]:
    """q, k and v in PyTorch's operators, which differentiate them any number of times."""
    return *heads.formula(of_parts(p)), part(p, 2)


class Packed(heads.Heads):
    def without_statistics(self, found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return found[:2]  # without v

    def empty(self, a: Any) -> tuple[Tensor, ...]:
        """As of q and k whose heads follow each other."""
        p = a if has_rows(a.qkv) else a._replace(qkv=a.qkv.contiguous())
        q, k = part(p, 0), part(p, 1)
        if p.by_head and q.shape[3 - p.seq_dim] != k.shape[3 - p.seq_dim]:
            q = part(p._replace(by_head=False), 0)
        return dense_like(q), dense_like(k)

    def order_of(self, b: Any, name: str) -> Tensor | None:
        some: Tensor = next(dy for dy in b.grads if dy is not None)
        return some.new_empty_strided(b.size, b.stride) if name == "qkv" else None

    def results(self, ctx: Any, a: Any, found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        order = a.qkv if a.qkv.is_contiguous() else dense_like(a.qkv)
        ctx.order = (*order.shape,), (*order.stride(),)
        return *found, part(a, 2)

    def gradients(self, ctx: Any, a: Any, grads: Any, flags: Any) -> dict[Any, Any]:
        call = (*grads, *a[:12], *a[13:], *ctx.order, *flags)  # all but the rounding
        found = autograd.call_operator(qkv_norm_rope_backward, *call)
        # A result without a gradient gives its parameters none.
        is_there = {"q": grads[0] is not None, "k": grads[1] is not None}
        names = ("qkv", *(name if is_there[name[0]] else None for name in a._fields[1:5]))
        return dict(zip(names, found, strict=True))


# ---- Autograd.


def _has_node(p: Any) -> bool:
    """Whether q, k and v get their gradients from one node."""
    return (
        autograd.needs_grad(p.qkv)
        and not torch.utils._python_dispatch.is_traceable_wrapper_subclass(p.qkv)
        and not torch._C._are_functorch_transforms_active()
        and not autograd.in_forward_mode()
        and not autograd.needs_grad(p.cos, p.sin)
    )


def run(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of a call of qkv_norm_rope."""
    p = PackedArguments(*args)
    try:
        if _has_node(p):
            return autograd.apply(heads.HeadNorms, None, FAMILY, *p)
        return *qkv_norm_rope(*p), part(p, 2)
    except Exception as error:
        raise arguments.explain(error, p, check) from None


def _autograd(keyset: Any, *args: Any) -> Any:
    """The operator called by itself."""
    p = PackedArguments(*args)
    if autograd.in_forward_mode() or autograd.needs_grad(*p[:7]):
        check(p)
        return qk_norm_rope(*of_parts(p))
    return autograd.redispatch(qkv_norm_rope, keyset, *args)


# Dynamo takes `run` as it is, and AOTAutograd sees the node inside.
_FAILURE = f"fused_layernorm's qkv_norm_rope breaks graphs under torch {torch.__version__}"
after_import("torch._dynamo", lambda: torch._dynamo.allow_in_graph(run), _FAILURE)

FAMILY = Packed("qkv_norm_rope", check, formula)
implement(FAMILY)
AUTOGRAD[qkv_norm_rope] = _autograd

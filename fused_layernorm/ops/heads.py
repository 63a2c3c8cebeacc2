# SPDX-License-Identifier: Apache-2.0
"""The operators qk_norm_rope and qk_norm_rope_backward: their Python half.

head_formulas.py computes them off CUDA, csrc/bindings/cuda/heads.cpp has them on CUDA.

A rotation is linear and its transpose is the reverse rotation, so a rotation alone (statistic None)
is differentiated by the forward operator itself, any number of times. The norm's gradients come
from qk_norm_rope_backward; where they are to be differentiated, and where cos or sin asks for a
gradient, PyTorch differentiates `formula`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from . import autograd, head_formulas, load
from .family import implement
from .head_formulas import BackwardArguments, HeadArguments, check, dense_like, sides, with_k
from .vmap import folded, one_by_one, to_front

qk_norm_rope = load.operators.qk_norm_rope.default
qk_norm_rope_backward = load.operators.qk_norm_rope_backward.default

# ---- Fakes. As with norms, backward's arguments are not checked here.


def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    a = HeadArguments(*args)
    check(a)
    return with_k(a, tuple(dense_like(x) for _, x, *_ in sides(a)))


def _fake_backward(*args: Any) -> Any:
    b = BackwardArguments(*args)
    named = ((name, getattr(b, name)) for name in head_formulas.wanted(b))
    found = {n: dense_like(t) if t.dim() == 4 else t.new_empty(t.shape) for n, t in named}
    return head_formulas.results(b, found)


# ---- Derivatives.


class _Forward(autograd.Function):
    """q_out and k_out of qk_norm_rope; without k, q_out alone."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *args: Any) -> Any:
        a = HeadArguments(*args)
        with autograd.lower_levels():
            found = autograd.redispatch(qk_norm_rope, keyset, *a)
        ctx.set_materialize_grads(False)
        # A rotation alone needs neither q nor k for its backward.
        tensors = a[:6] if a.statistic is not None else (None,) * 6
        ctx.save_for_backward(*tensors, a.cos, a.sin)
        ctx.options = a[8:]
        return found if a.k is not None else found[0]

    @staticmethod
    def backward(ctx: Any, dq: Tensor | None, dk: Tensor | None = None) -> Any:
        a: Any = HeadArguments(*ctx.saved_tensors, *ctx.options)
        needs: Any = HeadArguments(*ctx.needs_input_grad[1:])
        # A side without a gradient is left out: where q has none, k takes its place.
        present = [side for side, dy in enumerate((dq, dk)) if dy is not None]
        if not present:
            return (None,) * (1 + len(needs))

        def of(pair: Any) -> Any:
            return (*(pair[side] for side in present), None)[:2]

        of_q, of_k = of((dq, dk))
        if a.statistic is None:
            call = a._replace(q=of_q, k=of_k, inverse=not a.inverse)
            found = (*autograd.call_operator(qk_norm_rope, *call), None, None, None, None)
        else:
            a = HeadArguments(*of(a[0:2]), *of(a[2:4]), *of(a[4:6]), *a[6:])
            flags = needs.q_weight or needs.k_weight, needs.q_bias or needs.k_bias
            b = BackwardArguments(of_q, of_k, *a[:13], *a[14:], *flags)  # all but the rounding
            found = autograd.call_operator(qk_norm_rope_backward, *b)
        gradients: list[Any] = [None] * len(needs)
        for place, side in enumerate(present):
            for i in (0, 2, 4):  # of x, weights and biases
                if needs[i + side]:
                    gradients[i + side] = found[i + place]
        return (None, *gradients)


def _autograd(keyset: Any, *args: Any) -> Any:
    a = HeadArguments(*args)
    if autograd.in_forward_mode() or autograd.needs_grad(a.cos, a.sin):
        check(a)
        return head_formulas.by_formula(a)
    if autograd.needs_grad(*a[:6]):
        found = autograd.apply(_Forward, keyset, *a)
        return found if a.k is not None else with_k(a, (found,))
    return autograd.redispatch(qk_norm_rope, keyset, *args)


# ---- vmap: the batch is part of the first dimension. Parameters of samples are served one by one.


def _angles_folded(a: Any, dim: int | None, size: int, batch: int) -> Any:
    if a is None or (dim is None and a.dim() == 2):
        return a
    a = to_front(a, dim, size)
    if a.dim() == 3:  # one table for each sample of vmap
        a = a.unsqueeze(1)
    return a.expand(size, batch, *a.shape[2:]).flatten(0, 1)


def _unfolded(tensor: Tensor, size: int) -> Tensor:
    return tensor.unflatten(0, (size, -1)) if tensor.dim() == 4 else tensor.expand(size, 0)


def _vmap(info: Any, in_dims: Any, *args: Any) -> Any:
    a, size = HeadArguments(*args), info.batch_size
    dims: Any = HeadArguments(*in_dims)
    if any(dim is not None for dim in dims[2:6]):
        return one_by_one(qk_norm_rope, info, in_dims, *args)
    batch = a.q.shape[1 if dims.q == 0 else 0] if dims.q is not None else a.q.shape[0]
    call = a._replace(
        q=folded(a.q, dims.q, size),
        k=folded(a.k, dims.k, size),
        cos=_angles_folded(a.cos, dims.cos, size, batch),
        sin=_angles_folded(a.sin, dims.sin, size, batch),
    )
    return tuple(_unfolded(y, size) for y in qk_norm_rope(*call)), (0, 0)


def register(
    operator: OpOverload,
    implementation: Callable[..., Any],
    without_data: Callable[..., Any],
    of_autograd: Callable[..., Any],
    vmap: Callable[..., Any] | None = None,
) -> None:
    """vmap: the operator's rule, by default one call for each sample."""
    rule = vmap or functools.partial(one_by_one, operator)
    implement(operator, implementation, without_data, rule)
    load.library.impl(operator._opname, of_autograd, "Autograd", with_keyset=True)


register(qk_norm_rope, head_formulas.composite_forward, _fake, _autograd, _vmap)
register(
    qk_norm_rope_backward,
    head_formulas.composite_backward,
    _fake_backward,
    autograd.backward_autograd(qk_norm_rope_backward, head_formulas.backward_by_formula),
)

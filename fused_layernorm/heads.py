# SPDX-License-Identifier: Apache-2.0
"""The public functions for heads of attention: q and k, normalized and rotated in one kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import calls, stock
from .ops import arguments
from .ops.autograd import in_forward_mode, needs_grad
from .ops.head_formulas import (
    HeadArguments,
    by_formula,
    check,
    composite_forward,
    has_kernel,
    needs_grad_of_angles,
)
from .ops.heads import qk_norm_rope as _operator

_below_autograd = torch._C._AutoDispatchBelowAutograd
_LAYER_EPS = 1e-5


def norm_rope(
    input: Tensor,
    weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float | None = None,
    *,
    statistic: str | None = "rms",
    bias: Tensor | None = None,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    seq_dim: int = 1,
) -> Tensor:
    """Normalization of each head, and its rotation by its position, in one kernel.

    As :func:`qk_norm_rope` for one tensor.
    """
    arguments.check_tensor("input", input)
    a = HeadArguments(
        input, None, weight, None, bias, None, cos, sin, _rotary_dim(input, cos, sin, rotary_dim),
        _seq_dim(seq_dim), _eps(eps, statistic, input), statistic, weight_offset,
        bool(round_before_weight), bool(interleaved), False,
    )  # fmt: skip
    return _run(a)[0]


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float | None = None,
    *,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    statistic: str | None = "rms",
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    seq_dim: int = 1,
) -> tuple[Tensor, Tensor]:
    r"""Normalization of each head of q and k, and its rotation by its position, in one kernel.

    A row, the last dimension of q or k, is normalized, and its first ``rotary_dim`` columns are
    rotated in pairs (Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding",
    2021): with the angle's cosine :math:`c` and sine :math:`s`, a pair becomes

    .. math::
        (a, b) \mapsto (a c - b s,\; b c + a s).

    All arithmetic is in float32 (float64 for float64 q and k), and the result is rounded once.

    Args:
        q, k: ``(batch, positions, heads, columns)``, or with ``seq_dim=2`` ``(batch, heads,
            positions, columns)``; they may have different numbers of heads. Of float32, float16,
            bfloat16 or float64, and of any strides: rows that are contiguous, such as those of a
            slice of packed qkv, are read where they lie.
        q_weight, k_weight, q_bias, k_bias: shape ``(columns,)``, each optional; of q's dtype, or
            float32 beside half-precision q and k.
        cos, sin: ``(positions, n)`` or ``(batch, positions, n)`` of any strides, where the batch
            may be 1; of q's dtype or float32. n is ``rotary_dim / 2``, a value for each pair, or
            ``rotary_dim``, where each value is there twice, as transformers gives them: all of them
            and then all again, or with ``interleaved`` side by side. Both may be None: then nothing
            is rotated.
        eps: added to the mean of the squares, or to the variance. None is the default of
            ``torch.nn.functional.rms_norm``, for ``statistic="layer"`` 1e-5.
        statistic: ``"rms"`` for RMSNorm, ``"layer"`` for LayerNorm. None rotates alone; a weight,
            bias or offset beside it is an error.
        weight_offset: added to both weights, as in :func:`rms_norm`.
        round_before_weight: beside a weight, the normalized value is rounded to q's dtype before it
            is multiplied by the weight, and the norm's result before it is rotated, as Llama's norm
            does. Gradients take the rounding for the identity.
        rotary_dim: how many columns are rotated, an even number; by default all.
        interleaved: a pair is two neighbours, ``(2 i, 2 i + 1)``, as in GPT-J and Flux; otherwise
            ``(i, i + rotary_dim / 2)``, as in Llama and GPT-NeoX.
        seq_dim: the dimension of the positions, 1 or 2; it may be counted from the end.

    Returns:
        ``(q_out, k_out)``, each of the shape and dtype of q or k and in the same order of memory,
        without gaps. Autocast changes nothing.

    The kernels take heads of an even size up to 256, and give cos and sin no gradient. PyTorch's
    operators compute all other calls, and those in which cos or sin asks for a gradient.

    Raises:
        TypeError, ValueError, IndexError, RuntimeError: the message says in one sentence what was
            expected and what was given. A dtype or layout that is not supported raises
            NotImplementedError, a RuntimeError.
    """
    arguments.check_tensor("q", q)
    arguments.check_tensor("k", k)
    a = HeadArguments(
        q, k, q_weight, k_weight, q_bias, k_bias, cos, sin, _rotary_dim(q, cos, sin, rotary_dim),
        _seq_dim(seq_dim), _eps(eps, statistic, q), statistic, weight_offset,
        bool(round_before_weight), bool(interleaved), False,
    )  # fmt: skip
    return _run(a)


def _run(a: HeadArguments) -> tuple[Tensor, Tensor]:
    """The results; without k, an empty tensor is the second."""
    _check_types(a)
    if a.q.dim() == 4 and (needs_grad_of_angles(a) or not has_kernel(a)):
        check(a)
        return by_formula(a)
    if calls.is_compiling():
        return _operator(*a)
    if a.q.dtype not in arguments.HALF and stock.differentiates(a.q):
        return composite_forward(*a)
    found: tuple[Tensor, Tensor]
    if needs_grad(*a[:6]) or in_forward_mode():
        found = calls.call(_operator, a, check, by_formula)
    else:
        with _below_autograd():  # autograd of this operator is in Python, and would do nothing
            found = calls.call(_operator, a, check, by_formula)
    return found


def _eps(eps: float | None, statistic: str | None, q: Tensor) -> float:
    if statistic is None:
        return 0.0
    return _LAYER_EPS if eps is None and statistic == "layer" else arguments.rms_eps(eps, q)


def _rotary_dim(q: Tensor, cos: Tensor | None, sin: Tensor | None, rotary_dim: Any) -> int:
    if rotary_dim is None:
        return 0 if cos is None and sin is None else q.shape[-1] if q.dim() > 0 else 0
    dim = arguments.check_int("rotary_dim", rotary_dim)
    if cos is None and sin is None:
        raise ValueError(f"expected cos and sin beside rotary_dim {dim}, got neither")
    return dim


def _seq_dim(seq_dim: Any) -> int:
    dim = arguments.check_int("seq_dim", seq_dim)
    if not -4 <= dim < 4:
        raise IndexError(f"expected seq_dim from -4 to 3, got {dim}")
    dim %= 4
    if dim not in (1, 2):
        raise ValueError(f"expected seq_dim 1 or 2 of four dimensions, got {seq_dim}")
    return dim


def _check_types(a: HeadArguments) -> None:
    """Raises where the schema's error would be worse."""
    names = (name.removeprefix("q_") if a.k is None else name for name in a._fields[2:8])
    tensors = zip(names, a[2:8], strict=True)
    arguments.check_types(tensors, eps=a.eps, weight_offset=a.weight_offset)
    if a.statistic is not None and not isinstance(a.statistic, str):
        raise ValueError(f"expected statistic 'rms', 'layer' or None, got {a.statistic!r}")
    if isinstance(a.eps, float) and a.eps != a.eps:
        raise ValueError("expected eps to be a number, got nan")

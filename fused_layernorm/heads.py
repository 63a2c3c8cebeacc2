# SPDX-License-Identifier: Apache-2.0
"""The public functions for heads of attention: q and k, normalized and rotated in one kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import calls
from .ops import arguments, packed
from .ops.autograd import in_forward_mode, needs_grad
from .ops.heads import FAMILY, HeadArguments, has_kernel, has_rows

_is_wrapper = torch.utils._python_dispatch.is_traceable_wrapper_subclass
_below_autograd = torch._C._AutoDispatchBelowAutograd


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
        input, None, weight, None, bias, None, cos, sin,
        *_options(input, cos, sin, rotary_dim, seq_dim, eps, statistic), statistic, weight_offset,
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
            and then all again, or with ``interleaved`` side by side. Both None: no rotation.
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
    operators compute all other calls, and those in which cos or sin asks for a gradient. The errors
    are those of :func:`layer_norm`, and an IndexError for a seq_dim that is not there.
    """
    arguments.check_tensor("q", q)
    arguments.check_tensor("k", k)
    a = HeadArguments(
        q, k, q_weight, k_weight, q_bias, k_bias, cos, sin,
        *_options(q, cos, sin, rotary_dim, seq_dim, eps, statistic), statistic, weight_offset,
        bool(round_before_weight), bool(interleaved), False,
    )  # fmt: skip
    return _run(a)


def qkv_norm_rope(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float | None = None,
    *,
    layout: str = "3hd",
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    statistic: str | None = "rms",
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    seq_dim: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`qk_norm_rope` of q and k that are parts of one tensor, whose gradient is one tensor.

    In backward the gradients of q, k and v are written to their places in that of qkv, which is
    dense and in qkv's order of memory, by one kernel: nothing is zeroed and nothing added.

    Args:
        qkv: with ``layout="3hd"`` ``(batch, positions, 3, heads, columns)``, or ``(batch,
            positions, (heads + 2 num_kv_heads) columns)``: all of q, then k, then v. With
            ``layout="h3d"`` ``(batch, positions, heads, 3, columns)``, as GPT-NeoX has it, or one
            row of each kv head's q's, then its k, then its v, as Megatron has it.
        layout: ``"3hd"`` or ``"h3d"``.
        num_kv_heads: how many heads k and v have; by default as many as q.
        head_dim: columns of a head, which a qkv of three dimensions needs.
        seq_dim: the dimension of the positions in the **results**, 1 or 2 (or from the end), which
            are ``(batch, positions, heads, columns)`` or ``(batch, heads, positions, columns)``.

    The other arguments are those of :func:`qk_norm_rope`.

    Returns:
        ``(q, k, v)``. q and k are what :func:`qk_norm_rope` gives of their parts; v is a view of
        qkv. With gradients, writing into v or qkv afterwards raises what PyTorch raises of a view
        from a function with several results.
    """
    arguments.check_tensor("qkv", qkv)
    qkv, kv_heads = _all_heads(qkv, layout, num_kv_heads, head_dim)
    p = packed.PackedArguments(
        qkv, q_weight, k_weight, q_bias, k_bias, cos, sin,
        *_options(qkv, cos, sin, rotary_dim, seq_dim, eps, statistic), statistic, weight_offset,
        bool(round_before_weight), bool(interleaved), kv_heads, layout == "h3d",
    )  # fmt: skip
    arguments.check_types(packed.FAMILY, p)
    takes = qkv.dim() == 4 and has_kernel(qkv, cos) and has_rows(qkv)
    if takes and not calls.is_compiling():
        by_pytorch = qkv.dtype not in arguments.HALF and calls.differentiates(qkv)
        takes = not (by_pytorch or torch.onnx.is_in_onnx_export())
    if not takes:
        return *_run(packed.of_parts(p)), packed.part(p, 2)
    return packed.run(*p)


def _all_heads(qkv: Tensor, layout: Any, num_kv_heads: Any, head_dim: Any) -> tuple[Tensor, int]:
    """qkv as (batch, positions, heads of q, k and v, columns), or as it is if that is no view of
    it; and how many heads k has."""
    arguments.check_choice("layout", layout, ("3hd", "h3d"))
    kv = None if num_kv_heads is None else arguments.check_int("num_kv_heads", num_kv_heads)
    cols = None if head_dim is None else arguments.check_int("head_dim", head_dim)
    three = 2 if layout == "3hd" else 3
    if qkv.dim() == 5 and qkv.shape[three] == 3:
        heads, size = qkv.shape[5 - three], qkv.shape[4]
        for name, given, found in (("num_kv_heads", kv, heads), ("head_dim", cols, size)):
            if given is not None and given != found:
                shape = list(qkv.shape)
                raise ValueError(f"expected {name} {found} beside qkv of {shape}, got {given}")
        follow = qkv.stride(2) == qkv.shape[3] * qkv.stride(3)
        return (qkv.flatten(2, 3) if follow and not _is_wrapper(qkv) else qkv), heads
    if qkv.dim() != 3:
        sizes = "3, heads" if three == 2 else "heads, 3"
        expected = f"of shape (batch, positions, {sizes}, columns) or (batch, positions, columns)"
        raise arguments.shape_error("qkv", expected, qkv)
    width = qkv.shape[2]
    if cols is None or cols < 1 or width % cols != 0:
        raise ValueError(f"expected head_dim to divide {width}, the columns of qkv, got {head_dim}")
    heads = width // cols
    if kv is None and heads % 3 != 0:
        raise ValueError(f"expected num_kv_heads beside {heads} heads in all, got None")
    kv = heads // 3 if kv is None else kv
    if not 0 < 2 * kv < heads:
        raise ValueError(f"expected num_kv_heads above 0 and below half of {heads} heads, got {kv}")
    if three == 3 and heads % kv != 0:
        raise ValueError(f"expected num_kv_heads to divide {heads} heads in all, got {kv}")
    return qkv.unflatten(2, (heads, cols)), kv


def _run(a: HeadArguments) -> Any:
    """The results; without k, an empty tensor is the second."""
    arguments.check_types(FAMILY, a, "q_" if a.k is None else "")
    if a.q.dim() == 4 and (needs_grad(a.cos, a.sin) or not has_kernel(a.q, a.cos)):
        FAMILY.check(a)
        return FAMILY.without_statistics(FAMILY.formula(a))
    if calls.is_compiling() or needs_grad(*a[:6]) or in_forward_mode():
        return calls.call(FAMILY, a)
    with _below_autograd():  # autograd of this operator is in Python, and would do nothing
        return calls.call(FAMILY, a)


def _options(
    x: Tensor, cos: Any, sin: Any, rotary_dim: Any, seq_dim: Any, eps: Any, statistic: Any
) -> tuple[int, int, float]:
    """rotary_dim, seq_dim and eps as the operators take them."""
    rotates = cos is not None or sin is not None
    if rotary_dim is None:
        rotary_dim = x.shape[-1] if rotates and x.dim() > 0 else 0
    else:
        rotary_dim = arguments.check_int("rotary_dim", rotary_dim)
        if not rotates:
            raise ValueError(f"expected cos and sin beside rotary_dim {rotary_dim}, got neither")
    dim = arguments.check_int("seq_dim", seq_dim)
    if not -4 <= dim < 4:
        raise IndexError(f"expected seq_dim from -4 to 3, got {dim}")
    if dim % 4 not in (1, 2):
        raise ValueError(f"expected seq_dim 1 or 2 of four dimensions, got {seq_dim}")
    arguments.check_choice("statistic", statistic, arguments.OF_HEADS)
    if statistic == "layer" and eps is None:
        eps = 1e-5
    return rotary_dim, dim % 4, arguments.rms_eps(eps, x) if statistic is not None else 0.0

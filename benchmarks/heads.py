# SPDX-License-Identifier: Apache-2.0
"""The benchmark cases of heads: RMSNorm of q and k in a packed qkv tensor, and their rotation.

q and k are slices of (samples, positions, 3, heads, cols). The rotation is that of halves, as
transformers writes it: cos and sin have x's dtype and all columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import timing
from benchmarks.cases import EPS, Case
from benchmarks.timing import Call


def make_inputs(case: Case, count: int) -> list[dict[str, Any]]:
    """The fields of benchmarks.ours.Inputs. dy holds the gradients of q and of k."""
    options: dict[str, Any] = {"device": timing.DEVICE, "dtype": case.torch_dtype}
    samples, positions, _, heads, cols = case.shape
    shared = {"weight": torch.rand(cols, **options) + 0.5, "bias": None}
    if case.rotates:
        angle = torch.randn(positions, cols // 2, device=timing.DEVICE).repeat(1, 2)
        shared |= {"cos": angle.cos().to(case.torch_dtype), "sin": angle.sin().to(case.torch_dtype)}
    inputs = []
    for _ in range(count):
        one: dict[str, Any] = {"x": torch.randn(case.shape, **options), **shared}
        if case.backward:
            one["dy"] = torch.randn(2, samples, positions, heads, cols, **options)
            q, k, _v = one["x"].unbind(2)
            one["rstd"] = torch.stack([_rstd(x) for x in (q, k)])
        inputs.append(one)
    return inputs


def _rstd(x: torch.Tensor) -> torch.Tensor:
    return (x.float().square().mean(-1, keepdim=True) + EPS).rsqrt()


def ours(case: Case, t: Any) -> Call:
    ops = torch.ops.fused_layernorm
    q, k, _ = t.x.unbind(2)
    rotary = case.cols if case.rotates else 0
    tensors = (q, k, t.weight, t.weight, None, None, t.cos, t.sin)
    options: tuple[Any, ...] = (rotary, 1, EPS, "rms", 0.0)
    if not case.backward:
        return lambda: ops.qk_norm_rope.default(*tensors, *options, False, False, False)
    options += (False, False, True, False)
    backward = ops.qk_norm_rope_backward.default
    return lambda: backward(*t.dy.unbind(0), *tensors, *options)[:4]


def arguments(case: Case, t: Any) -> tuple[Any, ...]:
    """The arguments of `forward` and `backward`."""
    if case.backward:
        return (t.dy, t.x, t.rstd, t.weight, t.cos, t.sin)
    return (t.x, t.weight, t.cos, t.sin)


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def forward(case: Case) -> Callable[..., Any]:
    """As models write it."""

    def run(x: torch.Tensor, weight: torch.Tensor, cos: Any, sin: Any) -> Any:
        found = []
        for one in x.unbind(2)[:2]:
            y = F.rms_norm(one, (case.cols,), weight, EPS)
            if case.rotates:
                y = y * cos.unsqueeze(-2) + _rotate_half(y) * sin.unsqueeze(-2)
            found.append(y)
        return tuple(found)

    return run


def _rotate_back(dy: torch.Tensor, cos: Any, sin: Any, saved: bool) -> torch.Tensor:
    """The gradient in front of the rotation, by the operators that autograd runs for `forward`, or
    by fewer for a compiler, which fuses them."""
    turned, half = dy * sin.unsqueeze(-2), dy.shape[-1] // 2
    if not saved:
        back = torch.cat((turned[..., half:], -turned[..., :half]), dim=-1)
        return dy * cos.unsqueeze(-2) + back
    sizes, cols = list(dy.shape), dy.shape[-1]
    of_slice = torch.ops.aten.slice_backward.default
    second = of_slice(-turned[..., :half], sizes, -1, half, cols, 1)
    first = of_slice(turned[..., half:], sizes, -1, 0, half, 1)
    return dy * cos.unsqueeze(-2) + (second + first)


def backward(case: Case, saved: bool) -> Callable[..., Any]:
    """(dq, dk, dq_weight, dk_weight). On CUDA in eager mode, `saved`, by PyTorch's operator."""
    by_operator = saved and timing.DEVICE == "cuda"

    def run(dy: Any, x: Any, rstd: Any, weight: Any, cos: Any, sin: Any) -> Any:
        found = []
        for dz, one, its_rstd in zip(dy.unbind(0), x.unbind(2)[:2], rstd.unbind(0), strict=True):
            if case.rotates:
                dz = _rotate_back(dz, cos, sin, saved)
            if by_operator:
                found.append(
                    torch.ops.aten._fused_rms_norm_backward.default(
                        dz, one, [case.cols], its_rstd, weight, [True, True]
                    )
                )
                continue
            wide, xhat = dz.float(), one.float() * its_rstd
            g = wide * weight
            dx = its_rstd * (g - xhat * (g * xhat).mean(-1, keepdim=True))
            dweight = (wide * xhat).sum((0, 1, 2))
            found.append((dx.to(one.dtype), dweight.to(weight.dtype)))
        return tuple(gradient for both in zip(*found, strict=True) for gradient in both)

    return run

# SPDX-License-Identifier: Apache-2.0
"""Attention with normalized and rotated q and k, written out and with qk_norm_rope.

    python examples/attention.py

q and k are slices of one packed tensor, as a single product gives them. qk_norm_rope reads them
where they lie, normalizes and rotates each head in one kernel, and attention reads the results
without a copy. Output and gradients of both ways are compared.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from _common import device, device_name, milliseconds, say
from torch import Tensor, nn

from fused_layernorm import qk_norm_rope


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


class Attention(nn.Module):
    """Causal attention; `fused` says how q and k are normalized and rotated."""

    def __init__(self, width: int, head: int, fused: bool) -> None:
        super().__init__()
        self.shape = (3, width // head, head)
        self.fused = fused
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.q_norm = nn.RMSNorm(head, eps=1e-6)
        self.k_norm = nn.RMSNorm(head, eps=1e-6)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, self.shape).unbind(2)
        if self.fused:
            weights = self.q_norm.weight, self.k_norm.weight
            q, k = qk_norm_rope(q, k, *weights, cos, sin, eps=1e-6)
        else:
            q, k = self.q_norm(q), self.k_norm(k)
            angles = [angle.to(q.dtype).repeat(1, 2).unsqueeze(1) for angle in (cos, sin)]
            q, k = (y * angles[0] + rotate_half(y) * angles[1] for y in (q, k))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def step(model: Attention, x: Tensor, cos: Tensor, sin: Tensor, dy: Tensor) -> list[Tensor]:
    """The output and the gradients of all parameters."""
    model.zero_grad()
    y = model(x, cos, sin)
    y.backward(dy)
    return [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def main() -> None:
    where = device()
    on_gpu = where.type == "cuda"
    say(f"Attention with q/k norm and rotation, on {device_name(where)}")
    batch, positions, width, head = (4, 4096, 2048, 128) if on_gpu else (2, 64, 128, 32)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    torch.manual_seed(0)
    models = [Attention(width, head, fused).to(where, dtype) for fused in (False, True)]
    models[1].load_state_dict(models[0].state_dict())
    x, dy = torch.randn(2, batch, positions, width, device=where, dtype=dtype)
    frequencies = 10_000 ** (-torch.arange(0, head, 2, device=where) / head)
    angle = torch.outer(torch.arange(positions, device=where), frequencies)
    arguments = (x, angle.cos(), angle.sin(), dy)

    found = [step(model, *arguments) for model in models]
    differences = [((a - b).norm() / a.norm()).item() for a, b in zip(*found, strict=True)]
    if max(differences) > (0.05 if on_gpu else 1e-4):
        raise SystemExit(f"the fused attention differs: {differences}")
    say(f"  largest relative difference, of output and gradients: {max(differences):.1e}")
    calls = [functools.partial(step, model, *arguments) for model in models]
    before, after = (milliseconds(call, where, repeats=10) for call in calls)
    say(f"  forward and backward {before:.2f} ms written out, {after:.2f} ms fused")


if __name__ == "__main__":
    main()

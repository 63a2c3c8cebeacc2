# SPDX-License-Identifier: Apache-2.0
"""A pre-norm transformer with its residual additions fused into the LayerNorms.

    python examples/transformer_block.py

The stock block reads and writes the residual stream twice around each LayerNorm:

    x = x + attention(norm1(x))
    x = x + mlp(norm2(x))

The rewritten block does not add its last result, but returns it. The next FusedAddLayerNorm then
adds and normalizes in one kernel:

    y, residual = norm1(hidden, residual)      # residual += hidden; y = layer_norm(residual)
    hidden = attention(y)
    y, residual = norm2(hidden, residual)
    hidden = mlp(y)

The parameters and their names stay, so checkpoints load either way. The example compares outputs
and all gradients of the two, and on a GPU their times.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from _common import device, device_name, largest_error, milliseconds, say
from torch import nn

from fused_layernorm import FusedAddLayerNorm, layer_norm


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


def mlp(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Block(nn.Module):
    """The stock block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = mlp(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Blocks and the norm at the end, stock."""

    def __init__(self, depth: int, width: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class FusedBlock(nn.Module):
    """The block rewritten: from (hidden, residual) to (hidden, residual)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = FusedAddLayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = FusedAddLayerNorm(width)
        self.mlp = mlp(width)

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:  # the first block: nothing to add yet
            norm = self.norm1
            y, residual = layer_norm(hidden, norm.weight, norm.bias, norm.eps), hidden
        else:
            y, residual = self.norm1(hidden, residual)
        y, residual = self.norm2(self.attention(y), residual)
        return self.mlp(y), residual


class FusedTransformer(nn.Module):
    """Blocks and the norm at the end, rewritten; the state_dict is the stock one's."""

    def __init__(self, depth: int, width: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FusedBlock(width, heads) for _ in range(depth))
        self.norm = FusedAddLayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, residual = x, None
        for block in self.blocks:
            hidden, residual = block(hidden, residual)
        y, _ = self.norm(hidden, residual)
        return y


def gradients(model: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output and the gradients of the input and of every parameter, by name."""
    x = x.detach().requires_grad_()
    y = model(x)
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(y, (x, *parameters), dy)
    return {"output": y.detach(), **dict(zip(("input", *names), found, strict=True))}


def main() -> None:
    where = device()
    large = where.type == "cuda"
    depth, width, heads = (12, 1024, 16) if large else (2, 64, 4)
    batch, length = (8, 1024) if large else (2, 16)
    torch.manual_seed(0)
    say(f"a pre-norm transformer of {depth} blocks, width {width}, on {device_name(where)}")
    stock = Transformer(depth, width, heads).to(where)
    fused = FusedTransformer(depth, width, heads).to(where)
    fused.load_state_dict(stock.state_dict())
    x = torch.randn(batch, length, width, device=where)
    dy = torch.randn_like(x)

    error = largest_error(gradients(stock, x, dy), gradients(fused, x, dy))
    say(f"largest relative difference of the output and of all gradients, float32: {error:.1e}")
    if not error < 1e-4:
        raise SystemExit("the rewritten transformer differs from the stock one")
    if large:
        x, dy = x.bfloat16(), dy.bfloat16()
        stock.bfloat16()
        fused.bfloat16()
        before = milliseconds(lambda: gradients(stock, x, dy), where)
        after = milliseconds(lambda: gradients(fused, x, dy), where)
        say(f"forward and backward in bfloat16: stock {before:.2f} ms, fused {after:.2f} ms")


if __name__ == "__main__":
    main()

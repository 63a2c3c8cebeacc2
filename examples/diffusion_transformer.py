# SPDX-License-Identifier: Apache-2.0
"""A diffusion transformer (DiT) with modulations and gates fused into its LayerNorms.

    python examples/diffusion_transformer.py

A plain block writes out what surrounds each norm, in kernels that each read and write the whole
stream of tokens:

    x = x + gate1 * attention(norm(x) * (1 + scale1) + shift1)
    x = x + gate2 * mlp(norm(x) * (1 + scale2) + shift2)

The rewritten block does not add its last result, but returns it with its gate. The next norm then
gates, adds, normalizes and modulates in one kernel:

    y, residual = add_ada_layer_norm(hidden, residual, gate, shift1, scale1)
    y, residual = add_ada_layer_norm(attention(y), residual, gate1, shift2, scale2)
    hidden, gate = mlp(y), gate2

shift, scale and gate are chunks of one linear layer's output, which the kernels read in place. The
parameters and their names stay, so checkpoints load either way. The example compares outputs and
all gradients of the two, and on a GPU the device's time for an inference and for a training step.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from _common import device, device_name, graphed, largest_error, milliseconds, say
from torch import Tensor, nn

from fused_layernorm import ada_layer_norm, add_ada_layer_norm

EPS = 1e-6


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Parts(nn.Module):
    """What a block consists of, plain and rewritten. The norms have no parameters."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def modulations(self, condition: Tensor) -> tuple[Tensor, ...]:
        """shift, scale and gate of the attention, then of the MLP: each (batch, 1, width)."""
        return self.modulation(condition)[:, None].chunk(6, dim=-1)


class Block(Parts):
    """The plain block."""

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulations(condition)
        x = x + gate1 * self.attention(normalize(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(normalize(x) * (1 + scale2) + shift2)


def normalize(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=EPS)


class FusedBlock(Parts):
    """The block rewritten: from (hidden, residual, gate) to (hidden, residual, gate)."""

    def forward(self, hidden: Tensor, residual: Tensor | None, gate: Tensor | None,
                condition: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulations(condition)
        if residual is None:  # the first block: nothing to add yet
            y, residual = ada_layer_norm(hidden, shift1, scale1, eps=EPS), hidden
        else:
            y, residual = add_ada_layer_norm(hidden, residual, gate, shift1, scale1, eps=EPS)
        hidden = self.attention(y)
        y, residual = add_ada_layer_norm(hidden, residual, gate1, shift2, scale2, eps=EPS)
        return self.mlp(y), residual, gate2


class Transformer(nn.Module):
    """Blocks, and the modulated norm and the linear layer at the end."""

    block: type[nn.Module] = Block

    def __init__(self, depth: int, width: int, heads: int, channels: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block(width, heads) for _ in range(depth))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.out = nn.Linear(width, channels)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.modulation(condition)[:, None].chunk(2, dim=-1)
        return self.out(normalize(x) * (1 + scale) + shift)


class FusedTransformer(Transformer):
    """The same, rewritten; the state_dict is the plain one's."""

    block = FusedBlock

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        first, *others = self.blocks
        hidden, residual, gate = first(x, None, None, condition)
        for block in others:
            hidden, residual, gate = block(hidden, residual, gate, condition)
        shift, scale = self.modulation(condition)[:, None].chunk(2, dim=-1)
        y, _ = add_ada_layer_norm(hidden, residual, gate, shift, scale, eps=EPS)
        return self.out(y)


def gradients(model: nn.Module, inputs: tuple[Tensor, ...], dy: Tensor) -> dict[str, Tensor]:
    """The output and the gradients of the inputs and of every parameter, by name."""
    x, condition = (tensor.detach().requires_grad_() for tensor in inputs)
    y = model(x, condition)
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(y, (x, condition, *parameters), dy)
    return {"output": y.detach(), **dict(zip(("x", "condition", *names), found, strict=True))}


@torch.no_grad()
def inference(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    return model(*inputs)


def main() -> None:
    where = device()
    large = where.type == "cuda"
    # On a GPU: 8 of the 28 blocks of DiT-XL/2, on images of 256 x 256.
    depth, width, heads = (8, 1152, 16) if large else (2, 64, 4)
    batch, length, channels = (32, 256, 32) if large else (2, 16, 8)
    torch.manual_seed(0)
    say(f"a diffusion transformer of {depth} blocks, width {width}, on {device_name(where)}")
    plain = Transformer(depth, width, heads, channels).to(where)
    fused = FusedTransformer(depth, width, heads, channels).to(where)
    fused.load_state_dict(plain.state_dict())
    with where:
        inputs = torch.randn(batch, length, width), torch.randn(batch, width)
        dy = torch.randn(batch, length, channels)

    error = largest_error(gradients(plain, inputs, dy), gradients(fused, inputs, dy))
    say(f"largest relative difference of the output and of all gradients, float32: {error:.1e}")
    if not error < 1e-4:
        raise SystemExit("the rewritten transformer differs from the plain one")
    if large:
        x, condition = (tensor.bfloat16() for tensor in inputs)
        dy = dy.bfloat16()
        plain.bfloat16()
        fused.bfloat16()
        for name, step in (
            ("inference", lambda model: inference(model, (x, condition))),
            ("training step", lambda model: gradients(model, (x, condition), dy)),
        ):
            before, after = (milliseconds(graphed(partial(step, model), where), where)
                             for model in (plain, fused))  # fmt: skip
            say(f"{name} in bfloat16, device time: plain {before:.2f} ms, fused {after:.2f} ms "
                f"({before / after:.2f}x)")  # fmt: skip


if __name__ == "__main__":
    main()

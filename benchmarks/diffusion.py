# SPDX-License-Identifier: Apache-2.0
"""Diffusion transformers for benchmarks.models: diffusers' models, and the blocks of DiT alone.

diffusers' models have their real sizes, but only a few layers each, and random weights. The blocks
of DiT are written twice: with PyTorch's operators and with this package's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import timing

# The size at which the blocks are measured, and their name in the results file.
BLOCK_LAYERS, BLOCK_SIZE = 4, (64, 256, 1152)
BLOCKS = f"DiT-XL/2 blocks, {BLOCK_LAYERS} layers"

Built = tuple[Any, dict[str, torch.Tensor], Callable[[Any], torch.Tensor]]


def squared_error(*shape: int) -> Callable[[Any], torch.Tensor]:
    """The mean squared error of the model's first output against noise, as a training loss."""
    noise = torch.randn(shape)

    def loss(output: Any) -> torch.Tensor:
        sample = output if isinstance(output, torch.Tensor) else output[0]
        return F.mse_loss(sample.float(), noise.to(sample.device))

    return loss


def dit(layers: int = 8, heads: int = 16, batch: int = 32, side: int = 32) -> Built:
    """DiT-XL/2: side x side latents of 4 channels, so (side / 2)^2 tokens."""
    from diffusers import DiTTransformer2DModel

    with torch.device(timing.DEVICE):
        model: Any = DiTTransformer2DModel(num_layers=layers, num_attention_heads=heads,
                                      out_channels=8, sample_size=side)  # fmt: skip
        for module in model.modules():  # otherwise training drops labels at random
            if hasattr(module, "dropout_prob"):
                module.dropout_prob = 0.0
        inputs = {
            "hidden_states": torch.randn(batch, 4, side, side),
            "timestep": torch.randint(1000, (batch,)),
            "class_labels": torch.randint(1000, (batch,)),
        }
        return model, inputs, squared_error(batch, 8, side, side)


def sd3(
    layers: int = 6, heads: int = 38, batch: int = 2, side: int = 128, words: int = 333,
    text: int = 4096,
) -> Built:  # fmt: skip
    """Stable Diffusion 3.5 large: (side / 2)^2 tokens of the image beside those of the text."""
    from diffusers import SD3Transformer2DModel

    with torch.device(timing.DEVICE):
        model = SD3Transformer2DModel(
            sample_size=side, num_layers=layers, num_attention_heads=heads,
            caption_projection_dim=64 * heads, joint_attention_dim=text,
            pos_embed_max_size=max(192, side), qk_norm="rms_norm",
        )  # fmt: skip
        inputs = {
            "hidden_states": torch.randn(batch, 16, side, side),
            "encoder_hidden_states": torch.randn(batch, words, text),
            "pooled_projections": torch.randn(batch, 2048),
            "timestep": torch.randint(1000, (batch,)),
        }
        return model, inputs, squared_error(batch, 16, side, side)


def flux(
    layers: int = 2, single_layers: int = 4, heads: int = 24, side: int = 64, words: int = 512,
    text: int = 4096,
) -> Built:  # fmt: skip
    """Flux: side^2 tokens of the image beside those of the text, one sample."""
    from diffusers import FluxTransformer2DModel

    with torch.device(timing.DEVICE):
        model = FluxTransformer2DModel(
            num_layers=layers, num_single_layers=single_layers, num_attention_heads=heads,
            joint_attention_dim=text, guidance_embeds=True,
        )  # fmt: skip
        places = torch.arange(side, dtype=torch.float32)
        grid = torch.cartesian_prod(places, places)
        inputs = {
            "hidden_states": torch.randn(1, side * side, 64),
            "encoder_hidden_states": torch.randn(1, words, text),
            "pooled_projections": torch.randn(1, 768),
            "timestep": torch.rand(1),
            "guidance": torch.full((1,), 3.5),
            "img_ids": F.pad(grid, (1, 0)),
            "txt_ids": torch.zeros(words, 3),
        }
        return model, inputs, squared_error(1, side * side, 64)


def wan(
    layers: int = 4, heads: int = 12, hidden: int = 8960, frames: int = 21, height: int = 60,
    width: int = 104, words: int = 512, text: int = 4096,
) -> Built:  # fmt: skip
    """Wan 2.1 1.3B: frames x height / 2 x width / 2 tokens (5 seconds of 480p), one sample."""
    from diffusers import WanTransformer3DModel

    with torch.device(timing.DEVICE):
        model = WanTransformer3DModel(num_layers=layers, num_attention_heads=heads,
                                      ffn_dim=hidden, text_dim=text)  # fmt: skip
        inputs = {
            "hidden_states": torch.randn(1, 16, frames, height, width),
            "timestep": torch.randint(1000, (1,)),
            "encoder_hidden_states": torch.randn(1, words, text),
        }
        return model, inputs, squared_error(1, 16, frames, height, width)


class Block(nn.Module):
    """A block of DiT without its two modulated norms and gates, which `Blocks` computes."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.modulation = nn.Linear(dim, 6 * dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.projection = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), nn.Linear(4 * dim, dim)
        )

    def modulations(self, condition: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """shift, scale and gate of attention, then those of the MLP."""
        return self.modulation(F.silu(condition)).unsqueeze(1).chunk(6, dim=-1)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        heads = F.scaled_dot_product_attention(q, k, v)
        return self.projection(heads.transpose(1, 2).flatten(2))


class Blocks(nn.Module):
    """Blocks of DiT, computed by PyTorch's operators or, if `operators` is set, by this package's.

    One operator of this package computes the gated sum behind a block's MLP together with the next
    block's first norm.
    """

    def __init__(self, layers: int, dim: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.operators = False

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        return self.fused(x, condition) if self.operators else self.plain(x, condition)

    def plain(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        def norm(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift

        for block in self.blocks:
            assert isinstance(block, Block)
            shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = block.modulations(condition)
            x = x + gate_a * block.attention(norm(x, shift_a, scale_a))
            x = x + gate_m * block.mlp(norm(x, shift_m, scale_m))
        return x

    def fused(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        from fused_layernorm import ada_layer_norm, add_ada_layer_norm

        branch = gate = None
        for block in self.blocks:
            assert isinstance(block, Block)
            shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = block.modulations(condition)
            if branch is None:
                y = ada_layer_norm(x, shift_a, scale_a, eps=1e-6)
            else:
                y, x = add_ada_layer_norm(branch, x, gate, shift_a, scale_a, eps=1e-6)
            y, x = add_ada_layer_norm(block.attention(y), x, gate_a, shift_m, scale_m, eps=1e-6)
            branch, gate = block.mlp(y), gate_m
        return x if branch is None else x + gate * branch


def blocks(
    layers: int = BLOCK_LAYERS, size: tuple[int, int, int] = BLOCK_SIZE, heads: int = 16
) -> Built:
    """Blocks of DiT-XL/2 on samples x tokens x columns."""
    batch, tokens, dim = size
    with torch.device(timing.DEVICE):
        inputs = {"x": torch.randn(batch, tokens, dim), "condition": torch.randn(batch, dim)}
        return Blocks(layers, dim, heads), inputs, squared_error(batch, tokens, dim)

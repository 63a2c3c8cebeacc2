# SPDX-License-Identifier: Apache-2.0
"""Two KernelBench problems, original against fused: are the outputs the same, and how much faster?

    python examples/kernelbench.py

1. LayerNorm over the last three dimensions of a (16, 64, 256, 256) float32 tensor: 16 rows of
   4,194,304 elements.
2. A transposed convolution followed by LayerNorm, GELU and a scale on a (32, 32, 16, 32, 32)
   float32 tensor: 4,194,304 rows of 64 elements. The convolution stays PyTorch's. First only the
   LayerNorm is swapped, then LayerNorm, GELU and scale become one module.

The original and the new module get the same parameters and the same input; the outputs must pass
torch.allclose(atol=1e-5). Times are taken with events on a GPU. Without a GPU it runs a small
version, for the outputs only.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from _common import device, device_name, milliseconds, say
from torch import nn

from fused_layernorm import FusedLayerNorm, swap_layer_norm

TOLERANCE = 1e-5


class LayerNormModel(nn.Module):
    """Problem 1."""

    def __init__(self, normalized_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(normalized_shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer_norm(x)


class ConvTransposeModel(nn.Module):
    """Problem 2."""

    def __init__(self, in_channels: int = 32, out_channels: int = 64, scale: float = 2.0) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose3d(in_channels, out_channels, 4, stride=2, padding=1)
        self.layer_norm = nn.LayerNorm(out_channels, eps=1e-5)
        self.scale = scale

    def tail(self, x: torch.Tensor) -> torch.Tensor:
        """What follows the convolution."""
        return F.gelu(self.layer_norm(x)) * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tail(self.conv(x))


class FusedConvTransposeModel(ConvTransposeModel):
    """Problem 2 with LayerNorm, GELU and scale in one kernel; the state_dict is the same."""

    def __init__(self, in_channels: int = 32, out_channels: int = 64, scale: float = 2.0) -> None:
        super().__init__(in_channels, out_channels, scale)
        self.layer_norm = FusedLayerNorm(out_channels, eps=1e-5, activation="gelu", scale=scale)

    def tail(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer_norm(x)


def randomize(module: nn.Module) -> None:
    """Gives the LayerNorms random weights and biases; ones and zeros would hide mistakes."""
    for layer in module.modules():
        if isinstance(layer, nn.LayerNorm):
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.normal_(layer.bias)


def compare(what: str, original: torch.Tensor, new: torch.Tensor) -> bool:
    same = torch.allclose(original, new, atol=TOLERANCE)
    largest = float((original - new).abs().max())
    say(f"  {what}: allclose(atol={TOLERANCE:g}) {same}, largest difference {largest:.1e}")
    return same


@torch.no_grad()
def layer_norm_problem(where: torch.device) -> bool:
    shape = (16, 64, 256, 256) if where.type == "cuda" else (2, 64, 32, 32)
    say(f"problem 1: LayerNorm({shape[1:]}) on {shape}")
    original = LayerNormModel(shape[1:]).to(where)
    randomize(original)
    new = swap_layer_norm(copy.deepcopy(original))
    x = torch.randn(shape, device=where)
    same = compare("swapped", original(x), new(x))
    if where.type == "cuda":
        before = milliseconds(lambda: original(x), where, 50)
        after = milliseconds(lambda: new(x), where, 50)
        say(f"  original {before:.3f} ms, new {after:.3f} ms: {before / after:.1f} times faster")
    return same


@torch.no_grad()
def conv_transpose_problem(where: torch.device) -> bool:
    shape = (32, 32, 16, 32, 32) if where.type == "cuda" else (1, 32, 2, 4, 32)
    say(f"problem 2: ConvTranspose3d -> LayerNorm(64) -> GELU -> scale on {shape}")
    original = ConvTransposeModel().to(where)
    randomize(original)
    swapped = swap_layer_norm(copy.deepcopy(original))
    fused = FusedConvTransposeModel().to(where)
    fused.load_state_dict(original.state_dict())

    x = torch.randn(shape, device=where)
    expected = original(x)
    same = compare("LayerNorm swapped", expected, swapped(x))
    same &= compare("LayerNorm + GELU + scale fused", expected, fused(x))
    if where.type == "cuda":
        after_conv = original.conv(x)
        for what, part in (
            ("the whole chain", lambda model: lambda: model(x)),
            ("what follows the convolution", lambda model: lambda: model.tail(after_conv)),
        ):
            before, one, two = (
                milliseconds(part(model), where, 30) for model in (original, swapped, fused)
            )
            say(f"  {what}: original {before:.3f} ms, swapped {one:.3f} ms "
                f"({before / one:.1f} times faster), fused {two:.3f} ms "
                f"({before / two:.1f} times faster)")  # fmt: skip
    return same


def main() -> None:
    where = device()
    say(f"KernelBench problems on {device_name(where)}")
    if where.type == "cpu":
        say("(no GPU here: small versions of both, for the outputs; the times need a GPU)")
    torch.manual_seed(0)
    same = layer_norm_problem(where)
    same &= conv_transpose_problem(where)
    if not same:
        raise SystemExit("an output differs from the original's")


if __name__ == "__main__":
    main()

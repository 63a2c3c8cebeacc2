# SPDX-License-Identifier: Apache-2.0
"""Blocks of NAFNet (Chen et al., 2022) for benchmarks.models, with norms over the channels of NCHW
that are written out, as transformers' VitDet has them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks import timing
from benchmarks.diffusion import Built, squared_error


class NafBlock(nn.Module):
    """A block of NAFNet: two gated halves, each behind a norm over channels."""

    def __init__(self, width: int) -> None:
        from transformers.models.vitdet.modeling_vitdet import VitDetLayerNorm

        super().__init__()
        wide = 2 * width
        self.norm1, self.norm2 = VitDetLayerNorm(width), VitDetLayerNorm(width)
        self.expand1, self.expand2 = (nn.Conv2d(width, wide, 1) for _ in range(2))
        self.depthwise = nn.Conv2d(wide, wide, 3, padding=1, groups=wide)
        self.attention = nn.Conv2d(width, width, 1)
        self.reduce1, self.reduce2 = (nn.Conv2d(width, width, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.depthwise(self.expand1(self.norm1(x))).chunk(2, dim=1)
        gated = first * second
        x = x + self.reduce1(gated * self.attention(gated.mean((2, 3), keepdim=True)))
        first, second = self.expand2(self.norm2(x)).chunk(2, dim=1)
        return x + self.reduce2(first * second)


class NafBlocks(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:  # by name, as the models are called
        return super().forward(x)


def nafnet(layers: int = 4, size: tuple[int, int, int, int] = (8, 64, 256, 256)) -> Built:
    with torch.device(timing.DEVICE):
        model = NafBlocks(*(NafBlock(size[1]) for _ in range(layers)))
        return model, {"x": torch.randn(size)}, squared_error(*size)

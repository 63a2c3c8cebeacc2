# SPDX-License-Identifier: Apache-2.0
"""Models of images for benchmarks.models, with norms over the channels of NCHW.

Blocks of NAFNet (Chen et al., 2022), with the norms of transformers' VitDet; what follows the image
encoder of SAM; torchvision's ConvNeXt-T.
"""

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


class SamHead(nn.Module):
    """The neck of SAM's image encoder and its mask decoder, in the sizes of ViT-B."""

    def __init__(self) -> None:
        from transformers import SamMaskDecoderConfig, SamVisionConfig
        from transformers.models.sam.modeling_sam import SamMaskDecoder, SamVisionNeck

        super().__init__()
        self.neck = SamVisionNeck(SamVisionConfig())
        self.decoder = SamMaskDecoder(SamMaskDecoderConfig())

    def forward(self, hidden: Tensor, positions: Tensor, points: Tensor, dense: Tensor) -> Tensor:
        embeddings = self.neck(hidden)
        masks: Tensor = self.decoder(embeddings, positions, points, dense, True)[0]
        return masks


def sam(batch: int = 8, side: int = 64) -> Built:
    with torch.device(timing.DEVICE):
        image = (batch, 256, side, side)
        inputs = {
            "hidden": torch.randn(batch, side, side, 768),
            "positions": torch.randn(image),
            "points": torch.randn(batch, 1, 2, 256),
            "dense": torch.randn(image),
        }
        return SamHead(), inputs, squared_error(batch, 1, 3, 4 * side, 4 * side)


def torchvision_convnext(batch: int = 64) -> Built:
    from torchvision.models import convnext_tiny

    with torch.device(timing.DEVICE):
        model = convnext_tiny(stochastic_depth_prob=0.0)  # losses can be compared
        return model, {"x": torch.randn(batch, 3, 224, 224)}, squared_error(batch, 1000)

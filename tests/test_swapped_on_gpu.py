# SPDX-License-Identifier: Apache-2.0
"""What only a GPU shows of swapped models: weights that come by another stream (diffusers' group
offloading), a residual added in place under autocast.
"""

import contextlib
import copy

import libraries
import pytest
import torch
from swaps import fused
from torch import nn

import fused_layernorm as fl

pytestmark = pytest.mark.gpu

TRANSFORMER = {
    "patch_size": 2, "in_channels": 4, "num_layers": 2, "attention_head_dim": 8,
    "num_attention_heads": 4, "joint_attention_dim": 16, "caption_projection_dim": 32,
    "pooled_projection_dim": 16, "out_channels": 4, "sample_size": 8,
}  # fmt: skip
UNET = {
    "sample_size": 8, "block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "attention_head_dim": 8,
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}  # fmt: skip


def of_diffusers(name):
    """A model and its inputs, in float64, for convolutions in float32 are TF32's."""
    diffusers = libraries.get("diffusers")
    torch.manual_seed(0)
    shapes: list[tuple[int, ...]]
    if name == "unet":
        model, shapes = diffusers.UNet2DModel(**UNET), [(2, 3, 8, 8)]
    else:
        shapes = [(2, 4, 8, 8), (2, 5, 16), (2, 16)]
        model = diffusers.SD3Transformer2DModel(**TRANSFORMER)
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    return model.double(), [*inputs, torch.tensor([3.0, 5.0])]


def on_gpu(inputs):
    return [x.cuda() for x in inputs]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("kind", ["leaf_level", "block_level"])
@pytest.mark.parametrize("name", ["unet", "transformer"])
def test_group_offloading(name, kind, streams):
    """Before and after a swap; the weights come to the GPU as each module runs, and leave it."""
    model, inputs = of_diffusers(name)
    inputs = on_gpu(inputs)
    with torch.no_grad():
        expected = copy.deepcopy(model).cuda()(*inputs).sample
    options = {"onload_device": torch.device("cuda"), "offload_type": kind, "use_stream": streams}
    if kind == "block_level":
        options["num_blocks_per_group"] = 1
    for swap_first in (True, False):
        new = copy.deepcopy(model)
        if swap_first:
            fl.swap_norms(new, neighbours=True)
        new.enable_group_offload(**options)
        if not swap_first:
            fl.swap_norms(new, neighbours=True)
        assert fused(new) or not swap_first
        with torch.no_grad():
            for _ in range(3):  # the order of the modules is learnt in the first call
                found = new(*inputs).sample
                torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


class Residual(nn.Module):
    def __init__(self, in_place):
        super().__init__()
        self.norm, self.linear, self.in_place = nn.LayerNorm(64), nn.Linear(64, 64), in_place

    def forward(self, x):
        x = x * 1.0
        if self.in_place:
            x += self.linear(self.norm(x))
            return x
        return x + self.linear(self.norm(x))


@pytest.mark.parametrize("how", ["swap", "override"])
def test_a_residual_added_in_place_under_autocast(how):
    """docs/swap.md: PyTorch keeps a float32 copy of x, a fused norm x itself, and autograd sees it.

    What it says to write instead has the stock result.
    """
    torch.manual_seed(0)
    x = torch.randn(8, 64, device="cuda", dtype=torch.bfloat16)

    def step(module):
        with torch.autocast("cuda", torch.bfloat16):
            y = module(x)
        y.float().square().sum().backward()
        return [y, *(p.grad for p in module.parameters())]

    stock, new = Residual(in_place=True).cuda(), Residual(in_place=True).cuda()
    new.load_state_dict(stock.state_dict())
    expected = step(stock)
    with fl.override_aten() if how == "override" else contextlib.nullcontext():
        if how == "swap":
            fl.swap_norms(new)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            step(new)
        new.zero_grad()
        new.in_place = False
        found = step(new)
    for one, other in zip(found, expected, strict=True):
        size = other.abs().max()
        torch.testing.assert_close(one / size, other / size, rtol=2e-2, atol=2e-2)

# SPDX-License-Identifier: Apache-2.0
"""What only a GPU shows of swapped models: weights that come by another stream (diffusers' group
offloading), a residual added in place under autocast.
"""

import contextlib
import copy

import pytest
import torch
from swaps import fused
from tiny_diffusers import sd3, unet
from torch import nn

import fused_layernorm as fl

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("kind", ["leaf_level", "block_level"])
@pytest.mark.parametrize("make", [unet, sd3])
def test_group_offloading(make, kind, streams):
    """Before and after a swap; the weights come to the GPU as each module runs, and leave it."""
    model, inputs = make()
    model = model.double()  # convolutions in float32 are TF32's
    inputs = {
        name: (x.double() if x.is_floating_point() else x).cuda() for name, x in inputs.items()
    }
    with torch.no_grad():
        expected = copy.deepcopy(model).cuda()(**inputs).sample
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
                found = new(**inputs).sample
                torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def step(x, linear, norm, in_place):
    """The result and the gradients of a residual around a norm, under autocast."""
    with torch.autocast("cuda", torch.bfloat16):
        y = x * 1.0
        if in_place:
            y += linear(norm(y))
        else:
            y = y + linear(norm(y))
    y.float().square().sum().backward()
    return [y, linear.weight.grad, norm.weight.grad, norm.bias.grad]


@pytest.mark.parametrize("how", ["swap", "override"])
def test_a_residual_added_in_place_under_autocast(how):
    """docs/swap.md: PyTorch keeps a float32 copy of x, a fused norm x itself, and autograd sees it.

    What it says to write instead has the stock result.
    """
    x = torch.randn(8, 64, device="cuda", dtype=torch.bfloat16)
    stock = nn.Linear(64, 64).cuda(), nn.LayerNorm(64).cuda()
    linear, norm = copy.deepcopy(stock)
    expected = step(x, *stock, in_place=True)
    with fl.override_aten() if how == "override" else contextlib.nullcontext():
        if how == "swap":
            fl.swap_norms(norm)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            step(x, linear, norm, in_place=True)
        linear.zero_grad()
        norm.zero_grad()
        found = step(x, linear, norm, in_place=False)
    for one, other in zip(found, expected, strict=True):
        size = other.abs().max()
        torch.testing.assert_close(one / size, other / size, rtol=2e-2, atol=2e-2)

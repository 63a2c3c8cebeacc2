# SPDX-License-Identifier: Apache-2.0
"""timm: FusedLayerNorm as the norm of its models, by `norm_layer=` and swapped for timm's own."""

from functools import partial

import libraries
import pytest
import torch
from torch import nn
from torch.testing import assert_close

import fused_layernorm

timm = libraries.get("timm")

# Small models of timm's own classes: (model, arguments).
MODELS: dict[str, tuple[str, dict]] = {
    "vit": (
        "vit_tiny_patch16_224",
        {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3},
    ),
    "swin": (
        "swin_tiny_patch4_window7_224",
        {"img_size": 32, "embed_dim": 24, "depths": (1, 1), "num_heads": (2, 4), "window_size": 4},
    ),
}


def make(name, **options):
    model, arguments = MODELS[name]
    return timm.create_model(
        model, pretrained=False, num_classes=7, drop_path_rate=0.0, **arguments, **options
    )


def step(model, x, target):
    """(the loss, the gradients by parameter name)."""
    loss = nn.functional.cross_entropy(model(x), target)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def norms_of(model):
    return [module for module in model.modules() if isinstance(module, nn.LayerNorm)]


@pytest.mark.parametrize("name", MODELS)
def test_norm_layer(device, name):
    stock = make(name, norm_layer=nn.LayerNorm)
    fused = make(name, norm_layer=fused_layernorm.FusedLayerNorm)
    assert norms_of(fused)
    assert {type(norm) for norm in norms_of(fused)} == {fused_layernorm.FusedLayerNorm}
    assert len(norms_of(fused)) == len(norms_of(stock))
    fused.load_state_dict(stock.state_dict())

    x = torch.randn(2, 3, 32, 32, device=device)
    target = torch.tensor([1, 5], device=device)
    stock_loss, stock_grads = step(stock.to(device), x, target)
    loss, grads = step(fused.to(device), x, target)
    assert_close(loss, stock_loss, rtol=1e-4, atol=1e-5)
    assert set(grads) == set(stock_grads)
    for key, grad in grads.items():
        assert_close(grad, stock_grads[key], rtol=1e-3, atol=1e-4)


def test_norm_layer_with_an_eps():
    model = make("vit", norm_layer=partial(fused_layernorm.FusedLayerNorm, eps=1e-6))
    assert {norm.eps for norm in norms_of(model)} == {1e-6}

# SPDX-License-Identifier: Apache-2.0
"""Models of transformers, timm and torchvision, tiny and with random weights (those of diffusers
are in test_diffusers.py).

They run swapped and overridden without other changes: `swap_layer_norm` changes only the class of
their norms, and `override_aten` nothing. Without a GPU the override is tested on the CPU's dispatch
key.
"""

import copy
from functools import partial

import libraries
import pytest
import torch
from tiny_transformers import bert, gpt2, vit
from torch import nn

import fused_layernorm
from fused_layernorm import FusedLayerNorm, is_fused
from fused_layernorm.ops import autograd_library
from fused_layernorm.override import _calls, _override

HAS_KERNELS = (
    torch.ops.fused_layernorm._build_info() != "cpu only" and torch.backends.cuda.is_built()
)
STEPS = 3


# ---- The models: each function returns (a module whose output has a loss, its inputs).


class Loss(nn.Module):
    """Makes any model return its loss as those of transformers do."""

    def __init__(self, model, loss):
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, **inputs):
        return type("Output", (), {"loss": self.loss(self.model(**inputs))})


def classifier(model, size):
    labels = torch.tensor([0, 3])

    def loss(scores):
        return nn.functional.cross_entropy(scores, labels.to(scores.device))

    return Loss(model, loss), {"x": torch.randn(2, 3, size, size)}


# By id: timm's name of a model, the size of its images, options. Blocks of convnext_tiny normalize
# the last dimension, those of convnext_atto the channels.
PLAIN = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}
STAGES = {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)}
TIMM: dict[str, tuple[str, int, dict]] = {
    "timm_vit": ("vit_tiny_patch16_224", 16, PLAIN),
    "timm_convnext": ("convnext_atto", 32, STAGES),
    "timm_convnext_tiny": ("convnext_tiny", 32, STAGES),
}


def timm_model(name, **options):
    name, size, sizes = TIMM[name]
    create = libraries.get("timm").create_model
    return classifier(create(name, num_classes=5, drop_path_rate=0.0, **sizes, **options), size)


def torchvision_convnext():
    convnext = libraries.get("torchvision").models.convnext
    blocks = [convnext.CNBlockConfig(8, 16, 1), convnext.CNBlockConfig(16, None, 1)]
    return classifier(convnext.ConvNeXt(blocks, num_classes=5), 32)


MODELS = {f.__name__: f for f in (bert, gpt2, vit, torchvision_convnext)} | {
    name: partial(timm_model, name) for name in TIMM
}
CONVOLUTIONAL = ("timm_convnext", "timm_convnext_tiny", "torchvision_convnext")


def norms_of(model):
    return [module for module in model.modules() if isinstance(module, nn.LayerNorm)]


@pytest.fixture(params=MODELS)
def model_and_inputs(request, device):
    model, inputs = MODELS[request.param]()
    # Random weights show whether a norm ignores its weight or bias.
    for module in norms_of(model):
        for parameter in module.parameters():
            nn.init.normal_(parameter, 1.0, 0.2)
    model = model.to(device)
    return model, {name: tensor.to(device) for name, tensor in inputs.items()}


def gradients(model, inputs):
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads


def losses(model, inputs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found)


def same(found, expected):
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-3, atol=1e-5)


def test_swapped_and_overridden(model_and_inputs, caplog, device):
    """Every LayerNorm is swapped, so that the log names no module left alone."""
    stock, inputs = model_and_inputs
    with caplog.at_level("INFO", logger="fused_layernorm.swap"):
        swapped = fused_layernorm.swap_layer_norm(copy.deepcopy(stock))
    assert not caplog.records
    assert len(norms_of(swapped)) == len(norms_of(stock)) > 0
    for norm, old in zip(norms_of(swapped), norms_of(stock), strict=True):
        assert is_fused(norm)
        assert isinstance(norm, type(old))
    assert swapped.state_dict().keys() == stock.state_dict().keys()
    expected, expected_losses = gradients(stock, inputs), losses(copy.deepcopy(stock), inputs)
    same(gradients(swapped, inputs), expected)
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
    close(losses(swapped, inputs), expected_losses)
    if not autograd_library.active or (device == "cuda" and not HAS_KERNELS):
        return
    before = _calls(device.upper())
    with _override(device.upper()):
        found = gradients(stock, inputs)
        calls = _calls(device.upper()) - before
        found_losses = losses(copy.deepcopy(stock), inputs)
    assert calls >= len(norms_of(stock))
    same(found, expected)
    close(found_losses, expected_losses)


@pytest.mark.parametrize("model_and_inputs", CONVOLUTIONAL, indirect=True)
def test_swapped_channels_last(model_and_inputs):
    stock, inputs = model_and_inputs
    stock = stock.to(memory_format=torch.channels_last)
    inputs = {
        name: x.to(memory_format=torch.channels_last) if x.dim() == 4 else x
        for name, x in inputs.items()
    }
    swapped = fused_layernorm.swap_layer_norm(copy.deepcopy(stock))
    same(gradients(swapped, inputs), gradients(stock, inputs))


def test_norm_layer_of_timm(device):
    (stock, inputs), (fused, _) = (
        timm_model("timm_vit", norm_layer=cls) for cls in (nn.LayerNorm, FusedLayerNorm)
    )
    assert len(norms_of(fused)) == len(norms_of(stock)) > 0
    assert {type(norm) for norm in norms_of(fused)} == {FusedLayerNorm}
    fused.load_state_dict(stock.state_dict())
    inputs = {"x": inputs["x"].to(device)}
    same(gradients(fused.to(device), inputs), gradients(stock.to(device), inputs))

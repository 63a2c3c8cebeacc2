# SPDX-License-Identifier: Apache-2.0
"""Models of transformers, timm and torchvision, tiny and with random weights (those of diffusers
are in test_diffusers.py), run swapped and overridden without other changes; without a GPU the
override is tested on the CPU's dispatch key.
"""

import copy
from functools import partial

import libraries
import pytest
import torch
from swaps import outcome, same
from tiny_transformers import SMALL, bert, gpt2, make, tokens, vit
from torch import nn

import fused_layernorm
from fused_layernorm import is_fused
from fused_layernorm.ops import autograd_library
from fused_layernorm.override import _override

_calls = torch.ops.fused_layernorm._override_calls
BUILT = torch.ops.fused_layernorm._build_info()
HAS_KERNELS = BUILT != "cpu only" and torch.backends.cuda.is_built()

# By id: timm's name of a model, the size of its images, options. Blocks of convnext_tiny normalize
# the last dimension, those of convnext_atto the channels.
PLAIN = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}
STAGES = {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)}
TIMM: dict[str, tuple[str, int, dict]] = {
    "timm_vit": ("vit_tiny_patch16_224", 16, PLAIN),
    "timm_convnext": ("convnext_atto", 32, STAGES),
    "timm_convnext_tiny": ("convnext_tiny", 32, STAGES),
}


def timm_model(name):
    name, size, sizes = TIMM[name]
    create = libraries.get("timm").create_model
    model = create(name, num_classes=5, drop_path_rate=0.0, **sizes)
    return model, {"x": torch.randn(2, 3, size, size)}


def torchvision_convnext():
    convnext = libraries.get("torchvision").models.convnext
    blocks = [convnext.CNBlockConfig(8, 16, 1), convnext.CNBlockConfig(16, None, 1)]
    return convnext.ConvNeXt(blocks, num_classes=5), {"x": torch.randn(2, 3, 32, 32)}


MODELS = {f.__name__: f for f in (bert, gpt2, vit, torchvision_convnext)} | {
    name: partial(timm_model, name) for name in TIMM
}


def norms_of(model):
    return [module for module in model.modules() if isinstance(module, nn.LayerNorm)]


def first(model, inputs):
    """A model's scores, or its loss where it has one."""
    found = model(**inputs)
    return getattr(found, "loss", found)


@pytest.fixture(params=MODELS)
def model_and_inputs(request, device):
    model, inputs = MODELS[request.param]()
    # Random weights show whether a norm ignores its weight or bias.
    for module in norms_of(model):
        for parameter in module.parameters():
            nn.init.normal_(parameter, 1.0, 0.2)
    return model.to(device), {name: tensor.to(device) for name, tensor in inputs.items()}


def test_swapped_and_overridden(model_and_inputs, caplog, device, monkeypatch):
    """Every LayerNorm is swapped, so that the log names no module left alone."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    stock, inputs = model_and_inputs
    with caplog.at_level("INFO", logger="fused_layernorm.swap"):
        swapped = fused_layernorm.swap_layer_norm(copy.deepcopy(stock))
    assert not caplog.records
    assert len(norms_of(swapped)) == len(norms_of(stock)) > 0
    for norm, old in zip(norms_of(swapped), norms_of(stock), strict=True):
        assert is_fused(norm)
        assert isinstance(norm, type(old))
    assert swapped.state_dict().keys() == stock.state_dict().keys()
    expected = outcome(stock, inputs, first)
    same(outcome(swapped, inputs, first), expected, 1e-5)
    if "x" in inputs:  # an image
        swapped.to(memory_format=torch.channels_last)
        images = {"x": inputs["x"].to(memory_format=torch.channels_last)}
        same(outcome(swapped, images, first), expected, 1e-5)
    if not autograd_library.active or (device == "cuda" and not HAS_KERNELS):
        return
    before = _calls(device.upper())
    with _override(device.upper()):
        found = outcome(stock, inputs, first)
    assert _calls(device.upper()) - before >= len(norms_of(stock))
    same(found, expected, 1e-5)


@pytest.mark.cpu_operators
def test_a_gated_norm_of_a_model(device):
    """Backward of the only one is one operator."""
    stock = make(
        "Qwen3NextConfig", "Qwen3NextForCausalLM", vocab_size=50, num_key_value_heads=1,
        head_dim=16, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2,
        linear_num_value_heads=4, mlp_only_layers=[0, 1],
        layer_types=["linear_attention", "full_attention"], **SMALL,
    ).to(device)  # fmt: skip
    inputs = {name: tensor.to(device) for name, tensor in tokens().items()}
    model = fused_layernorm.swap_norms(copy.deepcopy(stock))
    losses = []
    for one in (stock, model):
        with torch.profiler.profile() as profile:
            loss = one(**inputs).loss
            loss.backward()
        losses.append(loss.detach())
    # On CUDA the kernels: autograd in C++ calls them past the dispatcher, which names operators.
    operator = "fused_layernorm::rms_norm_gated_backward"
    called = "gated_backward_kernel" if device == "cuda" else operator
    assert sum(called in event.name for event in profile.events()) == 1
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(model.parameters(), stock.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4)

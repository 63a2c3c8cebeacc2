# SPDX-License-Identifier: Apache-2.0
"""What people do with models, done to a stock model and to a swapped one: the results are equal.
The libraries are pyproject.toml's group `tools`, which a stage of .ci/run installs.
"""

import copy
import functools
from typing import Any

import libraries
import pytest
import torch
from swaps import assert_same, small_model
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fused_layernorm import swap_norms, unswap_norms

pytestmark = [
    pytest.mark.cpu_operators,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def swapped(model):
    return swap_norms(copy.deepcopy(model))


class Image(nn.Module):
    """Norms of images, each of which a tool may look up by its exact class."""

    def __init__(self):
        super().__init__()
        norms = [nn.InstanceNorm2d(6), nn.InstanceNorm2d(6, affine=True), nn.GroupNorm(2, 6)]
        self.layers = nn.Sequential(nn.Conv2d(3, 6, 1), *norms, nn.LayerNorm(5))
        self.volume = nn.InstanceNorm3d(6)
        self.line = nn.InstanceNorm1d(6)

    def forward(self, x):
        x = self.volume(self.layers(x).unsqueeze(2)).squeeze(2)
        return self.line(x.flatten(2))


MODELS = {
    "rows": lambda: (nn.Sequential(small_model(), nn.RMSNorm(3)), (8,)),
    "images": lambda: (Image(), (3, 4, 5)),
}


def fvcore(model, shape):
    count = libraries.get("fvcore.nn").FlopCountAnalysis(model, torch.randn(2, *shape))
    count.unsupported_ops_warnings(False)
    assert count.by_operator()["layer_norm"] > 0
    return count.total(), count.by_operator()["layer_norm"], count.by_module()


def ptflops(backend, model, shape):
    options = {"as_strings": False, "print_per_layer_stat": False, "backend": backend}
    return libraries.get("ptflops").get_model_complexity_info(model, shape, **options)


def thop(model, shape):
    count = libraries.get("thop").profile
    return count(copy.deepcopy(model), (torch.ones(2, *shape),), verbose=False)


def of_torch(model, shape):
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(2, *shape)).sum().backward()
    return counter.get_flop_counts()


COUNTERS: dict[str, Any] = {
    "torch": of_torch, "fvcore": fvcore, "thop": thop,
    "ptflops": functools.partial(ptflops, "pytorch"),
    "ptflops of aten": functools.partial(ptflops, "aten"),
}  # fmt: skip


@pytest.mark.parametrize("tool", COUNTERS)
@pytest.mark.parametrize("name", MODELS)
def test_counters_of_operations(name, tool):
    model, shape = MODELS[name]()
    assert COUNTERS[tool](swapped(model), shape) == COUNTERS[tool](model, shape)


def test_accelerate(device):
    accelerate = libraries.get("accelerate")
    model = small_model()
    x = torch.randn(4, 8)
    expected = model(x)
    new = accelerate.cpu_offload(swapped(model), execution_device=torch.device(device))
    assert_same(new(x).cpu(), expected)
    unswap_norms(new)
    assert type(new[1]) is nn.LayerNorm
    assert_same(new(x).cpu(), expected)
    accelerate.hooks.remove_hook_from_submodules(new)
    assert_same(new(x.to(next(new.parameters()).device)).cpu(), expected)


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
def test_opacus(mode):
    libraries.get("opacus")
    from opacus.grad_sample import wrap_model

    model, x, samples = small_model(), torch.randn(4, 8), []
    for each in (model, swapped(model)):
        wrapped = wrap_model(copy.deepcopy(each), grad_sample_mode=mode)
        wrapped(x).square().mean().backward()
        samples.append([p.grad_sample for p in wrapped.parameters()])
    assert_same(*samples)


@pytest.mark.parametrize("name", ["IntegratedGradients", "Saliency", "DeepLift", "LayerGradCam"])
def test_captum(name):
    attribution = getattr(libraries.get("captum.attr"), name)
    model, x, found = small_model(), torch.randn(4, 8), []
    for each in (model, swapped(model)):
        arguments = (each, each[1]) if name == "LayerGradCam" else (each,)
        found.append(attribution(*arguments).attribute(x.clone().requires_grad_(), target=1))
    assert_same(*found)

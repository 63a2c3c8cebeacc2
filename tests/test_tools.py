# SPDX-License-Identifier: Apache-2.0
"""What people do with models, done to a stock model and to a swapped one: the results are equal.

A stage of .ci/run installs the libraries (pyproject.toml's group `tools`); there a missing one is a
failure (tests/libraries.py), elsewhere it skips its tests.
"""

import copy
import tempfile
from typing import Any

import libraries
import pytest
import torch
from swaps import assert_same, small_model
from torch import nn

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


@pytest.fixture(params=MODELS)
def counted(request):
    """A model, and the shape of a sample."""
    return MODELS[request.param]()


def test_fvcore(counted):
    counters = libraries.get("fvcore.nn")
    model, shape = counted
    stock, ours = (
        counters.FlopCountAnalysis(each, torch.randn(2, *shape)).unsupported_ops_warnings(False)
        for each in (model, swapped(model))
    )
    assert ours.total() == stock.total()
    assert ours.by_operator()["layer_norm"] == stock.by_operator()["layer_norm"] > 0
    assert ours.by_module() == stock.by_module()


@pytest.mark.parametrize("backend", ["pytorch", "aten"])
def test_ptflops(backend, counted):
    count = libraries.get("ptflops").get_model_complexity_info
    options = {"as_strings": False, "print_per_layer_stat": False, "backend": backend}
    model, shape = counted
    assert count(swapped(model), shape, **options) == count(model, shape, **options)


def test_thop(counted):
    count = libraries.get("thop").profile
    model, x = counted[0], torch.randn(2, *counted[1])
    stock, ours = (count(copy.deepcopy(m), (x,), verbose=False) for m in (model, swapped(model)))
    assert ours == stock


@pytest.mark.parametrize("name", ["convnext_tiny", "swin_t"])
def test_torchvision_features(name):
    vision = libraries.get("torchvision")
    extraction = pytest.importorskip("torchvision.models.feature_extraction")
    model = getattr(vision.models, name)(weights=None).eval()
    new = swap_norms(copy.deepcopy(model))
    names = extraction.get_graph_node_names(model)
    assert extraction.get_graph_node_names(new) == names
    wanted = names[1][1::20]
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        stock, ours = (
            extraction.create_feature_extractor(each, wanted)(x) for each in (model, new)
        )
    assert_same(ours, stock)


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
    opacus = libraries.get("opacus")
    model = small_model()
    x, samples = torch.randn(4, 8), []
    for each in (model, swapped(model)):
        wrapped = opacus.GradSampleModule(copy.deepcopy(each)) if mode != "ew" else None
        if wrapped is None:
            from opacus.grad_sample import GradSampleModuleExpandedWeights

            wrapped = GradSampleModuleExpandedWeights(copy.deepcopy(each))
        elif mode == "functorch":
            wrapped = opacus.GradSampleModule(copy.deepcopy(each), force_functorch=True)
        wrapped(x).square().mean().backward()
        samples.append([p.grad_sample for p in wrapped.parameters()])
    assert_same(*samples)


@pytest.mark.parametrize("name", ["IntegratedGradients", "Saliency", "DeepLift", "LayerGradCam"])
def test_captum(name):
    attribution = getattr(libraries.get("captum.attr"), name)
    model, x = small_model(), torch.randn(4, 8)
    found = []
    for each in (model, swapped(model)):
        arguments = (each, each[1]) if name == "LayerGradCam" else (each,)
        found.append(attribution(*arguments).attribute(x.clone().requires_grad_(), target=1))
    assert_same(*found)


def test_peft():
    peft = libraries.get("peft")
    model, x = small_model(), torch.randn(4, 8)
    config = peft.LoraConfig(target_modules=["0"], modules_to_save=["1"], init_lora_weights=False)
    found, states = [], []
    for each in (model, swapped(model)):
        torch.manual_seed(1)
        adapted = peft.get_peft_model(copy.deepcopy(each), config)
        adapted(x).square().sum().backward()
        found.append([p.grad for p in adapted.parameters() if p.requires_grad])
        with tempfile.TemporaryDirectory() as folder:
            adapted.save_pretrained(folder)
            again = peft.PeftModel.from_pretrained(copy.deepcopy(each), folder)
        assert_same(again(x), adapted(x))
        states.append(sorted(adapted.state_dict()))
        found[-1].append(adapted.merge_and_unload()(x).detach())
    assert_same(*found)
    assert states[0] == states[1]


@pytest.mark.filterwarnings("ignore")
def test_lightning():
    lightning: Any = libraries.get("lightning")

    class Module(lightning.LightningModule):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def training_step(self, batch):
            return self.model(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    model, data = small_model(), torch.utils.data.TensorDataset(torch.randn(8, 8))
    trained = []
    for each in (model, swapped(model)):
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, barebones=True, devices=1
        )
        module = Module(copy.deepcopy(each))
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
        trained.append(module.state_dict())
    assert_same(*trained)

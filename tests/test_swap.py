# SPDX-License-Identifier: Apache-2.0
"""swap_layer_norm swaps the right modules, and changes nothing else in a model."""

import copy
import warnings
from typing import Any, cast

import pytest
import torch
from swaps import copies, fused, results
from tiny_transformers import WrittenHere
from torch import nn
from torch.nn.utils import parametrize

import fused_layernorm as fl
from fused_layernorm.swap import registry


class OwnForward(nn.LayerNorm):
    """A subclass that computes something else."""

    def forward(self, x):
        return super().forward(x.transpose(1, -1)).transpose(1, -1)


class OwnName(nn.LayerNorm):
    """A subclass that adds nothing but a name."""


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.alias = self.norm
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8, eps=1e-3, bias=False))
                for _ in range(2)
            ]
        )
        self.plain = nn.LayerNorm((4, 8), elementwise_affine=False)
        self.own = OwnForward(4)
        self.listed = [self.norm]  # a reference that is no submodule

    def forward(self, x):
        for block in self.blocks:
            x = x + block(self.norm(x))
        return self.own(self.plain(self.listed[0](x)))


def test_results_stay(device):
    model = Model().to(device, torch.float64)
    x = torch.randn(3, 4, 8, device=device, dtype=torch.float64)
    before = results(model, x)
    for _ in range(2):  # the second time changes nothing
        assert fl.swap_layer_norm(model) is model
        torch.testing.assert_close(results(model, x), before)
    assert fused(model) == ["norm", "blocks.0.1", "blocks.1.1", "plain"]
    norm = nn.LayerNorm(8)
    assert isinstance(fl.swap_layer_norm(norm), fl.FusedLayerNorm)  # a model that is one


def test_everything_else_stays():
    model: Any = Model().double()
    model.norm.eval()
    model.norm.weight.requires_grad_(False)
    model.norm.note = "kept"
    parameters = dict(model.named_parameters())
    names = [name for name, _ in model.named_modules()]
    state = copy.deepcopy(model.state_dict())
    fl.swap_layer_norm(model)
    assert [name for name, _ in model.named_modules()] == names
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name]
    assert model.alias is model.norm
    assert model.listed[0] is model.norm
    assert not model.norm.training
    assert model.plain.training
    assert not model.norm.weight.requires_grad
    assert model.norm.note == "kept"
    assert model.blocks[0][1].eps == 1e-3
    assert model.blocks[0][1].bias is None
    assert model.norm.weight.dtype == torch.float64
    assert list(model.state_dict()) == list(state)


# In the order in which a step, a saving and a loading call them.
HOOKS = ["forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook",
         "state_dict_pre_hook", "state_dict_post_hook", "load_state_dict_pre_hook",
         "load_state_dict_post_hook"]  # fmt: skip


@pytest.mark.parametrize("make", [nn.LayerNorm, nn.RMSNorm])
def test_hooks_stay(device, make):
    norm = make(8).to(device)
    model = nn.Sequential(norm, nn.Identity(), norm)
    calls: list[str] = []
    handles = [
        getattr(norm, f"register_{name}")(lambda *args, name=name: calls.append(name))
        for name in HOOKS
    ]
    fl.swap_norms(model)
    assert fl.is_fused(model[0])
    assert model[0] is model[2] is norm
    x = torch.randn(3, 8, device=device, requires_grad=True)
    model[0](x).sum().backward()
    norm.load_state_dict(norm.state_dict())
    assert calls == HOOKS
    for handle in handles:
        handle.remove()
    calls.clear()
    model(x).sum().backward()
    model.load_state_dict(model.state_dict())
    assert not calls


@pytest.mark.parametrize("make", [nn.LayerNorm, nn.RMSNorm])
def test_a_forward_of_the_instances_own_is_left_alone(make):
    """Libraries that offload or patch modules set such a forward."""
    norm: Any = make(8)
    stock_forward = norm.forward
    norm.forward = lambda x: stock_forward(x) + 1
    model = nn.Sequential(norm)
    for predicate in (None, lambda name, module: True):
        with pytest.warns(
            UserWarning, match=f"normalization.{make.__name__} .the module has a forward of its own"
        ):
            fl.swap_norms(model, predicate=predicate)
    assert type(model[0]) is make
    x = torch.randn(3, 8)
    torch.testing.assert_close(model(x), make(8)(x) + 1)


class Positive(nn.Module):
    def forward(self, weight):
        return weight.exp()


@pytest.mark.parametrize("make", [nn.LayerNorm, nn.RMSNorm])
def test_parametrized_modules(device, make):
    model = nn.Sequential(make(8)).to(device)
    parametrize.register_parametrization(model[0], "weight", Positive())
    x = torch.randn(3, 8, device=device)
    before, names = model(x), [name for name, _ in model.named_parameters()]
    with pytest.warns(UserWarning, match="parametrized"):
        fl.swap_norms(model)
    assert not fl.is_fused(model[0])
    fl.swap_norms(model, predicate=lambda name, module: True)
    assert fl.is_fused(model[0])
    assert parametrize.is_parametrized(model[0], "weight")
    assert [name for name, _ in model.named_parameters()] == names
    torch.testing.assert_close(model(x), before)
    model(x).sum().backward()
    assert model[0].get_parameter("parametrizations.weight.original").grad is not None
    assert not fl.is_fused(fl.unswap_norms(model)[0])
    torch.testing.assert_close(model(x), before)
    parametrize.remove_parametrizations(model[0], "weight")
    assert type(model[0]) is make
    torch.testing.assert_close(model(x), before)


def test_spectral_and_weight_norm_hooks(device):
    """PyTorch's older hooks replace the parameter by a plain tensor before each call."""
    model = nn.Sequential(nn.LayerNorm((4, 8))).to(device)
    nn.utils.spectral_norm(model[0])
    model.eval()
    x = torch.randn(3, 4, 8, device=device)
    before = model(x)
    torch.testing.assert_close(fl.swap_layer_norm(model)(x), before)


def test_transformer_encoder(device):
    """On its fast path nn.TransformerEncoderLayer reads the weights of its norms itself."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0).to(device)
    x = torch.randn(2, 5, 16, device=device)
    for training in (True, False):
        layer.train(training)
        with torch.set_grad_enabled(training):
            before = layer(x)
            after = fl.swap_layer_norm(copy.deepcopy(layer))(x)
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)


# ---- unswap_layer_norm.


def test_unswap_restores_what_was_swapped_and_only_that(device):
    model = Model().to(device)
    model.made = fl.FusedLayerNorm(8, activation="gelu")
    model.plain_made = fl.FusedLayerNorm(8)
    x = torch.randn(3, 4, 8, device=device)
    before, text, attributes = model(x), repr(model), {*vars(model.norm)}
    fl.swap_layer_norm(model, predicate=lambda name, module: True)
    assert repr(model) != text
    assert fl.unswap_layer_norm(model) is model
    assert repr(model) == text
    assert (type(model.norm), type(model.own)) == (nn.LayerNorm, OwnForward)
    assert type(model.made) is type(model.plain_made) is fl.FusedLayerNorm
    assert model.made.activation == "gelu"
    assert {*vars(model.norm)} == attributes
    assert torch.equal(model(x), before)
    assert repr(fl.unswap_layer_norm(model)) == text


# ---- register_swap.


class ByHand(nn.Module):
    """A hand-written LayerNorm whose name does not say so."""

    def __init__(self, size):
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(size))
        self.scale = nn.Parameter(torch.rand(size))

    def forward(self, x, shift=0):
        x = x - x.mean(-1, keepdim=True)
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * self.gamma * self.scale


def by_hand(self, x, shift=0):
    return fl.layer_norm(x, self.gamma * self.scale)


class Derived(ByHand):
    pass


@pytest.fixture(autouse=True)
def _registry(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})


def test_a_registered_class(device):
    asked = []

    def make(module):
        asked.append(module)
        return by_hand

    fl.register_swap(ByHand, make)
    model = nn.Sequential(ByHand(8), Derived(8), ByHand(8)).to(device)
    model.add_module("again", model[0])
    x = torch.randn(3, 8, device=device)
    before, grads = results(model, x)
    fl.swap_layer_norm(model)
    assert asked == [model[0], model[2]]
    assert [fl.is_fused(module) for module in model] == [True, False, True, True]
    assert isinstance(model[0], ByHand)
    assert repr(model[0]) == "FusedLayerNorm[ByHand]()"
    y, found = results(model, x)
    torch.testing.assert_close(y, before)
    torch.testing.assert_close(found, grads, rtol=1e-4, atol=1e-5)
    fl.unswap_layer_norm(model)
    assert type(model[0]) is ByHand


def test_copies_of_swapped_modules_compute_with_their_own_parameters(device):
    fl.register_swap(ByHand, lambda module: by_hand)
    model = nn.Sequential(ByHand(8), OwnName(8), nn.LayerNorm(8)).to(device)
    fl.swap_layer_norm(model, predicate=lambda name, module: True)
    assert repr(model[1]).startswith("FusedLayerNorm[OwnName](")
    x = torch.randn(3, 8, device=device)
    expected = model(x)
    for other in copies(model):
        assert [type(module) for module in other] == [type(module) for module in model]
        assert torch.equal(other(x), expected)
        for parameter in other.parameters():
            parameter.data = parameter.data.clone().zero_()
        assert not other(x).any()
        assert torch.equal(model(x), expected)
        fl.unswap_layer_norm(other)
        assert [type(module) for module in other] == [ByHand, OwnName, nn.LayerNorm]


def test_make_may_leave_a_module(caplog):
    fl.register_swap(ByHand, lambda module: by_hand if module.gamma.numel() == 8 else None)
    model = nn.Sequential(ByHand(8), ByHand(4))
    with caplog.at_level("INFO", logger="fused_layernorm.swap"):
        fl.swap_layer_norm(model)
    assert [fl.is_fused(module) for module in model] == [True, False]
    assert "1 test_swap.ByHand (the function registered" in caplog.text.replace("tests.", "")


def test_the_last_that_was_registered_holds():
    fl.register_swap(nn.LayerNorm, lambda module: lambda self, input: input)
    fl.register_swap(ByHand, lambda module: None)
    fl.register_swap(ByHand, lambda module: by_hand)
    model = fl.swap_layer_norm(nn.Sequential(nn.LayerNorm(8), ByHand(8)))
    x = torch.randn(3, 8)
    assert model[0](x) is x
    assert fl.is_fused(model[1])
    assert type(fl.unswap_layer_norm(model)[0]) is nn.LayerNorm


def test_the_predicate_narrows_what_is_registered():
    """The predicate is asked only of modules that are instances of nn.LayerNorm."""
    fl.register_swap(OwnForward, lambda module: OwnForward.forward)
    fl.register_swap(ByHand, lambda module: by_hand)
    model = nn.Sequential(OwnForward(8), OwnForward(8), ByHand(8), nn.LayerNorm(8), nn.Linear(8, 8))
    asked = []

    def predicate(name, module):
        asked.append(name)
        return module.normalized_shape == (8,) and name == "1"

    fl.swap_layer_norm(model, predicate=predicate)
    assert asked == ["0", "1", "3"]
    assert fused(model) == ["1", "2"]


def test_what_cannot_be_registered():
    with pytest.raises(TypeError, match=r"expected cls to be a subclass of torch.nn.Module, got 3"):
        fl.register_swap(cast(Any, 3), lambda module: by_hand)
    with pytest.raises(TypeError, match=r"got <function by_hand"):
        fl.register_swap(cast(Any, by_hand), lambda module: by_hand)
    with pytest.raises(TypeError, match=r"expected make to be callable, got int"):
        fl.register_swap(ByHand, cast(Any, 3))
    for module in (fl.FusedLayerNorm(8), *fl.swap_layer_norm(nn.Sequential(nn.LayerNorm(8)))):
        with pytest.raises(ValueError, match=r"expected a class that is not fused, got Fused"):
            fl.register_swap(type(module), lambda module: by_hand)
    fl.register_swap(ByHand, cast(Any, lambda module: "forward"))
    with pytest.raises(TypeError, match=r"make registered for ByHand to return a function or None"):
        fl.swap_layer_norm(ByHand(8))
    # A likely mistake is a closure over the module, whose parameters all copies would then share.
    fl.register_swap(ByHand, lambda module: lambda x: fl.layer_norm(x, module.gamma))
    with pytest.raises(
        TypeError, match=r"takes \(self, x\), self first, got one that takes \(x\)$"
    ):
        fl.swap_layer_norm(ByHand(8))


# ---- The log messages.


class SomeLayerNorm(nn.Module):
    """Has the name of a layer norm, but is not in the table."""


class RootLayerNorm(WrittenHere):
    """Has the name of a layer norm, and subtracts no mean."""


def test_one_line_names_what_was_left_and_why(caplog):
    model = nn.Sequential(
        nn.LayerNorm(8), OwnForward(8), OwnName(8), OwnName(8), SomeLayerNorm(), RootLayerNorm(8)
    )
    with caplog.at_level("INFO", logger="fused_layernorm.swap"), warnings.catch_warnings():
        warnings.simplefilter("error")
        fl.swap_layer_norm(model)
        (record,) = caplog.records
        text = record.getMessage().replace("tests.", "")
        assert "Sequential: 5 LayerNorm-like modules were left: " in text
        for left in ("1 test_swap.OwnForward", "2 test_swap.OwnName", "1 test_swap.SomeLayerNorm"):
            assert f"{left} (its class is not known), " in text
        assert "1 test_swap.RootLayerNorm (it computes RMSNorm)" in text
        caplog.clear()
        fl.swap_layer_norm(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)))
        assert not caplog.records


def test_a_model_of_which_nothing_is_fused_is_a_warning():
    model = nn.Sequential(OwnForward(8))
    with pytest.warns(UserWarning, match=r"1 .*OwnForward \(its class is not known\)") as found:
        fl.swap_layer_norm(model)
    assert len(found) == 1
    assert found[0].filename == __file__
    with pytest.warns(UserWarning, match="the predicate refused"):
        fl.swap_layer_norm(nn.LayerNorm(8), predicate=lambda name, module: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.append(fl.FusedLayerNorm(8))
        fl.swap_layer_norm(model)
        fl.swap_layer_norm(fl.swap_layer_norm(nn.LayerNorm(8)))

# SPDX-License-Identifier: Apache-2.0
"""The swaps swap the right modules, say what they leave, and change nothing else in a model; the
table of other libraries' classes knows the installed versions. What swapped classes compute is in
test_swapped_classes.py.
"""

import ast
import copy
import functools
import importlib
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import libraries
import pytest
import torch
import torch.nn.functional as F
from libraries import class_of
from swaps import assert_same, beside, copies, digest, fused, results, swapped
from tiny_transformers import GemmaHere, WrittenHere
from torch import nn
from torch.nn.utils import parametrize

import fused_layernorm as fl
from fused_layernorm import is_fused
from fused_layernorm.swap import registry, source


class OwnForward(nn.LayerNorm):
    """A subclass that computes something else."""

    def forward(self, x):
        return super().forward(x.transpose(1, -1)).transpose(1, -1)


# Subclasses that add nothing but a name, and a class that has but the name of a layer norm.
OwnName: Any = type("OwnName", (nn.LayerNorm,), {})
OwnRmsName: Any = type("OwnRmsName", (nn.RMSNorm,), {})
Inherits: Any = type("Inherits", (WrittenHere,), {})
RootLayerNorm: Any = type("RootLayerNorm", (WrittenHere,), {})  # it subtracts no mean
SomeLayerNorm: Any = type("SomeLayerNorm", (nn.Module,), {})


class OwnRmsForward(nn.RMSNorm):
    def forward(self, x):
        return 2 * super().forward(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.alias = self.norm
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8, eps=1e-3, bias=False)) for _ in range(2)
        )
        self.plain = nn.LayerNorm((4, 8), elementwise_affine=False)
        self.own = OwnForward(4)
        self.made = fl.FusedLayerNorm(8, activation="gelu")
        self.listed = [self.norm]  # a reference that is no submodule

    def forward(self, x):
        for block in self.blocks:
            x = x + block(self.norm(x))
        return self.own(self.plain(self.listed[0](self.made(x))))


def test_everything_stays(device):
    model: Any = Model().to(device, torch.float64)
    model.norm.eval()
    model.norm.weight.requires_grad_(False)
    model.norm.note = "kept"
    x = torch.randn(3, 4, 8, device=device, dtype=torch.float64)
    before, state, text = model(x), copy.deepcopy(model.state_dict()), repr(model)
    parameters, names = dict(model.named_parameters()), [name for name, _ in model.named_modules()]
    for _ in range(2):  # the second time changes nothing
        assert fl.swap_layer_norm(model) is model
        torch.testing.assert_close(model(x), before)
        assert fused(model) == ["norm", "blocks.0.1", "blocks.1.1", "plain", "made"]
    assert [name for name, _ in model.named_modules()] == names
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert list(model.state_dict()) == list(state)
    assert model.alias is model.norm is model.listed[0]
    assert (model.norm.training, model.plain.training, model.norm.note) == (False, True, "kept")
    assert not model.norm.weight.requires_grad
    model.norm.weight.requires_grad_()
    swapped_one, stock = copy.deepcopy(model), fl.unswap_layer_norm(model)
    torch.testing.assert_close(results(swapped_one, x), results(stock, x))
    assert fused(stock) == ["made"]  # it was constructed so
    assert repr(stock) == text
    norm = nn.LayerNorm(8)
    assert isinstance(fl.swap_layer_norm(norm), fl.FusedLayerNorm)  # a model that is one


# In the order in which a step, a saving and a loading call them.
HOOKS = ["forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook",
         "state_dict_pre_hook", "state_dict_post_hook", "load_state_dict_pre_hook",
         "load_state_dict_post_hook"]  # fmt: skip


@pytest.mark.parametrize("make", [nn.LayerNorm, nn.RMSNorm])
def test_hooks_stay(device, make):
    norm = make(8).to(device)
    model = nn.Sequential(norm, nn.Identity(), norm)
    calls: list[str] = []
    handles = [getattr(norm, f"register_{name}")(lambda *_, name=name: calls.append(name))
               for name in HOOKS]  # fmt: skip
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
def test_parametrized_modules(device, make):
    model = nn.Sequential(make(8)).to(device)
    parametrize.register_parametrization(model[0], "weight", nn.Softplus())
    x = torch.randn(3, 8, device=device)
    before, names = model(x), [name for name, _ in model.named_parameters()]
    with pytest.warns(UserWarning, match="it is parametrized, and no predicate accepted it"):
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
    monkeypatch.setattr(registry, "registered", {})


def test_a_registered_class(device):
    """Copies compute with their own parameters."""
    asked = []

    def make(module):
        asked.append(module)
        return by_hand

    fl.register_swap(ByHand, make)
    stock = nn.Sequential(ByHand(8), Derived(8), ByHand(8), OwnName(8), nn.LayerNorm(8)).to(device)
    stock.add_module("again", stock[0])
    x, model = torch.randn(3, 8, device=device), copy.deepcopy(stock)
    fl.swap_layer_norm(model, predicate=lambda name, module: True)
    assert asked == [model[0], model[2]]
    assert [fl.is_fused(module) for module in model] == [True, False, True, True, True, True]
    assert repr(model[0]) == "FusedLayerNorm[ByHand]()"
    assert repr(model[3]).startswith("FusedLayerNorm[OwnName](")
    y, found = results(model, x)
    before, grads = results(stock, x)
    torch.testing.assert_close(y, before)
    torch.testing.assert_close(found, grads, rtol=1e-4, atol=1e-5)
    for other in copies(model):
        assert [*map(type, other)] == [*map(type, model)]
        assert torch.equal(other(x), y)
        for parameter in other.parameters():
            parameter.data = parameter.data.clone().zero_()
        assert not other(x).any()
        assert torch.equal(model(x), y)
        assert [*map(type, fl.unswap_layer_norm(other))] == [*map(type, stock)]


def test_a_forward_that_leaves_a_call_is_asked_once_under_a_device_mode():
    asked = []
    fl.register_swap(OwnName, lambda module: lambda self, input: asked.append(input))
    stock, x = OwnName(8), torch.randn(3, 8)
    new = fl.swap_layer_norm(copy.deepcopy(stock))
    assert fl.is_fused(new)
    with torch.device("cpu"):
        assert torch.equal(new(x), stock(x))
    assert len(asked) == 1


def test_the_last_that_was_registered_holds_and_comes_first():
    fl.register_swap(nn.LayerNorm, lambda module: lambda self, input: input)
    fl.register_swap(ByHand, lambda module: None)
    fl.register_swap(ByHand, lambda module: by_hand)
    fl.register_swap(WrittenHere, lambda module: own)
    x = torch.randn(3, 8)
    for swap in (fl.swap_layer_norm, fl.swap_rms_norm, fl.swap_norms):
        model: Any = nn.Sequential(nn.LayerNorm(8), ByHand(8), WrittenHere(8))
        types = [*map(type, model)]
        swap(model)
        assert (model[0](x) is x) == (swap is not fl.swap_rms_norm)
        assert fl.is_fused(model[1])
        assert model[2]._known.forward is own
        torch.testing.assert_close(torch.jit.script(model[2])(x), model[2](x))
        assert [*map(type, fl.unswap_norms(model))] == types


# (what is registered, its make, the error; whether that comes only when ByHand is swapped).
WRONG: list[tuple[Any, Any, str, bool]] = [
    (3, lambda _: by_hand, "expected cls to be a subclass of torch.nn.Module, got 3", False),
    (by_hand, lambda _: by_hand, "got <function by_hand", False),
    (ByHand, 3, "expected make to be callable, got int", False),
    (fl.FusedLayerNorm, lambda _: by_hand, "expected a class that is not fused, got Fused", False),
    (type(swapped(WrittenHere(8))), lambda _: by_hand,
     "expected a class that is not fused, got WrittenHere", False),
    (ByHand, lambda _: "forward", "make registered for ByHand to return a function or None", True),
    # A likely mistake is a closure over the module, whose parameters all copies would then share.
    (ByHand, lambda module: lambda x: fl.layer_norm(x, module.gamma),
     r"takes \(self, x\), self first, got one that takes \(x\)$", True),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "make", "match", "later"), WRONG)
def test_what_cannot_be_registered(cls, make, match, later):
    if later:
        fl.register_swap(cls, make)
    with pytest.raises((TypeError, ValueError), match=match) as found:
        fl.swap_layer_norm(ByHand(8)) if later else fl.register_swap(cls, make)
    assert found.type is (ValueError if "not fused" in match else TypeError)


# ---- What is left, and what the log says of it.


class OwnGroups(nn.GroupNorm):
    def forward(self, x):
        return x


class FusedRMSNormGated(nn.Module):
    """As of another library, to which some models fall at construction."""

    def forward(self, x, g):
        return x * g


def changed(module: Any, change):
    change(module)
    return module


def with_a_forward(module):
    """Libraries that offload or patch modules set one."""
    stock_forward = module.forward
    module.forward = lambda x: stock_forward(x) + 1


UNKNOWN = "its class is not known"
OWN = "the module has a forward of its own"
LEFT: list[tuple[Any, str]] = [
    (lambda: OwnForward(8), UNKNOWN), (lambda: OwnName(8), UNKNOWN),
    (lambda: OwnRmsName(8), UNKNOWN), (lambda: OwnGroups(2, 8), UNKNOWN), (SomeLayerNorm, UNKNOWN),
    (FusedRMSNormGated, UNKNOWN), (lambda: nn.BatchNorm2d(8), ""), (nn.LazyInstanceNorm2d, ""),
    (lambda: nn.InstanceNorm2d(8, track_running_stats=True), "it has running statistics"),
    (lambda: changed(nn.RMSNorm(8), lambda m: setattr(m, "bias", nn.Parameter(torch.ones(8)))),
     "it has a bias"),
    (lambda: changed(nn.LayerNorm(8), with_a_forward), OWN),
    (lambda: changed(nn.RMSNorm(8), with_a_forward), OWN),
    (lambda: ByHand(4), "the function registered for its class left it"),
]  # fmt: skip


@pytest.mark.parametrize("place", range(len(LEFT)))
def test_what_is_left_is_named_in_one_line(place, caplog):
    make, reason = LEFT[place]
    fl.register_swap(ByHand, lambda module: by_hand if module.gamma.numel() == 8 else None)
    module = make()
    cls, model = type(module), nn.Sequential(module, nn.LayerNorm(8), module)
    is_called = "forward" in vars(module) or isinstance(module, nn.GroupNorm)
    x = torch.randn(3, 8)
    expected = module(x) if is_called else None
    with caplog.at_level("INFO", logger="fused_layernorm.swap"), warnings.catch_warnings():
        warnings.simplefilter("error")
        fl.swap_norms(model)
    assert [fl.is_fused(one) for one in model] == [False, True, False]
    assert type(module) is cls
    if is_called:
        torch.testing.assert_close(module(x), expected)
    texts = [record.getMessage() for record in caplog.records]
    name = f"{cls.__module__}.{cls.__qualname__}"
    assert len(texts) == (1 if reason else 0)
    assert all(f"Sequential: 1 norm-like modules were left: 1 {name} ({reason}" in t for t in texts)
    if reason == OWN:  # it is left of all that a predicate accepts
        fl.swap_norms(model, predicate=lambda name, module: True)
        assert not fl.is_fused(module)
    elif isinstance(module, (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)) and reason != "it has a bias":
        fl.swap_norms(model, predicate=lambda name, module: True)
        assert fl.is_fused(module)


def test_the_log_counts_and_knows_other_kinds(caplog):
    model = nn.Sequential(nn.LayerNorm(8), OwnName(8), OwnName(8), OwnForward(8), RootLayerNorm(8))
    with caplog.at_level("INFO", logger="fused_layernorm.swap"):
        fl.swap_layer_norm(model)
    (record,) = caplog.records
    text = record.getMessage().replace("tests.", "")
    assert "Sequential: 4 LayerNorm-like modules were left: " in text
    assert "2 test_swap.OwnName (its class is not known), 1 test_swap.OwnForward (its" in text
    assert "1 test_swap.RootLayerNorm (it computes RMSNorm)" in text


def test_a_model_of_which_nothing_is_fused_is_a_warning():
    model = nn.Sequential(OwnForward(8))
    with pytest.warns(UserWarning, match=r"1 .*OwnForward \(its class is not known\)") as found:
        fl.swap_layer_norm(model)
    assert len(found) == 1
    assert found[0].filename == __file__
    for swap, match in (
        (fl.swap_rms_norm, "swap_rms_norm: nothing in .* it has no RMSNorm"),
        (fl.swap_norms, "swap_norms: nothing in .* it has no norm"),
    ):
        with pytest.warns(UserWarning, match=match):
            swap(nn.Sequential(nn.Linear(2, 2)))
    for norm in (nn.LayerNorm(8), nn.GroupNorm(2, 8)):
        with pytest.warns(UserWarning, match="the predicate refused"):
            fl.swap_norms(norm, predicate=lambda name, module: False)
    with pytest.warns(UserWarning, match="swap_rms_norm"):
        fl.swap_rms_norm(fl.swap_layer_norm(nn.Sequential(nn.LayerNorm(8))))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.append(fl.FusedLayerNorm(8))
        fl.swap_layer_norm(model)
        fl.swap_layer_norm(fl.swap_layer_norm(nn.LayerNorm(8)))


# ---- The RMSNorm classes of transformers, as they were listed for one release.

LIST = Path(__file__).parent / "data" / "transformers_rms_norms.txt"


def listed_classes():
    """The modules and names of those that this release has, of one text together."""
    folder = Path(libraries.get("transformers").__file__).parent.parent
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for line in LIST.read_text().splitlines():
        module, name = line.split()
        path = folder / (module.replace(".", "/") + ".py")
        before, _, text = (path.read_text() if path.exists() else "").partition(f"\nclass {name}(")
        if body := re.match(r".*\n(?:(?: .*)?\n)*", text):
            key = before.rpartition("\n\n")[2], body[0].replace(name, "").strip()  # decorators too
            found.setdefault(key, []).append((module, name))
    return found.values()


def test_the_classes_of_transformers():
    """Those that docs/swap.md names are not known. Of classes of one text, one is imported."""
    page = (Path(__file__).parents[1] / "docs" / "swap.md").read_text()
    known = {name.rpartition(".")[2] for name in registry.CLASSES}
    left = [name for (module, first), *others in listed_classes()
            if digest(class_of(module, first)) not in registry.SOURCES and first not in known
            for name in (first, *(other for _, other in others))]  # fmt: skip
    assert f"all but {len(left)} of {len(LIST.read_text().splitlines())} classes" in page


# ---- Which kind a module is of.


class OverridesNorm(GemmaHere):
    """Its forward is GemmaHere's, and what that calls is not."""

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 2 * self.eps)


class OtherRMSNorm(nn.Module):
    def forward(self, x):
        return x


def kinds() -> Any:
    return nn.ModuleDict({
        "layer": nn.LayerNorm(8), "rms": nn.RMSNorm(8), "own_name": OwnRmsName(8),
        "own_forward": OwnRmsForward(8), "written_here": WrittenHere(8), "inherits": Inherits(8),
        "gemma": GemmaHere(8), "overrides": OverridesNorm(8), "other": OtherRMSNorm(),
    })  # fmt: skip


KNOWN = ["rms", "written_here", "inherits", "gemma"]


def test_the_kinds():
    model = kinds()
    assert fused(fl.swap_rms_norm(model)) == KNOWN
    assert type(model.rms) is fl.FusedRMSNorm
    assert fused(fl.swap_layer_norm(model)) == ["layer", *KNOWN]
    assert fused(fl.unswap_rms_norm(model)) == ["layer"]
    assert fused(fl.swap_norms(model)) == ["layer", *KNOWN]
    assert type(model.layer) is fl.FusedLayerNorm
    assert fused(fl.unswap_layer_norm(model)) == KNOWN
    assert fused(fl.unswap_norms(fl.swap_norms(model))) == []
    assert [*map(type, model.children())] == [*map(type, kinds().children())]


def test_predicate():
    """It is asked of instances of PyTorch's classes and of RMSNorms, registered or not."""
    fl.register_swap(OwnForward, lambda module: OwnForward.forward)
    fl.register_swap(ByHand, lambda module: by_hand)
    asked = []

    def predicate(name, module):
        asked.append(name)
        return name not in ("gemma", "refused")

    model = kinds()
    model.refused, model.accepted, model.by_hand = OwnForward(8), OwnForward(8), ByHand(8)
    fl.swap_norms(model, predicate=predicate)
    accepted = ["layer", "rms", "own_name", "own_forward", "written_here", "inherits", "accepted"]
    assert sorted(asked) == sorted([*accepted, "gemma", "refused"])
    assert fused(model) == [*accepted, "by_hand"]
    x = torch.randn(3, 8)
    for norm in (model.own_name, torch.fx.symbolic_trace(model.own_name)):
        torch.testing.assert_close(norm(x), F.rms_norm(x, (8,), model.own_name.weight))
    assert repr(model.own_name).startswith("FusedRMSNorm[OwnRmsName](")
    fl.unswap_norms(model)
    assert type(model.own_name) is OwnRmsName


@pytest.mark.cpu_operators
@pytest.mark.parametrize("cls", [WrittenHere, nn.LayerNorm, nn.RMSNorm])
def test_an_eps_that_the_operators_refuse(device, cls):
    x = torch.randn(3, 8, device=device)
    for eps in (float("nan"), -0.1, 1, *([torch.tensor(0.1)] if cls is WrittenHere else [])):
        norm = cls(8, eps=eps).to(device)
        torch.testing.assert_close(swapped(norm)(x), norm(x), equal_nan=True)


@pytest.mark.cpu_operators
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, functools.partial(nn.GroupNorm, 2)])
def test_attributes_of_a_stock_module_are_no_options(norm, device):
    model, x = nn.Sequential(norm(8), nn.SiLU()).to(device), torch.randn(3, 8, device=device)
    for name, value in {"scale": 2.0, "activation": "gelu", "weight_offset": 1.0}.items():
        setattr(model[0], name, value)
    new = beside(model)
    assert_same(swapped(model[0])(x), model[0](x))
    for call in (new, torch.compile(new, backend="aot_eager")):
        assert_same(call(x), model(x))
    new[0].reset_parameters()
    assert new[0].weight.eq(1).all()
    assert "scale" not in repr(new)


@pytest.mark.cpu_operators
def test_transformed(device):
    norm = WrittenHere(8).to(device)
    new = swapped(norm)
    x = torch.randn(3, 4, 8, device=device)
    torch.testing.assert_close(torch.func.vmap(new)(x), norm(x))
    gradient = torch.func.grad(lambda x: new(x).square().sum())(x)
    torch.testing.assert_close(gradient, torch.func.grad(lambda x: norm(x).square().sum())(x))


def own(self, hidden_states):
    return fl.rms_norm(hidden_states, self.weight, self.variance_epsilon)


# ---- Group and instance norms.


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.cpu_operators)])
def kernels(request, device, monkeypatch):
    """With the forwards that CUDA gets, in which the operators compute on the CPU too."""
    if request.param and device == "cuda":
        pytest.skip("CUDA has kernels anyway")


@pytest.mark.usefixtures("kernels")
def test_what_instance_norm_refuses_or_warns_of(device):
    norm = nn.InstanceNorm2d(8).to(device)
    new = swapped(norm)
    affine = nn.InstanceNorm2d(8, affine=True).to(device)
    for module in (norm, new):
        with pytest.warns(UserWarning, match="num_features"):
            assert module(torch.randn(2, 6, 4, 4, device=device)).shape == (2, 6, 4, 4)
        with pytest.raises(ValueError, match="spatial"):
            module(torch.randn(2, 8, 1, 1, device=device))
        with pytest.raises(ValueError, match="3D or 4D"):
            module(torch.randn(8, 8, device=device))
    for module in (affine, swapped(affine)):
        with pytest.raises(ValueError, match="num_features"):
            module(torch.randn(2, 6, 4, 4, device=device))
    x = torch.randn(8, 4, 4, device=device)  # without a batch
    torch.testing.assert_close(new(x), norm(x))


@pytest.mark.usefixtures("kernels")
def test_running_statistics_that_come_later(device):
    module = swapped(nn.InstanceNorm1d(4).to(device)).eval()
    module.track_running_stats = True
    module.running_mean, module.running_var = (torch.full((4,), 2.0, device=device),) * 2
    x = torch.randn(2, 4, 5, device=device)
    torch.testing.assert_close(module(x), (x - 2) / (2 + 1e-5) ** 0.5)


@pytest.mark.cpu_operators
@pytest.mark.parametrize(("act", "expected"), [(nn.SiLU, "silu"), (nn.Hardswish, None)])
def test_timms_activation_is_fused(act, expected, monkeypatch, device):
    norm = class_of("timm.layers.norm_act", "GroupNormAct")(8, 4, act_layer=act).to(device)
    new, seen, hooked = swapped(norm), [], []

    def recorded(*args, activation, **kwargs):
        seen.append(activation)
        return fl.group_norm(*args, activation=activation, **kwargs)

    monkeypatch.setattr("fused_layernorm.swap.groups.group_norm", recorded)
    x = torch.randn(2, 8, 4, 4, device=device)
    torch.testing.assert_close(new(x), norm(x))
    new.act.register_forward_hook(lambda *_: hooked.append(1))
    torch.testing.assert_close(new(x), norm(x))
    assert seen == [expected, None]
    assert hooked == [1]


# ---- The table of other libraries' classes: another source than those that it knows is left.


@pytest.mark.parametrize("package", ["timm", "torchvision", "diffusers", "transformers"])
def test_the_installed_version_is_known(package):
    """The table knows the source of every class that it names. The test imports none of them."""
    folder = Path(libraries.get(package).__file__).parent.parent
    checked = 0
    for module, _, name, sources in ((*n.rpartition("."), s) for n, s in registry.CLASSES.items()):
        path = folder / (module.replace(".", "/") + ".py")
        if not module.startswith(package + ".") or not path.exists():
            continue
        body = ast.parse(path.read_text()).body
        functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
        of_class = [n for n in body if isinstance(n, ast.ClassDef) and n.name == name]
        members = [n for cls in of_class for n in cls.body if isinstance(n, ast.FunctionDef)]
        for forward in [member for member in members if member.name == "forward"]:
            called = [functions[n] for n in source.called_names(forward) if n in functions]
            found = source.digest_of_trees(forward, called)
            said = f"swap/known.txt lacks {found} of {module}.{name}.forward: see what it computes"
            assert found in sources, said
            checked += 1
    assert checked > 0


def test_nothing_is_imported():
    cls = class_of("timm.layers.norm", "LayerNorm2d")
    before = set(sys.modules)
    fl.swap_layer_norm(nn.Sequential(nn.LayerNorm(8), cls(8)))
    assert set(sys.modules) == before


@pytest.mark.parametrize("name", ["LayerNorm", "LayerNorm2d"])
def test_fast_norm_is_timms_own(name, device):
    cls = class_of("timm.layers.norm", name)
    x = torch.randn(2, 8, 8, 8, device=device)
    try:
        importlib.import_module("timm.layers.fast_norm").set_fast_norm(True)
        norm = cls(8).to(device)
    finally:
        importlib.import_module("timm.layers.fast_norm").set_fast_norm(False)
    fast = swapped(norm)
    with torch.autocast(device, torch.bfloat16):
        assert fast(x).dtype == norm(x).dtype == torch.bfloat16
        assert torch.equal(fast(x), norm(x))
        # Each module has its own switch, which may be turned back.
        norm._fast_norm = fast._fast_norm = False
        assert fast(x).dtype == norm(x).dtype
        torch.testing.assert_close(fast(x), norm(x))


class TheSame:
    def forward(self: Any, x) -> "torch.Tensor":
        """With a docstring."""
        # And a comment.
        x = x.permute(
            0,
            2, 3, 1,
        )  # fmt: skip
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

        x = x.permute(0, 3, 1, 2)
        return x


class Another:
    def forward(self: Any, x):
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, 2 * self.eps)
        x = x.permute(0, 3, 1, 2)
        return x


def without_source():
    names: dict[str, Any] = {}
    exec("def forward(self, x):\n    return x", names)
    return names["forward"]


def wrapped():
    """Libraries may patch a class with functools.wraps. inspect then finds the wrapped source."""
    return functools.wraps(TheSame.forward)(lambda self, x: 2 * TheSame.forward(self, x))


@pytest.mark.parametrize("forward", [TheSame.forward, Another.forward, without_source(), wrapped()])
def test_another_source_is_left_alone_and_named(forward, caplog):
    cls = class_of("torchvision.models.convnext", "LayerNorm2d")
    names = {"forward": forward, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    model = nn.Sequential(type(cls.__name__, (cls,), names)(8), nn.LayerNorm(5))
    x = torch.randn(2, 8, 3, 5)
    expected = model(x)
    with caplog.at_level("INFO", logger="fused_layernorm.swap"):
        for options in ({}, {"predicate": lambda name, module: True}):
            fl.swap_layer_norm(model, **options)
            assert is_fused(model[0]) == (forward is TheSame.forward) == (not caplog.records)
            assert is_fused(model[1])
            torch.testing.assert_close(model(x), expected)
    for record in caplog.records:
        assert "1 torchvision.models.convnext.LayerNorm2d (the source of its" in record.getMessage()


def test_super_is_nn_layer_norm():
    """A forward that calls super's is known to the table only if super is nn.LayerNorm."""
    cls = class_of("diffusers.models.unets.unet_stable_cascade", "SDCascadeLayerNorm")
    assert digest(cls) in registry.CLASSES[registry.name_of(cls)]
    over_another = type(cls.__name__, (cls, OwnForward), {"__module__": cls.__module__})
    assert digest(over_another) is None

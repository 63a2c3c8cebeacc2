# SPDX-License-Identifier: Apache-2.0
"""The swaps swap the right modules, say what they leave, and change nothing else in a model; the
table of other libraries' classes knows the installed versions.

What swapped classes compute is in test_swapped_classes.py.
"""

import ast
import copy
import functools
import importlib
import inspect
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
from swaps import copies, digest, fused, results, swapped
from tiny_transformers import GemmaHere, WrittenHere
from torch import nn
from torch.nn.utils import parametrize

import fused_layernorm as fl
from fused_layernorm import is_fused
from fused_layernorm.swap import registry, source, table


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


def test_everything_stays(device):
    model: Any = Model().to(device, torch.float64)
    model.norm.eval()
    model.norm.weight.requires_grad_(False)
    model.norm.note = "kept"
    x = torch.randn(3, 4, 8, device=device, dtype=torch.float64)
    before, state = model(x), copy.deepcopy(model.state_dict())
    parameters, names = dict(model.named_parameters()), [name for name, _ in model.named_modules()]
    for _ in range(2):  # the second time changes nothing
        assert fl.swap_layer_norm(model) is model
        torch.testing.assert_close(model(x), before)
        assert fused(model) == ["norm", "blocks.0.1", "blocks.1.1", "plain"]
    assert [name for name, _ in model.named_modules()] == names
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert list(model.state_dict()) == list(state)
    assert model.alias is model.norm is model.listed[0]
    assert (model.norm.training, model.plain.training, model.norm.note) == (False, True, "kept")
    assert not model.norm.weight.requires_grad
    assert (model.blocks[0][1].eps, model.blocks[0][1].bias) == (1e-3, None)
    model.norm.weight.requires_grad_()
    swapped_one, stock = copy.deepcopy(model), fl.unswap_layer_norm(model)
    torch.testing.assert_close(results(swapped_one, x), results(stock, x))
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


class Positive(nn.Module):
    def forward(self, weight):
        return weight.exp()


@pytest.mark.parametrize("make", [nn.LayerNorm, nn.RMSNorm])
def test_parametrized_modules(device, make):
    model = nn.Sequential(make(8)).to(device)
    parametrize.register_parametrization(model[0], "weight", Positive())
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


def with_bias(module):
    module.bias = nn.Parameter(torch.ones(8))


def with_a_forward(module):
    """Libraries that offload or patch modules set one."""
    stock_forward = module.forward
    module.forward = lambda x: stock_forward(x) + 1


UNKNOWN = "its class is not known"
OWN = "the module has a forward of its own"
LEFT: list[tuple[Any, str]] = [
    (lambda: OwnForward(8), UNKNOWN),
    (lambda: OwnName(8), UNKNOWN),
    (lambda: OwnRmsName(8), UNKNOWN),
    (lambda: OwnGroups(2, 8), UNKNOWN),
    (SomeLayerNorm, UNKNOWN),
    (FusedRMSNormGated, UNKNOWN),
    (lambda: nn.BatchNorm2d(8), ""),
    (nn.LazyInstanceNorm2d, ""),
    (lambda: nn.InstanceNorm2d(8, track_running_stats=True), "it has running statistics"),
    (lambda: changed(nn.RMSNorm(8), with_bias), "it has a bias"),
    (lambda: changed(nn.LayerNorm(8), with_a_forward), OWN),
    (lambda: changed(nn.RMSNorm(8), with_a_forward), OWN),
    (lambda: ByHand(4), "the function registered for its class left it"),
]


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


@pytest.mark.parametrize(
    ("cls", "reason"),
    [(nn.LayerNorm, "its forward was replaced"), (nn.GroupNorm, "its forward was replaced"),
     (ByHand, "its forward was replaced since it was registered")],
)  # fmt: skip
def test_a_class_whose_forward_was_replaced_is_left(cls, reason, monkeypatch, caplog):
    fl.register_swap(ByHand, lambda module: by_hand)
    monkeypatch.setattr(cls, "forward", lambda self, x: x + 1)
    model = nn.Sequential(cls(2, 8) if cls is nn.GroupNorm else cls(8))
    with caplog.at_level("INFO", logger="fused_layernorm.swap"):
        fl.swap_norms(model)
    assert f"({reason})" in caplog.text
    assert not fl.is_fused(model[0])
    assert model(torch.zeros(1, 8)).tolist() == [[1.0] * 8]


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

SIZE = 256
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


def test_the_classes_of_transformers(monkeypatch):
    """At least 90% of those that a size makes are swapped, and compute what they did. Of classes of
    one text, one is imported."""
    monkeypatch.setattr(fl.stock, "_cpu_operators", False)  # which would round differently
    made, left = 0, []
    x = torch.randn(4, SIZE)
    for (module, name), *others in listed_classes():
        cls = class_of(module, name)
        first = next(iter(inspect.signature(cls).parameters), "")
        try:
            norm = cls() if first in ("", "eps") else cls(SIZE)
        except (AttributeError, TypeError):  # it is made of a configuration, or of more
            continue
        made += 1 + len(others)
        for parameter in norm.parameters():
            nn.init.normal_(parameter)
        model = nn.Sequential(copy.deepcopy(norm), nn.RMSNorm(SIZE))
        fl.swap_rms_norm(model)
        if not fl.is_fused(model[0]):
            left += [name, *(other for _, other in others)]
            continue
        takes_gate = "gate" in inspect.signature(norm.forward).parameters
        inputs = (x, torch.randn_like(x)) if takes_gate else (x,)
        assert torch.equal(model[0](*inputs), norm(*inputs))
    assert made >= 150
    assert len(left) <= 0.1 * made, left


# ---- Which kind a module is of.


class OverridesNorm(GemmaHere):
    """Its forward is GemmaHere's, and what that calls is not."""

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 2 * self.eps)


class OtherRMSNorm(nn.Module):
    def forward(self, x):
        return x


class Kinds(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LayerNorm(8)
        self.rms = nn.RMSNorm(8)
        self.own_name = OwnRmsName(8)
        self.own_forward = OwnRmsForward(8)
        self.written_here = WrittenHere(8)
        self.inherits = Inherits(8)
        self.gemma = GemmaHere(8)
        self.overrides = OverridesNorm(8)
        self.other = OtherRMSNorm()


KNOWN = ["rms", "written_here", "inherits", "gemma"]


def test_the_kinds():
    model = Kinds()
    assert fused(fl.swap_rms_norm(model)) == KNOWN
    assert type(model.rms) is fl.FusedRMSNorm
    assert fused(fl.swap_layer_norm(model)) == ["layer", *KNOWN]
    assert fused(fl.unswap_rms_norm(model)) == ["layer"]
    assert fused(fl.swap_norms(model)) == ["layer", *KNOWN]
    assert type(model.layer) is fl.FusedLayerNorm
    assert fused(fl.unswap_layer_norm(model)) == KNOWN
    assert fused(fl.unswap_norms(fl.swap_norms(model))) == []
    assert [*map(type, model.children())] == [*map(type, Kinds().children())]


def test_predicate():
    asked = []

    def predicate(name, module):
        asked.append(name)
        return name != "gemma"

    model = Kinds()
    fl.swap_norms(model, predicate=predicate)
    assert sorted(asked) == sorted(["layer", "own_name", "own_forward", *KNOWN])
    assert fused(model) == ["layer", "rms", "own_name", "own_forward", "written_here", "inherits"]
    x = torch.randn(3, 8)
    for norm in (model.own_name, torch.fx.symbolic_trace(model.own_name)):
        torch.testing.assert_close(norm(x), F.rms_norm(x, (8,), model.own_name.weight))
    assert repr(model.own_name).startswith("FusedRMSNorm[OwnRmsName](")
    fl.unswap_norms(model)
    assert type(model.own_name) is OwnRmsName


@pytest.mark.cpu_operators
def test_an_eps_that_the_operators_refuse(device):
    x = torch.randn(3, 8, device=device)
    for eps in (float("nan"), -0.1, 1, torch.tensor(0.1)):
        norm = WrittenHere(8, eps=eps).to(device)
        torch.testing.assert_close(swapped(norm)(x), norm(x), equal_nan=True)


@pytest.mark.cpu_operators
def test_traced_exported_and_transformed(device):
    norm = WrittenHere(8).to(device)
    new = swapped(norm)
    x = torch.randn(3, 4, 8, device=device)
    expected = norm(x)
    with torch.no_grad():
        torch.testing.assert_close(torch.jit.trace(new, x)(x), expected)
    program = torch.export.export(new, (x,), dynamic_shapes=({0: torch.export.Dim("n")},))
    assert "fused_layernorm" in str(program.graph)
    two = torch.cat([x, x])
    torch.testing.assert_close(program.module()(two), norm(two))
    torch.testing.assert_close(torch.func.vmap(new)(x), expected)
    gradient = torch.func.grad(lambda x: new(x).square().sum())(x)
    torch.testing.assert_close(gradient, torch.func.grad(lambda x: norm(x).square().sum())(x))


def own(self, hidden_states):
    return fl.rms_norm(hidden_states, self.weight, self.variance_epsilon)


def test_a_registered_class_comes_first():
    fl.register_swap(WrittenHere, lambda module: own)
    for swap_it in (fl.swap_layer_norm, fl.swap_rms_norm, fl.swap_norms):
        model: Any = nn.Sequential(WrittenHere(8))
        swap_it(model)
        assert type(model[0])._known.forward is own
        x = torch.randn(3, 8)
        torch.testing.assert_close(torch.jit.script(model)(x), model(x))
        assert type(fl.unswap_norms(model)[0]) is WrittenHere


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
    for (module, name), sources in table.CLASSES.items():
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
            assert found in sources, (
                f"{module}.{name}.forward has a source that the table does not know: see what it "
                f"computes and enter {found} into swap/table.py"
            )
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


def other_version(cls, forward):
    """The class as another version of its library would have it."""
    members = {"forward": forward, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), members)


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


def test_another_source_is_left_alone_and_named(caplog):
    cls = class_of("torchvision.models.convnext", "LayerNorm2d")
    x = torch.randn(2, 8, 3, 5)
    known = nn.Sequential(other_version(cls, TheSame.forward)(8))
    unknown = nn.Sequential(other_version(cls, Another.forward)(8), nn.LayerNorm(5))
    expected = unknown(x)
    with caplog.at_level("INFO", logger="fused_layernorm.swap"):
        assert is_fused(fl.swap_layer_norm(known)[0])
        assert not caplog.records
        fl.swap_layer_norm(unknown)
        fl.swap_layer_norm(unknown, predicate=lambda name, module: True)
    assert not is_fused(unknown[0])
    torch.testing.assert_close(unknown(x), expected)
    assert len(caplog.records) == 2
    for record in caplog.records:
        assert "1 torchvision.models.convnext.LayerNorm2d" in record.getMessage()
        assert "source of its forward" in record.getMessage()


@pytest.mark.parametrize("how", ["no source", "wrapped"])
def test_a_forward_without_a_source_of_its_own_is_left_alone(how):
    """Libraries may patch a class with functools.wraps. inspect then finds the wrapped source."""
    cls = class_of("torchvision.models.convnext", "LayerNorm2d")
    names: dict[str, Any] = {}
    exec("def forward(self, x):\n    return x", names)

    @functools.wraps(cls.forward)
    def patched(self, x):
        return 2 * cls.forward(self, x)

    forward = patched if how == "wrapped" else names["forward"]
    model = nn.Sequential(other_version(cls, forward)(8), nn.LayerNorm(8))
    fl.swap_layer_norm(model)
    assert [is_fused(module) for module in model] == [False, True]


def test_super_is_nn_layer_norm():
    """A forward that calls super's is known to the table only if super is nn.LayerNorm."""
    cls = class_of("diffusers.models.unets.unet_stable_cascade", "SDCascadeLayerNorm")
    assert digest(cls) in table.CLASSES[cls.__module__, cls.__name__]
    over_another = type(cls.__name__, (cls, OwnForward), {"__module__": cls.__module__})
    assert digest(over_another) is None

# SPDX-License-Identifier: Apache-2.0
"""swap_norms and swap_rms_norm: which modules are swapped, and the list of transformers' classes.

What swapped classes compute is in test_swapped_classes.py.
"""

import copy
import importlib
import inspect
from pathlib import Path
from typing import Any

import libraries
import pytest
import torch
import torch.nn.functional as F
from swaps import (
    fused,
    swapped,
)
from tiny_transformers import GemmaHere, WrittenHere
from torch import nn

import fused_layernorm as fl
from fused_layernorm.swap import registry

SIZE = 256

# ---- The RMSNorm classes of transformers, as they were listed for one release.

LIST = Path(__file__).parent / "data" / "transformers_rms_norms.txt"


def test_the_classes_of_transformers():
    """At least 90% of those that a size makes are swapped, and compute what they did."""
    libraries.get("transformers")
    made, left = 0, []
    x = torch.randn(4, SIZE)
    for line in LIST.read_text().splitlines():
        module, name = line.split()
        try:
            cls = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
        first = next(iter(inspect.signature(cls).parameters), "")
        try:
            norm = cls() if first in ("", "eps") else cls(SIZE)
        except (AttributeError, TypeError):  # it is made of a configuration, or of more
            continue
        made += 1
        for parameter in norm.parameters():
            nn.init.normal_(parameter)
        model = nn.Sequential(copy.deepcopy(norm), nn.RMSNorm(SIZE))
        fl.swap_rms_norm(model)
        if not fl.is_fused(model[0]):
            left.append(name)
            continue
        takes_gate = "gate" in inspect.signature(norm.forward).parameters
        inputs = (x, torch.randn_like(x)) if takes_gate else (x,)
        assert torch.equal(model[0](*inputs), norm(*inputs))
    assert made >= 150
    assert len(left) <= 0.1 * made, left


# ---- Which modules are swapped.


class OwnName(nn.RMSNorm):
    """A subclass that adds nothing but a name."""


class OwnForward(nn.RMSNorm):
    def forward(self, x):
        return 2 * super().forward(x)


class Inherits(WrittenHere):
    pass


class OverridesNorm(GemmaHere):
    """Its forward is GemmaHere's, and what that calls is not."""

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 2 * self.eps)


class OtherRMSNorm(nn.Module):
    def forward(self, x):
        return x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LayerNorm(8)
        self.rms = nn.RMSNorm(8)
        self.own_name = OwnName(8)
        self.own_forward = OwnForward(8)
        self.written_here = WrittenHere(8)
        self.inherits = Inherits(8)
        self.gemma = GemmaHere(8)
        self.overrides = OverridesNorm(8)
        self.other = OtherRMSNorm()


KNOWN = ["rms", "written_here", "inherits", "gemma"]


def test_the_kinds():
    model = Model()
    assert fused(fl.swap_rms_norm(model)) == KNOWN
    assert type(model.rms) is fl.FusedRMSNorm
    assert fused(fl.swap_layer_norm(model)) == ["layer", *KNOWN]
    assert fused(fl.unswap_rms_norm(model)) == ["layer"]
    assert fused(fl.swap_norms(model)) == ["layer", *KNOWN]
    assert type(model.layer) is fl.FusedLayerNorm
    assert fused(fl.unswap_layer_norm(model)) == KNOWN
    assert fused(fl.unswap_norms(fl.swap_norms(model))) == []
    assert [*map(type, model.children())] == [*map(type, Model().children())]


def test_predicate():
    asked = []

    def predicate(name, module):
        asked.append(name)
        return name != "gemma"

    model = Model()
    fl.swap_norms(model, predicate=predicate)
    assert sorted(asked) == sorted(["layer", "own_name", "own_forward", *KNOWN])
    assert fused(model) == ["layer", "rms", "own_name", "own_forward", "written_here", "inherits"]
    x = torch.randn(3, 8)
    for norm in (model.own_name, torch.fx.symbolic_trace(model.own_name)):
        torch.testing.assert_close(norm(x), F.rms_norm(x, (8,), model.own_name.weight))
    assert repr(model.own_name).startswith("FusedRMSNorm[OwnName](")
    fl.unswap_norms(model)
    assert type(model.own_name) is OwnName


def test_a_norm_that_was_given_a_bias_is_left():
    norm: Any = nn.RMSNorm(8)
    norm.bias = nn.Parameter(torch.ones(8))
    model = nn.Sequential(norm, nn.RMSNorm(8))
    assert fused(fl.swap_norms(model)) == ["1"]


def test_warnings():
    model = nn.Sequential(nn.LayerNorm(8))
    with pytest.warns(UserWarning, match="swap_rms_norm: nothing in .* it has no RMSNorm"):
        fl.swap_rms_norm(model)
    with pytest.warns(UserWarning, match="swap_norms: nothing in .* it has no norm"):
        fl.swap_norms(nn.Sequential(nn.Linear(2, 2)))
    fl.swap_layer_norm(model)
    with pytest.warns(UserWarning, match="swap_rms_norm"):
        fl.swap_rms_norm(model)


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


def test_a_registered_class_comes_first(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    fl.register_swap(WrittenHere, lambda module: own)
    for swap_it in (fl.swap_layer_norm, fl.swap_rms_norm, fl.swap_norms):
        model: Any = nn.Sequential(WrittenHere(8))
        swap_it(model)
        assert type(model[0])._known.forward is own
        x = torch.randn(3, 8)
        torch.testing.assert_close(torch.jit.script(model)(x), model(x))
        assert type(fl.unswap_norms(model)[0]) is WrittenHere

# SPDX-License-Identifier: Apache-2.0
"""Group and instance norms that swap_norms knows: what they refuse, what is left, and forwards that
somebody replaces later. What they compute is in test_swapped_classes.py.
"""

import pytest
import torch
import torch.nn.functional as F
from libraries import class_of
from swaps import (
    swapped,
)
from torch import nn

import fused_layernorm as fl
from fused_layernorm import is_fused, swap_norms

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
D, T = "diffusers.models.", "transformers.models."


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


def test_what_is_left(caplog):
    class Own(nn.GroupNorm):
        def forward(self, x):
            return x

    model = nn.Sequential(nn.GroupNorm(2, 8), nn.InstanceNorm2d(8, track_running_stats=True))
    model += nn.Sequential(Own(2, 8), nn.BatchNorm2d(8), nn.LazyInstanceNorm2d())
    with caplog.at_level("INFO", logger="fused_layernorm.swap"):
        swap_norms(model)
    assert [is_fused(module) for module in model] == [True, False, False, False, False]
    assert "running statistics" in caplog.text
    assert "Own (its class is not known)" in caplog.text
    swap_norms(model, predicate=lambda name, module: name == "2")
    assert is_fused(model[2])
    with pytest.warns(UserWarning, match="nothing"):
        swap_norms(nn.Sequential(nn.GroupNorm(2, 8)), predicate=lambda name, module: False)


@pytest.mark.usefixtures("kernels")
def test_running_statistics_that_come_later(device):
    module = swapped(nn.InstanceNorm1d(4).to(device)).eval()
    module.track_running_stats = True
    module.running_mean, module.running_var = (torch.full((4,), 2.0, device=device),) * 2
    x = torch.randn(2, 4, 5, device=device)
    torch.testing.assert_close(module(x), (x - 2) / (2 + 1e-5) ** 0.5)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("cls", [nn.GroupNorm, nn.InstanceNorm2d], ids=lambda cls: cls.__name__)
def test_a_replaced_forward_or_function_runs(cls, monkeypatch, device):
    module = cls(2, 4) if cls is nn.GroupNorm else cls(4)
    module = swapped(module.to(device))
    x = torch.randn(2, 4, 3, 3, device=device)
    with monkeypatch.context() as patch:
        patch.setattr(F, "group_norm", lambda *args: "function")
        patch.setattr(F, "instance_norm", lambda *args: "function")
        assert module(x) == "function"
    monkeypatch.setattr(cls, "forward", lambda self, x: "forward")
    assert module(x) == "forward"
    assert not is_fused(module)
    assert not is_fused(swap_norms(nn.Sequential(cls(4, 4), nn.LayerNorm(4)))[0])


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

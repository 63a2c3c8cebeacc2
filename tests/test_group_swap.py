# SPDX-License-Identifier: Apache-2.0
"""Group and instance norms that swap_norms knows: the stock results, strides and errors, with and
without a GPU; what is left, and what a forward that somebody replaces later does.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from libraries import class_of
from swaps import (
    check_compiler,
    check_swap_and_unswap,
    copies,
    digest,
    operators_of,
    results,
    swapped,
)
from torch import nn

import fused_layernorm as fl
from fused_layernorm import is_fused, swap_norms, unswap_norms
from fused_layernorm.swap import groups

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
D, T = "diffusers.models.", "transformers.models."


class Config:
    num_groups, hidden_act = 4, "relu"


# id: (class or where it is, arguments, shape of x). Each forward has one line or more.
CLASSES: dict[str, Any] = {
    "torch": (nn.GroupNorm, (4, 8), (2, 8, 5, 3)),
    "plain": (nn.GroupNorm, (1, 8, 1e-3, False), (3, 8, 7)),
    "two_dims": (nn.GroupNorm, (2, 8), (3, 8)),
    "five_dims": (nn.GroupNorm, (2, 8), (2, 8, 2, 3, 4)),
    "instance_1d": (nn.InstanceNorm1d, (8,), (2, 8, 9)),
    "instance_2d": (nn.InstanceNorm2d, (8, 1e-3, 0.1, True), (2, 8, 5, 3)),
    "instance_3d": (nn.InstanceNorm3d, (8, 1e-5, 0.1, True), (2, 8, 2, 3, 4)),
    "timm": ("timm.layers.norm.GroupNorm", (8, 4), (2, 8, 5, 3)),
    "timm_1": ("timm.layers.norm.GroupNorm1", (8,), (2, 8, 5, 3)),
    "timm_no_bias": ("timm.models.metaformer.GroupNorm1NoBias", (8,), (2, 8, 5, 3)),
    "timm_act": ("timm.layers.norm_act.GroupNormAct", (8, 4), (2, 8, 5, 3)),
    "timm_1_act": ("timm.layers.norm_act.GroupNorm1Act", (8,), (2, 8, 5, 3)),
    "bit": (T + "bit.modeling_bit.BitGroupNormActivation", (Config, 8), (2, 8, 5, 3)),
    "poolformer": (T + "poolformer.modeling_poolformer.PoolFormerGroupNorm", (8,), (2, 8, 5, 3)),
    "pe_audio": (T + "pe_audio.modeling_pe_audio.PeAudioMaskedGroupNorm", (2, 8), (2, 8, 9)),
}


@pytest.fixture(params=CLASSES)
def case(request, device):
    cls, arguments, shape = CLASSES[request.param]
    if isinstance(cls, str):
        cls = class_of(*cls.rsplit(".", 1))
    norm = cls(*arguments).to(device)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm, shape


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.cpu_operators)])
def kernels(request, device, monkeypatch):
    """With the forwards that CUDA gets, in which the operators compute on the CPU too."""
    if request.param and device == "cuda":
        pytest.skip("CUDA has kernels anyway")


def formats(shape, dtype, device):
    """An x of each memory format that the shape allows, and one of none."""
    x = (torch.randn(shape, device=device) * 2 + 1).to(dtype)
    yield x
    if len(shape) > 3:
        last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
        yield x.to(memory_format=last)
        yield torch.cat([x, x], -1)[..., 1 : 1 + shape[-1]]
    yield x.transpose(0, 1).contiguous().transpose(0, 1)


DTYPES = [(F32, F32), (F64, F64), (BF16, BF16), (F16, F16), (BF16, F32)]


def close(found, expected, dtype=None):
    """Equal to a rounding of dtype, by default expected's."""
    unit = {BF16: 2e-2, F16: 3e-3, F32: 1e-5, F64: 1e-10}[dtype or expected.dtype]
    size = float(expected.detach().abs().max()) + 1
    torch.testing.assert_close(found / size, expected / size, rtol=unit, atol=unit)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("dtype", "weights"), DTYPES)
def test_same_results(case, dtype, weights, device):
    norm, shape = case
    norm.to(weights)
    new = swapped(norm)
    for x in formats(shape, dtype, device):
        try:
            expected, gradients = results(norm, x)
        except RuntimeError as error:
            if "expected scalar type" not in str(error):
                raise
            pytest.skip("this torch's own kernel wants weights of x's dtype")
        y, found = results(new, x)
        assert y.dtype is expected.dtype
        assert y.stride() == expected.stride()
        # cuDNN's instance norm rounds the gradients of float32 weights to x's dtype on the way.
        for one, other in zip((y, *found), (expected, *gradients), strict=True):
            close(one, other, dtype)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_autocast(case, dtype, device):
    norm, shape = case
    new = swapped(norm)
    for x in formats(shape, dtype, device):
        with torch.autocast(device, BF16):
            y, expected = new(x), norm(x)
        assert y.dtype is expected.dtype
        assert y.stride() == expected.stride()
        close(y, expected)


@pytest.mark.usefixtures("kernels")
def test_the_operator_runs(case, device):
    """Otherwise the tests above compare the stock forward with itself."""
    if device == "cuda" or not fl.stock._cpu_operators:
        pytest.skip("plain calls are PyTorch's, or go past the dispatcher")
    norm, shape = case
    assert operators_of(lambda: swapped(norm)(torch.randn(shape, device=device)))


def test_swap_and_unswap(case):
    norm, _ = case
    if type(norm) is nn.GroupNorm:
        model = swap_norms(nn.Sequential(norm))
        assert type(model[0]) is fl.FusedGroupNorm
        assert type(unswap_norms(model)[0]) is nn.GroupNorm
        return
    check_swap_and_unswap(norm, swap_norms, unswap_norms, "FusedGroupNorm")


@pytest.mark.parametrize("name", groups.CLASSES, ids=".".join)
def test_the_installed_version_is_known(name):
    assert digest(class_of(*name)) in groups.CLASSES[name]


def test_copies(case):
    norm, shape = case
    x = torch.randn(shape)
    norm = norm.cpu()
    for new in copies(swapped(norm)):
        assert is_fused(new)
        torch.testing.assert_close(new(x), norm(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("compiler", [torch.fx.symbolic_trace, torch.jit.script])
def test_traced_and_scripted(case, compiler, device):
    check_compiler(case[0], compiler, torch.randn(case[1], device=device))


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

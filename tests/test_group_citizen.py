# SPDX-License-Identifier: Apache-2.0
"""group_norm beside PyTorch's machinery: registration, autocast, direct calls and the override of
ATen. test_autograd.py has its derivatives, test_errors.py bad input, test_modules.py the module."""

from typing import Any

import forms
import pytest
import torch
import torch.nn.functional as F
from forms import Calls
from numerics import EVERY, QUICK
from torch.library import opcheck

import fused_layernorm as fl
from fused_layernorm import FusedGroupNorm
from fused_layernorm.ops import autograd_library
from fused_layernorm.override import _calls, _override

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
OPS = torch.ops.fused_layernorm
# mypy cannot count tensors that are passed with a star.
ada_group_norm: Any = fl.ada_group_norm

pytestmark = pytest.mark.cpu_operators


def inputs(device, shape=(2, 6, 4, 3), dtype=F64, others=None, grad=True) -> Any:
    """x, shift, scale, weight and bias."""
    n, c, *rest = shape
    sizes = (shape, (n, c, *[1] * len(rest)), (n, c), (c,), (c,))
    dtypes = (dtype, *[others or dtype] * 4)
    return [
        torch.randn(size, device=device, dtype=F64).to(t).requires_grad_(grad)
        for size, t in zip(sizes, dtypes, strict=True)
    ]


def fused(activation=None, groups=2) -> Any:
    return lambda x, *others: ada_group_norm(x, groups, *others, activation=activation)


@pytest.mark.parametrize(
    ("shape", "dtype", "others", "options", "traced"),
    [
        ((2, 6, 4, 3), F32, None, ("silu", 0.5), True),
        ((2, 6, 4, 3), BF16, F32, ("leaky_relu", 1.0, F32), False),
        ((2, 6), F64, None, (), False),
        ((0, 6, 4), F32, None, (), False),
        ((2, 6, 0), BF16, None, ("gelu",), False),
    ],
    ids=str,
)
def test_opcheck(device, shape, dtype, others, options, traced):
    every = EVERY if traced else QUICK
    x, *parameters = inputs(device, shape, dtype, others)
    for last in (False, True) if len(shape) == 4 else (False,):
        if last:
            x = x.detach().to(memory_format=torch.channels_last).requires_grad_()
            every = QUICK
        args = (x, 2, *parameters, 1e-5, *options)
        for name in ("group_norm", "group_norm_forward"):
            opcheck(getattr(OPS, name).default, args, test_utils=every)
        opcheck(OPS.group_norm.default, (x, 3, None, None, None, None, 1e-5), test_utils=QUICK)
        y, mean, rstd = OPS.group_norm_forward(x.detach(), *args[1:])
        given = (torch.randn_like(y), x, 2, mean.detach(), rstd.detach(), *parameters)
        activation = options[0] if options else None
        scale = options[1] if len(options) > 1 else 1.0
        opcheck(
            OPS.group_norm_backward.default, (*given, activation, scale, *[True] * 5),
            test_utils=every,
        )  # fmt: skip
        for wanted in range(5):
            mask = [i == wanted for i in range(5)]
            backward = (*given, activation, scale, *mask)
            opcheck(OPS.group_norm_backward.default, backward, test_utils=QUICK)


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("x_dtype", [F32, F16, BF16, F64])
def test_autocast_gives_what_pytorch_gives(device, x_dtype, dtype):
    x = torch.randn(2, 6, 9, device=device).to(x_dtype).requires_grad_()
    weight = torch.randn(6, device=device).to(F64 if x_dtype == F64 else F32)
    with torch.autocast(device, dtype):
        ours = fl.group_norm(x, 2, weight, weight)
        stock = F.group_norm(x, 2, weight, weight)
        assert fl.group_norm(x, 2, out_dtype=BF16).dtype == BF16
    assert ours.dtype == stock.dtype
    tolerance = 2e-2 if stock.dtype in (F16, BF16) else 1e-5
    torch.testing.assert_close(ours, stock, rtol=tolerance, atol=tolerance)
    (dx,) = torch.autograd.grad(ours.float().square().sum(), x)
    assert dx.dtype == x_dtype


def test_autocast_casts_half_parameters(device):
    x, shift, scale, weight, bias = inputs(device, dtype=F32, others=BF16)
    with torch.autocast(device, F16):
        y = fl.ada_group_norm(x, 2, shift, scale, weight, bias.detach().float())
    expected = forms.stock("groups")(x, shift, scale, weight, bias)[0].float()
    torch.testing.assert_close(y.float(), expected, rtol=1e-4, atol=1e-4)
    y.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == BF16


COUNTS = {
    "groups": ((2**16, 2**15), 2**15),
    "positions": ((1, 1, 2**30 + 1), 1),
}


@pytest.mark.parametrize(("shape", "groups_"), COUNTS.values(), ids=COUNTS)
def test_what_kernels_cannot_count_is_the_operators_matter(shape, groups_):
    """The limits of the kernels are theirs alone: no function compares sizes with them."""
    with torch._subclasses.FakeTensorMode(), Calls() as calls:
        x = torch.empty(shape, device="cuda", dtype=BF16)
        y = fl.group_norm(x, groups_, activation="silu")
    assert y.shape == shape
    assert calls.names == ["group_norm"]


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "groups_"), COUNTS.values(), ids=COUNTS)
def test_what_kernels_cannot_count_on_cuda(shape, groups_, needs_memory):
    needs_memory(60)
    x = torch.randn(shape, device="cuda", dtype=BF16)
    module = fl.swap_norms(torch.nn.Sequential(torch.nn.GroupNorm(groups_, shape[1])))
    module = module.to("cuda", BF16)
    with torch.no_grad():
        if len(shape) == 2:  # PyTorch refuses one value a group
            found = fl.group_norm(x, groups_, activation="silu")
            assert torch.equal(found, torch.zeros_like(x))
            return
        expected = F.group_norm(x, groups_)
        for found in (fl.group_norm(x, groups_), module(x)):
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("absent", ["shift", "weight", "bias"])
def test_a_gradient_that_nobody_needs_has_the_dtype_of_the_real_one(device, absent):
    """Also where dy has not x's, as with out_dtype."""
    x, *parameters = inputs(device, (2, 6, 4), BF16, F32, grad=False)
    given = dict(zip(("shift", "scale", "weight", "bias"), parameters, strict=True))
    given[absent] = None
    _, mean, rstd = OPS.group_norm_forward(x, 2, *given.values(), 1e-5)
    args = (x.float(), x, 2, mean, rstd, *given.values(), None, 1.0)
    mask = [False, *(name == "scale" for name in given)]
    opcheck(OPS.group_norm_backward.default, (*args, *mask), test_utils=QUICK)
    gate = torch.randn_like(x[..., 0])
    _, _, rstd = OPS.rms_norm_gated_forward(x[..., 0], gate, None, None, 1e-5)
    gated = (gate.float(), x[..., 0], gate, rstd, None, None, False, "silu", 0, 0.0)
    mask = [absent == "shift", absent == "weight", False, False]
    opcheck(OPS.rms_norm_gated_backward.default, (*gated, *mask), test_utils=QUICK)


# ---- Direct calls.

direct = pytest.mark.skipif(not autograd_library.active, reason="autograd is in Python")


@direct
@pytest.mark.gpu
def test_plain_calls_ask_pytorchs_function():
    x, _, _, weight, bias = inputs("cuda", (2, 64, 9), F32)
    module = FusedGroupNorm(8, 64, device="cuda")
    before = OPS._direct_calls(None)
    dy = torch.randn_like(x)  # an expanded one is copied first, by the operator
    fl.group_norm(x, 8, weight, bias).backward(dy)
    module(x).backward(dy)
    with torch.inference_mode():
        module(x)
    with torch.autocast("cuda", BF16):
        assert module(x.bfloat16()).dtype == F32
    assert OPS._direct_calls(None) - before == 6
    with pytest.raises(RuntimeError, match="expected num_groups that divides the 64 channels"):
        fl.group_norm(x, 7)


def test_parameters_of_any_strides(device):
    x, *others = (t.detach() for t in inputs(device))
    strided = [torch.stack([t, t], -1)[..., 0] for t in others]
    for activation in (None, "silu"):
        for part in (0, 2):  # without a modulation too
            given, same = ([None] * part + of[part:] for of in (strided, others))
            found = ada_group_norm(x, 2, *given, activation=activation)
            expected = forms.stock("groups", activation=activation)(x, *same)[0]
            torch.testing.assert_close(found, expected)


def test_what_is_saved(device):
    x, _, _, weight, bias = inputs(device)
    assert len(forms.saved_by(lambda: fl.group_norm(x, 2, weight, bias, activation="silu"))) == 5


# ---- override_aten().

ON = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]
LAYOUTS = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
}


@direct
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [F32, BF16, F64])
@pytest.mark.parametrize("on", ON)
def test_override_takes_group_norm(on, dtype, layout):
    x, _, _, weight, bias = inputs(on, (2, 6, 5, 3), dtype)
    x = LAYOUTS[layout](x.detach()).requires_grad_()
    dy = torch.randn(x.shape, device=on, dtype=dtype)

    def run():
        y = F.group_norm(x, 2, weight, bias)
        return [y, *torch.autograd.grad(y, (x, weight, bias), dy)]

    expected = run()
    override = fl.override_aten if on == "cuda" else lambda: _override("CPU")
    before = _calls(on.upper())
    with override():
        found = run()
        with torch.inference_mode():
            assert torch.equal(F.group_norm(x, 2, weight, bias), found[0])
        for bad in (4, 0):
            with pytest.raises((RuntimeError, ZeroDivisionError)):
                F.group_norm(x, bad)
    taken = _calls(on.upper()) - before
    assert taken == 2
    tolerance = {F32: 1e-5, F64: 1e-12, BF16: 2e-2}[dtype]
    for a, b in zip(found, expected, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    run()
    assert _calls(on.upper()) - before == taken

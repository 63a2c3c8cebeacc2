# SPDX-License-Identifier: Apache-2.0
"""Under autocast results are those of PyTorch's layer_norm, without its casts: a call, a kernel."""

import itertools

import forms
import pytest
import torch
import torch.nn.functional as F
from numerics import covering, ids
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import fused_layernorm as fl

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
HALF = [F16, BF16]


@pytest.mark.parametrize("x_dtype", [F32, F16, BF16, F64])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_dtype_is_what_pytorch_gives(device, dtype, x_dtype, requires_grad):
    x = torch.randn(6, 32, device=device).to(x_dtype).requires_grad_(requires_grad)
    weight = torch.randn(32, device=device).to(F64 if x_dtype == F64 else F32)
    with torch.autocast(device, dtype):
        ours, stock = fl.layer_norm(x, weight), F.layer_norm(x, (32,), weight)
    assert ours.dtype == stock.dtype
    tolerance = 2e-2 if stock.dtype in HALF else 1e-5
    torch.testing.assert_close(ours, stock, rtol=tolerance, atol=tolerance)
    if requires_grad:
        (one,) = torch.autograd.grad(ours.float().pow(3).sum(), x)
        (other,) = torch.autograd.grad(stock.float().pow(3).sum(), x)
        assert one.dtype == other.dtype
        tolerance = 5e-2 if x_dtype in HALF else 1e-4
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", HALF)
def test_out_dtype_opts_out(device, dtype):
    x = torch.randn(6, 32, device=device).to(dtype)
    with torch.autocast(device, dtype):
        assert fl.layer_norm(x, normalized_shape=32, out_dtype=dtype).dtype == dtype
        assert fl.FusedLayerNorm(32, out_dtype=dtype, device=device)(x).dtype == dtype
        assert fl.ada_layer_norm(x, torch.ones(32, device=device), out_dtype=dtype).dtype == dtype
        norm = fl.FusedAddAdaLayerNorm(32, out_dtype=dtype, device=device)
        assert norm(x, x)[0].dtype == dtype


@pytest.mark.parametrize("dtypes", [(F16, F16), (BF16, BF16), (BF16, F32)])
@pytest.mark.parametrize("x_dtype", [F32, F16, BF16])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_half_weights_are_cast(device, x_dtype, dtypes, requires_grad):
    """Under autocast nn.LayerNorm takes half-precision weights beside another input dtype."""
    x = torch.randn(6, 32, device=device).to(x_dtype)
    weight, bias = (
        torch.randn(32, device=device).to(dtype).requires_grad_(requires_grad) for dtype in dtypes
    )
    with torch.autocast(device, BF16):
        y = fl.layer_norm(x, weight, bias)
    expected = F.layer_norm(x.float(), (32,), weight.float(), bias.float())
    torch.testing.assert_close(y.float(), expected, rtol=2e-2, atol=2e-2)
    if requires_grad:
        y.sum().backward()
        assert weight.grad is not None
        assert bias.grad is not None
        assert (weight.grad.dtype, bias.grad.dtype) == dtypes
        assert bias.grad.eq(6).all()


def test_residual(device):
    x = torch.randn(6, 32, device=device, dtype=BF16, requires_grad=True)
    residual = torch.randn(6, 32, device=device, requires_grad=True)
    weight = torch.randn(32, device=device, requires_grad=True)
    with torch.autocast(device, BF16):
        y, residual_out = fl.add_layer_norm(x, residual, weight)
        stock = F.layer_norm(x, (32,), weight) if device == "cuda" else x
    assert y.dtype == stock.dtype
    assert residual_out.dtype == F32
    (y.float() + residual_out).sum().backward()
    assert x.grad is not None
    assert residual.grad is not None
    assert x.grad.dtype == BF16
    assert residual.grad.dtype == F32


@pytest.mark.cpu_operators
@pytest.mark.parametrize(
    ("gated", "x_dtype", "modulation_dtype", "dtype"),
    covering([False, True], [F32, F16, BF16], [F32, F16, BF16], HALF),
    ids=ids,
)
def test_modulations(device, gated, x_dtype, modulation_dtype, dtype):
    """Input and modulations of any dtypes: linear layers under autocast make narrow modulations."""
    x = torch.randn(3, 5, 32, device=device).to(x_dtype).requires_grad_()
    residual = torch.randn(3, 5, 32, device=device)
    modulations = [
        torch.randn(3, 1, 32, device=device).to(modulation_dtype).requires_grad_() for _ in "gst"
    ]
    gate, shift, scale = modulations
    weight = torch.randn(32, device=device, requires_grad=True)
    leaves = [x, *(modulations if gated else modulations[1:]), weight]
    with torch.autocast(device, dtype):
        if gated:
            y, residual_out = fl.add_ada_layer_norm(x, residual, gate, shift, scale, weight)
            assert residual_out.dtype == F32
        else:
            y = fl.ada_layer_norm(x, shift, scale, weight)
        like = F.layer_norm(x, (32,))
    assert y.dtype == like.dtype
    wide = [leaf.detach().float().requires_grad_() for leaf in leaves]
    kind, rows = ("gated", [residual]) if gated else ("modulated", [])
    expected, *_ = forms.stock(kind)(wide[0], *rows, *wide[1:], None)
    tolerance = 1e-5 if y.dtype == F32 else 3e-2
    torch.testing.assert_close(y.float(), expected, rtol=tolerance, atol=tolerance)
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, leaves, dy)
    for leaf, one, other in zip(
        leaves, found, torch.autograd.grad(expected, wide, dy.float()), strict=True
    ):
        assert one.dtype == leaf.dtype
        tolerance = 1e-4 if leaf.dtype == F32 else 2e-2
        torch.testing.assert_close(one.float(), other, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("requires_grad", [False, True], ids=["", "grad"])
@pytest.mark.parametrize(
    ("kind", "modulation_dtype"),
    [("plain", F32), *itertools.product(("modulated", "gated"), (BF16, F32))],
)
def test_one_kernel_forward(kind, modulation_dtype, requires_grad, autocast):
    """The kernel reads chunks in place, without copies, and casts nothing.

    Only half-precision modulations beside a float32 y are cast to float32 first, because there is
    no kernel for them. The cast changes no bit of the result.
    """
    x, residual = torch.randn(2, 4, 256, 1152, device="cuda").to(BF16)
    chunks = torch.randn(4, 1, 6 * 1152, device="cuda").to(modulation_dtype).chunk(6, -1)
    shift, scale, gate = chunks[:3]
    for tensor in (x, residual, shift, scale, gate):
        tensor.requires_grad_(requires_grad and tensor.is_leaf)
    norm = fl.FusedLayerNorm(1152, dtype=F32 if autocast else BF16, device="cuda")
    call = {
        "plain": lambda: norm(x),
        "modulated": lambda: fl.ada_layer_norm(x, shift, scale),
        "gated": lambda: fl.add_ada_layer_norm(x, residual, gate, shift, scale)[0],
    }[kind]
    with torch.autocast("cuda", BF16, enabled=autocast):
        call()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
            y = call()
            torch.cuda.synchronize()
    assert y.dtype == (F32 if autocast else BF16)
    kernels = [event.name for event in trace.events() if event.device_type == DeviceType.CUDA]
    casts = 2 + (kind == "gated") if autocast and modulation_dtype == BF16 else 0
    assert len(kernels) == 1 + casts, kernels
    assert "layer_norm" in kernels[-1]


def test_outside_autocast_nothing_changes(device):
    x = torch.randn(6, 32, device=device, dtype=BF16)
    with torch.autocast(device, BF16), torch.autocast(device, enabled=False):
        assert fl.layer_norm(x, normalized_shape=32).dtype == BF16
    with pytest.raises(RuntimeError, match="expected weight of dtype float32"):
        fl.layer_norm(x.float(), torch.ones(32, device=device, dtype=BF16))

# SPDX-License-Identifier: Apache-2.0
"""Under autocast results are those of torch.nn.functional.layer_norm, without its casts."""

import pytest
import torch
import torch.nn.functional as F
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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_one_kernel_forward_and_no_cast(dtype, requires_grad):
    x = torch.randn(512, 1024, device="cuda").to(dtype).requires_grad_(requires_grad)
    norm = fl.FusedLayerNorm(1024).cuda()
    with torch.autocast("cuda", dtype):
        norm(x)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
            y = norm(x)
            torch.cuda.synchronize()
    assert y.dtype == F32
    kernels = [
        event.name
        for event in trace.events()
        if event.device_type == DeviceType.CUDA and "emcpy" not in event.name
    ]
    assert len(kernels) == 1, kernels
    assert "layer_norm" in kernels[0]


def test_outside_autocast_nothing_changes(device):
    x = torch.randn(6, 32, device=device, dtype=BF16)
    with torch.autocast(device, BF16), torch.autocast(device, enabled=False):
        assert fl.layer_norm(x, normalized_shape=32).dtype == BF16
    with pytest.raises(RuntimeError, match="expected weight of dtype float32"):
        fl.layer_norm(x.float(), torch.ones(32, device=device, dtype=BF16))

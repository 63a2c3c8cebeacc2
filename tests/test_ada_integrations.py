# SPDX-License-Identifier: Apache-2.0
"""The modulated norms among PyTorch's parts: what is saved, autocast, kernels that run."""

import forms
import pytest
import torch
import torch.nn.functional as F
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import fused_layernorm as fl

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
HALF = [F16, BF16]
ops = torch.ops.fused_layernorm
pytestmark = pytest.mark.cpu_operators


@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
def test_what_is_saved_for_backward(device, gated):
    """Of input's size only the norm's input is saved, and with a gate the tensor it multiplies."""
    x, residual = torch.randn(2, 3, 50, 64, device=device)
    gate, shift, scale = torch.randn(3, 3, 1, 64, device=device)
    for tensor in (x, residual, gate, shift, scale):
        tensor.requires_grad_()

    def large(tensors):
        return {tensor.data_ptr() for tensor in tensors if tensor.numel() >= x.numel()}

    outputs: list[torch.Tensor] = []
    given = (x, residual, gate if gated else None, shift, scale)
    saved = forms.saved_by(lambda: outputs.extend(fl.add_ada_layer_norm(*given)))
    assert large(saved) == large((outputs[1], x) if gated else outputs[1:])
    assert large(forms.saved_by(lambda: fl.ada_layer_norm(x, shift, scale))) == large([x])


# ---- Autocast.


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("modulation_dtype", [F32, F16, BF16])
@pytest.mark.parametrize("x_dtype", [F32, F16, BF16])
@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
def test_autocast(device, gated, x_dtype, modulation_dtype, dtype):
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


# ---- CUDA.


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("requires_grad", [False, True], ids=["", "grad"])
@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
@pytest.mark.parametrize("modulation_dtype", [BF16, F32])
def test_one_kernel_forward(modulation_dtype, gated, requires_grad, autocast):
    """The kernel reads chunks in place, without copies.

    Only half-precision modulations beside a float32 y are cast to float32 first, because there is
    no kernel for them. The cast changes no bit of the result.
    """
    x, residual = torch.randn(2, 4, 256, 1152, device="cuda").to(BF16)
    chunks = torch.randn(4, 1, 6 * 1152, device="cuda").to(modulation_dtype).chunk(6, -1)
    for tensor in (x, residual, *chunks[:3]):
        tensor.requires_grad_(requires_grad and tensor.is_leaf)

    def forward():
        with torch.autocast("cuda", BF16, enabled=autocast):
            if gated:
                return fl.add_ada_layer_norm(x, residual, chunks[2], chunks[0], chunks[1])[0]
            return fl.ada_layer_norm(x, chunks[0], chunks[1])

    forward()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        y = forward()
        torch.cuda.synchronize()
    assert y.dtype == (F32 if autocast else BF16)
    kernels = [event.name for event in trace.events() if event.device_type == DeviceType.CUDA]
    casts = 2 + gated if autocast and modulation_dtype == BF16 else 0
    assert len(kernels) == 1 + casts, kernels
    assert "layer_norm" in kernels[-1]

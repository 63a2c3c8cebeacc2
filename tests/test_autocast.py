# SPDX-License-Identifier: Apache-2.0
"""Under autocast results are those of PyTorch's layer_norm, without its casts: a call, a kernel."""

import itertools
from typing import Any

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


# Ours and PyTorch's, of x (6, 32, 2) and a weight of 32.
NORMS: dict[str, Any] = {
    "layer": (lambda x, *t: fl.layer_norm(x.mT.contiguous(), *t),
              lambda x, *t: F.layer_norm(x.mT.contiguous(), (32,), *t)),
    "group": (lambda x, *t: fl.group_norm(x, 4, *t), lambda x, *t: F.group_norm(x, 4, *t)),
}  # fmt: skip


@pytest.mark.parametrize("operators", [False, pytest.param(True, marks=pytest.mark.cpu_operators)])
@pytest.mark.parametrize(
    ("name", "dtype", "x_dtype", "requires_grad"),
    [*itertools.product(NORMS, HALF, [F32, F16, BF16, F64], [False, True])],
    ids=ids,
)
def test_dtype_is_what_pytorch_gives(device, operators, name, dtype, x_dtype, requires_grad):
    x = torch.randn(6, 32, 2, device=device).to(x_dtype).requires_grad_(requires_grad)
    weight, bias = torch.randn(2, 32, device=device).to(F64 if x_dtype == F64 else F32)
    with torch.autocast(device, dtype):
        ours, stock = (norm(x, weight, bias) for norm in NORMS[name])
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
        for y in (
            fl.layer_norm(x, normalized_shape=32, out_dtype=dtype),
            fl.FusedLayerNorm(32, out_dtype=dtype, device=device)(x),
            fl.ada_layer_norm(x, torch.ones(32, device=device), out_dtype=dtype),
            fl.FusedAddAdaLayerNorm(32, out_dtype=dtype, device=device)(x, x)[0],
            fl.group_norm(x, 2, out_dtype=dtype),
            torch.ops.fused_layernorm.layer_norm(x, 1, None, None, 1e-5, None, 1.0, dtype),
        ):
            assert y.dtype == dtype
    with torch.autocast(device, dtype), torch.autocast(device, enabled=False):
        assert fl.layer_norm(x, normalized_shape=32).dtype == dtype
    with pytest.raises(RuntimeError, match="expected weight of dtype float32"):
        fl.layer_norm(x.float(), torch.ones(32, device=device, dtype=dtype))


# By the function, and the operators by name, as an exported program calls them.
WAYS = [None, pytest.param(None, marks=pytest.mark.cpu_operators, id="operators"), "", "_forward"]


@pytest.mark.parametrize("suffix", WAYS)
@pytest.mark.parametrize(
    ("kind", "x_dtype", "others", "affine", "dtype"),
    covering([*forms.ALL_NAMES], [F32, *HALF], [F32, *HALF],
             [(F16, F16), (BF16, BF16), (BF16, F32), (F32, F32)], HALF), ids=ids,
)  # fmt: skip
def test_tensors_of_any_dtypes(device, suffix, kind, x_dtype, others, affine, dtype):
    """Linear layers under autocast make narrow modulations, and nn.LayerNorm takes half-precision
    weights beside another input dtype."""
    if suffix is not None and kind in forms.OTHERS:
        pytest.skip("its function alone has the form's arguments")
    t = dict(zip(forms.ALL_NAMES[kind], forms.tensors(kind, device, dtype=F32), strict=True))
    dtypes = {"x": x_dtype, "weight": affine[0], "bias": affine[1], "residual": F32}
    leaves = forms.leaves([u.to(dtypes.get(name, others)) for name, u in t.items()])
    function = forms.ours(kind) if suffix is None else forms.operator(kind, suffix)
    with torch.autocast(device, dtype):
        y, *residual_out = function(*leaves)
        like = F.layer_norm(leaves[0], (4,))
    if suffix is not None:
        wrong = leaves[-2].to(BF16 if x_dtype == F16 else F16)
        with torch.autocast(device, enabled=False), pytest.raises(RuntimeError, match="dtype"):
            function(*leaves[:-2], wrong, leaves[-1])
    assert kind == "gates" or y.dtype == like.dtype
    assert [total.dtype for total in residual_out] == [F32] * len(residual_out)
    wide = forms.leaves([leaf.double() for leaf in leaves])
    expected, *_ = forms.stock(kind)(*wide)
    tolerance = 1e-5 if y.dtype == F32 else 3e-2
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, leaves, dy)
    for leaf, one, other in zip(
        leaves, found, torch.autograd.grad(expected, wide, dy.double()), strict=True
    ):
        assert one.dtype == leaf.dtype
        tolerance = 1e-4 if leaf.dtype == F32 else 2e-2
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)


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

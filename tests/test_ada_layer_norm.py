# SPDX-License-Identifier: Apache-2.0
"""Modulated norms of rows: what the tables of all families (test_accuracy.py, test_every_norm.py)
do not say."""

import numerics
import pytest
import torch
import torch.nn.functional as F
from families import BF16, F32, F64
from families import MODULATED_DTYPES as DTYPES
from numerics import ids, modulated

import fused_layernorm as fl

pytestmark = pytest.mark.cpu_operators
GATED = pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])


def test_expanded_modulations(device):
    """A modulation expanded to input's shape has strides of zero, but a gradient per element."""
    t = numerics.make(modulated((3, 5, 32), affine="none"), device)
    t.shift, t.scale = t.shift.expand(3, 5, 32), t.scale.expand(3, 5, 32)
    found = numerics.ours(t)
    t.shift, t.scale = t.shift.contiguous(), t.scale.contiguous()
    expected = numerics.ours(t)
    for name in ("dshift", "dscale"):
        assert found[name].shape == (3, 5, 32)
        torch.testing.assert_close(found[name], expected[name])


def test_without_any_modulation_it_is_layer_norm(device):
    x, residual = torch.randn(2, 3, 5, 32, device=device)
    weight, bias = torch.randn(2, 32, device=device)
    y = fl.ada_layer_norm(x, None, None, weight, bias)
    assert torch.equal(y, fl.layer_norm(x, weight, bias))
    found = fl.add_ada_layer_norm(x, residual, None, None, None, weight, bias)
    assert all(map(torch.equal, found, fl.add_layer_norm(x, residual, weight, bias)))


# ---- Rounding, and what a result depends on.


@pytest.mark.parametrize("gated", [False, True])
def test_result_is_rounded_once(device, gated):
    """Neither the normalized value nor its product with 1 + scale is rounded before, nor the
    product of gate and input."""
    one, other, factor = torch.randn(3, 64, 512, device=device).to(BF16)
    if gated:
        _, narrow = fl.add_ada_layer_norm(one, other, factor)
        exact = other.double() + factor.double() * one.double()
    else:
        narrow = fl.ada_layer_norm(one, other, factor)
        exact = fl.ada_layer_norm(one.double(), other.double(), factor.double())
    assert (narrow != exact.to(BF16)).double().mean() < 0.002


def test_small_scales_are_not_lost(device):
    """1 + scale is computed in float32, because half precision would lose a small scale."""
    x = torch.randn(8, 64, device=device).to(BF16)
    scale = torch.full((64,), 2.0**-10, device=device).to(BF16)
    y = fl.ada_layer_norm(x, None, scale, out_dtype=F32)
    expected = F.layer_norm(x.float(), (64,)) * (1 + 2.0**-10)
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)


@GATED
def test_a_row_does_not_depend_on_its_place(device, gated):
    """Equal rows with equal modulations have equal results, to the bit."""
    rows = 50 if device == "cpu" else 2000
    for cols in (8, 257, 1152):
        t = numerics.make(modulated((2, rows, cols), "all", gated=gated, affine="none"), device)
        for name in ("x", "dy", "residual", "dresidual"):
            if (tensor := getattr(t, name)) is not None:
                setattr(t, name, tensor[:1, :1].expand(2, rows, cols).contiguous())
        for name, result in numerics.ours(t).items():
            if name in ("y", "residual_out", "dx", "dresidual"):
                assert torch.equal(result, result[:1, :1].expand_as(result)), name


# ---- Special gates and shifts.


def test_a_gate_of_zero(device):
    """A gate of zero keeps the residual to the bit, as in blocks initialised with zeros."""
    x, residual = torch.randn(2, 3, 4, 16, device=device)
    gate = torch.zeros(3, 1, 16, device=device, requires_grad=True)
    y, residual_out = fl.add_ada_layer_norm(x, residual, gate)
    assert torch.equal(residual_out, residual)
    (dgate,) = torch.autograd.grad(y.sin().sum() + residual_out.sum(), gate)
    assert dgate.abs().sum() > 0


@pytest.mark.parametrize("kind", ["all", "sample", "token"])
@pytest.mark.parametrize("dtypes", DTYPES, ids=ids)
def test_gate_of_add_layer_norm(device, dtypes, kind):
    t = numerics.make(modulated((3, 5, 64), kind, gated=True, dtypes=dtypes), device)
    args = (t.weight, t.bias)
    found = fl.add_layer_norm(t.x, t.residual, *args, gate=t.gate, normalized_shape=(64,))
    expected = fl.add_ada_layer_norm(t.x, t.residual, t.gate, None, None, *args)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("how", [{"activation": "gelu"}, {"scale": 0.5}], ids=str)
@pytest.mark.parametrize("dtypes", DTYPES, ids=ids)
def test_gate_beside_an_activation(device, dtypes, how):
    """It takes any dtypes that it takes without one; its gradients are rounded on the way."""
    options = {"shift": None, "scale_by": None, **how}
    problem = modulated((3, 5, 64), gated=True, dtypes=dtypes, **options)
    t = numerics.make(problem, device)
    found = numerics.ours(t)
    tolerance = {F32: 1e-5, F64: 1e-10}.get(max(dtypes[:2], key=lambda d: torch.finfo(d).eps), 3e-2)
    for name, expected in numerics.exact(t, found).items():
        assert found[name].dtype == problem.dtype_of(name)
        slack = tolerance * max(1.0, expected.abs().max().item())
        torch.testing.assert_close(found[name].double(), expected, rtol=0, atol=slack, msg=name)


@GATED
@pytest.mark.parametrize("shift_dtype", [F32, BF16], ids=ids)
def test_a_shift_of_every_element_has_the_gradient_of_y(device, shift_dtype, gated):
    """The gradient is dy itself if the dtypes are the same. Accumulation leaves dy unchanged."""
    x, residual, gate, scale = torch.randn(4, 2, 3, 24, device=device).to(BF16).unbind()
    shift = torch.randn(2, 3, 24, device=device).to(shift_dtype).requires_grad_()
    x.requires_grad_()
    if gated:
        y, _ = fl.add_ada_layer_norm(x, residual, gate, shift, scale)
    else:
        y = fl.ada_layer_norm(x, shift, scale)
    dy = torch.randn_like(y)
    of_shift, of_x = torch.autograd.grad(y, (shift, x), dy, retain_graph=True)
    assert of_shift.dtype == shift_dtype
    assert torch.equal(of_shift, dy.to(shift_dtype))
    assert of_x.isfinite().all()
    kept = dy.clone()
    for _ in range(2):
        y.backward(dy, retain_graph=True)
    assert shift.grad is not None
    assert torch.equal(shift.grad, 2 * kept.to(shift_dtype))
    assert torch.equal(dy, kept)

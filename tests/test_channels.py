# SPDX-License-Identifier: Apache-2.0
"""Norms over one dimension, such as the channels of NCHW: what the tables of all families
(test_accuracy.py, test_every_norm.py) do not say, registration, compilers."""

import functools

import libraries
import pytest
import torch
import torch.nn.functional as F
from families import BF16, F32, Channels
from numerics import EVERY, QUICK
from torch import nn
from torch.library import opcheck

import fused_layernorm as fl
from fused_layernorm import swap_norms

OPS = torch.ops.fused_layernorm

pytestmark = pytest.mark.cpu_operators


@pytest.mark.parametrize("dim", [0, 1, 2, 3, -1, -2, -4])
def test_any_dimension(device, dim):
    x = torch.randn(3, 4, 5, 8, device=device)
    weight = torch.randn(x.shape[dim], device=device)
    y = fl.layer_norm(x, weight, weight, dim=dim)
    expected = F.layer_norm(x.movedim(dim, -1), weight.shape, weight, weight).movedim(-1, dim)
    assert y.stride() == x.stride()
    torch.testing.assert_close(y, expected)


@pytest.mark.gpu
def test_no_copy_is_made():
    x = torch.randn(8, 96, 56, 56, device="cuda").to(BF16).requires_grad_()
    whole = functools.partial(fl.layer_norm, x, dim=1)
    by_view = functools.partial(fl.layer_norm, x.permute(0, 2, 3, 1), normalized_shape=96)
    for norm in (whole, by_view, functools.partial(by_view, out_dtype=F32)):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = norm()
        grown = torch.cuda.max_memory_allocated() - before
        assert grown < 1.2 * y.nbytes  # y and the statistics


@pytest.mark.gpu
def test_autocast():
    x = torch.randn(2, 16, 8, 8, device="cuda").to(BF16)
    with torch.autocast("cuda", BF16):
        y = fl.layer_norm(x, torch.ones(16, device="cuda"), dim=1)
    assert y.dtype == F32
    assert y.stride() == x.stride()


@pytest.mark.parametrize("order", ["contiguous", "channels_last", "slice of channels"])
@pytest.mark.parametrize("statistic", ["layer", "rms"])
def test_opcheck(device, order, statistic):
    x = Channels.LAYOUTS[order](torch.randn(2, 6, 4, 4, device=device)).requires_grad_()
    weight = torch.randn(6, device=device, requires_grad=True)
    kind = (None, 1.0, None, statistic, 0.0, False, True)
    rows = x.movedim(1, -1)
    traced = (order, statistic) in (("contiguous", "layer"), ("channels_last", "rms"))
    run = functools.partial(opcheck, test_utils=EVERY if traced else QUICK)
    run(OPS.layer_norm.default, (rows, 1, weight, None, 1e-5, *kind))
    run(OPS.layer_norm_forward.default, (rows, 1, weight, None, 1e-5, *kind))
    _, mean, rstd = OPS.layer_norm_forward(rows, 1, weight, None, 1e-5, *kind)
    needs = (True, True, False)
    arguments = (torch.randn_like(rows), rows, 1, mean, rstd, weight, None, None, None, 1.0, *needs)
    run(OPS.layer_norm_backward.default, (*arguments, statistic, 0.0, True))


@pytest.mark.parametrize("order", ["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", [(2, 6, 4, 4), (2, 1, 4, 4), (2, 6, 1, 1)], ids=str)
def test_compile_and_export(device, shape, order):
    module = fl.FusedLayerNorm2d(shape[1], device=device)
    x = Channels.LAYOUTS[order](torch.randn(shape, device=device)).requires_grad_()
    y = module(x)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)(x)
    program = torch.export.export(module, (x.detach(),))
    (fake,) = (node.meta["val"] for node in program.graph.output_node().args[0])
    assert fake.stride() == x.stride()
    for found in (compiled, program.module()(x.detach())):
        assert found.stride() == y.stride() == x.stride()
        torch.testing.assert_close(found, y)
    assert torch.autograd.grad(compiled.sum(), x)[0].stride() == x.stride()


@pytest.mark.parametrize("dim", [1, -1, -3])
def test_onnx(dim):
    class Norms(nn.Module):
        def forward(self, x):
            return fl.layer_norm(x, dim=dim) + fl.rms_norm(x, dim=dim)

    libraries.check_onnx(Norms(), (torch.randn(2, 6, 4, 5),))


@pytest.mark.parametrize("cls", [fl.FusedLayerNorm2d, fl.FusedRMSNorm2d])
def test_modules_refuse_other_channels(device, cls):
    module, wrong = cls(6, device=device), torch.randn(2, 7, 4, 5, device=device)
    with pytest.raises(RuntimeError, match=r"6\b.*\[2, 7, 4, 5\]|shape \[7\].*got shape \[6\]"):
        module(wrong)


# ---- A swapped class; its results are compared in test_swapped_classes.py.


def test_a_vector_of_zeros_stays_zero(device):
    cls = libraries.class_of("diffusers.models.autoencoders.autoencoder_kl_wan", "WanRMS_norm")
    module = swap_norms(cls(24).to(device))
    x = torch.zeros(2, 24, 4, 6, device=device, requires_grad=True)
    y = module(x)
    assert torch.equal(y, torch.zeros_like(y))
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert dx.isfinite().all()

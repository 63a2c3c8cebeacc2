# SPDX-License-Identifier: Apache-2.0
"""Norms over one dimension, such as the channels of NCHW: the numerics contract in every order of
memory, strides of results and gradients, bits, compilers."""

import functools
import math
from typing import Any

import forms
import libraries
import numerics
import pytest
import torch
import torch.nn.functional as F
from numerics import (
    EVERY,
    LAYOUTS,
    QUICK,
    ROW_LAYOUTS,
    Problem,
    covering,
    ids,
    misaligned,
    within,
)
from torch import nn
from torch.library import opcheck

import fused_layernorm as fl
from fused_layernorm import swap_norms

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
OPS = torch.ops.fused_layernorm

pytestmark = pytest.mark.cpu_operators


# Orders of memory of (N, C, *).
ORDERS: dict[str, Any] = {
    # A clone has contiguous strides in dimensions of size 1, too.
    "contiguous": lambda x: x.clone(memory_format=torch.contiguous_format),
    "channels_last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "shifted": misaligned,
    "slice": lambda x: within(x, 1, 2, 1),
    "channels_outside": ROW_LAYOUTS["transposed leading"],
    "every_second_pixel": LAYOUTS["every second"],
}


def over_channels(order="contiguous", dy_order="contiguous", by_view=False):
    """What numerics.check runs: x is drawn as (N, *, C), and given as (N, C, *) in this order.

    by_view: the norm is called as models write it, on a permuted view and without `dim`.
    """

    def run(t, *, backward=True):
        p = t.problem
        x = ORDERS[order](t.x.movedim(-1, 1)).requires_grad_(backward)
        dy = ORDERS[dy_order](t.dy.movedim(-1, 1))
        weight, bias = (
            None if u is None else u.detach().requires_grad_(backward) for u in (t.weight, t.bias)
        )
        where = {"normalized_shape": p.normalized_shape} if by_view else {"dim": 1}
        norm = forms.ours(
            "plain", statistic=p.statistic, activation=p.activation, factor=p.scale,
            offset=p.weight_offset, eps=p.eps, out_dtype=p.out_dtype,
            **{"normalized_shape": None, **where},
        )  # fmt: skip
        (y,) = norm(x.movedim(1, -1) if by_view else x, weight, bias)
        if by_view:
            assert y.is_contiguous()
            y = y.movedim(-1, 1)
        else:
            assert y.stride() == torch.empty_like(x).stride()
        results = {"y": y.detach().movedim(1, -1)}
        if backward:
            # Not y.backward(dy), which gives x.grad the strides of x.
            leaves = {"dx": x, "dweight": weight, "dbias": bias}
            wanted = {name: leaf for name, leaf in leaves.items() if leaf is not None}
            gradients = torch.autograd.grad(y, list(wanted.values()), dy)
            results |= dict(zip(wanted, gradients, strict=True))
            if not by_view:
                assert results["dx"].stride() == torch.empty_like(x).stride()
            results["dx"] = results["dx"].movedim(1, -1)
        return results

    return run


def problem(shape, dtype=F32, weight_dtype=None, **options):
    """The norm over dimension 1 of `shape`."""
    n, c, *pixels = shape
    return Problem((n, *pixels, c), dtype, weight_dtype, **options)


DTYPES = [(F32, None), (BF16, None), (F16, F32), (F64, None)]
SHAPES = [(3, 5), (2, 1, 9), (2, 2, 8), (2, 7, 64), (2, 8, 5, 7), (3, 9, 4, 4), (2, 16, 7, 7),
          (2, 24, 14, 14), (2, 64, 3, 11), (1, 65, 8, 16), (2, 33, 2, 3, 4), (1, 96, 1, 1),
          (4, 127, 2, 2), (1, 256, 57, 3)]  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "dtypes", "statistic"), covering(SHAPES, DTYPES, ("layer", "rms")), ids=ids
)
def test_accuracy(device, shape, dtypes, statistic):
    numerics.check(problem(shape, *dtypes, statistic=statistic), device, run=over_channels())


# Both sides of what one thread, one group of threads and one block hold.
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("channels", "pixels", "dtype"),
    covering([1, 2, 8, 9, 63, 64, 65, 127, 128, 129, 511, 513, 768, 1024, 1025, 2047, 2048, 2049,
              4095, 4096, 4097, 9000],
             [(7, 7), (8, 16), (7, 15), (14, 10), (1, 130)], [F32, BF16, F64]),
    ids=ids,
)  # fmt: skip
def test_accuracy_at_the_boundaries_of_channels(channels, pixels, dtype):
    p = problem((3, channels, *pixels), dtype)
    numerics.check(p, "cuda", run=over_channels())
    numerics.check(p, "cuda", run=over_channels(by_view=True))


# So many images that a block has several tiles, of which the last of a plane has fewer pixels.
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dy_order", "shape", "dtypes", "options"),
    covering(["contiguous", "channels_last"],
             [(600, 96, 8, 19), (1500, 24, 4, 19), (1500, 16, 7, 7), (900, 40, 14, 14)],
             DTYPES, [{}, {"statistic": "rms"}, {"activation": "gelu"}], strength=3),
    ids=ids,
)  # fmt: skip
def test_accuracy_of_many_images(dy_order, shape, dtypes, options):
    p = problem(shape, *dtypes, **options)
    numerics.check(p, "cuda", run=over_channels(dy_order=dy_order), sample=1)


@pytest.mark.parametrize(
    ("order", "dy_order", "by_view", "shape", "dtype"),
    covering([*ORDERS], ["contiguous", "channels_last", "every_second_pixel"], [False, True],
             [(2, 24, 8, 8), (2, 16, 7, 7), (3, 40, 14, 14)], [F32, BF16], strength=3),
    ids=ids,
)  # fmt: skip
def test_every_order_of_memory(device, order, dy_order, by_view, shape, dtype):
    run = over_channels(order, dy_order, by_view)
    numerics.check(problem(shape, dtype), device, run=run, sample=1)


@pytest.mark.parametrize(
    "p",
    [
        problem((2, 24, 8, 8), BF16, activation="gelu", scale=2.0),
        problem((2, 24, 7, 7), BF16, F32, activation="silu", out_dtype=F32),
        problem((2, 24, 14, 14), F32, out_dtype=BF16, activation="gelu_tanh"),
        problem((2, 136, 9, 24), F16, out_dtype=F32, affine="bias", activation="relu"),
        problem((2, 24, 8, 8), BF16, out_dtype=F64),
        problem((2, 24, 8, 8), F32, affine="none"),
        problem((2, 24, 8, 8), F32, affine="weight", statistic="rms", weight_offset=1.0),
        problem((2, 24, 8, 8), BF16, statistic="rms", activation="silu"),
        problem((2, 96, 16, 16), F32, mean=1000.0),
        problem((2, 96, 16, 16), BF16, mean=100.0),
        problem((2, 96, 7, 7), F32, mean=1000.0, eps=0.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("by_view", [False, True])
def test_accuracy_of_what_is_fused(device, p, by_view):
    numerics.check(p, device, run=over_channels(by_view=by_view))


@pytest.mark.parametrize("dim", [0, 1, 2, 3, -1, -2, -4])
def test_any_dimension(device, dim):
    x = torch.randn(3, 4, 5, 8, device=device)
    weight = torch.randn(x.shape[dim], device=device)
    y = fl.layer_norm(x, weight, weight, dim=dim)
    expected = F.layer_norm(x.movedim(dim, -1), weight.shape, weight, weight).movedim(-1, dim)
    assert y.stride() == x.stride()
    torch.testing.assert_close(y, expected)


def test_empty(device):
    for shape in [(0, 4, 3, 3), (2, 4, 0, 3), (2, 0, 3, 3)]:
        x = torch.zeros(shape, device=device, requires_grad=True)
        weight = torch.ones(shape[1], device=device, requires_grad=True)
        y = fl.layer_norm(x, weight, dim=1)
        dx, dweight = torch.autograd.grad(y.sum(), [x, weight])
        assert y.shape == shape == dx.shape
        assert torch.equal(dweight, torch.zeros_like(weight))


def test_a_pixel_with_nan_spoils_no_other(device):
    x = torch.randn(2, 48, 8, 8, device=device)
    clean = fl.layer_norm(x, dim=1)
    x[1, 5, 3, 2] = math.nan
    y = fl.layer_norm(x, dim=1)
    assert y[1, :, 3, 2].isnan().all()
    y[1, :, 3, 2] = clean[1, :, 3, 2]
    assert torch.equal(y, clean)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [(700, 64, 7, 7), (300, 768, 11, 11), (600, 384, 14, 14), (600, 96, 8, 19), (16, 4096, 15, 15)],
    ids=str,
)
def test_bits_depend_neither_on_the_batch_nor_on_the_run(shape):
    x = torch.randn(shape, device="cuda").to(BF16)
    dy = torch.randn_like(x)
    weight, bias = torch.randn(2, shape[1], device="cuda").to(BF16)

    def run(x, dy):
        rows = x.movedim(1, -1)
        args = (rows, 1, weight, bias, 1e-5, None, 1.0, None, "layer", 0.0, False, True)
        y, mean, rstd = OPS.layer_norm_forward(*args)
        assert torch.equal(OPS.layer_norm(*args), y)
        return y, *OPS.layer_norm_backward(
            dy.movedim(1, -1), rows, 1, mean, rstd, weight, bias, None, None, 1.0, True, True, True,
            "layer", 0.0, True,
        )  # fmt: skip

    whole = run(x, dy)
    assert all(map(torch.equal, whole, run(x, dy)))
    for few in (slice(0, 1), slice(5, 8)):
        y, dx, *_ = run(x[few], dy[few])
        assert torch.equal(y, whole[0][few])
        assert torch.equal(dx, whole[1][few])


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
def test_more_than_2_31_elements():
    x = torch.randn(3, 70, 3200, 3200, device="cuda", dtype=BF16)
    y = fl.layer_norm(x, dim=1)
    expected = F.layer_norm(x[2, :, -3:].movedim(0, -1).float(), (70,)).movedim(-1, 0)
    torch.testing.assert_close(y[2, :, -3:].float(), expected, atol=0.02, rtol=0.02)


@pytest.mark.gpu
def test_autocast():
    x = torch.randn(2, 16, 8, 8, device="cuda").to(BF16)
    with torch.autocast("cuda", BF16):
        y = fl.layer_norm(x, torch.ones(16, device="cuda"), dim=1)
    assert y.dtype == F32
    assert y.stride() == x.stride()


@pytest.mark.parametrize("order", ["contiguous", "channels_last", "slice"])
@pytest.mark.parametrize("statistic", ["layer", "rms"])
def test_opcheck(device, order, statistic):
    x = ORDERS[order](torch.randn(2, 6, 4, 4, device=device)).requires_grad_()
    weight = torch.randn(6, device=device, requires_grad=True)
    kind = (None, 1.0, None, statistic, 0.0, False, True)
    rows = x.movedim(1, -1)
    traced = (order, statistic) in (("contiguous", "layer"), ("channels_last", "rms"))
    check = functools.partial(opcheck, test_utils=EVERY if traced else QUICK)
    check(OPS.layer_norm.default, (rows, 1, weight, None, 1e-5, *kind))
    check(OPS.layer_norm_forward.default, (rows, 1, weight, None, 1e-5, *kind))
    _, mean, rstd = OPS.layer_norm_forward(rows, 1, weight, None, 1e-5, *kind)
    needs = (True, True, False)
    arguments = (torch.randn_like(rows), rows, 1, mean, rstd, weight, None, None, None, 1.0, *needs)
    check(OPS.layer_norm_backward.default, (*arguments, statistic, 0.0, True))


@pytest.mark.parametrize("order", ["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", [(2, 6, 4, 4), (2, 1, 4, 4), (2, 6, 1, 1)], ids=str)
def test_compile_and_export(device, shape, order):
    module = fl.FusedLayerNorm2d(shape[1], device=device)
    x = ORDERS[order](torch.randn(shape, device=device)).requires_grad_()
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

# SPDX-License-Identifier: Apache-2.0
"""Norms of rows, LayerNorm and RMSNorm: what the tables of all families do not say.

test_accuracy.py judges their accuracy, test_every_norm.py what every norm keeps.
"""

import itertools
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numerics
import pytest
import reference
import torch
import torch.nn.functional as F
from families import BF16, F16, F32
from numerics import ACTIVATIONS, Problem, check, forced, ids, ours, plan_here

import fused_layernorm as fl
from fused_layernorm.ops import formulas

ops = torch.ops.fused_layernorm
pytestmark = pytest.mark.cpu_operators  # the tests judge the operators, on the CPU too


# ---- Statistics.


@pytest.mark.parametrize("mean", [0.0, 3.0, -20.0, 1e4])
@pytest.mark.parametrize("cols", [1, 2, 5, 64, 1000, 40_000])
def test_rows_of_any_mean_and_a_constant_row(device, cols, mean):
    """The pivot, subtracted before a row is summed, depends on the row's first two elements."""
    t = numerics.make(Problem((33, cols), mean=mean), device)
    t.x[0] = t.x[0, 0].clone()  # a constant row
    t.x[1, :2] = mean  # two equal elements in a row that is not constant
    actual = ours(t, backward=False)
    expected = numerics.exact(t, actual, backward=False)
    stock = numerics.stock(t, actual, backward=False)
    torch.testing.assert_close(actual["y"][0], t.bias.expand_as(actual["y"][0]))
    error, limit = ((one["y"].double() - expected["y"]).abs().max() for one in (actual, stock))
    assert error <= 2 * limit + 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("statistic", ["layer", "rms"])
@pytest.mark.parametrize("mean", [0.0, 100.0])
@pytest.mark.parametrize(("rows", "cols"), [(40, 40_960), (30, 262_144), (2, 4_194_304)])
def test_statistics_of_the_ring_are_rounded_once(rows, cols, mean, statistic):
    """mean and rstd are as near as float32 lets them be, some units in the last place."""
    x = torch.randn(rows, cols, device="cuda") + mean
    with forced("ring"):
        _, *found = ops.layer_norm_forward(x, 1, None, None, 1e-5, statistic=statistic)
    wanted = reference.layer_norm(x, 1, statistic=statistic)
    assert ((found[1].double() - wanted.rstd).abs() <= 2.0**-23 * wanted.rstd).all()
    if statistic == "layer":
        slack = 2.0**-23 * mean + 2.0**-24 * 4 / wanted.rstd
        assert ((found[0] - wanted.mean).abs() <= slack).all()


@pytest.mark.parametrize("eps", [None, 0.0, 1e-12, 1e-5, 1.0, 100.0, -1.0, -1e3, 1])
@pytest.mark.parametrize("scale", [4, 1e-3])  # a variance that eps = -1 does not cancel, and none
def test_eps(device, scale, eps):
    x = scale * torch.randn(16, 48, device=device)
    y, z = fl.rms_norm(x, None, eps, normalized_shape=48), F.rms_norm(x, (48,), None, eps)
    torch.testing.assert_close(y, z, equal_nan=True)
    if eps is not None:
        y = fl.layer_norm(x, normalized_shape=(48,), eps=eps)
        torch.testing.assert_close(y, F.layer_norm(x, (48,), eps=eps), equal_nan=True)


# ---- Special rows.


def test_large_values_make_no_nan_and_nan_stays_in_its_row(device):
    """The sum of such a row is Inf in float32, its sum of squares is not used."""
    x = torch.full((4, 4096), 1e17, device=device)
    x[1, 3] = float("nan")
    y = fl.rms_norm(x, torch.ones(4096, device=device))
    torch.testing.assert_close(y[[0, 2, 3]], torch.ones_like(y[1:]))
    assert y[1].isnan().all()


def _strategy_of_many_rows(cols, dtype):
    strategy = plan_here(1 << 20, cols, dtype, backward=True)["strategy"]
    assert strategy in ("warp", "block")
    return strategy


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 300])
@pytest.mark.parametrize("strategy", ["of many rows", "few_rows", "stream"])
@pytest.mark.parametrize("cols", [24, 96, 250, 300, 768, 1027])
def test_a_large_constant_row(request, strategy, cols, rows):
    """Threads without columns must not let the row's large mean into its sums."""
    if strategy == "of many rows":
        strategy = _strategy_of_many_rows(cols, F32)
    x = torch.full((rows, cols), 1e37, device="cuda", requires_grad=True)
    dy = torch.randn(rows, cols, device="cuda")
    y = fl.layer_norm(x, normalized_shape=(cols,))
    with forced(strategy):  # of backward alone: forward has no few_rows
        p = plan_here(rows, cols, F32, backward=True)
        (dx,) = torch.autograd.grad(y, x, dy)
    ring = p.get("bulk") and p["width"] > 1
    if ring and p["team_threads"] * p["vecs"] * p["width"] > cols:
        reason = "a ring has zeros where a row has no columns (docs/tuning-log.md, Accuracy)"
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    # The variance is 0, so xhat is 0 and rstd is 1 / sqrt(eps).
    expected = (dy - dy.double().mean(1, keepdim=True)) * numerics.EPS**-0.5
    torch.testing.assert_close(dx.double(), expected, rtol=1e-4, atol=1e-2)


# ---- Bits that do not depend on the way.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16], ids=ids)
def test_rows_by_halves_have_the_bits_of_shifted_rows(dtype):
    """Where a row stands decides how it is moved, and must not change its result."""
    for cols, statistic in itertools.product((4, 60, 356, 512, 924, 1492, 3196), ("layer", "rms")):
        parameters = torch.randn(2, cols, device="cuda").to(dtype)
        x = (torch.randn(36, cols) + 100 * (torch.arange(36) % 3)[:, None]).to("cuda", dtype)
        wide = torch.zeros(6, 7, cols + 8, device="cuda", dtype=dtype)[:, :6, 4 : 4 + cols]
        wide.copy_(x.view(6, 6, cols))  # by halves, as the second; the last is shifted
        for weight, bias in (parameters, (None, None)):
            bias = None if statistic == "rms" else bias
            first, *others = (
                ops.layer_norm(rows, 1, weight, bias, 1e-5, statistic=statistic).view(torch.int16)
                for rows in (x, numerics.misaligned(x, 4), wide, numerics.misaligned(x))
            )
            for other in others:
                assert torch.equal(first, other.reshape(36, cols)), cols


@pytest.mark.gpu
@pytest.mark.parametrize(
    "problem",
    [
        *(Problem((100, cols), BF16, weight, residual_dtype=residual, activation=activation)
          for cols in (64, 96, 257, 768, 1027, 4096) for weight, residual, activation in
          ((None, None, "silu"), (None, BF16, None), (F32, None, None))),
        # Many such rows are read twice by persistent blocks.
        *(Problem((100, cols), dtype)
          for dtype, cols in [(F32, 8200), (F32, 10_000), (BF16, 8200), (BF16, 16_384),
                              (F16, 12_288)]),
    ],
    ids=str,
)  # fmt: skip
def test_few_rows_have_the_dx_of_many(problem):
    t = numerics.make(problem, "cuda")
    # Where dy is zero, dx is a zero of either sign, and the signs must agree too.
    t.dy[1::2] = 0
    strategies = ("few_rows", _strategy_of_many_rows(problem.cols, problem.dtype))
    dx = [ours(t.but(problem=replace(problem, forced=(None, s))))["dx"] for s in strategies]
    bits = {2: torch.int16, 4: torch.int32}[problem.dtype.itemsize]
    assert torch.equal(dx[0].view(bits), dx[1].view(bits))


# ---- Strategies forced for rows that plans give to others.


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 65, 700])
@pytest.mark.parametrize(
    ("dtype", "cols"), [(BF16, 31_744), (F32, 15_872), (F32, 13_056), (BF16, 15_875)]
)
def test_slices_without_a_warp_that_collects(dtype, cols, rows):
    """In a block whose slice takes nearly all threads, a working warp collects the sums."""
    strategy = "split blocks_per_row=2"
    with forced(strategy):
        plan = plan_here(rows, cols, dtype, backward=True, aligned=cols % 8 == 0)
    if plan is None or not plan["bulk"]:
        pytest.skip("the device has no room for rings of these slices")
    assert not plan["has_collector"]
    check(Problem((rows, cols), dtype, forced=(None, strategy)), "cuda", sample=1 << 17)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16], ids=ids)
def test_residual_on_the_longest_slices(dtype):
    """Beside a residual and no epilogue, backward's slices may take all threads of a block."""
    rows, cols = 210, 65_536
    plan = plan_here(rows, cols, dtype, backward=True, residual=True)
    assert plan["has_collector"] == (not plan["bulk"])
    check(Problem((rows, cols), dtype, residual_dtype=dtype), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["warp", "few_rows", "block", "split", "stream"])
def test_every_strategy_with_every_mask(strategy):
    options: Any = {"residual_dtype": F32, "activation": "silu", "forced": (None, strategy)}
    for cols in (64, 1000, 8192, 65536):
        try:
            numerics.check_wanted(Problem((40, cols), **options), "cuda")
        except (RuntimeError, ValueError) as error:
            if "cannot run" not in str(error):
                raise


# ---- Activations.


def of_bias(bias, activation):
    """activation(bias), and the slope there: rows of zeros are normalized to bias."""
    bias = bias.clone().requires_grad_()
    zeros = torch.zeros(1, bias.numel(), device=bias.device)
    y = fl.layer_norm(zeros, zeros[0], bias, activation=activation)[0]
    y.sum().backward()
    return y, bias.grad


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_activations_of_every_size_of_argument(device, activation):
    """Far from zero gelu and silu approach 0 and x, and their derivatives 0 and 1, also where the
    square of the argument is infinite. NaN and Inf give what PyTorch gives."""
    sizes = torch.tensor([100.0, 1e3, 1e10, 1e20, 1e30, 1e32, 1e38])
    sizes = sizes[:3] if activation == "gelu_tanh" else sizes  # PyTorch's cube overflows beyond
    z = torch.cat([torch.linspace(-12, 12, 4001), torch.zeros(1), sizes, -sizes]).to(device)
    wide = z.double().requires_grad_()
    expected = reference.activation_value(wide, activation)
    (slope,) = torch.autograd.grad(expected.sum(), wide)
    slope = torch.where(z.abs() < 50, slope, (z > 0).double())
    for found, exact in zip(of_bias(z, activation), (expected, slope), strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=2e-6)
    z = torch.tensor([float("nan"), float("inf")], device=device)
    stock = numerics.activate(z, activation)
    torch.testing.assert_close(of_bias(z, activation)[0], stock, equal_nan=True)


# ---- Where calls go.


def test_a_cuda_tensor_without_kernels_warns_once(monkeypatch):
    """In a build without nvcc the composite serves CUDA too. A stand-in with is_cuda suffices."""
    monkeypatch.setattr(formulas, "_warned", False)
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda *_: False)
    on_cuda = cast(torch.Tensor, SimpleNamespace(is_cuda=True))
    with pytest.warns(UserWarning, match="this build of fused_layernorm has no CUDA kernels"):
        formulas.warn_of_cuda(on_cuda)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        formulas.warn_of_cuda(on_cuda)

# SPDX-License-Identifier: Apache-2.0
"""RMSNorm, by the operators of LayerNorm: the numerics contract, orders of casts, bits."""

import functools

import numerics
import pytest
import torch
import torch.nn.functional as F
from numerics import Problem, ids

import fused_layernorm as fl

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
pytestmark = pytest.mark.cpu_operators  # the tests judge the operators, on the CPU too


rms = functools.partial(Problem, statistic="rms")


@pytest.mark.parametrize(
    "problem",
    [
        rms((40, 256), BF16, residual_dtype=BF16),
        rms((40, 257), BF16, residual_dtype=F32),
        rms((40, 4096), F32, residual_dtype=F32, activation="silu"),
        rms((40, 256), BF16, F32, activation="gelu", scale=2.0, out_dtype=F32),
        rms((40, 264), F16, affine="weight", weight_offset=1.0),
        rms((40, 1021), BF16, weight_offset=1.0),
        rms((40, 4096), BF16, F32, weight_offset=1.0, residual_dtype=BF16),
        rms((300, 768), F32, weight_offset=-0.5, activation="gelu_tanh"),
        rms((9, 20_000), BF16, weight_offset=1.0),
        rms((3, 70_001), F32, weight_offset=1.0),
        rms((40, 256), F64, weight_offset=1.0, activation="gelu"),
        rms((40, 256), affine="none"),
        rms((40, 256), affine="bias"),
        rms((2, 6, 384), BF16, affine="none", shift=(2, 1, 384), scale_by=(2, 1, 384)),
        rms((2, 6, 384), BF16, shift=(2, 6, 384), scale_by=(2, 6, 384)),
        rms((2, 40, 1152), BF16, affine="none", residual_dtype=BF16, gate=(2, 1, 1152),
            shift=(2, 1, 1152), scale_by=(2, 1, 1152)),
        rms((2, 40, 257), F32, affine="none", residual_dtype=F32, gate=(2, 1, 257)),
        rms((4, 3, 5, 7), normalized_ndim=3),
        rms((64, 512), BF16, mean=100.0),
        rms((64, 1000), F32, mean=1000.0),
    ],
    ids=str,
)  # fmt: skip
def test_accuracy_of_what_is_fused(device, problem):
    numerics.check(problem, device)


def _xhat(x):
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)


def _llama(x, weight):
    """LlamaRMSNorm's forward, as transformers writes it."""
    return weight * _xhat(x).to(x.dtype)


def _gemma(x, weight):
    """GemmaRMSNorm's forward, as transformers writes it."""
    return (_xhat(x) * (1.0 + weight.float())).type_as(x)


def _assert_alike(actual, wanted):
    """Equal in 99.9% of the elements, and elsewhere apart by one unit of xhat, and its rounding.

    Where xhat lies between two numbers of half precision, another rstd's last bit decides.
    """
    assert actual.dtype == wanted.dtype
    unlike = actual != wanted
    assert unlike.double().mean() <= 1e-3
    gap = (actual.double() - wanted.double()).abs()
    assert (gap <= 3.02 * numerics.rounding(wanted.double(), wanted.dtype)).all()


@pytest.mark.parametrize("cols", [64, 1000, 1021, 4096, 20_480])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=ids)
@pytest.mark.parametrize("form", [_llama, _gemma])
def test_orders_of_casts(device, form, dtype, cols):
    x = (torch.randn(64, cols, device=device) * 3).to(dtype)
    weight = torch.randn(cols, device=device).to(dtype)
    options = {"round_before_weight": True} if form is _llama else {"weight_offset": 1.0}
    _assert_alike(fl.rms_norm(x, weight, 1e-6, **options), form(x, weight))


def test_llama_with_a_float32_weight_gives_float32(device):
    x = torch.randn(64, 512, device=device).bfloat16()
    weight = torch.randn(512, device=device)
    y = fl.rms_norm(x, weight, 1e-6, round_before_weight=True, out_dtype=F32)
    wanted = _llama(x, weight)
    assert y.dtype == wanted.dtype == F32
    assert ((y - wanted).abs() > 1e-6 * wanted.abs()).double().mean() <= 1e-3
    torch.testing.assert_close(y, wanted, rtol=2**-7, atol=0)


@pytest.mark.parametrize(
    ("input_dtype", "residual_dtype", "gated", "activation"),
    [(BF16, F32, False, None), (F16, BF16, False, None), (BF16, BF16, False, None),
     (BF16, BF16, False, "silu"), (BF16, BF16, True, "silu")],
    ids=ids,
)  # fmt: skip
def test_rounding_is_to_the_dtype_of_input(device, input_dtype, residual_dtype, gated, activation):
    """Beside a residual, a gate and an activation, too."""
    problem = rms(
        (2, 32, 512), input_dtype, residual_dtype=residual_dtype, affine="weight", rounds=True,
        gate=(2, 1, 512) if gated else None, activation=activation, eps=1e-6,
    )  # fmt: skip
    t = numerics.make(problem, device)
    y, total = problem.forward(t)
    xhat = _xhat(total).to(input_dtype)
    z = numerics.activate(xhat.float() * t.weight.float(), activation)
    _assert_alike(y, z.to(input_dtype))


@pytest.mark.parametrize("eps", [None, 1e-3])
@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=ids)
def test_eps_is_that_of_pytorch(device, dtype, eps):
    x = (torch.randn(8, 64, device=device) * 1e-3).to(dtype)
    torch.testing.assert_close(fl.rms_norm(x, None, eps, normalized_shape=64),
                               F.rms_norm(x, (64,), None, eps))  # fmt: skip


def test_a_plain_call_on_the_cpu_is_pytorchs(monkeypatch):
    monkeypatch.setattr("fused_layernorm.stock._cpu_operators", False)
    x, norm = torch.randn(8, 64), fl.FusedRMSNorm(64)
    for y in (norm(x), fl.rms_norm(x, norm.weight)):
        assert torch.equal(y, F.rms_norm(x, (64,), norm.weight))


def test_large_values_make_no_nan_and_nan_stays_in_its_row(device):
    """The sum of such a row is Inf in float32, its sum of squares is not used."""
    x = torch.full((4, 4096), 1e17, device=device)
    x[1, 3] = float("nan")
    y = fl.rms_norm(x, torch.ones(4096, device=device))
    torch.testing.assert_close(y[[0, 2, 3]], torch.ones_like(y[1:]))
    assert y[1].isnan().all()


@pytest.mark.parametrize("operator", ["layer_norm_forward", "add_layer_norm_forward"])
def test_one_statistic_is_saved(device, operator):
    x = torch.randn(4, 64, device=device)
    rows = (x, x) if operator.startswith("add") else (x,)
    op = getattr(torch.ops.fused_layernorm, operator)
    *_, mean, rstd = op(*rows, 1, None, None, 1e-6, statistic="rms")
    assert mean.shape == (0,)
    assert rstd.shape == (4, 1)


def test_autocast(device):
    x = torch.randn(4, 64, device=device).bfloat16()
    weight = torch.randn(64, device=device)
    with torch.autocast(device, dtype=BF16):
        stock = F.rms_norm(x, (64,), weight.bfloat16())
        assert fl.rms_norm(x, weight).dtype == stock.dtype
        assert fl.rms_norm(x, weight, out_dtype=BF16).dtype == BF16

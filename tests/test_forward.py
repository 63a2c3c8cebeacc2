# SPDX-License-Identifier: Apache-2.0
"""Forward alone: accuracy, special values, statistics, strategies.

test_backward.py judges its accuracy too, and test_every_norm.py what every norm keeps.
"""

import itertools
import warnings
from types import SimpleNamespace
from typing import Any, cast

import numerics
import pytest
import reference
import torch
import torch.nn.functional as F
from numerics import Problem, ids, rows_for

from fused_layernorm import layer_norm
from fused_layernorm.ops import formulas

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64

pytestmark = pytest.mark.cpu_operators  # the tests judge the operators, on the CPU too
DTYPES = [(F32, None), (F16, None), (BF16, None), (F16, F32), (BF16, F32), (F64, None)]


@pytest.mark.parametrize("dtypes", DTYPES, ids=ids)
@pytest.mark.parametrize("cols", [1, 2, 3, 64, 257, 2047, 8191])
def test_accuracy_without_gradients(device, cols, dtypes):
    """On the CPU without statistics half precision has another path."""
    numerics.check(Problem((rows_for(cols), cols), *dtypes), device, backward=False)


# Rows of several strategies. Rows of odd length are not aligned.
@pytest.mark.gpu
@pytest.mark.parametrize("cols", [37, 64, 768, 1023, 1024, 4096, 16384, 65536, 150_528, 1_048_576])
def test_float32_is_as_accurate_as_pytorchs(cols):
    problem = Problem((max(2, 4_194_304 // cols), cols))
    numerics.check(problem, "cuda", backward=False, factor=1.02)


@pytest.mark.parametrize("mean", [0.0, 3.0, -20.0, 1e4])
@pytest.mark.parametrize("cols", [1, 2, 5, 64, 1000, 40_000])
def test_rows_of_any_mean_and_a_constant_row(device, cols, mean):
    """The pivot, subtracted before a row is summed, depends on the row's first two elements."""
    t = numerics.make(Problem((33, cols), mean=mean), device)
    t.x[0] = t.x[0, 0].clone()  # a constant row
    t.x[1, :2] = mean  # two equal elements in a row that is not constant
    actual = numerics.ours(t, backward=False)
    expected = numerics.exact(t, actual, backward=False)
    stock = numerics.stock(t, actual, backward=False)
    torch.testing.assert_close(actual["y"][0], t.bias.expand_as(actual["y"][0]))
    error, limit = ((one["y"].double() - expected["y"]).abs().max() for one in (actual, stock))
    assert error <= 2 * limit + 1e-6


@pytest.mark.parametrize("cols", [64, 1024, 4096, 65536])
def test_large_mean_without_cancellation(device, cols):
    """In float32, mean(x^2) - mean(x)^2 would lose this variance completely."""
    t = numerics.make(Problem((8, cols), affine="none", mean=1e4), device)
    y = layer_norm(t.x, normalized_shape=(cols,))
    # The mean itself can be off by half a unit in the last place of 1e4: 5e-4, in units of the
    # deviation, which is 1; the rest is the rounding of a sum.
    assert (y - reference.layer_norm(t.x, 1).y).abs().max() < 1e-2
    _, _, rstd = torch.ops.fused_layernorm.layer_norm_forward(t.x, 1, None, None, 1e-5)
    expected = reference.layer_norm(t.x, 1).rstd
    assert ((rstd - expected) / expected).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", [F32, BF16], ids=ids)
@pytest.mark.parametrize("cols", [1, 7, 64, 1000, 4096, 40000])
def test_statistics(device, cols, dtype):
    x = torch.randn(5, 3, cols, device=device).to(dtype)
    y, mean, rstd = torch.ops.fused_layernorm.layer_norm_forward(x, 1, None, None, 1e-5)
    assert mean.shape == rstd.shape == (5, 3, 1)
    assert mean.dtype == rstd.dtype == F32
    expected = reference.layer_norm(x, 1)
    torch.testing.assert_close(mean.double(), expected.mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rstd.double(), expected.rstd, rtol=1e-5, atol=0)
    assert torch.equal(y, torch.ops.fused_layernorm.layer_norm(x, 1, None, None, 1e-5))


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-5, 1.0, 100.0, -1.0, -1e3, 1])
def test_eps(device, eps):
    x = 4 * torch.randn(16, 48, device=device)  # a variance that eps = -1 does not cancel
    torch.testing.assert_close(
        layer_norm(x, normalized_shape=(48,), eps=eps),
        F.layer_norm(x, (48,), eps=eps),
        equal_nan=True,
    )


FORCED_COLS = [*numerics.FORCED_COLS, 17, 32768]
# "ring blocks_per_row=3": few columns of a block, and rows whose blocks meet.
STRATEGIES = ["warp", "block", "ring", "ring blocks_per_row=3", "stream"]
RMS = {"statistic": "rms"}
EPILOGUES: list[dict[str, Any]] = [
    {}, {"scale": 0.5}, {"scale": 0.5, "activation": "gelu"}, RMS, {**RMS, "weight_offset": 1.0},
    {"residual_dtype": F32}, {"residual_dtype": BF16},
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtypes", "layout", "epilogue"),
    [
        (dtypes, layout, epilogue)
        for dtypes, layout, epilogue in itertools.product(
            [(F32, None), (BF16, None), (BF16, F32), (F64, None)], STRATEGIES, EPILOGUES
        )
        if not {"statistic", "residual_dtype"} & {*epilogue} or dtypes in DTYPES[:3:2]
    ],
    ids=str,
)
def test_every_strategy(plans, layout, dtypes, epilogue):
    problem = Problem((1,), *dtypes, forced=(layout, None), **epilogue)
    numerics.check_strategy(plans, problem, FORCED_COLS, backward=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16], ids=ids)
def test_rows_by_halves_have_the_bits_of_shifted_rows(dtype):
    """Where a row stands decides how it is moved, and must not change its result."""
    for cols, statistic in itertools.product((4, 60, 356, 512, 924, 1492, 3196), ("layer", "rms")):
        numerics.check(Problem((36, cols), dtype, statistic=statistic), "cuda", backward=False)
        parameters = torch.randn(2, cols, device="cuda").to(dtype)
        x = (torch.randn(36, cols) + 100 * (torch.arange(36) % 3)[:, None]).to("cuda", dtype)
        wide = torch.zeros(6, 7, cols + 8, device="cuda", dtype=dtype)[:, :6, 4 : 4 + cols]
        wide.copy_(x.view(6, 6, cols))  # by halves, as the second; the last is shifted
        for weight, bias in (parameters, (None, None)):
            found = [
                torch.ops.fused_layernorm.layer_norm(
                    rows, 1, weight, None if statistic == "rms" else bias, 1e-5, statistic=statistic
                ).reshape(36, cols)
                for rows in (x, numerics.misaligned(x, 4), wide, numerics.misaligned(x))
            ]
            for other in found[1:]:
                assert torch.equal(found[0].view(torch.int16), other.view(torch.int16)), cols


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", ["odd column slice", "sliced leading"])
def test_every_strategy_with_odd_rows_of_memory(plans, strategy, kind):
    problem = Problem((1,), layout=kind, forced=(strategy, None))
    cols = (37, 64, 300, 1000, 8192, 65536)
    numerics.check_strategy(plans, problem, cols, backward=False, leading=(5, 4))


def test_a_cuda_tensor_without_kernels_warns_once(monkeypatch):
    """In a build without nvcc the composite serves CUDA too. A stand-in with is_cuda suffices."""
    monkeypatch.setattr(formulas, "_warned", False)
    monkeypatch.setattr(formulas, "_has_kernels", lambda: False)
    with pytest.warns(UserWarning, match="this build of fused_layernorm has no CUDA kernels"):
        formulas.warn_of_cuda(cast(torch.Tensor, SimpleNamespace(is_cuda=True)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        formulas.warn_of_cuda(cast(torch.Tensor, SimpleNamespace(is_cuda=True)))


def test_no_warning_where_the_kernels_are(device):
    if device == "cuda" and torch.ops.fused_layernorm._build_info() == "cpu only":
        pytest.skip("a build without CUDA kernels")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer_norm(torch.randn(3, 8, device=device), normalized_shape=8)

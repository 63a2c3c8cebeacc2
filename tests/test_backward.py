# SPDX-License-Identifier: Apache-2.0
"""Accuracy in both directions; the three gradients, the masks that select them, strategies.

test_every_norm.py has what every norm keeps.
"""

import itertools
from dataclasses import replace
from typing import Any

import numerics
import pytest
import reference
import torch
from numerics import Problem, covering, ids, ours, rows_for

from fused_layernorm import ada_layer_norm, layer_norm

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64

pytestmark = pytest.mark.cpu_operators  # the tests judge the operators, on the CPU too

SHORT = [1, 2, 3, 31, 33, 64, 100, 127, 255, 257, 768, 1023, 1024, 1025, 2047]
MIDDLE = [4095, 4096, 5120, 8191, 8192, 16384, 20001, 32768]
LONG = [(3, 65537), (64, 150528), (6, 262144), (3, 1_000_003), (4, 1_048_576), (2, 4_194_304)]
DTYPES = [(F32, None), (F16, None), (BF16, None), (F16, F32), (BF16, F32), (F64, None)]
XWB = ("x", "weight", "bias")


MIXED = [(F32, None), (BF16, F32)]


@pytest.mark.parametrize(
    "problem",
    [
        *(Problem((rows_for(cols), cols), *dtypes, statistic=statistic)
          for cols, dtypes, statistic in covering(SHORT, DTYPES, ("layer", "rms"))),
        *(Problem((5, cols), *dtypes) for cols in MIDDLE for dtypes in MIXED),
        *(Problem((37, cols), *dtypes, affine=affine)
          for cols, dtypes, affine in covering((3, 64, 1000, 5000), MIXED,
                                               ("both", "weight", "bias", "none"))),
        *(Problem(shape, normalized_ndim=ndim)
          for shape, ndim in [((4, 3, 5, 7), 3), ((40, 5, 6), 2), ((300,), 1), ((9, 1, 4, 1), 2),
                              ((2, 3, 1, 64), 1), ((2, 4, 16, 16), 3), ((5, 6), 2), ((1, 1), 1)]),
        *(Problem((32, cols), dtype, mean=1e4)
          for cols in (64, 1024, 4096, 65536) for dtype in (F32, F64)),
    ],
    ids=str,
)  # fmt: skip
def test_accuracy(device, problem):
    numerics.check(problem, device)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "problem",
    [
        *(Problem(shape, *dtypes) for shape in LONG for dtypes in DTYPES),
        # So many rows that every team works on several of them, one after another.
        *(Problem((3000, cols), *dtypes)
          for cols in (33, 96, 250, 257, 768, 1000, 2047, 2060, 4097, 5120, 9000, 16384)
          for dtypes in ((F32, None), (BF16, None), (BF16, F32))),
        Problem((16, 64, 256, 256), normalized_ndim=3),
        Problem((2, 64, 32, 64, 64)),
        Problem((300_000, 64)),
        Problem((70_001, 3)),
        Problem((1_000_000, 1)),
        Problem((20_000, 1024), BF16, F32),
        Problem((70_000, 2, 33), normalized_ndim=2),
        # x and dy stay in L2 as other data does.
        Problem((17_001, 1024), BF16),
        Problem((4_400, 2049)),
        *(Problem((400_001, cols), *dtypes) for dtypes in (*MIXED, (BF16, None))
          for cols in (1, 3, 8, 17, 37, 48, 49, 63, 64)),
        # Forward's persistent blocks, too, have several rows.
        *(Problem(shape, *dtypes) for dtypes in DTYPES
          for shape in [(400, 20_480), (300, 40_000), (70, 65_536)]),
        # Both sides of the kernels' own boundaries: one element, and one vector.
        *(Problem((max(3, 4096 // cols), cols), dtype)
          for row_bytes in (*(2**n for n in range(6, 18)), 10_240, 23_552, 28_672, 81_920, 114_688)
          for dtype in (F32, BF16, F64)
          for cols in (n + row_bytes // dtype.itemsize
                       for n in (-16 // dtype.itemsize, -1, 0, 1, 16 // dtype.itemsize))),
        *(Problem((1, cols), *dtypes, activation=activation)
          for cols, dtypes, activation in covering(
              (1, 2, 5, 64, 285, 768, 1492, 4096, 8191, 8192, 12_288, 16_384), DTYPES,
              (None, "gelu"))),
    ],
    ids=str,
)  # fmt: skip
def test_accuracy_on_cuda(problem):
    numerics.check(problem, "cuda")


# dweight and dbias over so many rows are sums of chains of rows.
@pytest.mark.gpu
@pytest.mark.parametrize(
    "problem",
    [
        *map(Problem, [(1_000_003, 37), (4_194_304, 64), (200_704, 96)]),
        *(
            Problem((1_000_003, cols), dtype, statistic="rms", weight_offset=offset)
            for cols, dtype, offset in ((37, F32, 0.0), (64, BF16, 1.0))
        ),
        *(numerics.modulated((groups, 300_000, 64)) for groups in (1, 3)),
    ],
    ids=str,
)
def test_sums_over_many_rows_are_as_accurate_as_pytorchs(problem):
    numerics.check(problem, "cuda", factor=1.02)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("dtypes", [(F32, None), (BF16, F32)], ids=ids)
@pytest.mark.parametrize("cols", [5, 64, 1024, 9000])
def test_gradients_that_are_asked_for_alone(device, cols, dtypes, activation):
    numerics.check_wanted(Problem((50, cols), *dtypes, activation=activation), device)


FUSED: list[dict[str, Any]] = [
    {"activation": "silu"}, {"residual_dtype": BF16}, {"weight_dtype": F32}
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(
    "problem",
    [
        *(Problem((100, cols), BF16, **options)
          for cols in (64, 96, 257, 768, 1027, 4096) for options in FUSED),
        # Many such rows are read twice by persistent blocks.
        *(Problem((100, cols), dtype)
          for dtype, cols in [(F32, 8200), (F32, 10_000), (BF16, 8200), (BF16, 16_384),
                              (F16, 12_288)]),
    ],
    ids=str,
)  # fmt: skip
def test_few_rows_have_the_dx_of_many(plans, problem):
    t = numerics.make(problem, "cuda")
    # Where dy is zero, dx is a zero of either sign, and the signs must agree too.
    t.dy[1::2] = 0
    strategies = ("few_rows", _strategy_of_many_rows(plans, problem.cols, problem.dtype))
    dx = [ours(t.but(problem=replace(problem, forced=(None, s))))["dx"] for s in strategies]
    bits = {2: torch.int16, 4: torch.int32}[problem.dtype.itemsize]
    assert torch.equal(dx[0].view(bits), dx[1].view(bits))


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("cols", [5, 768, 1001, 16_384])
def test_a_single_row_has_the_same_bits_whichever_gradients_are_asked_for(poison, cols, activation):
    problem = Problem((1, cols), BF16, activation=activation)
    numerics.check_wanted(problem, "cuda", poison, bits=True)


def _strategy_of_many_rows(plans, cols, dtype):
    strategy = plans.of(1 << 20, cols, dtype, backward=True)["strategy"]
    assert strategy in ("warp", "block")
    return strategy


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 300])
@pytest.mark.parametrize("strategy", ["of many rows", "few_rows", "stream"])
@pytest.mark.parametrize("cols", [24, 96, 250, 300, 768, 1027])
def test_a_large_constant_row(request, plans, strategy, cols, rows):
    """Threads without columns must not let the row's large mean into its sums."""
    if strategy == "of many rows":
        strategy = _strategy_of_many_rows(plans, cols, F32)
    x = torch.full((rows, cols), 1e37, device="cuda", requires_grad=True)
    dy = torch.randn(rows, cols, device="cuda")
    y = layer_norm(x, normalized_shape=(cols,))
    plans.force(f"strategy={strategy}")  # of backward alone: forward has no few_rows
    p = plans.of(rows, cols, F32, backward=True)
    ring = p.get("bulk") and p["width"] > 1
    if ring and p["team_threads"] * p["vecs"] * p["width"] > cols:
        reason = "a ring has zeros where a row has no columns (docs/tuning-log.md, Accuracy)"
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    (dx,) = torch.autograd.grad(y, x, dy)
    # The variance is 0, so xhat is 0 and rstd is 1 / sqrt(eps).
    expected = (dy - dy.double().mean(1, keepdim=True)) * numerics.EPS**-0.5
    torch.testing.assert_close(dx.double(), expected, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zero_weight_has_a_gradient(device, zero):
    """dweight is computed from x. y could not give it, because y lacks x where weight is zero."""
    t = numerics.make(Problem((50, 64)), device)
    t.weight[::2] = zero
    found, expected = numerics.ours(t), numerics.exact(t)
    torch.testing.assert_close(found["dx"].double(), expected["dx"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found["dweight"].double(), expected["dweight"], rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [{}, {"activation": "gelu", "scale": 0.5}, {"statistic": "rms"}], ids=str
)
@pytest.mark.parametrize("dtypes", [(F32, None), (BF16, F32), (F64, None)], ids=ids)
@pytest.mark.parametrize(
    "layout",
    ["warp", "few_rows", "few_rows vecs=4", "block", "block bulk=0", "split", "split bulk=0",
     "stream"],
)  # fmt: skip
def test_every_strategy(plans, layout, dtypes, options):
    """Chips before Hopper have no bulk copies: bulk=0 tests their kernels."""
    problem = Problem((1,), *dtypes, forced=(None, layout), **options)
    # A large sample, because the greatest error, PyTorch's too, is that of a single element.
    numerics.check_strategy(plans, problem, numerics.FORCED_COLS, sample=1 << 17)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 65, 700])
@pytest.mark.parametrize(
    ("dtype", "cols"), [(BF16, 31_744), (F32, 15_872), (F32, 13_056), (BF16, 15_875)]
)
def test_slices_without_a_warp_that_collects(plans, dtype, cols, rows):
    """In a block whose slice takes nearly all threads, a working warp collects the sums."""
    layout = "split blocks_per_row=2"
    plans.force(f"strategy={layout}")
    aligned = cols % 8 == 0
    plan = plans.of(rows, cols, dtype, backward=True, aligned=aligned)
    plans.force(None)
    if plan is None or not plan["bulk"]:
        pytest.skip("the device has no room for rings of these slices")
    assert not plan["has_collector"]
    numerics.check(Problem((rows, cols), dtype, forced=(None, layout)), "cuda", sample=1 << 17)


@pytest.mark.gpu
@pytest.mark.parametrize("wanted", [w for n in (1, 2, 3) for w in itertools.combinations(XWB, n)])
@pytest.mark.parametrize("strategy", ["warp", "few_rows", "block", "split", "stream"])
def test_every_strategy_with_every_mask(strategy, wanted):
    for cols in (64, 1000, 8192, 65536):
        options: dict[str, Any] = {"residual_dtype": F32, "activation": "silu"}
        t = numerics.make(Problem((40, cols), forced=(None, strategy), **options), "cuda")
        try:
            found = ours(t, wanted=wanted)
        except (RuntimeError, ValueError) as error:
            if "cannot run" not in str(error):
                raise
            continue
        expected = numerics.exact(t, found)
        numerics.assert_close({f"d{n}": found[f"d{n}"] for n in wanted}, expected, 1e-4)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("cols", [64, 4096, 65536])
def test_sums_over_more_elements_than_32_bits_count(needs_memory, cols):
    """test_every_norm.py looks at their rows."""
    needs_memory(40)
    rows = 2**31 // cols + 5
    x = torch.empty(rows, cols, device="cuda", dtype=BF16).normal_()
    dy = torch.empty_like(x).normal_()
    weight, bias = leaves = [torch.ones(cols, device="cuda", requires_grad=True) for _ in "wb"]
    found = torch.autograd.grad(layer_norm(x, weight, bias), leaves, dy)
    expected = [torch.zeros(cols, device="cuda", dtype=F64) for _ in "wb"]
    for part in (slice(start, start + rows // 64) for start in range(0, rows, rows // 64)):
        _, *sums = reference.layer_norm_backward(dy[part], x[part], 1)
        expected = [a + b for a, b in zip(expected, sums, strict=True)]
    # A sum of n numbers of deviation 1 is of order sqrt(n). Float32 sums taken in blocks err by far
    # less than 1e-4 of that.
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=1e-4 * rows**0.5)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "rows", "cols", "given"),
    [(F32, 1, 2**30 + 4104, "weight"), (BF16, 1, 2**31 - 5, "weight"),
     (F32, 1, 2**30 + 4104, "weight scale"), (F32, 2, 2**30 + 4104, "scale")],
    ids=str,
)  # fmt: skip
def test_columns_beyond_what_32_bits_count(needs_memory, dtype, rows, cols, given):
    """The bytes of a float32 row, and the columns to the last chunk's end, overflow 32 bits. Two
    rows share a modulation, one is a group of its own."""
    needs_memory(60)
    x, dy = (torch.empty(rows, cols, device="cuda", dtype=dtype).normal_() for _ in "xd")
    leaves = {n: torch.empty(cols, device="cuda", dtype=dtype).normal_() for n in given.split()}
    weight, scale = leaves.get("weight"), leaves.get("scale")
    name = given.split()[-1]
    x.requires_grad_(), leaves[name].requires_grad_()
    if scale is None:
        y = layer_norm(x, weight)
    else:
        y = ada_layer_norm(x, scale.detach(), scale, weight, normalized_shape=(cols,))
    found = torch.autograd.grad(y, (x, leaves[name]), dy)
    del y
    x = x.detach()
    parts = [slice(start, start + 2**26) for start in range(0, cols, 2**26)]
    mean, square, c1, c2 = (x.new_zeros(rows, 1, dtype=F64) for _ in range(4))
    for part in parts:
        mean += x[:, part].double().sum(1, keepdim=True) / cols
    for part in parts:
        square += (x[:, part].double() - mean).square().sum(1, keepdim=True) / cols
    rstd = (square + numerics.EPS).rsqrt()

    def of(part):
        """xhat, and the gradients of scale or weight and of xhat, row by row."""
        xhat, g = (x[:, part].double() - mean) * rstd, dy[:, part].double()
        factor = 1 if weight is None else weight.detach()[part].double()
        if scale is None:
            return xhat, g * xhat, g * factor
        return xhat, g * xhat * factor, g * factor * (1 + scale.detach()[part].double())

    for part in parts:
        xhat, _, g = of(part)
        c1 += g.sum(1, keepdim=True) / cols
        c2 += (g * xhat).sum(1, keepdim=True) / cols
    allowed = 2**-7 if dtype == BF16 else 1e-5
    for part in parts:
        xhat, dleaf, g = of(part)
        dx = rstd * (g - c1 - xhat * c2)
        for one, other in ((found[0][:, part], dx), (found[1][part], dleaf.sum(0))):
            torch.testing.assert_close(one.double(), other, rtol=allowed, atol=allowed)

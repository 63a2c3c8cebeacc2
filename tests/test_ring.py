# SPDX-License-Identifier: Apache-2.0
"""Forward by the ring: rows that several blocks share, or that one block cannot keep.

What all strategies must keep is tested with the others (test_forward.py, test_plan.py).
"""

import pytest
import reference
import torch
from golden_plans import plan
from numerics import Problem, check, covering, ids

import fused_layernorm as fl

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
TYPES = [
    (F32, F32, F32), (F32, F32, BF16), (F32, F32, F16), (BF16, BF16, BF16), (BF16, F32, BF16),
    (BF16, F32, F32), (F16, F16, F16), (F16, F32, F16), (F16, F32, F32),
]  # fmt: skip


def is_ring(cols, dtype=F32, rows=16, **problem):
    return plan(rows, cols, dtype=dtype, **problem)["strategy"] == "ring"


# ---- The plan.


def longest(dtype, **problem):
    """The most columns that the ring takes, by bisection."""
    unit = 16 // min(dtype.itemsize, problem.get("y_dtype", dtype).itemsize)
    low, high = 65536 // unit, 2**25 // unit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_ring(middle * unit, dtype, **problem) else (low, middle)
    return low * unit


@pytest.mark.parametrize(("dtype", "cols"), [(F32, 4_325_376), (BF16, 8_650_752)])
def test_the_longest_rows(dtype, cols):
    """132 blocks of 16 stages each. With an epilogue all parameters lie in shared memory, which has
    room for half of that and some more."""
    assert longest(dtype) == cols
    long = plan(16, cols, dtype=dtype)
    assert (long["long"], long["spans"], long["blocks_per_row"]) == (True, 16, 132)
    assert cols // 2 < longest(dtype, has_epilogue=True) < cols * 5 // 8
    assert plan(16, cols + 8, dtype=dtype)["strategy"] == "stream"


@pytest.mark.parametrize(
    "problem",
    [{"residual": True}, {"aligned": False}, {"dtype": torch.float64}, {"device": "A100"},
     {"group_rows": 8, "dtype": BF16}],
    ids=str,
)  # fmt: skip
def test_what_the_ring_does_not_take(problem):
    assert is_ring(150_528, BF16)
    for cols in (150_528, *(150_529, 150_530) * ("aligned" in problem)):
        assert not is_ring(cols, **{"dtype": F32, **problem})


# ---- On the device.

# Rows of one block and of many, with a last span that is whole, short, or that not all blocks and
# lanes have. With parameters in shared memory, and in registers.
COLS = [40_960, 40_968, 65_536, 65_544, 131_072, 131_064, 150_528, 262_144, 1_000_008]
LONG_COLS = [40_968, 150_528, 1_000_008, 3_000_008, 4_194_304, 4_325_376]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("cols", "types", "options"),
    covering(COLS, TYPES, [{}, {"activation": "gelu", "scale": 0.5}]),
    ids=ids,
)
def test_accuracy(plans, cols, types, options):
    plans.force("strategy=ring long=0")
    problem = Problem((3, cols), *types[:2], out_dtype=types[2], **options)
    check(problem, "cuda", backward=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16], ids=ids)
@pytest.mark.parametrize("cols", LONG_COLS)
@pytest.mark.parametrize("statistic", ["layer", "rms"])
def test_accuracy_with_parameters_in_registers(plans, cols, dtype, statistic):
    plans.force("strategy=ring long=1")
    cols *= F32.itemsize // dtype.itemsize
    assert plans.of(2, cols, dtype)["long"]
    check(Problem((2, cols), dtype, statistic=statistic), "cuda", backward=False)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [{"activation": "silu"}, {"weight_offset": 1.0}, {"affine": "none"}, {"affine": "weight"},
     {"mean": 1000.0}, {"statistic": "rms", "weight_offset": 1.0, "affine": "weight"}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dtype", [F32, BF16], ids=ids)
def test_accuracy_of_what_is_fused(plans, dtype, options):
    plans.force("strategy=ring")
    check(Problem((5, 150_528), dtype=dtype, **options), "cuda", backward=False)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("cols", "blocks", "long"),
    covering([8, 2048, 4104, 16_392], [1, 2, 3, 7, 33, 132], [0, 1]),
)
def test_any_number_of_blocks_a_row(plans, cols, blocks, long):
    """Also where most blocks and measurers have no columns."""
    plans.force(f"strategy=ring blocks_per_row={blocks} long={long}")
    if plans.of(70, cols, F32) is None:
        pytest.skip("this device has fewer multiprocessors")
    check(Problem((70, cols)), "cuda", backward=False)


@pytest.mark.gpu
@pytest.mark.parametrize(("cols", "dtype"), [(150_528, F32), (4_194_304, F32), (65_536, BF16)])
def test_a_row_is_the_same_in_any_batch(plans, poison, cols, dtype):
    plans.force("strategy=ring")
    x = torch.randn(37 if cols < 10**6 else 5, cols, device="cuda").to(dtype)
    weight, bias = (torch.randn(cols, device="cuda").to(dtype) for _ in range(2))
    poison(x)
    y = fl.layer_norm(x, weight, bias)
    for row in (0, 3, len(x) - 1):
        poison(x[row : row + 1])
        assert torch.equal(fl.layer_norm(x[row : row + 1], weight, bias)[0], y[row])
    # With gradients, and of rows with others between them.
    graph = fl.layer_norm(x.clone().requires_grad_(), weight, bias)
    assert torch.equal(graph, y)
    spread = torch.randn(len(x), cols + 64, device="cuda").to(dtype)
    spread[:, :cols] = x
    assert torch.equal(fl.layer_norm(spread[:, :cols], weight, bias), y)


@pytest.mark.gpu
@pytest.mark.parametrize("statistic", ["layer", "rms"])
@pytest.mark.parametrize("mean", [0.0, 100.0])
@pytest.mark.parametrize(("rows", "cols"), [(40, 40_960), (30, 262_144), (2, 4_194_304)])
def test_statistics_are_rounded_once(plans, rows, cols, mean, statistic):
    """mean and rstd are as near as float32 lets them be, some units in the last place."""
    plans.force("strategy=ring")
    x = torch.randn(rows, cols, device="cuda") + mean
    _, found_mean, found_rstd = torch.ops.fused_layernorm.layer_norm_forward(
        x, 1, None, None, 1e-5, statistic=statistic
    )
    wanted = reference.layer_norm(x, 1, statistic=statistic)
    rstd = wanted.rstd.flatten()
    assert ((found_rstd.flatten().double() - rstd).abs() <= 2.0**-23 * rstd).all()
    if statistic == "layer":
        slack = 2.0**-23 * mean + 2.0**-24 * 4 / rstd
        assert ((found_mean.flatten() - wanted.mean.flatten()).abs() <= slack).all()


@pytest.mark.gpu
@pytest.mark.parametrize("statistic", ["layer", "rms"])
def test_constant_rows_and_rows_that_are_not_finite(plans, statistic):
    plans.force("strategy=ring")
    cols = 150_528
    x = torch.randn(6, cols, device="cuda")
    x[1], x[2] = 3.0, 1e4
    x[3, 77], x[4, -1] = float("nan"), float("inf")
    function = fl.layer_norm if statistic == "layer" else fl.rms_norm
    y = function(x, normalized_shape=(cols,))
    if statistic == "layer":
        assert (y[1:3] == 0).all()
        assert y[3:5].isnan().all()
    else:
        assert ((y[1:3] - 1).abs() < 1e-5).all()
        assert y[3].isnan().all()
        assert y[4, :-1].eq(0).all()
        assert y[4, -1].isnan()
    assert y[[0, 5]].isfinite().all()

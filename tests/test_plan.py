"""The plan: which kernel for which problem. Plain host code, which needs no GPU."""

import itertools
import json

import pytest
import torch

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
STRATEGIES = ("warp", "block", "split", "stream")
# capability, multiprocessors, bytes of shared memory that one block may have
DEVICES = {
    "T4": (75, 40, 65536),
    "A100": (80, 108, 166912),
    "RTX 4090": (89, 128, 101376),
    "H100": (90, 132, 232448),
    "H100 slice": (90, 16, 232448),
    "B200": (100, 148, 232448),
}
ROWS = [1, 2, 3, 16, 100, 4096, 32768, 4_194_304, 2**31 - 1]
COLS = sorted(
    {1, 2, 3, 31, 33, 64, 96, 100, 768, 1152, 2047, 5120, 20001, 150528, 1_000_003, 4_194_304}
    | {n + d for n in (2**k for k in range(5, 23)) for d in (-1, 0, 1)}
    | {2**31 - 1}
)
DTYPES = [F32, BF16, F64]
MAX_NUMEL = 2**38  # more than any device holds


def plan(rows, cols, dtype=F32, *, backward=False, aligned=None, device="H100"):
    if aligned is None:
        aligned = cols * dtype.itemsize % 16 == 0
    return json.loads(
        torch.ops.fused_layernorm._plan(rows, cols, dtype, backward, aligned, *DEVICES[device])
    )


def every_problem(rows=ROWS):
    for cols, dtype, backward in itertools.product(COLS, DTYPES, (False, True)):
        for aligned in {False, cols * dtype.itemsize % 16 == 0}:
            for n in rows:
                if n * cols <= MAX_NUMEL:
                    yield n, cols, dtype, {"backward": backward, "aligned": aligned}


@pytest.fixture(autouse=True)
def _nothing_forced():
    yield
    torch.ops.fused_layernorm._force(None)


@pytest.mark.parametrize("device", DEVICES)
def test_every_problem_has_a_plan_that_covers_its_rows(device):
    capability, sms, shared_memory = DEVICES[device]
    for rows, cols, dtype, options in every_problem():
        p = plan(rows, cols, dtype, device=device, **options)
        problem = (rows, cols, dtype, options, p)
        assert p["strategy"] in STRATEGIES, problem
        # Every column belongs to one slice, and no slice is empty.
        assert p["slice_cols"] * p["blocks_per_row"] >= cols, problem
        assert p["slice_cols"] * (p["blocks_per_row"] - 1) < cols, problem
        # A slice fits what its threads hold.
        assert p["threads"] * p["vecs"] * p["width"] >= min(p["slice_cols"], cols), problem
        assert 1 <= p["blocks"] < 2**31, problem  # a grid's limit
        assert p["threads"] * p["groups"] <= 1024, problem
        assert p["shared_bytes"] <= shared_memory, problem
        # Forward moves rows that begin anywhere by vectors, if it can hold them in registers.
        shifts = not options["backward"] and not options["aligned"] and p["strategy"] != "stream"
        assert p["shifted"] == shifts, problem
        wide = options["aligned"] or shifts
        assert p["width"] == (16 // dtype.itemsize if wide else 1), problem
        if not options["backward"] and p["strategy"] in ("warp", "block"):
            # Of a thread's vectors only the last may be missing.
            assert p["threads"] * (p["vecs"] - 1) * p["width"] < cols, problem
        if p["strategy"] == "warp":
            assert p["threads"] <= 32, problem
        if p["strategy"] == "split":
            # Blocks that wait for each other are all resident at once.
            assert p["blocks"] <= sms, problem
            assert p["blocks"] % p["blocks_per_row"] == 0, problem
        if p["bulk"]:
            assert capability >= 90, problem


@pytest.mark.parametrize("device", DEVICES)
def test_order_of_summation_does_not_depend_on_the_number_of_rows(device):
    fixed = ("strategy", "width", "vecs", "threads", "blocks_per_row", "slice_cols")
    for _, cols, dtype, options in every_problem(rows=[0]):
        plans = [plan(rows, cols, dtype, device=device, **options) for rows in ROWS]
        for p in plans[1:]:
            assert [p[key] for key in fixed] == [plans[0][key] for key in fixed], (cols, dtype)


@pytest.mark.parametrize("cols", [96, 768, 1023, 4096])
def test_few_rows_go_in_one_launch(cols):
    """Blocks on columns beside those on rows, and so no partial sums to add up."""
    few = plan(128, cols, BF16, backward=True)
    assert few["few_rows"]
    assert few["column_blocks"] > 0
    assert few["blocks"] * few["groups"] >= 128
    assert few["workspace_bytes"] == 0
    many = plan(100_000, cols, BF16, backward=True)
    assert not many["few_rows"]
    assert many["column_blocks"] == 0
    assert many["partials"] > 1


@pytest.mark.parametrize("device", DEVICES)
def test_workspace_is_bounded(device):
    _, sms, _ = DEVICES[device]
    for rows, cols, dtype, options in every_problem(rows=[1, 16, 4096, 100_000]):
        p = plan(rows, cols, dtype, device=device, **options)
        problem = (rows, cols, dtype, options, p)
        acc = max(4, dtype.itemsize)
        if options["backward"]:
            # Partials of dweight and dbias, and two sums of every part of a row: what a block reads
            # of it, or a warp.
            parts_of_row = p["blocks_per_row"] * (
                p["threads"] // 32 if p["strategy"] == "stream" else 1
            )
            parts = 2 * acc * rows * (parts_of_row + 1) + 1024
            assert p["workspace_bytes"] <= 2 * sms * cols * acc + parts, problem
        elif p["strategy"] in ("warp", "block"):
            assert p["workspace_bytes"] == 0, problem


def test_a_row_is_summed_alike_wherever_it_begins():
    """Forward that has a row in registers: the same thread owns the same columns."""
    fixed = ("strategy", "width", "vecs", "threads")
    for cols, dtype in itertools.product(COLS, DTYPES):
        if cols * dtype.itemsize % 16 != 0:
            continue
        there, anywhere = (plan(4096, cols, dtype, aligned=aligned) for aligned in (True, False))
        if there["strategy"] in ("warp", "block"):
            assert [anywhere[key] for key in fixed] == [there[key] for key in fixed], (cols, dtype)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_strategies_follow_the_length_of_the_row(dtype, backward):
    """Each strategy has one range of lengths, and longer rows never go back to a shorter's."""
    order = [
        STRATEGIES.index(plan(4096, cols, dtype, backward=backward)["strategy"])
        for cols in range(16, 2**22, 4096 + 16)
        if cols * dtype.itemsize % 16 == 0
    ]
    assert order == sorted(order)


def test_long_rows_go_to_registers_or_to_a_ring():
    """By measurement (plan.cpp). A ring has stages; rows longer than rings hold need registers."""
    for dtype, block, kept in ((F32, 16_384, 20_480), (BF16, 32_768, 57_344)):
        step = 16 // dtype.itemsize
        for cols, strategy, blocks_per_row, ring in (
            (block, "block", 1, False),
            (block + step, "split", 1, False),
            (kept, "split", 1, False),
            (kept + step, "split", 2, True),
            (1_048_576, "split", 8, True),
            (4_194_304, "split", 60, False),
        ):
            p = plan(4096, cols, dtype)
            assert p["strategy"] == strategy, (cols, dtype)
            assert (p["stages"] > 0) == ring, (cols, dtype)
            assert p["blocks_per_row"] >= blocks_per_row, (cols, dtype)
    # The parameters of such a row must fit beside it.
    assert plan(4096, 8_388_608)["strategy"] == "stream"


def test_kernelbench_problems():
    """The two ends of the range: both with vectors of 16 bytes."""
    short = plan(4_194_304, 64)
    assert short["strategy"] == "warp"
    assert short["width"] == 4
    long = plan(16, 4_194_304)
    assert long["strategy"] == "split"
    assert long["width"] == 4
    assert long["blocks"] >= 120  # the whole chip on 16 rows


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("backward", [False, True])
def test_a_forced_strategy_is_used_or_refused(strategy, backward):
    torch.ops.fused_layernorm._force(f"strategy={strategy}")
    used = 0
    for cols in COLS[:-1]:
        try:
            assert plan(4096, cols, backward=backward)["strategy"] == strategy
            used += 1
        except (RuntimeError, ValueError) as error:
            refusal = str(error)
            direction = "backward" if backward else "forward"
            expected = f"the strategy {strategy} cannot run {direction} rows of {cols} columns"
            if expected not in refusal:
                raise
    assert used


def test_force_is_undone():
    before = plan(4096, 1024)
    torch.ops.fused_layernorm._force("strategy=stream")
    assert plan(4096, 1024) != before
    torch.ops.fused_layernorm._force(None)
    assert plan(4096, 1024) == before


def test_an_unknown_strategy_is_refused():
    with pytest.raises(
        (RuntimeError, ValueError), match="no strategy is called 'fast': expected warp, block"
    ):
        torch.ops.fused_layernorm._force("strategy=fast")


@pytest.mark.parametrize(
    ("cols", "dtype", "groups"),
    [
        (1024, BF16, 8),
        (2048, F32, 4),
        (3960, BF16, 2),
        (3968, BF16, 1),
        (4096, F32, 1),
        (8192, BF16, 1),
    ],
)
def test_backward_groups_fill_a_block_but_not_with_full_ones(cols, dtype, groups):
    """As many rows at once as a block has threads for; two that are nearly full would hinder each
    other (plan.cpp has the times)."""
    assert plan(32768, cols, dtype, backward=True)["groups"] == groups
    assert plan(2049, cols, dtype, backward=True)["groups"] == groups

# SPDX-License-Identifier: Apache-2.0
"""The plans of gated RMSNorm's kernels, which need no GPU; their results are in test_gated.py."""

import itertools
import json
import random
from typing import Any

import pytest
import torch
from golden_plans import DEVICES

import fused_layernorm  # noqa: F401  (registers the operators)

ops: Any = torch.ops.fused_layernorm
F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
MOST_THREADS = {False: 1024, True: 512}  # of a block that holds a group, by direction


def plan(rows, cols, groups=1, dtype=BF16, *, device="H100", **problem):
    return json.loads(ops._plan_gated(rows, cols, groups, dtype, **DEVICES[device], **problem))


def test_kernels_can_run_every_plan():
    choose, seen = random.Random(0), set()
    for _ in range(4000):
        rows, groups = int(2 ** choose.uniform(0, 22)), choose.choice([1, 1, 2, 3, 8, 100, 700])
        cols = int(2 ** choose.uniform(0, 19))
        if choose.random() < 0.8:
            cols = -(-cols // 8) * 8
        if rows * groups * cols > 2**32:
            continue
        dtype, backward = choose.choice([F32, F16, BF16, F64]), choose.random() < 0.6
        problem: dict[str, Any] = {
            "backward": backward,
            "aligned": choose.random() < 0.9,
            "needs_dweight": choose.random() < 0.8,
            "bias": choose.random() < 0.2,
        }
        device = choose.choice(list(DEVICES))
        p = plan(rows, cols, groups, dtype, device=device, **problem)
        width, vecs, teams = 16 // dtype.itemsize, p["vecs"], p["teams"]
        of_team = p["threads"] // teams
        sets = p["blocks"] // groups
        assert p["blocks"] == sets * groups
        assert p["threads"] % 32 == 0
        assert p["threads"] <= MOST_THREADS[backward]
        if p["strategy"] == "held":
            assert problem["aligned"]
            assert cols % width == 0
            assert dtype != F64
            assert not (backward and problem["bias"])
            # A thread has a whole group's vectors, and teams of less than a warp are logical warps.
            assert cols <= of_team * vecs * width
            assert of_team % 32 == 0 or 32 % of_team == 0
            assert teams == 1 or of_team <= 32
        else:
            assert (teams, vecs) == (1, 0)
        if not backward:
            assert (sets - 1) * teams < rows <= sets * teams
            assert p["workspace_bytes"] == 0
        else:
            # Few rows of logical warps of one vector have one block, which writes dweight itself.
            few = vecs == 1 and rows * of_team <= 512 and problem["needs_dweight"]
            assert p["partials"] == sets
            assert sets == 1 if few else sets >= 2
            sums = problem["needs_dweight"] + problem["bias"] if sets > 1 else 0
            acc = 8 if dtype == F64 else 4
            kept = (2 if problem["bias"] else 1) if sums else 0
            assert p["workspace_bytes"] == kept * sets * groups * cols * acc
            if p["strategy"] == "held":
                # x, gate and dy of the rows of a block, which leave room for the sums of its warps.
                stage = 3 * 16 * vecs * p["threads"]
                assert p["stages"] in (1, 2)
                assert p["shared_bytes"] == p["stages"] * stage
                assert p["shared_bytes"] + 512 <= DEVICES[device]["shared_memory"]
                assert teams == 1 or p["threads"] // 32 * cols * 4 <= stage
        seen.add((p["strategy"], backward, vecs, teams > 1))
    assert len(seen) == 8


def test_how_a_group_is_laid_out_depends_on_its_length_alone():
    for cols, backward in itertools.product((64, 128, 200, 1024, 1032, 8192, 16_384), (0, 1)):
        plans = [plan(rows, cols, groups, backward=bool(backward), needs_dweight=False)
                 for rows in (1, 60, 100_000) for groups in (1, 8)]  # fmt: skip
        assert len({(p["strategy"], p["threads"], p["teams"], p["vecs"]) for p in plans}) == 1
        assert plans[0]["strategy"] == "held"


def test_few_rows_are_of_one_block_that_has_dweight():
    for cols, rows in ((64, 64), (128, 32), (200, 16), (256, 16)):
        few, more = (plan(n, cols, backward=True) for n in (rows, rows + 1))
        assert (few["blocks"], few["stages"], few["workspace_bytes"]) == (1, 1, 0)
        assert few["threads"] // few["teams"] == more["threads"] // more["teams"]
        assert more["blocks"] > 1


def test_which_groups_are_held():
    assert [plan(9, cols)["strategy"] for cols in (1000, 1001, 32_768, 32_776)] == [
        "held", "looped", "held", "looped"]  # fmt: skip
    longest = [plan(9, cols, backward=True)["strategy"] for cols in (16_384, 16_392)]
    assert longest == ["held", "looped"]
    assert plan(9, 1024, backward=True, bias=True)["strategy"] == "looped"


def test_large_forward_calls_leave_l2_as_other_kernels_do():
    assert [plan(rows, 8192)["stays_in_l2"] for rows in (100, 16_384)] == [False, True]
    assert not plan(16_384, 8192, backward=True)["stays_in_l2"]


def test_which_rows_come_ahead():
    cols, stages = (128, 8192, 16_384), {}
    for device in ("H100", "L40S", "T4"):
        stages[device] = [
            plan(9, n, backward=True, needs_dweight=False, device=device)["stages"] for n in cols
        ]
    assert stages == {"H100": [2, 2, 2], "L40S": [2, 2, 1], "T4": [2, 1, 0]}
    # Two blocks a multiprocessor.
    assert plan(10_000, 8192, backward=True)["blocks"] == 264


def test_bad_problems_are_refused():
    with pytest.raises((RuntimeError, ValueError), match="expected rows of groups of columns"):
        plan(0, 128)
    assert ops._plan_gated(2**31 - 1, 1, 2**31 - 1, F32, aligned=False) == "null"

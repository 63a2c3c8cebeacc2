# SPDX-License-Identifier: Apache-2.0
"""The plan of groups of channels: which kernels, without a GPU.

The principles that every plan keeps are tested here; up to which sizes each strategy is taken
stands in golden_plans.txt.
"""

import math
import random
from typing import Any

import pytest
import torch
from golden_plans import DEVICES, group_plan

import fused_layernorm  # noqa: F401  (registers the operators)

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
# The types of x and y (dy) that have kernels.
TYPES = [*((t, t) for t in (F32, F16, BF16, F64)), (F16, F32), (BF16, F32)]
RESERVED = 3072  # kReservedSharedMemory
MOST_BLOCKS = 2**31 - 1
SAMPLES = (1, 2, 8, 64)


def problems(count, seed=0) -> Any:
    """Yields (samples, channels, positions, groups, problem), of all types, layouts and chips."""
    choose = random.Random(seed)
    for _ in range(count):
        groups = choose.choice([1, 2, 3, 8, 32, 32, 32, 64])
        channels = groups * choose.choice([1, 1, 2, 3, 4, 7, 10, 16, 40, 128])
        positions = int(2 ** choose.uniform(0, 21))
        if choose.random() < 0.7:
            positions = -(-positions // 8) * 8
        x, y = choose.choice(TYPES)
        problem: dict[str, Any] = {
            "dtype": x,
            "y_dtype": y,
            "backward": choose.random() < 0.5,
            "channels_last": choose.random() < 0.4,
            "aligned": choose.random() < 0.8,
            "blocks_meet": choose.random() < 0.8,
            "device": choose.choice(list(DEVICES)),
        }
        if channels * positions <= 1 << 31:
            yield choose.choice(SAMPLES), channels, positions, groups, problem


def check(p, sizes, problem):
    samples, channels, positions, groups = sizes
    chip, size = DEVICES[problem["device"]], problem["dtype"].itemsize
    strategy, width, backward = p["strategy"], p["width"], problem["backward"]
    extent = channels if problem["channels_last"] else positions
    units = p.get("vector_units", 1)  # channels are counted in these: elements, or else vectors
    assert width in ((1, 4, 8) if size == 2 and not problem["channels_last"] else (1, 16 // size))
    assert width != 4 or size == 4 or problem["y_dtype"] == problem["dtype"]
    assert units == 1 or (strategy == "held" and units == width == 16 // size > 4)
    assert width == 1 or problem["aligned"]
    assert (extent if units == 1 else channels // groups * positions) % width == 0
    assert 32 <= p["threads"] <= 1024
    assert p["threads"] % 32 == 0
    assert 1 <= p["blocks"] <= MOST_BLOCKS
    assert p["shared_bytes"] <= chip["shared_memory"] - RESERVED
    of_group = channels // groups
    vectors = of_group * positions // width
    if strategy == "held":
        assert p["cluster"] == p["blocks_per_group"] in (1, 2, 8)
        assert p["blocks"] == samples * groups * p["cluster"]
        # Every block has some vectors, and all of them are somebody's.
        assert (p["cluster"] - 1) * p["slice_vectors"] < vectors
        assert vectors <= p["cluster"] * p["slice_vectors"]
        held = p["slice_vectors"] * width * size
        assert p["shared_bytes"] >= held * (1 + backward * problem["y_dtype"].itemsize / size)
        if p["cluster"] > 1:
            assert chip["capability"] >= 90
            assert problem["blocks_meet"]
    elif strategy == "split":
        assert not problem["channels_last"]
        assert problem["dtype"] != F64
        assert chip["capability"] >= 90
        assert problem["blocks_meet"]
        blocks, of_warp = p["blocks_per_group"], p["segments_of_warp"]
        segments = of_group * p["pieces"]
        assert (blocks - 1) * 16 * of_warp < segments <= blocks * 16 * of_warp
        assert math.ceil(positions // width / p["pieces"]) <= (64 if backward else 128)
        # All blocks are resident at once, and a warp waits only for what comes.
        assert p["blocks"] <= chip["sms"]
        assert p["blocks"] % blocks == 0
        assert p["slots"] == p["lag"] + (2 if problem["backward"] else 3)
        assert of_warp - 1 <= p["lag"] <= 7 * of_warp - 1
        assert of_warp <= 5
    else:
        assert p["cluster"] == 1
        if problem["channels_last"]:
            slice_vectors = p["columns"] * p["slices"]
            assert slice_vectors - p["columns"] < channels // width <= slice_vectors
            assert p["columns"] * p["rows"] <= p["threads"] <= 256
            assert p["tile_positions"] % p["rows"] == 0
            assert (p["tiles"] - 1) * p["tile_positions"] < positions
            assert positions <= p["tiles"] * p["tile_positions"]
            assert p["blocks"] == samples * p["tiles"] * p["slices"]
        else:
            tile = 256 * (4 if backward else 8)
            pieces = p["pieces"]
            if pieces > 1:
                assert p["tile_channels"] == 1
                assert math.ceil(positions // width / pieces) <= tile
            else:
                assert p["tile_channels"] * (positions // width) <= tile
            assert p["tiles"] == math.ceil(of_group / p["tile_channels"]) * pieces
            assert p["blocks"] == samples * groups * p["tiles"]


def test_kernels_can_run_every_plan():
    seen, widths = set(), set()
    for *sizes, problem in problems(6000):
        p = group_plan(*sizes, **problem)
        check(p, sizes, problem)
        seen.add((p["strategy"], problem["backward"], problem["channels_last"], p["cluster"]))
        widths.add((p["strategy"], p["width"], p.get("vector_units", 1)))
    assert {(s, b, last) for s, b, last, _ in seen} == {
        *((strategy, b, False) for strategy in ("held", "split", "tiles") for b in (False, True)),
        *(("tiles", b, True) for b in (False, True)),
    }
    assert {cluster for *_, cluster in seen} == {1, 2, 8}
    assert widths >= {("held", 8, 8), ("held", 4, 1), ("tiles", 4, 1)}


def test_how_a_group_is_split_does_not_depend_on_the_number_of_samples():
    for _, *sizes, problem in problems(3000, seed=1):
        plans = [group_plan(samples, *sizes, **problem) for samples in SAMPLES]
        for p in plans:
            del p["blocks"], p["workspace_bytes"]
        assert all(p == plans[0] for p in plans)


def test_what_kernels_cannot_count_has_no_plan():
    assert group_plan(1, 1, 2**30, 1) is not None
    assert group_plan(1, 1, 2**30 + 1, 1) is None
    assert group_plan(2**20, 2**11, 1, 2**11) is None
    assert group_plan(1, 2**30, 1, 1) is not None
    assert group_plan(1, 2**30 + 1, 1, 1) is None


def test_no_line_of_memory_has_parts_and_totals():
    """One kernel writes parts while the next one, which reads totals, may have started."""
    seen = 0
    for samples, channels, positions, groups, problem in problems(3000, seed=2):
        p = group_plan(samples, channels, positions, groups, **problem)
        if p["strategy"] == "tiles":
            totals = samples * groups * 2 * (8 if problem["dtype"] == F64 else 4)
            assert (p["workspace_bytes"] - totals) % 128 == 0
            seen += 1
    assert seen > 100


def test_bad_problems_are_refused():
    for sizes in ((0, 4, 1, 2), (1, 4, 0, 2), (1, 4, 1, 3), (1, 4, 1, 0)):
        with pytest.raises((RuntimeError, ValueError), match="expected channels in whole groups"):
            group_plan(*sizes)
    with pytest.raises((RuntimeError, ValueError), match="no kernel takes x of"):
        group_plan(1, 4, 1, 2, BF16, y_dtype=F16)

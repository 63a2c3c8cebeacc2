# SPDX-License-Identifier: Apache-2.0
"""Small problems of every kernel for compute-sanitizer; ci/on_gpu runs them.

A problem is ragged if the teams of a block have unequal numbers of rows of a group: racecheck can
follow only equal ones (ci/racecheck_limits.cu).
"""

import itertools
import math
from typing import Any

import numerics
import pytest
import torch
from families import BF16, F32, Gated, Heads, Packed, of_groups, over_channels
from golden_plans import plan
from numerics import Problem, modulated

pytestmark = [pytest.mark.gpu, pytest.mark.sanitizer]


def of_many(cols, dtype, **options):
    """Backward by the strategy that the plan chooses for many rows."""
    fused = {"residual": "residual_dtype" in options, "has_epilogue": "activation" in options}
    weight_dtype = options.get("weight_dtype")
    p = plan(1 << 20, cols, dtype, backward=True, weight_dtype=weight_dtype, **fused)
    forced = (None, p["strategy"])
    ragged = {"ragged": Problem((300, cols), dtype, forced=forced, **options)}
    if p["strategy"] != "block":
        return {"": ragged["ragged"]}
    rows = 2 * p["blocks"] * p["teams"]
    return {**ragged, "": Problem((rows, cols), dtype, forced=forced, **options)}


def of_modulations(shape, kind, dtype, *, weight=False, forced=None):
    """Alone, of a sum and of a gated sum."""
    given: Any = {
        "dtypes": (dtype, dtype, dtype, dtype if weight else None),
        "forced": (None, forced),
    }
    yield modulated(shape, kind, **given)
    yield modulated(shape, kind, residual_dtype=dtype, **given)
    yield modulated(shape, kind, gated=True, **{**given, "forced": (None, None)})


def teams_of(cols, dtype, gated):
    """The teams of a block that works on groups of rows, one if it is a single team."""
    p = plan(1 << 14, cols, dtype, backward=True, group_rows=64, gated=gated)
    return (p or {}).get("teams", 1)


def problems() -> Any:
    """Problems, or several by the word that their names begin with."""
    for dtype in (BF16, F32):
        few: Any = {"dtype": dtype, "forced": (None, "few_rows")}
        for rows, cols in ((37, 64), (300, 64), (300, 1000), (300, 37), (300, 4096), (300, 16_384),
                           (30, 65_537), (8, 131_072), (1, 1_000_000)):  # fmt: skip
            rms: Any = {"dtype": dtype, "statistic": "rms", "affine": "weight"}
            yield Problem((rows, cols), **rms)
            yield Problem((rows, cols), **rms, weight_offset=1.0, residual_dtype=dtype)
            yield Problem((rows, cols), **rms, rounds=True)
        # Planes moved by 16 bytes, by 8, one by one and as whole samples; y is NCHW and NHWC.
        for shape in ((3, 96, 28, 28), (2, 384, 14, 14), (3, 30, 5, 9), (600, 32, 7, 7)):
            for activation, by_view in itertools.product((None, "silu"), (False, True)):
                yield over_channels(shape, dtype, F32, activation=activation, by_view=by_view)
        for cols in (7, 64, 96, 768, 1023, 2047, 4096, 5003, 16_384):
            # few_rows has no kernels for float32 rows that are worked on in slices.
            if cols <= 8192 or dtype == BF16:
                yield Problem((37, cols), **few)
            yield of_many(cols, dtype)
        for cols in (1000, 1027):
            fused: Any = {"weight_dtype": F32, "residual_dtype": dtype}
            yield Problem((37, cols), activation="silu", **few, **fused)
            yield of_many(cols, dtype, activation="gelu", **fused)
        # Shifted rows, a few and many.
        for rows, layout in itertools.product((37, 5000), ("contiguous", "odd column slice")):
            yield Problem((rows, 231), dtype, layout=layout)
        # Whole vectors of a lane, and a last one that is missing. In backward a single row.
        for vectors in (8, 16, 24, 32, 64, 96, 128) if dtype == BF16 else (16, 32, 64, 96):
            cols = vectors * 16 // dtype.itemsize
            for rows in (1, 9, 37):
                yield Problem((rows, cols), dtype, forced=("warp", None))
            yield Problem((37, cols - 3), dtype)
        # Modulations per group and per row, with rings and without, in stream, with odd columns.
        for cols in (7, 64, 1023, 1152, 3072, 6000, 12_288):
            tokens = math.lcm(*(teams_of(cols, dtype, gated) for gated in (False, True)))
            for problem in of_modulations((3, 150, cols), "sample", dtype):
                yield {"ragged": problem}
            yield from of_modulations((2 * 132, tokens, cols), "sample", dtype)
            yield from of_modulations((2, 20, cols), "token", dtype, weight=True)
        yield from of_modulations((140, 3, 96), "sample", dtype, weight=True)
        yield from of_modulations((2, 9, 24_576), "sample", dtype)
        for cols in (96, 9000, 16_384):
            yield from of_modulations((2, 20, cols), "token", dtype)
        yield from of_modulations((2, 90, 1152), "sample", dtype, weight=True, forced="stream")
        yield from of_modulations((2, 9, 1155), "token", dtype, forced="stream")
        # Groups held by a block or a cluster, shared, and by tiles, in both layouts.
        planes = (
            (3, 6, 50), (2, 24, 1600), (2, 8, 13_000), (2, 12, 6000), (1, 4, 110_000),
            (3, 4, 220_000), (9, 4, 220_000), (1, 2, 3_000_000), (2, 6, 10_403), (2, 6, 60_001),
            # Channels that begin within vectors, or in the middle of them.
            (2, 32, 49), (2, 1200, 49), (2, 6, 196), (1, 1024, 196), (2, 8, 10_403),
            (1, 16, 10_403),
        )  # fmt: skip
        last = (
            (2, 12, 50), (3, 320, 700), (1, 1280, 100), (2, 33, 1000), (1, 4160, 9), (2, 1280, 9),
        )  # fmt: skip
        how: Any = {"activation": "silu"}
        if dtype == BF16:
            how = {"activation": "leaky_relu", "modulation": "both"}
        for shapes, layout in ((planes, "contiguous"), (last, "channels_last")):
            for sizes in shapes:
                groups = 2 if sizes[1] % 2 == 0 else 3
                yield of_groups(sizes, groups, (dtype, F32), layout=layout, **how)
        for groups in (256, 32, 3, 1):  # of one position
            yield of_groups((5, 3072), groups, (dtype, F32), **how)
        yield from (of_groups((5, channels), 1, (dtype, F32)) for channels in (16_384, 4099))
        yield of_groups((5, 4096), 256, (dtype, F32), modulation="both")
        # Heads: whole vectors and single elements, rotated in part.
        rotations = ((64, None), (80, 32), (128, 64), (256, None), (30, 6), (256, 20))
        for (cols, rotary), flag in itertools.product(rotations, (False, True)):
            given: Any = {"rotary": rotary, "interleaved": flag, "layout": "packed"}
            yield Heads((2, 37, cols), dtype, F32, statistic="layer", affine="both", **given)
            yield Heads((2, 37, cols), dtype, statistic=None, affine="none", **given)
        for positions, layout in ((2000, "packed"), (37, "contiguous")):
            yield Heads((2, positions, 128), dtype, layout=layout)
        for cols, packing in ((64, "h3d"), (30, "3hd")):
            yield Packed((2, 37, cols), dtype, packing=packing)
            yield Packed((2, 37, cols), dtype, packing=packing, statistic=None, affine="none")
        # Gates: logical warps, blocks, groups of columns, rows that are read twice. More rows than
        # all blocks have at once, some of them without a row, and 13: one block has all.
        for rows, cols, size, affine in (
            *((9000, cols, None, "weight") for cols in (64, 128, 512)), (9000, 1024, 256, "weight"),
            (1100, 6144, None, "weight"), (1100, 8192, 1024, "weight"), (9000, 100, None, "both"),
            (3, 40_000, None, "both"), *((13, cols, None, "weight") for cols in (64, 128)),
            (13, 512, 128, "weight"),
        ):  # fmt: skip
            for first, activation in ((False, "silu"), (True, "sigmoid")):
                gates: Any = {"gate_first": first, "gate_activation": activation,
                              "group_size": size, "gate_layout": "sliced"}  # fmt: skip
                yield Gated((rows, cols), dtype, F32, affine=affine, **gates)
                # Of half precision and short rows, products are rounded in pairs.
                yield Gated((rows, cols), dtype, affine="weight", rounds=True, **gates)
    for channels in (32, 1200):
        yield of_groups((2, channels, 49), 2, (BF16, None), affine="none", out_dtype=F32)
    # Rows by halves of vectors; longer than a team keeps.
    yield from (Problem((37, cols), BF16) for cols in (4, 356, 1492, 3908))
    yield Problem((37, 9216), forced=(None, "few_rows"))
    # Several blocks a row, and rows longer than the chip holds.
    for rows, cols, dtype in ((8, 65_536, BF16), (4, 65_537, BF16), (30, 65_537, F32),
                              (10, 300_000, F32), (2, 4_194_304, F32)):  # fmt: skip
        yield Problem((rows, cols), dtype)
    yield Problem((6, 40_000), BF16, residual_dtype=BF16)
    # All threads of a block work on rows, and one of their warps collects the sums. All blocks
    # share each row, so that seven rows are enough for every place of the ring to be used again.
    yield Problem((7, 15_936 * 132), BF16)
    yield Problem((7, 15_936 * 132), BF16, residual_dtype=BF16)
    yield Problem((7, 7968 * 132))
    # Rings: blocks with and without columns, and rows enough for each slot to be used again.
    for cols, blocks in ((4096, 1), (16_392, 3), (5000, 16)):
        ring: Any = {"forced": (f"ring blocks_per_row={blocks}", None)}
        yield Problem((70, cols), **ring)
        yield Problem((70, cols), BF16, activation="gelu", **ring)
        yield Problem((70, cols), BF16, F32, **ring)
    # A row in the registers of one block: a block for each row, and persistent blocks.
    for cols, dtype in ((32_768, BF16), (16_384, F32), (40_960, BF16), (20_480, F32)):
        yield from (Problem((300, cols), dtype, activation=a) for a in (None, "silu"))


def named():
    for given in problems():
        for word, problem in (given if isinstance(given, dict) else {"": given}).items():
            yield pytest.param(problem, id=f"{word}-{problem}" if word else str(problem))


@pytest.mark.parametrize("problem", named())
def test_every_kernel(problem):
    """The results are judged by the other tests."""
    is_forward = isinstance(problem, Gated) and problem.rounds
    t = numerics.make(problem, "cuda")
    try:
        numerics.ours(t, backward=not is_forward)
    except (RuntimeError, ValueError) as error:  # chips before Hopper have no rings
        if "cannot run" not in str(error):
            raise
        pytest.skip(str(error))
    torch.cuda.synchronize()

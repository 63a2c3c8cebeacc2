# SPDX-License-Identifier: Apache-2.0
"""The plan: which kernel for which problem. Plain host code, which needs no GPU.

The principles that every plan keeps are tested here. Which of the plans that keep them is taken,
up to which number of rows and columns, stands in golden_plans.txt.
"""

import itertools
import math
import random
import re
from typing import Any

import golden_plans
import pytest
import torch
from golden_plans import BF16, DEVICES, F16, F32, F64, gated_plan, group_plan, plan
from numerics import forced

OPS: Any = torch.ops.fused_layernorm
FORWARD = ("warp", "block", "ring", "stream")
BACKWARD = ("warp", "few_rows", "block", "split", "stream")
# The types of x, weight and y that have kernels (dy is of y's type).
TYPES = [
    *((dtype, dtype, dtype) for dtype in (F32, F16, BF16, F64)),
    *((F32, F32, y) for y in (F16, BF16)),
    *((x, F32, y) for x in (F16, BF16) for y in (x, F32)),
]
ROWS = [1, 2, 3, 16, 100, 128, 256, 1025, 4096, 32768, 4_194_304, 2**31 - 1]
COLS = sorted(
    {1, 2, 3, 31, 33, 64, 96, 100, 356, 768, 1152, 2047, 5120, 20001, 150528, 1_000_003, 2_600_440}
    | {n + d for n in (2**k for k in range(5, 23)) for d in (-1, 0, 1)}
    | {2**31 - 1}
)
MAX_NUMEL = 2**38  # more than any device holds
MANY = 100_000  # rows
LANES = (1, 2, 4, 8, 16, 32)  # of a logical warp


def refused(match):
    """Expects the bindings' error; its type depends on the version of torch."""
    return pytest.raises((RuntimeError, ValueError), match=match)


def of_types(types):
    return dict(zip(("dtype", "weight_dtype", "y_dtype"), types, strict=True))


def unit(problem):
    """The number of columns that 16 bytes of the narrower of x and y hold."""
    x, y = problem["dtype"], problem.get("y_dtype") or problem["dtype"]
    return 16 // min(x.itemsize, y.itemsize)


def every_problem(rows=ROWS, seed=0):
    """Yields (a list of rows, columns, problem) for all lengths, types, directions, alignments.

    Each problem has one random choice of a residual, an epilogue and dparams.
    """
    choose = random.Random(seed)
    for cols, types, backward in itertools.product(COLS, TYPES, (False, True)):
        problem = {**of_types(types), "backward": backward}
        for aligned in {False, cols % unit(problem) == 0 or (None if cols % 4 == 0 else False)}:
            fused = {
                "residual": choose.random() < 0.4,
                "has_epilogue": choose.random() < 0.4,
                "needs_dparams": choose.random() < 0.7,
            }
            some_rows = [n for n in rows if n * cols <= MAX_NUMEL]
            yield some_rows, cols, {**problem, **fused, "aligned": aligned}


# ---- The kernels can run every plan.


def one_type(problem):
    return problem["dtype"] == problem["weight_dtype"] == problem["y_dtype"] != F64


def bare(problem):
    return not any(problem.get(one) for one in ("residual", "has_epilogue", "group_rows"))


def check_forward(p, rows, cols, problem, chip):
    width = 16 // problem["dtype"].itemsize
    vectors = -(-cols // width)
    strategy = p["strategy"]
    if strategy == "warp":
        assert p["blocks"] * (p["threads"] // p["lanes"]) >= rows
        held = p["lanes"]
    if strategy == "block":
        assert p["blocks"] == rows
        held = p["threads"]
    if strategy in ("warp", "block"):
        halves = bare(problem) and one_type(problem) and width == 8
        halves = halves and problem["aligned"] is None
        moves = "vectors" if problem["aligned"] else "halves" if halves else "shifted"
        assert p.get("moves", "vectors") == moves
        if strategy == "block":
            # Loads of weight and bias with the row leave registers for 512 threads.
            all_at_once = rows <= chip["sms"] * (512 // held)
            may_be_early = one_type(problem) and bare(problem) and p["vecs"] <= 5
            assert p["early"] == (may_be_early and problem["aligned"] and all_at_once)
        assert p["shared_bytes"] == p["workspace_bytes"] == 0
        # The row fits, and a thread lacks at most the last of its vectors.
        assert held * (p["vecs"] - 1) < vectors <= held * p["vecs"]
    if strategy == "ring":
        assert problem["aligned"]
        assert not problem["residual"]
        assert problem["dtype"] != F64
        # A span has 512 vectors of each block, and the last one may have fewer.
        assert 512 * p["blocks_per_row"] * (p["spans"] - 1) < vectors
        assert vectors <= 512 * p["blocks_per_row"] * p["spans"]
        # The ring holds a row, but no more rows than the block keeps the statistics of.
        assert p["spans"] < p["stages"] < 8 * p["spans"]
        # Beside it a block has the parameters of its columns, unless they lie in registers.
        parameters = p["shared_bytes"] - p["stages"] * 8192
        assert parameters >= 0
        needed = 0 if p["long"] else 2 * cols * problem["weight_dtype"].itemsize
        assert needed <= parameters * p["blocks_per_row"]
        assert not p["long"] or bare(problem)
    if strategy == "stream":
        assert p["width"] == (width if problem["aligned"] else 1)
        assert p["slice_cols"] == p["threads"] * p["width"] * (16 if p["width"] == 1 else 8)
        assert p["blocks"] == rows * p["blocks_per_row"]


def check_team(p, vectors, dtype, collecting=0):
    """Asserts that the threads of a team have all vectors of a row or slice."""
    assert vectors <= p["team_threads"] * p["vecs"]
    assert p["threads"] == p["teams"] * p["team_threads"] + collecting <= 512
    of_all = (8,) if dtype is F64 else (16, 32) if p["width"] > 1 else (16,)
    assert p.get("by_lanes") or p["vecs"] * p["width"] in of_all


def check_backward(p, rows, cols, problem, _chip):
    x_size, y_size = problem["dtype"].itemsize, problem["y_dtype"].itemsize
    width = 16 // x_size if problem["aligned"] else 1
    vectors = -(-cols // width)
    strategy = p["strategy"]
    assert p["width"] == width
    if strategy == "warp":
        assert vectors <= p["lanes"] * p["vecs"]
        assert p["shared_bytes"] >= 2 * cols * max(4, x_size)
    if strategy == "few_rows":
        assert problem["dtype"] != F64
        check_team(p, vectors, problem["dtype"])
        assert p["by_lanes"] or p["teams"] <= 15  # each has a hardware barrier
        assert (p["blocks"] - p["column_blocks"]) * p["teams"] >= rows
        assert (p["column_blocks"] > 0) == problem["needs_dparams"]
        if problem["needs_dparams"]:
            # Every column belongs to one block on columns, and no such block is empty.
            lanes = p["threads"] if rows == 1 else 32 // x_size if width == 1 else 4
            block_cols = lanes * width
            assert (p["column_blocks"] - 1) * block_cols < cols <= p["column_blocks"] * block_cols
        assert p["workspace_bytes"] == 0
        assert p["by_lanes"] == (vectors <= 32 * (2 if width > 1 else 8))
    if strategy in ("block", "split"):
        slice_cols = p.get("slice_cols", cols)
        slice_vectors = -(-slice_cols // width)
        assert (p["team_threads"] - 32) * p["vecs"] < slice_vectors
        assert p["stage_cols"] >= slice_cols
        collecting = 32 if strategy == "split" and p["has_collector"] else 0
        check_team(p, slice_vectors, problem["dtype"], collecting)
        if p["bulk"]:
            assert 1 <= p["stages"] <= 8
            ring = p["stages"] * p["teams"] * p["stage_cols"] * (x_size + y_size)
            params = p["stage_cols"] * problem["weight_dtype"].itemsize
            assert ring + params <= p["shared_bytes"]
        else:
            assert p["stages"] == 0
    if strategy == "split":
        assert problem["dtype"] != F64
        assert 1 <= p["lag"] < 4
        assert not p["bulk"] or p["lag"] + 2 <= p["stages"]
        assert p["has_collector"] or p["bulk"]
        assert p["slice_cols"] % (unit(problem) if width > 1 else 1) == 0
        # Aligned slices are whole cache lines, unless the last block would then have no columns.
        line_cols = 128 // min(x_size, y_size)
        if width > 1 and p["slice_cols"] % line_cols != 0:
            in_lines = -(-p["slice_cols"] // line_cols) * line_cols
            assert in_lines * (p["blocks_per_row"] - 1) >= cols
    if strategy == "stream":
        assert p["slice_cols"] == p["threads"] * 16
    if strategy != "few_rows":
        sets = p["blocks"] // p.get("blocks_per_row", 1)
        assert p["partials"] == sets <= rows
        sums = 2 * p["partials"] * cols * max(4, x_size)
        left = problem["needs_dparams"] and p["partials"] > 1
        assert p["workspace_bytes"] == p["partials_offset"] + (sums if left else 0)


@pytest.mark.parametrize("device", DEVICES)
def test_every_problem_has_a_plan_that_covers_its_rows(device):
    chip = DEVICES[device]
    for all_rows, cols, problem in every_problem():
        for rows in all_rows:
            p = plan(rows, cols, device=device, **problem)
            strategies = BACKWARD if problem["backward"] else FORWARD
            try:
                assert p["strategy"] in strategies
                assert p.get("lanes", 1) in LANES
                if "slice_cols" in p:
                    # Every column belongs to one slice or chunk of the row, and none is empty.
                    parts = p["blocks_per_row"]
                    assert p["slice_cols"] * (parts - 1) < cols <= p["slice_cols"] * parts
                assert 1 <= p["blocks"] < 2**31  # a grid's limit
                assert p["threads"] <= 1024
                # The plan leaves what kernels declare; backward's warp kernel declares nothing.
                declared = {"ring": 2048, "warp": 0}.get(p["strategy"], 3072)
                assert p["shared_bytes"] + declared <= chip["shared_memory"]
                if p["strategy"] in ("split", "ring"):
                    # Blocks that wait for each other are all resident at once.
                    assert p["blocks"] <= chip["sms"]
                    assert p["blocks"] % p["blocks_per_row"] == 0
                if p.get("bulk") or p["strategy"] == "ring":
                    assert chip["capability"] >= 90
                check = check_backward if problem["backward"] else check_forward
                check(p, rows, cols, problem, chip)
                # Two numbers for every row, and two for every part of it: what one block reads, or
                # in backward's stream one warp. The parameters' sums are of a block each.
                acc, parts = max(4, problem["dtype"].itemsize), p.get("blocks_per_row", 0)
                if problem["backward"] and p["strategy"] == "stream":
                    parts *= 8
                most = 2 * acc * rows * (parts + 1) + 1024 if parts else 0
                if problem["backward"] and problem["needs_dparams"]:
                    most += 2 * chip["sms"] * cols * acc
                assert p["workspace_bytes"] <= most
            except AssertionError as error:
                raise AssertionError(f"{rows} x {cols} {problem}: {p}") from error


@pytest.mark.parametrize("device", DEVICES)
def test_order_of_summation_does_not_depend_on_the_number_of_rows(device):
    """Few rows may run in other blocks, but a team owns a row as it does with many rows."""
    fixed = ("strategy", "width", "vecs", "lanes", "team_threads", "blocks_per_row", "slice_cols",
             "spans")  # fmt: skip
    for _, cols, problem in every_problem(rows=[]):
        plans = [plan(rows, cols, device=device, **problem) for rows in ROWS]
        many = plans[-1]
        for p in plans:
            if p["strategy"] == "few_rows":
                assert many["strategy"] == ("warp" if p["by_lanes"] else "block")
                team = "lanes" if p["by_lanes"] else "team_threads"
                assert (p["width"], p["vecs"]) == (many["width"], many["vecs"])
                assert p["team_threads"] == many[team], (cols, problem)
            else:
                same = [p.get(key) for key in fixed]
                assert same == [many.get(key) for key in fixed], (cols, problem)
                if not problem["backward"] and p["strategy"] == "block":
                    assert p["threads"] == many["threads"], (cols, problem)


# (groups, rows of each group): one group, groups of one row, and what lies between.
GROUPS = [(1, 1), (1, 4096), (64, 256), (100, 7), (133, 2), (4096, 1), (2, 17_776), (1, 32_760)]


def check_groups(p, groups, group_rows, cols, problem):
    """Asserts that backward's kernels for modulated rows can run this plan."""
    rows, acc = groups * group_rows, max(4, problem["dtype"].itemsize)
    x_size, y_size = problem["dtype"].itemsize, problem["y_dtype"].itemsize
    width = 16 // x_size if problem["aligned"] else 1
    assert p["width"] == width
    sums = 2 + problem.get("gated", False)
    if p["strategy"] == "rows":
        assert group_rows == 1
        assert problem["dtype"] != F64
        check_team(p, -(-cols // width), problem["dtype"])
        assert p["threads"] % 32 == 0
        assert p["by_lanes"] == (problem["aligned"] is True and cols <= 32 * width)
        assert not problem.get("gated") or width > 1
        if p["by_lanes"]:
            assert p["vecs"] == 2
        else:
            most = 384 if p["vecs"] * width == 16 and not problem.get("gated") else 512
            assert p["team_threads"] <= most
        assert p["blocks"] == -(-rows // p["teams"])
        assert p["workspace_bytes"] == p["shared_bytes"] == 0
    elif p["strategy"] == "group":
        assert problem["dtype"] != F64
        assert group_rows > 1
        check_team(p, -(-cols // width), problem["dtype"])
        assert p["teams"] <= 15  # each has a hardware barrier
        assert p["blocks"] == p["sets"] <= rows
        held = p["vecs"] * width <= 16 and not problem.get("gated")
        assert p["bulk"] or held
        ring = 0
        if p["bulk"]:
            assert (1 if held else 2) <= p["stages"] <= 8
            stage = x_size + y_size
            params = 4 * (1 + problem.get("gated", False))
            ring = p["stage_cols"] * (p["stages"] * p["teams"] * stage + params)
        of_teams = 2 * 4 * p["vecs"] * width * p["threads"] if p["teams"] > 1 else 0
        assert p["shared_bytes"] >= ring + of_teams
        if 20 * (p["blocks"] // groups * groups) >= 19 * p["blocks"]:
            assert p["blocks"] % groups == 0
    elif p["strategy"] == "warp":
        assert problem["aligned"]
        assert problem["dtype"] != F64
        assert not problem.get("gated")
        assert cols <= 32 * width
        assert cols <= p["lanes"] * p["vecs"] * width
        assert p["blocks"] == p["sets"] <= rows
        assert p["shared_bytes"] >= 2 * cols * acc
    else:
        assert p["strategy"] == "stream"
        assert p["slice_cols"] == p["threads"] * 16
        assert p["blocks"] == p["sets"] * p["blocks_per_row"]
    if group_rows > 1:
        assert p["parts"] == p["sets"] + groups - 1
        left = sums * p["parts"] * cols * acc if problem["needs_dparams"] else 0
        assert p["workspace_bytes"] == p["partials_offset"] + left


@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
@pytest.mark.parametrize("device", DEVICES)
def test_every_modulated_problem_has_a_plan(device, gated):
    chip = DEVICES[device]
    fixed = ("strategy", "width", "vecs", "lanes", "team_threads", "slice_cols")
    for _, cols, problem in every_problem(rows=[]):
        if not problem["backward"]:
            continue
        problem = {**problem, "has_epilogue": False, "gated": gated}
        teams: dict[bool, list[Any]] = {}
        for groups, group_rows in GROUPS:
            if groups * group_rows * cols > MAX_NUMEL:
                continue
            modulated = {**problem, "group_rows": group_rows}
            p = plan(groups * group_rows, cols, device=device, **modulated)
            if p is None:  # a separate kernel computes the gate's gradient
                assert gated
                continue
            try:
                assert p.get("lanes", 1) in LANES
                reserved = 0 if p["strategy"] == "warp" else 3072
                assert p["shared_bytes"] + reserved <= chip["shared_memory"]
                assert not p.get("bulk") or chip["capability"] >= 90
                check_groups(p, groups, group_rows, cols, modulated)
                # A row is summed in one order in all groups of several rows, and in all of one.
                order = [p.get(key) for key in fixed]
                assert teams.setdefault(group_rows > 1, order) == order
            except AssertionError as error:
                raise AssertionError(
                    f"{groups} x {group_rows} x {cols} {modulated}: {p}"
                ) from error


@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_row_alone_is_summed_as_one_of_many(dtype, gated):
    """With a single row, a modulation of all rows is also a modulation of each row."""
    for cols in (*range(1, 300), 384, 1024, 1151, 1152, 3072, 4095, 6144):
        many = plan(64, cols, dtype, backward=True, group_rows=64, gated=gated)
        alone = plan(1, cols, dtype, backward=True, group_rows=1, gated=gated)
        if many is None or alone is None:
            assert gated
            continue
        assert alone["strategy"] == "rows"
        assert (alone["width"], alone["vecs"]) == (many["width"], many["vecs"])
        assert alone["team_threads"] == many.get("lanes", many.get("team_threads"))


# ---- Which plan is taken.


def test_golden_plans():
    """`python tests/golden_plans.py --reason ...` makes the files anew."""
    known = golden_plans.FILE.read_text().splitlines()[1:]
    known += golden_plans.WHOLE.read_text().splitlines()
    found = [*golden_plans.lines(), *golden_plans.whole_lines()]
    pairs = itertools.zip_longest(known, found)
    changed = [f"- {old}\n+ {new}" for old, new in pairs if old != new]
    assert not changed, "\n".join(changed[:5])


# ---- The problem.

NO_SUCH_TYPES = ((torch.int8, "Char"), (torch.complex64, "ComplexFloat"), (torch.bool, "Bool"))
REFUSED: list[Any] = [
    *((plan, (4, 64), {name: dtype}, f"float32, float16, bfloat16 or float64, got {called}$")
      for name in ("dtype", "weight_dtype", "y_dtype") for dtype, called in NO_SUCH_TYPES),
    *((plan, (4, 64), of_types(types), "no kernel takes x of")
      for types in itertools.product((F32, F16, BF16, F64), repeat=3) if types not in TYPES),
    (plan, (0, 4), {}, "expected 1 to 2147483647 rows and columns, got 0 rows of 4"),
    (plan, (4, 0), {}, "got 4 rows of 0"), (plan, (2**31, 4), {}, "got 2147483648 rows"),
    (plan, (4, 3), {"aligned": True},
     "rows of 3 columns cannot all begin at multiples of 16 bytes"),
    (plan, (4, 4), {"aligned": True, "y_dtype": BF16}, "rows of 4 columns cannot"),
    (plan, (4096, 64), {"group_rows": 3}, "whole groups"),
    (OPS._plan, (4, 4, F32), {"sms": 0}, "expected a device of"),
    *((group_plan, sizes, {}, "expected channels in whole groups")
      for sizes in ((0, 4, 1, 2), (1, 4, 0, 2), (1, 4, 1, 3), (1, 4, 1, 0))),
    (group_plan, (1, 4, 1, 2, BF16), {"y_dtype": F16}, "no kernel takes x of"),
    (gated_plan, (0, 128), {}, "expected rows of groups of columns"),
]  # fmt: skip


def test_problems_that_cannot_be_are_refused():
    for planner, args, options, match in REFUSED:
        with refused(match):
            planner(*args, **options)


# ---- A forced plan runs or is refused.

HALF, BACKWARDS = {"dtype": BF16}, {"backward": True}
RESIDUAL, ANYWHERE = {"residual": True}, {"aligned": False}


def forced_plan(options, rows, cols, dtype=F32, **problem):
    """The plan, or None if forcing `options` is refused with an error that names the problem."""
    OPS._force(options)
    try:
        return plan(rows, cols, dtype, **problem)
    except (RuntimeError, ValueError) as error:
        direction = "backward" if problem.get("backward") else "forward"
        expected = f"'{options}' cannot run {direction} of {rows} rows of {cols} columns (x of "
        assert f"the forced plan {expected}" in str(error), error  # noqa: PT017
        return None
    finally:
        OPS._force(None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("strategy", sorted({*FORWARD, *BACKWARD}))
def test_a_forced_strategy_is_used_or_refused(strategy, device):
    used = set()
    for _, cols, problem in every_problem(rows=[], seed=1):
        p = forced_plan(f"strategy={strategy}", 3000, cols, device=device, **problem)
        if p is None:
            continue
        assert p["strategy"] == strategy
        used.add(problem["backward"])
        check = check_backward if problem["backward"] else check_forward
        if strategy != "few_rows" and cols > 1:
            check(p, 3000, cols, problem, DEVICES[device])
    directions = {d for d, names in ((False, FORWARD), (True, BACKWARD)) if strategy in names}
    if DEVICES[device]["capability"] < 90 and strategy == "ring":
        directions = set()  # it needs bulk copies
    assert used == directions


@pytest.mark.parametrize("backward", [False, True])
def test_what_is_planned_can_be_forced(backward):
    """Forcing all parts of a plan gives the same plan again."""
    keys = ("vecs", "teams", "stages", "lag", "blocks_per_row")
    for _, cols, problem in every_problem(rows=[], seed=2):
        if problem["backward"] != backward:
            continue
        for rows in (7, 5000):
            p = plan(rows, cols, **problem)
            parts = {"strategy": p["strategy"], **{key: p[key] for key in keys if p.get(key)}}
            if p["strategy"] == "stream":
                del parts["blocks_per_row"]  # the number of chunks is fixed
            if p["strategy"] == "ring":
                del parts["stages"]  # all that there is room for
            parts |= {key: int(p[key]) for key in ("bulk", "long") if key in p}
            options = " ".join(f"{key}={value}" for key, value in parts.items())
            assert forced_plan(options, rows, cols, **problem) == p


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        # There is no such kernel.
        ("vecs=6", (9, 4096, {})), ("vecs=1", (9, 4096, {})),
        ("strategy=warp vecs=4", (9, 1024, {**HALF, **RESIDUAL})),
        ("bulk=1", (MANY, 1027, {**RESIDUAL, **ANYWHERE, **BACKWARDS})),
        ("strategy=split", (MANY, 65_536, {"y_dtype": BF16, **BACKWARDS})),
        ("strategy=split bulk=0", (9, 65_536, {**ANYWHERE, **BACKWARDS})),
        # The row does not fit.
        ("strategy=block vecs=5", (9, 512, {})),
        ("strategy=few_rows", (9, 8200, {**HALF, **RESIDUAL, **BACKWARDS})),
        # Shared memory or threads do not suffice.
        ("strategy=block stages=8", (MANY, 8192, BACKWARDS)), ("teams=9", (MANY, 1024, BACKWARDS)),
        ("strategy=few_rows teams=15", (9, 4096, BACKWARDS)),
        ("blocks_per_row=140", (9, 65_536, {})), ("blocks_per_row=1", (MANY, 65_536, BACKWARDS)),
        # The last slice would be empty.
        ("blocks_per_row=3", (MANY, 8, BACKWARDS)),
        # The ring has no room for the rows that wait, or there is no ring.
        ("stages=2", (MANY, 65_536, BACKWARDS)), ("stages=3 bulk=0", (MANY, 1024, BACKWARDS)),
        ("bulk=1", (MANY, 1024, {"device": "A100", **BACKWARDS})),
        # The strategy has no such part.
        ("strategy=warp stages=3", (9, 64, {})), ("strategy=stream vecs=8", (9, 4096, {})),
        ("strategy=ring vecs=4", (9, 65_536, HALF)), ("teams=2", (9, 4096, {})),
        ("strategy=few_rows bulk=0", (9, 4096, BACKWARDS)),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_refused(options, problem):
    rows, cols, rest = problem
    assert forced_plan(options, rows, cols, **{"dtype": F32, **rest}) is None


WHOLE = "expected {} to be a whole number from 1 to {}"
PARTS = "strategy, vecs, teams, bulk, stages, lag, blocks_per_row or long"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("strategy=fast", "no strategy is called 'fast': expected warp, block, ring, stream, "
         "few_rows, split, rows, group or formula"),
        *((f"{word}=1", f"no part of a plan is called '{word}': expected {PARTS}")
          for word in ("threads", "few", "")),
        *((f"vecs={value}", f"{WHOLE.format('vecs', 16)}, got '{value}'")
          for value in ("", "0", "17", "four", "4x")),
        ("vecs", f"{WHOLE.format('vecs', 16)}, got ''"),
        ("teams=513", f"{WHOLE.format('teams', 512)}, got '513'"),
        ("lag=0", f"{WHOLE.format('lag', 3)}, got '0'"),
        ("blocks_per_row=161", WHOLE.format("blocks_per_row", 160)),
        ("stages=99999999999999999999", WHOLE.format("stages", 8)),
        ("stages=3 stages=4", "expected stages once, got 'stages=3 stages=4'"),
    ],
)  # fmt: skip
def test_unknown_words_are_refused(options, sentence):
    with forced("stream"):
        before = plan(4096, 1024)
        with refused(f"fused_layernorm: {re.escape(sentence)}"):
            OPS._force(options)
        assert plan(4096, 1024) == before, "what was forced before still is"


# ---- Groups of channels.

# The types of x and y (dy) that have kernels.
GROUP_TYPES = [*((t, t) for t in (F32, F16, BF16, F64)), (F16, F32), (BF16, F32)]
RESERVED = 3072  # kReservedSharedMemory
SAMPLES = (1, 2, 8, 64)


def group_problems(count, seed=0) -> Any:
    """Yields (samples, channels, positions, groups, problem), of all types, layouts and chips."""
    choose = random.Random(seed)
    for _ in range(count):
        groups = choose.choice([1, 2, 3, 8, 32, 32, 32, 64])
        channels = groups * choose.choice([1, 1, 2, 3, 4, 7, 10, 16, 40, 128])
        positions = int(2 ** max(0, choose.uniform(-3, 21)))
        if choose.random() < 0.7:
            positions = -(-positions // 8) * 8
        if positions == 1:
            channels *= choose.choice([1, 1, 37, 256, 1000])
        x, y = choose.choice(GROUP_TYPES)
        flags = {"backward": 0.5, "channels_last": 0.4, "aligned": 0.8, "blocks_meet": 0.8}
        problem: dict[str, Any] = {name: choose.random() < often for name, often in flags.items()}
        problem |= {"dtype": x, "y_dtype": y, "device": choose.choice(list(DEVICES))}
        if channels * positions <= 1 << 31:
            yield choose.choice(SAMPLES), channels, positions, groups, problem


def check_channels(p, sizes, problem):
    samples, channels, positions, groups = sizes
    chip, size = DEVICES[problem["device"]], problem["dtype"].itemsize
    strategy, width, backward = p["strategy"], p["width"], problem["backward"]
    one, in_last = strategy == "one_position", problem["channels_last"]
    extent = channels // groups if one else channels if in_last else positions
    units = p.get("vector_units", 1)  # channels are counted in these: elements, or else vectors
    assert width in ((1, 4, 8) if size == 2 and not (one or in_last) else (1, 16 // size))
    assert width != 4 or size == 4 or problem["y_dtype"] == problem["dtype"]
    assert units == 1 or (strategy == "held" and units == width == 16 // size > 2)
    assert width == 1 or problem["aligned"]
    assert (extent if units == 1 else channels // groups * positions) % width == 0
    assert p["threads"] in range(32, 1025, 32)
    assert 1 <= p["blocks"] < 2**31
    assert p["shared_bytes"] <= chip["shared_memory"] - RESERVED
    of_group = channels // groups
    vectors = of_group * positions // width
    clustered = chip["capability"] >= 90 and problem["blocks_meet"]
    assert p["cluster"] in range(1, 9 if clustered else 2)
    if one:
        lanes, rows, side = p["lanes"], p["rows"], p["groups_of_slice"]
        # Lanes of a warp are a power of two, and have all of the group.
        assert (lanes & (lanes - 1) == 0) if lanes <= 32 else lanes == p["threads"] * p["cluster"]
        assert p["threads"] <= 512
        assert of_group <= lanes * (8 if size <= 4 else 4)
        assert rows * side * lanes <= p["threads"] * p["cluster"]
        assert (p["slices"] - 1) * side < groups <= p["slices"] * side
        assert p["tiles"] == 1 or (p["tiles"] - 1) * rows < samples
        assert p["blocks"] == p["slices"] * p["tiles"] * p["cluster"]
        parts = backward * (p["tiles"] > 1) * p["tiles"]
        assert p["workspace_bytes"] == parts * channels * 2 * max(size, 4)
    elif strategy == "held":
        assert p["cluster"] == p["blocks_per_group"] in (1, 2, 8)
        assert p["blocks"] == samples * groups * p["cluster"]
        # Every block has some vectors, and all of them are somebody's.
        assert (p["cluster"] - 1) * p["slice_vectors"] < vectors
        assert vectors <= p["cluster"] * p["slice_vectors"]
        held = p["slice_vectors"] * width * size
        assert p["shared_bytes"] >= held * (1 + backward * problem["y_dtype"].itemsize / size)
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
        # One kernel writes parts while the next one, which reads totals, may have started: no line
        # of memory has some of both.
        totals = samples * groups * 2 * (8 if problem["dtype"] == F64 else 4)
        assert (p["workspace_bytes"] - totals) % 128 == 0
        if in_last:
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


def test_kernels_can_run_every_plan_of_groups():
    seen, widths = set(), set()
    for *sizes, problem in group_problems(6000):
        p = group_plan(*sizes, **problem)
        check_channels(p, sizes, problem)
        seen.add((p["strategy"], problem["backward"], problem["channels_last"], p["cluster"]))
        widths.add((p["strategy"], p["width"], p.get("vector_units", 1)))
    of_both = itertools.product(("one_position", "tiles"), (False, True))
    ways = {("held", False), ("split", False), *of_both}
    assert {(s, b, last) for s, b, last, _ in seen} == {
        (strategy, b, last) for strategy, last in ways for b in (False, True)
    }
    assert {cluster for strategy, *_, cluster in seen if strategy != "one_position"} == {1, 2, 8}
    assert {cluster for strategy, *_, cluster in seen if strategy == "one_position"} > {1, 2, 3, 8}
    assert widths >= {("held", 8, 8), ("held", 4, 1), ("tiles", 4, 1)}


def test_how_a_group_is_split_does_not_depend_on_the_number_of_samples():
    for _, *sizes, problem in group_problems(3000, seed=1):
        plans = [group_plan(samples, *sizes, **problem) for samples in SAMPLES]
        for p in plans:
            del p["blocks"], p["workspace_bytes"]
            if p["strategy"] == "one_position":
                del p["tiles"]  # of the samples
        assert all(p == plans[0] for p in plans)


# ---- Gates.


def test_kernels_can_run_every_plan_of_gates():
    choose, seen = random.Random(0), set()
    for _ in range(4000):
        rows, groups = int(2 ** choose.uniform(0, 22)), choose.choice([1, 1, 2, 3, 8, 100, 700])
        cols = int(2 ** choose.uniform(0, 19))
        if choose.random() < 0.8:
            cols = -(-cols // 8) * 8
        if rows * groups * cols > 2**32:
            continue
        dtype, backward = choose.choice([F32, F16, BF16, F64]), choose.random() < 0.6
        flags = {"aligned": 0.9, "needs_dweight": 0.8, "bias": 0.2}
        problem: dict[str, Any] = {name: choose.random() < often for name, often in flags.items()}
        problem["backward"] = backward
        device = choose.choice(list(DEVICES))
        p = gated_plan(rows, cols, groups, dtype, device=device, **problem)
        width, vecs, teams = 16 // dtype.itemsize, p["vecs"], p["teams"]
        of_team = p["threads"] // teams
        sets = p["blocks"] // groups
        assert p["blocks"] == sets * groups
        assert p["threads"] in range(32, 513 if backward else 1025, 32)
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
        plans = [gated_plan(rows, cols, groups, backward=bool(backward), needs_dweight=False)
                 for rows in (1, 60, 100_000) for groups in (1, 8)]  # fmt: skip
        assert len({(p["strategy"], p["threads"], p["teams"], p["vecs"]) for p in plans}) == 1
        assert plans[0]["strategy"] == "held"

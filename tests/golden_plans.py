# SPDX-License-Identifier: Apache-2.0
"""What is planned for many problems, in golden_plans.txt, and the whole plans of some, in
whole_plans.txt. Their diffs show what a change of plans does; tests/test_plan.py compares them, and
they are made anew by

    python tests/golden_plans.py --reason "why the plans change"
"""

import argparse
import functools
import itertools
import json
from pathlib import Path
from typing import Any

import torch

FILE = Path(__file__).with_suffix(".txt")
WHOLE = FILE.with_name("whole_plans.txt")
F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
DEVICES = {
    "T4": {"capability": 75, "sms": 40, "shared_memory": 65536, "l2_bytes": 4 << 20},
    "A100": {"capability": 80, "sms": 108, "shared_memory": 166912, "l2_bytes": 40 << 20},
    "L40S": {"capability": 89, "sms": 142, "shared_memory": 101376, "l2_bytes": 96 << 20},
    "H100": {"capability": 90, "sms": 132, "shared_memory": 232448, "l2_bytes": 50 << 20},
    "H100 slice": {"capability": 90, "sms": 16, "shared_memory": 232448, "l2_bytes": 6 << 20},
    "B200": {"capability": 100, "sms": 148, "shared_memory": 232448, "l2_bytes": 126 << 20},
}
# A problem has these words; the first is the type of x.
WORDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": F32}, "bfloat16": {"dtype": BF16}, "float64": {"dtype": F64},
    "weights-float32": {"weight_dtype": F32}, "y-float32": {"weight_dtype": F32, "y_dtype": F32},
    "y-bfloat16": {"y_dtype": BF16}, "residual": {"residual": True},
    "epilogue": {"has_epilogue": True}, "unaligned": {"aligned": False},
    "no-dparams": {"needs_dparams": False}, "rows": {"group_rows": 1}, "groups": {"group_rows": 64},
    "gated": {"gated": True}, **{name: {"device": name} for name in DEVICES},
}  # fmt: skip
BOTH = (
    "float32", "bfloat16", "float64", "bfloat16 weights-float32", "bfloat16 y-float32",
    "float32 y-bfloat16", "float32 epilogue", "bfloat16 epilogue",
    "bfloat16 weights-float32 epilogue", "float32 residual", "bfloat16 residual",
    "bfloat16 weights-float32 residual", "bfloat16 residual epilogue", "float32 unaligned",
    "bfloat16 unaligned", "float64 unaligned", "float32 unaligned epilogue",
    "bfloat16 unaligned epilogue", "float32 unaligned residual", "bfloat16 unaligned residual",
    "bfloat16 unaligned weights-float32", "float32 A100", "bfloat16 A100", "bfloat16 T4",
    "bfloat16 L40S", "bfloat16 B200", "bfloat16 groups", "float32 unaligned groups",
)  # fmt: skip
BACKWARD = ("bfloat16 no-dparams", "bfloat16 rows", "float32 unaligned rows",
            "bfloat16 groups gated")  # fmt: skip
ROWS = (64, 131_072)
COLS = (16, 64, 1024, 1152, 4096, 16_384)
UNALIGNED_COLS = (7, 37, 285, 1023, 4095, 8191)
MOST_ROWS = 4_194_304
COARSE = 1.03  # values further apart are looked between even where the same is said of both
LONG = (2**18, 2**20, 2**22, 2**24)  # columns, beyond those of which all are looked at
LAST_COLS = 73_728
# What a range has beside its strategy, and by which letter. The rest follows from the numbers of
# rows and columns, and has tests of its own.
LETTERS = {"width": "w", "vecs": "v", "lanes": "l", "teams": "n", "stages": "s", "lag": "g",
           "blocks_per_row": "b"}  # fmt: skip
FLAGS = ("early", "has_collector", "stays_in_l2", "chain_rows")


def _planned(operator, *args, device="H100", **problem):
    text = getattr(torch.ops.fused_layernorm, operator)(*args, **DEVICES[device], **problem)
    return json.loads(text)


def plan(rows, cols, dtype=F32, **problem):
    return _planned("_plan", rows, cols, dtype, **problem)


def group_plan(samples, channels, positions, groups, dtype=BF16, **problem):
    return _planned("_plan_groups", samples, channels, positions, groups, dtype, **problem)


def gated_plan(rows, cols, groups=1, dtype=BF16, **problem):
    return _planned("_plan_gated", rows, cols, groups, dtype, **problem)


def words_of_groups(p):
    """What a range of sizes of groups says: which blocks have a group or a tile, and how."""
    names = {
        "held": ("blocks_per_group",),
        "split": ("segments_of_warp", "slots"),
        "tiles": ("slices", "rows", "tile_positions"),
        "one_position": ("lanes", "rows", "slices"),
    }
    parts = [f"{name.split('_')[0]}{p[name]}" for name in names[p["strategy"]]]
    units = f"u{p['vector_units']}" if p.get("vector_units", 1) > 1 else ""
    return " ".join([p["strategy"], f"w{p['width']}{units}", *parts])


def words_of(p):
    if p is None:
        return "none"
    parts = [f"{letter}{p[key]}" for key, letter in LETTERS.items() if key in p]
    if p["strategy"] == "stream":
        parts = [part for part in parts if part[0] != "b"]
    flags = [flag.replace("_", "-") for flag in FLAGS if p.get(flag)]
    moves = [p["moves"]] if p.get("moves", "vectors") != "vectors" else []
    return " ".join([p["strategy"], *parts, *moves, *flags])


def ranges(said, values):
    """Yields (last value, what is said of it) for each range of values of which the same is said.

    Between two neighbours of which different things are said, the change is found exactly.
    """
    known = {}

    def of(value):
        if value not in known:
            known[value] = said(value)
        return known[value]

    def between(low, high):  # both are indices
        if high - low == 1:
            if of(values[low]) != of(values[high]):
                yield values[low], of(values[low])
        elif of(values[low]) != of(values[high]) or values[high] > COARSE * values[low]:
            middle = (low + high) // 2
            yield from between(low, middle)
            yield from between(middle, high)

    yield from between(0, len(values) - 1)
    yield values[-1], of(values[-1])


# Problems over groups have these words, too.
GROUP_WORDS: dict[str, dict[str, Any]] = {
    "channels_last": {"channels_last": True},
    "y-float32": {"y_dtype": F32},
    "apart": {"blocks_meet": False},
}
GROUPS = (
    "bfloat16", "float32", "bfloat16 y-float32", "float64", "bfloat16 unaligned", "bfloat16 apart",
    "bfloat16 A100", "bfloat16 T4", "bfloat16 B200", "bfloat16 channels_last",
    "float32 channels_last", "bfloat16 channels_last unaligned", "bfloat16 channels_last B200",
)  # fmt: skip
MOST_POSITIONS = 1 << 21  # of a channel, in steps of 8
# Of these channels that begin within vectors are looked at, too.
BETWEEN_VECTORS = ("bfloat16", "bfloat16 y-float32")


def problem_of(name, words=WORDS, **problem: Any):
    """What the words of a name say."""
    for word in name.split(" "):
        problem |= words[word]
    return problem


def line_of(what, said, values, more=()):
    """A line of what is said of each range of values, and of some values beyond."""
    found = [*ranges(said, values), *((value, said(value)) for value in more)]
    return f"{what} to {' | '.join(f'{last}: {text}' for last, text in found)}"


def group_lines():
    """As `lines`, of the positions of a channel, for some numbers of channels in 32 groups."""
    for direction, name in itertools.product(("forward", "backward"), GROUPS):
        problem = problem_of(name, WORDS | GROUP_WORDS, backward=direction == "backward")
        for channels in (32, 128, 320, 1280):

            def said(positions, channels=channels, problem=problem):
                return words_of_groups(group_plan(2, channels, positions, 32, **problem))

            for first in (8, 4, 1) if name in BETWEEN_VECTORS else (8,):
                of = "positions" if first == 8 else f"positions {first} modulo 8"
                along = range(first, MOST_POSITIONS // channels * 8 + 1, 8)
                yield line_of(f"{direction} groups {name}, {channels} channels; {of}", said, along)


# What problems in whole_plans.txt have beside those words.
MORE_WORDS: dict[str, Any] = {
    **GROUP_WORDS, **WORDS, "backward": {"backward": True}, "bias": {"bias": True},
    "no-dweight": {"needs_dweight": False},
}  # fmt: skip


def whole_lines():
    """The lines of whole_plans.txt, in which each problem stands in front of its plan."""
    planners: dict[str, Any] = {"rows": plan, "groups": group_plan, "gates": gated_plan}
    for line in WHOLE.read_text().splitlines():
        if line.startswith("#"):
            yield line
            continue
        text = line.partition(":")[0]
        family, *words = text.split(" ")
        problem: dict[str, Any] = {}
        for word in (word for word in words if not word.isdigit()):
            name, has_value, value = word.partition("=")
            problem |= {name: int(value)} if has_value else MORE_WORDS[name]
        sizes = (int(word) for word in words if word.isdigit())
        yield f"{text}: {json.dumps(planners[family](*sizes, **problem))}"


def lines():
    """The golden file's lines, each of one problem: all rows of some columns, or all columns."""
    for direction, problems in (("forward", BOTH), ("backward", BOTH + BACKWARD)):
        for name in problems:
            problem = problem_of(name, backward=direction == "backward")
            aligned = problem.get("aligned", True)
            size = min(problem["dtype"].itemsize, problem.get("y_dtype", F64).itemsize)
            step = 16 // size if aligned else 1
            per = problem.get("group_rows", 1)

            def said(rows, cols, problem=problem, per=per):
                return words_of(plan(rows * per, cols, **problem))

            for rows in ROWS:
                of, along = functools.partial(said, rows), range(step, LAST_COLS + 1, step)
                yield line_of(f"{direction} {name}, {rows} rows; columns", of, along, LONG)
            for cols in COLS if aligned else UNALIGNED_COLS:
                of, along = functools.partial(said, cols=cols), range(1, MOST_ROWS // 64)
                yield line_of(f"{direction} {name}, {cols} columns; rows", of, along, [MOST_ROWS])
    yield from group_lines()


def main():
    import fused_layernorm  # noqa: F401  (registers the operators)

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reason", required=True, help="why the plans change, in a sentence")
    reason = parser.parse_args().reason
    FILE.write_text("".join(f"{line}\n" for line in [f"# {reason}", *lines()]))
    WHOLE.write_text("".join(f"{line}\n" for line in [*whole_lines()]))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""The bits of every strategy beside other work on the GPU, which are those of the same call alone.

Blocks of other kernels share the multiprocessors with those of the norm, so that a warp may stand
still for longer than a memory access takes. What is not ordered by an instruction then comes in
another order than it does alone.
"""

import math
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numerics
import pytest
import torch
from families import BF16, F32, Gated, Heads, Packed, of_groups, over_channels
from golden_plans import group_plan, plan
from numerics import Problem, modulated

SECONDS = 2.0  # of each kind of other work
AT_ONCE = 10  # calls between two looks at their results
HALF = (BF16, BF16, BF16, None)  # of modulated norms


def call_of(problem, *, only_forward=False):
    """A call that gives all results and gradients. Forward alone has more calls a second."""
    t = numerics.make(problem, "cuda")
    return lambda: [*numerics.ours(t, backward=not only_forward).values()]


# Rows, columns, dtype, and the strategies of the two directions.
ROWS: list[Any] = [
    (32_768, 512, BF16, "warp", "warp"), (20_000, 229, BF16, "warp", "warp"),
    (20_000, 1021, BF16, "warp", "block"), (32_768, 4096, BF16, "block", "block"),
    (20_000, 2561, BF16, "block", "block"), (2048, 32_768, BF16, "block", "split"),
    (64, 4096, BF16, "block", "few_rows"), (512, 262_144, BF16, "ring", "split"),
    (64, 150_528, F32, "ring", "split"), (32, 2_097_152, BF16, "ring", "split"),
    (16, 4_194_304, F32, "ring", "stream"), (8, 9_437_184, BF16, "stream", "stream"),
    (350, 88_801, F32, "stream", "split"),
]  # fmt: skip
# Shape, groups, dtype, and the strategies of the two directions, with the blocks of a group.
GROUPS: list[Any] = [
    ((64, 256, 40, 40), 32, BF16, ("held", 1), ("held", 1)),
    ((64, 256, 56, 56), 32, BF16, ("held", 1), ("held", 2)),
    ((4, 320, 64, 64), 32, BF16, ("held", 8), ("tiles", None)),
    ((4, 640, 64, 64), 32, BF16, ("held", 8), ("split", 3)),
    ((2, 512, 128, 128), 32, BF16, ("split", 8), ("split", 8)),
    ((1, 256, 512, 512), 32, F32, ("split", 128), ("split", 128)),
    ((2, 128, 259, 263), 4, BF16, ("tiles", None), ("tiles", None)),
    ((64, 2048, 7, 7), 32, BF16, ("held", 1), ("held", 1)),
    ((64, 768, 14, 14), 1, BF16, ("tiles", None), ("tiles", None)),
    ((128, 16, 101, 103), 4, F32, ("held", 8), ("held", 8)),
    *(((512, 8192, 1, 1), groups, dtype, ("one_position", None), ("one_position", None))
      for groups, dtype in ((512, F32), (2, F32), (1, F32), (512, BF16), (4, BF16))),
]  # fmt: skip
# Of logical warps, a few rows, blocks, groups of columns behind a gate, long rows.
GATES: list[Any] = [
    *(Gated((rows, cols), BF16, affine="weight")
      for rows, cols in ((65_536, 128), (32, 128), (8192, 8192))),
    Gated((8192, 8192), BF16, affine="weight", gate_first=True, group_size=1024),
    Gated((512, 40_000), BF16, gate_activation="sigmoid"),
]  # fmt: skip
CASES: list[Any] = [
    *(Problem((count, cols), dtype) for count, cols, dtype, *_ in ROWS),
    modulated((64, 256, 1152), dtypes=HALF), modulated((8, 1024, 1152), gated=True, dtypes=HALF),
    modulated((64, 256, 128), dtypes=HALF), modulated((1, 4608, 3072), "token", dtypes=HALF),
    over_channels((64, 96, 56, 56), BF16),
    over_channels((64, 384, 14, 14), BF16, layout="channels_last"),
    Heads((2, 4096, 128), BF16, heads=(16, 16)),
    Packed((2, 4096, 128), BF16, heads=(16, 4), packing="h3d"),
    Packed((2, 4096, 64), BF16, statistic=None, affine="none"),
    *GATES, *(replace(problem, rounds=True) for problem in GATES),
    *(of_groups(shape, groups, (dtype, None), activation="silu")
      for shape, groups, dtype, *_ in GROUPS),
    of_groups((2, 320, 128, 128), 32, (BF16, None), activation="silu", layout="channels_last"),
    of_groups((512, 24, 7, 15), 3, activation="silu", layout="channels_last"),  # in one tile
    of_groups((2, 640, 64, 64), 32, (BF16, None), modulation="both"),
]  # fmt: skip
FORWARD: list[Any] = [  # alone
    Problem((512, 262_144), BF16), Problem((4096, 65_536), BF16, statistic="rms", affine="weight"),
    Problem((128, 1_048_576)), Problem((64, 163_840), BF16, activation="silu"),
]  # fmt: skip


def elementwise(until):
    """Three of these at a time leave no multiprocessor without other blocks."""
    a = torch.randn(64 << 20, device="cuda")
    c = torch.empty_like(a)
    while time.monotonic() < until:
        for _ in range(50):
            torch.mul(a, 2, out=c)
            (a != c).any()
        torch.cuda.current_stream().synchronize()


def repeat(call):
    def run(until):
        while time.monotonic() < until:
            for _ in range(AT_ONCE):
                call()
            torch.cuda.current_stream().synchronize()

    return run


@contextmanager
def beside(works, until):
    """Runs these works, each in a thread and on a stream of its own, until a point in time."""
    failures = []

    def run(work):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                work(until)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    torch.cuda.synchronize()
    for thread in threads:
        thread.start()
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            yield
    finally:
        for thread in threads:
            thread.join()
        torch.cuda.synchronize()
    assert not failures, failures


def differs(a, b):
    bits = torch.int16 if a.element_size() == 2 else torch.int32
    return (a.view(bits) != b.view(bits)).any()


@pytest.fixture(scope="module")
def other_norms():
    """Norms whose blocks take parts of a multiprocessor, and all of it."""
    sizes = [(8192, 16_384), (32_768, 4096), (512, 131_072)]
    return [call_of(Problem(shape, BF16)) for shape in sizes]


@pytest.mark.parametrize(("shape", "of", "dtype", "forward", "backward"), [*ROWS, *GROUPS], ids=str)
def test_the_strategies(shape, of, dtype, forward, backward):
    for is_backward, strategy in enumerate((forward, backward)):
        how: Any = {"backward": bool(is_backward)}
        if isinstance(shape, int):
            assert plan(shape, of, dtype, **how)["strategy"] == strategy
        else:
            samples, channels, *sizes = shape
            p = group_plan(samples, channels, math.prod(sizes), of, dtype, **how)
            assert (p["strategy"], p.get("blocks_per_group")) == strategy


@pytest.mark.gpu
@pytest.mark.beside
@pytest.mark.parametrize(
    ("problem", "only_forward"),
    [*((p, False) for p in CASES), *((p, True) for p in FORWARD)],
    ids=str,
)
def test_bits_beside_other_work(problem, only_forward, other_norms):
    call = call_of(problem, only_forward=only_forward)
    alone = call()
    works = {
        "elementwise kernels": [elementwise] * 3,
        "itself": [repeat(call)],
        "other norms": [repeat(norm) for norm in other_norms],
    }
    for work, others in works.items():
        calls = wrong = 0
        until = time.monotonic() + SECONDS
        with beside(others, until):
            while time.monotonic() < until:
                found = []
                for _ in range(AT_ONCE):
                    results = call()
                    assert len(results) == len(alone)
                    pairs = zip(results, alone, strict=True)
                    found.append(torch.stack([differs(a, b) for a, b in pairs]).any())
                torch.cuda.current_stream().synchronize()
                calls += AT_ONCE
                wrong += sum(map(bool, found))
        assert calls > 0
        assert wrong == 0, f"{wrong} of {calls} calls differ beside {work}"

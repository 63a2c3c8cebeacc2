# SPDX-License-Identifier: Apache-2.0
"""The bits of every strategy beside other work on the GPU, which are those of the same call alone.

Blocks of other kernels share the multiprocessors with those of the norm, so that a warp may stand
still for longer than a memory access takes. What is not ordered by an instruction then comes in
another order than it does alone.
"""

import threading
import time
from contextlib import contextmanager
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


# Shape, groups, dtype, and the strategies of the two directions, with the blocks of a group.
GROUPS = [
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
    ((512, 8192, 1, 1), 512, F32, ("held", 1), ("tiles", None)),
]
# Rows, columns, dtype, and the strategies of the two directions.
ROWS = [
    (32_768, 512, BF16, "warp", "warp"), (20_000, 229, BF16, "warp", "warp"),
    (20_000, 1021, BF16, "warp", "block"), (32_768, 4096, BF16, "block", "block"),
    (20_000, 2561, BF16, "block", "block"), (2048, 32_768, BF16, "block", "split"),
    (64, 4096, BF16, "block", "few_rows"), (512, 262_144, BF16, "ring", "split"),
    (64, 150_528, F32, "ring", "split"), (32, 2_097_152, BF16, "ring", "split"),
    (16, 4_194_304, F32, "ring", "stream"), (8, 9_437_184, BF16, "stream", "stream"),
    (350, 88_801, F32, "stream", "split"),
]  # fmt: skip
GATES: list[Any] = [
    ("gated", (65_536, 128), {"affine": "weight"}),
    ("gated, few rows", (32, 128), {"affine": "weight"}),
    ("gated, by blocks", (8192, 8192), {"affine": "weight"}),
    ("a gate, then the norm of groups", (8192, 8192),
     {"affine": "weight", "gate_first": True, "group_size": 1024}),
    ("gated, long rows", (512, 40_000), {"gate_activation": "sigmoid"}),
]  # fmt: skip
CASES: dict[str, Any] = {
    **{str(p): p for p in (Problem((count, cols), dtype) for count, cols, dtype, *_ in ROWS)},
    "groups": modulated((64, 256, 1152), dtypes=HALF),
    "groups with a gate": modulated((8, 1024, 1152), gated=True, dtypes=HALF),
    "groups, short rows": modulated((64, 256, 128), dtypes=HALF),
    "groups of one row": modulated((1, 4608, 3072), "token", dtypes=HALF),
    "channels": over_channels((64, 96, 56, 56), BF16),
    "channels_last": over_channels((64, 384, 14, 14), BF16, layout="channels_last"),
    "heads": Heads((2, 4096, 128), BF16, heads=(16, 16)),
    "packed heads": Packed((2, 4096, 128), BF16, heads=(16, 4), packing="h3d"),
    "packed heads, rotated": Packed((2, 4096, 64), BF16, statistic=None, affine="none"),
    **{
        f"{name}{', all of one type' * rounds}": Gated(shape, BF16, rounds=rounds, **options)
        for rounds in (False, True)
        for name, shape, options in GATES
    },
    **{
        f"{groups} groups of {shape}": of_groups(
            shape, groups, (dtype, None), activation="silu")
        for shape, groups, dtype, forward, backward in GROUPS
    },
    "groups in channels_last": of_groups(
        (2, 320, 128, 128), 32, (BF16, None), activation="silu", layout="channels_last"),
    "groups in one tile of channels_last": of_groups(
        (512, 24, 7, 15), 3, activation="silu", layout="channels_last"),
    "groups with a modulation": of_groups((2, 640, 64, 64), 32, (BF16, None), modulation="both"),
}  # fmt: skip
# Forward alone.
FORWARD: dict[str, Any] = {
    "ring": Problem((512, 262_144), BF16),
    "ring, RMSNorm": Problem((4096, 65_536), BF16, statistic="rms", affine="weight"),
    "ring, float32": Problem((128, 1_048_576)),
    "ring with an activation": Problem((64, 163_840), BF16, activation="silu"),
}


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


@pytest.mark.parametrize(("count", "cols", "dtype", "forward", "backward"), ROWS)
def test_the_strategies_of_the_rows(count, cols, dtype, forward, backward):
    aligned = cols * dtype.itemsize % 16 == 0
    for is_backward, strategy in ((False, forward), (True, backward)):
        p = plan(count, cols, dtype, aligned=aligned, backward=is_backward)
        assert p["strategy"] == strategy


@pytest.mark.parametrize(("shape", "groups", "dtype", "forward", "backward"), GROUPS)
def test_the_strategies_of_the_groups(shape, groups, dtype, forward, backward):
    positions = shape[2] * shape[3]
    for is_backward, expected in ((False, forward), (True, backward)):
        p = group_plan(shape[0], shape[1], positions, groups, dtype, backward=is_backward)
        assert (p["strategy"], p.get("blocks_per_group")) == expected


@pytest.mark.gpu
@pytest.mark.beside
@pytest.mark.parametrize("name", CASES | FORWARD)
def test_bits_beside_other_work(name, other_norms):
    call = call_of((CASES | FORWARD)[name], only_forward=name in FORWARD)
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

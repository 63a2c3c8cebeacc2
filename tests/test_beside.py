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

import pytest
import torch
from golden_plans import group_plan, plan

import fused_layernorm as fl

SECONDS = 2.0  # of each kind of other work
AT_ONCE = 10  # calls between two looks at their results
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def normal(*shape, dtype=F32):
    return torch.randn(shape, device="cuda", dtype=dtype)


def both(function, dy, *inputs):
    """A call that gives the results of function(*inputs) and all gradients."""

    def call():
        leaves = [t.detach().requires_grad_() for t in inputs]
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        gradients = torch.autograd.grad(outputs, leaves, [dy] * len(outputs))
        return [t.detach() for t in (*outputs, *gradients)]

    return call


def rows(count, cols, dtype=BF16, *, only_forward=False, **options):
    """A LayerNorm of rows. Forward alone has more calls a second."""
    x, dy = (normal(count, cols, dtype=dtype) for _ in "xd")
    weight, bias = (normal(cols, dtype=dtype) for _ in "wb")
    if only_forward:
        return lambda: [fl.layer_norm(x, weight, bias, **options)]
    return both(lambda *t: fl.layer_norm(*t, **options), dy, x, weight, bias)


def rms(count, cols, dtype=BF16):
    x, weight = normal(count, cols, dtype=dtype), normal(cols, dtype=dtype)
    return lambda: [fl.rms_norm(x, weight, 1e-6)]


def modulated(batch, positions, cols, *, per_token=False, gated=False):
    x, residual, dy = (normal(batch, positions, cols, dtype=BF16) for _ in range(3))
    shape = (batch, positions if per_token else 1, cols)
    shift, scale, gate = (normal(*shape, dtype=BF16) for _ in range(3))
    if gated:
        return both(fl.add_ada_layer_norm, dy, x, residual, gate, shift, scale)
    return both(fl.ada_layer_norm, dy, x, shift, scale)


def gate(batch, positions, cols):
    """The gradient of a gate beside an activation is that of an operator of its own."""
    dsum, x = (normal(batch, positions, cols, dtype=BF16) for _ in range(2))
    factor = normal(batch, 1, cols, dtype=BF16)
    return lambda: list(torch.ops.fused_layernorm.gate_backward(dsum, x, factor, True, True))


def channels(shape, memory_format=torch.contiguous_format):
    x, dy = (normal(*shape, dtype=BF16).to(memory_format=memory_format) for _ in "xd")
    weight, bias = (normal(shape[1], dtype=BF16) for _ in "wb")
    return both(lambda *t: fl.layer_norm(*t, dim=1), dy, x, weight, bias)


def heads(cols):
    q, k = (normal(2, 4096, n, cols, dtype=BF16) for n in (16, 16))
    weight, angle = normal(cols, dtype=BF16), normal(4096, cols // 2)
    cos, sin = angle.cos(), angle.sin()
    return both(lambda q, k, w: fl.qk_norm_rope(q, k, w, w, cos, sin), torch.ones_like(q), q, k,
                weight)  # fmt: skip


def gated(count, cols, *options, bias=False):
    """The operators: a norm first, or with gate_first a gate, and all gradients. Forward once more
    as most models have it, all of one type."""
    ops: Any = torch.ops.fused_layernorm
    x, gate, dy = (normal(count, cols, dtype=BF16) for _ in "xgd")
    weight, b = normal(cols, dtype=BF16), normal(cols, dtype=BF16) if bias else None

    def call():
        y, _, rstd = ops.rms_norm_gated_forward(x, gate, weight, b, 1e-6, *options)
        needs = (True, True, True, bias)
        rounded = ops.rms_norm_gated(x, gate, weight, None, 1e-6, *options, None, 0.0, True)
        return [y, rounded, rstd, *ops.rms_norm_gated_backward(
            dy, x, gate, rstd, weight, b, *options, 0.0, *needs)[: 3 + bias]]  # fmt: skip

    return call


def group_norm(
    shape, groups, dtype=BF16, memory_format=torch.contiguous_format, *, ada=False
) -> Any:
    x, dy = (normal(*shape, dtype=dtype).to(memory_format=memory_format) for _ in "xd")
    weight, bias = (normal(shape[1], dtype=dtype) for _ in "wb")
    if not ada:
        return both(lambda x, w, b: fl.group_norm(x, groups, w, b, activation="silu"), dy, x,
                    weight, bias)  # fmt: skip
    ada_group_norm: Any = fl.ada_group_norm
    shift, scale = (normal(*shape[:2], dtype=dtype) for _ in "bc")
    return both(lambda x, *t: ada_group_norm(x, groups, *t), dy, x, shift, scale, weight, bias)


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
]
# Rows, columns, dtype, and the strategies of the two directions.
ROWS = [
    (32_768, 512, BF16, "warp", "warp"),
    (20_000, 229, BF16, "warp", "warp"),
    (20_000, 1021, BF16, "warp", "block"),
    (32_768, 4096, BF16, "block", "block"),
    (20_000, 2561, BF16, "block", "block"),
    (2048, 32_768, BF16, "block", "split"),
    (64, 4096, BF16, "block", "few_rows"),
    (512, 262_144, BF16, "ring", "split"),
    (64, 150_528, F32, "ring", "split"),
    (32, 2_097_152, BF16, "ring", "split"),
    (16, 4_194_304, F32, "ring", "stream"),
    (8, 9_437_184, BF16, "stream", "stream"),
    (350, 88_801, F32, "stream", "split"),
]
CASES: dict[str, Any] = {
    **{
        f"{count} x {cols} {str(dtype)[6:]}": lambda sizes=(count, cols, dtype): rows(*sizes)
        for count, cols, dtype, *_ in ROWS
    },
    "ring": lambda: rows(512, 262_144, only_forward=True),
    "ring, RMSNorm": lambda: rms(4096, 65_536),
    "ring, float32": lambda: rows(128, 1_048_576, F32, only_forward=True),
    "ring with an activation": lambda: rows(64, 163_840, only_forward=True, activation="silu"),
    "groups": lambda: modulated(64, 256, 1152),
    "groups with a gate": lambda: modulated(8, 1024, 1152, gated=True),
    "groups, short rows": lambda: modulated(64, 256, 128),
    "groups of one row": lambda: modulated(1, 4608, 3072, per_token=True),
    "the gradient of a gate": lambda: gate(8, 1024, 1152),
    "channels": lambda: channels((64, 96, 56, 56)),
    "channels_last": lambda: channels((64, 384, 14, 14), torch.channels_last),
    "heads": lambda: heads(128),
    "gated": lambda: gated(65_536, 128, False, "silu", 0),
    "gated, few rows": lambda: gated(32, 128, False, "silu", 0),
    "gated, by blocks": lambda: gated(8192, 8192, False, "silu", 0),
    "a gate, then the norm of groups": lambda: gated(8192, 8192, True, "silu", 1024),
    "gated, long rows": lambda: gated(512, 40_000, False, "sigmoid", 0, bias=True),
    **{
        f"groups of {forward[0]} by {forward[1]} and {backward[0]} by {backward[1]}": (
            lambda of=(shape, groups, dtype): group_norm(*of)
        )
        for shape, groups, dtype, forward, backward in GROUPS
    },
    "groups in channels_last": lambda: group_norm(
        (2, 320, 128, 128), 32, BF16, torch.channels_last
    ),
    "groups with a modulation": lambda: group_norm((2, 640, 64, 64), 32, ada=True),
}


def elementwise(until):
    """Three of these at a time leave no multiprocessor without other blocks."""
    a = normal(64 << 20)
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
    return [rows(8192, 16_384), rows(32_768, 4096), rows(512, 131_072)]


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
@pytest.mark.parametrize("name", CASES)
def test_bits_beside_other_work(name, other_norms):
    call = CASES[name]()
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

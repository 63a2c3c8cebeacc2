# SPDX-License-Identifier: Apache-2.0
"""The bits of every strategy beside other work on the GPU, which are those of the same call alone.

Blocks of other kernels share the multiprocessors with those of the norm, so that a warp may stand
still for longer than a memory access takes. What is not ordered by an instruction then comes in
another order than it does alone.
"""

import threading
import time
from contextlib import contextmanager

import pytest
import torch
from golden_plans import plan

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
CASES = {
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

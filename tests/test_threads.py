# SPDX-License-Identifier: Apache-2.0
"""A GPU that host threads share: their kernels take no shared memory away from each other."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numerics
import pytest
import torch
from numerics import Problem
from processes import run

F32, BF16 = torch.float32, torch.bfloat16

pytestmark = pytest.mark.gpu


def in_threads(*functions):
    """Runs each function in a thread of its own; raises the first error."""

    def run(function):
        function()
        torch.cuda.synchronize()

    with ThreadPoolExecutor(len(functions)) as pool:
        list(pool.map(run, functions))


def in_turn(first, second, times=4):
    """Two threads call their function in turn: first, second, first, second, ..."""
    barrier = threading.Barrier(2)

    def alternate(function, is_first):
        try:
            for turn in range(2 * times):
                if (turn % 2 == 0) == is_first:
                    function()
                barrier.wait(timeout=60)
        except threading.BrokenBarrierError:
            pass  # the other thread has failed, and reports it
        except Exception:
            barrier.abort()
            raise

    in_threads(lambda: alternate(first, True), lambda: alternate(second, False))


def call_of(rows, cols, dtype, strategy=None, device="cuda", *, backward=True):
    t = numerics.make(Problem((rows, cols), dtype, forced=(None, strategy)), device)
    return lambda: numerics.ours(t, backward=backward)


@pytest.mark.parametrize(
    ("backward", "large", "small"),
    [
        (True, (3000, 1024, F32), (40, 1000, F32)),
        (True, (3000, 4096, F32), (3000, 1024, F32)),
        (True, (3000, 8192, BF16), (3000, 1024, BF16)),
        (False, (64, 150_528, F32), (400, 20_480, F32)),
        (False, (400, 65_536, BF16), (400, 40_000, BF16)),
    ],
    ids=str,
)
def test_a_small_plan_beside_a_large_one(backward, large, small):
    """As autograd's thread is beside that of a direct call, or of a checkpoint's first forward."""
    calls = [call_of(*sizes, backward=backward) for sizes in (large, small)]
    in_turn(*calls)
    in_turn(*reversed(calls))


def test_the_same_kernel_with_other_numbers_of_teams():
    """Plans of one kernel that differ in shared memory by what the number of teams changes."""
    needs, calls = [], []
    for strategy in ("block teams=4", "block teams=1"):
        with numerics.forced(strategy):
            needs.append(numerics.plan_here(3000, 1024, F32, backward=True)["shared_bytes"])
        calls.append(call_of(3000, 1024, F32, strategy=strategy))
    assert needs[0] > needs[1] > 40 * 1024
    in_turn(calls[0], calls[1], times=6)


@pytest.mark.multi_gpu
def test_two_devices():
    for both in ((4096, 1024), (1024, 4096)):
        in_turn(*(call_of(3000, cols, F32, device=f"cuda:{n}") for n, cols in enumerate(both)))


def test_eight_threads_with_random_shapes():
    """Every thread checks the results of its own calls against float64."""

    def work(seed):
        def run():
            choose = random.Random(seed)
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(6):
                    cols = choose.choice((64, 1000, 1024, 4096, 5003, 16_384, 40_000, 150_528))
                    dtype = choose.choice((F32, BF16))
                    statistic = choose.choice(("layer", "rms"))
                    problem = Problem((choose.choice((3, 40, 300)), cols), dtype=dtype,
                                      statistic=statistic)  # fmt: skip
                    numerics.check(problem, "cuda", sample=1)

        return run

    in_threads(*(work(seed) for seed in range(8)))


def test_a_launch_error_names_plan_and_shape():
    program = """
        import contextlib, torch, fused_layernorm
        x = torch.randn(64, 1024, device="cuda")
        torch.ops.fused_layernorm.layer_norm(x, 1, None, None, 1e-5)
        torch.cuda.synchronize()
        with contextlib.suppress(Exception), torch.cuda.graph(torch.cuda.CUDAGraph()):
            with contextlib.suppress(Exception):
                torch.cuda.synchronize()  # is not allowed there, so that every later launch fails
            try:
                torch.ops.fused_layernorm.layer_norm(x, 1, None, None, 1e-5)
            except Exception as error:
                print(error)
    """
    said, _ = run(program, fails=True)
    assert "CUDA error: " in said
    assert "at the launch of forward for 64 rows of 1024 columns, x float32" in said
    assert '"threads": ' in said

# SPDX-License-Identifier: Apache-2.0
"""Norms that have a part of the multiprocessors: a margin left free, and green contexts."""

import json
import threading

import pytest
import torch
from processes import run

import fused_layernorm as fl
from fused_layernorm import margin

F32, BF16 = torch.float32, torch.bfloat16
ops = torch.ops.fused_layernorm
PLANS = [
    lambda **device: ops._plan(64, 65536, F32, **device),
    lambda **device: ops._plan(64, 65536, BF16, backward=True, **device),
    lambda **device: ops._plan(4096, 4096, BF16, backward=True, **device),
    lambda **device: ops._plan_groups(2, 512, 65536, 32, BF16, **device),
    lambda **device: ops._plan_groups(2, 512, 65536, 32, BF16, backward=True, **device),
    lambda **device: ops._plan_gated(4096, 4096, 1, BF16, backward=True, **device),
]


@pytest.mark.parametrize("plan", PLANS)
def test_plans_leave_a_margin(plan):
    whole, smaller = plan(), plan(sms=100)
    assert whole != smaller
    with fl.sm_margin(32):
        assert plan() == smaller
        with fl.sm_margin(0):
            assert plan() == whole
        assert plan() == smaller
    assert plan() == whole


def current():
    """The margin, by the blocks of a plan that has one for each multiprocessor."""
    return 132 - json.loads(ops._plan(4096, 4096, BF16, backward=True))["blocks"]


def test_of_threads_the_last_one_counts():
    entered, leave = threading.Event(), threading.Event()

    def other():
        with fl.sm_margin(16):
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with fl.sm_margin(8):
        thread.start()
        entered.wait()
        assert current() == 16  # of the whole process
    assert current() == 16
    leave.set()
    thread.join()
    assert current() == 0


def test_margins_that_cannot_be():
    for n, error, words in (
        (-1, ValueError, "expected n of at least 0 multiprocessors, got -1"),
        (1 << 20, ValueError, r"expected n of fewer than \d+ multiprocessors, got 1048576"),
        (2.0, TypeError, "expected n to be an int, got float"),
        (True, TypeError, "expected n to be an int, got bool"),
    ):
        with pytest.raises(error, match=words):
            fl.sm_margin(n)  # type: ignore[arg-type]
    # torch 2.15 makes a RuntimeError of an operator's std::invalid_argument, others a ValueError.
    refused = pytest.raises((RuntimeError, ValueError), match="fewer multiprocessors than the 132")
    with refused, margin._margin(132):  # which is restored behind an error
        current()
    assert current() == 0


def test_the_environment_sets_a_margin():
    for given, words in (("-1", "'-1'"), ("many", "'many'"), ("65536", "'65536'")):
        with pytest.raises(ValueError, match=f"{margin.VARIABLE} to be a number .* got {words}"):
            margin._read(given)
    script = """
        import json, torch, fused_layernorm as fl
        plan = lambda: json.loads(torch.ops.fused_layernorm._plan(
            4096, 4096, torch.bfloat16, backward=True))["blocks"]
        outside = plan()
        with fl.sm_margin(2):
            print(outside, plan(), end=" ")
        print(plan())
    """
    assert run(script, environment={margin.VARIABLE: "12"})[0] == "120 130 120"


# ---- On the GPU.

# Norms whose blocks wait for each other: rows, and groups that blocks or clusters share.
NORMS = """
import time, torch, fused_layernorm as fl, numerics
from families import BF16, Problem, of_groups
CASES = [numerics.make(problem, "cuda") for problem in (
    Problem((64, 65536)), Problem((40, 65536), BF16, activation="gelu"),
    Problem((3, 600_000), BF16, statistic="rms", affine="weight"),
    of_groups((2, 512, 256, 256), 32, (BF16, None), activation="silu"),
    of_groups((2, 512, 64, 64), 32, (BF16, None)), of_groups((64, 32_768), 1, (BF16, None)),
)]
def results(case):
    return [*numerics.ours(case).values()]
def check(found, expected):
    for one, other in zip(found, expected, strict=True):
        rtol = 2e-2 if one.dtype == BF16 else 1e-3
        torch.testing.assert_close(one.double(), other.double(), rtol=rtol, atol=rtol)
"""


@pytest.mark.gpu
def test_results_with_a_margin():
    """Right, and with one margin the same in every run."""
    script = """
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        for case in CASES:
            whole = results(case)
            for n in (1, 20, sms - 32, sms - 1):
                with fl.sm_margin(n):
                    first, second = results(case), results(case)
                assert all(map(torch.equal, first, second)), (case.problem, n)
                check(first, whole)
                assert all(map(torch.equal, whole, results(case))), case.problem
    """
    run(NORMS, script)


# A kernel that holds n multiprocessors, a block on each, until it is released or gives up.
HOLD = """
SOURCE = '''
extern "C" __global__ void hold(volatile int* flags, long long cycles) {
  __shared__ volatile char all[48 * 1024];
  if (threadIdx.x != 0) return;
  all[0] = 1;
  atomicAdd_system((int*)&flags[0], 1);
  const long long begin = clock64();
  while (flags[1] == 0) {
    if (clock64() - begin > cycles) {
      flags[2] = 1;
      break;
    }
  }
}
extern "C" __global__ void release(volatile int* flags) { flags[1] = 1; }
'''
hold, release = (torch.cuda._compile_kernel(SOURCE, name) for name in ("hold", "release"))
flags = torch.zeros(3, dtype=torch.int32).pin_memory()
holder, ours = torch.cuda.Stream(), torch.cuda.Stream()
def beside(n, run):
    '''Seconds of a call beside the kernel, which waits for the call; whether it gave up.'''
    flags.zero_()
    hold(grid=(n, 1, 1), block=(32, 1, 1), args=(flags, 8_000_000_000), stream=holder)
    begin = time.monotonic()
    while flags[0] < n and time.monotonic() < begin + 2:
        pass
    assert flags[0] == n
    with torch.cuda.stream(ours):
        run()
        release(grid=(1, 1, 1), block=(1, 1, 1), args=(flags,), stream=ours)
    torch.cuda.synchronize()
    return time.monotonic() - begin, bool(flags[2])
"""


@pytest.mark.gpu
@pytest.mark.skipif(not hasattr(torch.cuda, "_compile_kernel"), reason="compiles no kernel")
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
def test_a_kernel_that_waits_for_ours(captured):
    """It holds as many multiprocessors as the margin has, and both end."""
    script = """
        beside(1, lambda: None)
        torch.cuda.synchronize()
        for case in CASES:
            for n in (1, 20):
                with fl.sm_margin(n), torch.cuda.stream(ours):
                    results(case)
                    call = lambda: results(case)
                    if CAPTURED:
                        graph = torch.cuda.CUDAGraph()
                        torch.cuda.synchronize()
                        with torch.cuda.graph(graph, stream=ours):
                            results(case)
                        call = graph.replay
                        call()
                torch.cuda.synchronize()
                with fl.sm_margin(n):
                    seconds, gave_up = beside(n, call)
                assert seconds < 1 and not gave_up, (case.problem, n, seconds)
    """
    run(NORMS, HOLD, script, CAPTURED=captured)


# A context of 16 multiprocessors, by the driver's interface.
GREEN = """
import ctypes
driver = ctypes.CDLL("libcuda.so.1")
def call(name, *args):
    error = getattr(driver, name)(*args)
    assert error == 0, (name, error)
    return args
def made(name, *args):
    into = ctypes.c_void_p()
    call(name, ctypes.byref(into), *args)
    return into
Resource = ctypes.c_ubyte * 256
def part(sms):
    whole, split, rest = Resource(), Resource(), Resource()
    call("cuDeviceGetDevResource", 0, whole, 1)
    call("cuDevSmResourceSplitByCount", split, ctypes.byref(ctypes.c_uint(1)), whole, rest, 0, sms)
    return made("cuGreenCtxCreate", made("cuDevResourceGenerateDesc", split, 1), 0, 1)
"""


def has_green_contexts():
    import ctypes

    try:
        return hasattr(ctypes.CDLL("libcuda.so.1"), "cuGreenCtxStreamCreate")
    except OSError:
        return False


@pytest.mark.gpu
@pytest.mark.skipif(not has_green_contexts(), reason="a driver without green contexts")
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(("place", "sms"), [("context", 8), ("context", 64), ("stream", 16)])
def test_a_part_of_the_device(place, sms, captured):
    """A green context that is current, or to which the stream belongs. What blocks of the whole
    device would share, and wait for, is right, and the refused launches leave no error behind."""
    script = """
        # Backward on this thread, whose context it is.
        torch.autograd.set_multithreading_enabled(False)
        stream = torch.cuda.Stream()
        expected = [numerics.exact(case).values() for case in CASES]
        with torch.cuda.stream(stream):
            for case in CASES:
                results(case)
        torch.cuda.synchronize()
        green = part(SMS)
        if PLACE == "stream":
            stream = torch.cuda.ExternalStream(made("cuGreenCtxStreamCreate", green, 1, 0).value)
        else:
            call("cuCtxSetCurrent", made("cuCtxFromGreenCtx", green))
        for case, exact in zip(CASES, expected):
            begin = time.monotonic()
            if CAPTURED:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    found = results(case)
                with torch.cuda.stream(stream):
                    graph.replay()
            else:
                with torch.cuda.stream(stream):
                    found = results(case)
            torch.cuda.synchronize()
            assert time.monotonic() < begin + 1, case.problem
            assert torch.zeros(4, device="cuda").add(1).sum().item() == 4
            check(found, exact)
    """
    run(NORMS, GREEN, script, CAPTURED=captured, PLACE=place, SMS=sms)

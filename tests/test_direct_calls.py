# SPDX-License-Identifier: Apache-2.0
"""Direct calls: kernels launched through the table of C functions, past the dispatcher.

The operators are the other way, which every call takes where direct calls are switched off. The two
must agree to the bit, and save the same tensors. Few of the tests run without a GPU. Those of
several threads are in test_threads.py.
"""

import contextlib
import ctypes
import functools
import itertools
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forms import saved_by
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fused_layernorm
from fused_layernorm import FusedLayerNorm, FusedRMSNorm
from fused_layernorm.ops import autograd_library

ops = torch.ops.fused_layernorm
pytestmark = pytest.mark.skipif(not autograd_library.active, reason="autograd is in Python")
F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64


def count():
    return ops._direct_calls(None)


@pytest.fixture(autouse=True)
def _switched_on():
    ops._direct_calls(True)
    yield
    ops._direct_calls(True)


def both_ways(function):
    """What a function gives directly and by the operators, and how many direct calls it made."""
    ops._direct_calls(True)
    before = count()
    direct = function()
    calls = count() - before
    ops._direct_calls(False)
    indirect = function()
    assert count() - before == calls
    ops._direct_calls(True)
    return direct, indirect, calls


def same_bits(one, other):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))


# --- without a GPU --------------------------------------------------------------------------------


def test_the_table_says_its_version_and_size():
    address = ops._kernel_table()
    assert (address != 0) == (ops._build_info() != "cpu only")
    if address:
        version, size, *functions = (ctypes.c_int64 * 6).from_address(address)
        assert (version, size) == (2, 8 * 6)
        assert all(functions)


def test_nothing_is_direct_on_the_cpu():
    before = count()
    x, weight = torch.randn(2, 8), torch.ones(8, requires_grad=True)
    with torch.inference_mode():
        ops.layer_norm(x, 1, weight, None, 1e-5)
    ops.layer_norm(x, 1, weight, None, 1e-5).sum().backward()
    assert count() == before


@pytest.mark.parametrize("add", [False, True])
def test_bias_is_saved_only_where_backward_reads_it(add):
    x, bias = torch.randn(2, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    weight = torch.full((8,), 2.0, requires_grad=True)

    def saved(weight, activation):
        operator, rows = (ops.add_layer_norm, (x, x)) if add else (ops.layer_norm, (x,))
        kept = saved_by(lambda: operator(*rows, 1, weight, bias, 1e-5, activation))
        return sum(t is bias for t in kept)

    assert [saved(weight, None), saved(weight, "gelu"), saved(None, None)] == [0, 1, 1]


def test_the_plain_operator_is_recorded_as_the_general_one():
    """What torch.jit.trace records must run without a C++ autograd library."""

    def f(x, weight):
        return ops._plain_rms_norm(x, 1, weight, 1e-5)

    x, weight = torch.randn(2, 8), torch.ones(8)
    graph = str(torch.jit.trace(f, (x, weight)).graph)
    assert "fused_layernorm::layer_norm" in graph
    assert "_plain" not in graph
    torch.testing.assert_close(f(x, weight), F.rms_norm(x, (8,), weight, 1e-5))


# --- both ways give the same ----------------------------------------------------------------------

DTYPES = [(F32, F32), (F16, F16), (BF16, BF16), (BF16, F32), (F64, F64)]
SHAPES = [(1, 1), (3, 5, 77), (4, 256), (513, 768), (2, 20000), (1, 300001)]


def norm(kind, x, residual, weight, bias, **options: Any) -> tuple[Any, ...]:
    rows = (x, residual) if kind.startswith("add") else (x,)
    function: Any = getattr(fused_layernorm, f"{kind}_norm")
    named = {"weight": weight, "bias": bias, "normalized_shape": x.shape[-1:], **options}
    found = function(*rows, **named)
    return found if isinstance(found, tuple) else (found,)


KINDS = ("layer", "add_layer", "rms", "add_rms")
AFFINE = ((True, True), (True, False), (False, True), (False, False))
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"activation": "gelu", "scale": 0.5}, {"out_dtype": F32})


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_equal(kind, dtype, shape, poison):
    x, residual, dy = (torch.randn(shape, device="cuda").to(dtype[0]) for _ in range(3))
    parameters = [torch.randn(shape[-1:], device="cuda").to(dtype[1]) for _ in range(2)]
    is_rms = "rms" in kind
    weights: list[dict[str, Any]] = [{}, {"weight_offset": 1.0}, {"round_before_weight": True}]
    for (has_weight, has_bias), options in itertools.product(AFFINE, OPTIONS):
        for of_weight in weights if is_rms and has_weight else [{}]:

            def run(options={**options, **of_weight}, has=(has_weight, has_bias)):  # noqa: B006
                leaves = [t.clone().requires_grad_() for t in (x, residual)]
                weight, bias = (
                    p.clone().requires_grad_() if one else None
                    for p, one in zip(parameters, has, strict=True)
                )
                rows = x[..., 0].numel()
                poison(x, x, *parameters, x.new_empty(2 * rows + 64, dtype=F32))
                given: Any = (*leaves, weight, bias)
                call = functools.partial(norm, kind, *given, **options)
                with torch.no_grad():
                    found = [*call()]
                with torch.inference_mode():
                    found += [t.clone() for t in call()]
                outputs = call()
                wanted = [t for t in given if t is not None]
                grads = torch.autograd.grad(
                    outputs, wanted, [dy.to(y.dtype) for y in outputs], allow_unused=True
                )
                return [*found, *outputs, *(g for g in grads if g is not None)]

            direct, indirect, calls = both_ways(run)
            same_bits(direct, indirect)
            # With an out_dtype, a weight that kernels read only converted goes by the operators.
            if "out_dtype" not in options:
                assert calls == 4, (options, has_weight, has_bias)


@pytest.mark.gpu
@pytest.mark.parametrize("change", ["strided", "transposed", "offset", "expanded dy", "empty"])
def test_other_layouts(change):
    """They are right whichever way they take; only what is contiguous is direct."""
    x = torch.randn(16, 8, 64, device="cuda")
    weight, bias = (torch.randn(64, device="cuda", requires_grad=True) for _ in range(2))
    x = {
        "strided": lambda: x[:, ::2],
        "transposed": lambda: x.transpose(0, 1),
        "offset": lambda: x.flatten()[1:-63].view(-1, 64),  # not aligned
        "expanded dy": lambda: x,
        "empty": lambda: x[:0],
    }[change]()

    def run():
        leaf = x.detach().requires_grad_()
        y = fused_layernorm.layer_norm(leaf, weight, bias)
        dy = torch.ones((), device="cuda").expand_as(y) if change == "expanded dy" else y.detach()
        return [y, *torch.autograd.grad(y, (leaf, weight, bias), dy)]

    direct, indirect, calls = both_ways(run)
    same_bits([t.contiguous() for t in direct], [t.contiguous() for t in indirect])
    expected = {"offset": 2, "expanded dy": 1, "strided": 0, "transposed": 0, "empty": 0}
    assert calls == expected[change]


@pytest.mark.gpu
def test_both_ways_save_the_same():
    x = torch.randn(4, 3, 64, device="cuda", requires_grad=True)
    weight, bias = (torch.randn(64, device="cuda", requires_grad=True) for _ in range(2))

    for kind, saved in zip(KINDS, (4, 4, 3, 3), strict=True):
        run = functools.partial(norm, kind, x, x, weight, bias)
        direct, indirect, calls = both_ways(lambda run=run: saved_by(run))
        assert calls == 1
        assert len(direct) == saved
        same_bits([t.detach() for t in direct], [t.detach() for t in indirect])


class Passes(TorchDispatchMode):
    """A mode, under which no call is direct."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.gpu
@pytest.mark.parametrize("mode_in_forward", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_checkpointing_with_a_mode_in_one_of_forward_and_recomputation(kind, mode_in_forward):
    leaves = [torch.randn(4, 64, device="cuda", requires_grad=True) for _ in range(2)]
    weight, bias = (torch.randn(64, device="cuda", requires_grad=True) for _ in range(2))

    def run(x, residual):
        return norm(kind, x * 1, residual * 1, weight, bias)[0].pow(2)

    expected = torch.autograd.grad(run(*leaves).sum(), (leaves[0], weight, bias))
    with Passes() if mode_in_forward else contextlib.nullcontext():
        loss = checkpoint(run, *leaves, use_reentrant=False).sum()
    with contextlib.nullcontext() if mode_in_forward else Passes():
        found = torch.autograd.grad(loss, (leaves[0], weight, bias))
    same_bits(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("given", ["0", "1"])
def test_the_environment_switches_direct_calls_off(given):
    code = (
        "import fused_layernorm, torch\n"
        "fused_layernorm.layer_norm(torch.ones(2, 4, device='cuda'), normalized_shape=4)\n"
        "print(torch.ops.fused_layernorm._direct_calls(None))\n"
    )
    environment = {**os.environ, "FUSED_LAYERNORM_DIRECT": given}
    command = [sys.executable, "-c", code]
    assert subprocess.check_output(command, env=environment, text=True).strip() == given


@pytest.mark.gpu
def test_which_calls_are_direct():
    module, rms = FusedLayerNorm(64, device="cuda"), FusedRMSNorm(64, device="cuda")
    x = torch.randn(4, 64, device="cuda", requires_grad=True)

    def calls(function):
        before = count()
        function()
        return count() - before

    for m in (module, rms):
        assert calls(lambda m=m: m(x)) == 1
        assert calls(lambda m=m: m(x).backward(x.detach())) == 2
        assert calls(lambda m=m: torch.autograd.grad(m(x).sum(), x, create_graph=True)) == 1
        with torch.autocast("cuda", BF16):
            assert calls(lambda m=m: m(x.bfloat16())) == 1
        with Passes():
            assert calls(lambda m=m: m(x)) == 0
        assert calls(lambda m=m: torch.func.grad(lambda x: m(x).sum())(x.detach())) == 0
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x.detach(), x.detach())
            assert calls(lambda m=m, dual=dual: m(dual)) == 0


# --- what surrounds a call ------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_captured_call_is_direct():
    """test_every_norm.py says that it reads what its tensors hold at the replay."""
    module, x = FusedLayerNorm(64, device="cuda"), torch.randn(4, 64, device="cuda")
    module(x)
    before = count()
    with torch.cuda.graph(torch.cuda.CUDAGraph()), torch.no_grad():
        module(x)
    assert count() == before + 1


@pytest.mark.gpu
def test_memory_pools():
    module = FusedLayerNorm(64, device="cuda")
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        y = module(torch.randn(1 << 16, 64, device="cuda"))
    segments = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == pool.id]
    assert any(s["address"] <= y.data_ptr() < s["address"] + s["total_size"] for s in segments)


@pytest.mark.gpu
def test_out_of_memory_keeps_its_type(one_gibibyte_left):
    x = torch.empty(1 << 26, 8, device="cuda")  # 2 GiB
    module = FusedLayerNorm(8, device="cuda")
    one_gibibyte_left()
    for function in (module, lambda x: fused_layernorm.layer_norm(x, normalized_shape=8)):
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            function(x)

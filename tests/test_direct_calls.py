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
from forms import Calls, saved_by
from numerics import covering, ids
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
    before = count()
    direct = function()
    calls = count() - before
    ops._direct_calls(False)
    indirect = function()
    assert count() - before == calls
    ops._direct_calls(True)
    return direct, indirect, calls


def leaf(*shape, dtype=F32):
    return torch.randn(shape, device="cuda").to(dtype).requires_grad_()


def merged(x):  # a direct call allocates mean and rstd as one
    return x.new_empty(2 * x[..., 0].numel() + 64, dtype=torch.promote_types(x.dtype, F32))


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
        version, size, *functions = (ctypes.c_int64 * 4).from_address(address)
        assert (version, size) == (6, 8 * 4)
        assert all(functions)


@pytest.mark.parametrize("add", [False, True])
def test_bias_is_saved_only_where_backward_reads_it(add):
    x, bias = torch.randn(2, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    weight = torch.full((8,), 2.0, requires_grad=True)

    def saved(weight, activation):
        operator, rows = (ops.add_layer_norm, (x, x)) if add else (ops.layer_norm, (x,))
        kept = saved_by(lambda: operator(*rows, 1, weight, bias, 1e-5, activation))
        return sum(t is bias for t in kept)

    assert [saved(weight, None), saved(weight, "gelu"), saved(None, None)] == [0, 1, 1]


# --- both ways give the same ----------------------------------------------------------------------

DTYPES = [(F32, F32), (F16, F16), (BF16, BF16), (BF16, F32), (F64, F64)]
SHAPES = [(1, 1), (3, 5, 77), (4, 256), (513, 768), (2, 20000), (1, 300001)]


def norm(kind, x, residual, weight, bias, modulations=(), **options: Any) -> tuple[Any, ...]:
    rows = (x, residual) if kind.startswith("add") else (x,)
    named = {"weight": weight, "bias": bias, "normalized_shape": x.shape[-1:], **options}
    if "ada" in kind:
        named.update(zip(("shift", "scale", "gate")[: 1 + len(rows)], modulations, strict=False))
        name, named["statistic"] = kind.rsplit("_", 1)
        kind = f"{name}_layer"
    function: Any = getattr(fused_layernorm, f"{kind}_norm")
    found = function(*rows, **named)
    return found if isinstance(found, tuple) else (found,)


def every_way(call, leaves, dy):
    """What a call gives without a graph, in inference mode, and with the gradients of leaves."""
    with torch.no_grad():
        found = [*call()]
    with torch.inference_mode():
        found += [t.clone() for t in call()]
    outputs = call()
    dys = [dy.to(y.dtype) for y in outputs]
    grads = torch.autograd.grad(outputs, leaves, dys, allow_unused=True)
    return [*found, *outputs, *(g for g in grads if g is not None)]


KINDS = ("layer", "add_layer", "rms", "add_rms")
MODULATED = ("ada_layer", "add_ada_layer", "ada_rms", "add_ada_rms")
AFFINE = ((True, True), (True, False), (False, True), (False, False))
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"activation": "gelu", "scale": 0.5}, {"out_dtype": F32})


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "dtype", "shape"), covering(KINDS, DTYPES, SHAPES), ids=ids)
def test_bits_are_equal(kind, dtype, shape, poison):
    x, residual, dy = (leaf(*shape, dtype=dtype[0]) for _ in range(3))
    parameters = [leaf(*shape[-1:], dtype=dtype[1]) for _ in range(2)]
    weights: list[dict[str, Any]] = [{}, {"weight_offset": 1.0}, {"round_before_weight": True}]
    for has, options in itertools.product(AFFINE, OPTIONS):
        weight, bias = (p if one else None for p, one in zip(parameters, has, strict=True))
        for of_weight in weights if "rms" in kind and has[0] else [{}]:

            def run(given=(x, residual, weight, bias), options={**options, **of_weight}):  # noqa: B006
                poison(x, x, *parameters, merged(x))
                call = functools.partial(norm, kind, *given, **options)
                return every_way(call, [t for t in given if t is not None], dy)

            direct, indirect, calls = both_ways(run)
            same_bits(direct, indirect)
            # With an out_dtype, a weight that kernels read only converted goes by the operators.
            if "out_dtype" not in options:
                assert calls == 4, (options, has)


# shift, scale and gate as parts of p, of shape (batch, rows, 6 * c), and the direct calls each way.
LAYOUTS: dict[str, Any] = {
    "chunks": (lambda p, c: p[:, :1].chunk(6, -1)[:3], 1, 1),
    "one row": (lambda p, c: p[0, 0].chunk(6)[:3], 1, 1),
    "shift alone": (lambda p, c: (p[:, :1, :c], None, None), 1, 1),
    "of elements": (lambda p, c: p.chunk(6, -1)[:3], 1, 1),
    "of several shapes": (lambda p, c: (p[0, 0, :c], *p[:, :1].chunk(6, -1)[1:3]), 1, 0),  # sums
    "unaligned": (lambda p, c: p[:, :1, 1 : 3 * c + 1].chunk(3, -1), 0, 0),
    "columns apart": (lambda p, c: p[:, :1, ::2].chunk(3, -1), 0, 0),
    "no columns": (lambda p, c: p[:, :1, :3].split(1, -1), 0, 0),
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "dtype", "layout"), covering(MODULATED, DTYPES[:4], [*LAYOUTS]), ids=ids
)
def test_modulated_bits_are_equal(kind, dtype, layout, poison):
    parts, forward, backward = LAYOUTS[layout]
    for (*rows, cols), is_affine in itertools.product(((2, 300, 1152), (3, 7, 64)), (True, False)):
        x, residual, dy = (leaf(*rows, cols, dtype=dtype[0]) for _ in range(3))
        weight, bias = (leaf(cols, dtype=dtype[1]) if is_affine else None for _ in range(2))
        made = parts(leaf(*rows, 6 * cols, dtype=dtype[1]), cols)
        modulations = [t if t is None else t.detach().requires_grad_() for t in made]

        def run(given=(x, residual, weight, bias, modulations), dy=dy):
            leaves = [t for t in (*given[:4], *given[4]) if t is not None]
            poison(dy, *leaves, merged(dy))
            return every_way(functools.partial(norm, kind, *given), leaves, dy)

        direct, indirect, calls = both_ways(run)
        same_bits(direct, indirect)
        # Backward has two launches for a gate of short rows, and for dweight beside such elements.
        is_short = kind.startswith("add") and modulations[2] is not None and cols == 64
        takes_two = is_affine if layout == "of elements" else is_short
        assert calls == 3 * forward + (not takes_two and backward), (cols, is_affine)


CHANGES: dict[str, Any] = {  # and the direct calls
    "strided": (lambda x: x[:, ::2], 2),
    "transposed": (lambda x: x.transpose(0, 1), 2),
    "columns apart": (lambda x: torch.stack([x, x], -1)[..., 0], 0),
    "offset": (lambda x: x.flatten()[1:-63].view(-1, 64), 2),  # not aligned
    "expanded dy": (lambda x: x, 1),
    "empty": (lambda x: x[:0], 0),
}


@pytest.mark.gpu
@pytest.mark.parametrize("change", CHANGES)
def test_other_layouts(change):
    """They are right whichever way they take; direct is what one launch reads where it lies."""
    weight, bias = leaf(2, 64).unbind()
    of, expected = CHANGES[change]
    x = of(leaf(16, 8, 64)).detach().requires_grad_()

    def run():
        y = fused_layernorm.layer_norm(x, weight, bias)
        dy = torch.ones((), device="cuda").expand_as(y) if change == "expanded dy" else y.detach()
        return [y, *torch.autograd.grad(y, (x, weight, bias), dy)]

    direct, indirect, calls = both_ways(run)
    same_bits([t.contiguous() for t in direct], [t.contiguous() for t in indirect])
    assert calls == expected


# Orders of memory of (N, C, H, W), and the direct calls of a norm over C.
ORDERS: dict[str, Any] = {
    "contiguous": (lambda x: x, 2),
    "channels last": (lambda x: x.to(memory_format=torch.channels_last), 2),
    "gaps": (lambda x: x[:, :64], 0),
}


@pytest.mark.gpu
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("statistic", ["layer", "rms"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_norms_over_channels(dtype, statistic, order, poison):
    of, expected = ORDERS[order]
    x = of(leaf(3, 80, 24, 24, dtype=dtype)).detach().requires_grad_()
    weight = leaf(x.shape[1], dtype=dtype)
    norm = getattr(fused_layernorm, f"{statistic}_norm")

    def run():
        poison(x, x, weight)
        y = norm(x, weight, dim=1)
        return [y, *torch.autograd.grad(y, (x, weight), torch.ones_like(y))]

    direct, indirect, calls = both_ways(run)
    assert direct[0].stride() == direct[1].stride() == torch.empty_like(x).stride()
    for a, b in zip(direct, indirect, strict=True):
        assert a.stride() == b.stride()
        assert torch.equal(a, b)
    assert calls == expected


OF_GROUPS: dict[str, Any] = {
    **{name: ORDERS[name][0] for name in ("contiguous", "channels last", "gaps")},
    "transposed": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("order", "dtypes"),
    [
        ("contiguous", (F32, F32)), ("contiguous", (BF16, F32)), ("contiguous", (F64, F64)),
        ("channels last", (BF16, BF16)), ("transposed", (F16, F16)), ("gaps", (BF16, F32)),
    ],
    ids=ids,
)  # fmt: skip
def test_norms_over_groups(order, dtypes, poison):
    x = OF_GROUPS[order](leaf(3, 80, 24, 20, dtype=dtypes[0])).detach().requires_grad_()
    samples, channels = x.shape[:2]
    sizes = ((samples, channels, 1, 1), (samples, channels), (channels,), (channels,))
    parameters: Any = [leaf(*size, dtype=dtypes[1]) for size in sizes]
    dy = torch.randn_like(x)

    def call():
        return (fused_layernorm.ada_group_norm(x, 8, *parameters, activation="silu"),)

    def run():
        poison(x, x, dy)
        return every_way(call, [x, *parameters], dy)

    direct, indirect, calls = both_ways(run)
    for a, b in zip(direct, indirect, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert torch.equal(a, b)
    assert calls == (0 if order == "gaps" else 4)


@pytest.mark.gpu
def test_both_ways_save_the_same():
    x, weight, bias, modulations = leaf(4, 3, 64), leaf(64), leaf(64), leaf(3, 4, 1, 64).unbind()
    for kind, saved in zip(KINDS + MODULATED, (4, 4, 3, 3, 7, 9, 6, 8), strict=True):
        run = functools.partial(norm, kind, x, x, weight, bias, modulations)
        direct, indirect, calls = both_ways(lambda run=run: saved_by(run))
        assert (calls, len(direct)) == (1, saved)
        same_bits([t.detach() for t in direct], [t.detach() for t in indirect])


@pytest.mark.gpu
@pytest.mark.parametrize("mode_in_forward", [False, True])
@pytest.mark.parametrize("kind", KINDS + MODULATED)
def test_checkpointing_with_a_mode_in_one_of_forward_and_recomputation(kind, mode_in_forward):
    leaves, (weight, bias) = [leaf(4, 3, 64) for _ in range(2)], leaf(2, 64).unbind()
    modulations = leaf(3, 4, 1, 64).unbind()

    def run(x, residual):
        return norm(kind, x * 1, residual * 1, weight, bias, modulations)[0].pow(2)

    expected = torch.autograd.grad(run(*leaves).sum(), (leaves[0], weight, bias))
    with Calls() if mode_in_forward else contextlib.nullcontext():
        loss = checkpoint(run, *leaves, use_reentrant=False).sum()
    with contextlib.nullcontext() if mode_in_forward else Calls():
        found = torch.autograd.grad(loss, (leaves[0], weight, bias))
    same_bits(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("on", "version", "size"), [(0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 0, 8)])
def test_the_environment_and_another_table_switch_direct_calls_off(on, version, size):
    code = (
        "import ctypes, fused_layernorm, torch\n"
        "ops, Table = torch.ops.fused_layernorm, ctypes.c_int64 * 6\n"
        "table = Table(*Table.from_address(ops._kernel_table()))\n"
        f"table[0] += {version}; table[1] += {size}\n"
        "library = torch.library.Library('fused_layernorm', 'IMPL')\n"
        "library.impl('_kernel_table', lambda: ctypes.addressof(table),\n"
        "             'CompositeExplicitAutograd', allow_override=True)\n"
        "fused_layernorm.layer_norm(torch.ones(2, 4, device='cuda'), normalized_shape=4)\n"
        "print(ops._direct_calls(None))\n"
    )
    environment = {**os.environ, "FUSED_LAYERNORM_DIRECT": str(on)}
    command = [sys.executable, "-c", code]
    found = subprocess.check_output(command, env=environment, text=True).strip()
    assert found == str(int(on and not version and not size))


@pytest.mark.gpu
def test_which_calls_are_direct():
    module, rms = FusedLayerNorm(64, device="cuda"), FusedRMSNorm(64, device="cuda")
    x, shift, weight = leaf(4, 64), torch.ones(64, device="cuda"), torch.ones(64, device="cuda")
    modulated = functools.partial(fused_layernorm.ada_layer_norm, shift=shift, normalized_shape=64)

    def calls(function):
        before = count()
        function()
        return count() - before

    for m in (module, rms, modulated):
        assert calls(lambda m=m: m(x)) == 1
        assert calls(lambda m=m: m(x).backward(x.detach())) == 2
        assert calls(lambda m=m: torch.autograd.grad(m(x).sum(), x, create_graph=True)) == 1
        with torch.autocast("cuda", BF16):
            assert calls(lambda m=m: m(x.bfloat16())) == 1
        with Calls():
            assert calls(lambda m=m: m(x)) == 0
        with torch.inference_mode(), torch.enable_grad():
            assert not m(torch.ones(4, 64, device="cuda")).requires_grad
        assert calls(lambda m=m: torch.func.grad(lambda x: m(x).sum())(x.detach())) == 0
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x.detach(), x.detach())
            assert calls(lambda m=m, dual=dual: m(dual)) == 0
    # A modulated norm that takes more than one launch, or a conversion.
    run = functools.partial(ops.ada_layer_norm, x.bfloat16(), 1, shift.bfloat16(), None)
    for last, direct in (((), 1), ((None, "layer", 1.0), 0), ((None, "layer", 0.0, True), 0)):
        assert calls(lambda last=last: run(weight.bfloat16(), None, 1e-5, *last)) == direct
    assert calls(lambda: run(weight, None, 1e-5)) == 0
    with pytest.raises(RuntimeError, match="shift must broadcast"):
        ops.ada_layer_norm(x, 1, shift[:0], None, None, None, 1e-5)


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

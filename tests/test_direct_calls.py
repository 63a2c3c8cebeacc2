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
from typing import Any

import pytest
import torch
from families import BF16, F16, F32, F64, Groups, of_groups, over_channels
from forms import Calls, leaves
from numerics import Problem, covering, ids, make, modulated, ours
from processes import run
from torch.utils.checkpoint import checkpoint

import fused_layernorm
from fused_layernorm import FusedGroupNorm, FusedLayerNorm, FusedRMSNorm
from fused_layernorm.compile import rules
from fused_layernorm.ops import autograd_library

ops = torch.ops.fused_layernorm
pytestmark = pytest.mark.skipif(not autograd_library.active, reason="autograd is in Python")


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


def same_bits(one, other, strides=True):
    for a, b in zip(one, other, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.stride() == b.stride() or not strides
        assert torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def test_the_table_says_its_version_and_size():
    address = ops._kernel_table()
    assert (address != 0) == (ops._build_info() != "cpu only")
    if address:
        version, size, *functions = (ctypes.c_int64 * 4).from_address(address)
        assert (version, size) == (6, 8 * 4)
        assert all(functions)


# --- both ways give the same ----------------------------------------------------------------------


def check(t, poison, forward=1, backward=1, **how):
    """Asserts that both ways give the same bits without a graph, in inference mode and with all
    gradients, and how many direct calls each of the three and backward makes."""
    x = t.x
    # A direct call allocates mean and rstd as one.
    statistics = x.new_empty(2 * x[..., :1].numel() + 64, dtype=torch.promote_types(x.dtype, F32))
    for tensor in t.inputs().values():
        tensor.requires_grad_()

    def run():
        poison(x, x, *t.inputs().values(), statistics)
        with torch.inference_mode():
            inference = ours(t, backward=False)
        results = inference, ours(t, backward=False), ours(t)
        return [tensor for named in results for tensor in named.values()]

    direct, indirect, calls = both_ways(run)
    same_bits(direct, indirect, **how)
    if forward is not None:
        assert calls == 3 * forward + backward, t.problem


DTYPES = [(F32, F32), (F16, F16), (BF16, BF16), (BF16, F32), (F64, F64)]
SHAPES = [(1, 1), (3, 5, 77), (4, 256), (513, 768), (2, 20000), (1, 300001)]
KINDS = ("layer", "add layer", "rms", "add rms")
AFFINE = ("both", "weight", "bias", "none")
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"activation": "gelu", "scale": 0.5}, {"out_dtype": F32})
WEIGHTS: tuple[dict[str, Any], ...] = ({}, {"weight_offset": 1.0}, {"rounds": True})


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "dtypes", "shape"), covering(KINDS, DTYPES, SHAPES), ids=ids)
def test_bits_are_equal(kind, dtypes, shape, poison):
    for affine, options, of_weight in itertools.product(AFFINE, OPTIONS, WEIGHTS):
        if of_weight and not ("rms" in kind and affine in ("both", "weight")):
            continue
        how: Any = {"affine": affine, **options, **of_weight}
        if "rms" in kind:
            how |= {"statistic": "rms", "eps": None}
        if "add" in kind:
            how["residual_dtype"] = dtypes[0]
        # With an out_dtype, a weight that kernels read only converted goes by the operators.
        forward = None if "out_dtype" in options else 1
        check(make(Problem(shape, *dtypes, **how), "cuda"), poison, forward)


# shift, scale and gate, and the direct calls each way.
MODULATIONS: dict[str, Any] = {
    "chunks": ({"modulation_layout": "chunk"}, 1, 1),
    "one row": ({"kind": "all"}, 1, 1),
    "shift alone": ({"scale_by": None, "gate": None, "modulation_layout": "chunk"}, 1, 1),
    "of elements": ({"kind": "token", "modulation_layout": "chunk"}, 1, 1),
    "unaligned": ({"modulation_layout": "misaligned"}, 0, 0),
    "columns apart": ({"modulation_layout": "every second"}, 0, 0),
    "no columns": ({"kind": "number of a sample"}, 0, 0),
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("gated", "statistic", "dtypes", "layout"),
    covering((False, True), ("layer", "rms"), DTYPES[:4], [*MODULATIONS, "of several shapes"]),
    ids=ids,
)
def test_modulated_bits_are_equal(gated, statistic, dtypes, layout, poison):
    dtype, other = dtypes
    for shape, affine in itertools.product(((2, 300, 1152), (3, 7, 64)), ("both", "none")):
        cols = shape[-1]
        several = ({"shift": (cols,)}, 1, 0)  # a sum for each
        how, forward, backward = MODULATIONS.get(layout, several)
        problem = modulated(
            shape, gated=gated, dtypes=(dtype, dtype, other, other), affine=affine,
            statistic=statistic, **how,
        )  # fmt: skip
        # Backward has two launches for a gate of short rows, and for dweight beside such elements.
        has_gate = problem.gate is not None and cols == 64
        takes_two = affine == "both" if layout == "of elements" else has_gate
        check(make(problem, "cuda"), poison, forward, not takes_two and backward)


LAST = {"layout": "channels_last", "dy_layout": "channels_last"}
GAPS = {"layout": "slice of channels", "dy_layout": "contiguous"}
# Rows, channels and groups of these in orders of memory, and the direct calls each way: direct is
# what one launch reads where it lies.
OTHERS: list[tuple[Any, int, int]] = [
    *((Problem((16, 8, 64), layout=layout, dy_layout="contiguous"), direct, direct)
      for layout, direct in (("every other row", 1), ("transposed leading", 1),
                             ("every other column", 0), ("misaligned", 1))),
    (Problem((16, 8, 64), dy_layout="expanded number"), 1, 0), (Problem((0, 8, 64)), 0, 0),
    *((over_channels((3, 80, 24, 24), dtype, statistic=statistic, affine="weight", **order),
       direct, direct)
      for dtype in (F32, BF16) for statistic in ("layer", "rms")
      for order, direct in (({}, 1), (LAST, 1), (GAPS, 0))),
    *((of_groups((3, 80, 24, 20), 8, dtypes, modulation="both", activation="silu", **order),
       direct, direct)
      for dtypes, order, direct in (
          ((F32, F32), {}, 1), ((BF16, F32), {}, 1), ((F64, F64), {}, 1), ((BF16, F32), GAPS, 0),
          ((BF16, BF16), LAST, 1), ((F16, F16), {"layout": "turned"}, 1))),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("problem", "forward", "backward"), OTHERS, ids=str)
def test_other_layouts(problem, forward, backward, poison):
    t = make(problem, "cuda")
    if isinstance(problem, Groups):  # direct calls read contiguous modulations
        t = t.but(shift=t.shift.clone(), scale=t.scale.clone())
    check(t, poison, forward, backward, strides=type(problem) is not Problem)


X = (4, 3, 64)
OF_EACH_KIND = [
    Problem(X), Problem(X, residual_dtype=F32), Problem(X, statistic="rms"),
    Problem(X, statistic="rms", residual_dtype=F32), modulated(X), modulated(X, gated=True),
    modulated(X, statistic="rms"), modulated(X, gated=True, statistic="rms"),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("mode_in_forward", [False, True])
@pytest.mark.parametrize("problem", OF_EACH_KIND, ids=str)
def test_checkpointing_with_a_mode_in_one_of_forward_and_recomputation(problem, mode_in_forward):
    t = make(problem, "cuda")
    names, given = [*t.inputs()], leaves(t.inputs().values())

    def run(*tensors):
        return problem.forward(t.but(**dict(zip(names, (u * 1 for u in tensors), strict=True))))[0]

    expected = torch.autograd.grad(run(*given).pow(2).sum(), given)
    with Calls() if mode_in_forward else contextlib.nullcontext():
        loss = checkpoint(run, *given, use_reentrant=False).pow(2).sum()
    with contextlib.nullcontext() if mode_in_forward else Calls():
        found = torch.autograd.grad(loss, given)
    same_bits(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("on", "version", "size"), [(0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 0, 8)])
def test_the_environment_and_another_table_switch_direct_calls_off(on, version, size):
    code = """
        import ctypes, fused_layernorm, torch
        ops, Table = torch.ops.fused_layernorm, ctypes.c_int64 * 4
        table = Table(*Table.from_address(ops._kernel_table()))
        table[0] += VERSION; table[1] += SIZE
        library = torch.library.Library("fused_layernorm", "IMPL")
        library.impl("_kernel_table", lambda: ctypes.addressof(table),
                     "CompositeExplicitAutograd", allow_override=True)
        fused_layernorm.layer_norm(torch.ones(2, 4, device="cuda"), normalized_shape=4)
        print(ops._direct_calls(None))
    """
    environment = {"FUSED_LAYERNORM_DIRECT": str(on)}
    found, _ = run(code, environment=environment, VERSION=version, SIZE=size)
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
        found = torch.func.grad(lambda x, m=m: m(x).sin().sum())(x.detach())
        torch.testing.assert_close(found, torch.autograd.grad(m(x).sin().sum(), x)[0])
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


@pytest.mark.gpu
def test_group_norms_and_captured_calls_are_direct():
    """test_every_norm.py says that a captured call reads what its tensors hold at the replay."""
    x, (weight, bias) = leaf(2, 64, 9), leaf(2, 64).unbind()
    module, dy = FusedGroupNorm(8, 64, device="cuda"), torch.randn_like(x)
    before = count()
    fused_layernorm.group_norm(x, 8, weight, bias).backward(dy)
    module(x).backward(dy)
    with torch.inference_mode():
        module(x)
    with torch.autocast("cuda", BF16):
        assert module(x.bfloat16()).dtype == F32
    assert count() - before == 6
    layer = FusedLayerNorm(9, device="cuda")
    layer(x)
    with torch.cuda.graph(torch.cuda.CUDAGraph()), torch.no_grad():
        layer(x)
    assert count() - before == 8


GRAPHS: dict[str, Any] = {
    "layer": lambda x, r, s, w: fused_layernorm.layer_norm(x, w, w, activation="silu"),
    "rms": lambda x, r, s, w: fused_layernorm.rms_norm(x, w, activation="silu"),
    "no parameters": lambda x, r, s, w: fused_layernorm.add_layer_norm(
        x, r, normalized_shape=(1152,), activation="silu"
    ),
    "modulated": lambda x, r, s, w: fused_layernorm.ada_layer_norm(x, s, s),
    "gated sum": lambda x, r, s, w: fused_layernorm.add_ada_layer_norm(x, r, s, s, s, w, w),
    "groups": lambda x, r, s, w: fused_layernorm.group_norm(x, 3, activation="silu"),
    "gated": lambda x, r, s, w: fused_layernorm.rms_norm_gated(x, r, w),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", GRAPHS)
def test_compiled_graphs_call_directly(name, monkeypatch):
    """With the bits of the operators, and empty tensors for gradients that nobody asks for."""
    monkeypatch.setattr(rules, "DEVICES", set())
    torch._dynamo.reset()
    given = [leaf(2, 6, 1152), leaf(2, 6, 1152), leaf(2, 1, 1152), leaf(1152)]
    compiled = torch.compile(GRAPHS[name], backend="aot_eager", fullgraph=True)

    def run():
        results = compiled(*given)
        results = results if isinstance(results, tuple) else (results,)
        dys = [torch.ones_like(y) for y in results]
        gradients = torch.autograd.grad(results, given, dys, allow_unused=True)
        return [*results, *(gradient for gradient in gradients if gradient is not None)]

    run()
    direct, indirect, calls = both_ways(run)
    same_bits(direct, indirect)
    assert calls == 2


@pytest.mark.gpu
@torch.no_grad()
def test_operators_with_statistics_and_of_backward():
    x, w = leaf(4, 64).detach(), leaf(64).detach()
    for last, has_mean in (((), True), ((None, 1.0, None, "rms"), False)):
        _, mean, rstd = ops.layer_norm_forward(x, 1, w, None, 1e-5, *last)
        assert (mean.shape, rstd.shape) == ((4, 1) if has_mean else (0,), (4, 1))
        statistic = last[-1:] or ("layer",)
        given = (x, x, 1, mean, rstd, w, None, None, None, 1.0)
        before = count()
        _, dw, db = ops.layer_norm_backward(*given, True, True, False, *statistic)
        assert (dw.shape, db.shape, count() - before) == (w.shape, (0,), 1)
        with pytest.raises(RuntimeError, match="mean and rstd"):
            ops.layer_norm_backward(*given[:4], rstd[:1], *given[5:], True, True, False, *statistic)
        # Gradients of parameters that are not there are the operators'.
        given = (x, x, 1, mean, rstd, None, None, None, None, 1.0)
        _, dw, db = ops.layer_norm_backward(*given, True, True, True, *statistic)
        assert dw.shape == db.shape == w.shape


# --- what surrounds a call ------------------------------------------------------------------------


@pytest.mark.gpu
def test_memory_pools():
    module = FusedLayerNorm(64, device="cuda")
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        y = module(torch.randn(1 << 16, 64, device="cuda"))
    segments = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == pool.id]
    assert any(s["address"] <= y.data_ptr() < s["address"] + s["total_size"] for s in segments)

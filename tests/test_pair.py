# SPDX-License-Identifier: Apache-2.0
"""ada_layer_norm_pair: one norm under two modulations gives what two calls give."""

import itertools
from typing import Any

import forms
import numerics
import pytest
import torch
import torch.nn.functional as F
from test_ada_layer_norm import GROUPS, KINDS, WIDE, WIDTHS, ids, masks
from torch import nn
from torch.func import grad, vmap

import fused_layernorm
from fused_layernorm import ada_layer_norm
from fused_layernorm.functional import ada_layer_norm_pair

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
HALF = [F16, BF16]
SHAPES = [(4,), (2, 1, 4), (2, 3, 4), (1, 3, 4), (2, 1, 1), ()]
ops = torch.ops.fused_layernorm
pytestmark = pytest.mark.cpu_operators
stock_ada = forms.stock("modulated")


def pair_of(
    device, shape, kinds=("sample", "sample"), dtypes=(F32, F32, F32), *, affine=True, absent=()
):
    """(x, [shift, scale] of y, [shift, scale] of second_y, (weight, bias)).

    dtypes: of x, weight and bias; of y's modulations; of second_y's.
    absent: the positions, among the four modulations, of those that are None.
    """
    input_dtype, *modulation_dtypes = dtypes
    x = (torch.randn(shape, device=device) + 0.5).to(input_dtype)
    modulations = [
        None
        if 2 * i + j in absent
        else torch.randn(KINDS[kind](*shape), device=device).to(modulation_dtypes[i])
        for i, kind in enumerate(kinds)
        for j in range(2)
    ]
    weight, bias = torch.randn(2, shape[-1], device=device).to(input_dtype)
    return x, modulations[:2], modulations[2:], (weight, bias) if affine else (None, None)


def one_call(x, first, second, affine, out_dtype=None, *, ndim=1):
    return ops.ada_layer_norm_pair(x, ndim, *first, *second, *affine, 1e-5, out_dtype)


def two_calls(x, first, second, affine, out_dtype=None, *, ndim=1):
    return tuple(
        ops.ada_layer_norm(x, ndim, *modulation, *affine, 1e-5, out_dtype)
        for modulation in (first, second)
    )


def check_pair(*args, exactly=True, **kwargs):
    found, expected = one_call(*args, **kwargs), two_calls(*args, **kwargs)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.is_contiguous()
        if exactly:
            assert torch.equal(one, other)
        else:
            tolerance = 2 * torch.finfo(one.dtype).eps if one.dtype in (F16, BF16) else 1e-5
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtypes", [(F32,) * 3, (BF16,) * 3, (BF16, F32, F32)], ids=ids)
@pytest.mark.parametrize("cols", [1, 48, 100, 1152])
@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", KINDS)
def test_pair_is_two_calls(device, first, second, cols, dtypes):
    check_pair(*pair_of(device, (4, 6, cols), (first, second), dtypes))


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64], ids=ids)
@pytest.mark.parametrize("out_dtype", [None, F32, F16, BF16, F64], ids=ids)
def test_pair_of_every_dtype(device, dtype, out_dtype, affine):
    for cols in (64, 1152):
        check_pair(*pair_of(device, (3, 7, cols), dtypes=(dtype,) * 3, affine=affine), out_dtype)


@pytest.mark.parametrize("dtypes", [(BF16, BF16, F32), (F16, F32, F16)], ids=ids)
def test_pair_of_two_dtypes(device, dtypes):
    """The kernel reads all modulations as float32, so its plan differs from half precision's."""
    for cols in (64, 100, 1152):
        check_pair(*pair_of(device, (3, 7, cols), dtypes=dtypes), exactly=device == "cpu")


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("present", list(itertools.product((True, False), repeat=4)), ids=str)
def test_pair_with_absent_arguments(device, present, affine):
    absent = [i for i, there in enumerate(present) if not there]
    for cols in (40, 1152):
        args = pair_of(device, (3, 7, cols), affine=affine, absent=absent)
        # A norm without any modulation runs on other kernels, which may round differently.
        is_modulated = any(present[:2]) and any(present[2:])
        check_pair(*args, exactly=device == "cpu" or is_modulated)


@pytest.mark.parametrize("layout", sorted({*numerics.LAYOUTS} - {"contiguous"}))
def test_layouts_of_a_pair(device, layout):
    """Layouts of the modulations, and an input with neither rows nor columns adjacent."""
    for cols in (64, 75):
        x, first, second, affine = pair_of(device, (3, 7, cols))
        strided = numerics.LAYOUTS[layout]
        check_pair(x, [strided(m) for m in first], [strided(m) for m in second], affine)
        for view in (x.repeat_interleave(2, 1)[:, ::2], x.mT.contiguous().mT):
            assert torch.equal(view, x)
            check_pair(view, first, second, affine)


@pytest.mark.parametrize("shape", [(0, 4, 8), (3, 0, 8), (3, 4, 0), (1, 1, 1)], ids=str)
def test_pair_of_few_elements(device, shape):
    check_pair(*pair_of(device, shape))
    check_pair(*pair_of(device, shape, ("token", "all")))


def test_pair_over_several_normalized_dimensions(device):
    x = torch.randn(2, 5, 3, 20, device=device)
    first = torch.randn(2, 2, 1, 3, 20, device=device)
    second = [torch.randn(3, 1, device=device), torch.randn(2, 1, 1, 20, device=device)]
    affine = torch.randn(2, 3, 20, device=device)
    check_pair(x, [*first], second, [*affine], ndim=2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", [(F32,) * 3, (BF16,) * 3, (BF16, F32, F32)], ids=ids)
@pytest.mark.parametrize("cols", [*WIDTHS, *WIDE])
def test_pair_of_every_width(cols, dtypes):
    for d in (cols - 1, cols, cols + 1):
        if d > 0:
            for kinds in (("sample", "sample"), ("token", "all")):
                check_pair(*pair_of("cuda", (3, 1 + 4096 // (3 * d), d), kinds, dtypes))


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [*GROUPS, (1, 5000), (5000, 1), (700, 7)], ids=str)
@pytest.mark.parametrize("cols", [1, 64, 1024, 1152, 1536, 2432, 8193])
def test_groups_of_a_pair(cols, groups):
    check_pair(*pair_of("cuda", (*groups, cols), dtypes=(BF16,) * 3))


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [1, 31, 64, 1000, 1152, 4096, 5001, 40000, 300_000])
def test_every_element_of_a_pair_is_written(poison, cols):
    """The memory of the results held NaN before the call."""
    args = pair_of("cuda", (7, 11, cols))
    expected = two_calls(*args)
    for _ in range(2):
        poison(*expected)
        for one, other in zip(one_call(*args), expected, strict=True):
            assert torch.equal(one, other)


PAIR = ("x", "shift", "scale", "second_shift", "second_scale", "weight", "bias")


@pytest.mark.parametrize("mask", [(False,) * 7, *masks(PAIR)], ids=str)
def test_gradients_of_a_pair_are_those_of_two_calls(device, mask):
    """Every combination of arguments requires gradients in turn. With none of them, or without grad
    mode, the pair is one operator."""
    x, first, second, affine = pair_of(device, (3, 7, 40))
    leaves = [
        t.requires_grad_(needed)
        for t, needed in zip((x, *first, *second, *affine), mask, strict=True)
    ]
    dys = torch.randn(2, 3, 7, 40, device=device)
    outputs = []
    for function in (one_call, two_calls):
        y, second_y = function(leaves[0], leaves[1:3], leaves[3:5], leaves[5:])
        assert y.requires_grad == any(mask[i] for i in (0, 1, 2, 5, 6))
        assert second_y.requires_grad == any(mask[i] for i in (0, 3, 4, 5, 6))
        outputs.append((y, second_y))
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if wanted:
        found, expected = (
            torch.autograd.grad(
                [y for y in ys if y.requires_grad],
                wanted,
                [dy for y, dy in zip(ys, dys, strict=True) if y.requires_grad],
            )
            for ys in outputs
        )
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    with forms.Calls() as ran:
        one_call(leaves[0], leaves[1:3], leaves[3:5], leaves[5:])
        with torch.no_grad():
            one_call(leaves[0], leaves[1:3], leaves[3:5], leaves[5:])
    twice = 2 * ["ada_layer_norm"] if wanted else ["ada_layer_norm_pair"]
    assert [name.removesuffix("_forward") for name in ran.names] == [*twice, "ada_layer_norm_pair"]


@pytest.mark.parametrize("used", [0, 1])
def test_one_output_of_a_pair_used(device, used):
    x, first, second, affine = pair_of(device, (3, 7, 40))
    leaves = [t.requires_grad_() for t in (x, *first, *second, *affine)]
    found, expected = (
        torch.autograd.grad(
            function(x, first, second, affine)[used].sin().sum(), leaves, allow_unused=True
        )
        for function in (one_call, two_calls)
    )
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


# Wrong modulations. In every place the error message is that of ada_layer_norm.
BAD_MODULATIONS: dict[str, Any] = {
    "shape": lambda device: torch.ones(5, 8, device=device),
    "enlarging": lambda device: torch.ones(2, 4, 8, device=device),
    "float64": lambda device: torch.ones(8, device=device, dtype=F64),
    "int": lambda device: torch.ones(8, device=device, dtype=torch.int32),
    "device": lambda device: torch.ones(8, device="meta"),
    "sparse": lambda device: torch.ones(4, 8, device=device).to_sparse(),
    "number": lambda device: 1.0,
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("what", BAD_MODULATIONS)
def test_bad_modulations_of_a_pair(device, what, place, requires_grad):
    bad = BAD_MODULATIONS[what](device)
    x = torch.ones(4, 8, device=device, requires_grad=requires_grad)
    args: list[Any] = [x, *torch.ones(4, 8, device=device), None, None, 1e-5, (8,), None]
    args[1 + place] = bad
    with pytest.raises((TypeError, RuntimeError)) as expected:
        ada_layer_norm(x, bad) if place % 2 == 0 else ada_layer_norm(x, None, bad)
    with pytest.raises(type(expected.value)) as caught:
        ada_layer_norm_pair(*args)
    assert str(caught.value) == str(expected.value)
    assert str(caught.value).startswith(f"expected {('shift', 'scale')[place % 2]} ")


@pytest.mark.parametrize(
    "wrong",
    [
        {"input": 1.0},
        {"input": torch.ones(4, 7)},
        {"weight": torch.ones(7)},
        {"bias": torch.ones(8).double()},
        {"eps": float("nan")},
        {"eps": "small"},
        {"normalized_shape": ()},
        {"out_dtype": torch.int32},
    ],
    ids=str,
)
def test_bad_arguments_of_a_pair(device, wrong):
    def there(value):
        return value.to(device) if isinstance(value, torch.Tensor) else value

    options: dict[str, Any] = {
        "input": torch.ones(4, 8, device=device),
        "weight": torch.ones(8, device=device),
        "bias": torch.ones(8, device=device),
        "eps": 1e-5,
        "normalized_shape": (8,),
        "out_dtype": None,
        **{name: there(value) for name, value in wrong.items()},
    }
    modulations: dict[str, Any] = {
        name: torch.ones(8, device=device)
        for name in ("shift", "scale", "second_shift", "second_scale")
    }
    with pytest.raises((TypeError, ValueError, RuntimeError)) as expected:
        ada_layer_norm(**options, shift=modulations["shift"])
    with pytest.raises(type(expected.value)) as caught:
        ada_layer_norm_pair(**options, **modulations)
    assert str(caught.value) == str(expected.value)
    assert str(caught.value).startswith("expected ")


def pair(*tensors):
    """ada_layer_norm_pair of (x, shift, scale, second_shift, second_scale, weight, bias)."""
    args: Any = (*tensors, 1e-5, tensors[0].shape[-1:], None)
    return ada_layer_norm_pair(*args)


def stock_pair(x, shift, scale, second_shift, second_scale, *affine):
    return stock_ada(x, shift, scale, *affine) + stock_ada(x, second_shift, second_scale, *affine)


def inputs(device, shape=(2, 1, 4), *, rows=(2, 3), dtype=F64):
    """x, residual, gate, shift, scale, weight, bias."""

    def randn(*sizes):
        return torch.randn(sizes, device=device, dtype=dtype)

    cols = 4
    return (
        randn(*rows, cols),
        randn(*rows, cols),
        *(randn(*shape) for _ in "gst"),
        randn(cols),
        randn(cols),
    )


def inputs_of_pair(device, shape=(2, 1, 4), *, rows=(2, 3), dtype=F64):
    x, _, _, *modulation, weight, bias = inputs(device, shape, rows=rows, dtype=dtype)
    return (x, *modulation, *(torch.randn_like(m) for m in modulation), weight, bias)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_derivatives_of_a_pair(device, shape):
    tensors = [t.requires_grad_() for t in inputs_of_pair(device, shape)]
    assert torch.autograd.gradcheck(pair, tensors, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(pair, tensors, check_fwd_over_rev=True, fast_mode=True)


EVERY = tuple(range(7))


OF_BATCH = (0, 0, 0, 0, 0, None, None)  # gate, shift and scale are batched too


def loss_of(f):
    return lambda *t: sum(out.pow(3).sum() for out in f(*t))


@pytest.mark.parametrize("in_dims", [OF_BATCH, (0,) * 7, (None, 0, 0, 0, 0, None, None)], ids=str)
def test_vmap_of_a_pair(device, in_dims):
    tensors = inputs_of_pair(device, (3, 2, 1, 4), rows=(3, 2, 5))
    x, *modulations, weight, bias = tensors
    affine = [torch.stack([t] * 3) if in_dims[5] == 0 else t for t in (weight, bias)]
    args = (x[0] if in_dims[0] is None else x, *modulations, *affine)
    for wrap in (lambda f: f, lambda f: grad(loss_of(f), argnums=EVERY)):
        results = [vmap(wrap(f), in_dims=in_dims)(*args) for f in (pair, stock_pair)]
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_compile_of_a_pair(device, backend, requires_grad):
    torch._dynamo.reset()
    tensors = [t.to(F32).requires_grad_(requires_grad) for t in inputs_of_pair(device)]
    compiled = torch.compile(pair, fullgraph=True, backend=backend)
    found, expected = compiled(*tensors), pair(*tensors)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    if requires_grad:
        gradients = [
            torch.autograd.grad(sum(y.sin().sum() for y in ys), tensors) for ys in (found, expected)
        ]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_compile_checks_the_modulations_of_a_pair(device):
    torch._dynamo.reset()
    x, *modulations, weight, bias = inputs_of_pair(device)
    compiled = torch.compile(pair, backend="eager")
    with pytest.raises(RuntimeError, match=r"expected scale that broadcasts to the shape of input"):
        compiled(x, *modulations[:3], torch.ones(3, device=device, dtype=F64), weight, bias)


class Pair(nn.Module):
    def forward(self, *tensors):
        return pair(*tensors)


def operators(graph):
    names = [str(n.target) for n in graph.nodes if n.op == "call_function"]
    return [name.split(".")[1] for name in names if name.startswith("fused_layernorm")]


def test_export_of_a_pair(device):
    """The exported graph has one operator without gradients, and none of ours if decomposed."""
    tensors = inputs_of_pair(device)
    with torch.no_grad():
        program = torch.export.export(Pair(), tensors)
        program = program.run_decompositions({})
    assert operators(program.graph) == ["ada_layer_norm_pair"]
    plain = program.run_decompositions(fused_layernorm.decompositions())
    assert operators(plain.graph) == []
    for found in (program.module()(*tensors), plain.module()(*tensors)):
        torch.testing.assert_close(found, pair(*tensors))


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("out_dtype", [None, BF16])
@pytest.mark.parametrize("dtypes", list(itertools.product([F32, *HALF], repeat=4)), ids=str)
def test_autocast_of_a_pair(device, dtypes, out_dtype, requires_grad):
    """Under autocast the pair gives the results of two calls.

    dtypes: of the input, of the first modulations, of the second ones and of weight.
    """
    x_dtype, first_dtype, second_dtype, weight_dtype = dtypes
    x = torch.randn(3, 5, 32, device=device).to(x_dtype).requires_grad_(requires_grad)
    first, second = (
        [torch.randn(3, 1, 32, device=device).to(dtype) for _ in "st"]
        for dtype in (first_dtype, second_dtype)
    )
    affine = (torch.randn(32, device=device).to(weight_dtype), torch.randn(32, device=device))
    with torch.autocast(device, BF16):
        found = ops.ada_layer_norm_pair(x, 1, *first, *second, *affine, 1e-5, out_dtype)
        expected = [
            ops.ada_layer_norm(x, 1, *modulation, *affine, 1e-5, out_dtype)
            for modulation in (first, second)
        ]
        like = F.layer_norm(x, (32,)).dtype
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype == (out_dtype or like)
        tolerance = 1e-5 if one.dtype == F32 else 1e-2
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)

# SPDX-License-Identifier: Apache-2.0
"""ada_layer_norm and add_ada_layer_norm: results and gradients of every kind of modulation.

Derivatives are in test_autograd.py, autocast in test_autocast.py.
"""

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import forms
import numerics
import pytest
import torch
import torch.nn.functional as F
from numerics import MODULATIONS, Problem, check_masks, covering, ids, modulated

import fused_layernorm as fl

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
ops = torch.ops.fused_layernorm
pytestmark = pytest.mark.cpu_operators
GATED = pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])

# input, residual (None: none), modulations, weight (None: none)
DTYPES = [
    (F32, F32, F32, F32),
    (BF16, BF16, BF16, BF16),
    (F16, F16, F16, F16),
    (BF16, BF16, F32, None),
    (F16, F16, F32, F32),
    (BF16, BF16, BF16, F32),
    (BF16, BF16, F32, BF16),
    (BF16, F32, BF16, None),
    (BF16, F32, F32, F32),
    (F16, F32, F16, F16),
    (F32, BF16, F32, None),
    (F64, F64, F64, F64),
]
# The boundaries of the kernels' strategies, and the models' widths.
WIDTHS = [1, 7, 8, 63, 64, 65, 256, 257, 512, 1023, 1024, 1152, 2432, 3072, 4095, 4096, 5120, 6144]
WIDE = [8192, 8193, 16384, 16385, 32768, 40960, 50001]
# (samples, rows of each): one group; groups of one row, of three rows, of many rows; more groups
# than an H200 has multiprocessors.
GROUPS = [(1, 1), (1, 40), (37, 1), (11, 3), (3, 257), (150, 2), (150, 5)]


# ---- Accuracy.


def alike(problem, shape, gated):
    """The problem with modulations of this shape."""
    residual = {"residual_dtype": F32, "gate": shape} if gated else {}
    return replace(problem, shift=shape, scale_by=shape, **residual)


def problems(gated):
    """The problems with a gate, and without one."""
    given: dict[str, Any] = {"gated": gated}
    both = (DTYPES[0], DTYPES[3])
    for cols, kind, dtypes in covering((48, 100), [*MODULATIONS], both):
        yield modulated((4, 6, cols), kind, dtypes=dtypes, **given)
    for shape in [(2, 3, 1, 64), (2, 1, 5, 64), (1, 3, 1, 64), (3, 1, 64)]:
        yield alike(Problem((2, 3, 5, 64)), shape, gated)
    for shape in [
        (2, 1, 3, 20),
        (2, 5, 3, 20),
        (3, 20),
        (20,),
        (2, 1, 1, 20),
        (2, 1, 3, 1),
        (3, 1),
    ]:
        yield alike(Problem((2, 5, 3, 20), normalized_ndim=2), shape, gated)
    for cols, dtypes in itertools.product((33, 256), DTYPES):
        yield modulated((3, 20, cols), dtypes=dtypes, **given)
    for cols, kind, dtypes, out_dtype in covering(
        (64, 1152), ("sample", "token"), both, (F32, BF16, F64)
    ):
        yield modulated((3, 20, cols), kind, dtypes=dtypes, out_dtype=out_dtype, **given)
    for affine in ("weight", "bias"):
        yield modulated((3, 7, 40), affine=affine, **given)
    yield modulated((3, 9, 256), mean=1e4, **given)
    for groups, cols, kind in covering(GROUPS, (8, 64, 257, 1152), ("sample", "all")):
        yield modulated((*groups, cols), kind, **given)


@pytest.mark.parametrize("problem", [*problems(gated=False), *problems(gated=True)], ids=str)
def test_accuracy(device, problem):
    numerics.check(problem, device)


@pytest.mark.parametrize(
    "kinds", list(itertools.permutations(["all", "sample", "token", "position"], 3))
)
def test_different_groups(device, kinds):
    shift, scale, gate = (MODULATIONS[kind](4, 6, 64) for kind in kinds)
    problem = modulated((4, 6, 64), gated=True, shift=shift, scale_by=scale, gate=gate)
    numerics.check(problem, device)


@pytest.mark.parametrize("layout", sorted({*numerics.LAYOUTS} - {"contiguous"}))
@pytest.mark.parametrize("kind", ["all", "sample", "token", "position", "number of a token"])
@pytest.mark.parametrize("dtypes", [DTYPES[0], DTYPES[3]], ids=ids)
def test_layouts_of_modulations(device, layout, kind, dtypes):
    for cols in (64, 75):
        problem = modulated((3, 7, cols), kind, gated=True, dtypes=dtypes, modulation_layout=layout)
        numerics.check(problem, device)


def test_expanded_modulations(device):
    """A modulation expanded to input's shape has strides of zero, but a gradient per element."""
    t = numerics.make(modulated((3, 5, 32), affine="none"), device)
    t.shift, t.scale = t.shift.expand(3, 5, 32), t.scale.expand(3, 5, 32)
    found = numerics.ours(t)
    t.shift, t.scale = t.shift.contiguous(), t.scale.contiguous()
    expected = numerics.ours(t)
    for name in ("dshift", "dscale"):
        assert found[name].shape == (3, 5, 32)
        torch.testing.assert_close(found[name], expected[name])


@pytest.mark.parametrize("present", list(itertools.product((True, False), repeat=4)), ids=str)
def test_absent_arguments(device, present):
    gate, shift, scale, affine = present
    kind = (3, 1, 40)
    problem = Problem(
        (3, 7, 40),
        affine="both" if affine else "none",
        residual_dtype=F32,
        gate=kind if gate else None,
        shift=kind if shift else None,
        scale_by=kind if scale else None,
    )
    numerics.check(problem, device)
    if not gate and (shift or scale):
        numerics.check(replace(problem, residual_dtype=None), device)


def test_without_any_modulation_it_is_layer_norm(device):
    x, residual = torch.randn(2, 3, 5, 32, device=device)
    weight, bias = torch.randn(2, 32, device=device)
    y = fl.ada_layer_norm(x, None, None, weight, bias)
    assert torch.equal(y, fl.layer_norm(x, weight, bias))
    found = fl.add_ada_layer_norm(x, residual, None, None, None, weight, bias)
    assert all(map(torch.equal, found, fl.add_layer_norm(x, residual, weight, bias)))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("cols", "dtypes", "gated"),
    covering([*WIDTHS, *WIDE], [DTYPES[0], DTYPES[1], DTYPES[3], DTYPES[8]], [False, True]),
    ids=ids,
)
def test_every_width(cols, dtypes, gated):
    """Each width and its two neighbours, because strategies and vectors change there."""
    for d in (cols - 1, cols, cols + 1):
        if d > 0:
            for kind in ("sample", "token"):
                shape = (3, 1 + 4096 // (3 * d), d)
                problem = modulated(shape, kind, gated=gated, dtypes=dtypes)
                numerics.check(problem, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "kind", "dtypes", "gated"),
    [
        *(((*groups, cols), kind, DTYPES[3], gated)
          for groups, cols, kind, gated in covering(
              [*GROUPS, (1, 5000), (5000, 1), (700, 7)], (1, 64, 1024, 1152, 3072, 8193),
              ("all", "sample", "token", "position"), (False, True), strength=3)),
        *((shape, "sample", DTYPES[0], gated)
          for shape in [(1, 3, 262_144), (2, 2, 1_000_003), (1, 1, 4_194_304)]
          for gated in (False, True)),
        *((shape, kind, DTYPES[3], gated)
          for shape, kind, gated in covering(
              [(2, 100_000, 64), (1, 16_384, 1152), (300, 257, 256)],
              ("all", "sample", "position"), (False, True))),
    ],
    ids=ids,
)  # fmt: skip
def test_accuracy_at_every_strategy(shape, kind, dtypes, gated):
    numerics.check(modulated(shape, kind, gated=gated, dtypes=dtypes), "cuda")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2])
def test_columns_beyond_what_32_bits_count(needs_memory, rows):
    """One row is a group of its own, with a weight; two rows share shift and scale."""
    needs_memory(20 + 20 * rows)
    cols = 2**30 + 4104
    x, dy = (torch.empty(rows, cols, device="cuda").normal_() for _ in "xd")
    scale, weight = (torch.empty(cols, device="cuda").normal_() for _ in "sw")
    x.requires_grad_(), scale.requires_grad_()
    given = weight if rows == 1 else None
    y = fl.ada_layer_norm(x, scale.detach(), scale, given, normalized_shape=(cols,))
    dx, dscale = torch.autograd.grad(y, (x, scale), dy)
    del y
    x, scale = x.detach(), scale.detach()
    parts = [slice(start, start + 2**26) for start in range(0, cols, 2**26)]
    mean, square, c1, c2 = (x.new_zeros(rows, 1, dtype=F64) for _ in range(4))
    for part in parts:
        mean += x[:, part].double().sum(1, keepdim=True) / cols
    for part in parts:
        square += (x[:, part].double() - mean).square().sum(1, keepdim=True) / cols
    rstd = (square + 1e-5).rsqrt()

    def of(part):
        xhat = (x[:, part].double() - mean) * rstd
        factor = x.new_ones((), dtype=F64) if given is None else given[part].double()
        return xhat, factor, dy[:, part].double() * (1 + scale[part].double()) * factor

    for part in parts:
        xhat, _, g = of(part)
        c1 += g.sum(1, keepdim=True) / cols
        c2 += (g * xhat).sum(1, keepdim=True) / cols
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
    for part in parts[:2] + parts[15:]:
        xhat, factor, g = of(part)
        close(dx[:, part].double(), rstd * (g - c1 - xhat * c2))
        close(dscale[part].double(), (dy[:, part].double() * xhat * factor).sum(0))


# ---- Rounding, and what a result depends on.


@pytest.mark.parametrize("gated", [False, True])
def test_result_is_rounded_once(device, gated):
    """Neither the normalized value nor its product with 1 + scale is rounded before, nor the
    product of gate and input."""
    one, other, factor = torch.randn(3, 64, 512, device=device).to(BF16)
    if gated:
        _, narrow = fl.add_ada_layer_norm(one, other, factor)
        exact = other.double() + factor.double() * one.double()
    else:
        narrow = fl.ada_layer_norm(one, other, factor)
        exact = fl.ada_layer_norm(one.double(), other.double(), factor.double())
    assert (narrow != exact.to(BF16)).double().mean() < 0.002


def test_small_scales_are_not_lost(device):
    """1 + scale is computed in float32, because half precision would lose a small scale."""
    x = torch.randn(8, 64, device=device).to(BF16)
    scale = torch.full((64,), 2.0**-10, device=device).to(BF16)
    y = fl.ada_layer_norm(x, None, scale, out_dtype=F32)
    expected = F.layer_norm(x.float(), (64,)) * (1 + 2.0**-10)
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)


@GATED
def test_a_row_does_not_depend_on_its_place(device, gated):
    """Equal rows with equal modulations have equal results, to the bit."""
    rows = 50 if device == "cpu" else 2000
    for cols in (8, 257, 1152):
        t = numerics.make(modulated((2, rows, cols), "all", gated=gated, affine="none"), device)
        for name in ("x", "dy", "residual", "dresidual"):
            if (tensor := getattr(t, name)) is not None:
                setattr(t, name, tensor[:1, :1].expand(2, rows, cols).contiguous())
        for name, result in numerics.ours(t).items():
            if name in ("y", "residual_out", "dx", "dresidual"):
                assert torch.equal(result, result[:1, :1].expand_as(result)), name


# ---- The gradients that backward is asked for.


def masks(count):
    return list(itertools.product((True, False), repeat=count))


def saved(t):
    """The arguments of ada_layer_norm_backward without its mask."""
    p = t.problem
    x = t.x if t.residual is None else numerics.ours(t, backward=False)["residual_out"]
    affine = (t.shift, t.scale, t.weight, t.bias)
    _, mean, rstd = ops.ada_layer_norm_forward(x, p.normalized_ndim, *affine, p.eps)
    return (t.dy, x, p.normalized_ndim, mean, rstd, *affine, t.dresidual)


@GATED
@pytest.mark.parametrize("kind", ["all", "sample", "token", "position"])
@pytest.mark.parametrize("dtypes", [DTYPES[0], DTYPES[3]], ids=ids)
def test_masks_of_the_operator(device, dtypes, kind, gated):
    problem = modulated((5, 9, 200), kind, gated=gated, dtypes=dtypes, affine="both")
    t = numerics.make(problem, device)
    but_none = masks(5)[:-1]
    everything = check_masks(ops.ada_layer_norm_backward, saved(t), but_none)
    of = (t.x, t.shift, t.scale, t.weight, t.bias)
    assert [gradient.shape for gradient in everything] == [argument.shape for argument in of]


@pytest.mark.parametrize("mask", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("kind", MODULATIONS)
def test_gate_backward(device, kind, mask):
    d = torch.randn(3, 5, 64, device=device)
    input = torch.randn(3, 5, 64, device=device).to(BF16)
    gate = torch.randn(MODULATIONS[kind](3, 5, 64), device=device)
    dinput, dgate = ops.gate_backward(d, input, gate, *mask)
    assert dinput.dtype == BF16
    assert dgate.dtype == F32
    exact_dinput = d.double() * gate
    exact_dgate = (d.double() * input).sum_to_size(gate.shape)
    if mask[0]:
        torch.testing.assert_close(dinput.double(), exact_dinput, rtol=2**-8, atol=2**-8)
    if mask[1]:
        torch.testing.assert_close(dgate.double(), exact_dgate, rtol=1e-5, atol=1e-5)
    assert (dinput.shape == (0,)) != mask[0]
    assert (dgate.shape == (0,)) != mask[1] or dgate.shape == gate.shape


def gated_saved(t):
    """The arguments of add_ada_layer_norm_backward without its mask."""
    dy, x, *others = saved(t)
    return (dy, x, t.x, t.gate, *others)


def in_two_steps(dy, x, input, gate, *others, needs):
    """The results of add_ada_layer_norm_backward, by ada_layer_norm_backward and gate_backward."""
    needs_dx, needs_dinput, needs_dgate, *of_parameters = needs
    is_gate_needed = needs_dinput or needs_dgate
    dx, *gradients = ops.ada_layer_norm_backward(
        dy, x, *others, needs_dx or is_gate_needed, *of_parameters
    )
    past = input.new_empty(0), gate.new_empty(0)
    if is_gate_needed:
        past = ops.gate_backward(dx, input, gate, needs_dinput, needs_dgate)
    return (dx if needs_dx else x.new_empty(0), *past, *gradients)


@pytest.mark.parametrize("kind", ["all", "sample", "token", "position"])
@pytest.mark.parametrize("dtypes", [DTYPES[0], DTYPES[3], DTYPES[8]], ids=ids)
def test_masks_of_the_gated_operator(device, dtypes, kind):
    problem = modulated((5, 9, 200), kind, gated=True, dtypes=dtypes, affine="both")
    t = numerics.make(problem, device)
    args = gated_saved(t)
    everything = check_masks(ops.add_ada_layer_norm_backward, args, masks(7))
    names = ("dresidual", "dx", "dgate", "dshift", "dscale", "dweight", "dbias")
    named = dict(zip(names, everything, strict=True))
    exact = numerics.exact(t, {"residual_out": args[1], **named})
    of = (t.residual, t.x, t.gate, t.shift, t.scale, t.weight, t.bias)
    for (name, whole), argument in zip(named.items(), of, strict=True):
        assert (whole.shape, whole.dtype) == (argument.shape, argument.dtype), name
        tolerance = {F32: 1e-5, BF16: 2**-8}[whole.dtype] * (1 + exact[name].abs().max().item())
        torch.testing.assert_close(whole.double(), exact[name], rtol=0, atol=tolerance, msg=name)
    for mask in masks(7):
        gradients = ops.add_ada_layer_norm_backward(*args, *mask)
        again = ops.add_ada_layer_norm_backward(*args, *mask)
        two = in_two_steps(*args, needs=mask)
        for gradient, same, other in zip(gradients, again, two, strict=True):
            assert (other.shape, other.dtype) == (gradient.shape, gradient.dtype)
            assert torch.equal(gradient, same)
            if device == "cpu":
                assert torch.equal(gradient, other)


def test_a_gate_of_zero(device):
    """A gate of zero keeps the residual to the bit, as in blocks initialised with zeros."""
    x, residual = torch.randn(2, 3, 4, 16, device=device)
    gate = torch.zeros(3, 1, 16, device=device, requires_grad=True)
    y, residual_out = fl.add_ada_layer_norm(x, residual, gate)
    assert torch.equal(residual_out, residual)
    (dgate,) = torch.autograd.grad(y.sin().sum() + residual_out.sum(), gate)
    assert dgate.abs().sum() > 0


# ---- add_layer_norm with a gate.


@pytest.mark.parametrize("kind", ["all", "sample", "token"])
@pytest.mark.parametrize("dtypes", DTYPES, ids=ids)
def test_gate_of_add_layer_norm(device, dtypes, kind):
    t = numerics.make(modulated((3, 5, 64), kind, gated=True, dtypes=dtypes), device)
    args = (t.weight, t.bias)
    found = fl.add_layer_norm(t.x, t.residual, *args, gate=t.gate, normalized_shape=(64,))
    expected = fl.add_ada_layer_norm(t.x, t.residual, t.gate, None, None, *args)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize(("activation", "factor"), [("gelu", 1.0), (None, 0.5)])
@pytest.mark.parametrize("dtypes", DTYPES, ids=ids)
def test_gate_beside_an_activation(device, dtypes, activation, factor):
    """A gate beside an activation takes any dtypes that it takes without one, and has all
    gradients."""
    t = numerics.make(modulated((3, 5, 64), gated=True, dtypes=dtypes), device)
    given: list[Any] = [
        None if u is None else u.detach().requires_grad_()
        for u in (t.x, t.residual, t.gate, t.weight, t.bias)
    ]
    x, residual, gate, weight, bias = given
    options: dict[str, Any] = {"activation": activation, "scale": factor, "normalized_shape": 64}
    y, residual_out = fl.add_layer_norm(x, residual, weight, bias, gate=gate, **options)
    assert y.dtype == t.x.dtype
    assert residual_out.dtype == t.residual.dtype
    wide = [None if u is None else u.detach().double().requires_grad_() for u in given]
    stock = forms.stock("gated", activation=activation, factor=factor)
    z, total = stock(*wide[:3], None, None, *wide[3:])
    tolerance = {F32: 1e-5, F64: 1e-10}.get(
        min(dtypes[:2], key=lambda d: -torch.finfo(d).eps), 3e-2
    )
    torch.testing.assert_close(y.double(), z, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(residual_out.double(), total, rtol=tolerance, atol=tolerance)
    leaves = [u for u in given if u is not None]
    found = torch.autograd.grad((y.double() * residual_out.double()).sum(), leaves)
    expected = torch.autograd.grad((z * total).sum(), [u for u in wide if u is not None])
    for leaf, one, other in zip(leaves, found, expected, strict=True):
        assert one.dtype == leaf.dtype
        scale = other.abs().max()
        torch.testing.assert_close(one.double() / scale, other / scale, rtol=0, atol=3 * tolerance)


@GATED
@pytest.mark.parametrize("shift_dtype", [F32, BF16], ids=ids)
def test_a_shift_of_every_element_has_the_gradient_of_y(device, shift_dtype, gated):
    """The gradient is dy itself if the dtypes are the same. Accumulation leaves dy unchanged."""
    x, residual, gate, scale = torch.randn(4, 2, 3, 24, device=device).to(BF16).unbind()
    shift = torch.randn(2, 3, 24, device=device).to(shift_dtype).requires_grad_()
    x.requires_grad_()
    if gated:
        y, _ = fl.add_ada_layer_norm(x, residual, gate, shift, scale)
    else:
        y = fl.ada_layer_norm(x, shift, scale)
    dy = torch.randn_like(y)
    of_shift, of_x = torch.autograd.grad(y, (shift, x), dy, retain_graph=True)
    assert of_shift.dtype == shift_dtype
    assert torch.equal(of_shift, dy.to(shift_dtype))
    assert of_x.isfinite().all()
    kept = dy.clone()
    for _ in range(2):
        y.backward(dy, retain_graph=True)
    assert shift.grad is not None
    assert torch.equal(shift.grad, 2 * kept.to(shift_dtype))
    assert torch.equal(dy, kept)

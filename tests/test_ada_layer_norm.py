# SPDX-License-Identifier: Apache-2.0
"""ada_layer_norm and add_ada_layer_norm: results and gradients of every kind of modulation.

Derivatives are in test_autograd.py, autocast in test_autocast.py; test_every_norm.py has what every
norm keeps.
"""

import itertools
from typing import Any

import numerics
import pytest
import torch
import torch.nn.functional as F
from families import BF16, F16, F32, F64
from numerics import MODULATIONS, Problem, check, covering, ids, modulated

import fused_layernorm as fl

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


def problems(gated):
    """The problems with a gate, and without one."""
    given: dict[str, Any] = {"gated": gated}
    both = (DTYPES[0], DTYPES[3])
    for cols, kind, dtypes in covering((48, 100), [*MODULATIONS], both):
        yield modulated((4, 6, cols), kind, dtypes=dtypes, **given)
    for shape, ndim, modulations in [
        ((2, 3, 5, 64), 1, [(2, 3, 1, 64), (2, 1, 5, 64), (1, 3, 1, 64), (3, 1, 64)]),
        ((2, 5, 3, 20), 2, [(2, 1, 3, 20), (2, 5, 3, 20), (3, 20), (20,), (2, 1, 1, 20),
                            (2, 1, 3, 1), (3, 1)]),
    ]:  # fmt: skip
        for modulation in modulations:
            of_all: Any = {"residual_dtype": F32, "gate": modulation} if gated else {}
            of_all |= {"shift": modulation, "scale_by": modulation}
            yield Problem(shape, normalized_ndim=ndim, **of_all)
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


def problems_of_gates():
    for kinds in itertools.permutations(["all", "sample", "token", "position"], 3):
        names = ("shift", "scale_by", "gate")
        of = {n: MODULATIONS[kind](4, 6, 64) for n, kind in zip(names, kinds, strict=True)}
        yield modulated((4, 6, 64), gated=True, **of)
    for layout, kind, dtypes, cols in itertools.product(
        sorted({*numerics.LAYOUTS} - {"contiguous"}),
        ["all", "sample", "token", "position", "number of a token"],
        [DTYPES[0], DTYPES[3]], (64, 75),
    ):  # fmt: skip
        how: Any = {"dtypes": dtypes, "modulation_layout": layout}
        yield modulated((3, 7, cols), kind, gated=True, **how)
    # Arguments that are absent.
    both = ((3, 1, 40), None)
    for gate, shift, scale, affine in itertools.product(both, both, both, ("both", "none")):
        some_of: Any = {"gate": gate, "shift": shift, "scale_by": scale, "affine": affine}
        yield Problem((3, 7, 40), residual_dtype=F32, **some_of)
        if not gate and (shift or scale):
            yield Problem((3, 7, 40), **some_of)


@pytest.mark.parametrize(
    "problem", [*problems(gated=False), *problems(gated=True), *problems_of_gates()], ids=str
)
def test_accuracy(device, problem):
    check(problem, device)


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
                check(problem, "cuda")


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
    check(modulated(shape, kind, gated=gated, dtypes=dtypes), "cuda")


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


# ---- Gradients that are asked for alone, special gates and shifts.


@GATED
@pytest.mark.parametrize("kind", ["all", "sample", "token", "position"])
@pytest.mark.parametrize("dtypes", [DTYPES[0], DTYPES[3], DTYPES[8]], ids=ids)
def test_gradients_that_are_asked_for_alone(device, dtypes, kind, gated):
    numerics.check_wanted(modulated((5, 9, 200), kind, gated=gated, dtypes=dtypes), device)


def test_a_gate_of_zero(device):
    """A gate of zero keeps the residual to the bit, as in blocks initialised with zeros."""
    x, residual = torch.randn(2, 3, 4, 16, device=device)
    gate = torch.zeros(3, 1, 16, device=device, requires_grad=True)
    y, residual_out = fl.add_ada_layer_norm(x, residual, gate)
    assert torch.equal(residual_out, residual)
    (dgate,) = torch.autograd.grad(y.sin().sum() + residual_out.sum(), gate)
    assert dgate.abs().sum() > 0


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


@pytest.mark.parametrize("how", [{"activation": "gelu"}, {"scale": 0.5}], ids=str)
@pytest.mark.parametrize("dtypes", DTYPES, ids=ids)
def test_gate_beside_an_activation(device, dtypes, how):
    """It takes any dtypes that it takes without one; its gradients are rounded on the way."""
    options = {"shift": None, "scale_by": None, **how}
    problem = modulated((3, 5, 64), gated=True, dtypes=dtypes, **options)
    t = numerics.make(problem, device)
    found = numerics.ours(t)
    tolerance = {F32: 1e-5, F64: 1e-10}.get(max(dtypes[:2], key=lambda d: torch.finfo(d).eps), 3e-2)
    for name, expected in numerics.exact(t, found).items():
        assert found[name].dtype == problem.dtype_of(name)
        slack = tolerance * max(1.0, expected.abs().max().item())
        torch.testing.assert_close(found[name].double(), expected, rtol=0, atol=slack, msg=name)


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

# SPDX-License-Identifier: Apache-2.0
"""rms_norm_gated and group_size of rms_norm: results against float64, registration, autocast and
compilation. Derivatives are in test_autograd.py, bad input in test_errors.py."""

import itertools
import math
from typing import Any

import numerics
import pytest
import reference
import torch
import torch.nn.functional as F
from numerics import EVERY, QUICK
from torch.library import opcheck

import fused_layernorm as fl
from fused_layernorm import FusedRMSNormGated

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
OPS: Any = torch.ops.fused_layernorm
ACTIVATE: dict[str, Any] = {"silu": F.silu, "sigmoid": torch.sigmoid}

pytestmark = pytest.mark.cpu_operators

# A slice of a projection's columns, as Qwen3-Next and Mamba 2 cut the gate out, and others.
LAYOUTS: dict[str, Any] = {
    "contiguous": torch.clone,
    "sliced": lambda t: torch.cat([t.new_full(t[..., :8].shape, math.nan), t, t], -1)[
        ..., 8 : 8 + t.shape[-1]
    ],
    "misaligned": numerics.misaligned,
    "transposed": lambda t: t.mT.contiguous().mT,
    "expanded": lambda t: t[:1].expand(t.shape),
}
FORMS = [
    {"gate_first": first, "gate_activation": activation, "group_size": size}
    for first, activation, size in itertools.product((False, True), ACTIVATE, (None, 8))
]


def plainly(
    x, gate, weight, bias, *, gate_first=False, gate_activation="silu", group_size=None,
    weight_offset=0.0,
):  # fmt: skip
    """The norm and its gate in elementary functions of PyTorch, in the dtype of its arguments."""
    value = ACTIVATE[gate_activation](gate)
    u = x * value if gate_first else x
    rows = u.reshape(*u.shape[:-1], -1, group_size or u.shape[-1])
    z = (rows * (rows.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).reshape(u.shape)
    z = z if weight is None else z * (weight + weight_offset)
    z = z if bias is None else z + bias
    return z if gate_first else z * value


def fused(**form) -> Any:
    def function(x, gate, weight=None, bias=None):
        return fl.rms_norm_gated(x, gate, weight, 1e-5, bias=bias, **form)

    return function


def inputs(device, shape=(3, 16), dtype=F64, gate=None, weight=None, grad=True) -> Any:
    """x, gate, weight and bias."""
    given = [(shape, dtype), (shape, gate or dtype), *[(shape[-1:], weight or dtype)] * 2]
    return [
        torch.randn(size, device=device, dtype=F64).to(t).requires_grad_(grad) for size, t in given
    ]


# ---- Results and gradients.


def check(
    device, shape, dtypes, form, *, out_dtype=None, layouts=("contiguous",) * 2, absent=(),
    poison=lambda *like: None,
):  # fmt: skip
    dtype = dtypes[0]
    names = [name for name in ("x", "gate", "weight", "bias") if name not in absent]
    acc = F64 if dtype is F64 else F32

    def draw(seed):
        torch.manual_seed(seed)
        t = dict(zip(("x", "gate", "weight", "bias"), inputs(device, shape, *dtypes), strict=True))
        for name, layout in zip(("x", "gate"), layouts, strict=True):
            t[name] = LAYOUTS[layout](t[name].detach())
        t = {n: v.detach().requires_grad_() if n in names else None for n, v in t.items()}
        dy = LAYOUTS[layouts[0]](torch.randn(shape, device=device).to(out_dtype or dtype))
        leaves = [t[name] for name in names]
        poison(dy, dy, *leaves)
        y = fused(**form, out_dtype=out_dtype)(*t.values())
        with torch.no_grad():
            assert torch.equal(fused(**form, out_dtype=out_dtype)(*t.values()), y)
        assert y.is_contiguous()
        assert y.dtype == (out_dtype or dtype)
        gradients = torch.autograd.grad(y, leaves, dy)
        assert [g.dtype for g in gradients] == [leaf.dtype for leaf in leaves]
        found = {"y": y.detach(), **{f"d{n}": g for n, g in zip(names, gradients, strict=True)}}
        values: Any = {n: None if v is None else v.detach() for n, v in t.items()}
        x, gate, *parameters = values.values()
        exact = reference.rms_norm_gated(x, gate, dy, *parameters, **form)
        wide: Any = {
            n: None if v is None else v.to(acc).requires_grad_() for n, v in values.items()
        }
        z = plainly(*wide.values(), **form)
        theirs = torch.autograd.grad(z, [wide[name] for name in names], dy.to(acc))
        stock = {"y": z.detach(), **{f"d{n}": g for n, g in zip(names, theirs, strict=True)}}
        return found, exact._asdict(), stock

    numerics.check_draws(map(draw, range(max(1, min(24, 8192 // math.prod(shape))))), dtype)


DTYPES = [(F32, F32, F32), (BF16, BF16, BF16), (BF16, BF16, F32), (F16, F32, F16), (F32, BF16, F32),
          (BF16, F64, BF16), (F64, F64, F64), (F64, F32, F64)]  # fmt: skip


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("form", [*FORMS, {**FORMS[3], "weight_offset": 1.0}], ids=str)
def test_forms(device, form, dtypes):
    check(device, (5, 7, 64), dtypes, form)


@pytest.mark.parametrize("form", [FORMS[0], FORMS[7]], ids=str)
@pytest.mark.parametrize(
    ("shape", "others"),
    [
        *(((4, 6, 40), {"out_dtype": out}) for out in (F32, F16, BF16, F64)),
        *(((4, 6, 40), {"absent": absent}) for absent in (("weight",), ("bias",),
                                                        ("weight", "bias"))),
        *(((4, 6, 40), {"layouts": pair}) for pair in itertools.product(LAYOUTS, repeat=2)),
        ((40,), {}), ((1, 8), {}), ((2, 3, 4, 8), {}), ((9, 1032), {}), ((2, 8200), {}),
    ],
    ids=str,
)  # fmt: skip
def test_shapes_layouts_and_dtypes(device, shape, others, form):
    for dtypes in ((BF16, BF16, F32), (F32, F32, F32)):
        check(device, shape, dtypes, form, **others)


# Of rows that blocks hold and of others: weight's dtype (None: there is none), whether there is a
# bias, the activation, the layouts of x and of the gate. One block has up to 16 rows of 128
# float32, and up to 32 of half precision.
SHAPES = ((37, 64), (131, 128), (16, 128), (17, 128), (32, 128), (33, 128), (2, 5, 256), (9, 512),
          (33, 1024), (5, 1536), (3, 8192), (3, 16_384), (2, 40_000), (7, 100), (4, 24),
          (3, 5))  # fmt: skip
OF_KERNELS = (
    ("same", False, "silu", "contiguous", "sliced"),
    (F32, False, "sigmoid", "sliced", "contiguous"),
    (None, False, "silu", "transposed", "sliced"),
    ("same", True, "silu", "contiguous", "misaligned"),
    (None, True, "sigmoid", "misaligned", "contiguous"),
)


@pytest.mark.gpu
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels(shape, dtype, gate_first, poison):
    cols = shape[-1]
    sizes = [None] + [cols // n for n in (3, 4) if cols % n == 0 and cols > n]
    others = [F32 if dtype != F32 else BF16, F16 if dtype != F16 else BF16]
    for (of_weight, bias, activation, *layouts), size in itertools.product(OF_KERNELS, sizes):
        if dtype == F64 and of_weight == F32:
            continue
        absent = ["weight"] * (of_weight is None) + ["bias"] * (not bias)
        form: Any = {"gate_first": gate_first, "gate_activation": activation, "group_size": size}
        form["weight_offset"] = 0.5 if bias and of_weight else 0.0
        kinds: list[Any] = [(dtype, None)]
        if of_weight == "same" and not bias:
            kinds += [(other, None) for other in others]
            kinds += [(dtype, out) for out in (F32, BF16, F16, F64) if out != dtype]
        for of_gate, out in kinds:
            dtypes = (dtype, of_gate, F32 if of_weight == F32 else dtype)
            how: Any = {"layouts": layouts, "absent": absent, "poison": poison, "out_dtype": out}
            check("cuda", shape, dtypes, form, **how)


@pytest.mark.gpu
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize(("cols", "group_size"), [(128, None), (1024, 256), (8192, None),
                                                  (8192, 1024), (100, None)])  # fmt: skip
def test_rows_do_not_depend_on_the_batch(cols, group_size, gate_first):
    x, gate, dy = (torch.randn(700, cols, device="cuda").to(BF16) for _ in range(3))
    weight = torch.randn(cols, device="cuda").to(BF16).requires_grad_()

    def run(rows):
        leaves = [t[:rows].detach().requires_grad_() for t in (x, gate)]
        y = fused(gate_first=gate_first, group_size=group_size)(*leaves, weight)
        return [y, *torch.autograd.grad(y, (*leaves, weight), dy[:rows])]

    whole = run(700)
    assert all(map(torch.equal, whole, run(700)))
    for rows in (1, 3, 69):
        for part, of_all in zip(run(rows)[:3], whole, strict=False):
            assert torch.equal(part, of_all[:rows])


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(("cols", "group_size"), [(128, None), (8192, 1024), (100, None)])
def test_more_elements_than_32_bits_count(cols, group_size, needs_memory):
    needs_memory(45)
    rows = 2**31 // cols + 300
    x, gate = (torch.empty(rows, cols, device="cuda", dtype=BF16).normal_() for _ in "xg")
    weight = torch.randn(cols, device="cuda", dtype=BF16)
    form = {"group_size": group_size, "round_before_weight": True}

    def both(x, gate):
        x, gate = x.detach().requires_grad_(), gate.detach().requires_grad_()
        y = fl.rms_norm_gated(x, gate, weight, 1e-6, **form)
        return y.detach(), *torch.autograd.grad(y, (x, gate), y.detach())

    # The last rows alone have the same bits.
    for whole, alone in zip(both(x, gate), both(x[-500:], gate[-500:]), strict=True):
        assert torch.equal(whole[-500:], alone)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("gate_first", [False, True])
def test_a_row_of_nearly_2_to_the_31_columns(gate_first, needs_memory):
    """It comes to an end. No kernel takes such a row, and PyTorch's operators need memory."""
    needs_memory(70)
    cols = 2**31 - 8
    x, gate = (torch.empty(1, cols, device="cuda", dtype=BF16).normal_() for _ in range(2))
    y = fl.rms_norm_gated(x, gate, None, 1e-6, gate_first=gate_first)
    parts = [slice(start, start + 2**27) for start in range(0, cols, 2**27)]

    def of(part):
        value = F.silu(gate[:, part].double())
        return x[:, part].double() * (value if gate_first else 1), 1 if gate_first else value

    squares = sum(of(part)[0].square().sum() for part in parts)
    rstd = (squares / cols + 1e-6).rsqrt()
    for part in (parts[0], parts[-1]):
        u, value = of(part)
        torch.testing.assert_close(y[:, part].double(), u * rstd * value, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize(("dtype", "weight_dtype"), [(BF16, BF16), (BF16, F32), (F16, F16)])
def test_round_before_weight_rounds_as_the_classes_do(device, dtype, weight_dtype, gate_first):
    x, gate, weight, _ = inputs(device, (256, 1024), dtype, None, weight_dtype, grad=False)
    promoted = torch.promote_types(dtype, weight_dtype)
    out = promoted if gate_first else dtype
    for group_size, given in itertools.product((None, 128), (gate, gate.float())):
        form: Any = {"gate_first": gate_first, "group_size": group_size}
        options: Any = {**form, "round_before_weight": True, "out_dtype": out}
        y = fl.rms_norm_gated(x, given, weight, 1e-5, **options)
        expected, once = (
            reference.rms_norm_gated(x, given, x, weight, rounding=rounding, **form).y.to(out)
            for rounding in ((dtype, promoted), None)
        )
        # xhat may be rounded to a neighbour, where the statistic's last bit decides, and so may the
        # affine map's result and y behind it, if these are rounded: each is one step.
        steps = 1 + (weight_dtype == dtype) + (not gate_first)
        size = expected.double().abs().clamp(min=torch.finfo(out).smallest_normal)
        near = (y.double() - expected.double()).abs() / size
        assert near.max() <= steps * torch.finfo(dtype).eps
        same = (near <= 1e-6) if out is F32 else y == expected
        assert same.float().mean() >= 0.999
        assert (y == once).float().mean() < 0.95


@pytest.mark.gpu
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize(("cols", "group_size"), [(64, None), (128, None), (1000, None),
                                                  (8192, None), (8192, 1024)])  # fmt: skip
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_products_in_pairs_are_those_of_float32(dtype, cols, group_size, gate_first):
    x, gate, weight, _ = inputs("cuda", (300, cols), dtype, grad=False)
    form: Any = {"gate_first": gate_first, "group_size": group_size, "round_before_weight": True}
    for activation in ACTIVATE:
        y, by_float32 = (
            fl.rms_norm_gated(x, gate, weight, 1e-5, bias=bias, gate_activation=activation, **form)
            # With a bias, products are float32.
            for bias in (None, torch.zeros_like(weight))
        )
        assert torch.equal(y, by_float32)


def test_a_weight_offset_is_added_in_float32(device):
    x, gate, weight, bias = inputs(device, (8, 64), BF16, grad=False)
    found = fl.rms_norm_gated(x, gate, weight, 1e-5, weight_offset=1.0, bias=bias, out_dtype=F32)
    expected = reference.rms_norm_gated(x, gate, x, weight, bias, weight_offset=1.0).y
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


# ---- RMSNorm over groups of columns.


@pytest.mark.parametrize("round_before_weight", [False, True])
@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, BF16), (BF16, F32), (F64, F64)], ids=str)
def test_rms_norm_over_groups(device, dtypes, round_before_weight):
    dtype = dtypes[0]
    x, _, weight, bias = inputs(device, (5, 3, 64), dtype, None, dtypes[1])
    rows = x.unflatten(-1, (4, 16))
    options: Any = {"weight_offset": 1.0, "round_before_weight": round_before_weight}
    for others in ({}, {"out_dtype": F32}, {"activation": "gelu", "scale": 0.5}):
        for parameters in ((weight, bias), (weight, None), (None, bias), (None, None)):
            given = dict(options, weight_offset=float(parameters[0] is not None), **others)
            found = fl.rms_norm(x, parameters[0], 1e-5, bias=parameters[1], group_size=16, **given)
            # Each group alone, with its part of weight and bias.
            parts = []
            for i, row in enumerate(rows.unbind(-2)):
                w, b = (p if p is None else p[16 * i :][:16] for p in parameters)
                parts.append(fl.rms_norm(row, w, 1e-5, bias=b, normalized_shape=16, **given))
            expected = torch.cat(parts, -1)
            assert found.dtype == expected.dtype
            tolerance = 1e-12 if dtype is F64 else 1e-5 if found.dtype is F32 else 2**-7
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
            leaves = [t for t in (x, *parameters) if t is not None]
            for g, h in zip(
                torch.autograd.grad(found.float().square().sum(), leaves),
                torch.autograd.grad(expected.float().square().sum(), leaves), strict=True,
            ):  # fmt: skip
                slack = 3e-2 if dtype is BF16 else 1e-4
                one, other = g / h.abs().max(), h / h.abs().max()
                torch.testing.assert_close(one, other, rtol=slack, atol=slack)


# ---- PyTorch's machinery.


@pytest.mark.parametrize(
    ("shape", "dtypes", "options", "traced"),
    [
        ((3, 4, 16), (F32, F32, F32), (False, "silu", 0), True),
        ((3, 16), (BF16, F32, F32), (True, "sigmoid", 4, F32, 1.0, True), True),
        ((16,), (F64, F64, F64), (), False),
        ((0, 16), (F32, F32, F32), (True, "silu", 4), False),
        ((2, 0), (BF16, BF16, BF16), (), False),
    ],
    ids=str,
)
def test_opcheck(device, shape, dtypes, options, traced):
    x, gate, weight, bias = inputs(device, shape, *dtypes)
    args = (x, gate, weight, bias, 1e-5, *options)
    every = EVERY if traced and device == "cpu" else QUICK
    for name in ("rms_norm_gated", "rms_norm_gated_forward"):
        opcheck(getattr(OPS, name).default, args, test_utils=every)
    y, mean, rstd = OPS.rms_norm_gated_forward(*(t.detach() for t in args[:4]), *args[4:])
    size = options[2] if options else 0
    assert mean.shape == (0,)
    assert rstd.shape == (*shape[:-1], shape[-1] // size if size else 1)
    of_backward = (*(options or (False, "silu", 0))[:3], options[4] if len(options) > 3 else 0.0)
    given = (torch.randn_like(y), x, gate, rstd, weight, bias, *of_backward)
    operator = OPS.rms_norm_gated_backward.default
    opcheck(operator, (*given, *[True] * 4), test_utils=every)
    for wanted in range(4):
        opcheck(operator, (*given, *(i == wanted for i in range(4))), test_utils=QUICK)


@pytest.mark.parametrize("x_dtype", [F32, F16, BF16, F64])
def test_autocast_gives_what_rms_norm_gives(device, x_dtype):
    x, gate, *_ = inputs(device, (4, 16), x_dtype)
    weight = torch.randn(16, device=device).to(F64 if x_dtype == F64 else BF16)
    with torch.autocast(device, BF16):
        y = fl.rms_norm_gated(x, gate, weight)
        assert y.dtype == fl.rms_norm(x, weight).dtype
        assert fl.rms_norm(x, weight, group_size=8).dtype == y.dtype
        assert fl.rms_norm_gated(x, gate, weight, out_dtype=F16).dtype == F16
    exact = reference.rms_norm_gated(x, gate, x, weight, eps=1e-7).y
    torch.testing.assert_close(y.double(), exact, rtol=1e-2, atol=1e-2)
    assert torch.autograd.grad(y.float().sum(), gate)[0].dtype == x_dtype


@pytest.mark.parametrize("form", [FORMS[0], FORMS[5]], ids=str)
def test_compiled_calls_of_both_kinds(device, form):
    """With the kernels, which a graph without Inductor keeps, and with PyTorch's forward."""
    given = inputs(device, (4, 16), F32)
    for backend in ("aot_eager", "fused_layernorm"):
        torch._dynamo.reset()
        compiled = torch.compile(fused(**form), fullgraph=True, backend=backend)
        results = []
        for function in (compiled, fused(**form)):
            y = function(*given)
            results.append([y, *torch.autograd.grad(y.square().sum(), given)])
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_compiled_module_of_any_number_of_rows(device):
    """With a gate and without, in groups."""
    module = FusedRMSNormGated(16, 1e-5, group_size=8, device=device)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 5):
        given = torch.randn(2, rows, 16, device=device)
        for tensors in (given, given[:1]):
            torch.testing.assert_close(compiled(*tensors), module(*tensors), rtol=1e-5, atol=1e-5)


# ---- Special numbers, masks of backward.


@pytest.mark.parametrize("biased", [False, True])
def test_backward_gives_the_gradients_that_are_asked_for(device, biased):
    x, gate, weight, bias = inputs(device, (50, 256), BF16, grad=False)
    bias = bias if biased else None
    rstd = OPS.rms_norm_gated_forward(x, gate, weight, bias, 1e-5)[2]
    args = (torch.randn_like(x), x, gate, rstd, weight, bias, False, "silu", 0, 0.0)
    every = OPS.rms_norm_gated_backward(*args, True, True, True, biased)
    for mask in itertools.product((True, False), repeat=3 + biased):
        found = OPS.rms_norm_gated_backward(*args, *mask, *[False] * (1 - biased))
        for one, whole, needed in zip(found, every, mask, strict=False):
            assert torch.equal(one, whole) if needed else one.shape == (0,)


def test_nan_stays_in_its_group_and_nothing_gives_nothing(device):
    x = torch.randn(3, 32, device=device)
    gate = torch.randn_like(x)
    x[1, 9] = math.nan
    y = fl.rms_norm_gated(x, gate, group_size=8)
    expected = torch.zeros(3, 32, dtype=torch.bool, device=device)
    expected[1, 8:16] = True
    assert torch.equal(y.isnan(), expected)
    for activation, value, dtype in itertools.product(
        ACTIVATE, (math.nan, math.inf, -math.inf, 200, -200), (F32, F16, BF16)
    ):
        gate = torch.full((3, 64), float(value), device=device, dtype=dtype)
        x = torch.randn_like(gate)
        y = fl.rms_norm_gated(x, gate, None, 1e-6, gate_activation=activation)
        expected = F.rms_norm(x.float(), (64,), None, 1e-6) * ACTIVATE[activation](gate.float())
        torch.testing.assert_close(y, expected.to(dtype), equal_nan=True)
    for shape in ((0, 8), (2, 0), (0, 3, 8)):
        x, gate, weight, bias = inputs(device, shape, BF16)
        y = fl.rms_norm_gated(x, gate, weight, bias=bias)
        assert y.shape == shape
        grads = torch.autograd.grad(y.sum(), (x, gate, weight, bias))
        assert not any(g.any() for g in grads)

# SPDX-License-Identifier: Apache-2.0
"""Gated RMSNorm: what the tables of all families (test_accuracy.py, test_every_norm.py) do not say,
registration, autocast, compilers."""

import itertools
import math
from typing import Any

import numerics
import pytest
import reference
import torch
import torch.nn.functional as F
from families import BF16, F16, F32, F64, GATED_FORMS, Gated
from numerics import EVERY, QUICK
from torch.library import opcheck

import fused_layernorm as fl
from fused_layernorm import FusedRMSNormGated

OPS: Any = torch.ops.fused_layernorm
formula: Any = reference.rms_norm_gated
ACTIVATE: dict[str, Any] = {"silu": F.silu, "sigmoid": torch.sigmoid}

pytestmark = pytest.mark.cpu_operators


def fused(**form) -> Any:
    def function(x, gate, weight=None, bias=None):
        return fl.rms_norm_gated(x, gate, weight, 1e-5, bias=bias, **form)

    return function


def inputs(device, shape=(3, 16), dtype=F64, gate=None, weight=None, grad=True) -> Any:
    """x, gate, weight and bias."""
    t = numerics.make(Gated(shape, dtype, weight, gate_dtype=gate), device)
    return [tensor.requires_grad_(grad) for tensor in t.inputs().values()]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("gate_first", [False, True])
def test_a_row_of_nearly_2_to_the_31_columns(gate_first, needs_memory):
    needs_memory(40)
    cols = 2**31 - 8
    x, gate, dy = (torch.empty(1, cols, device="cuda", dtype=BF16).normal_() for _ in range(3))
    x.requires_grad_()
    gate.requires_grad_()
    y = fl.rms_norm_gated(x, gate, None, 1e-6, gate_first=gate_first)
    dx, dgate = torch.autograd.grad(y, (x, gate), dy)
    parts = [slice(start, start + 2**27) for start in range(0, cols, 2**27)]

    def leaves(part):
        return [t.detach()[:, part].double().requires_grad_() for t in (x, gate)]

    squares = torch.zeros((), dtype=torch.float64, device=x.device)
    for part in parts:
        of_x, of_gate = leaves(part)
        u = of_x * F.silu(of_gate) if gate_first else of_x
        squares += u.detach().square().sum()
    of_row = (squares / cols + 1e-6).rsqrt()
    for part in (parts[0], parts[-1]):
        of_x, of_gate = leaves(part)
        u = of_x * F.silu(of_gate) if gate_first else of_x
        expected = of_row * u * (1 if gate_first else F.silu(of_gate))
        # Beside dy of mean zero the row's statistic has no gradient that the results show.
        gradients = torch.autograd.grad(expected, (of_x, of_gate), dy[:, part].double())
        for found, right in zip((y, dx, dgate), (expected, *gradients), strict=True):
            found = found.detach()[:, part].double()
            torch.testing.assert_close(found, right.detach(), rtol=2**-7, atol=2**-7)


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
            formula(x.double(), given, weight, rounding=rounding, **form).to(out)
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
    expected = formula(x.double(), gate, weight, bias, weight_offset=1.0)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


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
    exact = formula(x.double(), gate, weight, eps=1e-7)
    torch.testing.assert_close(y.double(), exact, rtol=1e-2, atol=1e-2)
    assert torch.autograd.grad(y.float().sum(), gate)[0].dtype == x_dtype


@pytest.mark.parametrize("form", [GATED_FORMS[0], GATED_FORMS[5]], ids=str)
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


# ---- Special numbers.


def test_special_gates(device):
    for activation, value, dtype in itertools.product(
        ACTIVATE, (math.nan, math.inf, -math.inf, 200, -200), (F32, F16, BF16)
    ):
        gate = torch.full((3, 64), float(value), device=device, dtype=dtype)
        x = torch.randn_like(gate)
        y = fl.rms_norm_gated(x, gate, None, 1e-6, gate_activation=activation)
        expected = F.rms_norm(x.float(), (64,), None, 1e-6) * ACTIVATE[activation](gate.float())
        torch.testing.assert_close(y, expected.to(dtype), equal_nan=True)

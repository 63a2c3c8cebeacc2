# SPDX-License-Identifier: Apache-2.0
"""The operators' registration: schema, autograd and fake kernels, by torch.library.opcheck."""

import itertools
from typing import Any

import pytest
import torch
from forms import NAMES, OPERATORS, ROWS
from numerics import EVERY, QUICK

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
ops = torch.ops.fused_layernorm

# Of all kinds, then of norms without modulations, then of modulated ones.
COMMON: dict[str, dict[str, Any]] = {
    "plain": {},
    "no parameters": {"absent": ("weight", "bias")},
    "no bias": {"absent": ("bias",)},
    "no weight": {"absent": ("weight",)},
    "mixed": {"dtype": BF16, "others": F32},
    "float64": {"dtype": F64},
    "no rows": {"shape": (0, 5, 8)},
    "strided": {"strided": True},
}
PLAIN: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": BF16},
    "two dimensions": {"ndim": 2},
    "all dimensions": {"ndim": 3},
    "one row": {"shape": (8,)},
    "gelu": {"options": ("gelu", 0.5)},
    "silu to float32": {"dtype": BF16, "options": ("silu", 1.0, F32)},
    "relu to float64": {"options": ("relu", 1.0, F64)},
    "rms": {"options": ("silu", 2.0, None, "rms", 1.0, False)},
}
MODULATED: dict[str, dict[str, Any]] = {
    "all": {"modulation": (8,)},
    "token": {"modulation": (3, 5, 8)},
    "position": {"modulation": (1, 5, 8)},
    "half": {"dtype": BF16, "others": F32, "modulation": (1, 5, 8)},
    "no shift": {"absent": ("shift",)},
    "no scale": {"absent": ("scale",)},
    "rms": {"dtype": BF16, "options": (None, "rms", 1.0, True)},
}
# With these, the operators are also traced with dynamic shapes on the CPU, which takes long.
TRACED = ("plain", "mixed", "strided", "two dimensions", "token", "rms")


def cases(*kinds):
    def of(kind):
        return COMMON | (MODULATED if kind in ("modulated", "gated") else PLAIN)

    return pytest.mark.parametrize(
        ("kind", "sample", "checks"),
        [pytest.param(kind, sample, EVERY if name in TRACED else QUICK, id=f"{kind}-{name}")
         for kind in kinds for name, sample in of(kind).items()],
    )  # fmt: skip


def tensors_of(kind, device, *, shape=(3, 5, 8), ndim=1, dtype=F32, others=None,
               modulation=(3, 1, 8), absent=(), strided=False, options=(), grad=False):  # fmt: skip
    """(the tensors by name, normalized_ndim, the options)."""

    def make(name):
        if name in absent:
            return None
        sizes = {"x": shape, "residual": shape, "weight": shape[-ndim:], "bias": shape[-ndim:]}
        tensor = torch.randn(sizes.get(name, modulation if shape[0] else ()), device=device)
        if strided and name in ("x", "residual"):
            tensor = tensor.mT.contiguous().mT
        return tensor.to(dtype if name == "x" else others or dtype).requires_grad_(grad)

    return {name: make(name) for name in NAMES[kind]}, ndim, options


@pytest.mark.parametrize("suffix", ["", "_forward"])
@cases(*NAMES)
def test_forward(device, kind, sample, checks, suffix):
    """The operators with statistics run under autograd, the others in calls without gradients."""
    operator = getattr(ops, OPERATORS[kind] + suffix).default
    tensors, ndim, options = tensors_of(kind, device, **sample, grad=suffix == "_forward")
    rows, given = ROWS[kind], list(tensors.values())
    args = (*given[:rows], ndim, *given[rows:], 1e-5, *options)
    torch.library.opcheck(operator, args, test_utils=checks if device == "cpu" else QUICK)


def backward_of(kind, device, sample):
    """(an operator of backward, its arguments, the whole mask, the options after it)."""
    tensors, ndim, options = tensors_of(kind, device, **sample)
    t: dict[str, Any] = tensors
    x = t["residual"] if kind == "gated" else t["x"]
    parameters = [t[name] for name in NAMES[kind][ROWS[kind] :]]
    forward = "ada_layer_norm_forward" if kind in ("modulated", "gated") else "layer_norm_forward"
    y, mean, rstd = getattr(ops, forward)(x, ndim, *parameters, 1e-5, *options)
    dy = torch.randn_like(y)
    rows = (dy, x, t["x"], t["gate"]) if kind == "gated" else (dy, x)
    args: list[Any] = [*rows, ndim, mean, rstd, *parameters, torch.randn_like(x)]
    if kind == "plain":
        given: tuple[Any, ...] = (*options, *(None, 1.0, None)[len(options) :])
        activation, factor, _, *statistic = given
        args += [activation, factor]
        operator, after = ops.layer_norm_backward, statistic[:2]
    else:
        operator, after = getattr(ops, OPERATORS[kind] + "_backward"), options[1:3]
    wanted = [True] * (len(rows) - 1) + [parameter is not None for parameter in parameters]
    return operator.default, args, wanted, after


@pytest.mark.parametrize("dresidual", [True, False])
@cases("plain", "modulated", "gated")
def test_backward(device, kind, sample, checks, dresidual):
    operator, args, wanted, after = backward_of(kind, device, sample)
    if not dresidual:
        args[-3 if kind == "plain" else -1] = None
    checks = checks if device == "cpu" else QUICK
    torch.library.opcheck(operator, (*args, *wanted, *after), test_utils=checks)


@pytest.mark.parametrize("kind", ["plain", "modulated", "gated"])
def test_backward_under_autograd(device, kind):
    operator, args, wanted, _ = backward_of(kind, device, {})
    for arg in args:
        if isinstance(arg, torch.Tensor) and arg.shape != (3, 5, 1):  # no statistic
            arg.requires_grad_()
    torch.library.opcheck(operator, (*args, *wanted))
    torch.library.opcheck(operator, (*args, False, *wanted[1:]), test_utils=QUICK)


@pytest.mark.parametrize("kind", ["plain", "modulated", "gated"])
def test_masks(device, kind):
    """The shapes that the fake kernels give, with every mask."""
    operator, args, wanted, _ = backward_of(kind, device, {})
    for mask in itertools.product((True, False), repeat=len(wanted)):
        torch.library.opcheck(operator, (*args, *mask), test_utils="test_faketensor")


@pytest.mark.parametrize("mask", list(itertools.product((True, False), repeat=2)), ids=str)
@pytest.mark.parametrize("gate", [(8,), (3, 1, 8), (3, 5, 8)], ids=str)
def test_gate_backward(device, gate, mask):
    for dtype in (F32, BF16):
        d, input = torch.randn(3, 5, 8, device=device), torch.randn(3, 5, 8, device=device)
        args = (d, input.to(dtype), torch.randn(gate, device=device))
        torch.library.opcheck(ops.gate_backward.default, (*args, *mask))

# SPDX-License-Identifier: Apache-2.0
"""A call on CUDA that no kernel takes finds the formula, the operator _formula_NAME."""

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fused_layernorm as fl
from fused_layernorm.ops import fallback, load

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
ops = torch.ops.fused_layernorm
COLS, SAMPLES, ROWS = 16, 2, 6


def calls_of_all(dtype=F32):
    """The arguments of a call of every operator that has kernels, none of them a default."""
    torch.manual_seed(0)

    def make(*shape, dtype=dtype):
        return torch.randn(*shape, dtype=dtype)

    x, dy, residual, input_, other = (make(SAMPLES, ROWS, COLS) for _ in range(5))
    weight, bias, shift = make(COLS), make(COLS), make(SAMPLES, 1, COLS)
    scale, gate = make(1, ROWS, COLS), make(COLS)
    rms, offset = ("rms", 0.5, True), ("rms", 0.5)
    modulation = (shift, scale, weight, bias)
    calls = {
        "layer_norm": (x, 1, weight, bias, 1e-3, "gelu", 0.5, F64, *rms, True),
        "add_layer_norm": (x, residual, 1, weight, bias, 1e-3, "silu", 0.5, F64, *rms),
        "ada_layer_norm": (x, 1, *modulation, 1e-3, F64, *rms),
        "add_ada_layer_norm": (x, residual, gate, 1, *modulation, 1e-3, F64, *rms),
    }
    _, _, rstd = ops.layer_norm_forward(x, 1, weight, bias, 1e-3, None, 1.0, None, "rms", 0.5)
    none, flags = x.new_empty(0), (True,) * 4
    backward = (dy, x, 1, none, rstd)
    of_sum = (dy, x, input_, gate, 1, none, rstd)
    calls["layer_norm_backward"] = (
        *backward, weight, bias, residual, "gelu_tanh", 0.5, True, False, True, *offset, True
    )  # fmt: skip
    calls["ada_layer_norm_backward"] = (*backward, *modulation, residual, False, *flags, *offset)
    calls["add_ada_layer_norm_backward"] = (
        *of_sum, *modulation, residual, True, False, True, *flags, *offset
    )  # fmt: skip
    calls["gate_backward"] = (dy, input_, gate, False, True)

    of_channels = (make(SAMPLES, ROWS), make(SAMPLES, ROWS, 1), make(ROWS), make(ROWS))
    calls["group_norm"] = (x, 3, *of_channels, 1e-3, "leaky_relu", 0.5, F64)
    _, mean, rstd = ops.group_norm_forward(x, 3, *of_channels, 1e-3)
    calls["group_norm_backward"] = (
        dy, x, 3, mean, rstd, *of_channels, "silu", 0.5, True, False, True, True, True
    )  # fmt: skip

    gated = (True, "sigmoid", 4)
    calls["rms_norm_gated"] = (x, other, weight, bias, 1e-3, *gated, F64, 0.5, True)
    _, _, rstd = ops.rms_norm_gated_forward(x, other, weight, bias, 1e-3, *gated, None, 0.5)
    calls["rms_norm_gated_backward"] = (
        dy, x, other, rstd, weight, bias, *gated, 0.5, True, True, False, True
    )  # fmt: skip
    for name in [name for name in calls if "backward" not in name]:
        calls[f"{name}_forward"] = calls[name]

    q, k = make(SAMPLES, ROWS, 3, COLS), make(SAMPLES, ROWS, 2, COLS)
    cos, sin = make(ROWS, 4, dtype=F32), make(ROWS, 4, dtype=F32)
    heads = (q, k, weight, bias, bias, weight, cos, sin, 8, 1, 1e-3, "layer", 0.5)
    calls["qk_norm_rope"] = (*heads, True, True, True)
    calls["qk_norm_rope_backward"] = (q.flip(0), k.flip(0), *heads, True, True, True, False)
    return calls


def with_kernels():
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for full in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full.partition("::")
        if namespace == load.NAMESPACE and has_kernel(full, "CUDA"):
            yield name


ALL = calls_of_all()


def test_every_operator_with_a_kernel_has_a_formula():
    if ops._build_info() != "cpu only":
        assert set(with_kernels()) == set(ALL)
    for name in ALL:
        schema = str(getattr(ops, name).default._schema)
        prefix = f"{load.NAMESPACE}::{fallback.PREFIX}"
        formula = getattr(ops, fallback.PREFIX + name).default._schema
        assert str(formula) == schema.replace(f"{load.NAMESPACE}::", prefix)


def as_tuple(found):
    return found if isinstance(found, tuple | list) else (found,)


@pytest.mark.parametrize("name", ALL)
def test_the_formula_is_what_other_devices_compute(name):
    before = fallback.served[name]
    found = getattr(ops, fallback.PREFIX + name)(*ALL[name])
    expected = getattr(ops, name)(*ALL[name])
    assert fallback.served[name] == before + 1
    torch.testing.assert_close(as_tuple(found), as_tuple(expected), rtol=0, atol=0)


def test_the_last_error_of_a_formula_is_kept():
    with pytest.raises(RuntimeError):
        getattr(ops, f"{fallback.PREFIX}group_norm")(torch.randn(2, 3), 2, *(None,) * 4, 1e-5)
    assert ops._formula_error().startswith("expected num_groups that divides the 3 channels")


@contextlib.contextmanager
def served_by_formula(*names):
    """No kernel takes a call; checks which operators' formulas served."""
    fallback.served.clear()
    ops._force("strategy=formula")
    try:
        yield
    finally:
        ops._force(None)
    assert fallback.served == dict.fromkeys(names, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", ALL)
def test_every_operator_finds_its_formula(name, dtype):
    arguments = calls_of_all(dtype)[name]
    on_cuda = [a.cuda() if isinstance(a, torch.Tensor) else a for a in arguments]
    expected = getattr(ops, name)(*arguments)
    with served_by_formula(name):
        found = getattr(ops, name)(*on_cuda)
    within: dict[str, Any] = (
        {"rtol": 2e-2, "atol": 2e-2} if dtype == BF16 else {"rtol": 1e-4, "atol": 1e-5}
    )
    for one, other in zip(as_tuple(found), as_tuple(expected), strict=True):
        torch.testing.assert_close(one.cpu(), other, **within)
        assert one.stride() == other.stride()


@pytest.mark.gpu
def test_derivatives_of_formulas():
    for shape, run in (
        ((4, COLS), lambda x, w: fl.layer_norm(x, w, w)),
        ((4, COLS, 3), lambda x, w: fl.group_norm(x, 2, w, w, activation="silu")),
        ((4, COLS), lambda x, w: fl.rms_norm_gated(x, x, w)),
    ):
        gradients = []
        for device in ("cpu", "cuda"):
            torch.manual_seed(0)
            x, w = torch.randn(shape), torch.randn(COLS)
            x, w = x.to(device).requires_grad_(), w.to(device).requires_grad_()
            fallback.served.clear()
            if device == "cuda":
                ops._force("strategy=formula")
            try:
                found = torch.autograd.grad(run(x, w).square().sum(), (x, w))
            finally:
                ops._force(None)
            gradients.append([gradient.cpu() for gradient in found])
        assert sorted(fallback.served.values()) == [1, 1]
        torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.gpu
def test_memory_that_a_formula_lacks_is_named():
    torch.cuda.empty_cache()
    # The operator's y and copy of x have room, but not the formula's float32.
    samples = int(0.35 * torch.cuda.mem_get_info()[0]) // 2**31
    x = torch.zeros(1, 1, 1, device="cuda", dtype=BF16).expand(samples, 1, 2**30)
    with served_by_formula("group_norm"), pytest.raises(torch.OutOfMemoryError, match="formula"):
        fl.group_norm(x, 1)


def stock_group_norm(x, groups):
    return F.group_norm(x.float(), groups).to(x.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("samples", "channels", "positions"), [(1, 1, 2**30 + 8), (2**30, 1, 2)])
def test_groups_that_kernels_cannot_count(samples, channels, positions):
    """More than 2^30 positions a channel, and 2^30 groups."""
    x = torch.randn(positions, device="cuda", dtype=BF16).expand(samples, channels, positions)
    if samples > 1:
        x = torch.randn(samples, 1, 1, device="cuda", dtype=BF16).expand(-1, channels, positions)
    module = fl.FusedGroupNorm(1, channels, device="cuda", dtype=BF16).requires_grad_(False)
    for run in (lambda: fl.group_norm(x, 1), lambda: module(x)):
        y = run()
        for part in (slice(0, 8), slice(-8, None)):
            expected = stock_group_norm(x, 1) if samples == 1 else stock_group_norm(x[part], 1)
            of_y, expected = y[part].flatten()[-64:], expected[-8:].flatten()[-64:]
            torch.testing.assert_close(of_y, expected)
            del expected
        del y

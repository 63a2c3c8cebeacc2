# SPDX-License-Identifier: Apache-2.0
"""The kernels of gated RMSNorm: their plans, without a GPU, and the operators against float64."""

import itertools
import json
import random
from typing import Any

import pytest
import torch
from golden_plans import DEVICES
from numerics import misaligned, rounding
from torch.nn import functional as F

import fused_layernorm  # noqa: F401  (registers the operators)

ops: Any = torch.ops.fused_layernorm
F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
MOST_THREADS = {False: 1024, True: 512}  # of a block that holds a group, by direction


def plan(rows, cols, groups=1, dtype=BF16, *, device="H100", **problem):
    return json.loads(ops._plan_gated(rows, cols, groups, dtype, **DEVICES[device], **problem))


def test_kernels_can_run_every_plan():
    choose, seen = random.Random(0), set()
    for _ in range(4000):
        rows, groups = int(2 ** choose.uniform(0, 22)), choose.choice([1, 1, 2, 3, 8, 100, 700])
        cols = int(2 ** choose.uniform(0, 19))
        if choose.random() < 0.8:
            cols = -(-cols // 8) * 8
        if rows * groups * cols > 2**32:
            continue
        dtype, backward = choose.choice([F32, F16, BF16, F64]), choose.random() < 0.6
        problem: dict[str, Any] = {
            "backward": backward,
            "aligned": choose.random() < 0.9,
            "needs_dweight": choose.random() < 0.8,
            "bias": choose.random() < 0.2,
        }
        device = choose.choice(list(DEVICES))
        p = plan(rows, cols, groups, dtype, device=device, **problem)
        width, vecs, teams = 16 // dtype.itemsize, p["vecs"], p["teams"]
        of_team = p["threads"] // teams
        sets = p["blocks"] // groups
        assert p["blocks"] == sets * groups
        assert p["threads"] % 32 == 0
        assert p["threads"] <= MOST_THREADS[backward]
        if p["strategy"] == "held":
            assert problem["aligned"]
            assert cols % width == 0
            assert dtype != F64
            assert not (backward and problem["bias"])
            # A thread has a whole group's vectors, and teams of less than a warp are logical warps.
            assert cols <= of_team * vecs * width
            assert of_team % 32 == 0 or 32 % of_team == 0
            assert teams == 1 or of_team <= 32
        else:
            assert (teams, vecs) == (1, 0)
        if not backward:
            assert (sets - 1) * teams < rows <= sets * teams
            assert p["workspace_bytes"] == 0
        else:
            assert p["partials"] == sets >= 2
            sums = problem["needs_dweight"] + problem["bias"]
            acc = 8 if dtype == F64 else 4
            kept = (2 if problem["bias"] else 1) if sums else 0
            assert p["workspace_bytes"] == kept * sets * groups * cols * acc
            if p["strategy"] == "held":
                # x, gate and dy of the rows of a block, which leave room for the sums of its warps.
                stage = 3 * 16 * vecs * p["threads"]
                assert p["stages"] in (1, 2)
                assert p["shared_bytes"] == p["stages"] * stage
                assert p["shared_bytes"] + 512 <= DEVICES[device]["shared_memory"]
                assert teams == 1 or p["threads"] // 32 * cols * 4 <= stage
        seen.add((p["strategy"], backward, vecs, teams > 1))
    assert len(seen) == 8


def test_how_a_group_is_laid_out_depends_on_its_length_alone():
    for cols, backward in itertools.product((64, 128, 200, 1024, 1032, 8192, 16_384), (0, 1)):
        plans = [plan(rows, cols, groups, backward=bool(backward))
                 for rows in (1, 60, 100_000) for groups in (1, 8)]  # fmt: skip
        assert len({(p["strategy"], p["threads"], p["teams"], p["vecs"]) for p in plans}) == 1
        assert plans[0]["strategy"] == "held"


def test_which_groups_are_held():
    assert [plan(9, cols)["strategy"] for cols in (1000, 1001, 32_768, 32_776)] == [
        "held", "looped", "held", "looped"]  # fmt: skip
    longest = [plan(9, cols, backward=True)["strategy"] for cols in (16_384, 16_392)]
    assert longest == ["held", "looped"]
    assert plan(9, 1024, backward=True, bias=True)["strategy"] == "looped"


def test_large_forward_calls_leave_l2_as_other_kernels_do():
    assert [plan(rows, 8192)["stays_in_l2"] for rows in (100, 16_384)] == [False, True]
    assert not plan(16_384, 8192, backward=True)["stays_in_l2"]


def test_which_rows_come_ahead():
    cols, stages = (128, 8192, 16_384), {}
    for device in ("H100", "L40S", "T4"):
        stages[device] = [plan(9, n, backward=True, device=device)["stages"] for n in cols]
    assert stages == {"H100": [2, 2, 2], "L40S": [2, 2, 1], "T4": [2, 1, 0]}
    # Two blocks a multiprocessor.
    assert plan(10_000, 8192, backward=True)["blocks"] == 264


def test_bad_problems_are_refused():
    with pytest.raises((RuntimeError, ValueError), match="expected rows of groups of columns"):
        plan(0, 128)
    assert ops._plan_gated(2**31 - 1, 1, 2**31 - 1, F32, aligned=False) == "null"


# ---- On the GPU

ACTIVATIONS: dict[str, Any] = {"silu": F.silu, "sigmoid": torch.sigmoid}


def packed(t):
    """The same values as the second part of a projection's rows."""
    wide = torch.full((*t.shape[:-1], 2 * t.shape[-1] + 16), float("nan"), dtype=t.dtype,
                      device=t.device)  # fmt: skip
    part = wide[..., t.shape[-1] + 8 : -8]
    part.copy_(t)
    return part


def turned(t):
    return t.transpose(0, 1).contiguous().transpose(0, 1) if t.dim() > 2 else packed(t)


LAYOUTS = {"dense": lambda t: t, "packed": packed, "misaligned": misaligned, "turned": turned}


def formula(x, gate, weight, bias, eps, first, activation, group, offset):
    """y in the dtype of its arguments."""
    value = ACTIVATIONS[activation](gate)
    u = x * value if first else x
    groups = u.unflatten(-1, (-1, group or u.shape[-1]))
    xhat = (groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps)).flatten(-2)
    z = xhat * (weight + offset) if weight is not None else xhat
    z = z if bias is None else z + bias
    return z if first else z * value


reference: Any = formula  # without types: mypy cannot count tensors that are passed with a star


def run(x, gate, weight, bias, first, activation, group, offset=0.0, out_dtype=None, dy=None):
    """y, and all gradients by name, as the operators give them."""
    options = (first, activation, group)
    y, mean, rstd = ops.rms_norm_gated_forward(
        x, gate, weight, bias, 1e-6, *options, out_dtype, offset
    )
    assert mean.shape == (0,)
    assert rstd.shape == (*x.shape[:-1], x.shape[-1] // group if group else 1)
    alone = ops.rms_norm_gated(x, gate, weight, bias, 1e-6, *options, out_dtype, offset)
    assert torch.equal(y, alone)
    dy = torch.ones_like(y) if dy is None else dy
    gradients = ops.rms_norm_gated_backward(
        dy, x, gate, rstd, weight, bias, *options, offset, True, True, weight is not None,
        bias is not None,
    )  # fmt: skip
    found = dict(zip(("dx", "dgate", "dweight", "dbias"), gradients, strict=True))
    given = {"dx": x, "dgate": gate, "dweight": weight, "dbias": bias}
    for name, t in given.items():
        if t is None:
            assert found.pop(name).shape == (0,)
        else:
            assert found[name].shape == t.shape
            assert found[name].dtype == t.dtype
            assert found[name].is_contiguous()
    return {"y": y, **found}


SHAPES = ((37, 64), (131, 128), (2, 5, 256), (9, 512), (33, 1024), (5, 1536), (3, 8192),
          (3, 16_384), (2, 40_000), (7, 100), (4, 24), (3, 5))  # fmt: skip
FORMS = (  # weight dtype, bias, activation, layouts of x and gate; None: x's dtype
    ("same", False, "silu", "dense", "packed"),
    (F32, False, "sigmoid", "packed", "dense"),
    (None, False, "silu", "turned", "packed"),
    ("same", True, "silu", "dense", "misaligned"),
    (None, True, "sigmoid", "misaligned", "dense"),
)


@pytest.mark.gpu
@pytest.mark.parametrize("first", [False, True], ids=["norm first", "gate first"])
@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(shape, dtype, first, poison):
    cols = shape[-1]
    splits = [0] + [cols // n for n in (3, 4) if cols % n == 0 and cols > n]
    others = [F32 if dtype != F32 else BF16, F16 if dtype != F16 else BF16]
    for (weight_dtype, bias, activation, *layouts), group in itertools.product(FORMS, splits):
        if dtype == F64 and weight_dtype == F32:
            continue
        parameters = dtype if weight_dtype in ("same", None) else weight_dtype
        kinds: list[Any] = [(dtype, None)]
        if weight_dtype == "same" and not bias:
            kinds += [(gate_dtype, None) for gate_dtype in others]
            kinds += [(dtype, out) for out in (F32, BF16, F16, F64) if out != dtype]
        for gate_dtype, out in kinds:
            randn = lambda *s, of: torch.randn(s, device="cuda").to(of)  # noqa: E731
            x, gate = randn(*shape, of=dtype), randn(*shape, of=gate_dtype)
            x, gate = LAYOUTS[layouts[0]](x), LAYOUTS[layouts[1]](gate)
            weight = None if weight_dtype is None else randn(cols, of=parameters)
            b = randn(cols, of=parameters) if bias else None
            offset = 0.5 if weight is not None and bias else 0.0
            dy = LAYOUTS[layouts[0]](randn(*shape, of=out or dtype))
            poison(dy, dy, x, gate, *([] if weight is None else [weight]))
            found = run(x, gate, weight, b, first, activation, group, offset, out, dy)
            assert found["y"].dtype == (out or dtype)
            leaves: Any = [t if t is None else t.detach().double().requires_grad_()
                      for t in (x, gate, weight, b)]  # fmt: skip
            y = reference(*leaves, 1e-6, first, activation, group, offset)
            y.backward(dy.double())
            names = ("dx", "dgate", "dweight", "dbias")
            exact = {"y": y.detach()}
            exact |= {n: t.grad for n, t in zip(names, leaves, strict=True) if t is not None}
            for name, value in found.items():
                # One rounding, and those of float32 (or float64) on the way. PyTorch's cast of
                # float64 to half precision rounds to float32 first.
                rounded = rounding(exact[name], value.dtype)
                if dtype == F64 and value.dtype.itemsize == 2:
                    rounded = rounded + rounding(exact[name], F32)
                inner = torch.finfo(F64 if dtype == F64 else F32).eps
                size = exact[name].abs() + exact[name].pow(2).mean().sqrt()
                limit = rounded + 24 * inner * size
                error = (value.double() - exact[name]).abs()
                assert (error <= limit).all(), (name, group, layouts, gate_dtype, out)


@pytest.mark.gpu
@pytest.mark.parametrize("first", [False, True], ids=["norm first", "gate first"])
@pytest.mark.parametrize(("cols", "group"), [(128, 0), (1024, 256), (8192, 0), (8192, 1024),
                                             (100, 0)])  # fmt: skip
def test_rows_do_not_depend_on_the_batch(cols, group, first):
    x, gate, dy = (torch.randn(700, cols, device="cuda").to(BF16) for _ in range(3))
    weight = torch.randn(cols, device="cuda").to(BF16)
    whole = run(x, gate, weight, None, first, "silu", group, dy=dy)
    again = run(x, gate, weight, None, first, "silu", group, dy=dy)
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    for rows in (1, 3, 69):
        part = run(x[:rows], gate[:rows], weight, None, first, "silu", group, dy=dy[:rows])
        for name in ("y", "dx", "dgate"):
            assert torch.equal(part[name], whole[name][:rows])


@pytest.mark.gpu
def test_arguments_that_do_not_fit():
    x, weight = torch.randn(4, 96, device="cuda"), torch.randn(96, device="cuda")
    calls: dict[str, tuple[Any, ...]] = {
        "gate must have the shape of the input": (x, x[:, :32], weight, None, 1e-6),
        "weight must have the shape": (x, x, weight[:32], None, 1e-6, False, "silu", 32),
        "group_size must be at least one and divide": (x, x, None, None, 1e-6, False, "silu", 36),
        "gate_activation must be 'silu' or 'sigmoid', got 'tanh'": (
            x, x, None, None, 1e-6, False, "tanh"),
        "gate must be on the input's device": (x, x.cpu(), None, None, 1e-6),
        "eps must be a number": (x, x, None, None, float("nan")),
    }  # fmt: skip
    for message, arguments in calls.items():
        with pytest.raises((RuntimeError, NotImplementedError), match=message):
            ops.rms_norm_gated(*arguments)

# SPDX-License-Identifier: Apache-2.0
"""What every operator has beside its kernels: a schema, autograd and fakes (torch.library.opcheck),
and the formula that serves a call on CUDA that no kernel takes, the operator _formula_NAME.

The calls are those that problems of every family make.
"""

import contextlib
from dataclasses import replace
from typing import Any

import families
import pytest
import torch
import torch.nn.functional as F
from families import BF16, F16, F32, F64, GATED_FORMS, Gated, Packed, of_groups, over_channels
from forms import Calls, arguments_of, calls_of
from numerics import EVERY, QUICK, Problem, covering, forced, modulated
from torch._inductor import lowering
from torch.library import opcheck

import fused_layernorm as fl
from fused_layernorm.ops import load

pytestmark = pytest.mark.cpu_operators

ops = torch.ops.fused_layernorm
X = (3, 5, 8)
HALF = (BF16, F32, F32, F32)  # beside float32 parameters


def beside_residuals(problems):
    """The same with a residual, and modulated ones with a gate."""
    return [
        replace(p, residual_dtype=p.weight_dtype or p.dtype, gate=p.shift or p.scale_by)
        for p in problems
    ]


# The operators of these are traced with dynamic shapes, which takes long.
DEFAULT: list[Any] = [Problem(X), modulated(X)]
TRACED: list[Any] = [
    Problem(X, BF16, F32), Problem(X, layout="transposed"),
    Problem(X, statistic="rms", activation="silu", scale=2.0, weight_offset=1.0),
    modulated(X, dtypes=HALF), modulated(X, "token", layout="transposed"),
    modulated(X, dtypes=(BF16,) * 4, statistic="rms"),
]  # fmt: skip
DEFAULT += [*beside_residuals(DEFAULT), of_groups((2, 6, 4, 3), 2, modulation="both", scale=0.5)]
TRACED += [
    *beside_residuals(TRACED),
    over_channels((2, 6, 4, 4), affine="weight"),
    over_channels((2, 6, 4, 4), statistic="rms", affine="weight", layout="channels_last"),
    Gated((3, 4, 16)),
    Gated((3, 16), BF16, F32, gate_dtype=F32, out_dtype=F32, weight_offset=1.0, **GATED_FORMS[7]),
    families.of_heads(dtype=F32, layout="packed", seq_dim=2),
]
# What the small problems of all families lack: of rows these, with residuals and gates, too;
SPECIAL: list[Any] = [
    *(of(X, affine=affine) for of in (Problem, modulated) for affine in ("none", "weight", "bias")),
    Problem(X, F64), Problem(X, normalized_ndim=2), Problem((8,)),
    Problem(X, BF16, activation="silu", out_dtype=F32), modulated(X, dtypes=(F64,) * 4),
    modulated((0, 5, 8), "number"), modulated(X, "all", dtypes=HALF), modulated(X, shift=None),
]  # fmt: skip
SPECIAL += beside_residuals(SPECIAL)
# and of others. x has float16 or bfloat16 and dy not: so must be the gradients that nobody needs.
WIDE: dict[str, Any] = {"out_dtype": F32}
OTHERS: list[Any] = [
    of_groups((2, 6), 2, (F64, None), modulation="both"),
    of_groups((2, 6, 4, 3), 2, (BF16, F32), modulation="both", activation="leaky_relu", **WIDE),
    of_groups((2, 6, 4, 3), 2, (BF16, F32), modulation="both", layout="channels_last"),
    *(of_groups((2, 6, 4), 2, (BF16, F32), modulation=m, affine=affine, **WIDE)
      for m, affine in [("scale", "both"), ("both", "weight"), ("both", "bias"), ("none", "none")]),
    Gated((16,), F64), *(Gated((3, 16), F16, affine=a, **WIDE) for a in ("none", "weight", "bias")),
    *(over_channels((2, 6, 4, 4), statistic=statistic, affine="weight", layout=layout)
      for statistic in ("layer", "rms") for layout in ("channels_last", "slice of channels")),
    families.Heads((2, 3, 8), layout="packed", affine="both", statistic="layer", seq_dim=2),
    families.of_heads(dtype=F32, layout="packed", seq_dim=2, statistic=None, affine="none"),
    Packed((2, 3, 8), affine="both", packing="h3d", seq_dim=2),
    Packed((2, 3, 8), statistic=None, affine="none"),
]  # fmt: skip

# By the argument's name, what no call has by default. (A problem has the others.)
OPTIONS = {"eps": 1e-3, "activation": "silu", "scale": 0.5, "output_scale": 0.5, "out_dtype": F64,
           "weight_offset": 0.5, "round_before_weight": True, "keeps_order": True,
           "interleaved": True, "inverse": True}  # fmt: skip
# Of every operator one that differs from the defaults in what OPTIONS lacks.
OF_ALL: list[Any] = [
    Problem((2, 6, 16), statistic="rms"), Problem((2, 6, 16), statistic="rms", residual_dtype=F32),
    *(modulated((2, 6, 16), statistic="rms", scale_by=(1, 6, 16), gated=gated)
      for gated in (False, True)),
    of_groups((2, 6, 16), 3, modulation="both"),
    Gated((2, 6, 16), gate_first=True, gate_activation="sigmoid", group_size=4),
    families.Heads((2, 6, 16), statistic="layer", affine="both", rotary=8, heads=(3, 2)),
    Packed((2, 6, 16), statistic="layer", affine="both", rotary=8, heads=(4, 2), packing="h3d"),
]  # fmt: skip


def variants(operator, args):
    """The call; without dresidual; asked for one of its gradients, or for some."""
    yield [*args]
    names = [name for name, *_ in arguments_of(operator, args)]
    if "dresidual" in names:
        yield [None if name == "dresidual" else v for name, v in zip(names, args, strict=False)]
    flags = [i for i in range(len(args)) if names[i][:6] == "needs_" and args[i]]
    takes_none = "layer_norm" in operator._opname or operator._opname == "gate_backward"
    pairs = covering(*[(True, False)] * len(flags))
    for mask in {tuple(i == j for j in flags) for i in flags} | {*pairs}:
        if not (any(mask) or takes_none):
            continue
        chosen = dict(zip(flags, mask, strict=True))
        yield [chosen.get(i, value) for i, value in enumerate(args)]


@pytest.mark.parametrize(
    "problem", [*DEFAULT, *TRACED, *SPECIAL, *OTHERS, *families.SMALL, *families.EMPTY], ids=str
)
def test_opcheck(device, problem):
    """The operators with statistics run under autograd, the others in calls without gradients."""
    is_default = problem in DEFAULT
    checks = EVERY if device == "cpu" and (is_default or problem in TRACED) else QUICK
    for name, args in calls_of(problem, device).items():
        operator = getattr(ops, name).default
        has_graph = name.endswith("_forward") or (name.endswith("_backward") and is_default)
        given: Any = [
            value.detach().requires_grad_(has_graph and argument not in ("mean", "rstd"))
            if isinstance(value, torch.Tensor)
            else value
            for argument, _, value in arguments_of(operator, args)
        ]
        opcheck(operator, tuple(given), test_utils=checks)
        for variant in variants(operator, given) if is_default or problem in OTHERS else ():
            opcheck(operator, tuple(variant), test_utils="test_faketensor")


def test_gradients_of_no_columns_and_of_absent_parameters(device):
    """No gradient is dy itself, even without elements, and one of an absent tensor, if it is asked
    for, is absent from a fake."""
    x, statistic = torch.randn(0, device=device), torch.randn(1, device=device)
    given = (x, 1, statistic, statistic, x.clone(), x.clone(), None, None, 1.0, *[True] * 3)
    opcheck(ops.layer_norm_backward.default, (x.clone(), *given), test_utils="test_schema")
    y, rows = torch.randn(2, 3, 8, device="meta"), torch.randn(3, 1, device="meta")
    options = (None, None, None, None, None, True, True, True, False, False)
    shapes = [each.shape for each in ops.ada_layer_norm_backward(*y, 1, rows, rows, *options)]
    assert shapes == [(3, 8), *[(0,)] * 4]


@pytest.mark.parametrize(("shape", "groups"), [((2**16, 2**15), 2**15), ((1, 1, 2**30 + 1), 1)])
def test_what_kernels_cannot_count_is_the_operators_matter(shape, groups):
    """The limits of the kernels are theirs alone: no function compares sizes with them."""
    with torch._subclasses.FakeTensorMode(), Calls() as calls:
        x = torch.empty(shape, device="cuda", dtype=BF16)
        y = fl.group_norm(x, groups, activation="silu")
    assert y.shape == shape
    assert calls.names == ["group_norm"]


# ---- The formulas.


def calls_of_all(device="cpu", dtype=F32):
    """A call of every operator, by name, in which no argument is as by default."""
    every: dict[str, Any] = {}
    for problem in OF_ALL:
        calls = calls_of(replace(problem, dtype=dtype), device)
        for name in [n for n in calls if f"{n}_forward" in calls]:
            calls[name + "_forward"] = calls[name]
        every = calls | every
    return {
        name: [
            value if "Tensor" in kind else OPTIONS.get(argument, value)
            for argument, kind, value in arguments_of(getattr(ops, name).default, args)
        ]
        for name, args in every.items()
    }


ALL = calls_of_all()


def has_kernel(name):
    """Of a gate alone PyTorch's operators may serve CUDA too."""
    has_one = torch._C._dispatch_has_kernel_for_dispatch_key(f"{load.NAMESPACE}::{name}", "CUDA")
    assert has_one or name == "gate_backward" or name not in ALL
    return has_one


def test_every_operator_with_a_kernel_has_a_formula():
    names = [name.split("::") for name in torch._C._dispatch_get_all_op_names()]
    ours = {name for space, name in names if space == load.NAMESPACE}
    if ops._build_info() != "cpu only":
        assert {n for n in {*ours, *ALL} if has_kernel(n)} <= {*ALL}
    for name, args in ALL.items():
        operator = getattr(ops, name).default
        defaults = [a.default_value for a in operator._schema.arguments]
        by_default = [a for a, d in zip(args, defaults, strict=True) if d is not None and a == d]
        assert by_default == [], name
        formula = getattr(ops, load.PREFIX + name).default._schema
        assert str(formula) == str(operator._schema).replace("::", f"::{load.PREFIX}", 1)
        assert lowering.maybe_layout_constraints(operator) is lowering.constrain_to_fx_strides


def as_tuple(found):
    return found if isinstance(found, tuple | list) else (found,)


@pytest.mark.parametrize("name", ALL)
def test_the_formula_is_what_other_devices_compute(name):
    before = load.served[name]
    found = getattr(ops, load.PREFIX + name)(*ALL[name])
    expected = getattr(ops, name)(*ALL[name])
    assert load.served[name] == before + 1
    torch.testing.assert_close(as_tuple(found), as_tuple(expected), rtol=0, atol=0)


def test_the_last_error_of_a_formula_is_kept():
    with pytest.raises(RuntimeError):
        getattr(ops, f"{load.PREFIX}group_norm")(torch.randn(2, 3), 2, *(None,) * 4, 1e-5)
    assert ops._formula_error().startswith("expected num_groups that divides the 3 channels")


@contextlib.contextmanager
def served_by_formula(*names):
    """No kernel takes a call; checks which operators' formulas served."""
    load.served.clear()
    with forced("formula"):
        yield
    assert load.served == dict.fromkeys(names, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", ALL)
def test_every_operator_finds_its_formula(name, dtype):
    """Asked for all gradients, and for all but each. Where the gradients of a gated sum are wanted
    with derivatives, autograd calls two operators instead."""
    operator, args = getattr(ops, name), calls_of_all(dtype=dtype)[name]
    within: Any = {"rtol": 2e-2, "atol": 2e-2} if dtype == BF16 else {"rtol": 1e-4, "atol": 1e-5}
    arguments = enumerate(operator.default._schema.arguments)
    for left_out in [None, *(i for i, a in arguments if a.name[:6] == "needs_")]:
        given = [value if i != left_out else False for i, value in enumerate(args)]
        on_cuda = [a.cuda() if isinstance(a, torch.Tensor) else a for a in given]
        with torch.no_grad():
            expected = operator(*given)
            with served_by_formula(*[name] * has_kernel(name)):
                found = operator(*on_cuda)
        for one, other in zip(as_tuple(found), as_tuple(expected), strict=True):
            torch.testing.assert_close(one.cpu(), other, **within)
            assert one.stride() == other.stride()


@pytest.mark.gpu
def test_memory_that_a_formula_lacks_is_named():
    torch.cuda.empty_cache()
    # The operator's y and copy of x have room, but not the formula's float32.
    samples = int(0.35 * torch.cuda.mem_get_info()[0]) // 2**31
    x = torch.zeros(1, 1, 1, device="cuda", dtype=BF16).expand(samples, 1, 2**30)
    with served_by_formula("group_norm"), pytest.raises(torch.OutOfMemoryError, match="formula"):
        fl.group_norm(x, 1)


@pytest.mark.gpu
@pytest.mark.parametrize(("samples", "channels", "positions"), [(1, 1, 2**30 + 8), (2**30, 1, 2)])
def test_groups_that_kernels_cannot_count(samples, channels, positions):
    """More than 2^30 positions a channel, and 2^30 groups."""
    x = torch.randn(positions, device="cuda", dtype=BF16).expand(samples, channels, positions)
    if samples > 1:
        x = torch.randn(samples, 1, 1, device="cuda", dtype=BF16).expand(-1, channels, positions)
    swapped = fl.swap_norms(torch.nn.GroupNorm(1, channels, device="cuda", dtype=BF16))
    swapped.requires_grad_(False)
    for run in (lambda: fl.group_norm(x, 1), lambda: swapped(x)):
        y = run()
        for part in (slice(0, 8), slice(-8, None)):
            given = x if samples == 1 else x[part]
            expected = F.group_norm(given.float(), 1).to(x.dtype)
            of_y, expected = y[part].flatten()[-64:], expected[-8:].flatten()[-64:]
            torch.testing.assert_close(of_y, expected)
            del expected
        del y

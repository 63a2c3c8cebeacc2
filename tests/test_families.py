# SPDX-License-Identifier: Apache-2.0
"""Modulated rows, norms over one dimension, groups of channels, gates and heads: what the tables of
all families (test_accuracy.py, test_every_norm.py) do not say. Plain rows are in test_rows.py."""

import functools
import itertools
import math
from typing import Any

import families
import libraries
import numerics
import pytest
import reference
import torch
import torch.nn.functional as F
from families import BF16, F16, F32, F64, MODULATED_DTYPES, of_heads, of_packed
from forms import Calls
from golden_plans import group_plan
from numerics import ids, make, modulated, ours
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

import fused_layernorm as fl
from fused_layernorm.ops import heads, packed

OPS: Any = torch.ops.fused_layernorm
# Without types: mypy cannot count tensors that are passed with a star.
norm_rope: Any = fl.norm_rope
qk_norm_rope: Any = fl.qk_norm_rope
formula: Any = reference.rms_norm_gated
ACTIVATE: dict[str, Any] = {"silu": F.silu, "sigmoid": torch.sigmoid}

pytestmark = pytest.mark.cpu_operators


# ---- Modulations.


@pytest.mark.parametrize("kind", ["all", "sample", "token"])
@pytest.mark.parametrize("dtypes", MODULATED_DTYPES, ids=ids)
def test_without_shift_and_scale_it_is_layer_norm(device, dtypes, kind):
    """And with a gate alone add_layer_norm with that gate."""
    t = make(modulated((3, 5, 64), kind, gated=True, dtypes=dtypes), device)
    args: Any = (t.weight, t.bias)
    shape: Any = {"normalized_shape": (64,)}
    found = [fl.ada_layer_norm(t.x, None, None, *args, **shape)]
    expected = [fl.layer_norm(t.x, *args, **shape)]
    for gate in (None, t.gate):
        found += fl.add_ada_layer_norm(t.x, t.residual, gate, None, None, *args, **shape)
        expected += fl.add_layer_norm(t.x, t.residual, *args, gate=gate, **shape)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("how", [{"activation": "gelu"}, {"scale": 0.5}], ids=str)
@pytest.mark.parametrize("dtypes", MODULATED_DTYPES, ids=ids)
def test_gate_beside_an_activation(device, dtypes, how):
    """It takes any dtypes that it takes without one; its gradients are rounded on the way."""
    options = {"shift": None, "scale_by": None, **how}
    problem = modulated((3, 5, 64), gated=True, dtypes=dtypes, **options)
    t = make(problem, device)
    found = ours(t)
    tolerance = {F32: 1e-5, F64: 1e-10}.get(max(dtypes[:2], key=lambda d: torch.finfo(d).eps), 3e-2)
    for name, expected in numerics.exact(t, found).items():
        assert found[name].dtype == problem.dtype_of(name)
        slack = tolerance * max(1.0, expected.abs().max().item())
        torch.testing.assert_close(found[name].double(), expected, rtol=0, atol=slack, msg=name)


@pytest.mark.parametrize("gated", [False, True])
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


# ---- One dimension.


@pytest.mark.parametrize("dim", [0, 1, 2, 3, -1, -2, -4])
def test_any_dimension(device, dim):
    x = torch.randn(3, 4, 5, 8, device=device)
    weight = torch.randn(x.shape[dim], device=device)
    y = fl.layer_norm(x, weight, weight, dim=dim)
    expected = F.layer_norm(x.movedim(dim, -1), weight.shape, weight, weight).movedim(-1, dim)
    assert y.stride() == x.stride()
    torch.testing.assert_close(y, expected)


def test_a_vector_of_zeros_stays_zero(device):
    cls = libraries.class_of("diffusers.models.autoencoders.autoencoder_kl_wan", "WanRMS_norm")
    module = fl.swap_norms(cls(24).to(device))
    x = torch.zeros(2, 24, 4, 6, device=device, requires_grad=True)
    y = module(x)
    assert torch.equal(y, torch.zeros_like(y))
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert dx.isfinite().all()


# ---- Groups of channels.


@pytest.mark.parametrize(("call", "strategies"), families.GROUP_KERNELS, ids=str)
def test_the_strategies_of_group_kernels(call, strategies):
    positions = math.prod(call.shape[2:])
    for backward, strategy in enumerate(strategies.split()):
        plan = group_plan(
            call.shape[0], call.shape[1], positions, call.groups, call.dtype,
            backward=bool(backward), channels_last="channels_last" in call.layout,
            y_dtype=None if call.dtype is F32 else call.out_dtype,
            aligned="misaligned" not in call.layout,
        )  # fmt: skip
        assert plan["strategy"] == strategy


# ---- Gates.


def inputs(device, shape, dtype, grad=True) -> Any:
    """x, gate, weight and bias."""
    t = make(families.Gated(shape, dtype), device)
    return [tensor.requires_grad_(grad) for tensor in t.inputs().values()]


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


@pytest.mark.parametrize("x_dtype", [F32, F16, BF16, F64])
def test_autocast_gives_what_rms_norm_gives(device, x_dtype):
    x, gate, *_ = inputs(device, (4, 16), x_dtype)
    weight = torch.randn(16, device=device).to(F64 if x_dtype == F64 else BF16)
    with torch.autocast(device, BF16):
        y, z = fl.rms_norm_gated(x, gate, weight), fl.rms_norm(x, weight)
        assert y.dtype == z.dtype == fl.rms_norm(x, weight, group_size=8).dtype
        assert x_dtype != BF16 or z.dtype == F.rms_norm(x, (16,), weight).dtype
        for norm in (
            functools.partial(fl.rms_norm_gated, x, gate),
            functools.partial(fl.rms_norm, x),
        ):
            assert norm(weight, out_dtype=F16).dtype == F16
    exact = formula(x.double(), gate, weight, eps=1e-7)
    torch.testing.assert_close(y.double(), exact, rtol=1e-2, atol=1e-2)
    assert torch.autograd.grad(y.float().sum(), gate)[0].dtype == x_dtype


def test_special_gates(device):
    for activation, value, dtype in itertools.product(
        ACTIVATE, (math.nan, math.inf, -math.inf, 200, -200), (F32, F16, BF16)
    ):
        gate = torch.full((3, 64), float(value), device=device, dtype=dtype)
        x = torch.randn_like(gate)
        y = fl.rms_norm_gated(x, gate, None, 1e-6, gate_activation=activation)
        expected = F.rms_norm(x.float(), (64,), None, 1e-6) * ACTIVATE[activation](gate.float())
        torch.testing.assert_close(y, expected.to(dtype), equal_nan=True)


# ---- Heads.


@pytest.mark.parametrize("flag", [False, True])
def test_one_tensor_gives_the_same_bits(flag, device):
    c = of_heads(cols=96, rotary=64, interleaved=flag)
    t = make(c, device)
    both = c.forward(t)
    for y, x, weight in zip(both, (t.q, t.k), (t.q_weight, t.k_weight), strict=True):
        assert torch.equal(norm_rope(x, weight, t.cos, t.sin, **c.options), y)


def test_default_eps_of_heads(device):
    x, w = 1e-4 * torch.randn(1, 3, 2, 8, device=device), torch.ones(8, device=device)
    y = norm_rope(x, w, None, None)
    torch.testing.assert_close(y, F.rms_norm(x, (8,), w))
    y = norm_rope(x, w, None, None, statistic="layer")
    torch.testing.assert_close(y, F.layer_norm(x, (8,), w))


def test_q_without_heads(device):
    t = make(of_heads(heads=(0, 2)), device)
    found = ours(t)
    assert found["q_out"].shape == found["dq"].shape == t.q.shape
    assert not found["dq_weight"].any()
    torch.testing.assert_close(found["k_out"], norm_rope(t.k, t.k_weight, t.cos, t.sin, 1e-6))


def test_inf_stays_outside_the_rotation(device):
    x = torch.randn(1, 4, 2, 32, device=device)
    x[0, 1, 0, 20] = float("inf")
    angle = torch.randn(4, 8, device=device)
    y = norm_rope(x, None, angle.cos(), angle.sin(), statistic=None, rotary_dim=16)
    assert y.isinf().sum() == 1
    assert not y.isnan().any()


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotated_results_may_be_written_into(device, interleaved):
    """Even those of no_grad, with gradients: they are no views."""
    x, angles = torch.randn(2, 3, 4, 8, device=device), torch.randn(2, 3, 4, device=device)
    with torch.no_grad():
        q, k = qk_norm_rope(x, x, None, None, *angles, interleaved=interleaved)
    factor = torch.ones(8, device=device, requires_grad=True)
    assert [q._is_view(), k._is_view()] == [False, False]
    assert q.mul_(factor).requires_grad


def test_derivatives_of_rotations_alone():
    q, k = (torch.randn(1, 2, n, 6, dtype=F64, requires_grad=True) for n in (2, 4))
    cos, sin = torch.randn(2, 2, 2, dtype=F64)
    kinds = (4, 1, 1e-3, None, 0.0, False, False)

    def of_both(q, k):
        return heads.qk_norm_rope(q, k, *[None] * 4, cos, sin, *kinds, False)

    def of_one(qkv):
        return packed.run(qkv, *[None] * 4, cos, sin, *kinds, 1, True)

    def of_k(k):
        return of_both(q.detach(), k)[1]

    for function, given in ((of_both, (q, k)), (of_k, (k,)), (of_one, (k,))):
        assert gradcheck(function, given)
        assert gradgradcheck(function, given)


@pytest.mark.parametrize("of", [of_heads, of_packed])
def test_angles_have_gradients(of):
    small: Any = {"batch": 1, "positions": 2, "heads": (2, 1), "rotary": 4, "angle_dtype": F64}
    t = make(of(6, F64, statistic=None, affine="none", **small), "cpu")
    given = t.named((*t.problem.NAMES, "cos", "sin"))

    def run(*tensors):
        return t.problem.forward(t.but(**dict(zip(given, tensors, strict=True))))

    leaves = tuple(u.requires_grad_() for u in given.values())
    assert gradcheck(run, leaves, check_forward_ad=True)
    assert gradgradcheck(run, leaves)


@pytest.mark.parametrize("how", [{}, {"statistic": None, "affine": "none"}], ids=str)
@pytest.mark.parametrize("of", [of_heads, of_packed])
def test_vmap_of_heads(of, how, device):
    """To the bit, of one sample after another; a rotation alone, too."""
    t = make(of(dtype=F32, batch=3, **how), device)
    rows = {name: u for name, u in t.inputs().items() if name in ("qkv", "q", "k")}

    def run(rows):
        return t.problem.forward(t.but(**{name: x[None] for name, x in rows.items()}))

    with Calls() as called:
        found = torch.vmap(run)(rows)
    # Not one for each sample, as parameters of samples make it.
    assert called.names == ["qk_norm_rope"] or of is of_packed
    for a, b in zip(found, t.problem.forward(t), strict=True):
        assert torch.equal(a.squeeze(1), b)


@pytest.mark.gpu
@pytest.mark.slow
def test_more_than_2_to_the_30_heads(needs_memory):
    needs_memory(40)
    x = torch.empty(1, 1, 2**30 + 5, 2, device="cuda", dtype=BF16).normal_().requires_grad_()
    y = norm_rope(x, None, None, None, 1e-6)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(x))
    for part in (slice(0, 9), slice(2**29, 2**29 + 9), slice(2**30 - 4, 2**30 + 5)):
        piece = x[:, :, part].detach().double().requires_grad_()
        expected = F.rms_norm(piece, (2,), None, 1e-6)
        torch.testing.assert_close(y[:, :, part].double(), expected, rtol=2**-7, atol=2**-7)
        (gradient,) = torch.autograd.grad(expected, piece, torch.ones_like(piece))
        torch.testing.assert_close(dx[:, :, part].double(), gradient, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("of", [of_heads, of_packed])
def test_autocast_changes_nothing_of_heads(of, device):
    t = make(of(dtype=F32), device)
    with torch.autocast(device, BF16):
        found = t.problem.forward(t)
    assert all(map(torch.equal, found, t.problem.forward(t)))


# ---- Of several families: torch.compile, torch.export.


def heads_of(q, k, q_weight, k_weight):
    cos, sin = torch.linspace(-1, 1, 320, device=q.device).view(2, 5, 32)
    return torch.cat(qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps=1e-6), 2)


def packed_of(qkv, q_weight, k_weight):
    cos, sin = torch.linspace(-1, 1, 80, device=qkv.device).view(2, 5, 8)
    return torch.cat(fl.qkv_norm_rope(2 * qkv, q_weight, k_weight, cos, sin, 1e-6, seq_dim=2), 1)


def packed_in_rows_of(qkv):
    how: Any = {"head_dim": 16, "num_kv_heads": 1, "layout": "h3d"}
    q, k, v = fl.qkv_norm_rope(qkv, None, None, *qkv.new_ones(2, 5, 8), **how)
    return q + k + v


def gated(i, x, gate, weight, bias):
    return fl.rms_norm_gated(x, gate, weight, bias=bias, **families.GATED_FORMS[i])


def gates_of(x, residual, weight, gate):
    y, total = fl.add_layer_norm(x, residual, weight, gate=gate)
    y, total = fl.add_layer_norm(y, total, weight, gate=gate, activation="gelu")
    return y + total


OLD = pytest.mark.skipif(torch.__version__.startswith("2.10."), reason="Dynamo cannot follow it")
IMAGES = [(2, 6, 4, 4), (2, 1, 4, 4), (2, 6, 1, 1)]
TRACED: list[Any] = [  # functions, and the shapes of their tensors
    (heads_of, [(2, 5, 6, 64), (2, 5, 2, 64), (64,), (64,)]),
    (packed_of, [(2, 5, 3, 2, 16), (16,), (16,)]), (packed_in_rows_of, [(2, 5, 64)]),
    (lambda x, w, b: fl.group_norm(x, 3, w, b, activation="silu"), [IMAGES[0], (6,), (6,)]),
    *((functools.partial(fl.layer_norm, dim=1), [shape, shape[1:2], shape[1:2]])
      for shape in IMAGES),
    *((functools.partial(gated, i), [(4, 16), (4, 16), (16,), (16,)]) for i in (0, 5)),
    (lambda x, weight: fl.rms_norm(x, weight, group_size=8), [(4, 16), (16,)]),
    pytest.param(gates_of, [(2, 3, 8), (2, 3, 8), (8,), (2, 1, 8)], marks=OLD),
]  # fmt: skip


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("function", "shapes"), TRACED)
def test_compile_and_export(device, function, shapes, channels_last):
    """With the kernels, which a graph without Inductor keeps, and with PyTorch's forward. Results
    and gradients keep their strides, and so do fakes."""
    tensors = [torch.randn(shape, device=device) for shape in shapes]
    if channels_last and tensors[0].dim() == 4:
        tensors[0] = families.ORDERS["channels_last"](tensors[0])
    leaves = [t.detach().requires_grad_() for t in tensors]
    module: Any = nn.Module()
    module.forward, y = function, function(*leaves)
    dy = torch.randn_like(y)
    expected = [y, *torch.autograd.grad(y, leaves, dy)]
    ways: list[Any] = [{"backend": "aot_eager"}, {"backend": "aot_eager", "dynamic": True}]
    if function in (heads_of, packed_of, packed_in_rows_of):
        ways.append({"backend": "fused_layernorm"})
    for how in ways:
        torch._dynamo.reset()
        z = torch.compile(module, fullgraph=True, **how)(*leaves)
        for found, right in zip([z, *torch.autograd.grad(z, leaves, dy)], expected, strict=True):
            assert how is not ways[0] or found.stride() == right.stride()
            torch.testing.assert_close(found, right)
    program = torch.export.export(module, (*tensors,))
    (fake,) = (node.meta["val"] for node in program.graph.output_node().args[0])
    assert fake.stride() == y.stride()
    plain = program.run_decompositions(fl.decompositions())
    assert "fused_layernorm" in program.graph_module.code
    assert "fused_layernorm" not in plain.graph_module.code
    for exported in (program, plain):
        z = exported.module()(*tensors)
        assert exported is plain or z.stride() == y.stride()
        torch.testing.assert_close(z, y.detach())

# SPDX-License-Identifier: Apache-2.0
"""Norms of heads with a rotation: what the tables of all families (test_accuracy.py,
test_every_norm.py) do not say, derivatives, registration, compilers."""

from typing import Any

import numerics
import pytest
import torch
from families import BF16, F32, F64
from families import of_heads as of
from numerics import make, ours
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck

import fused_layernorm
from fused_layernorm.ops import heads

# Without types: mypy cannot count tensors that are passed with a star.
norm_rope: Any = fused_layernorm.norm_rope
qk_norm_rope: Any = fused_layernorm.qk_norm_rope


@pytest.mark.parametrize("flag", [False, True])
def test_one_tensor_gives_the_same_bits(flag, device):
    c = of(cols=96, rotary=64, interleaved=flag)
    t = make(c, device)
    both = c.forward(t)
    for y, x, weight in zip(both, (t.q, t.k), (t.q_weight, t.k_weight), strict=True):
        assert torch.equal(norm_rope(x, weight, t.cos, t.sin, **c.options), y)


def test_rounding_is_that_of_llamas_class(device):
    x = torch.randn(2, 50, 4, 64, device=device).to(BF16)
    weight = 1 + torch.randn(64, device=device).to(BF16) / 2
    wide = x.float()
    xhat = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(BF16)
    for rounds, expected in ((True, weight * xhat), (False, weight.float() * xhat.float())):
        y = norm_rope(x, weight, None, None, 1e-6, round_before_weight=rounds)
        equal = (y == expected.to(BF16)).float().mean()
        assert equal > 0.999 if rounds else equal < 0.9
    # The norm's result is rounded in front of the rotation, too.
    cos, sin = torch.zeros(2, 50, 32, device=device)
    sin += 1
    y = norm_rope(x, weight, cos, sin, 1e-6, round_before_weight=True)
    z = norm_rope(x, weight, None, None, 1e-6, round_before_weight=True)
    assert torch.equal(y, torch.cat([-z[..., 32:], z[..., :32]], -1))


def test_default_eps(device):
    x, w = 1e-4 * torch.randn(1, 3, 2, 8, device=device), torch.ones(8, device=device)
    y = norm_rope(x, w, None, None)
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (8,), w))
    y = norm_rope(x, w, None, None, statistic="layer")
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (8,), w))


def test_bits_do_not_depend_on_the_positions(device):
    c = of(positions=37, batch=4, cols=128, statistic="layer", affine="both")
    t = make(c, device)
    whole, few = ours(t), slice(5, 9)
    rows = {name: getattr(t, name)[:, few] for name in c.HAVE_ROWS}
    part = ours(t.but(**rows, cos=t.cos[few], sin=t.sin[few]))
    assert all(torch.equal(part[name], whole[name][:, few]) for name in c.OF_ROWS)


def test_q_without_heads(device):
    t = make(of(heads=(0, 2)), device)
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


def test_one_result_alone_has_a_gradient(device):
    c = of(dtype=F32)
    t = make(c, device)
    expected = ours(t)
    for statistic in ("rms", None):
        for side, name in enumerate("qk"):
            leaves: Any = [u.detach().requires_grad_() for u in (t.q, t.k, t.q_weight, t.k_weight)]
            given = leaves[2:] if statistic else [None, None]
            found = qk_norm_rope(*leaves[:2], *given, t.cos, t.sin, c.eps, statistic=statistic)
            found[side].backward(t.gradients()[side])
            assert leaves[1 - side].grad is None
            if statistic:
                assert torch.equal(leaves[side].grad, expected[f"d{name}"])
                assert leaves[3 - side].grad is None


@pytest.mark.parametrize("interleaved", [False, True])
def test_derivatives_of_all_orders(interleaved):
    c = of(dtype=F64, cols=6, rotary=4, positions=2, batch=1, heads=(2, 1),
           statistic="layer", affine="both", interleaved=interleaved, eps=1e-3)  # fmt: skip
    t = make(c, "cpu")
    names = [*c.NAMES, "cos", "sin"]

    def run(*tensors):
        return c.forward(t.but(**dict(zip(names, tensors, strict=True))))

    leaves = [getattr(t, name).detach().double().requires_grad_() for name in names]
    assert gradcheck(run, leaves, check_forward_ad=True)
    assert gradgradcheck(run, leaves)
    leaves[6:] = [angles.detach() for angles in leaves[6:]]

    def by_operator(*tensors):
        return heads.qk_norm_rope(*tensors, 4, 1, 1e-3, "layer", 0.0, False, interleaved, False)

    assert gradcheck(by_operator, leaves)
    assert gradgradcheck(by_operator, leaves)


def test_double_backward_of_the_kernels(device):
    c = of(dtype=F32, cols=32, positions=3)
    t = make(c, device)
    cos, sin = t.cos, t.sin

    def second(*tensors):
        q, k, *weights = (t.detach().requires_grad_() for t in tensors)
        y = qk_norm_rope(q, k, *weights, cos.to(q.dtype), sin.to(q.dtype), eps=c.eps)
        (g,) = torch.autograd.grad(y[0].square().sum(), q, create_graph=True)
        return torch.autograd.grad(g.square().sum(), (q, weights[0]))

    found = second(*t.inputs().values())
    expected = second(*(u.double() for u in t.inputs().values()))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-3)


def test_opcheck(device):
    for statistic, affine in (("rms", "weight"), ("layer", "both"), (None, "none")):
        c = of(statistic=statistic, affine=affine, dtype=F32, layout="packed", seq_dim=2)
        t = make(c, device)
        t.q, t.k = (u.detach().requires_grad_() for u in (t.q, t.k))
        tensors = (*(getattr(t, name) for name in c.NAMES), t.cos, t.sin)
        options = (c.shape[-1], 2, 1e-6, statistic, 0.0, False, False)
        utils = numerics.EVERY if statistic == "rms" else numerics.QUICK
        opcheck(heads.qk_norm_rope, (*tensors, *options, False), test_utils=utils)
        if statistic:
            args = (*t.gradients(), *tensors, *options, True, True)
            opcheck(heads.qk_norm_rope_backward, args, test_utils=utils)


@pytest.mark.parametrize("statistic", ["rms", None])
def test_vmap(statistic, device):
    c = of(dtype=F32, statistic=statistic, affine="weight" if statistic else "none", batch=3)
    t = make(c, device)
    q, k, weights = t.q, t.k, (t.q_weight, t.k_weight)

    def run(q, k, qw, kw):
        return qk_norm_rope(q[None], k[None], qw, kw, t.cos, t.sin, **c.options)

    expected = c.forward(t)
    found = torch.vmap(run, in_dims=(0, 0, None, None))(q, k, *weights)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.squeeze(1), b)
    if statistic:
        many = [torch.stack([w, 2 * w, -w]) for w in weights]
        found = torch.vmap(run, in_dims=(0, 0, 0, 0))(q, k, *many)
        assert torch.equal(found[0][0, 0], expected[0][0])
        loss = torch.func.grad(lambda *a: run(*a)[0].square().sum(), argnums=(0, 2))
        _dq, dw = torch.vmap(loss, in_dims=(0, 0, None, None))(q, k, *weights)
        assert dw.shape == (3, c.shape[-1])


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_and_export(dynamic, device):
    c = of(dtype=F32, layout="packed")
    t = make(c, device)
    q, k, angles = t.q, t.k, (t.cos, t.sin)

    class Module(torch.nn.Module):
        def forward(self, q, k, cos, sin):
            return qk_norm_rope(q, k, t.q_weight, t.k_weight, cos, sin, eps=c.eps)

    expected = Module()(q, k, *angles)
    compiled = torch.compile(Module(), backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for y, z in zip(compiled(q, k, *angles), expected, strict=True):
        assert torch.equal(y, z)
    exported = torch.export.export(Module(), (q, k, *angles))
    assert "qk_norm_rope" in exported.graph_module.code
    plain = exported.run_decompositions(fused_layernorm.decompositions())
    assert "qk_norm_rope" not in plain.graph_module.code
    torch.testing.assert_close(plain.module()(q, k, *angles), expected)
    assert torch.equal(exported.module()(q, k, *angles)[1], expected[1])


@pytest.mark.gpu
@pytest.mark.slow
def test_more_than_2_to_the_30_heads(needs_memory):
    needs_memory(40)
    x = torch.empty(1, 1, 2**30 + 5, 2, device="cuda", dtype=BF16).normal_().requires_grad_()
    y = norm_rope(x, None, None, None, 1e-6)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(x))
    for part in (slice(0, 9), slice(2**29, 2**29 + 9), slice(2**30 - 4, 2**30 + 5)):
        piece = x[:, :, part].detach().double().requires_grad_()
        expected = torch.nn.functional.rms_norm(piece, (2,), None, 1e-6)
        torch.testing.assert_close(y[:, :, part].double(), expected, rtol=2**-7, atol=2**-7)
        (gradient,) = torch.autograd.grad(expected, piece, torch.ones_like(piece))
        torch.testing.assert_close(dx[:, :, part].double(), gradient, rtol=2**-6, atol=2**-6)


@pytest.mark.on_cpu
def test_autocast_changes_nothing():
    x, w = torch.randn(1, 2, 2, 8), torch.ones(8)
    with torch.autocast("cpu", BF16):
        assert norm_rope(x, w, None, None).dtype == F32

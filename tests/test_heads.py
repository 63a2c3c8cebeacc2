# SPDX-License-Identifier: Apache-2.0
"""norm_rope and qk_norm_rope: every form and layout, forward and backward, against float64."""

from dataclasses import dataclass, replace
from typing import Any

import numerics
import pytest
import reference
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck

import fused_layernorm
from fused_layernorm.ops import heads

# Without types: mypy cannot count tensors that are passed with a star.
norm_rope: Any = fused_layernorm.norm_rope
qk_norm_rope: Any = fused_layernorm.qk_norm_rope

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
Q_HEADS, K_HEADS = 6, 2


def _packed(q, k):
    """Slices of one tensor of q, k and v."""
    qkv = torch.cat([q, k, torch.full_like(k, float("nan"))], 2)
    return qkv[:, :, : q.shape[2]], qkv[:, :, q.shape[2] : q.shape[2] + k.shape[2]]


def _swapped(x, *dims):
    """The same values, with these two dimensions exchanged in memory."""
    return x.transpose(*dims).contiguous().transpose(*dims)


LAYOUTS = {
    "contiguous": lambda q, k: (q, k),
    "packed": _packed,
    "heads first": lambda q, k: (_swapped(q, 1, 2), _swapped(k, 1, 2)),
    "positions first": lambda q, k: (_swapped(q, 0, 1), k),
    "misaligned": lambda q, k: (numerics.misaligned(q), numerics.misaligned(k)),
    "columns apart": lambda q, k: (numerics.LAYOUTS["every second"](q), k),
}


@dataclass
class Call:
    """One call; `angles` says how cos and sin are given."""

    dtype: torch.dtype = BF16
    cols: int = 64
    rotary: int | None = None
    positions: int = 5
    batch: int = 2
    q_heads: int = Q_HEADS
    k_heads: int = K_HEADS
    statistic: str | None = "rms"
    affine: str = "weight"  # none, weight, both
    weight_dtype: torch.dtype | None = None
    angles: str = "positions"  # also: samples, doubled, strided, none
    angle_dtype: torch.dtype = F32
    interleaved: bool = False
    offset: float = 0.0
    rounds: bool = False
    seq_dim: int = 1
    layout: str = "contiguous"
    mean: float = 0.0
    eps: float = 1e-6

    def __str__(self):
        default = Call()
        changed = {n: v for n, v in vars(self).items() if v != getattr(default, n)}
        return "-".join(f"{n}={v}" for n, v in changed.items()) or "plain"


def make(c, device, seed=0) -> Any:
    """q, k, parameters and angles of a call, and the gradients of its results."""
    g = torch.Generator(device).manual_seed(seed)

    def randn(*shape, dtype=c.dtype):
        return torch.randn(shape, generator=g, device=device, dtype=F32).to(dtype)

    q = randn(c.batch, c.positions, c.q_heads, c.cols) + c.mean
    k = randn(c.batch, c.positions, c.k_heads, c.cols) + c.mean
    q, k = LAYOUTS[c.layout](q, k)
    grads = (randn(*q.shape), randn(*k.shape))
    if c.seq_dim == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        grads = tuple(grad.transpose(1, 2).contiguous() for grad in grads)
    weight_dtype = c.weight_dtype or c.dtype
    weights = biases = (None, None)
    if c.affine != "none":
        weights = tuple(1 + randn(c.cols, dtype=weight_dtype) / 2 for _ in range(2))
    if c.affine == "both":
        biases = tuple(randn(c.cols, dtype=weight_dtype) for _ in range(2))
    if c.angles == "none":
        return q, k, weights, biases, (None, None), grads
    rotary = c.rotary or c.cols
    shape = (c.batch, c.positions) if c.angles == "samples" else (c.positions,)
    angle = 10 * randn(*shape, rotary // 2, dtype=F32)
    cos, sin = angle.cos().to(c.angle_dtype), angle.sin().to(c.angle_dtype)
    if c.angles == "doubled":
        cos, sin = (
            t.repeat_interleave(2, -1)[None] if c.interleaved else torch.cat([t, t], -1)[None]
            for t in (cos, sin)
        )
    if c.angles == "strided":
        cos, sin = torch.view_as_real(torch.complex(cos.float(), sin.float())).unbind(-1)
    return q, k, weights, biases, (cos, sin), grads


def options(c) -> dict[str, Any]:
    return {
        "eps": c.eps,
        "statistic": c.statistic,
        "weight_offset": c.offset,
        "rotary_dim": c.rotary if c.angles != "none" else None,
        "interleaved": c.interleaved,
        "seq_dim": c.seq_dim,
    }


def ours(c, made):
    """Our results and gradients by name; one call for both."""
    q, k, weights, biases, angles, grads = made
    leaves = [None if t is None else t.detach().requires_grad_() for t in (q, k, *weights, *biases)]
    q, k, qw, kw, qb, kb = leaves
    found = qk_norm_rope(
        q, k, qw, kw, *angles, q_bias=qb, k_bias=kb, round_before_weight=c.rounds, **options(c)
    )
    torch.autograd.backward(found, grads)
    results = {}
    names = ("dx", "dweight", "dbias")
    for side, y, tensors in zip("qk", found, ((q, qw, qb), (k, kw, kb)), strict=True):
        results[f"{side} y"] = y.detach()
        for name, tensor in zip(names, tensors, strict=True):
            if tensor is not None:
                results[f"{side} {name}"] = tensor.grad
    return results


def exact(c, made):
    """The results in float64."""
    q, k, weights, biases, angles, grads = made
    results = {}
    for side, x, weight, bias, dy in zip("qk", (q, k), weights, biases, grads, strict=True):
        rounding = c.dtype if c.rounds and weight is not None else None
        given: dict[str, Any] = {"bias": bias, **options(c)}
        y = reference.norm_rope(x, weight, *angles, rounding=rounding, **given)
        found = (y, *reference.norm_rope_backward(dy, x, weight, *angles, **given)[:3])
        names = (("y", x), ("dx", x), ("dweight", weight), ("dbias", bias))
        for (name, tensor), value in zip(names, found, strict=True):
            if tensor is not None:
                results[f"{side} {name}"] = value
    return results


def in_float32(c, made):
    """The results of PyTorch's operators in float32, which round nothing before the end."""
    made = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.float, made)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fused_layernorm.heads.has_kernel", lambda a: False)
        return ours(replace(c, dtype=F32, weight_dtype=None), made)


# A value behind a rounding to x's dtype may be the other of two neighbours: with such roundings on
# the way, that much more is allowed.
def check(c, device):
    """The contract of numerics.py for all results of a call: 1.25 times PyTorch's error."""
    judgement = numerics.Judgement()
    for seed in range(3):
        made = make(c, device, seed)
        found = ours(c, made)
        expected = exact(c, made)
        yardstick = expected if c.dtype is F64 else in_float32(c, made)
        assert found.keys() == expected.keys()
        for name, value in found.items():
            parameter = name.endswith(("dweight", "dbias"))
            assert value.dtype == ((c.weight_dtype or c.dtype) if parameter else c.dtype)
            assert value.shape == expected[name].shape
            assert not value.isnan().any(), name
            error = (value.double() - expected[name]).abs()
            rounding = numerics.rounding(expected[name], value.dtype)
            if c.rounds and name.endswith(" y"):
                # Two neighbours of x's dtype, times a weight and a rotation.
                rounding = rounding + 8 * torch.finfo(c.dtype).eps
            if value.dtype.itemsize == 2:
                rounding = rounding * (1 + numerics.HALF_SLACK)
            judgement.add(name, (error - rounding).clamp(min=0), expected[name], yardstick[name])
    eps = torch.finfo(F64 if c.dtype is F64 else F32).eps
    broken = judgement.broken(lambda name, greatest: eps * greatest, greatest_factor=None)
    assert not broken, "; ".join(broken)


FORMS = [
    Call(),
    Call(interleaved=True),
    Call(dtype=F32), Call(dtype=F32, interleaved=True), Call(dtype=F16),
    Call(dtype=F64), Call(dtype=F64, interleaved=True, statistic="layer", affine="both"),
    *(Call(cols=cols, interleaved=cols % 3 == 0) for cols in (2, 6, 8, 16, 30, 80, 96, 128, 192)),
    *(Call(cols=cols, dtype=dtype) for cols in (254, 256, 258) for dtype in (BF16, F32)),
    *(Call(cols=80, rotary=rotary, interleaved=flag)
      for rotary in (2, 16, 20, 32, 64, 78) for flag in (False, True)),
    Call(cols=128, rotary=64, dtype=F32, interleaved=True), Call(cols=256, rotary=64),
    Call(statistic="layer", affine="both"), Call(statistic="layer", affine="none", dtype=F32),
    Call(statistic="layer", mean=1000.0, dtype=F32, cols=128), Call(statistic=None, affine="none"),
    Call(statistic=None, affine="none", dtype=F32, interleaved=True, cols=128, rotary=96),
    Call(affine="both", weight_dtype=F32), Call(affine="none"), Call(offset=1.0, dtype=F32),
    Call(offset=1.0, rounds=True, weight_dtype=F32), Call(rounds=True, dtype=F16, affine="both"),
    Call(rounds=True, cols=80, rotary=32), Call(rounds=True, cols=30, interleaved=True),
    Call(angles="none"), Call(angles="none", statistic="layer", affine="both"),
    *(Call(angles=angles, interleaved=flag, angle_dtype=dtype)
      for angles in ("samples", "doubled", "strided") for flag in (False, True)
      for dtype in (F32, BF16)),
    *(Call(angles="doubled", interleaved=True, cols=12, rotary=rotary) for rotary in (4, 12)),
    *(Call(layout=layout, seq_dim=seq_dim, cols=128)
      for layout in LAYOUTS for seq_dim in (1, 2)),
    Call(q_heads=1, k_heads=1, positions=33, batch=1), Call(q_heads=40, k_heads=5, cols=256),
    Call(q_heads=3, k_heads=17, cols=64, positions=7), Call(positions=1, batch=1),
    Call(positions=700, batch=3, q_heads=16, k_heads=4), Call(positions=129, cols=30, dtype=F32),
]  # fmt: skip


@pytest.mark.parametrize("call", FORMS, ids=str)
def test_forms(call, device):
    check(call, device)


@pytest.mark.parametrize("flag", [False, True])
def test_one_tensor_gives_the_same_bits(flag, device):
    c = Call(cols=96, rotary=64, interleaved=flag)
    q, k, (qw, kw), _, angles, _ = make(c, device)
    both = qk_norm_rope(q, k, qw, kw, *angles, **options(c))
    for y, x, weight in zip(both, (q, k), (qw, kw), strict=True):
        assert torch.equal(norm_rope(x, weight, *angles, **options(c)), y)


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


def test_bits_do_not_depend_on_the_batch_nor_on_gradients(device):
    c = Call(positions=37, batch=4, cols=128, statistic="layer", affine="both")
    made = make(c, device)
    whole = ours(c, made)
    again = ours(c, made)
    assert all(torch.equal(value, again[name]) for name, value in whole.items())
    q, k, weights, biases, angles, grads = made
    one = (q[2:3, 5:9], k[2:3, 5:9], weights, biases, tuple(t[5:9] for t in angles),
           tuple(g[2:3, 5:9] for g in grads))  # fmt: skip
    part = ours(replace(c, batch=1, positions=4), one)
    for name in ("q y", "k y", "q dx", "k dx"):
        assert torch.equal(part[name], whole[name][2:3, 5:9])
    with torch.no_grad():
        named = {"q_bias": biases[0], "k_bias": biases[1], **options(c)}
        found = qk_norm_rope(q, k, *weights, *angles, **named)
    assert torch.equal(found[0], whole["q y"])


def test_nothing_is_left_unwritten(device, poison):
    c = Call(cols=80, rotary=32, positions=65, layout="packed")
    made = make(c, device)
    expected = ours(c, made)
    poison(*expected.values(), *expected.values())
    for name, value in ours(c, made).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("shape", [(0, 3, 2, 8), (2, 0, 2, 8), (2, 3, 0, 8)])
def test_empty(shape, device):
    x: Any = torch.randn(shape, device=device, requires_grad=True)
    k = torch.randn((*shape[:2], 2, 8), device=device, requires_grad=True)
    w: Any = torch.ones(8, device=device, requires_grad=True)
    angle = torch.randn(shape[1], 4, device=device)
    y, z = qk_norm_rope(x, k, w, w, angle.cos(), angle.sin())
    (y.sum() + z.sum()).backward()
    assert y.shape == shape
    assert x.grad.shape == shape
    if k.numel() == 0:
        assert torch.equal(w.grad, torch.zeros_like(w))


def test_nan_and_inf_stay_in_their_row_and_outside_the_rotation(device):
    x = torch.randn(1, 4, 2, 32, device=device)
    x[0, 1, 0, 20] = float("inf")
    angle = torch.randn(4, 8, device=device)
    y = norm_rope(x, None, angle.cos(), angle.sin(), statistic=None, rotary_dim=16)
    assert y.isinf().sum() == 1
    assert not y.isnan().any()
    y = norm_rope(x, None, angle.cos(), angle.sin(), rotary_dim=16)
    assert y.isnan().any(-1).sum() == 1


@pytest.mark.parametrize("seq_dim", [1, 2])
@pytest.mark.parametrize("layout", ["packed", "heads first", "positions first"])
def test_results_have_the_order_of_memory(layout, seq_dim, device):
    c = Call(layout=layout, seq_dim=seq_dim)
    q, k, weights, _, angles, _ = make(c, device)
    found = qk_norm_rope(q, k, *weights, *angles, **options(c))
    for y, x in zip(found, (q, k), strict=True):
        assert y.stride() == torch.empty_like(x).stride()


def test_one_result_alone_has_a_gradient(device):
    c = Call(dtype=F32)
    made = make(c, device)
    expected = ours(c, made)
    q, k, weights, _, angles, grads = made
    for statistic in ("rms", None):
        for side in (0, 1):
            leaves: Any = [t.detach().requires_grad_() for t in (q, k, *weights)]
            given = leaves[2:] if statistic else [None, None]
            found = qk_norm_rope(*leaves[:2], *given, *angles, eps=c.eps, statistic=statistic)
            found[side].backward(grads[side])
            assert leaves[1 - side].grad is None
            if statistic:
                assert torch.equal(leaves[side].grad, expected[f"{'qk'[side]} dx"])
                assert leaves[3 - side].grad is None


@pytest.mark.parametrize("interleaved", [False, True])
def test_derivatives_of_all_orders(interleaved):
    c = Call(dtype=F64, cols=6, rotary=4, positions=2, batch=1, q_heads=2, k_heads=1,
             statistic="layer", affine="both", interleaved=interleaved, eps=1e-3)  # fmt: skip
    q, k, weights, biases, angles, _ = make(c, "cpu")
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, *weights, *biases, *angles)]

    def run(q, k, qw, kw, qb, kb, cos, sin):
        return qk_norm_rope(q, k, qw, kw, cos, sin, q_bias=qb, k_bias=kb, **options(c))

    leaves[6:] = [t.detach().double().requires_grad_() for t in leaves[6:]]
    assert gradcheck(run, leaves, check_forward_ad=True)
    assert gradgradcheck(run, leaves)
    leaves[6:] = [t.detach() for t in leaves[6:]]

    def by_operator(*tensors):
        return heads.qk_norm_rope(*tensors, 4, 1, 1e-3, "layer", 0.0, False, interleaved, False)

    assert gradcheck(by_operator, leaves)
    assert gradgradcheck(by_operator, leaves)


def test_double_backward_of_the_kernels(device):
    c = Call(dtype=F32, cols=32, positions=3)
    q, k, weights, _, (cos, sin), _ = make(c, device)

    def second(*tensors):
        q, k, *weights = (t.detach().requires_grad_() for t in tensors)
        y = qk_norm_rope(q, k, *weights, cos.to(q.dtype), sin.to(q.dtype), eps=c.eps)
        (g,) = torch.autograd.grad(y[0].square().sum(), q, create_graph=True)
        return torch.autograd.grad(g.square().sum(), (q, weights[0]))

    found = second(q, k, *weights)
    expected = second(*(t.double() for t in (q, k, *weights)))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-3)


def test_opcheck(device):
    for statistic, affine in (("rms", "weight"), ("layer", "both"), (None, "none")):
        c = Call(statistic=statistic, affine=affine, dtype=F32, layout="packed", seq_dim=2)
        q, k, weights, biases, angles, grads = make(c, device)
        q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
        tensors = (q, k, *weights, *biases, *angles)
        options = (c.cols, 2, 1e-6, statistic, 0.0, False, False)
        utils = numerics.EVERY if statistic == "rms" else numerics.QUICK
        opcheck(heads.qk_norm_rope, (*tensors, *options, False), test_utils=utils)
        if statistic:
            args = (*grads, *tensors, *options, True, True)
            opcheck(heads.qk_norm_rope_backward, args, test_utils=utils)


@pytest.mark.parametrize("statistic", ["rms", None])
def test_vmap(statistic, device):
    c = Call(dtype=F32, statistic=statistic, affine="weight" if statistic else "none", batch=3)
    q, k, weights, _, angles, _ = make(c, device)

    def run(q, k, qw, kw):
        return qk_norm_rope(q[None], k[None], qw, kw, *angles, **options(c))

    expected = qk_norm_rope(q, k, *weights, *angles, **options(c))
    found = torch.vmap(run, in_dims=(0, 0, None, None))(q, k, *weights)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.squeeze(1), b)
    if statistic:
        many = [torch.stack([w, 2 * w, -w]) for w in weights]
        found = torch.vmap(run, in_dims=(0, 0, 0, 0))(q, k, *many)
        assert torch.equal(found[0][0, 0], expected[0][0])
        loss = torch.func.grad(lambda *a: run(*a)[0].square().sum(), argnums=(0, 2))
        _dq, dw = torch.vmap(loss, in_dims=(0, 0, None, None))(q, k, *weights)
        assert dw.shape == (3, c.cols)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_and_export(dynamic, device):
    c = Call(dtype=F32, layout="packed")
    q, k, weights, _, angles, _ = make(c, device)

    class Module(torch.nn.Module):
        def forward(self, q, k, cos, sin):
            return qk_norm_rope(q, k, *weights, cos, sin, eps=c.eps)

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

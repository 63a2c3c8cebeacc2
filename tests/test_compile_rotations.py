# SPDX-License-Identifier: Apache-2.0
"""The graph pass finds rotations of q and k, with the norms in front, and leaves near misses."""

import copy

import pytest
import torch
import torch.nn.functional as F
from compiling import EAGER, afresh, everywhere  # noqa: F401

import fused_layernorm

pytestmark = pytest.mark.usefixtures("everywhere")


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def angles(x, angle, dim=1):
    """cos and sin as a model's rotary embedding gives them."""
    twice = torch.cat((angle, angle), dim=-1)
    cos, sin = twice.cos() * 1.0, twice.sin() * 1.0
    return cos.to(x.dtype).unsqueeze(dim), sin.to(x.dtype).unsqueeze(dim)


def rotated(q, k, angle):
    cos, sin = angles(q, angle)
    return q * cos + rotate_half(q) * sin, (k * cos) + (rotate_half(k) * sin)


def normalized(q, k, weight, angle):
    """As Qwen3: the norms come before the transposition."""
    q, k = (F.rms_norm(x, (8,), weight, 1e-6).transpose(1, 2) for x in (q, k))
    return rotated(q, k, angle)


def positions_first(q, k, angle):
    cos, sin = angles(q, angle, 2)
    return sin * rotate_half(q) + cos * q, k * cos + rotate_half(k) * sin


def tensors(device, dtype=torch.float32, heads_first=True):
    torch.manual_seed(0)
    q, k = torch.randn(2, 5, 4, 8, device=device), torch.randn(2, 5, 2, 8, device=device)
    if heads_first:
        q, k = (x.transpose(1, 2) for x in (q, k))
    angle = torch.randn(1, 5, 4, device=device)
    return q.to(dtype).requires_grad_(), k.to(dtype).requires_grad_(), angle


def check(f, *args, expected, atol=1e-6):
    """Results, gradients, and what is said of the rotations: what was fused, or why it was left."""
    leaves = [a for a in args if a.requires_grad]
    stock = f(*args)
    found = torch.compile(f, backend="fused_layernorm", fullgraph=True, options=EAGER)(*args)
    grads = [torch.randn_like(y) for y in stock]
    results = (*found, *torch.autograd.grad(found, leaves, grads))
    wanted = (*stock, *torch.autograd.grad(stock, leaves, grads))
    torch.testing.assert_close(results, wanted, rtol=1e-5, atol=atol)
    assert [y.stride() for y in found] == [y.stride() for y in stock]
    rows = fused_layernorm.explain(f, *args, then="eager").rows
    rows = [row for row in rows if row.form == "rotation"]
    assert [row.fused or row.notes for row in rows] == expected
    assert all((row.operator == "qk_norm_rope") == bool(row.fused) for row in rows)


def test_rotation(device):
    check(rotated, *tensors(device), expected=[["k"]])
    check(positions_first, *tensors(device, heads_first=False), expected=[["k"]])
    check(rotated, *tensors(device, torch.bfloat16), expected=[["k"]], atol=0.05)


def test_norm_and_rotation(device):
    q, k, angle = tensors(device, heads_first=False)
    weight = torch.ones(8, device=device, requires_grad=True)
    check(normalized, q, k, weight, angle, expected=[["norm", "k"]], atol=1e-5)


def test_float32_angles_and_a_cast(device):
    """OLMo 2's order, which is that of the operator."""
    q, k, angle = tensors(device, torch.bfloat16)

    def f(q, k, angle):
        y, z = rotated(q, k, angle)
        return y.to(q.dtype), z.to(k.dtype)

    def in_float32(q, k, angle):
        twice = torch.cat((angle, angle), dim=-1).unsqueeze(1)
        cos, sin = twice.cos(), twice.sin()
        y, z = (x * cos + rotate_half(x) * sin for x in (q, k))
        return y.to(q.dtype), z.to(k.dtype)

    check(f, q, k, angle, expected=[["k"]], atol=0.05)
    check(in_float32, q, k, angle, expected=[["k"]], atol=0.02)
    with torch.no_grad():
        y = in_float32(q, k, angle)[0]
        compiled = torch.compile(in_float32, backend="fused_layernorm", options=EAGER)
        assert (compiled(q, k, angle)[0] == y).float().mean() > 0.99


def test_what_is_left(device):
    q, k, angle = tensors(device)

    def given(q, k, cos, sin):  # nothing says that cos and sin have each value twice
        return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin

    cos, sin = (torch.randn(1, 1, 5, 8, device=device) for _ in range(2))
    check(given, q, k, cos, sin, expected=[])

    def other_halves(q, k, angle):
        twice = torch.cat((angle, angle * 2), dim=-1).unsqueeze(1)
        return q * twice.cos() + rotate_half(q) * twice.sin(), k

    check(other_halves, q, k, angle, expected=[])

    def turned(x, half, angle):
        cos, sin = angles(x, angle)
        return x * cos + half * sin

    def other_sign(q, k, angle):
        return turned(q, torch.cat((q[..., 4:], -q[..., :4]), -1), angle), k

    def other_tensor(q, k, angle):
        return turned(q, rotate_half(2 * q), angle), k

    def written(q, k, angle):
        x = q * 2
        return turned(x, rotate_half(x), angle).mul_(2), k

    def real_factors(q, k, angle):
        pairs = torch.view_as_complex(q.reshape(*q.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * angle.cos().unsqueeze(1)).flatten(3), k

    check(other_sign, q, k, angle, expected=[])
    check(other_tensor, q, k, angle, expected=[])
    check(real_factors, q, k, angle, expected=[])
    check(written, q, k, angle, expected=[["a part of it is written into"]])
    check(rotated, q, k, angle.clone().requires_grad_(), expected=[])


def test_a_norm_that_is_used_elsewhere_stays(device):
    q, k, angle = tensors(device)

    def f(q, k, angle):
        q = F.rms_norm(q, (8,), None, 1e-6)
        return *rotated(q, k, angle), q

    check(f, q, k, angle, expected=[["k"]])


def test_keys_behind_the_first_rotation(device):
    """k is computed from q's rotation: each has an operator of its own."""
    q, k, angle = tensors(device)

    def f(q, k, angle):
        cos, sin = angles(q, angle)
        q = q * cos + rotate_half(q) * sin
        k = k + q.mean()
        return q, k * cos + rotate_half(k) * sin

    rows = fused_layernorm.explain(f, q, k, angle, then="eager").rows
    assert [(row.operator, row.fused) for row in rows] == [("qk_norm_rope", [])] * 2


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma3Text", "Olmo2"])
def test_models(name, device):
    pytest.importorskip("transformers")
    import test_swap_rotations

    model = test_swap_rotations.make(name, device)
    stock = test_swap_rotations.run(copy.deepcopy(model))
    model.compile(backend="fused_layernorm", options=EAGER)
    torch.testing.assert_close(test_swap_rotations.run(model), stock, rtol=2e-4, atol=1e-5)
    ids = torch.randint(3, 50, (2, 9)).to(device)
    text = str(fused_layernorm.explain(test_swap_rotations.make(name, device), ids))
    assert "; 2 rotations, 2 replaced" in text
    assert ("norm, k" in text) == (name in ("Qwen3", "Gemma3Text"))


def embedding(angle, interleaved):
    """cos and sin of all columns, of (S, D), as diffusers' models compute them in parts."""
    if not interleaved:
        twice = torch.cat((angle, angle), dim=-1)
        return twice.cos(), twice.sin()
    parts = angle.split([1, 3], dim=-1)
    cos, sin = ([f(part).repeat_interleave(2, dim=1).float() for part in parts]
                for f in (torch.cos, torch.sin))  # fmt: skip
    return torch.cat(cos, dim=-1), torch.cat(sin, dim=-1)


def of_flux(x, cos_and_sin, unbind_dim=-1):
    from diffusers.models.embeddings import apply_rotary_emb

    return apply_rotary_emb(x, cos_and_sin, use_real_unbind_dim=unbind_dim, sequence_dim=1)


def of_cogview(x, cos_and_sin):
    return of_flux(x, cos_and_sin, -2)


def of_qwen_image(x, freqs):
    from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen

    return apply_rotary_emb_qwen(x, freqs, use_real=False)


def of_wan(x, cos_and_sin):
    """As the function inside of diffusers' WanAttnProcessor."""
    freqs_cos, freqs_sin = (t[None, :, None] for t in cos_and_sin)
    x1, x2 = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos = freqs_cos[..., 0::2]
    sin = freqs_sin[..., 1::2]
    out = torch.empty_like(x)
    out[..., 0::2] = x1 * cos - x2 * sin
    out[..., 1::2] = x1 * sin + x2 * cos
    return out.type_as(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rotate", [of_flux, of_cogview, of_qwen_image, of_wan])
def test_forms_of_diffusers(device, rotate, dtype):
    pytest.importorskip("diffusers")
    q, k, angle = tensors(device, dtype, heads_first=False)
    weight = torch.ones(8, device=device, dtype=dtype, requires_grad=True)
    atol = 0.05 if dtype == torch.bfloat16 else 1e-5

    def without_norms(q, k, angle):
        if rotate is of_qwen_image:
            angles = torch.polar(torch.ones_like(angle), angle)
        else:
            angles = embedding(angle, rotate is not of_cogview)
        return rotate(q, angles), rotate(k, angles)

    def normalized(q, k, weight, angle):
        q, k = (F.rms_norm(x, (8,), weight, 1e-6) for x in (q, k))
        return without_norms(q, k, angle)

    check(without_norms, q, k, angle[0], expected=[["k"]], atol=atol)
    # One ulp of weight's gradient is 0.0625 in bfloat16.
    check(normalized, q, k, weight, angle[0], expected=[["norm", "k"]], atol=2 * atol)


@pytest.mark.parametrize(("name", "count"), [("flux", 4), ("wan", 2)])
def test_models_of_diffusers(name, count, device):
    pytest.importorskip("diffusers")
    import tiny_diffusers

    model, inputs = getattr(tiny_diffusers, name)()
    model, inputs = model.to(device), {key: value.to(device) for key, value in inputs.items()}
    text = str(fused_layernorm.explain(model, then="eager", **inputs))
    assert f"; {count} rotations, {count} replaced" in text
    assert ("norm, k" in text) == (name == "flux")  # Wan normalizes all heads together
    compiled = torch.compile(model, backend="fused_layernorm", options=EAGER)
    with torch.no_grad():
        torch.testing.assert_close(compiled(**inputs)[0], model(**inputs)[0], rtol=1e-4, atol=1e-5)


def test_pairs_that_are_written_otherwise_stay(device):
    q, k, angle = tensors(device, heads_first=False)

    def read_between(x, cos, sin):
        x1, x2 = x.unflatten(-1, (-1, 2)).unbind(-1)
        out = torch.empty_like(x)
        out[..., 0::2] = x1 * cos - x2 * sin
        seen = out[..., 0::2] * 1
        out[..., 1::2] = x1 * sin + x2 * cos
        return out, seen

    def other_sign(x, cos, sin):
        x1, x2 = x.unflatten(-1, (-1, 2)).unbind(-1)
        out = torch.empty_like(x)
        out[..., 0::2] = x1 * cos + x2 * sin
        out[..., 1::2] = x1 * sin + x2 * cos
        return out, k

    def written_again(x, cos, sin):
        out = of_wan(x, (cos[:, 0], sin[:, 0]))
        out[..., 0] = 0
        return out, k

    cos, sin = (t[:, None] for t in embedding(angle[0], True))
    once = cos[..., ::2], sin[..., ::2]
    check(read_between, q, *once, expected=[])
    check(other_sign, q, *once, expected=[])
    check(written_again, q, cos, sin, expected=[["a part of it is written into"]])

    def rounded_between(x, angle):
        cos, sin = embedding(angle, False)
        rounded = x.bfloat16().float()
        return rounded * cos[:, None] + rotate_half(x) * sin[:, None], k

    check(rounded_between, q, angle[0], expected=[])

    def pairs_by_angles_of_halves(x, angle):
        x_real, x_imag = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
        cos, sin = (t[None, :, None, :] for t in embedding(angle, False))
        return x * cos + torch.stack([-x_imag, x_real], dim=-1).flatten(3) * sin, k

    check(pairs_by_angles_of_halves, q, angle[0], expected=[])

# SPDX-License-Identifier: Apache-2.0
"""swap_norms(model, neighbours=True): tiny models of transformers before and after."""

import copy
import importlib
from typing import Any

import libraries
import pytest
import torch
import torch.nn.functional as F
from forms import Names
from swaps import copies, give_own_class, results
from tiny_transformers import decoder
from torch import nn

import fused_layernorm
from fused_layernorm import stock, swap_norms, unswap_norms
from fused_layernorm.swap import heads as swap_heads

libraries.get("transformers")  # or all tests here are skipped

# Of a model: whether norms of heads are part of the kernel, or cut q, k and v out of one tensor.
MODELS = {"Llama": False, "Qwen3": True, "Gemma3": True, "Olmo2": False, "Phi3": "one tensor",
          "GPTNeoX": "one tensor", "Glm": False, "Cohere": False}  # fmt: skip


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """The calls of the kernel by swapped modules: whether each had weights, or one tensor."""
    found: list[Any] = []
    run, run_packed = fused_layernorm.qk_norm_rope, fused_layernorm.qkv_norm_rope

    def counted(*args, **options):
        found.append(args[2] is not None)
        return run(*args, **options)

    def counted_packed(*args, **options):
        found.append("one tensor")
        return run_packed(*args, **options)

    monkeypatch.setattr(stock, "_cpu_operators", True)
    monkeypatch.setattr(swap_heads, "qkv_norm_rope", counted_packed)
    monkeypatch.setattr(swap_heads, "qk_norm_rope", counted)
    return found


def make(name, device="cpu", dtype=torch.float32):
    torch.manual_seed(0)
    model = decoder(name, "Gemma3TextConfig" if name == "Gemma3" else None)[0].eval()
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    return model.to(device, dtype)


def run(model):
    """Logits and gradients."""
    model.zero_grad()
    torch.manual_seed(1)
    ids = torch.randint(3, 50, (2, 9)).to(model.device)
    out = model(ids, labels=ids)
    out.loss.backward()
    return [out.logits.detach(), *(p.grad.clone() for p in model.parameters())]


def rotating(model):
    return [m for m in model.modules() if getattr(type(m), "_rotation", None) is not None]


@pytest.mark.parametrize("name", MODELS)
def test_models(name, device, calls):
    model = make(name, device)
    stock = run(model)
    assert not rotating(swap_norms(model))  # which are asked for
    swap_norms(model, neighbours=True)
    assert len(rotating(model)) == 2
    torch.testing.assert_close(run(model), stock, rtol=2e-4, atol=1e-5)
    assert calls == [MODELS[name]] * 2
    for other in copies(model):
        assert len(rotating(other)) == 2
        assert torch.equal(run(other)[0], run(model)[0])
    unswap_norms(model)
    assert not rotating(model)
    assert all(map(torch.equal, run(model), stock))


def test_generation_with_a_cache_is_the_same(device):
    model = make("Qwen3", device)
    ids = torch.randint(3, 50, (2, 5)).to(device)
    options = {"max_new_tokens": 6, "do_sample": False}
    stock = model.generate(ids, **options)
    assert torch.equal(swap_norms(model, neighbours=True).generate(ids, **options), stock)


def test_what_the_kernel_does_not_take_runs_as_before(calls):
    model = make("Qwen3").double()  # these norms compute in float32
    stock = run(model)
    swap_norms(model, neighbours=True)
    assert all(map(torch.equal, run(model), stock))
    assert calls == []
    model = make("Qwen3")
    swap_norms(model, neighbours=True)
    seen = []
    for layer in model.model.layers:
        layer.self_attn.q_norm.register_forward_hook(lambda _, x, y: seen.append(x[0].shape[:2]))
    torch.testing.assert_close(run(model), run(make("Qwen3")), rtol=2e-4, atol=1e-5)
    # A hook of a norm still runs, on what it has in the stock model; the rotation alone is fused.
    assert seen == [(2, 9), (2, 9)]
    assert calls == [False, False]


def test_an_unknown_source_is_left(caplog, monkeypatch):
    monkeypatch.setattr(swap_heads, "SOURCES", {})
    caplog.set_level("INFO", "fused_layernorm.swap")
    model = swap_norms(make("Llama"), neighbours=True)
    assert not rotating(model)
    assert "the source of its apply_rotary_pos_emb is not one" in caplog.text


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Phi3"])
@pytest.mark.parametrize("what", ["forward", "function"])
def test_what_somebody_replaces_counts(name, what, device, monkeypatch, calls):
    """For models that were swapped before and after, as for the stock one; until it is undone."""
    stem = name.lower()
    file = importlib.import_module(f"transformers.models.{stem}.modeling_{stem}")
    attention = getattr(file, f"{name}Attention")
    early = swap_norms(make(name, device), neighbours=True)
    with monkeypatch.context() as patch:
        if what == "forward":
            forward = attention.forward

            def doubled(self, *args, **kwargs):
                output, *others = forward(self, *args, **kwargs)
                return 2 * output, *others

            patch.setattr(attention, "forward", doubled)
        else:
            rotation = file.apply_rotary_pos_emb
            patch.setattr(file, "apply_rotary_pos_emb", lambda q, *args: rotation(2 * q, *args))
        replaced = run(make(name, device))
        late = swap_norms(make(name, device), neighbours=True)
        for model in (early, late):
            torch.testing.assert_close(run(model), replaced, rtol=2e-4, atol=1e-5)
        assert calls == []
    stock = run(make(name, device))
    assert not torch.allclose(stock[0], replaced[0], rtol=1e-2)
    for model in (early, late):
        torch.testing.assert_close(run(model), stock, rtol=2e-4, atol=1e-5)
    assert len(calls) == 2  # those of the early model


def test_a_norm_that_was_given_another_class_is_called(device, calls):
    stock = make("Qwen3", device)
    new = swap_norms(copy.deepcopy(stock), neighbours=True)
    for model in (stock, new):
        for layer in model.model.layers:
            give_own_class(layer.self_attn.q_norm)
    torch.testing.assert_close(run(new), run(stock), rtol=2e-4, atol=1e-5)
    assert set(calls) == {False}  # the rotation alone


ATTENTION = """
import torch
from torch import nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = Qwen3RMSNorm(16), Qwen3RMSNorm(16)

    def forward(self, q, k, cos, sin):
        q = self.q_norm(q).transpose(1, 2)
        {between}
        k = self.k_norm(k).transpose(1, 2)
        {behind}
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q, k
"""


STATEMENTS = """
if self.q_norm is not None: q = q.clamp(-0.5, 0.5)
if cos is not None: q = q.clamp(-0.5, 0.5)
for _ in range(2): q = 2 * q
with torch.enable_grad(): q = 2 * q
q *= 2
q, sin = 2 * q, sin
q[..., 0] = 1
q.mul_(2)
q: torch.Tensor = 2 * q
scale = (q := 2 * q)
scale = [q.mul_(2)]
"""


@pytest.mark.parametrize("place", ["between", "behind"])
@pytest.mark.parametrize("statement", ["scale = 2", *STATEMENTS.strip().splitlines()])
def test_a_norm_is_moved_over_nothing(statement, place, tmp_path, monkeypatch):
    """Only where each statement between the norms and the rotation is known to leave q and k."""
    places = {"between": "scale = 2", "behind": "scale = 2", place: statement}
    name = f"attention_{abs(hash((statement, place)))}"
    (tmp_path / f"{name}.py").write_text(ATTENTION.format(**places))
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(name).Attention()
    for norm in module.children():
        nn.init.normal_(norm.weight)
    angles = torch.randn(1, 5, 8).repeat(1, 1, 2)
    inputs = [torch.randn(2, 5, heads, 16) for heads in (4, 2)]
    inputs += [angles.cos(), angles.sin()]
    expected = module(*inputs)
    swapped = swap_norms(nn.Sequential(module), neighbours=True)[0]
    assert getattr(swapped, "_norms", False) is (statement == "scale = 2")
    torch.testing.assert_close(swapped(*inputs), expected)


@pytest.mark.on_cpu
def test_compiled():
    model = make("Qwen3")
    ids = torch.randint(3, 50, (2, 9))
    expected = model(ids, use_cache=False).logits
    swap_norms(model, neighbours=True)
    found = torch.compile(model, backend="aot_eager")(ids, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=1e-5)


# ---- q, k and v of one projection.


class OfTimm(nn.Module):
    """Attention as timm writes it."""

    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        self.num_heads, self.head_dim = 3, 16
        self.qkv = nn.Linear(48, 144)
        self.q_norm, self.k_norm = norm(16), norm(16)

    def forward(self, x):
        B, N, _ = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


class WritesIntoV(OfTimm):
    def forward(self, x):
        B, N, _ = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k = qkv[0], qkv[1]
        v = qkv[2]
        q, k = self.q_norm(q), self.k_norm(k)
        v *= 2
        return (q + k + v).transpose(1, 2).flatten(2)


class OtherV(OfTimm):
    def forward(self, x):
        B, N, _ = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, v, k = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        return (q + k * v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("compiled", [False, True])
def test_norms_of_one_projection(device, calls, compiled):
    model: Any = nn.Sequential(OfTimm()).to(device)
    x = torch.randn(2, 5, 48, device=device)
    for norm in (model[0].q_norm, model[0].k_norm):
        norm.weight.data += torch.randn_like(norm.weight) / 3
        norm.bias.data += torch.randn_like(norm.bias)
    expected = results(model, x)
    swap_norms(model, neighbours=True)
    torch._dynamo.reset()
    one: Any = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    torch.testing.assert_close(results(one, x), expected, rtol=1e-4, atol=1e-5)
    assert calls == ["one tensor"]
    for other in copies(model):
        torch.testing.assert_close(results(other, x), expected, rtol=1e-4, atol=1e-5)
    assert len(calls) > 1
    calls.clear()
    with torch.no_grad():
        model(x)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        model(x)
    handle = model[0].q_norm.register_forward_hook(lambda *_: None)
    model(x)
    handle.remove()
    assert not calls
    unswap_norms(model)
    assert type(model[0]) is OfTimm
    torch.testing.assert_close(results(model, x), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("cls", "norm"), [(WritesIntoV, nn.LayerNorm), (OtherV, nn.LayerNorm), (OfTimm, nn.Identity)]
)
def test_projections_that_are_left(cls, norm, calls, device):
    model, x = cls(norm).to(device), torch.randn(2, 5, 48, device=device)
    holder = nn.ModuleList([model, nn.LayerNorm(4)])
    expected = model(x)
    swap_norms(holder, neighbours=True)
    torch.testing.assert_close(model(x), expected)
    assert not calls
    assert (type(model) is cls) == (cls is WritesIntoV or norm is nn.Identity)


@pytest.mark.parametrize("norm", ["LayerNorm", "RmsNorm"])
def test_attention_of_timm(norm, device, calls):
    layers = libraries.get("timm").layers
    cls, norm_layer = layers.Attention, getattr(layers, norm)
    model = nn.Sequential(cls(48, 3, qk_norm=True, norm_layer=norm_layer)).to(device)
    x = torch.randn(2, 5, 48, device=device)
    expected = results(model, x)
    found = results(swap_norms(model, neighbours=True), x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert calls == ["one tensor"]


@pytest.mark.parametrize("name", ["Phi3", "GPTNeoX"])
def test_one_gradient_of_a_projection(name, device):
    """Without a zeroed tensor for each of q, k and v."""
    model = swap_norms(make(name, device, torch.bfloat16), neighbours=True)
    ids = torch.randint(3, 50, (2, 9)).to(device)
    loss = model(ids, labels=ids).loss
    with Names() as seen:
        loss.backward()
    assert seen.names.count("fused_layernorm.qkv_norm_rope_backward.default") == 2
    assert "split_with_sizes_backward" not in " ".join(seen.names)

# SPDX-License-Identifier: Apache-2.0
"""swap_norms(model, neighbours=True): tiny models of transformers before and after."""

import copy
import importlib
from typing import Any

import libraries
import pytest
import torch
from swaps import copies, fused
from torch import nn

import fused_layernorm
from fused_layernorm import stock, swap_norms, unswap_norms
from fused_layernorm.swap import rotations as swap_rotations

transformers = libraries.get("transformers")

# Of a model: its class, options of its config, and whether norms of heads are part of the kernel,
# or which cut q, k and v out of one tensor.
MODELS = {
    "Llama": ("LlamaForCausalLM", {}, False),
    "Qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}, True),
    "Gemma3Text": ("Gemma3ForCausalLM", {"head_dim": 16}, True),
    "Olmo2": ("Olmo2ForCausalLM", {}, False),
    "Phi3": ("Phi3ForCausalLM", {}, "one tensor"),
    "GPTNeoX": ("GPTNeoXForCausalLM", {}, "one tensor"),
    "Glm": ("GlmForCausalLM", {"head_dim": 8}, False),
    "Cohere": ("CohereForCausalLM", {}, False),
}
SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


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
    monkeypatch.setattr(swap_rotations, "qkv_norm_rope", counted_packed)
    monkeypatch.setattr(swap_rotations, "qk_norm_rope", counted)
    return found


def make(name, device="cpu", dtype=torch.float32):
    cls, options, _ = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **options})
    model = getattr(transformers, cls)(config).eval()
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
    return [m for m in model.modules() if hasattr(type(m), "_rotation")]


@pytest.mark.parametrize("name", MODELS)
def test_models(name, device, calls):
    model = make(name, device)
    stock = run(model)
    swap_norms(model, neighbours=True)
    assert len(rotating(model)) == 2
    torch.testing.assert_close(run(model), stock, rtol=2e-4, atol=1e-5)
    assert calls == [MODELS[name][2]] * 2
    for other in copies(model):
        assert len(rotating(other)) == 2
        assert torch.equal(run(other)[0], run(model)[0])
    unswap_norms(model)
    assert not rotating(model)
    assert all(map(torch.equal, run(model), stock))


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_half_precision_is_nearer_to_float32(name, device):
    model = make(name, device, torch.bfloat16)
    exact = run(copy.deepcopy(model).float())[0]
    stock = run(model)[0]
    found = run(swap_norms(model, neighbours=True))[0]
    errors = [(logits - exact).square().mean() for logits in (found, stock)]
    assert errors[0] <= 1.1 * errors[1]


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
        layer.self_attn.q_norm.register_forward_hook(lambda *args: seen.append(1))
    torch.testing.assert_close(run(model), run(make("Qwen3")), rtol=2e-4, atol=1e-5)
    assert len(seen) == 2  # a hook of a norm still runs; the rotation alone is fused
    assert calls == [False, False]


def test_rotations_are_asked_for(device):
    model = make("Llama", device)
    stock = run(model)
    swap_norms(model)
    assert not rotating(model)
    assert len(fused(model)) == 5
    torch.testing.assert_close(run(model), stock, rtol=2e-4, atol=1e-5)


def test_an_unknown_source_is_left(caplog, monkeypatch):
    monkeypatch.setattr(swap_rotations, "SOURCES", {})
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


@pytest.mark.parametrize("place", ["between", "behind"])
@pytest.mark.parametrize(
    ("statement", "is_understood"),
    [
        ("scale = 2", True),
        ("if self.q_norm is not None: q = q.clamp(-0.5, 0.5)", False),
        ("if cos is not None: q = q.clamp(-0.5, 0.5)", False),
        ("for _ in range(2): q = 2 * q", False),
        ("with torch.enable_grad(): q = 2 * q", False),
        ("q *= 2", False),
        ("q, sin = 2 * q, sin", False),
        ("q[..., 0] = 1", False),
        ("q.mul_(2)", False),
        ("q: torch.Tensor = 2 * q", False),
        ("scale = (q := 2 * q)", False),
        ("scale = [q.mul_(2)]", False),
    ],
)
def test_a_norm_is_moved_over_nothing(statement, is_understood, place, tmp_path, monkeypatch):
    """Only where each statement between the norms and the rotation is known to leave q and k."""
    places = {"between": "pass", "behind": "pass", place: statement}
    if is_understood:
        places = dict.fromkeys(places, statement)
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
    assert getattr(swapped, "_norms", False) is is_understood
    torch.testing.assert_close(swapped(*inputs), expected)


@pytest.mark.on_cpu
def test_compiled():
    model = make("Qwen3")
    ids = torch.randint(3, 50, (2, 9))
    expected = model(ids, use_cache=False).logits
    swap_norms(model, neighbours=True)
    found = torch.compile(model, backend="aot_eager")(ids, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=1e-5)

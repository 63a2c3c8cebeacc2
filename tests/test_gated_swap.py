# SPDX-License-Identifier: Apache-2.0
"""The gated RMSNorms of transformers: a model, and what the graph pass makes of them. What a
swapped one computes is in test_swapped_classes.py.
"""

import copy
from typing import Any

import libraries
import pytest
import torch
from captured import operators_of, run
from compiling import afresh, everywhere  # noqa: F401
from swaps import assert_same_roundings, swapped
from tiny_transformers import SMALL, tokens
from torch import nn

from fused_layernorm import swap_norms

F32, BF16 = torch.float32, torch.bfloat16
SIZE = 128

# By class: its model, and its arguments beside the size.
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3NextRMSNormGated": ("qwen3_next", {}),
    "Qwen4ExpTextRMSNormGated": ("qwen4_exp", {"activation": "sigmoid"}),
    "MambaRMSNormGated": ("mamba2", {"group_size": 32}),
    "FalconH1RMSNormGated": ("falcon_h1", {"n_groups": 4, "norm_before_gate": False}),
}


def make(name, device="cpu", size=SIZE):
    model, options = CLASSES[name]
    cls = libraries.class_of(f"transformers.models.{model}.modeling_{model}", name)
    release = libraries.get("transformers").__version__
    if tuple(map(int, release.split(".")[:2])) < (5, 20):
        pytest.skip("the classes have other arguments and sources")
    norm = cls(size, **options).to(device)
    nn.init.normal_(norm.weight, 0.5, 1.0)
    return norm


def of_projection(device, dtype, *shape):
    """x and a gate that is cut out of a projection, as models make it."""
    x = torch.randn(*shape, device=device).to(dtype)
    wide = torch.randn(*shape[:-1], 3 * shape[-1], device=device).to(dtype)
    return x, wide[..., shape[-1] : 2 * shape[-1]]


@pytest.mark.cpu_operators
@pytest.mark.parametrize("name", ["Qwen3NextRMSNormGated", "MambaRMSNormGated"])
def test_gates_that_only_the_class_takes(name, device):
    norm = make(name, device)
    new = swapped(norm)
    x = torch.randn(4, SIZE, device=device)
    for gate in (x[:1], x[0], torch.randint(9, x.shape, device=device), x.double()):
        assert torch.allclose(new(x, gate), norm(x, gate), rtol=1e-5, atol=1e-6)
    for bad in (x[:, :3], "gate"):
        for module in (norm, new):
            with pytest.raises((RuntimeError, AttributeError)):
                module(x, bad)


def hybrid():
    transformers = libraries.get("transformers")
    return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(
        vocab_size=50, num_key_value_heads=1, head_dim=16, linear_key_head_dim=8,
        linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
        mlp_only_layers=[0, 1], layer_types=["linear_attention", "full_attention"],
        **SMALL))  # fmt: skip


@pytest.mark.cpu_operators
def test_a_model(device):
    stock, inputs = hybrid().to(device), {n: t.to(device) for n, t in tokens().items()}
    model = swap_norms(copy.deepcopy(stock))
    losses = []
    for one in (stock, model):
        with torch.profiler.profile() as profile:
            loss = one(**inputs).loss
            loss.backward()
        losses.append(loss.detach())
    # On CUDA the kernels: autograd in C++ calls them past the dispatcher, which names operators.
    operator = "fused_layernorm::rms_norm_gated_backward"
    called = "gated_backward_kernel" if device == "cuda" else operator
    assert sum(called in event.name for event in profile.events()) == 1
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(model.parameters(), stock.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4)


# ---- The graph pass.


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("name", CLASSES)
def test_the_graph_pass_leaves_the_gate(name):
    for weight_dtype in (BF16, F32):
        norm = make(name).to(weight_dtype)
        x, gate = of_projection("cpu", BF16, 2, 16, SIZE)
        torch._dynamo.reset()
        y, rows, graphs = run(norm, x, gate)
        assert operators_of(graphs[0]) == ["layer_norm"] == [row.operator for row in rows]
        assert_same_roundings(y, norm(x, gate))

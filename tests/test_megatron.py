# SPDX-License-Identifier: Apache-2.0
"""fused_layernorm.megatron: the interface of Megatron-LM's norm slots."""

import copy
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from forms import Names
from torch import nn
from torch.testing import assert_close

import fused_layernorm
from fused_layernorm.megatron import FusedLayerNorm, FusedNorm, FusedRMSNorm

HIDDEN = 48


@dataclass
class Config:
    """The fields of Megatron's TransformerConfig that a norm may read."""

    hidden_size: int = HIDDEN
    layernorm_epsilon: float = 1e-5
    normalization: str = "LayerNorm"
    layernorm_zero_centered_gamma: bool = False
    sequence_parallel: bool = False
    persist_layer_norm: bool = True
    memory_efficient_layer_norm: bool = False


def build(normalization="LayerNorm", zero_centered=False, **options):
    """Builds a norm as a slot does, with these three keywords."""
    config = Config(
        normalization=normalization, layernorm_zero_centered_gamma=zero_centered, **options
    )
    return FusedNorm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)


def randomize(norm):
    with torch.no_grad():
        norm.weight.normal_(1 - norm.weight_offset, 0.3)
        if norm.bias is not None:
            norm.bias.normal_(0, 0.3)
    return norm


STOCK: dict[str, Any] = {"LayerNorm": nn.functional.layer_norm, "RMSNorm": nn.functional.rms_norm}
NORMALIZATIONS = pytest.mark.parametrize("normalization", STOCK)
ZERO_CENTERED = pytest.mark.parametrize("zero_centered", [False, True])


@NORMALIZATIONS
def test_is_a_norm_of_the_package(normalization):
    norm = build(normalization)
    cls = {"LayerNorm": FusedLayerNorm, "RMSNorm": FusedRMSNorm}[normalization]
    assert fused_layernorm.swap_norms(nn.Sequential(norm))[0] is norm
    assert type(norm) is cls
    assert issubclass(cls, getattr(fused_layernorm, cls.__name__))
    assert issubclass(cls, getattr(nn, normalization))
    assert [*norm.state_dict()] == ["weight", "bias"][: 1 + (cls is FusedLayerNorm)]
    assert norm.eps == 1e-5
    of_megatron = FusedNorm(
        Config(normalization=normalization), (4, 6), 1e-6, True, False, normalization
    )
    assert of_megatron.eps == 1e-6
    x = torch.randn(3, 4, 6)
    assert_close(of_megatron(x), STOCK[normalization](x, (4, 6), eps=1e-6))


@pytest.mark.cpu_operators
@NORMALIZATIONS
@ZERO_CENTERED
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_result_and_gradients(device, dtype, normalization, zero_centered):
    norm = build(normalization, zero_centered).to(device, dtype)
    assert ("weight_offset=1.0" in repr(norm)) == zero_centered
    x = torch.randn(7, 2, HIDDEN, device=device, dtype=dtype, requires_grad=True)
    dy = torch.randn_like(x)
    assert_close(norm(x), STOCK[normalization](x, (HIDDEN,), eps=1e-5))  # it begins so
    randomize(norm)
    with Names() as seen:
        y = norm(x)
    assert seen.names  # the operator adds the offset itself
    assert all(name.startswith("fused_layernorm.layer_norm") for name in seen.names)
    compiled = torch.compile(norm, backend="eager", fullgraph=True)
    assert_close(compiled(x), y)

    leaves = [x, *norm.parameters()]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    stock = STOCK[normalization](wide[0], (HIDDEN,), wide[1] + zero_centered, *wide[2:], eps=1e-5)
    expected = (stock, *torch.autograd.grad(stock, wide, dy.double()))
    assert_close((y, *torch.autograd.grad(y, leaves, dy)), tuple(t.to(dtype) for t in expected))


@NORMALIZATIONS
def test_zero_centered_weight_of_half_precision_keeps_its_digits(device, normalization):
    """1 + 2**-12 rounds to 1 in bfloat16, so the sum must be computed in a wider type."""
    norm = build(normalization, zero_centered=True).to(device, torch.bfloat16)
    with torch.no_grad():
        norm.weight.fill_(2.0**-12)
    x = torch.randn(64, HIDDEN, device=device, dtype=torch.bfloat16, requires_grad=True)
    y = norm(x)
    wide = STOCK[normalization](x.double(), (HIDDEN,), eps=1e-5) * (1 + 2.0**-12)
    assert y.dtype == torch.bfloat16
    # A few results are so near the middle between two bfloat16 numbers that float32 arithmetic
    # rounds them to the other one. With a weight of 1, six in a hundred would differ.
    assert (y == wide.bfloat16()).double().mean() > 0.99
    y.sum().backward()
    assert norm.weight.grad.dtype == torch.bfloat16


@NORMALIZATIONS
@ZERO_CENTERED
@pytest.mark.parametrize("parallel", [False, True])
def test_what_megatron_relies_on(device, normalization, zero_centered, parallel):
    """Marks of parameters, half precision beside config.fp32_residual_connection's stream, and a
    result whose memory may be freed before backward, as pipeline stages do: no view."""
    norm = randomize(build(normalization, zero_centered, sequence_parallel=parallel)).to(device)
    x = torch.randn(7, HIDDEN, device=device, requires_grad=True)
    dy = torch.randn(7, HIDDEN, device=device)
    (expected,) = torch.autograd.grad(norm(x), x, dy)
    y = norm(x)
    assert y._base is None
    y.data = torch.empty(1, device=device)
    # torch.autograd.backward compares shapes first, so Megatron calls the engine itself.
    torch.autograd.Variable._execution_engine.run_backward(
        (y,), (dy,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
    assert_close(x.grad, expected)

    norm.zero_grad()
    norm.bfloat16()  # as Megatron converts a model
    y = norm(x)
    assert y.dtype == torch.float32
    assert_close(y, copy.deepcopy(norm).float()(x))
    y.sum().backward()
    for parameter in norm.parameters():
        assert parameter.sequence_parallel is parallel
        assert parameter.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("cls", "changes", "arguments", "sentence"),
    [
        (FusedLayerNorm, {"normalization": "RMSNorm"}, {},
         "config.normalization 'LayerNorm', got 'RMSNorm'"),
        (FusedRMSNorm, {}, {}, "config.normalization 'RMSNorm', got 'LayerNorm'"),
        (FusedNorm, {"normalization": "L2Norm"}, {},
         "config.normalization 'LayerNorm' or 'RMSNorm', got 'L2Norm'"),
        (FusedLayerNorm, {}, {"normalization": "RMSNorm"},
         "normalization 'LayerNorm', got 'RMSNorm'"),
        (FusedLayerNorm, {"memory_efficient_layer_norm": True}, {},
         "config.memory_efficient_layer_norm False, got True"),
        (FusedLayerNorm, {}, {"zero_centered_gamma": True},
         "zero_centered_gamma to be config.layernorm_zero_centered_gamma, False, got True"),
    ],
)  # fmt: skip
def test_refuses_what_it_cannot_do(cls, changes, arguments, sentence):
    with pytest.raises(ValueError, match=re.escape(f"expected {sentence}")):
        cls(Config(**changes), HIDDEN, **arguments)

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
    options |= {"normalization": normalization, "layernorm_zero_centered_gamma": zero_centered}
    config = Config(**options)
    return FusedNorm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)


STOCK: dict[str, Any] = {"LayerNorm": nn.functional.layer_norm, "RMSNorm": nn.functional.rms_norm}
NORMALIZATIONS = pytest.mark.parametrize("normalization", STOCK)
ZERO_CENTERED = pytest.mark.parametrize("zero_centered", [False, True])


@NORMALIZATIONS
def test_is_a_norm_of_the_package(normalization):
    norm = build(normalization)
    cls = {"LayerNorm": FusedLayerNorm, "RMSNorm": FusedRMSNorm}[normalization]
    assert type(norm) is cls
    assert issubclass(cls, getattr(fused_layernorm, cls.__name__))
    assert [*norm.state_dict()] == ["weight", "bias"][: 1 + (cls is FusedLayerNorm)]
    config = Config(normalization=normalization)
    of_megatron = FusedNorm(config, (4, 6), 1e-6, True, False, normalization)
    assert (norm.eps, of_megatron.eps) == (1e-5, 1e-6)
    x = torch.randn(3, 4, 6)
    assert_close(of_megatron(x), STOCK[normalization](x, (4, 6), eps=1e-6))


@pytest.mark.cpu_operators
@NORMALIZATIONS
@ZERO_CENTERED
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_result_and_gradients(device, dtype, normalization, zero_centered):
    norm = build(normalization, zero_centered).to(device, dtype)
    x = torch.randn(7, 2, HIDDEN, device=device, dtype=dtype, requires_grad=True)
    assert_close(norm(x), STOCK[normalization](x, (HIDDEN,), eps=1e-5))  # it begins so
    for parameter in norm.parameters():
        nn.init.normal_(parameter, 0.5, 0.3)
    with Names() as seen:
        y = norm(x)
    assert seen.names  # the operator adds the offset itself
    assert all(name.startswith("fused_layernorm.layer_norm") for name in seen.names)
    leaves, dy = [x, *norm.parameters()], torch.randn_like(x)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    stock = STOCK[normalization](wide[0], (HIDDEN,), wide[1] + zero_centered, *wide[2:], eps=1e-5)
    expected = (stock, *torch.autograd.grad(stock, wide, dy.double()))
    assert_close((y, *torch.autograd.grad(y, leaves, dy)), tuple(t.to(dtype) for t in expected))


@NORMALIZATIONS
@ZERO_CENTERED
@pytest.mark.parametrize("parallel", [False, True])
def test_what_megatron_relies_on(device, normalization, zero_centered, parallel):
    """Marks of parameters, half precision beside config.fp32_residual_connection's stream, and a
    result whose memory may be freed before backward, as pipeline stages do: no view."""
    norm = build(normalization, zero_centered, sequence_parallel=parallel).to(device)
    nn.init.normal_(norm.weight, 0.5, 0.3)
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

# SPDX-License-Identifier: Apache-2.0
"""fused_layernorm.megatron: the interface of Megatron-LM's norm slots, and, if megatron-core is
installed, one of its transformer layers with our norms in its slots."""

import copy
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from forms import Names
from torch import distributed, nn
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


# --- Megatron-LM itself ---------------------------------------------------------------------------


class Attention(nn.Module):
    """Mixes its inputs in place of Megatron's core attention, which runs only on CUDA."""

    def __init__(self, config, layer_number, **kwargs):
        super().__init__()

    def forward(self, query, key, value, *args, **kwargs):
        return (query + key.flip(0) * value).flatten(2)


@pytest.fixture
def megatron():
    """Sets up Megatron in one process. Yields a function that makes a layer with a given norm."""
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    store = distributed.HashStore()  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()

    def make(norm, **options):
        off = ("bias_dropout_fusion", "gradient_accumulation_fusion", "persist_layer_norm")
        config = TransformerConfig(
            num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, use_cpu_initialization=True,
            hidden_dropout=0.0, attention_dropout=0.0, **dict.fromkeys(off, False), **options,
        )  # fmt: skip
        spec = get_gpt_layer_local_spec(normalization="LayerNorm", qk_layernorm=True)
        slots = spec.submodules
        slots.input_layernorm = slots.pre_mlp_layernorm = norm
        attention = slots.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = norm
        attention.core_attention = Attention
        return build_module(spec, config=config, layer_number=1)

    yield make
    parallel_state.destroy_model_parallel()
    distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")  # Megatron warns of packages that are not installed
@NORMALIZATIONS
def test_in_a_transformer_layer_of_megatron(megatron, normalization):
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    stock, fused = (
        megatron(norm, normalization=normalization) for norm in (WrappedTorchNorm, FusedNorm)
    )
    kind = {"LayerNorm": FusedLayerNorm, "RMSNorm": FusedRMSNorm}[normalization]
    norms = [module for module in fused.modules() if isinstance(module, kind)]
    assert [norm.normalized_shape for norm in norms] == [(HIDDEN,), (12,), (12,), (HIDDEN,)]
    fused.load_state_dict(stock.state_dict())
    of_zero = megatron(FusedNorm, normalization=normalization, layernorm_zero_centered_gamma=True)
    weights = {name: w - 1 for name, w in stock.state_dict().items() if "layernorm.weight" in name}
    of_zero.load_state_dict(stock.state_dict() | weights)

    x, dy = torch.randn(2, 6, 2, HIDDEN)
    grads = []
    for layer in (stock, fused, of_zero):
        own_x = x.clone().requires_grad_()
        y, _ = layer(own_x, attention_mask=None)
        y.backward(dy)
        grads.append([y.detach(), own_x.grad, *(p.grad for p in layer.parameters())])
    for found in grads[1:]:
        assert_close(found, grads[0], rtol=1e-4, atol=1e-5)

# SPDX-License-Identifier: Apache-2.0
"""RMSNorm in the graph pass: every way in which models write it, what surrounds it, near misses.

The tests make the pass run on the CPU too, where the operators are PyTorch's own.
"""

import importlib
from typing import Any

import libraries
import pytest
import torch
import torch.nn.functional as F
from captured import B, D, S, assert_same, operators_of, outputs_and_gradients, run, tensors

import fused_layernorm
from fused_layernorm.compile import graph_pass, rotations, rules
from fused_layernorm.compile.rules import Choice, Kind, Problem, choose
from fused_layernorm.ops.operators import ADA_LAYER_NORM, ADD_LAYER_NORM, LAYER_NORM

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
EPS = 1e-6

pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")


@pytest.fixture(autouse=True)
def _everywhere(monkeypatch):
    monkeypatch.setattr(rules, "DEVICES", {"cpu", "cuda"})
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def calls_of(graph_module):
    return [n for n in graph_module.graph.nodes if n.op in ("call_function", "call_method")]


def options_of(graph_module):
    """The options of the graph's only norm."""
    (node,) = (n for n in calls_of(graph_module) if "fused_layernorm" in str(n.target))
    operators = {
        operator.overload: operator for operator in (LAYER_NORM, ADD_LAYER_NORM, ADA_LAYER_NORM)
    }
    return operators[node.target].arguments(*node.args).options


# ---- Ways to write an RMSNorm ------------------------------------------------------------------


def _functional(t):
    return F.rms_norm(t["x"], (D,), t["weight"], EPS)


def _default_eps(t):
    return F.rms_norm(t["x"], [D], weight=t["weight"])


def _of_torch(t):
    return torch.rms_norm(t["x"], (D,), t["weight"], EPS)


def _of_aten(t):
    return torch.ops.aten.rms_norm.default(t["x"], [D], t["weight"], EPS)


def _fused(t):
    return torch.ops.aten._fused_rms_norm.default(t["x"], [D], t["weight"], EPS)[0]


def _float32_detour(t):
    return F.rms_norm(t["x"].float(), (D,), t["weight"].float(), EPS).to(t["x"].dtype)


def _of_this_package(t):
    return fused_layernorm.rms_norm(t["x"], t["weight"], EPS, bias=t["bias"])


def _of_this_package_with_all(t):
    return fused_layernorm.rms_norm(
        t["x"], t["weight"], EPS, weight_offset=0.5, round_before_weight=True
    )


def _llama(t):
    hidden_states = t["x"]
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + EPS)
    return t["weight"] * hidden_states.to(input_dtype)


def _llama4(t):
    x = t["x"].float()
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)).type_as(t["x"]) * t["weight"]


def _olmo(t):
    x = t["x"].to(torch.float32)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return (t["weight"] * x).to(t["x"].dtype)


def _nemotron(t):
    x = t["x"].to(torch.float32)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return (t["weight"].to(torch.float32) * x).to(t["x"].dtype)


def _gemma(t):
    x = t["x"].float()
    output = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return (output * (1.0 + t["weight"].float())).type_as(t["x"])


def _gemma4(t):
    x = t["x"].float()
    output = x * torch.pow(x.pow(2).mean(-1, keepdim=True) + EPS, -0.5)
    return (output * t["weight"].float()).type_as(t["x"])


def _qwen_image(t):
    x = t["x"].float()
    rrms = torch.rsqrt(torch.mean(x**2, dim=-1, keepdim=True) + EPS)
    return (x * rrms * (t["weight"].float() + 1)).to(t["x"].dtype)


def _t5(t):
    """transformers' T5LayerNorm and diffusers' RMSNorm: x itself is not widened."""
    x, weight = t["x"], t["weight"]
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + EPS)
    if weight.dtype in (torch.float16, torch.bfloat16):
        x = x.to(weight.dtype)
    return weight * x


def _diffusers_with_bias(t):
    return _t5(t) + t["bias"]


def _weightless(t):
    x = t["x"].float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)).type_as(t["x"])


def _product_and_root(t):
    x = t["x"].float()
    y = x / torch.sqrt(EPS + (x * x).mean((-1,), True))
    return (y * t["weight"] + t["bias"]).to(t["x"].dtype)


def _two_dimensions(t):
    x = t["x"].float()
    return (x * torch.rsqrt(x.pow(2).mean((-2, -1), keepdim=True) + EPS)).to(t["x"].dtype)


def _weight_behind(t):
    return F.rms_norm(t["x"], (D,), None, EPS) * t["weight"]


def _offset_after_rounding(t):
    """1 + weight in float32, times the norm that was rounded."""
    return _weightless(t) * (1 + t["weight"].float())


# By form: (the offset of the weight, whether half precision is rounded before the weight).
PLAIN, ROUNDED, OFFSET = (0.0, False), (0.0, True), (1.0, False)
WAYS = {
    _functional: PLAIN,
    _default_eps: PLAIN,
    _of_torch: PLAIN,
    _of_aten: PLAIN,
    _fused: PLAIN,
    _float32_detour: PLAIN,
    _of_this_package: PLAIN,
    _of_this_package_with_all: (0.5, True),
    _llama: ROUNDED,
    _llama4: ROUNDED,
    _olmo: PLAIN,
    _nemotron: PLAIN,
    _gemma: OFFSET,
    _gemma4: PLAIN,
    _qwen_image: OFFSET,
    _t5: ROUNDED,
    _diffusers_with_bias: ROUNDED,
    _weightless: PLAIN,
    _product_and_root: PLAIN,
    _two_dimensions: PLAIN,
    _weight_behind: ROUNDED,
    _offset_after_rounding: (1.0, True),
}


@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, BF16), (BF16, F32), (F16, F16)])
@pytest.mark.parametrize("function", WAYS)
def test_ways_to_write_it(device, function, dtypes):
    if function is _fused and device == "cuda" and dtypes[0] is not dtypes[1]:
        pytest.skip("PyTorch's CUDA kernel takes one dtype")
    t = tensors(dtypes[0], None, device, dtypes[1])
    rows, graphs = assert_same(function, t)
    assert [(row.operator, row.statistic) for row in rows] == [("layer_norm", "rms")]
    assert len(calls_of(graphs[0])) == 1  # no cast and no affine step remains
    options = options_of(graphs[0])
    offset, rounds = WAYS[function]
    if function in (_t5, _diffusers_with_bias):
        rounds = dtypes[1] is not F32
    rounds = rounds and dtypes[0] is not F32
    if function is not _of_this_package_with_all:
        assert options.round_before_weight == rounds
    assert (options.statistic, options.weight_offset) == ("rms", offset)
    assert options.normalized_ndim == (2 if function is _two_dimensions else 1)


@pytest.mark.parametrize("function", [_llama, _llama4, _olmo, _gemma, _t5, _functional])
def test_the_order_of_rounding_is_kept(device, function):
    """Another order of rounding would change a quarter of the elements by one unit."""
    t = {name: tensor.detach() for name, tensor in tensors(BF16, device=device).items()}
    t["x"] = torch.randn(64, D * D, device=device).bfloat16().view(64, D, D)
    result, _, _ = run(function, t)
    assert (result == function(t)).float().mean() >= 0.999


def test_module():
    module = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Sequential(torch.nn.RMSNorm(D)))
    _, rows, graphs = run(module, torch.randn(B, D))
    assert operators_of(graphs[0]) == ["layer_norm"]
    assert (rows[0].where, rows[0].form, rows[0].statistic) == ("1.0", "rms_norm", "rms")
    assert options_of(graphs[0]).eps == torch.finfo(F32).eps


CLASSES = {
    ("llama", "LlamaRMSNorm"): ROUNDED,
    ("qwen3", "Qwen3RMSNorm"): ROUNDED,
    ("gemma3", "Gemma3RMSNorm"): OFFSET,
    ("t5", "T5LayerNorm"): ROUNDED,
    ("olmo2", "Olmo2RMSNorm"): PLAIN,
    ("moshi", "MoshiRMSNorm"): PLAIN,
    ("llama4", "Llama4TextRMSNorm"): ROUNDED,
    ("idefics", "IdeficsRMSNorm"): ROUNDED,
}


@pytest.mark.parametrize(("folder", "name"), CLASSES)
def test_classes_of_transformers(folder, name):
    libraries.get("transformers")
    source = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    module = getattr(source, name)(D)
    parameters = [*module.parameters()]
    assert len(parameters) == 1
    torch.nn.init.normal_(parameters[0])
    module.bfloat16()

    def function(t):
        return torch.func.functional_call(
            module, dict.fromkeys(dict(module.named_parameters()), t["weight"]), t["x"]
        )

    rows, graphs = assert_same(function, tensors(BF16))
    assert [row.operator for row in rows] == ["layer_norm"]
    assert len(calls_of(graphs[0])) == 1
    options = options_of(graphs[0])
    assert (options.weight_offset, options.round_before_weight) == CLASSES[folder, name]


MODELS = {  # how many norms a model of two layers has
    "Llama": 5,
    "Qwen3": 9,  # with those of queries and keys
    "Gemma3Text": 13,
    "Olmo2": 9,
}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(device, name, monkeypatch):
    """Every norm of a decoder is replaced, and the numbers are those of eager mode.

    Rotations, which round less than eager mode, are left (tests/test_compile_rotations.py).
    """
    monkeypatch.setattr(rotations, "find", lambda node: None)
    transformers = libraries.get("transformers")
    config = getattr(transformers, f"{name}Config")(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=0,
        attn_implementation="eager",
    )
    model = transformers.AutoModel.from_config(config).to(device, torch.bfloat16).eval()
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name:
            torch.nn.init.normal_(parameter, 1.0, 0.1)
    tokens = torch.randint(1, 64, (2, 7), device=device)

    def function():
        return model(tokens, use_cache=False)[0]

    expected = function().detach()
    function().float().square().mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    found, rows, _ = run(function)
    found.float().square().mean().backward()
    assert [row.operator is not None for row in rows] == [True] * MODELS[name]
    assert (found == expected).float().mean() >= 0.999
    for name, parameter in model.named_parameters():
        difference = (parameter.grad - gradients[name]).float().norm()
        assert difference <= 0.03 * gradients[name].float().norm()


# ---- Where a part of it is left ----------------------------------------------------------------


def _sum_in_half(t):
    """1 + weight is rounded, so the sum itself is the weight."""
    x = t["x"].float()
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return (y * (1.0 + t["weight"]).float()).type_as(t["x"])


def _sum_rounded(t):
    return _weightless(t) * (1.0 + t["weight"].float()).to(t["x"].dtype)


@pytest.mark.parametrize(("function", "rounds"), [(_sum_in_half, False), (_sum_rounded, True)])
def test_offset_in_half_precision(device, function, rounds):
    rows, graphs = assert_same(function, tensors(BF16, device=device))
    assert [row.operator for row in rows] == ["layer_norm"]
    options = options_of(graphs[0])
    assert (options.weight_offset, options.round_before_weight) == (0.0, rounds)


def test_rounding_to_another_dtype(device):
    """T5's class with a bfloat16 weight rounds float32 rows to bfloat16: the product is left."""
    rows, graphs = assert_same(_t5, tensors(F32, device=device, parameter_dtype=BF16))
    assert [row.operator for row in rows] == ["layer_norm"]
    assert "rounded to bfloat16" in rows[0].notes[0] or "one dtype" in rows[0].notes[0]
    assert options_of(graphs[0]).round_before_weight is False


def test_rounding_between_float32_and_float32():
    """A rounding to bfloat16 in the middle of float32 arithmetic is kept."""

    def function(t):
        x = t["x"]
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
        return y.bfloat16() * t["weight"]

    t = {name: tensor.detach() for name, tensor in tensors().items()}
    result, rows, _ = run(function, t)
    assert rows[0].operator == "layer_norm"
    assert rows[0].notes == [
        "the norm is rounded to bfloat16 before its weight, beside an input of float32"
    ]
    assert torch.equal(result / t["weight"], function(t) / t["weight"])


# ---- What surrounds it -------------------------------------------------------------------------


def _llama_of(x, t):
    return _llama({**t, "x": x})


def _chunks(t):
    return t["mod"].unsqueeze(1).chunk(6, dim=-1)


def _residual(t):
    h = t["residual"] + t["x"]
    return _llama_of(h, t), h


def _residual_of_gemma(t):
    h = t["x"] + t["residual"]
    return _gemma({**t, "x": h}), h


def _residual_of_call(t):
    h = t["x"] + t["residual"]
    return F.rms_norm(h, (D,), t["weight"], EPS), h


def _gated(t):
    h = t["residual"] + _chunks(t)[2] * t["x"]
    return _llama_of(h, t), h


def _modulated(t):
    shift, scale = _chunks(t)[:2]
    return _weightless(t) * (1 + scale) + shift


def _modulated_with_weight(t):
    return _llama(t) * (1 + _chunks(t)[1])


def _modulated_call(t):
    shift, scale = _chunks(t)[:2]
    return F.rms_norm(t["x"], (D,), t["weight"], EPS) * (1 + scale) + shift


def _gated_and_modulated(t):
    shift, scale, gate = _chunks(t)[:3]
    h = t["residual"] + gate * t["x"]
    return _olmo({**t, "x": h}) * (1 + scale) + shift, h


def _silu(t):
    return F.silu(_llama(t))


def _gelu_of_gemma(t):
    return F.gelu(_gemma(t), approximate="tanh") * 0.5


MODULATED = ["scale", "shift"]
SURROUNDINGS = {
    _residual: ("add_layer_norm", ["residual"]),
    _residual_of_gemma: ("add_layer_norm", ["residual"]),
    _residual_of_call: ("add_layer_norm", ["residual"]),
    _gated: ("add_ada_layer_norm", ["residual", "gate"]),
    _modulated: ("ada_layer_norm", MODULATED),
    _modulated_with_weight: ("ada_layer_norm", ["scale"]),
    _modulated_call: ("ada_layer_norm", MODULATED),
    _gated_and_modulated: ("add_ada_layer_norm", ["residual", "gate", *MODULATED]),
    _silu: ("layer_norm", ["activation"]),
    _gelu_of_gemma: ("layer_norm", ["activation", "factor"]),
}


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("function", SURROUNDINGS)
def test_surroundings(device, function, dtype):
    rows, graphs = assert_same(function, tensors(dtype, device=device))
    operator, fused = SURROUNDINGS[function]
    assert [(row.operator, row.statistic) for row in rows] == [(operator, "rms")]
    assert rows[0].fused == fused
    assert operators_of(graphs[0]) == [operator]


def test_float32_stream(device):
    """A half-precision branch is added to a float32 stream, which is not rounded before weight."""

    def function(t):
        h = t["x"].bfloat16() + t["residual"]
        return _llama_of(h, t), h

    rows, graphs = assert_same(function, tensors(device=device))
    assert rows[0].fused == ["residual"]
    assert options_of(graphs[0]).round_before_weight is False


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("normalize", [_llama, _gemma, _t5])
def test_heads_in_the_order_of_attention(device, normalize, dynamic):
    """Queries are normalized as a view (B, H, S, D), whose strides the result keeps."""

    def function(t):
        heads = t["x"].view(B, -1, 3, D).transpose(1, 2)
        return normalize({**t, "x": heads}), t["x"] * 2

    t = tensors(BF16, device=device)
    t["x"] = torch.randn(B, S, 3 * D, device=device).bfloat16().requires_grad_()
    rows, graphs = assert_same(function, t)
    assert [row.operator for row in rows] == ["layer_norm"]
    result, _, graphs = run(function, t, dynamic=dynamic)
    (node,) = graphs[0].graph.find_nodes(op="call_function", target=LAYER_NORM.overload)
    assert node.args[0].meta["example_value"].is_contiguous()  # the kernel reads it without a copy
    assert result[0].stride() == function(t)[0].stride()


def test_two_norms_of_one_stream(device):
    def function(t):
        h = t["residual"] + t["x"]
        first = _llama_of(h, t)
        h = h + torch.tanh(first)
        return _gemma({**t, "x": h}), F.layer_norm(h, (D,)), h

    rows, _ = assert_same(function, tensors(BF16, device=device))
    assert [row.operator for row in rows] == ["add_layer_norm", "add_layer_norm", "layer_norm"]
    assert [row.statistic for row in rows] == ["rms", "rms", "layer"]


# ---- Near misses -------------------------------------------------------------------------------


def _sum_for_mean(t):
    x = t["x"]
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + EPS)


def _eps_a_tensor(t):
    x = t["x"]
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + t["bias"].square().sum())


def _another_x_in_the_root(t):
    x = t["x"]
    return x * torch.rsqrt((x + 1).pow(2).mean(-1, keepdim=True) + EPS)


def _more_in_the_root(t):
    x = t["x"]
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS + 1)


def _cubes(t):
    x = t["x"].abs() + 1
    return x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + EPS)


def _product_of_two(t):
    x = t["x"]
    mean = (x * t["residual"]).mean(-1, keepdim=True)
    return x * torch.rsqrt(mean.abs() + EPS)


def _another_factor(t):
    return t["residual"] * torch.rsqrt(t["x"].pow(2).mean(-1, keepdim=True) + EPS)


def _divided_by_rsqrt(t):
    x = t["x"]
    return x / torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def _eps_outside(t):
    x = t["x"]
    return x / (torch.sqrt(x.pow(2).mean(-1, keepdim=True)) + EPS)


def _squares_in_half(t):
    x = t["x"]
    return x * torch.rsqrt(x.bfloat16().pow(2).mean(-1, keepdim=True) + EPS)


def _mean_of_all(t):
    x = t["x"]
    return x * torch.rsqrt(x.pow(2).mean() + EPS)


@pytest.mark.parametrize(
    "function",
    [
        _sum_for_mean,
        _eps_a_tensor,
        _another_x_in_the_root,
        _more_in_the_root,
        _cubes,
        _product_of_two,
        _another_factor,
        _divided_by_rsqrt,
        _eps_outside,
        _squares_in_half,
        _mean_of_all,
    ],
)
def test_what_is_no_rms_norm(function):
    rows, graphs = assert_same(function, tensors())
    assert rows == []
    assert operators_of(graphs[0]) == []


def test_over_channels():
    def function(t):
        x = t["x"]
        return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + EPS)

    rows, graphs = assert_same(function, tensors())
    assert operators_of(graphs[0]) == []
    assert rows[0].notes == ["it normalizes over dimensions [1], which are not the last"]


@pytest.mark.parametrize("shape", [(S, D), (1,), (S, 1), (1, 1, D)])
def test_weights_of_other_shapes(shape):
    """The norm is replaced, and the product with what is no weight of its own is left."""

    def function(t):
        x = t["x"]
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * t["weight"]

    t = tensors()
    t["weight"] = torch.randn(shape).requires_grad_()
    rows, graphs = assert_same(function, t)
    assert [row.operator for row in rows] == ["layer_norm"]
    (node,) = graphs[0].graph.find_nodes(op="call_function", target=LAYER_NORM.overload)
    assert LAYER_NORM.arguments(*node.args).weight is None


def test_two_plus_weight():
    def function(t):
        return _weightless(t) * (2 + t["weight"])

    _, graphs = assert_same(function, tensors())
    assert options_of(graphs[0]).weight_offset == 0.0


def test_used_before_the_weight():
    """xhat is used beside the product, which is left."""

    def function(t):
        y = _weightless(t)
        return y * t["weight"], y

    rows, graphs = assert_same(function, tensors())
    assert rows[0].fused == []
    assert len(calls_of(graphs[0])) == 2


def test_statistics_that_are_used():
    def function(t):
        return torch.ops.aten._fused_rms_norm.default(t["x"], [D], t["weight"], EPS)

    rows, graphs = assert_same(function, tensors())
    assert operators_of(graphs[0]) == []
    assert "statistics" in rows[0].notes[0]


def test_writes_in_between():
    def function(t):
        x = t["x"] * 1.5
        y = _llama_of(x, t)
        x.mul_(2)
        return y, x

    t = {name: tensor.detach() for name, tensor in tensors(BF16).items()}
    result, rows, graphs = run(function, t)
    for one, other in zip(result, function(t), strict=True):
        torch.testing.assert_close(one, other)
    assert operators_of(graphs[0]) == []
    assert rows[0].notes == ["mul_ writes into what backward reads"]


def test_autocast(device):
    """Llama's class under autocast: its stream may be float32 and its weight float32."""

    def function(t):
        with torch.autocast(device, BF16):
            branch = F.linear(t["x"], t["weight"].expand(D, D))
            h = t["residual"] + branch
            return _llama_of(h, t), _llama_of(branch, t), h

    t = {name: tensor.detach() for name, tensor in tensors(device=device).items()}
    result, rows, _ = run(function, t)
    for one, other in zip(result, function(t), strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)
    assert [row.fused for row in rows] == [["residual"], []]


# ---- Dynamic shapes, exported programs, rules --------------------------------------------------


def test_dynamic_shapes():
    """One graph serves every size of the batch; its norm is replaced without a guard."""
    rows, graphs = [], []

    def through_the_pass(graph_module, example_inputs):
        rows.extend(graph_pass.run(graph_module, graph_pass.Settings(False)))
        graphs.append(graph_module)
        return graph_module.forward

    compiled = torch.compile(
        _residual_of_gemma, backend=through_the_pass, fullgraph=True, dynamic=True
    )
    for batch, length in ((2, 5), (3, 7)):
        t = tensors()
        for name in ("x", "residual"):
            t[name] = torch.randn(batch, length, D).requires_grad_()
        for one, other in zip(compiled(t), _residual_of_gemma(t), strict=True):
            torch.testing.assert_close(one, other)
    assert [row.operator for row in rows] == ["add_layer_norm"]
    assert len(graphs) == 1


class Exported(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.RMSNorm(D, eps=EPS)
        self.weight = torch.nn.Parameter(torch.randn(D))

    def forward(self, x, residual):
        h = x + residual
        return _llama({"x": h, "weight": self.weight}), self.norm(x) * 2


@pytest.mark.parametrize("decomposed", [False, True])
def test_exported_graphs(decomposed):
    args = torch.randn(B, S, D).bfloat16(), torch.randn(B, S, D).bfloat16()
    module = Exported().bfloat16()
    program = torch.export.export(module, args)
    if decomposed:
        program = program.run_decompositions({torch.ops.aten.rms_norm.default: _decomposed})
    fused = fused_layernorm.fuse(program.module(), then="eager")
    assert sorted(operators_of(fused)) == ["add_layer_norm", "layer_norm"]
    for one, other in zip(fused(*args), module(*args), strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other)


def _decomposed(x, shape, weight=None, eps=None):
    return torch.ops.aten._fused_rms_norm.default(x, shape, weight, eps)[0]


class Ours(torch.nn.Module):
    def forward(self, x, weight, residual):
        kind: Any = {"weight_offset": 1.0, "round_before_weight": True}
        y, h = fused_layernorm.add_rms_norm(x, residual, weight, EPS, **kind)
        return fused_layernorm.rms_norm(y, weight, EPS, **kind), h


def test_decompositions():
    """The decomposition table knows the arguments that make a layer norm an RMSNorm."""
    args = [torch.randn(B, S, D).bfloat16(), torch.randn(D).bfloat16(), torch.randn(B, S, D)]
    program = torch.export.export(Ours(), tuple(args))
    program = program.run_decompositions(fused_layernorm.decompositions())
    assert operators_of(program.graph_module) == []
    for one, other in zip(program.module()(*args), Ours()(*args), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("problem", "choice"),
    [
        (Problem(Kind.PLAIN, 4096, False, statistic="rms"), Choice.INDUCTOR),
        (Problem(Kind.PLAIN, 4096, False), Choice.KERNEL),
        (Problem(Kind.RESIDUAL, 2880, True, statistic="rms"), Choice.INDUCTOR),
        (Problem(Kind.PLAIN, None, True, statistic="rms"), Choice.INDUCTOR),
        (Problem(Kind.MODULATED, 4096, True, statistic="rms"), Choice.KERNEL),
        (Problem(Kind.PLAIN, 4096, True, with_inductor=False, statistic="rms"), Choice.KERNEL),
        (Problem(Kind.PLAIN, 4096, True, deterministic=True, statistic="rms"), Choice.KERNEL),
    ],
)
def test_rules(problem, choice):
    assert choose(problem).choice is choice


@pytest.mark.parametrize("function", [_residual, _gemma, _functional])
def test_forward_is_left_to_inductor(device, function):
    """The twin computes the same, and its backward pass is this package's."""
    t = tensors(BF16, device=device)
    expected = outputs_and_gradients(function, t)
    operators = []

    def through_the_pass(t):
        result, _, graphs = run(function, t, then="inductor")
        operators.extend(operators_of(graphs[0]))
        return result

    found = outputs_and_gradients(function, t, through_the_pass)
    assert operators == ["aten_add_layer_norm" if function is _residual else "aten_layer_norm"]
    for one, other in zip(found[0], expected[0], strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other)
    for name in ("x", "weight"):
        torch.testing.assert_close(found[1][name], expected[1][name], rtol=0.02, atol=0.05)


@pytest.mark.skipif(not fused_layernorm.functional.CHOOSES, reason="Dynamo of torch 2.10")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("options", [{}, {"weight_offset": 1.0, "round_before_weight": True}])
def test_calls_under_plain_compile(device, options, dynamic):
    """Without the graph pass, too, the rules leave the forward pass of a call to Inductor."""
    graphs = []

    def seen(graph_module, example_inputs):
        graphs.append(graph_module)
        return graph_module.forward

    def function(x, w):
        return fused_layernorm.rms_norm(x, w, **options)

    x, w = torch.randn(3, 256, device=device), torch.randn(256, device=device)
    found = torch.compile(function, backend=seen, fullgraph=True, dynamic=dynamic)(x, w)
    torch.testing.assert_close(found, function(x, w))
    # Where the width is not known, the rules are not asked.
    assert operators_of(graphs[0]) == ["layer_norm" if dynamic else "aten_layer_norm"]


def test_explain(device):
    t = tensors(BF16, device=device)
    text = str(fused_layernorm.explain(_residual, t))
    assert "RMSNorm written out" in text
    assert 'aten_add_layer_norm, "rms" [1]' in text
    assert "1 norm in 1 graph, 1 replaced" in text

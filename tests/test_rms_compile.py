# SPDX-License-Identifier: Apache-2.0
"""RMSNorm in the graph pass: every way in which models write it, what surrounds it, near misses.

The tests make the pass run on the CPU too, where the operators are PyTorch's own.
"""

import pytest
import torch
import torch.nn.functional as F
from captured import (
    B,
    D,
    S,
    assert_same,
    llama,
    model,
    operators_of,
    outputs_and_gradients,
    run,
    tensors,
)
from compiling import afresh, everywhere  # noqa: F401
from tiny_transformers import WrittenHere, decoder

import fused_layernorm
from fused_layernorm.ops.operators import ADA_LAYER_NORM, ADD_LAYER_NORM, LAYER_NORM

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
EPS = 1e-6

pytestmark = [
    pytest.mark.usefixtures("everywhere"),
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),
]


def calls_of(graph_module):
    return [n for n in graph_module.graph.nodes if n.op in ("call_function", "call_method")]


def options_of(graph_module):
    """The options of the graph's only norm."""
    (node,) = (n for n in calls_of(graph_module) if "fused_layernorm" in str(n.target))
    operators = {
        operator.overload: operator for operator in (LAYER_NORM, ADD_LAYER_NORM, ADA_LAYER_NORM)
    }
    return operators[node.target].arguments(*node.args)


# ---- Ways to write an RMSNorm ------------------------------------------------------------------

WIDE, ROOT = "y = x.float(); ", "torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)"
WEIGHTLESS = "y = x.float(); z = (y * torch.rsqrt(y.square().mean(-1, True) + 1e-6)).type_as(x); "
# transformers' T5LayerNorm and diffusers' RMSNorm: x itself is not widened.
T5 = (
    "v = x.to(torch.float32).pow(2).mean(-1, keepdim=True); z = x * torch.rsqrt(v + 1e-6); "
    "z = z.to(weight.dtype) if weight.dtype in (torch.float16, torch.bfloat16) else z; "
)
# By form: (the offset of the weight, whether half precision is rounded before the weight).
# A sum with the weight stays in the graph, as the weight.
PLAIN, ROUNDED, SUM = (0.0, False), (0.0, True), (0.0, False, 1)
WAYS = {
    "F.rms_norm(x, (D,), weight, 1e-6)": PLAIN,
    "F.rms_norm(x, [D], weight=weight)": PLAIN,
    "torch.rms_norm(x, (D,), weight, 1e-6)": PLAIN,
    "torch.ops.aten.rms_norm.default(x, [D], weight, 1e-6)": PLAIN,
    "torch.ops.aten._fused_rms_norm.default(x, [D], weight, 1e-6)[0]": PLAIN,
    "F.rms_norm(x.float(), (D,), weight.float(), 1e-6).to(x.dtype)": PLAIN,
    WIDE + f"(y * {ROOT}).type_as(x) * weight": ROUNDED,  # Llama 4
    WIDE + f"(weight * (y * {ROOT})).to(x.dtype)": PLAIN,  # OLMo
    WIDE + f"(weight.to(torch.float32) * (y * {ROOT})).to(x.dtype)": PLAIN,  # Nemotron
    WIDE + f"(y * {ROOT} * (1.0 + weight.float())).type_as(x)": SUM,  # Gemma
    WIDE + "z = y * torch.pow(y.pow(2).mean(-1, keepdim=True) + 1e-6, -0.5); "
    "(z * weight.float()).type_as(x)": PLAIN,  # Gemma 4
    WIDE + "r = torch.rsqrt(torch.mean(y**2, dim=-1, keepdim=True) + 1e-6); "
    "(y * r * (weight.float() + 1)).to(x.dtype)": SUM,  # Qwen-Image
    T5 + "weight * z": ROUNDED,
    T5 + "weight * z + bias": ROUNDED,
    WEIGHTLESS + "z": PLAIN,
    WIDE + "z = y / torch.sqrt(1e-6 + (y * y).mean((-1,), True)); "
    "(z * weight + bias).to(x.dtype)": PLAIN,
    WIDE + "r = torch.rsqrt(y.pow(2).mean((-2, -1), keepdim=True) + 1e-6); (y * r).to(x.dtype)":
    PLAIN,
    "F.rms_norm(x, (D,), None, 1e-6) * weight": ROUNDED,
    # 1 + weight in float32, times the norm that was rounded.
    WEIGHTLESS + "z * (1 + weight.float())": (0.0, True, 1),
}  # fmt: skip


_llama = model("norm(x, weight)", llama)
_of_this_package = model("norm(x, weight, 1e-6, bias=bias)", fused_layernorm.rms_norm)
_with_all = model(
    "norm(x, weight, 1e-6, weight_offset=0.5, round_before_weight=True)", fused_layernorm.rms_norm
)
FUNCTIONS = {_of_this_package: PLAIN, _with_all: (0.5, True), _llama: ROUNDED}


@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, BF16), (BF16, F32), (F16, F16)])
@pytest.mark.parametrize("way", [*WAYS, *FUNCTIONS])
def test_ways_to_write_it(device, way, dtypes):
    if "_fused_rms_norm" in str(way) and device == "cuda" and dtypes[0] is not dtypes[1]:
        pytest.skip("PyTorch's CUDA kernel takes one dtype")
    t = tensors(dtypes[0], None, device, dtypes[1])
    rows, graphs = assert_same(model(way) if way in WAYS else way, t)
    assert [(row.operator, row.statistic) for row in rows] == [("layer_norm", "rms")]
    offset, rounds, *sums = (WAYS | FUNCTIONS)[way]
    calls = calls_of(graphs[0])
    assert len(calls) == 1 or sums  # no cast and no affine step remains
    options = options_of(graphs[0])
    if str(way).startswith(T5):
        rounds = dtypes[1] is not F32
    if way is not _with_all:
        assert options.round_before_weight == (rounds and dtypes[0] is not F32)
    assert (options.statistic, options.weight_offset) == ("rms", offset)
    assert options.normalized_ndim == (2 if "(-2, -1)" in str(way) else 1)


@pytest.mark.parametrize(
    "way",
    [
        _llama,
        *[
            way
            for way in WAYS
            if ROOT in way or way in (T5 + "weight * z", "F.rms_norm(x, (D,), weight, 1e-6)")
        ],
    ],
)
def test_the_order_of_rounding_is_kept(device, way):
    """Another order of rounding would change a quarter of the elements by one unit."""
    function = model(way) if way in WAYS else way
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


MODELS = {  # how many norms a model of two layers has
    "Llama": 5,
    "Qwen3": 9,  # with those of queries and keys
    "Gemma3": 13,
    "Olmo2": 9,
}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(device, name):
    """Every norm of a decoder is replaced, and the numbers are those of eager mode.

    Gemma 3 normalizes queries as views, whose strides an operator would not give.
    """
    model, inputs = decoder(
        name, "Gemma3TextConfig" if name == "Gemma3" else None, attn_implementation="eager"
    )
    model, tokens = model.to(device, torch.bfloat16).eval(), inputs["input_ids"].to(device)

    def function():
        return model(tokens, use_cache=False)[0]

    expected = function().detach()
    function().float().square().mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    found, rows, _ = run(function)
    found.float().square().mean().backward()
    assert len(rows) == MODELS[name]
    left = [row for row in rows if row.operator is None]
    assert len(left) == (2 if name == "Gemma3" else 0)
    assert all("strides" in row.notes[-1] for row in left)
    assert (found == expected).float().mean() >= 0.999
    for name, parameter in model.named_parameters():
        difference = (parameter.grad - gradients[name]).float().norm()
        assert difference <= 0.03 * gradients[name].float().norm()


# ---- Where a part of it is left ----------------------------------------------------------------


def test_rounding_to_another_dtype(device):
    """T5's class with a bfloat16 weight rounds float32 rows to bfloat16: the product is left."""
    t = tensors(F32, device=device, parameter_dtype=BF16)
    rows, graphs = assert_same(model(T5 + "weight * z"), t)
    assert [row.operator for row in rows] == ["layer_norm"]
    assert "rounded to bfloat16" in rows[0].notes[0] or "one dtype" in rows[0].notes[0]
    assert options_of(graphs[0]).round_before_weight is False


def test_rounding_between_float32_and_float32():
    """A rounding to bfloat16 in the middle of float32 arithmetic is kept."""
    function = model("y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6); "
                     "y.bfloat16() * weight")  # fmt: skip
    t = {name: tensor.detach() for name, tensor in tensors().items()}
    result, rows, _ = run(function, t)
    assert rows[0].operator == "layer_norm"
    assert rows[0].notes == [
        "the norm is rounded to bfloat16 before its weight, beside an input of float32"
    ]
    assert torch.equal(result / t["weight"], function(t) / t["weight"])


# ---- What surrounds it -------------------------------------------------------------------------


def test_float32_stream(device):
    """A half-precision branch is added to a float32 stream, which is not rounded before weight."""
    function = model("h = x.bfloat16() + residual; norm(h, weight), h", llama)
    rows, graphs = assert_same(function, tensors(device=device))
    assert rows[0].fused == ["residual"]
    assert options_of(graphs[0]).round_before_weight is False


def test_heads_in_the_order_of_attention(device):
    """Of queries as a view (B, H, S, D) a written-out norm has the view's strides: it is left."""

    def function(t):
        return _llama({**t, "x": t["x"].view(B, -1, 3, D).transpose(1, 2)}), t["x"] * 2

    t = tensors(BF16, device=device)
    t["x"] = torch.randn(B, S, 3 * D, device=device).bfloat16().requires_grad_()
    rows, _ = assert_same(function, t)
    assert [(row.operator, "strides" in row.notes[-1]) for row in rows] == [(None, True)]


def test_two_norms_of_one_stream(device):
    function = model(
        "h = residual + x; h = h + torch.tanh(norm(h, weight)); y = h.float(); "
        f"(y * {ROOT} * (1.0 + weight.float())).type_as(h), F.layer_norm(h, (D,)), h", llama,
    )  # fmt: skip
    rows, _ = assert_same(function, tensors(BF16, device=device))
    assert [row.operator for row in rows] == ["add_layer_norm", "add_layer_norm", "layer_norm"]
    assert [row.statistic for row in rows] == ["rms", "rms", "layer"]


# ---- Near misses -------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(S, D), (1,), (S, 1), (1, 1, D)])
def test_weights_of_other_shapes(shape):
    function = model("x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight")
    t = tensors()
    t["weight"] = torch.randn(shape).requires_grad_()
    rows, graphs = assert_same(function, t)
    assert [row.operator for row in rows] == ["layer_norm"]
    (node,) = graphs[0].graph.find_nodes(op="call_function", target=LAYER_NORM.overload)
    assert LAYER_NORM.arguments(*node.args).weight is None


@pytest.mark.parametrize("text", ["z * (2 + weight)", "z * (1.0 + weight.float()).to(x.dtype)"])
def test_sums_with_the_weight(text):
    """The sum itself, rounded where the model rounds it, is the weight."""
    for dtype in (F32, BF16):
        torch._dynamo.reset()
        _, graphs = assert_same(model(WEIGHTLESS + text), tensors(dtype))
        assert options_of(graphs[0]).weight_offset == 0.0


def test_used_before_the_weight():
    rows, graphs = assert_same(model(WEIGHTLESS + "z * weight, z"), tensors())
    assert rows[0].fused == []
    assert len(calls_of(graphs[0])) == 2


def test_autocast(device):
    """Llama's class under autocast: its stream may be float32 and its weight float32."""

    def function(t):
        with torch.autocast(device, BF16):
            branch = F.linear(t["x"], t["weight"].expand(D, D))
            h = t["residual"] + branch
            return llama(h, t["weight"]), llama(branch, t["weight"]), h

    t = {name: tensor.detach() for name, tensor in tensors(device=device).items()}
    result, rows, _ = run(function, t)
    torch.testing.assert_close(result, function(t), rtol=1e-2, atol=1e-2)
    assert [row.fused for row in rows] == [["residual"], []]


# ---- Rules, plain calls --------------------------------------------------


_residual = model("h = residual + x; norm(h, weight), h", llama)


@pytest.mark.parametrize(
    "function", [_residual, model(WIDE + f"(y * {ROOT} * (1.0 + weight.float())).type_as(x)"),
                 model("F.rms_norm(x, (D,), weight, 1e-6)")],
)  # fmt: skip
def test_forward_is_left_to_inductor(device, function):
    """The aten_ variant computes the same, and its backward pass is this package's."""
    t = tensors(BF16, device=device)
    expected = outputs_and_gradients(function, t)
    operators = []

    def through_the_pass(t):
        result, _, graphs = run(function, t, then="inductor")
        operators.extend(operators_of(graphs[0]))
        return result

    found = outputs_and_gradients(function, t, through_the_pass)
    assert operators == ["aten_add_layer_norm" if function is _residual else "aten_layer_norm"]
    torch.testing.assert_close(found[0], expected[0])
    for name in ("x", "weight"):
        torch.testing.assert_close(found[1][name], expected[1][name], rtol=0.02, atol=0.05)


@pytest.mark.skipif(not fused_layernorm.compile.choice.CHOOSES, reason="Dynamo of torch 2.10")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("options", [{}, {"weight_offset": 1.0, "round_before_weight": True}])
def test_calls_under_plain_compile(device, options, dynamic):
    """Without the graph pass the rules leave to Inductor what it can write for a call."""
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
    expected = ["layer_norm"] if dynamic else ["aten_layer_norm"] if options else []
    assert operators_of(graphs[0]) == expected


@pytest.mark.skipif(not fused_layernorm.compile.choice.CHOOSES, reason="Dynamo of torch 2.10")
def test_swapped_classes_under_compile(device, monkeypatch):
    """A swapped class is its own forward in a graph, where the graph pass finds it."""
    monkeypatch.setattr(fused_layernorm.stock, "_cpu_operators", True)
    graphs = []

    def seen(graph_module, example_inputs):
        graphs.append(graph_module)
        return graph_module.forward

    norm, x = WrittenHere(256).to(device), torch.randn(3, 256, device=device)
    stock = norm(x)
    fused_layernorm.swap_rms_norm(norm)
    torch.testing.assert_close(torch.compile(norm, backend=seen, fullgraph=True)(x), stock)
    assert operators_of(graphs[0]) == []
    assert operators_of(fused_layernorm.fuse(graphs[0])) != []


def test_explain(device):
    t = tensors(BF16, device=device)
    text = str(fused_layernorm.explain(_residual, t))
    assert "RMSNorm written out" in text
    assert 'aten_add_layer_norm, "rms" [1]' in text
    assert "1 norm in 1 graph, 1 replaced" in text

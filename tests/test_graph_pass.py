# SPDX-License-Identifier: Apache-2.0
"""The graph pass: the norms that it finds, however they are written, what it fuses with them, what
it leaves and why, and that results, strides and gradients stay.

A row of a table is a program (see captured.model) with what becomes of it. The tests make the pass
run on the CPU too, where the operators are PyTorch's own.
"""

import warnings
from pathlib import Path
from typing import Any

import captured
import pytest
import torch
import torch.nn.functional as F
from captured import B, C, D, S, detached, groups, layer, llama, model, rms, run, tensors
from compiling import afresh, everywhere  # noqa: F401
from swaps import outcome, same
from tiny_transformers import decoder
from torch import nn
from torch.utils.checkpoint import checkpoint

import fused_layernorm as fl
from fused_layernorm.compile import graph_pass, patterns
from fused_layernorm.ops import formulas

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
LN, ADD, ADA, ADD_ADA = "layer_norm", "add_layer_norm", "ada_layer_norm", "add_ada_layer_norm"

pytestmark = [
    pytest.mark.usefixtures("everywhere"),
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),
]


def check(function, t, operators, fused="", note=""):
    """Asserts that results stay, what becomes of the norms in the order of the graph (None: left),
    what is fused with the first, and what is said of it; returns the rows and the graph."""
    rows, graphs = captured.assert_same(function, t)
    assert [row.operator for row in rows] == operators
    assert captured.operators_of(graphs[0]) == [name for name in operators if name]
    if rows:
        assert rows[0].fused == fused.split()
        assert note in " ".join(note for row in rows for note in row.notes)
    return rows, graphs[0]


def calls_of(graph_module):
    return [n for n in graph_module.graph.nodes if n.op in ("call_function", "call_method")]


def fused_of(graph_module):
    """The graph's only node of an operator of this package."""
    (node,) = (n for n in calls_of(graph_module) if "fused_layernorm" in str(n.target))
    return node


def options_of(graph_module):
    """The options of the graph's only norm."""
    node = fused_of(graph_module)
    return formulas.call_of(node.target)(*node.args)


def copies_in(graph_module):
    return [n for n in calls_of(graph_module) if n.target is torch.ops.aten.contiguous.default]


# ---- Ways to write a norm ----------------------------------------------------------------------

VAR = "mean = x.mean(-1, keepdim=True); var = x.var(-1, unbiased=False, keepdim=True); "
LAYERS = [
    "F.layer_norm(x, (D,), weight, bias, 1e-6)",
    "F.layer_norm(input=x, normalized_shape=[D], weight=weight, bias=bias, eps=1e-6)",
    "torch.layer_norm(x, (D,), weight, bias)",
    "torch.native_layer_norm(x, (D,), weight, bias, 1e-5)[0]",
    "F.layer_norm(x, (S, D))",
    "F.layer_norm(x.float(), (D,), weight.float(), bias.float()).to(x.dtype)",
    "fl.layer_norm(x, weight, bias)",  # as a swapped module calls it
    VAR + "weight * ((x - mean) * torch.rsqrt(var + 1e-6)) + bias",
    "mean = torch.mean(x, dim=-1, keepdim=True); "
    "var = torch.var(x, dim=-1, correction=0, keepdim=True); "
    "(x - mean) / torch.sqrt(var + 1e-6) * weight + bias",
    "u = x.mean(-1, keepdim=True); s = (x - u).pow(2).mean(-1, keepdim=True); "
    "weight * ((x - u) / torch.sqrt(s + 1e-6)) + bias",
    "y = x.float(); u = y.mean((-1,), True); s = torch.square(y - u).mean((-1,), True); "
    "weight * ((y - u) * (s + 1e-6) ** -0.5).to(x.dtype) + bias",
    "c = x - x.mean(-1, keepdim=True); c * torch.rsqrt((c * c).mean(-1, keepdim=True) + 1e-6)",
    "u = x.mean(-1, keepdim=True); v = (x**2).mean(-1, keepdim=True); "
    "(x - u) * torch.rsqrt(v - u**2 + 1e-5)",
]
MEAN_OF_SQUARES = LAYERS[9]


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("text", LAYERS)
def test_ways_to_write_a_layer_norm(device, text, dtype):
    _, graph = check(model(text), tensors(dtype, device=device), [LN])
    # The operator replaces all of the norm: no cast and no affine step remains.
    assert len(calls_of(graph)) == 1


WIDE, ROOT = "y = x.float(); ", "torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)"
GEMMA = WIDE + f"(y * {ROOT} * (1.0 + weight.float())).type_as(x)"
WEIGHTLESS = "y = x.float(); z = (y * torch.rsqrt(y.square().mean(-1, True) + 1e-6)).type_as(x); "
# transformers' T5LayerNorm and diffusers' RMSNorm: x itself is not widened.
T5 = (
    "v = x.to(torch.float32).pow(2).mean(-1, keepdim=True); z = x * torch.rsqrt(v + 1e-6); "
    "z = z.to(weight.dtype) if weight.dtype in (torch.float16, torch.bfloat16) else z; "
)
WITH_ALL = "fl.rms_norm(x, weight, 1e-6, weight_offset=0.5, round_before_weight=True)"
# By form: (the offset of the weight, whether half precision is rounded before the weight).
# A sum with the weight stays in the graph, as the weight.
PLAIN, ROUNDED, SUM = (0.0, False), (0.0, True), (0.0, False, 1)
ROOTS = {
    "F.rms_norm(x, (D,), weight, 1e-6)": PLAIN,
    "F.rms_norm(x, [D], weight=weight)": PLAIN,
    "torch.rms_norm(x, (D,), weight, 1e-6)": PLAIN,
    "torch.ops.aten.rms_norm.default(x, [D], weight, 1e-6)": PLAIN,
    "torch.ops.aten._fused_rms_norm.default(x, [D], weight, 1e-6)[0]": PLAIN,
    "F.rms_norm(x.float(), (D,), weight.float(), 1e-6).to(x.dtype)": PLAIN,
    "fl.rms_norm(x, weight, 1e-6, bias=bias)": PLAIN,
    WITH_ALL: (0.5, True),
    "llama(x, weight)": ROUNDED,
    WIDE + f"(y * {ROOT}).type_as(x) * weight": ROUNDED,  # Llama 4
    WIDE + f"(weight * (y * {ROOT})).to(x.dtype)": PLAIN,  # OLMo
    WIDE + f"(weight.to(torch.float32) * (y * {ROOT})).to(x.dtype)": PLAIN,  # Nemotron
    GEMMA: SUM,
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


@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, BF16), (BF16, F32), (F16, F16)])
@pytest.mark.parametrize("text", ROOTS)
def test_ways_to_write_an_rms_norm(device, text, dtypes):
    if "_fused_rms_norm" in text and device == "cuda" and dtypes[0] is not dtypes[1]:
        pytest.skip("PyTorch's CUDA kernel takes one dtype")
    t = tensors(dtypes[0], None, device, dtypes[1])
    (row,), graph = check(model(text, llama=llama), t, [LN])
    offset, rounds, *sums = ROOTS[text]
    assert len(calls_of(graph)) == 1 or sums  # no cast and no affine step remains
    options = options_of(graph)
    if text.startswith(T5):
        rounds = dtypes[1] is not F32
    if text != WITH_ALL:
        assert options.round_before_weight == (rounds and dtypes[0] is not F32)
    assert (row.statistic, options.statistic, options.weight_offset) == ("rms", "rms", offset)
    assert options.normalized_ndim == (2 if "(-2, -1)" in text else 1)


LIBRARIES = ("llama(x, weight)", T5 + "weight * z", "F.rms_norm(x, (D,), weight, 1e-6)")


@pytest.mark.parametrize("text", [text for text in ROOTS if ROOT in text or text in LIBRARIES])
def test_the_order_of_rounding_is_kept(device, text):
    """Another order of rounding would change a quarter of the elements by one unit."""
    function, t = model(text, llama=llama), detached(tensors(BF16, device=device))
    t["x"] = torch.randn(64, D * D, device=device).bfloat16().view(64, D, D)
    result, _, _ = run(function, t)
    assert (result == function(t)).float().mean() >= 0.999


def test_where_it_stands():
    for norm, form in ((nn.LayerNorm(D), "layer_norm"), (nn.RMSNorm(D), "rms_norm")):
        module = nn.Sequential(nn.Identity(), nn.Sequential(norm))
        _, (row,), graphs = run(module, torch.randn(B, D))
        assert captured.operators_of(graphs[0]) == [LN]
        assert (row.where, row.form, row.statistic) == ("1.0", form, form[: -len("_norm")])
    assert options_of(graphs[0]).eps == torch.finfo(F32).eps

    def function(x):
        return F.layer_norm(x, (D,))

    _, rows, _ = run(function, torch.randn(B, D))
    assert rows[0].where == f"test_graph_pass.py:{function.__code__.co_firstlineno + 1}"


MODELS = {"Llama": 5, "Gemma3": 13}  # norms of two layers


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(device, name):
    """Every norm of a decoder is replaced, also of queries and keys; the numbers are eager mode's.

    Gemma 3 normalizes queries as views, whose strides an operator would not give.
    """
    config = "Gemma3TextConfig" if name == "Gemma3" else None
    model, tokens = decoder(name, config, attn_implementation="eager")
    model = model.to(device, BF16).eval()
    inputs, rows = {"input_ids": tokens["input_ids"].to(device)}, []

    def logits(model, inputs):
        return model(**inputs, use_cache=False)[0]

    def through_the_pass(model, inputs):
        result, found, _ = run(logits, model, inputs)
        rows.extend(found)
        return result

    found, expected = outcome(model, inputs, through_the_pass), outcome(model, inputs, logits)
    left = [row for row in rows if row.operator is None]
    assert (len(rows), len(left)) == (MODELS[name], 2 if name == "Gemma3" else 0)
    assert all("strides" in row.notes[-1] for row in left)
    assert (found["output 0"] == expected["output 0"]).float().mean() >= 0.999
    same(found, expected, 0.03)


# ---- What surrounds it -------------------------------------------------------------------------

MODULATED, GATED = "scale shift", "residual gate"
ROWS_OF = "shift, scale, *_ = mod.chunk(6, dim=1); "
GATED_AND_MODULATED = "h = gate * x + residual; norm(h) * (1 + scale) + shift, h"
SURROUNDINGS: dict[str, tuple[str, str]] = {
    "h = residual + x; norm(h, weight, bias), h": (ADD, "residual"),
    "norm(x + residual, weight, bias)": (ADD, "residual"),
    "h = x + residual; doubled = h * 2; norm(h), doubled": (ADD, "residual"),
    "h = residual + gate * x; norm(h), h": (ADD_ADA, GATED),
    "h = residual + weight * x; norm(h), h": (ADD_ADA, GATED),
    "h = torch.addcmul(residual, x, gate); norm(h), h": (ADD_ADA, GATED),
    "norm(x) * (1 + scale) + shift": (ADA, MODULATED),
    "shift + (scale + 1.0) * norm(x)": (ADA, MODULATED),
    ROWS_OF + "norm(x) * (1 + scale[:, None]) + shift[:, None]": (ADA, MODULATED),
    ROWS_OF + "norm(x) * (1 + scale)[:, None, :] + shift.unsqueeze(1)": (ADA, MODULATED),
    ROWS_OF + "y = norm(x) * (1 + scale).unsqueeze(1).expand(B, S, D); "
    "y + shift.unsqueeze(1)": (ADA, MODULATED),
    "torch.addcmul(shift, norm(x), 1 + scale)": (ADA, MODULATED),
    "y = norm(x); y + y * scale + shift": (ADA, MODULATED),
    "norm(x, weight, bias) * (1 + scale)": (ADA, "scale"),
    "(norm(x.float()) * (1 + scale.float()) + shift.float()).type_as(x)": (ADA, MODULATED),
    GATED_AND_MODULATED: (ADD_ADA, f"{GATED} {MODULATED}"),
    "h = (residual.float() + x * gate.float()).type_as(residual); "
    "(norm(h.float()) * (1 + scale.float()) + shift.float()).type_as(h), h":
    (ADD_ADA, f"{GATED} {MODULATED}"),
    "norm(x) * (1 + weight) + bias": (ADA, MODULATED),
    "F.gelu(norm(x, weight, bias))": (LN, "activation"),
    "F.gelu(norm(x, weight), approximate='tanh') * 0.5": (LN, "activation factor"),
    "F.silu(norm(x))": (LN, "activation"),
    "y = norm(x); y * torch.sigmoid(y)": (LN, "activation"),
    "norm(x).relu()": (LN, "activation"),
    "h = x + residual; torch.relu(norm(h, weight, bias)), h": (ADD, "residual activation"),
    # No operator has both a gate and an activation: the product is left, or the sum.
    "h = residual + gate * x; F.gelu(norm(h)) * 0.5, h": (ADD, "residual activation factor"),
    "h = torch.addcmul(residual, gate, x); F.silu(norm(h)), h": (LN, "activation"),
    "h = F.dropout(x / 1.0, 0.0) + residual; norm(h), h": (ADD, "residual"),
    # A factor with a single column is not fused as a gate. The sum with its product is fused.
    "h = residual + mod[:, None, :1] * x; norm(h), h": (ADD, "residual"),
    # Near misses.
    "norm(x) * (1 + mod[:, None, :1])": (LN, ""),
    "norm(x) * scale + shift": (LN, ""),
    "norm(x) * (2 + scale) + shift": (LN, ""),
    "y = norm(x); y * (1 + scale), y": (LN, ""),
    "norm(x[:, :1]) * (1 + residual)": (LN, ""),
    "h = x[:, :1] + residual; norm(h), h": (LN, ""),
    "h = residual - x; norm(h), h": (LN, ""),
    "h = torch.add(residual, x, alpha=2); norm(h), h": (LN, ""),
    "y = norm(x); F.gelu(y) + y": (LN, ""),
}  # fmt: skip
# gate * x and the sum are float32 beside a float32 gate, but residual is not. So gate * x takes the
# place of the operator's residual.
BESIDE_FLOAT32 = {
    "h = residual + gate * x; norm(h), h": (ADD, "residual"),
    "h = torch.addcmul(residual, x, gate); norm(h), h": (LN, ""),
    GATED_AND_MODULATED: (ADD_ADA, f"residual {MODULATED}"),
}
OFFSET = {"norm(x) * (1 + weight) + bias": (LN, "")}  # of RMSNorm this is a weight with an offset


@pytest.mark.parametrize(
    ("norm", "every"),
    [  # of rms the rows alone, of llama the casts
        (layer, [(F32, F32), (BF16, BF16), (BF16, F32)]),
        (rms, [(F32, F32)]),
        (llama, [(BF16, BF16), (F32, F32)]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("text", SURROUNDINGS)
def test_surroundings(device, text, norm, every):
    for dtypes in every:
        torch._dynamo.reset()
        others = OFFSET if norm is not layer else BESIDE_FLOAT32 if dtypes[1] != dtypes[0] else {}
        operator, fused = others.get(text, SURROUNDINGS[text])
        t = tensors(dtypes[0], dtypes[1], device)
        (row,), _ = check(model(text, norm), t, [operator], fused)
        assert row.statistic == ("layer" if norm is layer else "rms")


# What follows a norm of groups, and what is fused with it.
GROUPS = {
    "norm(x, weight, bias) * 1": "",
    "F.silu(norm(x, weight, bias))": "activation",
    "y = norm(x, weight, bias); y * torch.sigmoid(y)": "activation",
    "F.leaky_relu(norm(x, weight, bias))": "activation",
    "F.silu(norm(x, weight, bias)) * 0.5": "activation factor",
    "norm(x, weight, bias) * (1 + scale) + shift": "scale shift",
    "F.silu(norm(x, weight, bias) * (1 + scale) + shift)": "scale shift activation",
    "F.relu(norm(x, weight, bias) + shift)": "",
    "F.silu(norm(x, weight, bias) * (1 + scale))": "scale activation",
    "F.silu(norm(x.float(), weight.float(), bias.float()).to(x.dtype))": "activation",
    "F.silu(torch.native_group_norm(x, weight, bias, 2, 12, 24, G, 1e-5)[0])": "activation",
    "F.relu(torch.group_norm(x, G))": "activation",
    "F.leaky_relu(F.instance_norm(x, weight=weight, bias=bias))": "activation",
    "F.silu(fl.group_norm(x, G, weight, bias))": "activation",
    # Near misses: another slope, a modulation of positions, a second reader.
    "F.leaky_relu(norm(x, weight, bias), 0.2)": "",
    "F.silu(norm(x, weight, bias) * (1 + x) + shift)": "",
    "y = norm(x, weight, bias); F.silu(y) + y": "",
}


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("text", GROUPS)
def test_groups(text, dtype):
    (row,), _ = check(model(text, groups), captured.images(dtype), ["group_norm"], GROUPS[text])
    assert "no compiler" in row.reason


@pytest.mark.parametrize("behind", ["F.conv2d(F.silu(y), kernel)", "F.silu(y)", "F.silu(y).sum(1)"])
def test_groups_of_other_strides(behind):
    """PyTorch gives a contiguous result; where a convolution alone reads it, nothing is copied."""
    t = captured.images() | {"x": torch.randn(2, 4, C, 6).transpose(1, 2).requires_grad_()}
    text = "kernel = torch.ones(2, C, 1, 1); y = norm(x, weight, bias); " + behind
    _, graph = check(model(text, groups), t, ["group_norm"], "activation")
    assert len(copies_in(graph)) == ("conv" not in behind)


def test_two_norms_of_one_stream(device):
    text = "h = residual + x; h = h + torch.tanh(norm(h, weight)); y = h.float(); "
    text += f"(y * {ROOT} * (1.0 + weight.float())).type_as(h), F.layer_norm(h, (D,)), h"
    t = tensors(BF16, device=device)
    rows, _ = check(model(text, llama), t, [ADD, ADD, LN], "residual")
    assert [row.statistic for row in rows] == ["rms", "rms", "layer"]


# ---- What is left, and what is said of it ------------------------------------------------------

OVER_TWO = "u = x.mean((0, 1), True); (x - u) / torch.sqrt((x - u).pow(2).mean((0, 1), True) + 1)"
# The operators of a program's norms, what is fused with the first, and what is said of it.
LEFT: dict[str, tuple[list[Any], str, str]] = {
    # No norms.
    **dict.fromkeys([
        "(x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-6)",  # unbiased
        "(x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6)",
        VAR + "(x - residual.mean(-1, keepdim=True)) * torch.rsqrt(var + 1e-6)",
        VAR + "(residual - mean) * torch.rsqrt(var + 1e-6)",
        VAR + "(x - mean) * torch.rsqrt(x.var(1, False, keepdim=True) + 1e-6)",
        VAR + "(x - mean) * torch.rsqrt(var + weight.square().sum())",
        # It would have to be regrouped to be a norm.
        "var, mean = torch.var_mean(x, dim=-1, correction=0, keepdim=True); "
        "weight * (x - mean) * torch.rsqrt(1e-6 + var) + bias",
        "x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)",
        "x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + bias.square().sum())",
        "x * torch.rsqrt((x + 1).pow(2).mean(-1, keepdim=True) + 1e-6)",
        "x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6 + 1)",
        "y = x.abs() + 1; y * torch.rsqrt(y.pow(3).mean(-1, keepdim=True) + 1e-6)",
        "x * torch.rsqrt((x * residual).mean(-1, keepdim=True).abs() + 1e-6)",
        "residual * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)",
        "x / torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)",
        "x / (torch.sqrt(x.pow(2).mean(-1, keepdim=True)) + 1e-6)",
        "x * torch.rsqrt(x.bfloat16().pow(2).mean(-1, keepdim=True) + 1e-6)",
        "x * torch.rsqrt(x.pow(2).mean() + 1e-6)",
    ], ([], "", "")),
    # Writes between a norm and what would be fused with it.
    **dict.fromkeys([
        "y = x * 1.5; h = residual + y; y.mul_(2); norm(h), y",
        "h = residual + x; h += 1; norm(h), h",
        "h = residual * 1.5; h += x; norm(h), h",
        "s = scale * 1.5; y = norm(x) * (1 + s); s.mul_(0); y, s",
        # The sum is float32, but the only operand that could be the residual is bfloat16.
        "h = x.bfloat16() + mod[:, None, :D]; norm(h), h",
        # A weight of RMSNorm, behind a second reader.
        WEIGHTLESS + "z * weight, z",
    ], ([LN], "", "")),
    "h = residual + x; norm(h, weight), norm(h, bias), h": ([ADD, LN], "residual", ""),
    "h = residual + x; s = h.mean(1, keepdim=True); norm(h) * (1 + s) + bias, h":
    ([ADA], MODULATED, "uses the sum before"),
    # The shift is the sum, and the norm itself.
    "h = residual + x; norm(h) * (1 + x) + h, h":
    ([ADA], MODULATED, "an operand is what the operator would replace"),
    "h = residual + x; y = norm(h); y + y * scale + y, h":
    ([ADD], "residual", "an operand is what the operator would replace"),
    OVER_TWO: ([None], "", "it normalizes over dimensions [0, 1], which are not the last"),
    "torch.native_layer_norm(x, (D,), None, None, 1e-5)": ([None], "", "statistics"),
    "torch.ops.aten._fused_rms_norm.default(x, [D], weight, 1e-6)": ([None], "", "statistics"),
    "h = residual + x; other = mod * 2; other.mul_(2); y = norm(h); y.mul_(2); y, h, other":
    ([ADD], "residual", ""),
    "with torch.no_grad(): h = residual + x; norm(h, weight)": ([LN], "", "gradient mode"),
    "c = x.bfloat16(); with torch.no_grad(): h = c.float(); norm(h, weight)":
    ([None], "", "gradient mode"),
    # The operator's sum would be contiguous.
    "y, z = (a.mT.contiguous().mT for a in (x, residual)); h = y + z; norm(h), h":
    ([LN], "", "strides"),
}  # fmt: skip


@pytest.mark.parametrize("text", LEFT)
def test_what_is_left(device, text):
    check(model(text), tensors(device=device), *LEFT[text])


LEFT_OF_GROUPS: dict[str, tuple[list[Any], str]] = {
    "norm(x.double()).to(torch.int64).float()": (["group_norm"], ""),
    "torch.native_group_norm(x, weight, bias, 2, 12, 24, G, 1e-5)[:2][1]": ([], ""),
    "y, m, r = torch.native_group_norm(x, weight, bias, 2, 12, 24, G, 1e-5); y + m.sum()":
    ([None], "statistics"),
    "F.instance_norm(x, weight.detach(), bias.detach().abs(), use_input_stats=False)": ([], ""),
    "x = x + 1; y = norm(x); x.add_(1); F.silu(y) + x": (["group_norm"], "into an operand"),
    # Into the result of an operator that has taken a norm's place.
    "x = norm(x); y = F.group_norm(x, 1); x.mul_(x); F.silu(y) + x": (2 * ["group_norm"], ""),
}  # fmt: skip


@pytest.mark.parametrize("text", LEFT_OF_GROUPS)
def test_what_is_left_of_groups(text):
    operators, note = LEFT_OF_GROUPS[text]
    check(model(text, groups), detached(captured.images()), operators, "", note)


def test_wider_and_narrower_between():
    """A float64 norm of a float32 x stays float64: float32 would differ by more than rounding. A
    rounding to bfloat16 is kept, also if a cast to float32 follows it."""
    _, graph = check(model("norm(x.double()).float()"), tensors(), [LN])
    assert fused_of(graph).args[0].meta["example_value"].dtype == F64
    y, rows, _ = run(lambda x: layer(x).bfloat16().float(), torch.randn(B, D))
    assert torch.equal(y, y.bfloat16().float())
    assert rows[0].operator == LN


SUMS = ("z * (2 + weight)", "z * (1.0 + weight.float()).to(x.dtype)")
# A program, the dtypes of x and weight, what becomes of it, and the operator's options.
OPTIONS: list[tuple[str, tuple[torch.dtype, ...], tuple[Any, ...], dict[str, Any]]] = [
    # T5's class with a bfloat16 weight rounds float32 rows to bfloat16: the product is left.
    (T5 + "weight * z", (F32, BF16), ([LN], "", "one dtype"), {"round_before_weight": False}),
    # A half-precision branch is added to a float32 stream, which is not rounded before weight.
    ("h = x.bfloat16() + residual; llama(h, weight), h", (F32, F32), ([ADD], "residual"),
     {"round_before_weight": False}),
    # The sum itself, rounded where the model rounds it, is the weight.
    *((WEIGHTLESS + text, (dtype, dtype), ([LN],), {"weight_offset": 0.0})
      for text in SUMS for dtype in (F32, BF16)),
]  # fmt: skip


@pytest.mark.parametrize(("text", "dtypes", "expected", "options"), OPTIONS)
def test_options(device, text, dtypes, expected, options):
    t = tensors(dtypes[0], device=device, parameter_dtype=dtypes[1])
    _, graph = check(model(text, llama=llama), t, *expected)
    found = options_of(graph)
    assert {name: getattr(found, name) for name in options} == options


def test_rounding_between_float32_and_float32():
    """A rounding to bfloat16 in the middle of float32 arithmetic is kept."""
    function = model("y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6); "
                     "y.bfloat16() * weight")  # fmt: skip
    t = detached(tensors())
    result, rows, _ = run(function, t)
    assert rows[0].operator == LN
    said = "the norm is rounded to bfloat16 before its weight, beside an input of float32"
    assert rows[0].notes == [said]
    assert torch.equal(result / t["weight"], function(t) / t["weight"])


@pytest.mark.parametrize("shape", [(S, D), (1,), (S, 1), (1, 1, D)])
def test_weights_of_other_shapes(shape):
    function = model("x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight")
    t = tensors() | {"weight": torch.randn(shape).requires_grad_()}
    _, graph = check(function, t, [LN])
    assert options_of(graph).weight is None


# ---- Writes and modes --------------------------------------------------------------------------


def refuses_backward(function, t):
    """Whether eager PyTorch itself says that a write took from backward what it reads."""
    try:
        function(t).sum().backward()
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return True
    return False


@pytest.mark.parametrize(
    ("text", "norm"),
    [
        ("y = x * 1.5; u = y.mean(-1, keepdim=True); "
         "z = (y - u) * torch.rsqrt((y - u).pow(2).mean(-1, keepdim=True) + 1e-6); y.mul_(2); z, y",
         layer),
        ("y = (x * 1.5).bfloat16(); z = norm(y.float()); y.mul_(2); z, y", layer),
        ("y = (x * 1.5).bfloat16(); z = norm(y); y.mul_(2); z, y", llama),
        # Of an x that is not contiguous PyTorch's backward read a copy until 2.15, which refuses.
        ("x = (x + 0.0).mT.contiguous().mT; y = norm(x); x.mul_(2); y + x", groups),
    ],
)  # fmt: skip
def test_writes_into_what_backward_reads(device, text, norm):
    """In backward the norm as written reads its own copy of x, but the operator would read x."""
    function, t = model(text, norm), captured.images() if norm is groups else tensors(device=device)
    check(function, detached(t), [None], "", "mul_ writes into what backward reads")
    if norm is not groups or not refuses_backward(function, t):
        check(function, t, [None], "", "mul_ writes into what backward reads")
    with torch.no_grad():
        _, rows, _ = run(function, t, then="inductor")
    assert rows[0].operator is not None  # AOTAutograd removes the write


BRANCH = "with autocast: branch = F.linear(x, weight.expand(D, D));h = residual + branch"
# Norms under autocast, and behind it, with the tolerance and what is fused with each.
AUTOCAST: dict[str, tuple[Any, float, list[list[str]]]] = {
    BRANCH + ";y = norm(h, weight, bias); y, h": (layer, 1e-4, [["residual"]]),
    BRANCH + "; norm(h, weight, bias), h": (layer, 1e-4, [[]]),
    # A bfloat16 sum gives a float32 norm on CUDA, a bfloat16 one on the CPU.
    "with autocast: h = F.linear(x, weight.expand(D, D)) + F.linear(residual, x[0, 0].expand(D, D))"
    ";y = norm(h) * (1 + scale); y, h": (layer, 5e-2, [["residual", "scale"]]),
    # Llama's stream may be float32, and its weight float32.
    BRANCH + ";y, z = norm(h, weight), norm(branch, weight); y, z, h":
    (llama, 1e-2, [["residual"], []]),
}  # fmt: skip


@pytest.mark.parametrize("text", AUTOCAST)
def test_autocast(device, text):
    norm, tolerance, fused = AUTOCAST[text]
    text = text.replace("autocast:", f"torch.autocast({device!r}, torch.bfloat16):")
    function, t = model(text, norm), detached(tensors(device=device))
    result, rows, _ = run(function, t)
    torch.testing.assert_close(result, function(t), rtol=min(tolerance, 2e-2), atol=tolerance)
    assert [row.fused for row in rows] == fused


def test_convolutions_cast_under_autocast():
    """A convolution casts what it reads; the kernel writes that."""
    conv = nn.Conv2d(C, C, 3)

    def function(x):
        with torch.autocast("cpu", BF16):
            return conv(F.silu(groups(x)))

    x = torch.randn(2, C, 4, 6)
    found, (row,), (graph,) = run(function, x)
    assert row.fused == ["activation", "cast"]
    assert fused_of(graph).meta["example_value"].dtype is BF16
    torch.testing.assert_close(found, function(x), rtol=2e-2, atol=2e-2)


# Uses of a norm's result y, in several layouts, all casts to bfloat16 under autocast. w: a matrix.
CAST = {
    "one linear": lambda y, w: F.linear(y, w),
    "three products": lambda y, w: (y @ w, torch.matmul(y, w), torch.bmm(y, w.expand(B, D, D))),
    "behind views": lambda y, w: (
        F.linear(torch.roll(y.view(B, S, 2, D // 2), shifts=(-1,), dims=(1,)).flatten(2), w),
        torch.addmm(w[0], y.permute(1, 0, 2).contiguous().view(-1, D), w),
        F.linear(F.pad(y, (0, 0, 0, 2)), w),
    ),
    "part of it": lambda y, w: F.linear(y[:, 0], w),
}


@torch.library.custom_op("tests_graph_pass::mm", mutates_args=())
def _own_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Has the name of an operator that autocast knows, but autocast casts nothing for it."""
    assert a.dtype == F32
    return (a.flatten(0, -2) @ b.to(a.dtype)).to(BF16)


@_own_mm.register_fake
def _(a, b):
    return a.new_empty((a.numel() // a.shape[-1], b.shape[-1]), dtype=BF16)


# Uses of y of which one at least reads it in float32.
READ_IN_FLOAT32 = {
    "as residual": lambda y, w: y + F.linear(y, w),
    "given back": lambda y, w: (F.linear(y, w), y),
    "view given back": lambda y, w: (F.linear(y.flatten(1).view_as(y), w), y.flatten(1)),
    "padded with a third": lambda y, w: F.linear(F.pad(y, (0, 0, 0, 2), value=1 / 3), w),
    "written into": lambda y, w: F.linear(y.mul_(2), w),
    "nothing cast": lambda y, w: y.permute(1, 0, 2),
    "shown as bytes": lambda y, w: F.linear(y.view(torch.float32), w),
    "somebody else's": lambda y, w: torch.ops.tests_graph_pass.mm(y, w),
}
PLAIN_TEXT, ADA_TEXT = "norm(x, weight, bias)", "norm(residual + x) * (1 + scale) + shift"


def _under_autocast(use, device, text):
    def function(t):
        with torch.autocast(device, BF16):
            # The second argument is a matrix that does not depend on the norm's input.
            return use(normalize(t), t["weight"].expand(D, D) * t["bias"][:, None])

    normalize = model(text)
    return function


@pytest.mark.parametrize("text", [PLAIN_TEXT, ADA_TEXT])
@pytest.mark.parametrize("use", CAST)
def test_results_that_autocast_casts(device, use, text):
    """The kernel rounds the results itself. The products read the same numbers, but gradients from
    several products are summed in bfloat16."""
    function = _under_autocast(CAST[use], device, text)
    t = tensors(device=device)
    expected, expected_gradients = captured.outputs_and_gradients(function, t)
    _, rows, graphs = run(function, t)
    assert "cast" in rows[0].fused
    found, gradients = captured.outputs_and_gradients(function, t, lambda t: run(function, t)[0])
    assert {y.dtype for y in found} == {BF16}
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2, check_stride=True)
    for name, gradient in expected_gradients.items():
        if gradient is not None:
            limit = 0.02 * gradient.abs().max().item()
            assert gradients[name].dtype == gradient.dtype
            torch.testing.assert_close(gradients[name], gradient, rtol=0.02, atol=limit)
    node = fused_of(graphs[0])
    assert BF16 in node.args
    # If the operator also returns the sum, its first result is the one that is cast.
    behind = [user for user in node.users if user.args != (node, 1)]
    assert behind
    while behind:
        user = behind.pop()
        assert user.meta["example_value"].dtype == BF16
        behind += [other for other in user.users if other.op != "output"]


@pytest.mark.parametrize("use", READ_IN_FLOAT32)
def test_results_that_are_read_in_float32(device, use):
    function = _under_autocast(READ_IN_FLOAT32[use], device, PLAIN_TEXT)
    t = detached(tensors(device=device))
    expected = function(t)
    result, rows, _ = run(function, t)
    assert rows[0].operator == LN
    assert "cast" not in rows[0].fused
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("use", "fused"), [("one linear", ["cast"]), ("three products", [])])
def test_float16_has_no_range_for_sums_of_gradients(use, fused):
    """The gradient of one product is float16 in any case, but a sum over several is float32."""

    def function(x, w):
        with torch.autocast("cpu", F16):
            return CAST[use](layer(x), w)

    _, rows, _ = run(function, torch.randn(B, S, D), torch.randn(D, D))
    assert rows[0].fused == fused


def test_rows_that_do_not_lie_side_by_side(device):
    """The copy of rows that no kernel reads where they lie stays in the graph, but before a norm
    alone, whose kernels may read them."""
    t = tensors(device=device)
    t["x"] = torch.randn(B, 2 * D, S, device=device).requires_grad_()
    check(model("norm(x[:, ::2].transpose(1, 2), weight)"), t, [LN])
    text = "norm(x[:, ::2].transpose(1, 2), weight) * (1 + scale)"
    _, graph = check(model(text), t, [ADA], "scale")
    (copied,) = copies_in(graph)
    assert [*copied.users] == [fused_of(graph)]
    assert copied.meta["example_value"].is_contiguous()


# ---- Sub-graphs, dynamic shapes ----------------------------------------------------------------


def test_checkpoint_bodies(device):
    body = model(GATED_AND_MODULATED)

    def function(t):
        return checkpoint(body, t, use_reentrant=False)

    check(function, tensors(device=device), [ADD_ADA], f"{GATED} {MODULATED}")


def test_inside_a_transform():
    """Inside vmap, operands do not have the shapes of their example values."""
    function, t = model("torch.func.vmap(lambda x: norm(x))(x)"), tensors()
    result, rows, _ = run(function, t)
    torch.testing.assert_close(result, function(t))
    assert all(row.operator is None for row in rows)


ACTIVATED = "F.gelu(norm(x, weight), approximate='tanh') * 0.5"


@pytest.mark.parametrize("text", [GATED_AND_MODULATED, MEAN_OF_SQUARES, ACTIVATED])
def test_dynamic_shapes(text):
    """The pass adds no guard."""
    function, seen = model(text), []

    def counting(graph_module, example_inputs):
        examples: list[Any] = [n.meta.get("example_value") for n in graph_module.graph.nodes]
        fakes: Any = [t for t in examples if isinstance(t, torch._subclasses.FakeTensor)]
        guards = fakes[0].fake_mode.shape_env.guards
        before = len(guards)
        (row,) = graph_pass.run(graph_module, graph_pass.Settings(False))
        seen.append((row.operator is not None, len(guards) - before))
        return graph_module.forward

    compiled = torch.compile(function, backend=counting, fullgraph=True, dynamic=True)
    for batch, length in ((2, 5), (3, 7), (6, 11)):
        sizes = {"x": (batch, length, D), "residual": (batch, length, D), "mod": (batch, 6 * D)}
        t = tensors() | {name: torch.randn(s).requires_grad_() for name, s in sizes.items()}
        torch.testing.assert_close(compiled(t), function(t))
    assert seen == [(True, 0)]  # one compilation


def test_shapes_that_are_not_known_to_be_equal():
    """If each tensor has sizes of its own, the sum might broadcast. It may be left; y holds."""
    t = {name: torch.randn(4, 3, D) for name in ("x", "residual")}
    for tensor in t.values():
        torch._dynamo.decorators.mark_unbacked(tensor, 0)
    function = model("norm(x + residual)")
    result, rows, _ = run(function, t, dynamic=True)
    torch.testing.assert_close(result, function(t))
    assert rows[0].fused in ([], ["residual"])


def test_nothing_on_the_cpu(monkeypatch):
    monkeypatch.undo()
    _, rows, graphs = run(lambda x: layer(x), torch.randn(3, D))
    assert rows == []
    assert captured.operators_of(graphs[0]) == []


def test_an_error_of_the_pass(monkeypatch):
    """After an error in the pass the model runs, and one warning names the node."""

    def fail(*args):
        raise ZeroDivisionError("by design")

    monkeypatch.setattr("fused_layernorm.compile.replace.apply", fail)
    t = tensors()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result, rows, _ = run(model(GATED_AND_MODULATED), t)
    torch.testing.assert_close(result, model(GATED_AND_MODULATED)(t))
    (text,) = (str(w.message) for w in caught if "fused_layernorm" in str(w.message))
    assert rows[0].name in text
    assert "ZeroDivisionError: by design" in text


# ---- Inductor, plain calls, explain ------------------------------------------------------------


def test_forward_is_left_to_inductor(device):
    """The aten_ variant computes the same."""
    function = model("h = residual + x; llama(h, weight), h", llama=llama)
    t = detached(tensors(BF16, device=device))
    result, _, (graph,) = run(function, t, then="inductor")
    assert captured.operators_of(graph) == ["aten_add_layer_norm"]
    torch.testing.assert_close(result, function(t))


# ---- Graphs of torch.export ---------------------------------------------------------------------

# A program, the dtype of its tensors, and the operators that it gets.
EXPORTED = [
    (GATED_AND_MODULATED, F32, [ADD_ADA]),
    ("h = x + residual; llama(h, weight), F.rms_norm(x, (D,), bias, 1e-6) * 2", BF16, [ADD, LN]),
]


@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize(("text", "dtype", "operators"), EXPORTED)
def test_exported_graphs(text, dtype, operators, decomposed):
    program_of, t = nn.Module(), detached(tensors(dtype))
    function = model(text, llama=llama)
    program_of.forward = lambda t: function(t)
    program = torch.export.export(program_of, (t,))
    if decomposed:
        aten = torch.ops.aten
        table: Any = {aten.rms_norm.default: lambda *given: aten._fused_rms_norm.default(*given)[0]}
        program = program.run_decompositions(table if dtype is BF16 else {})
    fused = program.module()
    assert fl.fuse(fused, then="eager") is fused
    assert sorted(captured.operators_of(fused)) == operators
    torch.testing.assert_close(fused(t), function(t))


def test_fuse_of_another_word():
    module = torch.fx.symbolic_trace(nn.LayerNorm(D))
    with pytest.raises(ValueError, match="expected then 'inductor' or 'eager', got 'tensorrt'"):
        fl.fuse(module, then="tensorrt")
    assert fl.fuse(module) is module  # no examples: nothing to do


def test_docs_list_the_patterns():
    page = (Path(__file__).parents[1] / "docs" / "compile.md").read_text()
    affine = patterns.AFFINES
    behind = (*affine, *patterns.MODULATIONS, *patterns.ACTIVATIONS, *patterns.FACTORS)
    inside = (*patterns.VARIANCES[1:], *patterns.MEAN_SQUARES)
    for expression in (*inside, *patterns.SUMS, *behind):
        assert f"`{expression}`" in page

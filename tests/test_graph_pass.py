# SPDX-License-Identifier: Apache-2.0
"""The graph pass: the layer norms that it finds, what it fuses with them, what it leaves alone, and
that results stay the same.

The tests make the pass run on the CPU too, where the operators are PyTorch's own.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from captured import (
    B,
    D,
    S,
    assert_same,
    layer,
    llama,
    model,
    operators_of,
    outputs_and_gradients,
    rms,
    run,
    tensors,
)
from captured import layer as norm
from compiling import afresh, everywhere  # noqa: F401
from torch.utils.checkpoint import checkpoint

import fused_layernorm
from fused_layernorm.compile import graph_pass, patterns

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


pytestmark = pytest.mark.usefixtures("everywhere")


# ---- Ways to write a layer norm ----------------------------------------------------------------

VAR = "mean = x.mean(-1, keepdim=True); var = x.var(-1, unbiased=False, keepdim=True); "
WAYS = {
    "function": "F.layer_norm(x, (D,), weight, bias, 1e-6)",
    "keywords": "F.layer_norm(input=x, normalized_shape=[D], weight=weight, bias=bias, eps=1e-6)",
    "torch.layer_norm": "torch.layer_norm(x, (D,), weight, bias)",
    "native": "torch.native_layer_norm(x, (D,), weight, bias, 1e-5)[0]",
    "two dimensions": "F.layer_norm(x, (S, D))",
    "float32 detour": "F.layer_norm(x.float(), (D,), weight.float(), bias.float()).to(x.dtype)",
    "var and rsqrt": VAR + "weight * ((x - mean) * torch.rsqrt(var + 1e-6)) + bias",
    "var and sqrt": "mean = torch.mean(x, dim=-1, keepdim=True); "
    "var = torch.var(x, dim=-1, correction=0, keepdim=True); "
    "(x - mean) / torch.sqrt(var + 1e-6) * weight + bias",
    "mean of squares": "u = x.mean(-1, keepdim=True); s = (x - u).pow(2).mean(-1, keepdim=True); "
    "weight * ((x - u) / torch.sqrt(s + 1e-6)) + bias",
    "mean of squares in float32": "y = x.float(); u = y.mean((-1,), True); "
    "s = torch.square(y - u).mean((-1,), True); "
    "weight * ((y - u) * (s + 1e-6) ** -0.5).to(x.dtype) + bias",
    "centered product": "c = x - x.mean(-1, keepdim=True); "
    "c * torch.rsqrt((c * c).mean(-1, keepdim=True) + 1e-6)",
    "square of mean": "u = x.mean(-1, keepdim=True); v = (x**2).mean(-1, keepdim=True); "
    "(x - u) * torch.rsqrt(v - u**2 + 1e-5)",
}


def _swapped(t):
    return fused_layernorm.layer_norm(t["x"], t["weight"], t["bias"])


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("way", [*WAYS, _swapped])
def test_ways_to_write_it(device, way, dtype):
    function = model(WAYS[way]) if way in WAYS else way
    rows, graphs = assert_same(function, tensors(dtype, device=device))
    assert [row.operator for row in rows] == ["layer_norm"]
    assert operators_of(graphs[0]) == ["layer_norm"]
    # The operator replaces all of the norm: no cast and no affine step remains.
    calls = [n for n in graphs[0].graph.nodes if n.op in ("call_function", "call_method")]
    assert len(calls) == 1


def test_where_it_stands():
    module = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Sequential(torch.nn.LayerNorm(D)))
    _, rows, graphs = run(module, torch.randn(B, D))
    assert operators_of(graphs[0]) == ["layer_norm"]
    assert rows[0].where == "1.0"

    def function(x):
        return F.layer_norm(x, (D,))

    _, rows, _ = run(function, torch.randn(B, D))
    assert rows[0].where == f"test_graph_pass.py:{function.__code__.co_firstlineno + 1}"


# ---- What surrounds it -------------------------------------------------------------------------

RESIDUAL, GATED = ["residual"], ["residual", "gate"]
MODULATED = ["scale", "shift"]
PLAIN, ADD, ADA, ADD_ADA = "layer_norm", "add_layer_norm", "ada_layer_norm", "add_ada_layer_norm"
ROWS_OF = "shift, scale, *_ = mod.chunk(6, dim=1); "
GATED_AND_MODULATED = "h = gate * x + residual; norm(h) * (1 + scale) + shift, h"
SURROUNDINGS: dict[str, tuple[str, list[str]]] = {
    "h = residual + x; norm(h, weight, bias), h": (ADD, RESIDUAL),
    "norm(x + residual, weight, bias)": (ADD, RESIDUAL),
    "h = x + residual; doubled = h * 2; norm(h), doubled": (ADD, RESIDUAL),
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
    "norm(x, weight, bias) * (1 + scale)": (ADA, ["scale"]),
    "(norm(x.float()) * (1 + scale.float()) + shift.float()).type_as(x)": (ADA, MODULATED),
    GATED_AND_MODULATED: (ADD_ADA, GATED + MODULATED),
    "h = (residual.float() + x * gate.float()).type_as(residual); "
    "(norm(h.float()) * (1 + scale.float()) + shift.float()).type_as(h), h":
    (ADD_ADA, GATED + MODULATED),
    "norm(x) * (1 + weight) + bias": (ADA, MODULATED),
    "F.gelu(norm(x, weight, bias))": (PLAIN, ["activation"]),
    "F.gelu(norm(x, weight), approximate='tanh') * 0.5": (PLAIN, ["activation", "factor"]),
    "F.silu(norm(x))": (PLAIN, ["activation"]),
    "y = norm(x); y * torch.sigmoid(y)": (PLAIN, ["activation"]),
    "norm(x).relu()": (PLAIN, ["activation"]),
    "h = x + residual; torch.relu(norm(h, weight, bias)), h": (ADD, ["residual", "activation"]),
    # No operator has both a gate and an activation: the product is left, or the sum.
    "h = residual + gate * x; F.gelu(norm(h)) * 0.5, h":
    (ADD, ["residual", "activation", "factor"]),
    "h = torch.addcmul(residual, gate, x); F.silu(norm(h)), h": (PLAIN, ["activation"]),
    "h = F.dropout(x / 1.0, 0.0) + residual; norm(h), h": (ADD, RESIDUAL),
    # A factor with a single column is not fused as a gate. The sum with its product is fused.
    "h = residual + mod[:, None, :1] * x; norm(h), h": (ADD, RESIDUAL),
}  # fmt: skip
# gate * x and the sum are float32 beside a float32 gate, but residual is not. So gate * x takes the
# place of the operator's residual.
BESIDE_FLOAT32 = {
    "h = residual + gate * x; norm(h), h": (ADD, RESIDUAL),
    "h = torch.addcmul(residual, x, gate); norm(h), h": (PLAIN, []),
    GATED_AND_MODULATED: (ADD_ADA, RESIDUAL + MODULATED),
}


@pytest.mark.parametrize("norm", [layer, rms, llama])
@pytest.mark.parametrize("text", SURROUNDINGS)
def test_surroundings(device, text, norm):
    # Of rms the rows alone, of llama the casts.
    every: dict[Any, list[Any]] = {rms: [(F32, F32)], llama: [(BF16, BF16)]}
    for dtypes in every.get(norm, [(F32, F32), (BF16, BF16), (BF16, F32)]):
        torch._dynamo.reset()
        rows, graphs = assert_same(model(text, norm), tensors(dtypes[0], dtypes[1], device))
        expected: dict[str, tuple[str, list[str]]] = {}
        if norm is not layer:
            expected = {"norm(x) * (1 + weight) + bias": (PLAIN, [])}  # a weight with an offset
        elif dtypes == (BF16, F32):
            expected = BESIDE_FLOAT32
        operator, fused = expected.get(text, SURROUNDINGS[text])
        statistic = "layer" if norm is layer else "rms"
        assert [(row.operator, row.statistic) for row in rows] == [(operator, statistic)]
        assert rows[0].fused == fused
        assert operators_of(graphs[0]) == [operator]


# ---- Near misses -------------------------------------------------------------------------------

OTHERS = [
    "(x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-6)",  # unbiased
    "(x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6)",
    VAR + "(x - residual.mean(-1, keepdim=True)) * torch.rsqrt(var + 1e-6)",
    VAR + "(residual - mean) * torch.rsqrt(var + 1e-6)",
    VAR + "(x - mean) * torch.rsqrt(x.var(1, False, keepdim=True) + 1e-6)",
    VAR + "(x - mean) * torch.rsqrt(var + weight.square().sum())",
    # It would have to be regrouped to be a norm.
    "var, mean = torch.var_mean(x, dim=-1, correction=0, keepdim=True); "
    "weight * (x - mean) * torch.rsqrt(1e-6 + var) + bias",
    # Those that are near to RMSNorm.
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
]


@pytest.mark.parametrize("text", OTHERS)
def test_what_is_no_norm(text):
    rows, graphs = assert_same(model(text), tensors())
    assert rows == []
    assert operators_of(graphs[0]) == []


@pytest.mark.parametrize("norm", [layer, llama])
@pytest.mark.parametrize(
    "text",
    [
        "norm(x) * (1 + mod[:, None, :1])",
        "norm(x) * scale + shift",
        "norm(x) * (2 + scale) + shift",
        "y = norm(x); y * (1 + scale), y",
        "norm(x[:, :1]) * (1 + residual)",
        "h = x[:, :1] + residual; norm(h), h",
        "h = residual - x; norm(h), h",
        "h = torch.add(residual, x, alpha=2); norm(h), h",
        "y = norm(x); F.gelu(y) + y",
    ],
)
def test_surroundings_that_are_others(text, norm):
    rows, graphs = assert_same(model(text, norm), tensors())
    assert operators_of(graphs[0]) == ["layer_norm"]
    assert rows[0].fused == []


def test_float64_between():
    """A float64 norm of a float32 x stays float64: float32 would differ by more than rounding."""
    _, graphs = assert_same(model("norm(x.double()).float()"), tensors())
    (node,) = graphs[0].graph.find_nodes(
        op="call_function", target=torch.ops.fused_layernorm.layer_norm.default
    )
    assert node.args[0].meta["example_value"].dtype == F64


def test_rounding_that_is_asked_for():
    """A rounding to bfloat16 in the model is kept, also if a cast to float32 follows it."""
    y, rows, _ = run(lambda x: norm(x).bfloat16().float(), torch.randn(B, D))
    assert torch.equal(y, y.bfloat16().float())
    assert rows[0].operator == "layer_norm"


OVER_TWO = "u = x.mean((0, 1), True); (x - u) / torch.sqrt((x - u).pow(2).mean((0, 1), True) + 1)"
# The operators of a function's norms, what is fused with the first, and what is said of it.
SAID: dict[str, tuple[list[Any], list[str], str]] = {
    "h = residual + x; norm(h, weight), norm(h, bias), h":
    (["add_layer_norm", "layer_norm"], RESIDUAL, ""),
    "h = residual + x; s = h.mean(1, keepdim=True); norm(h) * (1 + s) + bias, h":
    ([ADA], MODULATED, "uses the sum before"),
    "h = residual + x; norm(h) * (1 + x) + h, h":
    ([ADA], MODULATED, "the sum is an operand beside itself"),
    OVER_TWO: ([None], [], "it normalizes over dimensions [0, 1], which are not the last"),
    # The sum is float32, but the only operand that could be the residual is bfloat16.
    "h = x.bfloat16() + mod[:, None, :D]; norm(h), h": ([PLAIN], [], ""),
    "torch.native_layer_norm(x, (D,), None, None, 1e-5)": ([None], [], "statistics"),
    "torch.ops.aten._fused_rms_norm.default(x, [D], weight, 1e-6)": ([None], [], "statistics"),
    "h = residual + x; other = mod * 2; other.mul_(2); y = norm(h); y.mul_(2); y, h, other":
    ([ADD], RESIDUAL, ""),
    "with torch.no_grad(): h = residual + x; norm(h, weight)": ([PLAIN], [], "gradient mode"),
    "c = x.bfloat16(); with torch.no_grad(): h = c.float(); norm(h, weight)":
    ([None], [], "gradient mode"),
    # The operator's sum would be contiguous.
    "y, z = (a.mT.contiguous().mT for a in (x, residual)); h = y + z; norm(h), h":
    ([PLAIN], [], "strides"),
}  # fmt: skip


@pytest.mark.parametrize("text", SAID)
def test_what_is_said(device, text):
    operators, fused, note = SAID[text]
    rows, graphs = assert_same(model(text), tensors(device=device))
    assert [row.operator for row in rows] == operators
    assert operators_of(graphs[0]) == [name for name in operators if name]
    assert rows[0].fused == fused
    assert note in " ".join(rows[0].notes)


# ---- Writes and modes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "y = x * 1.5; h = residual + y; y.mul_(2); norm(h), y",
        "y = x * 1.5; h = residual + y; y.view(-1)[0] = 7.0; norm(h), y",
        "h = residual + x; h += 1; norm(h), h",
        "h = residual + x; h.view(-1).add_(1); norm(h), h",
        "h = residual * 1.5; h += x; norm(h), h",
        "s = scale * 1.5; y = norm(x) * (1 + s); s.mul_(0); y, s",
        "y = norm(x); y.mul_(2); y * (1 + scale)",
        "y = x * 1.5; h = residual + y; F.relu(y, inplace=True); norm(h), y",
        "y = x.detach() * 1.5; h = residual + y; torch.mul(y, 2.0, out=y); norm(h), y.clone()",
    ],
)
def test_writes_prevent_a_match(device, text):
    rows, graphs = assert_same(model(text), tensors(device=device))
    assert operators_of(graphs[0]) == ["layer_norm"]
    assert rows[0].fused == []


@pytest.mark.parametrize(
    ("text", "norm"),
    [
        ("y = x * 1.5; u = y.mean(-1, keepdim=True); "
         "z = (y - u) * torch.rsqrt((y - u).pow(2).mean(-1, keepdim=True) + 1e-6); y.mul_(2); z, y",
         layer),
        ("y = (x * 1.5).bfloat16(); z = norm(y.float()); y.mul_(2); z, y", layer),
        ("y = (x * 1.5).bfloat16(); z = norm(y); y.mul_(2); z, y", llama),
    ],
)  # fmt: skip
def test_writes_into_what_backward_reads(device, text, norm):
    """In backward the norm as written reads its own copy of x, but the operator would read x."""
    function = model(text, norm)
    rows, graphs = assert_same(function, tensors(device=device))
    assert operators_of(graphs[0]) == []
    assert rows[0].notes == ["mul_ writes into what backward reads"]
    with torch.no_grad():
        _, rows, _ = run(function, tensors(device=device), then="inductor")
    assert rows[0].operator is not None  # AOTAutograd removes the write


def test_write_into_a_view_of_a_norm_that_was_replaced(device):
    function = model("first = norm(x); second = norm(first); first.view(-1)[:3] = 0.5; "
                     "F.silu(second), first")  # fmt: skip
    t = {name: tensor.detach() for name, tensor in tensors(device=device).items()}
    result, rows, _ = run(function, t)
    torch.testing.assert_close(result, function(t))
    assert [row.fused for row in rows] == [[], []]
    assert rows[1].notes == ["setitem writes into an operand in between"]


@pytest.mark.parametrize("inside", [True, False])
def test_autocast(device, inside):
    def function(t):
        with torch.autocast(device, BF16):
            branch = F.linear(t["x"], t["weight"].expand(D, D))
            h = t["residual"] + branch
            if inside:
                return norm(h, t["weight"], t["bias"]), h
        return norm(h, t["weight"], t["bias"]), h

    t = tensors(device=device)
    result, rows, _ = run(function, t)
    torch.testing.assert_close(result, function(t), rtol=1e-4, atol=1e-4)
    assert rows[0].fused == (["residual"] if inside else [])


def test_autocast_with_half_weight(device):
    """Under autocast a bfloat16 sum gives a float32 norm on CUDA, a bfloat16 one on the CPU."""

    def function(t):
        with torch.autocast(device, BF16):
            h = F.linear(t["x"], t["weight"].expand(D, D)) + F.linear(
                t["residual"], t["x"][0, 0].expand(D, D)
            )
            return norm(h) * (1 + _chunks(t)[1]), h

    t = tensors(device=device)
    result, rows, _ = run(function, t)
    torch.testing.assert_close(result, function(t), rtol=2e-2, atol=5e-2)
    assert rows[0].fused == ["residual", "scale"]


# Uses of a norm's result y, in several layouts, which all cast it to bfloat16 under autocast. w is
# a matrix.
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


def _chunks(t):
    return t["mod"].unsqueeze(1).chunk(6, dim=-1)


_plain = model("norm(x, weight, bias)")
_ada = model("norm(residual + x) * (1 + scale) + shift")


def _under_autocast(use, device, normalize):
    def function(t):
        with torch.autocast(device, BF16):
            # The second argument is a matrix that does not depend on the norm's input.
            return use(normalize(t), t["weight"].expand(D, D) * t["bias"][:, None])

    return function


@pytest.mark.parametrize("normalize", [_plain, _ada])
@pytest.mark.parametrize("use", CAST)
def test_results_that_autocast_casts(device, use, normalize):
    """The kernel rounds the results itself. The products read the same numbers, but gradients from
    several products are summed in bfloat16."""
    function = _under_autocast(CAST[use], device, normalize)
    t = tensors(device=device)
    expected, expected_gradients = outputs_and_gradients(function, t)
    _, rows, graphs = run(function, t)
    assert "cast" in rows[0].fused
    found, gradients = outputs_and_gradients(function, t, lambda t: run(function, t)[0])
    assert {y.dtype for y in found} == {BF16}
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2, check_stride=True)
    for name, gradient in expected_gradients.items():
        if gradient is not None:
            limit = 0.02 * gradient.abs().max().item()
            assert gradients[name].dtype == gradient.dtype
            torch.testing.assert_close(gradients[name], gradient, rtol=0.02, atol=limit)
    (node,) = (
        node
        for node in graphs[0].graph.nodes
        if getattr(node.target, "namespace", "") == "fused_layernorm"
    )
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
    function = _under_autocast(READ_IN_FLOAT32[use], device, _plain)
    t = {name: tensor.detach() for name, tensor in tensors(device=device).items()}
    expected = function(t)
    result, rows, _ = run(function, t)
    assert rows[0].operator == "layer_norm"
    assert "cast" not in rows[0].fused
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)


def test_float16_has_no_range_for_sums_of_gradients():
    """The gradient of one product is float16 in any case, but a sum over several is float32."""

    def function(use):
        def under_autocast(x, w):
            with torch.autocast("cpu", F16):
                return use(norm(x), w)

        return run(under_autocast, torch.randn(B, S, D), torch.randn(D, D))

    _, rows, _ = function(CAST["one linear"])
    assert rows[0].fused == ["cast"]
    _, rows, _ = function(CAST["three products"])
    assert rows[0].fused == []


def test_rows_that_do_not_lie_side_by_side(device):
    """The copy of rows that no kernel reads where they lie stays in the graph, but before a norm
    alone, whose kernels may read them."""
    t = tensors(device=device)
    t["x"] = torch.randn(B, 2 * D, S, device=device).requires_grad_()
    rows, graphs = assert_same(model("norm(x[:, ::2].transpose(1, 2), weight)"), t)
    assert [row.operator for row in rows] == ["layer_norm"]
    function = model("norm(x[:, ::2].transpose(1, 2), weight) * (1 + scale)")
    rows, graphs = assert_same(function, t)
    assert [row.operator for row in rows] == ["ada_layer_norm"]
    (copied,) = graphs[0].graph.find_nodes(
        op="call_function", target=torch.ops.aten.contiguous.default
    )
    (node,) = copied.users
    assert node.target.namespace == "fused_layernorm"
    assert copied.meta["example_value"].is_contiguous()


# ---- Sub-graphs, dynamic shapes, strides --------------------------------------------------------


def test_checkpoint_bodies(device):
    body = model(GATED_AND_MODULATED)

    def function(t):
        return checkpoint(body, t, use_reentrant=False)

    rows, graphs = assert_same(function, tensors(device=device))
    assert [row.operator for row in rows] == ["add_ada_layer_norm"]
    assert operators_of(graphs[0]) == ["add_ada_layer_norm"]


def test_inside_a_transform():
    """Inside vmap, operands do not have the shapes of their example values."""
    function = model("torch.func.vmap(lambda x: norm(x))(x)")
    t = tensors()
    result, rows, _ = run(function, t)
    torch.testing.assert_close(result, function(t))
    assert all(row.operator is None for row in rows)


@pytest.mark.parametrize(
    "function",
    [
        model(text)
        for text in (
            GATED_AND_MODULATED,
            WAYS["mean of squares"],
            "F.gelu(norm(x, weight), approximate='tanh') * 0.5",
        )
    ],
)
def test_dynamic_shapes(function):
    guards: list[Any] = []

    def counting(graph_module, example_inputs):
        shape_env: Any
        (shape_env,) = {
            value.fake_mode.shape_env
            for node in graph_module.graph.nodes
            if isinstance(value := node.meta.get("example_value"), torch._subclasses.FakeTensor)
        }
        before = len(shape_env.guards)
        rows = graph_pass.run(graph_module, graph_pass.Settings(False))
        guards.append((before, len(shape_env.guards), [row.operator for row in rows]))
        return graph_module.forward

    compiled = torch.compile(function, backend=counting, fullgraph=True, dynamic=True)
    for batch, length in ((2, 5), (3, 7), (6, 11)):
        t = tensors()
        for name in ("x", "residual"):
            t[name] = torch.randn(batch, length, D).requires_grad_()
        t["mod"] = torch.randn(batch, 6 * D).requires_grad_()
        torch.testing.assert_close(compiled(t), function(t))
    assert len(guards) == 1  # one compilation
    before, after, operators = guards[0]
    assert before == after
    assert None not in operators
    assert len(operators) == 1


def test_shapes_that_are_not_known_to_be_equal():
    """If each tensor has sizes of its own, the sum might broadcast. It may be left, but the result
    holds."""
    x, residual = torch.randn(4, 3, D), torch.randn(4, 3, D)
    for tensor in (x, residual):
        torch._dynamo.decorators.mark_unbacked(tensor, 0)
    t = {"x": x, "residual": residual}
    function = model("norm(x + residual)")
    result, rows, _ = run(function, t, dynamic=True)
    torch.testing.assert_close(result, function(t))
    assert rows[0].fused in ([], ["residual"])


def test_nothing_on_the_cpu(monkeypatch):
    monkeypatch.undo()
    _, rows, graphs = run(lambda x: norm(x), torch.randn(3, D))
    assert rows == []
    assert operators_of(graphs[0]) == []


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
    texts = [str(w.message) for w in caught if "fused_layernorm" in str(w.message)]
    assert len(texts) == 1
    assert rows[0].name in texts[0]
    assert "ZeroDivisionError: by design" in texts[0]


# ---- Graphs of torch.export ---------------------------------------------------------------------


class Modulated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(D, elementwise_affine=False, eps=1e-6)

    def forward(self, x, residual, mod):
        shift, scale, gate, *_ = mod.chunk(6, dim=1)
        h = residual + gate.unsqueeze(1) * x
        return self.norm(h) * (1 + scale[:, None]) + shift[:, None], h


class OfRoots(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.RMSNorm(D, eps=1e-6)
        self.weight = torch.nn.Parameter(torch.randn(D))

    def forward(self, x, residual, mod):
        h = x + residual
        return llama(h, self.weight), self.norm(x) * 2


def _decomposed(x, shape, weight=None, eps=None):
    return torch.ops.aten._fused_rms_norm.default(x, shape, weight, eps)[0]


@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("make", [Modulated, OfRoots])
def test_exported_graphs(make, decomposed):
    dtype = F32 if make is Modulated else BF16
    module = make().to(dtype)
    args = tuple(torch.randn(shape).to(dtype) for shape in ((B, S, D), (B, S, D), (B, 6 * D)))
    program = torch.export.export(module, args)
    if decomposed:
        table: Any = {torch.ops.aten.rms_norm.default: _decomposed} if make is OfRoots else {}
        program = program.run_decompositions(table)
    fused = program.module()
    assert fused_layernorm.fuse(fused, then="eager") is fused
    expected = ["add_ada_layer_norm"] if make is Modulated else ["add_layer_norm", "layer_norm"]
    assert sorted(operators_of(fused)) == expected
    torch.testing.assert_close(fused(*args), module(*args))


def test_fuse_of_another_word():
    module = torch.fx.symbolic_trace(torch.nn.LayerNorm(D))
    with pytest.raises(ValueError, match=r"expected then to be one of .*inductor.*got 'tensorrt'"):
        fused_layernorm.fuse(module, then="tensorrt")
    assert fused_layernorm.fuse(module) is module  # no examples: nothing to do


def test_docs_list_the_patterns():
    page = (Path(__file__).parents[1] / "docs" / "compile.md").read_text()
    affine = patterns.AFFINES
    behind = (*affine, *patterns.MODULATIONS, *patterns.ACTIVATIONS, *patterns.FACTORS)
    inside = (*patterns.VARIANCES[1:], *patterns.MEAN_SQUARES)
    for expression in (*inside, *patterns.SUMS, *behind):
        assert f"`{expression}`" in page

# SPDX-License-Identifier: Apache-2.0
"""Group norms under torch.compile: what the backend finds and fuses with them, what it leaves, that
results, gradients and strides stay, and what Inductor does around the operator.

The tests make the pass run on the CPU too, where the operators are PyTorch's own.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from captured import assert_same, operators_of, run
from compiling import afresh, everywhere, recording  # noqa: F401
from torch import nn

import fused_layernorm as fl

F32, BF16 = torch.float32, torch.bfloat16
N, C, H, W, G = 2, 12, 4, 6, 3

pytestmark = pytest.mark.usefixtures("everywhere")


def tensors(dtype=F32):
    def make(*shape):
        return torch.randn(shape).to(dtype).requires_grad_()

    return {"x": make(N, C, H, W), "weight": make(C), "bias": make(C), "mod": make(N, 2 * C)}


def model(text):
    """A function of tensors(), from the lines of a model, the last of which is its result."""
    *lines, result = text.split("; ")
    body = [f"{name} = t[{name!r}]" for name in ("x", "weight", "bias", "mod")]
    body.append("shift, scale = mod[:, :, None, None].chunk(2, dim=1)")
    if not text.startswith(("y = ", "y, ")):
        body.append("y = F.group_norm(x, G, weight, bias, 1e-6)")
    source = "def function(t):\n " + "\n ".join([*body, *lines, f"return {result}"])
    namespace: dict[str, Any] = {"torch": torch, "F": F, "G": G, "C": C, "fl": fl}
    exec(source, namespace)
    return namespace["function"]


# What follows the norm, and what is fused with it.
BEHIND = {
    "y * 1": [],
    "F.silu(y)": ["activation"],
    "y * torch.sigmoid(y)": ["activation"],
    "F.gelu(y)": ["activation"],
    "F.leaky_relu(y)": ["activation"],
    "F.silu(y) * 0.5": ["activation", "factor"],
    "y * (1 + scale) + shift": ["scale", "shift"],
    "F.silu(y * (1 + scale) + shift)": ["scale", "shift", "activation"],
    "F.relu(y + shift)": [],
    "F.silu(y * (1 + scale))": ["scale", "activation"],
    "y = F.group_norm(x.float(), G, weight.float(), bias.float()).to(x.dtype); F.silu(y)": [
        "activation"
    ],
    "y = torch.native_group_norm(x, weight, bias, 2, 12, 24, G, 1e-5)[0]; F.silu(y)": [
        "activation"
    ],
    "y = torch.group_norm(x, G); F.relu(y)": ["activation"],
    "y = F.instance_norm(x, weight=weight, bias=bias); F.leaky_relu(y)": ["activation"],
    "y = fl.group_norm(x, G, weight, bias); F.silu(y)": ["activation"],
    # Near misses: another slope, a modulation of positions, a second reader.
    "F.leaky_relu(y, 0.2)": [],
    "F.silu(y * (1 + x) + shift)": [],
    "F.silu(y) + y": [],
}


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("behind", BEHIND)
def test_what_is_fused(behind, dtype):
    t = tensors(dtype)
    rows, (graph,) = assert_same(model(behind), t)
    (row,) = rows
    assert row.operator == "group_norm"
    assert row.fused == BEHIND[behind]
    assert operators_of(graph) == ["group_norm"]
    assert "groups of channels" in row.reason or "no compiler" in row.reason


@pytest.mark.parametrize(
    "text",
    [
        "F.group_norm(x.double(), G).to(torch.int64).float()",
        "torch.native_group_norm(x, weight, bias, 2, 12, 24, G, 1e-5)[:2][1]",
        "y, m, r = torch.native_group_norm(x, weight, bias, 2, 12, 24, G, 1e-5); y + m.sum()",
        "F.instance_norm(x, weight.detach(), bias.detach().abs(), use_input_stats=False)",
    ],
)
def test_what_is_left(text):
    t = {name: tensor.detach() for name, tensor in tensors().items()}
    function = model(f"y = None; {text}")
    found, rows, graphs = run(function, t)
    torch.testing.assert_close(found, function(t), rtol=1e-5, atol=1e-5)
    if "double" not in text:
        assert operators_of(graphs[0]) == []
        assert all(row.operator is None for row in rows)


WRITES = {
    "x = x + 1; y = F.group_norm(x, G); x.add_(1); F.silu(y) + x": "writes into an operand",
    # Into the result of an operator that has taken a norm's place.
    "x = F.group_norm(x, G); y = F.group_norm(x, 1); x.mul_(x); F.silu(y) + x":
    "writes into an operand",
    # Of an x that is not contiguous PyTorch's backward read a copy until 2.15, which refuses this.
    "x = (x + 0.0).mT.contiguous().mT; y = F.group_norm(x, G); x.mul_(2); y + x":
    "writes into what backward reads",
}  # fmt: skip


def refuses_backward(function, t):
    """Whether eager PyTorch itself says that a write took from backward what it reads."""
    try:
        function(t).sum().backward()
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return True
    return False


@pytest.mark.parametrize("text", WRITES)
def test_writes_are_respected(text):
    function, t = model(f"y = None; {text}"), tensors()
    leaves = {name: tensor.detach() for name, tensor in t.items()}
    found, rows, _ = run(function, leaves)
    torch.testing.assert_close(found, function(leaves), rtol=1e-4, atol=1e-4)
    if "backward" in WRITES[text]:
        _, rows, _ = run(function, t)
        if not refuses_backward(function, t):
            assert_same(function, t)
    assert WRITES[text] in " ".join(note for row in rows for note in row.notes)


def test_autocast_casts_are_the_kernels():
    """A convolution casts what it reads; the kernel writes that."""
    conv = nn.Conv2d(C, C, 3)

    def function(x):
        with torch.autocast("cpu", BF16):
            return conv(F.silu(F.group_norm(x, G)))

    x = torch.randn(N, C, H, W)
    found, rows, (graph,) = run(function, x)
    (row,) = rows
    assert row.fused == ["activation", "cast"]
    (node,) = (n for n in graph.graph.nodes if "group_norm" in str(n.target))
    assert node.meta["example_value"].dtype is BF16
    torch.testing.assert_close(found, function(x), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("behind", ["F.conv2d(F.silu(y), kernel)", "F.silu(y)", "F.silu(y).sum(1)"])
def test_results_of_other_strides(behind):
    """PyTorch gives a contiguous result; where a convolution alone reads it, nothing is copied."""
    t = tensors() | {"x": torch.randn(N, H, C, W).transpose(1, 2).requires_grad_()}
    _, (graph,) = assert_same(model("kernel = torch.ones(2, C, 1, 1); " + behind), t)
    assert operators_of(graph) == ["group_norm"]
    copies = graph.graph.find_nodes(
        op="call_function", target=torch.ops.aten.contiguous.default, sort=False
    )
    assert len(copies) == ("conv" not in behind)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(4, 16), nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x):
        return x + self.conv(F.silu(self.norm(x)))


@pytest.mark.parametrize(("channels_last", "dynamic"), [(False, False), (True, True)])
def test_inductor_feeds_the_operator_in_any_order(channels_last, dynamic):
    """Its convolutions may be in channels_last, in a contiguous model too: nothing is copied."""
    torch.manual_seed(0)
    module: Any = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), Block(), Block())
    x = torch.randn(2, 3, 8, 10)
    if channels_last:
        module, x = (
            module.to(memory_format=torch.channels_last),
            x.to(memory_format=torch.channels_last),
        )
    compiled = torch.compile(module, backend="fused_layernorm", fullgraph=True, dynamic=dynamic)
    x.requires_grad_()
    dy = torch.randn(2, 16, 8, 10)
    parameters = list(module.parameters())
    y, z = module(x), compiled(x)
    torch.testing.assert_close(z, y, rtol=1e-4, atol=1e-4)
    found, expected = (torch.autograd.grad(out, (x, *parameters), dy) for out in (z, y))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert z.stride() == y.stride()


def test_explain_names_group_norms():
    text = str(fl.explain(Block(), torch.randn(1, 16, 4, 4), then="eager"))
    assert "group_norm" in text
    assert "activation" in text

# SPDX-License-Identifier: Apache-2.0
"""The graph pass sees every write: whatever writes into an operand between a norm and what would be
fused with it, the results stay those of eager PyTorch."""

import itertools
import operator
import re

import pytest
import torch
import torch.nn.functional as F
from captured import FUNCTIONS, D, by_position, detached, model, run, tensors
from compiling import afresh, everywhere  # noqa: F401
from torch import nn
from torch.utils.checkpoint import checkpoint

from fused_layernorm.compile.effects import written

pytestmark = pytest.mark.usefixtures("everywhere")

# Where a write is looked for: `act(t)` writes into t, and every norm would be fused without it.
RMS_ROOT = "torch.rsqrt(x.pow(2).mean(-1, True) + 1e-6)"
BETWEEN = {
    "activation": "y = norm(x); act(x); F.gelu(y)",
    "of the norm": "y = norm(x); act(y); F.gelu(y)",
    "modulation": "y = norm(x, weight, bias); act(x); y * (1 + scale) + shift",
    "scale": "s = scale + 0.0; y = norm(x) * (1 + s); act(s); y + shift, s",
    "residual": "h = x + residual; act(x); norm(h)",
    "sum": "h = x + residual; r = h.abs(); act(h); norm(h), r",
    "gate": "h = residual + gate * x; act(x); norm(h), h",
    "groups": "y = F.group_norm(x, 1, mod[0, :S], mod[0, :S]); act(x); F.silu(y)",
    "written out": f"r = {RMS_ROOT}; y = x * r; act(x); y * weight",
    "before a cast": "c = x.bfloat16(); h = c.float(); act(h); norm(h)",
    "before a join": "h = torch.cat([x[:, :2], x[:, 2:]], 1); act(h); norm(h)",
    "before an addition": "c = x.bfloat16(); h = c.float(); act(h); r = residual + h; norm(r), r",
    "of a second cast": "c = x.bfloat16(); h = c.float(); act(h); r = h.mean(-1, True); "
    "(c.float() - r) * torch.rsqrt(c.float().var(-1, False, True) + 1e-6)",
    "inside": f"r = {RMS_ROOT}; act(x); x * r * weight",
}


def compare(text, act):
    """A program's results by the pass and eagerly, and the pass's rows."""
    t = detached(tensors())  # no leaves: they are written into
    copies = detached(t)
    function = model(text, act=act)
    torch.manual_seed(1)
    expected = function(copies)
    torch.manual_seed(1)
    found, rows, _ = run(function, t)
    torch.testing.assert_close((found, t), (expected, copies), rtol=1e-4, atol=1e-4)
    return rows


def shaped(name, function):
    """A call of a function with a tensor viewed with as many dimensions as its name says."""
    function, *given = function
    dims = re.search(r"([123])d$", name)
    shape = (*[1] * (int(dims[1]) - 1 if dims else 0), -1, 4, 6)
    return lambda t: function(t.view(shape), *given)


def test_what_is_found_by_inspection():
    assert {"leaky_relu", "elu", "hardtanh", "rrelu", "alpha_dropout", "dropout2d"} <= {*FUNCTIONS}


# ---- Other writes ------------------------------------------------------------------------------


@torch.library.custom_op("tests_graph_effects::fill", mutates_args=("a",))
def own_fill(a: torch.Tensor, b: torch.Tensor) -> None:
    a.fill_(1.0)


@torch._dynamo.allow_in_graph
def not_understood(x):
    x.mul_(x)
    return x * 1


def statistics(t):
    mean, variance = t.view(-1, D)[:1].flatten(), torch.ones(D)
    return F.batch_norm(torch.linspace(0, 9, 3 * D).view(3, D), mean, variance, training=True)


OTHERS = {
    "setitem": lambda t: t.view(-1).__setitem__(slice(3), 3.0),
    "iadd": lambda t: operator.iadd(t, 1),
    "__imul__": lambda t: t.__imul__(t),
    "method of a view": lambda t: t.view(-1)[2:].mul_(3),
    "method of the class": lambda t: torch.Tensor.mul_(t, t),
    "builtin": lambda t: torch.relu_(t),
    "builtin by keyword": lambda t: torch.relu_(input=t),
    "inplace is a number": lambda t: F.relu(t, 1),  # type: ignore[arg-type]
    "out": lambda t: torch.mul(t, t, out=t),
    "out of joined parts": lambda t: torch.cat((t[:, :2] * 2, t[:, 2:] * 2), 1, out=t),
    "list": lambda t: torch._foreach_mul_([t], [t]),
    "operator": lambda t: torch.ops.aten.mul_.Tensor(t, t),
    "operator without overload": lambda t: torch.ops.aten.mul_(t, t),
    "custom operator": lambda t: own_fill(t, t * 1),
    "registered operator": lambda t: torch.ops.tests_graph_effects.fill(t, t * 1),
    "not understood": not_understood,
    "running statistics": statistics,
    "embedding": lambda t: F.embedding(torch.tensor([0, 1]), t.view(-1, D), max_norm=0.5),
    "checkpoint": lambda t: checkpoint(lambda x: x.mul_(x) + 1, t, use_reentrant=False),
}
WRITES = {**OTHERS, **{name: shaped(name, by_position(name, True, True)) for name in FUNCTIONS}}


PAIRS = [
    *((write, "activation") for write in WRITES),
    *((write, "scale") for write in OTHERS),
    *(("leaky_relu", between) for between in BETWEEN),
    *(("builtin", between) for between in BETWEEN),
    *zip(WRITES, itertools.cycle(BETWEEN), strict=False),
]


@pytest.mark.parametrize(("write", "between"), [*dict.fromkeys(PAIRS)])
def test_writes(write, between):
    compare(BETWEEN[between], WRITES[write])


# What writes into nothing, so that all of the norms are fused with what surrounds them.
READS = {
    "function": lambda t: F.leaky_relu(t, 0.2, False),
    "module": nn.Hardtanh(),
    "method": lambda t: t.clamp(0),
    "builtin": lambda t: torch.fmod(t, 2),
    "dispatched by an argument": lambda t: F.max_pool1d(t, 2),
    "einsum": lambda t: torch.einsum("bsd,btd->bst", t, t),
    "no running statistics": lambda t: F.batch_norm(t.mT, None, None, training=True),
    "checkpoint": lambda t: checkpoint(torch.exp, t, use_reentrant=False),
    "attention": lambda t: F.scaled_dot_product_attention(t, t, t),
    "vmap": lambda t: torch.func.vmap(torch.sum)(t),
}


@pytest.mark.parametrize("read", READS)
def test_reads(read):
    for between in ("activation", "modulation", "residual", "gate", "groups"):
        (row,) = compare(BETWEEN[between], READS[read])
        # vmap is a change of modes, not a write.
        assert row.fused or read == "vmap"


@pytest.mark.parametrize("between", [name for name in BETWEEN if name != "of a second cast"])
def test_all_is_fused_where_nothing_is_written(between):
    (row,) = compare(BETWEEN[between], lambda t: None)
    assert row.operator is not None
    assert row.fused or between in ("written out", "inside") or "before" in between


def test_dtensors_are_read(mesh):
    from torch.distributed.tensor import DTensor, Replicate, Shard

    def function(x):
        whole = DTensor.from_local(x, mesh, [Shard(0)]).redistribute(placements=[Replicate()])
        return whole.to_local()

    found: list[str] = []

    def backend(graph_module, example_inputs):
        for node in graph_module.graph.nodes:
            found.extend(node.name for argument in written(node) if argument is not None)
        return graph_module.forward

    torch.compile(function, backend=backend, fullgraph=True)(torch.randn(4, 4))
    assert found == []

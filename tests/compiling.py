# SPDX-License-Identifier: Apache-2.0
"""What the tests of torch.compile share: the rules of a GPU on the CPU, and what graphs hold."""

from importlib.metadata import entry_points
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from swaps import outcome, same
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

from fused_layernorm.compile import backend, rules

EAGER: dict[str, Any] = {"fused_layernorm.then": "eager"}


@pytest.fixture
def afresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def everywhere(afresh, monkeypatch):
    """Runs the pass on the CPU too, and makes the backend's name known without an installation."""
    monkeypatch.setattr(rules, "DEVICES", {"cpu", "cuda"})
    if not entry_points(group="torch_dynamo_backends", name="fused_layernorm"):
        registry = torch._dynamo.backends.registry
        monkeypatch.setitem(registry._BACKENDS, "fused_layernorm", None)
        monkeypatch.setitem(registry._COMPILER_FNS, "fused_layernorm", backend.backend)


def assert_same(module, compiled, *inputs, tolerance=1e-4):
    """A CUDA graph gives its results in memory that its next run overwrites."""
    found = outcome(module, inputs, lambda module, given: compiled(*given.values()))
    found = {name: tensor.clone() for name, tensor in found.items()}
    same(found, outcome(module, inputs), tolerance)


def recording():
    """(a backend of AOTAutograd, the operators' names in each graph that its compiler is given)."""
    seen: list[list[str]] = []

    def compiler(graph_module, example_inputs):
        seen.append([str(n.target) for n in graph_module.graph.nodes if n.op == "call_function"])
        return make_boxed_func(graph_module.forward)

    return aot_autograd(fw_compiler=compiler, bw_compiler=compiler), seen

# SPDX-License-Identifier: Apache-2.0
"""What the tests of torch.compile share: the rules of a GPU on the CPU, and what graphs hold."""

from importlib.metadata import entry_points
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
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


def outputs_and_gradients(module, run, *inputs):
    """What run gives, and the gradients of the inputs and of the module's parameters."""
    module.zero_grad()
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = run(*leaves)
    out.float().pow(2).sum().backward()
    gradients = [tensor.grad for tensor in leaves]
    return [out.detach(), *gradients, *(p.grad.clone() for p in module.parameters())]


def assert_same(module, compiled, *inputs, tolerance=1e-4):
    found = [t.clone() for t in outputs_and_gradients(module, compiled, *inputs)]
    expected = outputs_and_gradients(module, module, *inputs)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def recording():
    """(a backend of AOTAutograd, the operators' names in each graph that its compiler is given)."""
    seen: list[list[str]] = []

    def compiler(graph_module, example_inputs):
        seen.append([str(n.target) for n in graph_module.graph.nodes if n.op == "call_function"])
        return make_boxed_func(graph_module.forward)

    return aot_autograd(fw_compiler=compiler, bw_compiler=compiler), seen

# SPDX-License-Identifier: Apache-2.0
"""Functions run through the graph pass, and compared with themselves run eagerly."""

from typing import Any

import torch
import torch.nn.functional as F

from fused_layernorm.compile import graph_pass

B, S, D = 2, 5, 24


def run(function, *args, then="eager", dynamic=None):
    """(the function's result through the pass, the pass's rows, the captured graphs)."""
    rows, graphs = [], []

    def backend(graph_module, example_inputs):
        rows.extend(graph_pass.run(graph_module, graph_pass.Settings(then == "inductor")))
        graph_module.graph.lint()
        graphs.append(graph_module)
        return graph_module.forward

    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
    return compiled(*args), rows, graphs


def operators_of(graph_module):
    return [
        node.target._opname
        for module in graph_module.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
        and node.target.namespace == "fused_layernorm"
    ]


def tensors(dtype=torch.float32, modulation_dtype=None, device="cpu", parameter_dtype=None):
    """The operands of the functions under test, by name."""

    def make(*shape, dtype=dtype):
        return torch.randn(*shape, device=device).to(dtype).requires_grad_()

    modulation_dtype = modulation_dtype or dtype
    return {
        "x": make(B, S, D),
        "residual": make(B, S, D),
        "weight": make(D, dtype=parameter_dtype or dtype),
        "bias": make(D, dtype=parameter_dtype or dtype),
        "mod": make(B, 6 * D, dtype=modulation_dtype),
    }


def outputs_and_gradients(function, t, call=None):
    for tensor in t.values():
        tensor.grad = None
    outputs = (call or function)(t)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator(outputs[0].device).manual_seed(1)
    loss = sum(
        (out * torch.randn(out.shape, generator=generator, device=out.device)).sum()
        for out in outputs
    )
    loss.backward()
    gradients = {name: tensor.grad for name, tensor in t.items()}
    return [out.detach() for out in outputs], gradients


def assert_same(function, t):
    """Asserts that a function gives the same through the pass and eagerly.

    Returns the pass's rows and the captured graphs.
    """
    seen = []

    def through_the_pass(t):
        result, rows, graphs = run(function, t)
        seen.append((rows, graphs))
        return result

    expected = outputs_and_gradients(function, t)
    found = outputs_and_gradients(function, t, through_the_pass)
    rounding = max(torch.finfo(tensor.dtype).eps for tensor in t.values())
    rtol, atol = 8 * rounding, 16 * rounding
    for one, other in zip(found[0], expected[0], strict=True):
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)
    for name, expected_gradient in expected[1].items():
        if expected_gradient is None:
            assert found[1][name] is None
        else:
            assert found[1][name].dtype == expected_gradient.dtype
            scale = max(1.0, expected_gradient.abs().max().item())
            torch.testing.assert_close(
                found[1][name] / scale, expected_gradient / scale, rtol=rtol, atol=atol
            )
    return seen[0]


def layer(x, weight=None, bias=None):
    return F.layer_norm(x, (x.shape[-1],), weight, bias, 1e-6)


def rms(x, weight=None, bias=None):
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-6)


def llama(x, weight=None, bias=None):
    """RMSNorm as transformers writes it: rounded before its weight."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return wide.to(x.dtype) if weight is None else weight * wide.to(x.dtype)


def model(text, norm=layer, **others):
    """A function of tensors(), from the lines of a model, the last of which is its result.

    They know the tensors by name, `norm`, the first three of the six chunks of mod, which are
    shift, scale and gate, and the others by their names.
    """
    *lines, result = text.split("; ")
    names = [name for name in ("x", "residual", "weight", "bias", "mod") if name in text]
    chunked = any(name in text for name in ("shift", "scale", "gate")) and "*_ =" not in text
    names += ["mod"] * (chunked and "mod" not in names)
    body = [f"{name} = t[{name!r}]" for name in names]
    body += ["shift, scale, gate, *_ = mod.unsqueeze(1).chunk(6, dim=-1)"] * chunked
    source = "def function(t):\n " + "\n ".join([*body, *lines, f"return {result}"])
    namespace: dict[str, Any] = {"torch": torch, "F": F, "norm": norm, "B": B, "S": S, "D": D}
    namespace |= others
    exec(source, namespace)
    return namespace["function"]

# SPDX-License-Identifier: Apache-2.0
"""Functions run through the graph pass, and compared with themselves run eagerly.

A function is the lines of a model (`model`), of operands by name (`tensors`, `images`).
"""

import inspect
from typing import Any

import torch
import torch.nn.functional as F

import fused_layernorm as fl
from fused_layernorm.compile import graph_pass

B, S, D = 2, 5, 24
N, C, H, W, G = 2, 12, 4, 6, 3  # of images, and the groups of their channels


def passing(then="eager", behind=None):
    """(a backend that runs the pass, and perhaps another behind it, its rows, its graphs)."""
    rows: list[graph_pass.Row] = []
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph_module, example_inputs):
        rows.extend(graph_pass.run(graph_module, graph_pass.Settings(then == "inductor")))
        graph_module.graph.lint()
        graphs.append(graph_module)
        return behind(graph_module, example_inputs) if behind else graph_module.forward

    return backend, rows, graphs


def run(function, *args, then="eager", dynamic=None):
    """(the function's result through the pass, the pass's rows, the captured graphs)."""
    backend, rows, graphs = passing(then)
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


def images(dtype=torch.float32):
    """The operands of norms of groups."""
    shapes = {"x": (N, C, H, W), "weight": (C,), "bias": (C,), "mod": (N, 2 * C)}
    return {name: torch.randn(s).to(dtype).requires_grad_() for name, s in shapes.items()}


def detached(t):
    """The operands without gradients, each in memory of its own."""
    return {name: tensor.detach().clone() for name, tensor in t.items()}


def outputs_and_gradients(function, t, call=None):
    """The results, and the gradients of the operands that ask for one."""
    for tensor in t.values():
        tensor.grad = None
    outputs = (call or function)(t)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator(outputs[0].device).manual_seed(1)
    loss: Any = sum(
        (out * torch.randn(out.shape, generator=generator, device=out.device)).sum()
        for out in outputs
    )
    if loss.requires_grad:
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
    torch.testing.assert_close(found[0], expected[0], rtol=rtol, atol=atol, check_stride=True)
    for name, gradient in expected[1].items():
        slack = 0.0 if gradient is None else atol * max(1.0, gradient.abs().max().item())
        torch.testing.assert_close(found[1][name], gradient, rtol=rtol, atol=slack)
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


def groups(x, weight=None, bias=None):
    return F.group_norm(x, G, weight, bias, 1e-6)


def model(text, norm=layer, **others):
    """A function of tensors(), from the lines of a model, the last of which is its result.

    They know the tensors by name, `norm`, the first three of the six chunks of mod, which are
    shift, scale and gate (of images() the two of mod), and the others by their names.
    """
    *lines, result = text.split("; ")
    names = [name for name in ("x", "residual", "weight", "bias", "mod") if name in text]
    chunked = any(name in text for name in ("shift", "scale", "gate")) and "*_ =" not in text
    names += ["mod"] * (chunked and "mod" not in names)
    body = [f"{name} = t[{name!r}]" for name in names]
    chunks = "shift, scale, gate, *_ = mod.unsqueeze(1).chunk(6, dim=-1)"
    chunks = "shift, scale = mod[:, :, None, None].chunk(2, dim=1)" if norm is groups else chunks
    lines = [*body, *[chunks] * chunked, *lines, f"return {result}"]
    source = "def function(t):\n " + "\n ".join(lines)
    namespace: dict[str, Any] = {"torch": torch, "F": F, "fl": fl, "norm": norm}
    namespace |= {"B": B, "S": S, "D": D, "G": G, "C": C, **others}
    exec(source, namespace)
    return namespace["function"]


# ---- The functions of torch.nn.functional that may write in place, as modules call them too ------

FUNCTIONS = [
    name
    for name, value in sorted(vars(F).items())
    if inspect.isfunction(value) and "inplace" in inspect.signature(value).parameters
]


def by_position(name: str, inplace: bool, training: bool = False) -> tuple[Any, ...]:
    """A function, and its arguments behind the first one, given by position as modules do."""
    function = getattr(F, name)
    given: list[Any] = []
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        value = 0.5 if parameter.default is inspect.Parameter.empty else parameter.default
        value = {"inplace": inplace, "training": training}.get(parameter.name, value)
        given.append(value)
        if parameter.name == "inplace":
            break
    return function, *given

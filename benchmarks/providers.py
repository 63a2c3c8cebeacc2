"""Everything that is timed beside this package: PyTorch eager, torch.compile, and peers if there.

A provider turns a case and its inputs into one callable per input, or returns None where it has no
such operator. All of them run without autograd on the same inputs, mean and rstd precomputed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.cases import EPS, Case
from benchmarks.ours import Inputs, ours
from benchmarks.timing import Call

Provider = Callable[[Case, Sequence[Inputs]], "list[Call] | None"]

_ACTIVATIONS: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "silu": F.silu,
}


def _forward(case: Case) -> Callable[..., Any]:
    """The case's forward as anyone would write it in PyTorch; weight and bias are its last two."""
    shape = (case.cols,)
    name, scale = case.activation
    if case.residual:

        def add_layer_norm(x: Any, residual: Any, weight: Any, bias: Any) -> Any:
            total = x + residual
            return F.layer_norm(total, shape, weight, bias, EPS), total

        return add_layer_norm

    if name is None:
        return lambda x, weight, bias: F.layer_norm(x, shape, weight, bias, EPS)
    activation = _ACTIVATIONS[name]
    if scale == 1.0:
        return lambda x, weight, bias: activation(F.layer_norm(x, shape, weight, bias, EPS))
    return lambda x, weight, bias: activation(F.layer_norm(x, shape, weight, bias, EPS)) * scale


def _backward(case: Case, pre: bool) -> Callable[..., Any]:
    """The case's backward in ATen's operators, one after the other as autograd would run them.

    With an activation it needs the pre-activation: `pre` says whether it comes as the last argument
    (eager autograd has saved it) or is computed again (what a compiler does to save the memory).
    """
    shape = [case.cols]
    name, scale = case.activation
    layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default
    mask = [True, True, True]

    if case.residual:

        def add_backward(dy: Any, x: Any, mean: Any, rstd: Any, w: Any, b: Any, extra: Any) -> Any:
            dx, dweight, dbias = layer_norm_backward(dy, x, shape, mean, rstd, w, b, mask)
            return dx + extra, dweight, dbias

        return add_backward

    if name is None:
        return lambda dy, x, mean, rstd, w, b: layer_norm_backward(
            dy, x, shape, mean, rstd, w, b, mask
        )

    if name != "gelu":
        raise ValueError(f"no backward for {case.op}")

    def gelu_backward(dy: Any, x: Any, mean: Any, rstd: Any, w: Any, b: Any, *saved: Any) -> Any:
        inner = saved[0] if pre else ((x - mean) * rstd * w + b).to(x.dtype)
        dpre = torch.ops.aten.gelu_backward.default(dy * scale, inner)
        return layer_norm_backward(dpre, x, shape, mean, rstd, w, b, mask)

    return gelu_backward


def _arguments(case: Case, t: Inputs) -> tuple[Any, ...]:
    if not case.backward:
        return (t.x, t.residual, t.weight, t.bias) if case.residual else (t.x, t.weight, t.bias)
    arguments = (t.dy, t.x, t.mean, t.rstd, t.weight, t.bias)
    return (*arguments, t.dresidual) if case.residual else arguments


def _bind(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Call:
    return lambda: function(*arguments)


def ours_calls(case: Case, inputs: Sequence[Inputs]) -> list[Call]:
    return [ours(case, one) for one in inputs]


def eager_calls(case: Case, inputs: Sequence[Inputs]) -> list[Call]:
    if not case.backward:
        return [_bind(_forward(case), _arguments(case, one)) for one in inputs]
    function = _backward(case, pre=True)
    calls = []
    for one in inputs:
        saved: tuple[torch.Tensor, ...] = ()
        if case.activation[0] is not None:
            saved = (F.layer_norm(one.x, (case.cols,), one.weight, one.bias, EPS),)
        calls.append(_bind(function, _arguments(case, one) + saved))
    return calls


def compile_calls(case: Case, inputs: Sequence[Inputs]) -> list[Call]:
    torch._dynamo.reset()
    function = _backward(case, pre=False) if case.backward else _forward(case)
    compiled = torch.compile(function, fullgraph=True, dynamic=False)
    return [_bind(compiled, _arguments(case, one)) for one in inputs]


def liger_calls(case: Case, inputs: Sequence[Inputs]) -> list[Call] | None:
    from liger_kernel.ops.layer_norm import layer_norm_backward, layer_norm_forward

    if case.op == "forward":
        return [_bind(layer_norm_forward, (t.x, t.weight, t.bias, EPS)) for t in inputs]
    if case.op == "backward":
        calls = []
        for t in inputs:
            mean, rstd = layer_norm_forward(t.x, t.weight, t.bias, EPS)[2:4]
            arguments = (t.dy, t.x, t.weight, t.bias, mean, rstd)
            calls.append(_bind(layer_norm_backward, arguments))
        return calls
    return None


def apex_calls(case: Case, inputs: Sequence[Inputs]) -> list[Call] | None:
    import fused_layer_norm_cuda as apex

    shape = (case.cols,)
    if case.op == "forward":
        return [_bind(apex.forward_affine, (t.x, shape, t.weight, t.bias, EPS)) for t in inputs]
    if case.op == "backward":
        calls = []
        for t in inputs:
            _, mean, rstd = apex.forward_affine(t.x, shape, t.weight, t.bias, EPS)
            arguments = (t.dy, mean, rstd, t.x, shape, t.weight, t.bias, EPS, False)
            calls.append(_bind(apex.backward_affine, arguments))
        return calls
    return None


def quack_calls(case: Case, inputs: Sequence[Inputs]) -> list[Call] | None:
    from quack.rmsnorm import layernorm_fwd

    if case.op != "forward":
        return None
    weight, bias = inputs[0].weight.float(), inputs[0].bias.float()  # it takes no others
    return [_bind(layernorm_fwd, (t.x, weight, bias, EPS)) for t in inputs]


PROVIDERS: dict[str, Provider] = {
    "ours": ours_calls,
    "eager": eager_calls,
    "compile": compile_calls,
    "liger": liger_calls,
    "apex": apex_calls,
    "quack": quack_calls,
}

_MODULES = {"liger": "liger_kernel", "apex": "fused_layer_norm_cuda", "quack": "quack"}


def available() -> list[str]:
    """Providers whose packages are installed, in the order of the table."""
    return [
        name
        for name in PROVIDERS
        if name not in _MODULES or importlib.util.find_spec(_MODULES[name]) is not None
    ]

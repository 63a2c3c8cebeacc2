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
    """The case's forward as anyone would write it in PyTorch; weight and bias are its last two.

    PyTorch takes no half-precision x beside float32 parameters: x is cast, as autocast does it, and
    y too where it is to be half-precision.
    """
    shape = (case.cols,)
    name, scale = case.activation

    def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        if case.mixed:
            y = F.layer_norm(x.to(case.torch_weight_dtype), shape, weight, bias, EPS)
            return y.to(case.torch_out_dtype)
        return F.layer_norm(x, shape, weight, bias, EPS)

    if case.residual:

        def add_layer_norm(x: Any, residual: Any, weight: Any, bias: Any) -> Any:
            total = x + residual
            return norm(total, weight, bias), total

        return add_layer_norm

    if name is None:
        return norm
    activation = _ACTIVATIONS[name]
    if scale == 1.0:
        return lambda x, weight, bias: activation(norm(x, weight, bias))
    return lambda x, weight, bias: activation(norm(x, weight, bias)) * scale


def _backward(case: Case, saved: bool) -> Callable[..., Any]:
    """The case's backward in ATen's operators, one after the other as autograd would run them.

    What eager autograd has saved beside the arguments comes as the last one if `saved`: the
    pre-activation, or x cast to the parameters' dtype. Else it is computed again (what a compiler
    does to save the memory).
    """
    shape = [case.cols]
    name, scale = case.activation
    layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default
    mask = [True, True, True]

    if name is not None and (name != "gelu" or case.mixed or case.residual):
        raise ValueError(f"no backward for {case.name}")

    def plain_backward(dy: Any, x: Any, mean: Any, rstd: Any, w: Any, b: Any, *more: Any) -> Any:
        dresidual = more[0] if case.residual else None
        dtype = x.dtype
        if case.mixed:
            x = more[-1] if saved else x.to(w.dtype)
            dy = dy.to(w.dtype)
        dx, dweight, dbias = layer_norm_backward(dy, x, shape, mean, rstd, w, b, mask)
        dx = dx.to(dtype)
        return dx if dresidual is None else dx + dresidual, dweight, dbias

    def gelu_backward(dy: Any, x: Any, mean: Any, rstd: Any, w: Any, b: Any, *more: Any) -> Any:
        inner = more[0] if saved else ((x - mean) * rstd * w + b).to(x.dtype)
        dpre = torch.ops.aten.gelu_backward.default(dy * scale, inner)
        return layer_norm_backward(dpre, x, shape, mean, rstd, w, b, mask)

    return plain_backward if name is None else gelu_backward


def _arguments(case: Case, t: Inputs) -> tuple[Any, ...]:
    if not case.backward:
        return (t.x, t.residual, t.weight, t.bias) if case.residual else (t.x, t.weight, t.bias)
    arguments = (t.dy, t.x, t.mean, t.rstd, t.weight, t.bias)
    return (*arguments, t.dresidual) if case.residual else arguments


def _bind(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Call:
    return lambda: function(*arguments)


def ours_calls(case: Case, inputs: Sequence[Inputs]) -> list[Call]:
    import fused_layernorm  # noqa: F401  (registers the operators)

    return [ours(case, one) for one in inputs]


def eager_calls(case: Case, inputs: Sequence[Inputs]) -> list[Call]:
    if not case.backward:
        return [_bind(_forward(case), _arguments(case, one)) for one in inputs]
    function = _backward(case, saved=True)
    calls = []
    for one in inputs:
        saved: tuple[torch.Tensor, ...] = ()
        if case.activation[0] is not None:
            saved = (F.layer_norm(one.x, (case.cols,), one.weight, one.bias, EPS),)
        elif case.mixed:
            saved = (one.x.to(case.torch_weight_dtype),)
        calls.append(_bind(function, _arguments(case, one) + saved))
    return calls


def compile_calls(case: Case, inputs: Sequence[Inputs]) -> list[Call]:
    torch._dynamo.reset()
    function = _backward(case, saved=False) if case.backward else _forward(case)
    compiled = torch.compile(function, fullgraph=True, dynamic=False)
    return [_bind(compiled, _arguments(case, one)) for one in inputs]


def liger_calls(case: Case, inputs: Sequence[Inputs]) -> list[Call] | None:
    from liger_kernel.ops.layer_norm import layer_norm_backward, layer_norm_forward

    if case.mixed:
        return None
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

    if case.mixed:
        return None
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

    if case.op != "forward" or case.out_dtype is not None:
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

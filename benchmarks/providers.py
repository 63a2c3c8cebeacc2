# SPDX-License-Identifier: Apache-2.0
"""The providers that are timed: this package, PyTorch eager, torch.compile, installed peers.

A provider turns a case and its inputs into one callable per input, or returns None where it has no
such operator. All of them run without autograd on the same inputs, with mean and rstd precomputed.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import timing
from benchmarks.cases import EPS, Case
from benchmarks.ours import Inputs, ours
from benchmarks.timing import Call

Provider = Callable[[Case, Sequence[Inputs]], "list[Call] | None"]

_ACTIVATIONS: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "silu": F.silu,
}


def _bare_norm(case: Case, x: torch.Tensor) -> torch.Tensor:
    """The case's norm of x without weight and bias."""
    if case.is_rms:
        return F.rms_norm(x, (case.cols,), None, EPS)
    return F.layer_norm(x, (case.cols,), None, None, EPS)


def _rms_dx(g: torch.Tensor, xhat: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
    """The gradient at RMSNorm's x, from that at the normalized x."""
    return rstd * (g - xhat * (g * xhat).mean(-1, keepdim=True))


def _modulated_forward(case: Case) -> Callable[..., Any]:
    """Modulation as diffusion transformers write it; the last two arguments are shift and scale.

    With float32 modulations x is cast to float32, and y and the sum are cast back.
    """
    dtype, wide = case.torch_dtype, case.torch_modulation_dtype

    def norm(x: torch.Tensor, shift: Any, scale: Any) -> torch.Tensor:
        return (_bare_norm(case, x.to(wide)) * (1 + scale) + shift).to(dtype)

    if not case.residual:
        return norm

    def add_norm(x: Any, residual: Any, gate: Any, shift: Any, scale: Any) -> Any:
        total = (residual.to(wide) + gate * x).to(dtype)
        return norm(total, shift, scale), total

    return add_norm


def _modulated_backward(case: Case, saved: bool) -> Callable[..., Any]:
    """As `_backward`; if `saved`, the last two arguments are the normalized x and 1 + scale."""
    shape, dtype, wide = [case.cols], case.torch_dtype, case.torch_modulation_dtype
    layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default
    rms_norm_backward = torch.ops.aten._fused_rms_norm_backward.default
    groups = case.modulation_shape

    def backward(dy: Any, x: Any, mean: Any, rstd: Any, scale: Any, *more: Any) -> Any:
        dy, wide_x = dy.to(wide), x.to(wide)
        if saved:
            normalized, one_plus = more[-2:]
        else:
            centred = wide_x if case.is_rms else wide_x - mean
            normalized, one_plus = (centred * rstd).to(wide), 1 + scale
        dshift = dy.sum_to_size(groups)
        dscale = (dy * normalized).sum_to_size(groups)
        g = dy * one_plus
        if case.is_rms and saved and timing.DEVICE == "cuda":
            dx = rms_norm_backward(g, wide_x, shape, rstd, None, [True, False])[0].to(dtype)
        elif case.is_rms:
            dx = _rms_dx(g.float(), normalized.float(), rstd).to(dtype)
        else:
            mask = [True, False, False]
            dx = layer_norm_backward(g, wide_x, shape, mean, rstd, None, None, mask)[0].to(dtype)
        if not case.residual:
            return dx, dshift, dscale
        dresidual, branch, gate = more[:3]
        dx = dx + dresidual
        wide_dx = dx.to(wide)
        dgate = (wide_dx * branch).sum_to_size(groups)
        return (wide_dx * gate).to(dtype), dx, dgate, dshift, dscale

    return backward


def _forward(case: Case) -> Callable[..., Any]:
    """The case's forward as usually written in PyTorch; the last two arguments are weight and bias.

    PyTorch does not accept half-precision x with float32 parameters. x is therefore cast to
    float32, as autocast does, and y is cast back where it has to be half-precision.
    """
    if case.modulated:
        return _modulated_forward(case)
    shape = (case.cols,)
    name, scale = case.activation
    mixed, out_dtype = case.mixed, case.torch_out_dtype

    def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if case.is_rms:
            return F.rms_norm(x.to(weight.dtype), shape, weight, EPS).to(out_dtype)
        if mixed:
            return F.layer_norm(x.to(weight.dtype), shape, weight, bias, EPS).to(out_dtype)
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

    If `saved`, the last argument is the tensor that eager autograd saves in addition, if it saves
    one: the pre-activation, or x cast to the parameters' dtype. Otherwise this tensor is computed
    again, as a compiler does to save memory.
    """
    if case.modulated:
        return _modulated_backward(case, saved)
    if case.is_rms:
        return _rms_backward(case, saved)
    shape = [case.cols]
    name, scale = case.activation
    layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default
    mask = [True, True, True]
    mixed, residual = case.mixed, case.residual

    if name is not None and (name != "gelu" or case.mixed or case.residual):
        raise ValueError(f"no backward for {case.name}")

    def plain_backward(dy: Any, x: Any, mean: Any, rstd: Any, w: Any, b: Any, *more: Any) -> Any:
        dresidual = more[0] if residual else None
        dtype = x.dtype
        if mixed:
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


def _rms_backward(case: Case, saved: bool) -> Callable[..., Any]:
    """As `_backward`: PyTorch's operator, which CUDA alone has, or its formulas for a compiler."""
    shape, dtype, wide = [case.cols], case.torch_dtype, case.torch_weight_dtype

    def eager(dy: Any, x: Any, rstd: Any, weight: Any, *more: Any) -> Any:
        x = more[-1] if case.mixed else x
        dx, dweight = torch.ops.aten._fused_rms_norm_backward.default(
            dy.to(wide), x, shape, rstd, weight, [True, True]
        )
        dx = dx.to(dtype)
        return dx + more[0] if case.residual else dx, dweight

    def formulas(dy: Any, x: Any, rstd: Any, weight: Any, *more: Any) -> Any:
        dy, xhat = dy.float(), x.float() * rstd
        dx = _rms_dx(dy * weight, xhat, rstd).to(dtype)
        return dx + more[0] if case.residual else dx, (dy * xhat).sum(0).to(wide)

    return eager if saved and timing.DEVICE == "cuda" else formulas


def _arguments(case: Case, t: Inputs) -> tuple[Any, ...]:
    if case.modulated and case.backward:
        sums = (t.dresidual, t.input, t.gate) if case.residual else ()
        return (t.dy, t.x, t.mean, t.rstd, t.scale, *sums)
    if case.modulated:
        summands = (t.residual, t.gate) if case.residual else ()
        return (t.x, *summands, t.shift, t.scale)
    if case.is_rms and case.backward:
        return (t.dy, t.x, t.rstd, t.weight, *((t.dresidual,) if case.residual else ()))
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
        if case.modulated:
            assert one.scale is not None
            x = one.x.to(case.torch_modulation_dtype)
            saved = (_bare_norm(case, x), 1 + one.scale)
        elif case.activation[0] is not None:
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
    if case.op in ("rms_forward", "rms_backward"):
        return _liger_rms_calls(case, inputs)
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


def _liger_rms_calls(case: Case, inputs: Sequence[Inputs]) -> list[Call]:
    from liger_kernel.ops.rms_norm import rms_norm_backward, rms_norm_forward

    calls = []
    for t in inputs:
        forward = (t.x, t.weight, EPS, 0.0, "llama", None)
        if not case.backward:
            calls.append(_bind(rms_norm_forward, forward))
            continue
        _, x, rstd, block, warps, casting = rms_norm_forward(*forward)
        arguments = (t.dy, x, t.weight, rstd, 0.0, casting, block, warps, False, None)
        calls.append(_bind(rms_norm_backward, arguments))
    return calls


def llama_calls(case: Case, inputs: Sequence[Inputs]) -> list[Call] | None:
    """RMSNorm as transformers' LlamaRMSNorm writes it, and its backward as autograd runs it."""
    if case.op not in ("rms_forward", "rms_backward") or case.mixed:
        return None
    dtype = case.torch_dtype

    def forward(x: Any, weight: Any) -> Any:
        wide = x.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        return weight * (wide * torch.rsqrt(variance + EPS)).to(dtype)

    def backward(dy: Any, wide: Any, rstd: Any, rounded: Any, weight: Any) -> Any:
        dweight = (dy * rounded).sum_to_size(weight.shape)
        g = (dy * weight).to(torch.float32)
        dvariance = (g * wide).sum_to_size(rstd.shape) * (-0.5 * rstd.pow(3))
        dsquare = dvariance.expand(wide.shape) / case.cols
        return (g * rstd + dsquare * (2.0 * wide.pow(1.0))).to(dtype), dweight

    if not case.backward:
        return [_bind(forward, (t.x, t.weight)) for t in inputs]
    calls = []
    for t in inputs:
        assert t.rstd is not None
        wide = t.x.float()
        calls.append(_bind(backward, (t.dy, wide, t.rstd, (wide * t.rstd).to(dtype), t.weight)))
    return calls


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
    from quack.rmsnorm import layernorm_bwd, layernorm_fwd

    if case.op not in ("forward", "backward") or case.out_dtype is not None:
        return None
    weight, bias = _float32_parameters(inputs)
    if not case.backward:
        return [_bind(layernorm_fwd, (t.x, weight, bias, EPS)) for t in inputs]
    calls = []
    for t in inputs:
        assert t.mean is not None
        assert t.rstd is not None
        arguments = (t.x, weight, t.dy, t.rstd.flatten(), t.mean.flatten())
        calls.append(_bind(layernorm_bwd, arguments))
    return calls


def cudnn_calls(case: Case, inputs: Sequence[Inputs]) -> list[Call] | None:
    import cudnn.ops.norm.layernorm  # noqa: F401  (registers the operators)

    ops = torch.ops.cudnn
    if case.op not in ("forward", "backward") or case.out_dtype is not None:
        return None
    if case.dtype == "float64":
        return None

    def flat(tensor: torch.Tensor | None) -> torch.Tensor:
        assert tensor is not None
        return tensor[..., None, None]

    weight, bias = (parameter[None, :, None, None] for parameter in _float32_parameters(inputs))
    if not case.backward:
        return [_bind(ops.layernorm.default, (flat(t.x), weight, bias, EPS)) for t in inputs]
    return [
        _bind(
            ops.layernorm_bwd.default, (flat(t.dy), flat(t.x), weight, flat(t.mean), flat(t.rstd))
        )
        for t in inputs
    ]


def _float32_parameters(inputs: Sequence[Inputs]) -> tuple[torch.Tensor, torch.Tensor]:
    """weight and bias in float32, whatever the case has, for peers that take no other dtype."""
    weight, bias = inputs[0].weight, inputs[0].bias
    assert weight is not None
    assert bias is not None
    return weight.float(), bias.float()


PROVIDERS: dict[str, Provider] = {
    "ours": ours_calls,
    "eager": eager_calls,
    "compile": compile_calls,
    "llama": llama_calls,
    "liger": liger_calls,
    "apex": apex_calls,
    "quack": quack_calls,
    "cudnn": cudnn_calls,
}

# The module that each peer needs; the packages are liger-kernel, apex, quack-kernels (with
# nvidia-cutlass-dsl) and nvidia-cudnn-frontend.
_MODULES = {
    "liger": "liger_kernel.ops.layer_norm",
    "apex": "fused_layer_norm_cuda",
    "quack": "quack.rmsnorm",
    "cudnn": "cudnn.ops.norm.layernorm",
}


def available() -> tuple[list[str], list[str]]:
    """The providers that can be imported, in the order of `PROVIDERS`, and a line for each peer
    that is installed but cannot be imported.
    """
    names, problems = [], []
    for name in PROVIDERS:
        module = _MODULES.get(name)
        if module is not None:
            if importlib.util.find_spec(module.split(".")[0]) is None:
                continue
            try:
                importlib.import_module(module)
            except Exception as problem:  # a peer's import may raise anything
                said = str(problem).strip() or type(problem).__name__
                problems.append(f"{name}: does not import: {said.splitlines()[0]}")
                continue
        names.append(name)
    return names, problems

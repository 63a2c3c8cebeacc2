# SPDX-License-Identifier: Apache-2.0
"""The providers that are timed: this package, PyTorch eager, torch.compile, installed peers.

A provider turns a case and its inputs into one callable per input, or gives None where it has no
such operator. Eager and compiled are the family's `stock`; a peer is a function of the same
tensors. Their backward is what autograd runs: forward has run once before, and is not timed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.families import EPS, Tensors
from benchmarks.ours import ours, package
from benchmarks.timing import Call

Function = Callable[[Tensors], Any]  # what forward gives: y, or a tuple
Provider = Callable[[Case, Sequence[Tensors]], "list[Call] | None"]
GRADIENTS = ("dy", "dresidual", "dq_out", "dk_out", "dv")  # of the outputs, in their order


class Backward:
    """The gradients that autograd gives for one input; the first call runs forward, too."""

    def __init__(self, function: Function, case: Case, t: Tensors) -> None:
        self.function = function
        self.tensors = {name: t[name].detach() for name in case.family.inputs}
        self.leaves = [self.tensors[name].requires_grad_() for name in case.family.gradients]
        self.grads = [t[name] for name in GRADIENTS if name in t]
        self.outputs: Any = None

    @torch.enable_grad()
    def __call__(self) -> tuple[Tensor, ...]:
        if self.outputs is None:
            self.outputs = self.function(self.tensors)
        return torch.autograd.grad(self.outputs, self.leaves, self.grads, retain_graph=True)


def calls_of(function: Function, case: Case, inputs: Sequence[Tensors]) -> list[Call]:
    if case.backward:
        return [Backward(function, case, t) for t in inputs]
    return [functools.partial(torch.no_grad()(function), t) for t in inputs]


def ours_calls(case: Case, inputs: Sequence[Tensors]) -> list[Call]:
    package()  # registers the operators
    return [ours(case, t) for t in inputs]


def eager_calls(case: Case, inputs: Sequence[Tensors]) -> list[Call]:
    return calls_of(functools.partial(case.family.stock, case), case, inputs)


def reference(case: Case, t: Tensors) -> list[Tensor]:
    """What eager gives in float32, or in float64 for float64."""
    wide = torch.float64 if case.dtype == "float64" else torch.float32
    of_wide = replace(case, dtype=str(wide).removeprefix("torch."), weight_dtype=None,
                      out_dtype=None, modulation_dtype=None)  # fmt: skip
    found = eager_calls(of_wide, [{name: tensor.to(wide) for name, tensor in t.items()}])[0]()
    return [found] if isinstance(found, Tensor) else list(found)


def compile_calls(case: Case, inputs: Sequence[Tensors]) -> list[Call]:
    torch._dynamo.reset()
    compiled = torch.compile(lambda t: case.family.stock(case, t), fullgraph=True, dynamic=False)
    return calls_of(compiled, case, inputs)


def _llama(t: Tensors) -> Tensor:
    """RMSNorm as transformers' LlamaRMSNorm writes it."""
    wide = t["x"].to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    return t["weight"] * (wide * torch.rsqrt(variance + EPS)).to(t["x"].dtype)


def _of(module: str, name: str) -> Any:
    """A function of an installed package; of an autograd function its `apply`."""
    found = getattr(importlib.import_module(module), name)
    return getattr(found, "apply", found)


def _liger(file: str, name: str) -> Any:
    return _of(f"liger_kernel.ops.{file}", f"Liger{name}Function")


class Peer(NamedTuple):
    """Another package's norms: its module, its package, a function for each family it has, and
    whether they have gradients. Peers take no mixture of dtypes."""

    module: str
    package: str
    functions: dict[str, Function]
    differentiable: bool = True

    def calls(self, case: Case, inputs: Sequence[Tensors]) -> list[Call] | None:
        function = self.functions.get(case.family.name)
        if function is None or case.mixed or (case.backward and not self.differentiable):
            return None
        return calls_of(function, case, inputs)


PEERS = {
    "llama": Peer("torch", "torch", {"rms_": _llama}),
    "liger": Peer("liger_kernel.ops.layer_norm", "liger-kernel", {
        "": lambda t: _liger("layer_norm", "LayerNorm")(t["x"], t["weight"], t["bias"], EPS),
        "rms_": lambda t: _liger("rms_norm", "RMSNorm")(
            t["x"], t["weight"], EPS, 0.0, "llama", False),
        "add_rms_": lambda t: _liger("fused_add_rms_norm", "FusedAddRMSNorm")(
            t["x"], t["residual"], t["weight"], EPS, 0.0, "llama", False),
    }),
    "cudnn": Peer("cudnn.ops.norm.layernorm", "nvidia-cudnn-frontend", {
        "": lambda t: _of("cudnn.ops.norm.layernorm", "layer_norm")(
            t["x"], tuple(t["weight"].shape), t["weight"], t["bias"], EPS),
        "rms_": lambda t: _of("cudnn.ops.norm.rmsnorm", "rms_norm")(t["x"], t["weight"], None, EPS),
    }),
    "fla": Peer("fla.modules.norm", "fla-core", {
        "rms_": lambda t: _of("fla.modules.norm.layernorm", "rms_norm")(
            t["x"], t["weight"], None, eps=EPS),
        "gated_": lambda t: _of("fla.modules.norm.fused_norm_gate", "rms_norm_gated")(
            t["x"], t["gate"], t["weight"], None, "silu", eps=EPS),
    }),
    "quack": Peer("quack", "quack-kernels", {
        "rms_": lambda t: _of("quack", "rmsnorm")(t["x"], t["weight"], eps=EPS),
        "add_rms_": lambda t: _of("quack", "rmsnorm")(
            t["x"], t["weight"], residual=t["residual"], eps=EPS, prenorm=True),
    }),
    # Its sum and its norm take the places of residual and x.
    "flashinfer": Peer("flashinfer.norm", "flashinfer-python", {
        "rms_": lambda t: _of("flashinfer.norm", "rmsnorm")(t["x"], t["weight"], EPS),
        "add_rms_": lambda t: _of("flashinfer.norm", "fused_add_rmsnorm")(
            t["x"], t["residual"], t["weight"], EPS),
    }, differentiable=False),
}  # fmt: skip

PROVIDERS: dict[str, Provider] = {
    "ours": ours_calls, "eager": eager_calls, "compile": compile_calls,
    **{name: peer.calls for name, peer in PEERS.items()},
}  # fmt: skip


def available() -> tuple[list[str], list[str]]:
    """The providers that can be imported, in the order of `PROVIDERS`, and a line for each peer
    that is not installed, or that is and cannot be imported."""
    problems = {}
    for name, peer in PEERS.items():
        try:
            importlib.import_module(peer.module)
        except Exception as problem:  # a peer's import may raise anything
            said = (str(problem).strip() or type(problem).__name__).splitlines()[0]
            is_there = importlib.util.find_spec(peer.module.split(".")[0])
            what = f"does not import: {said}" if is_there else "is not installed"
            problems[name] = f"{name}: {peer.package} {what}"
    return [name for name in PROVIDERS if name not in problems], [*problems.values()]

# SPDX-License-Identifier: Apache-2.0
"""torch.compile, make_fx, and tensors without data."""

from typing import Any

import pytest
import torch
from compiling import afresh, recording  # noqa: F401
from torch._dynamo.testing import CompileCounterWithBackend

import fused_layernorm as fl
from fused_layernorm.compile import choice

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64


pytestmark = pytest.mark.usefixtures("afresh")


@pytest.mark.parametrize("requires_grad", [False, True])
def test_no_recompilation_for_new_sizes(device, requires_grad):
    """One compiled function serves all sizes that are dynamic, widths among them."""
    counter = CompileCounterWithBackend("aot_eager")

    def function(x, residual, gate, weight):
        y = fl.layer_norm(x, weight, activation="silu")
        y, residual = fl.add_layer_norm(y, residual, weight)
        y, residual = fl.add_ada_layer_norm(y, residual, gate, gate, gate)
        return y + residual

    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    first = None
    for rows, cols in ((2, 16), (3, 16), (17, 5), (100, 33), (1025, 16)):
        weight = torch.randn(cols, device=device, requires_grad=requires_grad)
        x, gate = (torch.randn(rows, n, cols, device=device) for n in (4, 1))
        out = compiled(x, x, gate, weight)
        torch.testing.assert_close(out, function(x, x, gate, weight), rtol=1e-4, atol=1e-4)
        if requires_grad:
            out.sum().backward()
        # The first call may compile twice, because PyTorch first tries eps and scale as symbols.
        first = first or counter.frame_count
    assert counter.frame_count == first


# By operator: the call, and the shapes of its tensors.
ONE_EACH: dict[str, tuple[Any, list[tuple[int, ...]]]] = {
    "layer_norm": (fl.layer_norm, [(3, 8), (8,)]),
    "add_ada_layer_norm": (
        lambda *t: torch.stack(fl.add_ada_layer_norm(*t)), [(2, n, 8) for n in (3, 3, 1, 1, 1)]
    ),
    "group_norm": (lambda x: fl.group_norm(x, 2, activation="silu"), [(2, 8, 5)]),
    "rms_norm_gated": (
        lambda *t: fl.rms_norm_gated(*t, gate_first=True, group_size=4), [(3, 8), (3, 8), (8,)]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE_EACH)
def test_forward_and_backward_are_one_operator_each(device, name):
    """Also past a gate, whose forward the rules leave to Inductor on CUDA."""
    function, shapes = ONE_EACH[name]
    tensors = [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]
    backend, seen = recording()
    torch.compile(function, backend=backend, fullgraph=True)(*tensors).sum().backward()
    forward = [f"fused_layernorm.{name}_forward.default"]
    assert [[target for target in graph if "fused_layernorm" in target] for graph in seen] == [
        [] if name == "rms_norm_gated" and device == "cuda" and choice.CHOOSES else forward,
        [f"fused_layernorm.{name}_backward.default"],
    ]


TRANSFORMS = {
    "vmap": lambda f: torch.func.vmap(f, in_dims=(0, None)),
    "grad": lambda f: torch.func.grad(lambda x, w: f(x, w).pow(2).sum(), argnums=(0, 1)),
    "vmap of grad": lambda f: torch.func.vmap(
        torch.func.grad(lambda x, w: f(x, w).pow(2).sum(), argnums=1), in_dims=(0, None)
    ),
    "jvp": lambda f: lambda x, w: torch.func.jvp(lambda x: f(x, w), (x,), (torch.ones_like(x),)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_under_compile(device, name):
    x, weight = torch.randn(2, 3, 8, device=device), torch.randn(8, device=device)
    function = TRANSFORMS[name](lambda x, w: fl.layer_norm(x, w, activation="gelu"))
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, weight), function(x, weight), rtol=1e-4, atol=1e-5)


def test_fake_tensors_of_a_device_that_need_not_be_here():
    """Not even autocast need know it."""
    for device_type in ("cuda", "meta", "lazy"):
        with torch._subclasses.FakeTensorMode():
            x = torch.empty(3, 8, device=device_type, dtype=BF16)
            y = fl.layer_norm(x, normalized_shape=8)
            y, residual_out = fl.add_layer_norm(y, x.float(), normalized_shape=8)
        assert y.device.type == residual_out.device.type == device_type
        assert (y.dtype, residual_out.dtype) == (BF16, F32)

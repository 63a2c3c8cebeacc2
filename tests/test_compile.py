# SPDX-License-Identifier: Apache-2.0
"""torch.compile, torch.export and the operators' registration (opcheck)."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from fused_layernorm import (
    FusedAddLayerNorm,
    FusedLayerNorm,
    add_ada_layer_norm,
    add_layer_norm,
    layer_norm,
    swap_layer_norm,
)
from fused_layernorm.compile import rules

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64


@pytest.fixture(autouse=True)
def _reset():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=["chosen", "as they are"])
def rules_on_cpu(request, monkeypatch):
    """Compiled calls choose between operators as on a GPU, or keep the operator as on the CPU."""
    if request.param == "chosen":
        monkeypatch.setattr(rules, "DEVICES", {"cpu", "cuda"})


class Block(torch.nn.Module):
    """A pre-norm feed-forward block with every fused operation."""

    def __init__(self, width=16):
        super().__init__()
        self.norm = FusedLayerNorm(width, activation="gelu", scale=0.5)
        self.up = torch.nn.Linear(width, 2 * width)
        self.down = torch.nn.Linear(2 * width, width)
        self.add_norm = FusedAddLayerNorm(width)

    def forward(self, x):
        y, residual = self.add_norm(self.down(F.relu(self.up(self.norm(x)))), x)
        return y + residual


def losses_and_gradients(run, module, x):
    module.zero_grad()
    x = x.clone().requires_grad_()
    out = run(x)
    out.pow(2).sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.usefixtures("rules_on_cpu")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_training(device, backend, dynamic):
    torch.manual_seed(0)
    block = Block().to(device)
    compiled = torch.compile(block, fullgraph=True, backend=backend, dynamic=dynamic)
    sizes = (3, 5) if dynamic else (3,)
    for size in sizes:
        x = torch.randn(size, 7, 16, device=device)
        ours, eager = (losses_and_gradients(run, block, x) for run in (compiled, block))
        for one, other in zip(ours, eager, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_inference(device, backend):
    block = Block().to(device).eval()
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    x = torch.randn(3, 7, 16, device=device)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), block(x), rtol=1e-4, atol=1e-4)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), block(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_no_recompilation_for_a_new_batch_size(device, requires_grad):
    weight = torch.randn(16, device=device, requires_grad=requires_grad)
    bias = torch.randn(16, device=device, requires_grad=requires_grad)
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def compiled(x, residual, weight, bias):
        y, residual = add_layer_norm(
            layer_norm(x, weight, bias, activation="silu"), residual, weight
        )
        return y + residual

    first = None
    for rows in (2, 3, 17, 100, 1025):
        x = torch.randn(rows, 4, 16, device=device)
        out = compiled(x, x, weight, bias)
        y, residual = add_layer_norm(layer_norm(x, weight, bias, activation="silu"), x, weight)
        torch.testing.assert_close(out, y + residual)
        if requires_grad:
            out.sum().backward()
        # The first call may compile twice, because PyTorch first tries eps and scale as symbols.
        first = first or counter.frame_count
    assert counter.frame_count == first


def test_no_recompilation_for_a_new_width_of_several_modules(device):
    """One compiled function serves layers of different widths, with dynamic sizes."""
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def compiled(x, weight):
        return layer_norm(x, weight)

    first = None
    for cols in (5, 8, 33):
        x, weight = torch.randn(4, cols, device=device), torch.randn(cols, device=device)
        torch.testing.assert_close(compiled(x, weight), F.layer_norm(x, (cols,), weight))
        first = first or counter.frame_count
    assert counter.frame_count == first


def test_default_mode_recompiles_once(device):
    """Without dynamic=True PyTorch recompiles once, with a dynamic size, when a size changes."""
    norm = FusedLayerNorm(8).to(device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(norm, backend=counter, fullgraph=True)
    for rows in (2, 3, 17, 100):
        compiled(torch.randn(rows, 8, device=device))
    assert counter.frame_count == 2


def test_no_graph_break_in_a_swapped_model(device):
    model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0).to(device)
    swap_layer_norm(model)
    model.train()
    explanation = torch._dynamo.explain(model)(torch.randn(2, 5, 16, device=device))
    assert explanation.graph_break_count == 0
    targets = {str(node.target) for graph in explanation.graphs for node in graph.graph.nodes}
    assert any("fused_layernorm" in target for target in targets)


def graph_targets(function, *args, backward=False):
    """The operators of the forward (and backward) graphs that a compiler gets."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    seen = []

    def record(graph, example_inputs):
        seen.append(
            [
                str(node.target)
                for node in graph.graph.nodes
                if "fused_layernorm" in str(node.target)
            ]
        )
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=record, bw_compiler=record)
    out = torch.compile(function, backend=backend, fullgraph=True)(*args)
    if backward:
        out.sum().backward()
    return seen


def test_the_graph_holds_the_operators(device):
    x = torch.randn(3, 8, device=device)
    weight = torch.randn(8, device=device)
    assert graph_targets(lambda x, w: layer_norm(x, w), x, weight) == [
        ["fused_layernorm.layer_norm.default"]
    ]
    weight.requires_grad_()
    assert graph_targets(lambda x, w: layer_norm(x, w), x, weight, backward=True) == [
        ["fused_layernorm.layer_norm_forward.default"],
        ["fused_layernorm.layer_norm_backward.default"],
    ]


def test_backward_past_a_gate_is_one_operator(device):
    x, residual = (torch.randn(2, 3, 8, device=device, requires_grad=True) for _ in "xr")
    gate, shift, scale = (torch.randn(2, 1, 8, device=device, requires_grad=True) for _ in "gst")

    def function(*tensors):
        y, residual_out = add_ada_layer_norm(*tensors)
        return y * residual_out

    tensors = (x, residual, gate, shift, scale)
    assert graph_targets(function, *tensors, backward=True) == [
        ["fused_layernorm.add_ada_layer_norm_forward.default"],
        ["fused_layernorm.add_ada_layer_norm_backward.default"],
    ]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    found, expected = (
        torch.autograd.grad(f(*tensors).sin().sum(), tensors) for f in (compiled, function)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("rules_on_cpu")
@pytest.mark.parametrize(
    "options",
    [
        {"eps": 1e-3},
        {"eps": 1},
        {"activation": "relu", "scale": 2},
        {"out_dtype": BF16},
        {"normalized_shape": (8,)},
        {"normalized_shape": 8},
        {"normalized_shape": [3, 8]},
        {"normalized_shape": torch.Size([8])},
    ],
    ids=str,
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_options(device, options, dynamic):
    x = torch.randn(2, 3, 8, device=device, requires_grad=True)

    def function(x):
        return layer_norm(x, **{"normalized_shape": (8,), **options})

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    torch.testing.assert_close(compiled(x), function(x))


@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, BF16), (F16, F32), (BF16, F32)])
def test_dtypes(device, dtypes):
    x = torch.randn(3, 8, device=device).to(dtypes[0]).requires_grad_()
    weight = torch.randn(8, device=device).to(dtypes[1]).requires_grad_()

    def function(x, weight):
        y = layer_norm(x, weight, activation="gelu")
        return torch.autograd.grad(y.float().pow(2).sum(), (x, weight))

    compiled = torch.compile(
        lambda x, w: layer_norm(x, w, activation="gelu"), fullgraph=True, backend="aot_eager"
    )
    grads = torch.autograd.grad(compiled(x, weight).float().pow(2).sum(), (x, weight))
    for one, other in zip(grads, function(x, weight), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_strided_input(device):
    """The fake result is contiguous, like the real one."""
    x = torch.randn(8, 5, 3, device=device).permute(2, 1, 0)
    compiled = torch.compile(
        lambda x: layer_norm(x, normalized_shape=(8,)) * 2, fullgraph=True, backend="inductor"
    )
    out = compiled(x)
    assert out.is_contiguous()
    torch.testing.assert_close(out, 2 * F.layer_norm(x, (8,)))


@pytest.mark.parametrize("device_type", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_autocast(device_type, dtype):
    norm = FusedLayerNorm(8).to(device_type)
    linear = torch.nn.Linear(8, 8).to(device_type)

    def function(x):
        with torch.autocast(device_type, dtype):
            return norm(linear(x))

    x = torch.randn(3, 8, device=device_type)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    ours, eager = compiled(x), function(x)
    assert ours.dtype == eager.dtype
    torch.testing.assert_close(ours, eager)
    ours.sum().backward()


def test_checkpointing_under_compile(device):
    torch.manual_seed(0)
    block = Block().to(device)

    def function(x):
        return checkpoint(block, checkpoint(block, x, use_reentrant=False), use_reentrant=False)

    x = torch.randn(3, 7, 16, device=device)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    ours, eager = (losses_and_gradients(run, block, x) for run in (compiled, function))
    for one, other in zip(ours, eager, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_compiled_autograd(device):
    """The compiler traces the whole backward graph, of eager and of compiled forwards."""
    torch.manual_seed(0)
    block = Block().to(device)
    x = torch.randn(3, 7, 16, device=device)
    eager = losses_and_gradients(block, block, x)
    for forward in (block, torch.compile(block, backend="aot_eager")):
        with (
            torch._dynamo.config.patch(compiled_autograd=True),
            torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")),
        ):
            ours = losses_and_gradients(forward, block, x)
        for one, other in zip(ours, eager, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_reduce_overhead():
    torch.manual_seed(0)
    block = Block(64).cuda()
    compiled = torch.compile(block, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        x = torch.randn(3, 7, 64, device="cuda")
        torch.compiler.cudagraph_mark_step_begin()
        ours = [t.clone() for t in losses_and_gradients(compiled, block, x)]
        eager = losses_and_gradients(block, block, x)
        for one, other in zip(ours, eager, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            torch.testing.assert_close(compiled(x), block(x), rtol=1e-3, atol=1e-3)


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
    function = TRANSFORMS[name](lambda x, w: layer_norm(x, w, activation="gelu"))
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, weight), function(x, weight), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_export(device, strict, training):
    block = Block().to(device).train(training)
    x = torch.randn(3, 7, 16, device=device)
    batch = torch.export.Dim("batch", min=2, max=1024)
    program = torch.export.export(block, (x,), dynamic_shapes=({0: batch},), strict=strict)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert sum("fused_layernorm" in target for target in targets) == 2
    for size in (2, 5, 100):
        x = torch.randn(size, 7, 16, device=device)
        torch.testing.assert_close(program.module()(x), block(x), rtol=1e-4, atol=1e-4)


def test_export_then_save_and_load(device, tmp_path):
    norm = FusedLayerNorm(8, activation="silu").to(device).eval()
    x = torch.randn(3, 8, device=device)
    with torch.no_grad():
        program = torch.export.export(norm, (x,))
    torch.export.save(program, tmp_path / "norm.pt2")
    loaded = torch.export.load(tmp_path / "norm.pt2")
    torch.testing.assert_close(loaded.module()(x), norm(x))


def sample(device, *, shape=(3, 4, 8), ndim=1, dtype=F32, weight=F32, bias=F32, requires_grad=False,
           strided=False, **options):  # fmt: skip
    """(input, normalized_ndim, weight, bias, eps) and the operator's options."""
    x = torch.randn(shape, device=device).to(dtype)
    if strided:
        x = (
            torch.randn(*reversed(shape), device=device)
            .to(dtype)
            .permute(*reversed(range(len(shape))))
        )
    parameters = [
        None if d is None else torch.randn(shape[-ndim:], device=device).to(d)
        for d in (weight, bias)
    ]
    tensors = [x, *parameters]
    if requires_grad:
        tensors = [None if t is None else t.requires_grad_() for t in tensors]
    return (tensors[0], ndim, tensors[1], tensors[2], 1e-5), options


SAMPLES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no weight": {"weight": None},
    "no bias": {"bias": None},
    "no parameters": {"weight": None, "bias": None},
    "bfloat16": {"dtype": BF16, "weight": BF16, "bias": BF16},
    "mixed": {"dtype": F16},
    "float64": {"dtype": F64, "weight": F64, "bias": F64},
    "two dimensions": {"ndim": 2},
    "all dimensions": {"ndim": 3},
    "one row": {"shape": (8,)},
    "no rows": {"shape": (0, 8)},
    "strided": {"strided": True},
    "gelu": {"activation": "gelu", "scale": 0.5},
    "silu to float32": {"dtype": BF16, "activation": "silu", "out_dtype": F32},
    "relu to float64": {"activation": "relu", "out_dtype": F64},
}


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("statistics", [False, True])
def test_opcheck_layer_norm(device, name, statistics):
    ops = torch.ops.fused_layernorm
    # The operator with statistics runs under autograd, the other in calls without gradients.
    args, options = sample(device, **SAMPLES[name], requires_grad=statistics)
    torch.library.opcheck(
        (ops.layer_norm_forward if statistics else ops.layer_norm).default, args, options
    )


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("statistics", [False, True])
def test_opcheck_add_layer_norm(device, name, statistics):
    ops = torch.ops.fused_layernorm
    (x, *args), options = sample(device, **SAMPLES[name], requires_grad=statistics)
    residual = torch.randn_like(x, dtype=F32 if x.dtype == BF16 else x.dtype)
    residual.requires_grad_(statistics)
    torch.library.opcheck(
        (ops.add_layer_norm_forward if statistics else ops.add_layer_norm).default,
        (x, residual, *args),
        options,
    )


MASKS = [m for m in itertools.product((True, False), repeat=3) if any(m)]


@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck_backward(device, name):
    ops = torch.ops.fused_layernorm
    (x, ndim, weight, bias, eps), options = sample(device, **SAMPLES[name])
    y, mean, rstd = ops.layer_norm_forward(x, ndim, weight, bias, eps, **options)
    dy = torch.randn_like(y)
    rest = (options.get("activation"), options.get("scale", 1.0))
    args = (dy, x, ndim, mean, rstd, weight, bias)
    needs = (True, weight is not None, bias is not None)
    torch.library.opcheck(ops.layer_norm_backward.default, (*args, None, *rest, *needs))
    torch.library.opcheck(
        ops.layer_norm_backward.default, (*args, torch.randn_like(x), *rest, *needs)
    )


@pytest.mark.parametrize("mask", MASKS)
def test_opcheck_backward_masks(device, mask):
    ops = torch.ops.fused_layernorm
    (x, ndim, weight, bias, eps), _ = sample(device)
    y, mean, rstd = ops.layer_norm_forward(x, ndim, weight, bias, eps)
    torch.library.opcheck(
        ops.layer_norm_backward.default,
        (torch.randn_like(y), x, ndim, mean, rstd, weight, bias, None, None, 1.0, *mask),
    )


def test_meta_tensors():
    x = torch.empty(3, 4, 8, device="meta", dtype=BF16, requires_grad=True)
    weight = torch.empty(4, 8, device="meta", requires_grad=True)
    y = layer_norm(x, weight, out_dtype=F32)
    assert y.is_meta
    assert y.shape == x.shape
    assert y.dtype == F32
    y.sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    assert x.grad.shape == x.shape
    assert weight.grad.shape == weight.shape
    out, residual_out = add_layer_norm(x, torch.empty(3, 4, 8, device="meta"), weight)
    assert out.dtype == BF16
    assert residual_out.dtype == F32


@pytest.mark.parametrize("device_type", ["meta", "lazy"])
def test_devices_without_autocast(device_type):
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(3, 8, device=device_type, dtype=BF16)
        y, residual_out = add_layer_norm(
            layer_norm(x, normalized_shape=8), x.float(), normalized_shape=8
        )
    assert y.device.type == residual_out.device.type == device_type
    assert y.dtype == BF16


def test_fake_tensors_of_a_device_that_need_not_be_here():
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(3, 8, device="cuda", dtype=BF16)
        y, residual_out = add_layer_norm(
            layer_norm(x, normalized_shape=8), x.float(), normalized_shape=8
        )
    assert y.device.type == residual_out.device.type == "cuda"
    assert y.dtype == BF16
    assert residual_out.dtype == F32


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_make_fx(device, mode):
    from torch.fx.experimental.proxy_tensor import make_fx

    def function(x, weight):
        y = layer_norm(x, weight, activation="silu")
        return torch.autograd.grad(y.sum(), (x, weight))

    x = torch.randn(3, 8, device=device, requires_grad=True)
    weight = torch.randn(8, device=device, requires_grad=True)
    graph = make_fx(function, tracing_mode=mode)(x, weight)
    targets = [str(node.target) for node in graph.graph.nodes if "fused" in str(node.target)]
    assert targets == [
        "fused_layernorm.layer_norm_forward.default",
        "fused_layernorm.layer_norm_backward.default",
    ]
    for one, other in zip(graph(x, weight), function(x, weight), strict=True):
        torch.testing.assert_close(one, other)

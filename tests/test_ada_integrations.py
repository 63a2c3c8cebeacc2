# SPDX-License-Identifier: Apache-2.0
"""The modulated norms among PyTorch's parts: derivatives, transforms, compilers, autocast, modules.

Their results and first gradients are in test_ada_layer_norm.py, their errors in test_errors.py.
"""

import copy
import io
import itertools
import pickle
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._C._autograd import DeviceType
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd.graph import saved_tensors_hooks
from torch.export import Dim
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import fused_layernorm
from fused_layernorm import (
    FusedAdaLayerNorm,
    FusedAddAdaLayerNorm,
    ada_layer_norm,
    add_ada_layer_norm,
    add_layer_norm,
)
from fused_layernorm.functional import ada_layer_norm_pair

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
HALF = [F16, BF16]
ops = torch.ops.fused_layernorm
pytestmark = pytest.mark.cpu_operators


stock_ada = forms.stock("modulated")
stock_add_ada = forms.stock("gated")
SHAPES = [(4,), (2, 1, 4), (2, 3, 4), (1, 3, 4), (2, 1, 1), ()]  # of modulations of (2, 3, 4)


# ---- Derivatives of every order and mode.


def loss_of(f):
    return lambda *t: sum(out.pow(3).sum() for out in f(*t))


@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
def test_what_is_saved_for_backward(device, gated):
    """Of input's size only the norm's input is saved, and with a gate the tensor it multiplies."""
    x, residual = torch.randn(2, 3, 50, 64, device=device)
    gate, shift, scale = torch.randn(3, 3, 1, 64, device=device)
    for tensor in (x, residual, gate, shift, scale):
        tensor.requires_grad_()
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        _, residual_out = add_ada_layer_norm(x, residual, gate if gated else None, shift, scale)
    large = {tensor.data_ptr() for tensor in saved if tensor.numel() >= x.numel()}
    assert large == {
        tensor.data_ptr() for tensor in ((residual_out, x) if gated else [residual_out])
    }
    saved.clear()
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        ada_layer_norm(x, shift, scale)
    assert {tensor.data_ptr() for tensor in saved if tensor.numel() >= x.numel()} == {x.data_ptr()}


def test_gradients_reach_the_linear_layer_of_the_chunks(device):
    """All six chunks of a modulation get gradients, as in a block of a diffusion transformer."""
    torch.manual_seed(3)
    linear = nn.Linear(8, 24).to(device, F64)
    x, branch = torch.randn(2, 3, 5, 4, device=device, dtype=F64)
    condition = torch.randn(3, 1, 8, device=device, dtype=F64)

    def gradients(ada, add_ada):
        linear.zero_grad()
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = linear(condition).chunk(6, -1)
        y = ada(x, shift, scale)
        z, residual = add_ada(branch * y, x, gate, shift_mlp, scale_mlp)
        (residual + gate_mlp * z).pow(2).sum().backward()
        return [p.grad.clone() for p in linear.parameters() if p.grad is not None]

    torch.testing.assert_close(
        gradients(ada_layer_norm, add_ada_layer_norm), gradients(stock_ada, stock_add_ada)
    )


# ---- opcheck.


def test_meta_tensors():
    n = sample("meta", **OPCHECKS["half"], requires_grad=True)
    x, residual, gate, shift, scale, weight, bias = n.values()
    y, residual_out = add_ada_layer_norm(x, residual, gate, shift, scale, weight, bias)
    assert y.is_meta
    assert (y.dtype, residual_out.dtype) == (BF16, F32)
    (y.float().sum() + residual_out.sum()).backward()
    for tensor in n.values():
        assert tensor.grad.shape == tensor.shape
        assert tensor.grad.dtype == tensor.dtype
    y, _ = add_layer_norm(x, residual, weight, gate=gate, activation="gelu", out_dtype=F64)
    assert y.dtype == F64


# ---- torch.compile and torch.export.


class Block(nn.Module):
    """Both modules, with the modulations cut out of one linear layer's output."""

    def __init__(self, dim=16, **options):
        super().__init__()
        self.modulation = nn.Linear(dim, 6 * dim)
        self.norm = FusedAdaLayerNorm(dim, **options)
        self.linear = nn.Linear(dim, dim)
        self.add_norm = FusedAddAdaLayerNorm(dim, **options)

    def forward(self, x, condition):
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = self.modulation(condition).chunk(6, -1)
        branch = self.linear(self.norm(x, shift, scale).to(x.dtype))
        y, residual = self.add_norm(branch, x, gate, shift_mlp, scale_mlp)
        return residual + gate_mlp * self.linear(y.to(x.dtype))


def block(device, *, samples=3, tokens=5, requires_grad=True, **options):
    torch.manual_seed(0)
    model = Block(**options).to(device).requires_grad_(requires_grad)
    x = torch.randn(samples, tokens, 16, device=device, requires_grad=requires_grad)
    condition = torch.randn(samples, 1, 16, device=device)
    return model, x, condition


def step(f, model, x, condition):
    model.zero_grad()
    x.grad = None
    y = f(x, condition)
    y.sin().sum().backward()
    return [y.detach(), x.grad.clone(), *(p.grad.clone() for p in model.parameters())]


def operators(graph):
    names = [str(n.target) for n in graph.nodes if n.op == "call_function"]
    return [name.split(".")[1] for name in names if name.startswith("fused_layernorm")]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("affine", [False, True])
def test_compile(device, backend, affine):
    torch._dynamo.reset()
    model, x, condition = block(device, elementwise_affine=affine)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    found, expected = step(compiled, model, x, condition), step(model, model, x, condition)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(
    torch.__version__.startswith("2.10."),
    reason="Dynamo of torch 2.10 cannot follow a gate beside an activation",
)
def test_compile_of_functions_and_of_a_gate_beside_an_activation(device):
    torch._dynamo.reset()
    x, residual, gate, shift, scale, weight, bias = (
        t.to(F32).requires_grad_() for t in inputs(device)
    )

    def f(x, residual, gate, shift, scale, weight, bias):
        y = ada_layer_norm(x, shift, scale, weight, bias)
        z, total = add_ada_layer_norm(y, residual, gate, shift)
        plain, total = add_layer_norm(z, total, weight, gate=gate)
        other, total = add_layer_norm(plain, total, weight, gate=gate, activation="gelu")
        return other + total

    leaves = (x, residual, gate, shift, scale, weight, bias)
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*leaves), f(*leaves))
    torch.testing.assert_close(
        torch.autograd.grad(compiled(*leaves).sin().sum(), leaves),
        torch.autograd.grad(f(*leaves).sin().sum(), leaves),
    )


def test_compile_with_dynamic_shapes(device):
    """One graph serves every number of samples and of tokens."""
    torch._dynamo.reset()
    model, _, _ = block(device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    first = None
    for samples, tokens in ((3, 5), (4, 7), (2, 9)):
        x = torch.randn(samples, tokens, 16, device=device, requires_grad=True)
        condition = torch.randn(samples, 1, 16, device=device)
        found, expected = step(compiled, model, x, condition), step(model, model, x, condition)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        # The first call may compile twice, because PyTorch first tries eps as a symbol.
        first = first or counter.frame_count
    assert counter.frame_count == first


@pytest.mark.parametrize("affine", [False, True])
def test_export_keeps_the_operators_and_decomposes_to_aten(device, affine):
    model, x, condition = block(device, requires_grad=False, elementwise_affine=affine)
    batch, tokens = Dim("batch"), Dim("tokens")
    program = torch.export.export(
        model, (x, condition), dynamic_shapes=({0: batch, 1: tokens}, {0: batch})
    )
    assert operators(program.graph) == ["ada_layer_norm", "add_ada_layer_norm"]
    plain = program.run_decompositions(fused_layernorm.decompositions())
    assert operators(plain.graph) == []
    _, x, condition = block(device, samples=4, tokens=7, requires_grad=False)
    for found in (program.module()(x, condition), plain.module()(x, condition)):
        torch.testing.assert_close(found, model(x, condition))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (
            lambda x, _residual, _gate, *rest: (ada_layer_norm(x, *rest),),
            {"ada_layer_norm_forward", "ada_layer_norm_backward"},
        ),
        (add_ada_layer_norm, {"add_ada_layer_norm_forward", "add_ada_layer_norm_backward"}),
        (
            lambda *args: add_ada_layer_norm(*args)[1:],
            {"add_ada_layer_norm_forward", "gate_backward"},
        ),
    ],
    ids=["ada_layer_norm", "add_ada_layer_norm", "only residual_out"],
)
def test_backward_decomposes_to_aten(device, function, expected):
    from torch.fx.experimental.proxy_tensor import make_fx

    tensors = inputs(device)

    def gradients(*tensors):
        leaves = [t.detach().requires_grad_() for t in tensors]
        found = torch.autograd.grad(loss_of(function)(*leaves), leaves, allow_unused=True)
        return [g for g in found if g is not None]

    graph = make_fx(gradients)(*tensors)
    assert set(operators(graph.graph)) == expected
    plain = make_fx(gradients, decomposition_table=fused_layernorm.decompositions())(*tensors)
    assert operators(plain.graph) == []
    torch.testing.assert_close(plain(*tensors), gradients(*tensors))


# ---- Autocast.


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("modulation_dtype", [F32, F16, BF16])
@pytest.mark.parametrize("x_dtype", [F32, F16, BF16])
@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
def test_autocast(device, gated, x_dtype, modulation_dtype, dtype):
    """Input and modulations of any dtypes: linear layers under autocast make narrow modulations."""
    x = torch.randn(3, 5, 32, device=device).to(x_dtype).requires_grad_()
    residual = torch.randn(3, 5, 32, device=device)
    modulations = [
        torch.randn(3, 1, 32, device=device).to(modulation_dtype).requires_grad_() for _ in "gst"
    ]
    gate, shift, scale = modulations
    weight = torch.randn(32, device=device, requires_grad=True)
    leaves = [x, *(modulations if gated else modulations[1:]), weight]
    with torch.autocast(device, dtype):
        if gated:
            y, residual_out = add_ada_layer_norm(x, residual, gate, shift, scale, weight)
            assert residual_out.dtype == F32
        else:
            y = ada_layer_norm(x, shift, scale, weight)
        like = F.layer_norm(x, (32,))
    assert y.dtype == like.dtype
    wide = [leaf.detach().float().requires_grad_() for leaf in leaves]
    if gated:
        expected, _ = stock_add_ada(wide[0], residual, *wide[1:])
    else:
        expected = stock_ada(*wide)
    tolerance = 1e-5 if y.dtype == F32 else 3e-2
    torch.testing.assert_close(y.float(), expected, rtol=tolerance, atol=tolerance)
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, leaves, dy)
    for leaf, one, other in zip(
        leaves, found, torch.autograd.grad(expected, wide, dy.float()), strict=True
    ):
        assert one.dtype == leaf.dtype
        tolerance = 1e-4 if leaf.dtype == F32 else 2e-2
        torch.testing.assert_close(one.float(), other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", HALF)
def test_out_dtype_opts_out_of_autocast(device, dtype):
    x = torch.randn(3, 5, 32, device=device).to(dtype)
    shift = torch.randn(3, 1, 32, device=device)
    with torch.autocast(device, dtype):
        assert ada_layer_norm(x, shift, out_dtype=dtype).dtype == dtype
        y, _ = FusedAddAdaLayerNorm(32, out_dtype=dtype)(x, x, shift, shift, shift)
    assert y.dtype == dtype


# ---- Modules.


def test_modules_are_layer_norms():
    for module in (FusedAdaLayerNorm(16), FusedAddAdaLayerNorm(16)):
        assert isinstance(module, nn.LayerNorm)
        assert module.eps == 1e-6
        assert module.normalized_shape == (16,)
        assert module.weight is None
        assert module.bias is None
        assert not module.state_dict()
    affine = FusedAdaLayerNorm((4, 8), 1e-3, True)
    assert affine.state_dict().keys() == nn.LayerNorm((4, 8)).state_dict().keys()
    assert FusedAdaLayerNorm(8, elementwise_affine=True, bias=False).bias is None


def test_swap_leaves_them_as_they_are():
    model = nn.Sequential(FusedAdaLayerNorm(16), FusedAddAdaLayerNorm(16), nn.LayerNorm(16))
    fused_layernorm.swap_layer_norm(model)
    kinds = [FusedAdaLayerNorm, FusedAddAdaLayerNorm, fused_layernorm.FusedLayerNorm]
    assert [type(module) for module in model] == kinds
    fused_layernorm.unswap_layer_norm(model)
    assert [type(module) for module in model] == [*kinds[:2], nn.LayerNorm]


@pytest.mark.parametrize("options", [{}, {"elementwise_affine": True, "out_dtype": F64}], ids=str)
def test_modules_give_what_the_functions_give(device, options):
    x, residual = torch.randn(2, 3, 5, 8, device=device)
    gate, shift, scale = torch.randn(3, 3, 1, 8, device=device)
    norm = FusedAdaLayerNorm(8, **options).to(device)
    add_norm = FusedAddAdaLayerNorm(8, **options).to(device)
    for module in (norm, add_norm):
        for parameter in module.parameters():
            nn.init.normal_(parameter)
    for copied in (norm, copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        y = copied(x, shift, scale)
        expected = stock_ada(x, shift, scale, norm.weight, norm.bias, 1e-6)
        torch.testing.assert_close(y, expected.to(y.dtype), rtol=1e-5, atol=1e-5)
        assert y.dtype == options.get("out_dtype", F32)
    y, residual_out = add_norm(x, residual, gate, shift, scale)
    total = residual + gate * x
    expected = stock_ada(total, shift, scale, add_norm.weight, add_norm.bias, 1e-6)
    torch.testing.assert_close(y, expected.to(y.dtype), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(residual_out, total)
    torch.testing.assert_close(
        norm(x, None, scale),
        ada_layer_norm(x, None, scale, norm.weight, norm.bias, 1e-6).to(y.dtype),
    )


def test_modules_normalize_several_dimensions(device):
    x = torch.randn(2, 3, 4, 5, device=device)
    scale = torch.randn(2, 1, 4, 5, device=device)
    norm = FusedAdaLayerNorm((4, 5)).to(device)
    expected = F.layer_norm(x, (4, 5), eps=1e-6) * (1 + scale)
    torch.testing.assert_close(norm(x, None, scale), expected)


@pytest.mark.parametrize("options", [{}, {"elementwise_affine": True, "out_dtype": F64}], ids=str)
@pytest.mark.parametrize("how", ["script", "trace"])
@pytest.mark.parametrize("module", [FusedAdaLayerNorm, FusedAddAdaLayerNorm])
def test_torch_script(device, module, how, options):
    """Scripted and traced modules, also saved and loaded, give the same results and gradients."""
    model = module(8, **options).to(device)

    def args(rows):
        x, residual = torch.randn(2, rows, 5, 8, device=device)
        modulations = torch.randn(3, rows, 1, 8, device=device)
        if module is FusedAdaLayerNorm:
            return x, *modulations[1:]
        return x, residual, *modulations

    given = tuple(t.requires_grad_() for t in args(4))
    script = torch.jit.trace(model, args(3)) if how == "trace" else torch.jit.script(model)
    buffer = io.BytesIO()
    torch.jit.save(script, buffer)
    buffer.seek(0)
    for scripted in (script, torch.jit.load(buffer)):
        found, expected = scripted(*given), model(*given)
        torch.testing.assert_close(found, expected)
        losses = [
            sum(out.sin().sum() for out in (outs if isinstance(outs, tuple) else (outs,)))
            for outs in (found, expected)
        ]
        torch.testing.assert_close(*(torch.autograd.grad(loss, given) for loss in losses))


def test_symbolic_trace():
    model, x, condition = block("cpu")
    traced = torch.fx.symbolic_trace(model)
    calls = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    ours = (ada_layer_norm, add_ada_layer_norm)
    assert [f for f in calls if f in ours] == list(ours)
    assert torch.equal(traced(x, condition), model(x, condition))


# ---- CUDA.


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("requires_grad", [False, True], ids=["", "grad"])
@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
@pytest.mark.parametrize("modulation_dtype", [BF16, F32])
def test_one_kernel_forward(modulation_dtype, gated, requires_grad, autocast):
    """The kernel reads chunks in place, without copies.

    Only half-precision modulations beside a float32 y are cast to float32 first, because there is
    no kernel for them. The cast changes no bit of the result.
    """
    x, residual = torch.randn(2, 4, 256, 1152, device="cuda").to(BF16)
    chunks = torch.randn(4, 1, 6 * 1152, device="cuda").to(modulation_dtype).chunk(6, -1)
    for tensor in (x, residual, *chunks[:3]):
        tensor.requires_grad_(requires_grad and tensor.is_leaf)

    def forward():
        with torch.autocast("cuda", BF16, enabled=autocast):
            if gated:
                return add_ada_layer_norm(x, residual, chunks[2], chunks[0], chunks[1])[0]
            return ada_layer_norm(x, chunks[0], chunks[1])

    forward()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        y = forward()
        torch.cuda.synchronize()
    assert y.dtype == (F32 if autocast else BF16)
    kernels = [event.name for event in trace.events() if event.device_type == DeviceType.CUDA]
    casts = 2 + gated if autocast and modulation_dtype == BF16 else 0
    assert len(kernels) == 1 + casts, kernels
    assert "layer_norm" in kernels[-1]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4,), (3, 1, 4), (3, 5, 4), (1, 5, 4)], ids=str)
def test_cuda_graph(shape):
    """A captured forward and backward reads the values that the tensors have at the replay."""
    leaves: Any = [t.requires_grad_() for t in inputs("cuda", shape, rows=(3, 5), dtype=F32)]
    gradients = tuple(torch.randn(2, 3, 5, 4, device="cuda"))

    def run():
        outputs = add_ada_layer_norm(*leaves)
        return (*outputs, *torch.autograd.grad(outputs, leaves, gradients))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    with torch.no_grad():
        for leaf in leaves:
            leaf.normal_()
    graph.replay()
    for one, other in zip(captured, run(), strict=True):
        assert torch.equal(one, other)

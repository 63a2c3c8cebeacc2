# SPDX-License-Identifier: Apache-2.0
"""The ways to use the graph pass: the backend, its options, swapped modules, caches, explain."""

import copy
import functools
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import tiny_diffusers
import torch
import torch.nn.functional as F
from captured import llama, model, operators_of, passing, tensors
from compiling import EAGER, afresh, assert_same, everywhere, recording  # noqa: F401
from libraries import class_of
from numerics import covering
from processes import run
from swaps import EveryNorm, outcome, same
from tiny_transformers import WrittenHere
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import fused_layernorm
from fused_layernorm import FusedAddLayerNorm, FusedLayerNorm, FusedRMSNorm, FusedRMSNormGated
from fused_layernorm.compile import backend as ways
from fused_layernorm.compile import choice, rules
from fused_layernorm.compile.rules import Choice, Problem, choose
from fused_layernorm.ops.operators import ADD_ADA_LAYER_NORM, ADD_LAYER_NORM, LAYER_NORM, VARIANTS

ROOT = Path(__file__).parents[1]
OFFSET: dict[str, Any] = {"weight_offset": 1.0, "round_before_weight": True}
OPERATORS = torch.ops.fused_layernorm
pytestmark = pytest.mark.usefixtures("everywhere")


class Block(torch.nn.Module):
    """Half of a diffusion transformer's block, followed by a plain layer norm."""

    def __init__(self, width=32, checkpointed=False):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.norm_out, self.mix = nn.LayerNorm(width), nn.Linear(width, width)
        self.mod, self.checkpointed = nn.Linear(width, 5 * width), checkpointed

    def forward(self, x, c):
        if self.checkpointed:
            return self.norm_out(checkpoint(self.body, x, c, use_reentrant=False))
        return self.norm_out(self.body(x, c))

    def body(self, x, c):
        shift, scale, gate, shift2, scale2 = self.mod(c).unsqueeze(1).chunk(5, dim=-1)
        h = self.mix(self.norm1(x) * (1 + scale) + shift)
        x = x + gate * h
        return x + torch.tanh(self.norm2(x) * (1 + scale2) + shift2)


def inputs(width=32, device="cpu", rows=3):
    return torch.randn(rows, 7, width, device=device), torch.randn(rows, width, device=device)


# Where plain torch.compile cannot choose between the kernels and Inductor.
chooses = pytest.mark.skipif(not choice.CHOOSES, reason="Dynamo of torch 2.10 cannot choose")


# ---- The backend ---------------------------------------------------------------------------------


def every(width=16):
    return EveryNorm("gelu")


def given(block, width=16, device="cpu", rows=3):
    x = torch.randn(rows, 4, width, device=device)
    return inputs(width, device, rows) if isinstance(block, Block) else (x,)


# A block, its backend, options, whether sizes are dynamic, whether rules choose as on a GPU, and
# whether plain calls reach the operators on the CPU too.
THEN = "fused_layernorm.then"
TRAINED: list[tuple[Any, str, Any, bool, bool, bool]] = [
    *((functools.partial(Block, 16, checkpointed), "fused_layernorm", {THEN: then}, dynamic, True,
       False)
      for then, checkpointed, dynamic in [
          ("eager", False, False), ("eager", True, False), ("eager", False, True),
          ("inductor", True, False), ("inductor", False, True)]),
    *((every, backend, None, *how) for backend, *how in covering(
        ["aot_eager", "inductor"], [False, True], [False, True], [False, True])),
]  # fmt: skip


@pytest.mark.parametrize(("make", "backend", "options", "dynamic", "chosen", "operators"), TRAINED)
def test_training(device, make, backend, options, dynamic, chosen, operators, monkeypatch):
    monkeypatch.setattr(fused_layernorm.stock, "_cpu_operators", operators)
    monkeypatch.setattr(rules, "DEVICES", {"cpu", "cuda"} if chosen else {"cuda"})
    block, how = make().to(device), {"options": options, "dynamic": dynamic}
    compiled = torch.compile(block, backend=backend, fullgraph=True, **how)
    for rows in (3, 5) if dynamic else (3,):
        assert_same(block, compiled, *given(block, device=device, rows=rows))


@pytest.mark.parametrize(
    ("make", "backend"), [(Block, "fused_layernorm"), (every, "aot_eager"), (every, "inductor")]
)
def test_inference(device, make, backend):
    block = make(16).to(device)
    compiled = torch.compile(block, backend=backend, fullgraph=True)
    x = given(block, device=device)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            torch.testing.assert_close(compiled(*x), block(*x), rtol=1e-4, atol=1e-4)


def swapped(width):
    norms = nn.LayerNorm(width), nn.RMSNorm(width), nn.GroupNorm(1, 4), nn.SiLU()
    model = nn.Sequential(nn.Linear(width, width), *norms)
    return fused_layernorm.swap_norms(model, neighbours=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("make", "width", "backend", "tolerance"),
    [(Block, 32, "fused_layernorm", 1e-4), (every, 16, "inductor", 1e-3),
     (swapped, 64, "inductor", 1e-3)],
)  # fmt: skip
def test_cuda_graphs(make, width, backend, tolerance):
    block = make(width).cuda()
    compiled = torch.compile(block, backend=backend, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        assert_same(block, compiled, *given(block, width, "cuda"), tolerance=tolerance)
    with torch.no_grad():
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            x = given(block, width, "cuda")
            torch.testing.assert_close(compiled(*x), block(*x), rtol=tolerance, atol=tolerance)


def test_by_name(tmp_path):
    """A process that imports only torch finds the backend by the package's entry point."""
    text = (ROOT / "pyproject.toml").read_text()
    (declared,) = re.findall(r'torch_dynamo_backends"?\]\nfused_layernorm = "(.*)"', text)
    module, _, name = declared.partition(":")
    assert getattr(importlib.import_module(module), name) is ways.backend
    info = tmp_path / "fused_layernorm-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fused_layernorm\nVersion: 0\n")
    points = f"[torch_dynamo_backends]\nfused_layernorm = {declared}\n"
    (info / "entry_points.txt").write_text(points)
    code = """
        import sys; sys.path[:0] = [ROOT, FOLDER]
        import torch
        assert "fused_layernorm" in torch._dynamo.list_backends()
        norm, x = torch.nn.LayerNorm(8), torch.randn(3, 8)
        compiled = torch.compile(norm, backend="fused_layernorm", options=EAGER)
        torch.testing.assert_close(compiled(x), norm(x))
        assert "fused_layernorm" in sys.modules
    """
    run(code, ROOT=str(ROOT), FOLDER=str(tmp_path), EAGER=EAGER)


@pytest.mark.parametrize(
    ("options", "mode", "sentence"),
    [
        ({"fused_layernorm.than": "eager"}, None,
         r"expected an option of \['fused_layernorm.then', 'fused_layernorm.deterministic'\] or "
         r"of Inductor, got 'fused_layernorm.than'"),
        ({THEN: "tensorrt"}, None,
         r"expected 'fused_layernorm.then' 'inductor' or 'eager', got 'tensorrt'"),
        ({**EAGER, "max_autotune": True}, None,
         r"expected no mode and no options of Inductor's beside \"fused_layernorm.then\": "
         r"\"eager\", got 'max_autotune'"),
        (EAGER, "reduce-overhead", r"\"eager\", got 'reduce-overhead'"),
        ({"no_such_thing": 1}, None, r"Unexpected optimization option no_such_thing"),
    ],
)  # fmt: skip
def test_unknown_options(options, mode, sentence):
    with pytest.raises((ValueError, RuntimeError), match=sentence):
        ways.backend(torch.fx.symbolic_trace(torch.nn.ReLU()), [], mode=mode, options=options)
    compiled = torch.compile(torch.nn.ReLU(), backend="fused_layernorm", options=options)
    if mode is None:
        with pytest.raises(Exception, match=sentence):
            compiled(torch.randn(3))


def test_mode_and_options_are_inductors(monkeypatch):
    given = []

    class Inductor:  # Dynamo of torch 2.15 tests for instances of this class.
        def __init__(self, mode, options, dynamic):
            given.append((mode, options))

        def __call__(self, graph_module, example_inputs):
            return graph_module.forward

    monkeypatch.setattr(torch, "_TorchCompileInductorWrapper", Inductor)
    options: Any = {"max_autotune": True, "fused_layernorm.deterministic": True}
    for how in ({"options": options}, {"mode": "reduce-overhead"}):
        torch.compile(nn.LayerNorm(8), backend="fused_layernorm", **how)(torch.randn(2, 8))
    assert given == [(None, {"max_autotune": True}), ("reduce-overhead", {})]


def test_reset(monkeypatch):
    """torch._dynamo.reset() reaches the backend, which frees its CUDA graphs."""
    resets: list[bool] = []
    monkeypatch.setattr(ways.backend, "reset", lambda: resets.append(True))
    torch.compile(nn.LayerNorm(8), backend="fused_layernorm", options=EAGER)(torch.randn(2, 8))
    torch._dynamo.reset()
    assert resets


# ---- ATen's forward and our backward -------------------------------------------------------------


@pytest.mark.parametrize("width", [256, 1152])
def test_what_is_left_to_inductor(device, width):
    """At 256 columns Inductor's forward is as fast as ours. The backward is ours at every width."""
    module = torch.nn.Sequential(torch.nn.GELU(), torch.nn.LayerNorm(width)).to(device)
    compiler, graphs = recording()

    def backend(graph_module, example_inputs):
        return compiler(fused_layernorm.fuse(graph_module), example_inputs)

    x = torch.randn(3, width, device=device)
    assert_same(module, torch.compile(module, backend=backend, fullgraph=True), x)
    forward, backward = graphs
    assert ("aten.native_layer_norm.default" in forward) == (width == 256)
    assert ("fused_layernorm.layer_norm_forward.default" in forward) == (width == 1152)
    assert "fused_layernorm.layer_norm_backward.default" in backward


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_what_is_left_to_inductor_in_inference(context):
    compiler, graphs = recording()
    operator = OPERATORS.aten_layer_norm.default
    with context():
        x = torch.randn(3, 256)
        torch.compile(lambda x: operator(x, 1, None, None, 1e-5), backend=compiler)(x)
    assert graphs[0][0] == "aten.native_layer_norm.default"
    assert not any("fused_layernorm" in name for name in graphs[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("operator", [LAYER_NORM, ADD_LAYER_NORM, ADD_ADA_LAYER_NORM])
def test_aten_variants_give_the_same(device, operator, dtype):
    def make(*shape):
        return torch.randn(*shape, device=device).to(dtype).requires_grad_()

    x, residual, weight, bias = make(3, 4, 16), make(3, 4, 16), make(16), make(16)
    gate, shift, scale = (make(3, 1, 16) for _ in range(3))
    args: Any = {
        LAYER_NORM: (x, 1, weight, bias, 1e-5, "gelu", 0.5),
        ADD_LAYER_NORM: (x, residual, 1, weight, bias, 1e-5),
        ADD_ADA_LAYER_NORM: (x, residual, gate, 1, shift, scale, weight, bias, 1e-5),
    }[operator]
    leaves = [arg for arg in args if isinstance(arg, torch.Tensor)]
    found = []
    for overload in (operator.plain, VARIANTS[operator.plain]):
        outputs = overload(*args)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        loss = sum((out.double() * torch.arange(16, device=device)).sum() for out in outputs)
        found.append([*outputs, *torch.autograd.grad(loss, leaves)])
    rtol = 2e-2 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(*found, rtol=rtol, atol=1e-3)


@pytest.mark.parametrize("operator", [LAYER_NORM, ADD_LAYER_NORM])
def test_aten_variants_differentiate_twice_and_forward(operator):
    x, residual = (torch.randn(2, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    rows = (x, residual)[: 1 + ("residual" in operator.fields)]

    def call(*rows):
        return VARIANTS[operator.plain](*rows, 1, None, None, 1e-5)

    torch.autograd.gradcheck(call, rows, check_forward_ad=True)
    torch.autograd.gradgradcheck(call, rows)


def test_aten_variants_check_their_arguments():
    with pytest.raises(RuntimeError, match="expected weight of shape"):
        OPERATORS.aten_layer_norm.default(torch.randn(2, 8), 1, torch.randn(7), None, 1e-5)


# ---- Swapped modules under plain torch.compile ---------------------------------------------------


def targets_of(function, *args, through=lambda graph_module: graph_module, **kwargs):
    """The names of the operators in the graph that plain torch.compile captures, which computes
    what the function does."""
    found: list[str] = []

    def backend(graph_module, example_inputs):
        found.extend(operators_of(through(graph_module)))
        return graph_module.forward

    result = torch.compile(function, backend=backend, fullgraph=True, **kwargs)(*args)
    torch.testing.assert_close(result, function(*args), rtol=1e-4, atol=1e-4)
    return found


EAGER_PASS = functools.partial(fused_layernorm.fuse, then="eager")
IMAGE = torch.randn(2, 96, 4, 5).permute(0, 2, 3, 1)
# A module, its input, and the operators in a graph of plain torch.compile, under autocast (where
# PyTorch's is left for Inductor to fuse with the casts), and once the pass has run behind it.
SWAPPED: list[tuple[Any, torch.Tensor, str, str, str]] = [
    (lambda: FusedLayerNorm(256), torch.randn(3, 256), "aten_layer_norm", "", "layer_norm"),
    (lambda: FusedLayerNorm(1152), torch.randn(3, 1152), "layer_norm", "layer_norm", "layer_norm"),
    (lambda: FusedLayerNorm(256, activation="relu"), torch.randn(3, 256),
     "layer_norm", "layer_norm", "layer_norm"),
    (lambda: FusedAddLayerNorm(256), torch.randn(3, 256),
     "aten_add_layer_norm", "aten_add_layer_norm", "add_layer_norm"),
    (lambda: FusedLayerNorm(96), IMAGE, "aten_layer_norm", "", "layer_norm"),
    (lambda: FusedLayerNorm(96), IMAGE.contiguous(), "layer_norm", "", "layer_norm"),
    (lambda: FusedRMSNorm(256), torch.randn(3, 256), "", "", "layer_norm"),  # Inductor can write it
    (lambda: FusedRMSNorm(256, **OFFSET), torch.randn(3, 256),
     "aten_layer_norm", "aten_layer_norm", "layer_norm"),
    (lambda: fused_layernorm.swap_norms(nn.Sequential(WrittenHere(256))), torch.randn(3, 256),
     "", "", "layer_norm"),
    (lambda: FusedRMSNormGated(256, 1e-5), torch.randn(3, 256),
     "aten_rms_norm_gated", "aten_rms_norm_gated", "rms_norm_gated"),
]  # fmt: skip


@chooses
@pytest.mark.cpu_operators
@pytest.mark.parametrize("how", [0, 1, 2], ids=["plain", "autocast", "the pass"])
@pytest.mark.parametrize("row", range(len(SWAPPED)))
def test_swapped_modules(device, row, how):
    """What the rules leave to Inductor without the graph pass, which decides again."""
    make, x, *operators = SWAPPED[row]
    module, x = make().to(device), x.to(device)
    args = (x, x) if isinstance(module, (FusedAddLayerNorm, FusedRMSNormGated)) else (x,)
    through = {"through": EAGER_PASS} if how == 2 else {}
    with torch.autocast(device, torch.bfloat16, enabled=how == 1):
        assert targets_of(module, *args, **through) == operators[how].split()
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        assert_same(module, compiled, *args)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("norm", [fused_layernorm.ada_layer_norm, FusedAddLayerNorm(96, 1, False)])
def test_operators_of_rows_are_given_rows(device, norm, dynamic):
    """Inductor fuses the copy of x with what computes it; within the operator it is a kernel."""
    graphs: dict[int, Any] = {}
    x, rows = torch.randn(2, 96, 5, device=device).mT, torch.randn(2, 5, 96, device=device)
    targets_of(norm, x, rows, through=lambda g: graphs.setdefault(0, g), dynamic=dynamic)
    (call,) = (n for n in graphs[0].graph.nodes if isinstance(n.target, torch._ops.OpOverload))
    assert call.args[0].meta["example_value"].is_contiguous()


@chooses
def test_where_the_operator_stays(monkeypatch, request):
    """The kernels are used where the width is not known at compile time, without a guard, where
    algorithms must be deterministic, in exported programs, and on the CPU."""
    module, x = FusedLayerNorm(256), torch.randn(3, 256)
    of_rms = functools.partial(fused_layernorm.rms_norm, **OFFSET)
    for function in (fused_layernorm.layer_norm, fused_layernorm.rms_norm, of_rms):
        torch._dynamo.reset()
        dynamic = targets_of(lambda x, w, f=function: f(x, w), x, torch.randn(256), dynamic=True)
        assert dynamic == ["layer_norm"]
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    torch.use_deterministic_algorithms(True)
    assert targets_of(module, x) == ["layer_norm"]
    assert fused_layernorm.explain(torch.nn.LayerNorm(256), x).rows[0].operator == "layer_norm"
    torch.use_deterministic_algorithms(False)
    assert targets_of(module, x) == ["aten_layer_norm"]
    for strict in (False, True):
        program = torch.export.export(module, (x,), strict=strict)
        names = [str(node.target) for node in program.graph.nodes]
        assert "fused_layernorm.layer_norm.default" in names
    monkeypatch.setattr(rules, "DEVICES", {"cuda"})
    assert targets_of(module, x) == ["layer_norm"]


@chooses
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("norm", "options"),
    [*(("layer_norm", options) for options in (
        {}, {"eps": 1e-3}, {"eps": 1}, {"scale": 2}, {"scale": 0.5, "activation": "relu"},
        {"out_dtype": torch.bfloat16}, {"normalized_shape": [256]},
        {"normalized_shape": torch.Size([256])})),
     # PyTorch's rms_norm, which Inductor fuses, has neither.
     ("rms_norm", {"scale": 2.0}), ("rms_norm", {"out_dtype": torch.bfloat16})],
    ids=str,
)  # fmt: skip
def test_options_under_plain_compile(device, norm, options, dynamic):
    """Options may be symbols, and widths may be unknown when the operator is chosen."""

    def function(x, w, options):
        return norm(x, None if "normalized_shape" in options else w, **options)

    norm = getattr(fused_layernorm, norm)
    x, w = torch.randn(3, 256, device=device), torch.randn(256, device=device)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for autocast in (False, True):
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            torch.testing.assert_close(compiled(x, w, options), function(x, w, options))


# The module, the shape of its input, and our operators in a graph of training and of a forward pass
# alone.
WORTH = {
    "narrow rows": (lambda: nn.LayerNorm(1024), (3, 1024), 1, 0),
    "wide rows": (lambda: nn.LayerNorm(1025), (3, 1025), 1, 1),
    "without parameters": (lambda: nn.LayerNorm(1025, 1e-5, False), (3, 1025), 0, 0),
    "small groups": (lambda: nn.GroupNorm(1, 4), (1, 4, 256, 256), 1, 0),
    "large groups": (lambda: nn.GroupNorm(1, 4), (1, 4, 512, 256), 1, 1),
    "small, SiLU": (lambda: nn.Sequential(nn.GroupNorm(1, 4), nn.SiLU()), (1, 4, 128, 64), 1, 0),
    "large, SiLU": (lambda: nn.Sequential(nn.GroupNorm(1, 4), nn.SiLU()), (1, 4, 256, 128), 1, 1),
    "small instances": (lambda: nn.InstanceNorm2d(2), (1, 2, 256, 256), 1, 0),
    "large instances": (lambda: nn.InstanceNorm2d(2), (1, 2, 512, 512), 1, 1),
}  # fmt: skip


@chooses
@pytest.mark.cpu_operators
@pytest.mark.parametrize("name", WORTH)
def test_swapped_modules_that_are_not_worth_it(device, name):
    """They are traced as written, where Inductor fuses more than a kernel gains."""
    make, shape, in_training, count = WORTH[name]
    model, x = nn.Sequential(make()).to(device), torch.randn(shape, device=device)
    swapped = fused_layernorm.swap_norms(copy.deepcopy(model), neighbours=True)

    def operators(x):
        torch._dynamo.reset()
        found = targets_of(swapped, x)
        torch.testing.assert_close(swapped(x), model(x), rtol=1e-4, atol=1e-4)
        return len(found)

    assert operators(x.clone().requires_grad_()) == in_training
    with torch.no_grad():
        assert operators(x) == count
    swapped.requires_grad_(False)
    assert operators(x) == count, "nothing wants a gradient"


@chooses
@pytest.mark.cpu_operators
@pytest.mark.parametrize(
    ("width", "affine", "limit", "count"),
    [(1152, False, rules.SMALL, 0), (1152, False, 0, 1), (1152, True, rules.SMALL, 1),
     (64, False, rules.SMALL, 1)],
)  # fmt: skip
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_small_modulation_is_left(device, width, affine, limit, count, dynamic, monkeypatch):
    """Where PyTorch computes its norm, too. Sizes that are not known count as many elements."""
    monkeypatch.setattr(rules, "SMALL", limit)
    cls = class_of("diffusers.models.normalization", "AdaLayerNormContinuous")
    model = fused_layernorm.swap_norms(cls(width, 8, elementwise_affine=affine).to(device))
    x, emb = torch.randn(2, 3, width, device=device), torch.randn(2, 8, device=device)
    torch._dynamo.reset()
    found = targets_of(model, x.requires_grad_(), emb, dynamic=dynamic)
    assert found.count("ada_layer_norm") == max(count, dynamic)


@chooses
@pytest.mark.cpu_operators
@pytest.mark.parametrize("make", [lambda: nn.LayerNorm(1152, 1e-5, False), lambda: nn.RMSNorm(64)])
def test_pytorchs_norms_stay_so_with_dynamic_sizes(device, make):
    """Dynamo makes symbols of numbers that are defaults of a function."""
    model = fused_layernorm.swap_norms(nn.Sequential(make()).to(device))
    x = torch.randn(3, *make().normalized_shape, device=device, requires_grad=True)
    torch._dynamo.reset()
    assert targets_of(model, x, dynamic=True) == []


@chooses
@pytest.mark.cpu_operators
@pytest.mark.parametrize("make", [tiny_diffusers.dit, tiny_diffusers.unet])
def test_no_guard_reads_an_attribute_of_a_class(make):
    """It would keep Dynamo from skipping the guards of each module of this class."""
    (model, inputs), found = make(), []
    for one in (model, fused_layernorm.swap_norms(copy.deepcopy(model), neighbours=True)):
        torch._dynamo.reset()
        torch.compile(one.eval().requires_grad_(False), backend="eager")(**inputs)
        (entry,) = _debug_get_cache_entry_list(type(one).forward.__code__)
        of_parts = r"source=(type\(L\['self'\][^)].*), accessed_by=GetAttr"
        found.append(sorted(re.findall(of_parts, str(entry.guard_manager))))
    assert found[0] == found[1] != []


@pytest.mark.parametrize("channels_last", [False, True])
def test_channels_of_images_are_left_to_inductor(device, channels_last):
    """Inductor chooses the layouts of convolutions' results itself, whatever they were."""

    def function(x, w):
        y = F.conv2d(x, w).permute(0, 2, 3, 1)
        return F.layer_norm(y, (96,)), F.layer_norm(y.flatten(1, 2), (96,)), F.layer_norm(x, (8,))

    x, w = torch.randn(2, 3, 6, 8, device=device), torch.randn(96, 3, 1, 1, device=device)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    rows = fused_layernorm.explain(function, x, w).rows
    last = "aten_layer_norm" if channels_last else "layer_norm"
    assert [row.operator for row in rows] == ["aten_layer_norm", "aten_layer_norm", last]
    rows = fused_layernorm.explain(function, x, w, then="eager").rows
    assert [row.operator for row in rows] == 3 * ["layer_norm"]


class Channels(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(24)

    def forward(self, x):
        return torch.sin(self.norm(torch.cos(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2))


class Convolutions(nn.Module):
    """In a contiguous model too Inductor may run them in channels_last."""

    def __init__(self):
        super().__init__()
        self.norm, self.before = nn.GroupNorm(4, 24), nn.Conv2d(24, 24, 3, padding=1)
        self.behind = nn.Conv2d(24, 24, 3, padding=1)

    def forward(self, x):
        x = self.before(x)
        return x + self.behind(F.silu(self.norm(x)))


@pytest.mark.parametrize("make", [Channels, Convolutions])
@pytest.mark.parametrize(("channels_last", "dynamic"), [(False, False), (True, True)])
def test_inductor_keeps_the_order_in_which_operators_read(make, channels_last, dynamic):
    module, x = make(), torch.randn(2, 24, 5, 7)
    if channels_last:
        module, x = (one.to(memory_format=torch.channels_last) for one in (module, x))
    compiled = torch.compile(module, backend="fused_layernorm", fullgraph=True, dynamic=dynamic)
    leaves, y, z = (x.requires_grad_(), *module.parameters()), module(x), compiled(x)
    torch.testing.assert_close(z, y, rtol=1e-4, atol=1e-4, check_stride=True)
    dy = torch.randn_like(y)
    found, expected = (torch.autograd.grad(out, leaves, dy) for out in (z, y))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


# ---- DTensor -------------------------------------------------------------------------------------


def test_dtensor(mesh):
    """Sharded rows stay sharded. AOTAutograd sees the operators on each rank's local tensors."""
    from torch._dynamo.backends.debugging import aot_eager
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def function(x, residual, weight, mod):
        h = residual + x
        y = F.layer_norm(h, (256,), weight)
        return F.layer_norm(y + h, (256,)) * (1 + mod) + mod, h

    shapes = ((2, 4, 256), (2, 4, 256), (256,), (1, 1, 256))
    placements = (Shard(0), Shard(0), Replicate(), Replicate())
    args = [distribute_tensor(torch.randn(shape), mesh, [where]).requires_grad_()
            for shape, where in zip(shapes, placements, strict=True)]  # fmt: skip

    def step(run):
        y, h = run(*args)
        assert y.placements == h.placements == (Shard(0),)
        gradients = torch.autograd.grad((y * y).sum() + (h * y).sum(), args)
        return [t.full_tensor() for t in (y, h, *gradients)]

    for with_inductor in (False, True):
        backend, rows, _ = passing("inductor", aot_eager) if with_inductor else passing()
        torch._dynamo.reset()
        found = step(torch.compile(function, backend=backend, fullgraph=True))
        torch.testing.assert_close(found, step(function), rtol=1e-4, atol=1e-3)
        first = "aten_add_layer_norm" if with_inductor else "add_layer_norm"
        assert [row.operator for row in rows] == [first, "add_ada_layer_norm"]


# ---- Rules ---------------------------------------------------------------------------------------


# The first three fields of a problem, and letters for the others.
LETTERS: dict[str, dict[str, Any]] = {
    "R": {"statistic": "rms"}, "A": {"is_apart": True}, "E": {"with_inductor": False},
    "D": {"deterministic": True}, "H": {"with_hidden_casts": True},
}  # fmt: skip
CHOICES: dict[Choice, list[tuple[Any, ...]]] = {
    Choice.KERNEL: [
        ("PLAIN", 1152, True), ("PLAIN", 4096, False), ("PLAIN", 32768, True),
        ("PLAIN", None, True), ("MODULATED", 768, True), ("MODULATED", None, True),
        ("ACTIVATED", 1024, True), ("PLAIN", 768, True, "E"), ("PLAIN", 768, True, "D"),
        ("PLAIN", 96, False), ("ACTIVATED", 96, False, "A"), ("PLAIN", 96, False, "AE"),
        ("MODULATED", 96, False, "A"), ("PLAIN", 1152, True, "H"), ("PLAIN", 96, True, "DH"),
        ("MODULATED", 4096, True, "R"), ("PLAIN", 4096, True, "RE"), ("PLAIN", 4096, True, "RD"),
    ],
    Choice.INDUCTOR: [
        ("PLAIN", 768, True), ("PLAIN", 4096, True), ("RESIDUAL", 768, False),
        ("PLAIN", 96, False, "A"), ("PLAIN", None, False, "A"), ("PLAIN", 4096, False, "R"),
        ("RESIDUAL", 2880, True, "R"), ("PLAIN", None, True, "R"),
        *(("GATED", cols, False) for cols in (128, 8192, None)),
    ],
    Choice.PYTORCH: [("PLAIN", 96, True, "H")],
}  # fmt: skip


def test_rules():
    """And the last one fits every problem."""
    for wanted, problems in CHOICES.items():
        for fusion, cols, trains, *letters in problems:
            options = {k: v for one in "".join(letters) for k, v in LETTERS[one].items()}
            problem = Problem(rules.Fusion[fusion], cols, trains, **options)
            assert choose(problem).choice is wanted, problem
    last = rules.RULES[-1]
    assert last == rules.Rule(last.choice, last.reason)


# ---- Caches --------------------------------------------------------------------------------------


def compile_afresh(module, *args):
    """Runs one training step of a fresh compilation; (hits, misses) of AOTAutograd's cache."""
    torch._dynamo.reset()
    counters.clear()
    out = torch.compile(module, backend="fused_layernorm", fullgraph=True)(*args)
    out.sum().backward()
    found = counters["aot_autograd"]
    assert found["autograd_cache_bypass"] == 0
    return found["autograd_cache_hit"], found["autograd_cache_miss"]


@torch._functorch.config.patch(enable_autograd_cache=True)
@torch._inductor.config.patch(fx_graph_cache=True)
def test_caches(monkeypatch, tmp_path):
    """A second compilation hits the cache. Other rules or another version of the package miss."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    module = torch.nn.Sequential(torch.nn.GELU(), torch.nn.LayerNorm(256))
    x = torch.randn(3, 256, requires_grad=True)
    assert compile_afresh(module, x) == (0, 1)
    assert compile_afresh(module, x) == (1, 0)

    with monkeypatch.context() as patch:
        rule = rules.Rule(Choice.INDUCTOR, "the same graph")
        patch.setattr(rules, "RULES", (rule, *rules.RULES))
        assert compile_afresh(module, x) == (0, 1)
    with monkeypatch.context() as patch:
        patch.setattr(ways, "VERSION", "99.0")
        assert compile_afresh(module, x) == (0, 1)
    assert compile_afresh(module, x) == (1, 0)


# ---- explain -------------------------------------------------------------------------------------


def test_explain(device):
    x, c = inputs(device=device)
    found = fused_layernorm.explain(Block().to(device), x, c)
    operators = [row.operator for row in found.rows]
    assert operators == ["ada_layer_norm", "add_ada_layer_norm", "add_layer_norm"]
    written = model("h = residual + x; norm(h, weight), h", llama)
    of_llama = fused_layernorm.explain(written, tensors(torch.bfloat16))
    for text, pieces in (
        (str(found), ["norm2", "residual, gate, scale, shift", "3 norms in 1 graph, 3 re", "[1] "]),
        (str(of_llama), ["RMSNorm written out", 'aten_add_layer_norm, "rms" [1]', "1 norm in 1 "]),
    ):
        assert text.split("  ")[0] == "where"
        assert all(piece in text for piece in pieces), text


def test_explain_what_is_left(device):
    """Repeated calls of explain do not use up a function's limit of compilations."""

    def function(x, residual):
        x = x * 2
        h = x + residual
        x.mul_(2)
        return F.layer_norm(h, (32,)), x

    for _ in range(12):
        found = fused_layernorm.explain(function, *(torch.randn(3, 32, device=device),) * 2)
    assert found.rows[0].notes == ["mul_ writes into an operand in between"]
    assert str(found).splitlines()[-1] == "[2] mul_ writes into an operand in between"
    nothing = fused_layernorm.explain(torch.nn.ReLU(), torch.randn(3))
    assert str(nothing) == "no norm on CUDA in 1 graph"


# ---- Diffusion transformers ----------------------------------------------------------------------


SD3 = functools.partial(tiny_diffusers.sd3, num_layers=2, qk_norm="rms_norm")
MOD, SUM, GATE = "scale, shift", "residual, ", "residual, gate, "
# For models of two layers: the operands fused with each norm, in the order of the graph.
DIFFUSION = {
    tiny_diffusers.dit: [MOD] + 4 * [GATE + MOD],
    # Two streams, image and text; then two blocks that join and part them; then the image's part.
    tiny_diffusers.flux: 2 * [MOD] + 6 * [GATE + MOD] + 3 * [MOD],
    SD3: 2 * [MOD] + 6 * [GATE + MOD],
    # Attention, cross-attention, feed-forward. The norm of the next layer's attention has the gate
    # of the feed-forward before.
    tiny_diffusers.wan: [MOD, "residual, gate", SUM + MOD, GATE + MOD, "residual, gate", SUM + MOD,
        GATE + MOD],
}  # fmt: skip


@pytest.mark.parametrize("make", DIFFUSION)
def test_diffusion_transformers(device, make):
    """Every norm of these models is replaced, and every layer norm fused with all around it.

    Attention is computed by PyTorch's plain formula, because on an H200 the kernel that PyTorch
    2.11 chooses for heads of 8 bfloat16 columns gives a stock Flux gradients of arbitrary size.
    """
    model, inputs = make()
    model = model.to(device, torch.bfloat16).eval()  # in training mode DiT drops labels at random
    for name, t in inputs.items():
        is_narrow = t.is_floating_point() and name != "timestep"
        inputs[name] = t.to(device, torch.bfloat16 if is_narrow else t.dtype)
    backend, rows, _ = passing()

    def compiled(model, inputs):
        return torch.compile(model, backend=backend)(**inputs)

    with sdpa_kernel(SDPBackend.MATH):
        same(outcome(model, inputs, compiled), outcome(model, inputs), 0.05)
    of_layers = [row for row in rows if row.statistic == "layer"]
    assert [", ".join(row.fused) for row in of_layers] == DIFFUSION[make]
    # SD 3.5 normalizes queries and keys as views, whose strides an operator would not give.
    assert all(row.operator or "strides" in row.notes[-1] for row in rows)

# SPDX-License-Identifier: Apache-2.0
"""Exported programs: torch.export, AOTInductor, ONNX, run with and without the package."""

import os
import re
import shutil
import subprocess
from typing import Any

import libraries
import pytest
import torch
import torch.nn.functional as F
from captured import operators_of
from processes import run
from swaps import OPTIONS, EveryNorm
from tiny_transformers import WrittenHere
from torch import nn
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx

import fused_layernorm as fl


def exported(model, x, grad=False, strict=False):
    with torch.set_grad_enabled(grad):
        shapes = {"x": {0: Dim("batch")}}
        return torch.export.export(model, (x,), dynamic_shapes=shapes, strict=strict)


def check_in_a_fresh_process(code, folder, model, x, **env):
    """Asserts that there the code, which knows FOLDER and x, finds what the model gives here."""
    torch.save((x, tuple(model(x))), folder / "data.pt")
    begin = """
        import sys, torch
        x, expected = torch.load(FOLDER + "/data.pt")
        same = lambda found: torch.testing.assert_close(tuple(found), expected)
    """
    run(begin, code, environment=env, FOLDER=str(folder))


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    """The C++ compiler for AOTInductor: $CXX if its packages can be loaded, else another.

    A package that contains a copy of the C++ library (libstdc++.a) crashes in PyTorch's own code
    when it is loaded, because std::regex takes its locale from the process's library.
    """
    library = tmp_path_factory.mktemp("compiler") / "probe.so"
    for candidate in filter(None, (os.environ.get("CXX"), "g++", "clang++")):
        if shutil.which(candidate) is None:
            continue
        subprocess.run(
            [candidate, "-shared", "-fPIC", "-x", "c++", "-", "-o", library],
            input=b"#include <locale>\nstd::locale probe() { return std::locale(); }\n",
            check=True,
        )
        if re.search(rb"lib(std)?c\+\+\.so", library.read_bytes()):
            return candidate
    return pytest.skip("no C++ compiler here shares its library with the process")


@pytest.mark.parametrize(("grad", "strict"), [(False, False), (True, True)])
def test_export_keeps_the_operators_and_decomposes_to_aten(device, grad, strict):
    model = EveryNorm(*OPTIONS).to(device)
    x = torch.randn(3, 4, 16, device=device)
    program = exported(model, x, grad, strict)
    names = [*["layer_norm", "add_layer_norm"] * len(OPTIONS), "layer_norm", "ada_layer_norm",
             "add_ada_layer_norm"]  # fmt: skip
    assert operators_of(program.graph_module) == names
    plain = program.run_decompositions(fl.decompositions())
    assert operators_of(plain.graph_module) == []
    x = torch.randn(5, 4, 16, device=device)  # another batch size
    expected = model(x)
    for found in (program.module()(x), plain.module()(x)):
        # The tolerance of float32, because the arithmetic is float32 also for a float64 output.
        torch.testing.assert_close(found, expected, rtol=1.3e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_decomposed_dtypes_round_once(dtype):
    x, weight, bias = torch.randn(6, 32), *torch.randn(2, 32)
    x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)

    class Norm(nn.Module):
        def forward(self, x):
            return fl.layer_norm(x, weight, bias, activation="gelu")

    program = torch.export.export(Norm(), (x,))
    plain = program.run_decompositions(fl.decompositions()).module()
    wide = F.gelu(F.layer_norm(x.double(), (32,), weight.double(), bias.double()))
    assert plain(x).dtype == dtype
    # A half-precision result is rounded once from a wider one. For float64 there is no wider type.
    eps = torch.finfo(dtype).eps * (1 if dtype != torch.float64 else 64)
    torch.testing.assert_close(plain(x), wide.to(dtype), rtol=eps, atol=eps / 8)


@pytest.mark.parametrize("options", OPTIONS)
def test_backward_decomposes_too(options):
    def gradients(x, residual, weight, bias):
        leaves = [t.requires_grad_() for t in (x, residual, weight, bias)]
        outputs = [
            fl.layer_norm(x, weight, bias, **OPTIONS[options]),
            *fl.add_layer_norm(x, residual, weight, bias, **OPTIONS[options]),
            fl.ada_layer_norm(x, weight, bias),
            *fl.add_ada_layer_norm(x, residual, weight, bias),
            fl.add_ada_layer_norm(residual, x, bias)[1],  # residual_out alone
        ]
        return torch.autograd.grad(torch.stack([out.sin().sum() for out in outputs]).sum(), leaves)

    tensors = [torch.randn(3, 8), torch.randn(3, 8), torch.randn(8), torch.randn(8)]
    expected = gradients(*tensors)
    tensors = [t.detach() for t in tensors]
    fused = make_fx(gradients)(*tensors)
    plain = make_fx(gradients, decomposition_table=fl.decompositions())(*tensors)
    called = {*operators_of(fused)}
    names = [f"{kind}layer_norm_forward" for kind in ("", "add_", "ada_", "add_ada_")]
    assert called >= {*names, "layer_norm_backward", "ada_layer_norm_backward", "gate_backward"}
    assert operators_of(plain) == []
    torch.testing.assert_close(plain(*tensors), expected)


def test_saved_program_runs_in_a_fresh_process(tmp_path):
    """Decomposed it runs without the package."""
    model, x = EveryNorm("gelu"), torch.randn(3, 4, 16)
    program = exported(model, x)
    plain = program.run_decompositions(fl.decompositions())
    torch.export.save(program, tmp_path / "program.pt2")
    torch.export.save(plain, tmp_path / "plain.pt2")
    code = """
        same(torch.export.load(FOLDER + "/plain.pt2").module()(x))
        assert "fused_layernorm" not in sys.modules
        import fused_layernorm
        same(torch.export.load(FOLDER + "/program.pt2").module()(x))
    """
    check_in_a_fresh_process(code, tmp_path, model, x)


@pytest.mark.slow
def test_aotinductor_package_runs_in_a_fresh_process(tmp_path, device, compiler):
    model = EveryNorm("gelu").to(device)
    program = exported(model, torch.randn(3, 4, 16, device=device))
    with torch._inductor.config.patch({"cpp.cxx": (compiler,)}):
        torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    x = torch.randn(5, 4, 16, device=device)
    # torch 2.10 does not import codecache itself.
    code = """
        import fused_layernorm, torch._inductor.codecache
        same(torch._inductor.aoti_load_package(FOLDER + "/model.pt2")(x))
    """
    check_in_a_fresh_process(code, tmp_path, model, x, CXX=compiler)


# Norms of (batch, 8, 6), by what they are.
OF_ROWS = torch.linspace(0.5, 2.0, 6)
OF_ANY_BATCH: dict[str, Any] = {
    "swapped GroupNorm": fl.swap_norms(nn.Sequential(nn.GroupNorm(2, 8))),
    "swapped InstanceNorm": fl.swap_norms(nn.Sequential(nn.InstanceNorm1d(8, affine=True))),
    "FusedGroupNorm": fl.FusedGroupNorm(2, 8, activation="silu"),
    "ada_group_norm": lambda x: fl.ada_group_norm(x, 2, x[..., 0], x[..., 1]),
    "swapped LayerNorm": fl.swap_norms(nn.Sequential(nn.LayerNorm(6))),
    "swapped RMSNorm": fl.swap_norms(nn.Sequential(nn.RMSNorm(6))),
    "swapped Llama's": fl.swap_norms(nn.Sequential(WrittenHere(6))),
    "channels": fl.FusedLayerNorm2d(8),
    "modulated": lambda x: fl.ada_layer_norm(x.mT, x[:, :, :1].mT, x[:, :, :1].mT),
    "residual": lambda x: torch.stack(fl.add_ada_layer_norm(x, x.cos(), x[..., :1], x, x.sin())),
    "residual, rounded": lambda x: torch.stack(
        fl.add_rms_norm(x, x.cos(), OF_ROWS, weight_offset=1.0, round_before_weight=True)
    ),
    "gated": lambda x: fl.rms_norm_gated(x, x, group_size=3),
    "gate first": lambda x: fl.rms_norm_gated(x, x.cos(), OF_ROWS, gate_first=True, group_size=3),
    "groups of columns": lambda x: fl.rms_norm(x, torch.ones(6), group_size=2),
    "heads": lambda x: fl.norm_rope(x.unflatten(1, (4, 2)), None, *torch.ones(2, 4, 3)),
}


class Called(nn.Module):
    def __init__(self, function, **options):
        super().__init__()
        self.function, self.options = function, options

    def forward(self, x, *tensors):
        return self.function(x, *tensors, **self.options)


@pytest.mark.parametrize("ours", [False, pytest.param(True, marks=pytest.mark.cpu_operators)])
@pytest.mark.parametrize("name", OF_ANY_BATCH)
def test_a_named_batch_gets_no_guard(name, ours):
    """A comparison with a size would be an AssertionError of torch.export, which is given our
    operators or PyTorch's. Ours decompose, for any batch too."""
    model = Called(OF_ANY_BATCH[name])
    program = exported(model, torch.randn(3, 8, 6))
    plain = program.run_decompositions(fl.decompositions())
    assert operators_of(plain.graph_module) == []
    x = torch.randn(5, 8, 6)
    for found in (program.module()(x), plain.module()(x)):
        torch.testing.assert_close(found, model(x))


def to_onnx(*given, **how) -> Any:
    pytest.importorskip("onnxscript")
    return torch.onnx.export(*given, dynamo=True, verbose=False, **how)


def test_onnx_of_a_swapped_group_norm_of_any_size():
    model = fl.swap_norms(nn.Sequential(nn.Conv2d(8, 8, 1), nn.GroupNorm(2, 8)))
    x = torch.randn(3, 8, 5, 6).to(memory_format=torch.channels_last)
    sizes = {0: Dim("batch"), 2: Dim("height"), 3: Dim("width")}
    program = to_onnx(model, (x,), dynamic_shapes=(sizes,))
    libraries.check_onnx(model, (torch.randn(2, 8, 7, 4),), program, 1e-4)


@pytest.mark.parametrize(
    ("names", "grad", "decomposed"),
    [(["plain"], False, False), (["plain", "gelu"], True, False), (["gelu"], False, True)],
    ids=str,
)
def test_onnx(names, grad, decomposed):
    """A module needs no table; of an exported program any batch may come."""
    model, x = EveryNorm(*names), torch.randn(3, 4, 16)
    if decomposed:
        program = to_onnx(exported(model, x).run_decompositions(fl.decompositions()))
        x = torch.randn(5, 4, 16)
    else:
        with torch.set_grad_enabled(grad):
            program = to_onnx(model, (x,))
        assert "LayerNormalization" in [node.op_type for node in program.model.graph]
    libraries.check_onnx(model, (x,), program, 1e-4)


# A function, or a model; the dtypes and sizes of its tensors; options.
SIZES: dict[str, tuple[int, ...]] = {"x": (4, 3, 16), "w": (16,), "q": (2, 3, 4, 8),
         "k": (2, 3, 2, 8), "d": (8,), "a": (2, 3, 4), "r": (2, 3, 2)}  # fmt: skip
SWAPPED = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.ReLU(), nn.RMSNorm(16))
SCRIPTED: list[tuple[Any, str, dict[str, Any]]] = [
    (fl.rms_norm, "hx hw", {"eps": 1e-6, "round_before_weight": True}),
    (fl.add_layer_norm, "hx fx fw fw", {"activation": "gelu"}),
    (fl.add_rms_norm, "fx fx fw", {"weight_offset": 1.0, "activation": "silu"}),
    (fl.layer_norm, "fx fw", {"activation": "gelu_tanh", "scale": 0.5, "out_dtype": torch.float16}),
    (fl.layer_norm, "fx", {"dim": 1}), (fl.rms_norm, "fx", {"dim": -3}),
    (fl.ada_layer_norm, "fx fw fx", {}),
    (fl.add_ada_layer_norm, "hx fx fw fx fw", {"statistic": "rms"}),
    (fl.group_norm, "hx", {"num_groups": 3, "activation": "silu"}),
    (fl.rms_norm_gated, "hx hx hw", {"group_size": 8, "gate_first": True}),
    (fl.qk_norm_rope, "fq fk fd fd fa fa", {"eps": 1e-5}),
    (fl.qk_norm_rope, "fq fk fd fd fr fr", {"eps": 1e-5, "rotary_dim": 4, "interleaved": True}),
    (fl.swap_norms(SWAPPED), "fx", {}),
]  # fmt: skip


@pytest.mark.cpu_operators
@pytest.mark.parametrize("opset", [12, 17, 18])
@pytest.mark.parametrize(("function", "tensors", "options"), SCRIPTED)
def test_onnx_from_torch_script(device, function, tensors, options, opset):
    model = Called(function, **options)
    kinds = {"h": torch.float16, "f": torch.float32}
    given = (torch.randn(SIZES[t[1]], device=device).to(kinds[t[0]]) for t in tensors.split())
    libraries.check_onnx(model.to(device).eval(), tuple(given), opset_version=opset)

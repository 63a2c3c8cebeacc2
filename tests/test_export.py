# SPDX-License-Identifier: Apache-2.0
"""Exported programs: torch.export, AOTInductor, ONNX, run with and without the package."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx

import fused_layernorm
from fused_layernorm import FusedAddLayerNorm, FusedLayerNorm, add_layer_norm, layer_norm

ROOT = Path(fused_layernorm.__file__).parents[1]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gelu": {"activation": "gelu", "scale": 0.5},
    "gelu_tanh": {"activation": "gelu_tanh"},
    "silu": {"activation": "silu", "scale": 2.0},
    "relu": {"activation": "relu"},
    "out_dtype": {"out_dtype": torch.float64},
}


class Model(nn.Module):
    """A norm over one dimension and an addition and norm over two."""

    def __init__(self, **options):
        super().__init__()
        self.norm = FusedLayerNorm(16, **options)
        self.linear = nn.Linear(16, 16)
        self.add_norm = FusedAddLayerNorm((4, 16), **options)
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0.2, 0.5)

    def forward(self, x):
        y = self.norm(x)
        return self.add_norm(self.linear(y.to(x.dtype)), x)


def operators(graph):
    names = [str(n.target) for n in graph.nodes if n.op == "call_function"]
    return [name for name in names if "fused_layernorm" in name]


def exported(model, x, grad=False):
    with torch.set_grad_enabled(grad):
        return torch.export.export(model, (x,), dynamic_shapes={"x": {0: Dim("batch")}})


def in_a_fresh_process(code, **env):
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
    )
    assert result.returncode == 0, (result.returncode, result.stderr)


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


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_export_keeps_the_operators_and_decomposes_to_aten(device, options, grad):
    model = Model(**OPTIONS[options]).to(device)
    x = torch.randn(3, 4, 16, device=device)
    program = exported(model, x, grad)
    assert operators(program.graph) == [
        "fused_layernorm.layer_norm.default",
        "fused_layernorm.add_layer_norm.default",
    ]
    plain = program.run_decompositions(fused_layernorm.decompositions())
    assert operators(plain.graph) == []
    x = torch.randn(5, 4, 16, device=device)  # another batch size
    expected = model(x)
    for found in (program.module()(x), plain.module()(x)):
        # The tolerance is that of float32, because the arithmetic is float32 also for a float64
        # output.
        torch.testing.assert_close(found, expected, rtol=1.3e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_decomposed_dtypes_round_once(dtype):
    x, weight, bias = torch.randn(6, 32), *torch.randn(2, 32)
    x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)

    class Norm(nn.Module):
        def forward(self, x):
            return layer_norm(x, weight, bias, activation="gelu")

    program = torch.export.export(Norm(), (x,))
    plain = program.run_decompositions(fused_layernorm.decompositions()).module()
    wide = F.gelu(F.layer_norm(x.double(), (32,), weight.double(), bias.double()))
    assert plain(x).dtype == dtype
    # A half-precision result is rounded once from a wider one. For float64 there is no wider type.
    eps = torch.finfo(dtype).eps * (1 if dtype != torch.float64 else 64)
    torch.testing.assert_close(plain(x), wide.to(dtype), rtol=eps, atol=eps / 8)


@pytest.mark.parametrize("options", OPTIONS)
def test_backward_decomposes_too(options):
    tensors = [torch.randn(3, 8), torch.randn(3, 8), torch.randn(8), torch.randn(8)]

    def gradients(x, residual, weight, bias):
        leaves = [t.requires_grad_() for t in (x, residual, weight, bias)]
        y = layer_norm(x, weight, bias, **OPTIONS[options])
        z, r = add_layer_norm(x, residual, weight, bias, **OPTIONS[options])
        return torch.autograd.grad(y.sin().sum() + z.sin().sum() + r.sin().sum(), leaves)

    expected = gradients(*tensors)
    tensors = [t.detach() for t in tensors]
    fused = make_fx(gradients)(*tensors)
    plain = make_fx(gradients, decomposition_table=fused_layernorm.decompositions())(*tensors)
    assert len(operators(fused.graph)) == 4
    assert operators(plain.graph) == []
    torch.testing.assert_close(plain(*tensors), expected)


def test_saved_program_runs_in_a_fresh_process(tmp_path):
    model, x = Model(activation="gelu"), torch.randn(3, 4, 16)
    program = exported(model, x)
    plain = program.run_decompositions(fused_layernorm.decompositions())
    torch.export.save(program, tmp_path / "program.pt2")
    torch.export.save(plain, tmp_path / "plain.pt2")
    torch.save((x, model(x)), tmp_path / "data.pt")
    for name, package in (("program", "fused_layernorm"), ("plain", "torch")):
        in_a_fresh_process(
            f"import sys, torch, {package}\n"
            f"x, expected = torch.load({str(tmp_path / 'data.pt')!r})\n"
            f"found = torch.export.load({str(tmp_path / name)!r} + '.pt2').module()(x)\n"
            "torch.testing.assert_close(found, expected)\n"
            f"assert ('fused_layernorm' in sys.modules) == ({package!r} == 'fused_layernorm')\n"
        )


@pytest.mark.slow
@pytest.mark.parametrize("decomposed", [False, True])
def test_aotinductor_package_runs_in_a_fresh_process(tmp_path, device, compiler, decomposed):
    model = Model(activation="gelu", scale=0.5).to(device)
    x = torch.randn(3, 4, 16, device=device)
    program = exported(model, x)
    if decomposed:
        program = program.run_decompositions(fused_layernorm.decompositions())
    with torch._inductor.config.patch({"cpp.cxx": (compiler,)}):
        torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    x = torch.randn(5, 4, 16, device=device)
    torch.save((x, model(x)), tmp_path / "data.pt")
    package = "torch" if decomposed else "fused_layernorm"
    in_a_fresh_process(
        f"import sys, torch, {package}\n"
        "import torch._inductor.codecache\n"  # torch 2.10 does not import it itself
        f"x, expected = torch.load({str(tmp_path / 'data.pt')!r})\n"
        f"model = torch._inductor.aoti_load_package({str(tmp_path / 'model.pt2')!r})\n"
        "torch.testing.assert_close(tuple(model(x)), tuple(expected))\n"
        f"assert ('fused_layernorm' in sys.modules) == {not decomposed}\n",
        CXX=compiler,
    )


@pytest.mark.parametrize("options", [name for name in OPTIONS if name != "out_dtype"])
def test_onnx(tmp_path, options):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = Model(**OPTIONS[options])
    program = exported(model, torch.randn(3, 4, 16))
    program = program.run_decompositions(fused_layernorm.decompositions())
    path = tmp_path / "model.onnx"
    exported_onnx = torch.onnx.export(program, dynamo=True, verbose=False)
    assert exported_onnx is not None
    exported_onnx.save(str(path))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    x = torch.randn(5, 4, 16)
    expected = model(x)
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(f), e, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [name for name in OPTIONS if name != "out_dtype"])
@pytest.mark.parametrize("grad", [False, True])
def test_onnx_of_a_module_needs_no_table(tmp_path, options, grad):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = Model(**OPTIONS[options])
    path = tmp_path / "model.onnx"
    with torch.set_grad_enabled(grad):
        program = torch.onnx.export(model, (torch.randn(3, 4, 16),), dynamo=True, verbose=False)
    assert program is not None
    program.save(str(path))
    kinds = [node.op_type for node in program.model.graph]
    assert ("LayerNormalization" in kinds) == (options == "plain")
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    x = torch.randn(3, 4, 16)
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    for f, e in zip(found, model(x), strict=True):
        torch.testing.assert_close(torch.from_numpy(f), e, rtol=1e-4, atol=1e-4)


def test_onnx_without_the_table_names_the_operator():
    pytest.importorskip("onnxscript")
    program = exported(Model(), torch.randn(3, 4, 16))
    with pytest.raises(torch.onnx.OnnxExporterError, match="fused_layernorm"):
        torch.onnx.export(program, dynamo=True, verbose=False)

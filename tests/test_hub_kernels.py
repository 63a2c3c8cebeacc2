# SPDX-License-Identifier: Apache-2.0
"""The layout of ci/hf_kernels.py: the demands of Hugging Face's `kernels`, and models that use it.

These tests build the layout without CUDA kernels on any machine, because the loader is the same.
The tests with the marker `gpu` build it with them.
"""

import ast
import copy
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import libraries
import pytest
import torch
from numerics import covering, ids
from tiny_transformers import bert, decoder, vit
from torch import nn
from torch.testing import assert_close

import fused_layernorm
from fused_layernorm.swap import rms as swap_rms

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "ci" / "hf_kernels.py"
if not SCRIPT.exists():
    pytest.skip("no sources beside these tests", allow_module_level=True)
kernels = libraries.get("kernels")  # and a torchvision that transformers can import


def build(out, **environment):
    command, env = [sys.executable, str(SCRIPT), str(out)], os.environ | environment
    subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
    return out


# On the CPU these tests run the operators, of the package and of the layouts that they load.
pytestmark = pytest.mark.cpu_operators


@pytest.fixture(autouse=True, scope="module")
def _cpu_operators_of_layouts():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSED_LAYERNORM_CPU_OPERATORS", "1")
        yield


@pytest.fixture(scope="module")
def layout(tmp_path_factory):
    return build(tmp_path_factory.mktemp("hub"), FUSED_LAYERNORM_CPU_ONLY="1")


@pytest.fixture(scope="module")
def variant(layout):
    (variant,) = (layout / "build").iterdir()
    return variant


@pytest.fixture(scope="module")
def kernel(layout):
    return kernels.get_local_kernel(layout, backend="cpu")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.slow, pytest.mark.gpu])])
def built(request, tmp_path):
    """(a device, a folder with a layout for it)."""
    if request.param == "cpu":
        # The variant is named itself, so that a torch with CUDA also takes it.
        return "cpu", request.getfixturevalue("variant")
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    archs = os.environ.get("TORCH_CUDA_ARCH_LIST", capability)
    return "cuda", build(tmp_path, TORCH_CUDA_ARCH_LIST=archs)


@pytest.fixture
def kernelize(monkeypatch):
    """A function that gives a model's norms of a class the forward of a layout's layer."""

    def kernelize(model, cls, layer_name, device, path):
        if getattr(cls, "kernel_layer_name", None) != layer_name:  # transformers names some itself
            for name in ("kernel_layer_name", "kernel_condition"):
                monkeypatch.setattr(cls, name, None, raising=False)
            kernels.replace_kernel_forward_from_hub(
                cls, layer_name, condition=lambda module: type(module) is cls
            )
        repository = kernels.LocalLayerRepository(path, layer_name=layer_name)
        with kernels.use_kernel_mapping({layer_name: {device: repository}}, inherit_mapping=False):
            mode = kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE
            kernels.kernelize(model, mode=mode, device=device)

    return kernelize


def module_of(name, path):
    spec: Any = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def called_by(function):
    """(the function's result, the names of the operators that it calls)."""
    with torch.profiler.profile() as profile:
        result = function()
    return result, [event.name for event in profile.events()]


# --- what the loader demands ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def hf_kernels():
    return module_of("hf_kernels", SCRIPT)


@pytest.mark.parametrize(
    ("compiled_with", "torch_cuda", "taken"),
    [
        ("12.9", "12.6", "cu126"),
        ("12.9", "12.8", "cu126"),
        ("12.9", "13.0", "cu130"),
        ("13.0", "13.0", "cu130"),
        ("13.2", "13.0", "cu130"),
        ("13.0", "12.8", None),  # whose driver may be too old for the binary's runtime
    ],
)
def test_variants_serve_torch_builds(hf_kernels, compiled_with, torch_cuda, taken):
    from kernels.backends import CUDA
    from kernels.variants import _resolve_variant_for_system, parse_variant
    from packaging.version import Version

    accepted, _ = _resolve_variant_for_system(
        variants=[parse_variant(name) for name in hf_kernels.variants_of(compiled_with)],
        selected_backend=CUDA(version=Version(torch_cuda)),
        cpu=platform.machine(),
        os=platform.system().lower(),
        torch_version=Version("2.13"),
        torch_cxx11_abi=True,
        tvm_ffi_version=None,
    )
    names = [variant.variant_str for variant in accepted]
    assert [name.split("-")[3] for name in names] == ([taken] if taken else [])


def test_metadata_with_kernels(hf_kernels, tmp_path):
    from kernels._rust import Metadata

    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    hf_kernels.lay_out(tmp_path / "package", tmp_path / "variant", "_x", ["75", "90", "120+PTX"])
    backend = Metadata.read_from_file(tmp_path / "variant" / "metadata.json").backend
    assert "cuda" in repr(backend).lower()
    assert backend.archs == ["7.5", "9.0", "12.0+PTX"]


def test_metadata(variant):
    from kernels._rust import Digest, DigestAlgorithm, Metadata

    metadata = Metadata.read_from_file(variant / "metadata.json")
    assert metadata.name.python_name == "fused_layernorm"
    assert metadata.id.isidentifier()
    assert metadata.version == 0
    assert metadata.license == "Apache-2.0"
    assert metadata.python_depends == []
    # The digest names exactly the files that exist.
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))


def test_operators_are_in_a_namespace_of_their_own(kernel, variant):
    identifier = json.loads((variant / "metadata.json").read_text())["id"]
    assert kernel.__name__ == identifier
    ours = getattr(torch.ops, identifier)
    assert ours.layer_norm.default is not torch.ops.fused_layernorm.layer_norm.default
    assert ours._build_info() == "cpu only"
    # Both builds are loaded, and each calls its own operators.
    x, weight = torch.randn(3, 8), torch.randn(8)
    expected = torch.nn.functional.layer_norm(x, (8,), weight)
    packages = {identifier: kernel, "fused_layernorm": fused_layernorm}
    for (own, package), other in zip(packages.items(), reversed(packages), strict=True):
        y, called = called_by(lambda package=package: package.layer_norm(x, weight))
        assert_close(y, expected)
        assert f"{own}::layer_norm" in called
        assert not any(name.startswith(f"{other}::") for name in called)


def test_needs_nothing_but_itself_torch_and_python(variant):
    """The package's imports of itself are relative, because the loader gives it another name."""
    paths = list(variant.rglob("*.py"))
    assert len(paths) > 10
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for name in names:
                top = name.split(".")[0]
                assert top == "torch" or top in sys.stdlib_module_names, f"{path}: {name}"


def test_sources_name_the_namespace_once():
    """Naming it a second time would prevent a second build in one process."""
    again = re.compile(
        r'LIBRARY\w*\(fused_layernorm|IMPL, "fused_layernorm"|Library\("fused_layernorm"|'
        r'"fused_layernorm::|ops\.fused_layernorm|NAMESPACE = "fused_layernorm"'
    )
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for folder, pattern in (("csrc", "*.[ch]*"), ("fused_layernorm", "*.py"))
        for path in (ROOT / folder).rglob(pattern)
        if "__pycache__" not in path.parts
        for line in path.read_text().splitlines()
        if again.search(line) and not line.strip().startswith(("//", "#"))
    ]
    assert found == ['fused_layernorm/ops/load.py: NAMESPACE = "fused_layernorm"']


def test_works_without_the_package(layout, tmp_path):
    """The layout works in a process that cannot import fused_layernorm, outside the sources."""
    program = f"""
import sys
from pathlib import Path
import kernels
import torch
kernel = kernels.get_local_kernel(Path({str(layout)!r}), backend="cpu")
x = torch.randn(3, 8, requires_grad=True)
y = kernel.layer_norm(x, normalized_shape=8)
assert torch.allclose(y, torch.nn.functional.layer_norm(x, (8,)), atol=1e-6)
y.sum().backward()
assert "fused_layernorm" not in sys.modules
"""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path, env=env)


def test_folder_of_the_name_is_the_same_kernel(kernel, variant):
    path = variant / "fused_layernorm" / "__init__.py"
    module = module_of("fused_layernorm_by_folder", path)
    assert module.layer_norm is kernel.layer_norm
    assert module.layers is kernel.layers


# --- models ---------------------------------------------------------------------------------------


def loss_and_backward(model, inputs):
    loss = model(**inputs).loss
    loss.backward()
    return loss


# By class of the norms: its hub name, a model, and how many of the norms the model has.
MODELS: dict[str, tuple[str, Any, int]] = {
    "LayerNorm of bert": ("LayerNorm", bert, 6),
    "LayerNorm of vit": ("LayerNorm", vit, 5),
    "LlamaRMSNorm": ("RMSNorm", lambda: decoder("Llama"), 5),
    "Qwen3RMSNorm": ("RMSNorm", lambda: decoder("Qwen3"), 9),
    "GemmaRMSNorm": ("RMSNormZeroCentered", lambda: decoder("Gemma"), 5),
}


@pytest.mark.parametrize("norm", MODELS)
def test_models(norm, kernelize, built):
    """The fused model calls the layout's operators once for each norm, and computes the same."""
    layer_name, make, count = MODELS[norm]
    device, path = built
    stock, inputs = make()
    stock.to(device)
    inputs = {name: value.to(device) for name, value in inputs.items()}
    fused = copy.deepcopy(stock)
    norms = [one for one in fused.modules() if type(one).__name__ == norm.split(" ")[0]]
    assert len(norms) == count
    kernelize(fused, type(norms[0]), layer_name, device, path)
    (namespace,) = {vars(norm)["forward"].__func__.__module__ for norm in norms}
    assert namespace.endswith(".layers")
    assert not namespace.startswith("fused_layernorm.")

    loss_and_backward(fused, inputs)
    fused.zero_grad()
    loss, called = called_by(lambda: loss_and_backward(fused, inputs))
    operators = namespace.removesuffix(".layers")
    assert called.count(f"{operators}::layer_norm") == count
    assert called.count(f"{operators}::layer_norm_backward") == count

    assert_close(loss, loss_and_backward(stock, inputs), rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(fused.parameters(), stock.parameters(), strict=True):
        if theirs.grad is not None:
            assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4)
    if layer_name != "LayerNorm":
        # In bfloat16 an order of casts that is not the class's own would show in the logits.
        stock.bfloat16(), fused.bfloat16()
        logits, expected = fused(**inputs).logits, stock(**inputs).logits
        assert logits.dtype == expected.dtype
        assert (logits == expected).float().mean() > 0.99


def test_compiles_without_graph_breaks(kernelize, variant):
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU())
    x = torch.randn(3, 8)
    expected = model(x)
    kernelize(model, nn.LayerNorm, "LayerNorm", "cpu", variant)
    assert "forward" in vars(model[1])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(compiled(x), expected)
    compiled(x).sum().backward()
    assert model[1].weight.grad is not None


# --- RMSNorm --------------------------------------------------------------------------------------


def rms_norm_class(folder, name):
    pytest.importorskip("transformers")
    return getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), name)


# One class of each distinct source that transformers gives one of the names, and Gemma's and T5's:
# its folder and its layer.
CLASSES = {
    "LlamaRMSNorm": ("llama", "RMSNorm"),
    "Olmo2RMSNorm": ("olmo2", "RMSNorm"),
    "GptOssRMSNorm": ("gpt_oss", "RMSNorm"),
    "NemotronHRMSNorm": ("nemotron_h", "RMSNorm"),
    "T5LayerNorm": ("t5", "RMSNorm"),
    "GemmaRMSNorm": ("gemma", "RMSNormZeroCentered"),
    "Qwen3_5RMSNorm": ("qwen3_5", "RMSNormZeroCentered"),
    "Qwen3NextRMSNormGated": ("qwen3_next", "RMSNormGated"),
    "KimiLinearRMSNormGated": ("kimi_linear", "RMSNormGated"),
    "LaraMiniRMSNormGated": ("lara_mini", "RMSNormGated"),
}
HALVES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def pair_of(name, dtype, device="cpu"):
    """A norm of the class with random weights, and a copy that has a layer's forward."""
    folder, layer = CLASSES[name]
    stock = rms_norm_class(folder, name)(64)
    torch.nn.init.normal_(stock.weight, 0.0 if layer == "RMSNormZeroCentered" else 1.0, 0.3)
    stock.to(device, dtype)
    fused = copy.deepcopy(stock)
    forward = getattr(fused_layernorm.layers, layer).forward
    fused.forward = forward.__get__(fused)
    return stock, fused


@pytest.mark.parametrize(
    ("name", "x_dtype", "weight_dtype", "autocast"),
    covering([*CLASSES], HALVES, HALVES, [False, True], strength=3),
    ids=ids,
)
def test_every_class_keeps_its_order_of_casts(name, x_dtype, weight_dtype, autocast, device):
    stock, fused = pair_of(name, weight_dtype, device)
    x = torch.randn(64, 64, device=device).to(x_dtype)
    xs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    gate = [torch.randn_like(x)] if CLASSES[name][1] == "RMSNormGated" else []
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        theirs, ours = (m.forward(x, *gate) for m, x in zip((stock, fused), xs, strict=True))
    assert ours.dtype == theirs.dtype
    tolerance = 2e-6 if ours.dtype == torch.float32 else 0.0
    same = torch.isclose(ours, theirs, rtol=tolerance, atol=0.0)
    assert same.float().mean() >= 0.999
    dy = torch.randn_like(ours)
    for y in (theirs, ours):
        y.backward(dy)
    rtol = 3e-2 if torch.bfloat16 in (x_dtype, weight_dtype) else 5e-3
    assert_close(xs[1].grad, xs[0].grad, rtol=rtol, atol=rtol)
    assert_close(fused.weight.grad, stock.weight.grad, rtol=rtol, atol=0.3)


@pytest.mark.parametrize("name", [name for name in CLASSES if name.endswith("Gated")])
def test_gated_norms_take_the_layer(name, kernelize, variant):
    """`kernels` compares signatures; one that is called without its gate keeps its own forward."""
    stock = nn.Sequential(rms_norm_class(CLASSES[name][0], name)(64))
    model = copy.deepcopy(stock)
    kernelize(model, type(stock[0]), "RMSNormGated", "cpu", variant)
    assert "forward" in vars(model[0])
    x, gate = torch.randn(2, 8, 64)
    y, called = called_by(lambda: model[0](x, gate))
    assert any(operator.endswith("::rms_norm_gated") for operator in called)
    assert_close(y, stock[0](x, gate), rtol=1e-5, atol=1e-6)
    with pytest.raises((AttributeError, TypeError)):
        model[0](x, None)


@pytest.mark.parametrize("name", CLASSES)
def test_sources_are_known(name):
    folder, _ = CLASSES[name]
    if name == "NemotronHRMSNorm":  # some versions before, its order is Llama's
        pytest.importorskip("transformers", "5.24")
    assert fused_layernorm.layers._digest(rms_norm_class(folder, name)) in swap_rms.SOURCES


def test_another_norm_keeps_its_own_forward():
    """A hub name is the model's word; a class that computes something else is left alone."""

    class Doubled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))
            self.eps = 1e-6

        def forward(self, x):
            return 2 * torch.nn.functional.rms_norm(x, (8,), self.weight, self.eps)

    class NoWeight(nn.Module):
        eps = 1e-6

        def forward(self, x):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    x = torch.randn(3, 8)
    modules: list[Any] = [Doubled(), NoWeight()]
    for module in modules:
        for layer in (fused_layernorm.layers.RMSNorm, fused_layernorm.layers.RMSNormZeroCentered):
            assert torch.equal(layer.forward(module, x), module(x))


@pytest.mark.parametrize("name", ["LlamaRMSNorm", "Olmo2RMSNorm", "GemmaRMSNorm"])
def test_rms_norms_compile_without_graph_breaks(name):
    stock, fused = pair_of(name, torch.bfloat16)
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    y = compiled(x)
    assert (y == stock(x)).float().mean() > 0.99
    y.sum().backward()
    assert fused.weight.grad is not None


@pytest.mark.parametrize("where", ["export", "vmap", "inference", "grad", "default dtype", "meta"])
def test_first_call_of_a_class_may_be_anywhere(where):
    stock, fused = pair_of("LlamaRMSNorm", torch.float32)
    x = torch.randn(3, 64)
    expected = stock(x)
    fused_layernorm.layers._digest.known.clear()
    match where:
        case "export":
            actual = torch.export.export(fused, (x,), strict=False).module()(x)
        case "vmap":
            actual = torch.vmap(fused)(x)
        case "inference":
            with torch.inference_mode():
                actual = fused(x)
        case "grad":
            actual = torch.func.vjp(fused, x)[0]
        case "default dtype":
            torch.set_default_dtype(torch.bfloat16)
            try:
                actual = fused(x)
            finally:
                torch.set_default_dtype(torch.float32)
        case "meta":
            with torch.device("meta"):
                actual = fused(x)
    assert_close(actual, expected)
    assert len(fused_layernorm.layers._digest.known) == 1

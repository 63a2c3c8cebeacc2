# SPDX-License-Identifier: Apache-2.0
"""What others did to a class, a function or a module, before a swap or after it, counts as it does
for the stock model."""

import gc
import importlib
import inspect
import sys
import threading
import weakref
from typing import Any

import pytest
import torch
from libraries import class_of
from swaps import Accepted, D, Registered, assert_same, registered_forward, results
from tiny_transformers import GemmaHere, WrittenHere
from torch import nn

import fused_layernorm
from fused_layernorm import is_fused, register_swap, stock, swap_norms, unswap_norms
from fused_layernorm.swap import registry, source

pytestmark = pytest.mark.cpu_operators  # as on a GPU: calls that are fused run our operators


CLASSES = {
    "LayerNorm": lambda: nn.LayerNorm,
    "RMSNorm": lambda: nn.RMSNorm,
    "GemmaHere": lambda: GemmaHere,
    "Registered": lambda: Registered,
    "Accepted": lambda: Accepted,
    "Llama": lambda: class_of("transformers.models.llama.modeling_llama", "LlamaRMSNorm"),
    "FP32LayerNorm": lambda: class_of("diffusers.models.normalization", "FP32LayerNorm"),
    "timm": lambda: class_of("timm.layers.norm", "LayerNorm"),
}


@pytest.fixture(params=CLASSES)
def cls(request, monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    register_swap(Registered, lambda module: registered_forward)
    return CLASSES[request.param]()


def swap(module):
    return swap_norms(nn.Sequential(module), predicate=lambda name, module: True)[0]


def test_a_forward_that_was_replaced_before_the_swap(cls, device, monkeypatch):
    """Tools of attribution do so, for the gradients: a swap would bring the old ones back."""
    monkeypatch.setattr(cls, "forward", lambda self, x: x * 3)
    module, x = swap(cls(D).to(device)), torch.randn(4, D, device=device)
    if cls is Accepted:  # whoever accepts a class says what it computes
        return
    assert not is_fused(module)
    assert_same(module(x), x * 3)


def test_a_forward_that_is_replaced_after_the_swap(cls, device, monkeypatch):
    module, x = swap(cls(D).to(device)), torch.randn(4, D, device=device)
    expected = module(x)
    assert is_fused(module)
    monkeypatch.setattr(cls, "forward", lambda self, x: x * 3)
    assert not is_fused(module)
    assert_same(module(x), x * 3)
    with torch.no_grad():
        assert_same(torch.compile(module, backend="eager")(x), x * 3)
    monkeypatch.undo()
    monkeypatch.setattr(stock, "_cpu_operators", True)
    assert is_fused(module)
    assert_same(module(x), expected)


def test_a_method_and_a_function_that_a_forward_calls(device, monkeypatch):
    module, x = swap(GemmaHere(D).to(device)), torch.randn(4, D, device=device)
    nn.init.ones_(module.weight)
    monkeypatch.setattr(GemmaHere, "_norm", lambda self, x: x * 3)
    assert not is_fused(module)
    assert_same(module(x), x * 3 * 2)
    assert not is_fused(swap(GemmaHere(D)))

    timm = class_of("timm.layers.norm", "LayerNormExp2d")
    image = torch.randn(2, D, 4, 4, device=device).to(memory_format=torch.channels_last)
    module = swap(timm(D).to(device))
    assert is_fused(module)
    monkeypatch.setattr(sys.modules[timm.__module__], "_layer_norm_cf", lambda x, *_: x * 3)
    assert_same(module(image), image * 3)


def test_a_constructed_norm_is_no_stock_module(device, monkeypatch):
    norm, x = fused_layernorm.FusedLayerNorm(D).to(device), torch.randn(4, D, device=device)
    expected = norm(x)
    monkeypatch.setattr(nn.LayerNorm, "forward", lambda self, x: x * 3)
    assert is_fused(norm)
    assert_same(norm(x), expected)


# A module of a model, with Llama's RMSNorm.
A_NORM = "import torch\nfrom torch import nn\n\n\n" + inspect.getsource(WrittenHere)


def test_a_file_that_changed_since_its_import(tmp_path, monkeypatch):
    """inspect reads the file as it is now; the class that is loaded is another one."""
    file = tmp_path / "of_a_model.py"
    file.write_text(A_NORM.replace("return self.weight *", "return 3.0 *"))
    monkeypatch.syspath_prepend(tmp_path)
    loaded = importlib.import_module(file.stem).WrittenHere
    file.write_text(A_NORM)
    assert source.read(loaded) is None
    x = torch.randn(4, D)
    assert_same(swap(loaded(D))(x), loaded(D)(x))


# ---- Hooks of all modules, quantization, compiled classes.


def test_hooks_of_all_modules_see_norms_inside_other_kernels(device):
    zero = class_of("diffusers.models.normalization", "AdaLayerNormZero")
    module, seen = swap_norms(zero(D, None, "layer_norm").to(device)), []
    assert is_fused(module)
    x, emb = torch.randn(2, 5, D, device=device), torch.randn(2, D, device=device)
    expected = module(x, emb=emb)[0]
    norm = module.norm

    def see(module, args, y):
        seen.append(module)
        return y * 0 if module is norm else y

    hook = torch.nn.modules.module.register_module_forward_hook(see)
    try:
        y = module(x, emb=emb)[0]
    finally:
        hook.remove()
    assert norm in seen
    assert not torch.allclose(y, expected)
    assert_same(module(x, emb=emb)[0], expected)


def test_an_init_function_that_asks_for_a_bias(device):
    """A swapped nn.RMSNorm has the attributes that nn.RMSNorm has, for scripts too."""
    norm = swap(nn.RMSNorm(D).to(device))
    assert not hasattr(norm, "bias")
    x = torch.randn(4, D, device=device)
    assert_same(torch.jit.script(norm)(x), norm(x))


QUANTIZED = {
    "layer": (lambda: nn.LayerNorm(D), (3, 5, D)),
    "group": (lambda: nn.GroupNorm(2, D), (3, D, 4)),
    "instance_1d": (lambda: nn.InstanceNorm1d(D), (3, D, 4)),
    "instance_2d": (lambda: nn.InstanceNorm2d(D, affine=True), (3, D, 4, 5)),
    "instance_3d": (lambda: nn.InstanceNorm3d(D), (3, D, 2, 4, 5)),
}


def eagerly(model, x, is_qat):
    quantization = torch.ao.quantization
    stubs = quantization.QuantStub(), quantization.DeQuantStub()
    model = nn.Sequential(stubs[0], *model, stubs[1]).train(is_qat)
    make = quantization.get_default_qat_qconfig if is_qat else quantization.get_default_qconfig
    model.qconfig = make("x86")
    (quantization.prepare_qat if is_qat else quantization.prepare)(model, inplace=True)(x)
    return quantization.convert(model.eval(), inplace=True)


def by_graph(model, x, is_qat):
    quantize = importlib.import_module("torch.ao.quantization.quantize_fx")
    mappings = torch.ao.quantization.qconfig_mapping
    name = "get_default_qat_qconfig_mapping" if is_qat else "get_default_qconfig_mapping"
    mapping = getattr(mappings, name)("x86")
    prepare = quantize.prepare_qat_fx if is_qat else quantize.prepare_fx
    types = [*map(type, model)]
    prepared = prepare(model.train(is_qat), mapping, (x,))
    prepared(x)
    quantized = quantize.convert_fx(prepared.eval())
    assert [*map(type, model)] == types  # the model itself is what it was
    return quantized


@pytest.mark.parametrize("is_qat", [False, True], ids=["static", "qat"])
@pytest.mark.parametrize("how", [eagerly, by_graph])
@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.on_cpu
@pytest.mark.filterwarnings("ignore")  # torch.ao.quantization's own
def test_quantization_is_that_of_the_stock_model(name, how, is_qat):
    make, shape = QUANTIZED[name]
    x = torch.randn(shape)

    def quantized(is_swapped):
        torch.manual_seed(0)
        model = nn.Sequential(make(), nn.Identity())
        if is_swapped:
            swap_norms(model)
        return how(model, x, is_qat)

    models = [quantized(True), quantized(False)]
    types = [{type(one) for one in each.modules() if "Norm" in type(one).__name__}
             for each in models]  # fmt: skip
    assert types[0] == types[1]
    # FX lowers a GroupNorm of PyTorch to nothing quantized.
    is_left = name == "group" and how is by_graph
    assert is_left or all(cls.__module__.startswith("torch.ao.") for cls in types[0])
    # A range that was observed may differ by a rounding, and then a result by one step.
    torch.testing.assert_close(models[0](x), models[1](x), rtol=0, atol=0.06)


@pytest.mark.filterwarnings("ignore")
def test_a_norm_that_fuses_something_is_not_quantized():
    quantization = torch.ao.quantization
    fusing = fused_layernorm.FusedLayerNorm(D, activation="silu")
    model: Any = nn.Sequential(fusing).eval()
    model.qconfig = quantization.get_default_qconfig("x86")
    assert type(quantization.convert(quantization.prepare(model))[0]) is type(fusing)


def test_compiled_submodules_are_left():
    traced = torch.jit.trace(nn.Linear(D, D), torch.randn(2, D))
    scripted = torch.jit.script(nn.Linear(D, D))
    model = nn.Sequential(traced, scripted, nn.LayerNorm(D))
    x = torch.randn(4, D)
    expected = model(x)
    assert_same(swap_norms(model, neighbours=True)(x), expected)


# ---- What is fused.


def test_is_fused_knows_every_module_of_the_package(monkeypatch):
    for name in fused_layernorm.__all__:
        cls = getattr(fused_layernorm, name)
        if isinstance(cls, type) and issubclass(cls, nn.Module):
            module = cls(*([4] if issubclass(cls, nn.GroupNorm) else []), D)
            assert is_fused(module), name
            swap_norms(nn.Sequential(module), predicate=lambda name, module: True)
            assert type(module) is cls, name
            again = eval(repr(module), vars(fused_layernorm))  # it accepts what it prints
            assert repr(again) == repr(module)
            module.forward = lambda *args: args[0]
            assert not is_fused(module)


@pytest.mark.filterwarnings("error")
def test_a_model_of_fused_modules_gets_no_warning():
    swap_norms(nn.Sequential(fused_layernorm.FusedAdaLayerNorm(D)))
    swap_norms(nn.Sequential(fused_layernorm.FusedRMSNorm2d(D)))


def test_unswap_of_one_kind_leaves_registered_classes_of_the_other(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    register_swap(Accepted, lambda module: registered_forward)
    model = swap_norms(nn.Sequential(Accepted(D), nn.RMSNorm(D)))
    fused_layernorm.unswap_rms_norm(model)
    assert [is_fused(module) for module in model] == [True, False]
    fused_layernorm.unswap_layer_norm(model)
    assert [type(module) for module in model] == [Accepted, nn.RMSNorm]


# ---- Threads, and what is kept.


@pytest.mark.parametrize("cls", [nn.LayerNorm, GemmaHere])
def test_two_threads_that_swap_and_unswap_one_model(cls):
    model = nn.Sequential(*(cls(D) for _ in range(50)))
    attributes = {*vars(cls(D))}
    start, errors = threading.Barrier(2), []

    def work():
        start.wait()
        try:
            for _ in range(40):
                swap_norms(model)
                unswap_norms(model)
        except Exception as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors
    unswap_norms(model)
    assert {type(module) for module in model} == {cls}
    assert all({*vars(module)} == attributes for module in model)


def test_classes_are_not_kept(tmp_path, monkeypatch):
    """Of a model that is gone, nothing here keeps the classes, those made for the swap included."""
    file = tmp_path / "of_another_model.py"
    file.write_text(A_NORM)
    monkeypatch.syspath_prepend(tmp_path)
    loaded = importlib.import_module(file.stem).WrittenHere
    module, x = swap(loaded(D)), torch.randn(4, D)
    assert is_fused(module)
    results(module, x)
    gone = [weakref.ref(one) for one in (loaded, type(module), loaded.forward)]
    del module, loaded, sys.modules[file.stem]
    gc.collect()  # the class that was made
    gc.collect()  # and then that of the model, the key under which it was kept
    assert [one() for one in gone] == [None] * 3


def raising(counts):
    def pack(tensor):
        counts.append(1)
        raise RuntimeError("a hook that raises")

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


CALLS: dict[str, Any] = {
    "module": lambda x: fused_layernorm.FusedLayerNorm(D, device=x.device)(x),
    "swapped": lambda x: swap_norms(nn.LayerNorm(D, device=x.device))(x),
    "rms": lambda x: fused_layernorm.FusedRMSNorm(D, device=x.device)(x),
    "function": lambda x: fused_layernorm.layer_norm(x, torch.ones(D, device=x.device)),
    "fused": lambda x: fused_layernorm.layer_norm(x, normalized_shape=D, activation="gelu"),
    "residual": lambda x: fused_layernorm.add_rms_norm(x, x, torch.ones(D, device=x.device)),
}


@pytest.mark.parametrize("by_pytorch", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_hook_that_raises_runs_once(name, by_pytorch, device, monkeypatch):
    monkeypatch.setattr(stock, "_cpu_operators", not by_pytorch)
    x, counts = torch.randn(4, D, device=device, requires_grad=True), list[int]()
    with raising(counts), pytest.raises(RuntimeError, match="a hook that raises"):
        CALLS[name](x)
    assert len(counts) == 1

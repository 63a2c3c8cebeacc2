# SPDX-License-Identifier: Apache-2.0
"""The rule of a swap: what the stock module accepts, the swapped one accepts, with its result; and
what others rely on or did to a class, a function or a module counts as it does for the stock model,
before a swap and after it.
"""

import contextlib
import copy
import functools
import gc
import importlib
import inspect
import json
import pickle
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import libraries
import pytest
import swaps
import tiny_diffusers
import torch
from libraries import class_of
from swaps import Accepted, D, Registered, assert_same, operators_of
from tiny_transformers import GemmaHere, WrittenHere
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import fused_layernorm
from fused_layernorm import is_fused, register_swap, stock, swap_norms, unswap_norms
from fused_layernorm.swap import registry, source

pytestmark = [
    pytest.mark.cpu_operators,  # as on a GPU: calls that are fused run our operators
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
T, R = "transformers.models.", "diffusers.models."


class RegisteredRms(Registered):
    def forward(self, x, *, shift=0.0):
        return F.rms_norm(x, self.gamma.shape, self.gamma) + shift


NORMS: dict[str, Any] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "llama": WrittenHere,
                         "accepted": Accepted, "registered": Registered}  # fmt: skip
SEQUENCE = {"sequence": lambda size: nn.Sequential(nn.GroupNorm(2, size), nn.SiLU())}
GROUPS: dict[str, Any] = {
    "group": lambda size: nn.GroupNorm(2, size),
    "instance": lambda size: nn.InstanceNorm2d(size, affine=True),
}
OF_LIBRARIES = {
    "transformers": (T + "llama.modeling_llama", "LlamaRMSNorm"),
    "diffusers": (R + "normalization", "FP32LayerNorm"),
    "timm": ("timm.layers.norm", "LayerNorm"),
}


def norm_of(kind, device="cpu"):
    """(a norm with random parameters, its input)."""
    known = {**NORMS, **GROUPS, **SEQUENCE, "gemma": GemmaHere}
    found = (known.get(kind) or class_of(*OF_LIBRARIES[kind]))(D).to(device)
    for parameter in found.parameters():
        nn.init.normal_(parameter)
    is_image = kind in {**GROUPS, **SEQUENCE}
    return found, torch.randn((2, D, 5, 5) if is_image else (4, D), device=device)


@pytest.fixture(params=NORMS)
def norm(request, device):
    return norm_of(request.param, device)[0]


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setattr(registry, "registered", {})
    register_swap(Registered, lambda module: swaps.registered_forward)
    register_swap(RegisteredRms, lambda _: lambda self, x: fused_layernorm.rms_norm(x, self.gamma))


def swap(module):
    return swap_norms(nn.Sequential(module), predicate=lambda *_: True, neighbours=True)[0]


def swapped(model):
    """A copy, of which every norm is fused."""
    found = swap(copy.deepcopy(model))
    norms: Any = [one for one in found.modules() if isinstance(one, tuple(NORMS.values()))]
    assert all(map(is_fused, norms))
    return found


def gradients(model, *inputs):
    """The output, and the gradients of input and parameters."""
    model.zero_grad()
    y = model(*inputs)
    y = y.values() if y.is_nested and y.layout is torch.jagged else y
    (torch.cat([*map(torch.flatten, y.unbind())]) if y.is_nested else y).square().sum().backward()
    return y, *(p.grad.clone() for p in model.parameters())


@pytest.mark.parametrize("parametrized", [False, True])
def test_kept_forwards(norm, device, parametrized):
    """Of before a swap, and of before an unswap: each computes what the stock module computes."""
    x, cls, name = torch.randn(4, D, device=device), type(norm), next(iter(norm._parameters))
    expected = norm(x)
    before = norm.forward
    swap_norms(norm, predicate=lambda name, module: True)
    if parametrized:
        parametrize.register_parametrization(norm, name, nn.Identity())
    between = norm.forward
    assert operators_of(lambda: norm(x))
    assert_same(before(x), expected)
    unswap_norms(norm)
    assert not operators_of(lambda: between(x))
    assert torch.equal(between(x), expected)
    if parametrized:
        parametrize.remove_parametrizations(norm, name)
    assert type(norm) is cls
    assert {*vars(norm)} == {*vars(cls(D))}


@pytest.mark.parametrize("first", ["swap", "shard"])
def test_fully_shard(norm, first, mesh):
    """fully_shard gives a module a class derived from its own: a swap and an unswap keep that."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    norm, x = norm.cpu(), torch.randn(4, D)
    new = swapped(norm) if first == "swap" else copy.deepcopy(norm)
    fully_shard(new, mesh=mesh)
    swap_norms(new, predicate=lambda name, module: True)
    for fused_now in (True, False):
        assert is_fused(new) is fused_now
        assert isinstance(new, FSDPModule)
        assert isinstance(new, type(norm))
        y, *grads = gradients(new, x)
        assert_same((y, *(grad.full_tensor() for grad in grads)), gradients(norm, x))
        unswap_norms(new)


@pytest.mark.filterwarnings("ignore:.*PyTorch API of nested tensors.*")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=["jagged", "strided"])
def test_nested_tensors(norm, device, layout):
    parts = [torch.randn(rows, D, device=device) for rows in (2, 3)]

    def of(model):
        try:
            return gradients(model, torch.nested.nested_tensor(parts, layout=layout))
        except (RuntimeError, ValueError) as error:
            return type(error)

    expected, found = of(norm), of(swapped(norm))
    if isinstance(norm, nn.LayerNorm):
        assert isinstance(expected, tuple)
    if isinstance(expected, type):
        assert found is expected
        return
    for one, other in zip(found, expected, strict=True):
        for a, b in zip(one.unbind(), other.unbind(), strict=True):
            assert_same(a, b)


@pytest.mark.parametrize("rows", [0, 2])
@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.float8_e4m3fn, None])
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_inputs_that_no_operator_takes(kind, dtype, rows, device):
    """The stock forward takes some of them: CUDA's layer_norm any, of no rows."""
    x: Any = [0.0] if dtype is None else torch.zeros(rows, D, dtype=dtype, device=device)

    def of(model):
        try:
            return model(x).dtype, torch.jit.trace(model, (x,))(x).dtype
        except (RuntimeError, TypeError) as error:
            return type(error)

    for affine in (True, False):
        norm = kind(D, elementwise_affine=affine, device=device)
        assert of(swapped(norm)) == of(norm)


class Scaled(torch.Tensor):
    """A subclass whose values only PyTorch's operators can read: it holds half of them."""

    @staticmethod
    def __new__(cls, half):
        return torch.Tensor._make_wrapper_subclass(cls, half.shape, dtype=half.dtype)

    def __init__(self, half):
        self.half_of_it = half

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types, args: Any = (), kwargs=None):  # type: ignore[override]
        assert func.namespace == "aten"
        args = [a.half_of_it * 2 if isinstance(a, cls) else a for a in args]
        return func(*args, **(kwargs or {}))


class Named(torch.Tensor):
    """A subclass as other libraries have them, for images for example."""


class Records(torch.overrides.TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_subclasses(norm):
    x = torch.randn(4, D)
    new = swapped(norm.cpu())
    with torch.no_grad():
        assert_same(new(Scaled(x / 2)), norm(x))
        assert type(new(x.as_subclass(Named))) is Named


@pytest.mark.parametrize("kind", [*NORMS, *GROUPS])
def test_modes_of_functions(kind, device):
    """A mode sees the stock calls; that of torch.set_default_device changes no norm."""
    stock, x = norm_of(kind, device)
    new = swapped(stock)
    with torch.no_grad():
        expected = stock(x)
        with Records() as of_stock:
            stock(x)
        with Records() as of_new:
            y = new(x)
        assert torch.equal(y, expected)
    assert of_new.seen == of_stock.seen
    with torch.device("meta"):
        found = new(x)
        assert torch.empty(1).is_meta, "the mode is still in force"
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert found.device == x.device
    with torch.device("cpu"):
        assert device == "cuda" or operators_of(lambda: new(x))


@pytest.mark.parametrize("operators", [False, True])
@pytest.mark.parametrize(
    ("make_it", "name"),
    [
        *((kind, "layer_norm") for kind in (nn.LayerNorm, Accepted, Registered)),
        *((kind, "rms_norm") for kind in (nn.RMSNorm, RegisteredRms)),
        *((GROUPS[kind], f"{kind}_norm") for kind in GROUPS),
    ],
)
def test_patched_functions(monkeypatch, make_it, name, operators):
    """DeepSpeed's profiler and others put their own functions in the place of PyTorch's."""
    monkeypatch.setattr(stock, "_cpu_operators", operators)
    new, x = swapped(make_it(D)), torch.randn((2, D, 3, 3) if name[0] in "gi" else (4, D))
    with monkeypatch.context() as patch:
        patch.setattr(F, name, lambda *args, **kwargs: torch.ones(3))
        assert torch.equal(new(x), torch.ones(3))
    assert operators is bool(operators_of(lambda: new(x)))


def test_torch_fx():
    """A swapped norm of PyTorch is one node with the stock name, and stays fused."""
    model = nn.Sequential(nn.LayerNorm(D), nn.RMSNorm(D))
    new = swapped(model)
    traced = [torch.fx.symbolic_trace(each) for each in (model, new)]
    stock, ours = ([(n.op, n.name, n.target) for n in each.graph.nodes] for each in traced)
    assert ours == stock
    x = torch.randn(4, D)
    assert operators_of(lambda: traced[1](x))
    for again in (pickle.loads(pickle.dumps(new)), copy.deepcopy(new), traced[1]):
        assert_same(again(x), model(x))
        assert type(again.get_submodule("0")) is fused_layernorm.FusedLayerNorm
    assert all(type(n).__module__ == "fused_layernorm.modules" for n in new)


@pytest.mark.parametrize("kind", [*NORMS, "group"])
def test_tensors_of_inference_mode_and_with_the_negative_bit(kind, device):
    negative = torch.randn(4, D, dtype=torch.complex64, device=device).conj().imag
    assert negative.is_neg()
    x = torch.randn(4, D, device=device, requires_grad=True)
    with torch.inference_mode():
        module, of_inference = norm_of(kind, device)[0], torch.randn(4, D, device=device)
    model = nn.Sequential(module)

    def run():
        with torch.no_grad():
            found = [model(input) for input in (negative, of_inference, x.detach())]
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
            model(x)
        return found

    expected = run()
    swap_norms(model, predicate=lambda *_: True)
    assert is_fused(module)
    torch.testing.assert_close(run(), expected)


# ---- What somebody replaces.


@pytest.mark.parametrize("operators", [False, True])
@pytest.mark.parametrize("kind", [*NORMS, *GROUPS, *SEQUENCE, "gemma", *OF_LIBRARIES])
def test_a_replaced_forward(kind, device, monkeypatch, operators, caplog):
    """Tools of attribution do so, for the gradients: a swap would bring the old ones back. Whoever
    accepts a class says what it computes."""
    monkeypatch.setattr(stock, "_cpu_operators", operators)
    early, x = norm_of(kind, device)
    cls, late, expected = type(early), copy.deepcopy(early), early(x)
    early = swap(early)
    assert is_fused(early)
    caplog.set_level("INFO", logger="fused_layernorm.swap")
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(cls, "forward", lambda self, x: x * 3)
        for module in (early, swap(late))[: 1 + (cls is not Accepted)]:
            assert not is_fused(module)
            for mode in (contextlib.nullcontext(), Records()):
                with mode:
                    assert_same(module(x), x * 3)
        if operators:
            assert_same(torch.compile(early, backend="eager")(x), x * 3)
    replaced = "its forward was replaced" + " since it was registered" * (cls is Registered)
    assert f"({replaced})" in caplog.text or kind not in ("layer", "rms", "group", "registered")
    assert is_fused(early)
    assert_same(early(x), expected)


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


@pytest.fixture
def of_a_model(tmp_path, monkeypatch):
    """A function that writes a model's file, Llama's RMSNorm but for a change, and imports it."""
    file = tmp_path / "of_a_model.py"

    def write(old="", new=""):
        text = "import torch\nfrom torch import nn\n\n\n" + inspect.getsource(WrittenHere)
        file.write_text(text.replace(old, new))
        return importlib.import_module(file.stem).WrittenHere

    monkeypatch.syspath_prepend(tmp_path)
    yield write
    sys.modules.pop(file.stem, None)


def test_a_file_that_changed_since_its_import(of_a_model):
    """inspect reads the file as it is now; the class that is loaded is another one."""
    loaded, x = of_a_model("return self.weight *", "return 3.0 *"), torch.randn(4, D)
    of_a_model()
    assert source.read(loaded) is None
    assert_same(swap(loaded(D))(x), loaded(D)(x))


# ---- Quantization, compiled classes.


def eagerly(model, x):
    quantization = torch.ao.quantization
    model = nn.Sequential(quantization.QuantStub(), *model, quantization.DeQuantStub()).eval()
    model.qconfig = quantization.get_default_qconfig("x86")
    quantization.prepare(model, inplace=True)(x)
    return quantization.convert(model, inplace=True)


def by_graph(model, x):
    quantize = importlib.import_module("torch.ao.quantization.quantize_fx")
    mapping = torch.ao.quantization.qconfig_mapping.get_default_qconfig_mapping("x86")
    types = [*map(type, model)]
    prepared = quantize.prepare_fx(model.eval(), mapping, (x,))
    prepared(x)
    quantized = quantize.convert_fx(prepared)
    assert [*map(type, model)] == types  # the model itself is what it was
    return quantized


@pytest.mark.parametrize("how", [eagerly, by_graph])
@pytest.mark.parametrize(
    ("make", "shape"),
    [(lambda: nn.LayerNorm(D), (3, 5, D)), (lambda: nn.GroupNorm(2, D), (3, D, 4)),
     (lambda: nn.InstanceNorm1d(D), (3, D, 4)), (lambda: nn.InstanceNorm3d(D), (3, D, 2, 4, 5)),
     (lambda: nn.InstanceNorm2d(D, affine=True), (3, D, 4, 5))],
    ids=["layer", "group", "instance_1d", "instance_3d", "instance_2d"],
)  # fmt: skip
@pytest.mark.on_cpu
@pytest.mark.filterwarnings("ignore")  # torch.ao.quantization's own
def test_quantization_is_that_of_the_stock_model(make, shape, how):
    x, found = torch.randn(shape), []
    for swap_it in (swap_norms, lambda model: model):
        torch.manual_seed(0)
        found.append(how(swap_it(nn.Sequential(make(), nn.Identity())), x))
    ours, stock = ({type(one) for one in model.modules() if "Norm" in type(one).__name__}
                   for model in found)  # fmt: skip
    assert ours == stock
    # FX lowers a GroupNorm of PyTorch to nothing quantized.
    is_left = how is by_graph and nn.GroupNorm in stock
    assert is_left or all(cls.__module__.startswith("torch.ao.") for cls in ours)
    # A range that was observed may differ by a rounding, and then a result by one step.
    torch.testing.assert_close(found[0](x), found[1](x), rtol=0, atol=0.06)


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


# ---- Classes that somebody saves or derives.


class Outer:
    class Norm(WrittenHere):
        pass


def test_a_class_in_a_class_keeps_its_name():
    swaps.check_swap_and_unswap(Outer.Norm(D), "FusedRMSNorm")


def test_a_saved_model_is_that_of_the_stock_class(tmp_path):
    diffusers = libraries.get("diffusers")
    model, inputs = tiny_diffusers.unet()
    new = swaps.beside(model.eval())
    assert is_fused(new)  # its own forward has a norm before an activation
    diffusers.DDPMPipeline(new, diffusers.DDPMScheduler()).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "unet/config.json").read_text())["_class_name"] == "UNet2DModel"
    again = diffusers.DDPMPipeline.from_pretrained(tmp_path).unet
    assert type(again) is type(model)
    assert_same(again.eval()(**inputs).sample, model(**inputs).sample)


@pytest.mark.parametrize("make_it", [nn.LayerNorm, WrittenHere, GROUPS["group"]])
def test_a_class_derived_from_a_swapped_one_stays(make_it, caplog):
    """Tools such as tomesd give a module a subclass of the class that it has."""
    model = swap_norms(nn.Sequential(make_it(D), make_it(D)))
    given, stock, x = type(model[0]), type(make_it(D)), torch.randn(3, D)

    class Doubled(given):  # type: ignore[misc, valid-type]
        def forward(self, x):
            return 2 * super().forward(x)

    expected = 2 * model[0](x)
    model[0].__class__ = Doubled
    assert type(copy.deepcopy(model)[0]) is Doubled
    with caplog.at_level("INFO", logger="fused_layernorm.swap"):
        unswap_norms(model)
    assert [*map(type, model)] == [Doubled, stock]
    assert "Doubled" in caplog.text
    assert_same(model[0](x), expected)
    model[0].__class__ = given
    unswap_norms(model)
    assert type(model[0]) is stock
    assert {*vars(model[0])} == {*vars(make_it(D))}


# ---- Nobody else's code.

ran: list[str] = []


def noted(what):
    ran.append(what)
    return 2.0


def halved(function):
    """Registers, and needs the frame of a class."""
    noted("decorator")
    assert "__qualname__" in sys._getframe(1).f_locals

    @functools.wraps(function)
    def wrapper(self, *args, **kwargs):
        return function(self, *args, **kwargs) * 0.5

    return wrapper


class Meta(type):
    def __init__(cls, *args):
        noted("metaclass")
        super().__init__(*args)


class Quiet(nn.Module, metaclass=Meta):
    def __init_subclass__(cls):
        noted(cls.__name__)

    def __setattr__(self, name, value):
        noted(name)
        super().__setattr__(name, value)


class Block(Quiet):
    def __init__(self):
        super().__init__()
        self.norm, self.act = nn.GroupNorm(2, 8), nn.SiLU()

    @halved
    @torch.no_grad()
    def forward(self, x: noted("x"), *, factor=noted("default")):  # type: ignore[valid-type] # noqa: B008
        return self.act(self.norm(x)) * factor


def test_a_swap_runs_no_decorator_default_or_hook_of_a_class():
    stock, x = Block(), torch.randn(2, 8, 4, 4)
    new = copy.deepcopy(stock)
    before = [*ran]
    swap_norms(new, neighbours=True)
    assert ran == before
    assert is_fused(new)
    assert_same(new(x), stock(x))
    assert_same(new(x, factor=3.0), stock(x, factor=3.0))
    assert not new(x.requires_grad_()).requires_grad  # the decorators' work is still done
    assert type(pickle.loads(pickle.dumps(new))) is type(new)
    Meta("Theirs", (type(new),), {})
    assert ran[-2:] == ["Theirs", "metaclass"], "a class that somebody derives is still told of"


# ---- All or nothing.


class Own(WrittenHere):
    def forward(self, x):
        return super().forward(x) + 1


def wrong(name, module):
    if name == "2":
        raise LookupError("a predicate of somebody")
    return True


@pytest.mark.parametrize("how", ["predicate", "make", "signature"])
def test_a_swap_that_raises_has_done_nothing(how):
    makes: Any = {"make": lambda _: [][1], "signature": lambda _: lambda: None}
    register_swap(Own, makes.get(how, lambda module: None))
    block = class_of(R + "normalization", "AdaLayerNormZero")(D, None)
    model = nn.Sequential(nn.LayerNorm(D), block, nn.GroupNorm(2, D), nn.SiLU(), Own(D))
    types = [type(one) for one in model.modules()]
    with pytest.raises((LookupError, TypeError)):
        swap_norms(model, predicate=wrong if how == "predicate" else None, neighbours=True)
    assert [type(one) for one in model.modules()] == types
    assert swaps.fused(model) == []


# ---- Threads, and what is kept.


@pytest.mark.parametrize("cls", [nn.LayerNorm, GemmaHere])
def test_two_threads_that_swap_and_unswap_one_model(cls):
    model, start = nn.Sequential(*(cls(D) for _ in range(50))), threading.Barrier(2)

    def work():
        start.wait()
        for _ in range(40):
            swap_norms(model)
            unswap_norms(model)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as pool:
            for thread in [pool.submit(work) for _ in range(2)]:
                thread.result()
    finally:
        sys.setswitchinterval(interval)
    unswap_norms(model)
    assert {type(module) for module in model} == {cls}
    assert all({*vars(module)} == {*vars(cls(D))} for module in model)


def test_classes_are_not_kept(of_a_model):
    """Of a model that is gone, nothing here keeps the classes, those made for the swap included."""
    loaded = of_a_model()
    module, x = swap(loaded(D)), torch.randn(4, D)
    assert is_fused(module)
    swaps.results(module, x)
    gone = [weakref.ref(one) for one in (loaded, type(module), loaded.forward)]
    del module, sys.modules[loaded.__module__], loaded
    gc.collect()  # the class that was made
    gc.collect()  # and then that of the model, the key under which it was kept
    assert [one() for one in gone] == [None] * 3


CALLS: dict[str, Any] = {
    "module": lambda x: fused_layernorm.FusedLayerNorm(D, device=x.device)(x),
    "swapped": lambda x: swap_norms(nn.LayerNorm(D, device=x.device))(x),
    "rms": lambda x: fused_layernorm.FusedRMSNorm(D, device=x.device)(x),
    "function": lambda x: fused_layernorm.layer_norm(x, torch.ones(D, device=x.device)),
    "fused": lambda x: fused_layernorm.layer_norm(x, normalized_shape=D, activation="gelu"),
    "residual": lambda x: fused_layernorm.FusedAddLayerNorm(D, device=x.device)(x, x),
}


@pytest.mark.parametrize("error", [RuntimeError, ZeroDivisionError])
@pytest.mark.parametrize("packed", [1, 3])  # of what a norm saves
@pytest.mark.parametrize("by_pytorch", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_what_a_hook_on_saved_tensors_raises_passes_through(
    name, by_pytorch, packed, error, device, monkeypatch
):
    """Checkpointing ends its second forward so: nothing may be called once more."""
    monkeypatch.setattr(stock, "_cpu_operators", not by_pytorch)
    kept: list[torch.Tensor] = []

    def pack(tensor):
        kept.append(tensor)
        if len(kept) == packed:
            raise error("by a hook")
        return tensor

    x = torch.randn(4, D, device=device, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, pytest.raises(error, match="by a hook"):
        CALLS[name](x)
    assert len(kept) == packed


# ---- The one exception.


def step(x, linear, norm, in_place):
    """The result and the gradients of a residual around a norm, under autocast."""
    with torch.autocast("cuda", torch.bfloat16):
        y = x * 1.0
        if in_place:
            y += linear(norm(y))
        else:
            y = y + linear(norm(y))
    y.float().square().sum().backward()
    return [y, linear.weight.grad, norm.weight.grad, norm.bias.grad]


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["swap", "override"])
def test_a_residual_added_in_place_under_autocast(how):
    """docs/swap.md: PyTorch keeps a float32 copy of x, a fused norm x itself, and autograd sees it.

    What it says to write instead has the stock result.
    """
    x = torch.randn(8, 64, device="cuda", dtype=torch.bfloat16)
    stock = nn.Linear(64, 64).cuda(), nn.LayerNorm(64).cuda()
    linear, norm = copy.deepcopy(stock)
    expected = step(x, *stock, in_place=True)
    with fused_layernorm.override_aten() if how == "override" else contextlib.nullcontext():
        if how == "swap":
            swap_norms(norm)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            step(x, linear, norm, in_place=True)
        linear.zero_grad()
        norm.zero_grad()
        found = step(x, linear, norm, in_place=False)
    for one, other in zip(found, expected, strict=True):
        size = other.abs().max()
        torch.testing.assert_close(one / size, other / size, rtol=2e-2, atol=2e-2)

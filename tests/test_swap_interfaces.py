# SPDX-License-Identifier: Apache-2.0
"""What others rely on around a swap: names of classes, that none of their code runs during it, that
it is all or nothing, that a replaced __call__ sees every module, and that a class which somebody
derives from a swapped one stays theirs.
"""

import copy
import importlib
import json
import pickle
import sys
from typing import Any

import libraries
import pytest
import torch
from libraries import class_of
from swaps import assert_same, copies, fused
from tiny_transformers import WrittenHere, make
from torch import nn
from torch.nn import functional as F

import fused_layernorm
from fused_layernorm import is_fused, register_swap, swap_norms, unswap_norms
from fused_layernorm.swap import registry

D = 16
pytestmark = pytest.mark.cpu_operators


def beside(module):
    return swap_norms(copy.deepcopy(module), neighbours=True)


# ---- Names.

T, R = "transformers.models.", "diffusers.models."
# id: (what makes the module, what its repr says once it is swapped).
NAMED: dict[str, tuple[Any, str]] = {
    "llama": (lambda: class_of(T + "llama.modeling_llama", "LlamaRMSNorm")(D), "FusedRMSNorm["),
    "instance": (lambda: nn.InstanceNorm2d(D), "FusedGroupNorm["),
    "fp32": (lambda: class_of(R + "normalization", "FP32LayerNorm")(D), "FusedLayerNorm["),
    "ada": (lambda: class_of(R + "normalization", "AdaLayerNormZero")(D, None), "FusedLayerNorm["),
    "resnet": (
        lambda: class_of(R + "resnet", "ResnetBlock2D")(
            in_channels=D, groups=2, temb_channels=None
        ),
        "FusedActivation[",
    ),
    "sequence": (lambda: nn.Sequential(nn.GroupNorm(2, D), nn.SiLU()), "FusedActivation["),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_swapped_class_has_the_stock_names(name):
    make_it, shown = NAMED[name]
    stock = make_it()
    new = swap_norms(nn.ModuleList([copy.deepcopy(stock)]), neighbours=True)[0]
    assert is_fused(new)
    assert type(new) is not type(stock)
    for attribute in ("__name__", "__qualname__", "__module__"):
        assert getattr(type(new), attribute) == getattr(type(stock), attribute)
    assert new._get_name() == stock._get_name()
    assert repr(new).startswith(shown + type(stock).__name__ + "]")
    copies(new)
    assert repr(unswap_norms(new)) == repr(stock)


def unet():
    return libraries.get("diffusers").UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, block_out_channels=(8, 8),
        layers_per_block=1, norm_num_groups=2, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=4,
    )  # fmt: skip


def test_a_saved_model_is_that_of_the_stock_class(tmp_path):
    diffusers = libraries.get("diffusers")
    model = unet().eval()
    new = beside(model)
    assert is_fused(new)  # its own forward has a norm before an activation
    new.save_pretrained(tmp_path / "model")
    assert json.loads((tmp_path / "model/config.json").read_text())["_class_name"] == "UNet2DModel"
    again = diffusers.UNet2DModel.from_pretrained(tmp_path / "model")
    pipeline = diffusers.DDPMPipeline(new, diffusers.DDPMScheduler())
    pipeline.save_pretrained(tmp_path / "pipeline")
    of_pipeline = diffusers.DDPMPipeline.from_pretrained(tmp_path / "pipeline").unet
    x = torch.randn(1, 3, 8, 8)
    for one in (again, of_pipeline):
        assert type(one) is type(model)
        assert torch.equal(one.eval()(x, 1).sample, model(x, 1).sample)


def test_classes_are_found_by_their_names():
    """As device maps, FSDP's policies and adapters look them up."""
    transformers = libraries.get("transformers")
    model = unet()
    new = beside(model)
    for one, other in zip(new.modules(), model.modules(), strict=True):
        if not isinstance(one, fused_layernorm.FusedGroupNorm):
            assert type(one).__name__ == type(other).__name__
    swapped = type(new.down_blocks[0].resnets[0])
    found = transformers.trainer_pt_utils.get_module_class_from_name(new, "ResnetBlock2D")
    assert found is swapped
    assert issubclass(found, type(model.down_blocks[0].resnets[0]))


# ---- Nobody else's code.

DECORATED = '''
import functools
import torch
from torch import nn
from torch.nn import functional as F

ran = []


def counted(function):
    """Registers, and needs the frame of a class."""
    ran.append(function.__name__)
    if "__qualname__" not in __import__("sys")._getframe(1).f_locals:
        raise AttributeError("not in a class")
    return function


def halved(scale):
    ran.append("made")
    def decorator(function):
        ran.append("wrapped")
        @functools.wraps(function)
        def wrapper(self, *args, **kwargs):
            return function(self, *args, **kwargs) * scale
        return wrapper
    return decorator


class Hiding:
    def __init__(self, function):
        functools.update_wrapper(self, function)
    def __get__(self, instance, owner):
        return self if instance is None else functools.partial(self.__wrapped__, instance)


def default():
    ran.append("default")
    return 2.0


class Meta(type):
    def __init__(cls, *args):
        ran.append("metaclass")
        super().__init__(*args)


class Quiet(nn.Module, metaclass=Meta):
    def __init_subclass__(cls):
        ran.append(cls.__name__)

    def __setattr__(self, name, value):
        ran.append(name)
        super().__setattr__(name, value)

    def __init__(self):
        super().__init__()
        self.norm, self.act = nn.GroupNorm(2, 8), nn.SiLU()


class Block(Quiet):
    @counted
    @halved(0.5)
    @torch.no_grad()
    def forward(self, x: default(), *, factor: default() = default()) -> default():
        return self.act(self.norm(x)) * factor


class Hidden(Quiet):
    @Hiding
    def forward(self, x):
        return self.act(self.norm(x))


class Private(Quiet):
    __factor = 2

    def forward(self, x):
        return self.act(self.norm(x)) * self.__factor
'''


@pytest.fixture
def file(tmp_path, monkeypatch):
    (tmp_path / "of_somebody.py").write_text(DECORATED)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("of_somebody")
    del sys.modules["of_somebody"]


def test_a_subclass_that_somebody_derives_is_still_told_of(file):
    new = beside(file.Block())
    meta: Any = type(type(new))
    meta("Theirs", (type(new),), {})
    assert file.ran[-2:] == ["Theirs", "metaclass"]


def test_a_swap_runs_no_decorator_default_or_hook_of_a_class(file):
    stock, x = file.Block(), torch.randn(2, 8, 4, 4)
    new = copy.deepcopy(stock)
    ran = [*file.ran]
    swap_norms(new, neighbours=True)
    assert file.ran == ran
    assert is_fused(new)
    assert_same(new(x), stock(x))
    assert_same(new(x, factor=3.0), stock(x, factor=3.0))
    assert not new(x.requires_grad_()).requires_grad  # the decorators' work is still done
    assert type(pickle.loads(pickle.dumps(new))) is type(new)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("Hidden", "its forward"), ("Private", "names that are private to its class")],
)
def test_a_class_that_cannot_be_read_is_left(file, name, reason, caplog):
    stock, x = getattr(file, name)(), torch.randn(2, 8, 4, 4)
    with caplog.at_level("INFO", logger="fused_layernorm.swap"):
        new = beside(stock)
    assert (is_fused(new), is_fused(new.norm)) == (False, True)
    assert_same(new(x), stock(x))
    if name == "Private":  # the names in a callable object are not known
        assert reason in caplog.text


def test_models_whose_forwards_are_decorated():
    sizes = {"vocab_size": 50, "dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 48}
    model = make("DistilBertConfig", "DistilBertForMaskedLM", **sizes).eval()
    ids = torch.randint(50, (2, 9))
    assert_same(beside(model)(ids).logits, model(ids).logits)


# ---- All or nothing.


class Own(WrittenHere):
    def forward(self, x):
        return super().forward(x) + 1


def wrong(name, module):
    if name == "2":
        raise LookupError("a predicate of somebody")
    return True


@pytest.mark.parametrize("how", ["predicate", "make", "signature"])
def test_a_swap_that_raises_has_done_nothing(how, monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    makes: Any = {
        "make": lambda module: [][1],
        "signature": lambda module: lambda: None,
        "predicate": lambda module: None,
    }
    register_swap(Own, makes[how])
    block = class_of(R + "normalization", "AdaLayerNormZero")(D, None)
    model = nn.Sequential(nn.LayerNorm(D), block, nn.GroupNorm(2, D), nn.SiLU(), Own(D))
    types = [type(one) for one in model.modules()]
    with pytest.raises((LookupError, TypeError)):
        swap_norms(model, predicate=wrong if how == "predicate" else None, neighbours=True)
    assert [type(one) for one in model.modules()] == types
    assert fused(model) == []


# ---- Activations at the end of blocks.


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.act = nn.GroupNorm(2, 8), nn.SiLU()

    def forward(self, x, twice: bool = False, deep: bool = True):
        if deep:
            x = self.norm(x)
            if twice:
                x = x * 2
            x = self.act(x)
        for _ in range(2):
            x = self.norm(x)
            x = self.act(x)
        try:
            if twice:
                x = self.norm(x)
            x = F.silu(x)
        finally:
            if not twice:
                x = F.silu(self.norm(x))
        return x


@pytest.mark.parametrize("flags", [(False, True), (True, True), (True, False)])
def test_an_activation_that_ends_a_nested_block(flags, device, caplog):
    stock, x = Nested().to(device), torch.randn(2, 8, 4, 4, device=device)
    with caplog.at_level("INFO", logger="fused_layernorm.swap"):
        new = beside(stock)
    assert not caplog.text
    assert is_fused(new)
    assert_same(new(x, *flags), stock(x, *flags))


# ---- A replaced __call__.


def inner_norms(device):
    """Modules of which a kernel computes more than the module itself."""
    zero = class_of(R + "normalization", "AdaLayerNormZero")
    x = torch.randn(2, 8, 4, 4, device=device)
    yield Nested().to(device), (x,)
    yield nn.Sequential(nn.InstanceNorm2d(8), nn.LeakyReLU(0.01)).to(device), (x,)
    yield zero(D, None).to(device), (
        torch.randn(2, 5, D, device=device), None, None, None, torch.randn(2, D, device=device),
    )  # fmt: skip


def test_a_replaced_call_of_all_modules_sees_each(device, monkeypatch):
    call = nn.Module.__call__
    for stock, inputs in inner_norms(device):
        new, seen = beside(stock), list[str]()
        assert is_fused(new)

        def counting(self, *args, seen=seen, **kwargs):
            seen.append(type(self).__name__)
            return call(self, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(nn.Module, "__call__", counting)
            expected = stock(*inputs)
            of_stock = [*seen]
            seen.clear()
            y = new(*inputs)
        names = [name.removeprefix("Fused") for name in seen]
        assert names == of_stock
        assert_same(y, expected)


# ---- Classes that somebody derives.


@pytest.mark.parametrize(
    "make_it",
    [nn.LayerNorm, nn.RMSNorm, WrittenHere, lambda size: nn.GroupNorm(1, size)],
    ids=["layer", "rms", "llama", "group"],
)
def test_a_class_derived_from_a_swapped_one_stays(make_it, caplog, device):
    """Tools such as tomesd give a module a subclass of the class that it has."""
    model = nn.Sequential(make_it(D), make_it(D)).to(device)
    stock, x = type(model[0]), torch.randn(3, D, device=device)
    swap_norms(model)
    given = type(model[0])

    class Doubled(given):  # type: ignore[misc, valid-type]
        def forward(self, x):
            return 2 * super().forward(x)

    expected = 2 * model[0](x)
    model[0].__class__ = Doubled
    assert type(copy.deepcopy(model)[0]) is Doubled
    with caplog.at_level("INFO", logger="fused_layernorm.swap"):
        unswap_norms(model)
    assert (type(model[0]), type(model[1])) == (Doubled, stock)
    assert "Doubled" in caplog.text
    assert_same(model[0](x), expected)
    swap_norms(model)
    assert type(model[0]) is Doubled
    model[0].__class__ = given  # type: ignore[assignment]
    unswap_norms(model)
    assert type(model[0]) is stock
    assert {*vars(model[0])} == {*vars(make_it(D))}

# SPDX-License-Identifier: Apache-2.0
"""swap_norms(neighbours=True): the activation behind a norm, in the blocks and models of diffusers
and in sequences: results, gradients and strides as stock's, how many norms have taken an
activation, and what a hook, a replaced forward or an activation that nobody knows does.
"""

import copy
import functools
import pickle
import sys
from typing import Any

import libraries
import pytest
import torch
import torch.nn.functional as F
from libraries import class_of
from swaps import beside, check_swap_and_unswap, give_own_class, outcome, same
from tiny_diffusers import unet
from torch import nn

import fused_layernorm as fl
from fused_layernorm import is_fused, swap_norms, unswap_norms
from fused_layernorm.swap import groups, neighbours

R, A, U = "diffusers.models.resnet.", "diffusers.models.autoencoders.", "diffusers.models.unets."
F32, BF16 = torch.float32, torch.bfloat16
X, VIDEO, TEMB = (2, 8, 6, 4), (2, 8, 3, 6, 4), (2, 5)

pytestmark = pytest.mark.cpu_operators


def resnet(**options):
    return {"in_channels": 8, "groups": 2, "temb_channels": None, **options}


# id: (class, arguments, shapes of inputs, how many norms take their activation).
BLOCKS: dict[str, tuple[str, dict[str, Any], list[Any], int]] = {
    "resnet": (R + "ResnetBlock2D", resnet(), [X, None], 2),
    "temb": (R + "ResnetBlock2D", resnet(temb_channels=5, out_channels=4), [X, TEMB], 2),
    "scale_shift": (R + "ResnetBlock2D", resnet(temb_channels=5, time_embedding_norm="scale_shift"),
        [X, TEMB], 2),
    "down": (R + "ResnetBlock2D", resnet(down=True), [X, None], 2),
    "mish": (R + "ResnetBlock2D", resnet(non_linearity="mish"), [X, None], 0),
    "gelu": (R + "ResnetBlock2D", resnet(non_linearity="gelu"), [X, None], 2),
    "ada_group": (R + "ResnetBlockCondNorm2D", resnet(temb_channels=5), [X, TEMB], 2),
    "temporal": (R + "TemporalResnetBlock", {"in_channels": 32, "temb_channels": 5},
        [(2, 32, 3, 4, 4), (2, 3, 5)], 2),
    "kandinsky3": (U + "unet_kandinsky3.Kandinsky3Block",
        {"in_channels": 8, "out_channels": 8, "time_embed_dim": 5, "norm_groups": 2}, [X, TEMB], 1),
    "hunyuan": (A + "autoencoder_kl_hunyuan_video.HunyuanVideoResnetBlockCausal3D",
        {"in_channels": 8, "groups": 2}, [VIDEO], 2),
    "hunyuan_image": (A + "autoencoder_kl_hunyuanimage.HunyuanImageResnetBlock",
        {"in_channels": 32, "out_channels": 32}, [(2, 32, 6, 4)], 2),
    "wan": (A + "autoencoder_kl_wan.WanResidualBlock", {"in_dim": 8, "out_dim": 4}, [VIDEO], 2),
    "ltx": (A + "autoencoder_kl_ltx.LTXVideoResnetBlock3d", {"in_channels": 8}, [VIDEO], 2),
    "ltx_temb": (A + "autoencoder_kl_ltx.LTXVideoResnetBlock3d",
        {"in_channels": 8, "timestep_conditioning": True}, [VIDEO, (2, 32, 1, 1, 1)], 0),
    "ltx2": (A + "autoencoder_kl_ltx2.LTX2VideoResnetBlock3d", {"in_channels": 8}, [VIDEO], 2),
    "cosmos": (A + "autoencoder_kl_cosmos.CosmosResnetBlock3d",
        {"in_channels": 8, "out_channels": 4}, [VIDEO], 2),
    "cosmos_groups": (A + "autoencoder_kl_cosmos.CosmosResnetBlock3d",
        {"in_channels": 8, "out_channels": 4, "num_groups": 2}, [VIDEO], 2),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _full_precision(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def block(device="cpu", name="scale_shift"):
    cls, arguments, shapes, _ = BLOCKS[name]
    return class_of(*cls.rsplit(".", 1))(**arguments).to(device), inputs_of(shapes, device)


@pytest.fixture(params=BLOCKS)
def case(request, device):
    made, inputs = block(device, request.param)
    return made.eval(), inputs, BLOCKS[request.param][-1]


def inputs_of(shapes, device):
    return [None if shape is None else torch.randn(shape, device=device) for shape in shapes]


@pytest.fixture
def fused(monkeypatch):
    """The activations that norms have taken."""
    seen: list[str] = []
    of_norm, modulated = neighbours._of_norm, groups.modulated

    def recorded(self, norm, activation, *args):
        y = of_norm(self, norm, activation, *args)
        seen.extend([] if y is None else [activation])
        return y

    def recorded_modulated(*args):
        y = modulated(*args)
        is_of_block = y is not None and args[1][1] is not None  # AdaGroupNorm has no weight
        seen.extend([args[-1]] if is_of_block else [])
        return y

    monkeypatch.setattr(neighbours, "_of_norm", recorded)
    monkeypatch.setattr(groups, "modulated", recorded_modulated)
    return seen


def check(module, new, inputs, tolerance):
    found, expected = outcome(new, inputs), outcome(module, inputs)
    if found["output 0"].dtype is BF16:
        # Gradients of biases in front of a norm are sums of what cancels.
        found, expected = ({k: t for k, t in of.items() if t.dim() > 2} for of in (found, expected))
    same(found, expected, tolerance, strides=True, least=1.0)


def channels_last(module, x):
    last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    module = copy.deepcopy(module)
    for parameter in module.parameters():
        if parameter.dim() == x.dim():
            parameter.data = parameter.data.contiguous(memory_format=last)
    return module, x.contiguous(memory_format=last)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_same_results(case, dtype, fused):
    block, inputs, count = case
    block, inputs = block.to(dtype), [None if one is None else one.to(dtype) for one in inputs]
    tolerance = 1e-4 if dtype is F32 else 3e-2
    check(block, beside(block), inputs, tolerance)
    assert len(fused) == count
    block, inputs[0] = channels_last(block, inputs[0])
    check(block, beside(block), inputs, tolerance)
    assert len(fused) == 2 * count


def test_autocast(case, device, fused):
    block, inputs, _ = case
    new = beside(block)
    with torch.autocast(device, BF16):
        y, expected = new(*inputs), block(*inputs)
    assert (y.dtype, y.stride()) == (expected.dtype, expected.stride())
    torch.testing.assert_close(y, expected, rtol=3e-2, atol=3e-2)


@pytest.mark.filterwarnings("ignore:.*scale.*argument is deprecated")
def test_swapped_copied_and_unswapped(case):
    block, _, count = case
    if count > 0 or is_fused(beside(block)):
        swap = functools.partial(swap_norms, neighbours=True)
        check_swap_and_unswap(block, "FusedActivation", swap)


def test_what_a_call_must_see(device, fused, monkeypatch):
    """Hooks, another activation and replaced functions: everybody runs, with the stock result."""
    stock, inputs = block(device)
    new, seen = beside(stock), []
    expected = stock(*inputs)
    hook = new.norm1.register_forward_hook(lambda *_: seen.append("norm"))
    torch.testing.assert_close(new(*inputs), expected)
    hook.remove()
    assert (seen, fused) == (["norm"], ["silu"])
    hook = new.nonlinearity.register_forward_hook(lambda *_: seen.append("act"))
    torch.testing.assert_close(new(*inputs), expected)
    hook.remove()
    assert seen[1:] == 3 * ["act"]  # the embedding's too
    assert fused == ["silu"]
    new.nonlinearity = stock.nonlinearity = nn.Tanh()
    torch.testing.assert_close(new(*inputs), stock(*inputs))
    new.nonlinearity = stock.nonlinearity = nn.SiLU()
    unswap_norms(new.norm2)
    torch.testing.assert_close(new(*inputs), expected)
    assert fused == 2 * ["silu"]
    for name in ("silu", "group_norm"):
        with monkeypatch.context() as patch:
            patch.setattr(F, name, lambda x, *args, **kwargs: x + 1)
            torch.testing.assert_close(new(*inputs), stock(*inputs))
    assert fused == 2 * ["silu"]


class NormAndAct(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.act = nn.GroupNorm(2, 8), nn.SiLU()


def closure(outside):
    class Closure(NormAndAct):
        def forward(self, x):
            return self.act(self.norm(x)) * outside

    return Closure()


class Hiding:
    def __init__(self: Any, function):
        functools.update_wrapper(self, function)

    def __get__(self: Any, instance, owner):
        return self if instance is None else functools.partial(self.__wrapped__, instance)


class Hidden(NormAndAct):
    @Hiding
    def forward(self, x):
        return self.act(self.norm(x))


class Private(NormAndAct):
    __factor = 2

    def forward(self, x):
        return self.act(self.norm(x)) * self.__factor


def generic(tmp_path):
    names: dict[str, Any] = {"NormAndAct": NormAndAct, "__name__": "generic"}
    text = "class Generic(NormAndAct):\n    def forward[T](self, x: T) -> T:\n"
    file = tmp_path / "generic.py"
    file.write_text(text + "        return self.act(self.norm(x))\n")
    exec(compile(file.read_text(), str(file), "exec"), names)
    return names["Generic"]()


NEW = pytest.mark.skipif(sys.version_info < (3, 12), reason="type parameters are of Python 3.12")


@pytest.mark.parametrize(
    ("make", "reason"),
    [(lambda _: closure(2), "Closure (its forward uses variables of a function around it"),
     (lambda _: Private(), "names that are private to its class"), (lambda _: Hidden(), ""),
     pytest.param(generic, "its forward has type parameters", marks=NEW)],
)  # fmt: skip
def test_a_forward_that_cannot_be_made_anew_is_named(make, reason, caplog, tmp_path):
    stock, x = make(tmp_path), torch.randn(X)
    with caplog.at_level("INFO", logger="fused_layernorm.swap"):
        new = beside(stock)
    assert (is_fused(new), is_fused(new.norm)) == (False, True)
    assert reason in caplog.text
    assert torch.equal(new(x), stock(x))


@pytest.mark.parametrize(("norm", "is_named"), [(nn.LayerNorm, True), (nn.Identity, False)])
def test_a_forward_of_heads_is_named_if_their_norms_are_fused(norm, is_named, caplog):
    outside = 1.0

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_norm, self.k_norm, self.norm = norm(8), norm(8), nn.LayerNorm(8)

        def forward(self, qkv):
            q, k, v = qkv.unbind(0)
            q, k = self.q_norm(q), self.k_norm(k)
            return q + k + self.norm(v) + outside

    with caplog.at_level("INFO", logger="fused_layernorm.swap"):
        swap_norms(Heads(), neighbours=True)
    assert ("a function around it" in caplog.text) is is_named


class Order(NormAndAct):
    """Where a norm and an activation are not neighbours, though they look like it."""

    def __init__(self):
        super().__init__()
        self.conv, self.calls = nn.Conv2d(8, 8, 1), list[str]()

    def flag(self):
        self.calls.append("flag")
        return len(self.calls) == 1

    def forward(self, x):
        h = self.norm(x)
        k = h
        h = self.act(h)
        x = self.norm(h)
        x = torch.cat([*x.split(1)])
        if self.flag():
            x = x * 2
        x = self.act(x)
        y = F.silu(self.norm(x)) + self.act(self.norm(k))
        if y.shape[0] > 5:
            return self.norm(y)
        else:
            for _ in range(2):
                y = self.norm(y)
                y = F.silu(y)
            y = self.norm(y)
        return self.act(y) + h


def test_statements_keep_their_order(device, fused):
    stock, x = Order().to(device), torch.randn(X, device=device)
    new = beside(stock)
    torch.testing.assert_close(new(x), stock(x), rtol=1e-4, atol=1e-4)
    assert fused == 4 * ["silu"]
    assert new.calls == stock.calls


class InPlace(NormAndAct):
    """What stands between a norm and its activation writes into the norm's input."""

    def __init__(self, write):
        super().__init__()
        self.write = write

    def forward(self, x):
        h = self.norm(x)
        k = self.write(x)
        h = self.act(h)
        return self.act(self.norm(h)) + k


@pytest.mark.parametrize("write", [nn.ReLU(inplace=True), lambda x: F.relu(x, True)])
def test_a_norm_does_not_wait_for_what_may_write_into_its_input(write, device, fused):
    stock, x = InPlace(write).to(device), torch.randn(X, device=device)
    new = beside(stock)
    with torch.no_grad():
        torch.testing.assert_close(new(x.clone()), stock(x.clone()), rtol=1e-4, atol=1e-4)
    assert fused == ["silu"]


# Modules of which a kernel computes more than the module itself, and their inputs.
INNER: dict[str, tuple[Any, list[Any]]] = {
    "statements": (Order, [X]),
    "block": (lambda: block()[0], [X, TEMB]),
    "sequence": (lambda: nn.Sequential(nn.InstanceNorm2d(8), nn.LeakyReLU(0.01)), [X]),
    "modulated": (
        lambda: class_of("diffusers.models.normalization", "AdaLayerNormZero")(16, None),
        [(2, 5, 16), None, None, None, (2, 16)],
    ),
    "by context": (
        lambda: class_of(U + "unet_kandinsky3", "Kandinsky3ConditionalGroupNorm")(2, 8, 4),
        [X, (2, 4)],
    ),
}


@pytest.mark.parametrize("how", ["call", "forward", "forward_pre", "class"])
@pytest.mark.parametrize("name", INNER)
def test_hooks_and_another_call_of_all_modules_see_each(name, how, device, monkeypatch):
    make, shapes = INNER[name]
    stock, inputs, seen = make().to(device), inputs_of(shapes, device), list[str]()
    new, call = beside(stock), nn.Module.__call__
    assert is_fused(new)
    for module in (*stock.children(), *new.children()):
        if how == "class" and "Norm" in type(module).__name__:
            give_own_class(module, lambda: seen.append("norm"))
            assert not is_fused(module)

    def see(self, *args, **kwargs):
        seen.append(type(self).__name__.removeprefix("Fused"))
        return call(self, *args, **kwargs) if how == "call" else None

    with monkeypatch.context() as patch:
        if how == "call":
            patch.setattr(nn.Module, "__call__", see)
        elif how != "class":
            patch.setitem(getattr(nn.modules.module, f"_global_{how}_hooks"), 0, see)
        expected, of_stock = stock(*inputs), [*seen]
        seen.clear()
        y = new(*inputs)
    assert seen == of_stock
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


class OfOneClass(nn.Sequential):
    pass


@pytest.mark.parametrize(
    ("norm", "act", "count"),
    [
        (nn.GroupNorm(2, 8), nn.SiLU(), 1),
        (nn.InstanceNorm2d(8, affine=True), nn.LeakyReLU(0.01, inplace=True), 1),
        (nn.InstanceNorm2d(8), nn.LeakyReLU(0.2), 0),
        (nn.InstanceNorm2d(8, track_running_stats=True), nn.ReLU(), 0),
        (nn.GroupNorm(2, 8), nn.GELU("tanh"), 1),
        (nn.BatchNorm2d(8), nn.ReLU(), 0),
        (nn.GroupNorm(2, 8), OfOneClass(nn.Identity()), 0),
    ],
    ids=repr,
)
def test_sequences(norm, act, count, device, fused):
    stock = nn.Sequential(nn.Conv2d(3, 8, 3), norm, act, nn.Identity()).to(device)
    model = nn.ModuleList([stock, nn.LayerNorm(3)])
    new = beside(model)[0]
    assert is_fused(new) == (count > 0)
    x = torch.randn(2, 3, 6, 5, device=device)
    check(stock, new, [x], 1e-4)
    assert len(fused) == count
    subclass = OfOneClass(*stock)
    check(stock, beside(nn.ModuleList([subclass, nn.LayerNorm(3)]))[0], [x], 1e-4)
    assert len(fused) == 2 * count
    stock, x = channels_last(stock, x)
    check(stock, beside(nn.ModuleList([stock, nn.LayerNorm(3)]))[0], [x], 1e-4)
    assert isinstance(new[1:3], nn.Sequential)
    assert len(pickle.loads(pickle.dumps(new))) == 4
    for tool in (torch.jit.script, torch.fx.symbolic_trace):
        torch.testing.assert_close(tool(new)(x), stock(x), rtol=1e-4, atol=1e-4)


def vae():
    model = libraries.get("diffusers").AutoencoderKL(
        block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=1, sample_size=16,
        down_block_types=2 * ("DownEncoderBlock2D",), up_block_types=2 * ("UpDecoderBlock2D",),
    )  # fmt: skip
    return model, {"sample": torch.randn(1, 3, 16, 16)}


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(("make", "others"), [(vae, 2), (unet, 1)])  # norms that no block has
def test_models(make, others, layout, device, fused):
    made, inputs = make()
    made, inputs = made.to(device).eval(), {name: x.to(device) for name, x in inputs.items()}
    if layout == "channels_last":
        made, inputs["sample"] = channels_last(made, inputs["sample"])
    new = beside(made)
    check(made, new, inputs, 1e-3)
    pairs = sum(type(one).__name__.endswith("ResnetBlock2D") for one in new.modules())
    assert len(fused) == 2 * pairs + others


@pytest.mark.parametrize("name", ["resnet", "wan"])
def test_compiled(name, device):
    stock, inputs = block(device, name)
    compiled = torch.compile(new := beside(stock), backend="aot_eager", fullgraph=True)
    for _ in range(2):  # then norm1 has a forward of its own
        torch.testing.assert_close(compiled(*inputs), stock(*inputs), rtol=1e-4, atol=1e-4)
        stock.norm1.forward = new.norm1.forward = torch.neg


def test_without_kernels_the_stock_functions_run(monkeypatch):
    monkeypatch.setattr(fl.stock, "_cpu_operators", False)
    stock, inputs = block()
    assert torch.equal(beside(stock)(*inputs), stock(*inputs))

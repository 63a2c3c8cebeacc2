# SPDX-License-Identifier: Apache-2.0
"""The rule of a swap: what the stock module accepts, the swapped one accepts, with its result."""

import copy
import pickle
from typing import Any, cast

import libraries
import pytest
import torch
from swaps import (
    Accepted,
    D,
    Registered,
    assert_same,
    operators_of,
    registered_forward,
    small_model,
)
from tiny_transformers import WrittenHere
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import fused_layernorm
from fused_layernorm import register_swap, swap_norms, unswap_norms
from fused_layernorm.swap import registry

pytestmark = [
    pytest.mark.cpu_operators,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


class RegisteredRms(Registered):
    def forward(self, x, *, shift=0.0):
        return F.rms_norm(x, self.gamma.shape, self.gamma) + shift


NORMS = {
    "layer": nn.LayerNorm,
    "rms": nn.RMSNorm,
    "llama": WrittenHere,
    "accepted": Accepted,
    "registered": Registered,
}


@pytest.fixture(params=NORMS)
def norm(request, device):
    found = NORMS[request.param](D).to(device)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return found


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    register_swap(Registered, lambda module: registered_forward)
    register_swap(RegisteredRms, lambda _: lambda self, x: fused_layernorm.rms_norm(x, self.gamma))


def swapped(model):
    found = swap_norms(copy.deepcopy(model), predicate=lambda name, module: True)
    norms = [module for module in found.modules() if isinstance(module, tuple(NORMS.values()))]
    assert all(fused_layernorm.is_fused(cast(Any, module)) for module in norms)
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
    assert set(vars(norm)) == set(vars(cls(D)))


@pytest.mark.parametrize("first", ["swap", "shard"])
def test_fully_shard(norm, first, mesh):
    """fully_shard gives a module a class derived from its own: a swap and an unswap keep that."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    norm, x = norm.cpu(), torch.randn(4, D)
    new = swapped(norm) if first == "swap" else copy.deepcopy(norm)
    fully_shard(new, mesh=mesh)
    swap_norms(new, predicate=lambda name, module: True)
    for is_fused in (True, False):
        assert fused_layernorm.is_fused(new) is is_fused
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


def test_expanded_weights(device):
    from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

    model, x = small_model().to(device), torch.randn(4, 8, device=device)
    samples = []
    for each in (model, swapped(model)):
        call_for_per_sample_grads(each)(x).square().sum().backward()
        samples.append([p.grad_sample for p in each.parameters()])
    assert_same(*samples)


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


GROUPS = {
    "group": lambda size: nn.GroupNorm(2, size),
    "instance": lambda size: nn.InstanceNorm2d(size, affine=True),
}


@pytest.mark.parametrize("kind", [*NORMS, *GROUPS])
def test_modes_of_functions(kind, device):
    """A mode sees the stock calls; that of torch.set_default_device changes no norm."""
    stock = (NORMS | GROUPS)[kind](D).to(device)
    x = torch.randn((2, D, 5, 5) if kind in GROUPS else (4, D), device=device)
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


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm, GROUPS["group"]])
def test_a_mode_and_a_replaced_forward(monkeypatch, kind):
    """And parameters that are not where the class keeps them."""
    x, new = torch.randn(2, D), swapped(kind(D))
    cls, weight = type(new)._stock, new.weight * 3
    with Records() as seen:
        expected = new(x)
    del new.weight
    new.weight = weight
    with Records() as again:
        y = new(x)
    assert again.seen == seen.seen
    torch.testing.assert_close(y, 3 * expected, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(cls, "forward", lambda self, x: x)
    with Records():
        assert new(x) is x


def counted(function, calls):
    def call(*args, **kwargs):
        calls.append(function.__name__)
        return function(*args, **kwargs)

    return call


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, "layer_norm") for kind in (nn.LayerNorm, Accepted, Registered)),
        *((kind, "rms_norm") for kind in (nn.RMSNorm, RegisteredRms)),
        (GROUPS["group"], "group_norm"),
        (GROUPS["instance"], "instance_norm"),
    ],
)
def test_patched_functions(monkeypatch, kind, name):
    """DeepSpeed's profiler and others put their own functions in the place of PyTorch's."""
    calls: list[str] = []
    new = swapped(kind(D))
    stock = getattr(F, name)
    x = torch.randn((2, D, 3, 3) if name in ("group_norm", "instance_norm") else (4, D))
    with monkeypatch.context() as patch:
        patch.setattr(F, name, counted(stock, calls))
        new(x)
    assert calls == [name]
    assert operators_of(lambda: new(x))


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


class Calls(nn.Module):
    def __init__(self, name, options):
        super().__init__()
        self.name, self.options = name, options

    def forward(self, *tensors):
        return getattr(fused_layernorm, self.name)(*tensors, **self.options)


H, F32 = torch.float16, torch.float32
# By function: the dtypes and leading sizes of its tensors, and options.
ONNX = {
    "rms_norm": ([(H, 4), (H, 0)], {"eps": 1e-6, "round_before_weight": True}),
    "add_layer_norm": ([(H, 4), (F32, 4), (F32, 0), (F32, 0)], {"activation": "gelu"}),
    "add_rms_norm": ([(F32, 4), (F32, 4), (F32, 0)], {"weight_offset": 1.0, "activation": "silu"}),
    "layer_norm": ([(F32, 4), (F32, 0)], {"activation": "gelu_tanh", "scale": 0.5, "out_dtype": H}),
    "ada_layer_norm": ([(F32, 4), (F32, 0), (F32, 4)], {}),
    "add_ada_layer_norm": ([(H, 4), (F32, 4), (F32, 0), (F32, 4), (F32, 0)], {"statistic": "rms"}),
    "group_norm": ([(H, 4)], {"num_groups": 3, "activation": "silu"}),
    "rms_norm_gated": ([(H, 4), (H, 4), (H, 0)], {"group_size": 8, "gate_first": True}),
}


@pytest.mark.parametrize("opset", [12, 17, 18])
@pytest.mark.parametrize("name", ONNX)
def test_onnx_from_torch_script(device, name, opset):
    kinds, options = ONNX[name]
    tensors = tuple(
        torch.randn(rows, 3, D, device=device).to(dtype)
        if rows
        else torch.randn(D, device=device).to(dtype)
        for dtype, rows in kinds
    )
    libraries.check_onnx(Calls(name, options).eval(), tensors, opset_version=opset)


@pytest.mark.parametrize("options", [{}, {"rotary_dim": 4, "interleaved": True}])
def test_onnx_of_heads_from_torch_script(device, options):
    q, k = (torch.randn(2, 3, heads, 8, device=device) for heads in (4, 2))
    angles = torch.randn(2, 3, options.get("rotary_dim", 8) // 2, device=device)
    norm = Calls("qk_norm_rope", {"eps": 1e-5, **options}).eval()
    weights = torch.randn(2, 8, device=device)
    libraries.check_onnx(norm, (q, k, *weights, *angles), opset_version=17)


def test_onnx_of_a_swapped_model(device):
    model = nn.Sequential(small_model(), nn.LayerNorm(3), nn.RMSNorm(3)).to(device)
    libraries.check_onnx(
        swapped(model).eval(), (torch.randn(4, 8, device=device),), opset_version=17
    )


def test_flop_counters(device):
    from torch.utils.flop_counter import FlopCounterMode

    def of_torch(model, x):
        with FlopCounterMode(display=False) as counter:
            model(x).sum().backward()
        return counter.get_flop_counts()

    model, x = small_model().to(device), torch.randn(2, 8, device=device)
    assert of_torch(swapped(model), x) == of_torch(model, x)


@pytest.mark.parametrize("kind", [*NORMS, "group"])
def test_tensors_of_inference_mode_and_with_the_negative_bit(kind, device):
    def make():
        return nn.GroupNorm(2, D) if kind == "group" else NORMS[kind](D)

    register_swap(Registered, lambda module: registered_forward)
    negative = torch.randn(4, D, dtype=torch.complex64, device=device).conj().imag
    assert negative.is_neg()
    x = torch.randn(4, D, device=device, requires_grad=True)
    with torch.inference_mode():
        module, of_inference = make().to(device), torch.randn(4, D, device=device)
    model = nn.Sequential(module)

    def run():
        with torch.no_grad():
            found = [model(input) for input in (negative, of_inference, x.detach())]
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
            model(x)
        return found

    expected = run()
    swap_norms(model, predicate=lambda *_: True)
    assert fused_layernorm.is_fused(module)
    torch.testing.assert_close(run(), expected)

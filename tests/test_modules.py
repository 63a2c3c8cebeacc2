# SPDX-License-Identifier: Apache-2.0
"""The package's modules: what each is, shows, keeps and computes; which calls are PyTorch's."""

import collections
import copy
import io
import itertools
import pickle
from typing import Any

import pytest
import torch
from processes import run
from swaps import copies, operators_of, results, saved_and_loaded
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fused_layernorm as fl
from fused_layernorm import stock

F64 = torch.float64


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((8,), {}), (((4, 8),), {"eps": 1e-3}), ((8,), {"elementwise_affine": False}),
     ((8,), {"bias": False}), (([4, 8],), {"dtype": F64}),
     ((torch.Size([8]), 1e-6, True, False), {}), ((8, 1e-5, True, True, "cpu", F64), {})],
    ids=str,
)  # fmt: skip
def test_is_an_nn_layer_norm(args, kwargs):
    ours, stock = fl.FusedLayerNorm(*args, **kwargs), nn.LayerNorm(*args, **kwargs)
    assert repr(ours) == "Fused" + repr(stock)
    ours.load_state_dict(stock.state_dict())
    stock.load_state_dict(ours.state_dict())
    x = torch.randn(3, 4, 8, dtype=ours.weight.dtype if ours.weight is not None else None)
    torch.testing.assert_close(ours(x), stock(x))


untyped: Any = fl  # mypy cannot count tensors that are passed with a star
X, MODULATION, IMAGE = (2, 3, 8), (2, 1, 8), (2, 6, 4, 5)
GATE: dict[str, Any] = {"gate_first": True, "gate_activation": "sigmoid", "group_size": 4}
# (the module, what it is, its parameters, what it shows, the shapes of its inputs, its function).
MODULES: list[tuple[Any, type[nn.Module], list[str], str, list[tuple[int, ...]], Any]] = [
    (lambda: fl.FusedLayerNorm(8, activation="silu", scale=0.5, out_dtype=torch.bfloat16),
     nn.LayerNorm, ["weight", "bias"], "activation='silu', scale=0.5, out_dtype=bfloat16)", [X],
     lambda m, x: fl.layer_norm(x, m.weight, m.bias, activation="silu", scale=0.5,
                                out_dtype=torch.bfloat16)),
    (lambda: fl.FusedAddLayerNorm(8, eps=0.1, activation="relu", scale=2.0), nn.LayerNorm,
     ["weight", "bias"], "FusedAddLayerNorm((8,), eps=0.1, ", [X, X],
     lambda m, *t: untyped.add_layer_norm(*t, m.weight, m.bias, 0.1, activation="relu", scale=2.0)),
    (lambda: fl.FusedRMSNorm(8, bias=True, weight_offset=1.0), nn.RMSNorm, ["weight", "bias"],
     "weight_offset=1.0", [X],
     lambda m, x: fl.rms_norm(x, m.weight, bias=m.bias, weight_offset=1.0)),
    (lambda: fl.FusedAddRMSNorm(8, 1e-6), nn.RMSNorm, ["weight"], "eps=1e-06", [X, X],
     lambda m, *t: untyped.add_rms_norm(*t, m.weight, 1e-6)),
    (lambda: fl.FusedAdaLayerNorm(8), nn.LayerNorm, [], "eps=1e-06", [X, MODULATION, MODULATION],
     lambda m, *t: untyped.ada_layer_norm(*t, eps=1e-6)),
    (lambda: fl.FusedAdaLayerNorm((3, 8), 1e-3, True, out_dtype=F64), nn.LayerNorm,
     ["weight", "bias"], "(3, 8)", [X, (2, 1, 1), (2, 3, 8)],
     lambda m, *t: untyped.ada_layer_norm(*t, m.weight, m.bias, 1e-3, out_dtype=F64)),
    (lambda: fl.FusedAddAdaLayerNorm(8, elementwise_affine=True), nn.LayerNorm, ["weight", "bias"],
     "eps=1e-06", [X, X, *[MODULATION] * 3],
     lambda m, *t: untyped.add_ada_layer_norm(*t, m.weight, m.bias, 1e-6)),
    (lambda: fl.FusedGroupNorm(2, 6, activation="silu", scale=0.5, out_dtype=F64), nn.GroupNorm,
     ["weight", "bias"], "activation='silu', scale=0.5, out_dtype=float64", [IMAGE],
     lambda m, x: fl.group_norm(x, 2, m.weight, m.bias, activation="silu", scale=0.5,
                                out_dtype=F64)),
    (lambda: fl.FusedRMSNormGated(8, 1e-5, bias=True, weight_offset=1.0, out_dtype=F64, **GATE),
     nn.RMSNorm, ["weight", "bias"], "bias=True, weight_offset=1.0, out_dtype=float64, "
     "gate_first=True, gate_activation='sigmoid', group_size=4)", [X, X],
     lambda m, *t: untyped.rms_norm_gated(*t, m.weight, 1e-5, bias=m.bias, weight_offset=1.0,
                                     out_dtype=F64, **GATE)),
    (lambda: fl.FusedRMSNormGated(8, 1e-5, weight_offset=1.0, group_size=4), nn.RMSNorm, ["weight"],
     "group_size=4", [X],  # without a gate
     lambda m, x: fl.rms_norm(x, m.weight, 1e-5, weight_offset=1.0, group_size=4)),
    (lambda: fl.FusedLayerNorm2d(6), nn.LayerNorm, ["weight", "bias"], "eps=1e-06", [IMAGE],
     lambda m, x: fl.layer_norm(x, m.weight, m.bias, 1e-6, dim=1)),
    (lambda: fl.FusedRMSNorm2d(6, affine=False), nn.RMSNorm, [], "eps=1e-06", [IMAGE],
     lambda m, x: fl.rms_norm(x, None, 1e-6, dim=1)),
]  # fmt: skip


@pytest.mark.parametrize(("make", "stock", "names", "shown", "shapes", "function"), MODULES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_modules(device, make, stock, names, shown, shapes, function):
    """torch.load(weights_only=True), its default, makes an object of known classes only."""
    module: Any = make().to(device).eval()
    assert isinstance(module, stock)
    assert type(fl.swap_norms(nn.Sequential(module))[0]) is type(module)
    assert fl.is_fused(module)
    assert [*module.state_dict()] == names
    assert shown in repr(module)
    if "dtype" not in repr(module):  # it accepts what it prints
        assert repr(eval(repr(module), vars(fl))) == repr(module)
    if "weight" in names:
        assert torch.all(module.state_dict()["weight"] == ("weight_offset=1" not in repr(module)))
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    given = [torch.randn(shape, device=device) for shape in shapes]
    expected = function(module, *given)
    others = [*copies(module), saved_and_loaded(module, weights_only=True)]
    for other in others:
        assert (type(other), repr(other), other.training) == (type(module), repr(module), False)
        assert not {*map(id, other.parameters())} & {*map(id, module.parameters())}
    if "2d" not in repr(module) and (len(shapes) > 1 or "Gated" not in repr(module)):
        others.append(torch.fx.symbolic_trace(module))
        assert [node.op for node in others[-1].graph.nodes].count("call_function") == 1
    others.append(torch.jit.trace(module, tuple(given)))
    for made in (module, *others):
        torch.testing.assert_close(made(*given), expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(NotImplementedError, match="whose forward torch"):
        torch.jit.script(nn.Sequential(module))
    module.forward = lambda *args: args[0]
    assert not fl.is_fused(module)


def test_all_classes_are_tested():
    classes = {one for name in fl.__all__ if isinstance(one := getattr(fl, name), type)}
    assert {type(make()) for make, *_ in MODULES} == classes


# By name: a module, and the shape of what it takes behind the number of rows.
SCRIPTED: dict[str, tuple[Any, tuple[int, ...]]] = {
    "plain": (lambda: fl.FusedLayerNorm(8), (4, 8)),
    "swapped": (lambda: fl.swap_norms(nn.Sequential(nn.LayerNorm(8), nn.RMSNorm(8))), (4, 8)),
    "group": (lambda: nn.Sequential(fl.FusedGroupNorm(2, 4), fl.FusedRMSNorm((4, 8))), (4, 8)),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("how", ["trace", "script"])
@pytest.mark.parametrize("name", SCRIPTED)
def test_torch_script(device, name, how):
    make, shape = SCRIPTED[name]
    model, buffer = make().to(device), io.BytesIO()
    three, x = (torch.randn(n, *shape, device=device, requires_grad=True) for n in (3, 5))
    script = torch.jit.trace(model, three) if how == "trace" else torch.jit.script(model)
    torch.jit.save(script, buffer)
    buffer.seek(0)
    for scripted in (script, torch.jit.load(buffer)):
        torch.testing.assert_close(results(scripted, x), results(model, x))


@pytest.mark.parametrize("name", ["forward", "_forward_hooks"])
def test_a_file_that_is_not_trusted_brings_nothing_that_runs(name, tmp_path):
    module = fl.FusedLayerNorm(8)
    call = collections.OrderedDict
    setattr(module, name, call if name == "forward" else call({0: call}))
    torch.save(module, tmp_path / "model.pt")
    with pytest.raises(pickle.UnpicklingError, match="expected the data of a FusedLayerNorm"):
        torch.load(tmp_path / "model.pt")
    trusted = torch.load(tmp_path / "model.pt", weights_only=False)
    assert vars(trusted).keys() == vars(module).keys()
    assert copy.deepcopy(module).state_dict().keys() == module.state_dict().keys()


PLAIN: dict[str, Any] = {
    "module": lambda x, w, b: fl.FusedLayerNorm(8)(x),
    "weight's shape": fl.layer_norm,
    "bias alone": lambda x, w, b: fl.layer_norm(x, None, b),
    "int": lambda x, w, b: fl.layer_norm(x, normalized_shape=8),
    "scale": lambda x, w, b: fl.layer_norm(x, w, scale=1),
    "float32 parameters": lambda x, w, b: fl.layer_norm(x.bfloat16(), w, b),
}
FUSED: dict[str, Any] = {
    "activation": lambda x, w, b: fl.layer_norm(x, w, b, activation="relu"),
    "factor": lambda x, w, b: fl.layer_norm(x, w, b, scale=2),
    "out_dtype": lambda x, w, b: fl.layer_norm(x, w, b, out_dtype=F64),
    "residual": lambda x, w, b: fl.add_layer_norm(x, x, w, b),
    "a float32 weight alone": lambda x, w, b: fl.layer_norm(x.bfloat16(), w),
}
# PyTorch's rules for these are not ours to know.
SEEN: dict[str, Any] = {
    "subclass": lambda x, w, b: fl.layer_norm(nn.Parameter(x), w, b),
    "transform": lambda x, w, b: torch.func.grad(lambda x: fl.layer_norm(x, w).sum())(x),
}
MODULATED: dict[str, Any] = {
    "sample": lambda x, w, b: fl.ada_layer_norm(x, x[:, :1].cos(), x[:, :1]),
    "one shift": lambda x, w, b: fl.ada_layer_norm(x, w),
    "token gated": lambda x, w, b: fl.add_ada_layer_norm(x, x, x.cos(), w, x.cos()),
}
EVERY = PLAIN | FUSED | SEEN | MODULATED


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EVERY)
def test_which_calls_on_the_cpu_are_pytorchs(monkeypatch, name, dtype):
    """Where a sum of half precision would round its gradient twice, it is the operator's."""
    given = [torch.randn(s, dtype=dtype, requires_grad=True) for s in ((2, 3, 8), (8,), (8,))]
    call = EVERY[name]
    results = []

    def operators(*tensors):
        return bool(operators_of(lambda: results.append(call(*tensors))))

    monkeypatch.setattr(stock, "_cpu_operators", False)
    assert operators(*given) == (name in SEEN or (name, dtype) == ("residual", torch.bfloat16))
    if name in PLAIN and name != "module":
        assert type(results[0].grad_fn).__name__ == "NativeLayerNormBackward0"
    if name in FUSED | SEEN and dtype == torch.float32:
        with torch.autocast("cpu"):
            assert operators(*given)
    monkeypatch.setattr(stock, "_cpu_operators", True)
    assert operators(*given)
    tolerance: Any = {"rtol": 0.03, "atol": 0.03} if dtype != torch.float32 else {}
    torch.testing.assert_close(results[-1], results[0], **tolerance)


def test_normalized_shape_rules_over_a_replaced_weight(device):
    norm = fl.FusedLayerNorm(8).to(device)
    norm.weight = nn.Parameter(torch.ones(4, device=device))
    norm.bias = nn.Parameter(torch.zeros(4, device=device))
    with pytest.raises(RuntimeError, match="expected input whose last dimensions"):
        norm(torch.randn(3, 4, device=device))
    with pytest.raises(RuntimeError, match=r"expected weight of shape \[8\].*, got shape \[4\]"):
        norm(torch.randn(3, 8, device=device))


# What F.group_norm and F.instance_norm refuse: one value a group, or a channel, of one sample.
ONE_VALUE: dict[str, tuple[Any, tuple[int, ...]]] = {
    "group norm": (lambda: nn.GroupNorm(4, 4), (1, 4, 1, 1)),
    "two dimensions": (lambda: nn.GroupNorm(3, 3, affine=False), (1, 3)),
    "with SiLU": (lambda: nn.Sequential(nn.GroupNorm(4, 4), nn.SiLU()), (1, 4, 1, 1)),
    "instance norm": (lambda: nn.InstanceNorm2d(4), (3, 4, 1, 1)),
}


@pytest.mark.parametrize("operators", [False, True])
@pytest.mark.parametrize("name", ONE_VALUE)
@pytest.mark.parametrize("training", [True, False])
def test_one_value_a_group_is_refused_as_pytorch_does(
    device, monkeypatch, operators, name, training
):
    monkeypatch.setattr(stock, "_cpu_operators", operators)
    make, shape = ONE_VALUE[name]
    models = [make(), fl.swap_norms(make()), fl.swap_norms(make(), neighbours=True)]
    x, messages = torch.randn(shape, device=device), set()
    for model in models:
        with pytest.raises(ValueError, match="Expected more than 1") as found:
            model.to(device).train(training)(x)
        messages.add(str(found.value))
    assert len(messages) == 1
    torch._dynamo.reset()
    for model, backend in itertools.product(models[:2], ("eager", "fused_layernorm")):
        # Dynamo makes a RuntimeError of what a function raises that it does not trace.
        with pytest.raises((ValueError, RuntimeError), match=r"more than (1|one) (value|spat)"):
            torch.compile(model, backend=backend)(x)
    if isinstance(models[0], nn.GroupNorm):
        count = models[0].num_groups
        for call in (
            lambda: fl.group_norm(x, count),
            lambda: fl.ada_group_norm(x, count, activation="silu"),
            lambda: fl.FusedGroupNorm(count, count, device=device).train(training)(x),
        ):
            with pytest.raises(ValueError, match="expected more than one value in a group"):
                call()
        assert fl.group_norm(x.expand(2, *shape[1:]), count).eq(0).all()


@pytest.mark.parametrize("operators", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_instance_norm_of_a_constant_channel_without_eps(device, monkeypatch, operators, affine):
    """PyTorch's batch norm, which serves nn.InstanceNorm, has an rstd of 0 where var + eps is 0.
    (What Inductor makes of either gives NaN.)"""
    monkeypatch.setattr(stock, "_cpu_operators", operators)
    x = torch.randn(2, 3, 4, 4, device=device)
    x[:, 1] = 5.0
    norm = nn.InstanceNorm2d(3, eps=0.0, affine=affine).to(device)
    expected = norm(x)
    for neighbours in (False, True):
        model = nn.Sequential(copy.deepcopy(norm), nn.ReLU())
        found = fl.swap_norms(model, neighbours=neighbours)(x)
        torch.testing.assert_close(found, expected.relu(), equal_nan=True)


def test_parametrized_parameters(device):
    """What is computed is not where a module keeps its parameters."""
    norm = fl.FusedRMSNorm(8, bias=True).to(device)
    nn.init.normal_(norm.bias)
    x = torch.randn(3, 8, device=device)
    expected = norm(x)
    for name in ("bias", "weight"):
        torch.nn.utils.parametrize.register_parametrization(norm, name, nn.Identity())
        torch.testing.assert_close(norm(x), expected)


@pytest.mark.parametrize("cls", [nn.LayerNorm, nn.RMSNorm])
def test_a_checkpoint_may_be_recomputed_without_the_mode_of_forward(device, cls):
    model, x = fl.swap_norms(nn.Sequential(nn.Linear(8, 8), cls(8))).to(device), torch.randn(4, 8)
    with FlopCounterMode(display=False):
        y = checkpoint(model, x.to(device), use_reentrant=False)
    y.sum().backward()
    assert model[1].weight.grad is not None


def test_a_tool_that_replaced_a_function_before_the_import_sees_the_calls():
    run("""
        import torch; F = torch.nn.functional; own, seen = F.layer_norm, []
        F.layer_norm = lambda *args: seen.append(args) or own(*args)
        import fused_layernorm
        fused_layernorm.swap_norms(torch.nn.LayerNorm(8))(torch.randn(3, 8))
        assert len(seen) == 1
    """)

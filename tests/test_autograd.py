# SPDX-License-Identifier: Apache-2.0
"""Derivatives of every order and mode, torch.func's transforms, and hooks around autograd."""

import itertools
import math
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from numerics import ACTIVATIONS
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

from fused_layernorm import FusedAddLayerNorm, FusedLayerNorm, add_layer_norm, layer_norm

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
SIGNATURES = ["x", "xw", "xb", "xwb"]


def inputs(device, *, shape=(2, 2, 4), ndim=1, dtype=F64):
    x = torch.randn(shape, device=device, dtype=dtype)
    residual = torch.randn(shape, device=device, dtype=dtype)
    weight = torch.randn(shape[-ndim:], device=device, dtype=dtype)
    bias = torch.randn(shape[-ndim:], device=device, dtype=dtype)
    return x, residual, weight, bias


def composite(x, weight=None, bias=None, eps=1e-5, *, activation=None, scale=1.0):
    """layer_norm over the last dimension, in PyTorch's elementary functions.

    F.layer_norm cannot serve here, because its double backward takes mean and rstd as constants, so
    that its third derivative is wrong.
    """
    centered = x - x.mean(-1, keepdim=True)
    z = centered / (centered.square().mean(-1, keepdim=True) + eps).sqrt()
    z = z if weight is None else z * weight
    z = z if bias is None else z + bias
    z = {
        None: lambda z: z,
        "gelu": lambda z: z * 0.5 * torch.erfc(-z / math.sqrt(2)),
        "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
        "silu": lambda z: z * torch.sigmoid(z),
        "relu": F.relu,
    }[activation](z)
    return z * scale


def add_composite(x, residual, weight=None, bias=None, **options):
    total = x + residual
    return composite(total, weight, bias, **options), total


def function_of(signature, **options):
    """layer_norm as a function of the tensors named, and these tensors."""

    def function(*tensors):
        named = dict(zip(signature, tensors, strict=True))
        return layer_norm(
            named["x"],
            named.get("w"),
            named.get("b"),
            normalized_shape=named["x"].shape[-1:],
            **options,
        )

    return function


def picked(signature, x, weight, bias):
    tensors = {"x": x, "w": weight, "b": bias}
    return tuple(tensors[name].requires_grad_() for name in signature)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("signature", SIGNATURES)
def test_gradcheck(device, signature, activation):
    x, _, weight, bias = inputs(device)
    function = function_of(signature, activation=activation, scale=1.5)
    tensors = picked(signature, x, weight, bias)
    assert torch.autograd.gradcheck(function, tensors, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(
        function, tensors, check_fwd_over_rev=True, check_rev_over_rev=True, fast_mode=True
    )


@pytest.mark.parametrize("activation", [None, "gelu", "silu"])
def test_gradcheck_of_several_dimensions(device, activation):
    x, _, weight, bias = inputs(device, shape=(2, 3, 4), ndim=2)
    tensors = [t.requires_grad_() for t in (x, weight, bias)]
    assert torch.autograd.gradcheck(
        lambda *t: layer_norm(*t, activation=activation), tensors, check_batched_grad=True
    )
    assert torch.autograd.gradgradcheck(lambda *t: layer_norm(*t, activation=activation), tensors)


@pytest.mark.parametrize("activation", [None, "gelu", "relu"])
@pytest.mark.parametrize("outputs", [(0,), (1,), (0, 1)])
def test_gradcheck_with_residual(device, outputs, activation):
    x, residual, weight, bias = (t.requires_grad_() for t in inputs(device))

    def function(*tensors):
        out = add_layer_norm(*tensors, activation=activation, scale=0.5)
        return tuple(out[i] for i in outputs)

    assert torch.autograd.gradcheck(function, (x, residual, weight, bias), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, (x, residual, weight, bias), fast_mode=True)


def test_gradcheck_where_some_are_frozen(device):
    x, _, weight, bias = inputs(device)
    for mask in itertools.product((True, False), repeat=3):
        if not any(mask):
            continue
        tensors = [
            t.detach().requires_grad_(m) for t, m in zip((x, weight, bias), mask, strict=True)
        ]
        function = lambda *t: layer_norm(*t, activation="silu")  # noqa: E731
        assert torch.autograd.gradcheck(function, tensors)
        assert torch.autograd.gradgradcheck(function, tensors, fast_mode=True)


def test_third_order(device):
    x = torch.randn(2, 4, device=device, dtype=F64, requires_grad=True)
    weight = torch.randn(4, device=device, dtype=F64, requires_grad=True)
    results = []
    for function in (layer_norm, composite):
        y = function(x, weight, activation="gelu").pow(3).sum()
        for _ in range(3):
            gx, gw = torch.autograd.grad(y, (x, weight), create_graph=True)
            y = (gx.pow(2).sum() + gw.pow(3).sum()) * 0.1
        results.append(torch.autograd.grad(y, (x, weight)))
    for ours, stock in zip(*results, strict=True):
        torch.testing.assert_close(ours, stock)


def third_order(function, x, weight):
    y = function(x, weight).pow(3).sum()
    for _ in range(2):
        gx, gw = torch.autograd.grad(y, (x, weight), create_graph=True)
        y = (gx.pow(2).sum() + gw.pow(3).sum()) * 0.1
    return torch.autograd.grad(y, (x, weight))


@pytest.mark.cpu_operators
def test_third_order_of_a_plain_call(device):
    x = torch.randn(2, 4, device=device, dtype=F64, requires_grad=True)
    weight = torch.randn(4, device=device, dtype=F64, requires_grad=True)
    for ours, stock in zip(
        third_order(layer_norm, x, weight), third_order(composite, x, weight), strict=True
    ):
        torch.testing.assert_close(ours, stock)


def test_third_order_of_a_plain_call_on_the_cpu_is_pytorchs(monkeypatch):
    """docs/support.md says so. Under torch.func the third derivative is right (test_transforms)."""
    monkeypatch.setattr("fused_layernorm.functional._cpu_operators", False)
    x = torch.randn(2, 4, dtype=F64, requires_grad=True)
    weight = torch.randn(4, dtype=F64, requires_grad=True)
    stock = third_order(lambda x, w: F.layer_norm(x, (4,), w), x, weight)
    torch.testing.assert_close(third_order(layer_norm, x, weight), stock)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_gradient_penalty(device, dtype):
    """WGAN-GP's loss: the norm of the gradient for x, differentiated for the parameters."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), FusedLayerNorm(32, activation="silu"), torch.nn.Linear(32, 1)
    ).to(device, dtype)
    x = torch.randn(64, 16, device=device, dtype=dtype, requires_grad=True)

    def penalty(layer):
        model.zero_grad()
        hidden = layer(model[0](x))
        (gx,) = torch.autograd.grad(model[2](hidden).sum(), x, create_graph=True)
        ((gx.norm(2, dim=1) - 1) ** 2).mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    ours = penalty(model[1])
    stock = penalty(lambda h: composite(h, model[1].weight, model[1].bias, activation="silu"))
    tolerance = {F32: 1e-4, BF16: 5e-2}[dtype]
    for one, other in zip(ours, stock, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * 0.1)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_forward_mode(device, activation):
    x, residual, weight, bias = inputs(device)
    tangents = inputs(device)
    primals = (x, weight, bias)
    moves = (tangents[0], tangents[2], tangents[3])
    ours = jvp(lambda *t: layer_norm(*t, activation=activation), primals, moves)
    stock = jvp(lambda *t: composite(*t, activation=activation), primals, moves)
    torch.testing.assert_close(ours, stock)
    ours = jvp(
        lambda *t: add_layer_norm(*t, activation=activation), (x, residual, weight, bias), tangents
    )
    stock = jvp(
        lambda *t: add_composite(*t, activation=activation), (x, residual, weight, bias), tangents
    )
    torch.testing.assert_close(ours, stock)


def test_dual_numbers(device):
    x, _, weight, bias = inputs(device)
    tangent = torch.randn_like(x)
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent)
        ours = forward_ad.unpack_dual(layer_norm(dual, weight, bias)).tangent
        stock = forward_ad.unpack_dual(composite(dual, weight, bias)).tangent
    assert ours is not None
    torch.testing.assert_close(ours, stock)


def test_forward_mode_checks_its_arguments(device):
    x = torch.randn(3, 5, device=device)
    with pytest.raises(ValueError, match="expected activation None"):
        jvp(lambda x: layer_norm(x, normalized_shape=5, activation="tanh"), (x,), (x,))


def test_half_precision_in_forward_mode(device):
    x = torch.randn(3, 64, device=device).to(BF16)
    weight = torch.randn(64, device=device)
    # jvp's annotation includes a third value, which it returns only with has_aux.
    y, tangent = cast(
        tuple[Any, Any], jvp(lambda x: layer_norm(x, weight), (x,), (torch.ones_like(x),))
    )
    assert y.dtype == tangent.dtype == BF16
    torch.testing.assert_close(y, layer_norm(x, weight))


TRANSFORMS = {
    "grad": lambda f: grad(lambda *t: f(*t).pow(3).sum(), argnums=(0, 1, 2)),
    "vjp": lambda f: lambda *t: vjp(f, *t)[1](torch.ones_like(t[0])),
    "jacrev": lambda f: jacrev(f, argnums=(0, 1, 2)),
    "jacfwd": lambda f: jacfwd(f, argnums=(0, 1, 2)),
    "hessian": lambda f: hessian(lambda *t: f(*t).pow(3).sum(), argnums=(0, 1)),
    "jacrev of jacrev": lambda f: jacrev(
        jacrev(lambda *t: f(*t).pow(3).sum(), argnums=1), argnums=0
    ),
    "jacrev of jacfwd": lambda f: jacrev(jacfwd(lambda *t: f(*t).pow(3).sum(), argnums=0)),
    "grad of grad": lambda f: grad(
        lambda *t: grad(lambda *t: f(*t).pow(3).sum())(*t).pow(2).sum(), argnums=(0, 1, 2)
    ),
    "grad of grad of grad": lambda f: grad(
        lambda *t: (
            grad(lambda *t: grad(lambda *t: f(*t).pow(3).sum())(*t).pow(2).sum())(*t).pow(2).sum()
            * 1e-3
        ),
        argnums=(0, 1),
    ),
    "vmap": lambda f: vmap(f, in_dims=(0, None, None)),
    "vmap of grad": lambda f: vmap(
        grad(lambda *t: f(*t).pow(3).sum(), argnums=(0, 1, 2)), in_dims=(0, None, None)
    ),
    "vmap of jvp": lambda f: (
        lambda x, w, b: vmap(lambda v: jvp(lambda x: f(x, w, b), (x,), (v,))[1])(
            torch.stack([x, w.expand_as(x)])
        )
    ),
    "grad of vmap": lambda f: grad(
        lambda *t: vmap(f, in_dims=(1, None, None), out_dims=1)(*t).pow(3).sum(), argnums=(0, 1, 2)
    ),
    "vmap of vmap": lambda f: vmap(vmap(f, in_dims=(0, None, None)), in_dims=(1, None, None)),
    "vmap of hessian": lambda f: vmap(
        hessian(lambda *t: f(*t).pow(3).sum()), in_dims=(0, None, None)
    ),
    "vmap of grad of grad": lambda f: vmap(
        grad(lambda *t: grad(lambda *t: f(*t).pow(3).sum())(*t).pow(2).sum(), argnums=(0, 1)),
        in_dims=(0, None, None),
    ),
}


@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(device, name, activation):
    x, _, weight, bias = inputs(device, shape=(2, 3, 4))
    results = [
        TRANSFORMS[name](lambda *t, f=f: f(*t, activation=activation))(x, weight, bias)
        for f in (layer_norm, composite)
    ]
    torch.testing.assert_close(*results)


ADD_TRANSFORMS = {
    "grad": lambda f: grad(lambda *t: sum(o.pow(3).sum() for o in f(*t)), argnums=(0, 1, 2, 3)),
    "hessian": lambda f: hessian(lambda *t: sum(o.pow(3).sum() for o in f(*t)), argnums=(0, 2)),
    "jacfwd": lambda f: jacfwd(f, argnums=(0, 1, 2, 3)),
    "jacrev": lambda f: jacrev(f, argnums=(0, 1, 2, 3)),
    "vmap": lambda f: vmap(f, in_dims=(0, 0, None, None)),
    "vmap with one residual": lambda f: (
        lambda x, r, w, b: vmap(f, in_dims=(0, None, None, None))(x, r[0], w, b)
    ),
    "vmap of grad": lambda f: vmap(
        grad(lambda *t: sum(o.pow(3).sum() for o in f(*t)), argnums=(0, 1, 2, 3)),
        in_dims=(0, 0, None, None),
    ),
    "grad of grad": lambda f: grad(
        lambda *t: grad(lambda *t: sum(o.pow(3).sum() for o in f(*t)))(*t).pow(2).sum(),
        argnums=(0, 1, 2, 3),
    ),
}


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("name", ADD_TRANSFORMS)
def test_transforms_with_residual(device, name, activation):
    tensors = inputs(device, shape=(2, 3, 4))
    results = [
        ADD_TRANSFORMS[name](lambda *t, f=f: f(*t, activation=activation))(*tensors)
        for f in (add_layer_norm, add_composite)
    ]
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    "in_dims",
    [d for d in itertools.product((None, 0, 1), repeat=3) if any(e is not None for e in d)],
)
@pytest.mark.parametrize("activation", [None, "gelu_tanh"])
def test_vmap_over_any_arguments(device, in_dims, activation):
    """Any arguments may be batched, in any dimension, as the parameters of an ensemble are."""
    size = 3
    x, _, weight, bias = inputs(device, shape=(4, 5))
    tensors = [
        t if dim is None else torch.randn_like(t.expand(size, *t.shape)).movedim(0, dim)
        for t, dim in zip((x, weight, bias), in_dims, strict=True)
    ]

    def loss(f):
        return lambda *t: f(*t, activation=activation).pow(3).sum()

    for make in (
        lambda f: lambda *t: f(*t, activation=activation),
        lambda f: grad(loss(f), argnums=(0, 1, 2)),
        lambda f: grad(loss(f), argnums=0),
    ):
        ours, stock = (vmap(make(f), in_dims=in_dims)(*tensors) for f in (layer_norm, composite))
        torch.testing.assert_close(ours, stock)


@pytest.mark.parametrize(
    "in_dims", [(0, 0, 0, None), (None, 0, None, None), (0, None, 0, 0), (1, 0, None, 0)]
)
def test_vmap_with_residual_over_any_arguments(device, in_dims):
    tensors = [
        t if dim is None else torch.randn_like(t.expand(3, *t.shape)).movedim(0, dim)
        for t, dim in zip(inputs(device, shape=(4, 5)), in_dims, strict=True)
    ]
    for make in (
        lambda f: f,
        lambda f: grad(lambda *t: sum(o.pow(3).sum() for o in f(*t)), argnums=(0, 1, 2, 3)),
    ):
        ours, stock = (
            vmap(make(f), in_dims=in_dims)(*tensors) for f in (add_layer_norm, add_composite)
        )
        torch.testing.assert_close(ours, stock)


def test_vmap_without_leading_dimensions(device):
    x = torch.randn(7, 5, device=device, dtype=F64)
    torch.testing.assert_close(
        vmap(lambda x: layer_norm(x, normalized_shape=(5,)))(x), F.layer_norm(x, (5,))
    )


def test_per_sample_gradients(device):
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8), FusedLayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 3)
    ).to(device, F64)
    x = torch.randn(5, 6, device=device, dtype=F64)
    target = torch.randint(3, (5,), device=device)
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params, x, target):
        return F.cross_entropy(functional_call(model, params, (x[None],)), target[None])

    per_sample = vmap(grad(loss), in_dims=(None, 0, 0))(params, x, target)
    for i in range(5):
        model.zero_grad()
        F.cross_entropy(model(x[i : i + 1]), target[i : i + 1]).backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(per_sample[name][i], p.grad)


@pytest.fixture
def kernel_calls(monkeypatch):
    """The names of the operators that torch dispatched below all transforms."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Record(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "fused_layernorm":
                self.names.append(func._opname)
            return func(*args, **(kwargs or {}))

    return Record()


def test_first_order_stays_on_the_kernels(device, kernel_calls):
    x, _, weight, bias = inputs(device, dtype=F32)

    def loss(*t):
        return layer_norm(*t, activation="gelu").sum()

    with kernel_calls:
        grad(loss, argnums=(0, 1, 2))(x, weight, bias)
    assert kernel_calls.names == ["layer_norm_forward", "layer_norm_backward"]
    kernel_calls.names.clear()
    with kernel_calls:
        vmap(grad(loss), in_dims=(0, None, None))(x, weight, bias)
    assert kernel_calls.names == ["layer_norm_forward", "layer_norm_backward"]
    kernel_calls.names.clear()
    with kernel_calls:
        vmap(lambda x: layer_norm(x, weight, bias))(x)
    assert kernel_calls.names == ["layer_norm"]
    kernel_calls.names.clear()
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    with kernel_calls:
        torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
    assert kernel_calls.names == ["layer_norm_forward", "layer_norm_backward"]


def test_a_dispatch_mode_sees_every_call(device, kernel_calls):
    x = torch.randn(3, 5, device=device, requires_grad=True)
    with kernel_calls:
        y = layer_norm(x, normalized_shape=5)
        y.sum().backward()
        with torch.no_grad():
            layer_norm(x, normalized_shape=5)
            add_layer_norm(x, x, normalized_shape=5)
        add_layer_norm(x, x, normalized_shape=5)
    assert kernel_calls.names == [
        "layer_norm_forward",
        "layer_norm_backward",
        "layer_norm",
        "add_layer_norm",
        "add_layer_norm_forward",
    ]


class Tagged(torch.Tensor):
    """A subclass that adds nothing but a name. By default PyTorch's operators keep the class."""


@pytest.mark.parametrize("requires_grad", [False, True])
def test_tensor_subclass_stays(device, requires_grad):
    x = torch.randn(3, 5, device=device).as_subclass(Tagged).requires_grad_(requires_grad)
    y = layer_norm(x, normalized_shape=5)
    assert type(y) is Tagged
    assert y.requires_grad == requires_grad
    torch.testing.assert_close(
        y.as_subclass(torch.Tensor), F.layer_norm(x.as_subclass(torch.Tensor), (5,))
    )
    out = add_layer_norm(x, x, normalized_shape=5)
    assert [type(o) for o in out] == [Tagged, Tagged]
    if requires_grad:
        y.sum().backward()
        assert x.grad is not None


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("negated", ["x", "residual", "weight", "bias", "dy"])
def test_lazily_negated_tensors(device, negated, autocast):
    """The imaginary part of a conjugate has the negated values of its memory."""
    plain = dict(zip(("x", "residual", "weight", "bias"), inputs(device, dtype=F32), strict=True))
    plain["dy"] = torch.randn_like(plain["x"])

    def gradients(x, residual, weight, bias, dy):
        tensors = [t.detach().requires_grad_() for t in (x, residual, weight, bias)]
        with torch.autocast(x.device.type, BF16, enabled=autocast):
            y = layer_norm(tensors[0], *tensors[2:])
            z, total = add_layer_norm(*tensors)
        outputs = (y, z, total)
        return (*outputs, *torch.autograd.grad(outputs, tensors, [dy] * 3))

    values = torch.complex(torch.zeros_like(plain[negated]), -plain[negated])
    lazy = {**plain, negated: values.conj().imag}
    assert lazy[negated].is_neg()
    torch.testing.assert_close(gradients(**lazy), gradients(**plain), rtol=0, atol=0)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(device, use_reentrant):
    torch.manual_seed(0)
    norm = FusedLayerNorm(32, activation="gelu").to(device)
    add_norm = FusedAddLayerNorm(32).to(device)
    linear = torch.nn.Linear(32, 32).to(device)

    def block(x):
        y, residual = add_norm(linear(norm(x)), x)
        return y + residual

    x = torch.randn(6, 32, device=device)
    results = []
    for run in (block, lambda x: checkpoint(block, x, use_reentrant=use_reentrant)):
        leaf = x.clone().requires_grad_()
        for module in (norm, add_norm, linear):
            module.zero_grad()
        run(leaf).sum().backward()
        results.append(
            [leaf.grad, *(p.grad for m in (norm, add_norm, linear) for p in m.parameters())]
        )
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_saved_tensors_pass_through_hooks(device):
    """All that backward needs is saved by autograd: x in its own dtype, statistics, parameters."""
    x = torch.randn(6, 32, device=device, dtype=BF16, requires_grad=True)
    weight, bias = (torch.randn(32, device=device, requires_grad=True) for _ in "wb")
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return tensor.cpu()

    with saved_tensors_hooks(pack, lambda tensor: tensor.to(device)):
        y = layer_norm(x, weight, bias, activation="silu")
    (gradient,) = torch.autograd.grad(y.float().sum(), x, retain_graph=True)
    shapes = sorted(tuple(t.shape) for t in packed)
    assert shapes == sorted([(6, 32), (6, 1), (6, 1), (32,), (32,)])
    assert sum(t.dtype == BF16 for t in packed) == 1
    with save_on_cpu():
        y = layer_norm(x, weight, bias, activation="silu")
    (again,) = torch.autograd.grad(y.float().sum(), x)
    assert torch.equal(gradient, again)


def test_inference_mode(device):
    norm = FusedLayerNorm(8).to(device)
    add_norm = FusedAddLayerNorm(8).to(device)
    x = torch.randn(3, 8, device=device)
    with torch.inference_mode():
        y = norm(x)
        z, residual_out = add_norm(y, x)
    assert y.is_inference()
    assert z.is_inference()
    assert residual_out.is_inference()
    assert torch.equal(y.clone(), norm(x).detach())


def test_inference_tensors_are_inputs_too(device):
    with torch.inference_mode():
        x = torch.randn(3, 8, device=device)
    assert not layer_norm(x, normalized_shape=8).requires_grad
    weight = torch.ones(8, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        layer_norm(x, weight)


def test_hooks_and_accumulation(device):
    norm = FusedLayerNorm(8).to(device)
    seen = []
    norm.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    norm.register_full_backward_hook(lambda module, gi, go: seen.append("module"))
    x = torch.randn(3, 8, device=device, requires_grad=True)
    x.register_hook(lambda g: 2 * g)
    for _ in range(2):
        norm(x).pow(2).sum().backward()
    assert seen.count("module") == 2
    tensors = [s for s in seen if s != "module"]
    torch.testing.assert_close(tensors[1], 2 * tensors[0])
    plain = x.detach().requires_grad_()
    norm(plain).pow(2).sum().backward()
    assert x.grad is not None
    assert plain.grad is not None
    torch.testing.assert_close(x.grad, 4 * plain.grad)


def test_anomaly_mode(device):
    x = torch.randn(3, 8, device=device, requires_grad=True)
    with torch.autograd.detect_anomaly(check_nan=True):
        layer_norm(x, normalized_shape=8).sum().backward()
    assert x.grad is not None


def test_backward_twice(device):
    x = torch.randn(3, 8, device=device, requires_grad=True)
    y = layer_norm(x, normalized_shape=8).pow(2).sum()
    y.backward(retain_graph=True)
    assert x.grad is not None
    first = x.grad.clone()
    y.backward()
    assert torch.equal(x.grad, 2 * first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()


def test_operators_have_a_gradient_of_their_own(device):
    """Called by name, as a compiled graph calls them, the operators are differentiable."""
    x, residual, weight, bias = (t.requires_grad_() for t in inputs(device))
    ops = torch.ops.fused_layernorm
    y = ops.layer_norm_forward(x, 1, weight, bias, 1e-5, "gelu", 2.0)[0]
    ours = torch.autograd.grad(y.pow(2).sum(), (x, weight, bias), create_graph=True)
    z = composite(x, weight, bias, activation="gelu", scale=2.0)
    stock = torch.autograd.grad(z.pow(2).sum(), (x, weight, bias), create_graph=True)
    torch.testing.assert_close(ours, stock)
    torch.testing.assert_close(
        torch.autograd.grad(torch.stack([g.pow(2).sum() for g in ours]).sum(), (x, weight, bias)),
        torch.autograd.grad(torch.stack([g.pow(2).sum() for g in stock]).sum(), (x, weight, bias)),
    )
    y, residual_out, mean, rstd = ops.add_layer_norm_forward(x, residual, 1, weight, bias, 1e-5)
    assert not mean.requires_grad
    assert not rstd.requires_grad
    ours = torch.autograd.grad(y.pow(2).sum() + residual_out.sum(), (x, residual, weight))
    z, total = add_composite(x, residual, weight, bias)
    stock = torch.autograd.grad(z.pow(2).sum() + total.sum(), (x, residual, weight))
    torch.testing.assert_close(ours, stock)


@pytest.mark.gpu
def test_grad_scaler():
    torch.manual_seed(0)
    results = []
    for norm in (FusedLayerNorm(32), torch.nn.LayerNorm(32)):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(32, 32), norm, torch.nn.Linear(32, 1)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        scaler = torch.amp.GradScaler("cuda")
        x = torch.randn(64, 32, device="cuda")
        losses = []
        for _ in range(10):
            with torch.autocast("cuda", torch.float16):
                loss = (model(x).float() - x.sum(1, keepdim=True)).pow(2).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
        results.append(torch.tensor(losses))
    torch.testing.assert_close(*results, rtol=2e-2, atol=1e-2)
    assert results[0][-1] < results[0][0]

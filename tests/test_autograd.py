# SPDX-License-Identifier: Apache-2.0
"""Of every norm derivatives of every order and mode, and transforms; what autograd saves."""

import contextlib
import functools
import itertools
from typing import Any, cast

import forms
import pytest
import torch
import torch.nn.functional as F
from forms import ALL_NAMES, NAMES, ROWS, TAKE_ACTIVATIONS, WITH_HEADS
from numerics import ACTIVATIONS, covering, on_devices
from torch import nn
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.autograd.graph import save_on_cpu
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import fused_layernorm as fl
from fused_layernorm.ops import autograd_library

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
pytestmark = pytest.mark.cpu_operators

RMS, SILU = {"statistic": "rms"}, {"activation": "silu"}
# A norm of each kind, and with each activation; (kind, options of forms.ours and forms.stock).
FORMS: list[tuple[str, dict[str, Any]]] = [
    *(("plain", {"activation": activation, "scale": 1.5}) for activation in ACTIVATIONS),
    ("plain", {**RMS, "activation": "gelu", "weight_offset": 1.0}),
    ("residual", {}), ("residual", RMS), ("residual", {"activation": "silu", "scale": 0.5}),
    ("modulated", {}), ("modulated", RMS), ("gated", {}), ("gated", RMS),
    ("groups", {}), ("groups", SILU), ("groups", {"activation": "leaky_relu"}), ("channels", SILU),
    ("gates", {}), ("gates", {"gate_activation": "sigmoid", "group_size": 2}),
    ("gates", {"gate_first": True, "group_size": 2}),
    ("gates", {"gate_first": True, "gate_activation": "sigmoid"}),
    ("heads", {"statistic": "layer"}), ("heads", {"interleaved": True}),
    ("packed", {}), ("packed", {"statistic": "layer", "packing": "h3d"}),
]  # fmt: skip


def check_derivatives(function, tensors, fast=True, **how):
    assert gradcheck(function, tensors, check_forward_ad=True, fast_mode=fast, **how)
    assert gradgradcheck(function, tensors, fast_mode=True)


# ---- Derivatives of every order and mode.


@pytest.mark.parametrize(
    ("kind", "options", "other"),
    [(*form, False) for form in FORMS]
    + [(*form, True) for form in FORMS if form[0] in ("modulated", "gated")],
    ids=str,
)
def test_gradcheck(device, kind, options, other):
    tensors = forms.leaves(forms.tensors(kind, device, (2, 2, 4), other=other))
    function = forms.ours(kind, **options)
    assert gradcheck(function, tensors, check_forward_ad=True, check_batched_grad=True)
    how: Any = {"check_fwd_over_rev": True, "check_rev_over_rev": True}
    assert gradgradcheck(function, tensors, fast_mode=True, **how)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_gradcheck_of_several_dimensions(device, activation):
    tensors = [torch.randn(size, device=device, dtype=F64) for size in ((2, 3, 4), (3, 4), (3, 4))]
    function: Any = functools.partial(fl.layer_norm, activation=activation)
    assert gradcheck(function, forms.leaves(tensors), check_batched_grad=True)
    assert gradgradcheck(function, forms.leaves(tensors))


@pytest.mark.parametrize("output", [0, 1])
@pytest.mark.parametrize("kind", ["residual", "gated", "heads"])
def test_gradcheck_of_one_output(device, kind, output):
    """residual_out depends on the tensors of rows alone, q_out and k_out on those of their side."""
    tensors = forms.leaves(forms.tensors(kind, device))
    places = range(len(tensors) if output == 0 else ROWS.get(kind, 0))
    places = range(output, len(tensors), 2) if kind == "heads" else places

    def run(*given):
        every = dict(enumerate(tensors)) | dict(zip(places, given, strict=True))
        return forms.ours(kind)(*every.values())[output]

    check_derivatives(run, [tensors[i] for i in places], fast=False)


def some(count):
    """Which of so many tensors are meant: one or more, and every choice of three meets."""
    return [mask for mask in covering(*[(True, False)] * count, strength=3) if any(mask)]


def options_of(kind, **others):
    """Those that are there, with an activation where the function takes one."""
    return others | ({"activation": "silu"} if kind in TAKE_ACTIVATIONS else {})


@pytest.mark.parametrize(
    ("kind", "options"),
    [(kind, options_of(kind)) for kind in WITH_HEADS]
    + [(kind, options_of(kind, **RMS)) for kind in NAMES],
    ids=str,
)
def test_gradcheck_where_some_are_absent_or_frozen(device, kind, options):
    tensors = forms.tensors(kind, device, (2, 2, 3))
    function = forms.ours(kind, **options)
    for mask in some(len(tensors)):
        check_derivatives(function, forms.leaves(tensors, mask))
    optional = [
        i for i, name in enumerate(WITH_HEADS[kind])
        if name in ("shift", "scale", "weight", "bias") or (name, kind) == ("gate", "gated")
    ]  # fmt: skip
    for mask in some(len(optional)):
        absent = {*itertools.compress(optional, mask)}

        def of_present(*given, absent=absent):
            rest = iter(given)
            return function(*(None if i in absent else next(rest) for i in range(len(tensors))))

        used = [t for i, t in enumerate(tensors) if i not in absent]
        check_derivatives(of_present, forms.leaves(used))


def third_order(function, tensors):
    tensors = forms.leaves(tensors)
    loss = torch.stack([out.pow(3).sum() for out in function(*tensors)]).sum()
    for _ in range(2):
        gradients = torch.autograd.grad(loss, tensors, create_graph=True)
        loss = torch.stack([g.pow(2).sum() for g in gradients]).sum() * 0.01
    return torch.autograd.grad(loss, tensors)


def tangents(function, tensors):
    """Of each tensor alone, where no gradients are taken."""
    results = []
    for i, tensor in enumerate(tensors):
        with torch.no_grad(), forward_ad.dual_level():
            dual = forward_ad.make_dual(tensor, tensor.cos())
            y = function(*tensors[:i], dual, *tensors[i + 1 :])[0]
            results.append(forward_ad.unpack_dual(y).tangent)
    return results


def tangents_of_backward(function, tensors):
    """Of a graph made before: the forward pass sees no tangents, but the backward pass does."""
    leaves = forms.leaves(tensors)
    y = function(*leaves)[0]
    results = []
    for create_graph in (False, True):
        with forward_ad.dual_level():
            dy = forward_ad.make_dual(y.detach().cos(), y.detach().sin())
            how: Any = {"create_graph": create_graph, "retain_graph": True, "allow_unused": True}
            found = torch.autograd.grad(y, leaves, dy, **how)
            results += [forward_ad.unpack_dual(g).tangent for g in found if g is not None]
    return results


def test_half_precision_in_forward_mode(device):
    x, scale = torch.randn(3, 64, device=device).to(BF16), torch.randn(64, device=device)
    for function, tensor in (
        (lambda x: fl.layer_norm(x, scale), x),
        (lambda scale: fl.ada_layer_norm(x, None, scale), scale),
    ):
        # jvp's annotation includes a third value, which it returns only with has_aux.
        y, tangent = cast(tuple[Any, Any], jvp(function, (tensor,), (tensor,)))
        assert y.dtype == tangent.dtype == BF16
        torch.testing.assert_close(y, function(tensor))


# ---- Transforms.


def loss_of(f):
    return lambda *t: sum(out.pow(3).sum() for out in f(*t))


def squares(f, argnums):
    """The sum of the squares of the gradients of f."""
    return lambda *t: sum(g.pow(2).sum() for g in grad(f, argnums=argnums)(*t))


# Of a function and the numbers of all its arguments.
TRANSFORMS: dict[str, Any] = {
    "grad": lambda f, n: grad(loss_of(f), argnums=n),
    "vjp": lambda f, n: lambda *t: vjp(f, *t)[1](tuple(torch.ones_like(y) for y in f(*t))),
    "jvp": lambda f, n: lambda *t: jvp(f, t, tuple(x.cos() for x in t)),
    "jacrev": lambda f, n: jacrev(f, argnums=n),
    "jacfwd": lambda f, n: jacfwd(f, argnums=n),
    "hessian": lambda f, n: hessian(loss_of(f), argnums=(0, n[-2])),
    "jacrev of jacrev": lambda f, n: jacrev(jacrev(loss_of(f), argnums=n[-2]), argnums=(0, 1)),
    "jacrev of jacfwd": lambda f, n: jacrev(jacfwd(f, argnums=n[-2]), argnums=1),
    "grad of grad": lambda f, n: grad(squares(loss_of(f), n), argnums=n),
    "grad of grad of grad": lambda f, n: grad(
        lambda *t: squares(squares(loss_of(f), (0, 1)), (0, 1))(*t) * 1e-3, argnums=(0, 1)
    ),
    "third order": lambda f, n: lambda *t: third_order(f, t),
    "tangents": lambda f, n: lambda *t: tangents(f, t),
    "tangents of backward": lambda f, n: lambda *t: tangents_of_backward(f, t),
}
# The functions in every form, and the operators by name, as a compiled graph calls them.
FUNCTIONS = [(kind, options, None) for kind, options in FORMS] + [
    (kind, {"activation": "gelu", "scale": 2.0} if kind in ("plain", "residual") else {}, suffix)
    for kind in NAMES
    for suffix in ("", "_forward")
]


# On CUDA those whose gradients the kernels give, and one of each that PyTorch's operators give.
@on_devices(
    "name",
    TRANSFORMS,
    ["grad", "vjp", "jvp", "jacrev", "hessian", "grad of grad", "third order", "tangents"],
)
@pytest.mark.parametrize(("kind", "options", "suffix"), FUNCTIONS, ids=str)
def test_transforms(device, name, kind, options, suffix):
    activation = options.get("activation", "silu" if kind == "gates" else None)
    if name == "tangents of backward" and options.get("gate_activation", activation) == "silu":
        pytest.skip("PyTorch's silu_backward has no forward mode")
    tensors = forms.tensors(kind, device)
    of = forms.ours(kind, **options) if suffix is None else forms.operator(kind, suffix, **options)
    results = [
        TRANSFORMS[name](f, tuple(range(len(tensors))))(*tensors)
        for f in (of, forms.stock(kind, **options))
    ]
    torch.testing.assert_close(*results)


# Of a function, the numbers of all its arguments, and the dimensions over which vmap goes.
VMAPS: dict[str, Any] = {
    "vmap": lambda f, n, dims: vmap(f, in_dims=dims),
    "vmap of grad": lambda f, n, dims: vmap(grad(loss_of(f), argnums=n), in_dims=dims),
    "vmap of one grad": lambda f, n, dims: vmap(grad(loss_of(f)), in_dims=dims),
    "vmap of jvp": lambda f, n, dims: vmap(lambda *t: jvp(f, t, t)[1], in_dims=dims),
    "vmap of grad of grad": lambda f, n, dims: vmap(
        grad(squares(loss_of(f), n), argnums=n), in_dims=dims
    ),
    "vmap of hessian": lambda f, n, dims: vmap(hessian(loss_of(f)), in_dims=dims),
    "grad of vmap": lambda f, n, dims: grad(loss_of(vmap(f, in_dims=dims)), argnums=n),
    "vmap of vmap": lambda f, n, dims: (
        lambda *t: vmap(vmap(f, in_dims=dims), in_dims=(0,) + (None,) * (len(t) - 1))(
            torch.stack([t[0], t[0].cos()]), *t[1:]
        )
    ),
}
# Which tensors are batched: rows and modulations are of samples, weights of ensembles.
BATCHED = {
    "plain": [("x",), ("weight",), ("x", "bias"), NAMES["plain"]],
    "residual": [("x",), ("x", "residual"), ("weight",), NAMES["residual"]],
    "modulated": [("x",), ("x", "shift", "scale"), ("scale",), NAMES["modulated"]],
    "gated": [("x", "residual"), ("x", "residual", "gate", "shift", "scale"), ("gate", "shift"),
              ("residual", "scale", "weight"), NAMES["gated"]],
    "groups": [("x",), ("x", "shift", "scale"), ("scale", "weight"), ("x", "bias"),
               ALL_NAMES["groups"]],
    "gates": [("x",), ("gate",), ("x", "gate"), ("weight",), ALL_NAMES["gates"]],
    "channels": [("x",), ("x", "weight")],
    "heads": [("q", "k"), ("k",), ("q_weight",), WITH_HEADS["heads"]],
    "packed": [("qkv",), ("k_weight", "q_bias"), WITH_HEADS["packed"]],
}  # fmt: skip


@on_devices("name", VMAPS, ["vmap", "vmap of grad", "vmap of grad of grad", "grad of vmap"])
@pytest.mark.parametrize(
    ("kind", "batched"), [(kind, names) for kind in BATCHED for names in BATCHED[kind]], ids=str
)
def test_vmap(device, name, kind, batched):
    """The dimension that vmap goes over is the first of some tensors, and the last of others."""
    dims: list[int | None] = []
    tensors = list(forms.tensors(kind, device))
    for i, argument in enumerate(WITH_HEADS[kind]):
        is_batched = argument in batched
        dims.append((0, -1)[i % 2] if is_batched else None)
        if is_batched:
            tensors[i] = torch.stack([tensors[i], tensors[i].sin(), -tensors[i]], (0, -1)[i % 2])
    every = tuple(range(len(tensors)))
    for how in ({}, RMS) if kind in NAMES else ({},):
        options = options_of(kind, **how)
        results = [
            VMAPS[name](f, every, tuple(dims))(*tensors)
            for f in (forms.ours(kind, **options), forms.stock(kind, **options))
        ]
        torch.testing.assert_close(*results)


def test_vmap_of_modulations_of_other_dimensions(device):
    """vmap puts its dimension first: of none, of fewer than a sample has, and of one too many."""
    x, shift = torch.randn(2, 7, 5, device=device, dtype=F64)
    found = vmap(lambda x, shift: fl.ada_layer_norm(x, shift, normalized_shape=(5,)))(x, shift)
    torch.testing.assert_close(found, F.layer_norm(x, (5,)) + shift)
    x, (shift, scale) = torch.randn(3, 5, 4, device=device), torch.randn(2, 3, 4, device=device)
    found = vmap(fl.ada_layer_norm)(x, shift, scale)
    torch.testing.assert_close(found, fl.ada_layer_norm(x, shift[:, None], scale[:, None]))
    scale = torch.randn(3, 3, 1, 4, device=device)
    for dim, given in ((0, scale), (None, scale[0])):
        with pytest.raises(RuntimeError, match="expected scale that broadcasts"):
            vmap(fl.ada_layer_norm, in_dims=(0, None, dim))(x, None, given)


# ---- What runs, and what is saved.


def test_first_order_stays_on_the_kernels(device):
    x, weight, bias = forms.tensors("plain", device, dtype=F32)

    def loss(*t):
        return fl.layer_norm(*t, activation="gelu").sum()

    leaves = forms.leaves((x, weight, bias))
    for run in (
        lambda: grad(loss, argnums=(0, 1, 2))(x, weight, bias),
        lambda: vmap(grad(loss), in_dims=(0, None, None))(x, weight, bias),
        lambda: torch.autograd.grad(loss(*leaves), leaves, create_graph=True),
    ):
        with forms.Calls() as calls:
            run()
        assert calls.names == ["layer_norm_forward", "layer_norm_backward"]
    with forms.Calls() as calls:
        vmap(lambda x: fl.layer_norm(x, weight, bias))(x)
        with torch.no_grad():
            fl.add_layer_norm(*leaves[:1] * 2, normalized_shape=4)
        fl.add_layer_norm(*leaves[:1] * 2, normalized_shape=4)
    assert calls.names == ["layer_norm", "add_layer_norm", "add_layer_norm_forward"]


class Tagged(torch.Tensor):
    """A subclass that adds nothing but a name. By default PyTorch's operators keep the class."""


@pytest.mark.parametrize("requires_grad", [False, True])
def test_tensor_subclass_stays(device, requires_grad):
    x = torch.randn(3, 5, device=device).as_subclass(Tagged).requires_grad_(requires_grad)
    y, *others = fl.layer_norm(x, normalized_shape=5), *fl.add_layer_norm(x, x, normalized_shape=5)
    assert [type(out) for out in (y, *others)] == [Tagged] * 3
    assert y.requires_grad == requires_grad
    plain = torch.Tensor
    torch.testing.assert_close(y.as_subclass(plain), F.layer_norm(x.as_subclass(plain), (5,)))
    if requires_grad:
        y.sum().backward()
        assert x.grad is not None


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", ALL_NAMES)
def test_lazily_negated_and_strided_tensors(device, kind, autocast):
    """The imaginary part of a conjugate has the negated values of its memory."""
    plain = dict(zip(ALL_NAMES[kind], forms.tensors(kind, device, dtype=F32), strict=True))
    plain["dy"] = torch.randn_like(plain["x"])

    def gradients(dy, **named):
        tensors = forms.leaves(named.values())
        with torch.autocast(device, BF16, enabled=autocast):
            outputs = forms.ours(kind)(*tensors)
        return (*outputs, *torch.autograd.grad(outputs, tensors, [dy] * len(outputs)))

    expected = gradients(**plain)
    for name, t in plain.items():
        lazy = torch.complex(torch.zeros_like(t), -t).conj().imag
        assert lazy.is_neg()
        torch.testing.assert_close(gradients(**{**plain, name: lazy}), expected, rtol=0, atol=0)
        strided = torch.stack([t, t], -1)[..., 0]
        torch.testing.assert_close(gradients(**{**plain, name: strided}), expected)


# What is saved: of parameters those that backward reads, of input's size the norm's input alone,
# and with a gate the tensor that it multiplies. (kind, options, what is not there, what is trained)
SAVED: dict[str, list[tuple[Any, ...]]] = {
    "x weight mean rstd": [("plain", {}), ("channels", {})],
    "x weight bias mean rstd": [("plain", {"activation": "silu"}), ("channels", SILU)],
    "x bias mean rstd": [("plain", {}, "weight")],
    "x weight rstd": [("plain", RMS, "", "x weight bias")],  # (Python's saves an empty mean, too.)
    "total weight mean rstd": [("residual", {})],
    "total weight bias mean rstd": [("residual", SILU)],
    "total bias mean rstd": [("residual", {}, "weight")],
    "x shift scale weight bias mean rstd": [("modulated", {}), ("groups", {}), ("groups", SILU)],
    "total shift scale weight bias mean rstd": [("gated", {}, "gate")],
    "total x gate shift scale weight bias mean rstd": [
        ("gated", {}), ("gated", {}, "", "x gate shift"),
    ],
    # Of a frozen modulation what only its own gradient needs. (Python's autograd saves more.)
    "total gate scale weight bias mean rstd": [("gated", {}, "", "x")],
    "x gate weight bias rstd": [("gates", {}), ("gates", {"gate_first": True})],
}  # fmt: skip


def saved(device, kind, options, absent="", trained=""):
    """The names of the tensors that a call saves."""
    t = dict(zip(ALL_NAMES[kind], forms.tensors(kind, device, dtype=F32), strict=True))
    for name, tensor in t.items():
        tensor.requires_grad_(not trained or name in trained.split())
    given = (None if name == absent else tensor for name, tensor in t.items())
    found: list[Any] = []
    kept = forms.saved_by(lambda: found.extend(forms.ours(kind, **options)(*given)))
    named = {tensor.data_ptr(): name for name, tensor in (t | {"total": found[-1]}).items()}
    return sorted(named.get(tensor.data_ptr(), "statistic") for tensor in kept)


def test_what_is_saved(device):
    for names, cases in SAVED.items():
        expected = names.replace("mean", "statistic").replace("rstd", "statistic").split()
        for case in cases:
            if len(case) < 4 or autograd_library.active:
                assert saved(device, *case) == sorted(expected), case
    x, weight = torch.randn(6, 32, device=device).to(BF16), torch.randn(32, device=device)
    leaves = forms.leaves((x, weight))
    kept = forms.saved_by(lambda: fl.layer_norm(*leaves, activation="silu"))
    assert [t.dtype for t in kept].count(BF16) == 1, "x is saved in its own dtype"


@pytest.mark.parametrize("kind", WITH_HEADS)
def test_second_derivatives_under_hooks(device, kind):
    """As without hooks on saved tensors, which torch.func does not take; of nothing, too."""
    for batch in (2, 0):
        leaves = forms.leaves(forms.tensors(kind, device, (batch, 3, 4)))
        found = []
        for hooks in (contextlib.nullcontext(), save_on_cpu()):
            with hooks:
                loss = torch.stack([y.square().sum() for y in forms.ours(kind)(*leaves)]).sum()
                first = torch.autograd.grad(loss, leaves, create_graph=True)
                total = torch.stack([g.square().sum() for g in first]).sum()
                second = torch.autograd.grad(total, leaves, materialize_grads=True)
                found.append((*first, *second))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_parameters_made_in_inference_mode_as_in_pytorch(device, offset):
    """A weight whose value backward does not read is not saved. (PyTorch's kernel on CUDA saves it,
    and raises.)"""
    with torch.inference_mode():
        weight = nn.Parameter(torch.full((8,), 2.0, device=device))
    x = torch.randn(3, 8, device=device)
    norm = F.rms_norm(x, (8,))
    assert x.is_cuda or F.rms_norm(x, (8,), weight).square().sum().requires_grad
    loss = fl.rms_norm(x, weight, weight_offset=offset).square().sum()
    (gradient,) = torch.autograd.grad(loss, weight)
    torch.testing.assert_close(gradient, (2 * norm.square() * (2 + offset)).sum(0))


def test_backward_twice(device):
    x = torch.randn(3, 8, device=device, requires_grad=True)
    y = fl.layer_norm(x, normalized_shape=8).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()

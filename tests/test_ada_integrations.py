# SPDX-License-Identifier: Apache-2.0
"""The modulated norms among PyTorch's parts: derivatives, transforms, compilers, autocast, modules.

Their results and first gradients are in test_ada_layer_norm.py, their errors in test_errors.py.
"""

import copy
import io
import itertools
import pickle
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._C._autograd import DeviceType
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd.graph import saved_tensors_hooks
from torch.export import Dim
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import fused_layernorm
from fused_layernorm import (
    FusedAdaLayerNorm,
    FusedAddAdaLayerNorm,
    ada_layer_norm,
    add_ada_layer_norm,
    add_layer_norm,
)

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
HALF = [F16, BF16]
ops = torch.ops.fused_layernorm
pytestmark = pytest.mark.cpu_operators

# The shapes of modulations of an input of shape (2, 3, 4).
SHAPES = [(4,), (2, 1, 4), (2, 3, 4), (1, 3, 4), (2, 1, 1), ()]


def stock_ada(x, shift=None, scale=None, weight=None, bias=None, eps=1e-5):
    """ada_layer_norm over the last dimension in PyTorch's elementary functions.

    F.layer_norm cannot serve here, because its double backward takes mean and rstd as constants.
    """
    centered = x - x.mean(-1, keepdim=True)
    z = centered / (centered.square().mean(-1, keepdim=True) + eps).sqrt()
    z = z if weight is None else z * weight
    z = z if bias is None else z + bias
    z = z if scale is None else z * (1 + scale)
    return z if shift is None else z + shift


def stock_add_ada(x, residual, gate=None, *modulation):
    total = residual + (x if gate is None else gate * x)
    return stock_ada(total, *modulation), total


def inputs(device, shape=(2, 1, 4), *, rows=(2, 3), dtype=F64):
    """x, residual, gate, shift, scale, weight, bias."""

    def randn(*sizes):
        return torch.randn(sizes, device=device, dtype=dtype)

    cols = 4
    return (
        randn(*rows, cols),
        randn(*rows, cols),
        *(randn(*shape) for _ in "gst"),
        randn(cols),
        randn(cols),
    )


def without_add(tensors):
    x, _, _, *modulation = tensors
    return (x, *modulation)


# ---- Derivatives of every order and mode.


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradcheck(device, shape):
    tensors = [t.requires_grad_() for t in inputs(device, shape)]
    for function, args in (
        (ada_layer_norm, without_add(tensors)),
        (add_ada_layer_norm, tensors),
    ):
        assert torch.autograd.gradcheck(
            function, args, check_forward_ad=True, check_batched_grad=True
        )
        assert torch.autograd.gradgradcheck(
            function, args, check_fwd_over_rev=True, check_rev_over_rev=True, fast_mode=True
        )


@pytest.mark.parametrize("outputs", [(0,), (1,)])
def test_gradcheck_of_one_output(device, outputs):
    tensors = [t.requires_grad_() for t in inputs(device)]

    def function(*tensors):
        out = add_ada_layer_norm(*tensors)
        return tuple(out[i] for i in outputs)

    used = tensors if outputs == (0,) else tensors[:3]
    rest = tensors[len(used) :]
    assert torch.autograd.gradcheck(lambda *t: function(*t, *rest), used, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda *t: function(*t, *rest), used, fast_mode=True)


def test_gradcheck_where_some_are_absent(device):
    """Any combination of gate, shift, scale, weight and bias may be absent."""
    tensors = inputs(device)
    for present in itertools.product((True, False), repeat=5):
        used = [
            t.detach().requires_grad_()
            for t, there in zip(tensors, (True, True, *present), strict=True)
            if there
        ]

        def function(*given, present=present):
            rest = iter(given)
            args: Any = [next(rest) if there else None for there in (True, True, *present)]
            return add_ada_layer_norm(*args)

        assert torch.autograd.gradcheck(function, used, fast_mode=True)
        assert torch.autograd.gradgradcheck(function, used, fast_mode=True)


def test_gradcheck_where_some_are_frozen(device):
    tensors = inputs(device)
    for mask in itertools.product((True, False), repeat=7):
        if any(mask):
            args = [t.detach().requires_grad_(m) for t, m in zip(tensors, mask, strict=True)]
            assert torch.autograd.gradgradcheck(add_ada_layer_norm, args, fast_mode=True)


def test_third_order(device):
    tensors = inputs(device, dtype=F64)
    results = []
    for function in (add_ada_layer_norm, stock_add_ada):
        leaves = [t.detach().requires_grad_() for t in tensors]
        loss = torch.stack([out.pow(3).sum() for out in function(*leaves)]).sum()
        for _ in range(2):
            gradients = torch.autograd.grad(loss, leaves, create_graph=True)
            loss = torch.stack([g.pow(2).sum() for g in gradients]).sum() * 0.01
        results.append(torch.autograd.grad(loss, leaves))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_mode(device, shape):
    primals, tangents = inputs(device, shape), inputs(device, shape)
    torch.testing.assert_close(
        jvp(add_ada_layer_norm, primals, tangents), jvp(stock_add_ada, primals, tangents)
    )
    primals, tangents = without_add(primals), without_add(tangents)
    torch.testing.assert_close(
        jvp(ada_layer_norm, primals, tangents), jvp(stock_ada, primals, tangents)
    )


def test_forward_mode_checks_its_arguments(device):
    x = torch.randn(3, 5, device=device)
    with pytest.raises(RuntimeError, match="expected shift that broadcasts"):
        jvp(lambda x: ada_layer_norm(x, torch.ones(4, device=device)), (x,), (x,))


def test_half_precision_in_forward_mode(device):
    x = torch.randn(3, 64, device=device).to(BF16)
    scale = torch.randn(64, device=device)
    # jvp's annotation includes a third value, which it returns only with has_aux.
    y, tangent = cast(
        tuple[Any, Any], jvp(lambda s: ada_layer_norm(x, None, s), (scale,), (scale,))
    )
    assert y.dtype == tangent.dtype == BF16
    torch.testing.assert_close(y, ada_layer_norm(x, None, scale))


EVERY = tuple(range(7))
OF_BATCH = (0, 0, 0, 0, 0, None, None)  # gate, shift and scale are batched too
SHARED = (0, 0, None, None, None, None, None)


def loss_of(f):
    return lambda *t: sum(out.pow(3).sum() for out in f(*t))


TRANSFORMS = {
    "grad": lambda f: grad(loss_of(f), argnums=EVERY),
    "vjp": lambda f: lambda *t: vjp(f, *t)[1]((torch.ones_like(t[0]), torch.ones_like(t[1]))),
    "jacrev": lambda f: jacrev(f, argnums=EVERY),
    "jacfwd": lambda f: jacfwd(f, argnums=EVERY),
    "hessian": lambda f: hessian(loss_of(f), argnums=(0, 2, 4)),
    "jacrev of jacrev": lambda f: jacrev(jacrev(loss_of(f), argnums=4), argnums=(0, 2)),
    "jacrev of jacfwd": lambda f: jacrev(jacfwd(f, argnums=2), argnums=4),
    "grad of grad": lambda f: grad(
        lambda *t: sum(g.pow(2).sum() for g in grad(loss_of(f), argnums=EVERY)(*t)), argnums=EVERY
    ),
}
# The tensors have one more dimension, or a modulation is shared.
VMAPS = {
    "vmap of samples": lambda f: vmap(f, in_dims=OF_BATCH),
    "vmap of shared": lambda f: (
        lambda x, r, g, s, t, w, b: vmap(f, in_dims=SHARED)(x, r, g[0], s[0], t[0], w, b)
    ),
    "vmap of one gate": lambda f: (
        lambda x, r, g, s, t, w, b: vmap(f, in_dims=(0, 0, None, 0, 0, None, None))(
            x, r, g[0], s, t, w, b
        )
    ),
    "vmap of gates of one input": lambda f: (
        lambda x, r, g, s, t, w, b: vmap(f, in_dims=(None, None, 0, 0, 0, None, None))(
            x[0], r[0], g, s, t, w, b
        )
    ),
    "vmap of weights": lambda f: (
        lambda x, r, g, s, t, w, b: vmap(f, in_dims=(0, 0, 0, 0, 0, 0, 0))(
            x, r, g, s, t, torch.stack([w] * 3), torch.stack([b] * 3)
        )
    ),
    "vmap of grad": lambda f: vmap(grad(loss_of(f), argnums=EVERY), in_dims=OF_BATCH),
    "vmap of grad of shared": lambda f: (
        lambda x, r, g, s, t, w, b: vmap(grad(loss_of(f), argnums=EVERY), in_dims=SHARED)(
            x, r, g[0], s[0], t[0], w, b
        )
    ),
    "vmap of grad of weights": lambda f: (
        lambda x, r, g, s, t, w, b: vmap(grad(loss_of(f), argnums=EVERY), in_dims=(0,) * 7)(
            x, r, g, s, t, torch.stack([w] * 3), torch.stack([b] * 3)
        )
    ),
    "grad of vmap": lambda f: grad(loss_of(vmap(f, in_dims=OF_BATCH)), argnums=EVERY),
    "vmap of jvp": lambda f: vmap(
        lambda *t: jvp(lambda x, g: f(x, t[1], g, *t[3:]), (t[0], t[2]), (t[0], t[2]))[1],
        in_dims=OF_BATCH,
    ),
    "vmap of grad of grad": lambda f: vmap(
        grad(
            lambda *t: sum(g.pow(2).sum() for g in grad(loss_of(f), argnums=(0, 2, 4))(*t)),
            argnums=(0, 3, 4),
        ),
        in_dims=OF_BATCH,
    ),
    "vmap of vmap": lambda f: (
        lambda x, r, g, s, t, w, b: vmap(
            vmap(f, in_dims=OF_BATCH), in_dims=(0, 0, None, 0, None, None, None)
        )(x, r, g[0], s, t[0], w, b)
    ),
}


@pytest.mark.parametrize("shape", [(4,), (2, 1, 4), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(device, name, shape):
    tensors = inputs(device, shape)
    results = [TRANSFORMS[name](f)(*tensors) for f in (add_ada_layer_norm, stock_add_ada)]
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", VMAPS)
def test_vmap(device, name):
    """vmap over 3 samples, each an input of (2, 5, 4) with modulations of (2, 1, 4)."""
    tensors = inputs(device, (3, 2, 1, 4), rows=(3, 2, 5))
    results = [VMAPS[name](f)(*tensors) for f in (add_ada_layer_norm, stock_add_ada)]
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", ["vmap of samples", "vmap of grad", "vmap of shared"])
def test_vmap_without_a_residual(device, name):
    tensors = inputs(device, (3, 2, 1, 4), rows=(3, 2, 5))

    def alone(f):
        return lambda x, residual, gate, *rest: (f(x, *rest), residual * gate)

    results = [VMAPS[name](alone(f))(*tensors) for f in (ada_layer_norm, stock_ada)]
    torch.testing.assert_close(*results)


def test_vmap_of_modulations_of_fewer_dimensions(device):
    """A sample has modulations of (D,) and an input of (S, D). vmap puts its dimension first."""
    x = torch.randn(3, 5, 4, device=device)
    shift, scale = torch.randn(2, 3, 4, device=device)
    found = vmap(ada_layer_norm)(x, shift, scale)
    torch.testing.assert_close(found, stock_ada(x, shift[:, None], scale[:, None]))


@pytest.mark.parametrize("batched", [False, True])
def test_vmap_does_not_enlarge_a_sample(device, batched):
    """A modulation with as many dimensions as the whole batch has one too many for a sample."""
    x = torch.randn(3, 5, 4, device=device)
    scale = torch.randn(3, 3, 1, 4, device=device)
    with pytest.raises(RuntimeError, match="expected scale that broadcasts"):
        vmap(ada_layer_norm, in_dims=(0, None, 0 if batched else None))(
            x, None, scale if batched else scale[0]
        )


def test_checkpoint(device):
    leaves = [t.requires_grad_() for t in inputs(device)]
    expected = torch.autograd.grad(loss_of(add_ada_layer_norm)(*leaves), leaves)
    for reentrant in (True, False):
        outputs = checkpoint(add_ada_layer_norm, *leaves, use_reentrant=reentrant)
        loss = sum(out.pow(3).sum() for out in outputs)
        for leaf in leaves:
            leaf.grad = None
        loss.backward()
        torch.testing.assert_close([leaf.grad for leaf in leaves], list(expected))


@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
def test_what_is_saved_for_backward(device, gated):
    """Of input's size only the norm's input is saved, and with a gate the tensor it multiplies."""
    x, residual = torch.randn(2, 3, 50, 64, device=device)
    gate, shift, scale = torch.randn(3, 3, 1, 64, device=device)
    for tensor in (x, residual, gate, shift, scale):
        tensor.requires_grad_()
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        _, residual_out = add_ada_layer_norm(x, residual, gate if gated else None, shift, scale)
    large = {tensor.data_ptr() for tensor in saved if tensor.numel() >= x.numel()}
    assert large == {
        tensor.data_ptr() for tensor in ((residual_out, x) if gated else [residual_out])
    }
    saved.clear()
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        ada_layer_norm(x, shift, scale)
    assert {tensor.data_ptr() for tensor in saved if tensor.numel() >= x.numel()} == {x.data_ptr()}


def test_changed_modulations_are_noticed(device):
    """Backward refuses a saved tensor that was modified since, as PyTorch's operators do."""
    x, _, _, shift, scale, _, _ = (t.requires_grad_() for t in inputs(device))
    scale = scale.clone()
    y = ada_layer_norm(x, shift, scale)
    with torch.no_grad():
        scale.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_gradients_reach_the_linear_layer_of_the_chunks(device):
    """All six chunks of a modulation get gradients, as in a block of a diffusion transformer."""
    torch.manual_seed(3)
    linear = nn.Linear(8, 24).to(device, F64)
    x, branch = torch.randn(2, 3, 5, 4, device=device, dtype=F64)
    condition = torch.randn(3, 1, 8, device=device, dtype=F64)

    def gradients(ada, add_ada):
        linear.zero_grad()
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = linear(condition).chunk(6, -1)
        y = ada(x, shift, scale)
        z, residual = add_ada(branch * y, x, gate, shift_mlp, scale_mlp)
        (residual + gate_mlp * z).pow(2).sum().backward()
        return [p.grad.clone() for p in linear.parameters() if p.grad is not None]

    torch.testing.assert_close(
        gradients(ada_layer_norm, add_ada_layer_norm), gradients(stock_ada, stock_add_ada)
    )


# ---- opcheck.

OPCHECKS: dict[str, dict[str, Any]] = {
    "sample": {"shape": (3, 1, 8)},
    "all": {"shape": (8,)},
    "token": {"shape": (3, 5, 8)},
    "position": {"shape": (1, 5, 8)},
    "half": {"shape": (3, 1, 8), "dtype": BF16, "modulation_dtype": F32, "residual_dtype": F32},
    "no parameters": {"shape": (3, 1, 8), "affine": False},
    "no shift": {"shape": (3, 1, 8), "absent": "shift"},
    "no scale": {"shape": (3, 1, 8), "absent": "scale"},
    "no gate": {"shape": (3, 1, 8), "absent": "gate"},
}


def sample(
    device,
    *,
    shape,
    dtype=F32,
    modulation_dtype=None,
    residual_dtype=None,
    affine=True,
    absent=None,
    requires_grad=False,
):
    def randn(sizes, dtype):
        return torch.randn(sizes, device=device, dtype=dtype).requires_grad_(requires_grad)

    modulation_dtype = modulation_dtype or dtype
    named = {
        "input": randn((3, 5, 8), dtype),
        "residual": randn((3, 5, 8), residual_dtype or dtype),
        **{
            name: None if name == absent else randn(shape, modulation_dtype)
            for name in ("gate", "shift", "scale")
        },
        **{name: randn((8,), modulation_dtype) if affine else None for name in ("weight", "bias")},
    }
    return named


@pytest.mark.parametrize("name", OPCHECKS)
@pytest.mark.parametrize("statistics", [False, True])
def test_opcheck_forward(device, name, statistics):
    # The operators with statistics run under autograd, the others in calls without gradients.
    n = sample(device, **OPCHECKS[name], requires_grad=statistics)
    affine = (1, n["shift"], n["scale"], n["weight"], n["bias"], 1e-5)
    ada = ops.ada_layer_norm_forward if statistics else ops.ada_layer_norm
    add = ops.add_ada_layer_norm_forward if statistics else ops.add_ada_layer_norm
    torch.library.opcheck(ada.default, (n["input"], *affine))
    torch.library.opcheck(add.default, (n["input"], n["residual"], n["gate"], *affine))


@pytest.mark.parametrize("name", OPCHECKS)
@pytest.mark.parametrize("with_dresidual", [False, True])
def test_opcheck_backward(device, name, with_dresidual):
    n = sample(device, **OPCHECKS[name])
    x = n["residual"] if OPCHECKS[name].get("residual_dtype") else n["input"]
    affine = (n["shift"], n["scale"], n["weight"], n["bias"])
    y, mean, rstd = ops.ada_layer_norm_forward(x, 1, *affine, 1e-5)
    dresidual = torch.randn_like(x) if with_dresidual else None
    needs = (True, *(tensor is not None for tensor in affine))
    torch.library.opcheck(
        ops.ada_layer_norm_backward.default,
        (torch.randn_like(y), x, 1, mean, rstd, *affine, dresidual, *needs),
    )


@pytest.mark.parametrize("mask", list(itertools.product((True, False), repeat=5)), ids=str)
def test_opcheck_backward_masks(device, mask):
    n = sample(device, shape=(3, 1, 8))
    affine = (n["shift"], n["scale"], n["weight"], n["bias"])
    y, mean, rstd = ops.ada_layer_norm_forward(n["input"], 1, *affine, 1e-5)
    torch.library.opcheck(
        ops.ada_layer_norm_backward.default,
        (torch.randn_like(y), n["input"], 1, mean, rstd, *affine, None, *mask),
    )


@pytest.mark.parametrize("mask", list(itertools.product((True, False), repeat=2)), ids=str)
@pytest.mark.parametrize("name", ["sample", "all", "token", "half"])
def test_opcheck_gate_backward(device, name, mask):
    n = sample(device, **OPCHECKS[name])
    torch.library.opcheck(
        ops.gate_backward.default, (torch.randn_like(n["residual"]), n["input"], n["gate"], *mask)
    )


GATED_MASKS = [
    (True,) * 7,
    *(tuple(i == j for i in range(7)) for j in range(7)),
    (False, True, True, False, False, False, False),
    (True, False, False, True, True, True, True),
    (False,) * 7,
]


@pytest.mark.parametrize("mask", GATED_MASKS, ids=lambda mask: "".join(str(int(m)) for m in mask))
@pytest.mark.parametrize("name", ["sample", "all", "token", "half"])
def test_opcheck_gated_backward(device, name, mask):
    """Its results are also those of ada_layer_norm_backward and gate_backward."""
    n = sample(device, **OPCHECKS[name])
    x, input, gate = n["residual"], n["input"], n["gate"]
    affine = (n["shift"], n["scale"], n["weight"], n["bias"])
    y, mean, rstd = ops.ada_layer_norm_forward(x, 1, *affine, 1e-5)
    dy, dresidual = torch.randn_like(y), torch.randn_like(x)
    args = (dy, x, input, gate, 1, mean, rstd, *affine, dresidual, *mask)
    torch.library.opcheck(ops.add_ada_layer_norm_backward.default, args)
    dx, *of_modulation = ops.ada_layer_norm_backward(
        dy, x, 1, mean, rstd, *affine, dresidual, *[True] * 5
    )
    expected = (dx, *ops.gate_backward(dx, input, gate, True, True), *of_modulation)
    found = ops.add_ada_layer_norm_backward(*args)
    for one, other, needed in zip(found, expected, mask, strict=True):
        assert one.dtype == other.dtype
        if needed:
            tolerance = {F32: 1e-5, BF16: 2**-7}[one.dtype]
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
        else:
            assert one.shape == (0,)


def test_meta_tensors():
    n = sample("meta", **OPCHECKS["half"], requires_grad=True)
    x, residual, gate, shift, scale, weight, bias = n.values()
    y, residual_out = add_ada_layer_norm(x, residual, gate, shift, scale, weight, bias)
    assert y.is_meta
    assert (y.dtype, residual_out.dtype) == (BF16, F32)
    (y.float().sum() + residual_out.sum()).backward()
    for tensor in n.values():
        assert tensor.grad.shape == tensor.shape
        assert tensor.grad.dtype == tensor.dtype
    y, _ = add_layer_norm(x, residual, weight, gate=gate, activation="gelu", out_dtype=F64)
    assert y.dtype == F64


# ---- torch.compile and torch.export.


class Block(nn.Module):
    """Both modules, with the modulations cut out of one linear layer's output."""

    def __init__(self, dim=16, **options):
        super().__init__()
        self.modulation = nn.Linear(dim, 6 * dim)
        self.norm = FusedAdaLayerNorm(dim, **options)
        self.linear = nn.Linear(dim, dim)
        self.add_norm = FusedAddAdaLayerNorm(dim, **options)

    def forward(self, x, condition):
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = self.modulation(condition).chunk(6, -1)
        branch = self.linear(self.norm(x, shift, scale).to(x.dtype))
        y, residual = self.add_norm(branch, x, gate, shift_mlp, scale_mlp)
        return residual + gate_mlp * self.linear(y.to(x.dtype))


def block(device, *, samples=3, tokens=5, requires_grad=True, **options):
    torch.manual_seed(0)
    model = Block(**options).to(device).requires_grad_(requires_grad)
    x = torch.randn(samples, tokens, 16, device=device, requires_grad=requires_grad)
    condition = torch.randn(samples, 1, 16, device=device)
    return model, x, condition


def step(f, model, x, condition):
    model.zero_grad()
    x.grad = None
    y = f(x, condition)
    y.sin().sum().backward()
    return [y.detach(), x.grad.clone(), *(p.grad.clone() for p in model.parameters())]


def operators(graph):
    names = [str(n.target) for n in graph.nodes if n.op == "call_function"]
    return [name.split(".")[1] for name in names if name.startswith("fused_layernorm")]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("affine", [False, True])
def test_compile(device, backend, affine):
    torch._dynamo.reset()
    model, x, condition = block(device, elementwise_affine=affine)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    found, expected = step(compiled, model, x, condition), step(model, model, x, condition)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(
    torch.__version__.startswith("2.10."),
    reason="Dynamo of torch 2.10 cannot follow a gate beside an activation",
)
def test_compile_of_functions_and_of_a_gate_beside_an_activation(device):
    torch._dynamo.reset()
    x, residual, gate, shift, scale, weight, bias = (
        t.to(F32).requires_grad_() for t in inputs(device)
    )

    def f(x, residual, gate, shift, scale, weight, bias):
        y = ada_layer_norm(x, shift, scale, weight, bias)
        z, total = add_ada_layer_norm(y, residual, gate, shift)
        plain, total = add_layer_norm(z, total, weight, gate=gate)
        other, total = add_layer_norm(plain, total, weight, gate=gate, activation="gelu")
        return other + total

    leaves = (x, residual, gate, shift, scale, weight, bias)
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*leaves), f(*leaves))
    torch.testing.assert_close(
        torch.autograd.grad(compiled(*leaves).sin().sum(), leaves),
        torch.autograd.grad(f(*leaves).sin().sum(), leaves),
    )


def test_compile_with_dynamic_shapes(device):
    """One graph serves every number of samples and of tokens."""
    torch._dynamo.reset()
    model, _, _ = block(device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    first = None
    for samples, tokens in ((3, 5), (4, 7), (2, 9)):
        x = torch.randn(samples, tokens, 16, device=device, requires_grad=True)
        condition = torch.randn(samples, 1, 16, device=device)
        found, expected = step(compiled, model, x, condition), step(model, model, x, condition)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        # The first call may compile twice, because PyTorch first tries eps as a symbol.
        first = first or counter.frame_count
    assert counter.frame_count == first


@pytest.mark.parametrize("affine", [False, True])
def test_export_keeps_the_operators_and_decomposes_to_aten(device, affine):
    model, x, condition = block(device, requires_grad=False, elementwise_affine=affine)
    batch, tokens = Dim("batch"), Dim("tokens")
    program = torch.export.export(
        model, (x, condition), dynamic_shapes=({0: batch, 1: tokens}, {0: batch})
    )
    assert operators(program.graph) == ["ada_layer_norm", "add_ada_layer_norm"]
    plain = program.run_decompositions(fused_layernorm.decompositions())
    assert operators(plain.graph) == []
    _, x, condition = block(device, samples=4, tokens=7, requires_grad=False)
    for found in (program.module()(x, condition), plain.module()(x, condition)):
        torch.testing.assert_close(found, model(x, condition))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (
            lambda x, _residual, _gate, *rest: (ada_layer_norm(x, *rest),),
            {"ada_layer_norm_forward", "ada_layer_norm_backward"},
        ),
        (add_ada_layer_norm, {"add_ada_layer_norm_forward", "add_ada_layer_norm_backward"}),
        (
            lambda *args: add_ada_layer_norm(*args)[1:],
            {"add_ada_layer_norm_forward", "gate_backward"},
        ),
    ],
    ids=["ada_layer_norm", "add_ada_layer_norm", "only residual_out"],
)
def test_backward_decomposes_to_aten(device, function, expected):
    from torch.fx.experimental.proxy_tensor import make_fx

    tensors = inputs(device)

    def gradients(*tensors):
        leaves = [t.detach().requires_grad_() for t in tensors]
        found = torch.autograd.grad(loss_of(function)(*leaves), leaves, allow_unused=True)
        return [g for g in found if g is not None]

    graph = make_fx(gradients)(*tensors)
    assert set(operators(graph.graph)) == expected
    plain = make_fx(gradients, decomposition_table=fused_layernorm.decompositions())(*tensors)
    assert operators(plain.graph) == []
    torch.testing.assert_close(plain(*tensors), gradients(*tensors))


def test_onnx_export():
    pytest.importorskip("onnxscript")
    model, x, condition = block("cpu", requires_grad=False)
    program = torch.onnx.export(model.eval(), (x, condition), dynamo=True, verbose=False)
    assert program is not None
    names = {node.op_type for node in program.model.graph}
    assert not any("layer_norm" in name for name in names), names


# ---- Autocast.


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("modulation_dtype", [F32, F16, BF16])
@pytest.mark.parametrize("x_dtype", [F32, F16, BF16])
@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
def test_autocast(device, gated, x_dtype, modulation_dtype, dtype):
    """Input and modulations of any dtypes: linear layers under autocast make narrow modulations."""
    x = torch.randn(3, 5, 32, device=device).to(x_dtype).requires_grad_()
    residual = torch.randn(3, 5, 32, device=device)
    modulations = [
        torch.randn(3, 1, 32, device=device).to(modulation_dtype).requires_grad_() for _ in "gst"
    ]
    gate, shift, scale = modulations
    weight = torch.randn(32, device=device, requires_grad=True)
    leaves = [x, *(modulations if gated else modulations[1:]), weight]
    with torch.autocast(device, dtype):
        if gated:
            y, residual_out = add_ada_layer_norm(x, residual, gate, shift, scale, weight)
            assert residual_out.dtype == F32
        else:
            y = ada_layer_norm(x, shift, scale, weight)
        like = F.layer_norm(x, (32,))
    assert y.dtype == like.dtype
    wide = [leaf.detach().float().requires_grad_() for leaf in leaves]
    if gated:
        expected, _ = stock_add_ada(wide[0], residual, *wide[1:])
    else:
        expected = stock_ada(*wide)
    tolerance = 1e-5 if y.dtype == F32 else 3e-2
    torch.testing.assert_close(y.float(), expected, rtol=tolerance, atol=tolerance)
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, leaves, dy)
    for leaf, one, other in zip(
        leaves, found, torch.autograd.grad(expected, wide, dy.float()), strict=True
    ):
        assert one.dtype == leaf.dtype
        tolerance = 1e-4 if leaf.dtype == F32 else 2e-2
        torch.testing.assert_close(one.float(), other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", HALF)
def test_out_dtype_opts_out_of_autocast(device, dtype):
    x = torch.randn(3, 5, 32, device=device).to(dtype)
    shift = torch.randn(3, 1, 32, device=device)
    with torch.autocast(device, dtype):
        assert ada_layer_norm(x, shift, out_dtype=dtype).dtype == dtype
        y, _ = FusedAddAdaLayerNorm(32, out_dtype=dtype)(x, x, shift, shift, shift)
    assert y.dtype == dtype


def test_autocast_of_a_gate_beside_an_activation(device):
    x = torch.randn(3, 5, 32, device=device).to(BF16)
    residual = torch.randn(3, 5, 32, device=device)
    gate = torch.randn(3, 1, 32, device=device).to(F16)
    weight = torch.randn(32, device=device).to(F16)
    with torch.autocast(device, BF16):
        like, _ = add_layer_norm(x, residual, weight, gate=gate)
        y, residual_out = add_layer_norm(x, residual, weight, gate=gate, activation="relu")
    assert y.dtype == like.dtype
    assert residual_out.dtype == F32
    torch.testing.assert_close(y, like.relu(), rtol=1e-2, atol=1e-2)


# ---- Modules.


def test_modules_are_layer_norms():
    for module in (FusedAdaLayerNorm(16), FusedAddAdaLayerNorm(16)):
        assert isinstance(module, nn.LayerNorm)
        assert module.eps == 1e-6
        assert module.normalized_shape == (16,)
        assert module.weight is None
        assert module.bias is None
        assert not module.state_dict()
    affine = FusedAdaLayerNorm((4, 8), 1e-3, True)
    assert affine.state_dict().keys() == nn.LayerNorm((4, 8)).state_dict().keys()
    assert FusedAdaLayerNorm(8, elementwise_affine=True, bias=False).bias is None


def test_swap_leaves_them_as_they_are():
    model = nn.Sequential(FusedAdaLayerNorm(16), FusedAddAdaLayerNorm(16), nn.LayerNorm(16))
    fused_layernorm.swap_layer_norm(model)
    kinds = [FusedAdaLayerNorm, FusedAddAdaLayerNorm, fused_layernorm.FusedLayerNorm]
    assert [type(module) for module in model] == kinds
    fused_layernorm.unswap_layer_norm(model)
    assert [type(module) for module in model] == [*kinds[:2], nn.LayerNorm]


def test_modules_are_shown():
    stock = repr(nn.LayerNorm(8, 1e-6, False)).removesuffix(")")
    assert repr(FusedAdaLayerNorm(8)) == f"FusedAda{stock})"
    assert repr(FusedAddAdaLayerNorm(8, out_dtype=F16)) == f"FusedAddAda{stock}, out_dtype=float16)"


def test_modules_check_their_options():
    with pytest.raises(ValueError, match="expected out_dtype float32"):
        FusedAdaLayerNorm(8, out_dtype=torch.int32)


@pytest.mark.parametrize("options", [{}, {"elementwise_affine": True, "out_dtype": F64}], ids=str)
def test_modules_give_what_the_functions_give(device, options):
    x, residual = torch.randn(2, 3, 5, 8, device=device)
    gate, shift, scale = torch.randn(3, 3, 1, 8, device=device)
    norm = FusedAdaLayerNorm(8, **options).to(device)
    add_norm = FusedAddAdaLayerNorm(8, **options).to(device)
    for module in (norm, add_norm):
        for parameter in module.parameters():
            nn.init.normal_(parameter)
    for copied in (norm, copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        y = copied(x, shift, scale)
        expected = stock_ada(x, shift, scale, norm.weight, norm.bias, 1e-6)
        torch.testing.assert_close(y, expected.to(y.dtype), rtol=1e-5, atol=1e-5)
        assert y.dtype == options.get("out_dtype", F32)
    y, residual_out = add_norm(x, residual, gate, shift, scale)
    total = residual + gate * x
    expected = stock_ada(total, shift, scale, add_norm.weight, add_norm.bias, 1e-6)
    torch.testing.assert_close(y, expected.to(y.dtype), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(residual_out, total)
    torch.testing.assert_close(
        norm(x, None, scale),
        ada_layer_norm(x, None, scale, norm.weight, norm.bias, 1e-6).to(y.dtype),
    )


def test_modules_normalize_several_dimensions(device):
    x = torch.randn(2, 3, 4, 5, device=device)
    scale = torch.randn(2, 1, 4, 5, device=device)
    norm = FusedAdaLayerNorm((4, 5)).to(device)
    expected = F.layer_norm(x, (4, 5), eps=1e-6) * (1 + scale)
    torch.testing.assert_close(norm(x, None, scale), expected)


def test_functional_call(device):
    norm = FusedAdaLayerNorm(8, elementwise_affine=True).to(device)
    x, shift = torch.randn(3, 8, device=device), torch.randn(8, device=device)
    weight = {"weight": torch.randn(8, device=device)}
    torch.testing.assert_close(
        functional_call(norm, weight, (x, shift)),
        stock_ada(x, shift, None, weight["weight"], eps=1e-6),
    )


@pytest.mark.parametrize("options", [{}, {"elementwise_affine": True, "out_dtype": F64}], ids=str)
@pytest.mark.parametrize("how", ["script", "trace"])
@pytest.mark.parametrize("module", [FusedAdaLayerNorm, FusedAddAdaLayerNorm])
def test_torch_script(device, module, how, options):
    """Scripted and traced modules, also saved and loaded, give the same results and gradients."""
    model = module(8, **options).to(device)

    def args(rows):
        x, residual = torch.randn(2, rows, 5, 8, device=device)
        modulations = torch.randn(3, rows, 1, 8, device=device)
        if module is FusedAdaLayerNorm:
            return x, *modulations[1:]
        return x, residual, *modulations

    given = tuple(t.requires_grad_() for t in args(4))
    script = torch.jit.trace(model, args(3)) if how == "trace" else torch.jit.script(model)
    buffer = io.BytesIO()
    torch.jit.save(script, buffer)
    buffer.seek(0)
    for scripted in (script, torch.jit.load(buffer)):
        found, expected = scripted(*given), model(*given)
        torch.testing.assert_close(found, expected)
        losses = [
            sum(out.sin().sum() for out in (outs if isinstance(outs, tuple) else (outs,)))
            for outs in (found, expected)
        ]
        torch.testing.assert_close(*(torch.autograd.grad(loss, given) for loss in losses))


def test_torch_script_without_modulations():
    script = torch.jit.script(FusedAddAdaLayerNorm(8))
    x = torch.randn(3, 8)
    torch.testing.assert_close(script(x, x, None, x), add_ada_layer_norm(x, x, None, x, eps=1e-6))


def test_symbolic_trace():
    model, x, condition = block("cpu")
    traced = torch.fx.symbolic_trace(model)
    calls = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    ours = (ada_layer_norm, add_ada_layer_norm)
    assert [f for f in calls if f in ours] == list(ours)
    assert torch.equal(traced(x, condition), model(x, condition))


# ---- CUDA.


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("requires_grad", [False, True], ids=["", "grad"])
@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
@pytest.mark.parametrize("modulation_dtype", [BF16, F32])
def test_one_kernel_forward(modulation_dtype, gated, requires_grad, autocast):
    """The kernel reads chunks in place, without copies.

    Only half-precision modulations beside a float32 y are cast to float32 first, because there is
    no kernel for them. The cast changes no bit of the result.
    """
    x, residual = torch.randn(2, 4, 256, 1152, device="cuda").to(BF16)
    chunks = torch.randn(4, 1, 6 * 1152, device="cuda").to(modulation_dtype).chunk(6, -1)
    for tensor in (x, residual, *chunks[:3]):
        tensor.requires_grad_(requires_grad and tensor.is_leaf)

    def forward():
        with torch.autocast("cuda", BF16, enabled=autocast):
            if gated:
                return add_ada_layer_norm(x, residual, chunks[2], chunks[0], chunks[1])[0]
            return ada_layer_norm(x, chunks[0], chunks[1])

    forward()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        y = forward()
        torch.cuda.synchronize()
    assert y.dtype == (F32 if autocast else BF16)
    kernels = [event.name for event in trace.events() if event.device_type == DeviceType.CUDA]
    casts = 2 + gated if autocast and modulation_dtype == BF16 else 0
    assert len(kernels) == 1 + casts, kernels
    assert "layer_norm" in kernels[-1]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4,), (3, 1, 4), (3, 5, 4), (1, 5, 4)], ids=str)
def test_cuda_graph(shape):
    """A captured forward and backward reads the values that the tensors have at the replay."""
    leaves: Any = [t.requires_grad_() for t in inputs("cuda", shape, rows=(3, 5), dtype=F32)]
    gradients = tuple(torch.randn(2, 3, 5, 4, device="cuda"))

    def run():
        outputs = add_ada_layer_norm(*leaves)
        return (*outputs, *torch.autograd.grad(outputs, leaves, gradients))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    with torch.no_grad():
        for leaf in leaves:
            leaf.normal_()
    graph.replay()
    for one, other in zip(captured, run(), strict=True):
        assert torch.equal(one, other)

# SPDX-License-Identifier: Apache-2.0
"""Autograd in C++ or in Python: which of the two is active, and the operators called by name.

Every other test runs on the active one. CI runs all tests twice, the second time with
FUSED_LAYERNORM_PYTHON_AUTOGRAD=1.
"""

import gc
import os
import re
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from numerics import ACTIVATIONS
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import fused_layernorm
from fused_layernorm import FusedAddLayerNorm, FusedLayerNorm
from fused_layernorm.ops import autograd_library
from fused_layernorm.ops.autograd_library import choose, path_of, released_minor

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
PACKAGE = Path(fused_layernorm.__file__).parent
ops = torch.ops.fused_layernorm


# --- the choice -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "minor"),
    [
        ("2.11.0", "2.11"),
        ("2.11.0+cu130", "2.11"),
        ("2.13.1+cpu", "2.13"),
        ("2.10", "2.10"),
        ("2.10.0.post1", "2.10"),
        ("2.11.0a0+git1234567", None),
        ("2.11.0a0+5228986c39.nv25.09", None),
        ("2.11.0rc1", None),
        ("2.14.0.dev20261101+cu130", None),
        ("unknown", None),
    ],
)
def test_only_releases_have_a_minor_version(version, minor):
    assert released_minor(version) == minor


@pytest.fixture
def folder(tmp_path):
    """A folder with empty files as the libraries for torch 2.9, 2.10 and 2.11."""
    for minor in ("2.9", "2.10", "2.11"):
        path_of(minor, tmp_path).touch()
    return tmp_path


def test_the_library_of_the_running_torch_is_chosen(folder):
    path, reason = choose("2.11.3+cu130", folder, {})
    assert path == path_of("2.11", folder)
    assert reason == "compiled for torch 2.11"


@pytest.mark.parametrize(
    ("version", "environment", "reason"),
    [
        ("2.12.0", {}, "this build has no library for torch 2.12 (2.9 2.10 2.11)"),
        ("3.10.0", {}, "this build has no library for torch 3.10 (2.9 2.10 2.11)"),
        (
            "2.11.0a0+git1",
            {},
            "torch 2.11.0a0+git1 is no release, so its C++ interface is not known",
        ),
        ("2.11.0", {"FUSED_LAYERNORM_PYTHON_AUTOGRAD": "1"}, "FUSED_LAYERNORM_PYTHON_AUTOGRAD=1"),
    ],
)
def test_no_library_is_chosen(folder, version, environment, reason):
    assert choose(version, folder, environment) == (None, reason)


def test_a_build_without_libraries(tmp_path):
    assert choose("2.11.0", tmp_path, {}) == (
        None,
        "this build has no library for torch 2.11 (nor any)",
    )


def test_a_library_is_active_unless_disabled():
    """An installation without its libraries would pass every other test, only more slowly."""
    expected, _ = choose(torch.__version__)
    assert autograd_library.active == (expected is not None)
    if os.environ.get(autograd_library.DISABLE) != "1" and sys.platform == "linux":
        assert autograd_library.active == (released_minor(torch.__version__) is not None)


@pytest.mark.parametrize(
    "name",
    [
        "layer_norm",
        "add_layer_norm_forward",
        "layer_norm_backward",
        "ada_layer_norm",
        "add_ada_layer_norm_forward",
        "ada_layer_norm_backward",
        "add_ada_layer_norm_backward",
        "gate_backward",
    ],
)
@pytest.mark.parametrize("key", ["AutogradCPU", "AutogradCUDA"])
def test_one_of_the_two_is_registered(name, key):
    dump = torch._C._dispatch_dump_table(f"fused_layernorm::{name}")
    (line,) = [line for line in dump.splitlines() if line.startswith(f"{key}:")]
    assert ("autograd.cpp" in line) == autograd_library.active, line
    assert "not implemented" not in line
    # A second registration of the same key would be listed as inactive.
    registered = torch._C._dispatch_dump(f"fused_layernorm::{name}")
    assert len(re.findall(r"^Autograd\[alias\]", registered, re.MULTILINE)) == 1
    assert "(inactive)" not in registered


TRAIN = """
import sys, warnings
warnings.simplefilter("error")
import torch
torch.__version__ = sys.argv[1] or torch.__version__
import fused_layernorm
from fused_layernorm.ops import autograd_library
x = torch.randn(3, 5, requires_grad=True)
y, total = fused_layernorm.add_layer_norm(x, x, torch.ones(5, requires_grad=True))
(y * total).sum().backward()
assert x.grad.abs().sum() > 0
print(y.grad_fn.name(), autograd_library.active, autograd_library.reason, sep="|")
"""


def in_a_copy(tmp_path, version="", **environment):
    """What TRAIN prints with the copy of the package in tmp_path, under torch called `version`."""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), **environment}
    result = subprocess.run(
        [sys.executable, "-c", TRAIN, version],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return result.stdout.strip() or result.stderr


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(
        PACKAGE, tmp_path / "fused_layernorm", ignore=shutil.ignore_patterns("__pycache__")
    )
    return tmp_path


needs_library = pytest.mark.skipif(
    choose(torch.__version__, environment={})[0] is None,
    reason="this installation has no library for the running torch",
)
ENABLED = {autograd_library.DISABLE: ""}


@needs_library
def test_the_two_in_a_fresh_process(copy):
    node, active, reason = in_a_copy(copy, **ENABLED).split("|")
    assert (node, active) == ("FusedAddLayerNormBackward", "True")
    assert reason.startswith("compiled for torch")
    printed = in_a_copy(copy, **{autograd_library.DISABLE: "1"})
    node, active, reason = printed.split("|")
    assert "FusedAddLayerNormBackward" not in node
    assert (active, reason) == ("False", f"{autograd_library.DISABLE}=1")


@needs_library
@pytest.mark.parametrize("version", ["2.99.0", "2.13.0a0+git1", "2.10.0.dev20250101"])
def test_a_library_of_another_version_is_not_loaded(copy, version):
    """The libraries are invalid files here: loading one would end the process."""
    poisoned = copy / "fused_layernorm" / "autograd"
    for library in poisoned.glob("*.so"):
        library.write_bytes(b"not to be read")
    node, active, reason = in_a_copy(copy, version, **ENABLED).split("|")
    assert "FusedAddLayerNormBackward" not in node
    assert active == "False"
    assert version.rsplit(".", 1)[0] in reason or version in reason


@needs_library
def test_a_library_that_does_not_load_is_told(copy):
    minor = released_minor(torch.__version__)
    assert minor is not None
    path_of(minor, copy / "fused_layernorm" / "autograd").write_bytes(b"\x7fELF and nothing more")
    assert "UserWarning: fused_layernorm takes Python's autograd: libfused" in in_a_copy(
        copy, **ENABLED
    )


def test_the_report_says_which():
    command = [sys.executable, "-m", "fused_layernorm"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (line,) = [line for line in printed.splitlines() if line.startswith("autograd ")]
    language = "C++" if autograd_library.active else "Python"
    assert line.split(maxsplit=1)[1] == f"in {language}: {autograd_library.reason}"


# --- the operators, called by name ----------------------------------------------------------------


def inputs(device, shape=(2, 3, 4), dtype=F64):
    x, residual = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    weight, bias = (torch.randn(shape[-1:], device=device, dtype=dtype) for _ in range(2))
    return x, residual, weight, bias


def reference(x, weight=None, bias=None, eps=1e-5, *, activation=None, scale=1.0):
    centered = x - x.mean(-1, keepdim=True)
    z = centered / (centered.square().mean(-1, keepdim=True) + eps).sqrt()
    z = z if weight is None else z * weight
    z = z if bias is None else z + bias
    z = {
        None: lambda z: z,
        "gelu": lambda z: z * 0.5 * torch.erfc(-z / 2**0.5),
        "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
        "silu": lambda z: z * torch.sigmoid(z),
        "relu": F.relu,
    }[activation](z)
    return z * scale


NAMES = ["layer_norm", "layer_norm_forward", "add_layer_norm", "add_layer_norm_forward"]
ADA_NAMES = [
    "ada_layer_norm",
    "ada_layer_norm_forward",
    "add_ada_layer_norm",
    "add_ada_layer_norm_forward",
]
# (operator, activation) to test: the modulated operators take no activation.
ACTIVATED = [(name, activation) for name in NAMES for activation in (None, "gelu")]
ACTIVATED += [(name, None) for name in ADA_NAMES]


def tensors_of(name, device, shape=(2, 3, 4), dtype=F64):
    """An operator's tensors in the order of its schema. Each modulation broadcasts differently."""
    x, residual, weight, bias = inputs(device, shape, dtype)
    batch, rows, cols = shape
    gate, shift, scale = (
        torch.randn(size, device=device, dtype=dtype)
        for size in [(cols,), (batch, 1, cols), (rows, 1)]
    )
    return {
        "layer_norm": (x, weight, bias),
        "add_layer_norm": (x, residual, weight, bias),
        "ada_layer_norm": (x, shift, scale, weight, bias),
        "add_ada_layer_norm": (x, residual, gate, shift, scale, weight, bias),
    }[name.removesuffix("_forward")]


def rows_of(name):
    """The number of an operator's tensors that come before normalized_ndim."""
    if name.startswith("add_ada"):
        return 3
    return 2 if name.startswith("add") else 1


def operator(name, activation=None, scale=1.0):
    """An operator as a function of its tensors that returns only y."""
    overload = getattr(ops, name).default
    rows = rows_of(name)
    options = () if "ada" in name else (activation, scale)

    def call(*tensors):
        out = overload(*tensors[:rows], 1, *tensors[rows:], 1e-5, *options)
        return out if isinstance(out, torch.Tensor) else out[0]

    return call


def expression(name, activation=None, scale=1.0):
    """The same function as operator(), in PyTorch's operators."""

    def add(x, residual, gate=None):
        return residual + (x if gate is None else gate * x)

    def modulate(x, shift, scale, weight, bias):
        y = reference(x, weight, bias)
        y = y if scale is None else y * (1 + scale)
        return y if shift is None else y + shift

    def call(*tensors):
        x, rest = tensors[0], tensors[rows_of(name) :]
        if name.startswith("add"):
            x = add(*tensors[: rows_of(name)])
        if "ada" in name:
            return modulate(x, *rest)
        return reference(x, *rest, activation=activation, scale=scale)

    return call


TRANSFORMS = {
    "grad": lambda f: grad(lambda *t: f(*t).pow(3).sum(), argnums=(0, 1)),
    "vjp": lambda f: lambda *t: vjp(f, *t)[1](torch.ones_like(t[0])),
    "jvp": lambda f: lambda *t: jvp(f, t, tuple(x.cos() for x in t)),
    "jacrev": lambda f: jacrev(f, argnums=(0, 1)),
    "jacfwd": lambda f: jacfwd(f, argnums=(0, 1)),
    "hessian": lambda f: hessian(lambda *t: f(*t).pow(3).sum(), argnums=(0, 1)),
    "jacrev of jacrev": lambda f: jacrev(jacrev(lambda *t: f(*t).pow(3).sum(), argnums=1)),
    "jacrev of jacfwd": lambda f: jacrev(jacfwd(lambda *t: f(*t).pow(3).sum())),
    "grad of grad of grad": lambda f: grad(
        lambda *t: (
            grad(lambda *t: grad(lambda *t: f(*t).pow(3).sum())(*t).pow(2).sum())(*t).pow(2).sum()
            * 1e-3
        )
    ),
    "vmap of grad": lambda f: vmap(grad(lambda *t: f(*t).pow(3).sum(), argnums=(0, 1))),
    "grad of vmap": lambda f: grad(lambda *t: vmap(f)(*t).pow(3).sum(), argnums=(0, 1)),
    "vmap of hessian": lambda f: vmap(hessian(lambda *t: f(*t).pow(3).sum())),
}


@pytest.mark.parametrize(("name", "activation"), ACTIVATED)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_operators_under_transforms(device, name, transform, activation):
    tensors = tensors_of(name, device)
    if "vmap" in transform:
        tensors = tuple(t if t.dim() == 3 else torch.stack([t, -t]) for t in tensors)
    function = TRANSFORMS[transform]
    torch.testing.assert_close(
        function(operator(name, activation))(*tensors),
        function(expression(name, activation))(*tensors),
    )


ABSENT = ["", "shift", "scale", "shift scale", "weight", "weight bias", "scale bias"]


@pytest.mark.parametrize(
    ("name", "absent"),
    [
        *(("ada_layer_norm", absent) for absent in ABSENT),
        *(("add_ada_layer_norm", absent) for absent in [*ABSENT, "gate", "gate shift weight"]),
    ],
)
def test_gradients_of_modulated_norms(device, name, absent):
    """Both derivatives and forward mode of y and residual_out, with some arguments absent."""
    rows = ["x"] if name == "ada_layer_norm" else ["x", "residual", "gate"]
    names = [*rows, "shift", "scale", "weight", "bias"]
    tensors = tensors_of(name, device, shape=(2, 2, 3))
    present = [i for i, argument in enumerate(names) if argument not in absent.split()]
    overload = getattr(ops, name).default

    def call(*leaves):
        full: list[Any] = [None] * len(tensors)
        for i, leaf in zip(present, leaves, strict=True):
            full[i] = leaf
        return overload(*full[: len(rows)], 1, *full[len(rows) :], 1e-5)

    leaves = [tensors[i].requires_grad_() for i in present]
    assert torch.autograd.gradcheck(call, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("absent", ["", "weight", "bias", "weight and bias"])
def test_gradients_of_the_backward_operator(device, absent, activation):
    """layer_norm_backward has derivatives of its own, forward mode among them."""
    x, dresidual, weight, bias = inputs(device, shape=(2, 2, 4))
    weight = None if "weight" in absent else weight
    bias = None if "bias" in absent else bias
    tensors = [torch.randn_like(x), x, dresidual, weight, bias]
    present = [i for i, t in enumerate(tensors) if t is not None]

    def backward(*leaves):
        full: list[Any] = [None] * 5
        for i, leaf in zip(present, leaves, strict=True):
            full[i] = leaf
        dy, x, dresidual, weight, bias = full
        # The operator takes mean and rstd as values and differentiates them as functions of x.
        centered = (x - x.mean(-1, keepdim=True)).detach()
        found = (centered.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        return ops.layer_norm_backward(
            dy, x, 1, x.detach().mean(-1, keepdim=True), found, weight, bias, dresidual,
            activation, 0.5, True, weight is not None, bias is not None,
        )  # fmt: skip

    leaves = [tensors[i].requires_grad_() for i in present]
    assert torch.autograd.gradcheck(
        lambda *t: [out for out in backward(*t) if out.numel()], leaves, check_forward_ad=True
    )
    assert torch.autograd.gradgradcheck(
        lambda *t: [out for out in backward(*t) if out.numel()], leaves, fast_mode=True
    )


def statistics(x):
    """(mean, rstd) as values, detached from x."""
    x = x.detach()
    mean = x.mean(-1, keepdim=True)
    return mean, ((x - mean).square().mean(-1, keepdim=True) + 1e-5).rsqrt()


@pytest.mark.parametrize("absent", ["", "shift", "scale", "weight", "bias", "shift scale weight"])
def test_gradients_of_the_modulated_backward_operator(device, absent):
    x, shift, scale, weight, bias = tensors_of("ada_layer_norm", device, shape=(2, 2, 3))
    named = {"shift": shift, "scale": scale, "weight": weight, "bias": bias}
    named = {name: t for name, t in named.items() if name not in absent.split()}
    dy, dresidual = torch.randn_like(x), torch.randn_like(x)

    def backward(dy, x, dresidual, *present):
        given = dict(zip(named, present, strict=True))
        parameters = [given.get(name) for name in ("shift", "scale", "weight", "bias")]
        needs = [True, *(p is not None for p in parameters)]
        found = ops.ada_layer_norm_backward(
            dy, x, 1, *statistics(x), *parameters, dresidual, *needs
        )
        return [gradient for gradient, needed in zip(found, needs, strict=True) if needed]

    leaves = [t.requires_grad_() for t in (dy, x, dresidual, *named.values())]
    assert torch.autograd.gradcheck(backward, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(backward, leaves)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 1, 3), (2, 1), (2, 2, 3)])
def test_gradients_of_the_gate(device, shape):
    dresidual_out, input, gate = (
        torch.randn(size, device=device, dtype=F64, requires_grad=True)
        for size in [(2, 2, 3), (2, 2, 3), shape]
    )

    def backward(*tensors):
        return ops.gate_backward(*tensors, True, True)

    leaves = (dresidual_out, input, gate)
    assert torch.autograd.gradcheck(backward, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(backward, leaves)
    dinput, dgate = backward(*leaves)
    torch.testing.assert_close(dinput, gate * dresidual_out)
    torch.testing.assert_close(dgate, (input * dresidual_out).sum_to_size(shape))


@pytest.mark.parametrize("only", range(3))
def test_one_gradient_of_the_backward_operator(device, only):
    needs = [i == only for i in range(3)]
    x, dy, weight, _ = (t.requires_grad_() for t in inputs(device))
    _, mean, rstd = ops.layer_norm_forward(x.detach(), 1, weight.detach(), None, 1e-5)
    found = ops.layer_norm_backward(dy, x, 1, mean, rstd, weight, None, None, "silu", 1.0, *needs)
    assert [out.requires_grad for out in found] == needs
    assert [out.numel() > 0 for out in found] == needs
    (out,) = [out for out, needed in zip(found, needs, strict=True) if needed]
    gradients = torch.autograd.grad(out.pow(2).sum(), (dy, x, weight), allow_unused=True)
    assert gradients[0].abs().sum() > 0


@pytest.mark.parametrize("only", range(5))
def test_one_gradient_of_the_modulated_backward_operator(device, only):
    needs = [i == only for i in range(5)]
    x, *parameters = (t.requires_grad_() for t in tensors_of("ada_layer_norm", device))
    dy = torch.randn_like(x, requires_grad=True)
    found = ops.ada_layer_norm_backward(dy, x, 1, *statistics(x), *parameters, None, *needs)
    assert [out.requires_grad for out in found] == needs
    assert [out.numel() > 0 for out in found] == needs
    assert found[only].shape == (x, *parameters)[only].shape
    (gradient,) = torch.autograd.grad(found[only].pow(2).sum(), dy)
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize("only", range(2))
def test_one_gradient_of_the_gate(device, only):
    needs = [i == only for i in range(2)]
    dresidual_out, input, _ = (t.requires_grad_() for t in tensors_of("add_layer_norm", device)[:3])
    gate = torch.randn(4, device=device, dtype=F64, requires_grad=True)
    found = ops.gate_backward(dresidual_out, input, gate, *needs)
    assert [out.requires_grad for out in found] == needs
    assert [out.numel() > 0 for out in found] == needs
    inputs_found = torch.autograd.grad(found[only].sum(), (input, gate), allow_unused=True)
    assert [gradient is not None for gradient in inputs_found] == [only == 1, only == 0]


@pytest.mark.parametrize("name", NAMES + ADA_NAMES)
def test_dual_numbers_outside_transforms(device, name):
    tensors = tensors_of(name, device)
    options = () if "ada" in name else ("silu", 2.0)
    for i, tangent in enumerate(torch.randn_like(t) for t in tensors):
        with forward_ad.dual_level():
            duals = [*tensors]
            duals[i] = forward_ad.make_dual(tensors[i], tangent)
            ours = forward_ad.unpack_dual(operator(name, *options)(*duals)).tangent
            stock = forward_ad.unpack_dual(expression(name, *options)(*duals)).tangent
            torch.testing.assert_close(ours, stock)


def test_forward_mode_over_a_graph_made_before(device):
    """The forward pass sees no tangents, but the backward pass does."""
    for name, activation in (("layer_norm", "gelu"), ("add_ada_layer_norm", None)):
        tensors = [t.requires_grad_() for t in tensors_of(name, device)]
        dy, tangent = torch.randn_like(tensors[0]), torch.randn_like(tensors[0])
        for create_graph in (False, True):
            results = []
            for function in (operator(name, activation), expression(name, activation)):
                y = function(*tensors)
                with forward_ad.dual_level():
                    dual = forward_ad.make_dual(dy, tangent)
                    found = torch.autograd.grad(y, tensors, dual, create_graph=create_graph)
                    results.append([forward_ad.unpack_dual(g).tangent for g in found])
            torch.testing.assert_close(*results)


@pytest.mark.parametrize("half_parameters", [False, True])
@pytest.mark.parametrize("name", NAMES + ADA_NAMES)
def test_gradient_dtypes(device, name, half_parameters):
    """Gradients have the dtypes and shapes of their arguments."""
    x, *rest = tensors_of(name, device, dtype=F32)
    residual = [rest.pop(0)] if name.startswith("add") else []
    parameters = [t.to(BF16 if half_parameters else F32) for t in rest]
    leaves = [t.requires_grad_() for t in (x.to(BF16), *residual, *parameters)]
    y = operator(name, "relu")(*leaves)
    assert y.dtype == BF16
    for gradient, leaf in zip(torch.autograd.grad(y.sum(), leaves), leaves, strict=True):
        assert (gradient.dtype, gradient.shape) == (leaf.dtype, leaf.shape)


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the names and arguments of the package's operators that run below autograd."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fused_layernorm":
            self.seen.append((func._opname, args))
        return func(*args, **(kwargs or {}))


# Where a graph is wanted, Python's autograd uses PyTorch's operators in place of gate_backward.
GATE_BACKWARD = ["gate_backward"] if autograd_library.active else []


def test_only_what_is_needed_is_computed(device):
    """Gradients of frozen parameters, or not asked of torch.autograd.grad, are not computed."""
    x, _, weight, bias = (t.requires_grad_() for t in inputs(device, dtype=F32))
    y = operator("layer_norm")(x, weight, bias)
    z = operator("layer_norm")(x, weight.detach(), bias.detach())
    with Calls() as calls:
        torch.autograd.grad(y.sum(), weight, retain_graph=True)
        torch.autograd.grad(y.sum(), (x, bias))
        z.sum().backward()
    seen = [args[-3:] for _, args in calls.seen]
    if not autograd_library.active:  # Python is not told what torch.autograd.grad was asked for
        assert seen == [(True, True, True), (True, True, True), (True, False, False)]
        return
    assert seen == [(False, True, False), (True, False, True), (True, False, False)]


def test_only_what_is_needed_of_a_modulated_norm_is_computed(device):
    leaves = [t.requires_grad_() for t in tensors_of("add_ada_layer_norm", device)]
    y = operator("add_ada_layer_norm")(*leaves)

    def asked_for(leaf):
        with Calls() as calls:
            torch.autograd.grad(y.sum(), leaf, retain_graph=True)
        flags = {"ada_layer_norm_backward": 5, "add_ada_layer_norm_backward": 7}
        return [(name, args[-flags[name] :]) for name, args in calls.seen]

    def only(i, count):
        return tuple(i == j for j in range(count))

    expected = [
        [("add_ada_layer_norm_backward", only(1, 7))],
        [("ada_layer_norm_backward", only(0, 5))],
        [("add_ada_layer_norm_backward", only(2, 7))],
        *([("ada_layer_norm_backward", only(i, 5))] for i in range(1, 5)),
    ]
    if not autograd_library.active:  # Python is not told what torch.autograd.grad was asked for
        expected = [[("add_ada_layer_norm_backward", (True,) * 7)]] * len(leaves)
    assert [asked_for(leaf) for leaf in leaves] == expected


@pytest.mark.parametrize("absent", ["", "shift scale", "shift scale weight bias"])
def test_one_operator_unless_a_graph_is_wanted(device, absent):
    """Backward with a gate is one operator, or with create_graph two that have derivatives."""
    names = ["x", "residual", "gate", "shift", "scale", "weight", "bias"]
    tensors: list[Any] = [
        None if name in absent.split() else t.requires_grad_()
        for name, t in zip(names, tensors_of("add_ada_layer_norm", device), strict=True)
    ]
    leaves = [t for t in tensors if t is not None]
    y = operator("add_ada_layer_norm")(*tensors)
    dy = torch.randn_like(y, requires_grad=True)
    with Calls() as one:
        first = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    with Calls() as two:
        again = torch.autograd.grad(y, leaves, dy, create_graph=True)
    assert [name for name, _ in one.seen] == ["add_ada_layer_norm_backward"]
    assert [name for name, _ in two.seen] == ["ada_layer_norm_backward", *GATE_BACKWARD]
    for gradient, other in zip(first, again, strict=True):
        assert not gradient.requires_grad
        assert other.requires_grad
        if device == "cpu":
            assert torch.equal(gradient, other)
        torch.testing.assert_close(gradient, other)
    stock = torch.autograd.grad(
        expression("add_ada_layer_norm")(*tensors), leaves, dy, create_graph=True
    )
    torch.testing.assert_close(again, stock)
    found, expected = (
        torch.autograd.grad(
            torch.stack([g.square().sum() for g in gradients]).sum(),
            [*leaves, dy],
            materialize_grads=True,
        )
        for gradients in (again, stock)
    )
    torch.testing.assert_close(found, expected)


def gated_backward_arguments(device, dtype=F64):
    """(differentiable tensors, add_ada_layer_norm_backward as a function of these tensors)."""
    x, residual, gate, *parameters = tensors_of(
        "add_ada_layer_norm", device, shape=(2, 2, 3), dtype=dtype
    )
    tensors = [torch.randn_like(x), residual + gate * x, x, gate, *parameters, torch.randn_like(x)]

    def backward(dy, x, input, gate, *others, needs=(True,) * 7):
        found = ops.add_ada_layer_norm_backward(
            dy, x, input, gate, 1, *statistics(x), *others, *needs
        )
        return [gradient for gradient, needed in zip(found, needs, strict=True) if needed]

    return tensors, backward


def test_gradients_of_the_gated_backward_operator(device):
    tensors, backward = gated_backward_arguments(device)
    leaves = [t.requires_grad_() for t in tensors]
    assert torch.autograd.gradcheck(backward, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(backward, leaves)
    with torch.no_grad(), Calls() as calls:
        backward(*leaves)
    assert [name for name, _ in calls.seen] == ["add_ada_layer_norm_backward"]


@pytest.mark.parametrize("only", range(7))
def test_one_gradient_of_the_gated_backward_operator(device, only):
    needs = [i == only for i in range(7)]
    tensors, backward = gated_backward_arguments(device)
    leaves = [t.requires_grad_() for t in tensors]
    with Calls() as calls:
        (found,) = backward(*leaves, needs=needs)
    past = GATE_BACKWARD if only in (1, 2) else []
    assert [name for name, _ in calls.seen] == ["ada_layer_norm_backward", *past]
    _, args = calls.seen[0]
    assert args[-5:] == (only < 3, *needs[3:])
    with torch.no_grad():
        torch.testing.assert_close(found, backward(*leaves)[only])
    (gradient,) = torch.autograd.grad(found.pow(2).sum(), leaves[0])
    assert gradient.abs().sum() > 0
    whole = ops.add_ada_layer_norm_backward(
        *leaves[:4], 1, *statistics(leaves[1]), *leaves[4:], *needs
    )
    assert [out.requires_grad for out in whole] == needs
    assert [out.numel() > 0 for out in whole] == needs


@pytest.mark.parametrize("batched", ["all", "dy", "gate", "input and scale", "weight"])
def test_the_gated_backward_operator_of_batches(device, batched):
    """vmap over some of the arguments gives the results of one call for each sample."""
    tensors, backward = gated_backward_arguments(device)
    names = ["dy", "x", "input", "gate", "shift", "scale", "weight", "bias", "dresidual"]
    dims = [0 if batched == "all" or name in batched.split() else None for name in names]
    stacked = [
        t if dim is None else torch.stack([t, t.sin(), -t])
        for t, dim in zip(tensors, dims, strict=True)
    ]
    for needs in ((True,) * 7, (False, True, False) + (True,) * 4, (True,) + (False,) * 6):
        found = vmap(lambda *t, needs=needs: backward(*t, needs=needs), tuple(dims))(*stacked)
        for i in range(3):
            one = [t if d is None else t[i] for t, d in zip(stacked, dims, strict=True)]
            expected = backward(*one, needs=needs)
            torch.testing.assert_close([gradient[i] for gradient in found], expected)


def test_a_batch_of_gradients_past_a_gate(device):
    leaves = [t.requires_grad_() for t in tensors_of("add_ada_layer_norm", device)]
    y = operator("add_ada_layer_norm")(*leaves)
    dys = torch.randn(3, *y.shape, device=device, dtype=y.dtype)
    found = torch.autograd.grad(y, leaves, dys, retain_graph=True, is_grads_batched=True)
    for i, dy in enumerate(dys):
        expected = torch.autograd.grad(y, leaves, dy, retain_graph=True)
        torch.testing.assert_close(tuple(gradient[i] for gradient in found), expected)


@pytest.mark.parametrize("gated", [False, True])
def test_the_gradient_of_residual_out_alone_goes_past_the_norm(device, gated):
    x, residual, gate, shift, *_ = tensors_of("add_ada_layer_norm", device)
    leaves = [t.requires_grad_() for t in (x, residual, gate, shift)]
    total = ops.add_ada_layer_norm(
        x, residual, gate if gated else None, 1, shift, None, None, None, 1e-5
    )[1]
    d = torch.randn_like(total)
    with Calls() as calls:
        dx, dresidual, dgate, dshift = torch.autograd.grad(total, leaves, d, allow_unused=True)
    assert [name for name, _ in calls.seen] == ["gate_backward"] * gated
    torch.testing.assert_close(dresidual, d)
    torch.testing.assert_close(dx, d * gate if gated else d)
    assert dshift is None
    if gated:
        torch.testing.assert_close(dgate, (d * x).sum((0, 1)))
    else:
        assert dgate is None


def saved_tensors(function, *tensors):
    """The shapes of the tensors that one call saves for backward."""
    shapes = []

    def pack(t):
        shapes.append(tuple(t.shape))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        function(*tensors)
    return shapes


@pytest.mark.skipif(not autograd_library.active, reason="Python's autograd saves all arguments")
def test_what_a_frozen_modulation_does_not_need_is_not_saved(device):
    """The branch x is saved only for the gate's gradient, and shift only for its own."""
    x, residual, gate, shift, scale, weight, bias = (
        t.detach() for t in tensors_of("add_ada_layer_norm", device, shape=(2, 3, 5))
    )
    x.requires_grad_()
    function = operator("add_ada_layer_norm")
    row, statistic = (2, 3, 5), (2, 3, 1)
    parameters = [(5,), (5,), (5,), (3, 1)]  # gate, weight, bias and scale
    frozen = saved_tensors(function, x, residual, gate, shift, scale, weight, bias)
    assert sorted(frozen) == sorted([row, statistic, statistic, *parameters])
    trained = saved_tensors(
        function, x, residual, gate.requires_grad_(), shift.requires_grad_(), scale, weight, bias
    )
    assert sorted(trained) == sorted([*frozen, row, (2, 1, 5)])


def test_derivatives_beside_a_frozen_gate(device, monkeypatch):
    """With a frozen gate the branch x is not saved. Its placeholder in backward, which holds NaN
    here, is never read."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    x, residual, gate, shift, scale, weight, bias = tensors_of("add_ada_layer_norm", device)
    leaves = [t.requires_grad_() for t in (x, residual, shift)]

    def call(x, residual, shift):
        return ops.add_ada_layer_norm(x, residual, gate, 1, shift, scale, weight, bias, 1e-5)

    torch.use_deterministic_algorithms(True)
    try:
        assert torch.autograd.gradcheck(call, leaves)
        assert torch.autograd.gradgradcheck(call, leaves, check_fwd_over_rev=True, fast_mode=True)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", ["ada_layer_norm", "add_ada_layer_norm"])
def test_gradients_of_some_arguments_alone(device, name):
    """The gradient of each argument with all the others frozen, in mixed precision."""
    x, *rest = tensors_of(name, device, dtype=F32)
    tensors = [x.to(BF16), *rest]
    y, expected = operator(name), expression(name)
    for i in range(len(tensors)):
        leaves = [t.detach().requires_grad_(i == j) for j, t in enumerate(tensors)]
        wide = [t.detach().double().requires_grad_(i == j) for j, t in enumerate(tensors)]
        dy = torch.randn(2, 3, 4, device=device).to(BF16)
        y(*leaves).backward(dy)
        expected(*wide).backward(dy.double())
        assert [t.grad is not None for t in leaves] == [i == j for j in range(len(leaves))]
        assert leaves[i].grad.dtype == leaves[i].dtype
        torch.testing.assert_close(
            leaves[i].grad.double(), wide[i].grad,
            rtol=1e-2 if leaves[i].dtype == BF16 else 1e-5, atol=1e-5,
        )  # fmt: skip


@pytest.mark.parametrize("name", ["ada_layer_norm", "add_ada_layer_norm"])
def test_no_graph_where_none_is_wanted(device, name):
    tensors = [t.requires_grad_() for t in tensors_of(name, device)]
    expected = operator(name)(*tensors)
    assert expected.grad_fn is not None
    with torch.no_grad():
        y = operator(name)(*tensors)
    assert not y.requires_grad
    with torch.inference_mode():
        z = operator(name)(*tensors)
    assert z.is_inference()
    assert torch.equal(y, expected)
    assert torch.equal(z, expected)


@pytest.mark.parametrize("name", ["ada_layer_norm", "add_ada_layer_norm"])
def test_a_graph_is_kept_only_on_demand(device, name):
    tensors = [t.requires_grad_() for t in tensors_of(name, device)]
    loss = operator(name)(*tensors).pow(2).sum()
    first = torch.autograd.grad(loss, tensors, retain_graph=True)
    second = torch.autograd.grad(loss, tensors)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, tensors)


@pytest.mark.parametrize("i", range(7))
def test_in_place_changes_of_a_modulated_norms_arguments_are_noticed(device, i):
    leaves = [t.requires_grad_() for t in tensors_of("add_ada_layer_norm", device)]
    tensors = [t * 1 for t in leaves]
    y = operator("add_ada_layer_norm")(*tensors)
    tensors[i].add_(1)
    if i == 1:  # residual_out is saved, not residual
        torch.autograd.grad(y.sum(), leaves)
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_in_place_changes_are_noticed(device):
    x, residual, weight, _ = (t.requires_grad_() for t in inputs(device))
    y = operator("layer_norm")(x * 1, weight, None)
    changed = x * 1
    z = operator("layer_norm")(changed, weight, None)
    changed.add_(1)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()
    y, total = ops.add_layer_norm(x, residual, 1, weight, None, 1e-5)
    total.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_no_cycle_keeps_the_node_alive(device):
    """The node saves its own output residual_out, which must not form a reference cycle."""
    x, residual, weight, bias = (t.requires_grad_() for t in inputs(device))

    class Hook:
        def __call__(self, *args):
            pass

    y, total = ops.add_layer_norm(x, residual, 1, weight, bias, 1e-5)
    hook = Hook()
    y.grad_fn.register_hook(hook)
    alive = weakref.ref(hook)
    del hook
    assert alive() is not None
    gc.disable()
    try:
        del y, total
        assert alive() is None
    finally:
        gc.enable()


def test_a_long_chain_is_destroyed(device):
    """The nodes are destroyed one after another: recursion this deep would overflow the stack."""
    y = torch.ones(1, 2, device=device, requires_grad=True)
    for _ in range(50_000 if autograd_library.active else 1000):
        y = ops.layer_norm(y, 1, None, None, 1e-5)
    del y


def modules(device):
    torch.manual_seed(0)
    norm, add = FusedLayerNorm(8, activation="gelu"), FusedAddLayerNorm(8)
    linear, modulation = torch.nn.Linear(8, 8), torch.nn.Linear(8, 32)
    return torch.nn.ModuleDict(
        {"norm": norm, "add": add, "linear": linear, "modulation": modulation}
    ).to(device)


def loss_of(model, x):
    y, total = model["add"](model["linear"](model["norm"](x)), x)
    gate, shift, scale, final_scale = model["modulation"](x[:1]).chunk(4, dim=-1)
    y, total = ops.add_ada_layer_norm(y, total, gate, 1, shift, scale, None, None, 1e-6)
    y = ops.ada_layer_norm(y * total, 1, None, final_scale, None, None, 1e-6)
    return (y * total).pow(2).mean()


@pytest.mark.parametrize("compiled_forward", [False, True])
def test_compiled_autograd(device, compiled_forward):
    """With one batch size twice, so that the second backward comes from the cache, then another."""
    model, stock = modules(device), modules(device)
    forward = torch.compile(loss_of, backend="aot_eager") if compiled_forward else loss_of

    for batch in (4, 4, 6):
        x = torch.randn(batch, 8, device=device)
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        model.zero_grad()
        stock.zero_grad()
        loss = forward(model, ours)
        with torch._dynamo.compiled_autograd._enable(
            torch.compile(backend="aot_eager", dynamic=batch == 6)
        ):
            loss.backward()
        loss_of(stock, theirs).backward()
        torch.testing.assert_close(ours.grad, theirs.grad)
        for one, other in zip(model.parameters(), stock.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)


def test_compiled_autograd_with_hooks_on_saved_tensors(device):
    model = modules(device)
    x = torch.randn(4, 8, device=device, requires_grad=True)
    loss_of(model, x).backward()
    assert x.grad is not None
    expected = x.grad.clone()
    x.grad = None
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t):
        loss = loss_of(model, x)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        loss.backward()
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("name", [*NAMES, "layer_norm_backward"])
def test_opcheck(device, name, activation):
    x, residual, weight, bias = (t.requires_grad_() for t in inputs(device, dtype=F32))
    rows = (x, residual) if name.startswith("add") else (x,)
    args = (*rows, 1, weight, bias, 1e-5, activation, 2.0)
    if name == "layer_norm_backward":
        _, mean, rstd = ops.layer_norm_forward(*args[:5])
        args = (residual, x, 1, mean.detach(), rstd.detach(), weight, bias, None, activation, 2.0)
        args = (*args, True, True, True)
    torch.library.opcheck(getattr(ops, name).default, args)


@pytest.mark.parametrize("name", ADA_NAMES)
def test_opcheck_of_modulated_norms(device, name):
    tensors = [t.requires_grad_() for t in tensors_of(name, device, dtype=F32)]
    rows = rows_of(name)
    args = (*tensors[:rows], 1, *tensors[rows:], 1e-5)
    torch.library.opcheck(getattr(ops, name).default, args)


def test_opcheck_of_the_modulated_backward_operators(device):
    x, *parameters = (t.requires_grad_() for t in tensors_of("ada_layer_norm", device, dtype=F32))
    dy = torch.randn_like(x, requires_grad=True)
    args = (dy, x, 1, *statistics(x), *parameters, dy, *[True] * 5)
    torch.library.opcheck(ops.ada_layer_norm_backward.default, args)
    gate = torch.randn(2, 1, 4, device=device, requires_grad=True)
    torch.library.opcheck(ops.gate_backward.default, (dy, x, gate, True, True))
    gated = (dy, x, dy, gate, *args[2:10])
    for needs in ((True,) * 7, (False, True, False) + (True,) * 4, (True,) + (False,) * 6):
        for detach in (False, True):
            of = [t.detach() if detach and isinstance(t, torch.Tensor) else t for t in gated]
            torch.library.opcheck(ops.add_ada_layer_norm_backward.default, (*of, *needs))


def test_per_sample_gradients_through_modules(device):
    model = modules(device).double()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return loss_of(self.model, x)

    def loss(parameters, x):
        named = {f"model.{name}": p for name, p in parameters.items()}
        return functional_call(Loss(), named, (x[None],))

    x = torch.randn(5, 8, device=device, dtype=F64)
    found = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    for i in range(5):
        model.zero_grad()
        loss_of(model, x[i : i + 1]).backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(found[name][i], p.grad)


@pytest.mark.parametrize("name", NAMES)
def test_autocast_of_operators(device, name):
    """Operators called by name, as an exported program calls them."""
    x, residual, weight, bias = inputs(device, dtype=F32)
    rows = (x.to(BF16), residual) if name.startswith("add") else (x.to(BF16),)
    overload = getattr(ops, name).default

    def y_of(*args):
        out = overload(*args)
        return out if isinstance(out, torch.Tensor) else out[0]

    with torch.autocast(device, BF16):
        y = y_of(*rows, 1, weight.half(), bias, 1e-5)
        assert y_of(*rows, 1, weight.half(), bias, 1e-5, None, 1.0, BF16).dtype == BF16
    expected = y_of(*rows, 1, weight.half().float(), bias, 1e-5, None, 1.0, y.dtype)
    assert y.dtype == (BF16 if device == "cpu" else F32)
    assert torch.equal(y, expected)
    with torch.autocast(device, enabled=False), pytest.raises(RuntimeError, match="weight"):
        y_of(*rows, 1, weight.half(), bias, 1e-5)


@pytest.mark.parametrize("name", ADA_NAMES)
def test_autocast_of_modulated_norms(device, name):
    """float16 modulations beside an input of another dtype give the results of float32 ones."""
    overload, rows = getattr(ops, name).default, rows_of(name)

    def y_of(tensors, *options):
        out = overload(*tensors[:rows], 1, *tensors[rows:], 1e-5, *options)
        return out if isinstance(out, torch.Tensor) else out[0]

    wide = tensors_of(name, device, dtype=F32)
    count = 2 if name.startswith("add") else 1  # input and residual
    for dtype in (BF16, F32):
        *modulations, weight, bias = (t.half() for t in wide[count:])
        given = [wide[0].to(dtype), *wide[1:count], *modulations, weight, bias.float()]
        with torch.autocast(device, BF16):
            y = y_of(given)
            assert y_of(given, BF16).dtype == BF16
        assert y.dtype == (BF16 if device == "cpu" and dtype == BF16 else F32)
        widened = [*given[:count], *(t.float() for t in given[count:])]
        assert torch.equal(y, y_of(widened, y.dtype))


SAMPLES = """
import sys
import torch
import fused_layernorm
from torch.func import jvp

torch.manual_seed(0)
ops = torch.ops.fused_layernorm
F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
found = []
for stream, branch, modulation in [(F64, F64, F64), (F32, BF16, F32), (F32, BF16, BF16)]:
    x = torch.randn(2, 3, 8).to(branch)
    residual = torch.randn(2, 3, 8).to(stream)
    sizes = [(2, 1, 8), (8,), (3, 1), (8,), (8,)]  # gate, shift, scale, weight, bias
    parameters = [torch.randn(size).to(modulation) for size in sizes]
    leaves = [t.requires_grad_() for t in (x, residual, *parameters)]

    def function(x, residual, gate, *parameters):
        y, total = ops.add_ada_layer_norm(x, residual, gate, 1, *parameters, 1e-5)
        return y, total, ops.ada_layer_norm(x * 2, 1, *parameters, 1e-5)

    outputs = function(*leaves)
    loss = sum(out.float().pow(3).sum() for out in outputs)
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    second = torch.autograd.grad(sum(g.float().pow(2).sum() for g in first), leaves)
    tangents = jvp(function, tuple(leaves), tuple(torch.ones_like(t) for t in leaves))[1]
    found.append([t.detach() for t in (*outputs, *first, *second, *tangents)])
torch.save(found, sys.argv[1])
"""


@needs_library
def test_the_two_give_the_same(tmp_path):
    """Both autograds agree in the outputs, first and second derivatives and forward mode of the
    modulated norms."""
    results = []
    for disabled in ("", "1"):
        path = tmp_path / f"results{disabled}.pt"
        environment = {**os.environ, autograd_library.DISABLE: disabled}
        command = [sys.executable, "-c", SAMPLES, str(path)]
        subprocess.run(command, env=environment, check=True)
        results.append(torch.load(path))
    for ours, theirs in zip(*results, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            # Second derivatives in bfloat16 are computed from gradients rounded to bfloat16.
            tolerance = {F64: 1e-9, F32: 2e-2, BF16: 5e-2}[one.dtype]
            distance = (one - other).double().norm() / other.double().norm()
            assert distance < tolerance

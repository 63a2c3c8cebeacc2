# SPDX-License-Identifier: Apache-2.0
"""Autograd in C++ or in Python: which of the two is active, and the operators called by name.

Every other test runs on the active one. CI runs these and the derivatives' on both.
"""

import contextlib
import gc
import os
import re
import shutil
import sys
import unittest.mock
import weakref
from pathlib import Path
from typing import Any

import forms
import pytest
import torch
from processes import run
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.graph import saved_tensors_hooks

import fused_layernorm
from fused_layernorm import FusedAddLayerNorm, FusedLayerNorm
from fused_layernorm.ops import autograd_library
from fused_layernorm.ops.autograd_library import REMEDY, choose, path_of, released_minor

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
PACKAGE = Path(fused_layernorm.__file__).parent
ops = torch.ops.fused_layernorm


NO_LIBRARY = "this build has no library for torch"
# (torch's version, whether the library is disabled, the library's, why)
CHOICES = [
    *((f"{minor}{more}", False, minor, f"compiled for torch {minor}")
      for minor, more in [("2.11", ".0"), ("2.11", ".3+cu130"), ("2.9", ".1+cpu"), ("2.10", ""),
                          ("2.10", ".0.post1")]),
    *((version, False, None, f"torch {version} is no release, so its C++ interface is not known")
      for version in ("2.11.0a0+git1234567", "2.11.0a0+5228986c39.nv25.09", "2.11.0rc1",
                      "2.14.0.dev20261101+cu130", "unknown")),
    *((f"{minor}.0", False, None, f"{NO_LIBRARY} {minor} (2.9 2.10 2.11); {REMEDY}")
      for minor in ("2.12", "3.10")),
    ("2.11.0", True, None, "FUSED_LAYERNORM_PYTHON_AUTOGRAD=1"),
]  # fmt: skip


@pytest.mark.parametrize(("version", "disabled", "found", "reason"), CHOICES)
def test_the_library_of_the_running_torch_is_chosen(version, disabled, found, reason, tmp_path):
    """Of a folder with empty files as the libraries for torch 2.9, 2.10 and 2.11."""
    environment = {"FUSED_LAYERNORM_PYTHON_AUTOGRAD": "1"} if disabled else {}
    without = choose("2.11.0", tmp_path, {})
    assert without == (None, f"{NO_LIBRARY} 2.11 (nor any); {REMEDY}")
    for minor in ("2.9", "2.10", "2.11"):
        path_of(minor, tmp_path).touch()
    path = path_of(found, tmp_path) if found else None
    assert choose(version, tmp_path, environment) == (path, reason)


def test_a_library_is_active_unless_disabled():
    """An installation without its libraries would pass every other test, only more slowly."""
    expected, _ = choose(torch.__version__)
    assert autograd_library.active == (expected is not None)
    if os.environ.get(autograd_library.DISABLE) != "1" and sys.platform == "linux":
        assert autograd_library.active == (released_minor(torch.__version__) is not None)


@pytest.mark.parametrize(
    "name",
    ["layer_norm", "add_layer_norm_forward", "layer_norm_backward", "ada_layer_norm",
     "add_ada_layer_norm_forward", "ada_layer_norm_backward", "add_ada_layer_norm_backward",
     "gate_backward"],
)  # fmt: skip
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


# A line of each scenario: a folder with a package, what torch calls its version, and whether the
# library is disabled. One process imports torch for all.
TRAIN = """
import os, sys, traceback, warnings
import torch
from torch.fx.experimental.proxy_tensor import make_fx
def train():
    warnings.simplefilter("error")
    import fused_layernorm
    from fused_layernorm.ops import autograd_library
    x = torch.randn(3, 5, requires_grad=True)
    assert "table" not in make_fx(fused_layernorm.FusedLayerNorm(5))(x).code
    weight = torch.ones(5, requires_grad=True)
    y, total = torch.ops.fused_layernorm.add_layer_norm(x, x, 1, weight, None, 1e-5)
    (y * total).sum().backward()
    assert x.grad.abs().sum() > 0
    print(y.grad_fn.name(), autograd_library.active, autograd_library.reason, sep="|")
for folder, version, disabled in SCENARIOS:
    sys.stdout.flush()
    if os.fork() == 0:
        os.environ["FUSED_LAYERNORM_PYTHON_AUTOGRAD"] = disabled
        sys.path.insert(0, folder)
        torch.__version__ = version or torch.__version__
        try:
            train()
        except Exception:
            print(traceback.format_exc().splitlines()[-1])
        sys.stdout.flush()
        os._exit(0)
    os.wait()
"""


@pytest.mark.skipif(
    choose(torch.__version__, environment={})[0] is None,
    reason="this installation has no library for the running torch",
)
def test_which_library_a_fresh_process_loads(tmp_path):
    """The libraries of `poisoned` are invalid files: loading one would end the process."""
    for name in ("whole", "poisoned"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(PACKAGE, tmp_path / name / PACKAGE.name, ignore=ignored)
    for library in (tmp_path / "poisoned" / PACKAGE.name / "autograd").glob("*.so"):
        library.write_bytes(b"\x7fELF and nothing more")
    whole, poisoned = str(tmp_path / "whole"), str(tmp_path / "poisoned")
    scenarios = [(whole, "", ""), (whole, "", "1"), (poisoned, "", ""), (poisoned, "2.99.0", "")]
    loaded, disabled, broken, other = run(TRAIN, SCENARIOS=scenarios)[0].splitlines()
    assert loaded.startswith("FusedAddLayerNormBackward|True|compiled for torch")
    assert disabled.endswith(f"|False|{autograd_library.DISABLE}=1")
    assert broken.startswith("UserWarning: fused_layernorm takes Python's autograd: libfused")
    assert re.search(r"\|False\|.*2\.99", other)
    assert "FusedAddLayerNormBackward" not in disabled + other


# --- the operators, called by name ----------------------------------------------------------------


def only(i, count):
    """A mask that asks for one of so many gradients."""
    return tuple(i == j for j in range(count))


@pytest.mark.parametrize("half_parameters", [False, True])
@pytest.mark.parametrize("suffix", ["", "_forward"])
@pytest.mark.parametrize("kind", forms.NAMES)
def test_gradients_of_mixed_dtypes(device, kind, suffix, half_parameters):
    """Each has the dtype and the shape of its argument. Those of the second order are computed from
    gradients rounded to half precision."""
    names, operator = forms.NAMES[kind], forms.operator(kind, suffix)
    tensors = [
        t.to(BF16 if name == "x" or (half_parameters and name != "residual") else F32)
        for name, t in zip(names, forms.tensors(kind, device), strict=True)
    ]
    dy, wide = (
        torch.randn(2, 3, 4, device=device).to(BF16),
        forms.leaves([*map(torch.Tensor.double, tensors)]),
    )
    y = forms.stock(kind)(*wide)[0]
    expected = torch.autograd.grad(y, wide, dy.double(), create_graph=True)
    leaves = forms.leaves(tensors)
    first = torch.autograd.grad(operator(*leaves)[0], leaves, dy, create_graph=True)
    torch.testing.assert_close([g.double() for g in first], [*expected], rtol=2e-2, atol=2e-2)
    for leaf, one, wanted in zip(
        leaves, squares(first, leaves), squares(expected, wide), strict=True
    ):
        assert (one.dtype, one.shape) == (leaf.dtype, leaf.shape)
        assert (one.double() - wanted).norm() <= 5e-2 * wanted.norm()


def squares(gradients, leaves):
    """The gradients of the sum of the squares of gradients."""
    total = torch.stack([g.double().square().sum() for g in gradients]).sum()
    how: Any = {"retain_graph": True, "materialize_grads": True}
    return torch.autograd.grad(total, leaves, **how)


def test_only_what_is_needed_is_computed(device):
    """Gradients of frozen parameters, or not asked of torch.autograd.grad, are not computed."""
    x, weight, bias = forms.leaves(forms.tensors("plain", device, dtype=F32))
    gated = forms.leaves(forms.tensors("gated", device))
    y = forms.operator("plain")(x, weight, bias)[0].sum()
    z = forms.operator("plain")(x, weight.detach(), bias.detach())[0].sum()
    w = forms.operator("gated")(*gated)[0].sum()
    flags = {"layer_norm_backward": 3, "ada_layer_norm_backward": 5}
    found = []
    for loss, leaves in [(y, weight), (y, (x, bias)), (z, x), *((w, leaf) for leaf in gated)]:
        with forms.Calls() as calls:
            torch.autograd.grad(loss, leaves, retain_graph=True)
        found += [(name, args[-flags.get(name, 7) :]) for name, args in calls.seen]
    plain = [only(1, 3), (True, False, True), (True, False, False)]
    if autograd_library.active:
        ada = [("ada_layer_norm_backward", only(i, 5)) for i in range(5)]
        past = [("add_ada_layer_norm_backward", only(i, 7)) for i in (1, 2)]
        past = [past[0], ada[0], past[1], *ada[1:]]
    else:  # Python is not told what torch.autograd.grad was asked for
        plain[:2] = [(True,) * 3] * 2
        past = [("add_ada_layer_norm_backward", (True,) * 7)] * len(gated)
    assert found == [*(("layer_norm_backward", needs) for needs in plain), *past]


@pytest.mark.parametrize("absent", ["", "shift scale", "shift scale weight bias"])
def test_one_operator_unless_a_graph_is_wanted(device, absent):
    """Backward with a gate is one operator, or with create_graph two that have derivatives."""
    tensors: list[Any] = [
        None if name in absent.split() else t.requires_grad_()
        for name, t in zip(forms.NAMES["gated"], forms.tensors("gated", device), strict=True)
    ]
    leaves = [t for t in tensors if t is not None]
    y, _ = forms.operator("gated")(*tensors)
    dy = torch.randn_like(y)
    with forms.Calls() as one:
        first = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    with forms.Calls() as two:
        again = torch.autograd.grad(y, leaves, dy, create_graph=True)
    assert one.names == ["add_ada_layer_norm_backward"]
    assert two.names == ["ada_layer_norm_backward", "gate_backward"]
    for gradient, other in zip(first, again, strict=True):
        assert not gradient.requires_grad
        assert other.requires_grad
        if device == "cpu":
            assert torch.equal(gradient, other)
        torch.testing.assert_close(gradient, other)


def test_derivatives_beside_a_frozen_gate(device, monkeypatch, request):
    """With a frozen gate the branch x is not saved. Its placeholder in backward, which holds NaN
    here, is never read."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    x, residual, gate, shift, *others = forms.tensors("gated", device)

    def call(x, residual, shift):
        return forms.operator("gated")(x, residual, gate, shift, *others)

    leaves = forms.leaves((x, residual, shift))
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    torch.use_deterministic_algorithms(True)
    assert gradcheck(call, leaves)
    assert gradgradcheck(call, leaves, check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("kind", forms.NAMES)
def test_in_place_changes_are_noticed(device, kind):
    """Of every argument but residual, in whose place residual_out is saved."""
    for changed, name in enumerate(forms.NAMES[kind]):
        leaves = forms.leaves(forms.tensors(kind, device))
        tensors = [t * 1 for t in leaves]
        options = {"activation": "silu"} if kind in ("plain", "residual") else {}
        y, *total = forms.operator(kind, **options)(*tensors)
        tensors[changed].add_(1)
        if name == "residual" or (name == "x" and kind == "residual"):
            torch.autograd.grad(y.sum(), leaves, retain_graph=True)
            total[0].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_no_cycle_keeps_the_node_alive(device):
    """The node saves its own output residual_out, which must not form a reference cycle."""
    y, total = forms.operator("residual")(*forms.leaves(forms.tensors("residual", device)))
    hook = unittest.mock.Mock()
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
    return torch.nn.ModuleDict({
        "norm": FusedLayerNorm(8, activation="gelu"), "add": FusedAddLayerNorm(8),
        "linear": torch.nn.Linear(8, 8), "modulation": torch.nn.Linear(8, 32),
    }).to(device)  # fmt: skip


def loss_of(model, x):
    y, total = model["add"](model["linear"](model["norm"](x)), x)
    gate, shift, scale, final_scale = model["modulation"](x[:1]).chunk(4, dim=-1)
    y, total = ops.add_ada_layer_norm(y, total, gate, 1, shift, scale, None, None, 1e-6)
    y = ops.ada_layer_norm(y * total, 1, None, final_scale, None, None, 1e-6)
    return (y * total).pow(2).mean()


@pytest.mark.parametrize("compiled_forward", [False, True])
def test_compiled_autograd(device, compiled_forward):
    """With one batch size twice, so that the second backward comes from the cache, then another,
    and at last with hooks on what is saved."""
    model, stock = modules(device), modules(device)
    forward = torch.compile(loss_of, backend="aot_eager") if compiled_forward else loss_of
    of_eager = [(6, False), (4, True)] * (not compiled_forward)
    for batch, hooks in [(4, False), (4, False), *of_eager]:
        ours = torch.randn(batch, 8, device=device, requires_grad=True)
        theirs = ours.detach().clone().requires_grad_()
        model.zero_grad()
        stock.zero_grad()
        hook = saved_tensors_hooks(lambda t: t * 1, lambda t: t)
        with hook if hooks else contextlib.nullcontext():
            loss = forward(model, ours)
        compiler = torch.compile(backend="aot_eager", dynamic=batch == 6)
        with torch._dynamo.compiled_autograd._enable(compiler):
            loss.backward()
        loss_of(stock, theirs).backward()
        found, expected = (
            [x.grad, *(p.grad for p in m.parameters())] for x, m in ((ours, model), (theirs, stock))
        )
        torch.testing.assert_close(found, expected)

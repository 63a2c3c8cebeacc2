# SPDX-License-Identifier: Apache-2.0
"""override_aten(): the calls that it takes, those that it leaves to PyTorch, and its exact undoing.

The tests run on the CPU's dispatch key, where the composite operators stand for the kernels, and on
CUDA where there is a GPU.
"""

import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forms import Calls, Names
from numerics import covering, ids
from processes import run
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import fused_layernorm
from fused_layernorm.calls import ASKS, ASKS_MODULATED
from fused_layernorm.ops import autograd_library
from fused_layernorm.override import _in_force, _override

pytestmark = pytest.mark.skipif(not autograd_library.active, reason="autograd is in Python")

_calls = torch.ops.fused_layernorm._override_calls
_is_built = torch.ops.fused_layernorm._build_info() != "cpu only"
HAS_KERNELS = _is_built and torch.backends.cuda.is_built()
needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="needs CUDA kernels")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
OPERATORS = [f"aten::{name}_norm" for name in ("layer", "rms", "group")]


@pytest.fixture
def override(device):
    """override_aten, for the device's dispatch key."""
    if device == "cuda" and not HAS_KERNELS:
        pytest.skip("needs CUDA kernels")
    return fused_layernorm.override_aten if device == "cuda" else lambda: _override("CPU")


@pytest.fixture
def calls(device):
    """A function that counts the calls that the override has taken since its own last call."""
    last = _calls(device.upper())

    def since():
        nonlocal last
        now = _calls(device.upper())
        last, count = now, now - last
        return count

    return since


@pytest.fixture(autouse=True, scope="module")
def kernels_are_registered():
    """The first override of a process registers them, and they stay."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a build without CUDA kernels warns
        with _override("CPU"), fused_layernorm.override_aten():
            pass


@pytest.fixture(autouse=True)
def leaves_no_trace():
    """Every test must leave PyTorch's operators as it found them."""
    before = [torch._C._dispatch_dump(name) for name in OPERATORS]
    yield
    assert [torch._C._dispatch_dump(name) for name in OPERATORS] == before
    assert not any(_in_force.values())


def inputs(device, shape=(4, 6, 32), normalized_ndim=1, dtype=torch.float32):
    sizes = (shape, shape[-normalized_ndim:], shape[-normalized_ndim:])
    return [torch.randn(size, device=device).to(dtype).requires_grad_() for size in sizes]


def layer_norm(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def close(actual, expected, dtype=torch.float32):
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-5}.get(dtype, 2e-2)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def node(y):
    return y.grad_fn.name()


ten = torch.ops.aten
NORMS: dict[str, Any] = {
    "layer": (layer_norm, lambda: nn.LayerNorm(32),
              lambda x, w, b: torch.native_layer_norm(x, (32,), w, b, 1e-5)[0]),
    "rms": (lambda x, weight, bias: F.rms_norm(x, (32,), weight), lambda: nn.RMSNorm(32),
            lambda x, weight, bias: torch._fused_rms_norm(x, (32,), weight, 1e-5)[0]),
    "group": (lambda x, *rest: F.group_norm(x.mT, 4, *rest), lambda: nn.GroupNorm(2, 6),
              lambda x, w, b: ten.native_group_norm(x.mT.contiguous(), w, b, 4, 32, 6, 4, 0)[0]),
}  # fmt: skip


@pytest.mark.parametrize("name", NORMS)
def test_covers(device, override, calls, name):
    norm, make, native = NORMS[name]
    given = x, weight, bias = inputs(device)
    module = make().to(device)
    expected = norm(*given)
    of_samples = torch.vmap(norm, (0, None, None)) if name != "group" else norm
    with override():
        y = norm(*given)
        assert calls() == 1
        assert node(y) in {"FusedLayerNormBackward", "FusedGroupNormBackward"}
        y.sum().backward()
        assert calls() == 0, "backward is that of our node"
        with torch.inference_mode():
            assert norm(*given).is_inference()
            assert calls() == 1
            close(norm(x.clone(), weight, bias), expected)
            assert calls() == 1
        with torch.no_grad():
            assert not norm(*given).requires_grad
        assert calls() == 1
        module(x.detach())
        assert calls() == 1
        native(*given).sum().backward()
        assert calls() == 0, "what is called by name is PyTorch's"
        close(of_samples(*given), expected)
        assert (calls() == 0) == (name != "group"), "a transform sees PyTorch's operators"
    norm(*given).sum().backward()
    with torch.inference_mode():
        norm(*given)
    assert calls() == 0


def rms(ndim, eps=None):
    return lambda x, weight, bias, eps=eps: F.rms_norm(x, x.shape[-ndim:], weight, eps)


# By what it is: a function, the shapes of x and of parameters, x's order of memory.
X, IMAGE = (4, 6, 32), (2, 6, 5, 3)
FORMS: dict[str, Any] = {
    **{f"layer norm of {n}": (lambda x, w, b, n=n: F.layer_norm(x, x.shape[-n:], w, b), X, X[-n:])
       for n in (1, 2, 3)},
    **{f"RMS norm of {n}": (rms(n), X, X[-n:]) for n in (1, 2, 3)},
    "layer norm of nothing": (layer_norm, (0, 8), (8,)),
    "layer norm of no columns": (layer_norm, (3, 0), (0,)),
    # F.rms_norm takes a float32 weight beside half-precision input; its result has input's dtype.
    "RMS norm of another weight": (lambda x, weight, bias, eps=None: F.rms_norm(
        x, (32,), weight if weight is None else
        weight.to(torch.promote_types(x.dtype, torch.float32)), eps), X, X[-1:]),
    "RMS norm with eps": (rms(1, 1e-2), X, X[-1:]),
    # Beside them the default epsilons of float32 and of the half-precision types differ much.
    "RMS norm of tiny squares": (rms(1), X, X[-1:], lambda x: 1e-4 * x),
    **{f"group norm {name}": (lambda x, w, b: F.group_norm(x, 2, w, b), IMAGE, (6,), order)
       for name, order in (
           ("", lambda x: x),
           ("channels_last", lambda x: x.to(memory_format=torch.channels_last)),
           ("turned", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)))},
}  # fmt: skip


@pytest.mark.parametrize(
    ("form", "dtype", "affine"), covering([*FORMS], DTYPES, ("wb", "w", "b", "")), ids=ids
)
def test_results_and_gradients_are_pytorchs(device, override, calls, form, dtype, affine):
    norm, shape, size, *order = FORMS[form]
    x, dy = ((order or [torch.clone])[0](torch.randn(2, *shape, device=device)[i]) for i in (0, 1))
    if "RMS" in form or ("group" in form and affine == "b"):  # PyTorch's backward wants a weight
        affine = affine.replace("b", "w")[:1]
    given = [x, *(torch.randn(size, device=device) if p in affine else None for p in "wb")]

    def run(dtype, **how):
        tensors = [None if t is None else t.detach().to(dtype).requires_grad_() for t in given]
        y = norm(*tensors, **how)
        return (y, *torch.autograd.grad(y, [t for t in tensors if t is not None], dy.to(dtype)))

    # PyTorch computes in float64 here, because its CPU kernel sums the parameters' gradients of
    # bfloat16 tensors in bfloat16.
    dy = dy.to(dtype)
    given = [None if t is None else t.to(dtype) for t in given]
    own_eps = torch.finfo(dtype if dtype == torch.float64 else torch.float32).eps
    expected = run(torch.float64, **({"eps": own_eps} if form.startswith("RMS norm of") else {}))
    stock = run(dtype)
    with override():
        actual = run(dtype)
    assert calls() == 1 or " of no" in form
    for a, e, like in zip(actual, expected, stock, strict=True):
        assert (a.dtype, a.stride()) == (dtype, like.stride())
        close(a, e.to(dtype), dtype)


def test_derivatives_of_any_order_and_mode_are_pytorchs(device, override):
    given = tuple(inputs(device, shape=(3, 5), dtype=torch.float64))
    expected_jvp = torch.func.jvp(layer_norm, given, given)
    with override():
        assert torch.autograd.gradcheck(layer_norm, given)
        assert torch.autograd.gradgradcheck(layer_norm, given)
        close(torch.func.jvp(layer_norm, given, given), expected_jvp, torch.float64)


def test_autocast_gives_float32_as_ever(device, override):
    x, *affine = inputs(device)
    half = x.detach().to(torch.bfloat16)
    with torch.autocast(device, dtype=torch.bfloat16):
        expected = layer_norm(half, *affine)
        with override():
            actual = layer_norm(half, *affine)
            with torch.inference_mode():
                close(layer_norm(half, *affine), expected, half.dtype)
    assert expected.dtype == (torch.float32 if device == "cuda" else half.dtype)
    close(actual, expected, expected.dtype)


BAD = {
    "shape": lambda x, w: F.layer_norm(x, (31,)),
    "weight's dtype": lambda x, w: F.layer_norm(x, (32,), w.double()),
    "complex": lambda x, w: F.layer_norm(x.to(torch.complex64), (32,)),
    "float8": lambda x, w: F.layer_norm(x.to(torch.float8_e4m3fn), (32,)),
    "too few dimensions": lambda x, w: F.layer_norm(x[0, 0], (6, 32)),
    "rms: weight's shape": lambda x, w: F.rms_norm(x, (32,), w[1:]),
    "rms: integers": lambda x, w: F.rms_norm(x.long(), (32,)),
    "group: none": lambda x, w: F.group_norm(x, 0),
}


@pytest.mark.parametrize("bad", BAD)
def test_errors_are_pytorchs(device, override, bad):
    x, weight, _ = (t.detach() for t in inputs(device))
    with pytest.raises((RuntimeError, ValueError, ZeroDivisionError)) as expected:
        BAD[bad](x, weight)
    with override(), pytest.raises(type(expected.value)) as actual:
        BAD[bad](x, weight)
    assert type(actual.value) is type(expected.value)
    assert str(actual.value) == str(expected.value)


def test_modes_and_transforms_see_pytorchs_operators(device, override):
    """A mode sees what it sees without the override, and so do FakeTensor, make_fx and export."""
    given = x, *affine = inputs(device)

    def seen():
        graph = make_fx(layer_norm, tracing_mode="fake")(*given)
        module = nn.Sequential(nn.LayerNorm(32), nn.RMSNorm(32)).to(device)
        exported = torch.export.export(module, (x.detach(),))
        with Names() as mode:
            layer_norm(*given)
        return graph.code, str(exported.graph_module.code), mode.names

    gradient = torch.func.grad(lambda x: layer_norm(x, *affine).pow(3).sum())
    expected = seen()
    with override():
        assert seen() == expected
        y = gradient(x.detach())
    close(y, gradient(x.detach()))


@pytest.mark.filterwarnings("ignore")  # a build without CUDA kernels warns
def test_what_the_kernels_do_not_take_is_pytorchs():
    """Tensors on the CPU, or a float32 weight beside a bfloat16 input, which PyTorch's kernel on
    the CPU takes by its own rules."""
    x, *affine = (t.detach() for t in inputs("cpu"))
    expected, before = layer_norm(x.bfloat16(), *affine), (_calls("CUDA"), _calls("CPU"))
    with fused_layernorm.override_aten():
        layer_norm(x, *affine)
    with _override("CPU"):
        assert torch.equal(layer_norm(x.bfloat16(), *affine), expected)
    assert (_calls("CUDA"), _calls("CPU")) == before


def test_nests_and_ends_in_any_order(device, override, calls):
    x = inputs(device)[0].detach()

    def covered():
        F.layer_norm(x, (32,))
        return calls() > 0

    outer = override()
    with override():
        inner = override()
        assert covered()
        outer.undo()
        assert covered()
        outer.undo()
        assert covered()
    assert covered()
    inner.undo()
    assert not covered()
    with pytest.raises(KeyError), override():
        raise KeyError
    assert not covered()


def test_undo_within_a_call(device, override, calls):
    """A call that has begun ends as it began, and so does backward of our own node."""
    given = inputs(device)

    def gradient(loss):
        return torch.autograd.grad(loss, given[0])[0]

    expected, handle = gradient(layer_norm(*given).square().sum()), override()

    def pack(tensor):
        handle.undo()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = layer_norm(*given).square().sum()
    assert "not in force" in repr(handle)
    assert calls() == 1, "our node saves while the call is taken"
    torch.testing.assert_close(gradient(loss), expected, rtol=1e-4, atol=1e-4)
    for forward, backward in ((override, nullcontext), (nullcontext, override)):
        with forward():
            loss = layer_norm(*given).square().sum()
        with backward():
            torch.testing.assert_close(gradient(loss), expected, rtol=1e-4, atol=1e-4)
    assert calls() == 1


def test_survives_switching_under_running_threads(device, override, calls):
    x, weight, bias = inputs(device)
    expected, stop = layer_norm(x, weight, bias), threading.Event()
    done, covered = [], []

    def train():
        a, w = x.detach().requires_grad_(), weight.detach().requires_grad_()
        while not stop.is_set():
            y = F.layer_norm(a, (32,), w, bias)
            torch.autograd.grad(y.sum(), (a, w))
            close(y, expected)
            done.append(1)

    def switch():
        while not stop.is_set():
            with override():
                F.layer_norm(x.detach(), (32,))
                covered.append(1)

    with ThreadPoolExecutor(5) as pool:
        running = [pool.submit(work) for work in (train, train, train, switch, switch)]
        time.sleep(1)
        stop.set()
        for future in running:
            future.result()
    assert min(len(covered), len(done)) > 10
    assert calls() >= len(covered)
    F.layer_norm(x, (32,))
    assert calls() == 0


@pytest.mark.parametrize("lacking", ["kernels", "library"])
def test_says_where_nothing_changes(monkeypatch, lacking):
    lacks = "fused_layernorm" if lacking == "kernels" else None
    monkeypatch.setattr("fused_layernorm.override._lacking_cuda", lambda: lacks)
    monkeypatch.setattr(autograd_library, "active", lacking != "library")
    reason = "this build of fused_layernorm" if lacks else "it needs autograd in C.., which is in P"
    with pytest.warns(UserWarning, match=f"changes nothing: {reason}"):
        handle = fused_layernorm.override_aten()
    assert "not in force" in repr(handle)
    with handle:
        pass
    handle.undo()


@pytest.mark.parametrize("norm", [torch.layer_norm, torch.rms_norm])
def test_serves_who_asks_behind_the_shape(device, override, norm):
    with override():  # on the CPU it registers the kernels
        pass
    x = torch.randn(3, 8, device=device, requires_grad=True)
    y = norm(x, (8, ASKS))
    assert "Fused" in node(y)
    close(y, norm(x, (8,)))
    with Calls() as seen:
        norm(x, (8, ASKS))
    assert "layer_norm" in str(seen.names), "modes see our operator"
    with pytest.raises((ValueError, RuntimeError)):
        norm(x, (4, ASKS))
    if device == "cuda":
        with torch.inference_mode():
            close(norm(x, (8, ASKS)), norm(x, (8,)))


def test_serves_who_asks_for_a_modulation(device, override):
    """layer_norm takes scale and shift in the place of weight and bias."""
    with override():  # on the CPU it registers the kernels
        pass
    x, scale, shift = given = [
        torch.randn(shape, device=device, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 3, 8), (2, 1, 8), (8,))
    ]

    def asked(shape=8, scale=scale, shift=shift):
        return torch.layer_norm(x, (shape, ASKS_MODULATED), scale, shift)

    y, expected = asked(), F.layer_norm(x, (8,)) * (1 + scale) + shift
    assert "FusedAda" in node(y)
    dy = torch.randn_like(y)
    for one, other in zip(*(torch.autograd.grad(z, given, dy) for z in (y, expected)), strict=True):
        close(one, other, torch.float64)
    for one in (torch.no_grad, torch.inference_mode)[: 1 + (device == "cuda")]:
        with one():
            close(asked(), expected, torch.float64)
            close(asked(scale=None), F.layer_norm(x, (8,)) + shift, torch.float64)
    with Calls() as seen:
        asked(shift=None)
    assert "ada_layer_norm" in str(seen.names), "modes see our operator"
    for other in ({"shape": 4}, {"scale": scale.float()}, {"shift": torch.ones(3, 2, 3, 8).to(x)}):
        assert asked(**other) is None
    with pytest.raises(RuntimeError):
        torch.rms_norm(x, (8, ASKS_MODULATED), shift)


def test_prints_nothing():
    # PyTorch warns on stderr of kernels that replace others. These must cause no such warning.
    code = """
        import torch, fused_layernorm.override as o
        for key in ["CPU"] + ["CUDA"] * torch.cuda.is_available():
            with o._override(key):
                torch.nn.functional.layer_norm(torch.ones(2, 4), (4,))
        assert torch.ops.fused_layernorm._override_calls("CPU") > 0
    """
    assert run(code, options=("-W", "error")) == ("", "")


@pytest.mark.gpu
@needs_kernels
@pytest.mark.parametrize("norm", [F.layer_norm, F.rms_norm])
def test_cuda_runs_these_kernels_and_no_others(norm):
    x, *parameters = inputs("cuda", shape=(64, 768), dtype=torch.bfloat16)
    with (
        fused_layernorm.override_aten(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile,
    ):
        norm(x, (768,), *parameters[: 1 + (norm is F.layer_norm)]).backward(torch.ones_like(x))
        torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages()]
    norms = [n for n in names if "norm" in n.lower() and not n.startswith(("aten::", "cuda"))]
    assert norms
    assert all("fused_layernorm" in n for n in norms), norms

# SPDX-License-Identifier: Apache-2.0
"""override_aten(): the calls that it takes, those that it leaves to PyTorch, and its exact undoing.

The tests run on the CPU's dispatch key, where the composite operators stand for the kernels, and on
CUDA where there is a GPU.
"""

import subprocess
import sys
import threading
import time
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fused_layernorm
from fused_layernorm.override import _override

HAS_KERNELS = (
    torch.ops.fused_layernorm._build_info() != "cpu only" and torch.backends.cuda.is_built()
)
OPERATORS = (
    "aten::native_layer_norm",
    "aten::native_layer_norm_backward",
    "aten::_fused_rms_norm",
    "aten::_fused_rms_norm_backward",
)


needs_kernels = pytest.mark.skipif(
    not (torch.cuda.is_available() and HAS_KERNELS), reason="needs CUDA kernels"
)


@pytest.fixture(
    params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_kernels])], ids=str
)
def device(request):
    return request.param


@pytest.fixture
def override(device):
    """override_aten, for the device's dispatch key."""
    return fused_layernorm.override_aten if device == "cuda" else lambda: _override("CPU")


@pytest.fixture
def calls(device):
    """A function that counts the calls through the override since its own last call."""
    last = torch.ops.fused_layernorm._override_calls(device.upper())

    def since():
        nonlocal last
        now = torch.ops.fused_layernorm._override_calls(device.upper())
        last, count = now, now - last
        return count

    return since


@pytest.fixture(autouse=True)
def leaves_no_trace():
    """Every test must leave PyTorch's operators as it found them."""
    before = [torch._C._dispatch_dump(name) for name in OPERATORS]
    yield
    assert [torch._C._dispatch_dump(name) for name in OPERATORS] == before


def inputs(device, shape=(4, 6, 32), normalized_ndim=1, dtype=torch.float32):
    torch.manual_seed(0)
    x = torch.randn(shape, device=device).to(dtype).requires_grad_()
    weight = torch.randn(shape[-normalized_ndim:], device=device).to(dtype).requires_grad_()
    bias = torch.randn(shape[-normalized_ndim:], device=device).to(dtype).requires_grad_()
    return x, weight, bias


def close(actual, expected, dtype=torch.float32):
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-5}.get(dtype, 2e-2)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def layer_norm(x, shape, weight=None, bias=None, eps=1e-5):
    return F.layer_norm(x, shape, weight, bias, 1e-5 if eps is None else eps)


def rms_norm(x, shape, weight=None, bias=None, eps=None):
    """F.rms_norm by the operator that it calls on CUDA; on the CPU it computes by parts."""
    return torch._fused_rms_norm(x, shape, weight, eps)[0]


EACH = pytest.mark.parametrize("norm", [layer_norm, rms_norm])


def test_covers_the_norms_with_pytorchs_autograd(device, override, calls):
    x, weight, bias = inputs(device)
    functions = [
        (lambda: layer_norm(x, (32,), weight, bias), "NativeLayerNormBackward0"),
        (lambda: nn.LayerNorm(32, device=device)(x), "NativeLayerNormBackward0"),
        (lambda: torch.native_layer_norm(x, (32,), weight, bias, 1e-5)[0], None),
        (lambda: torch.layer_norm(x, (32,)), "NativeLayerNormBackward0"),
        (lambda: rms_norm(x, (32,), weight), "FusedRmsNormBackward0"),
    ]
    if device == "cuda":
        functions += [(lambda: F.rms_norm(x, (32,), weight), None),
                      (lambda: nn.RMSNorm(32, device=device)(x), None)]  # fmt: skip
    for function, node in functions:
        with override():
            y = function()
            assert calls() > 0
            assert node in (None, type(y.grad_fn).__name__)
            y.sum().backward()
            assert calls() > 0
        function().sum().backward()
        assert calls() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("normalized_ndim", [1, 2, 3])
@pytest.mark.parametrize("affine", ["both", "weight", "bias", "none"])
@EACH
def test_results_and_gradients_are_pytorchs(
    device, override, calls, norm, dtype, normalized_ndim, affine
):
    x, weight, bias = inputs(device, normalized_ndim=normalized_ndim, dtype=dtype)
    weight = weight if affine in ("both", "weight") else None
    bias = bias if affine in ("both", "bias") and norm is layer_norm else None
    shape = x.shape[-normalized_ndim:]
    dy = torch.randn_like(x)

    def run(norm, eps, x, weight, bias, dy):
        leaves = [t for t in (x, weight, bias) if t is not None]
        y = norm(x, shape, weight, bias, eps)
        return (y, *torch.autograd.grad(y, leaves, dy))

    def stock(x, shape, weight, bias, eps):
        if norm is rms_norm:
            return F.rms_norm(x, shape, weight, eps)
        return layer_norm(x, shape, weight, bias, eps)

    # The epsilon of F.rms_norm is float32's for half precision. PyTorch computes in float64 here,
    # because its CPU kernel sums the parameters' gradients of bfloat16 tensors in bfloat16.
    own = torch.finfo(dtype if dtype == torch.float64 else torch.float32).eps
    wide: Any = [None if t is None else t.double() for t in (x, weight, bias, dy)]
    for eps in (None, 1e-2):
        expected = run(stock, own if eps is None and norm is rms_norm else eps, *wide)
        with override():
            actual = run(norm, eps, x, weight, bias, dy)
            assert calls() >= 2
        for a, e in zip(actual, expected, strict=True):
            assert a.dtype == dtype
            close(a, e.to(dtype), dtype)
    # Beside tiny squares, the epsilons of float32 and of the half-precision types differ much.
    tiny = (1e-4 * x.detach()).to(dtype)
    expected = norm(tiny, shape)
    with override():
        close(norm(tiny, shape), expected, dtype)


@pytest.mark.parametrize(
    ("norm", "only"), [*((layer_norm, i) for i in range(3)), (rms_norm, 0), (rms_norm, 1)]
)
def test_gradients_that_are_not_asked_for_are_not_there(device, override, calls, norm, only):
    x, weight, bias = (t.detach() for t in inputs(device))
    leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
    if norm is layer_norm:
        y, mean, rstd = torch.native_layer_norm(x, (32,), weight, bias, 1e-5)
        operator = torch.ops.aten.native_layer_norm_backward
        mask = [i == only for i in range(3)]
        args: tuple[Any, ...] = (torch.ones_like(y), x, (32,), mean, rstd, weight, bias, mask)
        loss = F.layer_norm(leaves[0], (32,), *leaves[1:]).sum()
    else:
        y, rstd = torch._fused_rms_norm(x, (32,), weight, 1e-5)
        operator = torch.ops.aten._fused_rms_norm_backward
        mask = [i == only for i in range(2)]
        args = (torch.ones_like(y), x, (32,), rstd, weight, mask)
        loss = F.rms_norm(leaves[0], (32,), leaves[1], 1e-5).sum()
    with override():
        actual = operator(*args)
    assert calls() > 0
    assert [a is not None for a in actual] == mask
    close(actual[only], torch.autograd.grad(loss, leaves[only])[0].float())


def test_forward_and_backward_may_stand_on_different_sides(device, override):
    x, weight, _ = inputs(device)
    leaves = (x, weight)

    def loss():
        return layer_norm(x, (32,), weight).square().sum()

    expected = torch.autograd.grad(loss(), leaves)
    with override():
        overridden = loss()
    found = [torch.autograd.grad(overridden, leaves)]
    stock = loss()
    with override():
        found.append(torch.autograd.grad(stock, leaves))
    for gradients in found:
        for a, e in zip(gradients, expected, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (4, 6, 32)], ids=str)
def test_results_have_pytorchs_shapes_and_statistics(device, override, calls, shape):
    """Empty ones, too, and a statistic of several dimensions."""
    x = torch.randn(shape, device=device)
    weight = torch.randn(shape[1:], device=device) if x.numel() else None
    for operator in (
        lambda: torch.native_layer_norm(x, shape[1:], weight, None, 1e-5),
        lambda: torch._fused_rms_norm(x, shape[1:], weight, 1e-5),
    ):
        expected = operator()
        with override():
            actual = operator()
        assert calls() > 0
        assert [t.shape for t in actual] == [t.shape for t in expected]
        if shape[1:] != (0,) or len(actual) == 3:
            torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5, equal_nan=True)


def test_higher_derivatives_and_transforms_are_pytorchs(device, override):
    x, weight, bias = inputs(device, shape=(3, 5), dtype=torch.float64)

    def f(x, weight, bias):
        return F.layer_norm(x, (5,), weight, bias)

    expected_vmap = torch.vmap(f, (0, None, None))(x, weight, bias)
    expected_jvp = torch.func.jvp(f, (x, weight, bias), (x, weight, bias))
    with override():
        assert torch.autograd.gradcheck(f, (x, weight, bias))
        assert torch.autograd.gradgradcheck(f, (x, weight, bias))
        close(torch.vmap(f, (0, None, None))(x, weight, bias), expected_vmap, torch.float64)
        actual_jvp = torch.func.jvp(f, (x, weight, bias), (x, weight, bias))
    for a, e in zip(actual_jvp, expected_jvp, strict=True):
        close(a, e, torch.float64)


def test_autocast_gives_float32_as_ever(device, override):
    x, weight, bias = inputs(device)
    half = x.detach().to(torch.bfloat16)
    with torch.autocast(device, dtype=torch.bfloat16):
        expected = F.layer_norm(half, (32,), weight, bias)
        with override():
            actual = F.layer_norm(half, (32,), weight, bias)
    assert actual.dtype == expected.dtype == (torch.float32 if device == "cuda" else half.dtype)
    close(actual, expected, expected.dtype)


BAD = {
    "shape": lambda norm, x, w: F.layer_norm(x, (31,)),
    "weight's shape": lambda norm, x, w: norm(x, (32,), w[1:]),
    "weight's dtype": lambda norm, x, w: F.layer_norm(x, (32,), w.double()),
    "complex": lambda norm, x, w: F.layer_norm(x.to(torch.complex64), (32,)),
    "integers": lambda norm, x, w: norm(x.long(), (32,)),
    "bools": lambda norm, x, w: F.layer_norm(x.bool(), (32,)),
    "float8": lambda norm, x, w: F.layer_norm(x.to(torch.float8_e4m3fn), (32,)),
    "too few dimensions": lambda norm, x, w: norm(x[0, 0], (6, 32)),
}


@EACH
@pytest.mark.parametrize("bad", BAD)
def test_errors_are_pytorchs(device, override, bad, norm):
    if norm is rms_norm and device == "cuda":
        norm = F.rms_norm
    x, weight, _ = (t.detach() for t in inputs(device))
    with pytest.raises((RuntimeError, ValueError)) as expected:
        BAD[bad](norm, x, weight)
    with override(), pytest.raises((RuntimeError, ValueError)) as actual:
        BAD[bad](norm, x, weight)
    assert type(actual.value) is type(expected.value)
    assert str(actual.value) == str(expected.value)


class OutOfMemoryKernel:
    """A replaced kernel that always runs out of memory."""

    def call_boxed(self, *args):
        raise torch.OutOfMemoryError("no memory")


def test_out_of_memory_of_a_replaced_kernel_keeps_its_type(monkeypatch):
    x = torch.ones(2, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(8)  # of another dtype: the kernels leave it to PyTorch's
    y = F.layer_norm(x, (8,), weight)
    with _override("CPU"):
        kernels = dict.fromkeys(fused_layernorm.override._OPERATORS, OutOfMemoryKernel())
        monkeypatch.setitem(fused_layernorm.override._replaced, "CPU", kernels)
        with pytest.raises(torch.OutOfMemoryError, match="no memory"):
            F.layer_norm(x, (8,), weight)
        with pytest.raises(torch.OutOfMemoryError, match="no memory"):
            y.sum().backward()


def test_a_later_torch_gets_a_runtime_error(monkeypatch):
    monkeypatch.setattr("fused_layernorm.override._TYPES_ARE_KEPT", False)
    with _override("CPU"), pytest.raises(RuntimeError, match="not implemented") as caught:
        F.layer_norm(torch.ones(2, 8).long(), (8,))
    assert type(caught.value) is RuntimeError


def test_what_the_kernels_do_not_take_runs_on_the_replaced_kernel():
    # PyTorch's CPU kernel takes a float32 weight beside a bfloat16 input, by its own rules. Its
    # RMSNorm takes complex numbers.
    x, weight, bias = (t.detach() for t in inputs("cpu"))
    half, imaginary = x.to(torch.bfloat16), x.to(torch.complex64)
    for operator in (
        lambda: torch.native_layer_norm(half, (32,), weight, bias, 1e-5),
        lambda: torch._fused_rms_norm(imaginary, (32,), weight.to(imaginary.dtype), 1e-5),
    ):
        expected = operator()
        before = torch.ops.fused_layernorm._override_calls("CPU")
        with _override("CPU"):
            actual = operator()
        assert torch.ops.fused_layernorm._override_calls("CPU") == before + 1
        for a, e in zip(actual, expected, strict=True):
            assert a.dtype == e.dtype
            assert torch.equal(a, e)


def test_plain_call_and_undo(device, override, calls):
    x, weight, bias = inputs(device)
    before = F.layer_norm(x, (32,), weight, bias)
    handle = override()
    F.layer_norm(x, (32,), weight, bias)
    assert calls() > 0
    assert "not in force" not in repr(handle)
    handle.undo()
    handle.undo()
    assert "not in force" in repr(handle)
    assert torch.equal(F.layer_norm(x, (32,), weight, bias), before)
    assert calls() == 0


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


def test_an_exception_undoes_it(device, override, calls):
    with pytest.raises(KeyError), override():
        raise KeyError
    F.layer_norm(torch.ones(2, 4, device=device), (4,))
    assert calls() == 0


def test_survives_switching_under_running_threads(device, override, calls):
    """Some threads train while others switch."""
    x, weight, bias = inputs(device)
    expected = F.layer_norm(x, (32,), weight, bias)
    stop = threading.Event()
    errors, done, switched = [], [], []

    def train():
        a, w = x.detach().requires_grad_(), weight.detach().requires_grad_()
        y = F.layer_norm(a, (32,), w, bias)
        torch.autograd.grad(y.sum(), (a, w))
        close(y, expected)
        done.append(1)

    def switch():
        with override():
            close(F.layer_norm(x.detach(), (32,), weight.detach(), bias.detach()), expected)
            switched.append(1)

    def repeat(work):
        try:
            while not stop.is_set():
                work()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=repeat, args=(work,)) for work in 3 * [train, switch]]
    for thread in threads:
        thread.start()
    time.sleep(1)
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors
    assert min(len(done), len(switched)) > 10
    assert calls() >= len(switched)
    F.layer_norm(x, (32,))
    assert calls() == 0


def test_a_build_without_kernels_says_that_nothing_changes(monkeypatch):
    monkeypatch.setattr("fused_layernorm.override._lacking_cuda", lambda: "fused_layernorm")
    before = torch._C._dispatch_dump("aten::native_layer_norm")
    with pytest.warns(UserWarning, match="changes nothing: this build of fused_layernorm"):
        handle = fused_layernorm.override_aten()
    assert torch._C._dispatch_dump("aten::native_layer_norm") == before
    assert "not in force" in repr(handle)
    with handle:
        pass
    handle.undo()


def test_leaves_cpu_tensors_alone():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a build without CUDA kernels warns
        before = torch._C._dispatch_dump("aten::native_layer_norm")
        calls = torch.ops.fused_layernorm._override_calls("CUDA")
        with fused_layernorm.override_aten():
            during = torch._C._dispatch_dump("aten::native_layer_norm")
            F.layer_norm(torch.ones(2, 4), (4,))
    assert (during != before) == HAS_KERNELS
    assert torch.ops.fused_layernorm._override_calls("CUDA") == calls


def test_prints_nothing():
    # PyTorch warns on stderr of kernels that replace others. These must cause no such warning.
    code = (
        "import torch, fused_layernorm.override as o\n"
        "with o._override('CPU'):\n"
        "    torch.nn.functional.layer_norm(torch.ones(2, 4), (4,))\n"
        "assert torch.ops.fused_layernorm._override_calls('CPU') > 0\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.gpu
@needs_kernels
def test_out_of_memory_says_so():
    x = torch.empty(1 << 26, 8, device="cuda")  # 2 GiB
    torch.cuda.empty_cache()
    in_use, total = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((in_use + (1 << 30)) / total)
    try:
        with (
            fused_layernorm.override_aten(),
            pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"),
        ):
            F.layer_norm(x, (8,))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_rms_norm_gets_along_with_another_override():
    """What another library registered is there again, whichever override ends first."""
    key, x = "CPU", torch.ones(2, 8)

    def other(input, normalized_shape, weight, eps):
        return torch.full_like(input, 7.0), torch.zeros(2, 1)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_fused_rms_norm", other, key, allow_override=True)
    assert rms_norm(x, (8,)).eq(7).all()
    with _override(key):
        close(rms_norm(x, (8,)), x)
    assert rms_norm(x, (8,)).eq(7).all()
    with _override(key):
        library._destroy()
        close(rms_norm(x, (8,)), x)
    close(rms_norm(x, (8,)), x)


@pytest.mark.gpu
@needs_kernels
@pytest.mark.parametrize("norm", [F.layer_norm, F.rms_norm])
def test_cuda_runs_these_kernels_and_no_others(norm):
    x, weight, _ = inputs("cuda", shape=(64, 768), dtype=torch.bfloat16)
    with (
        fused_layernorm.override_aten(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile,
    ):
        norm(x, (768,), weight).backward(torch.ones_like(x))
        torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages()]
    norms = [n for n in names if "norm" in n.lower() and not n.startswith(("aten::", "cuda"))]
    assert norms
    assert all("fused_layernorm" in n for n in norms), norms

# SPDX-License-Identifier: Apache-2.0
"""override_aten(): the calls that it takes, those that it leaves to PyTorch, and its exact undoing.

The tests run on the CPU's dispatch key, where the composite operators stand for the kernels, and on
CUDA where there is a GPU.
"""

import contextlib
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from forms import Calls, Names
from numerics import covering, ids
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import fused_layernorm
from fused_layernorm.calls import SENTINEL
from fused_layernorm.ops import autograd_library
from fused_layernorm.override import _calls, _in_force, _override

HAS_KERNELS = (
    torch.ops.fused_layernorm._build_info() != "cpu only" and torch.backends.cuda.is_built()
)
needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="needs CUDA kernels")
ON_CUDA = pytest.param("cuda", id="cuda", marks=[pytest.mark.gpu, needs_kernels])
DEVICES = [pytest.param("cpu", id="cpu"), ON_CUDA]
# On the CPU _fused_rms_norm is a composite of PyTorch's, which stays.
on_cuda = pytest.mark.parametrize("device", [ON_CUDA], indirect=True)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
NATIVES = ("native_layer_norm", "_fused_rms_norm")
OPERATORS = [f"aten::{name}{of}" for name in NATIVES for of in ("", "_backward")]
OPERATORS += [f"aten::{name}_norm" for name in ("layer", "rms", "group")]
OPERATORS += [f"aten::native_group_norm{of}" for of in ("", "_backward")]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture
def override(device):
    """override_aten, for the device's dispatch key."""
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


OUR_NODE = "FusedLayerNormBackward" if autograd_library.active else "NativeLayerNormBackward0"


def test_covers_layer_norm(device, override, calls):
    x, weight, bias = inputs(device)
    module = nn.LayerNorm(32, device=device)
    with override():
        y = layer_norm(x, weight, bias)
        assert calls() > 0
        assert node(y) == OUR_NODE
        y.sum().backward()
        # PyTorch's node calls native_layer_norm_backward, ours our operator.
        assert (calls() > 0) == (not autograd_library.active)
        y = torch.native_layer_norm(x, (32,), weight, bias, 1e-5)[0]
        assert calls() > 0
        assert node(y) == "NativeLayerNormBackward0"
        y.sum().backward()
        assert calls() > 0
        with torch.inference_mode():
            assert layer_norm(x, weight, bias).is_inference()
        assert calls() > 0
        with torch.no_grad():
            assert not layer_norm(x, weight, bias).requires_grad
        assert calls() > 0
        for call in (lambda: module(x.detach()), lambda: torch.layer_norm(x, (32,))):
            call()
            assert calls() > 0
    layer_norm(x, weight, bias).sum().backward()
    assert calls() == 0


@pytest.mark.parametrize(
    ("dtype", "normalized_ndim", "affine"),
    covering(DTYPES, (1, 2, 3), ("both", "weight", "bias", "none")),
    ids=ids,
)
def test_results_and_gradients_are_pytorchs(device, override, dtype, normalized_ndim, affine):
    x, weight, bias = inputs(device, normalized_ndim=normalized_ndim, dtype=dtype)
    weight = weight if affine in ("both", "weight") else None
    bias = bias if affine in ("both", "bias") else None
    shape = x.shape[-normalized_ndim:]
    check_results(override, F.layer_norm, F.layer_norm, x, shape, weight, bias)


@on_cuda
@pytest.mark.parametrize(
    ("dtype", "normalized_ndim", "affine", "eps"),
    covering(DTYPES, (1, 2, 3), (False, True), (None, 1e-2)),
    ids=ids,
)
def test_rms_norms_results_and_gradients(
    device, override, calls, dtype, normalized_ndim, affine, eps
):
    x, weight, _ = inputs(device, normalized_ndim=normalized_ndim, dtype=dtype)
    own_eps = torch.finfo(dtype if dtype == torch.float64 else torch.float32).eps

    def stock(x, shape, weight):
        return F.rms_norm(x, shape, weight, own_eps if eps is None else eps)

    def norm(x, shape, weight):
        return rms_norm(x, shape, weight, eps)

    shape = x.shape[-normalized_ndim:]
    check_results(override, norm, stock, x, shape, weight if affine else None)
    assert calls() == 2


def check_results(override, norm, stock, x, shape, *parameters):
    dy = torch.randn_like(x)

    def run(norm, x, *parameters, dy=dy):
        leaves = [t for t in (x, *parameters) if t is not None]
        y = norm(x, shape, *parameters)
        return (y, *torch.autograd.grad(y, leaves, dy))

    # PyTorch computes in float64 here, because its CPU kernel sums the parameters' gradients of
    # bfloat16 tensors in bfloat16.
    wide = [None if t is None else t.double() for t in (x, *parameters)]
    expected = run(stock, *wide, dy=dy.double())
    with override():
        actual = run(norm, x, *parameters)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == x.dtype
        close(a, e.to(x.dtype), x.dtype)


@pytest.mark.parametrize("wanted", ["100", "010", "001", "10", "01"])
def test_gradients_that_are_not_asked_for_are_not_there(device, override, calls, wanted):
    name = NATIVES[len(wanted) == 2]
    if name == "_fused_rms_norm" and device == "cpu":
        pytest.skip("a composite")
    mask = [one == "1" for one in wanted]
    x, *parameters = (t.detach() for t in inputs(device)[: len(mask)])
    y, *statistics = getattr(torch, name)(x, (32,), *parameters, 1e-5)
    backward = getattr(torch.ops.aten, f"{name}_backward")
    args = (torch.ones_like(y), x, (32,), *statistics, *parameters, mask)
    expected = backward(*args)
    with override():
        actual = backward(*args)
    assert calls() > 0
    assert [a is not None for a in actual] == [e is not None for e in expected] == mask
    close([a for a in actual if a is not None], [e for e in expected if e is not None])


def test_forward_and_backward_may_stand_on_different_sides(device, override):
    x, weight, bias = inputs(device)
    leaves = (x, weight, bias)
    expected = torch.autograd.grad(layer_norm(*leaves).square().sum(), leaves)
    for sides in ((override, contextlib.nullcontext), (contextlib.nullcontext, override)):
        with sides[0]():
            loss = layer_norm(*leaves).square().sum()
        with sides[1]():
            found = torch.autograd.grad(loss, leaves)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_rows_of_no_columns_have_pytorchs_statistics(device, override, calls):
    x = torch.empty(3, 0, device=device)
    expected = torch.native_layer_norm(x, (0,), None, None, 1e-5)
    with override():
        actual = torch.native_layer_norm(x, (0,), None, None, 1e-5)
    assert calls() > 0
    torch.testing.assert_close(actual, expected, equal_nan=True)


def test_empty_batch(device, override):
    x, weight, _ = inputs(device, shape=(0, 8))
    with override():
        y = F.layer_norm(x, (8,), weight)
        dx, dweight = torch.autograd.grad(y.sum(), (x, weight))
    assert y.shape == dx.shape == (0, 8)
    assert dweight.tolist() == [0.0] * 8


def test_higher_derivatives_and_transforms_are_pytorchs(device, override):
    given = tuple(inputs(device, shape=(3, 5), dtype=torch.float64))
    expected_vmap = torch.vmap(layer_norm, (0, None, None))(*given)
    expected_jvp = torch.func.jvp(layer_norm, given, given)
    with override():
        assert torch.autograd.gradcheck(layer_norm, given)
        assert torch.autograd.gradgradcheck(layer_norm, given)
        close(torch.vmap(layer_norm, (0, None, None))(*given), expected_vmap, torch.float64)
        close(torch.func.jvp(layer_norm, given, given), expected_jvp, torch.float64)


def test_autocast_gives_float32_as_ever(device, override):
    x, weight, bias = inputs(device)
    half = x.detach().to(torch.bfloat16)
    with torch.autocast(device, dtype=torch.bfloat16):
        expected = F.layer_norm(half, (32,), weight, bias)
        with override():
            actual = F.layer_norm(half, (32,), weight, bias)
            strided = half.expand(2, *half.shape)
            y, _ = torch._fused_rms_norm(strided, (32,), weight.bfloat16(), 1e-5)
            assert y.dtype == half.dtype, "PyTorch does not cast for it"
    assert expected.dtype == (torch.float32 if device == "cuda" else half.dtype)
    close(actual, expected, expected.dtype)


BAD = {
    "shape": lambda x, w: F.layer_norm(x, (31,)),
    "weight's shape": lambda x, w: F.layer_norm(x, (32,), w[1:]),
    "weight's dtype": lambda x, w: F.layer_norm(x, (32,), w.double()),
    "complex": lambda x, w: F.layer_norm(x.to(torch.complex64), (32,)),
    "integers": lambda x, w: F.layer_norm(x.long(), (32,)),
    "bools": lambda x, w: F.layer_norm(x.bool(), (32,)),
    "float8": lambda x, w: F.layer_norm(x.to(torch.float8_e4m3fn), (32,)),
    "too few dimensions": lambda x, w: F.layer_norm(x[0, 0], (6, 32)),
    "rms: weight's shape": lambda x, w: F.rms_norm(x, (32,), w[1:]),
    "rms: integers": lambda x, w: F.rms_norm(x.long(), (32,)),
    "rms: too few dimensions": lambda x, w: F.rms_norm(x[0, 0], (6, 32)),
}


@pytest.mark.parametrize(
    ("device", "bad"),
    [("cpu", bad) for bad in BAD if "rms" not in bad]
    + [pytest.param("cuda", bad, marks=ON_CUDA.marks) for bad in BAD],
    indirect=["device"],
)
def test_errors_are_pytorchs(device, override, bad):
    x, weight, _ = (t.detach() for t in inputs(device))
    with pytest.raises((RuntimeError, ValueError)) as expected:
        BAD[bad](x, weight)
    with override(), pytest.raises((RuntimeError, ValueError)) as actual:
        BAD[bad](x, weight)
    assert type(actual.value) is type(expected.value)
    assert str(actual.value) == str(expected.value)


def test_modes_and_transforms_see_pytorchs_operators(device, override):
    """A mode sees what it sees without the override, and so do FakeTensor, make_fx and export."""
    x, weight, bias = inputs(device)

    def traced():
        graph = make_fx(layer_norm, tracing_mode="fake")(x, weight, bias)
        module = nn.Sequential(nn.LayerNorm(32), nn.RMSNorm(32)).to(device)
        exported = torch.export.export(module, (x.detach(),))
        return graph.code, str(exported.graph_module.code)

    def seen():
        with Names() as mode:
            layer_norm(x, weight, bias)
        return mode.names

    expected, names = traced(), seen()
    with override():
        assert traced() == expected
        assert seen() == names
        y = torch.func.grad(lambda x: layer_norm(x, weight, bias).pow(3).sum())(x.detach())
    close(y, torch.func.grad(lambda x: layer_norm(x, weight, bias).pow(3).sum())(x.detach()))


def test_what_the_kernels_do_not_take_runs_on_the_replaced_kernel(override):
    # PyTorch's CPU kernel takes a float32 weight beside a bfloat16 input, by its own rules.
    x, weight, bias = (t.detach() for t in inputs("cpu"))
    x = x.to(torch.bfloat16)
    expected = torch.native_layer_norm(x, (32,), weight, bias, 1e-5)
    with _override("CPU"):
        actual = torch.native_layer_norm(x, (32,), weight, bias, 1e-5)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


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


def test_undo_within_a_call(device, override, calls):
    """A call that has begun ends as it began, and so does backward of our own node."""
    x, weight, bias = inputs(device)
    expected = torch.autograd.grad(layer_norm(x, weight, bias).square().sum(), x)[0]
    handle = override()

    def pack(tensor):
        handle.undo()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = layer_norm(x, weight, bias).square().sum()
    assert "not in force" in repr(handle)
    # PyTorch's autograd saves before it calls the kernel, ours while the call is taken.
    assert calls() == (1 if autograd_library.active else 0)
    torch.testing.assert_close(torch.autograd.grad(loss, x)[0], expected, rtol=1e-4, atol=1e-4)
    with override():
        loss = layer_norm(x, weight, bias).square().sum()
        assert calls() == 1
    torch.testing.assert_close(torch.autograd.grad(loss, x)[0], expected, rtol=1e-4, atol=1e-4)
    assert calls() == 0


def test_an_exception_undoes_it(device, override, calls):
    with pytest.raises(KeyError), override():
        raise KeyError
    F.layer_norm(torch.ones(2, 4, device=device), (4,))
    assert calls() == 0


def in_threads(count, work, meanwhile=lambda: None):
    """Runs work in so many threads; what it raises is raised here."""
    with ThreadPoolExecutor(count) as pool:
        running = [pool.submit(work) for _ in range(count)]
        meanwhile()
        for future in running:
            future.result()


def test_survives_switching_under_running_threads(device, override, calls):
    x, weight, bias = inputs(device)
    expected = layer_norm(x, weight, bias)
    stop = threading.Event()
    done, switched = [], []

    def train():
        a, w = x.detach().requires_grad_(), weight.detach().requires_grad_()
        while not stop.is_set():
            y = F.layer_norm(a, (32,), w, bias)
            torch.autograd.grad(y.sum(), (a, w))
            close(y, expected)
            done.append(1)

    def switch():
        deadline = time.monotonic() + 2
        try:
            while time.monotonic() < deadline:
                with override():
                    time.sleep(0.001)
                switched.append(1)
        finally:
            stop.set()

    in_threads(3, train, switch)
    assert len(switched) > 10
    assert len(done) > 10
    assert calls() > 0


def test_overrides_of_several_threads(device, override, calls):
    x = inputs(device)[0].detach()
    covered = []

    def work():
        for _ in range(50):
            with override():
                F.layer_norm(x, (32,))
                covered.append(1)

    in_threads(4, work)
    assert len(covered) == 200
    assert calls() >= 200
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


@pytest.mark.skipif(not autograd_library.active, reason="needs the kernels at Autograd")
@pytest.mark.parametrize("norm", [torch.layer_norm, torch.rms_norm])
def test_serves_who_asks_behind_the_shape(device, override, norm):
    with override():  # on the CPU it registers the kernels
        pass
    x = torch.randn(3, 8, device=device, requires_grad=True)
    y = norm(x, (8, *SENTINEL))
    assert "Fused" in node(y)
    close(y, norm(x, (8,)))
    with Calls() as seen:
        norm(x, (8, *SENTINEL))
    assert "layer_norm" in str(seen.names), "modes see our operator"
    with pytest.raises((ValueError, RuntimeError)):
        norm(x, (4, *SENTINEL))
    if device == "cuda":
        with torch.inference_mode():
            close(norm(x, (8, *SENTINEL)), norm(x, (8,)))


def test_leaves_cpu_tensors_alone():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a build without CUDA kernels warns
        before = _calls("CUDA"), _calls("CPU")
        with fused_layernorm.override_aten():
            F.layer_norm(torch.ones(2, 4), (4,))
        assert (_calls("CUDA"), _calls("CPU")) == before


def test_prints_nothing():
    # PyTorch warns on stderr of kernels that replace others. These must cause no such warning.
    code = (
        "import torch, fused_layernorm.override as o\n"
        "for key in ['CPU'] + ['CUDA'] * torch.cuda.is_available():\n"
        "    with o._override(key):\n"
        "        torch.nn.functional.layer_norm(torch.ones(2, 4), (4,))\n"
        "assert o._calls('CPU') > 0\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.gpu
@needs_kernels
def test_out_of_memory_says_so(one_gibibyte_left):
    x = torch.empty(1 << 26, 8, device="cuda")  # 2 GiB
    one_gibibyte_left()
    with (
        fused_layernorm.override_aten(),
        pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"),
    ):
        F.layer_norm(x, (8,))


# --- RMSNorm --------------------------------------------------------------------------------------


def rms_norm(x, shape, weight=None, eps=None):
    """F.rms_norm by the operator that it calls on CUDA."""
    return torch._fused_rms_norm(x, shape, weight, eps)[0]


@on_cuda
def test_covers_rms_norm(device, override, calls):
    x, weight, _ = inputs(device)
    with override():
        y = rms_norm(x, (32,), weight)
        assert calls() == 1
        assert type(y.grad_fn).__name__ == "FusedRmsNormBackward0"
        y.sum().backward()
        assert calls() == 1
        y = F.rms_norm(x, (32,), weight)
        assert autograd_library.active == (node(y) == "FusedLayerNormBackward")
        y.sum().backward()
        nn.RMSNorm(32, device=device)(x.detach())
        assert calls() == (2 if autograd_library.active else 3)
    rms_norm(x, (32,), weight).sum().backward()
    assert calls() == 0


@on_cuda
def test_rms_norms_default_eps_is_pytorchs(device, override):
    """Beside tiny squares, the epsilons of float32 and of the half-precision types differ much."""
    for dtype in DTYPES:
        x = (1e-4 * torch.randn(4, 32, device=device)).to(dtype)
        expected = rms_norm(x, (32,))
        with override():
            close(rms_norm(x, (32,)), expected, dtype)


@on_cuda
@pytest.mark.parametrize("shape", [(4, 6, 32), (0, 8), (3, 0)])
def test_rms_norms_statistic_is_pytorchs(device, override, shape):
    """Forward and backward may stand on different sides."""
    x, weight, _ = (t.detach() for t in inputs(device, shape, len(shape) - 1))
    expected = torch._fused_rms_norm(x, shape[1:], weight, 1e-5)
    with override():
        actual = torch._fused_rms_norm(x, shape[1:], weight, 1e-5)
    assert [t.shape for t in actual] == [t.shape for t in expected]
    if x.numel():
        close(actual, expected)


@pytest.mark.skipif(not autograd_library.active, reason="needs the kernel at Autograd")
def test_rms_norm_with_a_weight_of_another_dtype(device, override, calls):
    """F.rms_norm takes a float32 weight beside half-precision input; its result has input's."""
    x, weight, _ = inputs(device)
    x = x.detach().bfloat16().requires_grad_()
    dy = torch.randn_like(x)

    def run():
        y = F.rms_norm(x, (32,), weight)
        return (y, *torch.autograd.grad(y, (x, weight), dy))

    expected = run()
    with override():
        actual = run()
    assert calls() == 1
    close(actual, expected, torch.bfloat16)


def test_the_later_of_two_overrides_counts():
    """What another library registers later is in force until it goes."""
    x = torch.randn(2, 8)
    expected = F.layer_norm(x, (8,))

    def norm():
        return torch.native_layer_norm(x, (8,), None, None, 1e-5)[0]

    def other(input, normalized_shape, weight, bias, eps):
        return torch.full_like(input, 7.0), torch.zeros(2, 1), torch.zeros(2, 1)

    library = torch.library.Library("aten", "IMPL")
    library.impl("native_layer_norm", other, "CPU", allow_override=True)
    with _override("CPU"):
        assert norm().eq(7).all()
        library._destroy()
        close(norm(), expected)
    close(norm(), expected)
    library = torch.library.Library("aten", "IMPL")
    library.impl("layer_norm", lambda x, *others: torch.full_like(x, 7.0), "CPU")
    assert F.layer_norm(x, (8,)).eq(7).all(), "our kernel at autograd's key hides it"
    with Names() as seen:
        F.layer_norm(x, (8,))
    assert seen.names == ["aten.layer_norm.default"], "a mode sees it first"
    library._destroy()


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

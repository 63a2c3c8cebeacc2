# SPDX-License-Identifier: Apache-2.0
"""The operations fused with the normalization: activation, scale, output dtype, residual."""

import itertools
import math

import numerics
import pytest
import torch
import torch.nn.functional as F
from numerics import ACTIVATIONS, Problem

from fused_layernorm import add_layer_norm, layer_norm, reference

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
DTYPES = [(F32, None), (F16, None), (BF16, F32), (F64, None)]
STRATEGIES = ["warp", "few_rows", "block", "ring", "split", "stream"]


def ids(value):
    return str(value).removeprefix("torch.")


def dtype_ids(dtypes):
    return "-".join(map(ids, dtypes))


@pytest.mark.parametrize("dtypes", DTYPES, ids=dtype_ids)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("cols", [33, 64, 1024, 5000])
def test_activation_and_scale(device, cols, activation, dtypes):
    problem = Problem(
        (40, cols), dtype=dtypes[0], weight_dtype=dtypes[1], activation=activation, scale=-1.75
    )
    numerics.check(problem, device)


@pytest.mark.parametrize("affine", ["both", "weight", "bias", "none"])
@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_activation_with_missing_parameters(device, activation, affine):
    numerics.check(Problem((40, 96), activation=activation, affine=affine, scale=0.5), device)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=ids)
@pytest.mark.parametrize("affine_scale", [0.3, 0.1, 0.02])
@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_activation_of_small_numbers(device, activation, affine_scale, dtype):
    """Small weights make small pre-activations, whose errors are judged by their own size."""
    problem = Problem((40, 512), dtype=dtype, activation=activation, affine_scale=affine_scale)
    numerics.check(problem, device)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(6, 65536), (3, 1_000_003), (2, 4_194_304)], ids=str)
def test_activation_on_long_rows(shape, activation):
    numerics.check(Problem(shape, activation=activation, scale=0.5), "cuda")


@pytest.mark.gpu
def test_transposed_convolution_chain():
    """LayerNorm(64) + GELU + scale on a result of KernelBench's transposed convolution."""
    problem = Problem((4, 64, 32, 64, 64), activation="gelu", scale=1.0 / 3)
    numerics.check(problem, "cuda")


def test_activations_match_pytorch_for_every_size_of_argument(device):
    """The arguments include numbers far from zero, where gelu and silu approach 0 and x, and their
    derivatives 0 and 1."""
    z = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([-100.0, 0.0, 100.0])]).to(device)
    # A row of one column gives bias: z goes in as bias, and y is activation(z).
    for activation in ACTIVATIONS[1:]:
        x = torch.zeros(1, z.numel(), device=device)
        bias = z.clone().requires_grad_()
        y = layer_norm(x, torch.zeros_like(z), bias, activation=activation)[0]
        y.sum().backward()
        expected = reference.activation_value(z.double(), activation)
        slope = reference.activation_derivative(z.double(), activation)
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=2e-6)
        assert bias.grad is not None
        torch.testing.assert_close(bias.grad.double(), slope, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("activation", ["gelu", "silu", "relu"])
def test_the_greatest_arguments_of_activations(device, activation):
    """The derivatives are 0 and 1, also where the square of the argument is infinite."""
    size = torch.tensor([1e3, 1e10, 1e20, 1e30, 1e32, 1e38], device=device)
    bias = torch.cat([size, -size]).requires_grad_()
    zeros = torch.zeros(1, bias.numel(), device=device)
    y = layer_norm(zeros, zeros[0], bias, activation=activation)[0]
    y.sum().backward()
    assert torch.equal(y, torch.cat([size, torch.zeros_like(size)]))
    assert bias.grad is not None
    assert torch.equal(bias.grad, (bias > 0).float())


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_activation_keeps_nan_and_inf(device, activation):
    x = torch.zeros(1, 4, device=device)
    bias = torch.tensor([float("nan"), float("inf"), 1.0, -1.0], device=device)
    y = layer_norm(x, None, bias, activation=activation)[0]
    stock = numerics._activate(bias, activation)
    assert torch.equal(y.isnan(), stock.isnan())
    assert torch.equal(y.isinf(), stock.isinf())


OUT_DTYPES = [F32, F16, BF16, F64]


@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=ids)
@pytest.mark.parametrize("dtypes", [*DTYPES, (BF16, None)], ids=dtype_ids)
@pytest.mark.parametrize("cols", [50, 1024])
def test_out_dtype(device, cols, dtypes, out_dtype):
    problem = Problem((40, cols), dtype=dtypes[0], weight_dtype=dtypes[1], out_dtype=out_dtype)
    numerics.check(problem, device)


def test_result_is_rounded_once(device):
    """Neither the normalized value nor the pre-activation is rounded to half precision before."""
    x = torch.randn(64, 512, device=device).to(BF16)
    weight, bias = (torch.randn(512, device=device).to(BF16) for _ in "wb")
    for activation in ACTIVATIONS:
        narrow = layer_norm(x, weight, bias, activation=activation, scale=1.5)
        exact = layer_norm(
            x.double(), weight.double(), bias.double(), activation=activation, scale=1.5
        )
        # Errors in the last bits of float32 change few roundings to bfloat16. On the CPU they
        # change more, because PyTorch's erf has no digits left in the tail. A second rounding on
        # the way would change one in four.
        changed = (narrow != exact.to(BF16)).double().mean()
        assert changed < (0.002 if device == "cuda" else 0.02), (activation, changed)


RESIDUALS = [
    (F32, F32, None),
    (BF16, BF16, None),
    (F16, F16, None),
    (BF16, F32, None),
    (BF16, F32, F32),
    (F16, F32, None),
    (F32, BF16, None),
    (F16, BF16, F32),
    (BF16, BF16, F32),
    (F64, F64, None),
    (F32, F64, None),
    (F64, F32, F32),
]


@pytest.mark.parametrize("dtypes", RESIDUALS, ids=dtype_ids)
@pytest.mark.parametrize("cols", [3, 64, 1000, 4096])
def test_residual(device, cols, dtypes):
    input_dtype, residual_dtype, weight_dtype = dtypes
    problem = Problem(
        (40, cols), dtype=input_dtype, residual_dtype=residual_dtype, weight_dtype=weight_dtype
    )
    numerics.check(problem, device)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("out_dtype", [None, F32])
def test_residual_with_everything(device, activation, out_dtype):
    problem = Problem(
        (40, 257),
        dtype=BF16,
        residual_dtype=F32,
        weight_dtype=F32,
        activation=activation,
        scale=0.25,
        out_dtype=out_dtype,
    )
    numerics.check(problem, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", [(F32, F32, None), (BF16, F32, F32)], ids=dtype_ids)
@pytest.mark.parametrize(
    "shape", [(64, 16384), (6, 65536), (3, 1_000_003), (2, 4_194_304)], ids=str
)
def test_residual_on_long_rows(shape, dtypes):
    problem = Problem(
        shape, dtype=dtypes[0], residual_dtype=dtypes[1], weight_dtype=dtypes[2], activation="silu"
    )
    numerics.check(problem, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16], ids=ids)
def test_residual_on_the_longest_slices(plans, dtype):
    """Beside a residual and no epilogue, backward's slices may take all threads of a block."""
    rows, cols = 210, 65_536
    plan = plans.of(rows, cols, dtype, backward=True, residual=True)
    assert plan["has_collector"] == (not plan["bulk"])
    numerics.check(Problem((rows, cols), dtype=dtype, residual_dtype=dtype), "cuda")


@pytest.mark.parametrize(
    "dtypes", [(F32, F32), (BF16, BF16), (BF16, F32), (F32, BF16)], ids=dtype_ids
)
def test_residual_out_is_what_pytorch_adds(device, dtypes):
    x = torch.randn(40, 300, device=device).to(dtypes[0])
    residual = torch.randn(40, 300, device=device).to(dtypes[1])
    y, residual_out = add_layer_norm(x, residual, normalized_shape=(300,))
    assert residual_out.dtype == dtypes[1]
    assert y.dtype == dtypes[0]
    assert torch.equal(residual_out, (x + residual).to(dtypes[1]))
    # The rounded sum is normalized.
    again = layer_norm(residual_out, normalized_shape=(300,), out_dtype=dtypes[0])
    torch.testing.assert_close(y, again, rtol=2e-3 if BF16 in dtypes else 1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["transposed", "expanded", "sliced", "misaligned"])
@pytest.mark.parametrize("which", ["x", "residual"])
@pytest.mark.parametrize("cols", [7, 64, 4096])
def test_strided_residual(device, cols, which, kind):
    t = numerics.make(Problem((6, 9, cols), residual_dtype=F32), device)
    tensor = getattr(t, which)
    match kind:
        case "transposed":
            tensor = tensor.transpose(0, 1).contiguous().transpose(0, 1)
        case "expanded":
            tensor = tensor[:1, :1].expand(6, 9, cols)
        case "sliced":
            tensor = F.pad(tensor, (1, 2))[..., 1:-2]
        case "misaligned":
            tensor = torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)
    setattr(t, which, tensor)
    y, residual_out = numerics.forward(t)
    assert y.is_contiguous()
    assert residual_out.is_contiguous()
    assert torch.equal(residual_out, reference.add(t.x, t.residual))
    torch.testing.assert_close(y.double(), numerics.exact(t)["y"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cols", [64, 1024, 8191, 40000])
@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, F32)], ids=dtype_ids)
def test_a_row_does_not_depend_on_its_batch(device, cols, dtypes):
    x = torch.randn(200, cols, device=device).to(dtypes[0])
    residual = torch.randn(200, cols, device=device).to(dtypes[1])
    weight = torch.randn(cols, device=device).to(dtypes[0])
    whole = add_layer_norm(x, residual, weight, activation="gelu")
    for start, stop in ((0, 1), (199, 200), (3, 20)):
        rows = slice(start, stop)
        part = add_layer_norm(x[rows].clone(), residual[rows].clone(), weight, activation="gelu")
        for one, other in zip(part, whole, strict=True):
            assert torch.equal(one, other[rows])


@pytest.mark.parametrize("shape", [(0, 8), (2, 0), (3, 0, 5)], ids=str)
def test_empty(device, shape):
    x = torch.empty(shape, device=device, requires_grad=True)
    y, residual_out = add_layer_norm(x, x, normalized_shape=shape[-1:], activation="gelu")
    assert y.shape == residual_out.shape == shape
    (y + residual_out).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == shape


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    "dtypes", [(F32, None), (BF16, None), (BF16, F32), (F64, None)], ids=dtype_ids
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy(plans, strategy, dtypes, activation):
    ran = []
    for cols in (64, 257, 1000, 4096, 16384, 65536):
        problem = Problem(
            (40, cols), dtype=dtypes[0], weight_dtype=dtypes[1], activation=activation, scale=0.5
        )
        forced = {}
        for backward in (False, True):
            plans.force(f"strategy={strategy}")
            plan = plans.of(
                40, cols, dtypes[0], weight_dtype=dtypes[1], backward=backward, has_epilogue=True
            )
            if plan is not None:
                assert plan["strategy"] == strategy
                forced[backward] = f"strategy={strategy}"

        def run(t, *, backward, forced=forced):
            """Runs each direction by the forced strategy, or as planned if that cannot run it."""
            plans.force(forced.get(False))
            y, mean, rstd = torch.ops.fused_layernorm.layer_norm_forward(
                t.x, 1, t.weight, t.bias, numerics.EPS, t.problem.activation, t.problem.scale
            )
            plans.force(forced.get(True))
            grads = torch.ops.fused_layernorm.layer_norm_backward(
                t.dy, t.x, 1, mean, rstd, t.weight, t.bias, None, t.problem.activation,
                t.problem.scale, True, True, True,
            )  # fmt: skip
            plans.force(None)
            return dict(zip(("y", "dx", "dweight", "dbias"), (y, *grads), strict=True))

        if forced:
            numerics.check(problem, "cuda", run=run)
            ran.append(cols)
    if not ran:
        pytest.skip(f"{strategy} takes no {ids(dtypes[0])} rows on this device")


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, BF16), (BF16, F32)], ids=dtype_ids)
@pytest.mark.parametrize("strategy", ["warp", "block", "stream"])
def test_every_strategy_with_residual(plans, strategy, dtypes):
    ran = []
    for cols in (64, 257, 1000, 4096, 16384, 65536):
        t = numerics.make(Problem((40, cols), dtype=dtypes[0], residual_dtype=dtypes[1]), "cuda")
        plans.force(f"strategy={strategy}")
        try:
            out = numerics.forward(t)
        except (RuntimeError, ValueError) as error:
            if "cannot run" not in str(error):
                raise
            continue
        finally:
            plans.force(None)
        assert torch.equal(out[1], reference.add(t.x, t.residual))
        tolerance = {F32: 1e-5, BF16: 2**-8}[dtypes[0]]
        torch.testing.assert_close(
            out[0].double(), numerics.exact(t)["y"], rtol=tolerance, atol=tolerance
        )
        ran.append(cols)
    if not ran:
        pytest.skip(f"{strategy} takes no residual on this device")


def test_scale_zero(device):
    x = torch.randn(4, 8, device=device, requires_grad=True)
    y = layer_norm(x, normalized_shape=(8,), activation="gelu", scale=0)
    y.sum().backward()
    assert x.grad is not None
    assert not y.any()
    assert not x.grad.any()


def test_reference_activations_agree_with_pytorch():
    z = torch.linspace(-8, 8, 999, dtype=F64).requires_grad_()
    for activation in ACTIVATIONS:
        y = numerics._activate(z, activation)
        (slope,) = torch.autograd.grad(y.sum(), z) if activation else (torch.ones_like(z),)
        torch.testing.assert_close(reference.activation_value(z, activation), y)
        torch.testing.assert_close(reference.activation_derivative(z, activation), slope)
    with pytest.raises(ValueError, match="tanh"):
        reference.activation_value(z, "tanh")


def test_reference_backward_agrees_with_autograd():
    for activation, ndim in itertools.product(ACTIVATIONS, (1, 2)):
        t = numerics.make(
            Problem((5, 3, 4), ndim, dtype=F64, activation=activation, scale=0.3), "cpu"
        )
        leaves = [u.requires_grad_() for u in (t.x, t.weight, t.bias)]
        args = (ndim, t.weight, t.bias, 1e-5, activation, 0.3)
        y = reference.layer_norm(t.x, *args).y
        grads = torch.autograd.grad(y, leaves, t.dy)
        for ours, auto in zip(reference.layer_norm_backward(t.dy, t.x, *args), grads, strict=True):
            torch.testing.assert_close(ours, auto)
    value = reference.activation_value(torch.tensor(1.0).double(), "gelu")
    assert math.isclose(value, 0.8413447460685429)

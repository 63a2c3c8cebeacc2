# SPDX-License-Identifier: Apache-2.0
"""The operations fused with the normalization: activation, scale, output dtype, residual."""

import numerics
import pytest
import reference
import torch
from numerics import ACTIVATIONS, Problem, covering, ids

from fused_layernorm import layer_norm

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
DTYPES = [(F32, None), (F16, None), (BF16, F32), (F64, None)]


# Of x, weight and residual.
RESIDUALS = [
    (F32, None, F32), (BF16, None, BF16), (F16, None, F16), (BF16, None, F32), (BF16, F32, F32),
    (F16, None, F32), (F32, None, BF16), (F16, F32, BF16), (BF16, F32, BF16), (F64, None, F64),
    (F32, None, F64), (F64, F32, F32),
]  # fmt: skip


@pytest.mark.parametrize(
    "problem",
    [
        *(Problem((40, cols), *dtypes, activation=activation, scale=-1.75)
          for cols, activation, dtypes in covering((33, 64, 1024, 5000), ACTIVATIONS, DTYPES)),
        *(Problem((40, 96), activation=activation, affine=affine, scale=0.5)
          for activation in ACTIVATIONS[1:] for affine in ("both", "weight", "bias", "none")),
        # Small weights make small pre-activations, whose errors are judged by their own size.
        *(Problem((40, 512), dtype, activation=activation, affine_scale=affine_scale)
          for activation, affine_scale, dtype in covering(
              ACTIVATIONS[1:], (0.3, 0.1, 0.02), (F32, F16, BF16))),
        *(Problem((40, cols), *dtypes, out_dtype=out_dtype)
          for cols, dtypes, out_dtype in covering(
              (50, 1024), [*DTYPES, (BF16, None)], (F32, F16, BF16, F64))),
        *(Problem((40, cols), x, weight, residual_dtype=residual)
          for cols in (3, 64, 1000, 4096) for x, weight, residual in RESIDUALS),
        *(Problem((6, 9, cols), residual_dtype=F32, layout=layout, dy_layout="contiguous")
          for cols in (7, 64, 4096)
          for layout in ("transposed leading", "odd column slice", "misaligned")),
        *(Problem((40, 257), BF16, F32, residual_dtype=F32, activation=activation, scale=0.25,
                  out_dtype=out_dtype)
          for activation in ACTIVATIONS for out_dtype in (None, F32)),
    ],
    ids=str,
)  # fmt: skip
def test_accuracy(device, problem):
    numerics.check(problem, device)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "problem",
    [
        *(Problem(shape, activation=activation, scale=0.5)
          for shape in [(6, 65536), (3, 1_000_003), (2, 4_194_304)] for activation in ACTIVATIONS),
        *(Problem(shape, *dtypes, residual_dtype=F32, activation="silu")
          for shape in [(64, 16384), (6, 65536), (3, 1_000_003), (2, 4_194_304)]
          for dtypes in ((F32, None), (BF16, F32))),
        # LayerNorm(64) + GELU + scale on a result of KernelBench's transposed convolution.
        Problem((4, 64, 32, 64, 64), activation="gelu", scale=1.0 / 3),
    ],
    ids=str,
)  # fmt: skip
def test_accuracy_of_large_tensors(problem):
    numerics.check(problem, "cuda")


def of_bias(bias, activation):
    """activation(bias), and the slope there: rows of zeros are normalized to bias."""
    bias = bias.clone().requires_grad_()
    zeros = torch.zeros(1, bias.numel(), device=bias.device)
    y = layer_norm(zeros, zeros[0], bias, activation=activation)[0]
    y.sum().backward()
    return y, bias.grad


def test_activations_match_pytorch_for_every_size_of_argument(device):
    """The arguments include numbers far from zero, where gelu and silu approach 0 and x, and their
    derivatives 0 and 1."""
    z = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([-100.0, 0.0, 100.0])]).to(device)
    for activation in ACTIVATIONS[1:]:
        y, slope = of_bias(z, activation)
        wide = z.double().requires_grad_()
        expected = reference.activation_value(wide, activation)
        (expected_slope,) = torch.autograd.grad(expected.sum(), wide)
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(slope.double(), expected_slope, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("activation", ["gelu", "silu", "relu"])
def test_the_greatest_arguments_of_activations(device, activation):
    """The derivatives are 0 and 1, also where the square of the argument is infinite."""
    size = torch.tensor([1e3, 1e10, 1e20, 1e30, 1e32, 1e38], device=device)
    y, slope = of_bias(torch.cat([size, -size]), activation)
    assert torch.equal(y, torch.cat([size, torch.zeros_like(size)]))
    assert torch.equal(slope, torch.cat([torch.ones_like(size), torch.zeros_like(size)]))


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_activation_keeps_nan_and_inf(device, activation):
    bias = torch.tensor([float("nan"), float("inf"), 1.0, -1.0], device=device)
    y, _ = of_bias(bias, activation)
    stock = numerics.activate(bias, activation)
    assert torch.equal(y.isnan(), stock.isnan())
    assert torch.equal(y.isinf(), stock.isinf())


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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16], ids=ids)
def test_residual_on_the_longest_slices(plans, dtype):
    """Beside a residual and no epilogue, backward's slices may take all threads of a block."""
    rows, cols = 210, 65_536
    plan = plans.of(rows, cols, dtype, backward=True, residual=True)
    assert plan["has_collector"] == (not plan["bulk"])
    numerics.check(Problem((rows, cols), dtype, residual_dtype=dtype), "cuda")


def test_scale_zero(device):
    x = torch.randn(4, 8, device=device, requires_grad=True)
    y = layer_norm(x, normalized_shape=(8,), activation="gelu", scale=0)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert not y.any()
    assert not dx.any()


def test_reference_activations_agree_with_pytorch():
    z = torch.linspace(-8, 8, 999, dtype=F64).requires_grad_()
    for activation in ACTIVATIONS[1:]:
        expected, found = (
            f(z, activation) for f in (numerics.activate, reference.activation_value)
        )
        torch.testing.assert_close(found, expected)
        slopes = [torch.autograd.grad(y.sum(), z)[0] for y in (found, expected)]
        torch.testing.assert_close(*slopes)
    with pytest.raises(ValueError, match="tanh"):
        reference.activation_value(z, "tanh")

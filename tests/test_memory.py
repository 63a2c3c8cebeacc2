# SPDX-License-Identifier: Apache-2.0
"""A call allocates on the device only its outputs, the statistics, and bounded workspace."""

import functools

import pytest
import torch
from numerics import forced, plan_here

from fused_layernorm import add_layer_norm, layer_norm

F32, BF16 = torch.float32, torch.bfloat16
pytestmark = pytest.mark.gpu
SHAPES = [(32768, 64), (32768, 1024), (4096, 4096), (1024, 32768), (64, 1_048_576), (16, 4_194_304)]


def every_shape(function):
    for name, values in (("dtype", [F32, BF16]), ("shape", SHAPES)):
        function = pytest.mark.parametrize(name, values, ids=str)(function)
    return function


def peak(function):
    """(the most bytes that function had allocated at a time, the bytes that its result keeps)."""
    function()  # allocates whatever is allocated only once
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    out = function()
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    kept = after["requested_bytes.all.current"] - before
    del out
    return after["requested_bytes.all.peak"] - before, kept


def tensors(shape, dtype, grad=False):
    x = torch.randn(shape, device="cuda").to(dtype)
    parameters = (torch.randn(shape[-1], device="cuda") for _ in "wb")
    return [t.requires_grad_(grad) for t in (x, *parameters)]


def peak_of_backward(x, weight, bias, *mask, activation=None):
    ops = torch.ops.fused_layernorm
    _, *statistics = ops.layer_norm_forward(x, 1, weight, bias, 1e-5)
    args = (torch.randn_like(x), x, 1, *statistics, weight, bias, None, activation, 1.0, *mask)
    return peak(lambda: ops.layer_norm_backward(*args))


@every_shape
def test_forward_without_gradients(shape, dtype):
    x, weight, bias = tensors(shape, dtype)
    weight, bias = weight.to(dtype), bias.to(dtype)
    most, kept = peak(lambda: layer_norm(x, weight, bias))
    assert kept == x.nbytes
    extra = plan_here(shape[0], shape[1], dtype)["workspace_bytes"]
    if extra > 0:  # blocks wait for each other; the workspace suffices where they cannot, too
        with forced("stream"):
            extra = max(extra, plan_here(shape[0], shape[1], dtype)["workspace_bytes"])
    assert most <= x.nbytes + extra
    # Short and middle rows need no workspace, long ones a few numbers for each part of a row.
    assert extra == 0 if shape[1] <= 4096 else extra <= x.nbytes / 256


@every_shape
def test_forward_with_gradients(shape, dtype):
    """Forward keeps y, and 8 bytes a row for mean and rstd, in one block of memory in which rstd
    begins at a multiple of 256 bytes.
    """
    x, weight, bias = tensors(shape, dtype, grad=True)
    _, kept = peak(lambda: layer_norm(x, weight, bias))
    mean = 4 * shape[0]
    assert kept in (x.nbytes + 2 * mean, x.nbytes + -(-mean // 256) * 256 + mean)


@pytest.mark.parametrize("activation", [None, "gelu"])
@every_shape
def test_backward(shape, dtype, activation):
    """Backward keeps dx, dweight, dbias and frees partial sums of at most 2 x SMs x N x 4 bytes."""
    cols = shape[1]
    x, weight, bias = tensors(shape, dtype)
    most, kept = peak_of_backward(x, weight, bias, True, True, True, activation=activation)
    outputs = x.nbytes + 2 * cols * weight.element_size()
    assert kept == outputs
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    assert most - outputs <= 2 * sms * cols * 4


def test_masks_save_memory():
    rows, cols = 8192, 4096
    x, weight, bias = tensors((rows, cols), F32)
    most, kept = peak_of_backward(x, weight, bias, True, False, False)
    assert kept == x.nbytes
    assert most <= x.nbytes + rows * 16  # no partial sums without parameters' gradients
    most, kept = peak_of_backward(x, weight, bias, False, True, True)
    assert kept == 2 * cols * 4
    assert most < x.nbytes


def test_a_residual_and_an_activation():
    x, weight, bias = tensors((8192, 1024), BF16, grad=True)
    residual = torch.randn(8192, 1024, device="cuda", requires_grad=True)
    _, kept = peak(lambda: add_layer_norm(x, residual, weight, bias))
    assert kept == x.nbytes + residual.nbytes + 8 * 8192
    with torch.no_grad():
        most, kept = peak(lambda: add_layer_norm(x, residual, weight, bias))
    assert most == kept == x.nbytes + residual.nbytes
    _, plain = peak(lambda: layer_norm(x, weight, bias))
    _, fused = peak(lambda: layer_norm(x, weight, bias, activation="gelu", scale=2.0))
    assert fused == plain


def test_strided_rows_are_not_copied():
    x = torch.randn(64, 129, 1024, device="cuda")[:, 1:]
    image = torch.randn(8, 96, 56, 56, device="cuda").to(BF16).requires_grad_()
    by_view = functools.partial(layer_norm, image.permute(0, 2, 3, 1), normalized_shape=96)
    for call in (
        functools.partial(layer_norm, x, normalized_shape=1024),
        functools.partial(layer_norm, image, dim=1),
        by_view,
        functools.partial(by_view, out_dtype=F32),
    ):
        most, _ = peak(call)
        assert most < 1.2 * call().nbytes  # y and the statistics


def test_nothing_is_kept_by_many_calls():
    x, weight, bias = tensors((64, 70_000), F32, grad=True)

    def step():
        layer_norm(x, weight, bias).sum().backward()

    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        step()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before

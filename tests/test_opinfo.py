# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own test entries (OpInfo) of group_norm and instance_norm: their samples through our
function, its operators and override_aten(), against PyTorch's, with derivatives.

An instance norm is taken without its running statistics, as one of as many groups as channels.
"""

import contextlib
import functools
import importlib
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import fused_layernorm as fl
from fused_layernorm.ops import autograd_library
from fused_layernorm.override import _override

GROUP, INSTANCE = "nn.functional.group_norm", "nn.functional.instance_norm"
F64 = torch.float64


@functools.cache
def ops():
    """By name. The import would forbid the other tests of the process to set flags of backends."""
    pytest.importorskip("expecttest")  # which torch.testing's internals import
    name = "torch.testing._internal.common_methods_invocations"
    with mock.patch.object(torch.backends, "disable_global_flags"):
        found: Any = importlib.import_module(name).op_db
    return {one.name: one for one in found if one.name in (GROUP, INSTANCE)}


def instance_norm(x, groups, weight, bias, eps):
    return F.instance_norm(x, weight=weight, bias=bias, eps=eps)


def samples(name, device, dtype):
    """(x, num_groups, weight, bias, eps) of every sample."""
    for sample in ops()[name].sample_inputs(device, dtype, requires_grad=True):
        kwargs = sample.kwargs
        groups = sample.args[0] if name == GROUP else sample.input.shape[1]
        eps = kwargs.get("eps", 1e-5)
        yield sample.input, groups, kwargs.get("weight"), kwargs.get("bias"), eps


def derivatives(function, x, groups, weight, bias, eps):
    """The result and its gradients; in float64, which has the digits, also those of their sum."""
    leaves = [one for one in (x, weight, bias) if one is not None]
    y = function(x, groups, weight, bias, eps)
    first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
    if x.dtype is not F64:
        return [y, *first]
    total = torch.stack([one.square().sum() for one in first]).sum()
    return [y, *first, *torch.autograd.grad(total, leaves, allow_unused=True)]


@pytest.mark.parametrize("name", [GROUP, INSTANCE])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize(
    "way", ["function", pytest.param("operator", marks=pytest.mark.cpu_operators), "override"]
)
def test_samples(name, dtype, way, device):
    stock, count = (F.group_norm if name == GROUP else instance_norm), 0
    if way == "override" and not autograd_library.active:
        pytest.skip("autograd is in Python")
    overridden = fl.override_aten if device == "cuda" else lambda: _override("CPU")
    for case in samples(name, device, dtype):
        expected = derivatives(stock, *case)
        with overridden() if way == "override" else contextlib.nullcontext():
            found = derivatives(F.group_norm if way == "override" else fl.group_norm, *case)
        for one, other in zip(found, expected, strict=True):
            one, other = (torch.tensor(0.0) if t is None else t for t in (one, other))
            size = float(other.detach().abs().max()) + 1 if other.numel() else 1.0
            tolerance = 1e-4 if dtype is torch.float32 else 1e-9
            torch.testing.assert_close(
                one / size, other / size, rtol=tolerance, atol=tolerance, equal_nan=True
            )
        count += 1
    assert count >= 9

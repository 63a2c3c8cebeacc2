# SPDX-License-Identifier: Apache-2.0
"""Norms of groups of channels: what the tables of all families (test_accuracy.py,
test_every_norm.py) do not say."""

import math

import numerics
import pytest
import reference
import torch
from families import BF16, F32, F64, GROUP_KERNELS
from families import of_groups as of
from golden_plans import group_plan

pytestmark = pytest.mark.cpu_operators
OPS = torch.ops.fused_layernorm


@pytest.mark.parametrize(("call", "strategies"), GROUP_KERNELS, ids=str)
def test_the_strategies_of_the_kernels(call, strategies):
    positions = math.prod(call.shape[2:])
    for backward, strategy in enumerate(strategies.split()):
        plan = group_plan(
            call.shape[0], call.shape[1], positions, call.groups, call.dtype,
            backward=bool(backward), channels_last="channels_last" in call.layout,
            y_dtype=None if call.dtype is F32 else call.out_dtype,
            aligned="misaligned" not in call.layout,
        )  # fmt: skip
        assert plan["strategy"] == strategy


# ---- Special numbers.


def test_a_group_of_one_number_gives_bias(device):
    t = numerics.make(of((2, 6, 1), 6), device)
    y = numerics.ours(t)["y"]
    torch.testing.assert_close(y, t.bias[None, :, None].expand(y.shape))


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 4, 0), (0, 4), (2, 4, 3, 0)])
def test_statistics_of_nothing(device, shape):
    x = torch.empty(shape, device=device)
    _, mean, rstd = OPS.group_norm_forward(x, 2, None, None, None, None, 1e-5)
    assert mean.shape == rstd.shape == (shape[0], 2)
    assert torch.equal(mean, torch.zeros_like(mean))
    assert rstd.isnan().all()


def test_statistics(device):
    for dtype in (F32, BF16, F64):
        x = numerics.make(of((3, 12, 40), 4, (dtype, None)), device).x
        _, mean, rstd = OPS.group_norm_forward(x, 4, None, None, None, None, 1e-5)
        assert mean.dtype is rstd.dtype is (F64 if dtype is F64 else F32)
        _, *expected = reference.group_norm(x.double(), 4)
        for found, exact in zip((mean, rstd), expected, strict=True):
            torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6)

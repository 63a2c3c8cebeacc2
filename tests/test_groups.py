# SPDX-License-Identifier: Apache-2.0
"""group_norm and ada_group_norm: every form, layout and strategy, forward and backward, against
float64. test_every_norm.py has what every norm keeps."""

import math
from dataclasses import replace

import numerics
import pytest
import reference
import torch
from families import BF16, F16, F32, F64, GROUP_KERNELS, Groups
from families import of_groups as of
from golden_plans import group_plan
from numerics import check

OPS = torch.ops.fused_layernorm
ACTIVATIONS = (*numerics.ACTIVATIONS, "leaky_relu")

pytestmark = pytest.mark.cpu_operators

DTYPES = [(F32, None), (BF16, None), (BF16, F32), (F16, None), (F16, F32), (F64, None)]


FORMS = [
    *(of((2, 12, 5, 7), 3, dtypes, activation="silu") for dtypes in DTYPES),
    *(of((2, 12, 4, 8), 3, (dtype, F32 if dtype in (F16, BF16) else None), out_dtype=out)
      for dtype in (F32, F16, BF16, F64) for out in (F32, F16, BF16, F64)),
    *(of((3, 8, 6), 4, dtypes, activation=activation, scale=0.5)
      for activation in ACTIVATIONS for dtypes in ((F32, None), (BF16, None), (F64, None))),
    *(of((3, 24, 9), 4, dtypes, affine=affine, modulation=modulation, activation="silu")
      for affine in ("both", "weight", "bias", "none")
      for modulation in ("none", "both", "shift", "scale")
      for dtypes in ((F32, None), (BF16, F32))),
    # Any dimensions and groups: one, as many as channels, of one, two, three and odd channels.
    *(of(shape, groups, dtypes, activation="gelu_tanh")
      for shape, groups in (((3, 6), 2), ((2, 4), 1), ((2, 1, 5), 1), ((1, 7, 1, 1), 1),
                            ((4, 6, 8), 6), ((2, 15, 3, 5), 5), ((2, 3, 2, 3, 4), 1),
                            ((1, 64, 2, 4, 2, 2), 32), ((2, 96, 31), 32), ((5, 33, 8), 11))
      for dtypes in ((F32, None), (BF16, None))),
    of((2, 6, 1), 6), of((3, 4), 4, (BF16, None)),  # a group of one element has no variance
    *(of((2, 8, 64), 4, dtypes, mean=1000.0) for dtypes in ((F32, None), (BF16, F32))),
    *(of((3, 16, 4, 6), 4, dtypes, layout=layout, dy_layout=dy_layout, activation="silu")
      for dtypes in ((F32, None), (BF16, None))
      for layout in Groups.LAYOUTS for dy_layout in (None, "contiguous", "channels_last")),
    of((2, 16, 3, 4, 6), 4, (BF16, None), layout="channels_last"),
    of((2, 40, 9), 8, (BF16, None), layout="channels_last", modulation="both"),
]  # fmt: skip


@pytest.mark.parametrize("call", FORMS, ids=str)
def test_forms(call, device):
    check(call, device)


# ---- The kernels: every strategy, and both sides of every limit in csrc/groups/tuning.h. `per`
# ---- counts the elements of a group.


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


@pytest.mark.gpu
@pytest.mark.parametrize(
    "call",
    [
        *(call for call, _ in GROUP_KERNELS),
        of((2, 64, 64, 64), 4, (F64, None), activation="gelu"), of((2, 6, 30, 33), 3, (F64, None)),
        of((1, 1280, 32, 32), 32, (F64, None), layout="channels_last", modulation="both"),
    ],
    ids=str,
)  # fmt: skip
def test_kernels(call):
    check(call, "cuda")


# Groups of so many bytes of bfloat16 (kHeldBackwardBytes, kHeldBytes or kClusterBackwardBytes,
# twice that, kClusterBytes, kSplitBackwardBytes), of one channel or of three.
LIMITS = (28 << 10, 56 << 10, 112 << 10, 192 << 10, 400 << 10)


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("vectors", [-1, 0, 1])
@pytest.mark.parametrize("limit", LIMITS)
def test_kernels_at_the_limits_of_groups(limit, vectors, channels):
    positions = (limit // 16 // channels + vectors) * 8
    shape = (3, 4 * channels, positions)
    check(of(shape, 4, (BF16, None), activation="silu"), "cuda")
    check(of(shape, 4, (BF16, None), activation="silu", layout="misaligned"), "cuda")
    check(of((3, 4 * channels, positions + 3), 4, (BF16, F32), modulation="both"), "cuda")


# Channels of so many vectors that a tile has a piece of one, or several channels; groups of so many
# segments that a warp of blocks that share a group has the last, or none.
@pytest.mark.gpu
@pytest.mark.parametrize("vectors", [1, 2, 15, 16, 17, 511, 512, 513, 1023, 1024, 1025, 2049])
@pytest.mark.parametrize("channels", [1, 2, 7, 64])
def test_kernels_at_the_limits_of_channels(channels, vectors):
    for dtypes in ((BF16, None), (F32, None)):
        width = 16 // dtypes[0].itemsize
        check(of((2, 3 * channels, vectors * width), 3, dtypes, activation="silu"), "cuda")


# Channels that begin within vectors, or in the middle of them: of groups that a block or a cluster
# holds, or that are cut into tiles.
@pytest.mark.gpu
@pytest.mark.parametrize("positions", [7, 8, 9, 12, 15, 33, 49, 196])
@pytest.mark.parametrize("channels", [1, 2, 3, 8, 24, 600])
def test_kernels_of_channels_that_begin_within_vectors(channels, positions):
    for dtypes in ((BF16, None), (BF16, F32), (F16, None)):
        c = of((2, 3 * channels, positions), 3, dtypes, activation="silu")
        for out_dtype in (None, F32):
            check(replace(c, out_dtype=out_dtype), "cuda")
    check(replace(c, modulation="both", layout="misaligned"), "cuda")


# Columns, slices and rows of tiles of channels_last; samples around kLargeSample.
@pytest.mark.gpu
@pytest.mark.parametrize("channels", [1, 8, 31, 32, 256, 2040, 2048, 2056, 4104])
@pytest.mark.parametrize("positions", [1, 2, 63, 257, 1025])
def test_kernels_at_the_limits_of_channels_last(channels, positions):
    for g in (g for g in (1, 2, 8, 3, channels) if channels % g == 0):
        c = of((2, channels, positions, 2), g, (BF16, None), layout="channels_last")
        check(replace(c, activation="silu", modulation="both"), "cuda")
    check(replace(c, layout="misaligned channels_last"), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_kernels_at_the_limit_of_large_samples(beyond):
    positions = (8 << 20) // (128 * 2) + beyond
    check(of((1, 128, positions), 32, (BF16, None), layout="channels_last"), "cuda")


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
